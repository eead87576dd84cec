//! Asks a running process of ours how it is, over the Unix socket that serves its state. One plain HTTP request by
//! hand: it works inside the pod, where there is no other client.

mod others;
mod show;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;

pub use show::{OfferCells, kind, only_whole, profile, span};

use super::reading::{cause, typed};
use super::state::NodeState;
use super::{UsageError, output};
use crate::model::plain::in_plain_words;
use crate::ops::addresses::SOCKET;

const DEADLINE: Duration = Duration::from_secs(5);
/// Far more than any state; keeps a wrong address from filling the memory.
const ANSWER_BYTES_MAX: u64 = 16 * 1024 * 1024;

#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// What to ask for.
    #[arg(value_enum, default_value = "state")]
    pub what: What,
    /// How to show the state [default: table].
    #[arg(short, long, value_enum)]
    pub output: Option<InspectOutput>,
    /// With log-level: what is logged from now on, e.g. debug, or info,tranche::node=debug.
    #[arg(long, value_name = "FILTER")]
    pub set: Option<String>,
    #[command(flatten)]
    pub place: PluginAddress,
}

/// Where to ask.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct PluginAddress {
    /// The process's --ops-socket.
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    pub socket: PathBuf,
    /// The process's --ops-address instead: readiness and metrics alone.
    #[arg(long)]
    pub address: Option<SocketAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Of the node plugin: the node, its devices, and who holds them; of `tranche mps`: the MPS daemons; of the
    /// controller: what waits, and which GPUs it holds.
    State,
    /// Is it ready, and if not, what is awaited?
    Ready,
    /// Its metrics.
    Metrics,
    /// What it logs.
    LogLevel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum InspectOutput {
    /// What most people look for.
    Table,
    /// With UUIDs, PCI addresses and NUMA nodes.
    Wide,
    /// Everything that the process says of itself.
    Json,
    /// The same.
    Yaml,
}

/// What was asked for, ready to print.
///
/// # Errors
/// Nothing answers there, or the answer is not the one asked for.
pub fn answer(args: &InspectArgs) -> anyhow::Result<String> {
    let InspectArgs { what, output, set, place } = args;
    if *what != What::State && output.is_some() {
        bail!(UsageError(
            "-o is for the state; leave -o out: ready, metrics and log-level are plain text".to_owned()
        ));
    }
    if *what != What::LogLevel && set.is_some() {
        bail!(UsageError(
            "--set is for the log level; write tranche inspect log-level --set FILTER".to_owned()
        ));
    }
    match (what, output, set) {
        (What::Ready, ..) => get(place, "/readyz"),
        (What::Metrics, ..) => get(place, "/metrics"),
        (What::LogLevel, _, None) => get(place, "/log-level"),
        (What::LogLevel, _, Some(filter)) => ask(place, "PUT", "/log-level", filter),
        (What::State, Some(InspectOutput::Json), _) => get(place, "/state"),
        (What::State, Some(InspectOutput::Yaml), _) => {
            output::yaml(&read::<serde_json::Value>(&get(place, "/state")?, place)?)
        }
        (What::State, None | Some(InspectOutput::Table), _) => tables(place, show::Width::Usual),
        (What::State, Some(InspectOutput::Wide), _) => tables(place, show::Width::Wide),
    }
}

/// The state of the node plugin there.
///
/// # Errors
/// Nothing answers there, or not a node plugin of this release.
pub fn state(place: &PluginAddress) -> anyhow::Result<NodeState> {
    read(&get(place, "/state")?, place)
}

/// The state of whichever process answers there. Each kind names a part as no other does.
fn tables(place: &PluginAddress, width: show::Width) -> anyhow::Result<String> {
    let text = get(place, "/state")?;
    let parts: BTreeMap<String, serde::de::IgnoredAny> = read(&text, place)?;
    if parts.contains_key("daemons") {
        return Ok(others::supervisor(&read(&text, place)?));
    }
    if parts.contains_key("controller") {
        return Ok(others::controller(&read(&text, place)?));
    }
    Ok(show::tables(&read(&text, place)?, width))
}

fn read<T: DeserializeOwned>(text: &str, place: &PluginAddress) -> anyhow::Result<T> {
    let value = serde_json::from_str(text).map_err(|error| in_plain_words(&error.to_string()));
    value.and_then(|value| typed(&value)).map_err(|words| {
        anyhow::anyhow!("the state from {place} cannot be read; is the process of another release? {words}")
    })
}

fn get(place: &PluginAddress, path: &str) -> anyhow::Result<String> {
    ask(place, "GET", path, "")
}

fn ask(place: &PluginAddress, method: &str, path: &str, body: &str) -> anyhow::Result<String> {
    let answer = place.exchange(method, path, body);
    let answer = answer.map_err(|error| anyhow::anyhow!("{}", nobody(place, &error)))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("what answers at {place} does not speak HTTP; is it a Tranche process?"))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        Some("503") if path == "/readyz" => bail!("not ready: {}", body.trim_end()),
        Some("400") => bail!("{}", body.trim_end()),
        Some("404") if place.address.is_some() => {
            bail!(
                "{path} is served only on the process's socket; leave out --address, and ask inside the pod"
            )
        }
        _ => bail!(
            "{place} answers {path} with {:?}; is it a Tranche process?",
            head.lines().next().unwrap_or_default()
        ),
    }
}

