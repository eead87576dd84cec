//! The house's plan: which rooms there are, what they may import, which crates they may name.

pub struct Room {
    pub name: &'static str,
    pub ring: u8,
    /// Rooms below, and reasons where a wall has a door.
    pub imports: &'static [&'static str],
}

const fn room(name: &'static str, ring: u8, imports: &'static [&'static str]) -> Room {
    Room { name, ring, imports }
}

pub const ROOMS: &[Room] = &[
    room("model", 0, &[]),
    room("params", 1, &["model"]),
    room("inventory", 1, &["model"]),
    room("slices", 1, &["model", "inventory", "sharing"]),
    room("cdi", 1, &["model"]),
    room("ledger", 1, &["model"]),
    room("sharing", 1, &["model"]),
    room("select", 1, &["model"]),
    room("allocate", 1, &["model", "params", "select"]),
    room("feasible", 1, &["model"]),
    room("conditions", 1, &["model", "ledger"]),
    room("admission", 1, &["model", "params", "select"]),
    room("prepare", 1, &["model", "params", "inventory", "sharing", "cdi", "ledger"]),
    // The shape of a look, which it fills in.
    room("nvml", 2, &["model", "inventory"]),
    room("kubelet", 2, &["model"]),
    room("cluster", 2, &["model"]),
    room("supervisor", 2, &["model"]),
    room("daemon", 2, &["model"]),
    // The driver's files and device nodes, as data.
    room("host", 2, &["model", "cdi"]),
    room("ops", 3, &["model"]),
    room("mps", 3, &["model", "daemon", "supervisor", "nvml", "host", "ops"]),
    room("webhook", 3, &["model", "admission", "cluster", "ops"]),
    room(
        "controller",
        3,
        &["model", "params", "select", "allocate", "feasible", "slices", "admission", "cluster", "ops"],
    ),
    room(
        "node",
        3,
        &[
            "model",
            "params",
            "inventory",
            "slices",
            "cdi",
            "sharing",
            "prepare",
            "ledger",
            "conditions",
            "nvml",
            "kubelet",
            "cluster",
            "supervisor",
            "host",
            "ops",
        ],
    ),
    room(
        "cli",
        4,
        &[
            "model",
            "params",
            "select",
            "allocate",
            "feasible",
            "inventory",
            "slices",
            "cdi",
            "sharing",
            "prepare",
            "ledger",
            "conditions",
            "nvml",
            "kubelet",
            "cluster",
            "supervisor",
            "daemon",
            "host",
            "ops",
            "node",
            "mps",
            "webhook",
            "controller",
        ],
    ),
];

/// Where something from outside may be named.
pub enum Where {
    Rooms(&'static [&'static str]),
    /// This ring and those above.
    FromRing(u8),
}

/// A path from outside (a crate, or a part of std) and the rooms that may name it.
pub const OUTSIDE: &[(&str, Where)] = &[
    ("tokio", Where::FromRing(2)),
    ("tokio_util", Where::FromRing(2)),
    ("tokio_stream", Where::FromRing(2)),
    ("futures", Where::FromRing(2)),
    ("rand", Where::FromRing(2)),
    ("std::fs", Where::FromRing(2)),
    ("std::net", Where::FromRing(2)),
    ("std::process", Where::FromRing(2)),
    ("std::thread", Where::FromRing(2)),
    ("std::env", Where::FromRing(4)),
    ("nix", Where::Rooms(&["host", "nvml", "supervisor", "daemon"])),
    ("nvml_wrapper", Where::Rooms(&["nvml"])),
    ("nvml_wrapper_sys", Where::Rooms(&["nvml"])),
    ("tonic", Where::Rooms(&["kubelet"])),
    ("tonic_prost", Where::Rooms(&["kubelet"])),
    ("prost", Where::Rooms(&["cluster", "kubelet"])),
    ("kube", Where::Rooms(&["cluster"])),
    // As data: slices and conditions make them, select, feasible, admission and cli read them, node carries
    // them, cluster writes them.
    (
        "k8s_openapi",
        Where::Rooms(&[
            "cluster",
            "slices",
            "select",
            "feasible",
            "conditions",
            "admission",
            "node",
            "controller",
            "cli",
        ]),
    ),
    ("cel", Where::Rooms(&["select"])),
    ("semver", Where::Rooms(&["select"])),
    ("json_patch", Where::Rooms(&["admission"])),
    ("axum", Where::Rooms(&["ops", "webhook"])),
    ("hyper", Where::Rooms(&["ops", "webhook"])),
    ("tokio_rustls", Where::Rooms(&["webhook"])),
    ("rcgen", Where::Rooms(&["webhook"])),
    ("x509_parser", Where::Rooms(&["webhook"])),
    ("pem", Where::Rooms(&["webhook"])),
    ("prometheus_client", Where::Rooms(&["ops"])),
    ("tracing_subscriber", Where::Rooms(&["ops"])),
    ("clap", Where::FromRing(4)),
    ("anyhow", Where::FromRing(4)),
];

/// Asking for the time is an effect: rings 0 and 1 are given it.
pub const CLOCKS: &[&str] = &["SystemTime::now", "Instant::now", "Timestamp::now", "Zoned::now"];

pub const FILE_LINES_MAX: usize = 600;
pub const FUNCTION_LINES_MAX: usize = 70;

/// A rule that does not hold in one file, and why. One that is no longer needed must go.
pub struct Exception {
    pub path: &'static str,
    pub rule: &'static str,
    pub reason: &'static str,
}

pub const EXCEPTIONS: &[Exception] = &[
    Exception {
        path: "src/node/discovery.rs",
        rule: "spawn",
        reason: "the watch over files may end: it says so, and the timer does without it",
    },
    Exception {
        path: "src/kubelet/serve.rs",
        rule: "spawn",
        reason: "the servers of the two sockets: their handles are kept, watched and joined here",
    },
    Exception {
        path: "hack/fake-nvml/tests/nvml/events.rs",
        rule: "sleep",
        reason: "the event is to come while a thread waits inside NVML, and nothing shows that it does",
    },
    Exception {
        path: "hack/fake-nvml/tests/nvml/faults.rs",
        rule: "sleep",
        reason: "the fast call is to come while a slow one is inside NVML, and nothing shows that it is",
    },
];

pub fn find(name: &str) -> Option<&'static Room> {
    ROOMS.iter().find(|room| room.name == name)
}
