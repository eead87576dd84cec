//! How busy the processes of a GPU are, by the two functions that NVML has for it.
//!
//! What the blocks rest on: as in the parent module; the structs are laid out as in the headers of NVML 12.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_uint, c_ulonglong};
use std::ptr;

use anyhow::{Result, anyhow, bail};

use super::{Device, INSUFFICIENT_SIZE, NOT_FOUND, Nvml, call, code_of};

/// The two functions. Both tell of samples that are newer than a time stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Query {
    Process,
    /// Newer drivers only.
    Processes,
}

impl Query {
    pub const ALL: [Self; 2] = [Self::Process, Self::Processes];

    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "nvmlDeviceGetProcessUtilization",
            Self::Processes => "nvmlDeviceGetProcessesUtilizationInfo",
        }
    }
}

/// What NVML says of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    pub pid: u32,
    /// Microseconds since 1970.
    pub stamp: u64,
    /// Percent of the time in which a kernel of the process ran.
    pub sm: u32,
}

/// `nvmlProcessUtilizationSample_t`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RawSample {
    pid: c_uint,
    stamp: c_ulonglong,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

const _: () = assert!(size_of::<RawSample>() == 32);

/// `nvmlProcessUtilizationInfo_v1_t`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RawInfo {
    stamp: c_ulonglong,
    pid: c_uint,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
    jpeg: c_uint,
    optical_flow: c_uint,
}

const _: () = assert!(size_of::<RawInfo>() == 40);

/// `nvmlProcessesUtilizationInfo_v1_t`
#[repr(C)]
#[derive(Debug)]
struct RawInfos {
    version: c_uint,
    count: c_uint,
    since: c_ulonglong,
    array: *mut RawInfo,
}

const _: () = assert!(size_of::<RawInfos>() == 24);

/// The struct's size, and in the highest byte the number of its version.
const INFOS_VERSION: c_uint = size_of::<RawInfos>() as c_uint | 1 << 24;

/// Processes that may start between the question how many there are and the one who they are.
const HEADROOM: c_uint = 8;
const ATTEMPTS: u32 = 5;

impl Nvml {
    /// Samples newer than `since`; none where NVML has none.
    pub fn utilization(&self, uuid: &str, query: Query, since: u64) -> Result<Vec<Sample>> {
        let device = self.device(uuid)?;
        for _ in 0..ATTEMPTS {
            let answer = match query {
                Query::Process => self.samples(device, since),
                Query::Processes => self.infos(device, since),
            };
            match answer {
                // More processes than a moment ago.
                Err(error) if code_of(&error) == Some(INSUFFICIENT_SIZE) => {}
                Err(error) if code_of(&error) == Some(NOT_FOUND) => return Ok(Vec::new()),
                Err(error) => return Err(error),
                // Unused places of the array are left empty by some drivers.
                Ok(all) => return Ok(all.into_iter().filter(|one| one.pid != 0 && one.stamp > 0).collect()),
            }
        }
        bail!("{} asked for a longer list {ATTEMPTS} times", query.name())
    }

    fn samples(&self, device: Device, since: u64) -> Result<Vec<Sample>> {
        let mut count: c_uint = 0;
        // SAFETY: without an array NVML only writes how many places it needs.
        let needed = unsafe {
            call!(self, c"nvmlDeviceGetProcessUtilization", device => Device,
                ptr::null_mut() => *mut RawSample, &raw mut count => *mut c_uint, since => c_ulonglong)
        };
        room_needed(needed)?;
        count += HEADROOM;
        let mut raw = vec![RawSample::default(); count as usize];
        // SAFETY: the vector has room for `count`, which says how many are there afterwards.
        unsafe {
            call!(self, c"nvmlDeviceGetProcessUtilization", device => Device,
                raw.as_mut_ptr() => *mut RawSample, &raw mut count => *mut c_uint, since => c_ulonglong)
        }?;
        raw.truncate(count as usize);
        Ok(raw.into_iter().map(|one| Sample { pid: one.pid, stamp: one.stamp, sm: one.sm }).collect())
    }

    fn infos(&self, device: Device, since: u64) -> Result<Vec<Sample>> {
        let mut infos = RawInfos { version: INFOS_VERSION, count: 0, since, array: ptr::null_mut() };
        // SAFETY: a struct of the version that it names; without an array only the count is written.
        let needed = unsafe {
            call!(self, c"nvmlDeviceGetProcessesUtilizationInfo", device => Device,
                &raw mut infos => *mut RawInfos)
        };
        room_needed(needed)?;
        let mut raw = vec![RawInfo::default(); (infos.count + HEADROOM) as usize];
        infos.count += HEADROOM;
        infos.array = raw.as_mut_ptr();
        // SAFETY: the array has room for `count`, which says how many are there afterwards.
        unsafe {
            call!(self, c"nvmlDeviceGetProcessesUtilizationInfo", device => Device,
                &raw mut infos => *mut RawInfos)
        }?;
        raw.truncate(infos.count as usize);
        Ok(raw.into_iter().map(|one| Sample { pid: one.pid, stamp: one.stamp, sm: one.sm }).collect())
    }
}

/// The first call is to fail for want of room. With success there is nothing to tell.
fn room_needed(answer: Result<()>) -> Result<()> {
    match answer {
        Err(error) if code_of(&error) == Some(INSUFFICIENT_SIZE) => Ok(()),
        other => other,
    }
}
