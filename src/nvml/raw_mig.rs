//! Calls that make and end MIG instances, which nvml-wrapper lacks. What all blocks rest on is said in [`super::raw`]:
//! functions and handles are those of the library that `Nvml` keeps loaded, types are nvml-wrapper-sys' bindings of
//! nvml.h, and NVML answers INVALID_ARGUMENT to handles that are stale.
#![allow(unsafe_code)]

use std::ffi::c_uint;
use std::ptr;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError as Code, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT, nvmlComputeInstance_t, nvmlComputeInstanceProfileInfo_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlReturn_t,
};

use crate::model::gpu::Placement;
use crate::model::mig::MigPlace;

/// No board has so many placements of one profile, nor so many instances: what is beyond is taken for nonsense.
const LIST_MAX: usize = 64;

/// A GPU instance, while it is there; to be used with the device that gave it.
#[derive(Clone, Copy)]
pub(super) struct GpuInstanceHandle(nvmlGpuInstance_t);

/// A compute instance, likewise.
#[derive(Clone, Copy)]
pub(super) struct ComputeInstanceHandle(nvmlComputeInstance_t);

/// `nvmlDeviceGetGpuInstancePossiblePlacements_v2`: all placements of a profile on an empty board.
pub(super) fn placements(board: &Device<'_>, profile_id: u32) -> Result<Vec<Placement>, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2.as_ref())?;
    let mut count: c_uint = 0;
    // SAFETY: the handle is the board's own; without a buffer only `count` is written, which is live.
    nvml_try(unsafe { call(board.handle(), profile_id, ptr::null_mut(), &mut count) })?;
    let mut list = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; (count as usize).min(LIST_MAX)];
    let mut room = list.len() as c_uint;
    // SAFETY: `room` is live and says how many entries the buffer has.
    nvml_try(unsafe { call(board.handle(), profile_id, list.as_mut_ptr(), &mut room) })?;
    list.truncate(room as usize);
    Ok(list.into_iter().map(|at| Placement { start: at.start, size: at.size }).collect())
}

/// `nvmlDeviceGetGpuInstances`: the instances of a profile.
pub(super) fn gpu_instances(board: &Device<'_>, profile_id: u32) -> Result<Vec<GpuInstanceHandle>, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlDeviceGetGpuInstances.as_ref())?;
    let mut list: [nvmlGpuInstance_t; LIST_MAX] = [ptr::null_mut(); LIST_MAX];
    let mut count: c_uint = 0;
    // SAFETY: the handle is the board's own; the buffer has room for more instances than any board's profile allows,
    // which is what the call demands; `count` is live.
    nvml_try(unsafe { call(board.handle(), profile_id, list.as_mut_ptr(), &mut count) })?;
    Ok(list.into_iter().take(count as usize).map(GpuInstanceHandle).collect())
}

/// `nvmlGpuInstanceGetInfo`: NVML's id of the instance, and its place.
pub(super) fn gpu_instance_info(board: &Device<'_>, gi: GpuInstanceHandle) -> Result<(u32, MigPlace), Code> {
    let call = nvml_sym(board.nvml().lib().nvmlGpuInstanceGetInfo.as_ref())?;
    let placement = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
    let mut info = nvmlGpuInstanceInfo_t { device: ptr::null_mut(), id: 0, profileId: 0, placement };
    // SAFETY: the handle came from this library, which checks it; `info` is a live value of the declared type.
    nvml_try(unsafe { call(gi.0, &mut info) })?;
    let placement = Placement { start: info.placement.start, size: info.placement.size };
    Ok((info.id, MigPlace { profile_id: info.profileId, placement }))
}

/// `nvmlDeviceCreateGpuInstanceWithPlacement`
pub(super) fn create_gpu_instance(board: &Device<'_>, place: MigPlace) -> Result<GpuInstanceHandle, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlDeviceCreateGpuInstanceWithPlacement.as_ref())?;
    let at = nvmlGpuInstancePlacement_t { start: place.placement.start, size: place.placement.size };
    let mut gi: nvmlGpuInstance_t = ptr::null_mut();
    // SAFETY: the handle is the board's own; `at` is only read, and `gi` is a live pointer to write to.
    nvml_try(unsafe { call(board.handle(), place.profile_id, &at, &mut gi) })?;
    Ok(GpuInstanceHandle(gi))
}

