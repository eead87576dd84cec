//! Virtual memory management: physical chunks, mapped behind reserved addresses, handed to other processes
//! as file descriptors.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::pool::Location;
use super::{Called, Cuda, call};

const PINNED: c_int = 1;
const AS_FILE_DESCRIPTOR: c_int = 1;
const READ_AND_WRITE: c_int = 3;
const SMALLEST: c_int = 0;

/// `CUmemAllocationProp`
#[repr(C)]
struct ChunkProperties {
    kind: c_int,
    handles: c_int,
    location: Location,
    security: *mut c_void,
    compression: c_uchar,
    direct: c_uchar,
    usage: c_ushort,
    rest: [c_uchar; 4],
}

const _: () = assert!(size_of::<ChunkProperties>() == 32);

/// `CUmemAccessDesc`
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<Access>() == 12);

/// A physical chunk that is mapped.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    handle: c_ulonglong,
    pub at: u64,
    pub bytes: u64,
}

impl Cuda {
    fn properties(&self) -> ChunkProperties {
        ChunkProperties {
            kind: PINNED,
            handles: AS_FILE_DESCRIPTOR,
            location: Location::device(self.device),
            security: ptr::null_mut(),
            compression: 0,
            direct: 0,
            usage: 0,
            rest: [0; 4],
        }
    }

    /// A chunk of at least `bytes`: a multiple of what the driver deals in.
    pub fn take_chunk(&self, bytes: u64) -> Called<Chunk> {
        let properties = self.properties();
        let (mut grain, mut handle): (usize, c_ulonglong) = (0, 0);
        // SAFETY: both are live and of the declared types.
        unsafe {
            call!(self, cuMemGetAllocationGranularity, &raw mut grain => *mut usize,
                &raw const properties => *const ChunkProperties, SMALLEST => c_int)
        }?;
        let bytes = bytes.next_multiple_of((grain as u64).max(1));
        // SAFETY: `handle` is a live number to write to; the properties are live.
        unsafe {
            call!(self, cuMemCreate, &raw mut handle => *mut c_ulonglong, bytes as usize => usize,
                &raw const properties => *const ChunkProperties, 0 => c_ulonglong)
        }?;
        self.map(handle, bytes).inspect_err(|_| {
            // The failure to map is what is told.
            let _ = self.release(handle);
        })
    }

    fn map(&self, handle: c_ulonglong, bytes: u64) -> Called<Chunk> {
        let mut at = 0_u64;
        let size = bytes as usize;
        // SAFETY: `at` is a live number to write to.
        unsafe {
            call!(self, cuMemAddressReserve, &raw mut at => *mut u64, size => usize,
                0 => usize, 0 => u64, 0 => c_ulonglong)
        }?;
        let access = Access { location: Location::device(self.device), flags: READ_AND_WRITE };
        // SAFETY: addresses reserved just now and a handle that the driver gave.
        unsafe {
            call!(self, cuMemMap,
                at => u64, size => usize, 0 => usize, handle => c_ulonglong, 0 => c_ulonglong)
        }?;
        // SAFETY: one live description, and its count.
        unsafe {
            call!(self, cuMemSetAccess,
                at => u64, size => usize, &raw const access => *const Access, 1 => usize)
        }?;
        Ok(Chunk { handle, at, bytes })
    }

    fn release(&self, handle: c_ulonglong) -> Called<()> {
        // SAFETY: a handle that the driver gave.
        unsafe { call!(self, cuMemRelease, handle => c_ulonglong) }
    }

    pub fn give_chunk(&self, chunk: Chunk) -> Called<()> {
        let size = chunk.bytes as usize;
        // SAFETY: addresses that were reserved and mapped together.
        unsafe { call!(self, cuMemUnmap, chunk.at => u64, size => usize) }?;
        // SAFETY: as above, now unmapped.
        unsafe { call!(self, cuMemAddressFree, chunk.at => u64, size => usize) }?;
        self.release(chunk.handle)
    }

    pub fn export(&self, chunk: Chunk) -> Called<OwnedFd> {
        let mut fd: c_int = -1;
        // SAFETY: the driver writes an int for this kind of handle.
        unsafe {
            call!(self, cuMemExportToShareableHandle, (&raw mut fd).cast() => *mut c_void,
                chunk.handle => c_ulonglong, AS_FILE_DESCRIPTOR => c_int, 0 => c_ulonglong)
        }?;
        // SAFETY: the driver opened it for the caller, who has to close it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Maps a chunk of another process.
    pub fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Called<Chunk> {
        let mut handle: c_ulonglong = 0;
        // The descriptor itself travels in the pointer.
        let descriptor = fd.as_raw_fd() as c_uint as usize as *mut c_void;
        // SAFETY: `handle` is a live number; for this kind the pointer is a number and is not followed.
        unsafe {
            call!(self, cuMemImportFromShareableHandle,
                &raw mut handle => *mut c_ulonglong, descriptor => *mut c_void, AS_FILE_DESCRIPTOR => c_int)
        }?;
        self.map(handle, bytes).inspect_err(|_| {
            // The failure to map is what is told.
            let _ = self.release(handle);
        })
    }
}
