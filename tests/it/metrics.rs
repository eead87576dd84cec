//! The metrics that each process serves: names, help texts, labels, and the order of families, as a fresh process has
//! them; what is served only once there is something gets a first value. Dashboards and alerts depend on them: a change
//! here is a change for users, and has a line in CHANGELOG.md.
//! `TRANCHE_WRITE_METRICS=1 cargo test --test it metrics` writes the files anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use tranche::controller::{ControllerMetrics, Room, WaitingLabels};
use tranche::mps::MpsMetrics;
use tranche::node::NodeMetrics;
use tranche::node::watchdog::{
    ClaimFigures, ClaimLabels, ClaimMetrics, ClaimRow, DcgmMetrics, GpuFigures, GpuLabels, HoldKind, Rows,
};
use tranche::nvml::DeviceIdentity;
use tranche::ops::metrics::{Registry, plain_text, registry};
use tranche::webhook::WebhookMetrics;

const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/metrics");

fn node() -> (Registry, Registry) {
    let mut registry = registry();
    let node = NodeMetrics::register(&mut registry);
    node.device_faults("xid", 0);
    node.ledger_records("ready", 0);
    node.repair("orphan");
    let (rows, dcgm) = DcgmMetrics::new("node-a".into());
    let claims = ClaimMetrics::register(&mut registry).with_dcgm(rows);
    let labels = ClaimLabels {
        namespace: "team".into(),
        pod: "train-0".into(),
        container: "main".into(),
        claim: "train".into(),
        request: "gpu".into(),
        device: "gpu-0".into(),
        pool: "node-a".into(),
        uuid: "GPU-0".into(),
    };
    let figures = ClaimFigures {
        kind: HoldKind::Share,
        limit: Some(2),
        used: 1,
        peak: 1,
        processes: 1,
        activity: Some(0.5),
        compute_limit: Some(0.25),
    };
    let board = DeviceIdentity { index: Some(0), name: "NVIDIA H100".into(), ..DeviceIdentity::default() };
    let row = ClaimRow { labels, figures, board, board_uuid: "GPU-0".into(), mig: None };
    let gpu = GpuLabels { device: "gpu-0".into(), pool: "node-a".into(), uuid: "GPU-0".into() };
    let figures = GpuFigures {
        memory_total: Some(8),
        memory_reserved: Some(1),
        memory_used: Some(4),
        memory_uncounted: Some(2),
        temperature_celsius: Some(31.0),
        power_watts: Some(70.5),
        sm_clock_hertz: Some(345e6),
        memory_clock_hertz: Some(2619e6),
        activity: Some(0.75),
        shares_activity: Some(0.5),
    };
    claims.show(&Rows { claims: vec![row], gpus: BTreeMap::from([(gpu.clone(), figures)]) });
    claims.foreign(&gpu);
    claims.foreign_termination(&gpu);
    (registry, dcgm)
}

fn mps() -> Registry {
    let mut registry = registry();
    let _ = MpsMetrics::register(&mut registry);
    registry
}

fn controller() -> Registry {
    let mut registry = registry();
    let controller = ControllerMetrics::register(&mut registry);
    controller.waiting.count("memory", 0);
    let waiting = WaitingLabels { namespace: "team".into(), pod: "train-0".into(), reason: "memory" };
    controller.waiting.name([(waiting, 1)].into_iter());
    controller.write("hold", "ok");
    controller.kept.preemption.result("begun", 0);
    controller.kept.preemption.put_off("rate", 0);
    controller.gpus.room([("node-a", Room { free: 3, largest: 2, stranded: 1 })].into_iter());
    let _ = WebhookMetrics::register(&mut registry);
    registry
}

fn webhook() -> Registry {
    let mut registry = registry();
    let _ = WebhookMetrics::register(&mut registry);
    registry
}

/// By process; what the node serves under DCGM's names besides.
fn all() -> [(&'static str, Registry); 5] {
    let (node, dcgm) = node();
    [("node", node), ("dcgm", dcgm), ("mps", mps()), ("controller", controller()), ("webhook", webhook())]
}

/// The names of all families but DCGM's.
pub fn families() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, registry) in all() {
        let text = plain_text(&registry).unwrap();
        let heads = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        names.extend(heads.filter(|name| !name.starts_with(NOT_OURS)).map(str::to_owned));
    }
    names
}

/// Families in their order; the series of one family have none, so they are sorted. Without the build.
fn served(registry: &Registry) -> String {
    let text = plain_text(registry).unwrap();
    let (mut lines, mut series) = (Vec::new(), Vec::new());
    for line in text.lines().filter(|line| !line.starts_with("tranche_build_info")) {
        match line.starts_with('#') {
            true => {
                series.sort_unstable();
                lines.append(&mut series);
                lines.push(line);
            }
            false => series.push(line),
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn names_help_texts_labels_and_order_of_metrics_are_as_users_know_them() {
    let write = std::env::var_os("TRANCHE_WRITE_METRICS").is_some();
    for (process, registry) in all() {
        let (path, now) = (Path::new(FILES).join(format!("{process}.txt")), served(&registry));
        if write {
            fs::create_dir_all(FILES).unwrap();
            fs::write(&path, &now).unwrap();
        }
        let known = fs::read_to_string(&path).unwrap();
        for (at, (now, known)) in now.lines().zip(known.lines()).enumerate() {
            assert_eq!(now, known, "{}:{}", path.display(), at + 1);
        }
        assert_eq!(now.lines().count(), known.lines().count(), "{}", path.display());
    }
}

#[test]
fn units_are_base_units_and_every_type_has_its_suffix() {
    for (process, registry) in all() {
        let text = plain_text(&registry).unwrap();
        let typed = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        for (name, kind) in typed.filter(|_| process != "dcgm") {
            let words: Vec<_> = name.split('_').collect();
            let other_units = ["mib", "mb", "kb", "gib", "ms", "us", "percent", "mhz", "milliwatts"];
            assert!(!words.iter().any(|word| other_units.contains(word)), "{process}: {name}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{process}: {name} is a {kind}");
        }
    }
}

/// Names of series that are DCGM's, and so not by the rules.
const NOT_OURS: &str = "DCGM_FI_";

/// What Prometheus' own tool thinks of the names, types and help texts that each process serves.
#[test]
#[ignore = "needs promtool"]
fn promtool_finds_no_fault_with_what_is_served() {
    let promtool = std::env::var_os("TRANCHE_PROMTOOL").expect("TRANCHE_PROMTOOL names promtool");
    for (process, registry) in all() {
        let text = plain_text(&registry).unwrap();
        let mut checking = Command::new(&promtool)
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        checking.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let done = checking.wait_with_output().unwrap();
        let said =
            String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
        let faults: Vec<_> = said.lines().filter(|line| !line.starts_with(NOT_OURS)).collect();
        assert!(faults.is_empty(), "{process}: {faults:#?}");
        // Status 3: it finds fault with names alone.
        let is_fine = done.status.success() || (process == "dcgm" && done.status.code() == Some(3));
        assert!(is_fine, "{process}: {:?} {said}", done.status);
    }
}
