//! Programs that are run and waited for, with a deadline.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::signals;

const PAUSE: Duration = Duration::from_millis(10);

/// What it wrote to stdout and stderr, and whether it ended well.
#[derive(Debug)]
pub struct Output {
    pub text: String,
    pub success: bool,
}

/// Runs it with `input` on stdin; killed at the deadline. A signal does not end it: putting things back
/// takes programs, too.
pub fn run_until(command: Command, input: &str, limit: Duration) -> Result<Output> {
    run_until_or(command, input, limit, || false)
}

/// As [`run_until`], for what takes long: a signal ends it.
pub fn run_until_stopped(command: Command, input: &str, limit: Duration) -> Result<Output> {
    run_until_or(command, input, limit, signals::stopped)
}

fn run_until_or(mut command: Command, input: &str, limit: Duration, stopped: fn() -> bool) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read its input says so by its answer.
        let _ = stdin.write_all(input.as_bytes());
    }
    let out = child.stdout.take().map(read);
    let err = child.stderr.take().map(read);
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let late = Instant::now() >= deadline;
        if late || stopped() {
            child.kill().and_then(|()| child.wait()).with_context(|| format!("end {name}"))?;
            if late {
                bail!("{name} took longer than {} s", limit.as_secs());
            }
            bail!("{name} was ended: the run was stopped");
        }
        thread::sleep(PAUSE);
    };
    let texts = [out, err].into_iter().flatten().filter_map(|thread| thread.join().ok());
    let text = texts.collect::<Vec<_>>().concat().trim().to_owned();
    Ok(Output { text, success: status.success() })
}

fn read(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came until it broke is what there is.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_comes_back_and_a_program_that_hangs_is_ended() {
        let mut cat = Command::new("cat");
        cat.arg("-");
        let output = run_until(cat, "quit\n", Duration::from_secs(10)).unwrap();
        assert_eq!((output.text.as_str(), output.success), ("quit", true));
        let mut hangs = Command::new("sleep");
        hangs.arg("60");
        let words = run_until(hangs, "", Duration::from_millis(30)).unwrap_err().to_string();
        assert!(words.contains("sleep took longer"), "{words}");
    }
}
