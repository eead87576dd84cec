//! The way to MIG instances, which of them could not be made lately, and which could not be ended: nobody new is to be sent
//! there for a while. The former outlast the process ([`FailureFile`]); the latter are tried again at once by the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::watch;

use super::failure_file::{FailureFile, StoredFailure};
use super::mig_mode::MigModes;
use crate::inventory::FaultLocation;
use crate::ledger::RecordKey;
use crate::model::error_chain;
use crate::model::mig::{GpuInstance, MadeMig, MigPlace};
use crate::model::names::{ClaimUid, DeviceUuid};
use crate::nvml::{MigError, MigInstances};

/// For so long a place is avoided at which a MIG device could not be made, unless one is made there before.
pub const AVOIDED: Duration = Duration::from_secs(600);
/// Failures that are remembered: more than any node has places that claims can be sent to at once.
const MOST: usize = 256;

/// See the module's text.
pub struct Carver {
    instances: Arc<dyn MigInstances>,
    avoided: Duration,
    file: FailureFile,
    modes: MigModes,
    failures: watch::Sender<Failures>,
    failed: AtomicU64,
}

/// Where MIG devices could not be made lately, and where they could not be ended.
#[derive(Debug, Default)]
pub struct Failures {
    unmade: BTreeMap<(DeviceUuid, MigPlace), Failure>,
    /// Of records that are released; no more than these have.
    unended: BTreeMap<Unended, String>,
}

/// A MIG instance that could not be ended: the record that it was made for, and where it is.
pub type Unended = (RecordKey, DeviceUuid, MigPlace);

/// The last try at a place.
#[derive(Debug, Clone)]
pub struct Failure {
    claim: ClaimUid,
    words: String,
    at: Instant,
    /// The same for [`FailureFile`]: seconds since 1970.
    clock: u64,
    /// The claim has an event of it.
    told: bool,
}

impl Carver {
    /// `avoided`: [`AVOIDED`], shorter in tests. Reads the file; blocks for that.
    pub fn new(
        instances: Arc<dyn MigInstances>,
        avoided: Duration,
        file: FailureFile,
        modes: MigModes,
    ) -> Self {
        let read = file.read(now(), avoided, MOST);
        let unmade = read.into_iter().filter_map(|(one, age)| remembered(one, age)).collect();
        let failures = watch::Sender::new(Failures { unmade, ..Failures::default() });
        Self { instances, avoided, file, modes, failures, failed: AtomicU64::new(0) }
    }

    /// The MIG modes that were switched for claims.
    pub fn modes(&self) -> &MigModes {
        &self.modes
    }

    /// As [`MigInstances::mode`].
    pub fn mode(&self, gpu: &DeviceUuid) -> Result<bool, MigError> {
        self.instances.mode(gpu)
    }

    /// As [`MigInstances::set_mode`].
    pub fn set_mode(&self, gpu: &DeviceUuid, on: bool) -> Result<(), MigError> {
        self.instances.set_mode(gpu, on)
    }

    /// As [`MigInstances::instances`].
    pub fn instances(&self, gpu: &DeviceUuid) -> Result<Vec<GpuInstance>, MigError> {
        self.instances.instances(gpu)
    }

    /// As [`MigInstances::end`], of what was made for a record.
    pub fn end(
        &self,
        key: &RecordKey,
        gpu: &DeviceUuid,
        place: MigPlace,
        made: Option<&DeviceUuid>,
    ) -> Result<bool, MigError> {
        let ended = self.instances.end(gpu, place, made);
        let at = (key.clone(), gpu.clone(), place);
        let words = match &ended {
            Ok(_) | Err(MigError::Off { .. }) => None,
            Err(error) => Some(why_not_ended(error)),
        };
        self.failures.send_if_modified(|all| {
            let before = match words.clone() {
                Some(words) => all.unended.insert(at, words),
                None => all.unended.remove(&at),
            };
            before != words
        });
        ended
    }

    /// Where MIG devices could not be ended, and why. Other processes of ours may have ended them since, and whoever looks
    /// tells with [`Self::forget_unended`].
    pub fn unended(&self) -> BTreeMap<Unended, String> {
        self.failures.borrow().unended.clone()
    }

    /// Forgets what is ended.
    pub fn forget_unended(&self, ended: &[Unended]) {
        self.failures.send_if_modified(|all| {
            let before = all.unended.len();
            all.unended.retain(|one, _| !ended.contains(one));
            all.unended.len() != before
        });
    }

