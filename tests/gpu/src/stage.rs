//! The environment of the experiments: one GPU, its compute mode, one daemon, tenants.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};

use crate::guard::Guard;
use crate::limits::{Limits, MIB};
use crate::machine::Driver;
use crate::mps::Daemon;
use crate::nvml::{Gpu, Mode, Nvml};
use crate::signals;
use crate::supervised::Supervisor;
use crate::tenant::{Start, Tenant};

/// Beyond a limit, this much is asked for: enough to see that it does not hold.
const BEYOND: u64 = 2 << 30;

pub struct Stage {
    pub gpu: Gpu,
    pub nvml: Rc<Nvml>,
    /// The share that is tried.
    pub limits: Limits,
    pub quick: bool,
    pub daemon: Daemon,
    /// The driver's own; else the daemon is ours.
    pub supervisor: Option<Supervisor>,
    driver: Driver,
    folder: PathBuf,
    // Last: the mode goes back when nobody uses the GPU any more.
    guard: Guard,
}

/// What a stage is made of.
pub struct Parts {
    pub gpu: Gpu,
    pub nvml: Rc<Nvml>,
    pub limits: Limits,
    pub quick: bool,
    pub supervisor: Option<Supervisor>,
    pub driver: Driver,
    pub state: PathBuf,
}

impl Stage {
    /// Refuses a GPU that somebody uses.
    pub fn set(parts: Parts) -> Result<Self> {
        let Parts { gpu, nvml, limits, quick, supervisor, driver, state } = parts;
        let users = nvml.merged(&gpu.uuid)?;
        if !users.is_empty() {
            bail!(
                "GPU {} is in use by processes {:?}; end them, or name another (--gpu)",
                gpu.uuid,
                users.keys()
            );
        }
        let program =
            driver.control.clone().context("no nvidia-cuda-mps-control (name it: --mps-control)")?;
        let daemon_folder = match &supervisor {
            Some(supervisor) => supervisor.daemon_folder(&gpu.uuid),
            None => state.join("mps").join(&gpu.uuid),
        };
        let daemon = Daemon::at(program, daemon_folder);
        let folder = fresh(state.join("run"))?;
        let guard = Guard::take(nvml.clone(), &state, &gpu.uuid)?;
        Ok(Self { gpu, nvml, limits, quick, daemon, supervisor, driver, folder, guard })
    }

    /// A daemon with these limits for every client, and servers that know no others.
    pub fn serve(&self, limits: Limits) -> Result<()> {
        signals::go_on()?;
        self.end_daemon()?;
        self.guard.set(Mode::ExclusiveProcess)?;
        match &self.supervisor {
            Some(supervisor) => supervisor.keep(&self.gpu.uuid, limits),
            None => self.daemon.start(&self.gpu.uuid, limits),
        }
    }

    /// No daemon, and this compute mode.
    pub fn bare(&self, mode: Mode) -> Result<()> {
        signals::go_on()?;
        self.end_daemon()?;
        self.guard.set(mode)
    }

    /// A compute mode that is not the one of shares, beside a daemon.
    pub fn set_mode(&self, mode: Mode) -> Result<()> {
        self.guard.set(mode)
    }

    fn end_daemon(&self) -> Result<()> {
        match &self.supervisor {
            Some(supervisor) => supervisor.rest(&self.gpu.uuid),
            None => self.daemon.quit(),
        }
    }

    /// A process of a claim with these limits.
    pub fn tenant(&self, name: &str, limits: Limits) -> Result<Tenant> {
        self.start(Start { name: name.to_owned(), env: self.env(limits), ..Start::default() })
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
