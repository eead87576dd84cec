//! The annotation of the webhook counts where an administrator has said so, and nowhere else.

use serde_json::json;

use super::cluster::Cluster;
use super::scenes::{LONG, MOMENT, cluster, put_kai, rules};
use crate::cluster::events::EventSubject;
use crate::cluster::feed::{Change, WatchEvent};

const CLAIM: &str = "kai-gpu-share";

fn exists(cluster: &Cluster) -> bool {
    cluster.claims.contains_key(&("ml".to_owned(), CLAIM.to_owned()))
}

/// What the pod was told since this was last asked.
fn told(cluster: &mut Cluster) -> Vec<String> {
    let notes = cluster.core.recorder.take().0.into_iter();
    notes
        .filter(|note| matches!(&note.subject, EventSubject::Pod { name, .. } if name == "kai"))
        .map(|note| note.message)
        .collect()
}

#[test]
fn the_annotation_makes_no_claim_in_a_namespace_that_has_not_opted_in() {
    let mut cluster = cluster(1, 1);
    cluster.opt_out("ml");
    put_kai(&mut cluster);
    cluster.settle(LONG);
    assert!(!exists(&cluster), "whoever may create a pod has no right to claims by that");
    let said = told(&mut cluster);
    assert_eq!(said.len(), 1, "{said:?}");
    for words in ["tranche.dev/gpu-share makes no claim", "tranche.dev/kai-annotations=enabled", "ml is none"]
    {
        assert!(said[0].contains(words), "{said:?}");
    }
    // An annotation, or the name of a namespace that has opted in, is no label.
    cluster.opt_in("others");
    cluster.settle(LONG);
    assert!(!exists(&cluster) && told(&mut cluster).is_empty());
    cluster.opt_in("ml");
    cluster.settle(LONG);
    assert!(cluster.place(CLAIM).is_some());
}

#[test]
fn a_claim_that_its_user_made_is_served_without_a_word() {
    let mut cluster = cluster(1, 1);
    cluster.opt_out("ml");
    cluster.put_share(CLAIM, json!({"memory": "2000Mi"}), 1);
    put_kai(&mut cluster);
    cluster.settle(LONG);
    assert!(cluster.place(CLAIM).is_some());
    let said = told(&mut cluster);
    assert!(said.iter().all(|words| !words.contains("makes no claim")), "{said:?}");
}

#[test]
fn what_is_placed_goes_on_when_the_label_is_taken_away_and_what_is_promised_does_not() {
    let mut placed = cluster(1, 1);
    put_kai(&mut placed);
    placed.settle(LONG);
    let at = placed.place(CLAIM);
    placed.opt_out("ml");
    placed.settle(LONG);
    assert!(at.is_some() && placed.place(CLAIM) == at);
    placed.fail_over(rules());
    placed.settle(LONG);
    assert_eq!(placed.place(CLAIM), at);
    placed.check();

    let mut promised = cluster(1, 1);
    put_kai(&mut promised);
    promised.settle(MOMENT);
    promised.opt_out("ml");
    promised.settle(LONG);
    assert!(!exists(&promised), "no claim, and nothing kept for one");
    let said = told(&mut promised);
    assert!(said.last().is_some_and(|words| words.contains("makes no claim")), "{said:?}");
    promised.put_share("all", json!({"fraction": "1"}), 1);
    promised.put_pod("all", &["all"], json!({}));
    promised.settle(LONG);
    assert!(promised.place("all").is_some());
    promised.check();
}

/// What is new is told, though the pod was told something else a moment before.
#[test]
fn who_waits_for_room_is_told_that_the_label_is_gone() {
    let mut cluster = cluster(1, 1);
    cluster.put_share("all", json!({"fraction": "1"}), 1);
    cluster.put_pod("all", &["all"], json!({}));
    cluster.settle(LONG);
    put_kai(&mut cluster);
    cluster.settle(MOMENT);
    assert!(told(&mut cluster).iter().any(|words| words.contains("needs 2000 MiB")));
    cluster.opt_out("ml");
    cluster.settle(3 * LONG);
    let said = told(&mut cluster);
    assert!(said.last().is_some_and(|words| words.contains("makes no claim")), "{said:?}");
}

#[test]
fn a_controller_that_may_not_read_namespaces_serves_claims_and_makes_none() {
    let mut cluster = cluster(1, 1);
    cluster.fail_over(rules());
    cluster.feed.retain(|change| !matches!(change, Change::Namespace(_)));
    let problem = "namespaces is forbidden".to_owned();
    let refused = WatchEvent::Interrupted { problem, is_forbidden: true };
    cluster.feed.push_back(Change::Namespace(refused.clone()));
    cluster.settle(MOMENT);
    assert!(!cluster.core.view.is_complete(), "once may be a role that is being written anew");
    (1..5).for_each(|_| cluster.feed.push_back(Change::Namespace(refused.clone())));
    put_kai(&mut cluster);
    cluster.put_share("plain", json!({"memory": "2Gi"}), 1);
    cluster.put_pod("plain", &["plain"], json!({}));
    cluster.settle(LONG);
    assert!(cluster.place("plain").is_some() && !exists(&cluster));
    let (notes, troubles) = cluster.core.recorder.take();
    assert!(troubles.iter().any(|words| words.contains("Namespaces") && words.contains("forbidden")));
    // Who has opted in is not known: nobody is told that he has not.
    assert!(notes.iter().all(|note| !note.message.contains("makes no claim")));
}
