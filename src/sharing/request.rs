//! What an allocation requests of a GPU, and whether the request fits beside the others.

use thiserror::Error;

use super::{COMPUTE, MEMORY, SHARES, Shareable};
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::{Grant, NoPercent, Percent};

/// The allocator's numbers for one result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareRequest {
    /// All of the memory and no cap: the whole board.
    Whole,
    Share {
        memory: Bytes,
        compute: Option<Percent>,
        slots: u32,
    },
    /// No memory is counted ([`super::DefaultRequest::Nothing`]): nothing can be enforced.
    Uncounted,
}

/// Why a share is not prepared. The text is shown in the pod's events.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShareError {
    #[error(
        "the allocation does not say how much {0} the share has; delete the pods that use the claim, and new ones get it allocated again"
    )]
    Missing(&'static str),
    #[error("the allocation gives the share {quantity} of {name}, which is not a whole number of {unit}")]
    Number { name: &'static str, quantity: String, unit: &'static str },
    #[error(
        "the allocation gives the share less than 1 MiB of memory, which no limit can express; ask for more"
    )]
    TooLittle,
    #[error(
        "the allocation counts {counted} {unit} of {name}, but the controller's ShareGrant says {granted}: one \
         of the two was changed; delete the pods that use the claim, and new ones get it allocated again"
    )]
    Disagree { name: &'static str, unit: &'static str, counted: u64, granted: u64 },
    #[error("the allocation's share of compute cannot be set: {0}")]
    Compute(#[from] NoPercent),
    #[error(
        "the share of {wanted} MiB does not fit: {granted} of {grantable} MiB are granted to {others} other \
         claims, which go on undisturbed. If one of them is just ending, kubelet's next attempt succeeds; \
         otherwise the board was allocated twice, and one of the claims must be deleted"
    )]
    Memory { wanted: u64, granted: u64, grantable: u64, others: usize },
    #[error(
        "the share of {wanted} blocks of client slots does not fit: {granted} of {all} are granted to {others} \
         other claims. If one of them is just ending, kubelet's next attempt succeeds; otherwise delete one"
    )]
    Slots { wanted: u32, granted: u32, all: u32, others: usize },
    #[error(
        "the share of {wanted} % of compute does not fit: {granted} % are granted to {others} other claims. \
         If one of them is just ending, kubelet's next attempt succeeds; otherwise delete one"
    )]
    ComputeSum { wanted: u32, granted: u32, others: usize },
    #[error(
        "maxProcesses is {wanted}, but the share has client slots for {slots}; \
         ask for more with capacity.requests.shares ({per_share} each)"
    )]
    Processes { wanted: u32, slots: u32, per_share: u32 },
    #[error("{memory} MiB divided by maxProcesses {processes} leaves less than 1 MiB for each")]
    TooManyProcesses { memory: u64, processes: u32 },
}

impl ShareError {
    /// True if what others have is in the way.
    pub fn is_for_want_of_room(&self) -> bool {
        matches!(self, Self::Memory { .. } | Self::Slots { .. } | Self::ComputeSum { .. })
    }
}

/// Reads `consumedCapacity`. Capacities of other names are none of ours.
///
/// Memory that is not in whole MiB is rounded down: a grant is never more than was counted.
pub fn share_request(consumed: &[(String, Quantity)], board: &Shareable) -> Result<ShareRequest, ShareError> {
    let memory = whole(consumed, MEMORY, "bytes")?.ok_or(ShareError::Missing(MEMORY))?;
    let compute = whole(consumed, COMPUTE, "percent")?.unwrap_or(0);
    let slots = whole(consumed, SHARES, "blocks")?.unwrap_or(1);
    let capped = !matches!(compute, 0 | 100);
    if memory == 0 {
        return Ok(ShareRequest::Uncounted);
    }
    if memory >= board.memory.0 && !capped {
        return Ok(ShareRequest::Whole);
    }
    let memory = Bytes::from_mib(Bytes(memory).mib_floor());
    if memory.0 == 0 {
        return Err(ShareError::TooLittle);
    }
    let compute = if capped { Some(Percent::try_from(compute)?) } else { None };
    Ok(ShareRequest::Share { memory, compute, slots: u32::try_from(slots).unwrap_or(u32::MAX) })
}

