//! What is kept for one tenant must not stop the others. Each namespace is a tenant of its own here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge, object, results};
use crate::cluster::events::EventSubject;
use crate::controller::config::Rules;
use crate::controller::explain::{self, Answer, explain};
use crate::controller::queue::Patience;
use crate::model::names::{DRIVER, SHARED_CLASS};

const SECOND: Duration = Duration::from_secs(1);
/// A share of those that come and go ends so long after it was placed.
const LASTS: u64 = 6;

/// Something is kept for so many seconds at a time. Nobody binds pods here.
fn rules(keep: u64) -> Rules {
    let patience = Patience { keep: Duration::from_secs(keep), ..Patience::default() };
    let long = Duration::from_secs(100_000);
    Rules { patience, unused: long, stuck: long, ..Rules::default() }
}

/// Nodes with so many GPUs; `node-1` has GPUs of another product.
fn cluster(gpus: &[u32], keep: u64) -> Cluster {
    let mut cluster = Cluster::new(rules(keep));
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
        use crate::cluster::feed::{Change, WatchEvent};
        cluster.feed.push_back(Change::Pod(WatchEvent::Deleted(Box::new(pod.metadata))));
    }
    cluster.drop_claim(&at);
}

/// Each second a share of 1 GiB of namespace `other` comes, and ends a while after it was placed. How long each of them
/// waited, in seconds, by when it came.
fn others_wait(cluster: &mut Cluster, seconds: u64, mut each: impl FnMut(&mut Cluster, u64)) -> Vec<u64> {
    let mut waits: BTreeMap<u64, u64> = BTreeMap::new();
    let mut open: BTreeSet<u64> = BTreeSet::new();
    for now in 0..seconds {
        each(cluster, now);
        share(cluster, ("other", &format!("s{now}")), "1Gi");
        cluster.settle(SECOND);
        cluster.check();
        open.insert(now);
        for came in open.clone() {
            let name = format!("s{came}");
            if !waits.contains_key(&came) && is_placed(cluster, ("other", &name)) {
                waits.insert(came, now - came);
            }
            if waits.get(&came).is_some_and(|waited| came + waited + LASTS <= now) {
                end(cluster, ("other", &name));
                open.remove(&came);
            }
        }
    }
    for came in open {
        end(cluster, ("other", &format!("s{came}")));
    }
    (0..seconds).map(|came| waits.get(&came).copied().unwrap_or(u64::MAX)).collect()
}

/// The longest of those that came so long before the end that they must have been served.
fn longest(waits: &[u64], before: u64) -> u64 {
    let until = waits.len().saturating_sub(usize::try_from(before).unwrap());
    waits[..until].iter().copied().max().unwrap_or(0)
}

#[test]
fn who_asks_for_all_gpus_of_a_kind_stops_nobodys_small_shares() {
    let mut cluster = cluster(&[7, 2], 60);
    for (node, gpus) in [(0, 7), (1, 2)] {
        for gpu in 0..gpus {
            share_on(&mut cluster, ("team", &format!("t{node}-{gpu}")), "1Gi", (node, gpu));
        }
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("mallory", "seven"), 7, "H100");
    whole(&mut cluster, ("mallory", "two"), 2, "L40S");
    let mut kept = 0;
    let waits = others_wait(&mut cluster, 300, |cluster, _| kept += cluster.core.reserves.counts().0);
    assert!(kept > 0, "something was kept");
    assert!(longest(&waits, 5) <= 5, "{waits:?}");
}

