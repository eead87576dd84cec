//! An MPS control daemon as the node makes one for a share (`src/daemon` of the driver): a folder with `pipe`,
//! `log`, `shm` and `client`, limits as the defaults of future servers, and only then the hard link of the socket
//! that lets clients in, beside a log that leads nowhere.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::limits::Limits;
use crate::mounts::{self, Shm};
use crate::program;
use crate::tenant::without_cuda;

pub const CONTROL: &str = "nvidia-cuda-mps-control";
const PID_FILE: &str = "nvidia-cuda-mps-control.pid";
/// What a client uses of a pipe directory: the socket; and where it writes what it does, which leads nowhere.
const CLIENT_SOCKET: &str = "control";
const CLIENT_LOG: &str = "log";
/// As /proc names the daemon and its servers: the first letters of `nvidia-cuda-mps-…`.
const COMM: &str = "nvidia-cuda-mps";
const ANSWER: Duration = Duration::from_secs(10);
const START: Duration = Duration::from_secs(10);
const END: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(20);

/// The driver's program and where it finds what it needs.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
    pub libraries: Vec<PathBuf>,
}

/// A daemon of our own, or one of the driver's supervisor that is only asked.
#[derive(Debug, Clone)]
pub struct Daemon {
    program: Program,
    folder: PathBuf,
}

impl Daemon {
    pub fn at(program: Program, folder: PathBuf) -> Self {
        Self { program, folder }
    }

    /// One more daemon of the same program; its folder lies beside this one's.
    pub fn beside(&self, name: &str) -> Self {
        let own = self.folder.file_name().unwrap_or_default().to_string_lossy();
        Self { program: self.program.clone(), folder: self.folder.with_file_name(format!("{own}-{name}")) }
    }

    pub fn pipe(&self) -> PathBuf {
        self.folder.join("pipe")
    }

    /// What a tenant's container has at `/run/nvidia-mps`.
    pub fn client(&self) -> PathBuf {
        self.folder.join("client")
    }

    /// Starts it for one GPU, sets the limits, reads them back, lets clients in.
    pub fn start(&self, uuid: &str, limits: Limits) -> Result<()> {
        self.launch(uuid, limits, Command::new(&self.program.path), &[])
    }

    /// The same with more variables in the daemon's own environment.
    pub fn start_in(&self, uuid: &str, limits: Limits, env: &[(&str, String)]) -> Result<()> {
        self.launch(uuid, limits, Command::new(&self.program.path), env)
    }

    /// The same with a /dev/shm of its own, which its servers have, too.
    pub fn start_with(&self, uuid: &str, limits: Limits, shm: &Shm) -> Result<()> {
        let mut command = mounts::within(shm)?;
        command.arg(&self.program.path);
        self.launch(uuid, limits, command, &[])
    }

    fn launch(&self, uuid: &str, limits: Limits, mut command: Command, env: &[(&str, String)]) -> Result<()> {
        self.make_folder()?;
        command.env_clear();
        command
            .envs(env.iter().map(|(name, value)| (name, value)))
            .env("CUDA_VISIBLE_DEVICES", uuid)
            .env("CUDA_MPS_PIPE_DIRECTORY", self.pipe())
            .env("CUDA_MPS_LOG_DIRECTORY", self.folder.join("log"))
            .env("PATH", self.search_path())
            .arg("-d");
        if !self.program.libraries.is_empty() {
            command.env("LD_LIBRARY_PATH", joined(&self.program.libraries));
        }
        if self.knows_multi_user() {
            command.arg("-M");
        }
        let output = program::run_until(command, "", START)?;
        if !output.success {
            bail!("{} did not start: {}", self.program.path.display(), output.text);
        }
        wait_until(START, || self.pipe().join("control").exists().then_some(()))
            .with_context(|| format!("{CONTROL} made no socket: {}", self.last_log()))?;
        self.set(limits)?;
        self.open()
    }

