//! Devices that no claim has, and that a pod has open all the same. Whoever has a share of a GPU, a MIG device or
//! administrative access can hand the descriptor to another pod and end: then no record names the device, and a claim that
//! gets it alone is refused on this node again and again, because its pod is bound there.
//!
//! So a device is looked at when its last claim has ended, when it was refused to a claim, and when this process starts.
//! One that a pod has open is tainted as one that is withheld, and looked at every [`super::holders::AGAIN`]. Once a claim
//! has the device, the claim's record says what becomes of it. What an earlier process withheld stays tainted until this one
//! has looked: claims would be placed there in between, and their pods bound. A look that could not be made takes nobody's
//! taint away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::watch;
use tracing::{debug, warn};

use super::executor::Executor;
use super::file_looks::Openers;
use super::holders::{self, ReleaseCause};
use super::holding::{self, Holder, Holding};
use super::lanes::Held;
use super::preparer::Preparer;
use super::store::StoreError;

use crate::host::DeviceNumber;
use crate::host::driver_root::DriverError;
use crate::inventory::{FaultLocation, Inventory};
use crate::ledger::{HeldDevice, HoldMode, Intent, Record};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::error_chain;
use crate::model::gpu::{Device, Gpu, MigMode, NodeGpus};
use crate::model::names::{DeviceName, DeviceUuid};
use crate::prepare::{self, ExclusiveDevice};

/// Why nobody gets what an earlier process withheld.
const NOT_LOOKED_AT: &str = "it was held when this driver was started again, and was not looked at since";

/// See the module's text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unclaimed {
    due: BTreeMap<DeviceUuid, DueDevice>,
    open: BTreeMap<FaultLocation, OpenDevice>,
    /// What an earlier process withheld, as far as nobody has looked since.
    before: BTreeSet<FaultLocation>,
    /// What records name of which the API server did not say whether they are wanted.
    undecided: BTreeSet<FaultLocation>,
    /// All that no claim has was to be looked at once.
    all_asked: bool,
    /// How often something was to be looked at.
    asked: u64,
}

/// A device that is to be looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DueDevice {
    gpu: DeviceUuid,
    /// Who had it last, if that is known.
    claim: Option<ClaimRef>,
    /// The number of the asking.
    asked: u64,
}

/// A device that pods have open without a claim on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OpenDevice {
    gpu: DeviceUuid,
    device: DeviceName,
    numbers: BTreeSet<DeviceNumber>,
    by: Holding,
}

/// One device, or a place of it.
#[derive(Debug, Clone)]
enum UnclaimedDevice {
    /// It was open the last time.
    Again(FaultLocation),
    First(DeviceUuid),
}

/// What is to be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// What nobody has looked at yet.
    Due,
    /// That, and what was open.
    All,
}

impl Unclaimed {
    pub fn is_empty(&self) -> bool {
        self.due.is_empty() && self.open.is_empty()
    }

    /// By device, why nobody is to get it.
    pub fn by_location(&self) -> BTreeMap<FaultLocation, String> {
        let words = |open: &OpenDevice| format!("no claim has it, but it is held: {}", open.by);
        let before = self.before.iter().map(|location| (location.clone(), NOT_LOOKED_AT.to_owned()));
        before.chain(self.open.iter().map(|(location, open)| (location.clone(), words(open)))).collect()
    }

    /// With the board of each. What nobody has looked at comes first; of the others that which is `turn`th.
    fn looks(&self, which: Which, turn: usize) -> Vec<(DeviceUuid, UnclaimedDevice)> {
        let open = self.open.iter().filter(|_| which == Which::All);
        let open = open.map(|(location, open)| (open.gpu.clone(), UnclaimedDevice::Again(location.clone())));
        let open = holders::in_turn(open.collect(), turn);
        let is_known = |uuid: &DeviceUuid| self.open.contains_key(&FaultLocation::Device(uuid.clone()));
        let due = self.due.iter().filter(|(uuid, _)| which == Which::Due || !is_known(uuid));
        due.map(|(uuid, due)| (due.gpu.clone(), UnclaimedDevice::First(uuid.clone()))).chain(open).collect()
    }
}

