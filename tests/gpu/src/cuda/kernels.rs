//! Our kernels, loaded, and how each is launched: always on the default stream.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr;

use super::{Called, Cuda, Handle, call, ptx};

/// The kernels of [`ptx::TEXT`].
pub struct Kernels {
    spin: Handle,
    whereabouts: Handle,
    touch: Handle,
    stray: Handle,
    work: Handle,
}

impl Cuda {
    /// The driver compiles the text here.
    pub fn kernels(&self) -> Called<Kernels> {
        let mut module: Handle = ptr::null_mut();
        // SAFETY: `module` is a live handle to write to; the text ends with a zero. It is never unloaded.
        unsafe {
            call!(self, cuModuleLoadData,
                &raw mut module => *mut Handle, ptx::TEXT.as_ptr().cast() => *const c_void)
        }?;
        Ok(Kernels {
            spin: self.kernel(module, c"spin")?,
            whereabouts: self.kernel(module, c"whereabouts")?,
            touch: self.kernel(module, c"touch")?,
            stray: self.kernel(module, c"stray")?,
            work: self.kernel(module, c"work")?,
        })
    }

    fn kernel(&self, module: Handle, name: &CStr) -> Called<Handle> {
        let mut function: Handle = ptr::null_mut();
        // SAFETY: `function` is a live handle to write to; the name ends with a zero.
        unsafe {
            call!(self, cuModuleGetFunction,
                &raw mut function => *mut Handle, module => Handle, name.as_ptr() => *const c_char)
        }?;
        Ok(function)
    }

    /// Launches one kernel. Each parameter is 8 bytes here; one that is declared shorter takes the low ones.
    fn launch(&self, function: Handle, blocks: u32, threads: u32, parameters: &mut [u64]) -> Called<()> {
        let mut pointers: Vec<*mut c_void> =
            parameters.iter_mut().map(|one| ptr::from_mut(one).cast()).collect();
        let none: *mut *mut c_void = ptr::null_mut();
        let stream: Handle = ptr::null_mut();
        // SAFETY: the function is of a loaded module; as many parameters as it declares (tested in `ptx`),
        // each at least as long, live until the call returns: the driver copies them. Little endian hosts.
        unsafe {
            call!(self, cuLaunchKernel, function => Handle,
                blocks => c_uint, 1 => c_uint, 1 => c_uint, threads => c_uint, 1 => c_uint, 1 => c_uint,
                0 => c_uint, stream => Handle, pointers.as_mut_ptr() => *mut *mut c_void,
                none => *mut *mut c_void)
        }
    }

    pub fn spin(&self, kernels: &Kernels, cycles: u64) -> Called<()> {
        self.launch(kernels.spin, 1, 1, &mut [cycles])
    }

    pub fn whereabouts(&self, kernels: &Kernels, out: u64, blocks: u32, cycles: u64) -> Called<()> {
        self.launch(kernels.whereabouts, blocks, 64, &mut [out, cycles])
    }

    pub fn touch(&self, kernels: &Kernels, base: u64, bytes: u64, stride: u64) -> Called<()> {
        self.launch(kernels.touch, 64, 128, &mut [base, bytes, stride])
    }

    pub fn stray(&self, kernels: &Kernels, at: u64) -> Called<()> {
        self.launch(kernels.stray, 1, 1, &mut [at])
    }

    pub fn work(&self, kernels: &Kernels, out: u64, blocks: u32, rounds: u32) -> Called<()> {
        self.launch(kernels.work, blocks, WORK_THREADS, &mut [out, rounds.into()])
    }
}

/// Threads of one block of `work`.
pub const WORK_THREADS: u32 = 256;
