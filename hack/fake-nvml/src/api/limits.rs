//! Memory limits by cgroup (driver series 615): absent from older headers, so the
//! two structs are declared here.

use std::ffi::{c_char, c_ulonglong};

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use crate::abi::{edit, get, text};
use crate::call::nvml;
use crate::code::Code;
use crate::control::Process;
use crate::node::Gpu;
use crate::state::Limit;

/// What stands for "no hard limit".
pub const UNLIMITED: u64 = u64::MAX;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SetMemoryLimits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GetMemoryLimits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

const _: () = assert!(size_of::<SetMemoryLimits>() == 24 && size_of::<GetMemoryLimits>() == 32);

/// The cgroup of a process: as the control file says, or as the kernel does.
fn cgroup(process: &Process) -> Option<String> {
    process.cgroup.clone().or_else(|| {
        let text = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).ok()?;
        text.lines().find_map(|l| l.strip_prefix("0::")).map(str::to_owned)
    })
}

/// The path below the cgroup mount, without a slash at the end.
fn bare(path: &str) -> &str {
    path.strip_prefix("/sys/fs/cgroup").unwrap_or(path).trim_end_matches('/')
}

/// Memory of the processes in a cgroup and below.
fn used(gpu: &Gpu, path: &str) -> u64 {
    gpu.processes()
        .filter(|p| {
            cgroup(p).is_some_and(|c| {
                bare(&c).strip_prefix(bare(path)).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        })
        .filter_map(|p| p.used_mib)
        .fold(0, |sum, mib| sum.saturating_add(mib << 20))
}

nvml! {
    fn nvmlDeviceSetMemoryLimits_v1(device: nvmlDevice_t, limits: *mut SetMemoryLimits) |node| {
        let gpu = node.gpu(device)?;
        gpu.refuse_in_mig_mode()?;
        let asked = get(limits)?;
        let path = text(asked.name_space)?;
        if !path.starts_with('/') || asked.soft > asked.hard {
            return Err(Code::INVALID_ARGUMENT);
        }
        node.need_root()?;
        node.change(gpu.index, |s| {
            if asked.soft == 0 && asked.hard == UNLIMITED {
                s.limits.remove(&path);
            } else {
                s.limits.insert(path, Limit { soft: asked.soft, hard: asked.hard });
            }
            Ok(())
        })
    }

    fn nvmlDeviceGetMemoryLimits_v1(device: nvmlDevice_t, limits: *mut GetMemoryLimits) |node| {
        let gpu = node.gpu(device)?;
        gpu.refuse_in_mig_mode()?;
        let path = text(get(limits)?.name_space)?;
        let limit = gpu.changed.limits.get(&path).ok_or(Code::NOT_FOUND)?;
        edit(limits, |l| {
            l.soft = limit.soft;
            l.hard = limit.hard;
            l.used = used(gpu, &path);
        })
    }
}
