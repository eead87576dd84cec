//! What a user of NVML sees of the fake, through the client library that the
//! product uses. Each test loads its own copy of the library, with its own node
//! beside it, so that they can run side by side.

mod events;
mod faults;
mod inventory;
mod limits;
mod mig;
mod processes;
mod python;
mod rig;
mod shared;
mod smi;
mod symbols;
mod versions;
