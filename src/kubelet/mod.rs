//! Edge to kubelet: plugin registration, the DRA service in both versions, the health stream; which containers use claims.
//! Speaks gRPC over Unix sockets and decides nothing; [`Claims`] does the work.
//!
//! * [`Sockets`]: where the two sockets lie, and which dead ones to clear away
//! * [`serve`]: puts everything up in the right order and takes it down again
//! * [`Registration`]: what kubelet last said about us
//! * [`PodResources`]: what we ask kubelet
//!
//! May import: model. May name: tonic, prost, http, tokio (and -stream, -util), futures, jiff, sha2, tracing.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use jiff::Timestamp;
use tokio::sync::watch;

use crate::model::claim::{ClaimRef, PreparedDevice};
use crate::model::names::{ClaimUid, DeviceName, PoolName};

mod dra;
mod health;
mod listen;
mod pod_resources;
mod registration;
mod serve;
mod sockets;

pub use dra::{MAX_CALLS, MAX_CLAIMS};
pub use health::MAX_MESSAGE;
pub use pod_resources::{ContainerClaim, PodResources, PodResourcesError};
pub use registration::{Registration, SUPPORTED_VERSIONS};
pub use serve::{PluginConfig, PluginTiming, ServedPlugin, Stopped, serve};
pub use sockets::{MAX_PATH, Sockets};

/// Kubelet's protocols, as generated from proto/. The older versions have services of their own
/// and share the newer ones' messages.
#[expect(clippy::too_many_lines, reason = "generated")]
pub mod pb {
    pub mod registration {
        tonic::include_proto!("pluginregistration");
    }
    pub mod dra {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }
    pub mod dra_v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
    pub mod health {
        tonic::include_proto!("v1");
    }
    pub mod health_v1alpha1 {
        tonic::include_proto!("v1alpha1");
    }
    pub mod pod_resources {
        include!(concat!(env!("OUT_DIR"), "/podresources/v1.rs"));
    }
}

/// What one claim's preparation came to: its devices, or words for the pod's event.
pub type Prepared = Result<Vec<PreparedDevice>, String>;

/// Answers by claim, in due time. `T` is what success gives.
pub type Answering<'a, T> = Pin<Box<dyn Future<Output = BTreeMap<ClaimUid, Result<T, String>>> + Send + 'a>>;

/// Who prepares claims. One answer per asked claim, always; errors stay per claim.
///
/// Calls overlap, and a call goes on after kubelet gave up on it: kubelet then asks again for the
/// same claims while the first call still runs. A call must not block its thread.
pub trait Claims: Send + Sync + 'static {
    /// Each claim is asked for once per call, in UID order. Preparing again answers the same.
    fn prepare(&self, claims: Vec<ClaimRef>) -> Answering<'_, Vec<PreparedDevice>>;

    /// A claim that is not known is unprepared.
    fn unprepare(&self, claims: Vec<ClaimRef>) -> Answering<'_, ()>;
}

/// One device's health, as kubelet is to show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    pub pool: PoolName,
    pub device: DeviceName,
    /// `Err` carries the reason.
    pub state: Result<(), String>,
}

/// Tells the time of day for a health message, which carries whole seconds since 1970.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Where the health stream gets its messages from. `devices` is always the complete set; when its
/// sender goes away the stream ends, and kubelet shows Unknown.
#[derive(Clone)]
pub struct Health {
    pub devices: watch::Receiver<Vec<DeviceHealth>>,
    pub clock: Clock,
}

/// What went otherwise than it should; each is also logged where it happens.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls refused for their size, or because [`MAX_CALLS`] were under way.
    pub refused_calls: AtomicU64,
    /// Calls answered with the deadline's error instead of a result.
    pub late_calls: AtomicU64,
    /// Claims that [`Claims`] gave no answer for.
    pub missing_answers: AtomicU64,
    /// Sockets put back after somebody deleted their file.
    pub restored_sockets: AtomicU64,
}

/// Why the sockets cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "kubelet's directory {0:?} cannot be used: it must be an absolute path in UTF-8, like kubelet's \
         --root-dir"
    )]
    KubeletDir(PathBuf),
    #[error(
        "pod UID {0:?} cannot be part of a file name: pass the pod's metadata.uid by the downward API, or \
         leave it out"
    )]
    PodUid(String),
    #[error(
        "no socket name fits below {dir:?}: a path may have {MAX_PATH} bytes; give kubelet a shorter --root-dir"
    )]
    PathTooLong { dir: PathBuf },
    #[error("cannot make the plugin's directory {dir:?}; is kubelet's directory mounted writable?")]
    Directory { dir: PathBuf, source: io::Error },
    #[error("cannot listen on {path:?}; is kubelet's directory mounted writable, under its own path?")]
    Bind { path: PathBuf, source: io::Error },
    #[error("the server on {path:?} stopped by itself")]
    Server { path: PathBuf, source: tonic::transport::Error },
    #[error("the server on {path:?} stopped by itself, without a reason")]
    Ended { path: PathBuf },
}
