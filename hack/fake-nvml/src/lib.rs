//! A `libnvidia-ml.so.1` for machines without a GPU.
//!
//! Loaded through the same door as the real one. The node that it tells of is
//! described in a directory (`/run/fake-nvml`, or `FAKE_NVML_DIR`):
//!
//! * `control.json` ([`control`]) says what the node is made of and what goes
//!   wrong; it may change at any time;
//! * `state.json` ([`state`]) keeps what set-calls changed, for all processes;
//! * `calls.log` gets one line per call when asked for.
//!
//! [`board`] holds what real boards answer, [`mig`] the model of their slices,
//! [`node`] puts it together for one call, [`call`] is the way in, and `api` has
//! the exported functions by subject. Exported names that `api` lacks are stubs
//! that answer NOT_SUPPORTED, made by build.rs from `names.txt`. This file
//! exports the names of all driver versions; the copy that a node gets has those
//! of one ([`driver`]). [`carried`] is how a program knows its node in a container.

pub mod abi;
pub mod board;
pub mod call;
pub mod carried;
pub mod code;
pub mod control;
pub mod driver;
pub mod identity;
pub mod mig;
pub mod node;
pub mod session;
pub mod state;
pub mod strip;
pub mod watch;

#[allow(non_snake_case)]
mod api;

/// The exported functions that nothing here implements.
#[allow(non_snake_case)]
mod stubs {
    use nvml_wrapper_sys::bindings::nvmlReturn_t;
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
