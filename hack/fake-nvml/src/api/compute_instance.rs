//! Compute instances: profiles, placements, making and ending them.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t,
    nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t, nvmlComputeInstanceProfileInfo_v2_t,
    nvmlComputeInstanceProfileInfo_v3_t, nvmlGpuInstance_t,
};

use super::gpu_instance::resolve as gpu_instance;
use crate::abi::{Handle, chars, edit, get, put, put_all, put_list, versioned};
use crate::board::MigProfile;
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::mig::{self, Compute, ComputeProfile, Instance};
use crate::node::{Gpu, Node};

/// Board, GPU instance and its profile behind a handle.
fn parent(node: &Node, handle: nvmlGpuInstance_t) -> Answer<(&Gpu, &Instance, &'static MigProfile)> {
    let (gpu, instance) = gpu_instance(node, handle)?;
    Ok((gpu, instance, gpu.profile(instance).ok_or(Code::INVALID_ARGUMENT)?))
}

/// A compute profile by its index, which is its id.
fn profile(gpu: &Gpu, of: &MigProfile, kind: c_uint) -> Answer<ComputeProfile> {
    if kind >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        return Err(Code::INVALID_ARGUMENT);
    }
    mig::compute_profiles(gpu.board, of).into_iter().find(|p| p.kind == kind).ok_or(Code::NOT_SUPPORTED)
}