    /// As [`MigInstances::make`], for a claim.
    pub fn make(&self, claim: &ClaimUid, gpu: &DeviceUuid, place: MigPlace) -> Result<MadeMig, MigError> {
        let made = self.instances.make(gpu, place);
        let at = (gpu.clone(), place);
        match &made {
            Ok(_) => {
                if self.failures.send_if_modified(|all| all.unmade.remove(&at).is_some()) {
                    self.record();
                }
            }
            // A board that is not in MIG mode is no fault of a place on it: the next look tells.
            Err(MigError::Off { .. }) => {}
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                self.note(at, claim, error_chain(error));
            }
        }
        made
    }

    fn note(&self, at: (DeviceUuid, MigPlace), claim: &ClaimUid, words: String) {
        self.failures.send_modify(|all| {
            let all = &mut all.unmade;
            let before = all.get(&at);
            let told =
                before.is_some_and(|before| before.told && before.claim == *claim && before.words == words);
            if all.len() >= MOST && before.is_none() {
                all.pop_first();
            }
            let failure = Failure { claim: claim.clone(), words, at: Instant::now(), clock: now(), told };
            all.insert(at, failure);
        });
        self.record();
    }

    fn record(&self) {
        let stored = |((gpu, place), one): (&(DeviceUuid, MigPlace), &Failure)| StoredFailure {
            gpu: gpu.clone(),
            place: *place,
            claim: one.claim.clone(),
            words: one.words.clone(),
            at: one.clock,
        };
        self.file.write(|| self.failures.borrow().unmade.iter().map(stored).collect());
    }

    /// Where MIG devices could not be made lately, and why.
    pub fn unmade(&self) -> BTreeMap<FaultLocation, String> {
        let fresh = |failure: &Failure| failure.at.elapsed() < self.avoided;
        self.failures.send_if_modified(|all| {
            let before = all.unmade.len();
            all.unmade.retain(|_, failure| fresh(failure));
            all.unmade.len() != before
        });
        let told = |((gpu, place), failure): (&(DeviceUuid, MigPlace), &Failure)| {
            let words = format!("this MIG device could not be made: {}", failure.words);
            (FaultLocation::Device(place.stands_for(gpu)), words)
        };
        self.failures.borrow().unmade.iter().map(told).collect()
    }

    /// Changes of what [`Self::unmade`] and [`Self::unended`] say.
    pub fn changes(&self) -> watch::Receiver<Failures> {
        self.failures.subscribe()
    }

    /// Why the claim's MIG device could not be made, if nobody has told of it.
    pub fn untold(&self, claim: &ClaimUid) -> Option<String> {
        let mut words = None;
        self.failures.send_if_modified(|all| {
            for failure in all.unmade.values_mut().filter(|failure| failure.claim == *claim && !failure.told)
            {
                failure.told = true;
                words = Some(failure.words.clone());
            }
            false
        });
        words
    }

    /// Tries that failed since the start.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// A failure that an earlier process saw so long ago. Whether its claim was told nobody knows: told twice is better than never.
fn remembered(one: StoredFailure, age: Duration) -> Option<((DeviceUuid, MigPlace), Failure)> {
    let StoredFailure { gpu, place, claim, words, at: clock } = one;
    let failure = Failure { claim, words, at: Instant::now().checked_sub(age)?, clock, told: false };
    Some(((gpu, place), failure))
}

/// Seconds since 1970.
fn now() -> u64 {
    u64::try_from(Timestamp::now().as_second()).unwrap_or(0)
}

