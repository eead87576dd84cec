//! What pods leave and come to, in the controller's own capacity.

use crate::allocate::moves;
use crate::allocate::{self, GpuGrant, Index, Nodes, Placement, PodAsk, Shape, Studied};
use crate::controller::capacity::Aside;
use crate::controller::core::Core;
use crate::controller::queue::UnitKey;
use crate::controller::steps::bounded::least;
use crate::controller::view::{Claim, GpuRef};
use crate::controller::{ask, multi_gpu};
use crate::model::claim::ClaimKey;
use crate::model::names::PodUid;

/// A pod that may move.
#[derive(Debug, Clone)]
pub struct Who {
    pub pod: PodUid,
    pub claims: Vec<ClaimKey>,
}

/// What claims had of GPUs.
type Had = Vec<(ClaimKey, Vec<(GpuRef, GpuGrant)>)>;

pub struct Ground<'a> {
    core: &'a mut Core,
    /// What waits, and its namespace.
    unit: (&'a str, &'a UnitKey),
    who: &'a [Who],
    /// Of those that are away, the last that left at the end.
    away: Vec<(usize, Had)>,
}

impl<'a> Ground<'a> {
    pub fn new(core: &'a mut Core, unit: (&'a str, &'a UnitKey), who: &'a [Who]) -> Self {
        Self { core, unit, who, away: Vec::new() }
    }
}

impl moves::Ground for Ground<'_> {
    fn index(&mut self) -> &mut Index {
        &mut self.core.capacity.index
    }

    fn ask(&mut self, mover: usize) -> Option<PodAsk> {
        self.core.asks_anew(self.who.get(mover)?)
    }

    fn leave(&mut self, mover: usize) {
        let Some(who) = self.who.get(mover) else { return };
        let had = self.core.capacity.grants_of_these(&who.claims);
        who.claims.iter().for_each(|claim| self.core.capacity.set_grants(*claim, Vec::new()));
        if let Some((node, room)) = self.core.pods.place(&who.pod).cloned() {
            self.core.capacity.give_room(&node, room);
        }
        self.away.push((mover, had));
    }

    fn come_back(&mut self, mover: usize) {
        let Some(at) = self.away.iter().position(|(away, _)| *away == mover) else { return };
        let (_, had) = self.away.remove(at);
        had.into_iter().for_each(|(claim, grants)| self.core.capacity.set_grants(claim, grants));
        let place = self.who.get(mover).and_then(|who| self.core.pods.place(&who.pod).cloned());
        if let Some((node, room)) = place {
            self.core.capacity.take_room(&node, room);
        }
    }

    fn places(&mut self, asks: &[PodAsk]) -> Option<Vec<Placement>> {
        let (capacity, policy) = (&mut self.core.capacity, self.core.rules.policy);
        match asks.iter().any(|ask| ask::is_several(&ask.shape)) {
            false => allocate::places(&mut capacity.index, asks, policy),
            true => multi_gpu::decide(capacity, asks, policy).ok().map(|decision| decision.placements),
        }
    }

    fn allows(&self, moves: &[(usize, Placement)], then: &[Placement]) -> bool {
        let moves = moves.iter().filter_map(|(at, to)| {
            let who = self.who.get(*at)?;
            Some((&who.pod, self.core.usage_of(&who.claims), to))
        });
        self.core.may_all_have(self.unit, then, moves)
    }

    fn take(&mut self, places: &[Placement], alone: bool) {
        self.core.capacity.set_aside(Aside { places: places.to_vec(), alone });
    }

    fn free(&mut self) {
        self.core.capacity.lift();
    }
}

impl Core {
    /// As the pod asks that is made in place of this one. None: that is not known.
    fn asks_anew(&mut self, who: &Who) -> Option<PodAsk> {
        let pod = self.view.pod(&who.pod)?;
        let demands = self.view.origin(&who.pod)?.demands.clone();
        let claims: Vec<&Claim> =
            who.claims.iter().map(|claim| self.view.claim(*claim)).collect::<Option<_>>()?;
        let had = self.usage_of(&who.claims);
        let may_have = |shape: &Shape| self.may_have(&pod.at.namespace, had, least(shape));
        // The best of its alternatives that its namespace may have has to fit: it may be content with less, and is not asked
        // to be.
        let ways = self.ways(&claims).ok()?;
        let mut shapes = ways.iter().map_while(|wants| ask::shape(wants, pod.room).ok());
        let shape = shapes.find(may_have)?;
        if self.capacity.index.study(&shape) != Studied::Done {
            return None;
        }
        let apart = self.kept_off_anew(&who.pod, &demands);
        Some(PodAsk {
            shape,
            nodes: Nodes::Except([self.barred_for(&demands)].into_iter().chain(apart).collect()),
        })
    }
}
