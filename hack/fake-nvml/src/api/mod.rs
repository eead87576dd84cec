//! The exported functions, by subject.

mod access;
mod accounting;
mod compute_instance;
mod device;
mod events;
mod field;
mod gpm;
mod gpu_instance;
mod handle;
mod health;
mod limits;
mod link;
mod memory;
mod mig_device;
mod process;
mod sensors;
mod system;

/// Each implemented function has the type that the vendor's header gives it:
/// this does not compile otherwise.
#[cfg(test)]
mod signatures {
    use super::{
        access::*, accounting::*, compute_instance::*, device::*, events::*, field::*, gpm::*,
        gpu_instance::*, handle::*, health::*, link::*, memory::*, mig_device::*, process::*, sensors::*,
        system::*,
    };

    #[allow(dead_code)]
    fn are_those_of_the_header(lib: &mut nvml_wrapper_sys::bindings::NvmlLib) {
        include!(concat!(env!("OUT_DIR"), "/signatures.rs"))
    }
}
