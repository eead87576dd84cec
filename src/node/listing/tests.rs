use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::thread;

use super::*;
use crate::node::holders::tests::Fake;

const PATIENCE: Duration = Duration::from_secs(60);

fn listings(fake: &Arc<Fake>, stall: Duration) -> Arc<Listings> {
    Arc::new(Listings { stall, ..Listings::new(fake.clone()) })
}

fn ask(listings: &Arc<Listings>) -> thread::JoinHandle<Listing> {
    let listings = listings.clone();
    thread::spawn(move || listings.since(Instant::now()))
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let ended = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < ended, "{what}");
        thread::yield_now();
    }
}

fn answer_of(asked: thread::JoinHandle<Listing>) -> Listing {
    wait_until("nobody who asks waits for ever", || asked.is_finished());
    asked.join().unwrap()
}

/// A read of /proc that does not come back held everybody's claims up, and whoever asked afterwards.
#[test]
fn a_listing_that_is_held_up_is_left_and_the_next_one_serves() {
    let (let_go, held_up) = channel();
    let fake = Arc::new(Fake { held_up: Mutex::new(Some(held_up)), ..Fake::default() });
    let listings = listings(&fake, Duration::from_millis(300));
    let words = answer_of(ask(&listings)).unwrap_err();
    assert!(words.contains("held thread list-processes up"), "{words}");
    let found = answer_of(ask(&listings)).unwrap();
    assert!(found.by_pod.contains_key(&"uid".into()), "the first one stands still, and holds nobody up");
    drop(let_go);
}

#[test]
fn a_listing_serves_all_who_asked_before_it_began_and_nobody_else() {
    let (let_go, held_up) = channel();
    let fake = Arc::new(Fake { held_up: Mutex::new(Some(held_up)), ..Fake::default() });
    let listings = listings(&fake, PATIENCE);
    let first = ask(&listings);
    let looks = |count: usize| move |fake: &Fake| fake.looks.load(Ordering::SeqCst) == count;
    wait_until("nobody lists", || looks(1)(&fake));
    let asked = Instant::now();
    let later: Vec<_> = (0..4).map(|_| ask(&listings)).collect();
    drop(let_go);
    answer_of(first).unwrap();
    later.into_iter().for_each(|one| drop(answer_of(one).unwrap()));
    let made = fake.looks.load(Ordering::SeqCst);
    assert!((2..=5).contains(&made), "{made} listings");
    assert!(listings.since(asked).is_ok());
    assert!(looks(made)(&fake), "there was one since then");
    // One that failed serves as well.
    let soon = Instant::now() + PATIENCE;
    listings.state().last = Some((soon, Err("it took too long".to_owned())));
    assert_eq!(listings.since(soon), Err("it took too long".to_owned()));
    assert!(looks(made)(&fake));
}
