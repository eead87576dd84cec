//! What NVML says of a device as a whole, and how busy each of its processes is: for metrics alone, read by the thread of
//! the process lists. A figure that the driver or the device does not have is absent; none is ever made up.
//!
//! How busy a process is comes from samples that the driver takes by itself. NVML gives those that are newer than the
//! newest that the caller has seen, and answers NOT_FOUND where nobody worked since. The first question after the library
//! was loaded only finds out which sample is the newest: what is older may be of long before.
//! Of MPS clients NVML tells nothing: their work is their server's. MIG devices have no samples of this kind; how busy a
//! GPU instance is, all of its processes together, is between two samples of GPU performance monitoring (GPM), which Hopper
//! and newer have. The first question takes the first of them.

use std::collections::BTreeMap;

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::struct_wrappers::device::DeviceAttributes;
use nvml_wrapper::{Device, Nvml};

use super::worker::CallProgress;
use super::{NvmlError, convert};
use super::{raw, raw_gpm};
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::quantity::Bytes;

/// What figures are asked of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum FiguresSubject {
    /// A whole board, in MIG mode or not.
    Board(DeviceUuid),
    /// A MIG device, which has memory, and may tell how busy it is: samples from before its holder had it are of another's
    /// work.
    Mig { uuid: DeviceUuid, holder: Option<MigHolder> },
}

/// Who has a MIG device alone: a claim, and of the claim's pods the only one, if there is one. Pods that use a claim one after
/// the other have nothing to do with each other's work.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigHolder {
    pub claim: ClaimUid,
    pub pod: Option<PodUid>,
}

impl FiguresSubject {
    pub fn uuid(&self) -> &DeviceUuid {
        match self {
            Self::Board(uuid) | Self::Mig { uuid, .. } => uuid,
        }
    }
}

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    pub total: Bytes,
    /// What driver and firmware keep; not in `used`.
    pub reserved: Bytes,
    pub used: Bytes,
}

/// How busy the processes of a board are.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ProcessActivity {
    /// The driver does not tell, or not yet.
    #[default]
    Unknown,
    /// By PID, 0 to 1: the part of the time in which a kernel of the process ran. Who is not among them had none.
    Known(BTreeMap<u32, f64>),
}

/// What a device is called outside Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceIdentity {
    /// NVML's index of the board; none for a MIG device.
    pub index: Option<u32>,
    /// The product, with the profile behind it for a MIG device.
    pub name: String,
    pub pci_bus_id: Option<String>,
    /// Id of a MIG device's GPU instance.
    pub gpu_instance: Option<u32>,
}

/// All figures of one device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures {
    pub memory: Option<DeviceMemory>,
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
    pub sm_clock_megahertz: Option<u32>,
    pub memory_clock_megahertz: Option<u32>,
    /// The part of the time in which a kernel of anybody ran, in percent. Of a MIG device, if it is all of its GPU instance.
    pub busy_percent: Option<u32>,
    pub processes: ProcessActivity,
    pub identity: DeviceIdentity,
}

/// A sample of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sample {
    pub pid: u32,
    /// Microseconds since 1970.
    pub stamp: u64,
    pub percent: u32,
}

/// What is remembered of a device between two questions.
#[derive(Default)]
pub(super) struct Memo {
    /// Stamp of the newest sample that was seen; none before the first answer.
    newest: Option<u64>,
    identity: Option<DeviceIdentity>,
    /// Who has the MIG device that `gpm` is of.
    holder: Option<MigHolder>,
    gpm: Gpm,
}

/// What is known of the performance monitoring of a MIG device.
#[derive(Default)]
enum Gpm {
    #[default]
    NotAsked,
    /// The board has none, or the device is a part of its GPU instance, for which alone there are samples.
    None,
    /// The last sample of this GPU instance; none if it could not be taken.
    Of { gpu_instance: u32, last: Option<raw_gpm::GpmSample> },
}

