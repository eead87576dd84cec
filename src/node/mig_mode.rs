//! MIG modes that are switched for claims: on at the first MIG device that is made on a whole GPU, off when a claim gets
//! the GPU whole, or once nothing has been cut off it for a while.
//!
//! ```text
//! on:  recorded as ours → switched, read back → the MIG device is made          off: switched, read back → forgotten
//! ```
//! A record with the mode off is what a crash, a reload of the driver or somebody else's act left: it goes, and what is
//! switched on after that is not ours. One of another boot means nothing. The lane of the GPU is held all the while.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::executor::{ExecuteError, Executor, StepError};
use super::lanes::Held;
use super::preparer::{PrepareError, Preparer};
use crate::host::{Durability, Host, durable};
use crate::inventory::Inventory;
use crate::ledger::{HoldMode, Intent, Step};
use crate::model::error_chain;
use crate::model::gpu::{Gpu, MigMode, NodeGpus};
use crate::model::names::{BootId, DeviceUuid};
use crate::nvml::{MigError, ModeError};

/// In the state folder.
pub const FOLDER: &str = "mig-modes";
const SUFFIX: &str = ".json";
const VERSION: u32 = 1;
/// No file of ours has more.
const MOST_BYTES: u64 = 1 << 16;
/// How often modes are looked at that wait for something else than time.
const EVERY: Duration = Duration::from_secs(60);

/// See the module's text.
pub struct MigModes {
    host: Arc<dyn Host>,
    folder: PathBuf,
    boot: BootId,
    keep: Duration,
    switched: AtomicU64,
    failed: AtomicU64,
}

/// A GPU whose MIG mode is on because a claim needed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SwitchedOn {
    version: u32,
    pub gpu: DeviceUuid,
    boot: BootId,
    /// Seconds since 1970.
    pub since: u64,
    /// Since when nothing is cut off it, as far as that was seen.
    pub idle_since: Option<u64>,
}

/// What becomes of a mode off which nothing is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// It is idle from now on.
    Note,
    Wait(Duration),
    Off,
}

/// A clock that was set back begins anew.
fn next(idle_since: Option<u64>, keep: Duration, now: u64) -> Next {
    let Some(idle) = idle_since.and_then(|since| now.checked_sub(since)).map(Duration::from_secs) else {
        return if keep.is_zero() { Next::Off } else { Next::Note };
    };
    match keep.checked_sub(idle) {
        None | Some(Duration::ZERO) => Next::Off,
        Some(rest) => Next::Wait(rest),
    }
}

