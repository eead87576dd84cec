//! What `tranche rebalance` prints, draws and returns.

use clap::Parser;

use super::super::top::PictureStyle;
use super::super::top::map::{ClaimShare, DeviceRow, FromSlice, HeldAmount, Map, NodeMap};
use super::{RebalanceArgs, RebalanceOutput, RebalanceReport, after, text};
use crate::allocate::{GpuGrant, Placement};
use crate::controller::explain::rebalance::{Help, HelpedUnit};
use crate::controller::moves::{Move, Proposed};
use crate::controller::view::movable::{OwnerKind, PodOwner};
use crate::model::claim::PodRef;
use crate::model::names::PodUid;
use crate::model::quantity::Bytes;
use crate::model::share::Extent;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: RebalanceArgs,
}

fn args(line: &str) -> RebalanceArgs {
    Line::try_parse_from(line.split_whitespace()).unwrap().args
}

fn pod(name: &str) -> PodRef {
    PodRef { namespace: "ml".to_owned(), name: name.to_owned(), uid: PodUid::new(name) }
}

fn place(node: &str, device: &str, mib: u64) -> Placement {
    let memory = Bytes::from_mib(mib);
    let grant =
        GpuGrant { want: 0, device: device.into(), memory, compute: None, slots: 1, extent: Extent::Part };
    Placement { node: node.into(), gpus: vec![grant], cpu_milli: 0, memory: Bytes(0), pods: 1 }
}

fn row(device: &str, claims: Vec<ClaimShare>) -> DeviceRow {
    DeviceRow {
        device: device.to_owned(),
        product: "NVIDIA H100".to_owned(),
        kind: "gpu".to_owned(),
        grantable_mib: Some(80_000),
        cut: None,
        from_slice: FromSlice { possible: false, one_daemon: true },
        held: !claims.is_empty(),
        closed: false,
        taints: Vec::new(),
        claims,
    }
}

fn holder(name: &str, memory_mib: u64) -> ClaimShare {
    let part = HeldAmount::Share { memory_mib, compute: None };
    let (namespace, claim) = ("ml".to_owned(), format!("{name}-gpu-x"));
    ClaimShare { namespace, claim, pods: vec![name.to_owned()], part, used: None }
}

/// `small` keeps `large` off node a; b has room for it, and c has nothing to do with it.
fn report(help: Help) -> RebalanceReport {
    let node = |name: &str, rows| NodeMap { name: name.to_owned(), devices: rows };
    let all = Map {
        nodes: vec![
            node("a", vec![row("gpu-0", vec![holder("small", 10_000)])]),
            node("b", vec![row("gpu-0", vec![holder("other", 40_000)])]),
            node("c", vec![row("gpu-0", Vec::new())]),
        ],
        namespaces: Vec::new(),
        lacks: Vec::new(),
    };
    let waits = vec![HelpedUnit {
        gang: None,
        pods: vec![pod("large")],
        claims: vec![vec!["large".to_owned()]],
        help,
    }];
    let (before, after) = after::maps(&all, &waits);
    RebalanceReport { waits, before, after }
}

fn moves() -> Help {
    let (namespace, name, uid) = ("ml".to_owned(), "small-1".to_owned(), "rs".to_owned());
    let owner = PodOwner { namespace, kind: OwnerKind::ReplicaSet, name, uid };
    let one = Move {
        pod: pod("small"),
        owner,
        from: place("a", "gpu-0", 10_000),
        to: place("b", "gpu-0", 10_000),
        alone: false,
    };
    let then = vec![(PodUid::new("large"), place("a", "gpu-0", 75_000))];
    Help::Moves(Proposed { node: "a".into(), moves: vec![one], then, alone: false, marked: false })
}

#[test]
fn moves_are_told_with_the_gpus_before_and_after() {
    let report = report(moves());
    let shown = text(&report, &args("rebalance"), PictureStyle { width: 82, reverse: false }).unwrap();
    let told = shown.replace('\n', "|");
    for words in [
        "1 pod or gang waits for room; moving 1 pod would make room for 1.|",
        "|pod ml/large|  evict ml/small (10000 MiB of gpu-0, of ReplicaSet small-1); it fits b/gpu-0|",
        "|  then this fits a/gpu-0|",
        "--apply evicts these pods",
    ] {
        assert!(told.contains(words), "{words:?} is missing from\n{shown}");
    }
    let (before, after) = shown.split_once("\nAFTER\n").unwrap();
    let before = before.split_once("\nBEFORE\n").unwrap().1;
    assert!(before.contains("10000 of 80000 MiB") && !before.contains("large"), "{before}");
    assert!(after.contains("75000 of 80000 MiB") && after.contains("50000 of 80000 MiB"), "{after}");
    assert!(after.contains("ml/large") && after.contains("ml/small"), "{after}");
    assert!(!shown.contains("c: 1 device"), "{shown}");
    assert_eq!(report.exit_code(), 3);
    let json = report.json();
    assert_eq!(json["waiting"][0]["proposal"]["moves"][0]["to"]["node"], "b");
    assert_eq!(json["waiting"][0]["help"], "moves");
    assert_eq!(json["after"]["nodes"][0]["devices"][0]["claims"][0]["pods"][0], "large");
    let told = |line: &str| text(&report, &args(line), PictureStyle { width: 82, reverse: false }).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&told("rebalance -o json")).unwrap(), json);
    assert_eq!(serde_saphyr::from_str::<serde_json::Value>(&told("rebalance -o yaml")).unwrap(), json);
}

#[test]
fn where_nothing_is_to_be_moved_the_exit_code_is_0() {
    let look = PictureStyle { width: 82, reverse: false };
    let fits = report(Help::Fits);
    assert_eq!(text(&fits, &args("rebalance"), look).unwrap(), "Nothing waits for room.\n");
    let none = report(Help::None("needs 75000 MiB\u{1b}[2J".to_owned()));
    let shown = text(&none, &args("rebalance"), look).unwrap();
    assert!(shown.contains("waits for room; no moves would help.\n"), "{shown}");
    assert!(
        shown.contains("  pod ml/large: needs 75000 MiB\u{fffd}[2J\n") && !shown.contains("BEFORE"),
        "{shown}"
    );
    assert_eq!((fits.exit_code(), none.exit_code()), (0, 0));
}

#[test]
fn nobody_is_asked_twice_and_yes_is_of_apply() {
    assert!(Line::try_parse_from(["rebalance", "--yes"]).is_err());
    let parsed = args("rebalance --apply --yes -n ml -o json");
    assert!(parsed.apply && parsed.yes && parsed.output == RebalanceOutput::Json);
    assert_eq!(parsed.namespace.as_deref(), Some("ml"));
}
