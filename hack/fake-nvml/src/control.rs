//! `control.json`: what the node is made of, written by tests and operators.
//!
//! It is replaced as a whole (rename), may change at any time, and is read again
//! by every process at its next call. Unknown words are refused, so that a typing
//! mistake does not silently test something else.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The most boards that one node can have.
pub const MAX_GPUS: usize = 16;

/// The whole file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// A board's word: t4, a30, a100-40gb, a100-80gb, h100, h200, b200, rtx-pro-6000, l40s.
    pub profile: String,
    #[serde(default = "one")]
    pub count: usize,
    #[serde(default = "default_driver")]
    pub driver_version: String,
    /// False: as if the kernel module were not loaded.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub driver_loaded: bool,
    /// UUIDs and serial numbers derive from this and the index: give each node its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host_seed: String,
    /// Whether calls that need root are allowed; without it, the effective user decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privileged: Option<bool>,
    /// One line per call to `calls.log`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub log_calls: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<usize, GpuControl>,
    /// By function name, or `*` for all.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub faults: BTreeMap<String, OneOrMany<Fault>>,
    /// Functions that answer FUNCTION_NOT_FOUND.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
}

/// What differs on one board.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GpuControl {
    /// Fallen off the bus: every call about it answers GPU_IS_LOST.
    #[serde(skip_serializing_if = "is_false")]
    pub lost: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// `00000000:3B:00.0`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus_id: Option<String>,
    /// Host NUMA node that the board sits at (memory and CPU affinity).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_numa_node: Option<u32>,
    /// The board's own memory as a NUMA node (coherent platforms only).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node_id: Option<u32>,
    /// none, hmm or ats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addressing_mode: Option<AddressingMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_mib: Option<u64>,
    /// Memory in use that no listed process accounts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accounting: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigControl>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_gpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_memory: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ecc_enabled: Option<bool>,
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    pub remapped_corrected: u32,
    pub remapped_uncorrected: u32,
    #[serde(skip_serializing_if = "is_false")]
    pub remap_pending: bool,
    #[serde(skip_serializing_if = "is_false")]
    pub remap_failed: bool,
    /// Addresses of retired pages (boards that retire pages).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub retired_pages: Vec<u64>,
    #[serde(skip_serializing_if = "is_false")]
    pub retire_pending: bool,
    /// 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset.
    pub recovery_action: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressingMode {
    None,
    Hmm,
    Ats,
}

/// MIG as the operator wants it; set-calls change it until this changes again.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MigControl {
    #[serde(default = "yes")]
    pub enabled: bool,
    #[serde(default)]
    pub instances: Vec<InstanceControl>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceControl {
    /// `1g.10gb`, `1g.10gb+me`, ...
    pub profile: String,
    /// First memory slice; without it, the first that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<u32>,
    /// Slices of each compute instance; without it, one that has all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Vec<u32>>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    pub pid: u32,
    /// Absent: the driver cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    #[serde(default)]
    pub kind: ProcessKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// Listed only while such a process exists on this machine.
    #[serde(default, skip_serializing_if = "is_false")]
    pub only_if_alive: bool,
    /// For memory limits; without it, what /proc says of the pid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Percent of the time in which its kernels run; of an MPS client, told as its server's.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sm_util: u32,
}

/// `mps` is a client of an MPS server: it is in the compute list too. `server` is such a server, which is there alone.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessKind {
    #[default]
    Compute,
    Mps,
    Graphics,
    Server,
}

/// What a call does instead of, before, or after its work.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// A return code's name or number; absent: only the delay.
    #[serde(rename = "return", default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<usize>,
    #[serde(default, skip_serializing_if = "is_zero64")]
    pub delay_ms: u64,
    /// How often, over all processes; absent: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// How many calls go well first, over all processes.
    #[serde(default, skip_serializing_if = "is_zero64")]
    pub after: u64,
    /// The work is done first, if it can be: what follows is late, or told wrongly.
    #[serde(default, skip_serializing_if = "is_false")]
    pub done: bool,
    /// Changed to count anew for an otherwise equal fault.
    #[serde(default, skip_serializing_if = "is_zero64")]
    pub id: u64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub fn as_slice(&self) -> &[T] {
        match self {
            OneOrMany::One(one) => std::slice::from_ref(one),
            OneOrMany::Many(many) => many,
        }
    }
}

/// Something that happened; delivered once to each event set registered before it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Grows from event to event.
    pub seq: u64,
    pub gpu: usize,
    #[serde(default)]
    pub kind: EventKind,
    /// The Xid, for `xid`.
    #[serde(default)]
    pub value: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    #[default]
    Xid,
    EccSingle,
    EccDouble,
    PState,
    Clock,
    MigConfig,
    EccSingleStorm,
    DramRetirement,
    DramRetirementFailure,
    PoisonNonFatal,
    PoisonFatal,
    Unavailable,
    RecoveryAction,
}

impl EventKind {
    /// The bit of `nvmlEventType*`.
    pub fn bit(self) -> u64 {
        match self {
            EventKind::EccSingle => 0x1,
            EventKind::EccDouble => 0x2,
            EventKind::PState => 0x4,
            EventKind::Xid => 0x8,
            EventKind::Clock => 0x10,
            EventKind::MigConfig => 0x100,
            EventKind::EccSingleStorm => 0x200,
            EventKind::DramRetirement => 0x400,
            EventKind::DramRetirementFailure => 0x800,
            EventKind::PoisonNonFatal => 0x1000,
            EventKind::PoisonFatal => 0x2000,
            EventKind::Unavailable => 0x4000,
            EventKind::RecoveryAction => 0x8000,
        }
    }
}

impl Control {
    /// A node of `count` boards and nothing else.
    pub fn new(profile: &str, count: usize) -> Control {
        Control {
            profile: profile.to_owned(),
            count,
            driver_version: default_driver(),
            driver_loaded: true,
            host_seed: String::new(),
            privileged: None,
            log_calls: false,
            gpus: BTreeMap::new(),
            faults: BTreeMap::new(),
            missing: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Reads the text of a control file; the words say what is wrong with it.
    pub fn parse(text: &str) -> Result<Control, String> {
        let control: Control = serde_json::from_str(text).map_err(|e| e.to_string())?;
        control.check()?;
        Ok(control)
    }

    /// Refuses what no node can be.
    pub fn check(&self) -> Result<(), String> {
        if crate::board::find(&self.profile).is_none() {
            return Err(format!("no such profile: {}", self.profile));
        }
        if self.count > MAX_GPUS {
            return Err(format!("count is {}, at most {MAX_GPUS}", self.count));
        }
        if let Some(index) = self.gpus.keys().find(|i| **i >= self.count) {
            return Err(format!("gpus has {index}, but count is {}", self.count));
        }
        for (call, faults) in &self.faults {
            for code in faults.as_slice().iter().filter_map(|f| f.code.as_ref()) {
                if crate::code::parse(code).is_none() {
                    return Err(format!("fault of {call}: no such return code: {code}"));
                }
            }
        }
        Ok(())
    }
}

fn one() -> usize {
    1
}
fn default_driver() -> String {
    crate::driver::DEFAULT.to_owned()
}
fn yes() -> bool {
    true
}
fn is_true(b: &bool) -> bool {
    *b
}
fn is_false(b: &bool) -> bool {
    !*b
}
fn is_zero(n: &u32) -> bool {
    *n == 0
}
fn is_zero64(n: &u64) -> bool {
    *n == 0
}
