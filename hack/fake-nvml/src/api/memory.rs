//! How much memory there is and how much of it is taken.

use nvml_wrapper_sys::bindings::{nvmlBAR1Memory_t, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t};

use crate::abi::{edit, get, put, versioned};
use crate::call::nvml;
use crate::code::Answer;
use crate::node::{Device, Memory, Node};

fn memory(node: &Node, device: nvmlDevice_t) -> Answer<Memory> {
    Ok(match node.device(device)? {
        Device::Whole(gpu) => gpu.memory(),
        Device::Mig(mig) => mig.memory(),
    })
}

nvml! {
    /// The first version has no word for what the driver keeps: it counts as used.
    fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, out: *mut nvmlMemory_t) |node| {
        let m = memory(node, device)?;
        put(out, nvmlMemory_t { total: m.total, free: m.free(), used: m.used + m.reserved })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, out: *mut nvmlMemory_v2_t) |node| {
        let m = memory(node, device)?;
        versioned::<nvmlMemory_v2_t>(get(out)?.version, 2)?;
        edit(out, |o| {
            o.total = m.total;
            o.reserved = m.reserved;
            o.free = m.free();
            o.used = m.used;
        })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, out: *mut nvmlBAR1Memory_t) |node| {
        let total = match node.device(device)? {
            Device::Whole(gpu) => gpu.board.bar1_mib << 20,
            // Half the slices of an eighth each, as the vendor's tool shows it.
            Device::Mig(mig) => (mig.gpu.board.bar1_mib << 20) / 8 * u64::from(mig.profile.size),
        };
        let used = 1 << 20;
        put(out, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total.saturating_sub(used), bar1Used: used })
    }

    fn nvmlDeviceGetMemoryBusWidth(device: nvmlDevice_t, width: *mut std::ffi::c_uint) |node| {
        put(width, node.gpu(device)?.board.bus_width)
    }
}
