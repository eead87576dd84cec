//! The environment of the experiments: one GPU, its compute mode, one daemon, tenants.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};

use crate::card::{ComputeMode, Other};
use crate::limits::{Limits, MIB};
use crate::machine::Driver;
use crate::mounts::Shm;
use crate::mps::{Daemon, Program};
use crate::nvml::{Gpu, Mode, Nvml};
use crate::signals;
use crate::supervised::Supervisor;
use crate::tenant::{Start, Tenant};
use crate::witness::{Book, Witness};

/// Beyond a limit, this much is asked for: enough to see that it does not hold.
const BEYOND: u64 = 2 << 30;
/// Where a process without the pipe variable looks for a daemon.
const DEFAULT_PIPE: &str = "/tmp/nvidia-mps/control";

/// What the experiments take of the GPU's memory at most: four processes at once, each all it can get.
pub fn most_taken(limits: Limits) -> u64 {
    4 * (limits.memory.unwrap_or(0) * MIB + BEYOND)
}

pub struct Stage {
    pub gpu: Gpu,
    pub nvml: Rc<Nvml>,
    /// The share that is tried.
    pub limits: Limits,
    pub quick: bool,
    pub daemon: Daemon,
    /// The driver's own; else the daemon is ours.
    pub supervisor: Option<Supervisor>,
    /// Processes that were on the card before.
    pub others: Vec<Other>,
    driver: Driver,
    folder: PathBuf,
    /// Where it is not sure that a client cannot go round MPS.
    witness: Option<Witness>,
    // Last: the mode goes back when nobody uses the GPU any more.
    mode: ComputeMode,
}

/// What a stage is made of.
pub struct Parts {
    pub gpu: Gpu,
    pub nvml: Rc<Nvml>,
    pub limits: Limits,
    pub quick: bool,
    pub supervisor: Option<Supervisor>,
    pub others: Vec<Other>,
    pub driver: Driver,
    pub program: Program,
    pub state: PathBuf,
    pub mode: ComputeMode,
}

impl Stage {
    pub fn set(parts: Parts) -> Result<Self> {
        let Parts { gpu, nvml, limits, quick, supervisor, others, driver, program, state, mode } = parts;
        let daemon_folder = match &supervisor {
            Some(supervisor) => supervisor.daemon_folder(&gpu.uuid),
            None => state.join("mps").join(&gpu.uuid),
        };
        let daemon = Daemon::at(program, daemon_folder);
        let folder = fresh(state.join("run"))?;
        let witness = (mode.found() == Some(Mode::Default)).then(|| Witness::new(daemon.clone()));
        Ok(Self { gpu, nvml, limits, quick, daemon, supervisor, others, driver, folder, witness, mode })
    }

    /// A daemon with these limits for every client, and servers that know no others.
    pub fn serve(&self, limits: Limits) -> Result<()> {
        signals::go_on()?;
        self.end_daemon()?;
        self.mode.for_share()?;
        match &self.supervisor {
            Some(supervisor) => supervisor.keep(&self.gpu.uuid, limits),
            None => self.daemon.start(&self.gpu.uuid, limits),
        }
    }

    /// The same, in a compute mode that matters.
    pub fn serve_in(&self, limits: Limits, mode: Mode) -> Result<()> {
        if self.found().is_some() {
            // Before a daemon is started for nothing.
            self.mode.require(mode)?;
        }
        self.serve(limits)?;
        self.mode.require(mode)
    }

    /// The same, with a /dev/shm for daemon and servers alone.
    pub fn serve_with(&self, limits: Limits, shm: &Shm) -> Result<()> {
        signals::go_on()?;
        if self.supervisor.is_some() {
            bail!("needs a daemon of gpu-check's own: run it without --tranche");
        }
        self.end_daemon()?;
        self.mode.for_share()?;
        self.daemon.start_with(&self.gpu.uuid, limits, shm)
    }

    /// The same, with more variables in the daemon's own environment.
    pub fn serve_in_env(&self, limits: Limits, env: &[(&str, String)]) -> Result<()> {
        signals::go_on()?;
        if self.supervisor.is_some() {
            bail!("needs a daemon of gpu-check's own: run it without --tranche");
        }
        self.end_daemon()?;
        self.mode.for_share()?;
        self.daemon.start_in(&self.gpu.uuid, limits, env)
    }

    /// No daemon: a process has the GPU without MPS.
    pub fn bare(&self) -> Result<()> {
        signals::go_on()?;
        self.end_daemon()?;
        no_foreign_daemon()?;
        self.mode.for_bare()
    }

