//! GPUs of whose shares each has an MPS daemon of its own (`mps.daemon=share`): claims with shares of several GPUs meet
//! others there.

use serde_json::{Value, json};

use super::cluster::{Cluster, device, merge, own_daemons};
use super::preempting::{cluster as preempting, evicted, refused, run};
use super::scenes::{LONG, rules, share};
use super::walk::bind;

fn cluster(nodes: u32, gpus: u32) -> Cluster {
    let mut cluster = Cluster::new(rules());
    cluster.own_daemons = true;
    for node in 0..nodes {
        cluster.put_node(&format!("node-{node}"), gpus);
    }
    cluster.settle(LONG);
    cluster
}

fn several(cluster: &mut Cluster, name: &str, memory: &str, gpus: u32, more: Value) {
    cluster.put_share(name, json!({"memory": memory}), gpus);
    cluster.put_pod(name, &[name], more);
}

#[test]
fn shares_of_several_gpus_meet_shares_of_one() {
    let mut cluster = cluster(1, 2);
    share(&mut cluster, "one", "10Gi");
    cluster.settle(LONG);
    several(&mut cluster, "pair", "10Gi", 2, json!({}));
    cluster.settle(LONG);
    share(&mut cluster, "two", "60Gi");
    share(&mut cluster, "three", "65Gi");
    cluster.settle(LONG);
    ["one", "pair", "two", "three"].into_iter().for_each(|name| bind(&mut cluster, name));
    let (one, pair) = (cluster.place("one").unwrap(), cluster.place("pair").expect("beside the other"));
    assert!(pair.1.contains(&one.1[0]), "{one:?} {pair:?}");
    assert_eq!(cluster.place("two"), Some(one));
    assert!(cluster.place("three").is_some(), "beside the pair alone");
    share(&mut cluster, "more", "10Gi");
    several(&mut cluster, "another", "6Gi", 2, json!({}));
    cluster.settle(LONG);
    assert_eq!((cluster.place("more"), cluster.place("another")), (None, None), "memory counts as ever");
    cluster.check();
}

/// The daemons of a node may be changed while claims are on it: what its slice says counts.
#[test]
fn what_the_slice_says_of_daemons_closes_and_opens_gpus() {
    let mut cluster = cluster(1, 2);
    several(&mut cluster, "pair", "10Gi", 2, json!({}));
    cluster.settle(LONG);
    let old = |minor| device("node-0", minor, true);
    cluster.put_slice("node-0", vec![old(0), old(1)]);
    share(&mut cluster, "one", "10Gi");
    cluster.settle(LONG);
    assert_eq!(cluster.place("one"), None);
    let new = |minor| {
        let mut device = old(minor);
        merge(&mut device, &own_daemons());
        device
    };
    cluster.put_slice("node-0", vec![new(0), new(1)]);
    cluster.settle(LONG);
    assert!(cluster.place("one").is_some());
    cluster.check();
}

#[test]
fn a_gang_of_pods_with_several_gpus_each_shares_them() {
    let mut cluster = cluster(1, 2);
    let gang = json!({"metadata": {"annotations": {"tranche.dev/gang": "g", "tranche.dev/gang-size": "2"}}});
    several(&mut cluster, "g0", "30Gi", 2, gang.clone());
    several(&mut cluster, "g1", "30Gi", 2, gang);
    cluster.settle(LONG);
    assert!(cluster.place("g0").is_some() && cluster.place("g1").is_some());
    cluster.check();
}

#[test]
fn no_more_pods_end_for_shares_of_several_gpus_than_it_takes() {
    for (own, ended) in [(true, vec!["a"]), (false, vec!["a", "b"])] {
        let mut cluster = preempting(&[]);
        cluster.own_daemons = own;
        cluster.put_node("node-0", 2);
        run(&mut cluster, "a", 75, 1, &json!({}));
        run(&mut cluster, "b", 10, 1, &json!({}));
        several(&mut cluster, "pair", "40Gi", 2, {
            let mut pod = json!({"spec": {"priority": 10}});
            merge(&mut pod, &refused());
            pod
        });
        cluster.settle(LONG);
        let mut names = evicted(&cluster);
        names.sort_unstable();
        assert_eq!(names, ended);
        for name in ended {
            cluster.drop_pod(name, true);
        }
        cluster.settle(LONG);
        assert!(cluster.place("pair").is_some());
        cluster.check();
    }
}
