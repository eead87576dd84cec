//! Identifiers. Each is a newtype, so that a claim UID can never be passed where a GPU UUID is due.
//! A name is for reading, never for parsing: what a name seems to say stands in a typed field too. The exceptions are
//! pool and device of an allocation result, which the API has as texts alone ([`PoolName`], [`DeviceName::board`]).
//! A clone shares the text: the controller keeps a GPU's names in several places.
//!
//! What comes from outside becomes an identifier by `parse`, where it enters; `new` takes what we made ourselves, or what
//! the API server or a record of ours has vouched for.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The DRA driver name. Users' manifests, DeviceClasses and dcgm-exporter key on it.
pub const DRIVER: &str = "gpu.nvidia.com";
/// The DeviceClass whose claims our controller allocates.
pub const SHARED_CLASS: &str = "shared.gpu.nvidia.com";
/// On claims with which our controller takes a GPU for shares.
pub const HOLD_LABEL: &str = "tranche.dev/hold";
/// On slices that mirror the cluster's products, and the name of a label in their selectors of nodes, which no node fulfils.
pub const MIRROR_LABEL: &str = "tranche.dev/mirror";
/// On namespaces whose pods may have claims made for them. Who may label namespaces decides, not who may create pods.
pub const OPT_IN_LABEL: &str = "tranche.dev/kai-annotations";
pub const OPT_IN_VALUE: &str = "enabled";
/// On a pod: the claim that it wants, as JSON `{"share": {GpuShare parameters}, "count": n}`. The claim's name is that of the
/// pod's entry `gpu-share` in `spec.resourceClaims`. On what makes pods of a template: the same, of each pod.
pub const SHARE_ANNOTATION: &str = "tranche.dev/gpu-share";
/// On what makes pods of a template (a Job) whose share a queue is to count: a label by which the controller finds it, and
/// as an annotation the name of the ResourceClaimTemplate that is to be created for it.
pub const TEMPLATE_LABEL: &str = "tranche.dev/share-template";
pub const TEMPLATE_ANNOTATION: &str = "tranche.dev/share-template-name";
/// Kueue's: the queue of what carries the label, and on the pods of what was admitted the workload that they are of.
pub const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
pub const WORKLOAD_ANNOTATION: &str = "kueue.x-k8s.io/workload";
/// On a pod, a namespace or a DeviceClass, as an annotation: `"true"`, its pods may be moved so that others find room.
pub const MOVABLE: &str = "tranche.dev/movable";
/// On namespaces, as annotations: what the shares that our controller places there may come to together.
pub const MAX_SHARE_MEMORY: &str = "tranche.dev/max-share-memory";
pub const MAX_SHARE_GPUS: &str = "tranche.dev/max-share-gpus";

/// Bytes of an identifier: as many as a text of a DRA attribute may have. A UUID has 36, NVML's with its prefix 40.
const ID_BYTES_MAX: usize = 64;
/// Bytes of a DNS subdomain, and of each of its labels (RFC 1123).
const SUBDOMAIN_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// Why a text is no identifier of its kind.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidName {
    #[error("{text:?} is not a valid {kind}: it may have letters, digits and dashes, {ID_BYTES_MAX} at most")]
    Id { kind: &'static str, text: String },
    #[error("{0:?} is not a valid node name; see kubectl get nodes")]
    Node(String),
}

/// True for letters, digits and dashes, as UUIDs have them: such a text can be a part of a file name, a CDI name or an
/// environment variable.
fn is_id(text: &str) -> bool {
    (1..=ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Labels of lower-case letters, digits and dashes with dots between them, at most 253 bytes (RFC 1123), as the API server
/// takes names of objects: a label may be longer than one of DNS.
pub fn is_dns_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let inner = label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        inner && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= SUBDOMAIN_BYTES_MAX && text.split('.').all(is_label)
}

/// One label of DNS: at most 63 bytes (RFC 1123).
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= LABEL_BYTES_MAX && !text.contains('.') && is_dns_subdomain(text)
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn new(value: impl AsRef<str>) -> Self {
                Self(value.as_ref().into())
            }
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl From<&str> for $name {
            fn from(value: &str) -> Self {
                Self(value.into())
            }
        }
        impl From<String> for $name {
            fn from(value: String) -> Self {
                Self(value.into())
            }
        }
        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.as_ref().to_owned()
            }
        }
    };
}

