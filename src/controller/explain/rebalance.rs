//! Which pods would have to move so that what waits finds room, for people who ask: decided unit by unit in the
//! controller's order, each beside what those before it would get. Nothing is written.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::allocate::Placement;
use crate::allocate::moves::SEARCH_TICKS;
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::explain::{Listing, TURN, refuse_where_short};
use crate::controller::moves::Proposed;
use crate::controller::queue::{Turn, UnitKey};
use crate::controller::recorder::Reason;
use crate::controller::steps::bounded::of_places;
use crate::controller::steps::moving::{MoveSearch, MoverFilter};
use crate::model::claim::PodRef;
use crate::model::names::PodUid;

pub use crate::controller::steps::moving::{amount_of, spot};

/// Units that are searched for.
const UNITS_MAX: usize = 16;

/// A unit that waits, and what would help it.
#[derive(Debug, Clone, PartialEq)]
pub struct HelpedUnit {
    /// Of a gang: its name.
    pub gang: Option<String>,
    pub pods: Vec<PodRef>,
    /// Names of their claims, by pod.
    pub claims: Vec<Vec<String>>,
    pub help: Help,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Help {
    /// It fits as it is: these are the places that it would get.
    Fits,
    Moves(Proposed),
    /// No moves help, or it is not for room that it waits: why it is not placed.
    None(String),
    /// The search for moves cost more than it may.
    Spent(String),
    /// So many others come before it that it was not searched for.
    Later,
}

/// What waits, in order. The core was fed with everything at moment 0, and is of no use afterwards. `namespace`: only what
/// waits there is helped; the others come before and after it all the same.
pub fn rebalance(core: &mut Core, listing: &Listing, namespace: Option<&str>) -> Vec<HelpedUnit> {
    core.catch_up(Duration::ZERO, TURN);
    let pods: Vec<PodUid> = core.queue.pods().cloned().collect();
    // What kube-scheduler alone counts is known of the namespace that was listed.
    pods.iter().for_each(|pod| refuse_where_short(core, listing, pod));
    let (mut all, mut searched) = (Vec::new(), 0);
    for turn in core.queue.turns(TURN, |key| core.placed(key)) {
        let outcome = core.place(&turn, TURN);
        let is_meant = namespace.is_none_or(|meant| core.namespace(&turn) == Some(meant));
        let help = match outcome {
            Ok(true) => Help::Fits,
            Ok(false) => continue,
            Err(_) if !is_meant => continue,
            Err(refused) if matches!(refused.reason, Reason::Claim | Reason::Bound) => {
                Help::None(refused.words)
            }
            Err(_) if searched == UNITS_MAX => Help::Later,
            Err(refused) => {
                searched += 1;
                match core.propose(&turn, MoverFilter::Any, SEARCH_TICKS, TURN) {
                    MoveSearch::Found(found) => {
                        core.pretend(&found);
                        Help::Moves(found)
                    }
                    MoveSearch::Nothing => Help::None(refused.words),
                    MoveSearch::Spent => Help::Spent(refused.words),
                }
            }
        };
        if is_meant {
            all.push(core.waits(&turn, help));
        }
    }
    all
}

impl Core {
    fn waits(&self, turn: &Turn, help: Help) -> HelpedUnit {
        let pods: Vec<_> = turn.pods.iter().filter_map(|uid| self.view.pod(uid)).collect();
        let gang = match &turn.key {
            UnitKey::Gang { name, .. } => Some(name.clone()),
            UnitKey::Pod(_) => None,
        };
        let own = |name: &&String, namespace: &str| {
            self.view.claim_named(namespace, name).is_some_and(|claim| claim.is_shares())
        };
        let claims = pods.iter().map(|pod| {
            pod.requested.claims.iter().filter(|name| own(name, &pod.at.namespace)).cloned().collect()
        });
        let claims = claims.collect();
        HelpedUnit { gang, claims, pods: pods.into_iter().map(|pod| pod.at.clone()).collect(), help }
    }

    /// As if the moves had been made: those that come later are beside that.
    fn pretend(&mut self, found: &Proposed) {
        let moved: BTreeSet<&PodUid> = found.moves.iter().map(|one| &one.pod.uid).collect();
        for uid in moved {
            let Some(pod) = self.view.pod(uid) else { continue };
            let claims: Vec<_> =
                self.view.claims_of(pod).into_iter().flatten().map(|claim| claim.key).collect();
            claims.into_iter().for_each(|claim| self.capacity.set_grants(claim, Vec::new()));
            self.pods.ports.set(uid, None);
            if let Some((node, room)) = self.pods.set_place(uid, None).given {
                self.capacity.give_room(&node, room);
            }
        }
        for (uid, place) in &found.then {
            let Some(pod) = self.view.pod(uid) else { continue };
            let mut open = self.view.claims_of(pod).into_iter().flatten();
            let Some(claim) = open.find(|claim| claim.allocation.is_none()).map(|claim| claim.key) else {
                continue;
            };
            let usage = &mut self.capacity.usage;
            let sum = usage.of_claim(claim).plus(of_places([place]));
            usage.set(claim, Some(&pod.at.namespace), sum);
        }
        let places = found.then.iter().map(|(_, place)| (place.clone(), found.alone));
        let moved = found.moves.iter().map(|one| (one.to.clone(), one.alone));
        let all: Vec<(Placement, bool)> = places.chain(moved).collect();
        for (place, alone) in all {
            self.capacity.set_aside(Aside { places: vec![place], alone });
        }
    }
}
