//! The architecture: the modules, what each may import, and which crates each may name.

pub struct Module {
    pub name: &'static str,
    pub layer: u8,
    /// The modules below that this one may import.
    pub imports: &'static [&'static str],
}

const fn module(name: &'static str, layer: u8, imports: &'static [&'static str]) -> Module {
    Module { name, layer, imports }
}

pub const MODULES: &[Module] = &[
    module("model", 0, &[]),
    module("params", 1, &["model"]),
    module("inventory", 1, &["model"]),
    module("slices", 1, &["model", "inventory", "sharing"]),
    module("cdi", 1, &["model"]),
    module("ledger", 1, &["model"]),
    module("sharing", 1, &["model"]),
    module("select", 1, &["model"]),
    module("allocate", 1, &["model", "params", "select"]),
    module("feasible", 1, &["model"]),
    module("conditions", 1, &["model", "ledger"]),
    module("admission", 1, &["model", "params", "select"]),
    module("prepare", 1, &["model", "params", "sharing", "cdi", "ledger"]),
    // The shape of a look, which it fills in.
    module("nvml", 2, &["model", "inventory"]),
    module("kubelet", 2, &["model"]),
    module("cluster", 2, &["model"]),
    module("supervisor", 2, &["model"]),
    module("daemon", 2, &["model"]),
    // The driver's files and device nodes, as data.
    module("host", 2, &["model", "cdi"]),
    module("ops", 3, &[]),
    module("mps", 3, &["model", "daemon", "supervisor", "nvml", "host", "ops"]),
    module("webhook", 3, &["model", "admission", "cluster", "ops"]),
    module(
        "controller",
        3,
        &["model", "params", "select", "allocate", "feasible", "slices", "admission", "cluster", "ops"],
    ),
    module(
        "node",
        3,
        &[
            "model",
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
    module(
        "cli",
        4,
        &[
            "model",
            "params",
            "admission",
            "select",
            "allocate",
            "inventory",
            "slices",
            "cdi",
            "sharing",
            "prepare",
            "ledger",
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
    Modules(&'static [&'static str]),
    /// This layer and those above.
    FromLayer(u8),
}

/// A path from outside (a crate, or a part of std) and the modules that may name it.
pub const OUTSIDE: &[(&str, Where)] = &[
    ("tokio", Where::FromLayer(2)),
    ("tokio_util", Where::FromLayer(2)),
    ("tokio_stream", Where::FromLayer(2)),
    ("futures", Where::FromLayer(2)),
    ("rand", Where::FromLayer(2)),
    ("std::fs", Where::FromLayer(2)),
    ("std::net", Where::FromLayer(2)),
    ("std::process", Where::FromLayer(2)),
    ("std::thread", Where::FromLayer(2)),
    ("std::env", Where::FromLayer(4)),
    ("nix", Where::Modules(&["host", "nvml", "supervisor", "daemon"])),
    ("rustix", Where::Modules(&["host"])),
    ("socket2", Where::Modules(&["supervisor"])),
    ("nvml_wrapper", Where::Modules(&["nvml"])),
    ("nvml_wrapper_sys", Where::Modules(&["nvml"])),
    ("tonic", Where::Modules(&["kubelet"])),
    ("tonic_prost", Where::Modules(&["kubelet"])),
    ("prost", Where::Modules(&["cluster", "kubelet"])),
    ("kube", Where::Modules(&["cluster"])),
    // As data: slices and conditions make them, select, feasible, admission and cli read them, node carries
    // them, cluster writes them.
    (
        "k8s_openapi",
        Where::Modules(&[
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
    ("cel", Where::Modules(&["select"])),
    ("semver", Where::Modules(&["select"])),
    ("json_patch", Where::Modules(&["admission"])),
    ("axum", Where::Modules(&["ops", "webhook"])),
    ("hyper", Where::Modules(&["ops", "webhook"])),
    ("tokio_rustls", Where::Modules(&["webhook"])),
    ("rcgen", Where::Modules(&["webhook"])),
    ("x509_parser", Where::Modules(&["webhook"])),
    ("pem", Where::Modules(&["webhook"])),
    ("prometheus_client", Where::Modules(&["ops", "node", "mps", "controller", "webhook"])),
    ("tracing_subscriber", Where::Modules(&["ops"])),
    ("clap", Where::FromLayer(4)),
    ("anyhow", Where::FromLayer(4)),
];

/// Asking for the time is an effect: layers 0 and 1 are given it.
pub const CLOCKS: &[&str] = &["SystemTime::now", "Instant::now", "Timestamp::now", "Zoned::now"];

pub const FILE_LINES_MAX: usize = 600;

/// A rule that does not hold in one file, and why. One that is no longer needed must go.
pub struct Exception {
    pub path: &'static str,
    pub rule: &'static str,
    pub reason: &'static str,
}

pub const EXCEPTIONS: &[Exception] = &[
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

pub fn find(name: &str) -> Option<&'static Module> {
    MODULES.iter().find(|module| module.name == name)
}
