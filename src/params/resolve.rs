//! Which of a claim's configurations applies to one device.
//!
//! KEP-3063: an entry applies if it names no request, the device's request, or the request's parent; class
//! entries come before the claim's, and of those that apply the last one of its kind counts, as a whole.

use thiserror::Error;

use super::{GpuShare, Params, ParamsError, Sharing, decode};
use crate::model::claim::{AllocatedClaim, Config};
use crate::model::gpu::Device;
use crate::model::names::RequestName;

/// What the configuration makes of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSettings {
    pub sharing: Option<Sharing>,
    /// How firmly a share must hold, and for how many processes. The amount is the allocation's.
    pub share: GpuShare,
}

/// Why a claim's configuration cannot be used. The text is shown in the pod's events.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ResolveError {
    #[error("config[{index}] for driver gpu.nvidia.com")]
    Params { index: usize, source: ParamsError },
    #[error(
        "config[{index}] for driver gpu.nvidia.com names request {request:?}, which the claim does not have; \
         its requests are {known}"
    )]
    UnknownRequest { index: usize, request: String, known: String },
    #[error(
        "config[{index}] is a {kind}, but request \"{request}\" was given {device}; \
         use GpuConfig for whole GPUs and MigDeviceConfig for MIG devices"
    )]
    WrongKind { index: usize, kind: &'static str, request: RequestName, device: String },
}

/// Settings of one of the claim's devices. Every entry is decoded, so that a bad one is never passed over
/// only because a later one counts.
pub fn resolve(
    claim: &AllocatedClaim,
    request: &RequestName,
    device: &Device<'_>,
) -> Result<DeviceSettings, ResolveError> {
    let mut settings = DeviceSettings::default();
    for (index, config) in claim.configs.iter().enumerate() {
        check_requests(claim, index, config)?;
        let params = decode(&config.parameters).map_err(|source| ResolveError::Params { index, source })?;
        if !config.applies_to(request) {
            continue;
        }
        match (params, device) {
            (Params::Gpu(sharing), Device::Whole(_)) | (Params::Mig(sharing), Device::Mig { .. }) => {
                settings.sharing = sharing;
            }
            (Params::Share(share), _) => settings.share = share,
            // Written for all requests: means those of its kind.
            _ if config.requests.is_empty() => {}
            (params, device) => {
                let device = match device {
                    Device::Whole(_) => format!("the whole GPU {}", device.name()),
                    Device::Mig { .. } => format!("the MIG device {}", device.name()),
                };
                return Err(ResolveError::WrongKind {
                    index,
                    kind: params.kind(),
                    request: request.clone(),
                    device,
                });
            }
        }
    }
    Ok(settings)
}

fn check_requests(claim: &AllocatedClaim, index: usize, config: &Config) -> Result<(), ResolveError> {
    let unknown = config.requests.iter().find(|name| !claim.requests.iter().any(|r| r.is_meant_by(name)));
    match unknown {
        None => Ok(()),
        Some(request) => Err(ResolveError::UnknownRequest {
            index,
            request: request.clone(),
            known: claim.requests.iter().map(RequestName::as_str).collect::<Vec<_>>().join(", "),
        }),
    }
}
