//! From numbers and names to handles.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use crate::abi::{Handle, put, text};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::identity::parse_bus;
use crate::node::{Gpu, Node};
use crate::session::count_at_init;

/// Boards that were there when the library was initialised, lost or not.
fn known(node: &Node) -> impl Iterator<Item = &Gpu> {
    node.gpus.iter().take(count_at_init())
}

fn by_index(node: &Node, index: c_uint, device: *mut nvmlDevice_t) -> Answer {
    let index = index as usize;
    if device.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    put(device, node.present(index)?.handle().pointer())
}

fn by_bus(node: &Node, bus: *const c_char, device: *mut nvmlDevice_t) -> Answer {
    let wanted = parse_bus(&text(bus)?).ok_or(Code::INVALID_ARGUMENT)?;
    let gpu = known(node)
        .find(|g| (g.identity.domain, g.identity.bus, g.identity.device) == wanted)
        .ok_or(Code::NOT_FOUND)?;
    put(device, node.present(gpu.index)?.handle().pointer())
}

nvml! {
    fn nvmlDeviceGetCount(count: *mut c_uint) |_node| {
        put(count, count_at_init() as c_uint)
    }

    fn nvmlDeviceGetCount_v2(count: *mut c_uint) |_node| {
        put(count, count_at_init() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: *mut nvmlDevice_t) |node| {
        by_index(node, index, device)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) |node| {
        by_index(node, index, device)
    }

    fn nvmlDeviceGetHandleByPciBusId(bus: *const c_char, device: *mut nvmlDevice_t) |node| {
        by_bus(node, bus, device)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, device: *mut nvmlDevice_t) |node| {
        by_bus(node, bus, device)
    }

    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut nvmlDevice_t) |node| {
        let wanted = text(serial)?;
        let gpu = known(node).find(|g| g.identity.serial == wanted).ok_or(Code::NOT_FOUND)?;
        put(device, node.present(gpu.index)?.handle().pointer())
    }

    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) |node| {
        let wanted = text(uuid)?;
        if let Some(gpu) = known(node).find(|g| g.identity.uuid == wanted) {
            return put(device, node.present(gpu.index)?.handle().pointer());
        }
        if !wanted.starts_with("GPU-") && !wanted.starts_with("MIG-") {
            return Err(Code::INVALID_ARGUMENT);
        }
        for gpu in known(node).filter(|_| wanted.starts_with("MIG-")) {
            for (gi, ci) in gpu.mig.devices() {
                let handle = Handle::Mig { gpu: gpu.index, gi, ci };
                let crate::node::Device::Mig(mig) = node.device(handle.pointer::<()>())? else { continue };
                if mig.uuid() == wanted {
                    return put(device, handle.pointer());
                }
            }
        }
        Err(Code::NOT_FOUND)
    }
}
