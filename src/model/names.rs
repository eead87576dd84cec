//! Identifiers. Each is a newtype, so that a claim UID can never be passed where a GPU UUID is due.
//! A name is for reading, never for parsing: what a name seems to say stands in a typed field too.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The DRA driver name. Users' manifests, DeviceClasses and dcgm-exporter key on it.
pub const DRIVER: &str = "gpu.nvidia.com";
/// The DeviceClass whose claims our controller allocates.
pub const SHARED_CLASS: &str = "shared.gpu.nvidia.com";
/// On claims with which our controller takes a GPU for shares.
pub const HOLD_LABEL: &str = "tranche.dev/hold";
/// On namespaces whose pods may have claims made for them. Who may label namespaces decides, not who may create pods.
pub const OPT_IN_LABEL: &str = "tranche.dev/kai-annotations";
pub const OPT_IN_VALUE: &str = "enabled";

/// True for one or more letters, digits and dashes, as UUIDs have them: such a text can be a part of a file name, a CDI
/// name or an environment variable.
pub fn is_plain_id(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            pub fn new(value: impl Into<String>) -> Self {
                Self(value.into())
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
                Self(value.to_owned())
            }
        }
    };
}

name!(
    /// A Node object's name.
    NodeName
);
name!(
    /// A ResourceSlice pool. Ours is the node's name, as NVIDIA's driver has it.
    PoolName
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

/// Appended to a pool's name in results of shares where the API server keeps no share ids.
const SHARES: &str = "/shares";

impl PoolName {
    /// The pool that shares name where the API server keeps no share ids (KEP-5075). The scheduler's books have a
    /// device once: named by several claims it would be free with the end of the first, and given away whole.
    pub fn of_shares(&self) -> Self {
        Self(format!("{}{SHARES}", self.0))
    }

    /// The pool that is published: itself, or the one whose shares it stands for.
    pub fn published(&self) -> Self {
        Self(self.0.strip_suffix(SHARES).unwrap_or(&self.0).to_owned())
    }
}

impl DeviceName {
    /// `gpu-<minor>`, as NVIDIA's driver names a whole GPU.
    pub fn whole(minor: u32) -> Self {
        Self(format!("gpu-{minor}"))
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
        Self(format!("gpu-{parent_minor}-mig-{profile}-{profile_id}-{start}"))
    }

    /// The name of a compute instance that is a part of the GPU instance of that name: with its id at the end. That of
    /// the first, 0, is the GPU instance's own.
    pub fn of_compute_instance(self, id: u32) -> Self {
        if id == 0 { self } else { Self(format!("{}-{id}", self.0)) }
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
    fn mig_names_are_dns_labels() {
        assert_eq!(DeviceName::mig(3, "1g.10gb", 19, 4).as_str(), "gpu-3-mig-1g10gb-19-4");
        assert_eq!(DeviceName::mig(0, "1g.5gb+me", 20, 0).as_str(), "gpu-0-mig-1g5gb-me-20-0");
        let part = |id| DeviceName::mig(0, "1c.2g.20gb", 14, 2).of_compute_instance(id).to_string();
        assert_eq!([part(0), part(1)], ["gpu-0-mig-1c2g20gb-14-2", "gpu-0-mig-1c2g20gb-14-2-1"]);
    }
}
