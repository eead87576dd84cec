//! A board's MIG instances, as NVML would have them, which outlive the process that makes them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tranche::ledger::Step;
use tranche::model::gpu::{MigCapacity, Placement};
use tranche::model::mig::{GpuInstance, MadeMig, MigPlace, MigProfile};
use tranche::model::names::DeviceUuid;
use tranche::model::quantity::Bytes;
use tranche::nvml::{MigError, MigInstances, ModeError};

use crate::stop_at::{StopAt, Verb};

/// Instances by board.
#[derive(Default)]
pub struct MigBoards(Mutex<Vec<(DeviceUuid, GpuInstance)>>, AtomicBool, AtomicBool, AtomicBool, Mutex<Modes>);

/// MIG is on on all other boards.
#[derive(Default)]
struct Modes {
    off: BTreeSet<DeviceUuid>,
    off_after_boot: BTreeSet<DeviceUuid>,
    refusal: Option<Refusal>,
    switches: usize,
}

/// Why a mode is not switched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A process runs on the board.
    Running,
    /// It would be in force after a reset.
    Reset,
}

impl MigBoards {
    /// What is on a board.
    pub fn on(&self, gpu: &DeviceUuid) -> Vec<GpuInstance> {
        let all = self.0.lock().unwrap();
        all.iter().filter(|(on, _)| on == gpu).map(|(_, one)| one.clone()).collect()
    }

    pub fn all(&self) -> Vec<(DeviceUuid, MigPlace)> {
        self.0.lock().unwrap().iter().map(|(gpu, one)| (gpu.clone(), one.place)).collect()
    }

    /// A board whose MIG mode is off, and is after each boot.
    pub fn be_whole(&self, gpu: &DeviceUuid) {
        let mut modes = self.4.lock().unwrap();
        modes.off.insert(gpu.clone());
        modes.off_after_boot.insert(gpu.clone());
    }

    pub fn boot(&self) {
        self.clear();
        let mut modes = self.4.lock().unwrap();
        modes.off = modes.off_after_boot.clone();
    }

    pub fn is_on(&self, gpu: &DeviceUuid) -> bool {
        !self.4.lock().unwrap().off.contains(gpu)
    }

    /// Somebody's act: instances do not outlive it.
    pub fn switch(&self, gpu: &DeviceUuid, on: bool) {
        let mut modes = self.4.lock().unwrap();
        match on {
            true => _ = modes.off.remove(gpu),
            false => _ = modes.off.insert(gpu.clone()),
        }
        self.0.lock().unwrap().retain(|(at, _)| on || at != gpu);
    }

    /// Modes are not switched, or are again.
    pub fn refuse(&self, refusal: Option<Refusal>) {
        self.4.lock().unwrap().refusal = refusal;
    }

    /// How often modes were switched for claims.
    pub fn switches(&self) -> usize {
        self.4.lock().unwrap().switches
    }

    pub fn clear(&self) {
        self.0.lock().unwrap().clear();
    }

    /// An administrator's, or ours.
    pub fn make(&self, gpu: &DeviceUuid, place: MigPlace, devices: usize) -> GpuInstance {
        let Placement { start, size } = place.placement;
        let id = 8 / size - 1 + start / size;
        let device = MadeMig {
            uuid: DeviceUuid::new(format!("MIG-{gpu}-{id}")),
            gpu_instance: id,
            compute_instance: 0,
        };
        let made = GpuInstance { id, place, devices: vec![device; devices] };
        self.0.lock().unwrap().push((gpu.clone(), made.clone()));
        made
    }

    /// The next creation finds the board's thread busy, and an administrator makes the same meanwhile.
    pub fn be_busy(&self) {
        self.1.store(true, Ordering::Relaxed);
    }

    /// Creations fail, or do not any more.
    pub fn have_no_room(&self, none: bool) {
        self.2.store(none, Ordering::Relaxed);
    }

    /// Somebody on the host has a handle of each instance, or not any more.
    pub fn be_held(&self, held: bool) {
        self.3.store(held, Ordering::Relaxed);
    }

    /// Another device than ours would have.
    pub fn put(&self, gpu: &DeviceUuid, place: MigPlace, device: MadeMig) {
        let one = GpuInstance { id: device.gpu_instance, place, devices: vec![device] };
        self.0.lock().unwrap().push((gpu.clone(), one));
    }

    pub fn end(&self, gpu: &DeviceUuid, place: MigPlace) {
        self.0.lock().unwrap().retain(|(on, one)| on != gpu || one.place != place);
    }
}