macro_rules! id {
    ($name:ident, $kind:literal) => {
        impl $name {
            /// # Errors
            /// It has other characters than letters, digits and dashes, or more than 64.
            pub fn parse(text: &str) -> Result<Self, InvalidName> {
                match is_id(text) {
                    true => Ok(Self(text.into())),
                    false => Err(InvalidName::Id { kind: $kind, text: text.to_owned() }),
                }
            }

            /// As if it had been parsed: it can be a part of a file's name. One that was read as a part of something
            /// else need not be.
            pub fn is_well_formed(&self) -> bool {
                is_id(&self.0)
            }
        }
    };
}

name!(
    /// A Node object's name.
    NodeName
);
name!(
    /// A device's name within its pool: a DNS label such as `gpu-0`.
    DeviceName
);
name!(
    /// What NVML calls a GPU's or MIG device's UUID: `GPU-…` or `MIG-…`. The stable identity.
    DeviceUuid
);
name!(
    /// A ResourceClaim's UID.
    ClaimUid
);
name!(
    /// A pod's UID, as control groups and `status.reservedFor` have it.
    PodUid
);
name!(
    /// The kernel's boot id: another one means that everything but the disk is gone.
    BootId
);
id!(DeviceUuid, "device UUID");
id!(ClaimUid, "claim UID");
id!(PodUid, "pod UID");

impl NodeName {
    /// # Errors
    /// No object can have this name.
    pub fn parse(text: &str) -> Result<Self, InvalidName> {
        match is_dns_subdomain(text) {
            true => Ok(Self(text.into())),
            false => Err(InvalidName::Node(text.to_owned())),
        }
    }
}

/// Appended to a pool's name in results of shares where the API server keeps no share ids.
const SHARES: &str = "/shares";

/// A pool of our driver: which node's, and what it stands for. Slices and allocation results have it as one text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum PoolName {
    /// That of the node's ResourceSlices. It has the node's name, as NVIDIA's driver has it.
    Published(NodeName),
    /// The pool that shares name where the API server keeps no share ids (KEP-5075). The scheduler's books have a
    /// device once: named by several claims it would be free with the end of the first, and given away whole.
    Shares(NodeName),
}

impl PoolName {
    /// As a slice or a result names it.
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        match text.strip_suffix(SHARES) {
            Some(node) => Self::Shares(NodeName::new(node)),
            None => Self::Published(NodeName::new(text)),
        }
    }

    pub fn node(&self) -> &NodeName {
        match self {
            Self::Published(node) | Self::Shares(node) => node,
        }
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Published(node) => node.fmt(f),
            Self::Shares(node) => write!(f, "{node}{SHARES}"),
        }
    }
}

impl From<String> for PoolName {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl From<&str> for PoolName {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<PoolName> for String {
    fn from(pool: PoolName) -> Self {
        pool.to_string()
    }
}

impl DeviceName {
    /// `gpu-<minor>`, as NVIDIA's driver names a whole GPU.
    pub fn whole(minor: u32) -> Self {
        Self(format!("gpu-{minor}").into())
    }

    /// `gpu-<minor>-mig-<profile without dots>-<GPU instance profile id>-<placement start>`,
    /// as NVIDIA's driver names a MIG device. `+` (as in `1g.5gb+me`) is no DNS-label character
    /// and becomes `-`.
    ///
    /// Several compute instances of one GPU instance (`1c.2g.20gb`) have all of that in common: see
    /// [`Self::of_compute_instance`].
    pub fn mig(parent_minor: u32, profile: &str, profile_id: u32, start: u32) -> Self {
        let profile: String = profile
            .chars()
            .filter(|c| *c != '.')
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .collect();
        Self(format!("gpu-{parent_minor}-mig-{profile}-{profile_id}-{start}").into())
    }

    /// The name of a compute instance that is a part of the GPU instance of that name: with its id at the end. That of
    /// the first, 0, is the GPU instance's own.
    pub fn of_compute_instance(self, id: u32) -> Self {
        if id == 0 { self } else { Self(format!("{}-{id}", self.0).into()) }
    }

    /// Of the name of a whole GPU: its minor number.
    pub fn minor(&self) -> Option<u32> {
        let minor = self.0.strip_prefix("gpu-")?.parse().ok()?;
        (Self::whole(minor) == *self).then_some(minor)
    }

    /// The name of the board that the MIG device of this name is of. None: it is no MIG device's.
    pub fn board(&self) -> Option<Self> {
        let (board, _) = self.0.split_once("-mig-")?;
        let minor = board.strip_prefix("gpu-")?;
        let is_number = !minor.is_empty() && minor.bytes().all(|b| b.is_ascii_digit());
        is_number.then(|| Self(board.into()))
    }