impl MigModes {
    /// `keep`: how long a mode stays on that nobody needs; none: it goes at once. Blocks its thread.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn new(
        host: Arc<dyn Host>,
        folder: PathBuf,
        boot: BootId,
        keep: Option<Duration>,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let (switched, failed) = Default::default();
        Ok(Self { host, folder, boot, keep: keep.unwrap_or_default(), switched, failed })
    }

    /// Those of this boot. A file that is not understood is nobody's, and stays.
    pub fn all(&self) -> Vec<SwitchedOn> {
        let names = durable::names(&self.folder).unwrap_or_else(|error| {
            warn!(%error, folder = FOLDER, "cannot list the MIG modes that were switched on for claims");
            Vec::new()
        });
        let gpus = names
            .iter()
            .filter(|name| !name.starts_with(durable::TEMP_PREFIX))
            .filter_map(|name| name.strip_suffix(SUFFIX))
            .map(DeviceUuid::new);
        gpus.filter_map(|gpu| self.get(&gpu)).collect()
    }

    /// The record of one, if it is of this boot.
    pub fn get(&self, gpu: &DeviceUuid) -> Option<SwitchedOn> {
        match self.read(gpu) {
            Ok(one) => one.filter(|one| one.boot == self.boot && one.version == VERSION && one.gpu == *gpu),
            Err(error) => {
                warn!(%gpu, %error, folder = FOLDER, "who switched its MIG mode on cannot be read: it is left alone");
                None
            }
        }
    }

    fn read(&self, gpu: &DeviceUuid) -> io::Result<Option<SwitchedOn>> {
        if !gpu.is_well_formed() {
            return Ok(None);
        }
        let bytes = durable::read_at_most(&self.folder.join(format!("{gpu}{SUFFIX}")), MOST_BYTES)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    fn put(&self, gpu: &DeviceUuid, since: u64, idle_since: Option<u64>) -> io::Result<()> {
        let one =
            SwitchedOn { version: VERSION, gpu: gpu.clone(), boot: self.boot.clone(), since, idle_since };
        let name = format!("{gpu}{SUFFIX}");
        // After a power failure the boot is another one: there is nothing to flush for.
        self.host.write(&self.folder, &name, &serde_json::to_vec(&one)?, Durability::ProcessCrash)
    }

    fn forget(&self, gpu: &DeviceUuid) {
        if let Err(error) = self.host.remove(&self.folder.join(format!("{gpu}{SUFFIX}"))) {
            warn!(%gpu, %error, folder = FOLDER, "a record of a MIG mode cannot be removed; that is tried again");
        }
    }

    fn count(&self, done: bool) {
        let counter = if done { &self.switched } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// When a mode goes off off which nothing is cut: seconds since 1970.
    pub fn off_at(&self, one: &SwitchedOn) -> Option<u64> {
        one.idle_since.map(|since| since.saturating_add(self.keep.as_secs()))
    }

    /// Switches that were done, and that failed, since the start.
    pub fn counts(&self) -> (u64, u64) {
        (self.switched.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    u64::try_from(Timestamp::now().as_second()).unwrap_or(0)
}

fn failed(gpu: &DeviceUuid, on: bool) -> impl FnOnce(StepError) -> ExecuteError {
    let what = format!("switching the MIG mode of {gpu} {}", if on { "on" } else { "off" });
    move |source| ExecuteError::Step { what, source }
}

impl Executor {
    /// Has MIG mode on where MIG devices are about to be made: on boards whose mode is ours to switch.
    pub(super) fn be_cut(&self, intent: &Intent, gpus: &NodeGpus) -> Result<(), ExecuteError> {
        let made = intent.steps.iter().filter_map(|step| match step {
            Step::MakeMig { gpu, .. } if is_ours(gpus, gpu) => Some(gpu),
            _ => None,
        });
        let boards: BTreeSet<&DeviceUuid> = made.collect();
        boards.into_iter().try_for_each(|gpu| self.switch_on(gpu).map_err(failed(gpu, true)))
    }

    /// Has MIG mode off on boards that a claim is about to have whole, or shares of.
    pub(super) fn be_whole(&self, intent: &Intent, gpus: &NodeGpus) -> Result<(), ExecuteError> {
        let whole = |mode: HoldMode| matches!(mode, HoldMode::Whole | HoldMode::Share(_));
        let boards: BTreeSet<&DeviceUuid> =
            intent.devices.iter().filter(|held| whole(held.mode)).map(|held| &held.gpu).collect();
        boards.into_iter().try_for_each(|gpu| self.switch_off(gpu, gpus).map_err(failed(gpu, false)))
    }

    fn switch_on(&self, gpu: &DeviceUuid) -> Result<(), StepError> {
        let modes = self.mig.modes();
        let recorded = modes.get(gpu);
        if self.mig.mode(gpu)? {
            // From now on it is not idle, or it is not ours.
            if let Some(one) = recorded.filter(|one| one.idle_since.is_some()) {
                modes.put(gpu, one.since, None)?;
            }
            return Ok(());
        }
        modes.put(gpu, now(), None)?;
        let begun = Instant::now();
        let switched = self.mig.set_mode(gpu, true);
        modes.count(switched.is_ok());
        match switched {
            Ok(()) => {
                info!(%gpu, took_ms = millis(begun), "MIG mode switched on for a claim");
                Ok(())
            }
            Err(error) => {
                // One that goes on may yet come to be in force.
                let over = !matches!(error, MigError::Slow { .. } | MigError::Busy { .. });
                if over && matches!(self.mig.mode(gpu), Ok(false)) {
                    modes.forget(gpu);
                }
                Err(error.into())
            }
        }
    }

    fn switch_off(&self, gpu: &DeviceUuid, gpus: &NodeGpus) -> Result<(), StepError> {
        let recorded = self.mig.modes().get(gpu).is_some();
        if !recorded && !is_ours(gpus, gpu) {
            return Ok(());
        }
        match (self.mig.mode(gpu)?, recorded) {
            (false, recorded) => {
                if recorded {
                    self.mig.modes().forget(gpu);
                }
                Ok(())
            }
            (true, false) => Err(MigError::from(ModeError::Others { gpu: gpu.clone() }).into()),
            (true, true) => Ok(self.put_off(gpu)?),
        }
    }

    fn put_off(&self, gpu: &DeviceUuid) -> Result<(), MigError> {
        let modes = self.mig.modes();
        let begun = Instant::now();
        let switched = self.mig.set_mode(gpu, false);
        modes.count(switched.is_ok());
        switched?;
        modes.forget(gpu);
        info!(%gpu, took_ms = millis(begun), "MIG mode switched off: nothing is cut off the GPU");
        Ok(())
    }

    /// True if a claim has a MIG device of the board, or is about to, or has not left it yet.
    fn is_cut(&self, gpu: &DeviceUuid) -> bool {
        let has = |intent: &Intent| {
            let made = intent.places().any(|(on, _)| on == gpu);
            made || intent.devices.iter().any(|held| held.gpu == *gpu && held.mode == HoldMode::Mig)
        };
        let intents = self.store.held_on(std::slice::from_ref(gpu));
        intents.iter().any(|intent| intent.boot == self.boot && has(intent))
    }

    /// Looks at a mode of ours; in how long it is to be looked at again.
    fn review_mode(&self, held: &Held, gpu: &DeviceUuid) -> Result<Duration, PrepareError> {
        self.store.refresh(held)?;
        let modes = self.mig.modes();
        let Some(one) = modes.get(gpu) else { return Ok(EVERY) };
        let at_off = |error: MigError| failed(gpu, false)(error.into());
        if !self.mig.mode(gpu).map_err(at_off)? {
            // Also under claims: whoever switches it on again by hand wants it on after them, too.
            info!(%gpu, "MIG mode is off, and was not switched off by us: from now on it is not ours");
            modes.forget(gpu);
            return Ok(EVERY);
        }
        if self.is_cut(gpu) {
            return Ok(EVERY);
        }
        match next(one.idle_since, modes.keep, now()) {
            Next::Note => {
                let noted = modes.put(gpu, one.since, Some(now())).map_err(StepError::from);
                noted.map_err(failed(gpu, false))?;
                Ok(modes.keep)
            }
            Next::Wait(rest) => Ok(rest),
            Next::Off => {
                self.put_off(gpu).map_err(at_off)?;
                Ok(EVERY)
            }
        }
    }
}

/// True if the board's MIG mode is switched for claims.
pub(super) fn is_ours(gpus: &NodeGpus, gpu: &DeviceUuid) -> bool {
    gpus.gpus.iter().filter(|board| board.uuid == *gpu).any(Gpu::is_whole_or_cut)
}

/// True if the last look saw the board's MIG mode off.
fn is_seen_off(seen: &Inventory, gpu: &DeviceUuid) -> bool {
    let Inventory::Found(gpus) = seen else { return false };
    let is_off = |board: &Gpu| match &board.mig {
        MigMode::Off => true,
        MigMode::OnDemand(cut) => cut.switch.is_off(),
        MigMode::On(_) => false,
    };
    gpus.gpus.iter().filter(|board| board.uuid == *gpu).any(is_off)
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Switches modes off that nobody needs any more, until the process is to end.
pub async fn run(preparer: Arc<Preparer>, stop: CancellationToken) -> Result<(), Infallible> {
    let mut changes = preparer.executor.store.changes();
    let mut looks = preparer.inventory.clone();
    let mut told = BTreeMap::new();
    loop {
        changes.borrow_and_update();
        looks.mark_unchanged();
        let wait = review(&preparer, &mut told).await;
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            // The sender is the executor's, which is ours too.
            Ok(()) = changes.changed() => {}
            Ok(()) = looks.changed() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// One look at all modes of ours; in how long the next is due. `told`: why modes could not be switched off.
pub async fn review(preparer: &Preparer, told: &mut BTreeMap<DeviceUuid, String>) -> Duration {
    let executor = preparer.executor.clone();
    let seen = preparer.inventory.borrow().clone();
    let listed = move || {
        let all = executor.mig.modes().all().into_iter().map(|one| one.gpu);
        let is_due = |gpu: &DeviceUuid| !executor.is_cut(gpu) || is_seen_off(&seen, gpu);
        all.filter(is_due).collect::<Vec<DeviceUuid>>()
    };
    // A task that panicked saw none; the next one begins anew.
    let idle = tokio::task::spawn_blocking(listed).await.unwrap_or_default();
    told.retain(|gpu, _| idle.contains(gpu));
    let mut wait = EVERY;
    for gpu in idle {
        let one = gpu.clone();
        let look = move |executor: &Executor, held: &Held| executor.review_mode(held, &one);
        match preparer.within(vec![gpu.clone()], look).await {
            Ok(next) => {
                wait = wait.min(next);
                told.remove(&gpu);
            }
            Err(error) => {
                let words = error_chain(&error);
                if told.get(&gpu) != Some(&words) {
                    warn!(%gpu, error = words, "the MIG mode stays on for now; that is tried again every minute");
                    told.insert(gpu, words);
                }
            }
        }
    }
    wait.max(Duration::from_millis(100))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::host::LocalHost;

    pub fn modes(folder: &std::path::Path, boot: &str) -> MigModes {
        let host = Arc::new(LocalHost { driver: folder.to_owned().into() });
        MigModes::new(host, folder.join(FOLDER), boot.into(), Some(Duration::from_secs(600))).unwrap()
    }

    #[test]
    fn a_mode_goes_off_when_it_has_been_idle_for_so_long() {
        let keep = Duration::from_secs(600);
        assert_eq!(next(None, keep, 1_000), Next::Note);
        assert_eq!(next(Some(1_000), keep, 1_000), Next::Wait(keep));
        assert_eq!(next(Some(1_000), keep, 1_599), Next::Wait(Duration::from_secs(1)));
        assert_eq!(next(Some(1_000), keep, 1_600), Next::Off);
        assert_eq!(next(Some(1_000), keep, 999), Next::Note, "the clock was set back");
        for since in [None, Some(1_000)] {
            assert_eq!(next(since, Duration::ZERO, 1_000), Next::Off);
        }
        assert_eq!(
            next(Some(1_000), Duration::from_millis(100), 1_000),
            Next::Wait(Duration::from_millis(100))
        );
    }

    #[test]
    fn a_record_is_of_its_boot_and_whatever_else_is_there_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let (one, gpu) = (modes(dir.path(), "a"), DeviceUuid::new("GPU-1"));
        assert_eq!((one.all(), one.get(&gpu)), (vec![], None));
        one.put(&gpu, 1_000, Some(1_100)).unwrap();
        let all = modes(dir.path(), "a").all();
        assert_eq!(
            all.iter().map(|one| (one.gpu.as_str(), one.since)).collect::<Vec<_>>(),
            [("GPU-1", 1_000)]
        );
        assert_eq!(one.off_at(&all[0]), Some(1_700));
        assert_eq!(modes(dir.path(), "b").all(), []);
        let path = dir.path().join(FOLDER).join("GPU-1.json");
        let good = std::fs::read_to_string(&path).unwrap();
        for bad in [
            "",
            "{",
            "[]",
            &good[1..],
            &good.replace("\"version\":1", "\"version\":2"),
            &good.replace("GPU-1", "GPU-2"),
        ] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!((one.get(&gpu), one.all()), (None, vec![]), "{bad:?}");
            assert!(path.exists());
        }
        assert_eq!(one.get(&DeviceUuid::new("../GPU-1")), None);
        one.forget(&gpu);
        assert!(!path.exists());
        one.forget(&gpu);
    }
}
