//! Makes and ends MIG instances: [`MigInstances`], and [`MigCarver`], which does it through NVML.
//!
//! Creating a GPU instance may take 10 s, and meanwhile nobody else's GPU may wait. So each board has a thread of its
//! own, started when it is needed and ended when it has been idle for a while. A call that misses its deadline is not
//! given up as a look is: its thread goes on, and what is asked next about the board waits behind it. Only so can an
//! instance that appears late be found and ended by whoever undoes what was begun.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::NVML_GPU_INSTANCE_PROFILE_COUNT;
use thiserror::Error;

use super::look::Session;
use super::mig::{self, Profile};
use super::raw_mig::GpuInstanceHandle;
use super::worker::{self, CallProgress, STACK};
use super::{ModeError, NvmlError, mode, raw, raw_mig};
use crate::model::driver::DriverPlace;
use crate::model::gpu::MigCapacity;
use crate::model::mig::{GpuInstance, MadeMig, MigPlace, MigProfile};
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;

/// Questions about one board that may wait.
const QUEUE: usize = 4;
/// A board's thread, and the library that it keeps open, are given up after this.
const IDLE: Duration = Duration::from_secs(10);
/// `NVML_ERROR_INSUFFICIENT_RESOURCES`, which nvml-wrapper does not know.
const INSUFFICIENT_RESOURCES: u32 = 23;
/// No board has more MIG devices.
const MAX_DEVICES: u32 = 64;

/// Why an instance was not made, found or ended.
#[derive(Debug, Error)]
pub enum MigError {
    #[error(
        "MIG is off on GPU {gpu}: switch it on (nvidia-smi -i {gpu} -mig 1) before MIG devices are made on it"
    )]
    Off { gpu: DeviceUuid },
    #[error("GPU {gpu} has no MIG profile with id {id}; nvidia-smi mig -lgip lists those that it has", id = .place.profile_id)]
    NoProfile { gpu: DeviceUuid, place: MigPlace },
    #[error(
        "profile {id} cannot begin at memory slice {start} of GPU {gpu}; nvidia-smi mig -lgipp lists where it can",
        id = .place.profile_id, start = .place.placement.start
    )]
    NoPlacement { gpu: DeviceUuid, place: MigPlace },
    /// Nothing was made.
    #[error("there is a GPU instance already where one is to be made on GPU {gpu}: {}", words(.by))]
    Taken { gpu: DeviceUuid, by: MigPlace },
    /// Nothing was made.
    #[error("GPU {gpu} has no room left for profile {id} (NVML: insufficient resources)", id = .place.profile_id)]
    NoRoom { gpu: DeviceUuid, place: MigPlace },
    #[error("the MIG instance at {} of GPU {gpu} is in use by a process; it is ended once that process has", words(.place))]
    InUse { gpu: DeviceUuid, place: MigPlace },
    #[error("NVML lists no MIG device for the instance made at {} of GPU {gpu}", words(.place))]
    NoDevice { gpu: DeviceUuid, place: MigPlace },
    #[error(
        "{call} on GPU {gpu} has not returned within {} s; it goes on, and whatever it makes is taken back",
        .limit.as_secs_f32()
    )]
    Slow { gpu: DeviceUuid, call: String, limit: Duration },
    #[error("GPU {gpu} is still busy with what was asked before: {call}")]
    Busy { gpu: DeviceUuid, call: String },
    /// Nothing was made: it failed before anything was created.
    #[error(transparent)]
    Before(NvmlError),
    #[error(transparent)]
    Mode(#[from] ModeError),
    #[error(transparent)]
    Nvml(#[from] NvmlError),
}

impl MigError {
    /// True if it is certain that nothing was made: because of what else is on the board, or because creating it was
    /// not begun.
    pub fn made_nothing(&self) -> bool {
        matches!(
            self,
            Self::Off { .. }
                | Self::NoProfile { .. }
                | Self::NoPlacement { .. }
                | Self::Taken { .. }
                | Self::NoRoom { .. }
                | Self::Busy { .. }
                | Self::Before(_)
                | Self::Nvml(NvmlError::NoThread(_))
        )
    }
}

fn words(place: &MigPlace) -> String {
    let MigPlace { profile_id, placement } = place;
    format!(
        "memory slices {} to {} (profile {profile_id})",
        placement.start,
        placement.end().saturating_sub(1)
    )
}

/// MIG instances of the node's boards. Every call blocks its thread, within a deadline; calls about different boards do
/// not wait for one another.
pub trait MigInstances: Send + Sync + 'static {
    /// The profiles that the board has, with the placements that NVML calls possible. MIG must be on.
    ///
    /// # Errors
    /// MIG is off, or NVML fails.
    fn profiles(&self, gpu: &DeviceUuid) -> Result<Vec<MigProfile>, MigError>;

    /// Every GPU instance that is on the board, whoever made it.
    ///
    /// # Errors
    /// MIG is off, or NVML fails.
    fn instances(&self, gpu: &DeviceUuid) -> Result<Vec<GpuInstance>, MigError>;

    /// Makes a GPU instance at that place, and a compute instance that has all of it.
    ///
    /// # Errors
    /// [`MigError::made_nothing`] tells those after which nothing is there; after any other, something may be.
    fn make(&self, gpu: &DeviceUuid, place: MigPlace) -> Result<MadeMig, MigError>;

    /// Ends what is at that place, compute instances first. False if nothing is. With `made`, only an instance that has
    /// this device, or none: another one is somebody else's, and left alone.
    ///
    /// # Errors
    /// A process runs in it, or NVML fails.
    fn end(&self, gpu: &DeviceUuid, place: MigPlace, made: Option<&DeviceUuid>) -> Result<bool, MigError>;

    /// True if MIG is on, whatever is pending. A board that cannot do MIG has it off.
    ///
    /// # Errors
    /// NVML fails.
    fn mode(&self, gpu: &DeviceUuid) -> Result<bool, MigError>;

    /// Switches MIG on or off, and reads the mode back. One that is in force already is left alone.
    ///
    /// # Errors
    /// [`MigError::Mode`] if that cannot be: the mode is as it was. After any other it may be either.
    fn set_mode(&self, gpu: &DeviceUuid, on: bool) -> Result<(), MigError>;
}

