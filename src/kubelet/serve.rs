//! Puts the servers up in kubelet's order and takes them down again.
//!
//! Up: DRA socket, then registration socket, because kubelet dials the one as soon as it sees the
//! other. Down: registration socket unlinked, calls under way finish, DRA socket unlinked.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tracing::{info, warn};

use super::dra::Dra;
use super::health::HealthStream;
use super::listen::{Listener, SocketFile, WAITING_CONNECTIONS};
use super::pb::dra::dra_plugin_server::DraPluginServer as DraV1;
use super::pb::dra_v1beta1::dra_plugin_server::{self as v1beta1, DraPluginServer as DraV1beta1};
use super::pb::health::dra_resource_health_server::{self as health_v1, DraResourceHealthServer as HealthV1};
use super::pb::health_v1alpha1::dra_resource_health_server::{
    self as health_v1alpha1, DraResourceHealthServer as HealthV1alpha1,
};
use super::pb::registration::registration_server::RegistrationServer;
use super::registration::Registrar;
use super::sockets::sweep;
use super::{Claims, Counters, Error, Health, Registration, Sockets};

/// Where and as whom to serve.
#[derive(Debug, Clone)]
pub struct PluginConfig {
    pub driver: String,
    /// Kubelet's --root-dir, usually /var/lib/kubelet; the same path inside and outside of the container.
    pub kubelet_dir: PathBuf,
    /// The pod's UID, where old and new instance overlap during an update; None for fixed names.
    pub pod_uid: Option<String>,
    pub timing: PluginTiming,
}

/// Deadlines and periods.
#[derive(Debug, Clone, Copy)]
pub struct PluginTiming {
    /// A prepare or unprepare call. Kubelet gives up after 45 s, without words.
    pub call: Duration,
    /// What calls under way get when the process stops. A pod's default grace is 30 s.
    pub drain: Duration,
    /// Between two looks whether the sockets' files are there.
    pub socket_check: Duration,
    /// The health stream's longest silence. Kubelet turns devices to Unknown after 30 s.
    pub health_resend: Duration,
    /// Between the two probes that show another instance's socket to be dead.
    pub sweep_settle: Duration,
}

impl Default for PluginTiming {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(40),
            drain: Duration::from_secs(25),
            socket_check: Duration::from_secs(10),
            health_resend: Duration::from_secs(10),
            sweep_settle: Duration::from_secs(1),
        }
    }
}

/// A served plugin. Dropping it lets it run on; cancel the token given to [`serve`] to stop it.
pub struct ServedPlugin {
    pub sockets: Sockets,
    pub registration: watch::Receiver<Registration>,
    pub counters: Arc<Counters>,
    running: JoinHandle<Result<Stopped, Error>>,
}

/// How the stop went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Calls that were still at work when the drain's time was up.
    pub unfinished_calls: usize,
}

impl ServedPlugin {
    /// Waits until everything is down: after a stop, or with an error when a server ended by itself.
    pub async fn stopped(self) -> Result<Stopped, Error> {
        let path = self.sockets.dra.clone();
        self.running.await.unwrap_or(Err(Error::Ended { path }))
    }
}

/// Serves until `stop`. When this returns, both sockets listen.
#[expect(
    clippy::disallowed_methods,
    reason = "what runs is watched by its handle, which the caller is given"
)]
pub async fn serve(
    config: PluginConfig,
    claims: Arc<dyn Claims>,
    health: Health,
    stop: CancellationToken,
) -> Result<ServedPlugin, Error> {
    let sockets = Sockets::place(&config.kubelet_dir, &config.driver, config.pod_uid.as_deref())?;
    make_dir(sockets.dra.parent().unwrap_or(&config.kubelet_dir))?;
    let counters = Arc::new(Counters::default());
    let (state, registration) = watch::channel(Registration::NotYet);
    let registrar = Registrar::new(&config.driver, &sockets, state.clone())?;

    let streams = CancellationToken::new();
    let dra = Dra::new(claims, config.timing.call, Arc::clone(&counters));
    let health = HealthStream::new(health, config.timing.health_resend, streams.clone());
    let services = Services::new(dra.clone(), health);
    let lost = counted(&counters, || {});
    let calls = Server::start(Listener::bind(&sockets.dra)?, services, config.timing.socket_check, lost);

    let lost = counted(&counters, move || drop(state.send_replace(Registration::NotYet)));
    let registrations = match Listener::bind(&sockets.registration) {
        Ok(socket) => {
            Server::start(socket, RegistrationServer::new(registrar), config.timing.socket_check, lost)
        }
        Err(error) => {
            calls.close().await.unlink();
            return Err(error);
        }
    };
    info!(registration = %sockets.registration.display(), endpoint = %sockets.dra.display(), "waiting for kubelet");
    tokio::spawn(clear_away(sockets.clone(), config.driver.clone(), config.timing.sweep_settle));
    let plugin = Plugin { registrations, calls, dra, streams, drain: config.timing.drain };
    let running = tokio::spawn(plugin.run(stop));
    Ok(ServedPlugin { sockets, registration, counters, running })
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(|source| Error::Directory { dir: dir.to_owned(), source })
}

