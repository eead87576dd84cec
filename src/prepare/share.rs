//! What the allocation gives of a board, a share or all of it, and whether a share can stand beside what is there.

use std::collections::BTreeSet;

use super::{Refusal, Site, Target, carved, mps};
use crate::ledger::{HeldDevice, HoldMode, Intent, Placer, Step};
use crate::model::claim::{Access, AllocatedClaim};
use crate::model::gpu::{Device, Gpu};
use crate::model::names::DeviceName;
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::{DaemonScope, Extent, Grant, Isolation, MpsGroup};
use crate::params::{self, DeviceSettings, GrantedDevice};
use crate::sharing::{self, DefaultRequest, ShareRequest, Shareable, SharingPolicy};

/// What a result with a share id gives the claim, by the scheduler's numbers: a part of the board, or all of
/// it.
pub(super) fn mode(
    device: &Device<'_>,
    consumed: &[(String, Quantity)],
    settings: &DeviceSettings,
    site: Site<'_>,
) -> Result<HoldMode, Refusal> {
    let (name, board) = (device.name(), board(device, site)?);
    let wrong = |source| Refusal::Share { device: name.clone(), source };
    let (memory, compute, slots, isolation) = match sharing::share_request(consumed, &board).map_err(wrong)? {
        ShareRequest::Whole => return Ok(HoldMode::Whole),
        ShareRequest::Uncounted if site.sharing.default_request == DefaultRequest::Nothing => {
            (Bytes(0), None, 1, Isolation::None)
        }
        ShareRequest::Uncounted => return Err(Refusal::Uncounted { device: name }),
        ShareRequest::Share { memory, compute, slots } => (memory, compute, slots, board.isolation),
    };
    check_settings(&name, settings)?;
    Ok(HoldMode::Share(Grant { memory, compute, slots, processes: processes(settings), isolation }))
}

/// What our controller gave of the device: exactly those numbers, on that very board. If that board is no longer on the
/// node (it was replaced, or the node moved to another machine), the one that has its name now stands in for it:
/// allocations are counted by that name. Where the API server keeps the scheduler's form as well, both must say the same.
///
/// A board that was granted whole is held like one that the scheduler gives whole, whether the node shares it or not.
pub(super) fn granted(
    device: &Device<'_>,
    access: &Access,
    granted: &GrantedDevice,
    settings: &DeviceSettings,
    site: Site<'_>,
) -> Result<HoldMode, Refusal> {
    let name = device.name();
    check_board(device, granted, site)?;
    let GrantedDevice { memory, compute, slots, extent, .. } = *granted;
    let offered = match (extent, device) {
        (Extent::Whole, Device::Whole(_)) => granted.isolation,
        _ => board(device, site)?.isolation,
    };
    if granted.isolation > offered {
        return Err(Refusal::Promised { device: name, promised: granted.isolation, offered });
    }
    // Never lower than what was promised, and as high as the board can.
    let grant = Grant { memory, compute, slots, processes: processes(settings), isolation: offered };
    if let Access::Share { consumed, .. } = access {
        let wrong = |source| Refusal::Share { device: name.clone(), source };
        sharing::agree(consumed, &grant).map_err(wrong)?;
    }
    check_settings(&name, settings)?;
    Ok(match extent {
        Extent::Part => HoldMode::Share(grant),
        Extent::Whole => HoldMode::Whole,
        // See `carved`.
        Extent::Mig(_) => HoldMode::Mig,
    })
}

/// The controller knows boards by their UUIDs: names go from board to board.
pub(super) fn check_board(
    device: &Device<'_>,
    granted: &GrantedDevice,
    site: Site<'_>,
) -> Result<(), Refusal> {
    let is_elsewhere = || site.gpus.gpus.iter().any(|gpu| gpu.uuid == granted.gpu);
    if *device.uuid() != granted.gpu && is_elsewhere() {
        let (granted, found) = (granted.gpu.clone(), device.uuid().clone());
        return Err(Refusal::OtherBoard { device: device.name(), granted, found });
    }
    Ok(())
}

/// What may be granted of the board. While its shares have daemons as an earlier setting had them, the more generous of
/// both counts: what was allocated by that setting is not refused.
fn board(device: &Device<'_>, site: Site<'_>) -> Result<Shareable, Refusal> {
    let found = match device {
        Device::Whole(gpu) => {
            let scope = mps::scope_on(site.held, std::slice::from_ref(&gpu.uuid));
            let changes = scope.is_some_and(|scope| scope != site.sharing.daemon);
            let daemon = if changes { DaemonScope::Gpu } else { site.sharing.daemon };
            sharing::shareable(gpu, &SharingPolicy { daemon, ..site.sharing.clone() })
        }
        Device::Mig { .. } | Device::Place { .. } | Device::Parent(_) => Err(sharing::NotShareable::Mig),
    };
    found.map_err(|reason| Refusal::NotShareable { device: device.name(), reason })
}

fn processes(settings: &DeviceSettings) -> u32 {
    settings.share.max_processes.unwrap_or(1)
}

/// Settings that a share cannot have, or that contradict its allocation. What the controller grants is
/// what `GpuShare` asked for: there the amount is in its place.
fn check_settings(device: &DeviceName, settings: &DeviceSettings) -> Result<(), Refusal> {
    if settings.sharing.is_some() {
        return Err(Refusal::SharingOfAShare { device: device.clone() });
    }
    match settings.share.requested() {
        Some(field) if settings.grant.is_none() => {
            Err(Refusal::LimitOfScheduledShare { device: device.clone(), field })
        }
        _ => Ok(()),
    }
}

