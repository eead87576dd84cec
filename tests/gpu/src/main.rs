//! Experiments on a real GPU: do the limits of a share hold? See README.md.
//!
//! The environment is the one that `tranche` makes for a share: an MPS control daemon with the share's limits
//! as its defaults, a client folder with two files, the client's variables; and EXCLUSIVE_PROCESS mode, if the
//! card has it or may be set to it. Tenants are this program once more, as child processes.

mod args;
mod card;
mod cuda;
mod descriptors;
mod experiments;
mod guard;
mod guest;
mod limits;
mod machine;
mod mounts;
mod mps;
mod nvml;
mod program;
mod protocol;
mod signals;
mod stage;
mod supervised;
mod table;
mod tenant;
mod witness;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, Result};
use clap::Parser;

use args::{Cli, Command, Installation, ModePermission, Restore, Run};
use card::{ComputeMode, Found, Other};
use experiments::Experiment;
use guard::Guard;
use limits::{Limits, MIB};
use machine::Driver;
use nvml::{Gpu, Mode, ModeSetter, Nvml};
use stage::{Parts, Stage};
use supervised::{Supervisor, SupervisorCommand};
use table::{Circumstances, Finding, Report};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::List => {
            list();
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(wanted) => run(&wanted),
        Command::Restore(wanted) => restore(&wanted),
        Command::Guest { library } => guest::serve(&library).map(|()| ExitCode::SUCCESS),
        Command::Within { shm, command } => mounts::become_within(&shm, &command).map(|()| ExitCode::SUCCESS),
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
    table.set_header(["", "experiment", "what it does", "needs", "passes if", "as found in DEFAULT mode"]);
    for one in &experiments::ALL {
        table.add_row([one.id, one.title, one.does, one.needs, one.passes, one.in_default.words()]);
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
fn ground(place: &Installation, wanted: Option<&str>) -> Result<Ground> {
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
    anyhow::ensure!(machine::is_root(), "MPS daemons for all users are started by root only: run it as root");
    signals::watch()?;
    let state = &wanted.place.state;
    let _lock = guard::lock(state)?;
    sweep(&ground.driver, state)?;
    match wanted.mode_permission() {
        None => guard::nothing_left(state)?,
        Some(permission) => put_back(&ground.nvml, permission, state)?,
    }
    let others = card::others(&ground.nvml.merged(&ground.gpu.uuid)?);
    let mode = ground.nvml.mode(&ground.gpu.uuid)?;
    let mut report = Report::new(circumstances(&ground, limits, wanted, mode, &others));
    let obstacle = obstacle(&ground, limits, wanted.may_set_compute_mode, mode, &others)?;
    let (ended, usable) = match obstacle {
        Some(why) => {
            for one in &chosen {
                report.add(one.id, one.title, vec![Finding::not_run("", why.as_str())]);
            }
            (Ok(()), false)
        }
        None => (all_of(&chosen, ground, others, wanted, limits, &mut report), true),
    };
    println!("\n{}\n{}", report.markdown(), report.sum());
    if let Some(path) = &wanted.markdown {
        fs::write(path, report.markdown()).with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = &wanted.json {
        fs::write(path, report.json()?).with_context(|| format!("write {}", path.display()))?;
    }
    ended.map(|()| if wanted.require_gpu && !usable { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs them one after another. What one fails at is its row; only a signal ends them all.
fn all_of(
    chosen: &[&'static Experiment],
    ground: Ground,
    others: Vec<Other>,
    wanted: &Run,
    limits: Limits,
    report: &mut Report,
) -> Result<()> {
    let Ground { driver, nvml, gpu } = ground;
    let program = driver.control.clone().context("the MPS control program")?;
    let (state, quick) = (wanted.place.state.clone(), wanted.quick);
    let (mode, supervisor) = match wanted.mode_permission() {
        // `tranche mps` sets compute modes: as found, it is not even started.
        None => {
            let (nvml, uuid) = (nvml.clone(), gpu.uuid.clone());
            (ComputeMode::as_found(Box::new(move || nvml.mode(&uuid)))?, None)
        }
        Some(permission) => {
            let setter = Rc::new(ModeSetter::new(nvml.clone(), permission));
            let guard = Guard::take(setter, &state, &gpu.uuid)?;
            (ComputeMode::Settable(guard), supervisor(wanted)?)
        }
    };
    let parts = Parts { gpu, nvml, limits, quick, supervisor, others, driver, program, state, mode };
    let mut stage = Stage::set(parts)?;
    for one in chosen {
        signals::go_on()?;
        eprintln!("== {} {}", one.id, one.title);
        let findings = experiments::findings(one, &mut stage);
        for finding in &findings {
            eprintln!("   {}: {} [{}]", finding.part, finding.observed_and_notes(), finding.verdict);
        }
        report.add(one.id, one.title, findings);
    }
    stage.mode_unchanged()
}

/// Why no experiment can be asked of this card, if so.
fn obstacle(
    ground: &Ground,
    limits: Limits,
    may_set: bool,
    mode: Mode,
    others: &[Other],
) -> Result<Option<String>> {
    if ground.driver.control.is_none() {
        return Ok(Some(format!("no {} (name it: --mps-control)", mps::CONTROL)));
    }
    let (total, used) = ground.nvml.memory(&ground.gpu.uuid)?;
    let free = total.saturating_sub(used);
    let found = Found { mig: ground.gpu.mig, mode, may_set, free, wanted: stage::most_taken(limits), others };
    Ok(found.obstacle())
}

fn supervisor(wanted: &Run) -> Result<Option<Supervisor>> {
    let Some(program) = &wanted.tranche else { return Ok(None) };
    let arguments = wanted.tranche_args.split_whitespace().map(str::to_owned).collect();
    let how = SupervisorCommand { program: program.clone(), arguments };
    let folder = wanted.place.state.join("tranche");
    fs::create_dir_all(&folder)?;
    let log = wanted.place.state.join("tranche.log");
    Supervisor::start(how, folder, &wanted.place.driver_root, log).map(Some)
}

fn skipped(chosen: &[&'static Experiment], limits: Limits, why: &str) {
    println!("NO GPU HERE, NOTHING IS PROVEN: {why}");
    println!("With one, for a share of {}:", limits.words());
    for one in chosen {
        println!("SKIPPED {} ({}): would {}; passes if {}", one.id, one.title, one.does, one.passes);
    }
    println!("{} experiments SKIPPED", chosen.len());
}

fn circumstances(
    ground: &Ground,
    limits: Limits,
    wanted: &Run,
    mode: Mode,
    others: &[Other],
) -> Circumstances {
    let maker = match &wanted.tranche {
        Some(_) if wanted.may_set_compute_mode => "`tranche mps`",
        _ => "gpu-check's own daemon",
    };
    let mode = match wanted.may_set_compute_mode {
        true => format!("set as each experiment needs it; found in {mode}"),
        false => format!("{mode}, as found"),
    };
    Circumstances {
        gpu: format!("{} ({} MiB)", ground.gpu.name, ground.gpu.total / MIB),
        driver: ground.nvml.driver_version().unwrap_or_else(|error| format!("{error:#}")),
        kernel: machine::kernel(),
        date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
        share: format!("{}, by {maker}", limits.words()),
        mode,
        others: card::words(others),
    }
}

fn restore(wanted: &Restore) -> Result<ExitCode> {
    let state = &wanted.place.state;
    let _lock = guard::lock(state)?;
    let ground = ground(&wanted.place, None)?;
    // First nobody uses the GPU any more, then its mode goes back.
    sweep(&ground.driver, state)?;
    put_back(&ground.nvml, wanted.mode_permission(), state)?;
    println!("nothing is left of earlier runs");
    Ok(ExitCode::SUCCESS)
}

/// Ends the daemons of runs that were cut off.
fn sweep(driver: &Driver, state: &Path) -> Result<()> {
    let Some(program) = &driver.control else { return Ok(()) };
    for folder in ["mps", "tranche"] {
        let ended = mps::sweep(program, &state.join(folder))?;
        if ended > 0 {
            eprintln!("gpu-check: ended {ended} MPS daemons of a run that was cut off");
        }
    }
    Ok(())
}

fn put_back(nvml: &Rc<Nvml>, permission: ModePermission, state: &Path) -> Result<()> {
    let setter = ModeSetter::new(nvml.clone(), permission);
    if let Some(words) = guard::recover(&setter, state)? {
        eprintln!("gpu-check: {words}");
    }
    Ok(())
}
