//! Who holds a device, and in which words that is told.

use std::fmt;

use super::file_looks::Openers;
use crate::host::PodProcesses;
use crate::model::claim::PodRef;
use crate::model::names::PodUid;

/// Pods, and processes of each, that are named; of more the number is told.
pub(super) const NAMED: usize = 8;

/// A pod with processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its name is empty where only its control group is known.
    pub pod: PodRef,
    pub pids: Vec<u32>,
    pub hold: Hold,
}

impl Holder {
    /// Whose its processes are cannot be read.
    pub(super) fn hides(&self) -> bool {
        self.pod.uid.as_str() == PodProcesses::UNTOLD
    }
}

/// Why a pod's processes keep a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The pod had it by the claim, and they run.
    Runs,
    /// They have it open, without a claim on it.
    HasOpen,
}

/// Who holds a device. What a look has seen held is not free because the next one could not tell: that needs a look which
/// can, and sees nobody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holding {
    /// By the last look that could tell.
    pub holders: Vec<Holder>,
    /// Why no look could since then.
    pub untold: Option<String>,
    /// An earlier process saw that it is held, and no look of this one could tell.
    pub before: bool,
}

/// What a look at those has told who had devices open the last time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownOpeners {
    /// Who has one open still.
    pub open: Openers,
    /// Of whom that could not be told, and why; nobody, if it could of all.
    pub unseen: Holding,
}

impl KnownOpeners {
    pub(super) fn untold(holders: Vec<Holder>, problem: String) -> Self {
        let unseen = Holding { holders, untold: Some(problem), before: false };
        Self { unseen, ..Self::default() }
    }

    /// Of a pod that was not looked through all processes that may have one, whichever was found.
    pub(super) fn into_holding(self) -> Holding {
        let Self { mut open, unseen } = self;
        open.retain(|pod, _| !unseen.holders.iter().any(|one| one.pod.uid == *pod));
        let mut holders = unseen.holders;
        if !open.is_empty() {
            holders.extend(holders_of(open));
            holders.sort_by(|a, b| a.pod.uid.cmp(&b.pod.uid));
        }
        Holding { holders, ..unseen }
    }

    /// This one of them has a device open still, or may have, also where it hides its pod by now.
    pub(super) fn may_concern(&self, known: &Holder) -> bool {
        let is_it = |one: &Holder| {
            let hides = one.hides() || known.hides();
            one.pod.uid == known.pod.uid || (hides && one.pids.iter().any(|pid| known.pids.contains(pid)))
        };
        self.clone().into_holding().holders.iter().any(is_it)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&numbered(&self.pids))?;
        match (self.pod.name.as_str(), self.pod.uid.as_str()) {
            ("", PodProcesses::UNTOLD) => write!(f, " whose control group cannot be read")?,
            ("", uid) => write!(f, " of pod {uid}")?,
            _ => write!(f, " of pod {}", self.pod)?,
        }
        match self.hold {
            Hold::Runs => Ok(()),
            Hold::HasOpen => write!(f, ", which has it open without a claim on it"),
        }
    }
}

impl Holding {
    pub fn by(holders: Vec<Holder>) -> Self {
        Self { holders, ..Self::default() }
    }

    /// Nobody holds it.
    pub fn is_none(&self) -> bool {
        self.holders.is_empty() && self.untold.is_none()
    }
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(problem) = &self.untold else { return f.write_str(&listed(&self.holders)) };
        if !self.holders.is_empty() {
            return write!(
                f,
                "{}; this was seen before, and whether it is still so cannot be told: {problem}",
                listed(&self.holders)
            );
        }
        match self.before {
            true => write!(
                f,
                "processes that are not known: it was held when this driver was started again, and who holds it cannot be told: \
                 {problem}"
            ),
            false => f.write_str(problem),
        }
    }
}

/// In words, of many the first.
pub(super) fn listed(by: &[Holder]) -> String {
    let mut words: Vec<_> = by.iter().take(NAMED).map(Holder::to_string).collect();
    if by.len() > NAMED {
        words.push(format!("processes of {} more pods", by.len() - NAMED));
    }
    words.join("; ")
}

/// Processes by their numbers, of many the first.
fn numbered(pids: &[u32]) -> String {
    let named: Vec<_> = pids.iter().take(NAMED).map(u32::to_string).collect();
    let word = if pids.len() == 1 { "process" } else { "processes" };
    match pids.len().saturating_sub(NAMED) {
        0 => format!("{word} {}", named.join(", ")),
        more => format!("{word} {} and {more} more", named.join(", ")),
    }
}

/// Why pods without processes that are seen cannot be said to have ended.
pub(super) fn may_be_theirs(untold: &[u32]) -> String {
    format!(
        "whether the claim's pods have ended cannot be told, because the control group cannot be read (its name may be longer \
         than the kernel tells) of {}; delete the pod that has these, or end them",
        numbered(untold)
    )
}

/// Of pods of which nothing but the control group is known.
pub(super) fn holders_of(found: Openers) -> Vec<Holder> {
    found.into_iter().map(|(pod, pids)| has_open((pod, pids.into_keys().collect()))).collect()
}

/// Those who had a device open, but for these pods, which may.
pub(super) fn had_open(known: &[Holder], rightful: &[PodRef]) -> Vec<Holder> {
    let is_rightful = |pod: &PodRef| rightful.iter().any(|one| one.uid == pod.uid);
    known.iter().filter(|one| one.hold == Hold::HasOpen && !is_rightful(&one.pod)).cloned().collect()
}

pub(super) fn has_open((uid, pids): (PodUid, Vec<u32>)) -> Holder {
    let pod = PodRef { namespace: String::new(), name: String::new(), uid };
    Holder { pod, pids, hold: Hold::HasOpen }
}
