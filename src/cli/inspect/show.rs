//! The node's state as tables, and in words what a table cannot say.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cli::state::{DeviceFault, MigModeOn, NodeState, RecordedClaim};
use crate::cli::table::{NONE, listed, or_none, render};
use crate::inventory::Inventory;
use crate::model::gpu::{Device, Gpu, Health, Memory, MigMode, NodeGpus};
use crate::model::names::{DeviceName, DeviceUuid};
use crate::model::share::Isolation;
use crate::sharing::MIG_PARENT;
use crate::slices::Offered;
use crate::supervisor::protocol::{DaemonPhase, DaemonState};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    Usual,
    Wide,
}

/// The node, its devices, then whatever is not as it should be.
pub fn tables(state: &NodeState, width: Width) -> String {
    let mut text = node(state, width);
    let mut notes = notes(state);
    match &state.inventory {
        Inventory::Unknown => {
            notes.insert(0, "The GPUs of this node have not been looked at yet.".to_owned())
        }
        Inventory::Unavailable { reason } => notes.insert(0, format!("No GPUs can be used: {reason}")),
        Inventory::Found(gpus) if gpus.gpus.is_empty() => {
            notes.insert(0, "The driver works, but it lists no GPU on this node.".to_owned());
        }
        Inventory::Found(gpus) => {
            text.push('\n');
            text.push_str(&devices(gpus, state, width));
            text.push_str(&daemons(gpus, &state.mps));
            notes.extend(boards(gpus));
            notes.extend(mig_modes(gpus, &state.mig_modes));
            notes.extend(state.device_faults.iter().map(device_fault));
            notes.extend(only_whole(&state.slices.offered));
            notes.extend(held_but_gone(gpus, &state.claims));
        }
    }
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        text.push_str(&note);
        text.push('\n');
    }
    text
}

fn node(state: &NodeState, width: Width) -> String {
    let driver = match &state.inventory {
        Inventory::Found(gpus) => gpus.driver.clone(),
        _ => Default::default(),
    };
    let ago = state.discovery.last_look_seconds_ago;
    let due = ago.map(|ago| state.discovery.next_look_in_seconds - ago);
    let mut header = vec![
        "NODE",
        "DRIVER",
        "CUDA",
        "KUBELET",
        "PUBLICATION",
        "SLICES",
        "DEVICES",
        "GENERATION",
        "LAST LOOK",
        "NEXT LOOK",
    ];
    let mut row = vec![
        or_none(Some(&state.node.name)),
        or_none(Some(driver.driver)),
        or_none(Some(driver.cuda)),
        or_none(Some(&state.kubelet.registration)),
        or_none(Some(&state.slices.phase)),
        state.slices.slices.to_string(),
        state.slices.devices.to_string(),
        state.slices.generation.to_string(),
        or_none(ago.map(|ago| format!("{} ago", span(ago)))),
        or_none(due.map(|due| if due < 1.0 { "now".to_owned() } else { format!("in {}", span(due)) })),
    ];
    if width == Width::Wide {
        header.push("VERSION");
        row.push(match state.node.version.as_str() {
            "" => NONE.to_owned(),
            version => format!("{version} ({})", state.node.commit),
        });
    }
    render(&header, [row])
}

/// Seconds as kubectl prints ages: `45s`, `10m`, `3h`, `2d`.
pub fn span(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0}s"),
        s if s < 7200.0 => format!("{:.0}m", s / 60.0),
        s if s < 48.0 * 3600.0 => format!("{:.0}h", s / 3600.0),
        s => format!("{:.0}d", s / 86400.0),
    }
}

