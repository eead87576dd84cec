//! Asks a running node plugin how it is, over its health and metrics address. One plain HTTP request by
//! hand: it works inside the pod, where there is no other client.

mod show;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

pub use show::{Offer as OfferCells, kind, only_whole, profile, span};

use super::Usage;
use super::state::NodeState;

const DEADLINE: Duration = Duration::from_secs(5);
/// Far more than any state; keeps a wrong address from filling the memory.
const ANSWER_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Where the node plugin serves its state unless it is told otherwise.
pub const ADDRESS: &str = "127.0.0.1:8080";

#[derive(Debug, Clone, Copy, Args)]
pub struct InspectArgs {
    /// What to ask for.
    #[arg(value_enum, default_value = "state")]
    pub what: What,
    /// How to show the state [default: table].
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Where the process serves health and metrics.
    #[arg(long, default_value = ADDRESS)]
    pub address: SocketAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// The node, its devices, and who holds them.
    State,
    /// Is it ready, and if not, what is awaited?
    Ready,
    /// Its metrics.
    Metrics,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// What most people look for.
    Table,
    /// With UUIDs, PCI addresses and NUMA nodes.
    Wide,
    /// Everything that the process says of itself.
    Json,
}

/// What was asked for, ready to print.
///
/// # Errors
/// Nothing answers at the address, or the answer is not the one asked for.
pub fn answer(args: InspectArgs) -> anyhow::Result<String> {
    let InspectArgs { what, output, address } = args;
    if what != What::State && output.is_some() {
        bail!(Usage("-o is for the state; leave it away: ready and metrics are plain text".to_owned()));
    }
    match (what, output) {
        (What::Ready, _) => ask(address, "/readyz"),
        (What::Metrics, _) => ask(address, "/metrics"),
        (What::State, Some(Output::Json)) => ask(address, "/state"),
        (What::State, None | Some(Output::Table)) => Ok(show::tables(&state(address)?, show::Width::Usual)),
        (What::State, Some(Output::Wide)) => Ok(show::tables(&state(address)?, show::Width::Wide)),
    }
}

/// The state of the node plugin at the address.
///
/// # Errors
/// Nothing answers there, or not a node plugin of this release.
pub fn state(address: SocketAddr) -> anyhow::Result<NodeState> {
    let text = ask(address, "/state")?;
    let mut json = serde_json::Deserializer::from_str(&text);
    serde_path_to_error::deserialize(&mut json).with_context(|| {
        format!("what http://{address}/state answers is not understood; is it another release?")
    })
}

fn ask(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let answer = get(address, path).with_context(|| nobody(address))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("what answers at {address} does not speak HTTP; correct --address"))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        Some("503") if path == "/readyz" => bail!("not ready: {}", body.trim_end()),
        _ => bail!(
            "http://{address}{path} answers {:?}; is it a node plugin of tranche?",
            head.lines().next().unwrap_or_default()
        ),
    }
}

fn nobody(address: SocketAddr) -> String {
    format!(
        "no node plugin answers at {address}. Ask inside its pod (kubectl -n tranche-system exec \
         daemonset/tranche-node -- tranche inspect), give its --ops-address as --address, or see why it is not \
         running (kubectl -n tranche-system get pods -o wide)"
    )
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

    fn args(what: What, output: Option<Output>, address: SocketAddr) -> InspectArgs {
        InspectArgs { what, output, address }
    }

    /// A real server that is asked `what`, not ready while `awaited`.
    async fn asked(what: What, output: Option<Output>, awaited: bool) -> Result<String, String> {
        let (_filter, logs) = LogControl::new("info").unwrap();
        let readiness = Readiness::default();
        let _token = awaited.then(|| readiness.wait_for("kubelet registered"));
        let mut state = server::StateDump::default();
        state.add("node", || serde_json::json!({"name": "node-1"}));
        let ops =
            server::Ops { registry: metrics::registry(), readiness, shutdown: Shutdown::new(), logs, state };
        let bound = ops.bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let args = args(what, output, bound.address());
        let client = tokio::task::spawn_blocking(move || answer(args).map_err(|error| format!("{error:#}")));
        tokio::select! {
            answer = client => answer.unwrap(),
            _ = bound.serve(std::future::pending()) => unreachable!("it serves for ever"),
        }
    }

    #[tokio::test]
    async fn a_process_tells_its_state_and_what_it_waits_for() {
        let state = asked(What::State, None, false).await.unwrap();
        assert!(state.starts_with("NODE ") && state.contains("\nnode-1 "), "{state}");
        let state = asked(What::State, Some(Output::Json), false).await.unwrap();
        assert_eq!(state, "{\n  \"node\": {\n    \"name\": \"node-1\"\n  }\n}\n");
        assert_eq!(asked(What::Ready, None, false).await.unwrap(), "ready\n");
        assert!(asked(What::Metrics, None, false).await.unwrap().contains("tranche_build_info"));
        let words = asked(What::Ready, None, true).await.unwrap_err();
        assert!(words.starts_with("not ready: awaiting kubelet registered"), "{words}");
    }

    #[test]
    fn nobody_there_is_told_with_what_to_do() {
        // Bound but never listening again: the port is free once the listener is gone.
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let words = answer(args(What::State, None, address)).unwrap_err().to_string();
        assert!(words.contains("--address") && words.contains("kubectl"), "{words}");
    }

    #[test]
    fn a_form_of_output_that_has_no_meaning_is_refused() {
        let address = ADDRESS.parse().unwrap();
        let error = answer(args(What::Metrics, Some(Output::Json), address)).unwrap_err();
        assert!(error.is::<Usage>(), "{error}");
    }
}
