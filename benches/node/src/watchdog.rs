//! The watchdog: what it costs beside 60 processes on each of 16 GPUs, and how soon a process that takes too much
//! is dead. The processes are real ones that sleep; the simulated NVML lists them, and a folder that stands for
//! /proc says in which pods they are.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kube::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

use tranche::host::FileLock;
use tranche::model::names::DRIVER;

use crate::api::{self, Access, PATIENCE};
use crate::bench::{Bench, Start};
use crate::figures::{Report, Samples};
use crate::plugin::{Process, Setting};
use crate::shares;

const GPUS: usize = 16;
/// With four processes each, 60 on a GPU: what an MPS server takes from CUDA 13 on.
const SHARES: usize = 15;
const PROCESSES: usize = 4;
const SHARE: Access = Access::Share { mib: 5000, percent: 6 };
const EACH_MIB: u64 = 1000;
/// Alone over the grant and the grace: it is the one that goes.
const TOO_MUCH_MIB: u64 = 6000;
const VICTIMS: usize = 10;
const SETTLE: Duration = Duration::from_secs(3);
const WITHOUT: Duration = Duration::from_secs(8);
const WITH: Duration = Duration::from_secs(20);
/// Between two looks at the metrics, where nothing is timed.
const LOOK: Duration = Duration::from_millis(100);
/// As the metrics have them.
const ROW: &str = "tranche_claim_gpu_processes{";
const TICK: &str = "tranche_watchdog_tick_duration_seconds_";
/// What stands behind the host's PID namespace in /proc.
const HOST_PIDS: &str = "pid:[4026531836]";

/// Everything of this file, into the report.
pub async fn measure(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("watched", &["--profile", "h100", "--count", "16"]).await?;
    let proc = Proc(setting.folder("p")?);
    let off = ["--watchdog=off".to_owned()];
    let (bench, mps) = shares::start(setting, client, "w", &gpus, &off).await?;
    let claims = bench.claims("watched", GPUS * SHARES, SHARE).await?;
    let pods = api::reserve(client, &claims).await?;
    for some in claims.chunks(GPUS) {
        bench.socket.prepare_all(some).await?;
    }
    let mut crowd = Crowd::start(&gpus, &proc, &bench.devices, &pods)?;
    crowd.show(&crowd.listed())?;
    sleep(SETTLE).await;
    let without = Spent::over(&bench.plugin, WITHOUT).await?;
    let (folder, daemons) = (bench.folder.clone(), setting.folder("wm")?);
    bench.plugin.stop().await?;

    // The watchdog begins when it has the lock.
    let lock = folder.join("plugins").join(DRIVER).join("watchdog.lock");
    let lock = FileLock::try_acquire(&lock)?.context("somebody holds the watchdog's lock")?;
    let more =
        vec![format!("--mps-dir={}", daemons.display()), format!("--process-root={}", proc.0.display())];
    let start = Start { folder: "w", gpus: &gpus, devices: GPUS, more };
    let bench = Bench::start(setting, client, start).await?;
    proc.belongs_to(bench.plugin.pid())?;
    drop(lock);
    until_counted(&bench.plugin, GPUS * SHARES).await?;
    cost(&bench.plugin, &without, report).await?;
    reaction(&mut crowd, report).await.with_context(|| bench.plugin.last_words())?;
    for some in claims.chunks(GPUS) {
        bench.socket.unprepare_all(some).await?;
    }
    bench.plugin.stop().await?;
    mps.stop().await
}

/// Waits until each share's row shows its processes: the watchdog has found out whose they are.
async fn until_counted(plugin: &Process, rows: usize) -> Result<()> {
    let ending = format!("}} {PROCESSES}");
    let deadline = Instant::now() + PATIENCE;
    loop {
        // It may not serve them yet.
        let metrics = plugin.ask("/metrics").await.unwrap_or_default();
        let counted = metrics.lines().filter(|line| line.starts_with(ROW) && line.ends_with(&ending)).count();
        if counted == rows {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the watchdog counts {counted} shares, not {rows}; {}", plugin.last_words());
        }
        sleep(LOOK).await;
    }
}

async fn cost(plugin: &Process, without: &Spent, report: &mut Report) -> Result<()> {
    sleep(SETTLE).await;
    let before = looks(plugin).await?;
    let with = Spent::over(plugin, WITH).await?;
    let after = looks(plugin).await?;
    let each = (after.0 - before.0) * 1e3 / (after.1 - before.1);
    let percent = with.all - without.all;
    let (resident, _) = plugin.memory_mib()?;
    report.single("watchdog, 16 GPUs with 60 processes each: percent of a core ***", percent, "", "");
    report.single("  of it inside the simulated NVML, %", with.lists, "", "");
    report.single("  of it reading /proc, %", with.processes, "", "");
    report.single("  the plugin beside it, watchdog off, %", without.all, "", "");
    report.single("  one look at everything, ms", each, "", "");
    report.single("  resident memory of the plugin, MiB", resident, "", "");
    report.figure("watchdog_cpu_percent", percent);
    report.figure("watchdog_cpu_in_nvml_percent", with.lists);
    report.figure("watchdog_cpu_in_proc_percent", with.processes);
    report.figure("watchdog_look_ms", each);
    Ok(())
}