/// `nvmlGpuInstanceDestroy`: not while it has compute instances.
pub(super) fn destroy_gpu_instance(board: &Device<'_>, gi: GpuInstanceHandle) -> Result<(), Code> {
    let call = nvml_sym(board.nvml().lib().nvmlGpuInstanceDestroy.as_ref())?;
    // SAFETY: the handle came from this library, which checks it.
    nvml_try(unsafe { call(gi.0) })
}

/// `nvmlGpuInstanceGetComputeInstanceProfileInfo`: ids of the compute profiles that the instance has, with their slices.
pub(super) fn compute_profiles(board: &Device<'_>, gi: GpuInstanceHandle) -> Result<Vec<(u32, u32)>, Code> {
    const SHARED_ENGINES: c_uint = 0;
    let call = nvml_sym(board.nvml().lib().nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())?;
    let mut found = Vec::new();
    for kind in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        // SAFETY: a struct of integers, for which zero bytes are a value.
        let mut info: nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the handle came from this library, which checks it; `info` is a live value of the declared type.
        match nvml_try(unsafe { call(gi.0, kind, SHARED_ENGINES, &mut info) }) {
            Ok(()) => found.push((info.id, info.sliceCount)),
            Err(Code::NotSupported | Code::InvalidArg) => {}
            Err(code) => return Err(code),
        }
    }
    Ok(found)
}

/// `nvmlGpuInstanceGetComputeInstances`: the compute instances of one compute profile.
pub(super) fn compute_instances(
    board: &Device<'_>,
    gi: GpuInstanceHandle,
    profile_id: u32,
) -> Result<Vec<ComputeInstanceHandle>, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlGpuInstanceGetComputeInstances.as_ref())?;
    let mut list: [nvmlComputeInstance_t; LIST_MAX] = [ptr::null_mut(); LIST_MAX];
    let mut count: c_uint = 0;
    // SAFETY: as for GPU instances: more room than any profile allows; `count` is live.
    nvml_try(unsafe { call(gi.0, profile_id, list.as_mut_ptr(), &mut count) })?;
    Ok(list.into_iter().take(count as usize).map(ComputeInstanceHandle).collect())
}

/// `nvmlGpuInstanceCreateComputeInstance`
pub(super) fn create_compute_instance(
    board: &Device<'_>,
    gi: GpuInstanceHandle,
    profile_id: u32,
) -> Result<ComputeInstanceHandle, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlGpuInstanceCreateComputeInstance.as_ref())?;
    let mut ci: nvmlComputeInstance_t = ptr::null_mut();
    // SAFETY: the handle came from this library, which checks it; `ci` is a live pointer to write to.
    nvml_try(unsafe { call(gi.0, profile_id, &mut ci) })?;
    Ok(ComputeInstanceHandle(ci))
}

/// `nvmlComputeInstanceDestroy`: not while a process runs in it.
pub(super) fn destroy_compute_instance(board: &Device<'_>, ci: ComputeInstanceHandle) -> Result<(), Code> {
    let call = nvml_sym(board.nvml().lib().nvmlComputeInstanceDestroy.as_ref())?;
    // SAFETY: the handle came from this library, which checks it.
    nvml_try(unsafe { call(ci.0) })
}

/// `nvmlDeviceSetMigMode`: NVML's word on whether the mode is in force, a return code.
pub(super) fn set_mode(board: &Device<'_>, on: bool) -> Result<u32, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlDeviceSetMigMode.as_ref())?;
    let mut status: nvmlReturn_t = 0;
    // SAFETY: the handle is the board's own; `status` is a live number.
    nvml_try(unsafe { call(board.handle(), c_uint::from(on), &mut status) })?;
    Ok(status)
}
