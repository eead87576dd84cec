//! A share of a board: what the allocation asks for, and whether it can stand beside what is there.

use super::{Refusal, Site};
use crate::ledger::{HoldMode, Intent, Step};
use crate::model::claim::AllocatedClaim;
use crate::model::gpu::{Device, Gpu};
use crate::model::names::DeviceName;
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::{Grant, Isolation, MpsGroup};
use crate::params::{Amount, DeviceSettings};
use crate::sharing::{self, Asked, Unasked};

/// What a result with a share id gives the claim: a part of the board, or all of it.
pub(super) fn mode(
    device: &Device<'_>,
    consumed: &[(String, Quantity)],
    settings: &DeviceSettings,
    site: Site<'_>,
) -> Result<HoldMode, Refusal> {
    let name = device.name();
    let Device::Whole(gpu) = device else {
        return Err(Refusal::NotShareable { device: name, reason: sharing::NotShareable::Mig });
    };
    let board = sharing::shareable(gpu, site.sharing)
        .map_err(|reason| Refusal::NotShareable { device: name.clone(), reason })?;
    let wrong = |source| Refusal::Share { device: name.clone(), source };
    let (memory, compute, slots, isolation) = match sharing::ask(consumed, &board).map_err(wrong)? {
        Asked::Whole => return Ok(HoldMode::Whole),
        Asked::Uncounted if site.sharing.unasked == Unasked::Nothing => (Bytes(0), None, 1, Isolation::None),
        Asked::Uncounted => return Err(Refusal::Uncounted { device: name }),
        Asked::Share { memory, compute, slots } => (memory, compute, slots, board.isolation),
    };
    check_settings(&name, settings)?;
    let processes = settings.share.max_processes.unwrap_or(1);
    Ok(HoldMode::Share(Grant { memory, compute, slots, processes, isolation }))
}

/// Settings that a share cannot have, or that contradict its allocation.
fn check_settings(device: &DeviceName, settings: &DeviceSettings) -> Result<(), Refusal> {
    if settings.sharing.is_some() {
        return Err(Refusal::SharingOfAShare { device: device.clone() });
    }
    match settings.share.amount {
        None => Ok(()),
        Some(amount) => Err(Refusal::AmountTwice {
            device: device.clone(),
            field: match amount {
                Amount::Memory(_) => "memory",
                Amount::Fraction(_) => "fraction",
            },
        }),
    }
}

/// Checks a share against the other claims on its board: the sum of grants, and one mechanism per board.
pub(super) fn fits(
    claim: &AllocatedClaim,
    gpu: &Gpu,
    grant: &Grant,
    before: &[Grant],
    site: Site<'_>,
) -> Result<(), Refusal> {
    let device = DeviceName::whole(gpu.minor);
    let board = sharing::shareable(gpu, site.sharing)
        .map_err(|reason| Refusal::NotShareable { device: device.clone(), reason })?;
    let mut others = before.to_vec();
    for (holder, other) in grants_of_others(claim, gpu, site) {
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
    for holder in site.held.iter().filter(|holder| holder.claim.uid != claim.claim.uid) {
        for step in &holder.steps {
            if let Step::Mps { group: other, .. } = step
                && other != group
                && other.devices().iter().any(|device| group.devices().contains(device))
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
) -> impl Iterator<Item = (&'a Intent, &'a Grant)> {
    let others = site.held.iter().filter(|holder| holder.claim.uid != claim.claim.uid);
    others.flat_map(|holder| holder.devices.iter().map(move |held| (holder, held))).filter_map(
        move |(holder, held)| match &held.mode {
            HoldMode::Share(grant) if held.gpu == gpu.uuid => Some((holder, grant)),
            _ => None,
        },
    )
}