/// The real one. Loads nothing before it is asked.
#[derive(Debug)]
pub struct MigCarver {
    driver: DriverPlace,
    limit: Duration,
    boards: Boards,
}

/// Boards that have a thread at the moment. A thread ends, and work is queued, only while this is locked: so nothing is
/// queued for a thread that ends.
type Boards = Arc<Mutex<BTreeMap<DeviceUuid, Board>>>;

/// Work for a board's thread. It answers by itself.
type Work = Box<dyn FnOnce(&mut Open) + Send>;

#[derive(Debug)]
struct Board {
    work: SyncSender<Work>,
    progress: Arc<CallProgress>,
}

impl MigCarver {
    /// Three calls of 10 s each; kubelet gives the whole of a preparation 45 s.
    pub const LIMIT: Duration = Duration::from_secs(30);

    pub fn new(driver: DriverPlace, limit: Duration) -> Self {
        Self { driver, limit, boards: Boards::default() }
    }

    /// Has the board's thread do something, and waits for the answer. What was begun is never begun again by itself:
    /// it may have made something.
    fn ask<T: Send + 'static>(
        &self,
        gpu: &DeviceUuid,
        act: impl FnOnce(&mut Open, &DeviceUuid) -> Result<T, MigError> + Send + 'static,
    ) -> Result<T, MigError> {
        let (reply, answer) = sync_channel(1);
        let uuid = gpu.clone();
        // An answer that nobody waits for any more: whoever asked was told that the call goes on.
        let progress = self.queue(gpu, Box::new(move |open| _ = reply.send(act(open, &uuid))))?;
        match answer.recv_timeout(self.limit) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                Err(MigError::Slow { gpu: gpu.clone(), call: progress.words(), limit: self.limit })
            }
            Err(RecvTimeoutError::Disconnected) => Err(NvmlError::ThreadGone.into()),
        }
    }

    fn queue(&self, gpu: &DeviceUuid, work: Work) -> Result<Arc<CallProgress>, MigError> {
        let mut boards = lock(&self.boards);
        let board = match boards.get(gpu) {
            Some(board) => board,
            None => boards.entry(gpu.clone()).or_insert(self.start(gpu)?),
        };
        let progress = board.progress.clone();
        let work = match board.work.try_send(work) {
            Ok(()) => return Ok(progress),
            Err(TrySendError::Full(_)) => {
                return Err(MigError::Busy { gpu: gpu.clone(), call: progress.words() });
            }
            Err(TrySendError::Disconnected(work)) => work,
        };
        // Its thread has panicked.
        let board = self.start(gpu)?;
        let progress = board.progress.clone();
        let sent = board.work.try_send(work);
        boards.insert(gpu.clone(), board);
        sent.map(|()| progress).map_err(|_| NvmlError::ThreadGone.into())
    }

    fn start(&self, gpu: &DeviceUuid) -> Result<Board, MigError> {
        let (work, queue) = sync_channel(QUEUE);
        let progress = Arc::new(CallProgress::default());
        let open = Open { driver: self.driver.clone(), progress: progress.clone(), nvml: None };
        let (boards, gpu) = (self.boards.clone(), gpu.clone());
        let builder = thread::Builder::new().name("nvml-mig".to_owned()).stack_size(STACK);
        builder.spawn(move || serve(open, &queue, &boards, &gpu)).map_err(NvmlError::NoThread)?;
        Ok(Board { work, progress })
    }
}

