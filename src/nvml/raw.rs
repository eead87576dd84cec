//! Calls that nvml-wrapper lacks, or whose answers it cannot take: texts that may be no UTF-8, MIG
//! instances and their placements, events of MIG devices, the addressing mode, process lists that grow.
//!
//! What all blocks rest on: the functions come from the library that `Nvml` keeps loaded and
//! initialised for at least as long as the borrow lives, their types are nvml-wrapper-sys' bindings of
//! NVIDIA's nvml.h, handles come from that same library, and every out parameter points to a live
//! value of the declared type and size. NVML itself checks handles and answers INVALID_ARGUMENT to
//! stale ones.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_uint, c_ulonglong};

use nvml_wrapper::error::{NvmlError as Code, nvml_sym, nvml_try};
use nvml_wrapper::{Device, EventSet, Nvml};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAddressingMode_t, nvmlEventData_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlMemory_t, nvmlProcessInfo_t,
    nvmlProcessUtilizationSample_t, nvmlReturn_t,
};

use super::figures::Sample;
use crate::model::gpu::Placement;

/// The longest that NVML's manual gives for any text (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`).
const TEXT: usize = 96;

/// An instance id that stands for "does not apply".
const NO_INSTANCE: c_uint = c_uint::MAX;

/// `nvmlSystemGetDriverVersion`: the text, ended by a zero.
pub(super) fn driver_version(nvml: &Nvml) -> Result<[u8; TEXT], Code> {
    let call = nvml_sym(nvml.lib().nvmlSystemGetDriverVersion.as_ref())?;
    // SAFETY: `text` hands over a buffer and its true length.
    text(|buffer, length| unsafe { call(buffer, length) })
}

/// `nvmlDeviceGetUUID`
pub(super) fn uuid(device: &Device<'_>) -> Result<[u8; TEXT], Code> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetUUID.as_ref())?;
    // SAFETY: the handle is the device's own; `text` hands over a buffer and its true length.
    text(|buffer, length| unsafe { call(device.handle(), buffer, length) })
}

/// `nvmlDeviceGetName`
pub(super) fn name(device: &Device<'_>) -> Result<[u8; TEXT], Code> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetName.as_ref())?;
    // SAFETY: the handle is the device's own; `text` hands over a buffer and its true length.
    text(|buffer, length| unsafe { call(device.handle(), buffer, length) })
}

fn text(call: impl FnOnce(*mut c_char, c_uint) -> nvmlReturn_t) -> Result<[u8; TEXT], Code> {
    let mut buffer = [0_u8; TEXT];
    nvml_try(call(buffer.as_mut_ptr().cast(), TEXT as c_uint))?;
    Ok(buffer)
}

/// `nvmlDeviceGetMemoryInfo`, for drivers without `_v2`: total bytes.
pub(super) fn memory_total(device: &Device<'_>) -> Result<u64, Code> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = nvmlMemory_t { total: 0, free: 0, used: 0 };
    // SAFETY: the handle is the device's own; `info` is a live value of the declared type.
    nvml_try(unsafe { call(device.handle(), &mut info) })?;
    Ok(info.total)
}

/// `nvmlDeviceGetAddressingMode`: NVML's number.
pub(super) fn addressing_mode(device: &Device<'_>) -> Result<u32, Code> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetAddressingMode.as_ref())?;
    let version = size_of::<nvmlDeviceAddressingMode_t>() as c_uint | 1 << 24;
    let mut mode = nvmlDeviceAddressingMode_t { version, value: 0 };
    // SAFETY: the handle is the device's own; `mode` is live and says its own size.
    nvml_try(unsafe { call(device.handle(), &mut mode) })?;
    Ok(mode.value)
}

/// `nvmlDeviceGetGpuInstanceId` of a MIG device.
pub(super) fn gpu_instance_id(mig: &Device<'_>) -> Result<u32, Code> {
    let call = nvml_sym(mig.nvml().lib().nvmlDeviceGetGpuInstanceId.as_ref())?;
    let mut id = 0;
    // SAFETY: the handle is the device's own; `id` is a live number.
    nvml_try(unsafe { call(mig.handle(), &mut id) })?;
    Ok(id)
}

/// `nvmlDeviceGetComputeInstanceId` of a MIG device.
pub(super) fn compute_instance_id(mig: &Device<'_>) -> Result<u32, Code> {
    let call = nvml_sym(mig.nvml().lib().nvmlDeviceGetComputeInstanceId.as_ref())?;
    let mut id = 0;
    // SAFETY: the handle is the device's own; `id` is a live number.
    nvml_try(unsafe { call(mig.handle(), &mut id) })?;
    Ok(id)
}

/// A GPU instance's profile id and place.
pub(super) struct GpuInstance {
    pub profile_id: u32,
    pub placement: Placement,
}

