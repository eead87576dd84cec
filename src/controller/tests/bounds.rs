//! What a namespace may have, as its annotations say: who is over it waits with the numbers, keeps nobody else from
//! anything, and goes on when there is room again.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge, object};
use super::scenes::{LONG, SECOND, cluster, rules, share};
use super::walk::bind;
use crate::allocate::Policy;
use crate::cluster::feed::{Change, WatchEvent};
use crate::controller::config::Rules;
use crate::model::names::{MAX_SHARE_GPUS, MAX_SHARE_MEMORY};

fn memory(most: &str) -> Value {
    json!({MAX_SHARE_MEMORY: most})
}

fn is_placed(cluster: &Cluster, name: &str) -> bool {
    cluster.place(name).is_some()
}

const OTHER: &str = "other";

/// A pod of another namespace with a claim of its own name, which says its amount in its request.
fn put_other(cluster: &mut Cluster, name: &str) {
    let exactly =
        json!({"deviceClassName": "shared.gpu.nvidia.com", "capacity": {"requests": {"memory": "1Gi"}}});
    cluster.put_claim(json!({"metadata": {"name": name, "namespace": OTHER},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}));
    cluster.store_pod(object(json!({"metadata": {"name": name, "namespace": OTHER}, "status": {"phase": "Pending"},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "c", "resourceClaimName": name}]}})));
}

/// What the claim carries for people.
fn words(cluster: &Cluster, claim: &str) -> String {
    let annotations = cluster.claim(claim).metadata.annotations.clone().unwrap_or_default();
    annotations.get("tranche.dev/waiting").cloned().unwrap_or_default()
}

#[test]
fn who_is_over_the_bound_waits_with_the_numbers_and_is_placed_when_others_end() {
    let mut cluster = cluster(1, 2);
    cluster.annotate("ml", memory("30Gi"));
    share(&mut cluster, "a", "20Gi");
    cluster.settle(LONG);
    bind(&mut cluster, "a");
    share(&mut cluster, "c", "10Gi");
    cluster.settle(LONG);
    bind(&mut cluster, "c");
    share(&mut cluster, "b", "11Gi");
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "a") && is_placed(&cluster, "c") && !is_placed(&cluster, "b"));
    let told = "namespace ml may have 30720 MiB of shares; 30720 are used and 11264 are asked for";
    assert!(words(&cluster, "b").starts_with(told), "{}", words(&cluster, "b"));
    assert!(words(&cluster, "b").ends_with("(tranche.dev/max-share-memory)"), "{}", words(&cluster, "b"));
    let notes = cluster.core.recorder.take().0;
    assert!(notes.iter().any(|note| note.reason == "WaitingForGpuShare" && note.message.contains(told)));
    cluster.drop_pod("c", true);
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "b"), "still 1 GiB too much");
    cluster.drop_pod("a", true);
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "b"));
    cluster.check();
}

#[test]
fn a_share_counts_once_for_each_gpu_that_it_is_on() {
    let mut cluster = cluster(1, 4);
    cluster.annotate("ml", json!({MAX_SHARE_GPUS: "3"}));
    cluster.put_share("two", json!({"memory": "1Gi"}), 2);
    cluster.put_pod("two", &["two"], json!({}));
    cluster.settle(LONG);
    cluster.put_share("more", json!({"memory": "1Gi"}), 2);
    cluster.put_pod("more", &["more"], json!({}));
    share(&mut cluster, "one", "1Gi");
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "two") && is_placed(&cluster, "one") && !is_placed(&cluster, "more"));
    assert!(words(&cluster, "more").contains("may have 3 GPUs of shares; 3 are used and 2 are asked for"));
}

#[test]
fn a_fraction_counts_with_the_memory_that_it_comes_to() {
    let mut cluster = cluster(1, 1);
    cluster.annotate("ml", memory("39Gi"));
    cluster.put_share("half", json!({"fraction": "0.5"}), 1);
    cluster.put_pod("half", &["half"], json!({}));
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "half"));
    assert!(words(&cluster, "half").contains("40960 are asked for"), "{}", words(&cluster, "half"));
    cluster.annotate("ml", memory("40Gi"));
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "half"));
}

/// The best GPU by the policy is one of which the fraction is more than the namespace may have.
#[test]
fn a_smaller_gpu_is_taken_where_the_fraction_of_the_best_is_over_the_bound() {
    for (share, gang) in [
        (json!({"fraction": "0.5"}), json!({})),
        (json!({"fraction": "1"}), json!({})),
        (
            json!({"fraction": "0.25"}),
            json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}}),
        ),
    ] {
        for (most, node) in [("200Gi", "node-0"), ("30Gi", "node-small")] {
            let mut cluster = Cluster::new(Rules { policy: Policy::Spread, ..rules() });
            cluster.put_node("node-0", 2);
            let mut small = device("node-small", 0, true);
            merge(
                &mut small,
                &json!({"attributes": {"grantableMemoryMiB": {"int": 20_480}},
                    "capacity": {"memory": {"value": "20Gi"}}}),
            );
            cluster.put_node_object("node-small", json!({}));
            cluster.put_slice("node-small", vec![small]);
            cluster.annotate("ml", memory(most));
            for name in ["a", "b"] {
                cluster.put_share(name, share.clone(), 1);
                cluster.put_pod(name, &[name], gang.clone());
                cluster.settle(if gang == json!({}) { LONG } else { SECOND });
            }
            cluster.settle(LONG);
            let first = cluster.place("a").map(|(node, _)| node);
            assert_eq!(first.as_deref(), Some(node), "{share} {most} {}", words(&cluster, "a"));
            cluster.check();
        }
    }
}

