//! GPU instances: profiles, placements, making and ending them.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};

use crate::abi::{Handle, chars, edit, get, put, put_list, versioned};
use crate::board::MigProfile;
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::mig::{self, Instance};
use crate::node::{Gpu, Node};

fn capable(node: &Node, device: nvmlDevice_t) -> Answer<&Gpu> {
    let gpu = node.gpu(device)?;
    if gpu.board.mig_capable() { Ok(gpu) } else { Err(Code::NOT_SUPPORTED) }
}

fn enabled(node: &Node, device: nvmlDevice_t) -> Answer<&Gpu> {
    let gpu = capable(node, device)?;
    if gpu.mig.enabled { Ok(gpu) } else { Err(Code::NOT_SUPPORTED) }
}

fn by_kind(gpu: &Gpu, kind: c_uint) -> Answer<&'static MigProfile> {
    if kind >= nvml_wrapper_sys::bindings::NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(Code::INVALID_ARGUMENT);
    }
    mig::by_kind(gpu.board, kind).ok_or(Code::NOT_SUPPORTED)
}

fn by_id(gpu: &Gpu, id: c_uint) -> Answer<&'static MigProfile> {
    mig::by_id(gpu.board, id).ok_or(Code::NOT_SUPPORTED)
}

/// The board and the instance behind a handle.
pub(super) fn resolve(node: &Node, handle: nvmlGpuInstance_t) -> Answer<(&Gpu, &Instance)> {
    match Handle::decode(handle as usize) {
        Some(Handle::GpuInstance { gpu, gi }) => {
            let gpu = node.present(gpu)?;
            Ok((gpu, gpu.mig.instance(gi).ok_or(Code::INVALID_ARGUMENT)?))
        }
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn info_v2(
    node: &Node,
    device: nvmlDevice_t,
    kind: c_uint,
    by: Lookup,
    out: *mut nvmlGpuInstanceProfileInfo_v2_t,
) -> Answer {
    let gpu = capable(node, device)?;
    let p = by(gpu, kind)?;
    match get(out.cast::<c_uint>())? >> 24 {
        2 => {
            versioned::<nvmlGpuInstanceProfileInfo_v2_t>(get(out)?.version, 2)?;
            edit(out, |o| {
                o.id = p.id;
                o.isP2pSupported = 0;
                o.sliceCount = p.slices;
                o.instanceCount = p.instances;
                o.multiprocessorCount = p.multiprocessors;
                o.copyEngineCount = p.copy_engines;
                o.decoderCount = p.decoders;
                o.encoderCount = p.encoders;
                o.jpegCount = p.jpeg;
                o.ofaCount = p.ofa;
                o.memorySizeMB = p.memory_mib;
                o.name = chars(&format!("MIG {}", p.name));
            })
        }
        3 => {
            let out = out.cast::<nvmlGpuInstanceProfileInfo_v3_t>();
            versioned::<nvmlGpuInstanceProfileInfo_v3_t>(get(out)?.version, 3)?;
            edit(out, |o| {
                o.id = p.id;
                o.sliceCount = p.slices;
                o.instanceCount = p.instances;
                o.multiprocessorCount = p.multiprocessors;
                o.copyEngineCount = p.copy_engines;
                o.decoderCount = p.decoders;
                o.encoderCount = p.encoders;
                o.jpegCount = p.jpeg;
                o.ofaCount = p.ofa;
                o.memorySizeMB = p.memory_mib;
                o.name = chars(&format!("MIG {}", p.name));
                o.capabilities = 0;
            })
        }
        _ => Err(Code::ARGUMENT_VERSION_MISMATCH),
    }
}

type Lookup = fn(&Gpu, c_uint) -> Answer<&'static MigProfile>;

fn placements(
    node: &Node,
    device: nvmlDevice_t,
    id: c_uint,
    out: *mut nvmlGpuInstancePlacement_t,
    count: *mut c_uint,
) -> Answer {
    let gpu = capable(node, device)?;
    let p = by_id(gpu, id)?;
    let all: Vec<_> =
        p.starts.iter().map(|&start| nvmlGpuInstancePlacement_t { start, size: p.size }).collect();
    // Without a buffer only the count is asked for.
    if out.is_null() {
        return put(count, all.len() as c_uint);
    }
    put_list(count, out, &all)
}

fn create(
    node: &Node,
    device: nvmlDevice_t,
    id: c_uint,
    start: Option<u32>,
    out: *mut nvmlGpuInstance_t,
) -> Answer {
    let gpu = enabled(node, device)?;
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    by_id(gpu, id)?;
    node.need_root()?;
    let gi = node.change_mig(gpu, |mig| mig.create(gpu.board, id, start))?;
    put(out, Handle::GpuInstance { gpu: gpu.index, gi }.pointer())
}

nvml! {
    fn nvmlDeviceGetGpuInstanceProfileInfo(device: nvmlDevice_t, kind: c_uint, out: *mut nvmlGpuInstanceProfileInfo_t) |node| {
        let gpu = capable(node, device)?;
        let p = by_kind(gpu, kind)?;
        put(out, nvmlGpuInstanceProfileInfo_t {
            id: p.id,
            isP2pSupported: 0,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.multiprocessors,
            copyEngineCount: p.copy_engines,
            decoderCount: p.decoders,
            encoderCount: p.encoders,
            jpegCount: p.jpeg,
            ofaCount: p.ofa,
            memorySizeMB: p.memory_mib,
        })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(device: nvmlDevice_t, kind: c_uint, out: *mut nvmlGpuInstanceProfileInfo_v2_t) |node| {
        info_v2(node, device, kind, by_kind, out)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstanceProfileInfo_v2_t) |node| {
        info_v2(node, device, id, by_id, out)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstancePlacement_t, count: *mut c_uint) |node| {
        placements(node, device, id, out, count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstancePlacement_t, count: *mut c_uint) |node| {
        placements(node, device, id, out, count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: nvmlDevice_t, id: c_uint, count: *mut c_uint) |node| {
        let gpu = capable(node, device)?;
        put(count, gpu.mig.remaining(gpu.board, by_id(gpu, id)?))
    }

    fn nvmlDeviceCreateGpuInstance(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstance_t) |node| {
        create(node, device, id, None, out)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(device: nvmlDevice_t, id: c_uint, place: *const nvmlGpuInstancePlacement_t, out: *mut nvmlGpuInstance_t) |node| {
        let place = get(place)?;
        let profile = by_id(enabled(node, device)?, id)?;
        if place.size != profile.size {
            return Err(Code::INVALID_ARGUMENT);
        }
        create(node, device, id, Some(place.start), out)
    }

    fn nvmlGpuInstanceDestroy(instance: nvmlGpuInstance_t) |node| {
        let (gpu, found) = resolve(node, instance)?;
        node.need_root()?;
        if gpu.processes().any(|p| p.gi == Some(found.id)) {
            return Err(Code::IN_USE);
        }
        node.change_mig(gpu, |mig| mig.destroy(found.id))
    }

    fn nvmlDeviceGetGpuInstances(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstance_t, count: *mut c_uint) |node| {
        let gpu = enabled(node, device)?;
        let profile = by_id(gpu, id)?;
        let all: Vec<nvmlGpuInstance_t> = gpu.mig.instances.iter()
            .filter(|i| i.profile == profile.id)
            .map(|i| Handle::GpuInstance { gpu: gpu.index, gi: i.id }.pointer())
            .collect();
        // The real call takes no room from the caller: the buffer must hold the profile's most.
        if out.is_null() || count.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        crate::abi::put_all(out, &all)?;
        put(count, all.len() as c_uint)
    }

    fn nvmlDeviceGetGpuInstanceById(device: nvmlDevice_t, id: c_uint, out: *mut nvmlGpuInstance_t) |node| {
        let gpu = enabled(node, device)?;
        let found = gpu.mig.instance(id).ok_or(Code::NOT_FOUND)?;
        put(out, Handle::GpuInstance { gpu: gpu.index, gi: found.id }.pointer())
    }

    fn nvmlGpuInstanceGetInfo(instance: nvmlGpuInstance_t, out: *mut nvmlGpuInstanceInfo_t) |node| {
        let (gpu, found) = resolve(node, instance)?;
        let size = gpu.profile(found).map_or(0, |p| p.size);
        put(out, nvmlGpuInstanceInfo_t {
            device: gpu.handle().pointer(),
            id: found.id,
            profileId: found.profile,
            placement: nvmlGpuInstancePlacement_t { start: found.start, size },
        })
    }
}
