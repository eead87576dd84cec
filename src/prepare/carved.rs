//! MIG devices that our controller granted of a board that is carved for claims, and who may choose places on such a board.

use super::{Refusal, Site, Target, share};
use crate::ledger::{HeldDevice, HeldMig, Intent, MigAsked, Placer};
use crate::model::claim::{Access, AllocatedClaim};
use crate::model::gpu::{Device, Gpu, MigMode};
use crate::model::mig::MigPlace;
use crate::params::{Amount, GrantedDevice};

/// The MIG device of the board `found` that the grant is for: made, or yet to be made.
pub(super) fn granted<'a>(
    found: &Device<'a>,
    access: &Access,
    granted: &GrantedDevice,
    place: MigPlace,
    site: Site<'a>,
) -> Result<Device<'a>, Refusal> {
    let name = found.name();
    share::check_board(found, granted, site)?;
    let Device::Parent(board) = *found else { return Err(Refusal::NotCarved { device: name }) };
    // It would be counted twice: as a part of the board, and as a place on it.
    if let Access::Share { .. } = access {
        return Err(Refusal::CarvedShare { device: name });
    }
    let Some((device, memory)) = at(board, place) else {
        return Err(Refusal::NoPlacement { device: name, place, known: known(board, place.profile_id) });
    };
    match memory.mib_floor() < granted.memory.mib_floor() {
        true => Err(Refusal::Smaller { device: name, granted: granted.memory, found: memory }),
        false => Ok(device),
    }
}

/// What is, or may be, at that place of the board, and its memory.
fn at(board: &Gpu, place: MigPlace) -> Option<(Device<'_>, crate::model::quantity::Bytes)> {
    board.devices().into_iter().find_map(|device| match device {
        Device::Place { place: one, .. } if one.place == place => Some((device, one.capacity.memory)),
        Device::Mig { mig, .. } if MigPlace::of(mig) == place => Some((device, mig.capacity.memory)),
        _ => None,
    })
}

/// What the board has, for people: placements of the profile, or the profiles.
fn known(board: &Gpu, profile: u32) -> String {
    let MigMode::OnDemand(cut) = &board.mig else { return "none".to_owned() };
    let profiles = cut.profiles();
    let words: Vec<String> = match profiles.iter().find(|one| one.id == profile) {
        Some(one) => one.placements.iter().map(|at| format!("{} from {}", at.size, at.start)).collect(),
        None => profiles.iter().map(|one| format!("{} ({})", one.id, one.name)).collect(),
    };
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

/// Places on a board are chosen by the scheduler or by our controller, not by both: neither sees what the other has given.
pub(super) fn check_placer(
    claim: &AllocatedClaim,
    device: &Device<'_>,
    placer: Placer,
    site: Site<'_>,
) -> Result<(), Refusal> {
    let board = device.gpu();
    if !makes(device) {
        return Ok(());
    }
    let others = site.held.iter().filter(|holder| !holder.is_current_of(&claim.claim.uid));
    let made = others.filter(|holder| holder.places().any(|(gpu, _)| *gpu == board.uuid));
    let held = made.flat_map(|holder| holder.devices.iter().map(move |held| (holder, held)));
    let mut other = held.filter(|(_, held)| held.gpu == board.uuid && held.placer != placer);
    match other.next() {
        Some((holder, held)) => Err(Refusal::OtherPlacer {
            device: crate::model::names::DeviceName::whole(board.minor),
            holder: holder.claim.clone(),
            placer: held.placer,
        }),
        None => Ok(()),
    }
}

/// True if the device is made for a claim, or was.
fn makes(device: &Device<'_>) -> bool {
    match device {
        Device::Place { .. } => true,
        Device::Mig { parent, mig } => match &parent.mig {
            MigMode::OnDemand(cut) => cut.made.iter().any(|made| made.uuid == mig.uuid),
            MigMode::Off | MigMode::On(_) => false,
        },
        Device::Whole(_) | Device::Parent(_) => false,
    }
}

/// What is recorded of a MIG device of a board that is carved for claims.
pub(super) fn held(target: &Target<'_>) -> Option<HeldMig> {
    let (profile, place) = match target.device {
        Device::Place { place, .. } => (&place.profile, place.place),
        Device::Mig { parent, mig } if matches!(parent.mig, MigMode::OnDemand(_)) => {
            (&mig.profile, MigPlace::of(mig))
        }
        Device::Whole(_) | Device::Parent(_) | Device::Mig { .. } => return None,
    };
    let share = &target.settings.share;
    let asked = match target.placer() {
        Placer::Scheduler => MigAsked::default(),
        Placer::Controller => MigAsked {
            memory: share.amount.and_then(|amount| match amount {
                Amount::Memory(memory) => Some(memory),
                Amount::Fraction(_) => None,
            }),
            fraction: share.amount.and_then(|amount| match amount {
                Amount::Fraction(fraction) => Some(fraction.to_string()),
                Amount::Memory(_) => None,
            }),
            compute: share.compute,
        },
    };
    Some(HeldMig { profile: profile.clone(), place, asked })
}

/// True if the record has its MIG device of that board where the grant says.
pub(super) fn is_at(intent: &Intent, held: &HeldDevice, place: MigPlace) -> bool {
    let recorded = held.mig.as_ref().map(|mig| mig.place);
    recorded == Some(place) && intent.places().filter(|(gpu, _)| **gpu == held.gpu).all(|(_, at)| at == place)
}
