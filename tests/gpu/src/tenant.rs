//! A process of a claim: this program once more, with the environment that its container would have.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::mounts::{self, Shm};
use crate::protocol::{Allocator, Opened, Reply, Request, Stop};
use crate::signals;
use crate::witness::Witness;

/// Long enough for anything that is not stuck.
pub const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// Who it runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Who {
    #[default]
    Root,
    /// [`NOBODY`]
    Nobody,
}

/// What a tenant is started with.
#[derive(Debug, Clone, Default)]
pub struct Start {
    pub name: String,
    pub env: Vec<(String, String)>,
    pub who: Who,
    /// In a PID namespace of its own.
    pub pid_namespace: bool,
    /// None: the machine's /dev/shm.
    pub shm: Option<Shm>,
    /// Asks the daemon whether this process is one of its clients, once it has a context.
    pub witness: Option<Witness>,
}

pub struct Tenant {
    pub name: String,
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<String>,
    log: PathBuf,
    witness: Option<Witness>,
}

/// Why nothing was heard.
#[derive(Debug)]
pub enum Silence {
    Died(String),
    Mute(Duration),
}

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Died(how) => write!(f, "its process ended ({how})"),
            Self::Mute(limit) => write!(f, "no answer within {} s", limit.as_secs()),
        }
    }
}

impl Tenant {
    /// `library`: libcuda; `folder`: where what it says on stderr is kept.
    pub fn start(library: &Path, folder: &Path, start: Start) -> Result<Self> {
        let mut program = std::env::current_exe().context("find this program")?;
        if start.who == Who::Nobody {
            program = for_all(&program, folder)?;
        }
        let log = folder.join(format!("{}.log", start.name));
        let mut command = match (&start.shm, start.pid_namespace) {
            (Some(shm), _) => {
                let mut within = mounts::within(shm)?;
                within.arg(&program);
                within
            }
            (None, true) => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--"]).arg(&program);
                unshare
            }
            (None, false) => Command::new(&program),
        };
        command.arg("guest").arg("--library").arg(library);
        without_cuda(&mut command).envs(start.env);
        if start.who == Who::Nobody {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut child = command.spawn().with_context(|| format!("start the tenant {}", start.name))?;
        let output = child.stdout.take().context("a pipe from the tenant")?;
        let (send, answers) = sync_channel(4);
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let (name, witness) = (start.name, start.witness);
        Ok(Self { name, input: child.stdin.take(), child, answers, log, witness })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks and does not wait.
    pub fn tell(&mut self, what: &Request) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        // A tenant that is gone is noticed when its answer is waited for.
        let _ = self.input.as_mut().map(|input| input.write_all(&line).and_then(|()| input.flush()));
        Ok(())
    }