fn nobody(place: &PluginAddress, error: &io::Error) -> String {
    format!(
        "nothing answers at {place} ({}). Ask inside a pod (kubectl -n tranche-system exec daemonset/tranche-node \
         -- tranche inspect), give the process's --ops-socket as --socket, or see why it is not running (kubectl -n \
         tranche-system get pods -o wide)",
        cause(error)
    )
}

impl PluginAddress {
    fn exchange(&self, method: &str, path: &str, body: &str) -> io::Result<String> {
        match self.address {
            Some(address) => {
                let stream = TcpStream::connect_timeout(&address, DEADLINE)?;
                stream.set_read_timeout(Some(DEADLINE))?;
                stream.set_write_timeout(Some(DEADLINE))?;
                exchange(stream, method, path, body)
            }
            None => {
                let stream = UnixStream::connect(&self.socket)?;
                stream.set_read_timeout(Some(DEADLINE))?;
                stream.set_write_timeout(Some(DEADLINE))?;
                exchange(stream, method, path, body)
            }
        }
    }
}

impl fmt::Display for PluginAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{address}"),
            None => write!(f, "{}", self.socket.display()),
        }
    }
}

fn exchange(mut stream: impl Read + Write, method: &str, path: &str, body: &str) -> io::Result<String> {
    // HTTP/1.0, so that the body comes in one piece and the end of the stream is its end.
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.0\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}")?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::addresses::Addresses;
    use tokio_util::sync::CancellationToken;

    use crate::ops::{logs::LogControl, metrics, readiness::Readiness, server};

    fn args(what: What, output: Option<InspectOutput>, place: PluginAddress) -> InspectArgs {
        InspectArgs { what, output, set: None, place }
    }

    fn at(socket: &std::path::Path) -> PluginAddress {
        PluginAddress { socket: socket.to_owned(), address: None }
    }

    /// A real server that is asked, not ready while `awaited`; by its address if `over_tcp`.
    async fn asked_by(mut args: InspectArgs, awaited: bool, over_tcp: bool) -> Result<String, String> {
        let (_filter, logs) = LogControl::new("info").unwrap();
        let readiness = Readiness::default();
        let _token = awaited.then(|| readiness.wait_for("kubelet registered"));
        let mut state = server::StateDump::default();
        state.add("node", || serde_json::json!({"name": "node-1"}));
        let ops = server::Ops {
            registry: metrics::registry(),
            dcgm: None,
            readiness,
            stop: CancellationToken::new(),
            logs,
            state,
        };
        let dir = tempfile::tempdir().unwrap();
        let mut addresses: Addresses = "127.0.0.1:0".parse().unwrap();
        args.place = at(&dir.path().join("ops.sock"));
        addresses.socket = Some(args.place.socket.clone());
        let bound = ops.bind(addresses).await.unwrap();
        args.place.address = over_tcp.then(|| bound.address());
        let client = tokio::task::spawn_blocking(move || answer(&args).map_err(|error| format!("{error:#}")));
        tokio::select! {
            answer = client => answer.unwrap(),
            _ = bound.serve(CancellationToken::new()) => unreachable!("it serves for ever"),
        }
    }

    async fn asked(what: What, output: Option<InspectOutput>, awaited: bool) -> Result<String, String> {
        asked_by(args(what, output, at("/".as_ref())), awaited, false).await
    }

    #[tokio::test]
    async fn a_process_tells_its_state_and_what_it_waits_for() {
        let state = asked(What::State, None, false).await.unwrap();
        assert!(state.starts_with("NODE ") && state.contains("\nnode-1 "), "{state}");
        let state = asked(What::State, Some(InspectOutput::Json), false).await.unwrap();
        assert_eq!(state, "{\n  \"node\": {\n    \"name\": \"node-1\"\n  }\n}\n");
        assert_eq!(asked(What::Ready, None, false).await.unwrap(), "ready\n");
        assert!(asked(What::Metrics, None, false).await.unwrap().contains("tranche_build_info"));
        let words = asked(What::Ready, None, true).await.unwrap_err();
        assert!(words.starts_with("not ready: awaiting kubelet registered"), "{words}");
    }

    #[tokio::test]
    async fn the_log_level_is_told_and_set() {
        assert_eq!(asked(What::LogLevel, None, false).await.unwrap(), "info\n");
        let mut set = args(What::LogLevel, None, at("/".as_ref()));
        set.set = Some("debug".to_owned());
        assert_eq!(asked_by(set.clone(), false, false).await.unwrap(), "debug\n");
        set.set = Some("loud".to_owned());
        let words = asked_by(set.clone(), false, false).await.unwrap_err();
        assert!(words.contains("write a level"), "{words}");
        set.what = What::State;
        assert!(answer(&set).unwrap_err().is::<UsageError>());
    }

    #[tokio::test]
    async fn over_tcp_there_are_metrics_and_no_state() {
        let by_address = |what| asked_by(args(what, None, at("/".as_ref())), false, true);
        assert_eq!(by_address(What::Ready).await.unwrap(), "ready\n");
        let words = by_address(What::State).await.unwrap_err();
        assert!(words.contains("only on the process's socket"), "{words}");
    }

    #[test]
    fn nobody_there_is_told_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let place = at(&dir.path().join("none"));
        let words = answer(&args(What::State, None, place)).unwrap_err().to_string();
        assert!(words.contains("--socket") && words.contains("kubectl"), "{words}");
    }

    #[test]
    fn a_form_of_output_that_has_no_meaning_is_refused() {
        let error = answer(&args(What::Metrics, Some(InspectOutput::Json), at("/".as_ref()))).unwrap_err();
        assert!(error.is::<UsageError>(), "{error}");
    }
}