    /// The mode that the card was found in, if it stays in it.
    pub fn found(&self) -> Option<Mode> {
        self.mode.found()
    }

    /// An error if somebody else has changed the card's mode meanwhile.
    pub fn mode_unchanged(&self) -> Result<()> {
        self.mode.unchanged()
    }

    /// Whether the clients since the last question were clients.
    pub fn witnessed(&self) -> Book {
        self.witness.as_ref().map(Witness::take).unwrap_or_default()
    }

    /// An error where the card's mode is another one and stays.
    pub fn require(&self, mode: Mode) -> Result<()> {
        self.mode.require(mode)
    }

    pub fn end_daemon(&self) -> Result<()> {
        match &self.supervisor {
            Some(supervisor) => supervisor.rest(&self.gpu.uuid),
            None => self.daemon.quit(),
        }
    }

    /// A process of a claim with these limits.
    pub fn tenant(&self, name: &str, limits: Limits) -> Result<Tenant> {
        self.start(self.client(name, self.env(limits)))
    }

    /// Another daemon's place, for a second share of the same GPU. Whoever starts the daemon ends it.
    pub fn second_daemon(&self) -> Result<Daemon> {
        if self.supervisor.is_some() {
            bail!("needs daemons of gpu-check's own: run it without --tranche");
        }
        Ok(self.daemon.beside("second"))
    }

    /// A process of a claim that another daemon serves.
    pub fn tenant_of(&self, daemon: &Daemon, name: &str, limits: Limits) -> Result<Tenant> {
        let env = limits.env(&daemon.client());
        self.start(Start { name: name.to_owned(), env, ..Start::default() })
    }

    /// How a process is started that is to be a client of the daemon, whatever else it has in mind.
    pub fn client(&self, name: &str, env: Vec<(String, String)>) -> Start {
        Start { name: name.to_owned(), env, witness: self.witness.clone(), ..Start::default() }
    }

    pub fn env(&self, limits: Limits) -> Vec<(String, String)> {
        limits.env(&self.daemon.client())
    }

    /// A process that knows nothing of MPS.
    pub fn bare_tenant(&self, name: &str) -> Result<Tenant> {
        self.start(Start { name: name.to_owned(), env: self.bare_env(), ..Start::default() })
    }

    pub fn bare_env(&self) -> Vec<(String, String)> {
        vec![("CUDA_VISIBLE_DEVICES".to_owned(), self.gpu.uuid.clone())]
    }

    pub fn start(&self, mut start: Start) -> Result<Tenant> {
        start.env.extend(self.library_path());
        Tenant::start(&self.driver.cuda, &self.folder, start)
    }

    fn library_path(&self) -> Option<(String, String)> {
        let libraries =
            self.driver.control.as_ref().map(|program| program.libraries.as_slice()).unwrap_or_default();
        let first = libraries.first()?;
        Some(("LD_LIBRARY_PATH".to_owned(), first.display().to_string()))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How much a tenant is to try to take of a limit: all of it and more.
    pub fn beyond(&self, mib: u64) -> u64 {
        mib * MIB + BEYOND
    }

    /// The share's memory in MiB: the experiments on memory need one.
    pub fn memory(&self) -> u64 {
        self.limits.memory.unwrap_or(2000)
    }

    /// Bytes that NVML counts for these processes.
    pub fn counted(&self, pids: &[u32]) -> Result<u64> {
        let all = self.nvml.merged(&self.gpu.uuid)?;
        Ok(pids.iter().filter_map(|pid| all.get(pid)).sum())
    }
}

/// A process without the pipe variable would be the client of a daemon that listens in the usual place.
pub fn no_foreign_daemon() -> Result<()> {
    if Path::new(DEFAULT_PIPE).exists() {
        bail!("{DEFAULT_PIPE} is there: a process without MPS variables may be the client of that daemon");
    }
    Ok(())
}

/// For logs, sockets and copies: what is in it is to be of this run.
fn fresh(folder: PathBuf) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(error) = self.end_daemon() {
            eprintln!("gpu-check: the MPS daemon could not be ended: {error:#}; run `gpu-check restore`");
        }
        // The supervisor's daemons outlive it; nobody needs this one any more.
        if let Some(supervisor) = self.supervisor.take() {
            drop(supervisor);
            if let Err(error) = self.daemon.quit() {
                eprintln!("gpu-check: the supervisor's daemon could not be ended: {error:#}");
            }
        }
    }
}
