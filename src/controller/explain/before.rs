//! What goes before a claim: places that are kept for others, and units whose turn comes first.

use std::time::Duration;

use jiff::Timestamp;

use super::ClaimPlace;
use crate::controller::core::Core;
use crate::controller::holds::HoldPhase;
use crate::controller::recorder::KEPT_FOR;
use crate::controller::view::{Claim, GpuRef};

/// So many claims that something is kept for are named.
const KEPT_MAX: usize = 5;

/// What is kept for other claims, and until when: it stands on them. Who may write a claim can write that, too.
pub(super) fn kept(core: &Core, own: &Claim, at: Timestamp) -> Vec<String> {
    let one = |claim: &Claim| {
        let text = claim.waiting.as_deref()?.strip_prefix(KEPT_FOR)?;
        let text = text.get(text.find("until ")?..)?.split(';').next()?.lines().next()?;
        let (until, _) = text.strip_prefix("until ")?.split_once(": ")?;
        let until: Timestamp = until.parse().ok()?;
        (until > at).then(|| format!("claim {}/{} {text}", claim.namespace(), claim.name()))
    };
    let waits = |claim: &&Claim| claim.waiting.is_some() && claim.allocation.is_none();
    let others = core.view.claims().filter(waits).filter(|claim| claim.key != own.key);
    others.filter_map(one).take(KEPT_MAX).collect()
}

pub(super) fn goes_first(before: usize) -> Option<String> {
    match before {
        0 => None,
        1 => Some("1 pod or gang gets its share first, by priority and age".to_owned()),
        more => Some(format!("{more} pods or gangs get their shares first, by priority and age")),
    }
}

/// What is still to happen before the claim gets a place that there is.
pub(super) fn holdups(core: &Core, place: &ClaimPlace, before: usize, at: Timestamp) -> Vec<String> {
    let mut holdups = Vec::new();
    if before > 0 {
        let pods =
            if before == 1 { "1 pod or gang gets its share" } else { "pods or gangs get their shares" };
        let count = if before == 1 { String::new() } else { format!("{before} ") };
        holdups.push(format!("{count}{pods} first, by priority and age"));
    }
    let settle = core.rules.holds.settle;
    let settles = format!(
        "settles for {} s, or {} s while the scheduler may be giving that GPU to somebody",
        core.rules.holds.settle_least().as_secs_f32(),
        settle.as_secs_f32()
    );
    for part in &place.devices {
        let gpu = &part.gpu;
        match core.holds.phase(gpu) {
            None => holdups.push(format!(
                "{gpu} is nobody's yet: the controller takes it first, by a claim of its own that {settles}"
            )),
            Some(HoldPhase::Settling { .. }) if is_younger(core, gpu, settle, at) => {
                holdups.push(format!("{gpu} was taken a moment ago: that {settles}"));
            }
            Some(_) => {}
        }
    }
    holdups
}

fn is_younger(core: &Core, gpu: &GpuRef, settle: Duration, at: Timestamp) -> bool {
    let hold = core.view.hold(gpu);
    let age = hold.and_then(|hold| hold.meta.created).map(|created| at.duration_since(created));
    age.is_none_or(|age| age.as_secs_f64() < settle.as_secs_f64())
}