    /// Waits for the next answer. An error means that the run was stopped, or nonsense was said.
    pub fn hear(&mut self, limit: Duration) -> Result<Result<Reply, Silence>> {
        let deadline = Instant::now() + limit;
        loop {
            signals::go_on()?;
            match self.answers.recv_timeout(PAUSE) {
                Ok(line) => {
                    let said = serde_json::from_str(&line).with_context(|| self.whose(&line))?;
                    if let (Reply::Opened(_), Some(witness)) = (&said, &self.witness) {
                        witness.look(self.pid());
                    }
                    return Ok(Ok(said));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(Silence::Died(self.how_it_ended()))),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    return Ok(Err(Silence::Mute(limit)));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    pub fn try_ask(&mut self, what: Request) -> Result<Result<Reply, Silence>> {
        self.tell(&what)?;
        self.hear(PATIENCE)
    }

    /// An answer, and no failure of the driver's.
    pub fn ask(&mut self, what: Request) -> Result<Reply> {
        match self.try_ask(what)? {
            Ok(Reply::Failed(failure)) => Err(anyhow!(failure.to_string()).context(self.name.clone())),
            Ok(said) => Ok(said),
            Err(silence) => bail!("{}: {silence}", self.name),
        }
    }

    pub fn open(&mut self) -> Result<Opened> {
        match self.ask(Request::Open)? {
            Reply::Opened(opened) => Ok(opened),
            other => self.unexpected(&other),
        }
    }

    /// Bytes and what ended it.
    pub fn grow(&mut self, way: Allocator, most: u64) -> Result<(u64, Stop)> {
        self.tell(&Request::Grow { way, step: STEP, most, pause_ms: 0 })?;
        self.grown()
    }

    pub fn grown(&mut self) -> Result<(u64, Stop)> {
        match self.hear(PATIENCE)? {
            Ok(Reply::Grown { bytes, stop, .. }) => Ok((bytes, stop)),
            Ok(other) => self.unexpected(&other),
            Err(silence) => bail!("{}: {silence}", self.name),
        }
    }

    pub fn work(&mut self, ms: u64) -> Result<f64> {
        self.tell(&Request::Work { ms })?;
        self.worked()
    }

    pub fn worked(&mut self) -> Result<f64> {
        match self.hear(PATIENCE)? {
            Ok(Reply::Worked { per_second }) => Ok(per_second),
            Ok(other) => self.unexpected(&other),
            Err(silence) => bail!("{}: {silence}", self.name),
        }
    }

    pub fn unexpected<T>(&self, said: &Reply) -> Result<T> {
        match said {
            Reply::Failed(failure) => bail!("{}: {failure}", self.name),
            other => bail!("{}: answered {other:?}", self.name),
        }
    }

    /// SIGKILL, and its end is waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("kill a tenant")?;
        self.wait_for_end(Duration::from_secs(10)).map(|_| ())
    }

    /// A signal, and its end is waited for.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        let number = i32::try_from(self.pid()).context("a process id")?;
        kill(Pid::from_raw(number), signal).with_context(|| format!("send {signal} to a tenant"))?;
        self.wait_for_end(Duration::from_secs(10)).map(|_| ())
    }

    /// Tells it that nothing more will come; its end is not waited for.
    pub fn let_go(&mut self) {
        self.input = None;
    }

    fn wait_for_end(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} (PID {}) does not end", self.name, self.pid());
            }
            thread::sleep(PAUSE);
        }
    }

    fn how_it_ended(&mut self) -> String {
        let status = match self.wait_for_end(Duration::from_secs(5)) {
            Ok(status) => {
                status.signal().map_or_else(|| status.to_string(), |number| format!("signal {number}"))
            }
            Err(error) => error.to_string(),
        };
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        match log.trim().lines().last() {
            Some(last) => format!("{status}: {last}"),
            None => status,
        }
    }

    fn whose(&self, line: &str) -> String {
        format!("{} answered what is not understood: {line}", self.name)
    }
}

/// Told nothing more, it ends by itself; else it is ended.
impl Drop for Tenant {
    fn drop(&mut self) {
        self.input = None;
        let patience = if signals::stopped() { Duration::from_millis(500) } else { Duration::from_secs(8) };
        if self.wait_for_end(patience).is_err() {
            // Nothing more can be done for one that does not even end then.
            let _ = self.kill();
        }
    }
}

/// A user without any rights.
pub const NOBODY: u32 = 65534;

/// A copy that every user may run, wherever the program itself lies.
pub fn for_all(program: &Path, folder: &Path) -> Result<PathBuf> {
    let name = program.file_name().context("a program's name")?;
    let copy = folder.join(name);
    if !copy.exists() {
        fs::copy(program, &copy)
            .with_context(|| format!("copy {} to {}", program.display(), copy.display()))?;
        fs::set_permissions(&copy, Permissions::from_mode(0o755))?;
    }
    Ok(copy)
}

/// One step of growing.
pub const STEP: u64 = 16 << 20;

/// Our own surroundings say nothing to a tenant about CUDA.
pub fn without_cuda(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CUDA_") {
            command.env_remove(name);
        }
    }
    command
}
