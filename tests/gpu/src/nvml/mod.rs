//! NVML, as much of it as the experiments need: which GPU, its compute mode, its processes, their utilisation.
//! [`Nvml`] only reads; the one function that changes a card is in [`setter`].
//!
//! What all blocks rest on: as in `cuda`; NVML's functions keep their types under their versioned names,
//! handles come from this library and are only given back to it while it is initialised.
#![allow(unsafe_code)]

mod setter;
mod utilization;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, anyhow, bail};
use libloading::Library;

pub use setter::ModeSetter;
pub use utilization::{Query, Sample};

type Device = *mut c_void;

const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
/// As NVML says that it does not know.
const UNKNOWN: u64 = u64::MAX;

/// `nvmlComputeMode_t`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Default,
    /// As it was before CUDA 8, or one that came later: only ever put back.
    Other(u32),
    Prohibited,
    ExclusiveProcess,
}

impl Mode {
    pub fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Other(number) => number,
            Self::Prohibited => 2,
            Self::ExclusiveProcess => 3,
        }
    }

    pub fn of(number: u32) -> Self {
        match number {
            0 => Self::Default,
            2 => Self::Prohibited,
            3 => Self::ExclusiveProcess,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("DEFAULT"),
            Self::Other(number) => write!(f, "mode {number}"),
            Self::Prohibited => f.write_str("PROHIBITED"),
            Self::ExclusiveProcess => f.write_str("EXCLUSIVE_PROCESS"),
        }
    }
}

/// `nvmlProcessInfo_t` of the `_v3` lists.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawProcess {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<RawProcess>() == 24);

/// The lists in which NVML names processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum List {
    Compute,
    Mps,
    Graphics,
}

impl List {
    pub const ALL: [Self; 3] = [Self::Compute, Self::Mps, Self::Graphics];

    fn symbol(self) -> &'static CStr {
        match self {
            Self::Compute => c"nvmlDeviceGetComputeRunningProcesses_v3",
            Self::Mps => c"nvmlDeviceGetMPSComputeRunningProcesses_v3",
            Self::Graphics => c"nvmlDeviceGetGraphicsRunningProcesses_v3",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Mps => "MPS compute",
            Self::Graphics => "graphics",
        }
    }
}

/// A GPU as it is named on the command line and in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    pub index: u32,
    pub uuid: String,
    pub name: String,
    pub total: u64,
    pub mig: bool,
}

pub struct Nvml {
    library: Library,
}

/// A call that NVML did not answer with success.
#[derive(Debug)]
struct CallFailed {
    call: String,
    code: c_int,
    text: String,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}{}", self.call, self.code, self.text)
    }
}

impl std::error::Error for CallFailed {}

/// The code that NVML answered, if it was NVML that failed.
fn code_of(error: &anyhow::Error) -> Option<c_int> {
    error.downcast_ref::<CallFailed>().map(|failed| failed.code)
}

/// Looks the function up and calls it. To be used in an `unsafe` block: the kinds are the function's own.
macro_rules! call {
    ($nvml:expr, $name:expr, $($value:expr => $kind:ty),* $(,)?) => {{
        let name: &CStr = $name;
        match $nvml.library.get::<unsafe extern "C" fn($($kind),*) -> c_int>(name.to_bytes_with_nul()) {
            Ok(function) => {
                let code = function($($value),*);
                $nvml.judge(name, code)
            }
            Err(_) => Err(anyhow!("this driver has no {}", name.to_string_lossy())),
        }
    }};
}
use call;

