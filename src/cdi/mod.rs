//! CDI: what a container gets when it uses a claim, as the JSON file that container runtimes read.
//!
//! May import `model` only; external crates: serde, serde_json, thiserror. Pure: what the driver
//! root holds comes in as [`DriverFiles`] (found by `host::driver_root`), the file goes out as text.
//!
//! One file per claim, `k8s.gpu.nvidia.com-claim_<uid>.json`. What every GPU container needs (control
//! nodes, libraries, programs, hooks, `NVIDIA_VISIBLE_DEVICES=void`) stands once at the file's top;
//! each allocated device has an entry with its own nodes, variables and mounts, so that a container
//! which uses one request of a claim gets the devices of that request and no others.
//!
//! # With and without NVIDIA's container toolkit
//! Where the toolkit's hook program is installed, libraries are mounted where they lie in the driver
//! root, and the hook makes the `.so` links and rebuilds the container's linker cache.
//!
//! Without it nothing can be run inside the container, so each library is mounted under the name
//! that programs ask the loader for (`libcuda.so.1`), in both directories that the loaders of common
//! images search by themselves: `/usr/lib/<triplet>` (Debian, Ubuntu) and `/usr/lib64` (RHEL, SUSE).
//! Limits of that mode: a program that reads the linker cache (`ldconfig -p`, as Triton does) does
//! not see the libraries; a library of the same name that the image's own cache lists (CUDA's compat
//! package, a stub) wins over the mounted one; images on musl are not served (the driver needs glibc).
//!
//! Not injected in either mode: /dev/dri nodes, X.org modules, 32-bit libraries, Wine's DLLs.

mod common;
mod driver;
mod names;
mod render;
mod spec;
#[cfg(test)]
mod tests;

pub use driver::{
    Arch, DeviceNode, DeviceNodeState, DeviceNodes, DriverFiles, DriverNode, FileKind, Hook, HookTool,
    HostPath, Library, RootFile, RootFiles,
};
pub use names::{KIND, claim_of, file_name, id};
pub use render::{CdiDevice, CdiError, CdiFile, CdiNodes, Mount, MountAccess, render};
