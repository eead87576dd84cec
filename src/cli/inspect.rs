//! Asks a running process how it is, over its health and metrics address. One plain HTTP request by
//! hand: it works inside the pod, where there is no other client.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

const DEADLINE: Duration = Duration::from_secs(5);
/// Far more than any state; keeps a wrong address from filling the memory.
const ANSWER_BYTES_MAX: u64 = 16 * 1024 * 1024;

#[derive(Debug, Clone, Copy, Args)]
pub struct InspectArgs {
    /// What to ask for.
    #[arg(value_enum, default_value = "state")]
    pub what: What,
    /// Where the process serves health and metrics.
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub address: SocketAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Everything that the process says of itself, as JSON.
    State,
    /// Is it ready, and if not, what is awaited?
    Ready,
    /// Its metrics.
    Metrics,
}

/// The process's answer.
///
/// # Errors
/// Nothing answers at the address, or the answer is not the one asked for.
pub fn ask(args: InspectArgs) -> anyhow::Result<String> {
    let InspectArgs { what, address } = args;
    let path = match what {
        What::State => "/state",
        What::Ready => "/readyz",
        What::Metrics => "/metrics",
    };
    let answer = get(address, path).with_context(|| {
        format!(
            "cannot ask http://{address}{path}; is the process there, and is --address its --ops-address?"
        )
    })?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        Some("503") if what == What::Ready => bail!("not ready: {}", body.trim_end()),
        _ => bail!("http://{address}{path} answers {:?}", head.lines().next().unwrap_or_default()),
    }
}

fn get(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    // HTTP/1.0, so that the body comes in one piece and the end of the stream is its end.
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{drain::Shutdown, logs::LogControl, metrics, readiness::Readiness, server};

    /// A real server that is asked `what`, not ready while `awaited`.
    async fn asked(what: What, awaited: bool) -> Result<String, String> {
        let (_filter, logs) = LogControl::new("info").unwrap();
        let readiness = Readiness::default();
        let _token = awaited.then(|| readiness.wait_for("kubelet registered"));
        let mut state = server::StateDump::default();
        state.add("node", || serde_json::json!("node-1"));
        let ops =
            server::Ops { registry: metrics::registry(), readiness, shutdown: Shutdown::new(), logs, state };
        let bound = ops.bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let args = InspectArgs { what, address: bound.address() };
        let client = tokio::task::spawn_blocking(move || ask(args).map_err(|error| format!("{error:#}")));
        tokio::select! {
            answer = client => answer.unwrap(),
            _ = bound.serve(std::future::pending()) => unreachable!("it serves for ever"),
        }
    }

    #[tokio::test]
    async fn a_process_tells_its_state_and_what_it_waits_for() {
        assert_eq!(asked(What::State, false).await.unwrap(), "{\n  \"node\": \"node-1\"\n}\n");
        assert_eq!(asked(What::Ready, false).await.unwrap(), "ready\n");
        assert!(asked(What::Metrics, false).await.unwrap().contains("tranche_build_info"));
        let words = asked(What::Ready, true).await.unwrap_err();
        assert!(words.starts_with("not ready: awaiting kubelet registered"), "{words}");
    }

    #[test]
    fn nobody_there_is_told_with_the_flag_to_check() {
        // Bound but never listening again: the port is free once the listener is gone.
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let words = ask(InspectArgs { what: What::State, address }).unwrap_err().to_string();
        assert!(words.contains("--address"), "{words}");
    }
}