/// Checks that `consumedCapacity` counts exactly what was granted: the scheduler's books are made of it.
pub fn agree(consumed: &[(String, Quantity)], grant: &Grant) -> Result<(), ShareError> {
    let memory = whole(consumed, MEMORY, "bytes")?.ok_or(ShareError::Missing(MEMORY))?;
    let compute = whole(consumed, COMPUTE, "percent")?.unwrap_or(0);
    let slots = whole(consumed, SHARES, "blocks")?.unwrap_or(1);
    let percent = grant.compute.map_or(0, |percent| u64::from(percent.get()));
    for (name, unit, counted, granted) in [
        (MEMORY, "bytes", memory, grant.memory.0),
        (COMPUTE, "percent", compute, percent),
        (SHARES, "blocks", slots, u64::from(grant.slots)),
    ] {
        if counted != granted {
            return Err(ShareError::Disagree { name, unit, counted, granted });
        }
    }
    Ok(())
}

fn whole(
    consumed: &[(String, Quantity)],
    name: &'static str,
    unit: &'static str,
) -> Result<Option<u64>, ShareError> {
    let Some((_, quantity)) = consumed.iter().find(|(other, _)| other == name) else { return Ok(None) };
    let number = quantity.is_whole().then(|| quantity.units_ceil()).flatten();
    number.map(Some).ok_or_else(|| ShareError::Number { name, quantity: quantity.to_string(), unit })
}

