//! The HTTP server for health, metrics and state. Three listening addresses, so that none of their clients blocks another:
//!
//! | address | clients | paths |
//! |---|---|---|
//! | health (TCP) | kubelet's probes | GET /healthz: 200 while the process can answer at all; GET /readyz: 200, or 503 with what is still awaited |
//! | open (TCP) | scrapers | the same, and GET /metrics: text format 0.0.4, or OpenMetrics for whoever asks for it; GET /metrics/dcgm, if there is a registry for it |
//! | socket (Unix, mode 0600) | people in the pod, `tranche inspect` | all of them; GET /state: JSON, what each registered part says of itself; GET, PUT /log-level: the log filter, the body of PUT is the new one |
//!
//! Everything is limited: connections in all and of each address, headers, bodies, and the time each may take.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

use super::OpsError;
use super::addresses::Addresses;
use super::connection_slots::{ConnectionSlot, ConnectionSlots, Limits};
use super::exposition::Format;
use super::logs::{Chain, LogControl};
use super::metrics::Registry;
use super::readiness::Readiness;
use super::scrape::Scrapes;

/// Kubelet's probes come one at a time, each with a connection of its own.
const HEALTH: Limits = Limits { all: 32, per_peer: 16, bytes: 0, answer: ANSWER };
/// Scrapers, and whoever looks from outside.
const OPEN: Limits = Limits { all: 64, per_peer: 16, bytes: 0, answer: ANSWER };
/// People in the pod.
const PRIVATE: Limits = Limits { all: 16, per_peer: 16, bytes: 0, answer: ANSWER };
/// Whoever takes longer to take an answer may lose it to others.
const ANSWER: Option<Duration> = Some(Duration::from_secs(1));
const HEADER_BYTES_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
const BODY_BYTES_MAX: usize = 4 * 1024;
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
/// Headers, request and writing the answer to a slow reader.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(15);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const HEALTH_PATHS: &str = "GET /healthz, /readyz\n";
const OPEN_PATHS: &str = "GET /healthz, /readyz, /metrics\n";
const OPEN_PATHS_WITH_DCGM: &str = "GET /healthz, /readyz, /metrics, /metrics/dcgm\n";
const PATHS: &str = "GET /healthz, /readyz, /metrics, /state, /log-level; PUT /log-level\n";

type Describe = Box<dyn Fn() -> serde_json::Value + Send + Sync>;

/// What the server tells about.
pub struct Ops {
    pub registry: Registry,
    /// What is served under DCGM's names, if anything.
    pub dcgm: Option<Registry>,
    pub readiness: Readiness,
    pub stop: CancellationToken,
    pub logs: LogControl,
    pub state: StateDump,
}

