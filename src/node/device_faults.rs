//! Keeps the faults of the GPUs up to date, from Xids that NVML reports, from looks at the GPUs and, while claims
//! need MPS daemons, from the state of those daemons. The publisher turns faults into taints, the health stream
//! reports them to kubelet, and the reporter to the claims concerned.
//!
//! NVML reports an Xid once, so Xids outlast this process in [`FILE`], with the boot and the load of the driver in
//! which they were seen, and so does what was withheld, until it is looked at again ([`super::unclaimed`]). Another boot or load clears them, because it means a reset. An administrator who has reset
//! a single GPU removes the file to clear them.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::discovery::Discovered;
use super::executor::Executor;
use crate::host::{Durability, boot};
use crate::inventory::{
    DaemonsDown, DeviceFault, DeviceFaults, DriverSession, FaultLocation, Inventory, ShmFull, Xid,
};
use crate::ledger::Phase;
use crate::model::error_chain;
use crate::model::names::DeviceUuid;
use crate::model::share::{MpsGroup, MpsLimits};
use crate::nvml::GpuEvent;
use crate::supervisor::protocol::{DaemonPhase, DaemonState};

/// In the state folder.
pub const FILE: &str = "ailments.json";
const VERSION: u32 = 1;
/// How many times rarer the looks are while there is no fault and no claim needs a daemon.
const IDLE_LOOKS: u32 = 10;
/// The kernel module whose load is a reset of every board.
const MODULE: &str = "nvidia";
/// An uncorrectable ECC error, which the driver tells as an Xid too.
const XID_ECC: u64 = 48;
/// For so many looks' time without an answer `tranche mps` is believed to be away for a moment: it is being
/// updated, say. Then its daemons count as down.
const SILENT_LOOKS: u32 = 10;
/// The same for a daemon that claims need and that is not there: a claim may come before the sweeper has asked for its
/// daemon.
const MISSING_LOOKS: u32 = 3;
/// The same for limits that are being set. Each step of that has a deadline of up to 5 seconds in `tranche mps`, after
/// which the daemon counts as down with the reason, and nobody gets to the daemon meanwhile. Each new claim may need
/// other limits, with which it begins anew.
const SETTLING_LOOKS: u32 = 15;
/// For so many looks' time a /dev/shm that was full must have room before it counts as such.
const ROOMY_LOOKS: u32 = 3;

/// What the loop needs.
pub struct FaultSources {
    pub discovered: Discovered,
    /// For the ledger, the MPS daemons and the boot.
    pub executor: Arc<Executor>,
    /// Where [`FILE`] is kept.
    pub folder: PathBuf,
    pub sys_root: PathBuf,
    /// From one look at daemons, driver and file to the next.
    pub every: Duration,
}

impl FaultSources {
    /// A daemon's death is seen within this and the time of an answer.
    pub const EVERY: Duration = Duration::from_secs(1);
}

/// The loop. Made by [`FaultWatcher::new`], driven by [`FaultWatcher::run`].
pub struct FaultWatcher {
    sources: Arc<FaultSources>,
    run: DriverSession,
    known: DeviceFaults,
    daemons: Daemons,
    /// What processes hold, all of it or a share, without an allocation, and why, as text.
    withheld: BTreeMap<FaultLocation, String>,
    saving: Saving,
    /// Times that the file was brought up to date.
    saves: u64,
    events: broadcast::Receiver<GpuEvent>,
    out: watch::Sender<DeviceFaults>,
    inventory_with_faults: watch::Sender<Inventory>,
    states: watch::Sender<Vec<DaemonState>>,
    daemons_down: watch::Sender<Vec<DaemonDown>>,
    /// Claims need daemons, as of the last look.
    needs_daemons: bool,
}

/// What the loop publishes.
#[derive(Debug, Clone)]
pub struct FaultReceivers {
    pub device_faults: watch::Receiver<DeviceFaults>,
    /// The inventory with [`DeviceFaults::applied_to`] health.
    pub inventory_with_faults: watch::Receiver<Inventory>,
    /// What `tranche mps` last said of its daemons; empty while no claim needs one.
    pub states: watch::Receiver<Vec<DaemonState>>,
    pub daemons_down: watch::Receiver<Vec<DaemonDown>>,
}

