//! One complete look at the node's GPUs.

use std::path::Path;

use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::{Device, Nvml};

use crate::inventory::{FailedGpu, Look};
use crate::model::gpu::{DriverVersions, Gpu, Health, Memory, MigMode, MigSwitch, NodeGpus, OnDemand};
use crate::model::mig::PossibleMig;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;
use crate::model::selector::GpuSelector;

use super::events::EventSource;
use super::worker::CallProgress;
use super::{ComputeMode, NvmlError, Settings, carve, convert, mig, mode, raw, sysfs};

/// No node has more: what is beyond is taken for nonsense.
const MAX_GPUS: u32 = 64;
/// From this compute capability on (Hopper) a change of the MIG mode needs no reset (NVIDIA's MIG user guide).
const SWITCHED_AT_ONCE: (u32, u32) = (9, 0);

/// Calls into a loaded library, each noted before it is made so that a hang can be named.
pub(super) struct Session<'a> {
    pub nvml: &'a Nvml,
    pub sys_root: &'a Path,
    pub progress: &'a CallProgress,
    /// See [`Settings::on_demand`].
    pub on_demand: &'a [GpuSelector],
    /// See [`Settings::switches`].
    pub switches: bool,
}

impl<'a> Session<'a> {
    pub fn new(nvml: &'a Nvml, settings: &'a Settings, progress: &'a CallProgress) -> Self {
        let Settings { sys_root, on_demand, switches, .. } = settings;
        Self { nvml, sys_root, progress, on_demand, switches: *switches }
    }