    /// Of the name of a MIG device: NVML's id of its GPU instance's profile, and its first memory slice. None: it is no
    /// MIG device's.
    pub fn profile_and_start(&self) -> Option<(u32, u32)> {
        self.board()?;
        let number = |part: &str| part.parse::<u32>().ok().filter(|n| n.to_string() == part);
        // The profile, maybe with a suffix, is no number.
        let mut numbers: Vec<u32> = self.0.rsplit('-').map_while(number).take(4).collect();
        numbers.reverse();
        match numbers[..] {
            [id, start] | [id, start, _] => Some((id, start)),
            _ => None,
        }
    }
}

/// A request as an allocation result names it: `request`, or `request/subrequest` for a
/// `firstAvailable` request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestName(String);

impl RequestName {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }
    /// The full name, `request` or `request/subrequest`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
    /// The name without the subrequest: what kubelet wants in its answer.
    pub fn base(&self) -> &str {
        self.0.split_once('/').map_or(self.0.as_str(), |(base, _)| base)
    }
    /// True if `selector` (an entry of a config's `requests`) means this request: its full name,
    /// or the parent of a subrequest.
    pub fn is_meant_by(&self, selector: &str) -> bool {
        selector == self.as_str() || selector == self.base()
    }
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_for_the_parent_means_its_subrequests_too() {
        let request = RequestName::new("gpu/large");
        assert!(request.is_meant_by("gpu/large"));
        assert!(request.is_meant_by("gpu"));
        assert!(!request.is_meant_by("gpu/small"));
        assert!(!request.is_meant_by("gp"));
        assert_eq!(request.base(), "gpu");
    }

    #[test]
    fn ids_from_outside_cannot_be_paths_and_say_what_is_wrong() {
        assert_eq!(ClaimUid::parse("0a-1B").unwrap().as_str(), "0a-1B");
        for bad in ["", "../x", "a/b", "a b", "a\n", "\u{e9}", &"a".repeat(65)] {
            let error = ClaimUid::parse(bad).unwrap_err().to_string();
            assert!(error.contains("is not a valid claim UID"), "{error}");
            assert!(!PodUid::new(bad).is_well_formed() && DeviceUuid::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn node_names_are_dns_subdomains() {
        for good in ["a", "node-1", "ip-10-0-0-1.ec2.internal"] {
            assert_eq!(NodeName::parse(good), Ok(NodeName::new(good)));
        }
        for bad in ["", "Node", "-a", "a-", "a..b", "a_b", &"a".repeat(254)] {
            assert!(NodeName::parse(bad).is_err(), "{bad}");
        }
        assert!(is_dns_label(&"a".repeat(63)) && !is_dns_label(&"a".repeat(64)) && !is_dns_label("a.b"));
    }

    #[test]
    fn a_pool_is_a_nodes_and_keeps_its_text() {
        let node = NodeName::new("node-a");
        assert_eq!(PoolName::new("node-a"), PoolName::Published(node.clone()));
        assert_eq!(PoolName::new("node-a/shares"), PoolName::Shares(node));
        for text in ["", "node-a", "node-a/shares", "/shares", "a/shares/shares", "a/b"] {
            let pool: PoolName = serde_json::from_value(text.into()).unwrap();
            assert_eq!(
                (pool.to_string().as_str(), serde_json::to_value(&pool).unwrap()),
                (text, text.into())
            );
        }
    }

    #[test]
    fn mig_names_are_dns_labels() {
        assert_eq!(DeviceName::mig(3, "1g.10gb", 19, 4).as_str(), "gpu-3-mig-1g10gb-19-4");
        assert_eq!(DeviceName::mig(0, "1g.5gb+me", 20, 0).as_str(), "gpu-0-mig-1g5gb-me-20-0");
        let part = |id| DeviceName::mig(0, "1c.2g.20gb", 14, 2).of_compute_instance(id).to_string();
        assert_eq!([part(0), part(1)], ["gpu-0-mig-1c2g20gb-14-2", "gpu-0-mig-1c2g20gb-14-2-1"]);
        for (name, read) in [
            (DeviceName::mig(3, "1g.10gb", 19, 4), Some((19, 4))),
            (DeviceName::mig(0, "1g.5gb+me.all", 20, 0), Some((20, 0))),
            (DeviceName::mig(0, "1c.2g.20gb", 14, 2).of_compute_instance(1), Some((14, 2))),
            (DeviceName::whole(3), None),
            ("gpu-0-mig-1g10gb".into(), None),
            ("gpu-0-mig-1g10gb-1-2-3-4".into(), None),
            ("gpu-0-mig-1g10gb-x-4".into(), None),
            ("dpu-0-mig-1g10gb-19-4".into(), None),
        ] {
            assert_eq!(name.profile_and_start(), read, "{name}");
        }
    }
}
