//! Which kinds of GPUs are sought by pods that can use no other: by their selectors, or because others are too small. The
//! policy `pack` leaves these GPUs to such pods as long as others will do.

use super::ask::{Shape, Want};
use super::choice::Choices;
use super::fit::needs;
use super::index::Nodes;

/// The highest rank.
const RANK_MAX: u64 = 15;
/// The rank of a class of which such pods would use all there is by the time that the cluster is full.
const ALL_OF_IT: u64 = 8;
/// Of what is sought less, nothing is left to anybody: there is enough for all.
const RANK_MIN: u64 = 2;
/// GPUs that are looked at, at most: of more than these a sample.
const GPUS_MAX: usize = 4096;

/// How much of each class of GPUs is sought.
#[derive(Debug, Default)]
pub(super) struct Sought {
    /// Grows with each change of a rank: scores that were made by other ranks are of no use.
    pub epoch: u64,
    /// By class.
    ranks: Vec<u8>,
}

impl Sought {
    /// From 0, nobody needs this class rather than others, to [`RANK_MAX`].
    #[inline]
    pub fn rank(&self, class: u32) -> u64 {
        self.ranks.get(class as usize).copied().map_or(0, u64::from)
    }

    /// `shapes`: with how many pods were seen of each.
    pub fn renew(&mut self, shapes: &[(Shape, u64)], nodes: &Nodes, choices: &Choices) {
        let ranks = ranks(shapes, nodes, choices);
        if ranks != self.ranks {
            self.ranks = ranks;
            self.epoch += 1;
        }
    }
}

/// What is asked of each class by pods that cannot use every class, against what all pods ask of all GPUs.
fn ranks(shapes: &[(Shape, u64)], nodes: &Nodes, choices: &Choices) -> Vec<u8> {
    let gpus = sample(nodes);
    let mut mib = vec![0_u64; nodes.classes.len()];
    for (class, _) in &gpus {
        mib[*class] = mib[*class].saturating_add(nodes.classes[*class].memory_mib);
    }
    let all = mib.iter().copied().fold(0, u64::saturating_add);
    // On which GPUs the pods will be is not known yet.
    let largest = nodes.classes.iter().map(|class| class.memory_mib).max().unwrap_or(0);
    let mut total = 0_u128;
    // MiB that are sought for each MiB of a class, in millionths.
    let mut sought = vec![0_u128; nodes.classes.len()];
    for (shape, count) in shapes {
        for want in &shape.wants {
            let each = want.part.mib(largest).min(largest);
            // What a node says of its memory may be any number.
            let asked = u128::from(each).saturating_mul(want.gpus.into()).saturating_mul((*count).into());
            total = total.saturating_add(asked);
            let usable = usable(want, &gpus, nodes, choices);
            let there = usable.iter().copied().fold(0, u64::saturating_add);
            if there == 0 || there == all {
                continue;
            }
            for ((sought, usable), mib) in sought.iter_mut().zip(&usable).zip(&mib) {
                let of_class = asked.saturating_mul((*usable).into()).saturating_mul(1_000_000);
                let part = of_class.checked_div(u128::from(there) * u128::from(*mib)).unwrap_or(0);
                *sought = sought.saturating_add(part);
            }
        }
    }
    let rank = |sought: u128| {
        let of_full = (sought * u128::from(all) * u128::from(ALL_OF_IT)).checked_div(total * 1_000_000);
        let rank = of_full.unwrap_or(0).min(u128::from(RANK_MAX)) as u64;
        if rank < RANK_MIN { 0 } else { rank as u8 }
    };
    sought.into_iter().map(rank).collect()
}

/// Class and number of the facts of GPUs, evenly chosen.
fn sample(nodes: &Nodes) -> Vec<(usize, u32)> {
    let gpus = || nodes.all.iter().flatten().flat_map(|node| &node.gpus);
    let step = gpus().count().div_ceil(GPUS_MAX).max(1);
    gpus().step_by(step).map(|gpu| (gpu.class as usize, gpu.facts)).collect()
}

/// MiB of the GPUs of each class that could serve the want if they were empty. What its selectors choose counts as far as
/// it is known.
fn usable(want: &Want, gpus: &[(usize, u32)], nodes: &Nodes, choices: &Choices) -> Vec<u64> {
    let fits: Vec<bool> = nodes.classes.iter().map(|class| needs(want, class).is_ok()).collect();
    let chosen = choices.known(&want.selectors, &nodes.facts);
    let mut usable = vec![0_u64; nodes.classes.len()];
    for (class, facts) in gpus {
        if fits[*class] && chosen.is_none_or(|chosen| chosen.has(*facts)) {
            usable[*class] = usable[*class].saturating_add(nodes.classes[*class].memory_mib);
        }
    }
    usable
}
