//! What is told of preemption to people who ask why a claim waits.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::cluster::{Cluster, NS, merge};
use super::explain::listed;
use super::preempting::{ask, cluster, evicted, refused, run, wait};
use crate::cluster::feed::Change;
use crate::controller::Moment;
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::explain::{Answer, Listing, Preemption, Subject, explain};
use crate::controller::steps::preempting::Prospect;

pub(super) fn told(cluster: &mut Cluster, name: &str) -> Option<Preemption> {
    let unheard = std::mem::take(&mut cluster.feed);
    let (core, listing) = listed(cluster);
    cluster.feed = unheard;
    told_by(core, &listing, name, cluster.now)
}

fn told_by(mut core: Core, listing: &Listing, name: &str, now: Moment) -> Option<Preemption> {
    let claim = Subject::Claim(core.view.claim_named("ml", name).unwrap().key);
    let now = Timestamp::UNIX_EPOCH + SignedDuration::try_from(now).unwrap();
    match explain(&mut core, listing, &[claim], now).remove(0).answer {
        Answer::Waits { preemption, .. } => preemption,
        other => panic!("it does not wait: {other:?}"),
    }
}

/// In words.
fn words(cluster: &mut Cluster, name: &str) -> String {
    told(cluster, name).expect("something is told").to_string()
}

/// It waits, and the controller has not heard of it yet.
fn unheard(cluster: &mut Cluster, name: &str, gib: u32, priority: i32, more: &Value) {
    let mut pod = refused();
    merge(&mut pod, more);
    ask(cluster, name, gib, priority, &pod);
}

#[test]
fn who_would_end_is_told_and_then_ends() {
    let mut cluster = cluster(&[2]);
    for (name, gib, priority) in [("a", 40, 0), ("b", 40, 0), ("c", 40, 5), ("d", 40, 5)] {
        run(&mut cluster, name, gib, priority, &json!({}));
    }
    unheard(&mut cluster, "high", 60, 10, &json!({}));
    let found = told(&mut cluster, "high").unwrap();
    let names: Vec<&str> = found.prospect.pods().iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!((found.prospect.as_str(), &names[..]), ("ends", &["a", "b"][..]));
    assert_eq!(found.prospect.node().map(|node| node.as_str()), Some("node-0"));
    let (words, device) = (found.to_string(), cluster.place("a").unwrap().1[0].clone());
    assert_eq!(
        words,
        format!(
            "the controller ends 2 pods of lower priority for it on node node-0: ml/a, ml/b; it is kept 61440 MiB of \
             {device}"
        )
    );
    assert_eq!(evicted(&cluster), [""; 0], "who asks ends nobody");
    cluster.settle(std::time::Duration::from_secs(1));
    assert_eq!(evicted(&cluster), ["a", "b"]);
    // From then on nobody else does.
    let found = told(&mut cluster, "high").unwrap();
    assert_eq!(found.to_string(), "nobody ends for it: what is ending on node node-0 makes room");
}

#[test]
fn why_nobody_ends_is_told() {
    let mut cluster = cluster(&[1]);
    run(&mut cluster, "low", 60, 5, &json!({}));
    let never = json!({"spec": {"preemptionPolicy": "Never"}});
    unheard(&mut cluster, "never", 60, 10, &never);
    assert_eq!(words(&mut cluster, "never"), "nobody ends for it: pod never has preemptionPolicy: Never");
    ask(&mut cluster, "fresh", 60, 10, &json!({}));
    assert_eq!(
        words(&mut cluster, "fresh"),
        "nobody ends for it: the scheduler of pod fresh has not tried it in vain yet (PodScheduled)"
    );
    unheard(&mut cluster, "large", 90, 10, &json!({}));
    assert_eq!(
        words(&mut cluster, "large"),
        "nobody ends for it: on no node that takes it do pods of lower priority make room by ending"
    );
    unheard(&mut cluster, "same", 60, 5, &json!({}));
    assert_eq!(words(&mut cluster, "same"), "nobody ends for it: no pod of lower priority has a share");
    unheard(&mut cluster, "lowest", 60, 0, &json!({}));
    assert_eq!(told(&mut cluster, "lowest"), None, "of nobody's priority is lower");
    assert_eq!(evicted(&cluster), [""; 0]);
}

#[test]
fn budgets_that_are_in_the_way_are_named() {
    let mut cluster = cluster(&[1]);
    let guarded = json!({"metadata": {"labels": {"app": "db"}}});
    run(&mut cluster, "db", 40, 0, &guarded);
    run(&mut cluster, "db2", 40, 0, &guarded);
    cluster.put_budget(("ml", "keep"), json!({"app": "db"}), 1);
    cluster.put_budget(("ml", "other"), json!({"app": "web"}), 0);
    wait(&mut cluster, "high", 80, 10);
    assert_eq!(evicted(&cluster), [""; 0]);
    let found = told(&mut cluster, "high").unwrap();
    assert_eq!(
        found.to_string(),
        "nobody ends for it: PodDisruptionBudget ml/keep keeps pods of lower priority on node node-0: ml/db, ml/db2"
    );
    assert_eq!((found.prospect.as_str(), found.prospect.budgets()), ("budget", &["ml/keep".to_owned()][..]));
}

#[test]
fn the_controllers_switch_and_unseen_budgets_count() {
    let mut cluster = cluster(&[1]);
    cluster.core.rules.preemption = false;
    run(&mut cluster, "low", 60, 5, &json!({}));
    wait(&mut cluster, "high", 60, 10);
    let (mut core, listing) = listed(&mut cluster);
    core.rules.preemption = false;
    let off = told_by(core, &listing, "high", cluster.now).unwrap();
    assert_eq!(off.prospect, Prospect::Off);
    assert_eq!(off.to_string(), "nobody ends for it: preemption is off (the controller's --preemption)");
    cluster.relist();
    let (mut core, listing) = (Core::new(Rules::default(), NS), Listing::new("ml"));
    for change in cluster.feed.drain(..).filter(|change| !matches!(change, Change::Budget(_))) {
        core.apply(change, Moment::ZERO);
    }
    let blind = told_by(core, &listing, "high", cluster.now).unwrap();
    assert!(blind.blind, "{blind:?}");
    assert!(blind.to_string().contains("you may not list poddisruptionbudgets.policy"), "{blind}");
}
