//! What is known of a claim beside its grant. It begins with nothing and takes in what others found.

use std::collections::BTreeMap;

use crate::model::claim::ClaimRef;
use crate::model::gpu::Health;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;

/// What the watchdog saw of one claim on one board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub claim: ClaimRef,
    pub gpu: DeviceUuid,
    pub usage: Usage,
    pub seen: Seen,
}

/// Memory on one board, of all processes of a claim together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub used: Bytes,
    pub granted: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Over the grant, and not for one sample only.
    Over,
    /// A process was ended for it, the usage being that before.
    Ended {
        /// As the host counts.
        pid: u32,
    },
    /// A process uses the board past the MPS server, where no limit holds it.
    Bypass { pid: u32 },
    /// Within the grant again.
    Within,
}

/// How one part of a board is. It concerns every claim on the board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ailment {
    pub gpu: DeviceUuid,
    pub part: Part,
    pub health: Health,
}

/// What can ail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The board itself.
    Board,
    /// The MPS daemon or server that its shares need.
    Mps,
    /// The /dev/shm that its shares have together.
    Shm,
}

/// How a claim takes more of a board than it was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trespass {
    Over(Usage),
    Bypass { pid: u32, usage: Usage },
}

/// See the module's text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    trespasses: BTreeMap<DeviceUuid, Trespass>,
    ill: BTreeMap<(DeviceUuid, Part), String>,
}

impl Standing {
    /// Takes in a finding. True if a condition changes by it.
    pub fn find(&mut self, finding: &Finding) -> bool {
        let usage = finding.usage;
        let trespass = match finding.seen {
            Seen::Within => return self.trespasses.remove(&finding.gpu).is_some(),
            Seen::Over | Seen::Ended { .. } => Trespass::Over(usage),
            Seen::Bypass { pid } => Trespass::Bypass { pid, usage },
        };
        let before = self.trespasses.insert(finding.gpu.clone(), trespass);
        before.is_none_or(|before| std::mem::discriminant(&before) != std::mem::discriminant(&trespass))
    }

    /// Takes in how a part of a board is. True if a condition changes by it.
    pub fn ail(&mut self, ailment: &Ailment) -> bool {
        let key = (ailment.gpu.clone(), ailment.part);
        match ailment.health.ill() {
            None => self.ill.remove(&key).is_some(),
            Some(reason) => self.ill.insert(key, reason.to_owned()).as_deref() != Some(reason),
        }
    }

    pub(super) fn trespass(&self, gpu: &DeviceUuid) -> Option<Trespass> {
        self.trespasses.get(gpu).copied()
    }

    /// What ails of a board or a MIG device, with the reason.
    pub(super) fn ill(&self, gpu: &DeviceUuid) -> impl Iterator<Item = (Part, &str)> {
        let of_board = move |entry: &(&(DeviceUuid, Part), &String)| entry.0.0 == *gpu;
        self.ill.iter().filter(of_board).map(|((_, part), reason)| (*part, reason.as_str()))
    }
}