/// [`Unclaimed`], with who wants to know of changes.
#[derive(Default)]
pub struct UnclaimedDevices {
    all: watch::Sender<Unclaimed>,
    /// How many looks were made at what was open.
    turn: AtomicUsize,
}

impl UnclaimedDevices {
    pub fn changes(&self) -> watch::Receiver<Unclaimed> {
        self.all.subscribe()
    }

    /// An earlier process withheld these.
    pub fn remember(&self, before: BTreeSet<FaultLocation>) {
        self.change(|all| all.before = before);
    }

    /// All records were looked at, but for those of which nobody knows whether they are wanted, and once the GPUs are known
    /// what no record names, but for what is still due.
    pub(super) fn records_were_looked_at(&self, undecided: BTreeSet<FaultLocation>) {
        self.change(|all| all.undecided = undecided);
        self.forget_before();
    }

    fn forget_before(&self) {
        self.change(|all| {
            let Unclaimed { due, before, undecided, all_asked, .. } = all;
            let is_due =
                |at: &FaultLocation| matches!(at, FaultLocation::Device(uuid) if due.contains_key(uuid));
            before.retain(|at| !*all_asked || is_due(at) || undecided.contains(at));
        });
    }

    /// The look at what no record names, and has not been looked at since this process started, is over.
    pub(super) fn was_looked_at(&self) {
        self.change(|all| all.all_asked = true);
        self.forget_before();
    }

    fn change(&self, what: impl FnOnce(&mut Unclaimed)) {
        self.all.send_if_modified(|all| {
            let before = all.clone();
            what(all);
            *all != before
        });
    }

    fn look_at(&self, device: &DeviceUuid, gpu: &DeviceUuid, claim: Option<&ClaimRef>) {
        self.change(|all| {
            all.asked += 1;
            let due = DueDevice { gpu: gpu.clone(), claim: claim.cloned(), asked: all.asked };
            all.due.insert(device.clone(), due);
        });
    }

    pub(super) fn were_held_before(&self, mut locations: impl Iterator<Item = FaultLocation>) -> bool {
        let all = self.all.borrow();
        locations.any(|location| all.before.contains(&location))
    }

    /// Who had it open the last time, without a claim on it.
    pub(super) fn holders_at(&self, location: &FaultLocation) -> Vec<Holder> {
        let all = self.all.borrow();
        all.open.get(location).map(|open| open.by.holders.clone()).unwrap_or_default()
    }

    /// What is known of a device that is open.
    pub(super) fn still_held(&self, location: &FaultLocation, by: Holding) {
        self.change(|all| _ = all.open.get_mut(location).map(|open| open.by = by));
    }

    fn set(&self, location: &FaultLocation, open: OpenDevice) {
        self.change(|all| match open.by.is_none() {
            true => _ = all.open.remove(location),
            false => _ = all.open.insert(location.clone(), open),
        });
    }
}

impl Executor {
    /// A claim has ended: what nobody has now, and was not looked at, is looked at soon.
    pub(super) fn leave(&self, record: &Record, cause: ReleaseCause) {
        // No process outlives a boot.
        if cause == ReleaseCause::Anew || record.intent.boot != self.boot || !self.holders.looks_at_files() {
            return;
        }
        let on = self.store.held_on(&record.gpus());
        let unclaimed = self.holders.unclaimed();
        for held in &record.intent.devices {
            // A whole GPU was looked at before it was released. What was made for the claim was ended with it.
            let devices = match held.mode {
                HoldMode::Whole => [None, None],
                HoldMode::Share(_) | HoldMode::Admin => [Some(&held.uuid), None],
                HoldMode::Mig => [Some(&held.gpu), Some(&held.uuid).filter(|_| held.mig.is_none())],
            };
            for device in devices.into_iter().flatten() {
                if !is_held(&on, &held.gpu, &FaultLocation::Device(device.clone())) {
                    unclaimed.look_at(device, &held.gpu, Some(&record.intent.claim));
                }
            }
        }
    }

