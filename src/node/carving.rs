//! MIG instances that are made for claims and end with them: what the executor does on boards that are carved on demand.
//!
//! ```text
//! is anything there? ─yes→ refused, nothing recorded
//!   └no→ intent (where, not yet what) durable → make → intent again, with what was made → … → plan the rest → intent
//!        as planned → its steps → ready
//! ```
//! What a crash leaves is found by its place on the board: NVML gives ids again, and names follow from the board's
//! number. Whatever else is on a board is somebody else's and stays as it is.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use tracing::{debug, warn};

use super::discovery::CarvedPlaces;
use super::executor::{ExecuteError, Executor, StepError, step_error, stuck};
use super::holders::ReleaseCause;
use super::lanes::Held;
use super::mig_mode::is_ours;
use crate::inventory::{Claimed, ClaimedPart, FaultLocation};
use crate::ledger::{HeldDevice, HoldMode, Intent, Mark, Phase, Record, RecordKey, Step};
use crate::model::claim::AllocatedClaim;
use crate::model::error_chain;
use crate::model::gpu::{MigMode, NodeGpus, Placement};
use crate::model::mig::{MadeMig, MigPlace};
use crate::model::names::{ClaimUid, DeviceUuid};
use crate::model::selector::GpuSelector;
use crate::nvml::MigError;
use crate::prepare::{Plan, Refusal};

/// What preparing a claim comes to.
pub(super) enum Planned {
    Ready(Box<Plan>),
    /// MIG instances first: what else it comes to follows from them.
    ToMake(Box<Intent>),
}

impl Planned {
    pub fn intent(&self) -> &Intent {
        match self {
            Self::Ready(plan) => &plan.intent,
            Self::ToMake(intent) => intent,
        }
    }

    pub fn intent_mut(&mut self) -> &mut Intent {
        match self {
            Self::Ready(plan) => &mut plan.intent,
            Self::ToMake(intent) => intent,
        }
    }
}

/// The GPUs with the instances that were made by these steps, in place of those that may be made.
pub(super) fn with_made<'a>(gpus: &'a NodeGpus, steps: &[Step]) -> Cow<'a, NodeGpus> {
    let mut with = Cow::Borrowed(gpus);
    for step in steps {
        let Step::MakeMig { gpu, place, made: Some(made) } = step else { continue };
        for board in with.to_mut().gpus.iter_mut().filter(|board| board.uuid == *gpu) {
            let MigMode::OnDemand(cut) = &mut board.mig else { continue };
            let device = cut.places.iter().find(|one| one.place == *place).map(|one| one.as_made(made));
            cut.made.extend(device);
        }
    }
    with
}

/// The ledger's word on which instances are made for claims.
pub(super) struct CarvedByClaims(pub Arc<Executor>);

impl fmt::Debug for CarvedByClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CarvedByClaims")
    }
}

impl CarvedPlaces for CarvedByClaims {
    fn claimed(&self) -> Vec<Claimed> {
        let store = &self.0.store;
        // Another process of ours may have made some, while two overlap in a rolling update.
        if let Err(error) = store.read_again() {
            warn!(
                error = error_chain(&error),
                "cannot read the ledger again; MIG instances are told by what is known of it"
            );
        }
        let intents: Vec<Intent> =
            store.intents().into_iter().filter(|intent| intent.boot == self.0.boot).collect();
        claimed_in(&intents)
    }

    fn switched(&self) -> Vec<DeviceUuid> {
        self.0.mig.modes().all().into_iter().map(|one| one.gpu).collect()
    }
}

/// What the claims of one boot have of boards in MIG mode.
fn claimed_in(intents: &[Intent]) -> Vec<Claimed> {
    // A record says of a MIG device only on a carved board what it is; one of a release before that never does. So a
    // board is carved as soon as one record of it says so: what the others have of it is an instance of others'.
    let of_one = |intent: &Intent| -> Vec<DeviceUuid> {
        let known = intent.devices.iter().filter(|held| held.mig.is_some()).map(|held| held.gpu.clone());
        known.chain(intent.places().map(|(gpu, _)| gpu.clone())).collect()
    };
    let carved: BTreeSet<DeviceUuid> = intents.iter().flat_map(of_one).collect();
    intents.iter().flat_map(|intent| claimed_by(intent, &carved)).collect()
}

fn claimed_by(intent: &Intent, carved: &BTreeSet<DeviceUuid>) -> Vec<Claimed> {
    let on = |gpu: &DeviceUuid, what| Claimed { gpu: gpu.clone(), claim: intent.claim.clone(), what };
    let made = intent.steps.iter().filter_map(|step| match step {
        Step::MakeMig { gpu, place, made } => {
            let device = made.as_ref().map(|made| made.uuid.clone());
            Some(on(gpu, ClaimedPart::Made { place: *place, device }))
        }
        Step::TimeSlice { .. } | Step::Mps { .. } | Step::WriteCdi { .. } => None,
    });
    let is_static = |held: &&HeldDevice| held.mode == HoldMode::Mig && !carved.contains(&held.gpu);
    let fixed = intent.devices.iter().filter(is_static).map(|held| on(&held.gpu, ClaimedPart::Static));
    let is_share = |held: &&HeldDevice| matches!(held.mode, HoldMode::Share(_));
    let shares = intent.devices.iter().filter(is_share).map(|held| on(&held.gpu, ClaimedPart::Share));
    made.chain(fixed).chain(shares).collect()
}

