//! The types that all other modules use. No decisions, no effects, nothing from outside.
//!
//! * [`names`]: identifiers of the field (driver, pool, device, claim, GPU) and their laws
//! * [`quantity`]: exact Kubernetes quantities, bytes and MiB
//! * [`named`]: values by name, of which many have most in common
//! * [`gpu`]: GPUs and MIG devices as this node has them
//! * [`mig`]: what a board can be cut into, and what was made of it
//! * [`driver`]: where NVIDIA's driver is installed
//! * [`claim`]: a claim and what was allocated to it
//! * [`plain`]: what a parser says, in the words of those who write YAML
//! * [`process`]: a process of the host, told apart from later ones with its PID
//! * [`time`]: which kind of time is for what; how long to wait after failures
//! * [`selector`]: which GPUs an administrator means
//! * [`share`]: a part of a GPU, its rung of enforcement, and the MPS daemon that serves it
//!
//! May import: nothing of ours. May name: serde, thiserror.

pub mod claim;
pub mod driver;
pub mod gpu;
pub mod mig;
pub mod named;
pub mod names;
pub mod plain;
pub mod process;
pub mod quantity;
pub mod selector;
pub mod share;
pub mod time;

/// FNV-1a, 64 bits: a hash for names, the same in every release. It does not stop anybody from making two inputs with
/// the same hash.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// An error and its sources in one line, outermost first: what people are shown.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