/// Reads all figures of one device, with at most seven calls (eleven the first time). A figure that cannot be read is absent.
///
/// # Errors
/// Only those after which the library must be loaded anew.
pub(super) fn read(
    nvml: &Nvml,
    subject: &FiguresSubject,
    handle: &raw::DeviceHandle,
    (memo, room): (&mut Memo, &mut raw::Samples),
    progress: &CallProgress,
) -> Result<Figures, NvmlError> {
    let device = raw::device(nvml, handle);
    let ask = Asking { device: &device, progress };
    let memory = ask.optional("nvmlDeviceGetMemoryInfo_v2", |device| device.memory_info())?;
    let memory = memory.map(|info| DeviceMemory {
        total: Bytes(info.total),
        reserved: Bytes(info.reserved),
        used: Bytes(info.used),
    });
    let identity = match memo.identity.clone() {
        Some(known) => known,
        None => memo.identity.insert(ask.identity(subject)?).clone(),
    };
    if let FiguresSubject::Mig { holder, .. } = subject {
        if memo.holder != *holder {
            (memo.holder, memo.gpm) = (holder.clone(), Gpm::NotAsked);
        }
        let busy = ask.instance(nvml, &mut memo.gpm)?;
        let busy_percent = busy.map(|percent| percent.round() as u32);
        return Ok(Figures { memory, identity, busy_percent, ..Figures::default() });
    }
    Ok(Figures {
        memory,
        identity,
        temperature_celsius: ask
            .optional("nvmlDeviceGetTemperature", |device| device.temperature(TemperatureSensor::Gpu))?,
        power_milliwatts: ask.optional("nvmlDeviceGetPowerUsage", |device| device.power_usage())?,
        sm_clock_megahertz: ask.optional("nvmlDeviceGetClockInfo", |device| device.clock_info(Clock::SM))?,
        memory_clock_megahertz: ask
            .optional("nvmlDeviceGetClockInfo", |device| device.clock_info(Clock::Memory))?,
        busy_percent: ask
            .optional("nvmlDeviceGetUtilizationRates", |device| device.utilization_rates())?
            .map(|rates| rates.gpu),
        processes: ask.processes(nvml, handle, memo, room)?,
    })
}

/// Calls about one device.
struct Asking<'a> {
    device: &'a Device<'a>,
    progress: &'a CallProgress,
}