    /// A claim was not given these devices, because pods have some of them open.
    pub(super) fn note_open(&self, exclusive: &[ExclusiveDevice], intent: &Intent, openers: &Openers) {
        for (one, held, location) in located(exclusive, intent) {
            let by = Holding::by(holding::holders_of(openers_of(openers, &one.numbers)));
            let numbers = one.numbers.iter().copied().collect();
            let unclaimed = self.holders.unclaimed();
            match (by.is_none(), &held.mig) {
                (false, _) => {
                    let open = OpenDevice { gpu: held.gpu.clone(), device: one.device.clone(), numbers, by };
                    unclaimed.set(&location, open);
                }
                // Who has several open was found with the first.
                (true, None) => unclaimed.look_at(&held.uuid, &held.gpu, None),
                (true, Some(_)) => {}
            }
        }
    }

    /// A claim is given these devices.
    pub(super) fn note_given(&self, exclusive: &[ExclusiveDevice], intent: &Intent) {
        for (_, _, location) in located(exclusive, intent) {
            self.holders.unclaimed().change(|all| _ = all.open.remove(&location));
        }
    }

    /// Looks at a device that nobody has; blocks on that. Tells whom if the device was found open and was not known to be,
    /// with the claim that had it last.
    fn look_at_unclaimed(
        &self,
        held: &Held,
        (gpu, look): (&DeviceUuid, &UnclaimedDevice),
        gpus: &NodeGpus,
    ) -> Result<Option<(ClaimRef, String)>, StoreError> {
        self.store.refresh(held)?;
        let on = self.store.held_on(std::slice::from_ref(gpu));
        let rightful = self.watchers(std::slice::from_ref(gpu));
        let unclaimed = self.holders.unclaimed();
        let (uuid, location) = match look {
            UnclaimedDevice::Again(location) => {
                let open = unclaimed.all.borrow().open.get(location).cloned();
                if let Some(open) = open {
                    let still = self.still_open(open, location, &on, &rightful, gpus);
                    unclaimed.set(location, still);
                }
                return Ok(None);
            }
            UnclaimedDevice::First(uuid) => (uuid, FaultLocation::Device(uuid.clone())),
        };
        let Some(DueDevice { claim, .. }) = unclaimed.all.borrow().due.get(uuid).cloned() else {
            return Ok(None);
        };
        let mut found = None;
        let one = match self.exclusive(uuid, gpus) {
            Ok(one) => one,
            Err(error) => {
                // It stays due. That the driver's files are not there is told elsewhere.
                debug!(%uuid, error = error_chain(&error), "who has the device open is not looked at");
                return Ok(None);
            }
        };
        if let Some(one) = one
            && !is_held(&on, gpu, &location)
        {
            let numbers = one.numbers.into_iter().collect();
            let before = self.holders.were_held_before([location.clone()].into_iter());
            let known = unclaimed.holders_at(&location);
            let by = self.holders.openers_again(&numbers, &rightful, &known, (before, Instant::now()));
            if by.before {
                debug!(%uuid, %by, "it stays due");
                return Ok(None);
            }
            let is_known = unclaimed.all.borrow().open.contains_key(&location);
            let words = format!("{} ({uuid}): {by}", one.device);
            found = claim.filter(|_| !by.is_none() && !is_known).map(|claim| (claim, words));
            unclaimed.set(&location, OpenDevice { gpu: gpu.clone(), device: one.device, numbers, by });
        }
        unclaimed.change(|all| {
            all.due.remove(uuid);
            all.before.remove(&location);
        });
        Ok(found)
    }