/// The MPS daemons: what each was told, and what it answers when asked.
pub(super) fn daemons(gpus: &NodeGpus, daemons: &[DaemonState]) -> String {
    if daemons.is_empty() {
        return String::new();
    }
    let name = |uuid: &DeviceUuid| {
        let devices = gpus.devices();
        let found = devices.iter().find(|(_, device)| device.uuid() == uuid);
        found.map_or_else(|| uuid.to_string(), |(name, _)| name.to_string())
    };
    let header =
        ["MPS DAEMON OF", "PHASE", "MEMORY PER CLIENT", "ANSWERS", "THREADS", "ANSWERS", "SERVERS", "DEATHS"];
    let rows = daemons.iter().map(|daemon| {
        let limits = daemon.limits.as_ref();
        let memory = limits.iter().flat_map(|limits| &limits.memory);
        let memory: Vec<String> =
            memory.map(|limit| or_none(limit.map(|l| format!("{} MiB", l.mib_floor())))).collect();
        let phase = match &daemon.phase {
            DaemonPhase::Serving { pid } => format!("Serving ({pid})"),
            DaemonPhase::Settling { pid } => format!("Settling ({pid})"),
            DaemonPhase::Resting { pid } => format!("Resting ({pid})"),
            DaemonPhase::Down { reason } => format!("Down: {reason}"),
        };
        let servers: Vec<String> =
            daemon.servers.iter().map(|server| format!("{} {}", server.pid, server.state)).collect();
        [
            listed(&daemon.group.devices().iter().map(name).collect::<Vec<_>>()),
            phase,
            listed(&memory),
            listed(&daemon.memory_answers),
            or_none(limits.and_then(|limits| limits.compute).map(|percent| percent.to_string())),
            or_none(Some(daemon.compute_answer.as_str())),
            listed(&servers),
            daemon.deaths.to_string(),
        ]
    });
    format!("\n{}", render(&header, rows))
}

fn devices(gpus: &NodeGpus, state: &NodeState, width: Width) -> String {
    let mut header = vec!["DEVICE", "TYPE", "PRODUCT", "PROFILE", "MEMORY"];
    header.extend(OfferCells::HEADER);
    header.extend(["HEALTH", "HELD BY"]);
    if width == Width::Wide {
        header.extend(["UUID", "PCI", "NUMA"]);
    }
    let holders = holders(&state.claims);
    let rows = gpus.gpus.iter().flat_map(Gpu::devices).map(|device| {
        let gpu = device.gpu();
        let held = holders.get(&device.name()).map(Vec::as_slice).unwrap_or_default();
        let mut row = vec![
            device.name().to_string(),
            kind(&device).to_owned(),
            gpu.product_name.clone(),
            or_none(profile(&device)),
            memory(&device),
        ];
        row.extend(OfferCells::of(&device, &state.slices.offered).cells());
        row.extend([health(&gpu.health).to_owned(), listed(held)]);
        if width == Width::Wide {
            let numa = gpu.pci.numa_node.map(|node| node.to_string());
            row.extend([device.uuid().to_string(), or_none(Some(&gpu.pci.bus_id)), or_none(numa)]);
        }
        row
    });
    render(&header, rows)
}

/// `gpu`, `mig` or `mig-parent`, as the published attribute `type` has it.
pub fn kind(device: &Device<'_>) -> &'static str {
    match device {
        Device::Whole(_) => "gpu",
        Device::Mig { .. } | Device::Place { .. } => "mig",
        Device::Parent(_) => MIG_PARENT,
    }
}

/// A MIG device's profile.
pub fn profile(device: &Device<'_>) -> Option<String> {
    match device {
        Device::Whole(_) | Device::Parent(_) => None,
        Device::Mig { mig, .. } => Some(mig.profile.clone()),
        Device::Place { place, .. } => Some(place.profile.clone()),
    }
}

/// What is offered of a device, as it stands in a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct OfferCells {
    /// For all shares together.
    pub shareable: Option<String>,
    /// Blocks of client slots, and processes in each.
    pub slots: Option<String>,
    pub isolation: Option<&'static str>,
}

