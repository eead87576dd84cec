//! First half: which devices of this node the allocation means, and whether they are free.
//!
//! The API server checks neither that an allocated device exists nor that nobody else has it
//! (facts of KEP-4381's status validation), so this is the last line of defence.

use std::collections::BTreeMap;

use super::Refusal;
use crate::ledger::{HoldMode, Intent};
use crate::model::claim::{Access, Allocated, AllocatedClaim};
use crate::model::gpu::{Device, Health, NodeGpus};
use crate::model::names::{DeviceName, NodeName, PoolName};
use crate::params::{DeviceSettings, resolve};

/// What the node is and has, at the moment of the decision.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    pub node: &'a NodeName,
    pub pool: &'a PoolName,
    pub gpus: &'a NodeGpus,
    /// Records of all claims that hold something on the boards concerned.
    pub held: &'a [Intent],
}

/// One device of the claim, found and free.
#[derive(Debug, Clone)]
pub struct Target<'a> {
    pub device: Device<'a>,
    pub name: DeviceName,
    pub mode: HoldMode,
    /// Base names of the requests that it serves, sorted, each once.
    pub requests: Vec<String>,
    pub settings: DeviceSettings,
}

impl Target<'_> {
    /// One claim, two results for one device: it is held if either holds it.
    fn merge(&mut self, other: Self) {
        self.requests.extend(other.requests);
        self.requests.sort();
        self.requests.dedup();
        if self.mode == HoldMode::Admin {
            self.mode = other.mode;
            self.settings = other.settings;
        }
    }
}

/// Finds and checks every result of the claim. Results for one device are merged into one target.
pub fn targets<'a>(claim: &AllocatedClaim, site: Site<'a>) -> Result<Vec<Target<'a>>, Refusal> {
    if claim.results.is_empty() {
        return Err(Refusal::NothingAllocated);
    }
    let mut targets: Vec<Target<'a>> = Vec::new();
    for result in &claim.results {
        let target = target(claim, result, site)?;
        match targets.iter_mut().find(|other| other.name == target.name) {
            Some(other) => other.merge(target),
            None => targets.push(target),
        }
    }
    Ok(targets)
}

fn target<'a>(claim: &AllocatedClaim, result: &Allocated, site: Site<'a>) -> Result<Target<'a>, Refusal> {
    let device = find(result, site)?;
    let name = result.device.clone();
    let mode = match &result.access {
        Access::Admin => HoldMode::Admin,
        Access::Share { .. } => return Err(Refusal::NotShareable { device: name }),
        Access::Exclusive => match device {
            Device::Whole(_) => HoldMode::Whole,
            Device::Mig { .. } => HoldMode::Mig,
        },
    };
    // Administrative access changes nothing and is given to broken devices too.
    if mode == HoldMode::Admin {
        let settings = DeviceSettings::default();
        return Ok(Target { device, name, mode, requests: base(result), settings });
    }
    if let Health::Unhealthy(reason) = &device.gpu().health {
        return Err(Refusal::Unhealthy { device: name, reason: reason.clone() });
    }
    if let Some(holder) = holder(claim, &device, mode, site) {
        return Err(Refusal::InUse { device: name, holder: holder.claim.clone() });
    }
    let settings = resolve(claim, &result.request, &device)?;
    Ok(Target { device, name, mode, requests: base(result), settings })
}

fn base(result: &Allocated) -> Vec<String> {
    vec![result.request.base().to_owned()]
}

fn find<'a>(result: &Allocated, site: Site<'a>) -> Result<Device<'a>, Refusal> {
    let (request, device) = (result.request.clone(), result.device.clone());
    if result.pool != *site.pool {
        let node = site.node.clone();
        return Err(Refusal::OtherPool { request, device, pool: result.pool.clone(), node });
    }
    site.gpus.device(&device).ok_or_else(|| {
        let present: BTreeMap<_, _> = site.gpus.devices();
        let present = match present.len() {
            0 => "none".to_owned(),
            _ => present.keys().map(DeviceName::as_str).collect::<Vec<_>>().join(", "),
        };
        Refusal::NoSuchDevice { request, device, present }
    })
}

/// Another claim that holds the device, the board it is a part of, or a part of it.
fn holder<'a>(
    claim: &AllocatedClaim,
    device: &Device<'_>,
    mode: HoldMode,
    site: Site<'a>,
) -> Option<&'a Intent> {
    site.held.iter().filter(|held| held.claim.uid != claim.claim.uid).find(|held| {
        held.devices.iter().any(|other| {
            let same_board = other.gpu == device.gpu().uuid;
            let whole = mode == HoldMode::Whole || other.mode == HoldMode::Whole;
            other.mode != HoldMode::Admin && same_board && (whole || other.uuid == *device.uuid())
        })
    })
}
