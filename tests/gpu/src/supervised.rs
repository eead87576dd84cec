//! The driver's own supervisor, `tranche mps`, started here and asked over its socket (the words are in
//! `src/supervisor/protocol.rs` of the driver): so the environment is not one like the product's, but the product's.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::limits::{Limits, MIB};
use crate::mps::wait_until;

const VERSION: u64 = 1;
const SOCKET: &str = "tranche-mps.sock";
const ANSWER: Duration = Duration::from_secs(30);
const START: Duration = Duration::from_secs(15);

/// How it is started: the program and its arguments, in which `{folder}` and `{root}` are filled in.
#[derive(Debug, Clone)]
pub struct SupervisorCommand {
    pub program: PathBuf,
    pub arguments: Vec<String>,
}

pub struct Supervisor {
    how: SupervisorCommand,
    folder: PathBuf,
    log: PathBuf,
    child: Child,
}

impl Supervisor {
    pub fn start(how: SupervisorCommand, folder: PathBuf, root: &Path, log: PathBuf) -> Result<Self> {
        let filled = filled(&how.arguments, &folder, root);
        let how = SupervisorCommand { arguments: filled, ..how };
        let child = spawn(&how, &log)?;
        let supervisor = Self { how, folder, log, child };
        supervisor.wait_for_socket()?;
        Ok(supervisor)
    }

    fn wait_for_socket(&self) -> Result<()> {
        let socket = self.folder.join(SOCKET);
        wait_until(START, || UnixStream::connect(&socket).ok()).map(drop).with_context(|| {
            format!(
                "{} does not listen on {}; see {}",
                self.how.program.display(),
                socket.display(),
                self.log.display()
            )
        })
    }

    /// Folder of the daemon of one GPU.
    pub fn daemon_folder(&self, uuid: &str) -> PathBuf {
        self.folder.join(uuid)
    }

    pub fn keep(&self, uuid: &str, limits: Limits) -> Result<()> {
        self.ask(&keep_words(uuid, limits)).map(drop)
    }

    pub fn rest(&self, uuid: &str) -> Result<()> {
        self.ask(&json!({"Rest": {"group": [uuid]}})).map(drop)
    }

    /// PID of the daemon if it serves with its limits in force.
    pub fn serving(&self, uuid: &str) -> Result<Option<u64>> {
        let said = self.ask(&json!("States"))?;
        let states = said["States"].as_array().cloned().unwrap_or_default();
        let ours = states.iter().find(|state| state["group"] == json!([uuid]));
        Ok(ours.and_then(|state| state["phase"]["Serving"]["pid"].as_u64()))
    }

    fn ask(&self, ask: &Value) -> Result<Value> {
        let mut stream = UnixStream::connect(self.folder.join(SOCKET)).context("ask the supervisor")?;
        stream.set_read_timeout(Some(ANSWER))?;
        writeln!(stream, "{}", json!({"version": VERSION, "ask": ask}))?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).context("the supervisor's answer")?;
        answer_of(&line)
    }

    /// Ends it as an update would, waits, and starts it anew.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.child = spawn(&self.how, &self.log)?;
        self.wait_for_socket()
    }

    fn stop(&mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("a process id")?;
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("end the supervisor")?;
        let ended = wait_until(Duration::from_secs(20), || self.child.try_wait().ok().flatten());
        if ended.is_err() {
            self.child.kill().and_then(|()| self.child.wait()).context("kill the supervisor")?;
            bail!("the supervisor did not end within 20 s of SIGTERM");
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("gpu-check: {error:#}");
        }
    }
}

fn spawn(how: &SupervisorCommand, log: &Path) -> Result<Child> {
    let output = File::options().create(true).append(true).open(log)?;
    let mut command = Command::new(&how.program);
    command.args(&how.arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    command.process_group(0).spawn().with_context(|| format!("start {}", how.program.display()))
}

fn filled(arguments: &[String], folder: &Path, root: &Path) -> Vec<String> {
    let (folder, root) = (folder.display().to_string(), root.display().to_string());
    arguments.iter().map(|one| one.replace("{folder}", &folder).replace("{root}", &root)).collect()
}

fn keep_words(uuid: &str, limits: Limits) -> Value {
    let memory = limits.memory.map(|mib| mib * MIB);
    json!({"Keep": {
        "group": [uuid], "exclusive": true, "limits": {"memory": [memory], "compute": limits.compute}
    }})
}

fn answer_of(line: &str) -> Result<Value> {
    let answer: Value = serde_json::from_str(line).context("the supervisor's answer is no JSON")?;
    if answer["version"] != json!(VERSION) {
        bail!("the supervisor speaks version {}, this is {VERSION}", answer["version"]);
    }
    match &answer["say"]["Refused"] {
        Value::Null => Ok(answer["say"].clone()),
        words => bail!("the supervisor refused: {}", words.as_str().unwrap_or("without words")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_as_the_driver_reads_it() {
        let limits = Limits { memory: Some(2000), compute: Some(25) };
        let expected =
            r#"{"Keep":{"exclusive":true,"group":["GPU-1"],"limits":{"compute":25,"memory":[2097152000]}}}"#;
        assert_eq!(keep_words("GPU-1", limits).to_string(), expected);
        let none =
            r#"{"Keep":{"exclusive":true,"group":["GPU-1"],"limits":{"compute":null,"memory":[null]}}}"#;
        assert_eq!(keep_words("GPU-1", Limits::default()).to_string(), none);
    }

    #[test]
    fn answers_are_taken_and_refusals_are_errors() {
        assert_eq!(answer_of(r#"{"version":1,"say":"Done"}"#).unwrap(), json!("Done"));
        let words = answer_of(r#"{"version":1,"say":{"Refused":"no such GPU"}}"#).unwrap_err().to_string();
        assert!(words.contains("no such GPU"), "{words}");
        assert!(answer_of(r#"{"version":2,"say":"Done"}"#).unwrap_err().to_string().contains("version 2"));
        assert!(answer_of("").is_err());
    }

    #[test]
    fn arguments_name_the_folder_and_the_root() {
        let arguments = ["mps".to_owned(), "--mps-dir={folder}".to_owned(), "{root}".to_owned()];
        assert_eq!(filled(&arguments, Path::new("/f"), Path::new("/r")), ["mps", "--mps-dir=/f", "/r"]);
    }
}