impl OfferCells {
    pub const HEADER: [&'static str; 3] = ["SHAREABLE", "SLOTS", "ISOLATION"];

    /// `offered` is by board.
    pub fn of(device: &Device<'_>, offered: &BTreeMap<DeviceName, Offered>) -> Self {
        let alone = |isolation: Option<Isolation>| Self {
            shareable: None,
            slots: None,
            isolation: isolation.map(Isolation::as_str),
        };
        match (device, offered.get(&device.name())) {
            (Device::Mig { .. } | Device::Place { .. } | Device::Parent(_), _) => alone(Some(Isolation::Mig)),
            (Device::Whole(gpu), None) if gpu.is_whole_or_cut() => alone(Some(Isolation::Mig)),
            (Device::Whole(_), None) => alone(None),
            (Device::Whole(_), Some(Offered::Whole { .. })) => alone(Some(Isolation::None)),
            (
                Device::Whole(_),
                Some(
                    Offered::Shares { memory, slots, processes_per_slot, isolation }
                    | Offered::ControllerShares { memory, slots, processes_per_slot, isolation, .. },
                ),
            ) => Self {
                shareable: Some(memory.to_quantity_string()),
                slots: Some(format!("{slots}x{processes_per_slot}")),
                isolation: Some(isolation.as_str()),
            },
        }
    }

    pub fn cells(&self) -> [String; 3] {
        let isolation = self.isolation.map(str::to_owned);
        [self.shareable.clone(), self.slots.clone(), isolation].map(or_none)
    }
}

/// Why boards are given whole only, if not by everybody then by the scheduler: a line for each reason.
pub fn only_whole(offered: &BTreeMap<DeviceName, Offered>) -> Vec<String> {
    let mut by_reason = BTreeMap::<(&str, &str), Vec<&str>>::new();
    for (device, how) in offered {
        let reason = match how {
            Offered::Shares { .. } => continue,
            Offered::ControllerShares { because, .. } => {
                ("Only shared by class shared.gpu.nvidia.com", because.as_str())
            }
            Offered::Whole { because } => ("Only given whole", because.as_str()),
        };
        by_reason.entry(reason).or_default().push(device.as_str());
    }
    let line = |((what, because), devices): ((&str, &str), Vec<&str>)| {
        format!("{what}: {}: {because}.", devices.join(", "))
    };
    by_reason.into_iter().map(line).collect()
}

fn memory(device: &Device<'_>) -> String {
    match device {
        Device::Mig { mig, .. } => mig.capacity.memory.to_quantity_string(),
        Device::Place { place, .. } => place.capacity.memory.to_quantity_string(),
        Device::Whole(gpu) | Device::Parent(gpu) => match gpu.memory {
            Memory::Known { total, .. } => total.to_quantity_string(),
            Memory::Unknown => "unknown".to_owned(),
        },
    }
}

fn health(health: &Health) -> &'static str {
    match health {
        Health::Healthy => "Healthy",
        Health::Changing(_) => "Changing",
        Health::Unhealthy(_) => "Unhealthy",
        Health::Lost(_) => "Lost",
    }
}

/// `namespace/claim (Whole)` by device; with the phase where a claim is not ready.
fn holders(claims: &[RecordedClaim]) -> BTreeMap<DeviceName, Vec<String>> {
    let mut by_device = BTreeMap::<_, Vec<_>>::new();
    for holder in claims {
        let claim = &holder.intent.claim;
        let phase = match holder.phase.as_str() {
            "Ready" => String::new(),
            other => format!(", {other}"),
        };
        for held in &holder.intent.devices {
            let words = format!("{}/{} ({}{phase})", claim.namespace, claim.name, held.mode);
            by_device.entry(held.answer.device.clone()).or_default().push(words);
        }
    }
    by_device
}

