//! Who uses the board: the process lists in all their versions, and utilisation by process.

use std::collections::BTreeMap;
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

/// The driver takes a sample so often, in microseconds.
const SAMPLE_US: u64 = 167_000;

/// When the newest sample was taken.
fn newest_sample() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64) / SAMPLE_US * SAMPLE_US
}

/// The newest sample of each process that worked, with its stamp: PID and percent. What MPS clients do is their server's
/// work (seen with driver 580.159.04 on an H100); without a server nobody is told to have done it.
fn samples(node: &Node, device: nvmlDevice_t, since: u64) -> Answer<(u64, Vec<(u32, u32)>)> {
    let gpu = node.gpu(device)?;
    gpu.refuse_in_mig_mode()?;
    let stamp = newest_sample();
    let server = gpu.processes().find(|p| p.kind == ProcessKind::Server).map(|p| p.pid);
    let mut busy = BTreeMap::new();
    for process in gpu.processes().filter(|p| p.sm_util > 0) {
        let pid = if process.kind == ProcessKind::Mps { server } else { Some(process.pid) };
        let Some(pid) = pid else { continue };
        let sum: &mut u32 = busy.entry(pid).or_default();
        *sum = sum.saturating_add(process.sm_util).min(100);
    }
    // Nobody worked, or nothing is newer than what the caller has seen.
    if busy.is_empty() || stamp <= since {
        return Err(Code::NOT_FOUND);
    }
    Ok((stamp, busy.into_iter().collect()))
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

    /// Not for MIG; a sample of each process that worked since.
    fn nvmlDeviceGetProcessUtilization(device: nvmlDevice_t, out: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, since: c_ulonglong) |node| {
        let (stamp, all) = samples(node, device, since)?;
        let all: Vec<_> = all.into_iter().map(|(pid, sm)| nvmlProcessUtilizationSample_t {
            pid,
            timeStamp: stamp,
            smUtil: sm,
            memUtil: sm / 2,
            encUtil: 0,
            decUtil: 0,
        }).collect();
        put_list(count, out, &all)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: nvmlDevice_t, out: *mut nvmlProcessesUtilizationInfo_t) |node| {
        let asked: nvmlProcessesUtilizationInfo_v1_t = get(out)?;
        versioned::<nvmlProcessesUtilizationInfo_v1_t>(asked.version, 1)?;
        let (stamp, all) = samples(node, device, asked.lastSeenTimeStamp)?;
        let all: Vec<_> = all.into_iter().map(|(pid, sm)| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: stamp,
            pid,
            smUtil: sm,
            memUtil: sm / 2,
            encUtil: 0,
            decUtil: 0,
            jpgUtil: 0,
            ofaUtil: 0,
        }).collect();
        edit(out, |o| o.processSamplesCount = all.len() as c_uint)?;
        if (asked.processSamplesCount as usize) < all.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        put_all(asked.procUtilArray, &all)
    }
}
