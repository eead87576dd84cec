//! Modes that decide who may use the board: compute, persistence, display, virtualisation.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlComputeMode_t, nvmlDevice_t, nvmlDriverModel_t, nvmlEnableState_t, nvmlGpuVirtualizationMode_t,
};

use crate::abi::put;
use crate::call::nvml;
use crate::code::Code;
use crate::state::Change;

nvml! {
    fn nvmlDeviceGetComputeMode(device: nvmlDevice_t, mode: *mut nvmlComputeMode_t) |node| {
        put(mode, node.gpu(device)?.compute_mode)
    }

    /// 0 default, 2 prohibited, 3 exclusive process; 1 is of the past.
    fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t) |node| {
        let gpu = node.gpu(device)?;
        match mode {
            0 | 2 | 3 => {}
            1 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_ARGUMENT),
        }
        node.need_root()?;
        if mode != 0 {
            gpu.refuse_in_mig_mode()?;
        }
        node.change(gpu.index, |s| {
            s.compute_mode = Change::new(&gpu.over.compute_mode, mode);
            Ok(())
        })
    }

    fn nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) |node| {
        put(mode, c_uint::from(node.gpu(device)?.persistence))
    }

    fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: nvmlEnableState_t) |node| {
        let gpu = node.gpu(device)?;
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        node.need_root()?;
        node.change(gpu.index, |s| {
            s.persistence = Change::new(&gpu.over.persistence, mode == 1);
            Ok(())
        })
    }

    fn nvmlDeviceGetDisplayMode(device: nvmlDevice_t, display: *mut nvmlEnableState_t) |node| {
        node.gpu(device)?;
        put(display, 0)
    }

    fn nvmlDeviceGetDisplayActive(device: nvmlDevice_t, active: *mut nvmlEnableState_t) |node| {
        node.gpu(device)?;
        put(active, 0)
    }

    /// A thing of Windows.
    fn nvmlDeviceGetDriverModel(device: nvmlDevice_t, _current: *mut nvmlDriverModel_t, _pending: *mut nvmlDriverModel_t) |node| {
        node.gpu(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetVirtualizationMode(device: nvmlDevice_t, mode: *mut nvmlGpuVirtualizationMode_t) |node| {
        node.gpu(device)?;
        put(mode, 0)
    }

    fn nvmlDeviceGetGspFirmwareVersion(device: nvmlDevice_t, version: *mut std::ffi::c_char) |node| {
        node.gpu(device)?;
        crate::abi::put_text(version, 64, &node.control.driver_version)
    }

    fn nvmlDeviceGetGspFirmwareMode(device: nvmlDevice_t, enabled: *mut c_uint, default: *mut c_uint) |node| {
        node.gpu(device)?;
        put(enabled, 1)?;
        put(default, 1)
    }
}