fn lock(boards: &Mutex<BTreeMap<DeviceUuid, Board>>) -> MutexGuard<'_, BTreeMap<DeviceUuid, Board>> {
    boards.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Works until there has been nothing to do for a while.
fn serve(mut open: Open, queue: &Receiver<Work>, boards: &Boards, gpu: &DeviceUuid) {
    loop {
        match queue.recv_timeout(IDLE) {
            Ok(work) => work(&mut open),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let mut boards = lock(boards);
                let Ok(work) = queue.try_recv() else {
                    boards.remove(gpu);
                    return;
                };
                drop(boards);
                work(&mut open);
            }
        }
    }
}

/// The library as one board's thread has it.
struct Open {
    driver: DriverPlace,
    progress: Arc<CallProgress>,
    nvml: Option<Nvml>,
}

impl Open {
    /// Does something with the library, which is loaded if it is not, and let go of if it will never answer again.
    fn with<T>(&mut self, act: impl FnOnce(&Session<'_>) -> Result<T, MigError>) -> Result<T, MigError> {
        let nvml = match self.nvml.take() {
            Some(nvml) => nvml,
            None => worker::open(&self.driver, &self.progress)?,
        };
        let (sys_root, on_demand, switches) = (Path::new("/sys"), [].as_slice(), false);
        let session = Session { nvml: &nvml, sys_root, progress: &self.progress, on_demand, switches };
        let done = act(&session);
        let reload = matches!(&done, Err(MigError::Nvml(error)) if error.wants_reload());
        self.nvml = (!reload).then_some(nvml);
        done
    }
}

impl MigInstances for MigCarver {
    fn profiles(&self, gpu: &DeviceUuid) -> Result<Vec<MigProfile>, MigError> {
        self.ask(gpu, |open, gpu| open.with(|session| Carving::of(session, gpu)?.profiles(&mut Vec::new())))
    }

    fn instances(&self, gpu: &DeviceUuid) -> Result<Vec<GpuInstance>, MigError> {
        self.ask(gpu, |open, gpu| open.with(|session| Carving::of(session, gpu)?.instances()))
    }

    fn make(&self, gpu: &DeviceUuid, place: MigPlace) -> Result<MadeMig, MigError> {
        self.ask(gpu, move |open, gpu| {
            let mut begun = false;
            let made = open.with(|session| Carving::of(session, gpu)?.make(place, &mut begun));
            made.map_err(|error| match error {
                MigError::Nvml(error) if !begun => MigError::Before(error),
                error => error,
            })
        })
    }

    fn end(&self, gpu: &DeviceUuid, place: MigPlace, made: Option<&DeviceUuid>) -> Result<bool, MigError> {
        let made = made.cloned();
        self.ask(gpu, move |open, gpu| {
            open.with(|session| Carving::of(session, gpu)?.end(place, made.as_ref()))
        })
    }

    fn mode(&self, gpu: &DeviceUuid) -> Result<bool, MigError> {
        self.ask(gpu, |open, gpu| open.with(|session| Ok(mode::is_on(session, gpu)?)))
    }

