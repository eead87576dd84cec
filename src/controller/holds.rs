//! Whose GPU is it? A GPU is not used as soon as it is taken: the hold is written, it settles, the API is looked at
//! again; only then shares go there. A hold that has lost its race is withdrawn, one that nobody needs is given back.
//!
//! Looking is a write, too: a hold that has settled is marked, and once the watch of claims brings the mark it has
//! brought all that came before. A list would tell who is there, but not who has come and gone.
//!
//! A hold settles for 50 ms; if somebody may still be given its GPU (`steps::contenders`), for up to 2 s, and it is
//! looked at twice.
//!
//! ```text
//!           take          written            settled, look         nobody else
//! (nobody's) ──→ Writing ─────────→ Settling ───────────→ Looking ────────────→ Held
//!     ▲             │ failed        │  ▲    somebody may come │                    │
//!     │             │               │  └─────────────────────┤                    │
//!     │             │ somebody else │          somebody else │                    │ idle too long, or wanted whole
//!     └─────────────┴─── Releasing ←┴────────────────────────┴────────────────────┘
//! ```
//!
//! Where no share ids are kept (Kubernetes 1.34 and 1.35) kube-scheduler's books have a device once, however many
//! claims name it, and the end of any of them frees it there. So
//! - a hold is worth nothing if anybody else named its GPU between its writing and the look, even if they have ended;
//! - a hold that has lost its race stands by until whoever won has ended: withdrawn at once, it would free a GPU in
//!   the books that somebody has;
//! - it then goes in two steps: its allocation is cleared, and it is deleted once the watch has brought that and
//!   nobody else names the GPU. Somebody may have got it before the clearing, which took it out of the books under
//!   them: then the hold is allocated again, and stands by. A hold without allocation tells this to the next leader,
//!   too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cluster::allocation::ClaimVersion;
use crate::controller::Moment;
use crate::controller::gpus::NotedGpus;
use crate::controller::view::{GpuRef, Sought};
use crate::model::claim::ClaimRef;

#[derive(Debug, Clone, PartialEq)]
pub enum HoldPhase {
    /// The hold is being written.
    Writing,
    /// Written; whoever decided at the same time is still to become visible, which all have by `latest`.
    Settling { claim: ClaimRef, until: Moment, latest: Moment },
    /// The watch is to bring all that there was when it had settled. `again`: when to look again if somebody may
    /// still come; none: nobody can.
    Looking { claim: ClaimRef, again: Option<Moment> },
    /// Shares may go there.
    Held { claim: ClaimRef, idle: Option<Moment> },
    /// The hold is to go, and the GPU is not taken again before.
    Releasing { until: Moment, asked: Option<PendingStep> },
}

/// The last step asked for of a hold that is to go. `again`: it failed, and is asked for again then; another, for a
/// newer version of the hold, at once.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingStep {
    step: ReleaseStep,
    again: Option<Moment>,
}

impl HoldPhase {
    /// On its way to be held.
    fn is_young(&self) -> bool {
        matches!(self, Self::Writing | Self::Settling { .. } | Self::Looking { .. })
    }
}

/// Who else is there, for a hold that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    Nobody,
    /// Somebody may have been given the GPU, and it does not show yet.
    MayCome,
    Named,
}

/// The hold of a GPU, as the API has it.
#[derive(Debug, Clone, PartialEq)]
pub enum HoldStanding {
    No,
    /// It keeps the GPU in the scheduler's books for somebody else, or nobody knows just now.
    StandBy,
    Due(ReleaseStep),
}

/// The next step of a hold that is to go, from how it stands now.
#[derive(Debug, Clone, PartialEq)]
pub enum ReleaseStep {
    /// Take its allocation away.
    Clear(ClaimVersion),
    /// Allocate it again, to stand by: where the books have a GPU once, and no parts of it are given.
    Restore(ClaimVersion),
    Delete(ClaimVersion),
}

