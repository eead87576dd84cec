//! Who moves and ends, and what room is kept, where namespaces have bounds: nobody for a place that the waiting pod's
//! namespace may not have, and nobody whose own namespace would not get the share again.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceRequest;
use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge, object};
use super::explain::listed;
use super::moving::{self, fragmented, mark, proposed, put_in};
use super::preempting::{self, evicted};
use super::preempting_limits::ends_in;
use super::scenes::{LONG, SECOND, rules};
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::{Consolidation, Mode, Rules};
use crate::controller::explain::rebalance::{Help, rebalance};
use crate::controller::moves::Proposed;
use crate::model::names::{DRIVER, MAX_SHARE_GPUS, MAX_SHARE_MEMORY, NodeName};
use crate::model::quantity::Bytes;

const OTHER: &str = "other";

fn memory(most: &str) -> Value {
    json!({MAX_SHARE_MEMORY: most})
}

/// Nodes with one GPU of so many GiB each.
fn of_sizes(mode: Mode, nodes: &[(&str, u32)]) -> Cluster {
    let consolidation = Consolidation { mode, ..Consolidation::default() };
    let mut cluster = Cluster::new(Rules { consolidation, ..rules() });
    for (node, gib) in nodes {
        let mut gpu = device(node, 0, true);
        merge(
            &mut gpu,
            &json!({"attributes": {"grantableMemoryMiB": {"int": gib * 1024}},
                "capacity": {"memory": {"value": format!("{gib}Gi")}}}),
        );
        cluster.put_node_object(node, json!({}));
        cluster.put_slice(node, vec![gpu]);
    }
    cluster.settle(SECOND);
    cluster
}

/// A pod that may run on these nodes alone.
fn on(nodes: &[&str]) -> Value {
    let field =
        |node: &&str| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]});
    let terms: Vec<Value> = nodes.iter().map(field).collect();
    json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": terms}}}}})
}

fn with_priority(priority: i32, mut more: Value) -> Value {
    merge(&mut more, &json!({"spec": {"priority": priority}}));
    more
}

fn share(part: &Value) -> Value {
    let mut share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    merge(&mut share, part);
    json!({"driver": DRIVER, "parameters": share})
}

/// A pod of a ReplicaSet, with a claim of its own that asks for one of these: a part of a GPU, and the node whose GPU it may
/// be of.
fn put_either(cluster: &mut Cluster, at: (&str, &str), ways: &[(Value, Option<&str>)], more: Value) {
    put_in(cluster, at, ("1Gi", 1), &format!("rs-{}", at.1), more);
    let mut claim = cluster.claims[&(at.0.to_owned(), at.1.to_owned())].clone();
    let sub = |(nth, (_, node)): (usize, &(Value, Option<&str>))| {
        let text = |node: &&str| format!("device.attributes['gpu.nvidia.com'].uuid == 'GPU-{node}-0'");
        let selectors: Vec<Value> =
            node.iter().map(|node| json!({"cel": {"expression": text(node)}})).collect();
        json!({"name": format!("s{nth}"), "deviceClassName": "shared.gpu.nvidia.com", "selectors": selectors})
    };
    let subs: Vec<Value> = ways.iter().enumerate().map(sub).collect();
    let request: DeviceRequest = object(json!({"name": "gpu", "firstAvailable": subs}));
    let config = ways
        .iter()
        .enumerate()
        .map(|(nth, (part, _))| object(json!({"requests": [format!("gpu/s{nth}")], "opaque": share(part)})));
    let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
    devices.config = Some(config.collect());
    devices.requests = Some(vec![request]);
    cluster.store(claim);
    cluster.settle(5 * SECOND);
}

fn put_fraction(cluster: &mut Cluster, at: (&str, &str), fraction: &str, more: Value) {
    put_either(cluster, at, &[(json!({"fraction": fraction, "compute": 10}), None)], more);
}

