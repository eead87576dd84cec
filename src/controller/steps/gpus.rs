//! GPUs that something has happened to: whether they are held, open to shares, or named by somebody else.

use crate::controller::Moment;
use crate::controller::core::Core;
use crate::controller::holds::Loss;
use crate::controller::view::{GpuRef, PublishedGpu, Use};
use crate::model::claim::ClaimKey;

impl Core {
    /// A young hold of the GPU is worth nothing, where the scheduler's books have a GPU once.
    pub(super) fn invalidate_hold(&mut self, gpu: &GpuRef, now: Moment) {
        if self.view.counts_once(gpu) && self.holds.spoil(gpu, now) {
            for key in self.tracker.units_on(gpu) {
                self.cancel(&key, now);
            }
        }
    }

    /// Looks again at the GPUs that something has happened to.
    pub(in crate::controller) fn reevaluate_gpus(&mut self, now: Moment) {
        for gpu in self.holds.gpus.take_changed() {
            self.reevaluate_gpu(&gpu, now);
        }
    }

    fn reevaluate_gpu(&mut self, gpu: &GpuRef, now: Moment) {
        let others = self.view.is_anothers(gpu);
        let shares: Vec<ClaimKey> = self
            .view
            .uses(gpu)
            .filter(|(_, how)| matches!(how, Use::Share(_)))
            .map(|(claim, _)| claim)
            .collect();
        match others && (self.holds.is_ours(gpu) || !shares.is_empty()) {
            true => self.contested(gpu, &shares, now),
            false => self.holds.gpus.settle(gpu),
        }
        if (!shares.is_empty() || self.capacity.is_granted(gpu)) && !others && self.holds.phase(gpu).is_none()
        {
            self.holds.want(gpu);
        }
        let known = self.view.gpu(gpu);
        let named = |list: &[String]| known.is_some_and(|known| is_named(list, gpu, known));
        // One that was taken under other rules gets no more shares, and goes back after its last.
        let forbidden = named(&self.rules.never_hold);
        let pinned = !forbidden && named(&self.rules.always_hold);
        self.holds.gpus.set_pinned(gpu, pinned);
        if pinned && !others && self.holds.phase(gpu).is_none() {
            self.holds.want(gpu);
        }
        let given_back = self.reserves.evictions.preempting.gives_back(gpu);
        let closed = others || known.is_none() || forbidden || given_back || !self.holds.is_open(gpu);
        self.capacity.set_closed(gpu, closed);
    }

    /// Somebody else names a GPU of ours. Without shares we go; shares that nobody uses yet are taken back.
    pub(in crate::controller) fn contested(&mut self, gpu: &GpuRef, shares: &[ClaimKey], now: Moment) {
        for key in self.tracker.units_on(gpu) {
            self.cancel(&key, now);
        }
        if shares.is_empty() {
            self.holds.gpus.settle(gpu);
            self.holds.lose(gpu, Loss::Race, now);
            return;
        }
        if self.holds.gpus.contest(gpu) {
            self.recorder.trouble(format!("{gpu} has shares of ours, and another claim names it"));
        }
        let is_unused = |claim: &ClaimKey| self.view.claim(*claim).is_some_and(|claim| !claim.is_reserved());
        shares.iter().copied().filter(is_unused).for_each(|claim| self.tracker.clear(claim, now));
    }
}

/// By the name of its node, its UUID or a part of its product's name.
fn is_named(list: &[String], gpu: &GpuRef, known: &PublishedGpu) -> bool {
    let known = &known.grantable;
    let product = known.product.to_lowercase();
    list.iter().any(|one| {
        *one == gpu.node.as_str() || *one == known.gpu.as_str() || product.contains(&one.to_lowercase())
    })
}
