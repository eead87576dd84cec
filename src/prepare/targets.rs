//! First half: which devices of this node the allocation means, and whether they are free.
//!
//! The API server checks neither that an allocated device exists nor that nobody else has it
//! (facts of KEP-4381's status validation), so this is the last line of defence.

use std::collections::BTreeMap;

use super::{Refusal, carved, share};
use crate::ledger::{HoldMode, Intent, Placer};
use crate::model::claim::{Access, Allocated, AllocatedClaim};
use crate::model::gpu::{Device, Health, MigMode, NodeGpus};
use crate::model::names::{DeviceName, NodeName, PoolName};
use crate::model::share::{Extent, Isolation};
use crate::params::{self, DeviceSettings, GrantedDevice, resolve};
use crate::sharing::SharingPolicy;

/// What the node is and has, at the moment of the decision.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    pub node: &'a NodeName,
    pub pool: &'a PoolName,
    pub gpus: &'a NodeGpus,
    pub sharing: &'a SharingPolicy,
    /// Records of all claims that hold something on the boards concerned.
    pub held: &'a [Intent],
}

/// One device of the claim, found and free.
#[derive(Debug, Clone)]
pub struct Target<'a> {
    pub device: Device<'a>,
    pub name: DeviceName,
    /// As the result names it.
    pub pool: PoolName,
    pub mode: HoldMode,
    /// Of a result that shares the device (KEP-5075), whole or in part.
    pub share_id: Option<String>,
    /// Base names of the requests that it serves, sorted, each once.
    pub requests: Vec<String>,
    pub settings: DeviceSettings,
}

impl Target<'_> {
    pub fn placer(&self) -> Placer {
        placer(&self.settings)
    }

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

/// Finds and checks every result of the claim. Results for one device are merged into one target, save
/// shares: each is a part of its own.
pub fn targets<'a>(claim: &AllocatedClaim, site: Site<'a>) -> Result<Vec<Target<'a>>, Refusal> {
    if claim.results.is_empty() {
        return Err(Refusal::NothingAllocated);
    }
    let mut targets: Vec<Target<'a>> = Vec::new();
    for result in &claim.results {
        let target = target(claim, result, &targets, site)?;
        let same = |other: &&mut Target<'_>| other.name == target.name && other.share_id == target.share_id;
        match targets.iter_mut().find(same) {
            Some(other) => other.merge(target),
            None => targets.push(target),
        }
    }
    share::check_whole(&targets)?;
    Ok(targets)
}

fn target<'a>(
    claim: &AllocatedClaim,
    result: &Allocated,
    before: &[Target<'_>],
    site: Site<'a>,
) -> Result<Target<'a>, Refusal> {
    let mut device = as_asked(claim, result, find(result, site)?);
    let (name, pool) = (result.device.clone(), result.pool.clone());
    let requests = vec![result.request.base().to_owned()];
    // Administrative access changes nothing and is given to broken devices too.
    if result.access == Access::Admin {
        let (mode, settings) = (HoldMode::Admin, DeviceSettings::default());
        return Ok(Target { device, name, pool, mode, share_id: None, requests, settings });
    }
    if let Some(reason) = device.gpu().health.problem() {
        return Err(Refusal::Unhealthy { device: name, reason: reason.to_owned() });
    }
    if let Health::Changing(why) = &device.gpu().health
        && !has_part_of(claim, &device, site)
    {
        return Err(Refusal::Changing { device: name, why: why.clone() });
    }
    let settings = resolve(claim, &result.request, &device)?;
    // What a claim was prepared with it keeps: its pods run, and its container edits are made anew for them.
    if !site.held.iter().any(|holder| holder.is_current_of(&claim.claim.uid)) {
        params::check_all_new(claim)?;
    }
    if let Some(granted) = &settings.grant
        && let Extent::Mig(place) = granted.extent
    {
        device = carved::granted(&device, &result.access, granted, place, site)?;
    }
    let mode = match (&settings.grant, &result.access, device) {
        (Some(GrantedDevice { extent: Extent::Mig(_), .. }), _, _) => HoldMode::Mig,
        (Some(granted), access, _) => share::granted(&device, access, granted, &settings, site)?,
        (None, Access::Share { consumed, .. }, _) => share::mode(&device, consumed, &settings, site)?,
        (None, _, Device::Whole(_)) => HoldMode::Whole,
        (None, _, Device::Mig { .. } | Device::Place { .. }) => HoldMode::Mig,
        (None, _, Device::Parent(_)) => return Err(Refusal::NotGiven { device: name }),
    };
    let share_id = result.access.share_id().map(str::to_owned);
    check_isolation(&name, mode, &settings)?;
    if let Some(holder) = holder(claim, &device, mode, site) {
        return Err(Refusal::InUse { device: name, holder: holder.claim.clone() });
    }
    carved::check_placer(claim, &device, placer(&settings), site)?;
    if let HoldMode::Share(grant) = &mode {
        let own = before.iter().filter(|other| other.name == name).filter_map(|other| match other.mode {
            HoldMode::Share(grant) => Some(grant),
            _ => None,
        });
        let (before, placer) = (own.collect::<Vec<_>>(), placer(&settings));
        share::fits(claim, &share::NewShare { gpu: device.gpu(), grant, placer, before: &before }, site)?;
    }
    Ok(Target { device, name, pool, mode, share_id, requests, settings })
}

