//! The measured processes: `tranche node` and `tranche mps` of the release build, with folders of their own and
//! simulated GPUs, and `tranche controller`.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use tranche::host::driver_root::{self, DriverRoot};
use tranche::supervisor::SOCKET;

use crate::api::{NODE, PATIENCE};

/// What an end may take before it is enforced.
const END: Duration = Duration::from_secs(30);
/// Between two looks at what should be there soon, where nothing is timed.
const LOOK: Duration = Duration::from_millis(10);

/// In a process's folder.
const STATE_SOCKET: &str = "ops.sock";

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

    /// Starts the plugin in `folder`, with these arguments beside the usual ones.
    pub fn start(&self, folder: &Path, gpus: &Path, more: &[String]) -> Result<Process> {
        let mut command = Command::new(&self.tranche);
        command.args(["node", "--node-name", NODE]);
        for (flag, path) in [
            ("--kubelet-dir", folder),
            ("--cdi-dir", &folder.join("cdi")),
            ("--driver-root-on-host", &self.driver_root),
            ("--proc-root", &self.driver_root.join("proc")),
            ("--kubeconfig", &self.kubeconfig),
        ] {
            command.arg(flag).arg(path);
        }
        command.args(more);
        self.spawn(command, folder, gpus)
    }

    /// Starts the keeper of the MPS daemons, with the driver's own control program, and waits until it answers.
    pub async fn start_mps(&self, folder: &Path, gpus: &Path) -> Result<Process> {
        // Daemons leave the control group of a container; here there is none, and what they enter is a folder.
        let cgroup = self.folder("cgroup")?;
        fs::write(cgroup.join("cgroup.procs"), "")?;
        let mut command = Command::new(&self.tranche);
        command.arg("mps").arg("--mps-dir").arg(folder).arg("--cgroup-root").arg(cgroup);
        let mps = self.spawn(command, folder, gpus)?;
        let deadline = Instant::now() + PATIENCE;
        while !folder.join(SOCKET).exists() {
            if Instant::now() > deadline {
                bail!("tranche mps does not listen; its last words: {}", mps.last_words());
            }
            sleep(LOOK).await;
        }
        Ok(mps)
    }

    fn spawn(&self, mut command: Command, folder: &Path, gpus: &Path) -> Result<Process> {
        command.arg("--driver-root").arg(&self.driver_root).env("FAKE_NVML_DIR", gpus);
        spawn(command, folder)
    }
}

/// Starts the controller as it is set by default, without the webhook. Lease and holds are in `namespace`.
pub fn start_controller(
    tranche: &Path,
    kubeconfig: &Path,
    folder: &Path,
    namespace: &str,
    more: &[String],
) -> Result<Process> {
    let mut command = Command::new(tranche);
    command.args([
        "controller",
        "--pod-name",
        "bench",
        "--pod-namespace",
        namespace,
        "--webhook-address",
        "off",
    ]);
    command.arg("--kubeconfig").arg(kubeconfig).args(more);
    spawn(command, folder)
}

fn spawn(mut command: Command, folder: &Path) -> Result<Process> {
    let log = fs::File::create(folder.join("log"))?;
    let child = command
        .arg("--ops-socket")
        .arg(folder.join(STATE_SOCKET))
        .args(["--ops-address", "127.0.0.1:0", "--log-format", "json"])
        .stdin(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("tranche cannot be started")?;
    let pid = child.id().context("it ended at once")?;
    Ok(Process { child, pid: i32::try_from(pid)?, log: folder.join("log") })
}

async fn asked(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str) -> Result<String> {
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut text)).await.with_context(|| format!("no {path}"))??;
    Ok(text)
}

/// A running process; killed when dropped.
pub struct Process {
    child: Child,
    pid: i32,
    log: PathBuf,
}

impl Process {
    /// Asks it to end, and waits.
    pub async fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.pid), Signal::SIGTERM)?;
        match timeout(END, self.child.wait()).await.context("it does not end")?? {
            status if status.success() => Ok(()),
            _ => bail!("it failed; its last words: {}", self.last_words()),
        }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Where it serves its metrics, once it says so.
    pub fn ops_address(&self) -> Result<SocketAddr> {
        let text = fs::read_to_string(&self.log)?;
        let told = text.lines().find(|line| line.contains("metrics and state are served"));
        let told: Value = serde_json::from_str(told.context("it serves no metrics yet")?)?;
        Ok(told["address"].as_str().context("no address in the log")?.parse()?)
    }

    /// What it answers to a GET of its state, with the head.
    pub async fn state(&self) -> Result<String> {
        asked(UnixStream::connect(self.log.with_file_name(STATE_SOCKET)).await?, "/state").await
    }

    /// What it answers to a GET.
    pub async fn ask(&self, path: &str) -> Result<String> {
        asked(TcpStream::connect(self.ops_address()?).await?, path).await
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