fn counted(counters: &Arc<Counters>, then: impl Fn() + Send + 'static) -> impl Fn() + Send + 'static {
    let counters = Arc::clone(counters);
    move || {
        counters.restored_sockets.fetch_add(1, Relaxed);
        then();
    }
}

async fn clear_away(own: Sockets, driver: String, settle: Duration) {
    for path in sweep(&own, &driver, settle).await {
        info!(path = %path.display(), "removed the socket of a dead instance");
    }
}

/// The two servers and what they share.
struct Plugin {
    registrations: Server,
    calls: Server,
    dra: Dra,
    /// Ends the health streams, which would otherwise keep their connections open.
    streams: CancellationToken,
    drain: Duration,
}

impl Plugin {
    async fn run(mut self, stop: CancellationToken) -> Result<Stopped, Error> {
        let ended = tokio::select! {
            () = stop.cancelled() => None,
            error = self.registrations.ended() => Some(error),
            error = self.calls.ended() => Some(error),
        };
        let stopped = self.stop().await;
        match ended {
            Some(error) => Err(error),
            None => Ok(stopped),
        }
    }

    async fn stop(self) -> Stopped {
        let deadline = Instant::now() + self.drain;
        let mut registrations = self.registrations.close().await;
        registrations.unlink();
        self.streams.cancel();
        let mut calls = self.calls.close().await;
        let work = self.dra.work();
        work.close();
        tokio::join!(registrations.finish(deadline), calls.finish(deadline));
        let unfinished_calls = match timeout_at(deadline, work.wait()).await {
            Ok(()) => 0,
            Err(_) => work.len(),
        };
        calls.unlink();
        if unfinished_calls > 0 {
            warn!(unfinished_calls, "stopped with calls under way; kubelet will ask again");
        }
        Stopped { unfinished_calls }
    }
}

type Serving = JoinHandle<Result<(), tonic::transport::Error>>;

/// One gRPC server on one socket.
struct Server {
    path: PathBuf,
    stop: CancellationToken,
    keeper: JoinHandle<SocketFile>,
    serving: Serving,
}

impl Server {
    #[expect(clippy::disallowed_methods, reason = "the handles are kept, watched and joined here")]
    fn start<S>(
        socket: Listener,
        service: S,
        check: Duration,
        lost: impl Fn() + Send + Sync + 'static,
    ) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send,
    {
        let path = socket.path().to_owned();
        let stop = CancellationToken::new();
        let (sender, connections) = mpsc::channel(WAITING_CONNECTIONS);
        let keeper = tokio::spawn(socket.keep(sender, check, stop.clone(), lost));
        // No age limit and no idle close: a connection lost for 30 s makes kubelet wipe our slices.
        let server = tonic::transport::Server::builder().serve_with_incoming_shutdown(
            service,
            ReceiverStream::new(connections),
            stop.clone().cancelled_owned(),
        );
        Self { path, stop, keeper, serving: tokio::spawn(server) }
    }

    /// Returns when the server ends without having been stopped.
    async fn ended(&mut self) -> Error {
        match (&mut self.serving).await {
            Ok(Err(source)) => Error::Server { path: self.path.clone(), source },
            Ok(Ok(())) | Err(_) => Error::Ended { path: self.path.clone() },
        }
    }

    /// Takes no more connections and asks the clients to leave. Calls under way go on.
    async fn close(self) -> Closing {
        self.stop.cancel();
        Closing { file: self.keeper.await.ok(), path: self.path, serving: self.serving }
    }
}

/// A server on its way down. Its file is there until it is unlinked.
struct Closing {
    path: PathBuf,
    file: Option<SocketFile>,
    serving: Serving,
}

impl Closing {
    fn unlink(&mut self) {
        if let Some(file) = self.file.take() {
            file.unlink();
        }
    }

    /// Waits until the last call is answered, or the deadline.
    async fn finish(&mut self, deadline: Instant) {
        // A server that ended by itself has been waited for already.
        if self.serving.is_finished() {
            return;
        }
        if timeout_at(deadline, &mut self.serving).await.is_err() {
            warn!(path = %self.path.display(), "connections were still open when the time to stop was up");
            self.serving.abort();
        }
    }
}

/// The services on the DRA socket, by the first part of a call's path.
#[derive(Clone)]
struct Services {
    dra: DraV1<Dra>,
    dra_v1beta1: DraV1beta1<Dra>,
    health: HealthV1<HealthStream>,
    health_v1alpha1: HealthV1alpha1<HealthStream>,
}

impl Services {
    fn new(dra: Dra, health: HealthStream) -> Self {
        Self {
            dra: DraV1::new(dra.clone()),
            dra_v1beta1: DraV1beta1::new(dra),
            health: HealthV1::new(health.clone()),
            health_v1alpha1: HealthV1alpha1::new(health),
        }
    }
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match request.uri().path().split('/').nth(1) {
            Some(v1beta1::SERVICE_NAME) => self.dra_v1beta1.call(request),
            Some(health_v1::SERVICE_NAME) => self.health.call(request),
            Some(health_v1alpha1::SERVICE_NAME) => self.health_v1alpha1.call(request),
            // Answers UNIMPLEMENTED to what is not its own.
            _ => self.dra.call(request),
        }
    }
}
