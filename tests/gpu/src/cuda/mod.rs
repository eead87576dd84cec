//! The CUDA driver API, as much of it as the experiments need. The library is loaded at run time and every
//! function is looked up when it is used, so that an old driver lacks only what it lacks.
//!
//! What all blocks rest on: the function's type is that of the driver API's reference, whose names carry
//! their version (`_v2`) and never change type; numbers are C ints, unsigned ints, size_t (`usize`) or
//! 64-bit device addresses; handles are opaque pointers that only this library gives and takes; every out
//! parameter points to a live value of the declared type. Addresses on the device are only numbers here:
//! nothing on the host follows them. The driver checks handles and numbers and answers with a code.
#![allow(unsafe_code)]

mod chunks;
mod kernels;
mod pool;
pub mod ptx;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;
use std::time::Instant;

use anyhow::{Context as _, Result};
use libloading::Library;

use crate::protocol::{Failure, Opened};

pub use chunks::Chunk;
pub use kernels::{Kernels, WORK_THREADS};
pub use pool::Pool;

type Handle = *mut c_void;
pub type Called<T> = Result<T, Failure>;

/// Numbers of device attributes.
const CLOCK_KHZ: c_int = 13;
const MULTIPROCESSORS: c_int = 16;

/// Looks the function up and calls it. To be used in an `unsafe` block: the kinds are the function's own.
macro_rules! call {
    ($cuda:expr, $name:ident, $($value:expr => $kind:ty),* $(,)?) => {{
        let name = concat!(stringify!($name), "\0").as_bytes();
        match $cuda.library.get::<unsafe extern "C" fn($($kind),*) -> std::ffi::c_int>(name) {
            Ok(function) => {
                let code = function($($value),*);
                $cuda.judge(stringify!($name), code)
            }
            Err(_) => Err($crate::protocol::Failure::absent(stringify!($name))),
        }
    }};
}
use call;

/// The library, initialised, with a context that is current to the thread that opened it.
pub struct Cuda {
    library: Library,
    device: c_int,
    pub opened: Opened,
    clock_khz: u64,
}

impl Cuda {
    /// `cuInit` and a context on the first device that this process may see.
    pub fn open(path: &Path) -> Result<Called<Self>> {
        // SAFETY: the driver's own library; its initialisers are made for any process.
        let library = unsafe { Library::new(path) }.with_context(|| format!("load {}", path.display()))?;
        let opened =
            Opened { device: String::new(), cuda: 0, multiprocessors: 0, free: 0, total: 0, open_ms: 0.0 };
        let mut cuda = Self { library, device: 0, opened, clock_khz: 0 };
        Ok(cuda.init().map(|()| cuda))
    }

    fn init(&mut self) -> Called<()> {
        let begin = Instant::now();
        let (mut device, mut context): (c_int, Handle) = (0, ptr::null_mut());
        // SAFETY: a number, as declared.
        unsafe { call!(self, cuInit, 0 => c_uint) }?;
        // SAFETY: `device` is a live number to write to.
        unsafe { call!(self, cuDeviceGet, &raw mut device => *mut c_int, 0 => c_int) }?;
        self.device = device;
        // SAFETY: `context` is a live handle to write to. It is never destroyed: the process's end does it.
        unsafe {
            call!(self, cuCtxCreate_v2, &raw mut context => *mut Handle, 0 => c_uint, device => c_int)
        }?;
        self.opened.open_ms = begin.elapsed().as_secs_f64() * 1e3;
        self.opened.device = self.name()?;
        self.opened.cuda = self.version()?;
        self.opened.multiprocessors = self.attribute(MULTIPROCESSORS)?.unsigned_abs();
        // Where the driver does not tell any more, a usual clock: only how long kernels last hangs on it.
        self.clock_khz = self
            .attribute(CLOCK_KHZ)
            .ok()
            .filter(|khz| *khz > 0)
            .map_or(1_500_000, |khz| khz.unsigned_abs().into());
        (self.opened.free, self.opened.total) = self.memory()?;
        Ok(())
    }

