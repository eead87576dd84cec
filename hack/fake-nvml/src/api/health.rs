//! ECC, retired pages, remapped rows: what tells of ageing and breaking.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEccCounterType_t, nvmlEccErrorCounts_t, nvmlEnableState_t, nvmlMemoryErrorType_t,
    nvmlMemoryLocation_t, nvmlPageRetirementCause_t, nvmlRepairStatus_t, nvmlRepairStatus_v1_t,
    nvmlRowRemapperHistogramValues_t,
};

use crate::abi::{edit, get, put, put_list, versioned};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::Gpu;

/// Corrected (0) or uncorrected (1) errors; the fake keeps no separate lifetime counts.
fn errors(gpu: &Gpu, kind: nvmlMemoryErrorType_t) -> Answer<u64> {
    if !gpu.ecc() {
        return Err(Code::NOT_SUPPORTED);
    }
    match kind {
        0 => Ok(gpu.over.ecc_corrected),
        1 => Ok(gpu.over.ecc_uncorrected),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn retires(gpu: &Gpu) -> Answer {
    if gpu.board.remaps_rows { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
}

fn remaps(gpu: &Gpu) -> Answer {
    if gpu.board.remaps_rows { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

/// All retired pages count as retired for a double-bit error (cause 1).
fn retired(gpu: &Gpu, cause: nvmlPageRetirementCause_t) -> Answer<&[u64]> {
    retires(gpu)?;
    match cause {
        0 => Ok(&[]),
        1 => Ok(&gpu.over.retired_pages),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

nvml! {
    fn nvmlDeviceGetEccMode(device: nvmlDevice_t, current: *mut nvmlEnableState_t, pending: *mut nvmlEnableState_t) |node| {
        let mode = c_uint::from(node.gpu(device)?.ecc());
        put(current, mode)?;
        put(pending, mode)
    }

    fn nvmlDeviceGetDefaultEccMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) |node| {
        node.gpu(device)?;
        put(mode, 1)
    }

    fn nvmlDeviceGetTotalEccErrors(device: nvmlDevice_t, kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, out: *mut u64) |node| {
        put(out, errors(node.gpu(device)?, kind)?)
    }

    fn nvmlDeviceGetDetailedEccErrors(device: nvmlDevice_t, kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, out: *mut nvmlEccErrorCounts_t) |node| {
        let count = errors(node.gpu(device)?, kind)?;
        put(out, nvmlEccErrorCounts_t { l1Cache: 0, l2Cache: 0, deviceMemory: count, registerFile: 0 })
    }

    /// All errors are in device memory (location 2).
    fn nvmlDeviceGetMemoryErrorCounter(device: nvmlDevice_t, kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, place: nvmlMemoryLocation_t, out: *mut u64) |node| {
        let count = errors(node.gpu(device)?, kind)?;
        put(out, if place == 2 { count } else { 0 })
    }

    fn nvmlDeviceGetRetiredPages(device: nvmlDevice_t, cause: nvmlPageRetirementCause_t, count: *mut c_uint, out: *mut u64) |node| {
        put_list(count, out, retired(node.gpu(device)?, cause)?)
    }

    fn nvmlDeviceGetRetiredPages_v2(device: nvmlDevice_t, cause: nvmlPageRetirementCause_t, count: *mut c_uint, out: *mut u64, times: *mut u64) |node| {
        let pages = retired(node.gpu(device)?, cause)?;
        put_list(count, out, pages)?;
        crate::abi::put_all(times, &vec![0; pages.len()])
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: nvmlDevice_t, pending: *mut nvmlEnableState_t) |node| {
        let gpu = node.gpu(device)?;
        retires(gpu)?;
        put(pending, c_uint::from(gpu.over.retire_pending))
    }

    fn nvmlDeviceGetRemappedRows(device: nvmlDevice_t, corrected: *mut c_uint, uncorrected: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        remaps(gpu)?;
        put(corrected, gpu.over.remapped_corrected)?;
        put(uncorrected, gpu.over.remapped_uncorrected)?;
        put(pending, c_uint::from(gpu.over.remap_pending))?;
        put(failed, c_uint::from(gpu.over.remap_failed))
    }

    fn nvmlDeviceGetRowRemapperHistogram(device: nvmlDevice_t, out: *mut nvmlRowRemapperHistogramValues_t) |node| {
        let gpu = node.gpu(device)?;
        remaps(gpu)?;
        let used = gpu.over.remapped_corrected.saturating_add(gpu.over.remapped_uncorrected);
        put(out, nvmlRowRemapperHistogramValues_t { max: 2560_u32.saturating_sub(used), high: used.min(2560), partial: 0, low: 0, none: 0 })
    }

    fn nvmlDeviceGetRepairStatus(device: nvmlDevice_t, out: *mut nvmlRepairStatus_t) |node| {
        let gpu = node.gpu(device)?;
        remaps(gpu)?;
        versioned::<nvmlRepairStatus_v1_t>(get(out)?.version, 1)?;
        edit(out, |o| {
            o.bChannelRepairPending = 0;
            o.bTpcRepairPending = 0;
        })
    }

    fn nvmlDeviceValidateInforom(device: nvmlDevice_t) |node| {
        node.gpu(device).map(|_| ())
    }
}
