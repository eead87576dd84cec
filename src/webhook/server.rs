//! HTTPS: POST /validate and /mutate. Everything is limited: connections in all and of each address, headers, bodies
//! one by one and all together, and the time each may take, since whoever reaches the pod may connect.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error_span, info, warn};

use super::WebhookError;
use super::callers::CallerGuard;
use super::certificate_resolver::CertificateResolver;
use super::config::{Callers, WebhookTiming};
use super::metrics::WebhookMetrics;
use super::validator::{Decided, Validator};
use crate::admission::{self, KnownClasses, ReviewAnswer, ReviewVerdict};
use crate::model::error_chain;
use crate::ops::connection_slots::{ConnectionSlot, ConnectionSlots, Limits};

/// The API server takes objects of 3 MiB at most; a claim comes with what it was before.
const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// An API server has a connection for each review under way, and keeps them. Bodies that are being received are four
/// of the largest, or a thousand ordinary ones.
const LIMITS: Limits = Limits { all: 256, per_peer: 192, bytes: 4 * BODY_BYTES_MAX, answer: None };
const HEADER_BYTES_MAX: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Between requests and for their headers.
const HEADER_DEADLINE: Duration = Duration::from_secs(30);
/// For room, while others' bodies come in.
const ROOM_DEADLINE: Duration = Duration::from_secs(2);
/// For the body and the answer: the API server waits no longer (timeoutSeconds of the configurations).
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// Then a connection ends, after the request that is under way: nobody stays with an old certificate.
const CONNECTION_LIFE: Duration = Duration::from_secs(600);
/// For what is under way when a connection is to end.
const LAST_REQUEST: Duration = Duration::from_secs(12);
/// After a failed accept (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const PATHS: &str = "POST /validate, /mutate\n";

/// Answers the reviews.
#[derive(Clone)]
pub(super) struct ReviewHandler {
    classes: watch::Receiver<Arc<KnownClasses>>,
    metrics: WebhookMetrics,
    validator: Validator,
}

/// A server that has its address and does not answer yet.
pub(super) struct BoundWebhook {
    listener: TcpListener,
    address: SocketAddr,
    tls: TlsAcceptor,
    guard: Option<CallerGuard>,
    handler: ReviewHandler,
}