/// Checks one more grant beside those of other claims on the board: sum of all ≤ what is grantable.
pub fn fits(wanted: &Grant, others: &[Grant], board: &Shareable) -> Result<(), ShareError> {
    let most = wanted.slots.saturating_mul(board.slots_per_share);
    if wanted.processes > most {
        let per_share = board.slots_per_share;
        return Err(ShareError::Processes { wanted: wanted.processes, slots: most, per_share });
    }
    if wanted.memory_per_process().0 == 0 {
        let memory = wanted.memory.mib_floor();
        return Err(ShareError::TooManyProcesses { memory, processes: wanted.processes });
    }
    let granted = others.iter().fold(0_u64, |sum, grant| sum.saturating_add(grant.memory.0));
    if granted.saturating_add(wanted.memory.0) > board.memory.0 {
        return Err(ShareError::Memory {
            wanted: wanted.memory.mib_ceil(),
            granted: Bytes(granted).mib_ceil(),
            grantable: board.memory.mib_floor(),
            others: others.len(),
        });
    }
    let granted = others.iter().fold(0_u32, |sum, grant| sum.saturating_add(grant.slots));
    if granted.saturating_add(wanted.slots) > board.slots {
        let (wanted, all, others) = (wanted.slots, board.slots, others.len());
        return Err(ShareError::Slots { wanted, granted, all, others });
    }
    let percent = |grant: &Grant| grant.compute.map_or(0, |percent| u32::from(percent.get()));
    let granted = others.iter().map(percent).fold(0, u32::saturating_add);
    if granted.saturating_add(percent(wanted)) > 100 {
        return Err(ShareError::ComputeSum { wanted: percent(wanted), granted, others: others.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::share::Isolation;

    const BOARD: Shareable =
        Shareable { memory: Bytes(80 << 30), slots: 16, slots_per_share: 3, isolation: Isolation::Mps };

    fn requested(consumed: &[(&str, &str)]) -> Result<ShareRequest, ShareError> {
        let consumed: Vec<_> =
            consumed.iter().map(|(name, text)| ((*name).to_owned(), text.parse().unwrap())).collect();
        share_request(&consumed, &BOARD)
    }

    fn grant(mib: u64, compute: u8, slots: u32, processes: u32) -> Grant {
        Grant {
            memory: Bytes::from_mib(mib),
            compute: Percent::try_from(compute).ok(),
            slots,
            processes,
            isolation: Isolation::Mps,
        }
    }

    #[test]
    fn all_of_the_memory_without_a_cap_is_the_whole_board() {
        let all = [("memory", "80Gi"), ("compute", "0"), ("shares", "1")];
        assert_eq!(requested(&all), Ok(ShareRequest::Whole));
        let capped = [("memory", "80Gi"), ("compute", "50"), ("shares", "1")];
        assert!(matches!(requested(&capped), Ok(ShareRequest::Share { compute: Some(_), .. })));
    }

    #[test]
    fn a_share_is_read_in_its_units() {
        let share = ShareRequest::Share {
            memory: Bytes::from_mib(2000),
            compute: Percent::try_from(25_u8).ok(),
            slots: 2,
        };
        assert_eq!(requested(&[("memory", "2000Mi"), ("compute", "25"), ("shares", "2")]), Ok(share));
        let odd = requested(&[("memory", "1048577")]);
        assert_eq!(odd, Ok(ShareRequest::Share { memory: Bytes::from_mib(1), compute: None, slots: 1 }));
        assert_eq!(requested(&[("memory", "0"), ("compute", "0")]), Ok(ShareRequest::Uncounted));
    }

    #[test]
    fn numbers_that_cannot_be_meant_are_refused() {
        assert_eq!(requested(&[("compute", "25")]), Err(ShareError::Missing(MEMORY)));
        assert!(matches!(
            requested(&[("memory", "1Gi"), ("compute", "500m")]),
            Err(ShareError::Number { .. })
        ));
        assert!(matches!(requested(&[("memory", "1Gi"), ("compute", "101")]), Err(ShareError::Compute(_))));
        assert_eq!(requested(&[("memory", "1000")]), Err(ShareError::TooLittle));
    }

    #[test]
    fn what_is_counted_is_what_was_granted() {
        let agreed = |numbers: [&str; 3]| {
            let names = [MEMORY, COMPUTE, SHARES].into_iter().zip(numbers);
            let consumed: Vec<_> = names.map(|(name, n)| (name.to_owned(), n.parse().unwrap())).collect();
            agree(&consumed, &grant(2000, 25, 2, 1)).map_err(|error| error.to_string())
        };
        assert_eq!(agreed(["2000Mi", "25", "2"]), Ok(()));
        for (numbers, word) in [
            (["2001Mi", "25", "2"], "bytes of memory"),
            (["2000Mi", "0", "2"], "0 percent of compute"),
            (["2000Mi", "25", "1"], "ShareGrant says 2"),
            (["2000Mi", "25500m", "2"], "not a whole number"),
        ] {
            let words = agreed(numbers).unwrap_err();
            assert!(words.contains(word), "{words}");
        }
        assert_eq!(agree(&[], &grant(1, 0, 1, 1)), Err(ShareError::Missing(MEMORY)));
    }

    #[test]
    fn the_sum_of_grants_never_exceeds_the_board() {
        let others = [grant(40 << 10, 50, 8, 1), grant(20 << 10, 25, 7, 1)];
        assert_eq!(fits(&grant(20 << 10, 25, 1, 1), &others, &BOARD), Ok(()));
        for (wanted, word) in [
            (grant((20 << 10) + 1, 0, 1, 1), "20481 MiB"),
            (grant(1, 26, 1, 1), "26 %"),
            (grant(1, 0, 2, 1), "15 of 16"),
            (grant(1024, 0, 1, 4), "maxProcesses is 4"),
            (grant(2, 0, 1, 3), "less than 1 MiB"),
        ] {
            let words = fits(&wanted, &others, &BOARD).unwrap_err().to_string();
            assert!(words.contains(word), "{words}");
        }
    }
}