#[test]
fn bounds_come_and_go_without_ending_what_is_placed_and_the_next_leader_keeps_them() {
    let mut cluster = cluster(1, 1);
    share(&mut cluster, "a", "20Gi");
    cluster.settle(LONG);
    let place = cluster.place("a");
    cluster.annotate("ml", memory("10Gi"));
    share(&mut cluster, "b", "1Gi");
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "b") && cluster.place("a") == place, "what runs goes on");
    cluster.fail_over(rules());
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "b"), "{}", words(&cluster, "b"));
    assert_eq!(cluster.place("a"), place);
    cluster.annotate("ml", json!({}));
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "b"));
    cluster.check();
}

#[test]
fn a_bound_that_cannot_be_read_lets_nothing_through_and_is_told_once() {
    let mut cluster = cluster(1, 1);
    cluster.annotate("ml", memory("lots"));
    share(&mut cluster, "a", "1Gi");
    cluster.settle(LONG);
    cluster.annotate("ml", memory("lots"));
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "a"));
    assert!(words(&cluster, "a").contains("write one such as 64Gi"), "{}", words(&cluster, "a"));
    let troubles = cluster.core.recorder.take().1;
    let told = troubles.iter().filter(|words| words.starts_with("Namespace ml: annotation")).count();
    assert_eq!(told, 1, "{troubles:?}");
    cluster.annotate("ml", memory("64Gi"));
    cluster.settle(LONG);
    assert!(is_placed(&cluster, "a"));
}

/// However long it waits, and however many others are placed meanwhile.
#[test]
fn nothing_is_kept_for_who_is_over_the_bound_of_its_own_namespace() {
    let mut cluster = cluster(1, 1);
    cluster.annotate("ml", memory("70Gi"));
    share(&mut cluster, "a", "60Gi");
    cluster.settle(LONG);
    bind(&mut cluster, "a");
    share(&mut cluster, "waits", "15Gi");
    for nth in 0..50 {
        let name = format!("o{nth}");
        put_other(&mut cluster, &name);
        cluster.settle(3 * SECOND);
        let at = (OTHER.to_owned(), name.clone());
        let is_placed =
            |claim: &ResourceClaim| claim.status.as_ref().is_some_and(|all| all.allocation.is_some());
        assert!(is_placed(&cluster.claims[&at]), "{name}");
        let pod = cluster.pods.remove(&at).unwrap();
        cluster.feed.push_back(Change::Pod(WatchEvent::Deleted(Box::new(pod.metadata))));
        cluster.drop_claim(&at);
    }
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "waits"));
    assert_eq!(cluster.core.reserves.counts(), (0, 0), "nothing is kept");
    cluster.check();
}

/// All pods of a gang, or none of them.
#[test]
fn a_gang_counts_as_a_whole() {
    let mut cluster = cluster(1, 4);
    cluster.annotate("ml", memory("29Gi"));
    for name in ["g0", "g1", "g2"] {
        cluster.put_share(name, json!({"memory": "10Gi"}), 1);
        let gang =
            json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "3"}}});
        cluster.put_pod(name, &[name], gang);
    }
    cluster.settle(LONG);
    assert!(["g0", "g1", "g2"].iter().all(|name| !is_placed(&cluster, name)));
    assert!(
        words(&cluster, "g1").contains("0 are used and 30720 are asked for, which is more than all of it")
    );
    cluster.annotate("ml", memory("30Gi"));
    cluster.settle(LONG);
    assert!(["g0", "g1", "g2"].iter().all(|name| is_placed(&cluster, name)));
}

/// Of two alternatives the first that the namespace may have.
#[test]
fn an_alternative_within_the_bound_is_taken() {
    let mut cluster = cluster(1, 1);
    cluster.annotate("ml", memory("10Gi"));
    let sub = |name: &str, memory: &str| json!({"name": name, "deviceClassName": "shared.gpu.nvidia.com", "capacity": {"requests": {"memory": memory}}});
    cluster.put_claim(json!({"metadata": {"name": "either", "namespace": "ml"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "firstAvailable": [sub("large", "20Gi"), sub("small", "8Gi")]}]}}}));
    cluster.put_pod("either", &["either"], json!({}));
    cluster.settle(LONG);
    let allocation = cluster.claim("either").status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|all| all.devices.as_ref()?.results.as_ref());
    assert_eq!(results.expect("it is placed")[0].request, "gpu/small");
}

#[test]
fn nothing_is_decided_before_the_bounds_are_known() {
    let mut cluster = cluster(1, 1);
    cluster.annotate("ml", memory("1Gi"));
    cluster.settle(SECOND);
    cluster.fail_over(rules());
    cluster.feed.retain(|change| !matches!(change, Change::Namespace(_)));
    let problem = "the API server is away".to_owned();
    cluster.feed.push_back(Change::Namespace(WatchEvent::Interrupted { problem, is_forbidden: false }));
    share(&mut cluster, "a", "2Gi");
    cluster.settle(LONG);
    assert!(!is_placed(&cluster, "a") && words(&cluster, "a").is_empty());
    cluster.relist_one(5);
    cluster.settle(LONG);
    assert!(words(&cluster, "a").contains("may have 1024 MiB"), "{}", words(&cluster, "a"));
}