    /// Makes one call, about the GPU with that NVML index if it is about one.
    pub fn call<T>(
        &self,
        name: &'static str,
        index: Option<u32>,
        call: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, NvmlError> {
        self.progress.enter(name, index);
        call().map_err(|code| NvmlError::of_call(name, index, code))
    }

    /// The UUID of a board or MIG device; `prefix` is what it must begin with.
    pub fn uuid(
        &self,
        device: &Device<'_>,
        index: Option<u32>,
        prefix: &str,
    ) -> Result<DeviceUuid, NvmlError> {
        let call = "nvmlDeviceGetUUID";
        let bytes = self.call(call, index, || raw::uuid(device))?;
        let what = || format!("{:?} for a UUID that begins with {prefix}", convert::text(&bytes));
        convert::uuid(&bytes, prefix).ok_or_else(|| NvmlError::Nonsense { call, index, what: what() })
    }

    /// Everything there is, and the boards that said who they are. A GPU that fails by itself is told
    /// of and does not spoil the others.
    pub fn look(&self) -> Result<(Look, Vec<EventSource>), NvmlError> {
        let mut boards = Vec::new();
        let mut look =
            Look { gpus: NodeGpus { driver: self.versions()?, gpus: Vec::new() }, ..Look::default() };
        let count = self.call("nvmlDeviceGetCount_v2", None, || self.nvml.device_count())?;
        if count > MAX_GPUS {
            let what = format!("{count} GPUs");
            return Err(NvmlError::Nonsense { call: "nvmlDeviceGetCount_v2", index: None, what });
        }
        for index in 0..count {
            let mut uuid = None;
            let gpu = self.gpu(index, &mut uuid, &mut look.left_out);
            boards.extend(uuid.clone().map(|uuid| EventSource { index, uuid }));
            match gpu {
                Ok(gpu) => look.gpus.gpus.push(gpu),
                Err(e) if e.wants_reload() => return Err(e),
                Err(e) => {
                    look.failed.push(FailedGpu { index, uuid, reason: e.to_string(), lost: e.is_lost() });
                }
            }
        }
        Ok((look, boards))
    }

    /// A board's compute mode, after setting it if one is given and another is in force.
    pub fn mode(&self, gpu: &DeviceUuid, set: Option<ComputeMode>) -> Result<Option<ComputeMode>, NvmlError> {
        let mut device =
            self.call("nvmlDeviceGetHandleByUUID", None, || self.nvml.device_by_uuid(gpu.as_str()))?;
        let found = self.call("nvmlDeviceGetComputeMode", None, || device.compute_mode())?;
        let found = convert::compute_mode(&found);
        let Some(mode) = set.filter(|mode| found != Some(*mode)) else { return Ok(found) };
        let raw = convert::of_compute_mode(mode);
        self.call("nvmlDeviceSetComputeMode", None, || device.set_compute_mode(raw))?;
        let found = self.call("nvmlDeviceGetComputeMode", None, || device.compute_mode())?;
        Ok(convert::compute_mode(&found))
    }

    fn versions(&self) -> Result<DriverVersions, NvmlError> {
        let driver = self.call("nvmlSystemGetDriverVersion", None, || raw::driver_version(self.nvml))?;
        let cuda =
            self.call("nvmlSystemGetCudaDriverVersion_v2", None, || self.nvml.sys_cuda_driver_version())?;
        Ok(DriverVersions { driver: convert::text(&driver), cuda: convert::cuda_version(cuda) })
    }

    /// One board. `uuid` is filled in as soon as it is known, for the words about a failure.
    fn gpu(
        &self,
        index: u32,
        uuid: &mut Option<DeviceUuid>,
        left_out: &mut Vec<String>,
    ) -> Result<Gpu, NvmlError> {
        let on = Some(index);
        let device = self.call("nvmlDeviceGetHandleByIndex_v2", on, || self.nvml.device_by_index(index))?;
        let device = &device;
        let own = uuid.insert(self.uuid(device, on, "GPU-")?).clone();
        let name = self.call("nvmlDeviceGetName", on, || raw::name(device))?;
        // WSL has no /dev/nvidiaN, and NVML no minor numbers there: boards are told apart by NVML's own.
        let minor = self.call("nvmlDeviceGetMinorNumber", on, || device.minor_number());
        let minor = optional(minor)?.unwrap_or(index);
        let brand = named(self.call("nvmlDeviceGetBrand", on, || device.brand()))?;
        let architecture = named(self.call("nvmlDeviceGetArchitecture", on, || device.architecture()))?;
        let compute_capability = self.compute_capability(device, index)?;
        let memory = self.memory(device, index)?;
        let gpu = Gpu {
            uuid: own,
            minor,
            product_name: convert::text(&name),
            brand: brand.as_ref().map_or("Unknown", convert::brand).to_owned(),
            architecture: architecture.as_ref().map_or("Unknown", convert::architecture).to_owned(),
            compute_capability,
            memory,
            multiprocessors: self.multiprocessors(device, index, compute_capability)?,
            addressing_mode: self.addressing_mode(device, index)?,
            pci: self.pci(device, index)?,
            mig: self.mig(mig::ParentGpu { device, index, memory: total(memory) }, left_out)?,
            health: Health::Healthy,
        };
        self.on_demand(gpu, left_out)
    }

    /// With what can be made of a board, if it is carved on demand. Whom the instances are for is not NVML's to say.
    fn on_demand(&self, mut gpu: Gpu, left_out: &mut Vec<String>) -> Result<Gpu, NvmlError> {
        if !self.on_demand.iter().any(|selector| selector.matches(&gpu)) {
            return Ok(gpu);
        }
        if let MigMode::On(devices) = &gpu.mig {
            let told = left_out.len();
            if let Some((profiles, foreign)) = carve::found(self, &gpu.uuid, left_out)? {
                let places = PossibleMig::all(&gpu.uuid, &profiles);
                let devices = devices.clone();
                gpu.mig = MigMode::OnDemand(OnDemand { places, foreign, devices, ..OnDemand::default() });
            } else if self.switches && !mode::is_on(self, &gpu.uuid)? {
                // Switched off by us while it was looked at: what it could be cut into is the same.
                left_out.truncate(told);
                gpu.mig = MigMode::Off;
            }
        }
        if gpu.mig == MigMode::Off {
            let (switch, profiles) = if self.switches && is_switched_at_once(&gpu) {
                (MigSwitch::Off, carve::possible(self, &gpu.uuid, left_out)?)
            } else {
                // For claims that have MIG devices of before, if there are any: nothing else comes of it.
                let profiles = match carve::possible(self, &gpu.uuid, &mut Vec::new()) {
                    Err(error) if error.wants_reload() => return Err(error),
                    profiles => profiles.unwrap_or_default(),
                };
                (MigSwitch::OffByOthers, profiles)
            };
            let places = PossibleMig::all(&gpu.uuid, &profiles);
            if !places.is_empty() {
                gpu.mig = MigMode::OnDemand(OnDemand { switch, places, ..OnDemand::default() });
            }
        }
        Ok(gpu)
    }

    fn compute_capability(&self, device: &Device<'_>, index: u32) -> Result<(u32, u32), NvmlError> {
        let call = "nvmlDeviceGetCudaComputeCapability";
        let cc = self.call(call, Some(index), || device.cuda_compute_capability())?;
        match (u32::try_from(cc.major), u32::try_from(cc.minor)) {
            (Ok(major), Ok(minor)) => Ok((major, minor)),
            _ => {
                let what = format!("{}.{}", cc.major, cc.minor);
                Err(NvmlError::Nonsense { call, index: Some(index), what })
            }
        }
    }

    fn memory(&self, device: &Device<'_>, index: u32) -> Result<Memory, NvmlError> {
        let v2 = self.call("nvmlDeviceGetMemoryInfo_v2", Some(index), || device.memory_info());
        if let Some(info) = optional(v2)? {
            return Ok(Memory::Known { total: Bytes(info.total), reserved: Bytes(info.reserved) });
        }
        let v1 = self.call("nvmlDeviceGetMemoryInfo", Some(index), || raw::memory_total(device));
        Ok(match optional(v1)? {
            Some(total) => Memory::Known { total: Bytes(total), reserved: Bytes(0) },
            None => Memory::Unknown,
        })
    }

    /// NVML counts cores, not multiprocessors, of a board.
    fn multiprocessors(
        &self,
        device: &Device<'_>,
        index: u32,
        compute_capability: (u32, u32),
    ) -> Result<Option<u32>, NvmlError> {
        let cores = optional(self.call("nvmlDeviceGetNumGpuCores", Some(index), || device.num_cores()))?;
        let per_multiprocessor = convert::cores_per_multiprocessor(compute_capability);
        Ok(cores.zip(per_multiprocessor).map(|(cores, per)| cores / per).filter(|count| *count > 0))
    }

    fn addressing_mode(&self, device: &Device<'_>, index: u32) -> Result<Option<String>, NvmlError> {
        let call = self.call("nvmlDeviceGetAddressingMode", Some(index), || raw::addressing_mode(device));
        Ok(optional(call)?.and_then(convert::addressing_mode).map(str::to_owned))
    }

    fn pci(&self, device: &Device<'_>, index: u32) -> Result<crate::model::gpu::Pci, NvmlError> {
        let call = "nvmlDeviceGetPciInfo_v3";
        let info = self.call(call, Some(index), || device.pci_info())?;
        let Some(bus_id) = sysfs::bus_id(&info.bus_id) else {
            let what = format!("{:?} for a PCI bus id", convert::text(info.bus_id.as_bytes()));
            return Err(NvmlError::Nonsense { call, index: Some(index), what });
        };
        self.progress.enter("reading sysfs", Some(index));
        Ok(sysfs::place(self.sys_root, &bus_id))
    }

    fn mig(&self, board: mig::ParentGpu<'_, '_>, left_out: &mut Vec<String>) -> Result<MigMode, NvmlError> {
        let mode =
            optional(self.call("nvmlDeviceGetMigMode", Some(board.index), || board.device.mig_mode()))?;
        match mode {
            Some(mode) if mode.current != 0 => Ok(MigMode::On(mig::devices(self, board, left_out)?)),
            _ => Ok(MigMode::Off),
        }
    }
}

/// What consumes counters has a capacity, its memory.
fn is_switched_at_once(gpu: &Gpu) -> bool {
    let is_counted = total(gpu.memory).is_some_and(|bytes| i64::try_from(bytes).is_ok());
    gpu.compute_capability >= SWITCHED_AT_ONCE && is_counted
}

fn total(memory: Memory) -> Option<u64> {
    match memory {
        Memory::Unknown => None,
        Memory::Known { total, .. } => Some(total.0),
    }
}

/// `None` where board or driver do not have the fact; a failure stays one.
fn optional<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.is_absence() => Ok(None),
        Err(e) => Err(e),
    }
}

/// `None` also for a name that is newer than we are.
fn named<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Err(e) if e.is_news() => Ok(None),
        other => optional(other),
    }
}