impl ReleaseStep {
    /// The hold, as it is to be when the step is done.
    pub fn at(&self) -> &ClaimVersion {
        match self {
            Self::Clear(at) | Self::Restore(at) | Self::Delete(at) => at,
        }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Act {
    Take(GpuRef),
    /// Mark this hold, once for all that have settled.
    Look(GpuRef),
    Release(GpuRef, ReleaseStep),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldPace {
    /// Between the writing of a hold and its first use, if somebody else may get its GPU meanwhile.
    pub settle: Duration,
    /// How long a hold without shares is kept.
    pub keep_warm: Duration,
    /// How long a GPU that was given back, or lost, is left to others.
    pub leave: Duration,
    /// GPUs that are held without being needed yet.
    pub ahead: usize,
}

/// What a hold settles in any case is this part of the most, 50 ms of 2 s: for pods that ask by their limits and that our
/// watch brings later than kube-scheduler's. It grows with the most, which is for control planes that are slow.
const SETTLE_LEAST_PART: u32 = 40;

impl HoldPace {
    /// Between the writing of a hold and the first look.
    pub fn settle_least(&self) -> Duration {
        self.settle / SETTLE_LEAST_PART
    }

    fn settling(&self, claim: &ClaimRef, now: Moment) -> HoldPhase {
        HoldPhase::Settling {
            claim: claim.clone(),
            until: now + self.settle_least(),
            latest: now + self.settle,
        }
    }
}

impl Default for HoldPace {
    fn default() -> Self {
        Self {
            settle: Duration::from_secs(2),
            keep_warm: Duration::from_secs(60),
            leave: Duration::from_secs(10),
            ahead: 0,
        }
    }
}

#[derive(Debug, Default)]
pub struct Holds {
    pub pace: HoldPace,
    phases: BTreeMap<GpuRef, HoldPhase>,
    wanted: BTreeSet<GpuRef>,
    look: Option<BarrierLook>,
    /// Those whose phase changes are looked at again.
    pub gpus: NotedGpus,
    /// The lists were complete and the holds that they showed were taken in.
    has_begun: bool,
}

/// The look under way, even if nobody waits for it any more: what has settled since is for the next one.
#[derive(Debug, Default)]
struct BarrierLook {
    /// What pods without claims sought when it began.
    sought: Sought,
    /// The marked hold, once the mark was written.
    mark: Option<ClaimVersion>,
}

/// What a GPU is kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worth {
    /// Its node takes no pods.
    Nothing,
    /// The next share can go there at once.
    InAdvance,
    /// It has shares, is planned with, or is kept for good (which is known here).
    InUse,
}

/// Why a GPU is not to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Somebody else names it.
    Race,
    /// A pod waits for a whole GPU.
    Whole,
    Idle,
}

impl Holds {
    pub fn new(pace: HoldPace) -> Self {
        Self { pace, ..Self::default() }
    }

    fn set(&mut self, gpu: GpuRef, phase: HoldPhase) {
        self.gpus.note([gpu.clone()]);
        self.phases.insert(gpu, phase);
    }

    fn unset(&mut self, gpu: &GpuRef) {
        self.gpus.note([gpu.clone()]);
        self.phases.remove(gpu);
    }

    /// The holds of the first complete lists are taken in now. False if they were before.
    pub fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    pub fn phase(&self, gpu: &GpuRef) -> Option<&HoldPhase> {
        self.phases.get(gpu)
    }

    pub fn all(&self) -> impl Iterator<Item = (&GpuRef, &HoldPhase)> {
        self.phases.iter()
    }

    pub fn is_held(&self, gpu: &GpuRef) -> bool {
        matches!(self.phases.get(gpu), Some(HoldPhase::Held { .. }))
    }

    /// Held, or on the way there.
    pub fn is_ours(&self, gpu: &GpuRef) -> bool {
        self.phases.get(gpu).is_some_and(|phase| !matches!(phase, HoldPhase::Releasing { .. }))
    }

    /// It may be planned with: ours, or nobody's and not just given away.
    pub fn is_open(&self, gpu: &GpuRef) -> bool {
        !matches!(self.phases.get(gpu), Some(HoldPhase::Releasing { .. }))
    }

    /// The GPU is needed.
    pub fn want(&mut self, gpu: &GpuRef) {
        if !self.phases.contains_key(gpu) {
            self.wanted.insert(gpu.clone());
        }
    }

    /// A hold that stands in the API already, by a leader before us. Where shares are it has settled; else it may
    /// have been written a moment ago.
    pub fn found(&mut self, gpu: &GpuRef, claim: &ClaimRef, shared: bool, now: Moment) {
        let phase = match shared {
            true => HoldPhase::Held { claim: claim.clone(), idle: None },
            false => self.pace.settling(claim, now),
        };
        self.set(gpu.clone(), phase);
    }

    pub fn written(&mut self, gpu: &GpuRef, claim: &ClaimRef, now: Moment) {
        if matches!(self.phases.get(gpu), Some(HoldPhase::Writing)) {
            self.set(gpu.clone(), self.pace.settling(claim, now));
        }
    }

    /// It was not written, or nobody knows: what stands in the API by then is deleted.
    pub fn failed(&mut self, gpu: &GpuRef, now: Moment) {
        if matches!(self.phases.get(gpu), Some(HoldPhase::Writing)) {
            self.stray(gpu, now + self.pace.leave);
        }
    }

