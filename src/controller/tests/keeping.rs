//! What is kept for one tenant must not stop the others. Each namespace is a tenant of its own here.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge, object, results};
use crate::controller::config::Rules;
use crate::controller::queue::Patience;
use crate::model::names::{DRIVER, SHARED_CLASS};

const SECOND: Duration = Duration::from_secs(1);
/// As the rules have it.
const KEEP: u64 = 60;

/// Nodes with so many GPUs; `node-1` has GPUs of another product.
fn cluster(gpus: &[u32]) -> Cluster {
    let mut cluster = Cluster::new(Rules::default());
    for (nth, gpus) in gpus.iter().enumerate() {
        let node = format!("node-{nth}");
        cluster.put_node_object(&node, json!({}));
        let of = |minor| {
            let mut gpu = device(&node, minor, true);
            if nth == 1 {
                gpu["attributes"]["productName"]["string"] = "NVIDIA L40S".into();
            }
            gpu
        };
        cluster.put_slice(&node, (0..*gpus).map(of).collect());
    }
    cluster.settle(SECOND);
    cluster
}

/// A claim of a namespace, and a pod of its name. `exactly`: more of its request; `more`: of its pod.
fn ask(cluster: &mut Cluster, at: (&str, &str), share: Value, (exactly, more): (Value, Value)) {
    let (namespace, name) = at;
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    merge(&mut parameters, &share);
    let mut request = json!({"deviceClassName": SHARED_CLASS});
    merge(&mut request, &exactly);
    cluster.put_claim(json!({
        "metadata": {"name": name, "namespace": namespace, "annotations": {"tranche.dev/policy": "pack"}},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}}));
    let mut pod = json!({"metadata": {"name": name, "namespace": namespace}, "status": {"phase": "Pending"},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": name, "resourceClaimName": name}]}});
    merge(&mut pod, &more);
    cluster.store_pod(object(pod));
}

fn share(cluster: &mut Cluster, at: (&str, &str), memory: &str) {
    ask(cluster, at, json!({"memory": memory}), (json!({}), json!({})));
}

/// On the GPU with this number of a node.
fn share_on(cluster: &mut Cluster, at: (&str, &str), memory: &str, gpu: (usize, u32)) {
    let uuid = format!("GPU-node-{}-{}", gpu.0, gpu.1);
    let text = format!("device.attributes['gpu.nvidia.com'].uuid == '{uuid}'");
    let exactly = json!({"selectors": [{"cel": {"expression": text}}]});
    ask(cluster, at, json!({"memory": memory}), (exactly, json!({})));
}

/// So many whole GPUs, by one claim.
fn whole(cluster: &mut Cluster, at: (&str, &str), gpus: u32, product: &str) {
    let text = format!("device.attributes['gpu.nvidia.com'].productName.contains('{product}')");
    let exactly = json!({"count": gpus, "selectors": [{"cel": {"expression": text}}]});
    ask(cluster, at, json!({"fraction": "1"}), (exactly, json!({})));
}

fn is_placed(cluster: &Cluster, (namespace, name): (&str, &str)) -> bool {
    let claim = cluster.claims.get(&(namespace.to_owned(), name.to_owned()));
    claim.is_some_and(|claim| !results(claim).is_empty())
}

fn end(cluster: &mut Cluster, (namespace, name): (&str, &str)) {
    let at = (namespace.to_owned(), name.to_owned());
    if let Some(pod) = cluster.pods.remove(&at) {
        use crate::cluster::feed::{Change, Seen};
        cluster.feed.push_back(Change::Pod(Seen::Deleted(Box::new(pod.metadata))));
    }
    cluster.drop_claim(&at);
}

/// Each second a share of 1 GiB of namespace `other` comes, which ends 15 s after it was placed. How long each of them
/// waited, in seconds, by when it came.
fn others_wait(cluster: &mut Cluster, seconds: u64, mut each: impl FnMut(&mut Cluster, u64)) -> Vec<u64> {
    let mut waits: BTreeMap<u64, u64> = BTreeMap::new();
    for now in 0..seconds {
        each(cluster, now);
        share(cluster, ("other", &format!("s{now}")), "1Gi");
        cluster.settle(SECOND);
        cluster.check();
        for came in 0..=now {
            let name = format!("s{came}");
            if !waits.contains_key(&came) && is_placed(cluster, ("other", &name)) {
                waits.insert(came, now - came);
            }
            if waits.get(&came).is_some_and(|waited| came + waited + 15 == now) {
                end(cluster, ("other", &name));
            }
        }
    }
    (0..seconds).map(|came| waits.get(&came).copied().unwrap_or(u64::MAX)).collect()
}

/// The longest of those that came so long before the end that they must have been served.
fn longest(waits: &[u64], before: u64) -> u64 {
    let until = waits.len().saturating_sub(usize::try_from(before).unwrap());
    waits[..until].iter().copied().max().unwrap_or(0)
}

#[test]
fn who_asks_for_nearly_all_gpus_stops_nobodys_small_shares() {
    let mut cluster = cluster(&[8, 2]);
    for (node, gpus) in [(0, 8), (1, 2)] {
        for gpu in 0..gpus {
            share_on(&mut cluster, ("team", &format!("t{node}-{gpu}")), "1Gi", (node, gpu));
        }
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("mallory", "seven"), 7, "H100");
    whole(&mut cluster, ("mallory", "two"), 2, "L40S");
    let mut kept = 0;
    let waits = others_wait(&mut cluster, 600, |cluster, _| kept += cluster.core.reserves.counts().0);
    assert!(kept > 0, "something was kept");
    assert!(longest(&waits, 5) <= 5, "{waits:?}");
}

#[test]
fn what_needs_all_gpus_holds_others_up_for_a_time_and_leaves_them_as_long() {
    let mut cluster = cluster(&[2]);
    for gpu in 0..2 {
        share_on(&mut cluster, ("team", &format!("t{gpu}")), "1Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    // Tenants take turns.
    for namespace in ["mallory", "mary", "max"] {
        for name in ["a", "b"] {
            whole(&mut cluster, (namespace, name), 2, "H100");
        }
    }
    let mut kept = Vec::new();
    let waits = others_wait(&mut cluster, 1000, |cluster, _| kept.push(cluster.core.reserves.counts().0 > 0));
    assert!(kept.iter().any(|kept| *kept));
    assert!(longest(&waits, KEEP) <= KEEP + 1, "{waits:?}");
    let runs = kept.chunk_by(|one, next| one == next).map(|run| (run[0], run.len()));
    let runs: Vec<(bool, usize)> = runs.collect();
    for pair in runs.windows(2).filter(|pair| pair[0].0) {
        assert!(pair[0].1 as u64 <= KEEP + 1, "{runs:?}");
    }
    for pair in runs.windows(3).filter(|three| three[0].0) {
        assert!(pair[1].1 + 1 >= pair[0].1, "open as long: {runs:?}");
    }
}

#[test]
fn a_namespace_that_got_nothing_rests_longer_each_time() {
    let mut cluster = cluster(&[1]);
    share(&mut cluster, ("team", "stays"), "30Gi");
    cluster.settle(20 * SECOND);
    share(&mut cluster, ("big", "a"), "60Gi");
    let mut kept = Vec::new();
    others_wait(&mut cluster, 2200, |cluster, _| kept.push(cluster.core.reserves.counts().0 > 0));
    let runs: Vec<usize> = kept.chunk_by(|one, next| one == next).map(<[bool]>::len).collect();
    let times: Vec<usize> = runs.iter().map(|run| run.div_ceil(5) * 5 / KEEP as usize).collect();
    assert_eq!(times[1..8], [1, 1, 1, 2, 1, 4, 1], "{runs:?}");
    assert!(!is_placed(&cluster, ("big", "a")));
    end(&mut cluster, ("team", "stays"));
    end(&mut cluster, ("other", "none"));
    cluster.settle(2 * SECOND);
    assert!(is_placed(&cluster, ("big", "a")), "at once, kept or not");
}

#[test]
fn where_its_own_namespaces_shares_are_in_the_way_others_do_not_notice() {
    let mut cluster = cluster(&[4]);
    for gpu in 0..4 {
        share_on(&mut cluster, ("mallory", &format!("mine{gpu}")), "1Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("mallory", "all"), 4, "H100");
    let waits = others_wait(&mut cluster, 300, |_, _| {});
    assert!(longest(&waits, 5) <= 1, "{waits:?}");
    // Its own are held up, and for a time only.
    let held = |cluster: &mut Cluster| {
        share(cluster, ("mallory", "late"), "1Gi");
        cluster.settle(SECOND);
        let held = !is_placed(cluster, ("mallory", "late"));
        end(cluster, ("mallory", "late"));
        held
    };
    let times = (0..300).filter(|_| held(&mut cluster)).count();
    assert!((1..=240).contains(&times), "{times}");
}

#[test]
fn nothing_is_kept_where_others_have_gpus_whole() {
    let mut cluster = cluster(&[2]);
    cluster.put_whole("whole");
    let mut claim = cluster.claim("whole").clone();
    let made = crate::controller::grant::hold(&"node-0".into(), "gpu", "gpu-0");
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
    whole(&mut cluster, ("mallory", "two"), 2, "H100");
    let waits =
        others_wait(&mut cluster, 200, |cluster, _| assert_eq!(cluster.core.reserves.counts(), (0, 0)));
    assert!(longest(&waits, 5) <= 5, "{waits:?}");
}

#[test]
fn what_fits_beside_what_is_kept_is_placed_at_once() {
    let mut cluster = cluster(&[2]);
    share_on(&mut cluster, ("team", "stays"), "30Gi", (0, 1));
    cluster.settle(20 * SECOND);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    for name in ["g0", "g1"] {
        ask(&mut cluster, ("ml", name), json!({"memory": "60Gi"}), (json!({}), gang.clone()));
    }
    others_wait(&mut cluster, 70, |_, _| {});
    assert_eq!(cluster.core.reserves.counts(), (1, 2));
    for (name, memory) in [("too-large", "21Gi"), ("beside", "4Gi")] {
        share(&mut cluster, ("third", name), memory);
    }
    cluster.settle(SECOND);
    assert!(is_placed(&cluster, ("third", "beside")));
    assert!(!is_placed(&cluster, ("third", "too-large")));
    end(&mut cluster, ("team", "stays"));
    cluster.settle(2 * SECOND);
    assert!(is_placed(&cluster, ("ml", "g0")) && is_placed(&cluster, ("ml", "g1")));
    cluster.check();
}

#[test]
fn what_comes_free_bit_by_bit_is_kept_for_longer() {
    let mut cluster = cluster(&[4]);
    for gpu in 0..4 {
        share_on(&mut cluster, ("team", &format!("t{gpu}")), "1Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("ml", "all"), 4, "H100");
    let mut placed = None;
    let waits = others_wait(&mut cluster, 400, |cluster, now| {
        // The first three quarters of a minute after it began.
        if now >= 100 && (now - 100) % 50 == 0 && now < 300 {
            end(cluster, ("team", &format!("t{}", (now - 100) / 50)));
        }
        if placed.is_none() && is_placed(cluster, ("ml", "all")) {
            placed = Some(now);
        }
        if placed.is_some_and(|placed| placed + 10 == now) {
            end(cluster, ("ml", "all"));
        }
    });
    let placed = placed.expect("it gets its turn");
    assert!((250..260).contains(&placed), "{placed}: once the last has ended");
    assert!(longest(&waits, 60) <= 5 * KEEP, "{waits:?}");
}

#[test]
fn tenants_with_small_demands_keep_a_tenth_of_the_gpus_at_once() {
    let mut cluster = cluster(&[20, 1]);
    for gpu in 0..20 {
        share_on(&mut cluster, ("team", &format!("t{gpu}")), "30Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    for nth in 0..6 {
        whole(&mut cluster, (&format!("ns{nth}"), "one"), 1, "H100");
    }
    let mut most = 0;
    others_wait(&mut cluster, 300, |cluster, _| most = most.max(cluster.core.reserves.counts().1));
    assert_eq!(most, 2);
}

#[test]
fn time_to_keep_can_be_set() {
    let patience = Patience { keep: 10 * SECOND, ..Patience::default() };
    let mut cluster = Cluster::new(Rules { patience, ..Rules::default() });
    cluster.put_node("node-0", 1);
    share(&mut cluster, ("team", "stays"), "30Gi");
    cluster.settle(20 * SECOND);
    share(&mut cluster, ("big", "a"), "60Gi");
    let waits = others_wait(&mut cluster, 200, |_, _| {});
    assert!(longest(&waits, 12) <= 11, "{waits:?}");
}