/// One that runs.
fn put_bound(cluster: &mut Cluster, (namespace, name): (&str, &str), memory: &str, more: Value) {
    put_in(cluster, (namespace, name), (memory, 1), &format!("rs-{name}"), more);
    moving::bind(cluster, namespace, name);
}

/// It has ended, and its claim goes with it.
fn drop_pod(cluster: &mut Cluster, (namespace, name): (&str, &str)) {
    let at = (namespace.to_owned(), name.to_owned());
    let pod = cluster.pods.remove(&at).unwrap();
    cluster.feed.push_back(Change::Pod(WatchEvent::Deleted(Box::new(pod.metadata))));
    let mut claim = cluster.claims[&at].clone();
    claim.status.iter_mut().for_each(|status| status.reserved_for = None);
    cluster.store(claim);
    cluster.drop_claim(&at);
}

/// A pod that is bound may move to any node.
fn free(cluster: &mut Cluster, (namespace, name): (&str, &str)) {
    let mut pod = cluster.pods[&(namespace.to_owned(), name.to_owned())].clone();
    pod.spec.as_mut().unwrap().affinity = None;
    cluster.store_pod(pod);
    cluster.settle(SECOND);
}

fn is_placed(cluster: &Cluster, (namespace, name): (&str, &str)) -> bool {
    let claim = &cluster.claims[&(namespace.to_owned(), name.to_owned())];
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

fn words(cluster: &Cluster, claim: &str) -> String {
    let annotations = cluster.claim(claim).metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

fn movers(found: Option<Proposed>) -> Vec<String> {
    found.into_iter().flat_map(|found| found.moves).map(|one| one.pod.name).collect()
}

/// The pod that would be made in place of one that moves would wait at its own namespace's bound.
#[test]
fn nobody_moves_whose_namespace_may_not_have_the_share_anew() {
    let gpus = |most: &str| json!({MAX_SHARE_GPUS: most});
    for (bound, mover) in [
        (json!({}), "small"),
        (memory("10Gi"), "small"),
        (memory("9Gi"), "half"),
        (memory("much"), "half"),
        (gpus("1"), "small"),
        (gpus("0"), "half"),
    ] {
        let mut cluster = fragmented(Mode::Propose, (OTHER, json!({})));
        cluster.annotate(OTHER, bound.clone());
        moving::put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(5 * SECOND);
        assert_eq!(movers(proposed(&mut cluster)), [mover], "{bound}");
    }
}

/// Where it would go its fraction would be of a larger GPU. Another pod may move in place of it.
#[test]
fn nobody_moves_to_a_gpu_of_which_the_fraction_is_more_than_the_bound() {
    for (most, moved) in [("39Gi", "larger"), ("40Gi", "half")] {
        let mut cluster = of_sizes(Mode::Propose, &[("big", 80), ("small-1", 20), ("small-2", 20)]);
        put_fraction(&mut cluster, (OTHER, "half"), "0.5", on(&["small-1"]));
        moving::bind(&mut cluster, OTHER, "half");
        put_bound(&mut cluster, ("third", "larger"), "12Gi", on(&["small-2"]));
        free(&mut cluster, (OTHER, "half"));
        free(&mut cluster, ("third", "larger"));
        cluster.annotate(OTHER, memory(most));
        moving::put(&mut cluster, "waits", "15Gi", "rs-waits", on(&["small-1", "small-2"]));
        cluster.settle(5 * SECOND);
        assert_eq!(movers(proposed(&mut cluster)), [moved], "{most}");
    }
}

/// It has its second alternative, since its namespace may not have the first, and would have that again.
#[test]
fn a_pod_with_the_alternative_that_its_bound_allows_may_move() {
    let mut cluster = of_sizes(Mode::Propose, &[("a", 80), ("b", 80)]);
    cluster.annotate(OTHER, memory("60Gi"));
    put_bound(&mut cluster, (OTHER, "first"), "40Gi", on(&["b"]));
    let ways = [(json!({"memory": "40Gi"}), None), (json!({"memory": "20Gi"}), None)];
    put_either(&mut cluster, (OTHER, "second"), &ways, on(&["a"]));
    moving::bind(&mut cluster, OTHER, "second");
    free(&mut cluster, (OTHER, "second"));
    moving::put(&mut cluster, "waits", "70Gi", "rs-waits", on(&["a"]));
    cluster.settle(5 * SECOND);
    assert_eq!(movers(proposed(&mut cluster)), ["second"]);
}

#[test]
fn nobody_moves_for_a_place_that_is_over_the_bound() {
    for (most, is_found) in [("70Gi", false), ("80Gi", true)] {
        let mut cluster = fragmented(Mode::Propose, ("ml", json!({})));
        cluster.annotate(OTHER, memory(most));
        put_fraction(&mut cluster, (OTHER, "waits"), "0.9", json!({}));
        let found = proposed(&mut cluster);
        assert_eq!(found.is_some(), is_found, "{most}: {found:?}");
    }
}

/// What was found is not begun when the namespace has more by then.
#[test]
fn nobody_moves_for_who_has_come_to_its_bound_since() {
    for (late, moved) in [("1Gi", 1), ("2Gi", 0)] {
        let mut cluster = fragmented(Mode::Auto, (OTHER, mark("true")));
        // 190 GiB are used.
        cluster.annotate("ml", memory("266Gi"));
        moving::put(&mut cluster, "big", "75Gi", "rs-big", json!({}));
        cluster.settle(5 * SECOND);
        assert!(cluster.core.reserves.evictions.moves.counts().evictions == 0, "not yet");
        moving::put(&mut cluster, "late", late, "rs-late", json!({}));
        cluster.settle(SECOND);
        assert!(is_placed(&cluster, ("ml", "late")));
        cluster.settle(LONG);
        assert_eq!(cluster.core.reserves.evictions.moves.counts().evictions, moved, "{late}");
    }
}

/// Rebalance helps the first of two that wait; the second as well, or these words say why not.
fn assert_second_is_helped(cluster: &mut Cluster, is_helped: bool, why_not: &str) {
    let (mut core, listing) = listed(cluster);
    let helps: Vec<Help> = rebalance(&mut core, &listing, None).into_iter().map(|one| one.help).collect();
    let [Help::Moves(_), second] = &helps[..] else { panic!("{helps:?}") };
    match second {
        Help::Moves(_) => assert!(is_helped, "{why_not}"),
        Help::None(words) => assert!(!is_helped && words.contains(why_not), "{words}"),
        other => panic!("{other:?}"),
    }
}

/// The second would have both together, which is told, and nobody is to be evicted for it.
#[test]
fn rebalance_counts_what_it_has_shown_already() {
    for (most, is_helped) in [("29Gi", false), ("30Gi", true)] {
        let mut cluster = of_sizes(Mode::Propose, &[("big", 80), ("small-1", 20), ("small-2", 20)]);
        for (name, node) in [("a", "small-1"), ("b", "small-2")] {
            put_bound(&mut cluster, (OTHER, name), "12Gi", on(&[node]));
            free(&mut cluster, (OTHER, name));
        }
        cluster.annotate("ml", memory(most));
        for (name, node) in [("first", "small-1"), ("second", "small-2")] {
            moving::put(&mut cluster, name, "15Gi", "rs-waits", on(&[node]));
            cluster.settle(SECOND);
        }
        assert_second_is_helped(&mut cluster, is_helped, "15360 are used");
    }
}

/// The first pod has a claim already; what it still waits for comes to that.
#[test]
fn rebalance_adds_what_it_has_shown_to_what_the_pod_has() {
    for (most, is_helped) in [("31Gi", false), ("32Gi", true)] {
        let mut cluster = of_sizes(Mode::Propose, &[("big", 80), ("small-1", 20), ("small-2", 20)]);
        put_bound(&mut cluster, ("ml", "common"), "2Gi", on(&["small-1"]));
        for (name, node) in [("a", "small-1"), ("b", "small-2")] {
            put_bound(&mut cluster, (OTHER, name), "12Gi", on(&[node]));
            free(&mut cluster, (OTHER, name));
        }
        cluster.annotate("ml", memory(most));
        let mut both = on(&["small-1"]);
        merge(
            &mut both,
            &json!({"spec": {"resourceClaims": [
                {"name": "common", "resourceClaimName": "common"}, {"name": "gpu", "resourceClaimName": "first"}]}}),
        );
        for (name, more) in [("first", both), ("second", on(&["small-2"]))] {
            moving::put(&mut cluster, name, "15Gi", "rs-waits", more);
            cluster.settle(SECOND);
        }
        assert_second_is_helped(&mut cluster, is_helped, "17408 are used");
    }
}

/// The first alternative would be over the bound, too.
#[test]
fn pods_move_and_end_for_the_alternative_that_is_within_the_bound() {
    let mut cluster = fragmented(Mode::Propose, (OTHER, json!({})));
    // 190 GiB are used.
    cluster.annotate("ml", memory("266Gi"));
    let ways = [(json!({"memory": "79Gi"}), None), (json!({"memory": "75Gi"}), None)];
    put_either(&mut cluster, ("ml", "waits"), &ways, json!({}));
    let then = proposed(&mut cluster).expect("small may move").then;
    assert_eq!(then[0].1.gpus[0].memory, Bytes(75 << 30));

    let mut cluster = preempting::cluster(&[1]);
    preempting::run(&mut cluster, "low", 50, 0, &json!({}));
    cluster.annotate("ml", memory("90Gi"));
    let ways = [(json!({"memory": "60Gi"}), None), (json!({"memory": "40Gi"}), None)];
    put_either(&mut cluster, ("ml", "high"), &ways, with_priority(10, json!({})));
    assert_eq!(evicted(&cluster), ["low"]);
    preempting::end(&mut cluster);
    assert!(is_placed(&cluster, ("ml", "high")));
    cluster.check();
}

/// Of the large GPU, where less is lost by ending pods, or nothing has to end, the namespace may not have the fraction.
#[test]
fn pods_end_where_the_namespace_may_have_the_share() {
    let both = on(&["node-big", "node-small"]);
    let fraction = (json!({"fraction": "0.5", "compute": 10}), None);
    let of_small = (json!({"memory": "15Gi"}), Some("node-small"));
    let large = (json!({"memory": "40Gi"}), Some("node-big"));
    for (what, on_big, ways, is_told) in [
        ("a node beside", "75Gi", vec![fraction.clone()], None),
        (
            "an alternative that fits, were it not for the bound",
            "10Gi",
            vec![fraction, of_small.clone()],
            None,
        ),
        (
            "the last alternative fits, were it not for the bound",
            "10Gi",
            vec![of_small, large],
            Some("none of 2 alternatives fits; one needs 15360 MiB"),
        ),
    ] {
        let mut cluster = of_sizes(Mode::Off, &[("node-big", 80), ("node-small", 20)]);
        put_bound(&mut cluster, (OTHER, "on-big"), on_big, with_priority(0, on(&["node-big"])));
        put_bound(&mut cluster, (OTHER, "on-small"), "15Gi", with_priority(1, on(&["node-small"])));
        cluster.annotate("ml", memory("30Gi"));
        put_either(&mut cluster, ("ml", "high"), &ways, with_priority(10, both.clone()));
        assert_eq!(evicted(&cluster), ["on-small"], "{what}: {}", words(&cluster, "high"));
        assert!(
            is_told.is_none_or(|told| words(&cluster, "high").contains(told)),
            "{}",
            words(&cluster, "high")
        );
        drop_pod(&mut cluster, (OTHER, "on-small"));
        cluster.settle(SECOND);
        assert!(is_placed(&cluster, ("ml", "high")), "{what}");
        cluster.check();
    }
}

/// Once others have ended there would be room on the larger GPU first, of which the namespace may not have the fraction beside
/// what it has.
#[test]
fn room_is_kept_where_the_namespace_may_have_it() {
    for small in [true, false] {
        let nodes = [("node-big", 80), ("node-small", 20)];
        let mut cluster = of_sizes(Mode::Off, if small { &nodes } else { &nodes[..1] });
        cluster.annotate("ml", memory("45Gi"));
        put_bound(&mut cluster, ("ml", "mine"), "10Gi", on(&["node-big"]));
        put_bound(&mut cluster, (OTHER, "many"), "60Gi", on(&["node-big"]));
        if small {
            put_bound(&mut cluster, (OTHER, "theirs"), "15Gi", on(&["node-small"]));
        }
        put_fraction(&mut cluster, ("ml", "half"), "0.5", json!({}));
        assert!(words(&cluster, "half").contains("needs"), "{}", words(&cluster, "half"));
        // It is passed by others.
        let mut kept = BTreeSet::new();
        for nth in 0..60 {
            let name = format!("o{nth}");
            put_in(&mut cluster, (OTHER, &name), ("1Gi", 1), "rs-o", on(&["node-big"]));
            cluster.settle(3 * SECOND);
            let kept_for_it = cluster.core.reserves.kept_from("ml").filter(|kept| kept.namespace == "ml");
            kept.extend(kept_for_it.flat_map(|kept| kept.aside.nodes()));
            drop_pod(&mut cluster, (OTHER, &name));
        }
        let expected: BTreeSet<NodeName> = small.then(|| NodeName::new("node-small")).into_iter().collect();
        assert_eq!(kept, expected);
        cluster.check();
    }
}

/// What is ending of the namespace leaves room in its bound, too: nobody else need end.
#[test]
fn nobody_ends_where_what_is_ending_makes_room_in_the_bound() {
    let mut cluster = of_sizes(Mode::Off, &[("node-big", 80), ("node-small", 20)]);
    put_bound(&mut cluster, ("ml", "first"), "40Gi", on(&["node-big"]));
    put_bound(&mut cluster, ("ml", "second"), "30Gi", on(&["node-big"]));
    put_bound(&mut cluster, (OTHER, "low"), "15Gi", with_priority(0, on(&["node-small"])));
    cluster.annotate("ml", memory("80Gi"));
    ends_in(&mut cluster, "first", SECOND * 10);
    put_fraction(&mut cluster, ("ml", "high"), "0.5", with_priority(10, on(&["node-big", "node-small"])));
    assert_eq!(evicted(&cluster), [""; 0]);
    drop_pod(&mut cluster, ("ml", "first"));
    cluster.settle(SECOND);
    assert_eq!(cluster.place("high").map(|(node, _)| node).as_deref(), Some("node-big"));
}

/// Of the own namespace one pod will soon have ended, which is not enough. Another should have ended long ago, or ends soon
/// and its claim has another user: nobody counts on that, and somebody ends where the namespace may have the share.
#[test]
fn what_is_not_about_to_end_makes_no_room_in_the_bound() {
    for is_shared in [false, true] {
        let mut cluster = of_sizes(Mode::Off, &[("node-big", 80), ("node-mid", 80), ("node-small", 20)]);
        put_bound(&mut cluster, ("ml", "mine"), "40Gi", on(&["node-mid"]));
        put_bound(&mut cluster, ("ml", "leaves"), "10Gi", on(&["node-big"]));
        put_bound(&mut cluster, (OTHER, "theirs"), "35Gi", with_priority(100, on(&["node-big"])));
        put_bound(&mut cluster, (OTHER, "low"), "15Gi", with_priority(0, on(&["node-small"])));
        cluster.annotate("ml", memory("75Gi"));
        if is_shared {
            cluster.store_pod(object(json!({"metadata": {"name": "beside", "namespace": "ml"},
                "spec": {"nodeName": "node-mid", "containers": [{"name": "main"}],
                    "resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}})));
        }
        ends_in(&mut cluster, "mine", SECOND * 10);
        if !is_shared {
            cluster.settle(SECOND * 100);
        }
        ends_in(&mut cluster, "leaves", SECOND * 10);
        let both = on(&["node-big", "node-small"]);
        put_fraction(&mut cluster, ("ml", "high"), "0.5", with_priority(10, both));
        assert_eq!(evicted(&cluster), ["low"], "{is_shared}: {}", words(&cluster, "high"));
    }
}

/// Its own namespace is in the way of the second alternative; the first one would be over the bound.
#[test]
fn room_is_kept_from_the_own_namespace_for_the_alternative_within_the_bound() {
    let mut cluster = of_sizes(Mode::Off, &[("node", 60)]);
    cluster.annotate("ml", memory("80Gi"));
    for nth in 0..4 {
        put_bound(&mut cluster, ("ml", &format!("mine-{nth}")), "10Gi", json!({}));
    }
    let ways = [(json!({"memory": "60Gi"}), None), (json!({"memory": "30Gi"}), None)];
    put_either(&mut cluster, ("ml", "waits"), &ways, json!({}));
    let mut kept = BTreeSet::new();
    for nth in 0..40 {
        let name = format!("o{nth}");
        put_in(&mut cluster, (OTHER, &name), ("1Gi", 1), "rs-o", json!({}));
        cluster.settle(3 * SECOND);
        let kept_for_it = cluster.core.reserves.kept_from("ml").filter(|kept| kept.namespace == "ml");
        kept.extend(kept_for_it.flat_map(|kept| kept.aside.gpus()).map(|(_, grant)| grant.memory));
        drop_pod(&mut cluster, (OTHER, &name));
    }
    assert_eq!(kept, [Bytes(30 << 30)].into());
    cluster.check();
}

/// No GPU could ever serve the first alternative; the second one is over the bound.
#[test]
fn an_alternative_that_nothing_can_serve_hides_no_bound() {
    let mut cluster = of_sizes(Mode::Off, &[("node", 80)]);
    cluster.annotate("ml", memory("30Gi"));
    let ways = [(json!({"memory": "10Gi"}), Some("nowhere")), (json!({"memory": "40Gi"}), None)];
    put_either(&mut cluster, ("ml", "waits"), &ways, json!({}));
    let words = words(&cluster, "waits");
    assert!(words.contains("may have 30720 MiB") && !words.contains("alternatives"), "{words}");
}

/// The first alternative lacks room, the last one is over the bound: whatever may be spent in a round.
#[test]
fn what_may_be_spent_does_not_change_what_a_unit_waits_for() {
    let mut told = 0;
    for ticks in (0..40).map(|nth| 500 + 250 * nth) {
        let mut cluster = of_sizes(Mode::Off, &[("node-big", 80), ("node-small", 20)]);
        put_bound(&mut cluster, (OTHER, "on-small"), "15Gi", on(&["node-small"]));
        cluster.annotate("ml", memory("30Gi"));
        cluster.core.purse.bound(ticks);
        let ways =
            [(json!({"memory": "15Gi"}), Some("node-small")), (json!({"memory": "40Gi"}), Some("node-big"))];
        put_either(&mut cluster, ("ml", "waits"), &ways, json!({}));
        cluster.settle(LONG);
        let words = words(&cluster, "waits");
        let is_told = words.contains("none of 2 alternatives fits; one needs 15360 MiB");
        assert!(is_told || !words.contains("may have"), "{ticks}: {words}");
        told += u32::from(is_told);
    }
    assert!(told > 0, "some of them get on");
}
