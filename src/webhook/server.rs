//! HTTPS: POST /validate and /mutate. Everything is limited: connections, headers, bodies, and the time each
//! may take, since whoever reaches the pod may connect.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

use super::WebhookError;
use super::holder::Holder;
use crate::admission::{self, Answer, ClassAmount, ReviewError, Verdict};
use crate::model::error_chain;
use crate::ops::drain::Shutdown;
use crate::ops::metrics::WebhookMetrics;

/// API servers keep their connections; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
const HEADER_BYTES_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
/// The API server takes objects of 3 MiB at most; a claim comes with what it was before.
const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Between requests and for their headers.
const HEADER_DEADLINE: Duration = Duration::from_secs(30);
/// For the body and the answer: the API server waits no longer (timeoutSeconds of the configurations).
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// Then a connection ends, after the request that is under way: nobody stays with an old certificate.
const CONNECTION_LIFE: Duration = Duration::from_secs(600);
/// For what is under way when a connection is to end.
const LAST_REQUEST: Duration = Duration::from_secs(12);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const PATHS: &str = "POST /validate, /mutate\n";

/// What requests are answered with.
#[derive(Clone)]
pub(super) struct Desk {
    pub class: watch::Receiver<ClassAmount>,
    pub metrics: WebhookMetrics,
}

/// A server that has its address and does not answer yet.
pub(super) struct Bound {
    listener: TcpListener,
    tls: TlsAcceptor,
    router: Router,
    metrics: WebhookMetrics,
}

impl Bound {
    /// Takes the address; port 0 takes any free one.
    pub async fn bind(address: SocketAddr, holder: Holder, desk: Desk) -> Result<Self, WebhookError> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|source| WebhookError::Listen { address, source })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(WebhookError::Tls)?.with_no_client_auth();
        let mut config = config.with_cert_resolver(Arc::new(holder));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let metrics = desk.metrics.clone();
        Ok(Self { listener, tls: TlsAcceptor::from(Arc::new(config)), router: router(desk), metrics })
    }

    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Answers until told, a little longer still, and lets what is under way finish.
    pub async fn serve(self, linger: Duration, shutdown: Shutdown) {
        let mut connections = JoinSet::new();
        let end = async {
            shutdown.graceful().await;
            tokio::time::sleep(linger).await;
        };
        let (ending, ended) = watch::channel(());
        let mut end = pin!(end);
        loop {
            tokio::select! {
                () = &mut end => break,
                accepted = self.listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(self.connection(stream, ended.clone()));
                    }
                    Err(error) => {
                        warn!(error = error_chain(&error), "cannot accept a connection to the webhook");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
        drop((self.listener, ending));
        // Each ends by its own deadline.
        while connections.join_next().await.is_some() {}
    }

    fn connection(&self, stream: TcpStream, ended: watch::Receiver<()>) -> impl Future<Output = ()> + use<> {
        let (tls, router, metrics) = (self.tls.clone(), self.router.clone(), self.metrics.clone());
        async move {
            let handshake = tokio::time::timeout(HANDSHAKE_DEADLINE, tls.accept(stream));
            match handshake.await {
                Ok(Ok(stream)) => requests(stream, router, ended).await,
                Ok(Err(error)) => {
                    metrics.failed_handshakes.inc();
                    debug!(error = error_chain(&error), "a TLS handshake failed");
                }
                Err(_) => {
                    metrics.failed_handshakes.inc();
                    debug!("a TLS handshake took too long");
                }
            }
        }
    }
}

/// The requests of one connection, one after the other.
async fn requests(
    stream: tokio_rustls::server::TlsStream<TcpStream>,
    router: Router,
    mut ended: watch::Receiver<()>,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    tokio::select! {
        result = connection.as_mut() => return told(result),
        // Only ever fails: the sender is gone.
        _ = ended.changed() => {}
        () = tokio::time::sleep(CONNECTION_LIFE) => {}
    }
    connection.as_mut().graceful_shutdown();
    match tokio::time::timeout(LAST_REQUEST, connection).await {
        Ok(result) => told(result),
        Err(_) => debug!("a connection was cut: its last request took too long"),
    }
}

fn told(result: hyper::Result<()>) {
    if let Err(error) = result {
        debug!(error = error_chain(&error), "a connection ended early");
    }
}

fn router(desk: Desk) -> Router {
    Router::new()
        .route("/validate", post(validate))
        .route("/mutate", post(mutate))
        .fallback(async || (StatusCode::NOT_FOUND, PATHS))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(within_deadline))
        .with_state(desk)
}

async fn within_deadline(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_DEADLINE, next.run(request)).await {
        Ok(response) => response,
        // The rest of the body may still come, so nothing more is read from there.
        Err(_) => {
            let close = [(header::CONNECTION, "close")];
            (StatusCode::REQUEST_TIMEOUT, close, "the request took too long\n").into_response()
        }
    }
}

async fn validate(State(desk): State<Desk>, body: Bytes) -> Response {
    let class = *desk.class.borrow();
    desk.answered(|| admission::validate(&body, class))
}

async fn mutate(State(desk): State<Desk>, body: Bytes) -> Response {
    desk.answered(|| admission::mutate(&body))
}

impl Desk {
    fn answered(&self, decide: impl FnOnce() -> Result<Answer, ReviewError>) -> Response {
        let start = Instant::now();
        let answer = decide();
        let (subject, verdict) = match &answer {
            Ok(answer) => (answer.subject.as_str(), answer.verdict.as_str()),
            Err(_) => ("other", "malformed"),
        };
        self.metrics.request(subject, verdict, start.elapsed());
        match answer {
            Ok(Answer { verdict, object, review, .. }) => {
                if verdict != Verdict::Allowed {
                    let said = review["response"]["status"]["message"].as_str();
                    info!(object, verdict = verdict.as_str(), said, "{subject}");
                }
                ([(header::CONTENT_TYPE, "application/json")], review.to_string()).into_response()
            }
            Err(error) => {
                warn!(error = error_chain(&error), "a review cannot be answered");
                (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response()
            }
        }
    }
}