/// A board that is given whole or cut is one to be cut where our controller granted a MIG device of it.
fn as_asked<'a>(claim: &AllocatedClaim, result: &Allocated, device: Device<'a>) -> Device<'a> {
    match device {
        Device::Whole(gpu) if gpu.is_whole_or_cut() => match params::grant_of(claim, result) {
            Ok(Some(GrantedDevice { extent: Extent::Mig(_), .. })) => Device::Parent(gpu),
            _ => device,
        },
        _ => device,
    }
}

/// True if the claim has something of the board already: what it has it keeps.
fn has_part_of(claim: &AllocatedClaim, device: &Device<'_>, site: Site<'_>) -> bool {
    let mut own = site.held.iter().filter(|held| held.is_current_of(&claim.claim.uid));
    own.any(|held| held.devices.iter().any(|held| held.gpu == device.gpu().uuid))
}

fn placer(settings: &DeviceSettings) -> Placer {
    match settings.grant {
        Some(_) => Placer::Controller,
        None => Placer::Scheduler,
    }
}

/// Nobody shares a device that is held whole, so only parts can be too weak.
fn check_isolation(device: &DeviceName, mode: HoldMode, settings: &DeviceSettings) -> Result<(), Refusal> {
    let offered = match mode {
        HoldMode::Share(grant) => grant.isolation,
        HoldMode::Mig => Isolation::Mig,
        HoldMode::Whole | HoldMode::Admin => return Ok(()),
    };
    match settings.share.minimum_isolation {
        Some(demanded) if demanded > offered => {
            Err(Refusal::Isolation { device: device.clone(), demanded, offered })
        }
        _ => Ok(()),
    }
}

fn find<'a>(result: &Allocated, site: Site<'a>) -> Result<Device<'a>, Refusal> {
    let (request, device) = (result.request.clone(), result.device.clone());
    if result.pool.node() != site.pool.node() {
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

/// Another claim that holds the device, the board it is a part of, or a part of it. Shares do not stand
/// in each other's way here.
fn holder<'a>(
    claim: &AllocatedClaim,
    device: &Device<'_>,
    mode: HoldMode,
    site: Site<'a>,
) -> Option<&'a Intent> {
    let shared = |mode: HoldMode| matches!(mode, HoldMode::Share(_));
    site.held.iter().filter(|held| !held.is_current_of(&claim.claim.uid)).find(|held| {
        is_carved_over(held, device)
            || held.devices.iter().any(|other| {
                let same_board = other.gpu == device.gpu().uuid;
                let whole = mode == HoldMode::Whole || other.mode == HoldMode::Whole;
                let both_shared = shared(mode) && shared(other.mode);
                let taken = whole || (other.uuid == *device.uuid() && !both_shared);
                // A board that was cut into MIG devices, or put together again, under its shares.
                let cut = shared(mode) != shared(other.mode);
                other.mode != HoldMode::Admin && same_board && (taken || cut)
            })
    })
}

/// True if a MIG instance was made for the claim, or is about to be, where the device's own is or would be.
pub fn is_carved_over(held: &Intent, device: &Device<'_>) -> bool {
    let own = match device {
        Device::Place { place, .. } => place.place.placement,
        Device::Mig { parent, mig } if matches!(parent.mig, MigMode::OnDemand(_)) => mig.placement,
        Device::Whole(_) | Device::Parent(_) | Device::Mig { .. } => return false,
    };
    held.places().any(|(gpu, other)| *gpu == device.gpu().uuid && other.placement.overlaps(own))
}