    fn set_mode(&self, gpu: &DeviceUuid, on: bool) -> Result<(), MigError> {
        self.ask(gpu, move |open, gpu| open.with(|session| mode::set(session, gpu, on)))
    }
}

/// What a board in MIG mode can be cut into, and the places of the instances that are on it.
type BoardLayout = (Vec<MigProfile>, Vec<MigPlace>);

/// Asks a board in MIG mode for both. `None` if it does not say:
/// switched off while it was looked at, say, or calls that this driver lacks. What was left out is told in words.
///
/// # Errors
/// The board has left the bus, or the library must be loaded anew.
pub(super) fn found(
    session: &Session<'_>,
    gpu: &DeviceUuid,
    left_out: &mut Vec<String>,
) -> Result<Option<BoardLayout>, NvmlError> {
    let mut look = || {
        let board = Carving::of(session, gpu)?;
        let places = board.handles()?.into_iter().map(|(_, place, _)| place).collect();
        Ok((board.profiles(left_out)?, places))
    };
    match look() {
        Ok(found) => Ok(Some(found)),
        Err(MigError::Nvml(error)) if error.wants_reload() || error.is_lost() => Err(error),
        Err(error) => {
            left_out.push(format!("all MIG devices that could be made on GPU {gpu}: {error}"));
            Ok(None)
        }
    }
}

/// What a board could be cut into whose MIG mode is off. None of one that cannot do MIG, or does not say.
///
/// # Errors
/// NVML fails: nothing is known, and nothing may be concluded from it.
pub(super) fn possible(
    session: &Session<'_>,
    gpu: &DeviceUuid,
    left_out: &mut Vec<String>,
) -> Result<Vec<MigProfile>, NvmlError> {
    let board = Carving::whatever_its_mode(session, gpu)?;
    match board.profiles(left_out) {
        Ok(profiles) => Ok(profiles),
        Err(MigError::Nvml(error)) if error.is_absence() => Ok(Vec::new()),
        Err(MigError::Nvml(error)) => Err(error),
        // No other comes of it.
        Err(_) => Ok(Vec::new()),
    }
}

/// The places of the instances on a board in MIG mode.
pub(super) fn places(session: &Session<'_>, gpu: &DeviceUuid) -> Result<Vec<MigPlace>, MigError> {
    Ok(Carving::of(session, gpu)?.handles()?.into_iter().map(|(_, place, _)| place).collect())
}

/// The first of those compute instance profiles that have the most slices. A GPU instance of one slice has two: the
/// plain one, and one with media extensions (`NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1`), which comes later.
fn whole(profiles: &[(u32, u32)]) -> Option<u32> {
    let most = profiles.iter().map(|(_, slices)| *slices).max()?;
    profiles.iter().find(|(_, slices)| *slices == most).map(|(id, _)| *id)
}

/// One board, in MIG mode but for [`possible`], while something is done to it.
struct Carving<'a> {
    session: &'a Session<'a>,
    gpu: &'a DeviceUuid,
    board: Device<'a>,
}

impl<'a> Carving<'a> {
    fn of(session: &'a Session<'a>, gpu: &'a DeviceUuid) -> Result<Self, MigError> {
        let board = Self::whatever_its_mode(session, gpu)?;
        match session.call("nvmlDeviceGetMigMode", None, || board.board.mig_mode()) {
            Ok(mode) if mode.current != 0 => Ok(board),
            Ok(_) => Err(MigError::Off { gpu: gpu.clone() }),
            Err(error) if error.is_absence() => Err(MigError::Off { gpu: gpu.clone() }),
            Err(error) => Err(error.into()),
        }
    }

    fn whatever_its_mode(session: &'a Session<'a>, gpu: &'a DeviceUuid) -> Result<Self, NvmlError> {
        let by_uuid = || session.nvml.device_by_uuid(gpu.as_str());
        let board = session.call("nvmlDeviceGetHandleByUUID", None, by_uuid)?;
        Ok(Self { session, gpu, board })
    }

    fn call<T>(&self, name: &'static str, call: impl FnOnce() -> Result<T, Code>) -> Result<T, NvmlError> {
        self.session.call(name, None, call)
    }