/// Boards to be looked at as carved: those that are to be, and those with MIG devices that were made for claims.
pub(super) fn carved_boards(wanted: &[GpuSelector], executor: &Executor) -> Vec<GpuSelector> {
    let intents = executor.store.intents().into_iter().filter(|intent| intent.boot == executor.boot);
    let mut kept: Vec<DeviceUuid> =
        intents.flat_map(|intent| intent.places().map(|(gpu, _)| gpu.clone()).collect::<Vec<_>>()).collect();
    kept.sort();
    kept.dedup();
    wanted.iter().cloned().chain(kept.into_iter().map(GpuSelector::Uuid)).collect()
}

impl Executor {
    /// The memory slices of a GPU instance that was made for a claim, by NVML's number of it.
    pub(super) fn made_at(&self, gpu: &DeviceUuid, instance: u32) -> Option<Placement> {
        let intents = self.store.intents().into_iter().filter(|intent| intent.boot == self.boot);
        let of = |step: &Step| match step {
            Step::MakeMig { gpu: on, place, made: Some(made) }
                if on == gpu && made.gpu_instance == instance =>
            {
                Some(place.placement)
            }
            _ => None,
        };
        intents.flat_map(|intent| intent.steps.iter().find_map(of)).next()
    }

    /// True unless NVML says that an instance which was made for the claim is not there any more: somebody ended it, or
    /// the driver was loaded anew.
    pub(super) fn has_its_instances(&self, record: &Record) -> bool {
        record.intent.steps.iter().all(|step| {
            let Step::MakeMig { gpu, place, made: Some(made) } = step else { return true };
            match self.mig.instances(gpu) {
                Ok(all) => all.iter().any(|one| one.place == *place && one.devices.contains(made)),
                Err(MigError::Off { .. }) => false,
                Err(error) => {
                    debug!(error = error_chain(&error), "it is not known whether a MIG instance is there");
                    true
                }
            }
        })
    }

    /// Refuses to take a record back whose MIG device somebody ended, while a pod that had the device runs: the pod's
    /// containers may open whatever is made at that place, and NVML gives numbers of instances again.
    pub(super) fn check_left(&self, record: &Record) -> Result<(), ExecuteError> {
        if record.intent.boot != self.boot || self.has_its_instances(record) {
            return Ok(());
        }
        let left = self.holders.left_of(&record.intent.pods);
        let pods: Vec<String> = left.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
        match pods.is_empty() {
            true => Ok(()),
            false => Err(ExecuteError::Ended { pods: pods.join(", ") }),
        }
    }

    /// Where MIG devices could not be ended after their claims, and why. As long as their records are there, nothing else is
    /// made over them.
    pub(super) fn unended(&self) -> BTreeMap<FaultLocation, String> {
        let (mut found, mut ended) = (BTreeMap::new(), Vec::new());
        for (one, words) in self.mig.unended() {
            let (key, gpu, place) = &one;
            let record =
                self.store.get(key).filter(|record| record.intent.places().any(|at| at == (gpu, *place)));
            let Some(record) = record else {
                ended.push(one);
                continue;
            };
            let words = format!(
                "the MIG device that was made here for claim {} could not be ended: {words}",
                record.intent.claim
            );
            found.insert(FaultLocation::Taken(gpu.clone(), place.placement), words);
        }
        self.mig.forget_unended(&ended);
        found
    }

    /// Why a MIG device that was made for a claim could not be ended.
    pub(super) fn unended_of(&self, claim: &ClaimUid) -> Option<String> {
        let is_of = |key: &RecordKey| self.store.get(key).is_some_and(|one| one.intent.claim.uid == *claim);
        self.mig.unended().into_iter().find(|((key, ..), _)| is_of(key)).map(|(_, words)| words)
    }

    /// Prepares a claim whose MIG instances are yet to be made.
    pub(super) fn make(
        &self,
        held: &Held,
        intent: Intent,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
    ) -> Result<Vec<HeldDevice>, ExecuteError> {
        // Before the record says that there may be something of ours: it would be ended as such.
        for step in &intent.steps {
            self.check_free(step, gpus).map_err(|source| step_error(step, source))?;
        }
        self.be_cut(&intent, gpus)?;
        let key = intent.key();
        self.make_and_go_on(held, intent, claim, gpus).map_err(|problem| {
            match self.release(held, &key, ReleaseCause::Anew) {
                Ok(()) => problem,
                Err(left) => stuck(&error_chain(&problem))(left),
            }
        })
    }

    fn check_free(&self, step: &Step, gpus: &NodeGpus) -> Result<(), StepError> {
        let Step::MakeMig { gpu, place, .. } = step else { return Ok(()) };
        let all = match self.mig.instances(gpu) {
            // The mode is yet to be switched on.
            Err(MigError::Off { .. }) if is_ours(gpus, gpu) => return Ok(()),
            all => all?,
        };
        match all.iter().find(|one| one.place.placement.overlaps(place.placement)) {
            None => Ok(()),
            Some(other) => Err(MigError::Taken { gpu: gpu.clone(), by: other.place }.into()),
        }
    }

