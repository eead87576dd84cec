//! Who uses the board: the process lists in all their versions, and utilisation by process.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_t, nvmlProcessDetailList_v1_t,
    nvmlProcessInfo_t, nvmlProcessInfo_v1_t, nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t,
    nvmlProcessesUtilizationInfo_t, nvmlProcessesUtilizationInfo_v1_t,
};

use crate::abi::{edit, get, put_all, put_list, versioned};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::control::{Process, ProcessKind};
use crate::node::{Device, Node, listed};

/// What stands for "not known" in memory and "not applicable" in instance ids.
const NONE: c_uint = c_uint::MAX;

fn used(process: &Process) -> c_ulonglong {
    process.used_mib.map_or(c_ulonglong::MAX, |m| m.saturating_mul(1 << 20))
}

/// The processes of a board or MIG device that are in one of the lists.
fn select(node: &Node, device: nvmlDevice_t, wanted: impl Fn(&Process) -> bool) -> Answer<Vec<&Process>> {
    Ok(match node.device(device)? {
        Device::Whole(gpu) => gpu.processes().filter(|p| wanted(p)).collect(),
        Device::Mig(mig) => mig.gpu.processes().filter(|p| mig.runs(p) && wanted(p)).collect(),
    })
}

fn list_v1(
    node: &Node,
    device: nvmlDevice_t,
    kind: ProcessKind,
    count: *mut c_uint,
    out: *mut nvmlProcessInfo_v1_t,
) -> Answer {
    let all: Vec<_> = select(node, device, |p| listed(p, kind))?
        .into_iter()
        .map(|p| nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: used(p) })
        .collect();
    put_list(count, out, &all)
}

fn list(
    node: &Node,
    device: nvmlDevice_t,
    kind: ProcessKind,
    count: *mut c_uint,
    out: *mut nvmlProcessInfo_t,
) -> Answer {
    let all: Vec<_> = select(node, device, |p| listed(p, kind))?
        .into_iter()
        .map(|p| nvmlProcessInfo_t {
            pid: p.pid,
            usedGpuMemory: used(p),
            gpuInstanceId: p.gi.unwrap_or(NONE),
            computeInstanceId: p.gi.map_or(NONE, |_| p.ci.unwrap_or(0)),
        })
        .collect();
    put_list(count, out, &all)
}

fn now_us() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// Processes with a known utilisation; whole boards only.
fn busy(node: &Node, device: nvmlDevice_t) -> Answer<Vec<&Process>> {
    let gpu = node.gpu(device)?;
    gpu.refuse_in_mig_mode()?;
    Ok(gpu.processes().filter(|p| p.sm_util > 0).collect())
}

nvml! {
    fn nvmlDeviceGetComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) |node| {
        list_v1(node, device, ProcessKind::Compute, count, out)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Compute, count, out)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Compute, count, out)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) |node| {
        list_v1(node, device, ProcessKind::Graphics, count, out)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Graphics, count, out)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Graphics, count, out)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_v1_t) |node| {
        list_v1(node, device, ProcessKind::Mps, count, out)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Mps, count, out)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, out: *mut nvmlProcessInfo_t) |node| {
        list(node, device, ProcessKind::Mps, count, out)
    }

    /// Modes: 0 compute, 1 graphics, 2 MPS clients.
    fn nvmlDeviceGetRunningProcessDetailList(device: nvmlDevice_t, out: *mut nvmlProcessDetailList_t) |node| {
        let asked: nvmlProcessDetailList_v1_t = get(out)?;
        versioned::<nvmlProcessDetailList_v1_t>(asked.version, 1)?;
        let kind = match asked.mode {
            0 => ProcessKind::Compute,
            1 => ProcessKind::Graphics,
            2 => ProcessKind::Mps,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        let all: Vec<_> = select(node, device, |p| listed(p, kind))?.into_iter().map(|p| nvmlProcessDetail_v1_t {
            pid: p.pid,
            usedGpuMemory: used(p),
            gpuInstanceId: p.gi.unwrap_or(NONE),
            computeInstanceId: p.gi.map_or(NONE, |_| p.ci.unwrap_or(0)),
            usedGpuCcProtectedMemory: 0,
        }).collect();
        edit(out, |o| o.numProcArrayEntries = all.len() as c_uint)?;
        if (asked.numProcArrayEntries as usize) < all.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        put_all(asked.procArray, &all)
    }

    fn nvmlDeviceGetProcessUtilization(device: nvmlDevice_t, out: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, _since: c_ulonglong) |node| {
        let stamp = now_us();
        let all: Vec<_> = busy(node, device)?.into_iter().map(|p| nvmlProcessUtilizationSample_t {
            pid: p.pid,
            timeStamp: stamp,
            smUtil: p.sm_util,
            memUtil: p.sm_util / 2,
            encUtil: 0,
            decUtil: 0,
        }).collect();
        if all.is_empty() {
            return Err(Code::NOT_FOUND);
        }
        put_list(count, out, &all)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: nvmlDevice_t, out: *mut nvmlProcessesUtilizationInfo_t) |node| {
        let asked: nvmlProcessesUtilizationInfo_v1_t = get(out)?;
        versioned::<nvmlProcessesUtilizationInfo_v1_t>(asked.version, 1)?;
        let stamp = now_us();
        let all: Vec<_> = busy(node, device)?.into_iter().map(|p| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: stamp,
            pid: p.pid,
            smUtil: p.sm_util,
            memUtil: p.sm_util / 2,
            encUtil: 0,
            decUtil: 0,
            jpgUtil: 0,
            ofaUtil: 0,
        }).collect();
        if all.is_empty() {
            return Err(Code::NOT_FOUND);
        }
        edit(out, |o| o.processSamplesCount = all.len() as c_uint)?;
        if (asked.processSamplesCount as usize) < all.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        put_all(asked.procUtilArray, &all)
    }
}