    fn judge(&self, call: &str, code: c_int) -> Called<()> {
        match code {
            0 => Ok(()),
            code => Err(Failure { call: call.to_owned(), code, name: self.error_name(code) }),
        }
    }

    fn error_name(&self, code: c_int) -> String {
        let unknown = || "an error without a name".to_owned();
        let mut text: *const c_char = ptr::null();
        // SAFETY: as declared; `text` is a live pointer to write to.
        let symbol = unsafe {
            self.library.get::<unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int>(b"cuGetErrorName\0")
        };
        let Ok(symbol) = symbol else { return unknown() };
        // SAFETY: `text` is a live pointer to write to.
        let answer = unsafe { symbol(code, &raw mut text) };
        if answer != 0 || text.is_null() {
            return unknown();
        }
        // SAFETY: the driver gave a constant text that ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    fn name(&self) -> Called<String> {
        let mut text = [0_u8; 128];
        let length = text.len() as c_int - 1;
        // SAFETY: a buffer with its length; one zero stays behind it.
        unsafe {
            call!(self, cuDeviceGetName,
                text.as_mut_ptr().cast() => *mut c_char, length => c_int, self.device => c_int)
        }?;
        let name = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    fn version(&self) -> Called<c_int> {
        let mut version = 0;
        // SAFETY: `version` is a live number to write to.
        unsafe { call!(self, cuDriverGetVersion, &raw mut version => *mut c_int) }?;
        Ok(version)
    }

    fn attribute(&self, number: c_int) -> Called<c_int> {
        let mut value = 0;
        // SAFETY: `value` is a live number to write to.
        unsafe {
            call!(self, cuDeviceGetAttribute,
                &raw mut value => *mut c_int, number => c_int, self.device => c_int)
        }?;
        Ok(value)
    }

    /// Free and total bytes, as this process is told.
    pub fn memory(&self) -> Called<(u64, u64)> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both are live numbers to write to.
        unsafe { call!(self, cuMemGetInfo_v2, &raw mut free => *mut usize, &raw mut total => *mut usize) }?;
        Ok((free as u64, total as u64))
    }

    pub fn take(&self, bytes: u64) -> Called<u64> {
        let mut at = 0_u64;
        // SAFETY: `at` is a live number to write to.
        unsafe { call!(self, cuMemAlloc_v2, &raw mut at => *mut u64, bytes as usize => usize) }?;
        Ok(at)
    }

    /// Managed memory, for every stream. It is on the GPU once a kernel has written to it.
    pub fn take_managed(&self, bytes: u64) -> Called<u64> {
        const ATTACH_GLOBAL: c_uint = 1;
        let mut at = 0_u64;
        // SAFETY: `at` is a live number to write to.
        unsafe {
            call!(self, cuMemAllocManaged,
                &raw mut at => *mut u64, bytes as usize => usize, ATTACH_GLOBAL => c_uint)
        }?;
        Ok(at)
    }

    pub fn give(&self, at: u64) -> Called<()> {
        // SAFETY: a number; the driver refuses what it has not given.
        unsafe { call!(self, cuMemFree_v2, at => u64) }
    }

    /// Waits for everything launched; tells of a fault of any of it.
    pub fn wait(&self) -> Called<()> {
        // SAFETY: no arguments.
        unsafe { call!(self, cuCtxSynchronize,) }
    }

    pub fn read_u32(&self, at: u64, count: usize) -> Called<Vec<u32>> {
        let mut numbers = vec![0_u32; count];
        let bytes = size_of_val(numbers.as_slice());
        // SAFETY: the vector is live and `bytes` long; the driver refuses addresses that are not its own.
        unsafe {
            call!(self, cuMemcpyDtoH_v2,
                numbers.as_mut_ptr().cast() => *mut c_void, at => u64, bytes => usize)
        }?;
        Ok(numbers)
    }

    /// Clock cycles of about `ms`.
    pub fn cycles(&self, ms: u64) -> u64 {
        ms.saturating_mul(self.clock_khz)
    }
}
