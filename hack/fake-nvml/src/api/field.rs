//! Field values: many small questions in one call, each with its own answer.

use std::ffi::c_int;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlFieldValue_t, nvmlValue_t};

use crate::abi::{get, put};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::Gpu;

const UNSIGNED_INT: u32 = 1;
const UNSIGNED_LONG_LONG: u32 = 3;

/// The value of a field, and its type.
fn field(gpu: &Gpu, id: u32) -> Answer<(u32, u64)> {
    let over = &gpu.over;
    let rows = |n: u32| {
        if gpu.board.remaps_rows { Ok((UNSIGNED_INT, u64::from(n))) } else { Err(Code::NOT_SUPPORTED) }
    };
    let pages = |n: usize| {
        if gpu.board.remaps_rows { Err(Code::NOT_SUPPORTED) } else { Ok((UNSIGNED_INT, n as u64)) }
    };
    match id {
        // ECC mode, now and pending.
        1 | 2 => Ok((UNSIGNED_INT, u64::from(gpu.ecc()))),
        // Totals of single- and double-bit errors, volatile and aggregate.
        3 | 5 => Ok((UNSIGNED_LONG_LONG, over.ecc_corrected)),
        4 | 6 => Ok((UNSIGNED_LONG_LONG, over.ecc_uncorrected)),
        // Retired pages: single-bit, double-bit, pending.
        29 => pages(0),
        30 => pages(over.retired_pages.len()),
        31 => pages(usize::from(over.retire_pending)),
        // Temperature of the memory.
        82 if gpu.board.nvlinks > 0 => Ok((UNSIGNED_INT, u64::from(over.temperature_c.unwrap_or(31)) + 5)),
        // Number of NVLinks.
        91 => Ok((UNSIGNED_INT, u64::from(gpu.board.nvlinks))),
        // Remapped rows: corrected, uncorrected, pending, failed.
        142 => rows(over.remapped_corrected),
        143 => rows(over.remapped_uncorrected),
        144 => rows(u32::from(over.remap_pending)),
        145 => rows(u32::from(over.remap_failed)),
        // What has to be done to get well again.
        230 => Ok((UNSIGNED_INT, u64::from(over.recovery_action))),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

nvml! {
    fn nvmlDeviceGetFieldValues(device: nvmlDevice_t, count: c_int, values: *mut nvmlFieldValue_t) |node| {
        let gpu = node.gpu(device)?;
        if values.is_null() || count < 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_micros() as i64);
        for at in 0..count as usize {
            let slot = values.wrapping_add(at);
            let mut value = get(slot)?;
            value.timestamp = now;
            value.latencyUsec = 1;
            match field(gpu, value.fieldId) {
                Ok((kind, number)) => {
                    value.nvmlReturn = 0;
                    value.valueType = kind;
                    value.value = nvmlValue_t { ullVal: number };
                }
                Err(Code(code)) => value.nvmlReturn = code,
            }
            put(slot, value)?;
        }
        Ok(())
    }
}