/// One process's way to them.
pub struct FakeMig {
    pub boards: Arc<MigBoards>,
    pub host: Arc<StopAt>,
    /// Where the modes are recorded that were switched for claims.
    pub modes: PathBuf,
}

impl FakeMig {
    fn check_on(&self, gpu: &DeviceUuid) -> Result<(), MigError> {
        if self.boards.is_on(gpu) { Ok(()) } else { Err(MigError::Off { gpu: gpu.clone() }) }
    }
}

impl MigInstances for FakeMig {
    fn profiles(&self, _: &DeviceUuid) -> Result<Vec<MigProfile>, MigError> {
        Ok(profiles())
    }

    fn instances(&self, gpu: &DeviceUuid) -> Result<Vec<GpuInstance>, MigError> {
        self.check_on(gpu)?;
        Ok(self.boards.on(gpu))
    }

    fn make(&self, gpu: &DeviceUuid, place: MigPlace) -> Result<MadeMig, MigError> {
        let of =
            |step: &Step| matches!(step, Step::MakeMig { gpu: g, place: p, .. } if g == gpu && *p == place);
        self.host.demand(&format!("{place:?} on {gpu}"), |record| record.intent.steps.iter().any(of));
        self.check_on(gpu)?;
        if self.boards.1.swap(false, Ordering::Relaxed) {
            self.boards.make(gpu, place, 1);
            return Err(MigError::Busy { gpu: gpu.clone(), call: "what came before".to_owned() });
        }
        if self.boards.2.load(Ordering::Relaxed) {
            return Err(MigError::NoRoom { gpu: gpu.clone(), place });
        }
        let half = || _ = self.boards.make(gpu, place, 0);
        self.host.halves(Verb::MakeMig, half, || {
            let taken =
                self.boards.on(gpu).into_iter().find(|one| one.place.placement.overlaps(place.placement));
            match taken {
                Some(other) => Err(MigError::Taken { gpu: gpu.clone(), by: other.place }),
                None => Ok(self.boards.make(gpu, place, 1).devices[0].clone()),
            }
        })
    }

    fn end(&self, gpu: &DeviceUuid, place: MigPlace, made: Option<&DeviceUuid>) -> Result<bool, MigError> {
        self.check_on(gpu)?;
        let Some(found) = self.boards.on(gpu).into_iter().find(|one| one.place == place) else {
            return Ok(false);
        };
        if found.devices.iter().any(|device| made.is_some_and(|made| *made != device.uuid)) {
            return Ok(false);
        }
        if self.boards.3.load(Ordering::Relaxed) {
            return Err(MigError::InUse { gpu: gpu.clone(), place });
        }
        let half = || {
            self.boards.end(gpu, place);
            self.boards.make(gpu, place, 0);
        };
        self.host.halves(Verb::EndMig, half, || self.boards.end(gpu, place));
        Ok(true)
    }

    fn mode(&self, gpu: &DeviceUuid) -> Result<bool, MigError> {
        Ok(self.boards.is_on(gpu))
    }

    fn set_mode(&self, gpu: &DeviceUuid, on: bool) -> Result<(), MigError> {
        self.host.require(&format!("MIG mode of {gpu}"), self.modes.join(format!("{gpu}.json")).exists());
        let (gpu_of, to) = (gpu.clone(), if on { "on" } else { "off" });
        match self.boards.4.lock().unwrap().refusal {
            Some(Refusal::Running) => {
                return Err(ModeError::Running { gpu: gpu_of, to, processes: "4711".into() }.into());
            }
            Some(Refusal::Reset) => return Err(ModeError::Reset { gpu: gpu_of, to }.into()),
            None => {}
        }
        if !on && !self.boards.on(gpu).is_empty() {
            return Err(ModeError::Cut { gpu: gpu_of, count: self.boards.on(gpu).len() }.into());
        }
        self.host.around(Verb::SwitchMig, || {
            self.boards.4.lock().unwrap().switches += 1;
            self.boards.switch(gpu, on);
        });
        Ok(())
    }
}

/// Two profiles of an H100.
pub fn profiles() -> Vec<MigProfile> {
    let profile = |id, name: &str, slices, most, starts: &[u32], size| MigProfile {
        id,
        name: name.to_owned(),
        slices,
        most,
        capacity: MigCapacity { memory: Bytes::from_mib(9984 * u64::from(size)), ..MigCapacity::default() },
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    };
    vec![profile(19, "1g.10gb", 1, 7, &[0, 1, 2, 3, 4, 5, 6], 1), profile(14, "2g.20gb", 2, 3, &[0, 2, 4], 2)]
}