/// `nvmlDeviceGetGpuInstanceById`: a handle that ends with the instance.
pub(super) fn gpu_instance(board: &Device<'_>, id: u32) -> Result<GpuInstance, Code> {
    let lib = board.nvml().lib();
    let by_id = nvml_sym(lib.nvmlDeviceGetGpuInstanceById.as_ref())?;
    let get_info = nvml_sym(lib.nvmlGpuInstanceGetInfo.as_ref())?;
    let mut handle: nvmlGpuInstance_t = std::ptr::null_mut();
    // SAFETY: the handle is the board's own; `handle` is a live pointer to write to.
    nvml_try(unsafe { by_id(board.handle(), id, &mut handle) })?;
    let placement = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
    let mut info = nvmlGpuInstanceInfo_t { device: std::ptr::null_mut(), id: 0, profileId: 0, placement };
    // SAFETY: NVML gave the handle just now; `info` is a live value of the declared type.
    nvml_try(unsafe { get_info(handle, &mut info) })?;
    let placement = Placement { start: info.placement.start, size: info.placement.size };
    Ok(GpuInstance { profile_id: info.profileId, placement })
}

/// `nvmlDeviceGetGpuInstanceProfileInfo`: the profile id behind a kind (`NVML_GPU_INSTANCE_PROFILE_*`).
pub(super) fn profile_id(board: &Device<'_>, kind: u32) -> Result<u32, Code> {
    profile_info(board, kind).map(|info| info.id)
}

/// `nvmlDeviceGetGpuInstanceProfileInfo`
pub(super) fn profile_info(board: &Device<'_>, kind: u32) -> Result<nvmlGpuInstanceProfileInfo_t, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlDeviceGetGpuInstanceProfileInfo.as_ref())?;
    // SAFETY: a struct of integers, for which zero bytes are a value.
    let mut info: nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the handle is the board's own; `info` is a live value of the declared type.
    nvml_try(unsafe { call(board.handle(), kind, &mut info) })?;
    Ok(info)
}

/// An event as NVML delivers it.
pub(super) struct Event {
    pub board: Handle,
    /// One bit of `nvmlEventType*`.
    pub kind: u64,
    pub data: u64,
    pub gpu_instance: Option<u32>,
    pub compute_instance: Option<u32>,
}

/// A device's handle as a number, to be compared and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(usize);

pub(super) fn handle(device: &Device<'_>) -> Handle {
    // SAFETY: the handle is only looked at.
    Handle(unsafe { device.handle() } as usize)
}

/// `nvmlDeviceRegisterEvents` for those of `kinds` that the board supports; the bits that it does.
/// (nvml-wrapper's own gives up the whole set when one board refuses.)
pub(super) fn register(board: &Device<'_>, kinds: u64, set: &EventSet<'_>) -> Result<u64, Code> {
    let lib = board.nvml().lib();
    let supported = nvml_sym(lib.nvmlDeviceGetSupportedEventTypes.as_ref())?;
    let register = nvml_sym(lib.nvmlDeviceRegisterEvents.as_ref())?;
    let mut bits: c_ulonglong = 0;
    // SAFETY: the handle is the board's own; `bits` is a live number.
    nvml_try(unsafe { supported(board.handle(), &mut bits) })?;
    let bits = bits & kinds;
    if bits != 0 {
        // SAFETY: both handles are live: the set is borrowed and frees itself only when dropped.
        nvml_try(unsafe { register(board.handle(), bits, set.handle()) })?;
    }
    Ok(bits)
}

/// `nvmlEventSetWait_v2`: the next event, or `Timeout`.
pub(super) fn wait(set: &EventSet<'_>, timeout_ms: u32) -> Result<Event, Code> {
    let call = nvml_sym(set.nvml.lib().nvmlEventSetWait_v2.as_ref())?;
    let device: nvmlDevice_t = std::ptr::null_mut();
    let (gpu, compute) = (NO_INSTANCE, NO_INSTANCE);
    let mut data = nvmlEventData_t {
        device,
        eventType: 0,
        eventData: 0,
        gpuInstanceId: gpu,
        computeInstanceId: compute,
    };
    // SAFETY: the set is borrowed and live; `data` is a live value of the declared type.
    nvml_try(unsafe { call(set.handle(), &mut data, timeout_ms) })?;
    let instance = |id: c_uint| (id != NO_INSTANCE).then_some(id);
    Ok(Event {
        board: Handle(data.device as usize),
        kind: data.eventType,
        data: data.eventData,
        gpu_instance: instance(data.gpuInstanceId),
        compute_instance: instance(data.computeInstanceId),
    })
}

/// A board's handle, kept between questions: to be used with the library that gave it, while it is loaded.
pub(super) struct DeviceHandle(nvmlDevice_t);

/// `nvmlDeviceGetHandleByUUID`
pub(super) fn board(nvml: &Nvml, uuid: &str) -> Result<DeviceHandle, Code> {
    let device = nvml.device_by_uuid(uuid)?;
    // SAFETY: the handle is only copied.
    Ok(DeviceHandle(unsafe { device.handle() }))
}

