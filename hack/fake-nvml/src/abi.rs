//! The C side of a call: handles, out parameters, strings, versioned structs.
//!
//! A handle is a number that looks like no pointer, so a stale or foreign one is
//! recognised and never followed. Out parameters are written through the raw
//! pointer that the caller gave: the helpers here are reached only from the
//! `extern "C"` entry points, whose callers promise, as with the real library,
//! that a pointer is null or valid for what the function writes.

use std::ffi::{CStr, c_char, c_uint};

use crate::code::{Answer, Code};

const TAG: usize = 0x4E56 << 48;

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handle {
    Gpu { gpu: usize },
    Mig { gpu: usize, gi: u32, ci: u32 },
    GpuInstance { gpu: usize, gi: u32 },
    ComputeInstance { gpu: usize, gi: u32, ci: u32 },
    EventSet { id: u32 },
    GpmSample { id: u32 },
}

impl Handle {
    /// The number that the caller gets as a pointer.
    pub fn encode(self) -> usize {
        let (kind, gpu, gi, ci) = match self {
            Handle::Gpu { gpu } => (1, gpu, 0, 0),
            Handle::Mig { gpu, gi, ci } => (2, gpu, gi, ci),
            Handle::GpuInstance { gpu, gi } => (3, gpu, gi, 0),
            Handle::ComputeInstance { gpu, gi, ci } => (4, gpu, gi, ci),
            Handle::EventSet { id } => return TAG | 5 << 44 | id as usize,
            Handle::GpmSample { id } => return TAG | 6 << 44 | id as usize,
        };
        TAG | kind << 44 | (gpu & 0xFF) << 16 | (gi as usize & 0xFF) << 8 | (ci as usize & 0xFF)
    }

    /// What a number from outside stands for, if it is one of ours.
    pub fn decode(raw: usize) -> Option<Handle> {
        if raw >> 48 != TAG >> 48 {
            return None;
        }
        let (gpu, gi, ci) = ((raw >> 16) & 0xFF, (raw >> 8 & 0xFF) as u32, (raw & 0xFF) as u32);
        match raw >> 44 & 0xF {
            1 => Some(Handle::Gpu { gpu }),
            2 => Some(Handle::Mig { gpu, gi, ci }),
            3 => Some(Handle::GpuInstance { gpu, gi }),
            4 => Some(Handle::ComputeInstance { gpu, gi, ci }),
            5 => Some(Handle::EventSet { id: raw as u32 }),
            6 => Some(Handle::GpmSample { id: raw as u32 }),
            _ => None,
        }
    }

    /// The board that the handle is about.
    pub fn board(self) -> Option<usize> {
        match self {
            Handle::Gpu { gpu }
            | Handle::Mig { gpu, .. }
            | Handle::GpuInstance { gpu, .. }
            | Handle::ComputeInstance { gpu, .. } => Some(gpu),
            Handle::EventSet { .. } | Handle::GpmSample { .. } => None,
        }
    }

    pub fn pointer<T>(self) -> *mut T {
        self.encode() as *mut T
    }
}

/// Writes an answer; a null pointer is an invalid argument.
pub(crate) fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and valid for a write by the caller's promise (module header).
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Reads what the caller put behind a pointer.
pub(crate) fn get<T: Copy>(from: *const T) -> Answer<T> {
    if from.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and valid for a read by the caller's promise (module header).
    Ok(unsafe { from.read_unaligned() })
}

/// Writes the fields of a struct in place, leaving what the closure does not touch.
pub(crate) fn edit<T: Copy>(at: *mut T, change: impl FnOnce(&mut T)) -> Answer {
    let mut value = get(at)?;
    change(&mut value);
    put(at, value)
}

/// Writes `values` from `out` on; the caller has checked that they fit.
pub(crate) fn put_all<T: Copy>(out: *mut T, values: &[T]) -> Answer {
    if values.is_empty() {
        return Ok(());
    }
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and room for the count that the caller stated.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), out, values.len()) };
    Ok(())
}

/// NVML's protocol for lists: the count goes in as room and comes out as need.
/// Asked with no room it answers INSUFFICIENT_SIZE, unless there is nothing to tell.
pub(crate) fn put_list<T: Copy>(count: *mut c_uint, out: *mut T, values: &[T]) -> Answer {
    let room = get(count)? as usize;
    let need = c_uint::try_from(values.len()).unwrap_or(c_uint::MAX);
    if room < values.len() {
        put(count, need)?;
        return Err(Code::INSUFFICIENT_SIZE);
    }
    if out.is_null() && room > 0 && !values.is_empty() {
        return Err(Code::INVALID_ARGUMENT);
    }
    put_all(out, values)?;
    put(count, need)
}

/// Copies text with its end mark into a caller's buffer.
pub(crate) fn put_text(out: *mut c_char, length: c_uint, text: &str) -> Answer {
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    if (length as usize) <= text.len() {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: not null, and `length` bytes of room by the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// A fixed array of a struct, filled with text and zeroes.
pub(crate) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (slot, byte) in out.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *slot = byte as c_char;
    }
    out
}

/// Text that the caller passed.
pub(crate) fn text(from: *const c_char) -> Answer<String> {
    if from.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and ended by a zero by the caller's promise.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_ARGUMENT)
}

/// Does the version word of a struct fit its size and number?
pub(crate) fn versioned<T>(word: c_uint, number: u32) -> Answer {
    let want = size_of::<T>() as c_uint | number << 24;
    if word == want { Ok(()) } else { Err(Code::ARGUMENT_VERSION_MISMATCH) }
}
