//! Experiments on a real GPU: do the limits of a share hold? See README.md.
//!
//! The environment is the one that `tranche` makes for a share: EXCLUSIVE_PROCESS mode, an MPS control daemon
//! with the share's limits as its defaults, a client folder with two files, the client's variables. Tenants
//! are this program once more, as child processes.

mod args;
mod cuda;
mod descriptors;
mod experiments;
mod guard;
mod guest;
mod limits;
mod machine;
mod mps;
mod nvml;
mod program;
mod signals;
mod stage;
mod supervised;
mod table;
mod tenant;
mod words;

use std::fs;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, Result};
use clap::Parser;

use args::{Cli, Command, Place, Run};
use experiments::Experiment;
use guard::Modes;
use limits::Limits;
use machine::Driver;
use nvml::{Gpu, Nvml};
use stage::{Parts, Stage};
use supervised::{How, Supervisor};
use table::{Circumstances, Finding, Report};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::List => {
            list();
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(wanted) => run(&wanted),
        Command::Restore(place) => restore(&place),
        Command::Guest { library } => guest::serve(&library).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("gpu-check: {error:#}");
        ExitCode::FAILURE
    })
}

fn list() {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic).set_width(140);
    table.set_header(["", "experiment", "what it does", "needs", "passes if"]);
    for one in &experiments::ALL {
        table.add_row([one.id, one.title, one.does, one.needs, one.passes]);
    }
    println!("{table}");
}

/// A GPU that can be used, and all that is needed for it.
struct Ground {
    driver: Driver,
    nvml: Rc<Nvml>,
    gpu: Gpu,
}

/// Why there is nothing to run on, if so.
fn ground(place: &Place, wanted: Option<&str>) -> Result<Ground> {
    let driver = machine::driver(&place.driver_root, place.mps_control.as_deref(), place.nvml.as_deref())?;
    let nvml = Nvml::open(&driver.nvml)?;
    let gpu = machine::choose(&nvml, wanted)?;
    Ok(Ground { driver, nvml: Rc::new(nvml), gpu })
}

fn run(wanted: &Run) -> Result<ExitCode> {
    let chosen = experiments::chosen(&wanted.experiments)?;
    let limits = Limits { memory: Some(wanted.memory), compute: Some(wanted.compute) };
    let ground = match ground(&wanted.place, wanted.gpu.as_deref()) {
        Ok(ground) => ground,
        Err(why) => {
            skipped(&chosen, limits, &format!("{why:#}"));
            return Ok(if wanted.require_gpu { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
    };
    anyhow::ensure!(machine::is_root(), "compute modes and MPS daemons are set by root only: run it as root");
    signals::watch()?;
    let _lock = guard::lock(&wanted.place.state)?;
    put_back(&ground, &wanted.place)?;
    let mut report = Report::new(circumstances(&ground, limits, wanted));
    let ended = all_of(&chosen, ground, wanted, limits, &mut report);
    println!("\n{}\n{}", report.markdown(), report.sum());
    if let Some(path) = &wanted.markdown {
        fs::write(path, report.markdown()).with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = &wanted.json {
        fs::write(path, report.json()?).with_context(|| format!("write {}", path.display()))?;
    }
    ended.map(|()| ExitCode::SUCCESS)
}

/// Runs them one after another. What one fails at is its row; only a signal ends them all.
fn all_of(
    chosen: &[&'static Experiment],
    ground: Ground,
    wanted: &Run,
    limits: Limits,
    report: &mut Report,
) -> Result<()> {
    let supervisor = match &wanted.tranche {
        None => None,
        Some(program) => {
            let arguments = wanted.tranche_args.split_whitespace().map(str::to_owned).collect();
            let how = How { program: program.clone(), arguments };
            let folder = wanted.place.state.join("tranche");
            fs::create_dir_all(&folder)?;
            let log = wanted.place.state.join("tranche.log");
            Some(Supervisor::start(how, folder, &wanted.place.driver_root, log)?)
        }
    };
    let Ground { driver, nvml, gpu } = ground;
    let state = wanted.place.state.clone();
    let quick = wanted.quick;
    let mut stage = Stage::set(Parts { gpu, nvml, limits, quick, supervisor, driver, state })?;
    for one in chosen {
        signals::go_on()?;
        eprintln!("== {} {}", one.id, one.title);
        let findings = (one.run)(&mut stage);
        let findings = findings.unwrap_or_else(|error| vec![Finding::not_run("", format!("{error:#}"))]);
        for finding in &findings {
            eprintln!("   {}: {} [{}]", finding.part, finding.observed, finding.verdict);
        }
        report.add(one.id, one.title, findings);
    }
    Ok(())
}

fn skipped(chosen: &[&'static Experiment], limits: Limits, why: &str) {
    println!("NO GPU HERE, NOTHING IS PROVEN: {why}");
    println!("With one, for a share of {}:", limits.words());
    for one in chosen {
        println!("SKIPPED {} ({}): would {}; passes if {}", one.id, one.title, one.does, one.passes);
    }
    println!("{} experiments SKIPPED", chosen.len());
}

fn circumstances(ground: &Ground, limits: Limits, wanted: &Run) -> Circumstances {
    let maker = match &wanted.tranche {
        Some(_) => "`tranche mps`",
        None => "gpu-check's own daemon",
    };
    Circumstances {
        gpu: format!("{} ({} MiB)", ground.gpu.name, ground.gpu.total / limits::MIB),
        driver: ground.nvml.driver_version().unwrap_or_else(|error| format!("{error:#}")),
        kernel: machine::kernel(),
        date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
        share: format!("{}, by {maker}", limits.words()),
    }
}

fn restore(place: &Place) -> Result<ExitCode> {
    let _lock = guard::lock(&place.state)?;
    put_back(&ground(place, None)?, place)?;
    println!("nothing is left of earlier runs");
    Ok(ExitCode::SUCCESS)
}

/// First nobody uses the GPU any more, then its mode goes back.
fn put_back(ground: &Ground, place: &Place) -> Result<()> {
    if let Some(program) = &ground.driver.control {
        for folder in ["mps", "tranche"] {
            let ended = mps::sweep(program, &place.state.join(folder))?;
            if ended > 0 {
                eprintln!("gpu-check: ended {ended} MPS daemons of a run that was cut off");
            }
        }
    }
    let modes: &dyn Modes = &*ground.nvml;
    if let Some(words) = guard::recover(modes, &place.state)? {
        eprintln!("gpu-check: {words}");
    }
    Ok(())
}