/// A `GpuShare` that limits a device which the claim has whole. An entry that names no request means the claim's
/// shares, if it has some. One that asks the controller for the whole device says so by its amount.
pub(super) fn check_whole(targets: &[Target<'_>]) -> Result<(), Refusal> {
    let is_share = |target: &Target<'_>| matches!(target.mode, HoldMode::Share(_));
    let has_shares = targets.iter().any(is_share);
    let whole = targets.iter().filter(|target| matches!(target.mode, HoldMode::Whole | HoldMode::Mig));
    let mut meant = whole.filter(|target| target.settings.share_is_named || !has_shares);
    let limit = |target: &Target<'_>| match target.placer() {
        Placer::Scheduler => target.settings.share.limit(),
        // What the amount and compute led to is a MIG device, which its hardware bounds.
        Placer::Controller if target.mode == HoldMode::Mig => None,
        Placer::Controller => target.settings.share.limit_beside_whole(),
    };
    match meant.find_map(|target| Some((target, limit(target)?))) {
        Some((target, field)) => Err(Refusal::LimitOfWhole { device: target.name.clone(), field }),
        None => Ok(()),
    }
}

/// A share that is to stand on a board.
pub(super) struct NewShare<'a> {
    pub gpu: &'a Gpu,
    pub grant: &'a Grant,
    pub placer: Placer,
    /// The claim's other shares of the board.
    pub before: &'a [Grant],
}

/// Checks a share against the other claims on its board: the sum of grants, one mechanism, and one placer.
pub(super) fn fits(claim: &AllocatedClaim, part: &NewShare<'_>, site: Site<'_>) -> Result<(), Refusal> {
    let NewShare { gpu, grant, placer, before } = part;
    let device = DeviceName::whole(gpu.minor);
    let board = board(&Device::Whole(gpu), site)?;
    let mut others = before.to_vec();
    for (holder, held, other) in grants_of_others(claim, gpu, site) {
        if held.placer != *placer {
            return Err(Refusal::OtherPlacer { device, holder: holder.claim.clone(), placer: held.placer });
        }
        if (other.isolation == Isolation::None) != (grant.isolation == Isolation::None) {
            return Err(Refusal::OtherMechanism { device, holder: holder.claim.clone() });
        }
        others.push(*other);
    }
    if grant.isolation == Isolation::None {
        return Ok(());
    }
    sharing::fits(grant, &others, &board).map_err(|source| Refusal::Share { device, source })
}

/// A board has one MPS daemon: that of another group stands in the way.
pub(super) fn check_group(claim: &AllocatedClaim, group: &MpsGroup, site: Site<'_>) -> Result<(), Refusal> {
    for holder in site.held.iter().filter(|holder| !holder.is_current_of(&claim.claim.uid)) {
        for step in &holder.steps {
            if let Step::Mps { group: other, .. } = step
                && group.excludes(other)
            {
                return Err(Refusal::OtherGroup {
                    group: group.clone(),
                    other: other.clone(),
                    holder: holder.claim.clone(),
                });
            }
        }
    }
    Ok(())
}

fn grants_of_others<'a>(
    claim: &'a AllocatedClaim,
    gpu: &'a Gpu,
    site: Site<'a>,
) -> impl Iterator<Item = (&'a Intent, &'a HeldDevice, &'a Grant)> {
    let others = site.held.iter().filter(|holder| !holder.is_current_of(&claim.claim.uid));
    others.flat_map(|holder| holder.devices.iter().map(move |held| (holder, held))).filter_map(
        move |(holder, held)| match &held.mode {
            HoldMode::Share(grant) if held.gpu == gpu.uuid => Some((holder, held, grant)),
            _ => None,
        },
    )
}

/// True if the record is that of the allocation as it is now, not of one that was cleared since: the same
/// devices and share ids, and what the controller granted of them.
pub fn as_recorded(claim: &AllocatedClaim, intent: &Intent) -> bool {
    let recorded: BTreeSet<_> =
        intent.devices.iter().map(|held| (&held.answer.device, held.answer.share_id.as_deref())).collect();
    let allocated: BTreeSet<_> =
        claim.results.iter().map(|result| (&result.device, result.access.share_id())).collect();
    recorded == allocated && intent.devices.iter().all(|held| as_granted(claim, intent, held))
}

fn as_granted(claim: &AllocatedClaim, intent: &Intent, held: &HeldDevice) -> bool {
    let mut results = claim.results.iter().filter(|result| result.access != Access::Admin);
    let result = results.find(|result| result.device == held.answer.device);
    let Ok(granted) = result.map_or(Ok(None), |result| params::grant_of(claim, result)) else { return false };
    match (granted, held.placer, held.mode) {
        (None, Placer::Scheduler, _) => true,
        (Some(granted), Placer::Controller, HoldMode::Whole) => {
            granted.gpu == held.gpu && granted.extent == Extent::Whole
        }
        (Some(granted), Placer::Controller, HoldMode::Mig) => match granted.extent {
            Extent::Mig(place) => granted.gpu == held.gpu && carved::is_at(intent, held, place),
            Extent::Part | Extent::Whole => false,
        },
        (Some(granted), Placer::Controller, HoldMode::Share(grant)) => {
            granted.gpu == held.gpu
                && granted.extent == Extent::Part
                && (granted.memory, granted.compute, granted.slots)
                    == (grant.memory, grant.compute, grant.slots)
        }
        _ => false,
    }
}