/// An MPS daemon that claims need and that does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonDown {
    pub group: MpsGroup,
    pub reason: String,
}

/// How [`FILE`] stands to what is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Saving {
    Saved,
    Due,
}

#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    version: u32,
    run: DriverSession,
    /// The name in the file is that of earlier versions.
    #[serde(rename = "ailments")]
    device_faults: Vec<DeviceFault>,
}

/// What one look at daemons, driver and file found.
struct Observation {
    driver: Option<u64>,
    file_is_there: bool,
    /// Saves before the look: what was written since it cannot have seen.
    saves: u64,
    /// The groups that claims need, and what `tranche mps` says of all; none if none is needed.
    needed: BTreeSet<MpsGroup>,
    states: Option<Result<Vec<DaemonState>, String>>,
}

impl FaultWatcher {
    /// Reads what is remembered; blocks for that. Events count from now on.
    pub fn new(sources: FaultSources) -> (Self, FaultReceivers) {
        let driver = boot::module_load(&sources.sys_root, MODULE);
        let run = DriverSession { boot: sources.executor.boot.clone(), driver };
        // What is there already, and right, is not written: another instance may be about to.
        let (known, saving) = match read(&sources.folder) {
            Some(earlier) => {
                let known = DeviceFaults::restored(earlier.device_faults.clone(), &earlier.run, &run);
                let right = earlier.run == run && earlier.device_faults == known.persistent();
                (known, if right { Saving::Saved } else { Saving::Due })
            }
            None => (DeviceFaults::default(), Saving::Saved),
        };
        for fault in known.iter() {
            warn!(place = ?fault.location, kind = fault.kind.word(), "remembered: {}", fault.words);
        }
        let holders = &sources.executor.holders;
        holders.unclaimed().remember(known.withheld());
        // From the beginning: what comes first, the GPUs or what is withheld, is left to chance.
        let withheld = holders.kept_from_others();
        let (out, device_faults) = watch::channel(known.clone());
        let (inventory_with_faults, inventory_out) = watch::channel(Inventory::Unknown);
        let (states, states_out) = watch::channel(Vec::new());
        let (daemons_down, down_out) = watch::channel(Vec::new());
        let told = FaultReceivers {
            device_faults,
            inventory_with_faults: inventory_out,
            states: states_out,
            daemons_down: down_out,
        };
        let (events, daemons) = (sources.discovered.events.subscribe(), Daemons::default());
        let sources = Arc::new(sources);
        (
            Self {
                sources,
                run,
                known,
                daemons,
                withheld,
                saving,
                saves: 0,
                events,
                out,
                inventory_with_faults,
                states,
                daemons_down,
                needs_daemons: false,
            },
            told,
        )
    }

