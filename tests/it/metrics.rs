//! The metrics that each process serves: names, help texts, labels, and the order of families, as a fresh process has
//! them; what is served only once there is something gets a first value. Dashboards and alerts depend on them: a change
//! here is a change for users, and has a line in CHANGELOG.md.
//! `TRANCHE_WRITE_METRICS=1 cargo test --test it metrics` writes the files anew.

use std::fs;
use std::path::Path;

use tranche::controller::{ControllerMetrics, Room};
use tranche::mps::MpsMetrics;
use tranche::node::NodeMetrics;
use tranche::node::watchdog::{ClaimMetrics, ShareLabels, ShareUse};
use tranche::ops::metrics::{Registry, registry, text};
use tranche::webhook::WebhookMetrics;

const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/metrics");

fn node() -> Registry {
    let mut registry = registry();
    let node = NodeMetrics::register(&mut registry);
    node.device_faults("xid", 0);
    node.ledger_records("ready", 0);
    node.repair("orphan");
    let claims = ClaimMetrics::register(&mut registry);
    let labels = ShareLabels {
        namespace: "team".into(),
        pod: "train-0".into(),
        claim: "train".into(),
        gpu: "GPU-0".into(),
        device: "gpu-0".into(),
    };
    claims.show(vec![(labels, ShareUse { limit: Some(2), used: 1, peak: 1, processes: 1 })]);
    claims.foreign("GPU-0", "gpu-0");
    claims.foreign_termination("GPU-0", "gpu-0");
    registry
}

fn mps() -> Registry {
    let mut registry = registry();
    let _ = MpsMetrics::register(&mut registry);
    registry
}

fn controller() -> Registry {
    let mut registry = registry();
    let controller = ControllerMetrics::register(&mut registry);
    controller.waiting("memory", 0);
    controller.write("hold", "ok");
    controller.gpus.room([("node-a", Room { free: 3, largest: 2, stranded: 1 })].into_iter());
    let _ = WebhookMetrics::register(&mut registry);
    registry
}

fn webhook() -> Registry {
    let mut registry = registry();
    let _ = WebhookMetrics::register(&mut registry);
    registry
}

/// Families in their order; the series of one family have none, so they are sorted. Without the build.
fn served(registry: &Registry) -> String {
    let text = text(registry).unwrap();
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
    for (process, registry) in
        [("node", node()), ("mps", mps()), ("controller", controller()), ("webhook", webhook())]
    {
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
