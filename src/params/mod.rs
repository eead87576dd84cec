//! Opaque claim parameters: decode strictly, then say which apply to which device.
//!
//! The kinds are those that users of NVIDIA's driver already write, `GpuConfig` and `MigDeviceConfig` of
//! `resource.nvidia.com/v1beta1`, and our own `GpuShare` of `tranche.dev/v1alpha1`, all with the same
//! strictness: an unknown field is an error. `ShareGrant` is what our controller writes into allocations.
//! [`decode`] turns one JSON object into [`Params`]; [`resolve`] picks what one device gets; [`asked()`] is how much a
//! request for a share asks for, wherever that stands.
//!
//! May import: model. May name: serde_json, serde_path_to_error.

mod asked;
mod decode;
mod gpu_share;
mod grant;
mod resolve;

pub use asked::{AskedError, MEMORY, ShareSource, THOUSANDTHS, asked, capacity_of};
pub use decode::{ParamsError, check_new, decode};
pub use gpu_share::{
    Amount, Fraction, GpuShare, MIG_OF_SCHEDULED_SHARE, limit_of_scheduled_share, limit_of_whole,
    requested_memory,
};
pub use grant::{GrantedDevice, ShareGrant};
pub use resolve::{DeviceSettings, ResolveError, check_all_new, grant_of, resolve};

use crate::model::claim::ConfigSource;
use crate::model::quantity::Bytes;

/// One decoded and validated parameters object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Params {
    /// `GpuConfig`: for whole GPUs.
    Gpu(Option<Sharing>),
    /// `MigDeviceConfig`: for MIG devices. Has no time-slice interval.
    Mig(Option<Sharing>),
    /// `GpuShare`: for parts of a GPU.
    Share(GpuShare),
    /// `ShareGrant`: what the controller gave. Only of use with [`Params::check_source`].
    Grant(ShareGrant),
}

impl Params {
    /// The object's `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Gpu(_) => "GpuConfig",
            Self::Mig(_) => "MigDeviceConfig",
            Self::Share(_) => "GpuShare",
            Self::Grant(_) => grant::KIND,
        }
    }

    /// Fails if an object of this kind cannot come from there: a claim's author grants himself nothing.
    pub fn check_source(&self, source: ConfigSource) -> Result<(), ParamsError> {
        match (self, source) {
            (Self::Grant(_), ConfigSource::FromClaim) => Err(ParamsError::new(
                "kind",
                "a ShareGrant is what the controller writes into an allocation, never a part of a claim; \
                 to ask for a share, write a GpuShare",
            )),
            _ => Ok(()),
        }
    }
}

/// How the containers of *one claim* share its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sharing {
    TimeSlicing(Interval),
    Mps(MpsSettings),
}

/// How long the GPU stays with one process before it turns to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Interval {
    #[default]
    Default,
    Short,
    Medium,
    Long,
}

impl Interval {
    /// The word in manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "Default",
            Self::Short => "Short",
            Self::Medium => "Medium",
            Self::Long => "Long",
        }
    }

    /// The value that `nvidia-smi compute-policy --set-timeslice` takes.
    pub fn level(self) -> u8 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }
}

/// Limits that the MPS daemon gives every client of the claim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MpsSettings {
    /// 1 to 100.
    pub active_thread_percentage: Option<u32>,
    pub pinned_memory_limit: Option<Bytes>,
    /// By GPU UUID, or by index in the order of the claim's sorted UUIDs.
    pub per_device_pinned_memory_limit: Vec<(String, Bytes)>,
    pub multi_user: bool,
}
