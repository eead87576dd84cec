//! Where people and probes ask: health, readiness, metrics, the process's state, its log level.
//!
//! | path | answers |
//! |---|---|
//! | GET /healthz | 200 while the process can answer at all |
//! | GET /readyz | 200, or 503 with what is still awaited |
//! | GET /metrics | OpenMetrics text |
//! | GET /state | JSON: what each registered part says of itself |
//! | GET, PUT /log-level | the log filter; the body of PUT is the new one |
//!
//! Everything is limited: connections, headers, bodies, and the time each may take.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::OpsError;
use super::drain::{Shutdown, Stage};
use super::logs::{Chain, LogControl};
use super::readiness::Readiness;

/// Probes, a scraper and a few people; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
const HEADER_BYTES_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
const BODY_BYTES_MAX: usize = 4 * 1024;
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
/// Headers, request and writing the answer to a slow reader.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(15);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PATHS: &str = "GET /healthz, /readyz, /metrics, /state, /log-level; PUT /log-level\n";

type Describe = Box<dyn Fn() -> serde_json::Value + Send + Sync>;

/// What the server tells about.
pub struct Ops {
    pub registry: Registry,
    pub readiness: Readiness,
    pub shutdown: Shutdown,
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

/// A server that has its address and does not answer yet.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
}

impl Ops {
    /// Takes the address; port 0 takes any free one.
    ///
    /// # Errors
    /// The address cannot be had.
    pub async fn bind(self, address: SocketAddr) -> Result<Bound, OpsError> {
        let failed = |source| OpsError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Bound { listener, address, router: router(Arc::new(self)) })
    }
}

impl Bound {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until told, then lets the answers under way finish.
    pub async fn serve(self, until: impl Future<Output = ()>) -> Result<(), OpsError> {
        tracing::info!(address = %self.address, "health and metrics are served");
        let mut connections = JoinSet::new();
        let mut until = pin!(until);
        loop {
            tokio::select! {
                () = &mut until => break,
                accepted = self.listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(connection(stream, self.router.clone()));
                    }
                    Err(error) => pause_after(&error).await,
                },
                Some(_) = connections.join_next() => {}
            }
        }
        // Each ends by its own deadline.
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

async fn pause_after(error: &io::Error) {
    tracing::warn!(error = %Chain(error), "cannot accept a connection to health and metrics");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// One connection, one request: probes and scrapers come seldom, and idle ones would hold a place.
async fn connection(stream: TcpStream, router: Router) {
    let serving = http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_DEADLINE)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(CONNECTION_DEADLINE, serving).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error = %Chain(&error), "connection ended early"),
        Err(_) => tracing::debug!("connection ended: it took too long"),
    }
}

fn router(ops: Arc<Ops>) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/state", get(state))
        .route("/log-level", get(log_level).put(set_log_level))
        .fallback(async || (StatusCode::NOT_FOUND, PATHS))
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
    if ops.shutdown.stage() > Stage::Running {
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

async fn metrics(State(ops): State<Arc<Ops>>) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &ops.registry) {
        Ok(()) => ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
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