impl BoundWebhook {
    /// Takes the address; port 0 takes any free one.
    pub async fn bind(
        address: SocketAddr,
        certificate_resolver: CertificateResolver,
        callers: Option<Callers>,
        handler: ReviewHandler,
    ) -> Result<Self, WebhookError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let guard = callers.map(|callers| {
            let path = callers.authorities.clone();
            CallerGuard::new(callers, provider.clone())
                .map_err(|source| WebhookError::Callers { path, source })
        });
        let guard = guard.transpose()?;
        let refused = |source| WebhookError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(WebhookError::Tls)?;
        let config = match &guard {
            Some(guard) => config.with_client_cert_verifier(Arc::new(guard.clone())),
            None => config.with_no_client_auth(),
        };
        let mut config = config.with_cert_resolver(Arc::new(certificate_resolver));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { listener, address, tls: TlsAcceptor::from(Arc::new(config)), guard, handler })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until told, a little longer still, and lets what is under way finish.
    pub async fn serve(self, timing: WebhookTiming, stop: CancellationToken) {
        let (mut connections, slots) = (JoinSet::new(), ConnectionSlots::new(LIMITS));
        let guard = self.guard.clone();
        let end = async {
            let told = async {
                stop.cancelled().await;
                tokio::time::sleep(timing.linger).await;
            };
            match guard {
                Some(guard) => tokio::select! { () = told => {}, () = guard.keep(timing.check) => {} },
                None => told.await,
            }
        };
        let (ending, ended) = watch::channel(());
        let mut end = pin!(end);
        loop {
            tokio::select! {
                () = &mut end => break,
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        if let Some(slot) = slots.enter(peer.ip()) {
                            connections.spawn(self.connection(stream, slot, ended.clone()));
                        }
                        self.handler.metrics.dropped_connections.inc_by(slots.take_dropped());
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

    fn connection(
        &self,
        stream: TcpStream,
        slot: ConnectionSlot,
        ended: watch::Receiver<()>,
    ) -> impl Future<Output = ()> + use<> {
        let (tls, handler, slot) = (self.tls.clone(), self.handler.clone(), Arc::new(slot));
        let served = slot.clone();
        let served = async move {
            let handshake = tokio::time::timeout(HANDSHAKE_DEADLINE, tls.accept(stream));
            match handshake.await {
                Ok(Ok(stream)) => requests(stream, handler, served, ended).await,
                Ok(Err(error)) => {
                    handler.metrics.failed_handshakes.inc();
                    debug!(error = error_chain(&error), "a TLS handshake failed");
                }
                Err(_) => {
                    handler.metrics.failed_handshakes.inc();
                    debug!("a TLS handshake took too long");
                }
            }
        };
        async move {
            tokio::select! {
                () = served => {}
                () = slot.given_up() => debug!("a connection was cut: there was no room for all"),
            }
        }
    }
}

/// The requests of one connection, one after the other.
async fn requests(
    stream: tokio_rustls::server::TlsStream<TcpStream>,
    handler: ReviewHandler,
    slot: Arc<ConnectionSlot>,
    mut ended: watch::Receiver<()>,
) {
    let service = service_fn(move |request| {
        let (handler, slot) = (handler.clone(), slot.clone());
        async move { Ok::<_, Infallible>(handler.answer(&slot, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
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

/// Why a body was not read. The rest of it may still come, so nothing more is read from there.
enum Unread {
    TooLarge,
    NoRoom,
    Slow,
    /// The caller has gone.
    Broken,
}

impl Unread {
    fn label(&self) -> Option<&'static str> {
        match self {
            Self::TooLarge => Some("too_large"),
            Self::NoRoom => Some("no_room"),
            Self::Slow => Some("too_slow"),
            Self::Broken => None,
        }
    }
}

impl IntoResponse for Unread {
    fn into_response(self) -> Response {
        let (status, words) = match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "no review is larger than 4 MiB\n"),
            Self::NoRoom => (StatusCode::SERVICE_UNAVAILABLE, "too many reviews at once; try again\n"),
            Self::Slow => (StatusCode::REQUEST_TIMEOUT, "the request took too long\n"),
            Self::Broken => (StatusCode::BAD_REQUEST, "the request has no end\n"),
        };
        (status, [(header::CONNECTION, "close")], words).into_response()
    }
}

/// All of it, once there is room for it.
async fn body(slot: &ConnectionSlot, body: Incoming) -> Result<Vec<u8>, Unread> {
    let said = body.size_hint().upper().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let most = said.unwrap_or(BODY_BYTES_MAX);
    if most > BODY_BYTES_MAX {
        return Err(Unread::TooLarge);
    }
    tokio::time::timeout(ROOM_DEADLINE, slot.hold(most)).await.map_err(|_| Unread::NoRoom)?;
    let mut bytes = Vec::with_capacity(said.unwrap_or(0));
    let mut parts = Body::new(body).into_data_stream();
    while let Some(part) = parts.next().await {
        let part = part.map_err(|_| Unread::Broken)?;
        if bytes.len() + part.len() > most {
            return Err(Unread::TooLarge);
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

impl ReviewHandler {
    pub fn new(classes: watch::Receiver<Arc<KnownClasses>>, metrics: WebhookMetrics) -> Self {
        let validator = Validator::new(metrics.clone());
        Self { classes, metrics, validator }
    }

    async fn answer(&self, slot: &ConnectionSlot, request: hyper::Request<Incoming>) -> Response {
        let (head, incoming) = request.into_parts();
        let is_mutation = match head.uri.path() {
            "/validate" => false,
            "/mutate" => true,
            _ => return (StatusCode::NOT_FOUND, PATHS).into_response(),
        };
        if head.method != Method::POST {
            let allow = [(header::ALLOW, HeaderValue::from_static("POST"))];
            return (StatusCode::METHOD_NOT_ALLOWED, allow, PATHS).into_response();
        }
        slot.receiving();
        let read = tokio::time::timeout(REQUEST_DEADLINE, body(slot, incoming)).await;
        let answer = match read.unwrap_or(Err(Unread::Slow)) {
            Ok(bytes) => {
                slot.answering();
                match is_mutation {
                    // Cheap, and pods wait for it.
                    true => {
                        let start = Instant::now();
                        let answer = admission::mutate(&bytes);
                        self.answered(Decided { answer, took: start.elapsed() })
                    }
                    false => {
                        let classes = self.classes.borrow().clone();
                        match self.validator.check(slot.peer(), bytes, classes).await {
                            Some(decided) => self.answered(decided),
                            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                        }
                    }
                }
            }
            Err(unread) => {
                unread.label().into_iter().for_each(|reason| self.metrics.unread(reason));
                unread.into_response()
            }
        };
        slot.waiting();
        answer
    }

    fn answered(&self, Decided { answer, took }: Decided) -> Response {
        let (subject, verdict) = match &answer {
            Ok(answer) => (answer.subject.as_str(), answer.verdict.as_str()),
            Err(_) => ("other", "malformed"),
        };
        self.metrics.request(subject, verdict, took);
        match answer {
            Ok(ReviewAnswer { verdict, object, review, .. }) => {
                let uid = review["response"]["uid"].as_str();
                let _entered = error_span!("review", request.uid = uid).entered();
                if verdict != ReviewVerdict::Allowed {
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
