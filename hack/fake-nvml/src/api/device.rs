//! What a board is: names, numbers, model, place on the bus.

use std::ffi::{c_char, c_int, c_uint, c_ulong};

use nvml_wrapper_sys::bindings::{
    nvmlAffinityScope_t, nvmlBrandType_t, nvmlBusType_t, nvmlDevice_t, nvmlDeviceAddressingMode_v1_t,
    nvmlDeviceArchitecture_t, nvmlDeviceCapabilities_v1_t, nvmlPciInfo_t, nvmlPciInfoExt_v1_t,
};

use crate::abi::{chars, edit, get, put, put_text, versioned};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::control::AddressingMode;
use crate::node::{Device, Gpu, Node};

fn pci(node: &Node, device: nvmlDevice_t, out: *mut nvmlPciInfo_t, full: bool) -> Answer {
    let gpu = node.gpu(device)?;
    edit(out, |info| {
        info.busIdLegacy = chars(&gpu.identity.bus_id_legacy());
        info.domain = gpu.identity.domain;
        info.bus = gpu.identity.bus;
        info.device = gpu.identity.device;
        info.pciDeviceId = gpu.board.pci_device;
        info.pciSubSystemId = gpu.board.pci_subsystem;
        if full {
            info.busId = chars(&gpu.identity.bus_id());
        }
    })
}

/// A set of `total` numbers that holds `members`, as words of a C long.
fn put_set(out: *mut c_ulong, words: c_uint, members: impl Iterator<Item = usize>) -> Answer {
    if out.is_null() || words == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    let mut set = vec![0 as c_ulong; words as usize];
    let bits = c_ulong::BITS as usize;
    for member in members {
        match set.get_mut(member / bits) {
            Some(word) => *word |= 1 << (member % bits),
            None => return Err(Code::INSUFFICIENT_SIZE),
        }
    }
    crate::abi::put_all(out, &set)
}

/// All processors of the machine: the fake has no topology of its own.
fn processors() -> std::ops::Range<usize> {
    // SAFETY: sysconf has no preconditions.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    0..usize::try_from(count).unwrap_or(1)
}

fn board_id(gpu: &Gpu) -> c_uint {
    gpu.identity.domain << 16 | gpu.identity.bus << 8 | gpu.identity.device
}