fn why_not_ended(error: &MigError) -> String {
    let advice = match error {
        MigError::InUse { .. } => {
            " (what holds it may be a tool on the host that watches or profiles GPUs, nvidia-smi or DCGM, say: end it)"
        }
        _ => "",
    };
    format!("{}{advice}. That is tried again every minute", error_chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gpu::Placement;
    use crate::model::mig::MigProfile;
    use crate::node::failure_file::FILE;
    use crate::node::failure_file::tests::file;
    use crate::node::mig_mode::tests::modes;

    /// Makes what is asked, or says that the board is busy.
    struct Board(watch::Sender<bool>);

    impl MigInstances for Board {
        fn profiles(&self, _: &DeviceUuid) -> Result<Vec<MigProfile>, MigError> {
            Ok(Vec::new())
        }
        fn instances(&self, _: &DeviceUuid) -> Result<Vec<GpuInstance>, MigError> {
            Ok(Vec::new())
        }
        fn make(&self, gpu: &DeviceUuid, _: MigPlace) -> Result<MadeMig, MigError> {
            match *self.0.borrow() {
                true => Ok(MadeMig { uuid: "MIG-1".into(), gpu_instance: 1, compute_instance: 0 }),
                false => Err(MigError::Busy { gpu: gpu.clone(), call: "another call".into() }),
            }
        }
        fn end(&self, _: &DeviceUuid, _: MigPlace, _: Option<&DeviceUuid>) -> Result<bool, MigError> {
            Ok(false)
        }
        fn mode(&self, _: &DeviceUuid) -> Result<bool, MigError> {
            Ok(true)
        }
        fn set_mode(&self, _: &DeviceUuid, _: bool) -> Result<(), MigError> {
            Ok(())
        }
    }

    /// Over the folder's files, in this boot.
    fn carver(board: Board, avoided: Duration, folder: &std::path::Path, boot: &str) -> Carver {
        Carver::new(Arc::new(board), avoided, file(folder, boot), modes(folder, boot))
    }

    fn at(start: u32) -> MigPlace {
        MigPlace { profile_id: 19, placement: Placement { start, size: 1 } }
    }

    #[test]
    fn a_place_is_avoided_until_a_device_is_made_there_and_told_of_once() {
        let board = watch::Sender::new(false);
        let dir = tempfile::tempdir().unwrap();
        let carver = carver(Board(board.clone()), AVOIDED, dir.path(), "a");
        let gpu = DeviceUuid::new("GPU-1");
        for start in [0, 1, 0] {
            assert!(carver.make(&"c-1".into(), &gpu, at(start)).is_err());
        }
        let unmade = carver.unmade();
        let place = FaultLocation::Device("GPU-1-mig-19-0".into());
        assert!(unmade.len() == 2 && unmade[&place].contains("still busy"), "{unmade:?}");
        assert_eq!(carver.failed(), 3);
        assert!(carver.untold(&"c-2".into()).is_none());
        assert!(carver.untold(&"c-1".into()).is_some_and(|words| words.contains("another call")));
        assert!(carver.make(&"c-1".into(), &gpu, at(0)).is_err());
        assert_eq!(carver.untold(&"c-1".into()), None, "the same of the same claim is no news");
        board.send_replace(true);
        assert!(carver.make(&"c-1".into(), &gpu, at(0)).is_ok());
        assert_eq!(
            carver.unmade().into_keys().collect::<Vec<_>>(),
            [FaultLocation::Device("GPU-1-mig-19-1".into())]
        );
    }

    #[test]
    fn a_place_is_not_avoided_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let carver = carver(Board(watch::Sender::new(false)), Duration::ZERO, dir.path(), "a");
        assert!(carver.make(&"c-1".into(), &"GPU-1".into(), at(0)).is_err());
        assert!(carver.unmade().is_empty());
    }
    #[test]
    fn what_could_not_be_made_is_avoided_over_a_restart_and_not_over_a_boot() {
        let (dir, board) = (tempfile::tempdir().unwrap(), watch::Sender::new(false));
        let start = |boot: &str| carver(Board(board.clone()), AVOIDED, dir.path(), boot);
        let gpu = DeviceUuid::new("GPU-1");
        let first = start("a");
        for place in [0, 1] {
            assert!(first.make(&"c-1".into(), &gpu, at(place)).is_err());
        }
        let unmade = first.unmade();
        let second = start("a");
        assert_eq!((second.unmade(), second.failed()), (unmade, 0));
        assert!(second.untold(&"c-1".into()).is_some(), "told twice rather than never");
        assert!(start("b").unmade().is_empty());
        board.send_replace(true);
        assert!(second.make(&"c-1".into(), &gpu, at(0)).is_ok());
        let rest: Vec<_> = start("a").unmade().into_keys().collect();
        assert_eq!(rest, [FaultLocation::Device("GPU-1-mig-19-1".into())]);
        assert!(second.make(&"c-1".into(), &gpu, at(1)).is_ok());
        assert!(!dir.path().join(FILE).exists(), "nothing is left to remember");
    }

    #[test]
    fn no_more_failures_are_kept_than_a_node_has_places() {
        let dir = tempfile::tempdir().unwrap();
        let start = || carver(Board(watch::Sender::new(false)), AVOIDED, dir.path(), "a");
        let carver = start();
        for place in 0..300 {
            assert!(carver.make(&"c-1".into(), &"GPU-1".into(), at(place)).is_err());
        }
        assert_eq!((carver.unmade().len(), start().unmade().len()), (MOST, MOST));
    }
}