/// One of NVML's lists of a board's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessListKind {
    /// Everything with a compute context: bare processes, MPS servers and MPS clients.
    Compute,
    /// Clients of an MPS server.
    Mps,
    Graphics,
}

/// A process as a list has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listed {
    pub pid: u32,
    /// None: the driver cannot tell.
    pub used: Option<u64>,
}

/// Room for the answers, kept between questions.
#[derive(Default)]
pub(super) struct Buffer(Vec<nvmlProcessInfo_t>);

/// Processes that are asked room for at first, and kept free for those that start meanwhile.
const HEADROOM: usize = 32;
/// A board has room for far fewer: more is nonsense.
const PROCESSES_MAX: usize = 1 << 16;
/// How often a list may have outgrown its buffer before it is given up.
const TRIES: usize = 4;

/// `nvmlDeviceGet[MPS]Compute|GraphicsRunningProcesses_v3`: one call, unless the list has grown.
pub(super) fn processes(
    nvml: &Nvml,
    board: &DeviceHandle,
    list: ProcessListKind,
    buffer: &mut Buffer,
) -> Result<Vec<Listed>, Code> {
    let lib = nvml.lib();
    let call = *match list {
        ProcessListKind::Compute => nvml_sym(lib.nvmlDeviceGetComputeRunningProcesses_v3.as_ref())?,
        ProcessListKind::Mps => nvml_sym(lib.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref())?,
        ProcessListKind::Graphics => nvml_sym(lib.nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref())?,
    };
    let buffer = &mut buffer.0;
    let empty = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let mut room = HEADROOM;
    for _ in 0..TRIES {
        if buffer.len() < room {
            buffer.resize(room, empty);
        }
        let mut count = c_uint::try_from(buffer.len()).unwrap_or(0);
        // SAFETY: the handle came from this library, which checks it; `count` is live and says how many
        // entries the buffer has.
        match nvml_try(unsafe { call(board.0, &mut count, buffer.as_mut_ptr()) }) {
            Ok(()) => return Ok(buffer.iter().take(count as usize).map(listed).collect()),
            Err(Code::InsufficientSize(_)) if (count as usize) < PROCESSES_MAX => {
                room = buffer.len().max(count as usize) + HEADROOM;
            }
            Err(code) => return Err(code),
        }
    }
    Err(Code::InsufficientSize(None))
}

fn listed(info: &nvmlProcessInfo_t) -> Listed {
    // NVML_VALUE_NOT_AVAILABLE
    let used = (info.usedGpuMemory != c_ulonglong::MAX).then_some(info.usedGpuMemory);
    Listed { pid: info.pid, used }
}

/// The device behind a handle.
pub(super) fn device<'a>(nvml: &'a Nvml, handle: &DeviceHandle) -> Device<'a> {
    // SAFETY: the handle came from this library, which checks it.
    unsafe { Device::new(handle.0, nvml) }
}

/// Room for samples, kept between questions.
#[derive(Default)]
pub(super) struct Samples(Vec<nvmlProcessUtilizationSample_t>);

/// `nvmlDeviceGetProcessUtilization`: samples newer than `since` (microseconds since 1970); one call, unless there are
/// more than before. `NotFound`: nobody worked since.
pub(super) fn process_samples(
    nvml: &Nvml,
    board: &DeviceHandle,
    since: u64,
    buffer: &mut Samples,
) -> Result<Vec<Sample>, Code> {
    let call = *nvml_sym(nvml.lib().nvmlDeviceGetProcessUtilization.as_ref())?;
    let buffer = &mut buffer.0;
    let empty = nvmlProcessUtilizationSample_t {
        pid: 0,
        timeStamp: 0,
        smUtil: 0,
        memUtil: 0,
        encUtil: 0,
        decUtil: 0,
    };
    let mut room = HEADROOM;
    for _ in 0..TRIES {
        if buffer.len() < room {
            buffer.resize(room, empty);
        }
        // Some drivers leave places empty that they count.
        buffer.fill(empty);
        let mut count = c_uint::try_from(buffer.len()).unwrap_or(0);
        // SAFETY: the handle came from this library, which checks it; `count` is live and says how many
        // entries the buffer has.
        match nvml_try(unsafe { call(board.0, buffer.as_mut_ptr(), &mut count, since) }) {
            Ok(()) => return Ok(buffer.iter().take(count as usize).map(sample).collect()),
            Err(Code::InsufficientSize(_)) if (count as usize) < PROCESSES_MAX => {
                room = buffer.len().max(count as usize) + HEADROOM;
            }
            Err(code) => return Err(code),
        }
    }
    Err(Code::InsufficientSize(None))
}

fn sample(info: &nvmlProcessUtilizationSample_t) -> Sample {
    Sample { pid: info.pid, stamp: info.timeStamp, percent: info.smUtil }
}
