//! A claim, and what an allocation gives it on this node.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::names::{ClaimUid, DeviceName, PodUid, PoolName, RequestName};
use super::quantity::Quantity;

/// Which ResourceClaim. The UID tells apart claims that were re-created under one name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: ClaimUid,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.name, self.uid)
    }
}

/// A claim in the controller's tables, from when it is first known, be it only planned, until it is gone: its UID it has
/// once it exists. Never given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimKey(u64);

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no. {}", self.0)
    }
}

/// Gives out keys.
#[derive(Debug, Default)]
pub struct ClaimKeys(u64);

impl ClaimKeys {
    pub fn issue(&mut self) -> ClaimKey {
        self.0 += 1;
        ClaimKey(self.0)
    }
}

/// A pod that may use a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: PodUid,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.name, self.uid)
    }
}

/// An allocated claim, reduced to our driver's part: other drivers' results and configuration are
/// left out by the edge that reads the object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocatedClaim {
    pub claim: ClaimRef,
    /// Every request that the claim's spec has, `request` or `request/subrequest`, whoever serves it.
    pub requests: Vec<RequestName>,
    /// In the order of the allocation. Never empty for a claim that kubelet asks us to prepare.
    pub results: Vec<Allocated>,
    /// Class entries first, then the claim's: later ones win (KEP-3063).
    pub configs: Vec<Config>,
    /// The pods of `status.reservedFor`: nobody else is given the claim's devices.
    pub pods: Vec<PodRef>,
    /// Something other than a pod is in `status.reservedFor`: more pods than those may use the claim.
    pub reserved_for_others: bool,
}

/// One `status.allocation.devices.results[]` entry of our driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocated {
    pub request: RequestName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub access: Access,
}

/// What kind of access a result gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The whole device, for this claim alone; unless a `ShareGrant` says which part of it: API servers
    /// before 1.36 keep no share ids.
    Exclusive,
    /// A share of the device (KEP-5075): capacities by name.
    Share { id: String, consumed: Vec<(String, Quantity)> },
    /// `adminAccess`: to look at, beside whoever uses it. Counts for nothing, changes nothing.
    Admin,
}

impl Access {
    /// Of a share, where the API server keeps it.
    pub fn share_id(&self) -> Option<&str> {
        match self {
            Self::Share { id, .. } => Some(id),
            Self::Exclusive | Self::Admin => None,
        }
    }
}

/// One `status.allocation.devices.config[]` entry for our driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub source: ConfigSource,
    /// Empty: all requests.
    pub requests: Vec<String>,
    /// The opaque parameters, as they were written.
    pub parameters: serde_json::Value,
}

/// Who wrote a configuration. A grant is never taken from a claim: its author is the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConfigSource {
    FromClass,
    FromClaim,
}

impl Config {
    /// KEP-3063: an entry applies if it names no request, the request, or its parent.
    pub fn applies_to(&self, request: &RequestName) -> bool {
        self.requests.is_empty() || self.requests.iter().any(|selector| request.is_meant_by(selector))
    }
}

/// One device of a prepared claim, as kubelet is told about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedDevice {
    /// Base request names (no subrequest), sorted.
    pub requests: Vec<String>,
    pub pool: PoolName,
    pub device: DeviceName,
    /// Fully qualified CDI names, `vendor/class=name`.
    pub cdi_ids: Vec<String>,
    pub share_id: Option<String>,
}
