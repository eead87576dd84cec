//! Asked over a real socket, as a probe would.

use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{EnvFilter, reload};

use super::*;
use crate::ops::metrics;

const DEADLINE: Duration = Duration::from_secs(10);

struct Running {
    address: SocketAddr,
    health: SocketAddr,
    dir: tempfile::TempDir,
    readiness: Readiness,
    stop: CancellationToken,
    served: JoinSet<Result<(), OpsError>>,
    _filter: reload::Layer<EnvFilter, tracing_subscriber::Registry>,
}

async fn start() -> Running {
    start_with(None).await
}

async fn start_with(dcgm: Option<metrics::Registry>) -> Running {
    let (filter, logs) = LogControl::new("info").unwrap();
    let (readiness, stop) = (Readiness::default(), CancellationToken::new());
    let mut state = StateDump::default();
    state.add("ledger", || json!({ "records": 2 }));
    state.add("inventory", || json!(["gpu-0"]));
    let ops = Ops {
        registry: metrics::registry(),
        dcgm,
        readiness: readiness.clone(),
        stop: stop.clone(),
        logs,
        state,
    };
    let dir = tempfile::tempdir().unwrap();
    let socket = Some(dir.path().join("private/ops.sock"));
    let bound = ops.bind(Addresses { socket, ..here() }).await.unwrap();
    let (address, health, told) = (bound.address(), bound.health_address(), stop.clone());
    let mut served = JoinSet::new();
    served.spawn(async move { bound.serve(told).await });
    Running { address, health, dir, readiness, stop, served, _filter: filter }
}

fn here() -> Addresses {
    "127.0.0.1:0".parse().unwrap()
}

/// Sends bytes, returns the whole answer.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: &str) -> String {
    let exchange = async {
        // A server that refuses early may close while we still write.
        let _ = stream.write_all(bytes.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    };
    tokio::time::timeout(DEADLINE, exchange).await.expect("an answer in time")
}

fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// Status code and body.
fn read(answer: &str) -> (u16, String) {
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    (status, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned())
}

impl Running {
    /// To the door for everybody.
    async fn send(&self, bytes: &str) -> String {
        exchange(TcpStream::connect(self.address).await.unwrap(), bytes).await
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        read(&self.send(&request(method, path, body)).await)
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.health).await.unwrap();
        read(&exchange(stream, &request("GET", path, "")).await)
    }

    /// By the socket.
    async fn tell(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let stream = UnixStream::connect(self.dir.path().join("private/ops.sock")).await.unwrap();
        read(&exchange(stream, &request(method, path, body)).await)
    }
}

#[tokio::test]
async fn health_metrics_and_state_are_answered() {
    let running = start().await;
    assert_eq!(running.ask("GET", "/healthz", "").await, (200, "ok\n".to_owned()));
    let (status, text) = running.ask("GET", "/metrics", "").await;
    assert_eq!(status, 200);
    assert!(text.contains("# TYPE tranche_build_info gauge\n") && !text.contains("# EOF"), "{text}");
    for path in ["/healthz", "/readyz"] {
        assert_eq!(running.probe(path).await.0, 200, "{path}");
    }
    let (status, text) = running.tell("GET", "/state", "").await;
    assert_eq!(status, 200);
    let state: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(state, json!({ "inventory": ["gpu-0"], "ledger": { "records": 2 } }));
}

/// The type that metrics are served as, and their text.
async fn scrape(running: &Running, path: &str, accept: &str) -> (String, String) {
    let answer = running.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n{accept}\r\n")).await;
    let kind = answer.lines().find_map(|line| line.strip_prefix("content-type: "));
    (kind.unwrap_or_default().to_owned(), read(&answer).1)
}

#[tokio::test]
async fn openmetrics_is_served_to_whoever_asks_for_it_and_the_text_format_to_everybody_else() {
    let running = start().await;
    for accept in ["", "accept: */*\r\n", "accept: text/plain;version=0.0.4\r\n"] {
        let (kind, text) = scrape(&running, "/metrics", accept).await;
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8", "{accept}");
        assert!(text.contains("# TYPE tranche_ops_dropped_connections_total counter\n"), "{text}");
    }
    let accept = "accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3,*/*;q=0.2\r\n";
    let (kind, text) = scrape(&running, "/metrics", accept).await;
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(text.contains("# TYPE tranche_build info\n") && text.ends_with("# EOF\n"), "{text}");
}

#[tokio::test]
async fn rows_under_dcgms_names_are_served_where_there_are_some() {
    let running = start().await;
    assert_eq!(running.ask("GET", "/metrics/dcgm", "").await, (404, OPEN_PATHS.to_owned()));
    let mut registry = metrics::Registry::default();
    registry.register("DCGM_FI_DEV_FB_USED", "MiB", metrics::FloatGauge::default());
    let running = start_with(Some(registry)).await;
    let (kind, text) = scrape(&running, "/metrics/dcgm", "").await;
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    assert!(text.contains("\nDCGM_FI_DEV_FB_USED 0"), "{text}");
    assert!(!text.contains("tranche_"), "{text}");
    assert_eq!(running.probe("/metrics/dcgm").await.0, 404);
}

#[tokio::test]
async fn readiness_names_what_is_awaited() {
    let running = start().await;
    let token = running.readiness.wait_for("kubelet registered");
    let (status, text) = running.ask("GET", "/readyz", "").await;
    assert_eq!(status, 503);
    assert!(text.starts_with("awaiting kubelet registered for "), "{text}");
    drop(token);
    assert_eq!(running.ask("GET", "/readyz", "").await, (200, "ready\n".to_owned()));
}