fn resolve(node: &Node, handle: nvmlComputeInstance_t) -> Answer<(&Gpu, &Instance, &Compute)> {
    match Handle::decode(handle as usize) {
        Some(Handle::ComputeInstance { gpu, gi, ci }) => {
            let gpu = node.present(gpu)?;
            let (instance, compute) = gpu.mig.compute(gi, ci).ok_or(Code::INVALID_ARGUMENT)?;
            Ok((gpu, instance, compute))
        }
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn handle(gpu: &Gpu, gi: u32, ci: u32) -> nvmlComputeInstance_t {
    Handle::ComputeInstance { gpu: gpu.index, gi, ci }.pointer()
}

fn kind_of(slices: u32) -> c_uint {
    if slices == 7 { 4 } else { slices.saturating_sub(1) }
}

fn name(of: &MigProfile, p: &ComputeProfile) -> String {
    format!("MIG {}c.{}", p.slices, of.name)
}

fn info(node: &Node, handle: nvmlComputeInstance_t, out: *mut nvmlComputeInstanceInfo_t) -> Answer {
    let (gpu, instance, compute) = resolve(node, handle)?;
    put(
        out,
        nvmlComputeInstanceInfo_t {
            device: gpu.handle().pointer(),
            gpuInstance: Handle::GpuInstance { gpu: gpu.index, gi: instance.id }.pointer(),
            id: compute.id,
            profileId: kind_of(compute.slices),
            placement: nvmlComputeInstancePlacement_t { start: compute.start, size: compute.slices },
        },
    )
}

fn create(
    node: &Node,
    instance: nvmlGpuInstance_t,
    kind: c_uint,
    start: Option<u32>,
    out: *mut nvmlComputeInstance_t,
) -> Answer {
    let (gpu, instance, of) = parent(node, instance)?;
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let p = profile(gpu, of, kind)?;
    node.need_root()?;
    let ci = node.change_mig(gpu, |mig| mig.create_compute(gpu.board, instance.id, p.slices, start))?;
    put(out, handle(gpu, instance.id, ci))
}

nvml! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(instance: nvmlGpuInstance_t, kind: c_uint, engine: c_uint, out: *mut nvmlComputeInstanceProfileInfo_t) |node| {
        let (gpu, _, of) = parent(node, instance)?;
        if engine != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let p = profile(gpu, of, kind)?;
        put(out, nvmlComputeInstanceProfileInfo_t {
            id: p.kind,
            sliceCount: p.slices,
            instanceCount: p.instances,
            multiprocessorCount: p.multiprocessors,
            sharedCopyEngineCount: of.copy_engines,
            sharedDecoderCount: of.decoders,
            sharedEncoderCount: of.encoders,
            sharedJpegCount: of.jpeg,
            sharedOfaCount: of.ofa,
        })
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance: nvmlGpuInstance_t, kind: c_uint, engine: c_uint, out: *mut nvmlComputeInstanceProfileInfo_v2_t) |node| {
        let (gpu, _, of) = parent(node, instance)?;
        if engine != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let p = profile(gpu, of, kind)?;
        macro_rules! fill {
            ($out:expr) => { edit($out, |o| {
                o.id = p.kind;
                o.sliceCount = p.slices;
                o.instanceCount = p.instances;
                o.multiprocessorCount = p.multiprocessors;
                o.sharedCopyEngineCount = of.copy_engines;
                o.sharedDecoderCount = of.decoders;
                o.sharedEncoderCount = of.encoders;
                o.sharedJpegCount = of.jpeg;
                o.sharedOfaCount = of.ofa;
                o.name = chars(&name(of, &p));
            }) };
        }
        match get(out.cast::<c_uint>())? >> 24 {
            2 => {
                versioned::<nvmlComputeInstanceProfileInfo_v2_t>(get(out)?.version, 2)?;
                fill!(out)
            }
            3 => {
                let out = out.cast::<nvmlComputeInstanceProfileInfo_v3_t>();
                versioned::<nvmlComputeInstanceProfileInfo_v3_t>(get(out)?.version, 3)?;
                fill!(out)
            }
            _ => Err(Code::ARGUMENT_VERSION_MISMATCH),
        }
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance: nvmlGpuInstance_t, kind: c_uint, count: *mut c_uint) |node| {
        let (gpu, instance, of) = parent(node, instance)?;
        let p = profile(gpu, of, kind)?;
        put(count, gpu.mig.remaining_compute(gpu.board, instance.id, p.slices)?)
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance: nvmlGpuInstance_t, kind: c_uint, out: *mut nvmlComputeInstancePlacement_t, count: *mut c_uint) |node| {
        let (gpu, _, of) = parent(node, instance)?;
        let p = profile(gpu, of, kind)?;
        let all: Vec<_> = mig::compute_starts(of, p.slices).into_iter()
            .map(|start| nvmlComputeInstancePlacement_t { start, size: p.slices })
            .collect();
        if out.is_null() {
            return put(count, all.len() as c_uint);
        }
        put_list(count, out, &all)
    }

    fn nvmlGpuInstanceCreateComputeInstance(instance: nvmlGpuInstance_t, kind: c_uint, out: *mut nvmlComputeInstance_t) |node| {
        create(node, instance, kind, None, out)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance: nvmlGpuInstance_t, kind: c_uint, place: *const nvmlComputeInstancePlacement_t, out: *mut nvmlComputeInstance_t) |node| {
        create(node, instance, kind, Some(get(place)?.start), out)
    }

    fn nvmlComputeInstanceDestroy(instance: nvmlComputeInstance_t) |node| {
        let (gpu, of, compute) = resolve(node, instance)?;
        node.need_root()?;
        if gpu.processes().any(|p| p.gi == Some(of.id) && p.ci.unwrap_or(0) == compute.id) {
            return Err(Code::IN_USE);
        }
        node.change_mig(gpu, |mig| mig.destroy_compute(of.id, compute.id))
    }

    fn nvmlGpuInstanceGetComputeInstances(instance: nvmlGpuInstance_t, kind: c_uint, out: *mut nvmlComputeInstance_t, count: *mut c_uint) |node| {
        let (gpu, instance, of) = parent(node, instance)?;
        let p = profile(gpu, of, kind)?;
        if out.is_null() || count.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let all: Vec<_> = instance.compute.iter()
            .filter(|c| c.slices == p.slices)
            .map(|c| handle(gpu, instance.id, c.id))
            .collect();
        put_all(out, &all)?;
        put(count, all.len() as c_uint)
    }

    fn nvmlGpuInstanceGetComputeInstanceById(instance: nvmlGpuInstance_t, id: c_uint, out: *mut nvmlComputeInstance_t) |node| {
        let (gpu, instance, _) = parent(node, instance)?;
        let found = instance.compute.iter().find(|c| c.id == id).ok_or(Code::NOT_FOUND)?;
        put(out, handle(gpu, instance.id, found.id))
    }

    fn nvmlComputeInstanceGetInfo(instance: nvmlComputeInstance_t, out: *mut nvmlComputeInstanceInfo_t) |node| {
        info(node, instance, out)
    }

    fn nvmlComputeInstanceGetInfo_v2(instance: nvmlComputeInstance_t, out: *mut nvmlComputeInstanceInfo_t) |node| {
        info(node, instance, out)
    }
}