    /// Profiles of kinds that are newer than we are have names that we do not know, and are left out. So are those
    /// whose placements NVML does not tell, as long as there are others.
    fn profiles(&self, left_out: &mut Vec<String>) -> Result<Vec<MigProfile>, MigError> {
        let memory = self.call("nvmlDeviceGetMemoryInfo", || raw::memory_total(&self.board))?;
        let (mut profiles, mut problem) = (Vec::new(), None);
        for kind in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
            let asked =
                self.call("nvmlDeviceGetGpuInstanceProfileInfo", || raw::profile_info(&self.board, kind));
            let info = match asked {
                Ok(info) => info,
                Err(error) if error.is_absence() || error.is_not_found() => continue,
                Err(error) => return Err(error.into()),
            };
            let call = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
            let mut placements = match self.call(call, || raw_mig::placements(&self.board, info.id)) {
                Ok(placements) => placements,
                Err(error) if error.wants_reload() || error.is_lost() => return Err(error.into()),
                Err(error) => {
                    left_out.push(format!("MIG profile {} of GPU {}: {error}", info.id, self.gpu));
                    problem = Some(error);
                    continue;
                }
            };
            placements.sort_unstable();
            let name = Profile {
                compute_slices: info.sliceCount,
                gpu_slices: info.sliceCount,
                memory_mib: info.memorySizeMB,
                suffix: mig::suffix_of(kind),
            };
            profiles.push(MigProfile {
                id: info.id,
                name: name.name(memory),
                slices: info.sliceCount,
                most: info.instanceCount,
                capacity: MigCapacity {
                    memory: Bytes::from_mib(info.memorySizeMB),
                    multiprocessors: info.multiprocessorCount,
                    copy_engines: info.copyEngineCount,
                    decoders: info.decoderCount,
                    encoders: info.encoderCount,
                    jpeg_engines: info.jpegCount,
                    ofa_engines: info.ofaCount,
                },
                placements,
            });
        }
        match problem.filter(|_| profiles.is_empty()) {
            Some(problem) => Err(problem.into()),
            None => Ok(profiles),
        }
    }

    fn handles(&self) -> Result<Vec<(u32, MigPlace, GpuInstanceHandle)>, MigError> {
        let mut all = Vec::new();
        for kind in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
            let asked =
                self.call("nvmlDeviceGetGpuInstanceProfileInfo", || raw::profile_id(&self.board, kind));
            let profile = match asked {
                Ok(profile) => profile,
                Err(error) if error.is_absence() || error.is_not_found() => continue,
                Err(error) => return Err(error.into()),
            };
            let call = "nvmlDeviceGetGpuInstances";
            for gi in self.call(call, || raw_mig::gpu_instances(&self.board, profile))? {
                let info = || raw_mig::gpu_instance_info(&self.board, gi);
                let (id, place) = match self.call("nvmlGpuInstanceGetInfo", info) {
                    Ok(info) => info,
                    // Somebody ended it since it was listed.
                    Err(error) if error.is_not_found() => continue,
                    Err(error) => return Err(error.into()),
                };
                if all.iter().all(|(known, _, _)| *known != id) {
                    all.push((id, place, gi));
                }
            }
        }
        all.sort_by_key(|(_, place, _)| (place.placement, place.profile_id));
        Ok(all)
    }

    fn instances(&self) -> Result<Vec<GpuInstance>, MigError> {
        let devices = self.devices()?;
        let handles = self.handles()?.into_iter();
        let own = |id| devices.iter().filter(move |device| device.gpu_instance == id).cloned().collect();
        Ok(handles.map(|(id, place, _)| GpuInstance { id, place, devices: own(id) }).collect())
    }

    /// The board's MIG devices, which are its compute instances.
    fn devices(&self) -> Result<Vec<MadeMig>, MigError> {
        let count = self.call("nvmlDeviceGetMaxMigDeviceCount", || self.board.mig_device_count())?;
        let mut devices = Vec::new();
        for slot in 0..count.min(MAX_DEVICES) {
            let by_index = || self.board.mig_device_by_index(slot);
            let device = match self.call("nvmlDeviceGetMigDeviceHandleByIndex", by_index) {
                Ok(device) => device,
                Err(error) if error.is_not_found() => continue,
                Err(error) => return Err(error.into()),
            };
            devices.push(MadeMig {
                uuid: self.session.uuid(&device, None, "MIG-")?,
                gpu_instance: self.call("nvmlDeviceGetGpuInstanceId", || raw::gpu_instance_id(&device))?,
                compute_instance: self
                    .call("nvmlDeviceGetComputeInstanceId", || raw::compute_instance_id(&device))?,
            });
        }
        Ok(devices)
    }

    /// `begun` is set before the first call that may make something.
    fn make(&self, place: MigPlace, begun: &mut bool) -> Result<MadeMig, MigError> {
        // Ids of instances are used again, and so would be a name: only the place tells ours from others'.
        let overlaps = |(_, other, _): &&(u32, MigPlace, _)| other.placement.overlaps(place.placement);
        if let Some((_, by, _)) = self.handles()?.iter().find(overlaps) {
            return Err(MigError::Taken { gpu: self.gpu.clone(), by: *by });
        }
        let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
        *begun = true;
        let created = self.call(call, || raw_mig::create_gpu_instance(&self.board, place));
        let gi = created.map_err(|error| self.not_created(error, place))?;
        let (id, _) = self.call("nvmlGpuInstanceGetInfo", || raw_mig::gpu_instance_info(&self.board, gi))?;
        self.make_compute(gi)?;
        let made = self.devices()?.into_iter().find(|device| device.gpu_instance == id);
        made.ok_or_else(|| MigError::NoDevice { gpu: self.gpu.clone(), place })
    }

    fn not_created(&self, error: NvmlError, place: MigPlace) -> MigError {
        let gpu = self.gpu.clone();
        match error.code() {
            Some(Code::NotSupported) => MigError::NoProfile { gpu, place },
            Some(Code::InvalidArg) => MigError::NoPlacement { gpu, place },
            Some(Code::UnexpectedVariant(INSUFFICIENT_RESOURCES)) => MigError::NoRoom { gpu, place },
            _ => error.into(),
        }
    }

    /// The compute instance that has all slices of its GPU instance.
    fn make_compute(&self, gi: GpuInstanceHandle) -> Result<(), MigError> {
        let call = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
        let profiles = self.call(call, || raw_mig::compute_profiles(&self.board, gi))?;
        let Some(profile) = whole(&profiles) else {
            let what = "no compute instance profile for a GPU instance".to_owned();
            return Err(NvmlError::Nonsense { call, index: None, what }.into());
        };
        let call = "nvmlGpuInstanceCreateComputeInstance";
        self.call(call, || raw_mig::create_compute_instance(&self.board, gi, profile))?;
        Ok(())
    }

    fn end(&self, place: MigPlace, made: Option<&DeviceUuid>) -> Result<bool, MigError> {
        let handles = self.handles()?;
        let Some((id, _, gi)) = handles.into_iter().find(|(_, found, _)| *found == place) else {
            return Ok(false);
        };
        if let Some(made) = made {
            let mut own = self.devices()?.into_iter().filter(|device| device.gpu_instance == id).peekable();
            if own.peek().is_some() && own.all(|device| device.uuid != *made) {
                return Ok(false);
            }
        }
        let in_use = |error: NvmlError| match error.code() {
            Some(Code::InUse) => MigError::InUse { gpu: self.gpu.clone(), place },
            _ => error.into(),
        };
        let call = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
        for (profile, _) in self.call(call, || raw_mig::compute_profiles(&self.board, gi))? {
            let call = "nvmlGpuInstanceGetComputeInstances";
            for ci in self.call(call, || raw_mig::compute_instances(&self.board, gi, profile))? {
                let call = "nvmlComputeInstanceDestroy";
                self.call(call, || raw_mig::destroy_compute_instance(&self.board, ci)).map_err(in_use)?;
            }
        }
        let call = "nvmlGpuInstanceDestroy";
        self.call(call, || raw_mig::destroy_gpu_instance(&self.board, gi)).map_err(in_use)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_compute_instance_profiles_the_plain_one_is_made() {
        assert_eq!(whole(&[(0, 1), (7, 1)]), Some(0), "not the one with media extensions");
        assert_eq!(whole(&[(0, 1), (1, 2), (2, 3), (7, 1)]), Some(2));
        assert_eq!(whole(&[]), None);
    }
}
