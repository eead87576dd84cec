//! What is run, by whose bytes it reads. A new parser is a new entry here.
//!
//! * `words`: single words of users and administrators
//! * `claims`: what tenants write into claims, pods and their annotations
//! * `lists`: answers of the API server, as bytes
//! * `selectors`: CEL, as text and as expressions that are well formed and as costly as can be
//! * `controller`: objects of all kinds, one after another, before the controller's core
//! * `machine`: the ledger, /proc, MPS daemons, sockets, files of people
//!
//! Not here is what others' libraries read alone and hand on as fields: kubelet's calls (prost), certificates (rustls),
//! NVML's answers; and files that only the driver itself writes and nobody else can, save the ledger.

mod claims;
mod controller;
mod lists;
mod machine;
mod selectors;
mod words;

use super::driver::Target;

pub fn all() -> Vec<Target> {
    [
        words::targets(),
        claims::targets(),
        lists::targets(),
        selectors::targets(),
        controller::targets(),
        machine::targets(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Inputs to begin with, from text.
fn texts(all: &[&str]) -> Vec<Vec<u8>> {
    all.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// The same, from JSON.
fn jsons(all: &[serde_json::Value]) -> Vec<Vec<u8>> {
    all.iter().map(|value| value.to_string().into_bytes()).collect()
}