    /// Stops at the first failure, with whatever was done until then in the ledger.
    fn make_and_go_on(
        &self,
        held: &Held,
        intent: Intent,
        claim: &AllocatedClaim,
        gpus: &NodeGpus,
    ) -> Result<Vec<HeldDevice>, ExecuteError> {
        self.store.begin(held, &intent)?;
        let intent = self.make_all(held, intent)?;
        let made = intent.places().count();
        let plan = match self.plan_on(claim, &with_made(gpus, &intent.steps))? {
            Planned::Ready(plan) => *plan,
            Planned::ToMake(unmade) => {
                let device = unmade.devices.into_iter().next().map(|device| device.answer.device);
                return Err(Refusal::NotMade { device: device.unwrap_or_else(|| "?".into()) }.into());
            }
        };
        let whole = Intent { pods: intent.pods, ..plan.intent };
        self.check_unopened(&plan.exclusive, &whole)?;
        let key = whole.key();
        self.store.replace(held, whole.clone(), Phase::Applying(made))?;
        for (index, step) in whole.steps.iter().enumerate().skip(made) {
            self.apply(step, &key, &plan.cdi).map_err(|source| step_error(step, source))?;
            self.store.mark(held, &key, Mark::Applied(index))?;
        }
        self.store.mark(held, &key, Mark::Ready)?;
        Ok(whole.devices)
    }

    /// Makes the intent's instances, which are its first steps, and records each.
    fn make_all(&self, held: &Held, mut intent: Intent) -> Result<Intent, ExecuteError> {
        for index in 0..intent.steps.len() {
            let Step::MakeMig { gpu, place, .. } = &intent.steps[index] else { break };
            let (gpu, place) = (gpu.clone(), *place);
            match self.mig.make(&intent.claim.uid, &gpu, place) {
                Ok(made) => {
                    intent.steps[index] = Step::MakeMig { gpu, place, made: Some(made) };
                    self.store.replace(held, intent.clone(), Phase::Applying(index + 1))?;
                }
                Err(error) => {
                    let problem = step_error(&intent.steps[index], StepError::from(error));
                    if let ExecuteError::Step { source: StepError::Mig(error), .. } = &problem
                        && error.made_nothing()
                    {
                        // What is there is not ours, and must not be taken for it.
                        intent.steps.truncate(index);
                        self.store.replace(held, intent, Phase::Applying(index))?;
                    }
                    return Err(problem);
                }
            }
        }
        Ok(intent)
    }

    /// Ends what was made at a place, if it still is there.
    pub(super) fn end_mig(
        &self,
        key: &RecordKey,
        gpu: &DeviceUuid,
        place: MigPlace,
        made: Option<&MadeMig>,
    ) -> Result<(), StepError> {
        match self.mig.end(key, gpu, place, made.map(|made| &made.uuid)) {
            // Nothing is there.
            Ok(_) | Err(MigError::Off { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{HeldMig, MigAsked, decode};

    fn record(bytes: &[u8]) -> Intent {
        decode(bytes).unwrap().record.intent
    }

    /// As releases wrote it that carved nothing: a MIG device that somebody had made.
    fn of_before() -> Intent {
        record(include_bytes!("../../tests/data/ledger/v1-mig-of-others.rec"))
    }

    /// The same, of another instance, on a board that is carved.
    fn of_others() -> Intent {
        let mut intent = of_before();
        intent.claim.name = "other".into();
        let place = MigPlace { profile_id: 19, placement: Placement { start: 5, size: 1 } };
        intent.devices[0].mig =
            Some(HeldMig { profile: "1g.10gb".into(), place, asked: MigAsked::default() });
        intent
    }

    #[test]
    fn a_mig_device_of_before_keeps_the_use_of_a_board_that_no_record_calls_carved() {
        let is_static =
            |all: &[Intent]| claimed_in(all).iter().filter(|one| one.what == ClaimedPart::Static).count();
        assert_eq!(is_static(&[of_before()]), 1);
        let claimed = claimed_in(&[of_before()]);
        assert_eq!((claimed[0].gpu.as_str(), claimed[0].claim.name.as_str()), ("GPU-3", "train"));
        assert_eq!(is_static(&[of_before(), of_others()]), 0, "the board was carved meanwhile");
        let made = record(include_bytes!("../../tests/data/ledger/v1-made-mig.rec"));
        assert_eq!(is_static(&[of_before(), made.clone()]), 0);
        assert_eq!(claimed_in(&[of_before(), made]).len(), 1);
        let mut elsewhere = of_others();
        elsewhere.devices[0].gpu = "GPU-4".into();
        assert_eq!(is_static(&[of_before(), elsewhere]), 1);
        for mode in [HoldMode::Whole, HoldMode::Admin] {
            let mut other = of_before();
            other.devices[0].mode = mode;
            assert_eq!(claimed_in(&[other]), []);
        }
    }
}
