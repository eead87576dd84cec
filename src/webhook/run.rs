//! Starts the webhook server: as a part of the controller, or alone.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::WebhookError;
use super::certificate_renewer::CertificateRenewer;
use super::certificate_resolver::CertificateResolver;
use super::config::{WebhookSettings, WebhookTiming};
use super::metrics::WebhookMetrics;
use super::server::{BoundWebhook, ReviewHandler};
use crate::admission::KnownClasses;
use crate::cluster::webhooks::WebhookApi;
use crate::cluster::{Endpoint, KubeCluster};
use crate::ops::addresses::Addresses;
use crate::ops::drain::Signals;
use crate::ops::logs::LogControl;
use crate::ops::metrics;
use crate::ops::readiness::{Readiness, Token};
use crate::ops::server::{Ops, StateDump};
use crate::ops::tasks::Tasks;

/// What is under way and the time in which the API server learns of the end; a pod has 30 s.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);

/// What the server needs of the process around it.
pub struct WebhookContext {
    pub api: WebhookApi,
    pub metrics: WebhookMetrics,
    /// Dropped once there is a certificate that the API server trusts.
    pub ready: Token,
    pub stop: CancellationToken,
}

/// A webhook server that has its address and does not answer yet.
pub struct Webhook {
    bound: BoundWebhook,
    certificate_renewer: CertificateRenewer,
    timing: WebhookTiming,
    ready: Token,
    stop: CancellationToken,
}

impl Webhook {
    /// Takes the address; port 0 takes any free one. To be done by every replica, whoever leads.
    ///
    /// # Errors
    /// The address cannot be had, or the CAs of callers cannot be read. Nothing that happens later ends the server.
    pub async fn bind(settings: WebhookSettings, parts: WebhookContext) -> Result<Self, WebhookError> {
        let WebhookContext { api, metrics, ready, stop } = parts;
        let WebhookSettings { address, certificates, callers, timing } = settings;
        let certificate_resolver = CertificateResolver::default();
        let (classes, known) = watch::channel(Arc::new(KnownClasses::default()));
        let handler = ReviewHandler::new(known, metrics.clone());
        let bound = BoundWebhook::bind(address, certificate_resolver.clone(), callers, handler).await?;
        info!(address = %bound.address(), "webhooks are served");
        let certificate_renewer =
            CertificateRenewer { api, certificates, timing, certificate_resolver, classes, metrics };
        Ok(Self { bound, certificate_renewer, timing, ready, stop })
    }

    /// Where HTTPS is served.
    pub fn address(&self) -> SocketAddr {
        self.bound.address()
    }

    /// Serves until told to end.
    pub async fn serve(self) {
        let Self { bound, certificate_renewer, timing, ready, stop } = self;
        tokio::join!(certificate_renewer.run(ready, stop.clone()), bound.serve(timing, stop));
    }
}

/// Takes the address and serves until told to end.
///
/// # Errors
/// As [`Webhook::bind`].
pub async fn serve(settings: WebhookSettings, parts: WebhookContext) -> Result<(), WebhookError> {
    Webhook::bind(settings, parts).await?.serve().await;
    Ok(())
}

/// How to serve webhooks in a process of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunSettings {
    pub webhook: WebhookSettings,
    pub ops_address: Addresses,
    pub kubeconfig: Option<PathBuf>,
}

/// Serves webhooks and nothing else, until told to end.
///
/// # Errors
/// What kept it from starting.
pub async fn run(settings: RunSettings, logs: LogControl) -> Result<(), WebhookError> {
    info!(version = env!("CARGO_PKG_VERSION"), commit = env!("TRANCHE_COMMIT"), ?settings, "starting");
    let signals = Signals::catch()?;
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    let readiness = Readiness::default();
    let ready = readiness.wait_for("a certificate that the API server trusts");
    let mut registry = metrics::registry();
    let metrics = WebhookMetrics::register(&mut registry);
    let endpoint = settings.kubeconfig.map_or(Endpoint::InCluster, Endpoint::from);
    // No node is asked about.
    let cluster = KubeCluster::connect(&endpoint).await?;

    let mut dump = StateDump::default();
    let shown = metrics.clone();
    dump.add("webhook", move || json!({"certificate_not_after": shown.certificate_not_after.get()}));
    let ops = Ops { registry, dcgm: None, readiness, stop: stop.clone(), logs, state: dump };
    let ops = ops.bind(settings.ops_address).await?;
    tasks.spawn("ops server", ops.serve(stop.clone()));
    // Health answers while reviews are looked at.
    let thread = tasks.thread("webhook")?;
    let api = {
        let _entered = thread.enter();
        cluster.with_own_connections()?
    };
    let parts = WebhookContext { api: WebhookApi::of(&api), metrics, ready, stop };
    tasks.spawn_on(&thread, "webhook", serve(settings.webhook, parts));
    Ok(tasks.run(signals, DRAIN_LIMIT).await?)
}