/// What is wrong with the parts of the plugin.
fn notes(state: &NodeState) -> Vec<String> {
    let mut notes = Vec::new();
    match (state.kubelet.registration.as_str(), &state.kubelet.reason) {
        ("Refused", reason) => {
            notes.push(format!("Kubelet refused the plugin: {}", or_none(reason.as_deref())));
        }
        ("NotYet", _) => notes.push("Kubelet has not registered the plugin yet.".to_owned()),
        _ => {}
    }
    let looks = &state.discovery;
    if let Some(error) = &looks.last_error {
        notes.push(format!("The last look failed ({} in a row): {error}", looks.failures_in_a_row));
    }
    notes.extend(looks.left_out.iter().map(|words| format!("Left out: {words}")));
    if looks.stuck_threads > 0 {
        notes.push(format!("{} threads hang in calls into the NVIDIA driver.", looks.stuck_threads));
    }
    if state.slices.phase == "WaitingForLock" {
        notes.push("Another instance publishes; this one takes over when it ends.".to_owned());
    }
    if let Some(error) = &state.slices.error {
        notes.push(format!("The ResourceSlices cannot be written, which is tried again: {error}"));
    }
    if let Some(dropped) = &state.slices.dropped {
        notes.push(format!("This API server does not keep {dropped}"));
    }
    notes.extend(state.toolkit.missing.as_ref().map(|words| format!("{words}.")));
    notes
}

/// `gpu-3 (NoNewPods since 2026-01-01T00:00:00Z): Xid 48: …`
fn device_fault(device_fault: &DeviceFault) -> String {
    let devices: Vec<_> = device_fault.devices.iter().map(DeviceName::as_str).collect();
    let since = jiff::Timestamp::from_second(device_fault.since).map(|at| at.to_string()).unwrap_or_default();
    format!("{} ({} since {since}): {}.", listed(&devices), device_fault.effect, device_fault.words)
}

/// What is to be said of boards.
fn boards(gpus: &NodeGpus) -> Vec<String> {
    let mut notes = Vec::new();
    for gpu in &gpus.gpus {
        let (minor, product) = (gpu.minor, &gpu.product_name);
        if let Some(reason) = gpu.health.problem() {
            notes.push(format!("GPU {minor} ({product}) is unhealthy: {reason}"));
        }
        if let Health::Changing(why) = &gpu.health {
            notes.push(format!("GPU {minor} ({product}) takes no new claims: {why}."));
        }
        notes.extend(gpu.missing().iter().map(|one| format!("GPU {minor} ({product}): {}.", one.words())));
        if matches!(&gpu.mig, MigMode::On(devices) if devices.is_empty()) {
            notes.push(format!(
                "GPU {minor} ({product}) is in MIG mode without MIG devices, so no part of it can be used: \
                 create MIG devices or turn MIG off."
            ));
        }
    }
    notes
}

/// How GPUs are used now that are given whole or cut.
fn mig_modes(gpus: &NodeGpus, on: &[MigModeOn]) -> Vec<String> {
    let at = |seconds: u64| {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        jiff::Timestamp::from_second(seconds).map(|at| at.to_string()).unwrap_or_default()
    };
    let words = |gpu: &Gpu| {
        let (minor, product) = (gpu.minor, &gpu.product_name);
        let begin = format!("GPU {minor} ({product}) is given whole, or cut into MIG devices");
        match on.iter().find(|one| one.gpu == gpu.uuid) {
            None => format!("{begin}: MIG mode is off."),
            Some(MigModeOn { since, off_at: None, .. }) => {
                format!("{begin}: cut, MIG mode on for claims since {}.", at(*since))
            }
            Some(MigModeOn { off_at: Some(off), .. }) => {
                format!("{begin}: idle, MIG mode on until {}, or until a claim gets the whole GPU.", at(*off))
            }
        }
    };
    gpus.gpus.iter().filter(|gpu| gpu.is_whole_or_cut()).map(words).collect()
}

