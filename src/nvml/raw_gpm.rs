//! GPU performance monitoring, which nvml-wrapper lacks: how busy a GPU instance was between two samples. What all blocks
//! rest on is said in [`super::raw`].
#![allow(unsafe_code)]

use std::ffi::c_uint;
use std::ptr;

use nvml_wrapper::error::{NvmlError as Code, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION, nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL,
    nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t, nvmlReturn_t,
};

/// Bytes for a question. Its list of metrics has grown with the drivers (210 of 40 bytes once, 477 of release 615), and
/// its version has not: there is room for more than one driver has.
const ROOM: usize = 64 << 10;
const _: () = assert!(
    size_of::<nvmlGpmMetricsGet_t>() <= ROOM && align_of::<nvmlGpmMetricsGet_t>() <= align_of::<u64>()
);

/// A sample, which the library has memory for. To be dropped before the library that gave it, which is still loaded then.
pub(super) struct GpmSample {
    sample: nvmlGpmSample_t,
    free: unsafe extern "C" fn(nvmlGpmSample_t) -> nvmlReturn_t,
}

impl Drop for GpmSample {
    fn drop(&mut self) {
        // SAFETY: the sample came from this library, which is still loaded, and nobody has freed it. What the call answers
        // changes nothing: there is nothing else to try.
        let _ = unsafe { (self.free)(self.sample) };
    }
}

/// `nvmlGpmQueryDeviceSupport`: Hopper and newer have it.
pub(super) fn is_supported(board: &Device<'_>) -> Result<bool, Code> {
    let call = nvml_sym(board.nvml().lib().nvmlGpmQueryDeviceSupport.as_ref())?;
    let mut answer = nvmlGpmSupport_t { version: NVML_GPM_SUPPORT_VERSION, isSupportedDevice: 0 };
    // SAFETY: the handle is the board's own; `answer` is a live value of the declared type, with its version.
    nvml_try(unsafe { call(board.handle(), &mut answer) })?;
    Ok(answer.isSupportedDevice != 0)
}

/// `nvmlGpmSampleAlloc` and `nvmlGpmMigSampleGet`: a sample of a GPU instance, as it is now.
pub(super) fn sample(board: &Device<'_>, gpu_instance: u32) -> Result<GpmSample, Code> {
    let lib = board.nvml().lib();
    let (allocate, free) =
        (nvml_sym(lib.nvmlGpmSampleAlloc.as_ref())?, *nvml_sym(lib.nvmlGpmSampleFree.as_ref())?);
    let get = nvml_sym(lib.nvmlGpmMigSampleGet.as_ref())?;
    let mut sample: nvmlGpmSample_t = ptr::null_mut();
    // SAFETY: `sample` is a live pointer to write to.
    nvml_try(unsafe { allocate(&mut sample) })?;
    let sample = GpmSample { sample, free };
    // SAFETY: the handle is the board's own, and the sample this library's.
    nvml_try(unsafe { get(board.handle(), gpu_instance, sample.sample) })?;
    Ok(sample)
}

/// `nvmlGpmMetricsGet`: the part of the time between two samples in which anything ran, in percent
/// (`NVML_GPM_METRIC_GRAPHICS_UTIL`). `None` if the driver gives no number.
pub(super) fn busy_percent(nvml: &Nvml, before: &GpmSample, now: &GpmSample) -> Result<Option<f64>, Code> {
    let call = nvml_sym(nvml.lib().nvmlGpmMetricsGet.as_ref())?;
    let mut room = vec![0_u64; ROOM.div_ceil(size_of::<u64>())];
    let question: *mut nvmlGpmMetricsGet_t = room.as_mut_ptr().cast();
    // SAFETY: the room is live, larger than the structure and aligned for its pointers; zeroes are a value of each of its
    // fields, which are numbers and pointers. The samples are this library's.
    let metric = unsafe {
        (*question).version = NVML_GPM_METRICS_GET_VERSION;
        (*question).numMetrics = 1;
        (*question).sample1 = before.sample;
        (*question).sample2 = now.sample;
        (*question).metrics[0].metricId = nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL as c_uint;
        nvml_try(call(question))?;
        (*question).metrics[0]
    };
    nvml_try(metric.nvmlReturn)?;
    Ok(metric.value.is_finite().then(|| metric.value.clamp(0.0, 100.0)))
}