#[tokio::test]
async fn the_log_filter_can_be_read_and_changed_and_a_bad_one_is_refused_with_advice() {
    let running = start().await;
    assert_eq!(running.tell("GET", "/log-level", "").await, (200, "info\n".to_owned()));
    assert_eq!(running.tell("PUT", "/log-level", "debug\n").await, (200, "debug\n".to_owned()));
    let (status, text) = running.tell("PUT", "/log-level", "loud").await;
    assert_eq!(status, 400);
    assert!(text.contains("write a level"), "{text}");
    assert_eq!(running.tell("GET", "/log-level", "").await, (200, "debug\n".to_owned()));
}

#[tokio::test]
async fn state_and_log_level_are_not_told_over_the_network() {
    let running = start().await;
    for (method, path) in [("GET", "/state"), ("GET", "/log-level"), ("PUT", "/log-level")] {
        assert_eq!(running.ask(method, path, "trace").await.0, 404, "{method} {path}");
        assert_eq!(running.probe(path).await, (404, HEALTH_PATHS.to_owned()));
    }
    assert_eq!(running.probe("/metrics").await.0, 404);
    assert_eq!(running.tell("GET", "/log-level", "").await, (200, "info\n".to_owned()));
}

#[tokio::test]
async fn too_much_is_refused() {
    let running = start().await;
    let (status, _) = running.tell("PUT", "/log-level", &"x".repeat(BODY_BYTES_MAX + 1)).await;
    assert_eq!(status, 413);
    let long = "x".repeat(HEADER_BYTES_MAX + 1);
    let answer = running.send(&format!("GET /healthz HTTP/1.1\r\nhost: x\r\nlong: {long}\r\n\r\n")).await;
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    let many: String = (0..=HEADERS_MAX).map(|n| format!("h{n}: x\r\n")).collect();
    let answer = running.send(&format!("GET /healthz HTTP/1.1\r\n{many}\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn unknown_paths_list_the_known_ones_and_wrong_methods_are_told() {
    let running = start().await;
    assert_eq!(running.ask("GET", "/", "").await, (404, OPEN_PATHS.to_owned()));
    assert_eq!(running.ask("DELETE", "/healthz", "").await.0, 405);
}

/// As many as were seen to have a node plugin killed by its probes. Each answer has [`DEADLINE`].
#[tokio::test]
async fn idle_connections_hold_up_nobody() {
    let running = start().await;
    for door in [running.address, running.health] {
        let mut idle = Vec::new();
        for _ in 0..1_400 {
            idle.push(TcpStream::connect(door).await.unwrap());
        }
        for path in ["/healthz", "/readyz"] {
            assert_eq!(running.probe(path).await.0, 200, "{path} with {door} taken");
            assert_eq!(running.ask("GET", path, "").await.0, 200, "{path} with {door} taken");
        }
    }
    let (_, text) = running.ask("GET", "/metrics", "").await;
    for door in ["open", "health"] {
        let count = dropped(&text, door);
        assert!(count > 1_000, "{door}: {count}");
    }
}

/// The connections that a door has dropped, of the metrics' text.
fn dropped(text: &str, door: &str) -> u32 {
    let line = format!("tranche_ops_dropped_connections_total{{door=\"{door}\"}} ");
    let count = text.lines().find_map(|text| text.strip_prefix(&line)).expect("a counter");
    count.parse().unwrap()
}

/// Asked by the socket, which nobody floods.
async fn until_dropped(running: &Running, door: &str, count: u32) {
    let end = std::time::Instant::now() + DEADLINE;
    loop {
        let (_, text) = running.tell("GET", "/metrics", "").await;
        let have = dropped(&text, door);
        if have >= count {
            return;
        }
        assert!(std::time::Instant::now() < end, "{door}: {have} of {count} were turned away");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A probe that is under way is answered, whoever else comes meanwhile, and from how many addresses.
#[tokio::test]
async fn connections_from_many_addresses_end_no_probe_that_is_under_way() {
    /// More than either door has places. The probe's request must be whole within [`REQUEST_DEADLINE`], and all this is
    /// done meanwhile.
    const OTHERS: u8 = 100;
    let running = start().await;
    for (name, door) in [("health", running.health), ("open", running.address)] {
        // Kubelet's, from the node's own address.
        let mut probe = TcpStream::connect(door).await.unwrap();
        probe.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
        let mut others = Vec::new();
        for nth in 0..OTHERS {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 1, nth], 0))).unwrap();
            others.push(socket.connect(door).await.unwrap());
        }
        // All of them have been let in, or not.
        until_dropped(&running, name, u32::from(OTHERS) - 64).await;
        let answer = exchange(probe, "host: x\r\n\r\n").await;
        assert_eq!(read(&answer), (200, "ok\n".to_owned()), "{answer}");
        // And others are still served.
        assert_eq!(running.probe("/healthz").await.0, 200);
        assert_eq!(running.ask("GET", "/healthz", "").await.0, 200);
    }
}

#[tokio::test]
async fn draining_is_not_ready_and_ends_the_server() {
    let mut running = start().await;
    running.stop.cancel();
    let joined = tokio::time::timeout(DEADLINE, running.served.join_next()).await.expect("it ends");
    joined.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(running.address).await.is_err());
}

#[tokio::test]
async fn a_taken_address_is_told_with_the_flag_to_change() {
    let running = start().await;
    let (_filter, logs) = LogControl::new("info").unwrap();
    let ops = Ops {
        registry: metrics::registry(),
        dcgm: None,
        readiness: Readiness::default(),
        stop: CancellationToken::new(),
        logs,
        state: StateDump::default(),
    };
    let error = ops.bind(Addresses { health: running.health, ..here() }).await.err().unwrap();
    assert!(Chain(&error).to_string().contains("--health-address"), "{}", Chain(&error));
}
