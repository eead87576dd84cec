//! Makes looks of NVML's lists: each process with its owner, on its account, and how it came to the GPU. And counts them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;
use tracing::warn;

use super::detours::{Detours, OwnDaemons};
use super::knowledge::{Knowledge, ProcessStanding};
use super::managed::Managed;
use super::shares::WatchedDevice;
use super::table::{KnownProcess, ProcessTable};
use super::{ALONE_TICKS, Watchdog};
use crate::host::cgroup::ProcessOwner;
use crate::model::claim::ClaimRef;
use crate::model::names::{DeviceUuid, PodUid};
use crate::model::process::{ProcessKey, ProcessPod};
use crate::model::quantity::Bytes;
use crate::model::share::MpsGroup;
use crate::model::time::Moment;
use crate::nvml::{ContextKind, GpuProcess};
use crate::sharing::watch::{BoardLook, ObservedProcess, ProcessAccess};

/// When looks are made, and how many were.
pub(super) struct LookCounts {
    /// The moment 0.
    started: Instant,
    /// Ticks since the last look.
    passed: u32,
    /// So many of each device.
    made: BTreeMap<DeviceUuid, Arc<AtomicU64>>,
}

impl LookCounts {
    pub fn new(started: Instant) -> Self {
        Self { started, passed: 0, made: BTreeMap::new() }
    }

    pub fn now(&self) -> Moment {
        self.started.elapsed()
    }

    /// A tick has come. True if a look is made now: where nobody shares a device (`rests`), they are rare.
    pub fn take_turn(&mut self, rests: bool) -> bool {
        self.passed += 1;
        let is_due = !rests || self.passed >= ALONE_TICKS;
        if is_due {
            self.passed = 0;
        }
        is_due
    }

    /// A regular look was made at the device.
    pub fn note(&mut self, gpu: &DeviceUuid) {
        self.of(gpu).fetch_add(1, Ordering::Relaxed);
    }

    pub fn of(&mut self, gpu: &DeviceUuid) -> &Arc<AtomicU64> {
        self.made.entry(gpu.clone()).or_default()
    }

    pub fn keep(&mut self, devices: &BTreeMap<DeviceUuid, WatchedDevice>) {
        self.made.retain(|device, _| devices.contains_key(device));
    }
}

impl Watchdog {
    /// The devices' processes, each on its account.
    pub(super) fn observe(
        &mut self,
        answers: Vec<(DeviceUuid, Vec<GpuProcess>)>,
        now: Moment,
    ) -> Vec<BoardLook> {
        let Some(table) = &self.table else { return Vec::new() };
        let all = answers.iter().flat_map(|(_, list)| list.iter());
        self.knowledge.note_processes(all.filter_map(|process| table.get(process.pid)), now);
        let is_listed =
            |process: &ProcessKey| table.get(process.pid).is_some_and(|known| known.process == *process);
        let groups: HashSet<&MpsGroup> = self.devices.values().flat_map(|device| &device.groups).collect();
        self.detours.keep(is_listed, &groups);
        let (mut looks, mut untold) = (Vec::new(), false);
        let managed = Managed::new(&self.devices, self.shown.measured(), &answers);
        for (gpu, list) in answers {
            let Some(device) = self.devices.get(&gpu) else { continue };
            untold |= device.has_own_daemons() && list.iter().any(is_untold);
            let mut access = Accesses { device, detours: &mut self.detours, table, list: &list, now };
            let (mut claimed, mut foreign) = (Vec::new(), Vec::new());
            for (process, known) in list.iter().filter_map(|one| Some((one, table.get(one.pid)?))) {
                let owner = self.knowledge.owner(device, known);
                let mut seen = seen(process, known, device);
                match owner {
                    ProcessStanding::Claim => {
                        let more = managed.of(&gpu, process.pid, table.managed(process.pid));
                        seen.used = seen.used.map(|used| Bytes(used.0.saturating_add(more.0)));
                        seen.access = access.of(process, known, &self.knowledge).unwrap_or(seen.access);
                        claimed.push(seen);
                    }
                    // Of the claim that has the device for itself, or of nobody's account.
                    ProcessStanding::Exempt if device.is_alone() && known.believed => claimed.push(seen),
                    ProcessStanding::Foreign => foreign.push(seen),
                    ProcessStanding::Exempt | ProcessStanding::Unknown => {}
                }
            }
            let roster = self.knowledge.roster(&gpu, device, self.parts.slots_per_share);
            let accounts = roster.fill(claimed);
            looks.push(BoardLook { gpu, accounts, foreign });
        }
        if untold && !std::mem::replace(&mut self.logged_failures.untold_clients, true) {
            warn!(
                "NVML does not tell which processes are MPS clients: on GPUs whose shares have MPS daemons of their own, \
                 programs that go around MPS are not found"
            );
        }
        looks
    }
}

fn is_untold(process: &GpuProcess) -> bool {
    process.context == ContextKind::ComputeOfUnknownKind
}

/// What it takes to say how a process works on a device.
struct Accesses<'a> {
    device: &'a WatchedDevice,
    detours: &'a mut Detours,
    table: &'a ProcessTable,
    list: &'a [GpuProcess],
    now: Moment,
}

impl Accesses<'_> {
    /// How a process of a claim works there, if the claim has an MPS daemon for itself.
    fn of(
        &mut self,
        process: &GpuProcess,
        known: &KnownProcess,
        knowledge: &Knowledge,
    ) -> Option<ProcessAccess> {
        let ProcessOwner::Pod { pod, .. } = &known.owner else { return None };
        let own = own_daemons(self.device, pod, knowledge, (self.table, self.list))?;
        Some(self.detours.access(known.process, process.context, &own, self.now))
    }
}

/// The daemons of a pod's claims on the device; none where daemons are common, or where the pod may use the device as an
/// administrator, too.
fn own_daemons<'a>(
    device: &'a WatchedDevice,
    pod: &PodUid,
    knowledge: &Knowledge,
    (table, list): (&ProcessTable, &[GpuProcess]),
) -> Option<OwnDaemons<'a>> {
    let is_pods = |claim: &ClaimRef| knowledge.pods(&claim.uid).iter().any(|user| user.uid == *pod);
    if !device.has_own_daemons() || device.admins.iter().any(is_pods) {
        return None;
    }
    let claims = device.shares.iter().map(|(claim, _)| claim).filter(|claim| is_pods(claim));
    let claims: BTreeSet<_> = claims.map(|claim| &claim.uid).collect();
    let is_own = |group: &&MpsGroup| group.claim().is_some_and(|claim| claims.contains(claim));
    let groups: Vec<&MpsGroup> = device.groups.iter().filter(is_own).collect();
    let known = list.iter().filter_map(|one| table.get(one.pid));
    let serves =
        |known: &&KnownProcess| knowledge.served_claim(known).is_some_and(|claim| claims.contains(claim));
    let servers = known.filter(serves).map(|known| known.process).collect();
    (!groups.is_empty()).then_some(OwnDaemons { groups, servers })
}

fn seen(process: &GpuProcess, known: &KnownProcess, device: &WatchedDevice) -> ObservedProcess {
    let pod = match &known.owner {
        ProcessOwner::Pod { pod, .. } => ProcessPod::Known(pod.clone()),
        ProcessOwner::Host => ProcessPod::None,
        ProcessOwner::Hidden => ProcessPod::Hidden,
    };
    let is_client = process.context == ContextKind::MpsClient && !device.groups.is_empty();
    let access = if is_client { ProcessAccess::Client } else { ProcessAccess::Other };
    ObservedProcess { process: known.process, used: process.used, access, pod }
}
