//! Which of a claim's configurations applies to one device.
//!
//! KEP-3063: an entry applies if it names no request, the device's request, or the request's parent; class
//! entries come before the claim's, and of those that apply the last one of its kind counts, as a whole.
//! A `ShareGrant` is no setting but a decision: it must name its request and devices that the request was
//! given, and a device is granted once.

use thiserror::Error;

use super::{GpuShare, GrantedDevice, Params, ParamsError, ShareGrant, Sharing, check_new, decode};
use crate::model::claim::{Access, Allocated, AllocatedClaim, Config};
use crate::model::gpu::Device;
use crate::model::names::{DeviceName, RequestName};

/// What the configuration makes of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSettings {
    pub sharing: Option<Sharing>,
    /// How firmly a share must hold, and for how many processes. The amount is the allocation's.
    pub share: GpuShare,
    /// `share` comes from an entry that names the device's request; an entry that names none means all shares.
    pub share_is_named: bool,
    /// What our controller gave of the device; none: the scheduler decided.
    pub grant: Option<GrantedDevice>,
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
    #[error(
        "config[{index}] is a ShareGrant that names no request, so it belongs to no request; delete the pods \
         that use the claim, and new ones get it allocated again"
    )]
    GrantForNobody { index: usize },
    #[error(
        "config[{index}] grants a share of {device}, but its request was not given that device (it has {given}); \
         delete the pods that use the claim, and new ones get it allocated again"
    )]
    GrantElsewhere { index: usize, device: DeviceName, given: String },
    #[error(
        "request \"{request}\" was given {device}, but its ShareGrant, config[{index}], is not for that device; \
         delete the pods that use the claim, and new ones get it allocated again"
    )]
    NotGranted { index: usize, request: RequestName, device: DeviceName },
    #[error(
        "device {device} is in the allocation more than once although config[{index}] is a ShareGrant for it; \
         a share that the controller placed has its device once: delete the pods that use the claim, and new ones get it allocated again"
    )]
    GrantedTwice { index: usize, device: DeviceName },
}

/// A decoded entry.
struct Entry<'a> {
    index: usize,
    config: &'a Config,
    params: Params,
}

/// Settings of one of the claim's devices. Every entry is decoded, so that a bad one is never passed over
/// only because a later one counts.
pub fn resolve(
    claim: &AllocatedClaim,
    request: &RequestName,
    device: &Device<'_>,
) -> Result<DeviceSettings, ResolveError> {
    let entries = entries(claim)?;
    let grant = granted(claim, &entries, request, &device.name())?;
    let mut settings = DeviceSettings { grant, ..DeviceSettings::default() };
    for Entry { index, config, params } in entries {
        if !config.applies_to(request) {
            continue;
        }
        match (params, device) {
            (Params::Gpu(sharing), Device::Whole(_))
            | (Params::Mig(sharing), Device::Mig { .. } | Device::Place { .. } | Device::Parent(_)) => {
                settings.sharing = sharing;
            }
            (Params::Share(share), _) => {
                settings.share = share;
                settings.share_is_named = !config.requests.is_empty();
            }
            (Params::Grant(_), _) => {}
            // Written for all requests: means those of its kind.
            _ if config.requests.is_empty() => {}
            (params, device) => {
                let device = match device {
                    Device::Whole(_) => format!("the whole GPU {}", device.name()),
                    Device::Parent(_) => format!("the MIG device that is made of {}", device.name()),
                    Device::Mig { .. } | Device::Place { .. } => format!("the MIG device {}", device.name()),
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

/// What our controller granted of a result's device, for those who only tell of it.
pub fn grant_of(claim: &AllocatedClaim, result: &Allocated) -> Result<Option<GrantedDevice>, ResolveError> {
    granted(claim, &entries(claim)?, &result.request, &result.device)
}

/// Of a claim that has no device yet: what claims that have one may go on saying.
///
/// # Errors
/// An entry that cannot be read, or says what no new claim may say ([`check_new`]).
pub fn check_all_new(claim: &AllocatedClaim) -> Result<(), ResolveError> {
    entries(claim)?.into_iter().try_for_each(|Entry { index, params, .. }| {
        check_new(&params).map_err(|source| ResolveError::Params { index, source })
    })
}

fn entries(claim: &AllocatedClaim) -> Result<Vec<Entry<'_>>, ResolveError> {
    claim.configs.iter().enumerate().map(|(index, config)| entry(claim, index, config)).collect()
}

fn entry<'a>(claim: &AllocatedClaim, index: usize, config: &'a Config) -> Result<Entry<'a>, ResolveError> {
    check_requests(claim, index, config)?;
    let wrong = |source| ResolveError::Params { index, source };
    let params = decode(&config.parameters).map_err(wrong)?;
    params.check_source(config.source).map_err(wrong)?;
    Ok(Entry { index, config, params })
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

fn granted(
    claim: &AllocatedClaim,
    entries: &[Entry<'_>],
    request: &RequestName,
    device: &DeviceName,
) -> Result<Option<GrantedDevice>, ResolveError> {
    let grants: Vec<_> = entries.iter().filter_map(as_grant).collect();
    check_grants(claim, &grants)?;
    let mut found = None;
    for (entry, grant) in grants.into_iter().filter(|(entry, _)| entry.config.applies_to(request)) {
        match grant.of(device) {
            Some(granted) => found = Some(granted.clone()),
            None => {
                let (request, device) = (request.clone(), device.clone());
                return Err(ResolveError::NotGranted { index: entry.index, request, device });
            }
        }
    }
    Ok(found)
}

fn as_grant<'a>(entry: &'a Entry<'_>) -> Option<(&'a Entry<'a>, &'a ShareGrant)> {
    match &entry.params {
        Params::Grant(grant) => Some((entry, grant)),
        _ => None,
    }
}

/// Every granted device stands in one result, one of the entry's own request, and in one grant.
fn check_grants(claim: &AllocatedClaim, grants: &[(&Entry<'_>, &ShareGrant)]) -> Result<(), ResolveError> {
    // Administrative access holds nothing.
    let held: Vec<&Allocated> = claim.results.iter().filter(|one| one.access != Access::Admin).collect();
    let mut seen: Vec<&DeviceName> = Vec::new();
    for (entry, grant) in grants {
        let index = entry.index;
        if entry.config.requests.is_empty() {
            return Err(ResolveError::GrantForNobody { index });
        }
        let own = held.iter().filter(|result| entry.config.applies_to(&result.request));
        let own: Vec<&DeviceName> = own.map(|result| &result.device).collect();
        for device in grant.devices.iter().map(|granted| &granted.device) {
            if !own.contains(&device) {
                let given = if own.is_empty() { "none".to_owned() } else { listed(&own) };
                return Err(ResolveError::GrantElsewhere { index, device: device.clone(), given });
            }
            if seen.contains(&device) || held.iter().filter(|result| result.device == *device).count() > 1 {
                return Err(ResolveError::GrantedTwice { index, device: device.clone() });
            }
            seen.push(device);
        }
    }
    Ok(())
}

fn listed(devices: &[&DeviceName]) -> String {
    devices.iter().map(|device| device.as_str()).collect::<Vec<_>>().join(", ")
}
