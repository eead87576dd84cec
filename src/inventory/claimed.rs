//! What claims have of boards that are, were or are to be carved for them, laid over a look: which instances are theirs,
//! which of them somebody has ended, and which boards keep their use until the last claim on them has gone.

use std::collections::BTreeSet;

use crate::model::claim::ClaimRef;
use crate::model::gpu::{Gpu, Health, MigDevice, MigMode, MigSwitch, MissingMig, OnDemand};
use crate::model::mig::MigPlace;
use crate::model::names::DeviceUuid;

/// Claims that are told by name; of others their number.
const NAMED: usize = 3;

/// What a claim has of a board, by the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    pub gpu: DeviceUuid,
    pub claim: ClaimRef,
    pub what: ClaimedPart,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimedPart {
    /// A MIG device that is made for it: at which place, and its UUID once it is made.
    Made { place: MigPlace, device: Option<DeviceUuid> },
    /// A MIG device that was there, on a board that was not carved for claims.
    Static,
    /// A share of the board.
    Share,
}

/// The ledger's word from before and after a look: what is in one of them only came or went meanwhile.
#[derive(Debug, Clone, Default)]
pub struct ClaimedAround {
    pub before: Vec<Claimed>,
    pub after: Vec<Claimed>,
    /// Boards whose MIG mode is on because we have switched it on, or are about to.
    pub switched: BTreeSet<DeviceUuid>,
}

/// Brings a board as NVML shows it to how it is used. `wanted`: the configuration has it carved for claims.
pub fn settle(gpu: &mut Gpu, claims: &ClaimedAround, wanted: bool) {
    let on =
        |all: &[Claimed]| -> Vec<Claimed> { all.iter().filter(|one| one.gpu == gpu.uuid).cloned().collect() };
    let (before, after) = (on(&claims.before), on(&claims.after));
    let all: Vec<&Claimed> = before.iter().chain(&after).collect();
    let made: Vec<&Claimed> =
        all.iter().copied().filter(|one| matches!(one.what, ClaimedPart::Made { .. })).collect();
    let fixed: Vec<&Claimed> = all.iter().copied().filter(|one| one.what == ClaimedPart::Static).collect();
    let shares: Vec<&Claimed> = all.iter().copied().filter(|one| one.what == ClaimedPart::Share).collect();
    let ours = claims.switched.contains(&gpu.uuid);
    if let MigMode::OnDemand(cut) = &mut gpu.mig
        && ours
        && cut.switch == MigSwitch::Fixed
    {
        cut.switch = MigSwitch::On;
    }
    let is_whole = |switch: MigSwitch| switch == MigSwitch::OffByOthers || (switch.is_ours() && !wanted);
    let changing = match &mut gpu.mig {
        // It is about to be switched off, and is whole.
        MigMode::On(_) if ours && !wanted && made.is_empty() => {
            gpu.mig = MigMode::Off;
            None
        }
        MigMode::OnDemand(cut) if made.is_empty() && is_whole(cut.switch) => {
            gpu.mig = MigMode::Off;
            None
        }
        // A scheduler takes the counters of an allocated device for free once that device is not published any more.
        MigMode::OnDemand(cut) if cut.switch == MigSwitch::OffByOthers => {
            note_missing(cut, &before, &after);
            Some(switched_off(&made))
        }
        MigMode::OnDemand(cut) if cut.switch == MigSwitch::Off && !shares.is_empty() => {
            gpu.mig = MigMode::Off;
            Some(shared(&shares))
        }
        MigMode::OnDemand(cut) if cut.switch == MigSwitch::Off => {
            // What is about to be made, or was ended while NVML was asked, was not there for another reason.
            let lost: Vec<&Claimed> =
                before.iter().filter(|one| is_made(one) && after.contains(one)).collect();
            note_missing(cut, &before, &after);
            (!lost.is_empty()).then(|| switched_off(&lost))
        }
        MigMode::OnDemand(cut) if !wanted && made.is_empty() => {
            gpu.mig = MigMode::On(std::mem::take(&mut cut.devices));
            None
        }
        MigMode::OnDemand(cut) if wanted && !fixed.is_empty() && made.is_empty() => {
            gpu.mig = MigMode::On(std::mem::take(&mut cut.devices));
            Some(cut_before(&fixed))
        }
        MigMode::OnDemand(cut) => {
            note_missing(cut, &before, &after);
            leave_others(cut, &made);
            (!wanted).then(|| not_named(&made))
        }
        MigMode::Off if !made.is_empty() => Some(switched_off(&made)),
        MigMode::Off | MigMode::On(_) => None,
    };
    if let Some(words) = changing
        && gpu.health == Health::Healthy
    {
        gpu.health = Health::Changing(words);
    }
}

fn cut_before(fixed: &[&Claimed]) -> String {
    format!(
        "--mig-on-demand names it now, but claims have MIG devices of before: {}; it is carved for claims once they have gone",
        named(fixed)
    )
}

fn not_named(made: &[&Claimed]) -> String {
    format!(
        "--mig-on-demand does not name it any more, but claims have MIG devices that were made for them: {}; its use changes \
         once they have gone",
        named(made)
    )
}

fn shared(shares: &[&Claimed]) -> String {
    format!(
        "--mig-on-demand and --mig-keep name it now, but claims have shares of before: {}; it is given whole or cut once \
         they have gone",
        named(shares)
    )
}

fn switched_off(made: &[&Claimed]) -> String {
    format!(
        "MIG was switched off while claims had MIG devices that were made for them: {}; those devices are gone. Delete the \
         pods that use these claims; then it is used as it is",
        named(made)
    )
}

fn is_made(one: &Claimed) -> bool {
    matches!(one.what, ClaimedPart::Made { device: Some(_), .. })
}

/// What was made for a claim before the look, and is the claim's after it, was there meanwhile unless somebody ended it.
fn note_missing(cut: &mut OnDemand, before: &[Claimed], after: &[Claimed]) {
    for one in before.iter().filter(|one| after.contains(one)) {
        let ClaimedPart::Made { place, device: Some(uuid) } = &one.what else { continue };
        let is_it = |mig: &MigDevice| mig.uuid == *uuid && MigPlace::of(mig) == *place;
        if !cut.devices.iter().any(is_it) {
            cut.missing.push(MissingMig { place: *place, uuid: uuid.clone() });
        }
    }
    cut.missing.sort();
    cut.missing.dedup();
}

/// What was made for claims is theirs: only other instances stand in the way of what may be made.
fn leave_others(cut: &mut OnDemand, made: &[&Claimed]) {
    let is_ours = |at: MigPlace| {
        made.iter().any(|one| matches!(&one.what, ClaimedPart::Made { place, .. } if *place == at))
    };
    cut.foreign.retain(|place| !is_ours(*place));
    cut.devices.retain(|mig| !is_ours(MigPlace::of(mig)));
}

fn named(claims: &[&Claimed]) -> String {
    let mut names: Vec<String> = claims.iter().map(|one| one.claim.to_string()).collect();
    names.sort();
    names.dedup();
    let more = names.len().saturating_sub(NAMED);
    names.truncate(NAMED);
    match more {
        0 => names.join(", "),
        _ => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
#[path = "claimed_tests.rs"]
mod tests;