    /// Who has it open still; nobody once a claim has it, or if it is not there any more. Blocks on the look.
    fn still_open(
        &self,
        open: OpenDevice,
        location: &FaultLocation,
        on_board: &[Intent],
        watchers: &[PodRef],
        gpus: &NodeGpus,
    ) -> OpenDevice {
        if is_held(on_board, &open.gpu, location) {
            return OpenDevice { by: Holding::default(), ..open };
        }
        let mut rightful = watchers.to_vec();
        let numbers = match location {
            // A device that is made anew may have the numbers of one that is gone.
            FaultLocation::Device(uuid) => match self.exclusive(uuid, gpus) {
                Ok(Some(one)) => one.numbers.into_iter().collect(),
                Ok(None) if gpus.gpus.iter().any(|gpu| gpu.uuid == open.gpu) => BTreeSet::new(),
                // Nothing is known of the board.
                Ok(None) | Err(_) => open.numbers.clone(),
            },
            // So may one that was made at another place of the board since.
            _ => {
                rightful.extend(on_board.iter().flat_map(|intent| intent.pods.iter().cloned()));
                open.numbers.clone()
            }
        };
        let seen = (false, Instant::now());
        let by = self.holders.openers_again(&numbers, &rightful, &open.by.holders, seen);
        OpenDevice { by, numbers, ..open }
    }

    /// Nothing of these is open to anybody, as one look for all of them tells. It takes no lanes: who is given one of
    /// them meanwhile may have it open, and they are looked at one by one. Blocks on the look.
    fn are_all_closed(&self, devices: &BTreeMap<DeviceUuid, DueDevice>, gpus: &NodeGpus) -> bool {
        let all: Result<Vec<_>, _> = devices.keys().map(|uuid| self.exclusive(uuid, gpus)).collect();
        let Ok(all) = all else { return false };
        let numbers = all.into_iter().flatten().flat_map(|one| one.numbers).collect();
        let boards: BTreeSet<DeviceUuid> = devices.values().map(|due| due.gpu.clone()).collect();
        let rightful = self.watchers(&boards.into_iter().collect::<Vec<_>>());
        self.holders.openers_of_all(&numbers, &rightful).is_ok_and(|found| found.openers.is_empty())
    }

    /// None of a device that is not there, or that nobody gets alone.
    ///
    /// # Errors
    /// Its nodes cannot be found.
    fn exclusive(&self, uuid: &DeviceUuid, gpus: &NodeGpus) -> Result<Option<ExclusiveDevice>, DriverError> {
        let mut devices = gpus.gpus.iter().flat_map(Gpu::devices);
        let device = devices.find(|device| device.uuid() == uuid && is_given_alone(device));
        let Some((device, nodes)) = device.and_then(|device| Some((device, prepare::nodes_of(device)?)))
        else {
            return Ok(None);
        };
        let files = self.driver.files(Some(&gpus.driver.driver), &[nodes])?;
        Ok(prepare::exclusive_of(device, &files.nodes))
    }
}

impl Preparer {
    /// Every device is to be looked at that no claim has: what an earlier process knew is not known.
    pub(super) fn look_at_all_unclaimed(&self, gpus: &NodeGpus) {
        let executor = &self.executor;
        for device in gpus.gpus.iter().flat_map(Gpu::devices).filter(is_given_alone) {
            let (gpu, uuid) = (&device.gpu().uuid, device.uuid());
            let on = executor.store.held_on(std::slice::from_ref(gpu));
            if executor.holders.looks_at_files() && !is_held(&on, gpu, &FaultLocation::Device(uuid.clone())) {
                executor.holders.unclaimed().look_at(uuid, gpu, None);
            }
        }
    }

