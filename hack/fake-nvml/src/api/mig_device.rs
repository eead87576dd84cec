//! MIG mode and MIG devices as devices.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlDeviceAttributes_t, nvmlReturn_t};

use crate::abi::{Handle, put};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::{Device, MigDevice, Node};

const MAX_DEVICES: c_uint = 7;

fn only_mig(node: &Node, device: nvmlDevice_t) -> Answer<MigDevice<'_>> {
    match node.device(device)? {
        Device::Mig(mig) => Ok(mig),
        Device::Whole(_) => Err(Code::NOT_SUPPORTED),
    }
}

fn attributes(node: &Node, device: nvmlDevice_t, out: *mut nvmlDeviceAttributes_t) -> Answer {
    let mig = only_mig(node, device)?;
    let p = mig.profile;
    put(
        out,
        nvmlDeviceAttributes_t {
            multiprocessorCount: mig.multiprocessors(),
            sharedCopyEngineCount: p.copy_engines,
            sharedDecoderCount: p.decoders,
            sharedEncoderCount: p.encoders,
            sharedJpegCount: p.jpeg,
            sharedOfaCount: p.ofa,
            gpuInstanceSliceCount: p.slices,
            computeInstanceSliceCount: mig.compute.slices,
            memorySizeMB: p.memory_mib,
        },
    )
}

nvml! {
    fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        if !gpu.board.mig_capable() {
            return Err(Code::NOT_SUPPORTED);
        }
        put(current, c_uint::from(gpu.mig.enabled))?;
        put(pending, c_uint::from(gpu.mig.pending))
    }

    /// With instances or processes about, or on a board that wants a reset, the mode only becomes pending.
    fn nvmlDeviceSetMigMode(device: nvmlDevice_t, mode: c_uint, activation: *mut nvmlReturn_t) |node| {
        let gpu = node.gpu(device)?;
        if !gpu.board.mig_capable() {
            return Err(Code::NOT_SUPPORTED);
        }
        if mode > 1 || activation.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        node.need_root()?;
        let busy = gpu.processes().next().is_some();
        let status = node.change_mig(gpu, |mig| {
            Ok(mig.set_mode(gpu.board, mode == 1, busy).map_or_else(|Code(why)| why, |()| 0))
        })?;
        put(activation, status)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        put(count, if gpu.mig.enabled { MAX_DEVICES } else { 0 })
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: c_uint, out: *mut nvmlDevice_t) |node| {
        let gpu = node.gpu(device)?;
        if !gpu.mig.enabled {
            return Err(Code::NOT_FOUND);
        }
        if index >= MAX_DEVICES {
            return Err(Code::INVALID_ARGUMENT);
        }
        let (gi, ci) = gpu.mig.devices().get(index as usize).copied().ok_or(Code::NOT_FOUND)?;
        put(out, Handle::Mig { gpu: gpu.index, gi, ci }.pointer())
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: nvmlDevice_t, out: *mut nvmlDevice_t) |node| {
        let mig = match node.device(mig)? {
            Device::Mig(mig) => mig,
            Device::Whole(_) => return Err(Code::INVALID_ARGUMENT),
        };
        put(out, mig.gpu.handle().pointer())
    }

    fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is: *mut c_uint) |_node| {
        match Handle::decode(device as usize) {
            Some(Handle::Gpu { .. }) => put(is, 0),
            Some(Handle::Mig { .. }) => put(is, 1),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut c_uint) |node| {
        put(id, only_mig(node, device)?.instance.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: *mut c_uint) |node| {
        put(id, only_mig(node, device)?.compute.id)
    }

    fn nvmlDeviceGetAttributes(device: nvmlDevice_t, out: *mut nvmlDeviceAttributes_t) |node| {
        attributes(node, device, out)
    }

    fn nvmlDeviceGetAttributes_v2(device: nvmlDevice_t, out: *mut nvmlDeviceAttributes_t) |node| {
        attributes(node, device, out)
    }
}