    /// A hold that nobody counts on any more, or that was never finished: it is deleted if it stands in the API.
    pub fn stray(&mut self, gpu: &GpuRef, until: Moment) {
        self.set(gpu.clone(), HoldPhase::Releasing { until, asked: None });
    }

    /// GPUs that the look under way is for.
    pub fn looking(&self) -> Vec<GpuRef> {
        self.in_phase(|phase| matches!(phase, HoldPhase::Looking { .. }))
    }

    /// What pods without claims seek as the look begins.
    pub fn look_begins(&mut self, sought: Sought) {
        if let Some(look) = &mut self.look {
            look.sought = sought;
        }
    }

    /// The look's mark was written.
    pub fn marked(&mut self, mark: ClaimVersion) {
        if let Some(look) = &mut self.look {
            look.mark = Some(mark);
        }
    }

    /// The mark of the look under way.
    pub fn mark(&self) -> Option<&ClaimVersion> {
        self.look.as_ref()?.mark.as_ref()
    }

    /// What pods without claims sought when the look under way began.
    pub fn take_sought(&mut self) -> Sought {
        self.look.as_mut().map(|look| std::mem::take(&mut look.sought)).unwrap_or_default()
    }

    /// All is known that there was when the look began. None: it came to nothing, and is taken again. What is lost is
    /// returned.
    pub fn looked(&mut self, others: Option<&dyn Fn(&GpuRef) -> Others>, now: Moment) -> Vec<GpuRef> {
        self.look = None;
        let mut lost = Vec::new();
        for gpu in self.looking() {
            let Some(HoldPhase::Looking { claim, again }) = self.phases.get(&gpu).cloned() else { continue };
            match (others.map(|others| others(&gpu)), again) {
                (None, _) => {
                    let until = now + self.pace.settle_least();
                    let latest = again.unwrap_or(until);
                    self.set(gpu, HoldPhase::Settling { claim, until, latest });
                }
                (Some(Others::Named), _) => lost.push(gpu),
                (Some(Others::MayCome), Some(latest)) => {
                    self.set(gpu, HoldPhase::Settling { claim, until: latest, latest });
                }
                (Some(_), _) => self.set(gpu, HoldPhase::Held { claim, idle: Some(now) }),
            }
        }
        for gpu in &lost {
            self.lose(gpu, Loss::Race, now);
        }
        lost
    }

    /// The GPU is not to be ours any more. True if it was, or was on its way.
    pub fn lose(&mut self, gpu: &GpuRef, why: Loss, now: Moment) -> bool {
        self.wanted.remove(gpu);
        if !self.is_ours(gpu) {
            return false;
        }
        let leave = if why == Loss::Idle { Duration::ZERO } else { self.pace.leave };
        self.stray(gpu, now + leave);
        true
    }

    /// Somebody else names the GPU, or did, while its hold was young; or may have, unseen. Where the scheduler's
    /// books have a GPU once, the end of that claim takes it out of them under the hold, which is worth nothing
    /// then. True if it was young: it goes, and another may be taken.
    pub fn spoil(&mut self, gpu: &GpuRef, now: Moment) -> bool {
        let young = HoldPhase::is_young;
        self.phases.get(gpu).is_some_and(young) && self.lose(gpu, Loss::Race, now)
    }

    pub fn young_ones(&self) -> Vec<GpuRef> {
        self.in_phase(HoldPhase::is_young)
    }

    /// Its hold is gone from the API, or is no hold any more, whoever did it. True if it was counted on.
    pub fn gone(&mut self, gpu: &GpuRef) -> bool {
        let counted =
            !matches!(self.phases.get(gpu), None | Some(HoldPhase::Writing | HoldPhase::Releasing { .. }));
        if counted {
            self.unset(gpu);
        }
        counted
    }

    /// What time brings, and what was wanted. `worth`: what a GPU is kept for that is not held for good. `standing`: how
    /// the hold of a GPU stands in the API.
    pub fn step(
        &mut self,
        now: Moment,
        worth: impl Fn(&GpuRef) -> Worth,
        standing: impl Fn(&GpuRef) -> HoldStanding,
    ) -> Vec<Act> {
        let mut acts = Vec::new();
        for gpu in std::mem::take(&mut self.wanted) {
            if !self.phases.contains_key(&gpu) {
                self.set(gpu.clone(), HoldPhase::Writing);
                acts.push(Act::Take(gpu));
            }
        }
        self.settle(now, &mut acts);
        self.idle(now, &worth);
        self.release(now, standing, &mut acts);
        acts
    }