/// Devices that claims hold and that the node does not have (any more).
fn held_but_gone(gpus: &NodeGpus, claims: &[RecordedClaim]) -> Vec<String> {
    let present = gpus.devices();
    let gone = |(device, holders): (&DeviceName, &Vec<String>)| {
        let here = present.contains_key(device);
        (!here).then(|| format!("{device} is held by {}, but this node does not have it.", listed(holders)))
    };
    holders(claims).iter().filter_map(gone).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(parts: serde_json::Value, width: Width) -> String {
        tables(&serde_json::from_value(parts).unwrap(), width)
    }

    fn gpu(minor: u32, mig: serde_json::Value, health: serde_json::Value) -> serde_json::Value {
        json!({
            "uuid": format!("GPU-{minor}"), "minor": minor, "product_name": "NVIDIA H100", "brand": "Nvidia",
            "architecture": "Hopper", "compute_capability": [9, 0],
            "memory": {"Known": {"total": 85_520_809_984_u64, "reserved": 0}},
            "multiprocessors": 132, "addressing_mode": null,
            "pci": {"bus_id": "0000:1a:00.0", "root": "pci0000:15", "numa_node": 1},
            "mig": mig, "health": health,
        })
    }

    fn working() -> serde_json::Value {
        let mig = json!({"On": [{
            "uuid": "MIG-a", "profile": "1g.10gb", "gpu_instance": 7, "compute_instance": 0, "profile_id": 19,
            "placement": {"start": 0, "size": 1},
            "capacity": {"memory": 10_737_418_240_u64, "multiprocessors": 16, "copy_engines": 1, "decoders": 1,
                         "encoders": 0, "jpeg_engines": 1, "ofa_engines": 0},
        }]});
        json!({
            "node": {"name": "node-a", "version": "0.1.0", "commit": "abc"},
            "inventory": {"Found": {
                "driver": {"driver": "550.163.01", "cuda": "12.4"},
                "gpus": [gpu(0, json!("Off"), json!("Healthy")), gpu(1, mig, json!("Healthy"))],
            }},
            "discovery": {"lastLookSecondsAgo": 12.2, "nextLookInSeconds": 60.0},
            "slices": {"phase": "Published", "generation": 3, "slices": 1, "devices": 2, "offered": {
                "gpu-0": {"shares": {"memory": 84_983_939_072_u64, "slots": 16, "processesPerSlot": 3, "isolation": "mps"}},
            }},
            "kubelet": {"registration": "Registered"},
            "claims": [{"phase": "Ready", "intent": {
                "claim": {"namespace": "team", "name": "train", "uid": "u1"}, "boot": "b", "steps": [],
                "devices": [{"answer": {"requests": ["gpu"], "pool": "node-a", "device": "gpu-0", "cdi_ids": [],
                                        "share_id": null},
                             "uuid": "GPU-0", "gpu": "GPU-0", "mode": "Whole"}],
            }}],
        })
    }

    #[test]
    fn a_working_node_is_two_tables() {
        let expected = "\
NODE     DRIVER       CUDA   KUBELET      PUBLICATION   SLICES   DEVICES   GENERATION   LAST LOOK   NEXT LOOK
node-a   550.163.01   12.4   Registered   Published     1        2         3            12s ago     in 48s

DEVICE                  TYPE   PRODUCT       PROFILE   MEMORY    SHAREABLE   SLOTS    ISOLATION   HEALTH    HELD BY
gpu-0                   gpu    NVIDIA H100   <none>    81559Mi   81047Mi     16x3     mps         Healthy   team/train (Whole)
gpu-1-mig-1g10gb-19-0   mig    NVIDIA H100   1g.10gb   10Gi      <none>      <none>   mig         Healthy   <none>
";
        assert_eq!(shown(working(), Width::Usual), expected);
    }

    #[test]
    fn mps_daemons_show_what_they_were_told_and_what_they_answer() {
        let mut state = working();
        state["mps"] = json!([
            {"group": ["GPU-0"], "exclusive": true, "phase": {"Serving": {"pid": 71}},
             "limits": {"memory": [10_737_418_240_u64], "compute": 25}, "memory_answers": ["10G"],
             "compute_answer": "25.0", "deaths": 1, "servers": [{"pid": 90, "state": "ACTIVE"}]},
            {"group": ["GPU-7"], "exclusive": true, "phase": {"Down": {"reason": "it ended"}},
             "limits": {"memory": [null], "compute": null}, "memory_answers": [], "compute_answer": "",
             "deaths": 0, "servers": []},
        ]);
        let text = shown(state, Width::Usual);
        let row = |of: &str, has: &str| {
            let row = text.lines().find(|line| line.starts_with(of) && line.contains(has));
            row.unwrap_or_else(|| panic!("no row of {of} with {has} in\n{text}")).to_owned()
        };
        let serving = row("gpu-0", "Serving");
        let cells: Vec<&str> = serving.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        assert_eq!(cells, ["gpu-0", "Serving (71)", "10240 MiB", "10G", "25 %", "25.0", "90 ACTIVE", "1"]);
        row("GPU-7", "Down: it ended");
    }

    #[test]
    fn wide_adds_what_identifies_a_device() {
        let text = shown(working(), Width::Wide);
        assert!(text.contains("UUID    PCI            NUMA\n"), "{text}");
        assert!(text.contains("GPU-0   0000:1a:00.0   1\n"), "{text}");
        assert!(text.contains("0.1.0 (abc)"), "{text}");
    }

    #[test]
    fn what_is_wrong_stands_below_in_words() {
        let mut state = working();
        let broken = json!({"Unhealthy": "fell off the bus"});
        state["inventory"]["Found"]["gpus"] = json!([gpu(3, json!({"On": []}), broken)]);
        state["claims"][0]["phase"] = json!("Releasing");
        state["ailments"] = json!([{"devices": ["gpu-3"], "kind": "xid", "effect": "NoNewPods", "since": 1_767_225_600,
                                    "words": "Xid 48: memory has an uncorrectable error"}]);
        state["kubelet"] = json!({"registration": "Refused", "reason": "another driver has the name"});
        state["slices"]["error"] = json!("forbidden");
        state["toolkit"] = json!({"missing": "/opt/toolkit has neither"});
        let whole = json!({"whole": {"because": "it is in MIG mode"}});
        state["slices"]["offered"] = json!({"gpu-3": whole, "gpu-4": whole});
        state["slices"]["dropped"] = json!("spec.devices[].allowMultipleAllocations");
        state["discovery"]["lastError"] = json!("NVML is gone");
        state["discovery"]["failuresInARow"] = json!(2);
        let text = shown(state, Width::Usual);
        for part in [
            "Kubelet refused the plugin: another driver has the name\n",
            "The last look failed (2 in a row): NVML is gone\n",
            "cannot be written, which is tried again: forbidden\n",
            "/opt/toolkit has neither.\n",
            "gpu-3 (NoNewPods since 2026-01-01T00:00:00Z): Xid 48: memory has an uncorrectable error.\n",
            "does not keep spec.devices[].allowMultipleAllocations\n",
            "Only given whole: gpu-3, gpu-4: it is in MIG mode.\n",
            "GPU 3 (NVIDIA H100) is unhealthy: fell off the bus\n",
            "GPU 3 (NVIDIA H100) is in MIG mode without MIG devices",
            "gpu-0 is held by team/train (Whole, Releasing), but this node does not have it.\n",
        ] {
            assert!(text.contains(part), "{part} is missing from\n{text}");
        }
    }

    #[test]
    fn a_node_without_gpus_says_why() {
        for (inventory, words) in [
            (json!("Unknown"), "have not been looked at yet"),
            (
                json!({"Unavailable": {"reason": "libnvidia-ml.so.1 was not found"}}),
                "No GPUs can be used: libnvidia",
            ),
            (
                json!({"Found": {"driver": {"driver": "550.163.01", "cuda": "12.4"}, "gpus": []}}),
                "lists no GPU",
            ),
        ] {
            let text = shown(json!({"node": {"name": "node-a"}, "inventory": inventory}), Width::Usual);
            assert!(text.contains(words) && !text.contains("DEVICE "), "{text}");
        }
    }

    #[test]
    fn spans_are_short() {
        assert_eq!([0.4, 119.0, 120.0, 7200.0, 200_000.0].map(span), ["0s", "119s", "2m", "2h", "2d"]);
    }
}