impl Nvml {
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the driver's own library; its initialisers are made for any process.
        let library = unsafe { Library::new(path) }.with_context(|| format!("load {}", path.display()))?;
        let nvml = Self { library };
        // SAFETY: no arguments.
        unsafe { call!(nvml, c"nvmlInit_v2",) }?;
        Ok(nvml)
    }

    fn judge(&self, call: &CStr, code: c_int) -> Result<()> {
        match code {
            0 => Ok(()),
            code => Err(CallFailed {
                call: call.to_string_lossy().into_owned(),
                code,
                text: self.error_text(code).map(|text| format!(", {text}")).unwrap_or_default(),
            }
            .into()),
        }
    }

    fn error_text(&self, code: c_int) -> Option<String> {
        // SAFETY: as declared; it gives a constant text that ends with a zero for any number.
        let symbol =
            unsafe { self.library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"nvmlErrorString\0") };
        let symbol = symbol.ok()?;
        // SAFETY: any number will do.
        let text = unsafe { symbol(code) };
        // SAFETY: a constant text that ends with a zero.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    pub fn driver_version(&self) -> Result<String> {
        self.text(|buffer, length| {
            // SAFETY: `text` hands over a buffer and its true length.
            unsafe { call!(self, c"nvmlSystemGetDriverVersion", buffer => *mut c_char, length => c_uint) }
        })
    }

    fn text(&self, call: impl FnOnce(*mut c_char, c_uint) -> Result<()>) -> Result<String> {
        let mut buffer = [0_u8; 96];
        call(buffer.as_mut_ptr().cast(), buffer.len() as c_uint)?;
        Ok(CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy().into_owned())
    }

    pub fn gpus(&self) -> Result<Vec<Gpu>> {
        let mut count: c_uint = 0;
        // SAFETY: `count` is a live number to write to.
        unsafe { call!(self, c"nvmlDeviceGetCount_v2", &raw mut count => *mut c_uint) }?;
        (0..count).map(|index| self.gpu(index)).collect()
    }

    fn gpu(&self, index: u32) -> Result<Gpu> {
        let mut device: Device = ptr::null_mut();
        // SAFETY: `device` is a live handle to write to.
        unsafe {
            call!(self, c"nvmlDeviceGetHandleByIndex_v2", index => c_uint, &raw mut device => *mut Device)
        }?;
        let uuid = self.text(|buffer, length| {
            // SAFETY: `text` hands over a buffer and its true length.
            unsafe {
                call!(self, c"nvmlDeviceGetUUID",
                    device => Device, buffer => *mut c_char, length => c_uint)
            }
        })?;
        let name = self.text(|buffer, length| {
            // SAFETY: `text` hands over a buffer and its true length.
            unsafe {
                call!(self, c"nvmlDeviceGetName",
                    device => Device, buffer => *mut c_char, length => c_uint)
            }
        })?;
        let (mut now, mut later): (c_uint, c_uint) = (0, 0);
        // SAFETY: both are live numbers to write to.
        let mig = unsafe {
            call!(self, c"nvmlDeviceGetMigMode",
                device => Device, &raw mut now => *mut c_uint, &raw mut later => *mut c_uint)
        };
        // A GPU that knows no MIG is in no MIG mode.
        let mig = mig.is_ok() && now == 1;
        Ok(Gpu { index, total: self.memory(&uuid)?.0, uuid, name, mig })
    }

    fn device(&self, uuid: &str) -> Result<Device> {
        let text = std::ffi::CString::new(uuid).context("a UUID")?;
        let mut device: Device = ptr::null_mut();
        // SAFETY: the text ends with a zero; `device` is a live handle to write to.
        unsafe {
            call!(self, c"nvmlDeviceGetHandleByUUID",
                text.as_ptr() => *const c_char, &raw mut device => *mut Device)
        }?;
        Ok(device)
    }

    /// Bytes of the board: total and used.
    pub fn memory(&self, uuid: &str) -> Result<(u64, u64)> {
        // total, free, used
        let mut info: [c_ulonglong; 3] = [0; 3];
        let device = self.device(uuid)?;
        // SAFETY: three numbers of 64 bits, as declared.
        unsafe {
            call!(self, c"nvmlDeviceGetMemoryInfo", device => Device, info.as_mut_ptr() => *mut c_ulonglong)
        }?;
        Ok((info[0], info[2]))
    }

    pub fn mode(&self, uuid: &str) -> Result<Mode> {
        let device = self.device(uuid)?;
        let mut mode: c_uint = 0;
        // SAFETY: the enum is an unsigned int; `mode` is live.
        unsafe { call!(self, c"nvmlDeviceGetComputeMode", device => Device, &raw mut mode => *mut c_uint) }?;
        Ok(Mode::of(mode))
    }

    /// PID → bytes, none where NVML does not tell.
    pub fn processes(&self, uuid: &str, list: List) -> Result<BTreeMap<u32, Option<u64>>> {
        let device = self.device(uuid)?;
        // The list may grow between two calls.
        for room in [64_usize, 256, 1024] {
            let empty = RawProcess { pid: 0, used: 0, gpu_instance: 0, compute_instance: 0 };
            let mut raw = vec![empty; room];
            let mut count = room as c_uint;
            // SAFETY: the vector has room for `count`, which says how many are there afterwards.
            let answer = unsafe {
                call!(self, list.symbol(), device => Device,
                    &raw mut count => *mut c_uint, raw.as_mut_ptr() => *mut RawProcess)
            };
            match answer {
                Err(error) if code_of(&error) == Some(INSUFFICIENT_SIZE) => continue,
                answer => answer?,
            }
            let told = |used: u64| (used != UNKNOWN).then_some(used);
            return Ok(raw.iter().take(count as usize).map(|one| (one.pid, told(one.used))).collect());
        }
        bail!("more than 1024 processes on one GPU")
    }

    /// All lists by PID: the largest that any of them says, as the watchdog counts.
    pub fn merged(&self, uuid: &str) -> Result<BTreeMap<u32, u64>> {
        let mut all = BTreeMap::new();
        for list in List::ALL {
            // A list that this driver lacks names nobody.
            for (pid, bytes) in self.processes(uuid, list).unwrap_or_default() {
                let most = all.entry(pid).or_insert(0);
                *most = bytes.unwrap_or(0).max(*most);
            }
        }
        Ok(all)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: no arguments; initialised once in `open`. There is nobody to tell of a failure.
        let _ = unsafe { call!(self, c"nvmlShutdown",) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_put_back_as_it_was() {
        for number in 0..6 {
            assert_eq!(Mode::of(number).number(), number);
        }
        assert_eq!(Mode::of(3).to_string(), "EXCLUSIVE_PROCESS");
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let words = format!("{:#}", Nvml::open(Path::new("/nowhere/libnvidia-ml.so.1")).err().unwrap());
        assert!(words.contains("/nowhere/libnvidia-ml.so.1"), "{words}");
    }
}