    /// Watches until the process is to end.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut inventory = self.sources.discovered.inventory.clone();
        let mut ledger = self.sources.executor.store.changes();
        let mut withheld = self.sources.executor.holders.withheld();
        withheld.mark_changed();
        let mut unclaimed = self.sources.executor.holders.unclaimed().changes();
        unclaimed.mark_changed();
        let mut carved = self.sources.executor.mig.changes();
        let (mut last, mut next) = (Instant::now(), Instant::now());
        let mut looking: Option<JoinHandle<Observation>> = None;
        inventory.mark_changed();
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                event = next_event(&mut self.events) => self.take_event(event),
                Ok(()) = inventory.changed() => self.take_facts(&inventory.borrow_and_update()),
                seen = ended(&mut looking) => {
                    looking = None;
                    if let Some(seen) = seen {
                        self.take_observation(seen);
                        self.take_facts(&inventory.borrow());
                    }
                }
                // The sender is the executor's, which is ours too.
                Ok(()) = withheld.changed() => self.take_withheld(),
                Ok(()) = unclaimed.changed() => self.take_withheld(),
                Ok(()) = carved.changed() => self.set(self.with_carving(&self.known)),
                // Not at once: many claims come together.
                Ok(()) = ledger.changed() => next = next.min(last + self.sources.every),
                () = sleep_until(next), if looking.is_none() => {
                    last = Instant::now();
                    next = last + self.pause();
                    let (sources, saves) = (self.sources.clone(), self.saves);
                    looking = Some(tokio::task::spawn_blocking(move || look(&sources, saves)));
                }
            }
            // What was just learnt may call for closer looks.
            next = next.min(last + self.pause());
            self.tell();
            self.judge(&inventory.borrow());
            self.save().await;
        }
    }

    /// Looks are rare while there is no fault and no claim needs a daemon.
    fn pause(&self) -> Duration {
        let idle = !self.needs_daemons && self.known.is_empty();
        self.sources.every * if idle { IDLE_LOOKS } else { 1 }
    }

    fn take_event(&mut self, event: GpuEvent) {
        let xid = match event {
            GpuEvent::Xid { gpu, code, gpu_instance, .. } => Xid { gpu, code, gpu_instance },
            GpuEvent::EccDoubleBit { gpu } => Xid { gpu, code: XID_ECC, gpu_instance: None },
            GpuEvent::MigChanged { .. } | GpuEvent::EventWaitFailed { .. } => return,
        };
        // Whose instance it is stands in the ledger; by its number it could be anybody's.
        let at = xid.gpu_instance.and_then(|instance| self.sources.executor.made_at(&xid.gpu, instance));
        self.set(self.known.with_xid_at(&xid, at, now()));
    }

    fn take_facts(&mut self, inventory: &Inventory) {
        let facts = self.known.with_facts(inventory, &self.daemons.dead_devices(), now());
        let facts = facts.with_full_shm(&self.known, &self.daemons.full, now());
        let facts = facts.with_withheld(&self.withheld, now());
        self.set(self.with_carving(&facts));
    }

    /// With the MIG devices that could not be made lately, and those that could not be ended.
    fn with_carving(&self, faults: &DeviceFaults) -> DeviceFaults {
        let executor = &self.sources.executor;
        faults.with_unmade(&executor.mig.unmade(), now()).with_unended(&executor.unended(), now())
    }

    /// A share whose claim was taken away keeps new pods off its whole board: what it holds the API server counts as free,
    /// so that neither scheduler nor controller can tell what is left beside it. Who is there already goes on.
    fn take_withheld(&mut self) {
        self.withheld = self.sources.executor.holders.kept_from_others();
        self.set(self.known.with_withheld(&self.withheld, now()));
    }

    fn take_observation(&mut self, seen: Observation) {
        self.needs_daemons = seen.states.is_some();
        let states = match &seen.states {
            None => Some(Vec::new()),
            Some(Ok(states)) => Some(states.clone()),
            Some(Err(_)) => None,
        };
        self.daemons.take(&seen.needed, seen.states, (Instant::now(), self.sources.every));
        let down = &self.daemons.down;
        self.daemons_down.send_if_modified(|before| {
            let differs = before != down;
            before.clone_from(down);
            differs
        });
        if let Some(states) = states {
            self.states.send_replace(states);
        }
        let now = DriverSession { driver: seen.driver.or(self.run.driver), ..self.run.clone() };
        if now != self.run {
            let kept = DeviceFaults::restored(self.known.persistent(), &self.run, &now);
            if !kept.has_xids() && self.known.has_xids() {
                info!("the driver was loaded again: Xids seen before no longer count");
            }
            self.run = now;
            self.set(kept);
            self.saving = Saving::Due;
        }
        let removed = self.saving == Saving::Saved && seen.saves == self.saves && !seen.file_is_there;
        if removed && !self.known.persistent().is_empty() {
            if self.known.has_xids() {
                info!(file = FILE, "the file was removed: Xids seen before are forgotten");
            }
            self.set(self.known.without_xids());
            // What is withheld is so still.
            self.saving = Saving::Due;
        }
    }

    fn set(&mut self, next: DeviceFaults) {
        if next.persistent() != self.known.persistent() {
            self.saving = Saving::Due;
        }
        self.known = next;
    }

    /// Publishes what has changed, and says so in the log.
    fn tell(&self) {
        let before = self.out.borrow().clone();
        if before == self.known {
            return;
        }
        let has = |all: &DeviceFaults, one: &DeviceFault| {
            all.iter().any(|other| (&other.location, other.kind) == (&one.location, one.kind))
        };
        for fault in self.known.iter().filter(|fault| !has(&before, fault)) {
            warn!(place = ?fault.location, effect = %fault.kind.effect().as_str(), "{}", fault.words);
        }
        for fault in before.iter().filter(|fault| !has(&self.known, fault)) {
            info!(place = ?fault.location, "over: {}", fault.words);
        }
        self.out.send_replace(self.known.clone());
    }

    fn judge(&self, inventory: &Inventory) {
        let now = self.known.applied_to(inventory);
        self.inventory_with_faults.send_if_modified(|before| {
            let differs = *before != now;
            *before = now;
            differs
        });
    }

    /// Brings the file up to date. What fails is tried again with the next tick.
    async fn save(&mut self) {
        if self.saving == Saving::Saved {
            return;
        }
        let (sources, device_faults) = (self.sources.clone(), self.known.persistent());
        let remembered = Remembered { version: VERSION, run: self.run.clone(), device_faults };
        let written = tokio::task::spawn_blocking(move || write(&sources, &remembered)).await;
        match written.unwrap_or_else(|panicked| Err(io::Error::other(panicked))) {
            Ok(()) => (self.saving, self.saves) = (Saving::Saved, self.saves + 1),
            Err(error) => {
                error!(file = FILE, %error, "faults of the GPUs cannot be recorded; trying again")
            }
        }
    }
}