#[test]
fn what_needs_all_gpus_holds_others_up_for_a_time_and_leaves_them_as_long() {
    const KEEP: u64 = 20;
    let mut cluster = cluster(&[2], KEEP);
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
    let waits = others_wait(&mut cluster, 300, |cluster, _| kept.push(cluster.core.reserves.counts().0 > 0));
    assert!(kept.iter().any(|kept| *kept));
    // What was there when it began ends meanwhile.
    let most = KEEP + LASTS + 2;
    assert!(longest(&waits, most) <= most, "{waits:?}");
    let runs = kept.chunk_by(|one, next| one == next).map(|run| (run[0], run.len()));
    let runs: Vec<(bool, usize)> = runs.collect();
    for pair in runs.windows(2).filter(|pair| pair[0].0) {
        assert!(pair[0].1 as u64 <= most, "{runs:?}");
    }
    for three in runs.windows(3).filter(|three| three[0].0) {
        assert!(three[1].1 + 1 >= three[0].1, "open as long: {runs:?}");
    }
    assert!(runs.len() >= 6, "each of them had its turn: {runs:?}");
}

#[test]
fn a_namespace_that_got_nothing_rests_longer_each_time() {
    let mut cluster = cluster(&[1], 10);
    share(&mut cluster, ("team", "stays"), "30Gi");
    cluster.settle(20 * SECOND);
    share(&mut cluster, ("big", "a"), "60Gi");
    let mut kept = Vec::new();
    let waits = others_wait(&mut cluster, 250, |cluster, _| kept.push(cluster.core.reserves.counts().0 > 0));
    let runs: Vec<usize> = kept.chunk_by(|one, next| one == next).map(<[bool]>::len).collect();
    let times: Vec<usize> = runs.iter().map(|run| (run + 5) / 10).collect();
    assert_eq!(times[1..8], [1, 1, 1, 2, 1, 4, 1], "{runs:?}");
    assert!(longest(&waits, 5) <= 1, "they fit beside what is kept once the other has ended: {waits:?}");
    assert!(!is_placed(&cluster, ("big", "a")));
    end(&mut cluster, ("team", "stays"));
    cluster.settle(2 * SECOND);
    assert!(is_placed(&cluster, ("big", "a")), "at once, kept or not");
}