nvml! {
    fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: c_uint) |node| {
        match node.device(device)? {
            Device::Whole(gpu) => put_text(name, length, gpu.name()),
            Device::Mig(mig) => put_text(name, length, &mig.name()),
        }
    }

    fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) |node| {
        match node.device(device)? {
            Device::Whole(gpu) => put_text(uuid, length, &gpu.identity.uuid),
            Device::Mig(mig) => put_text(uuid, length, &mig.uuid()),
        }
    }

    fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut c_uint) |node| {
        match node.device(device)? {
            Device::Whole(gpu) => put(index, gpu.index as c_uint),
            Device::Mig(mig) => {
                let place = mig.gpu.mig.devices().iter().position(|d| *d == (mig.instance.id, mig.compute.id));
                put(index, place.ok_or(Code::NOT_FOUND)? as c_uint)
            }
        }
    }

    fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor: *mut c_uint) |node| {
        put(minor, node.gpu(device)?.identity.minor)
    }

    fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module: *mut c_uint) |node| {
        put(module, node.gpu(device)?.index as c_uint)
    }

    fn nvmlDeviceGetSerial(device: nvmlDevice_t, serial: *mut c_char, length: c_uint) |node| {
        put_text(serial, length, &node.gpu(device)?.identity.serial)
    }

    fn nvmlDeviceGetBrand(device: nvmlDevice_t, brand: *mut nvmlBrandType_t) |node| {
        put(brand, node.device(device)?.gpu().board.brand)
    }

    fn nvmlDeviceGetArchitecture(device: nvmlDevice_t, architecture: *mut nvmlDeviceArchitecture_t) |node| {
        put(architecture, node.device(device)?.gpu().board.architecture)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: nvmlDevice_t, major: *mut c_int, minor: *mut c_int) |node| {
        let (a, b) = node.device(device)?.gpu().board.compute;
        put(major, a)?;
        put(minor, b)
    }

    fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, cores: *mut c_uint) |node| {
        put(cores, node.gpu(device)?.board.cores)
    }

    fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, info: *mut nvmlPciInfo_t) |node| {
        pci(node, device, info, false)
    }

    fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, info: *mut nvmlPciInfo_t) |node| {
        pci(node, device, info, false)
    }

    fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, info: *mut nvmlPciInfo_t) |node| {
        pci(node, device, info, true)
    }

    fn nvmlDeviceGetPciInfoExt(device: nvmlDevice_t, info: *mut nvmlPciInfoExt_v1_t) |node| {
        let gpu = node.gpu(device)?;
        versioned::<nvmlPciInfoExt_v1_t>(get(info)?.version, 1)?;
        edit(info, |i| {
            i.domain = gpu.identity.domain;
            i.bus = gpu.identity.bus;
            i.device = gpu.identity.device;
            i.pciDeviceId = gpu.board.pci_device;
            i.pciSubSystemId = gpu.board.pci_subsystem;
            i.baseClass = 0x03;
            i.subClass = 0x02;
            i.busId = chars(&gpu.identity.bus_id());
        })
    }

    fn nvmlDeviceGetBoardId(device: nvmlDevice_t, id: *mut c_uint) |node| {
        put(id, board_id(node.gpu(device)?))
    }

    fn nvmlDeviceGetMultiGpuBoard(device: nvmlDevice_t, multi: *mut c_uint) |node| {
        node.gpu(device)?;
        put(multi, 0)
    }

    fn nvmlDeviceOnSameBoard(first: nvmlDevice_t, second: nvmlDevice_t, same: *mut c_int) |node| {
        put(same, c_int::from(node.gpu(first)?.index == node.gpu(second)?.index))
    }

    fn nvmlDeviceGetBoardPartNumber(device: nvmlDevice_t, part: *mut c_char, length: c_uint) |node| {
        put_text(part, length, node.gpu(device)?.board.part)
    }

    fn nvmlDeviceGetVbiosVersion(device: nvmlDevice_t, version: *mut c_char, length: c_uint) |node| {
        put_text(version, length, node.gpu(device)?.board.vbios)
    }

    fn nvmlDeviceGetBusType(device: nvmlDevice_t, kind: *mut nvmlBusType_t) |node| {
        node.gpu(device)?;
        put(kind, 2)
    }

    fn nvmlDeviceGetIrqNum(device: nvmlDevice_t, number: *mut c_uint) |node| {
        put(number, 100 + node.gpu(device)?.index as c_uint)
    }

    fn nvmlDeviceGetNumaNodeId(device: nvmlDevice_t, id: *mut c_uint) |node| {
        put(id, node.gpu(device)?.over.numa_node_id.ok_or(Code::NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetMemoryAffinity(device: nvmlDevice_t, size: c_uint, set: *mut c_ulong, _scope: nvmlAffinityScope_t) |node| {
        put_set(set, size, std::iter::once(node.gpu(device)?.identity.host_numa_node as usize))
    }

    fn nvmlDeviceGetCpuAffinity(device: nvmlDevice_t, size: c_uint, set: *mut c_ulong) |node| {
        node.gpu(device)?;
        put_set(set, size, processors())
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: nvmlDevice_t, size: c_uint, set: *mut c_ulong, _scope: nvmlAffinityScope_t) |node| {
        node.gpu(device)?;
        put_set(set, size, processors())
    }

    fn nvmlDeviceGetAddressingMode(device: nvmlDevice_t, mode: *mut nvmlDeviceAddressingMode_v1_t) |node| {
        let gpu = node.gpu(device)?;
        versioned::<nvmlDeviceAddressingMode_v1_t>(get(mode)?.version, 1)?;
        let default = if gpu.board.hmm { AddressingMode::Hmm } else { AddressingMode::None };
        let value = match gpu.over.addressing_mode.unwrap_or(default) {
            AddressingMode::None => 0,
            AddressingMode::Hmm => 1,
            AddressingMode::Ats => 2,
        };
        edit(mode, |m| m.value = value)
    }

    fn nvmlDeviceGetCapabilities(device: nvmlDevice_t, out: *mut nvmlDeviceCapabilities_v1_t) |node| {
        node.gpu(device)?;
        versioned::<nvmlDeviceCapabilities_v1_t>(get(out)?.version, 1)?;
        edit(out, |c| c.capMask = 0)
    }
}