/// Seconds since 1970, as the file of faults has them.
fn now() -> u64 {
    u64::try_from(Timestamp::now().as_second()).unwrap_or(0)
}

/// The next event; never, once there will be none.
async fn next_event(events: &mut broadcast::Receiver<GpuEvent>) -> GpuEvent {
    loop {
        match events.recv().await {
            Ok(event) => return event,
            // Discovery counts them.
            Err(RecvError::Lagged(missed)) => {
                warn!(missed, "GPU events came too fast; some Xids may be unknown")
            }
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

/// The look's end; a look that panicked found nothing.
async fn ended(looking: &mut Option<JoinHandle<Observation>>) -> Option<Observation> {
    match looking {
        Some(look) => look.await.ok(),
        None => std::future::pending().await,
    }
}

fn look(sources: &FaultSources, saves: u64) -> Observation {
    // The groups whose daemons running claims use.
    let (store, boot) = (&sources.executor.store, &sources.executor.boot);
    let needed: BTreeSet<_> = store.mps_groups(boot, |phase| *phase == Phase::Ready).into_keys().collect();
    let states = || sources.executor.daemons.states().map_err(|error| error_chain(&error));
    Observation {
        driver: boot::module_load(&sources.sys_root, MODULE),
        file_is_there: sources.folder.join(FILE).exists(),
        saves,
        states: (!needed.is_empty()).then(states),
        needed,
    }
}

fn read(folder: &Path) -> Option<Remembered> {
    let bytes = match std::fs::read(folder.join(FILE)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            warn!(file = FILE, %error, "earlier faults of the GPUs cannot be read");
            return None;
        }
    };
    let read = serde_json::from_slice::<Remembered>(&bytes);
    read.inspect_err(
        |error| warn!(file = FILE, %error, "the record of earlier faults of the GPUs is not understood"),
    )
    .ok()
    .filter(|remembered| remembered.version == VERSION)
}

/// Without anything to remember there is no file.
fn write(sources: &FaultSources, remembered: &Remembered) -> io::Result<()> {
    let host = &sources.executor.host;
    if remembered.device_faults.is_empty() {
        return host.remove(&sources.folder.join(FILE)).map(drop);
    }
    let bytes = serde_json::to_vec(remembered)?;
    host.write(&sources.folder, FILE, &bytes, Durability::PowerLoss)
}

/// Which daemons are down, from one answer of `tranche mps` to the next.
#[derive(Debug, Default)]
struct Daemons {
    down: Vec<DaemonDown>,
    needed: BTreeSet<MpsGroup>,
    /// Since when.
    silent: Option<Instant>,
    /// Since when, and with which limits to be set.
    missing: BTreeMap<MpsGroup, (Instant, Option<MpsLimits>)>,
    /// Whose /dev/shm is full.
    full: Vec<ShmFull>,
    /// When each of those was last seen without room.
    tight: BTreeMap<MpsGroup, Instant>,
}

impl Daemons {
    /// Takes in a look of this moment; `every` is from one look to the next.
    fn take(
        &mut self,
        needed: &BTreeSet<MpsGroup>,
        states: Option<Result<Vec<DaemonState>, String>>,
        (now, every): (Instant, Duration),
    ) {
        self.needed.clone_from(needed);
        self.down.retain(|daemon| needed.contains(&daemon.group));
        self.missing.retain(|group, _| needed.contains(group));
        self.full.retain(|full| needed.contains(&full.group));
        if let Some(Ok(states)) = &states {
            self.take_full(needed, states, now, every);
        }
        match states {
            None => self.silent = None,
            Some(Ok(states)) => {
                self.silent = None;
                let mut reason = |group: &MpsGroup| self.reason(group, &states, now, every);
                let down = needed.iter().filter_map(|group| Some((group, reason(group)?)));
                let down: Vec<_> = down.collect::<BTreeMap<_, _>>().into_iter().collect();
                self.down = down
                    .into_iter()
                    .map(|(group, reason)| DaemonDown { group: group.clone(), reason })
                    .collect();
            }
            Some(Err(reason)) => {
                if now.duration_since(*self.silent.get_or_insert(now)) >= every * SILENT_LOOKS {
                    let daemon =
                        |group: &MpsGroup| DaemonDown { group: group.clone(), reason: reason.clone() };
                    self.down = needed.iter().map(daemon).collect();
                }
            }
        }
    }

    /// Devices of which no claim has a daemon that serves. Where claims have daemons of their own, the death of one is
    /// that claim's concern, and new claims on the device get daemons of their own.
    fn dead_devices(&self) -> Vec<DaemonsDown> {
        let is_down = |group: &MpsGroup| self.down.iter().any(|daemon| daemon.group == *group);
        let serving = self.needed.iter().filter(|group| !is_down(group));
        let alive: BTreeSet<&DeviceUuid> = serving.flat_map(MpsGroup::devices).collect();
        let mut dead = BTreeMap::new();
        for daemon in &self.down {
            for device in daemon.group.devices().iter().filter(|device| !alive.contains(device)) {
                dead.entry(device.clone()).or_insert_with(|| daemon.reason.clone());
            }
        }
        dead.into_iter().map(|(device, reason)| DaemonsDown { device, reason }).collect()
    }

    /// A /dev/shm is full once it is seen so, and no more once it had room for a while: who fills and empties it in
    /// turn is no reason to write taints all the time.
    fn take_full(
        &mut self,
        needed: &BTreeSet<MpsGroup>,
        states: &[DaemonState],
        now: Instant,
        every: Duration,
    ) {
        let told = std::mem::take(&mut self.full);
        for state in states.iter().filter(|state| needed.contains(&state.group)) {
            let (group, usage) = (&state.group, state.shm);
            let was_full = told.iter().find(|full| full.group == *group);
            let is_full = usage.is_some_and(|usage| usage.is_full());
            if is_full || was_full.is_some() && usage.is_some_and(|usage| !usage.is_roomy()) {
                self.tight.insert(group.clone(), now);
            }
            let lately =
                self.tight.get(group).is_some_and(|at| now.duration_since(*at) < every * ROOMY_LOOKS);
            match (was_full, usage) {
                (Some(full), _) if lately => self.full.push(full.clone()),
                (None, Some(usage)) if is_full => self.full.push(ShmFull { group: group.clone(), usage }),
                _ => {}
            }
        }
        let full = &self.full;
        self.tight.retain(|group, _| full.iter().any(|one| one.group == *group));
    }

    /// Why a group's daemon counts as down.
    fn reason(
        &mut self,
        group: &MpsGroup,
        states: &[DaemonState],
        now: Instant,
        every: Duration,
    ) -> Option<String> {
        let state = states.iter().find(|state| state.group == *group);
        let (words, looks) = match state.map(|state| &state.phase) {
            Some(DaemonPhase::Serving { .. }) => {
                self.missing.remove(group);
                return None;
            }
            Some(DaemonPhase::Down { reason }) => return Some(reason.clone()),
            Some(DaemonPhase::Settling { .. }) => ("its limits are not in force", SETTLING_LOOKS),
            Some(DaemonPhase::Resting { .. }) | None => {
                ("`tranche mps` does not keep it for these claims", MISSING_LOOKS)
            }
        };
        let limits = state.and_then(|state| state.limits.as_ref());
        let same = self.missing.get(group).filter(|(_, before)| before.as_ref() == limits);
        let since = same.map_or(now, |(since, _)| *since);
        self.missing.insert(group.clone(), (since, limits.cloned()));
        (now.duration_since(since) >= every * looks).then(|| words.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::quantity::Bytes;
    use crate::model::share::SharedMemory;

    fn group(name: &str) -> MpsGroup {
        MpsGroup::new([name.into()])
    }

    fn state(name: &str, phase: DaemonPhase) -> DaemonState {
        DaemonState {
            group: group(name),
            exclusive: true,
            phase,
            limits: None,
            memory_answers: Vec::new(),
            compute_answer: String::new(),
            deaths: 0,
            servers: Vec::new(),
            shm: None,
        }
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let fault = r#"{"place":{"Board":"GPU-0"},"kind":{"Xid":48},"since":100,"words":"Xid 48"}"#;
        let text = format!(r#"{{"version":1,"run":{{"boot":"a","driver":1}},"ailments":[{fault}]}}"#);
        std::fs::write(folder.path().join(FILE), &text).unwrap();
        let remembered = read(folder.path()).unwrap();
        assert_eq!(remembered.device_faults.len(), 1);
        assert_eq!(serde_json::to_string(&remembered).unwrap(), text);
    }

    fn down(daemons: &Daemons) -> Vec<(String, &str)> {
        daemons.down.iter().map(|daemon| (daemon.group.to_string(), daemon.reason.as_str())).collect()
    }

    const EVERY: Duration = Duration::from_secs(1);

    /// Looks at this many seconds from `begin` on.
    fn at(begin: Instant, seconds: u32) -> (Instant, Duration) {
        (begin + EVERY * seconds, EVERY)
    }

    #[test]
    fn a_dead_daemon_is_told_at_once_and_a_missing_one_after_a_while() {
        let (needed, begin) = (BTreeSet::from([group("a"), group("b"), group("c")]), Instant::now());
        let states = || {
            let dead = DaemonPhase::Down { reason: "it exited".into() };
            Some(Ok(vec![state("a", dead), state("b", DaemonPhase::Serving { pid: 1 })]))
        };
        let mut daemons = Daemons::default();
        for _ in 0..10 {
            // However often it is looked.
            daemons.take(&needed, states(), at(begin, 0));
            assert_eq!(down(&daemons), [("a".to_owned(), "it exited")]);
        }
        daemons.take(&needed, states(), at(begin, MISSING_LOOKS));
        assert_eq!(down(&daemons).len(), 2);
        assert!(down(&daemons)[1].1.contains("tranche mps"), "{daemons:?}");
        let all = ["a", "b", "c"].map(|name| state(name, DaemonPhase::Serving { pid: 1 }));
        daemons.take(&needed, Some(Ok(all.to_vec())), at(begin, MISSING_LOOKS));
        assert_eq!(down(&daemons), []);
    }

    #[test]
    fn a_device_is_dead_if_no_claim_on_it_has_a_daemon_that_serves() {
        let own = |claim: &str| group("a").of_claim(claim.into());
        let state = |group, phase| DaemonState { group, ..state("", phase) };
        let dead = |first: DaemonPhase, second: DaemonPhase| {
            let needed = BTreeSet::from([own("x"), own("y")]);
            let states = vec![state(own("x"), first), state(own("y"), second)];
            let mut daemons = Daemons::default();
            daemons.take(&needed, Some(Ok(states)), at(Instant::now(), 0));
            daemons.dead_devices()
        };
        let (down, serving) =
            (DaemonPhase::Down { reason: "it exited".into() }, DaemonPhase::Serving { pid: 1 });
        assert_eq!(dead(down.clone(), serving.clone()), [], "that is one claim's concern");
        assert_eq!(dead(serving.clone(), serving), []);
        let all = [DaemonsDown { device: "a".into(), reason: "it exited".into() }];
        assert_eq!(dead(down.clone(), down), all);
    }

    #[test]
    fn a_full_shm_is_told_at_once_and_its_room_once_it_lasts() {
        let (needed, begin) = (BTreeSet::from([group("a")]), Instant::now());
        let look = |used: u64| {
            let shm = SharedMemory {
                used: Bytes::from_mib(used),
                size: Bytes::from_mib(100),
                files: 2,
                files_max: 8194,
                most: None,
            };
            let state = state("a", DaemonPhase::Serving { pid: 1 });
            Some(Ok(vec![DaemonState { shm: Some(shm), ..state }]))
        };
        let mut daemons = Daemons::default();
        let seen = [
            (94, false),
            (96, true),
            (10, true),
            (85, true),
            (79, true),
            (79, true),
            (79, false),
            (94, false),
        ];
        for (second, (used, full)) in (0..).zip(seen) {
            daemons.take(&needed, look(used), at(begin, second));
            assert_eq!(daemons.full.len(), usize::from(full), "second {second}: {daemons:?}");
        }
        daemons.take(&needed, look(99), at(begin, 20));
        daemons.take(&needed, Some(Err("no answer".into())), at(begin, 21));
        assert_eq!(daemons.full.len(), 1, "nothing else is known");
        daemons.take(&BTreeSet::new(), None, at(begin, 22));
        assert!(daemons.full.is_empty(), "nobody has it any more");
        daemons.take(&needed, look(50), at(begin, 23));
        assert!(daemons.full.is_empty(), "{daemons:?}");
    }

    #[test]
    fn limits_that_are_being_set_are_no_fault_unless_it_takes_for_ever() {
        let (needed, begin) = (BTreeSet::from([group("a")]), Instant::now());
        let look = |phase: DaemonPhase| Some(Ok(vec![state("a", phase)]));
        let mut daemons = Daemons::default();
        for second in (0..20).step_by(2) {
            daemons.take(&needed, look(DaemonPhase::Settling { pid: 1 }), at(begin, second));
            assert_eq!(down(&daemons), []);
            daemons.take(&needed, look(DaemonPhase::Serving { pid: 1 }), at(begin, second + 1));
        }
        // Others are wanted before those are in force, again and again.
        for second in 20..40 {
            let limits = MpsLimits { memory: vec![Some(Bytes::from_mib(second.into()))], compute: None };
            let state = DaemonState { limits: Some(limits), ..state("a", DaemonPhase::Settling { pid: 1 }) };
            daemons.take(&needed, Some(Ok(vec![state])), at(begin, second));
            assert_eq!(down(&daemons), []);
        }
        // A busy machine takes its time.
        for second in 40..40 + SETTLING_LOOKS {
            daemons.take(&needed, look(DaemonPhase::Settling { pid: 1 }), at(begin, second));
            assert_eq!(down(&daemons), []);
        }
        daemons.take(&needed, look(DaemonPhase::Settling { pid: 1 }), at(begin, 40 + SETTLING_LOOKS));
        assert_eq!(down(&daemons), [("a".to_owned(), "its limits are not in force")]);
    }

    #[test]
    fn a_supervisor_that_does_not_answer_is_given_time() {
        let (needed, begin) = (BTreeSet::from([group("a")]), Instant::now());
        let mut daemons = Daemons::default();
        for second in 0..SILENT_LOOKS {
            daemons.take(&needed, Some(Err("no answer".into())), at(begin, second));
            assert_eq!(down(&daemons), []);
        }
        daemons.take(&needed, Some(Err("no answer".into())), at(begin, SILENT_LOOKS));
        assert_eq!(down(&daemons), [("a".to_owned(), "no answer")]);
        daemons.take(&BTreeSet::new(), None, at(begin, SILENT_LOOKS));
        assert_eq!(down(&daemons), [], "nobody needs it any more");
    }
}