#[test]
fn where_its_own_namespaces_shares_are_in_the_way_others_do_not_notice() {
    let mut cluster = cluster(&[4], 60);
    for gpu in 0..4 {
        share_on(&mut cluster, ("mallory", &format!("mine{gpu}")), "1Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("mallory", "all"), 4, "H100");
    let waits = others_wait(&mut cluster, 60, |_, _| {});
    assert!(longest(&waits, 5) <= 1, "{waits:?}");
    // Its own are held up, and for a time only.
    let held = |cluster: &mut Cluster| {
        share(cluster, ("mallory", "late"), "1Gi");
        cluster.settle(SECOND);
        let held = !is_placed(cluster, ("mallory", "late"));
        end(cluster, ("mallory", "late"));
        held
    };
    let times = (0..150).filter(|_| held(&mut cluster)).count();
    assert!((1..125).contains(&times), "{times}");
}

#[test]
fn nothing_is_kept_where_others_have_gpus_whole() {
    let mut cluster = cluster(&[2], 60);
    cluster.put_whole("whole");
    let mut claim = cluster.claim("whole").clone();
    let made = crate::controller::grant::hold(&"node-0".into(), "gpu", "gpu-0", None);
    claim.status.get_or_insert_default().allocation = Some(made);
    cluster.store(claim);
    whole(&mut cluster, ("mallory", "two"), 2, "H100");
    let waits =
        others_wait(&mut cluster, 100, |cluster, _| assert_eq!(cluster.core.reserves.counts(), (0, 0)));
    assert!(longest(&waits, 5) <= 5, "{waits:?}");
}

#[test]
fn what_fits_beside_what_is_kept_is_placed_at_once() {
    let mut cluster = cluster(&[2], 60);
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
    const KEEP: u64 = 60;
    let mut cluster = cluster(&[4], KEEP);
    for gpu in 0..4 {
        share_on(&mut cluster, ("team", &format!("t{gpu}")), "1Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    whole(&mut cluster, ("ml", "all"), 4, "H100");
    let mut placed = None;
    let waits = others_wait(&mut cluster, 280, |cluster, now| {
        if now >= 60 && (now - 60) % 50 == 0 && now < 260 {
            end(cluster, ("team", &format!("t{}", (now - 60) / 50)));
        }
        if placed.is_none() && is_placed(cluster, ("ml", "all")) {
            placed = Some(now);
        }
        if placed.is_some_and(|placed| placed + 10 == now) {
            end(cluster, ("ml", "all"));
        }
    });
    let placed = placed.expect("it gets its turn");
    assert!((210..215).contains(&placed), "{placed}: once the last has ended");
    assert!(longest(&waits, 60) <= 5 * KEEP, "{waits:?}");
}

#[test]
fn tenants_with_small_demands_keep_a_tenth_of_the_gpus_at_once() {
    let mut cluster = cluster(&[20, 1], 60);
    for gpu in 0..20 {
        share_on(&mut cluster, ("team", &format!("t{gpu}")), "30Gi", (0, gpu));
    }
    cluster.settle(20 * SECOND);
    for nth in 0..6 {
        whole(&mut cluster, (&format!("ns{nth}"), "one"), 1, "H100");
    }
    let mut most = 0;
    others_wait(&mut cluster, 120, |cluster, _| most = most.max(cluster.core.reserves.counts().1));
    assert_eq!(most, 2);
}

#[test]
fn what_is_kept_is_told_to_both_with_numbers_and_until_when() {
    let mut cluster = cluster(&[1], 20);
    share(&mut cluster, ("team", "stays"), "30Gi");
    cluster.settle(20 * SECOND);
    ask(&mut cluster, ("big", "a"), json!({"fraction": "1"}), (json!({}), json!({})));
    let mut told = Vec::new();
    let waits = others_wait(&mut cluster, 120, |cluster, _| told.extend(cluster.core.recorder.take().0));
    assert!(longest(&waits, 30) <= 28, "{waits:?}");
    let says = |name: &str, words: &[&str]| {
        let of = |subject: &EventSubject| matches!(subject, EventSubject::Pod { name: pod, .. } if pod.starts_with(name));
        told.iter().any(|note| of(&note.subject) && words.iter().all(|one| note.message.contains(one)))
    };
    let words = ["kept for it until 1970-01-01T00:", "Z: 81920 MiB of node-0/gpu-0; needs a whole GPU"];
    assert!(says("a", &words), "{told:?}");
    let words = "; kept for a pod of another namespace, which goes first, until 1970-01-01T00:";
    assert!(says("s", &[words, "Z: 81920 MiB of node-0/gpu-0"]), "{told:?}");
}

/// What is told who asks for a claim now.
fn explained(cluster: &mut Cluster, (namespace, name): (&str, &str)) -> Answer {
    let unheard = std::mem::take(&mut cluster.feed);
    let (mut core, listing) = super::explain::listed(cluster);
    cluster.feed = unheard;
    let claim = explain::Subject::Claim(core.view.claim_named(namespace, name).unwrap().key);
    let now = Timestamp::UNIX_EPOCH + SignedDuration::try_from(cluster.now).unwrap();
    explain(&mut core, &listing, &[claim], now).remove(0).answer
}

#[test]
fn who_asks_for_a_claim_hears_what_is_kept_for_others() {
    let mut cluster = cluster(&[1], 60);
    share(&mut cluster, ("team", "stays"), "30Gi");
    cluster.settle(20 * SECOND);
    ask(&mut cluster, ("big", "a"), json!({"fraction": "1"}), (json!({}), json!({})));
    others_wait(&mut cluster, 45, |_, _| {});
    share(&mut cluster, ("third", "b"), "1Gi");
    cluster.settle(20 * SECOND);
    assert!(!is_placed(&cluster, ("third", "b")));
    let Answer::Would { holdups, .. } = explained(&mut cluster, ("third", "b")) else { panic!() };
    let kept = |words: &String| {
        words.starts_with("kept for claim big/a until 1970-01-01T00:0")
            && words.ends_with("Z: 81920 MiB of node-0/gpu-0")
    };
    assert!(holdups.iter().any(kept), "{holdups:?}");
    let answer = explained(&mut cluster, ("big", "a"));
    assert!(matches!(&answer, Answer::Waits { kept, .. } if kept.is_empty()), "{answer:?}");
}