/// Parts of the process that can say how they are.
#[derive(Default)]
pub struct StateDump(BTreeMap<&'static str, Describe>);

impl StateDump {
    /// Adds a part. `describe` runs within a request: it copies what is known and never waits.
    pub fn add(
        &mut self,
        name: &'static str,
        describe: impl Fn() -> serde_json::Value + Send + Sync + 'static,
    ) {
        self.0.insert(name, Box::new(describe));
    }

    fn dump(&self) -> serde_json::Value {
        self.0.iter().map(|(name, describe)| ((*name).to_owned(), describe())).collect()
    }
}

/// A server that has its addresses and does not answer yet.
pub struct BoundServer {
    open: Endpoint,
    health: Endpoint,
    /// None: it could not be had, which was told.
    socket: Option<Endpoint>,
    address: SocketAddr,
    health_address: SocketAddr,
}

impl Ops {
    /// Takes the addresses; port 0 takes any free one. A socket that cannot be had is told in the log: what it
    /// serves is for people, and is no reason to serve nobody.
    ///
    /// # Errors
    /// A TCP address cannot be had.
    pub async fn bind(mut self, addresses: Addresses) -> Result<BoundServer, OpsError> {
        let dropped = self.counted();
        let Addresses { open, health, socket } = addresses;
        let (open, address) = listen(open, "metrics", "--ops-address").await?;
        let (health, health_address) = listen(health, "health", "--health-address").await?;
        let (ops, probes) = (Arc::new(self), Router::new().route("/healthz", get(async || "ok\n")));
        let probes = probes.route("/readyz", get(readyz));
        let texts = Arc::new(Texts::default());
        let scrape = async move |State(ops): State<Arc<Ops>>, headers: HeaderMap| {
            texts.answer(&ops.registry, &headers)
        };
        let mut scrapes = probes.clone().route("/metrics", get(scrape));
        let mut open_paths = OPEN_PATHS;
        if ops.dcgm.is_some() {
            let texts = Arc::new(Texts::default());
            let scrape = async move |State(ops): State<Arc<Ops>>, headers: HeaderMap| match &ops.dcgm {
                Some(registry) => texts.answer(registry, &headers),
                None => StatusCode::NOT_FOUND.into_response(),
            };
            scrapes = scrapes.route("/metrics/dcgm", get(scrape));
            open_paths = OPEN_PATHS_WITH_DCGM;
        }
        let people = scrapes.clone().route("/state", get(state));
        let people = people.route("/log-level", get(log_level).put(set_log_level));
        let probes = finished(probes, HEALTH_PATHS, ops.clone());
        let scrapes = finished(scrapes, open_paths, ops.clone());
        let people = finished(people, PATHS, ops);
        let socket = socket.and_then(|path| for_people(&path));
        Ok(BoundServer {
            open: Endpoint::new(Either::Left(open), scrapes, OPEN, dropped("open")),
            health: Endpoint::new(Either::Left(health), probes, HEALTH, dropped("health")),
            socket: socket
                .map(|socket| Endpoint::new(Either::Right(socket), people, PRIVATE, dropped("socket"))),
            address,
            health_address,
        })
    }

    /// A counter for each door.
    fn counted(&mut self) -> impl Fn(&'static str) -> Counter + use<> {
        let dropped = Family::<[(&'static str, &'static str); 1], Counter>::default();
        self.registry.register(
            "ops_dropped_connections",
            "Connections to health, metrics and state that were ended, or not accepted, because a listener was full",
            dropped.clone(),
        );
        move |door| dropped.get_or_create(&[("door", door)]).clone()
    }
}

fn for_people(path: &Path) -> Option<UnixListener> {
    let listener = super::addresses::listen(path);
    let told = |error: &io::Error| {
        tracing::warn!(
            socket = %path.display(),
            error = %Chain(error),
            "state and log level are not served; choose another path with --ops-socket"
        );
    };
    listener.inspect_err(told).ok()
}

async fn listen(
    address: SocketAddr,
    what: &'static str,
    flag: &'static str,
) -> Result<(TcpListener, SocketAddr), OpsError> {
    let failed = |source| OpsError::Listen { what, flag, address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

impl BoundServer {
    /// Where metrics are served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn health_address(&self) -> SocketAddr {
        self.health_address
    }

    /// Answers until `stop`, then lets the answers under way finish.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), OpsError> {
        tracing::info!(address = %self.address, health = %self.health_address, "health and metrics are served");
        let private = async {
            if let Some(door) = self.socket {
                door.serve(&stop).await;
            }
        };
        tokio::join!(self.open.serve(&stop), self.health.serve(&stop), private);
        Ok(())
    }
}

type Stream = Either<TcpStream, UnixStream>;
type AnyListener = Either<TcpListener, UnixListener>;

/// One listening address, and what is answered there.
struct Endpoint {
    listener: AnyListener,
    router: Router,
    slots: ConnectionSlots,
    dropped: Counter,
}

impl Endpoint {
    fn new(listener: AnyListener, router: Router, limits: Limits, dropped: Counter) -> Self {
        Self { listener, router, slots: ConnectionSlots::new(limits), dropped }
    }

    async fn serve(self, stop: &CancellationToken) {
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = self.accept() => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Ok((stream, peer, reached)) => {
                    if let Some(slot) = self.slots.enter_at(peer, reached) {
                        connections.spawn(connection(stream, self.router.clone(), slot));
                    }
                    self.dropped.inc_by(self.slots.take_dropped());
                }
                Err(error) => pause_after(&error).await,
            }
        }
        drop(self.listener);
        // Each ends by its own deadline.
        while connections.join_next().await.is_some() {}
    }

    /// A connection, whose it is, and the address that it has reached.
    async fn accept(&self) -> io::Result<(Stream, IpAddr, Option<IpAddr>)> {
        match &self.listener {
            Either::Left(tcp) => {
                let (stream, peer) = tcp.accept().await?;
                let reached = stream.local_addr().ok().map(|address| address.ip());
                Ok((Either::Left(stream), peer.ip(), reached))
            }
            // Whoever may open the socket is one of us.
            Either::Right(unix) => {
                let here = IpAddr::from([0, 0, 0, 0]);
                unix.accept().await.map(|(stream, _)| (Either::Right(stream), here, None))
            }
        }
    }
}

