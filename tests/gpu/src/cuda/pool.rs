//! Stream-ordered memory: from the device's default pool or from one of our own. On the default stream.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uchar, c_void};
use std::ptr;

use super::{Called, Cuda, Handle, call};

const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    pub kind: c_int,
    pub id: c_int,
}

impl Location {
    pub fn device(id: c_int) -> Self {
        Self { kind: ON_DEVICE, id }
    }
}

/// `CUmemPoolProps`
#[repr(C)]
struct PoolProperties {
    kind: c_int,
    handles: c_int,
    location: Location,
    security: *mut c_void,
    most: usize,
    rest: [c_uchar; 56],
}

const _: () = assert!(size_of::<PoolProperties>() == 88);

/// A pool's handle. Pools of our own end with the process.
#[derive(Clone, Copy)]
pub struct Pool(Handle);

impl Cuda {
    pub fn default_pool(&self) -> Called<Pool> {
        let mut pool: Handle = ptr::null_mut();
        // SAFETY: `pool` is a live handle to write to.
        unsafe {
            call!(self, cuDeviceGetDefaultMemPool, &raw mut pool => *mut Handle, self.device => c_int)
        }?;
        Ok(Pool(pool))
    }

    pub fn new_pool(&self) -> Called<Pool> {
        let properties = PoolProperties {
            kind: PINNED,
            handles: 0,
            location: Location::device(self.device),
            security: ptr::null_mut(),
            most: 0,
            rest: [0; 56],
        };
        let mut pool: Handle = ptr::null_mut();
        // SAFETY: both are live; the struct has the declared size, its unused rest is zero.
        unsafe {
            call!(self, cuMemPoolCreate,
                &raw mut pool => *mut Handle, &raw const properties => *const PoolProperties)
        }?;
        Ok(Pool(pool))
    }

    pub fn take_from(&self, pool: Option<Pool>, bytes: u64) -> Called<u64> {
        let (mut at, stream): (u64, Handle) = (0, ptr::null_mut());
        let bytes = bytes as usize;
        match pool {
            // SAFETY: `at` is a live number; no stream is the default stream.
            None => unsafe {
                call!(self, cuMemAllocAsync, &raw mut at => *mut u64, bytes => usize, stream => Handle)
            },
            // SAFETY: as above; the pool is one that the driver gave.
            Some(Pool(pool)) => unsafe {
                call!(self, cuMemAllocFromPoolAsync,
                    &raw mut at => *mut u64, bytes => usize, pool => Handle, stream => Handle)
            },
        }?;
        Ok(at)
    }

    pub fn give_later(&self, at: u64) -> Called<()> {
        let stream: Handle = ptr::null_mut();
        // SAFETY: a number and the default stream.
        unsafe { call!(self, cuMemFreeAsync, at => u64, stream => Handle) }
    }

    /// Gives what the pool keeps in reserve back to the driver.
    pub fn trim(&self, pool: Pool) -> Called<()> {
        // SAFETY: the pool is one that the driver gave.
        unsafe { call!(self, cuMemPoolTrimTo, pool.0 => Handle, 0 => usize) }
    }
}
