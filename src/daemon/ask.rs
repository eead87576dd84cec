//! One question: the control program as a child, commands on its standard input, answers on its output.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

use super::{DaemonError, Folder, words};

/// It answers in 2 ms; a machine that swaps takes its time.
const LIMIT: Duration = Duration::from_secs(3);

/// Sends the commands in turn and returns all that was printed. A command that was refused is an error;
/// those before it were done.
pub async fn ask(program: &Path, folder: &Folder, commands: &[String]) -> Result<String, DaemonError> {
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
    let mut script = commands.join("\n");
    script.push('\n');
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
    let output = output.map_err(start)?;
    let text: String =
        [output.stdout, output.stderr].iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
    match words::complaint(&text) {
        None => Ok(text),
        Some(words::Complaint::Gone(words)) => Err(DaemonError::Gone { words }),
        Some(words::Complaint::Refused(words)) => {
            Err(DaemonError::Refused { command: commands.join("; "), words })
        }
    }
}
