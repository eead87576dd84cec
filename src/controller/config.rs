//! What the controller is told at its start. `cli::settings` makes it from flags and environment.

use std::path::PathBuf;
use std::time::Duration;

use crate::admission::ShareClasses;
use crate::allocate::Policy;
use crate::cluster::makers::MakerKind;
use crate::controller::holds::HoldPace;
use crate::controller::queue::Patience;
use crate::ops::addresses::Addresses;

/// How to run the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerSettings {
    /// Of this process: its pod's name.
    pub identity: String,
    /// Of the lease and the holds.
    pub namespace: String,
    pub lease: Leasing,
    /// The Deployment that owns the holds; none: nobody does.
    pub deployment: Option<String>,
    pub kubeconfig: Option<PathBuf>,
    pub ops_address: Addresses,
    /// Mirror the cluster's products for queues that count shares.
    pub mirror: bool,
    /// What makes pods of a template, and may need a ResourceClaimTemplate for it.
    pub makers: Vec<MakerKind>,
    /// The DeviceClasses of claims that KAI's annotations ask for.
    pub share_classes: ShareClasses,
    pub rules: Rules,
}

/// How the one that writes is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leasing {
    pub name: String,
    /// After so long without a sign of life a leader is taken for dead.
    pub duration: Duration,
    pub renew_every: Duration,
}

impl Leasing {
    pub const DURATION: Duration = Duration::from_secs(10);
}

/// The schedulers that are known to put every pod into a PodGroup: Volcano's and KAI's, by their usual names.
pub const GROUPING: [&str; 2] = ["volcano", "kai-scheduler"];

/// What the controller does about room that moves would make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// It does not look for moves.
    Off,
    /// It tells of them.
    #[default]
    Propose,
    /// It moves pods that are marked as movable.
    Auto,
}

/// How it does so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consolidation {
    pub mode: Mode,
    /// Pods that may be moved in an hour.
    pub per_hour: u32,
    /// An owner of which a pod was moved rests so long, and so does a unit for which pods were moved in vain.
    pub rest: Duration,
}

impl Default for Consolidation {
    fn default() -> Self {
        Self { mode: Mode::default(), per_hour: 30, rest: Duration::from_secs(600) }
    }
}

/// How to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub policy: Policy,
    pub holds: HoldPace,
    pub patience: Patience,
    /// Schedulers that put every pod into a PodGroup: nothing is placed for a pod of theirs before its group is known.
    pub grouping_schedulers: Vec<String>,
    /// Parts of products' names, UUIDs, or nodes' names: GPUs that are never held.
    pub never_hold: Vec<String>,
    /// The same: GPUs that are held whenever they are free, and never given back. Those of both are never held.
    pub always_hold: Vec<String>,
    /// Pods of lower priority end for those of higher priority that find no room.
    pub preemption: bool,
    /// What is done about room that moves of others would make.
    pub consolidation: Consolidation,
    /// An allocation that nobody uses is taken back after so long.
    pub unused: Duration,
    /// A pod that the scheduler does not bind to its node is placed elsewhere after so long.
    pub stuck: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            policy: Policy::Pack,
            holds: HoldPace::default(),
            patience: Patience::default(),
            grouping_schedulers: GROUPING.iter().map(|name| (*name).to_owned()).collect(),
            never_hold: Vec::new(),
            always_hold: Vec::new(),
            preemption: true,
            consolidation: Consolidation::default(),
            unused: Duration::from_secs(30),
            stuck: Duration::from_secs(60),
        }
    }
}