impl Asking<'_> {
    fn optional<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&Device<'_>) -> Result<T, Code>,
    ) -> Result<Option<T>, NvmlError> {
        self.progress.enter(name, None);
        match call(self.device).map_err(|code| NvmlError::of_call(name, None, code)) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.wants_reload() => Err(error),
            Err(_) => Ok(None),
        }
    }

    fn identity(&self, subject: &FiguresSubject) -> Result<DeviceIdentity, NvmlError> {
        let name = self.optional("nvmlDeviceGetName", raw::name)?;
        let name = name.as_ref().map(|bytes| convert::text(bytes)).unwrap_or_default();
        Ok(match subject {
            FiguresSubject::Mig { .. } => DeviceIdentity {
                name,
                gpu_instance: self.optional("nvmlDeviceGetGpuInstanceId", raw::gpu_instance_id)?,
                ..DeviceIdentity::default()
            },
            FiguresSubject::Board(_) => DeviceIdentity {
                name,
                index: self.optional("nvmlDeviceGetIndex", |device| device.index())?,
                pci_bus_id: self
                    .optional("nvmlDeviceGetPciInfo_v3", |device| device.pci_info())?
                    .map(|pci| pci.bus_id),
                gpu_instance: None,
            },
        })
    }

    /// How busy the GPU instance of a MIG device was since the last question, in percent; none where that is not known.
    fn instance(&self, nvml: &Nvml, gpm: &mut Gpm) -> Result<Option<f64>, NvmlError> {
        let parent = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle";
        let Some(board) = self.optional(parent, |_| self.device.mig_parent_device())? else {
            return Ok(None);
        };
        let board = Asking { device: &board, progress: self.progress };
        if let Gpm::NotAsked = gpm {
            *gpm = self.monitored(&board)?;
        }
        let Gpm::Of { gpu_instance, last } = gpm else { return Ok(None) };
        let id = *gpu_instance;
        let before = last.take();
        *last = board.optional("nvmlGpmMigSampleGet", |device| raw_gpm::sample(device, id))?;
        let (Some(before), Some(now)) = (&before, &*last) else { return Ok(None) };
        let between = board.optional("nvmlGpmMetricsGet", |_| raw_gpm::busy_percent(nvml, before, now))?;
        Ok(between.flatten())
    }

    fn monitored(&self, board: &Asking<'_>) -> Result<Gpm, NvmlError> {
        let attributes = self.optional("nvmlDeviceGetAttributes_v2", |device| device.attributes())?;
        let is_all = |slices: &DeviceAttributes| {
            slices.compute_instance_slice_count == slices.gpu_instance_slice_count
        };
        let is_supported = board.optional("nvmlGpmQueryDeviceSupport", raw_gpm::is_supported)?;
        let id = self.optional("nvmlDeviceGetGpuInstanceId", raw::gpu_instance_id)?;
        Ok(match (attributes, is_supported, id) {
            (Some(slices), Some(true), Some(gpu_instance)) if is_all(&slices) => {
                Gpm::Of { gpu_instance, last: None }
            }
            (Some(_), Some(_), Some(_)) => Gpm::None,
            // A driver without these calls, or one that failed: asked again.
            _ => Gpm::NotAsked,
        })
    }

    fn processes(
        &self,
        nvml: &Nvml,
        handle: &raw::DeviceHandle,
        memo: &mut Memo,
        room: &mut raw::Samples,
    ) -> Result<ProcessActivity, NvmlError> {
        let name = "nvmlDeviceGetProcessUtilization";
        self.progress.enter(name, None);
        let since = memo.newest.unwrap_or_default();
        let samples = match raw::process_samples(nvml, handle, since, room) {
            Ok(samples) => samples,
            // Nobody worked since.
            Err(Code::NotFound) => Vec::new(),
            Err(code) => {
                memo.newest = None;
                let error = NvmlError::of_call(name, None, code);
                return if error.wants_reload() { Err(error) } else { Ok(ProcessActivity::Unknown) };
            }
        };
        let is_first = memo.newest.is_none();
        memo.newest = Some(samples.iter().map(|sample| sample.stamp).fold(since, u64::max));
        Ok(match is_first {
            true => ProcessActivity::Unknown,
            false => ProcessActivity::Known(mean(&samples)),
        })
    }
}

/// The mean of each process's samples. Places that the driver left empty, and percentages that are none, do not count.
fn mean(samples: &[Sample]) -> BTreeMap<u32, f64> {
    let mut sums: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for sample in samples.iter().filter(|one| one.pid != 0 && one.stamp != 0 && one.percent <= 100) {
        let (sum, count) = sums.entry(sample.pid).or_default();
        *sum += sample.percent;
        *count += 1;
    }
    let ratio = |(sum, count): (u32, u32)| f64::from(sum) / f64::from(count.max(1)) / 100.0;
    sums.into_iter().map(|(pid, one)| (pid, ratio(one))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_as_busy_as_its_samples_are_in_the_mean() {
        let sample = |pid, stamp, percent| Sample { pid, stamp, percent };
        let samples = [
            sample(7, 10, 40),
            sample(7, 20, 60),
            sample(8, 20, 100),
            sample(0, 20, 50),
            sample(9, 0, 50),
            sample(10, 20, 4_000_000_000),
        ];
        assert_eq!(mean(&samples), BTreeMap::from([(7, 0.5), (8, 1.0)]));
        assert_eq!(mean(&[]), BTreeMap::new());
    }
}
