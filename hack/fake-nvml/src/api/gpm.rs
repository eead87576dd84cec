//! GPU performance monitoring (Hopper and newer): how busy a board or a GPU instance is. The work of its processes, by
//! their `sm-util`, stands for the time in which anything ran.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION, nvmlDevice_t, nvmlGpmMetricsGet_t,
    nvmlGpmSample_t, nvmlGpmSupport_t,
};

use crate::abi::{Handle, edit, get, put};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::node::Gpu;
use crate::session::{self, GpmTaken};

/// The first architecture that has it, by its compute capability.
const HOPPER: (i32, i32) = (9, 0);
const GRAPHICS_UTIL: c_uint = 1;
const SM_UTIL: c_uint = 2;
/// Room for metrics in a question.
const METRICS_MAX: usize = 210;

fn has_it(gpu: &Gpu) -> bool {
    gpu.board.compute >= HOPPER
}

fn sample_id(sample: nvmlGpmSample_t) -> Answer<u32> {
    match Handle::decode(sample as usize) {
        Some(Handle::GpmSample { id }) => Ok(id),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn take(gpu: &Gpu, gi: Option<u32>, sample: nvmlGpmSample_t) -> Answer {
    if !has_it(gpu) {
        return Err(Code::NOT_SUPPORTED);
    }
    let of_it = gpu.processes().filter(|process| gi.is_none() || process.gi == gi);
    let busy_percent = of_it.map(|process| process.sm_util).sum::<u32>().min(100);
    let taken = GpmTaken { gpu: gpu.index, gi, busy_percent };
    session::with_sample(sample_id(sample)?, |place| {
        *place = Some(taken);
        Ok(())
    })
}

fn taken(sample: nvmlGpmSample_t) -> Answer<GpmTaken> {
    session::with_sample(sample_id(sample)?, |place| place.ok_or(Code::INVALID_ARGUMENT))
}

nvml! {
    fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, out: *mut nvmlGpmSupport_t) |node| {
        let gpu = node.gpu(device)?;
        if get(out)?.version != NVML_GPM_SUPPORT_VERSION {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        edit(out, |answer| answer.isSupportedDevice = has_it(gpu).into())
    }

    fn nvmlGpmSampleAlloc(sample: *mut nvmlGpmSample_t) |_node| {
        if sample.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(sample, Handle::GpmSample { id: session::create_sample() }.pointer())
    }

    fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) |_node| {
        session::free_sample(sample_id(sample)?)
    }

    fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) |node| {
        take(node.gpu(device)?, None, sample)
    }

    fn nvmlGpmMigSampleGet(device: nvmlDevice_t, gi: c_uint, sample: nvmlGpmSample_t) |node| {
        let gpu = node.gpu(device)?;
        if !gpu.mig.enabled || gpu.mig.instance(gi).is_none() {
            return Err(Code::INVALID_ARGUMENT);
        }
        take(gpu, Some(gi), sample)
    }

    /// Two samples of the same: what was between them is taken to be what the later one saw.
    fn nvmlGpmMetricsGet(question: *mut nvmlGpmMetricsGet_t) |_node| {
        let asked = get(question)?;
        if asked.version != NVML_GPM_METRICS_GET_VERSION {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let (first, second) = (taken(asked.sample1)?, taken(asked.sample2)?);
        let count = asked.numMetrics as usize;
        if count > METRICS_MAX || (first.gpu, first.gi) != (second.gpu, second.gi) {
            return Err(Code::INVALID_ARGUMENT);
        }
        edit(question, |answer| {
            for metric in &mut answer.metrics[..count] {
                let is_known = matches!(metric.metricId, GRAPHICS_UTIL | SM_UTIL);
                (metric.nvmlReturn, metric.value) = match is_known {
                    true => (0, f64::from(second.busy_percent)),
                    false => (Code::NOT_SUPPORTED.0, 0.0),
                };
            }
        })
    }
}
