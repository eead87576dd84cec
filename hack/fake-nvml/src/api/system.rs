//! Start and end of the library, versions, error words.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlReturn_t, nvmlSystemDriverBranchInfo_v1_t};

use crate::abi::{chars, edit, get, put, put_text, versioned};
use crate::call::{enter_closed, nvml};
use crate::code::{self, Code};
use crate::driver::cuda;
use crate::node::Node;
use crate::session;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    enter_closed("nvmlInit_v2", |node| {
        session::open(node);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit() -> nvmlReturn_t {
    enter_closed("nvmlInit", |node| {
        session::open(node);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    enter_closed("nvmlInitWithFlags", |node| {
        session::open(node);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    match session::close() {
        Ok(()) => 0,
        Err(Code(number)) => number,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    code::words(result).as_ptr()
}

fn library_version(node: &Node) -> String {
    format!("{}.{}", cuda(node.driver_major) / 1000, node.control.driver_version)
}

nvml! {
    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) |node| {
        put_text(version, length, &node.control.driver_version)
    }

    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) |node| {
        put_text(version, length, &library_version(node))
    }

    fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) |node| {
        put(version, cuda(node.driver_major))
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) |node| {
        put(version, cuda(node.driver_major))
    }

    fn nvmlSystemGetDriverBranch(branch: *mut nvmlSystemDriverBranchInfo_v1_t, _length: c_uint) |node| {
        versioned::<nvmlSystemDriverBranchInfo_v1_t>(get(branch)?.version, 1)?;
        edit(branch, |b| b.branch = chars(&format!("r{}_00", node.driver_major)))
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) |_node| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| Code::NOT_FOUND)?;
        let text = text.trim_end();
        if name.is_null() || length == 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        // Longer names are cut to fit.
        let cut: String = text.chars().take(length as usize - 1).collect();
        put_text(name, length, &cut)
    }

    fn nvmlSystemGetHicVersion(count: *mut c_uint, _entries: *mut nvml_wrapper_sys::bindings::nvmlHwbcEntry_t) |_node| {
        put(count, 0)
    }

    fn nvmlUnitGetCount(count: *mut c_uint) |_node| {
        put(count, 0)
    }

    fn nvmlGetExcludedDeviceCount(count: *mut c_uint) |_node| {
        put(count, 0)
    }
}