    fn make_folder(&self) -> Result<()> {
        // Sockets of a dead daemon would be taken for those of the new one.
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", self.folder.display()));
            }
            _ => {}
        }
        for (name, mode) in [("pipe", 0o711), ("log", 0o755), ("shm", 0o1777), ("client", 0o755)] {
            let path = self.folder.join(name);
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
            fs::set_permissions(&path, Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Limits of future servers, read back.
    fn set(&self, limits: Limits) -> Result<()> {
        for command in limits.commands() {
            let said = self.ask(&command)?;
            // A percentage that was set is repeated; a memory limit is not.
            if !said.is_empty() && said.parse::<f32>().is_err() {
                bail!("{command}: {said}");
            }
        }
        let answer = self.ask("get_default_active_thread_percentage")?;
        if answer.parse::<f32>().ok() != Some(limits.compute.unwrap_or(100).into()) {
            bail!("the daemon was set to {} % and says {answer}", limits.compute.unwrap_or(100));
        }
        Ok(())
    }

    fn open(&self) -> Result<()> {
        let log = self.client().join(CLIENT_LOG);
        symlink("/dev/null", &log).with_context(|| format!("make {}", log.display()))?;
        let (from, to) = (self.pipe().join(CLIENT_SOCKET), self.client().join(CLIENT_SOCKET));
        fs::hard_link(&from, &to).with_context(|| format!("link {}", from.display()))
    }

    /// One command through the daemon's own folder; what it printed. The exit status never tells.
    pub fn ask(&self, command: &str) -> Result<String> {
        self.ask_through(&self.pipe(), command, Command::new(&self.program.path))
    }

    /// The same through another folder, and by another way of starting the program.
    pub fn ask_through(&self, pipe: &Path, command: &str, mut program: Command) -> Result<String> {
        without_cuda(&mut program).env("CUDA_MPS_PIPE_DIRECTORY", pipe);
        program::run_until(program, &format!("{command}\n"), ANSWER).map(|output| output.text)
    }

    pub fn program(&self) -> &Path {
        &self.program.path
    }

    pub fn servers(&self) -> Result<Vec<u32>> {
        Ok(numbers(&self.ask("get_server_list")?))
    }

    /// Server and client, of every client.
    pub fn clients(&self) -> Result<Vec<(u32, u32)>> {
        let mut all = Vec::new();
        for server in self.servers()? {
            let clients = numbers(&self.ask(&format!("get_client_list {server}"))?);
            all.extend(clients.into_iter().map(|client| (server, client)));
        }
        Ok(all)
    }

    /// Whether the daemon has the process among its clients.
    pub fn has_client(&self, pid: u32) -> Result<bool> {
        let exists = |pid: u32| Path::new("/proc").join(pid.to_string()).exists();
        Ok(is_listed(pid, &self.clients()?, exists))
    }

    /// Ends a client cleanly; what the daemon said.
    pub fn terminate(&self, pid: u32) -> Result<String> {
        let clients = self.clients()?;
        match clients.iter().find(|(_, client)| *client == pid) {
            Some((server, _)) => self.ask(&format!("terminate_client {server} {pid}")),
            None => bail!("MPS knows no client {pid}; it knows {clients:?}"),
        }
    }

    /// The daemon's process, if one of that kind has the number in its file.
    pub fn pid(&self) -> Option<u32> {
        self.recorded().filter(|pid| is_mps(*pid))
    }

    fn recorded(&self) -> Option<u32> {
        let text = fs::read_to_string(self.pipe().join(PID_FILE)).ok()?;
        text.trim().parse().ok()
    }

    /// `quit`; then whatever is left of it is ended, also of a daemon that died without its servers.
    pub fn quit(&self) -> Result<()> {
        let Some(pid) = self.recorded() else { return Ok(()) };
        let family = session(pid);
        if is_mps(pid) {
            // One that does not answer is ended all the same.
            let _ = self.ask("quit -t 5");
            if wait_until(END, || (!is_mps(pid)).then_some(())).is_err() {
                end(pid)?;
            }
        }
        for server in family {
            if wait_until(Duration::from_secs(5), || (!is_mps(server)).then_some(())).is_err() {
                end(server)?;
            }
        }
        Ok(())
    }

    /// Its servers, as processes.
    pub fn family(&self) -> Vec<u32> {
        self.recorded().map(session).unwrap_or_default()
    }

    /// Told by its texts, as it does not tell itself: an older one would take the flag for a question.
    fn knows_multi_user(&self) -> bool {
        let bytes = fs::read(&self.program.path).unwrap_or_default();
        [b"multiuser-server".as_slice(), b"multi-user"]
            .iter()
            .any(|name| bytes.windows(name.len()).any(|w| w == *name))
    }

    /// The daemon looks for its server in PATH.
    fn search_path(&self) -> String {
        let beside = self.program.path.parent().map(Path::to_owned).unwrap_or_default();
        let neighbour = beside.with_file_name("sbin");
        let usual = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin"].map(PathBuf::from);
        joined(&[vec![beside, neighbour], usual.to_vec()].concat())
    }

    pub fn last_log(&self) -> String {
        let text = fs::read_to_string(self.folder.join("log/control.log")).unwrap_or_default();
        text.lines().last().unwrap_or("control.log is empty").to_owned()
    }
}

fn joined(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":")
}