/// One process after the other takes too much, at any time between two looks.
async fn reaction(crowd: &mut Crowd, report: &mut Report) -> Result<()> {
    let mut took = Samples::default();
    for number in 0..VICTIMS {
        sleep(Duration::from_millis(300 + 37 * number as u64)).await;
        took.push(crowd.take_too_much(number).await?);
    }
    report.samples("watchdog: from too much memory to the process's end", &took, "max 1000", "");
    report.figure("watchdog_reaction_p50_ms", took.p50());
    report.figure("watchdog_reaction_ms", took.max());
    Ok(())
}

/// Processor time in percent of one core.
struct Spent {
    all: f64,
    lists: f64,
    processes: f64,
}

impl Spent {
    async fn over(plugin: &Process, time: Duration) -> Result<Self> {
        let spent = || {
            let threads = [plugin.cpu_of("nvml-processes")?, plugin.cpu_of("watch-processes")?];
            anyhow::Ok([plugin.cpu()?, threads[0], threads[1]])
        };
        let (before, begun) = (spent()?, Instant::now());
        sleep(time).await;
        let seconds = begun.elapsed().as_secs_f64();
        let after = spent()?;
        let [all, lists, processes] =
            std::array::from_fn(|i| (after[i] - before[i]).as_secs_f64() / seconds * 100.0);
        Ok(Self { all, lists, processes })
    }
}

/// Seconds that all looks took together, and their number.
async fn looks(plugin: &Process) -> Result<(f64, f64)> {
    let text = plugin.ask("/metrics").await?;
    let value = |name: &str| -> Result<f64> {
        let name = format!("{TICK}{name} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&name));
        Ok(value.with_context(|| format!("no metric {name}"))?.parse()?)
    };
    Ok((value("sum")?, value("count")?))
}

/// A folder that stands for /proc.
struct Proc(PathBuf);

impl Proc {
    /// Shows a real process as one of a pod. What is read at every look is the kernel's own file.
    fn show(&self, pid: u32, pod: &str) -> Result<()> {
        let folder = self.0.join(pid.to_string());
        fs::create_dir_all(&folder)?;
        symlink(format!("/proc/{pid}/stat"), folder.join("stat"))?;
        Ok(fs::write(folder.join("cgroup"), format!("0::/kubepods/pod{pod}/{pid:064x}\n"))?)
    }

    /// Whose view it is.
    fn belongs_to(&self, pid: i32) -> Result<()> {
        let own = pid.to_string();
        fs::create_dir_all(self.0.join(&own).join("ns"))?;
        symlink(HOST_PIDS, self.0.join(&own).join("ns/pid"))?;
        Ok(symlink(&own, self.0.join("self"))?)
    }
}

/// The processes on the GPUs.
struct Crowd {
    gpus: PathBuf,
    /// As `fake-nvml init` wrote it.
    control: Value,
    /// By GPU.
    processes: BTreeMap<usize, Vec<(Child, u64)>>,
}

impl Crowd {
    /// Claims were made in turns over the devices, so that `pods` are too.
    fn start(gpus: &Path, proc: &Proc, devices: &[String], pods: &[String]) -> Result<Self> {
        let control = serde_json::from_str(&fs::read_to_string(gpus.join("control.json"))?)?;
        let mut crowd = Self { gpus: gpus.to_owned(), control, processes: BTreeMap::new() };
        for (device, pod) in devices.iter().cycle().zip(pods) {
            let gpu = device.rsplit('-').next().context("a device without a number")?.parse()?;
            for _ in 0..PROCESSES {
                let mut sleeper = Command::new("sleep");
                sleeper.arg("600").stdin(Stdio::null()).stdout(Stdio::null());
                let child = sleeper.spawn().context("cannot start sleep")?;
                let pid = child.id();
                crowd.processes.entry(gpu).or_default().push((child, EACH_MIB));
                proc.show(pid, pod)?;
            }
        }
        Ok(crowd)
    }

    /// What the simulated NVML is to list.
    fn listed(&self) -> String {
        let mut control = self.control.clone();
        for (gpu, processes) in &self.processes {
            let all = processes.iter().map(|(child, mib)| {
                json!({"pid": child.id(), "used_mib": mib, "kind": "mps", "only_if_alive": true})
            });
            control["gpus"][gpu.to_string()]["processes"] = all.collect();
        }
        control.to_string()
    }

    fn show(&self, listed: &str) -> Result<()> {
        let new = self.gpus.join("control.new");
        fs::write(&new, listed)?;
        Ok(fs::rename(new, self.gpus.join("control.json"))?)
    }

    /// The first process of a GPU takes too much: until it is dead.
    async fn take_too_much(&mut self, gpu: usize) -> Result<Duration> {
        self.first(gpu)?.1 = TOO_MUCH_MIB;
        let listed = self.listed();
        let begun = Instant::now();
        self.show(&listed)?;
        let (child, _) = self.first(gpu)?;
        while child.try_wait()?.is_none() {
            if begun.elapsed() > PATIENCE {
                bail!("process {} takes too much and lives", child.id());
            }
            sleep(Duration::from_millis(1)).await;
        }
        Ok(begun.elapsed())
    }

    fn first(&mut self, gpu: usize) -> Result<&mut (Child, u64)> {
        self.processes.get_mut(&gpu).and_then(|all| all.first_mut()).context("a GPU without processes")
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for (child, _) in self.processes.values_mut().flatten() {
            // One that has ended is no loss.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
