//! Shares with the fraction 1: GPUs for their claims alone, packed, kept and given back like other shares.

use serde_json::{Value, json};

use super::cluster::{Cluster, device};
use super::scenes::{LONG, cluster, share};

fn whole(cluster: &mut Cluster, name: &str, gpus: u32, more: Value) {
    cluster.put_share(name, json!({"fraction": "1"}), gpus);
    cluster.put_pod(name, &[name], more);
}

/// The controller's grants of a claim, as they stand in its allocation.
fn granted(cluster: &Cluster, name: &str) -> Vec<Value> {
    let allocation = cluster.claim(name).status.as_ref().and_then(|status| status.allocation.as_ref());
    let config = allocation.and_then(|one| one.devices.as_ref()?.config.as_ref());
    let parameters = config.into_iter().flatten().filter_map(|one| one.opaque.as_ref());
    let grants = parameters.map(|opaque| &opaque.parameters.0).filter(|one| one["kind"] == "ShareGrant");
    grants.flat_map(|grant| grant["devices"].as_array().cloned().unwrap_or_default()).collect()
}

fn told(cluster: &mut Cluster, words: &str) {
    let (notes, _) = cluster.core.recorder.take();
    assert!(notes.iter().any(|note| note.message.contains(words)), "{notes:?}");
}

#[test]
fn a_fraction_of_1_has_its_gpu_alone_and_shares_come_back_after_it() {
    for keeps in [true, false] {
        let mut cluster = Cluster::new(super::scenes::rules());
        cluster.keeps = keeps;
        cluster.put_node("node-0", 2);
        share(&mut cluster, "small", "1Gi");
        cluster.settle(LONG);
        whole(&mut cluster, "all", 1, json!({}));
        cluster.settle(LONG);
        let at = cluster.place("all").expect("there is an idle GPU");
        told(&mut cluster, &format!("all of {} on node node-0", at.1[0]));
        assert_ne!(cluster.place("small"), Some(at.clone()));
        let grant = &granted(&cluster, "all")[0];
        assert_eq!((&grant["whole"], &grant["memory"]), (&json!(true), &json!("80Gi")), "{grant}");
        assert_eq!((&grant["compute"], &grant["slots"]), (&json!(100), &json!(16)), "{grant}");
        assert!(granted(&cluster, "small")[0]["whole"].is_null(), "shares are written as ever");
        assert_eq!(cluster.holds().len(), 2, "the hold keeps kube-scheduler away");

        share(&mut cluster, "large", "78Gi");
        share(&mut cluster, "large-2", "1Mi");
        cluster.settle(LONG);
        cluster.check();
        assert_eq!(cluster.place("large-2"), cluster.place("small"), "keeps: {keeps}");
        assert_eq!(cluster.place("large").map(|(node, _)| node).as_deref(), Some("node-0"));
        share(&mut cluster, "more", "10Gi");
        cluster.settle(LONG);
        assert_eq!(cluster.place("more"), None);
        cluster.drop_pod("all", true);
        cluster.settle(LONG);
        assert_eq!(cluster.place("more"), Some(at), "keeps: {keeps}");
        cluster.check();
    }
}

/// Where a GPU could give more than when it was granted, the index has a rest; nobody gets it.
#[test]
fn what_a_gpu_can_give_may_change_under_a_claim_that_has_it_whole() {
    let mut cluster = cluster(1, 1);
    whole(&mut cluster, "all", 1, json!({}));
    cluster.settle(LONG);
    assert!(cluster.place("all").is_some());
    let mut more = device("node-0", 0, true);
    more["attributes"]["grantableMemoryMiB"]["int"] = json!(90_000);
    more["attributes"]["shareSlots"]["int"] = json!(24);
    cluster.put_slice("node-0", vec![more]);
    share(&mut cluster, "small", "1Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("small"), None);
    cluster.drop_pod("all", true);
    cluster.settle(LONG);
    assert!(cluster.place("small").is_some());
}

/// Shares of several GPUs have one MPS daemon, and whoever shares one of these GPUs shares all of them. Whole GPUs have
/// none.
#[test]
fn several_whole_gpus_are_no_group() {
    let mut cluster = cluster(2, 4);
    share(&mut cluster, "small", "1Gi");
    cluster.settle(LONG);
    let small = cluster.place("small").unwrap();
    whole(&mut cluster, "three", 3, json!({}));
    whole(&mut cluster, "four", 4, json!({}));
    cluster.settle(LONG);
    let (node, gpus) = cluster.place("three").expect("packed beside the share's GPU");
    assert_eq!((&node, gpus.len()), (&small.0, 3));
    assert!(!gpus.contains(&small.1[0]));
    let (other, gpus) = cluster.place("four").expect("the other node is idle");
    assert_ne!(other, node);
    assert_eq!(gpus.len(), 4);
    cluster.check();
    // A pod may have a whole GPU and, by another claim, a share of a GPU that others share.
    cluster.drop_pod("three", true);
    cluster.put_share("both", json!({"fraction": "1"}), 1);
    cluster.put_share("both-2", json!({"memory": "1Gi"}), 1);
    cluster.put_pod("both", &["both", "both-2"], json!({}));
    cluster.settle(LONG);
    assert_eq!(cluster.place("both-2"), Some(small));
    assert!(cluster.place("both").is_some());
    cluster.check();
}

#[test]
fn a_gang_of_whole_gpus_is_placed_together_or_not_at_all() {
    let mut cluster = cluster(2, 2);
    share(&mut cluster, "small", "1Gi");
    cluster.settle(LONG);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    for name in ["a", "b"] {
        whole(&mut cluster, name, 2, gang.clone());
    }
    cluster.settle(LONG);
    assert_eq!((cluster.place("a"), cluster.place("b")), (None, None));
    told(&mut cluster, "the gang's 2 pods do not fit together");
    cluster.drop_pod("small", true);
    cluster.settle(LONG);
    let nodes = ["a", "b"].map(|name| cluster.place(name).expect("both nodes are idle").0);
    assert_ne!(nodes[0], nodes[1]);
    cluster.check();
}

#[test]
fn a_pod_that_waits_for_a_whole_gpu_is_told_so() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "small", "1Gi");
    cluster.settle(LONG);
    whole(&mut cluster, "all", 1, json!({}));
    cluster.settle(LONG);
    told(&mut cluster, "needs a whole GPU; none of 1 candidate is idle");
}

#[test]
fn a_limit_that_nothing_would_enforce_is_refused_in_words() {
    let mut cluster = cluster(1, 1);
    cluster.put_share("all", json!({"fraction": "1", "maxProcesses": 4}), 1);
    cluster.put_pod("all", &["all"], json!({}));
    cluster.settle(LONG);
    assert_eq!(cluster.place("all"), None);
    told(&mut cluster, "GpuShare.maxProcesses limits a share, but the fraction 1 is the whole GPU");
}
