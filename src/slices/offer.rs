//! How boards are offered: in shares where that is possible, else whole; and what keeps pods off a device.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::gpu::{Gpu, MigMode, NodeGpus};
use crate::model::names::DeviceName;
use crate::model::quantity::Bytes;
use crate::model::share::Isolation;
use crate::sharing::{Shareable, SharingPolicy, shareable};

/// What is published beside the attributes of the GPUs.
#[derive(Debug, Clone, Copy)]
pub struct PublishOptions<'a> {
    pub offer: Offer<'a>,
    pub taints: &'a Taints,
    pub counters: Counters,
}

/// What the API server does with shared counters (KEP-4815).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counters {
    Kept,
    /// It drops them, or nothing has shown yet that it does not.
    NotKept,
}

/// Who places shares of the boards that can be and may be shared.
#[derive(Debug, Clone, Copy)]
pub enum Offer<'a> {
    /// The scheduler and our controller.
    Shares(&'a SharingPolicy),
    /// Our controller alone: the API server does not keep the fields that the scheduler needs (KEP-5075), so
    /// it gives boards whole.
    WholeOnly(&'a SharingPolicy),
}

impl Offer<'_> {
    /// What shares of the board may come to, or why it is only given whole.
    pub(super) fn of(&self, gpu: &Gpu) -> Result<Shareable, String> {
        let (Self::Shares(policy) | Self::WholeOnly(policy)) = self;
        let found = shareable(gpu, policy).map_err(|reason| reason.to_string())?;
        match i64::try_from(found.memory.0) {
            Ok(_) => Ok(found),
            Err(_) => Err("its memory is more than a quantity can hold".to_owned()),
        }
    }
}

/// How a board is offered, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Offered {
    Shares {
        /// For all shares together.
        memory: Bytes,
        /// Blocks of client slots, and client processes in each.
        slots: u32,
        processes_per_slot: u32,
        isolation: Isolation,
    },
    /// Whole by the scheduler, in shares by our controller.
    ControllerShares {
        memory: Bytes,
        slots: u32,
        processes_per_slot: u32,
        isolation: Isolation,
        /// Why not in shares by the scheduler.
        because: String,
    },
    Whole {
        /// Why not in shares.
        because: String,
    },
}

const NOT_KEPT: &str =
    "this API server keeps no shares (feature gate DRAConsumableCapacity, on from Kubernetes 1.36)";

/// How each board is offered. Boards in MIG mode are not: their MIG devices are.
pub fn offered(gpus: &NodeGpus, offer: Offer<'_>) -> BTreeMap<DeviceName, Offered> {
    let boards = gpus.gpus.iter().filter(|gpu| gpu.mig == MigMode::Off);
    let one = |gpu: &Gpu| match (offer.of(gpu), offer) {
        (Ok(Shareable { memory, slots, slots_per_share, isolation }), Offer::Shares(_)) => {
            Offered::Shares { memory, slots, processes_per_slot: slots_per_share, isolation }
        }
        (Ok(Shareable { memory, slots, slots_per_share, isolation }), Offer::WholeOnly(_)) => {
            let (because, processes_per_slot) = (NOT_KEPT.to_owned(), slots_per_share);
            Offered::ControllerShares { memory, slots, processes_per_slot, isolation, because }
        }
        (Err(because), _) => Offered::Whole { because },
    };
    boards.map(|gpu| (DeviceName::whole(gpu.minor), one(gpu))).collect()
}

/// Taints by device (KEP-5055), in the order in which they are published.
pub type Taints = BTreeMap<DeviceName, Vec<Taint>>;

/// Keeps pods off a device that do not tolerate it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// With a domain: a label's key.
    pub key: String,
    /// A label's value; may be empty.
    pub value: String,
    pub effect: Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// No new pod gets the device.
    NoSchedule,
    /// And pods that have it are evicted.
    NoExecute,
}

impl Effect {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::tests::node_gpus;
    use super::*;

    #[test]
    fn each_board_is_offered_in_shares_or_says_why_not() {
        let mut gpus = node_gpus(4);
        gpus.gpus[1].compute_capability = (6, 1);
        gpus.gpus[2].mig = MigMode::On(vec![]);
        let policy = SharingPolicy { exclusive: vec!["3".parse().unwrap()], ..SharingPolicy::default() };
        let offered = offered(&gpus, Offer::Shares(&policy));
        let words: Vec<String> = offered.iter().map(|(name, how)| format!("{name}: {how:?}")).collect();
        assert_eq!(words.len(), 3, "{words:?}");
        let shares = Offered::Shares {
            memory: Bytes::from_mib(81_920 - 600 - 512),
            slots: 16,
            processes_per_slot: 3,
            isolation: Isolation::Mps,
        };
        assert_eq!(offered[&DeviceName::whole(0)], shares);
        assert!(words[1].contains("6.1") && words[2].contains("--exclusive-gpus 3"), "{words:?}");
    }

    #[test]
    fn where_the_api_server_keeps_no_shares_only_the_controller_shares_and_every_board_says_so() {
        let policy = SharingPolicy { exclusive: vec!["1".parse().unwrap()], ..SharingPolicy::default() };
        let offered = offered(&node_gpus(2), Offer::WholeOnly(&policy));
        let Offered::ControllerShares { slots: 16, because, .. } = &offered[&DeviceName::whole(0)] else {
            panic!("{offered:?}");
        };
        assert!(because.contains("DRAConsumableCapacity"), "{because}");
        let never = format!("{:?}", offered[&DeviceName::whole(1)]);
        assert!(never.contains("--exclusive-gpus 1"), "{never}");
    }
}
