//! Where the scheduler's books have a GPU once, however many claims name it (Kubernetes 1.34 and 1.35).

use super::cluster::Cluster;
use super::scenes::{LONG, SECOND, rules, share};
use crate::controller::holds::ReleaseStep;
use crate::controller::write::Write;

/// A whole GPU that the scheduler gives while we hold it; none of its books has it twice.
fn lost_race() -> Cluster {
    let mut cluster = Cluster::new(rules());
    cluster.keeps = false;
    cluster.put_node("node-0", 1);
    cluster.put_whole("w");
    share(&mut cluster, "a", "10Gi");
    cluster.settle(SECOND);
    assert_eq!((cluster.holds().len(), cluster.place("a")), (1, None), "somebody may still come");
    give(&mut cluster, "w");
    cluster
}

/// The scheduler gives gpu-0 of node-0 to a claim, as a whole.
fn give(cluster: &mut Cluster, name: &str) {
    cluster.put_whole(name);
    let mut claim = cluster.claim(name).clone();
    claim.status.get_or_insert_default().allocation =
        Some(crate::controller::grant::hold(&"node-0".into(), "gpu", "gpu-0", None));
    cluster.store(claim);
}

#[test]
fn where_the_books_have_a_gpu_once_a_hold_that_lost_stands_by_until_the_winner_ends() {
    let mut cluster = lost_race();
    cluster.settle(10 * LONG);
    assert_eq!((cluster.holds().len(), cluster.place("a")), (1, None));
    assert!(cluster.blind.is_empty() && cluster.books.len() == 1, "the scheduler knows that somebody has it");
    cluster.drop_claim(&("ml".to_owned(), "w".to_owned()));
    cluster.settle(2 * LONG);
    assert!(cluster.place("a").is_some());
    cluster.check();
}

/// A hold of which somebody got the GPU while its clearing was on its way.
fn gone_too_late() -> Cluster {
    let mut cluster = lost_race();
    cluster.settle(LONG);
    cluster.drop_claim(&("ml".to_owned(), "w".to_owned()));
    cluster.deliver(100);
    cluster.round();
    assert!(matches!(cluster.writes[0], Write::Release(_, ReleaseStep::Clear(_))));
    // Between the decision and the clearing.
    give(&mut cluster, "x");
    cluster.write(false);
    assert_eq!(cluster.blind.len(), 1);
    cluster
}

#[test]
fn a_hold_that_went_too_late_is_allocated_again_so_that_the_books_are_right() {
    let mut cluster = gone_too_late();
    cluster.settle(LONG);
    assert!(cluster.blind.is_empty() && cluster.books.len() == 1);
    assert_eq!((cluster.holds().len(), cluster.place("a")), (1, None));
    cluster.drop_claim(&("ml".to_owned(), "x".to_owned()));
    cluster.settle(2 * LONG);
    assert!(cluster.place("a").is_some(), "it stands by no longer than it must");
    cluster.check();
}

#[test]
fn a_new_leader_finds_the_hold_that_went_too_late() {
    let mut cluster = gone_too_late();
    cluster.fail_over(rules());
    cluster.settle(LONG);
    assert!(cluster.blind.is_empty() && cluster.books.len() == 1);
    cluster.check();
}

#[test]
fn where_the_books_have_a_gpu_once_a_hold_stands_by_while_its_node_is_away() {
    let mut cluster = lost_race();
    cluster.settle(LONG);
    cluster.drop_node("node-0");
    cluster.settle(LONG);
    assert!(
        cluster.blind.is_empty() && cluster.books.len() == 1,
        "somebody has it, and the node may come back"
    );
    cluster.drop_claim(&("ml".to_owned(), "w".to_owned()));
    cluster.settle(LONG);
    assert_eq!(cluster.holds(), [""; 0]);
}

#[test]
fn where_the_books_have_a_gpu_once_a_hold_is_worth_nothing_once_somebody_has_come_and_gone_unseen() {
    let mut cluster = lost_race();
    cluster.drop_claim(&("ml".to_owned(), "w".to_owned()));
    assert!(cluster.books.is_empty(), "the scheduler believes that nobody has it");
    // The watch is late: whoever reads all claims now finds the hold alone.
    let late = std::mem::take(&mut cluster.feed);
    cluster.now += 3 * SECOND;
    for _ in 0..3 {
        cluster.round();
        while !cluster.writes.is_empty() {
            cluster.write(false);
        }
    }
    assert_eq!(cluster.place("a"), None);
    let mark = std::mem::replace(&mut cluster.feed, late);
    cluster.feed.extend(mark);
    cluster.settle(2 * LONG);
    assert!(cluster.place("a").is_some() && cluster.books.len() == 1, "it was taken anew");
    cluster.check();
}
