//! The measured process: `tranche node` of the release build, with folders of its own and simulated GPUs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use tranche::host::driver_root::{self, DriverRoot};

use crate::api::NODE;

/// What an end may take before it is enforced.
const END: Duration = Duration::from_secs(30);

/// Where everything lies that a measured process needs.
#[derive(Debug, Clone)]
pub struct Setting {
    pub tranche: PathBuf,
    pub driver_root: PathBuf,
    pub fake_nvml: PathBuf,
    pub kubeconfig: PathBuf,
    /// Short, because sockets lie below it.
    pub work: PathBuf,
}

impl Setting {
    /// Describes simulated GPUs of the driver that is in the driver root; `arguments` as of `fake-nvml init`. The answer names the folder.
    pub async fn gpus(&self, name: &str, arguments: &[&str]) -> Result<PathBuf> {
        let dir = self.work.join(name);
        fs::create_dir_all(&dir)?;
        let root = DriverRoot::new(&self.driver_root, self.driver_root.to_string_lossy());
        let version = driver_root::scan(&root, None)?.version;
        let mut command = Command::new(&self.fake_nvml);
        command.arg("--dir").arg(&dir).args(["init", "--driver", &version]).args(arguments);
        command.stdout(Stdio::null());
        match timeout(END, command.status()).await.context("fake-nvml hangs")?? {
            status if status.success() => Ok(dir),
            status => bail!("fake-nvml {arguments:?}: {status}"),
        }
    }

    /// An empty folder that is to be kubelet's.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let dir = self.work.join(name);
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Starts the plugin in `folder`.
    pub fn start(&self, folder: &Path, gpus: &Path) -> Result<Plugin> {
        let log = fs::File::create(folder.join("log"))?;
        let child = Command::new(&self.tranche)
            .arg("node")
            .args(["--node-name", NODE, "--ops-address", "127.0.0.1:0", "--log-format", "json"])
            .arg("--kubelet-dir")
            .arg(folder)
            .arg("--cdi-dir")
            .arg(folder.join("cdi"))
            .arg("--driver-root")
            .arg(&self.driver_root)
            .arg("--driver-root-on-host")
            .arg(&self.driver_root)
            .arg("--proc-root")
            .arg(self.driver_root.join("proc"))
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .env("FAKE_NVML_DIR", gpus)
            .stdin(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.tranche.display()))?;
        let pid = child.id().context("the plugin ended at once")?;
        Ok(Plugin { child, pid: i32::try_from(pid)?, log: folder.join("log") })
    }
}

/// A running plugin; killed when dropped.
pub struct Plugin {
    child: Child,
    pid: i32,
    log: PathBuf,
}

impl Plugin {
    /// Asks it to end, and waits.
    pub async fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid), Signal::SIGTERM)?;
        match timeout(END, self.child.wait()).await.context("the plugin does not end")?? {
            status if status.success() => Ok(()),
            _ => bail!("the plugin failed; its last words: {}", self.last_words()),
        }
    }

    /// Its log's last lines.
    pub fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// Resident and anonymous memory, MiB.
    pub fn memory_mib(&self) -> Result<(f64, f64)> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let field = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).context("no such field")?;
            let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
            Ok(kib.parse::<f64>()? / 1024.0)
        };
        Ok((field("VmRSS")?, field("RssAnon")?))
    }

    /// Processor time so far, of threads that have ended too.
    pub fn cpu(&self) -> Result<Duration> {
        Ok(clock_getcpuclockid(Pid::from_raw(self.pid))?.now()?.into())
    }

    /// Processor time so far of its threads of this name.
    pub fn cpu_of(&self, thread: &str) -> Result<Duration> {
        let mut nanos = 0;
        for entry in fs::read_dir(format!("/proc/{}/task", self.pid))? {
            let path = entry?.path();
            if fs::read_to_string(path.join("comm"))?.trim() == thread {
                let text = fs::read_to_string(path.join("schedstat"))?;
                nanos += text.split(' ').next().context("no time in schedstat")?.parse::<u64>()?;
            }
        }
        Ok(Duration::from_nanos(nanos))
    }

    pub fn threads(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/task", self.pid))?.count())
    }
}
