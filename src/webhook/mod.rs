//! The webhook server: HTTPS for the API server, and the certificates that it is trusted by.
//!
//! ```text
//! API server ─TLS→ server ─→ admission::mutate ─→ answer
//!                    ↑  └──→ validator, one at a time on a thread beside ─→ admission::validate ─→ answer
//!                    │          └ selector_budgets: what selectors may cost, of each namespace and caller
//!                    │ which certificate, at each handshake
//!     CertificateResolver ←─ renewer ─→ Secret with CA and certificate (shared by all replicas)
//!                                  └──→ caBundle of the webhook configurations, watched
//! ```
//! | certificates | who makes them | who tells the API server |
//! |---|---|---|
//! | [`Certificates::Own`] | the renewer, when a third of their lifetime is left | the renewer |
//! | [`Certificates::Files`] | somebody else (cert-manager); read again when they change | somebody else |
//!
//! A new CA is trusted long before a certificate of it is served: it comes into the bundle when twice a
//! certificate's life is left of the old one, and signs from the next renewal on. So nothing restarts and no
//! request fails. All replicas serve; what two of them do at once is settled by the Secret's version.
//!
//! Every client that reaches the pod may connect, and the API server says who it is only where the cluster is set up so
//! ([`Callers`]). So nothing is read before memory for it is reserved, and nothing is kept that is not used.
//!
//! What is decided about objects is decided in [`crate::admission`].
//!
//! May import: model, admission, cluster, ops. May name: tokio, tokio_rustls, rustls, axum, hyper, hyper_util,
//! rcgen, x509_parser, pem, prometheus_client, futures, thiserror, tracing.

mod callers;
mod certificate;
mod certificate_renewer;
mod certificate_resolver;
pub mod config;
mod metrics;
mod run;
mod selector_budgets;
mod server;
mod validator;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

pub use callers::CallersError;
pub use certificate::{CertificateError, Lifetimes};
pub use config::{Callers, Certificates, Own, WebhookSettings, WebhookTiming};
pub use metrics::WebhookMetrics;
pub use run::{RunSettings, Webhook, WebhookContext, run, serve};

use crate::cluster::ConnectError;
use crate::ops::OpsError;

/// Why the webhook server did not start, or ended.
#[derive(Debug, Error)]
pub enum WebhookError {
    #[error("cannot serve webhooks on {address}; choose another with --webhook-address")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("the TLS library cannot be set up; this is a bug, please report it")]
    Tls(#[source] rustls::Error),
    #[error("the CAs of callers cannot be read from {}; correct --webhook-client-ca or what is mounted there", .path.display())]
    Callers { path: PathBuf, source: CallersError },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Ops(#[from] OpsError),
}