    /// Looks at them one by one, for a bounded time: while a device is looked at, its board's lane is held, and claims that
    /// came meanwhile have the lane before the next device.
    pub(super) async fn look_at_unclaimed(&self, which: Which) {
        let unclaimed = self.executor.holders.unclaimed();
        let gpus = match &*self.inventory.borrow() {
            Inventory::Found(gpus) => gpus.clone(),
            // They stay due.
            _ => return,
        };
        let due = unclaimed.all.borrow().due.clone();
        // At the start, and after a claim with many.
        if due.len() > 1 {
            let (executor, on) = (self.executor.clone(), gpus.clone());
            let devices = due.clone();
            let look = tokio::task::spawn_blocking(move || executor.are_all_closed(&devices, &on));
            if look.await.is_ok_and(|closed| closed) {
                // But for those that a claim has left since the look began.
                unclaimed.change(|all| {
                    all.due.retain(|device, now| due.get(device) != Some(now));
                    all.before.retain(
                        |location| !matches!(location, FaultLocation::Device(uuid) if due.contains_key(uuid)),
                    );
                });
            }
        }
        let looks = unclaimed.all.borrow().looks(which, unclaimed.turn.load(Ordering::Relaxed));
        let begun = Instant::now();
        for (gpu, look) in looks {
            if begun.elapsed() > holders::IN_ONE_GO {
                break;
            }
            if matches!(look, UnclaimedDevice::Again(_)) {
                unclaimed.turn.fetch_add(1, Ordering::Relaxed);
            }
            let (at, on) = (gpu.clone(), gpus.clone());
            let look = move |executor: &Executor, held: &Held| {
                Ok(executor.look_at_unclaimed(held, (&at, &look), &on)?)
            };
            match self.within(vec![gpu.clone()], look).await {
                Ok(found) => found.iter().for_each(|(claim, who)| self.reporter.held_after(claim, who)),
                Err(error) => {
                    let error = error_chain(&error);
                    warn!(%gpu, error, "who has the GPU open without a claim was not looked at; that is tried again");
                }
            }
        }
    }
}

/// What claims may get alone, and is there whether or not a claim has it.
fn is_given_alone(device: &Device<'_>) -> bool {
    match device {
        Device::Whole(_) => true,
        Device::Mig { parent, .. } => matches!(parent.mig, MigMode::On(_)),
        Device::Parent(_) | Device::Place { .. } => false,
    }
}

/// A claim has the device, or a part of it, or what it is a part of.
fn is_held(on_board: &[Intent], gpu: &DeviceUuid, location: &FaultLocation) -> bool {
    let has = |held: &HeldDevice| match location {
        FaultLocation::Device(uuid) => uuid == gpu || *uuid == held.uuid,
        FaultLocation::Slices(_, at) => held.mig.as_ref().is_none_or(|mig| mig.place.placement.overlaps(*at)),
        FaultLocation::Board(_) | FaultLocation::Instance(..) | FaultLocation::Taken(..) => true,
    };
    let mut held = on_board.iter().flat_map(|intent| &intent.devices);
    held.any(|held| {
        held.gpu == *gpu && held.mode != HoldMode::Admin && (held.mode == HoldMode::Whole || has(held))
    })
}

pub(super) fn located<'a>(
    exclusive: &'a [ExclusiveDevice],
    intent: &'a Intent,
) -> impl Iterator<Item = (&'a ExclusiveDevice, &'a HeldDevice, FaultLocation)> {
    exclusive.iter().filter_map(|one| {
        let held = intent.devices.iter().find(|held| held.uuid == one.uuid)?;
        Some((one, held, holders::location(held)))
    })
}

/// Those that have one of these devices open.
fn openers_of(openers: &Openers, numbers: &[DeviceNumber]) -> Openers {
    let of_these = openers.iter().map(|(pod, pids)| {
        let pids = pids.iter().filter(|(_, number)| numbers.contains(number));
        (pod.clone(), pids.map(|(pid, number)| (*pid, *number)).collect::<BTreeMap<_, _>>())
    });
    of_these.filter(|(_, pids)| !pids.is_empty()).collect()
}
