//! What the program asks of its tenants (child processes with a CUDA context) and what they answer: one
//! JSON line each way over stdin and stdout.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Codes of the CUDA driver API that decide something here.
pub const OUT_OF_MEMORY: i32 = 2;
pub const DEVICE_UNAVAILABLE: i32 = 46;
/// No connection, a failed call, a server that is not ready.
pub const MPS_CODES: std::ops::RangeInclusive<i32> = 805..=807;
pub const MPS_MAX_CLIENTS: i32 = 808;
/// No code of CUDA's: the driver does not have the function.
pub const ABSENT: i32 = -1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// `cuInit`, a context on the first device that is seen, the kernels.
    Open,
    /// What the driver says of memory.
    Info,
    /// Takes memory in steps until it is refused, or until `most` bytes are held in this way.
    Grow { way: Allocator, step: u64, most: u64, pause_ms: u64 },
    /// Writes to every 64 KiB of what is held.
    Touch,
    /// Gives all memory back; the pool is trimmed.
    Free,
    /// Sends the chunks' file descriptors to whoever connects to the socket.
    Export { socket: PathBuf },
    /// Receives chunks, maps them and writes to them.
    Import { socket: PathBuf },
    /// Which multiprocessors run the blocks of one launch; each block stays for `ms`.
    Where { blocks: u32, ms: u64 },
    /// Computes for about `ms`.
    Work { ms: u64 },
    /// Launches a kernel that takes `ms` and does not wait for it.
    Spin { ms: u64 },
    /// Waits for everything launched.
    Wait,
    /// Writes to an address that belongs to nobody.
    Stray,
    /// Times launches and small allocations.
    Latency { rounds: u32 },
}

/// How memory is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Allocator {
    /// `cuMemAlloc`
    Linear,
    /// `cuMemAllocManaged`: on the GPU once a kernel writes to it.
    Managed,
    /// `cuMemAllocAsync`: from the device's default pool.
    Stream,
    /// `cuMemAllocFromPoolAsync`: from a pool of its own.
    Pool,
    /// `cuMemCreate` and `cuMemMap`: physical chunks behind reserved addresses.
    Chunks,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Opened(Opened),
    /// Bytes.
    Memory {
        free: u64,
        total: u64,
    },
    Grown {
        bytes: u64,
        steps: u64,
        stop: Stop,
    },
    /// Bytes received and mapped.
    Imported {
        bytes: u64,
        stop: Stop,
    },
    Done,
    /// `%smid` of each block.
    Ran {
        on: Vec<u32>,
    },
    /// Multiply-adds in a second.
    Worked {
        per_second: f64,
    },
    /// Microseconds.
    Took {
        launch: Spread,
        alloc: Spread,
    },
    Failed(Failure),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    pub device: String,
    /// As the driver numbers it, e.g. 13000.
    pub cuda: i32,
    /// That this process may use.
    pub multiprocessors: u32,
    pub free: u64,
    pub total: u64,
    pub open_ms: f64,
}

/// Why growing ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// `most` was reached: there may be more.
    Enough,
    Refused(Failure),
}

impl Stop {
    pub fn words(&self) -> String {
        match self {
            Self::Enough => "no refusal".to_owned(),
            Self::Refused(failure) => failure.to_string(),
        }
    }

    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Refused(failure) if failure.code == OUT_OF_MEMORY)
    }
}

/// A call of the driver API that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub call: String,
    pub code: i32,
    pub name: String,
}

impl Failure {
    pub fn absent(call: &str) -> Self {
        Self { call: call.to_owned(), code: ABSENT, name: "this driver does not have it".to_owned() }
    }

    /// Something of ours that went wrong around the driver.
    pub fn ours(call: &str, words: impl ToString) -> Self {
        Self { call: call.to_owned(), code: ABSENT, name: words.to_string() }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.code {
            ABSENT => write!(f, "{}: {}", self.call, self.name),
            code => write!(f, "{} ({code}) from {}", self.name, self.call),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub p50: f64,
    pub p99: f64,
}

impl Spread {
    /// Nearest rank; not a number without samples.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * samples.len() as f64).ceil() as usize;
            samples.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
        };
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_survives_the_pipe() {
        let grown = Reply::Grown {
            bytes: 1 << 30,
            steps: 64,
            stop: Stop::Refused(Failure {
                call: "cuMemAlloc_v2".to_owned(),
                code: OUT_OF_MEMORY,
                name: "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
            }),
        };
        let line = serde_json::to_string(&grown).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Reply>(&line).unwrap(), grown);
        let ask = Request::Grow { way: Allocator::Chunks, step: 1, most: 2, pause_ms: 0 };
        assert_eq!(serde_json::from_str::<Request>(&serde_json::to_string(&ask).unwrap()).unwrap(), ask);
    }

    #[test]
    fn a_refusal_names_code_and_call() {
        let failure = Failure {
            call: "cuMemAlloc_v2".to_owned(),
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
        };
        assert_eq!(failure.to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2) from cuMemAlloc_v2");
        assert!(Failure::absent("cuMemPoolCreate").to_string().contains("does not have it"));
        assert!(Stop::Refused(failure).is_out_of_memory());
        assert!(!Stop::Enough.is_out_of_memory());
    }

    #[test]
    fn a_spread_is_by_nearest_rank() {
        let spread = Spread::of((1..=100).rev().map(f64::from).collect());
        assert_eq!((spread.p50, spread.p99), (50.0, 99.0));
        assert_eq!(Spread::of(vec![7.0]).p99, 7.0);
        assert!(Spread::of(Vec::new()).p50.is_nan());
    }
}
