//! Edge to kubelet: plugin registration, the DRA service in both versions, the health stream.
//! Speaks gRPC over Unix sockets and decides nothing; [`Claims`] does the work.
//!
//! May import: model. May name: tonic, prost, tokio.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;

use crate::model::claim::{ClaimRef, PreparedDevice};
use crate::model::names::{ClaimUid, DeviceName, PoolName};

/// The four protocols, as generated from proto/.
pub mod pb {
    pub mod registration {
        include!(concat!(env!("OUT_DIR"), "/pluginregistration_v1.rs"));
    }
}

/// What one claim's preparation came to: its devices, or words for the pod's event.
pub type Prepared = Result<Vec<PreparedDevice>, String>;

/// Who prepares claims. One answer per asked claim, always; errors stay per claim.
pub trait Claims: Send + Sync + 'static {
    fn prepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Pin<Box<dyn Future<Output = BTreeMap<ClaimUid, Prepared>> + Send + '_>>;

    fn unprepare(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Pin<Box<dyn Future<Output = BTreeMap<ClaimUid, Result<(), String>>> + Send + '_>>;
}

/// One device's health, as kubelet is to show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    pub pool: PoolName,
    pub device: DeviceName,
    /// `Err` carries the reason.
    pub state: Result<(), String>,
}