/// In a sandbox the daemon may list clients by numbers that no process has there: one of them may be meant.
fn is_listed(pid: u32, clients: &[(u32, u32)], exists: impl Fn(u32) -> bool) -> bool {
    clients.iter().any(|(_, client)| *client == pid || !exists(*client))
}

/// Process ids, one on each line; other lines are no numbers.
fn numbers(text: &str) -> Vec<u32> {
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// A live process of MPS, whatever became of its number.
pub fn is_mps(pid: u32) -> bool {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    comm.starts_with(COMM)
        && !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Other MPS processes of the daemon's session: its servers.
fn session(daemon: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let of_session = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let field =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(3)?.parse::<u32>().ok());
        field == Some(daemon)
    };
    pids.filter(|pid| *pid != daemon && is_mps(*pid)).filter(of_session).collect()
}

/// Ends a process of MPS; one that is gone is fine.
pub fn end(pid: u32) -> Result<()> {
    if is_mps(pid) {
        let number = i32::try_from(pid).context("a process id")?;
        match kill(Pid::from_raw(number), Signal::SIGKILL) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(errno) => return Err(errno).with_context(|| format!("end process {pid}")),
        }
        wait_until(Duration::from_secs(10), || (!is_mps(pid)).then_some(()))
            .with_context(|| format!("process {pid} does not end"))?;
    }
    Ok(())
}

/// Ends daemons that runs which were cut off have left below the folder.
pub fn sweep(program: &Program, folder: &Path) -> Result<u32> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(0) };
    let mut ended = 0;
    for entry in entries.flatten() {
        let daemon = Daemon::at(program.clone(), entry.path());
        if daemon.pid().is_some() || !daemon.family().is_empty() {
            daemon.quit()?;
            ended += 1;
        }
    }
    Ok(ended)
}

pub fn wait_until<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(done) = condition() {
            return Ok(done);
        }
        if Instant::now() >= deadline {
            bail!("not within {:.0} s", limit.as_secs_f64());
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_numbers_and_words_are_none() {
        assert_eq!(numbers("12\n 34\n"), [12, 34]);
        assert_eq!(numbers("Server 1 not found\n"), [0_u32; 0]);
    }

    #[test]
    fn a_client_is_listed_by_its_number_or_by_one_that_is_nobodys_here() {
        let exists = |pid| pid < 100;
        assert!(is_listed(7, &[(1, 6), (1, 7)], exists));
        assert!(is_listed(7, &[(1, 4711)], exists));
        assert!(!is_listed(7, &[(1, 6)], exists) && !is_listed(7, &[], exists));
    }

    #[test]
    fn nothing_that_is_not_mps_is_ever_ended() {
        assert!(!is_mps(std::process::id()));
        end(std::process::id()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::at(Program { path: "/nowhere".into(), libraries: vec![] }, folder.path().join("GPU-1"));
        fs::create_dir_all(daemon.pipe()).unwrap();
        fs::write(daemon.pipe().join(PID_FILE), std::process::id().to_string()).unwrap();
        assert_eq!(daemon.pid(), None);
        daemon.quit().unwrap();
    }

    #[test]
    fn the_client_folder_has_the_socket_and_a_log_that_leads_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::at(Program { path: "/nowhere".into(), libraries: vec![] }, folder.path().to_owned());
        daemon.make_folder().unwrap();
        for name in ["control", "control_privileged", "control_lock", "log"] {
            fs::write(daemon.pipe().join(name), "").unwrap();
        }
        daemon.open().unwrap();
        let mut names: Vec<_> =
            fs::read_dir(daemon.client()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["control", "log"]);
        assert_eq!(fs::read_link(daemon.client().join("log")).unwrap(), Path::new("/dev/null"));
    }
}
