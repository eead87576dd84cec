//! One exchange with a daemon: the control program runs as a child, with commands on its standard input and answers
//! on its output.
//!
//! A daemon serves one session at a time, whether root on the node or a tenant opened it. The daemon turns the next
//! client away or breaks off; the program then prints nothing, or that it cannot send (seen with 550).

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::protocol::Complaint;
use super::{DaemonError, Folder, Process, protocol};
use crate::model::time::back_off;

/// It answers in 2 ms; a machine that swaps takes its time. For so long, too, another session may go on.
const LIMIT: Duration = Duration::from_secs(3);
/// Until the next try while another session is open: longer each time, for each costs a process.
const PAUSE_FIRST: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Sends the commands in turn and returns all that was answered. What was not heard is said again for 3 s.
/// A command that was refused is an error; those before it were done.
pub async fn ask(program: &Path, folder: &Folder, commands: &[String]) -> Result<String, DaemonError> {
    let script: String = commands
        .iter()
        .map(String::as_str)
        .chain([protocol::END_MARKER])
        .flat_map(|line| [line, "\n"])
        .collect();
    let deadline = Instant::now() + LIMIT;
    let mut tries = 0_u32;
    loop {
        let text = run(program, folder, &script).await?;
        let last = match protocol::complete_answer(&text) {
            Ok(answer) => return Ok(answer.to_owned()),
            Err(Complaint::Gone(words)) => return Err(DaemonError::Gone { words }),
            Err(Complaint::Refused(words)) => {
                return Err(DaemonError::Refused { command: commands.join("; "), words });
            }
            Err(Complaint::Busy(words)) => words,
        };
        if Process::daemon_of(folder).is_none() {
            return Err(DaemonError::Gone { words: last });
        }
        if Instant::now() >= deadline {
            return Err(DaemonError::Busy { seconds: LIMIT.as_secs(), words: last });
        }
        tries = tries.saturating_add(1);
        sleep(back_off(PAUSE_FIRST, tries, PAUSE_MAX)).await;
    }
}

/// Sends one command that has no answer, once: the daemon may end of it.
pub async fn tell(program: &Path, folder: &Folder, command: &str) -> Result<(), DaemonError> {
    let text = run(program, folder, &format!("{command}\n")).await?;
    match protocol::complaint(&text) {
        None => Ok(()),
        Some(Complaint::Gone(words)) => Err(DaemonError::Gone { words }),
        Some(Complaint::Busy(words)) => Err(DaemonError::Busy { seconds: 0, words }),
        Some(Complaint::Refused(words)) => Err(DaemonError::Refused { command: command.to_owned(), words }),
    }
}

/// All that the program prints.
async fn run(program: &Path, folder: &Folder, script: &str) -> Result<String, DaemonError> {
    let start = |source| DaemonError::Start { path: program.to_owned(), source };
    let mut child = Command::new(program)
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", folder.pipe())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let stdin = child.stdin.take();
    let exchange = async {
        if let Some(mut stdin) = stdin {
            // A program that reads nothing has said why.
            let _ = stdin.write_all(script.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let Ok(output) = timeout(LIMIT, exchange).await else {
        return Err(DaemonError::Mute { seconds: LIMIT.as_secs() });
    };
    let Output { stdout, stderr, .. } = output.map_err(start)?;
    Ok([stdout, stderr].iter().map(|bytes| String::from_utf8_lossy(bytes)).collect())
}
