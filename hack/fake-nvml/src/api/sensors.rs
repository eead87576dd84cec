//! Temperature, power, clocks, load and the host link: steady figures of an idle
//! board, unless the control file says otherwise.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlClockId_t, nvmlClockType_t, nvmlDevice_t, nvmlEnableState_t, nvmlPcieUtilCounter_t,
    nvmlPowerSource_t, nvmlPstates_t, nvmlTemperature_t, nvmlTemperature_v1_t, nvmlTemperatureSensors_t,
    nvmlTemperatureThresholds_t, nvmlUtilization_t,
};

use crate::abi::{edit, get, put, versioned};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::Gpu;

const IDLE_C: u32 = 31;
const IDLE_MHZ: u32 = 345;
/// Sampling period of the engine utilisations, in microseconds.
const PERIOD_US: u32 = 167_000;
/// Clock event reason: nothing to do.
const REASON_IDLE: u64 = 1;

fn load(gpu: &Gpu) -> u32 {
    gpu.over.utilization_gpu.unwrap_or_else(|| gpu.processes().map(|p| p.sm_util).sum::<u32>().min(100))
}

/// Graphics, SM, memory and video clocks of the board at its fastest.
fn fastest(gpu: &Gpu, kind: nvmlClockType_t) -> Answer<c_uint> {
    match kind {
        0 | 1 => Ok(gpu.board.clock_sm),
        2 => Ok(gpu.board.clock_memory),
        3 => Ok(gpu.board.clock_sm / 10 * 9),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn current(gpu: &Gpu, kind: nvmlClockType_t) -> Answer<c_uint> {
    let top = fastest(gpu, kind)?;
    Ok(if load(gpu) > 0 || kind == 2 { top } else { IDLE_MHZ })
}

fn power_limit(gpu: &Gpu) -> u32 {
    gpu.changed.power_limit_mw.unwrap_or(gpu.board.power_limit_mw)
}

fn engine(gpu: &Gpu, out: *mut c_uint, period: *mut c_uint) -> Answer {
    gpu.refuse_in_mig_mode()?;
    put(out, 0)?;
    put(period, PERIOD_US)
}

fn reasons(gpu: &Gpu) -> u64 {
    if load(gpu) == 0 { REASON_IDLE } else { 0 }
}

nvml! {
    fn nvmlDeviceGetTemperature(device: nvmlDevice_t, sensor: nvmlTemperatureSensors_t, out: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(out, gpu.over.temperature_c.unwrap_or(IDLE_C))
    }

    fn nvmlDeviceGetTemperatureV(device: nvmlDevice_t, out: *mut nvmlTemperature_t) |node| {
        let gpu = node.gpu(device)?;
        let asked = get(out)?;
        versioned::<nvmlTemperature_v1_t>(asked.version, 1)?;
        if asked.sensorType != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        edit(out, |o| o.temperature = gpu.over.temperature_c.unwrap_or(IDLE_C) as i32)
    }

    /// 0 shutdown, 1 slowdown, 2 memory, 3 GPU.
    fn nvmlDeviceGetTemperatureThreshold(device: nvmlDevice_t, kind: nvmlTemperatureThresholds_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        match kind {
            0 => put(out, 92),
            1 => put(out, 89),
            2 => put(out, 95),
            3 => put(out, 87),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }

    fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, out: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        let span = gpu.board.power_limit_mw - gpu.board.power_idle_mw;
        put(out, gpu.over.power_mw.unwrap_or(gpu.board.power_idle_mw + span / 100 * load(gpu).min(100)))
    }

    fn nvmlDeviceGetTotalEnergyConsumption(device: nvmlDevice_t, out: *mut u64) |node| {
        let gpu = node.gpu(device)?;
        let mut up = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `up` is valid for the write.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut up) };
        put(out, up.tv_sec.unsigned_abs().saturating_mul(u64::from(gpu.board.power_idle_mw)))
    }

    fn nvmlDeviceGetPowerManagementMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) |node| {
        node.gpu(device)?;
        put(mode, 1)
    }

    fn nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, power_limit(node.gpu(device)?))
    }

    fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, power_limit(node.gpu(device)?))
    }

    fn nvmlDeviceGetPowerManagementDefaultLimit(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, node.gpu(device)?.board.power_limit_mw)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(device: nvmlDevice_t, least: *mut c_uint, most: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        put(least, gpu.board.power_min_mw)?;
        put(most, gpu.board.power_limit_mw)
    }

    fn nvmlDeviceSetPowerManagementLimit(device: nvmlDevice_t, limit: c_uint) |node| {
        let gpu = node.gpu(device)?;
        if !(gpu.board.power_min_mw..=gpu.board.power_limit_mw).contains(&limit) {
            return Err(Code::INVALID_ARGUMENT);
        }
        node.need_root()?;
        node.change(gpu.index, |s| {
            s.power_limit_mw = Some(limit);
            Ok(())
        })
    }

    fn nvmlDeviceGetPowerSource(device: nvmlDevice_t, out: *mut nvmlPowerSource_t) |node| {
        node.gpu(device)?;
        put(out, 0)
    }

    fn nvmlDeviceGetPerformanceState(device: nvmlDevice_t, out: *mut nvmlPstates_t) |node| {
        node.gpu(device)?;
        put(out, 0)
    }

    fn nvmlDeviceGetPowerState(device: nvmlDevice_t, out: *mut nvmlPstates_t) |node| {
        node.gpu(device)?;
        put(out, 0)
    }

    fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: nvmlClockType_t, out: *mut c_uint) |node| {
        put(out, current(node.gpu(device)?, kind)?)
    }

    fn nvmlDeviceGetMaxClockInfo(device: nvmlDevice_t, kind: nvmlClockType_t, out: *mut c_uint) |node| {
        put(out, fastest(node.gpu(device)?, kind)?)
    }

    /// Current, application target and default, and the most a customer may set.
    fn nvmlDeviceGetClock(device: nvmlDevice_t, kind: nvmlClockType_t, id: nvmlClockId_t, out: *mut c_uint) |node| {
        let gpu = node.gpu(device)?;
        match id {
            0 => put(out, current(gpu, kind)?),
            1..=3 => put(out, fastest(gpu, kind)?),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetApplicationsClock(device: nvmlDevice_t, kind: nvmlClockType_t, out: *mut c_uint) |node| {
        put(out, fastest(node.gpu(device)?, kind)?)
    }

    fn nvmlDeviceGetDefaultApplicationsClock(device: nvmlDevice_t, kind: nvmlClockType_t, out: *mut c_uint) |node| {
        put(out, fastest(node.gpu(device)?, kind)?)
    }

    fn nvmlDeviceGetMaxCustomerBoostClock(device: nvmlDevice_t, kind: nvmlClockType_t, out: *mut c_uint) |node| {
        put(out, fastest(node.gpu(device)?, kind)?)
    }

    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: nvmlDevice_t, out: *mut u64) |node| {
        put(out, reasons(node.gpu(device)?))
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(device: nvmlDevice_t, out: *mut u64) |node| {
        put(out, reasons(node.gpu(device)?))
    }

    fn nvmlDeviceGetSupportedClocksThrottleReasons(device: nvmlDevice_t, out: *mut u64) |node| {
        node.gpu(device)?;
        put(out, 0x1FF)
    }

    fn nvmlDeviceGetSupportedClocksEventReasons(device: nvmlDevice_t, out: *mut u64) |node| {
        node.gpu(device)?;
        put(out, 0x1FF)
    }

    /// In MIG mode the whole has no utilisation, and no MIG device has one.
    fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, out: *mut nvmlUtilization_t) |node| {
        let gpu = node.gpu(device)?;
        gpu.refuse_in_mig_mode()?;
        put(out, nvmlUtilization_t { gpu: load(gpu), memory: gpu.over.utilization_memory.unwrap_or(0) })
    }

    fn nvmlDeviceGetEncoderUtilization(device: nvmlDevice_t, out: *mut c_uint, period: *mut c_uint) |node| {
        engine(node.gpu(device)?, out, period)
    }

    fn nvmlDeviceGetDecoderUtilization(device: nvmlDevice_t, out: *mut c_uint, period: *mut c_uint) |node| {
        engine(node.gpu(device)?, out, period)
    }

    fn nvmlDeviceGetJpgUtilization(device: nvmlDevice_t, out: *mut c_uint, period: *mut c_uint) |node| {
        engine(node.gpu(device)?, out, period)
    }

    fn nvmlDeviceGetOfaUtilization(device: nvmlDevice_t, out: *mut c_uint, period: *mut c_uint) |node| {
        engine(node.gpu(device)?, out, period)
    }

    /// Boards of servers have none: asked for its speed, they answer NOT_SUPPORTED.
    fn nvmlDeviceGetNumFans(device: nvmlDevice_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        put(out, 0)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, node.gpu(device)?.board.pcie_generation)
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, node.gpu(device)?.board.pcie_generation)
    }

    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(device: nvmlDevice_t, out: *mut c_uint) |node| {
        put(out, node.gpu(device)?.board.pcie_generation)
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(device: nvmlDevice_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        put(out, 16)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(device: nvmlDevice_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        put(out, 16)
    }

    fn nvmlDeviceGetPcieThroughput(device: nvmlDevice_t, _counter: nvmlPcieUtilCounter_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        put(out, 0)
    }

    fn nvmlDeviceGetPcieReplayCounter(device: nvmlDevice_t, out: *mut c_uint) |node| {
        node.gpu(device)?;
        put(out, 0)
    }
}
