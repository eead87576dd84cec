//! Accounting: what processes used. The fake knows the ones that run now.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{nvmlAccountingStats_t, nvmlDevice_t, nvmlEnableState_t};

use crate::abi::{put, put_list};
use crate::call::nvml;
use crate::code::Code;
use crate::state::Change;

/// Processes that the driver remembers.
const BUFFER: c_uint = 4000;

nvml! {
    fn nvmlDeviceGetAccountingMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) |node| {
        put(mode, c_uint::from(node.gpu(device)?.accounting))
    }

    fn nvmlDeviceSetAccountingMode(device: nvmlDevice_t, mode: nvmlEnableState_t) |node| {
        let gpu = node.gpu(device)?;
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        node.need_root()?;
        node.change(gpu.index, |s| {
            s.accounting = Change::new(&gpu.over.accounting, mode == 1);
            Ok(())
        })
    }

    fn nvmlDeviceClearAccountingPids(device: nvmlDevice_t) |node| {
        node.gpu(device)?;
        node.need_root()
    }

    fn nvmlDeviceGetAccountingBufferSize(device: nvmlDevice_t, size: *mut c_uint) |node| {
        node.gpu(device)?;
        put(size, BUFFER)
    }

    fn nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut c_uint, out: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        let all: Vec<c_uint> = if gpu.accounting { gpu.processes().map(|p| p.pid).collect() } else { Vec::new() };
        put_list(count, out, &all)
    }

    fn nvmlDeviceGetAccountingStats(device: nvmlDevice_t, pid: c_uint, out: *mut nvmlAccountingStats_t) |node| {
        let gpu = node.gpu(device)?;
        let process = gpu.processes().find(|p| gpu.accounting && p.pid == pid).ok_or(Code::NOT_FOUND)?;
        put(out, nvmlAccountingStats_t {
            gpuUtilization: process.sm_util,
            memoryUtilization: process.sm_util / 2,
            maxMemoryUsage: process.used_mib.map_or(u64::MAX, |m| m.saturating_mul(1 << 20)),
            time: 0,
            startTime: 0,
            isRunning: 1,
            reserved: [0; 5],
        })
    }
}