async fn pause_after(error: &io::Error) {
    tracing::warn!(error = %Chain(error), "cannot accept a connection to health and metrics");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// One connection, one request: probes and scrapers come seldom, and idle ones would hold a place.
async fn connection(stream: Stream, router: Router, slot: ConnectionSlot) {
    let (slot, router) = (Arc::new(slot), TowerToHyperService::new(router));
    let answered = slot.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        // Its headers are there.
        answered.answering();
        router.call(request)
    });
    let serving = http1::Builder::new()
        .keep_alive(false)
        // Whoever has said all that there is to say, as `nc` does, is answered all the same.
        .half_close(true)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_DEADLINE)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        served = tokio::time::timeout(CONNECTION_DEADLINE, serving) => match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(error = %Chain(&error), "connection ended early"),
            Err(_) => tracing::debug!("connection ended: it took too long"),
        },
        () = slot.given_up() => tracing::debug!("connection ended: there was no room for all"),
    }
}

fn finished(router: Router<Arc<Ops>>, paths: &'static str, ops: Arc<Ops>) -> Router {
    router
        .fallback(async move || (StatusCode::NOT_FOUND, paths))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(within_deadline))
        .with_state(ops)
}

async fn within_deadline(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_DEADLINE, next.run(request)).await {
        Ok(response) => response,
        Err(_) => (StatusCode::REQUEST_TIMEOUT, "the request took too long\n").into_response(),
    }
}

async fn readyz(State(ops): State<Arc<Ops>>) -> (StatusCode, String) {
    if ops.stop.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    let awaited = ops.readiness.awaited();
    if awaited.is_empty() {
        return (StatusCode::OK, "ready\n".to_owned());
    }
    let mut text = String::new();
    for one in awaited {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "awaiting {} for {:.1} s", one.name, one.since.as_secs_f64());
    }
    (StatusCode::SERVICE_UNAVAILABLE, text)
}

/// The texts of one registry, by format.
#[derive(Default)]
struct Texts {
    open: Scrapes,
    plain: Scrapes,
}

impl Texts {
    fn answer(&self, registry: &Registry, headers: &HeaderMap) -> Response {
        let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        let format = Format::asked_for(accept);
        let made = match format {
            Format::OpenMetrics => self.open.text(|| super::metrics::text(registry)),
            Format::Text => self.plain.text(|| super::metrics::plain_text(registry)),
        };
        match made {
            Ok(text) => {
                let headers = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")];
                (headers, text).into_response()
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        }
    }
}

async fn state(State(ops): State<Arc<Ops>>) -> Response {
    let text = format!("{:#}\n", ops.state.dump());
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

async fn log_level(State(ops): State<Arc<Ops>>) -> (StatusCode, String) {
    match ops.logs.current() {
        Ok(filter) => (StatusCode::OK, format!("{filter}\n")),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", Chain(&error))),
    }
}

async fn set_log_level(State(ops): State<Arc<Ops>>, filter: String) -> (StatusCode, String) {
    match ops.logs.set(filter.trim()) {
        Ok(()) => {
            tracing::warn!(filter = filter.trim(), "the log filter was changed");
            log_level(State(ops)).await
        }
        Err(error @ OpsError::LogFilter { .. }) => (StatusCode::BAD_REQUEST, format!("{}\n", Chain(&error))),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", Chain(&error))),
    }
}

#[cfg(test)]
mod tests;