    fn settle(&mut self, now: Moment, acts: &mut Vec<Act>) {
        let settled =
            self.in_phase(|phase| matches!(phase, HoldPhase::Settling { until, .. } if *until <= now));
        let Some(first) = settled.first().cloned().filter(|_| self.look.is_none()) else { return };
        self.look = Some(BarrierLook::default());
        for gpu in settled {
            if let Some(HoldPhase::Settling { claim, latest, .. }) = self.phases.get(&gpu).cloned() {
                self.set(gpu, HoldPhase::Looking { claim, again: (now < latest).then_some(latest) });
            }
        }
        acts.push(Act::Look(first));
    }

    /// Notes since when a GPU is idle, and gives back what has been so for long.
    fn idle(&mut self, now: Moment, worth: &impl Fn(&GpuRef) -> Worth) {
        let (mut over, mut ready) = (Vec::new(), 0);
        for (gpu, phase) in &mut self.phases {
            let HoldPhase::Held { idle, .. } = phase else { continue };
            let worth = if self.gpus.is_pinned(gpu) { Worth::InUse } else { worth(gpu) };
            if worth == Worth::InUse {
                *idle = None;
                continue;
            }
            ready += usize::from(worth == Worth::InAdvance);
            let since = *idle.get_or_insert(now);
            if since + self.pace.keep_warm <= now {
                over.push((since, gpu.clone(), worth));
            }
        }
        // The longest idle go first; so many stay as are to be held in advance.
        over.sort();
        let (useless, spare): (Vec<_>, Vec<_>) =
            over.into_iter().partition(|(.., worth)| *worth == Worth::Nothing);
        let spare = spare.into_iter().take(ready.saturating_sub(self.pace.ahead));
        for (_, gpu, _) in useless.into_iter().chain(spare) {
            self.lose(&gpu, Loss::Idle, now);
        }
    }

    fn release(&mut self, now: Moment, standing: impl Fn(&GpuRef) -> HoldStanding, acts: &mut Vec<Act>) {
        let leaving = self.in_phase(|phase| matches!(phase, HoldPhase::Releasing { .. }));
        for gpu in leaving {
            let Some(HoldPhase::Releasing { until, asked }) = self.phases.get_mut(&gpu) else { continue };
            match standing(&gpu) {
                HoldStanding::Due(step) => {
                    let answered = |asked: &PendingStep| {
                        asked.step != step || asked.again.is_some_and(|again| again <= now)
                    };
                    if asked.as_ref().is_none_or(answered) {
                        *asked = Some(PendingStep { step: step.clone(), again: None });
                        acts.push(Act::Release(gpu, step));
                    }
                }
                HoldStanding::No if *until <= now => {
                    self.unset(&gpu);
                }
                _ => {}
            }
        }
    }

    /// A step of a hold that is to go failed: it is tried again then, if no other is due before.
    pub fn not_released(&mut self, gpu: &GpuRef, again: Moment) {
        if let Some(HoldPhase::Releasing { asked: Some(asked), .. }) = self.phases.get_mut(gpu) {
            asked.again = Some(again);
        }
    }

    /// When time alone will bring something, after `now`.
    pub fn next(&self, now: Moment) -> Option<Moment> {
        let due = |phase: &HoldPhase| match phase {
            HoldPhase::Settling { until, .. } => [Some(*until), None],
            HoldPhase::Releasing { until, asked } => {
                [Some(*until), asked.as_ref().and_then(|asked| asked.again)]
            }
            HoldPhase::Held { idle: Some(since), .. } => [Some(*since + self.pace.keep_warm), None],
            _ => [None, None],
        };
        self.phases.values().flat_map(due).flatten().filter(|due| *due > now).min()
    }

    /// Held GPUs, the longest idle first. The last ones were in use when time was last looked at, and may be.
    pub fn idle_ones(&self) -> Vec<GpuRef> {
        let mut idle: Vec<(Moment, &GpuRef)> = self
            .phases
            .iter()
            .filter_map(|(gpu, phase)| match phase {
                HoldPhase::Held { idle, .. } => Some((idle.unwrap_or(Moment::MAX), gpu)),
                _ => None,
            })
            .collect();
        idle.sort();
        idle.into_iter().map(|(_, gpu)| gpu.clone()).collect()
    }

    fn in_phase(&self, is: impl Fn(&HoldPhase) -> bool) -> Vec<GpuRef> {
        self.phases.iter().filter(|(_, phase)| is(phase)).map(|(gpu, _)| gpu.clone()).collect()
    }
}
