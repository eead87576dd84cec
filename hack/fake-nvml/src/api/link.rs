//! How boards are connected: NVLink through a switch where the model has it, the
//! host's sockets otherwise.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEnableState_t, nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t,
    nvmlIntNvLinkDeviceType_t, nvmlNvLinkCapability_t, nvmlNvLinkErrorCounter_t, nvmlPciInfo_t,
};

use crate::abi::{Handle, chars, edit, put, put_list};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::{Gpu, Node};

/// `NVML_TOPOLOGY_*`
const INTERNAL: nvmlGpuTopologyLevel_t = 0;
const SAME_NODE: nvmlGpuTopologyLevel_t = 40;
const SYSTEM: nvmlGpuTopologyLevel_t = 50;

/// A board in MIG mode has its links down.
fn link(node: &Node, device: nvmlDevice_t, link: c_uint) -> Answer<&Gpu> {
    let gpu = node.gpu(device)?;
    if gpu.board.nvlinks == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    if link >= gpu.board.nvlinks { Err(Code::INVALID_ARGUMENT) } else { Ok(gpu) }
}

fn level(a: &Gpu, b: &Gpu) -> nvmlGpuTopologyLevel_t {
    if a.index == b.index {
        INTERNAL
    } else if a.identity.host_numa_node == b.identity.host_numa_node {
        SAME_NODE
    } else {
        SYSTEM
    }
}

/// Every link ends at a switch of the machine, one switch to three links.
fn remote(node: &Node, device: nvmlDevice_t, at: c_uint, out: *mut nvmlPciInfo_t, full: bool) -> Answer {
    link(node, device, at)?;
    let bus = 0x05 + at / 3;
    edit(out, |o| {
        o.busIdLegacy = chars(&format!("0000:{bus:02X}:00.0"));
        o.domain = 0;
        o.bus = bus;
        o.device = 0;
        o.pciDeviceId = 0x22A3_10DE;
        o.pciSubSystemId = 0;
        if full {
            o.busId = chars(&format!("00000000:{bus:02X}:00.0"));
        }
    })
}

nvml! {
    fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, at: c_uint, active: *mut nvmlEnableState_t) |node| {
        let gpu = link(node, device, at)?;
        put(active, c_uint::from(!gpu.mig.enabled))
    }

    fn nvmlDeviceGetNvLinkVersion(device: nvmlDevice_t, at: c_uint, version: *mut c_uint) |node| {
        put(version, link(node, device, at)?.board.nvlink_version)
    }

    fn nvmlDeviceGetNvLinkCapability(device: nvmlDevice_t, at: c_uint, _what: nvmlNvLinkCapability_t, out: *mut c_uint) |node| {
        link(node, device, at)?;
        put(out, 1)
    }

    fn nvmlDeviceGetNvLinkErrorCounter(device: nvmlDevice_t, at: c_uint, _counter: nvmlNvLinkErrorCounter_t, out: *mut u64) |node| {
        link(node, device, at)?;
        put(out, 0)
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: nvmlDevice_t, at: c_uint, out: *mut nvmlIntNvLinkDeviceType_t) |node| {
        link(node, device, at)?;
        put(out, 2)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo(device: nvmlDevice_t, at: c_uint, out: *mut nvmlPciInfo_t) |node| {
        remote(node, device, at, out, false)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: nvmlDevice_t, at: c_uint, out: *mut nvmlPciInfo_t) |node| {
        remote(node, device, at, out, true)
    }

    /// Status 0 is good, 5 is "not supported".
    fn nvmlDeviceGetP2PStatus(first: nvmlDevice_t, second: nvmlDevice_t, what: nvmlGpuP2PCapsIndex_t, out: *mut nvmlGpuP2PStatus_t) |node| {
        let (a, b) = (node.gpu(first)?, node.gpu(second)?);
        if a.index == b.index || what > 5 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let linked = a.board.nvlinks > 0 && !a.mig.enabled && !b.mig.enabled;
        put(out, if linked || what < 2 { 0 } else { 5 })
    }

    fn nvmlDeviceGetTopologyCommonAncestor(first: nvmlDevice_t, second: nvmlDevice_t, out: *mut nvmlGpuTopologyLevel_t) |node| {
        put(out, level(node.gpu(first)?, node.gpu(second)?))
    }

    fn nvmlDeviceGetTopologyNearestGpus(device: nvmlDevice_t, wanted: nvmlGpuTopologyLevel_t, count: *mut c_uint, out: *mut nvmlDevice_t) |node| {
        let gpu = node.gpu(device)?;
        let all: Vec<nvmlDevice_t> = node.gpus.iter()
            .filter(|g| g.index != gpu.index && !g.over.lost && level(gpu, g) == wanted)
            .map(|g| Handle::Gpu { gpu: g.index }.pointer())
            .collect();
        if out.is_null() {
            return put(count, all.len() as c_uint);
        }
        put_list(count, out, &all)
    }
}
