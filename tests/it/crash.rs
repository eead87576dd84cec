//! The process is stopped before, amid and after every verb that it does to its host, and started again.
//! However it went: nothing is half prepared, nothing is held twice, and kubelet's next call succeeds.

use crate::site::{Claim, Life, Site};
use crate::stop_at::{Verb, When};

/// What the process is doing when it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum During {
    Prepare,
    Unprepare,
    Sweep,
}

/// What had happened before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Prepared,
    PreparedInAnotherBoot,
    PreparedAndDeleted,
    PreparedAndEditsLost,
    /// Recorded, some steps done.
    HalfPrepared,
}

/// What happens after the restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// The sweeper comes first, then kubelet asks again.
    SweptAndRetried,
    /// Kubelet is faster than the sweeper.
    Retried,
    /// The pod and its claim are gone; kubelet asks nothing.
    Deleted,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    claim: fn() -> Claim,
    before: Before,
    during: During,
}

fn whole() -> Claim {
    Claim::new("whole", &["gpu-0"])
}

fn sliced() -> Claim {
    Claim::new("sliced", &["gpu-0"]).interval("Long")
}

fn two() -> Claim {
    Claim::new("two", &["gpu-0", "gpu-1"]).interval("Short")
}

fn mig() -> Claim {
    Claim::new("mig", &["gpu-2-mig-1g10gb-19-0"])
}

fn admin() -> Claim {
    Claim::new("admin", &["gpu-1"]).admin()
}

const CLAIMS: [(&str, fn() -> Claim); 5] =
    [("whole GPU", whole), ("time slice", sliced), ("two GPUs", two), ("MIG device", mig), ("admin", admin)];

/// A site and what is on it before the process is stopped.
async fn set_up(case: Case) -> Site {
    let site = Site::new();
    let claim = (case.claim)();
    site.api.put(&claim);
    if case.before == Before::Nothing {
        return site;
    }
    let life = site.life();
    if case.before == Before::HalfPrepared {
        // All steps are done, the last marks are missing.
        life.host.stop_at_next(Verb::WriteEdits, When::After);
        life.prepare(&claim).await.unwrap_err();
        return site;
    }
    life.prepared(&claim, case.name).await;
    match case.before {
        Before::PreparedInAnotherBoot => site.reboot(),
        Before::PreparedAndDeleted => site.api.remove(&claim),
        Before::PreparedAndEditsLost => {
            std::fs::remove_file(site.path("cdi").join(&site.files()[0])).unwrap();
        }
        _ => {}
    }
    site
}

async fn act(life: &Life, case: Case) {
    let claim = (case.claim)();
    // Whether the caller hears an error or nothing is not the point: the process is gone.
    match case.during {
        During::Prepare => drop(life.prepare(&claim).await),
        During::Unprepare => drop(life.unprepare(&claim).await),
        During::Sweep => drop(life.sweep().await),
    }
}

/// What an undisturbed run does to the host.
async fn verbs(case: Case) -> Vec<Verb> {
    let site = set_up(case).await;
    let life = site.life();
    act(&life, case).await;
    life.check(case.name);
    site.check(case.name);
    life.host.log()
}

/// Every place at which a run of these verbs can be stopped.
fn points(verbs: &[Verb]) -> Vec<(usize, When)> {
    let places = |(index, verb): (usize, &Verb)| {
        let half = verb.divisible().then_some((index, When::Half));
        [Some((index, When::Before)), half, Some((index, When::After))].into_iter().flatten()
    };
    verbs.iter().enumerate().flat_map(places).collect()
}

/// A new process after a crash, with the sweeper's first round done.
async fn restart(site: &Site, at: &str) -> Life {
    let life = site.life();
    site.age_temporaries();
    let swept = life.sweep().await.unwrap();
    assert_eq!(swept.failed, 0, "{at}");
    site.check(at);
    life
}

async fn recover(site: &Site, case: Case, undisturbed: &Site, then: Then, at: &str) {
    let claim = (case.claim)();
    if then == Then::Deleted {
        site.api.remove(&claim);
        // The site may not be empty yet only because kubelet still has to unprepare: it need not.
        restart(site, at).await;
        site.check_empty(at);
        return use_again(site, &claim, at).await;
    }
    let life = if then == Then::Retried { site.life() } else { restart(site, at).await };
    let claim_is_gone = case.before == Before::PreparedAndDeleted;
    if case.during != During::Unprepare && !claim_is_gone {
        is_prepared(site, &life, &claim, undisturbed, at).await;
    }
    life.unprepare(&claim).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    site.age_temporaries();
    life.sweep().await.unwrap();
    site.check_empty(at);
    life.check(at);
    drop(life);
    use_again(site, &claim, at).await;
}

/// Preparing gives what it gives on a site where nothing ever went wrong.
async fn is_prepared(site: &Site, life: &Life, claim: &Claim, undisturbed: &Site, at: &str) {
    for _ in 0..2 {
        life.prepared(claim, at).await;
        assert!(site.is_ready(claim), "{at}");
        assert_eq!(site.edits(claim), undisturbed.edits(claim), "{at}");
        for minor in 0..3 {
            assert_eq!(site.time_slice(minor), undisturbed.time_slice(minor), "{at}: GPU {minor}");
        }
    }
    site.check(at);
}

/// Another claim gets the devices, and goes as the first did.
async fn use_again(site: &Site, claim: &Claim, at: &str) {
    let other = claim.clone().with("/metadata/name", "next".into()).uid("uid-next");
    site.api.put(&other);
    let life = site.life();
    life.prepared(&other, at).await;
    life.unprepare(&other).await.unwrap();
    site.check_empty(at);
}

/// Stops a run of the case at every point, with every ending. How many that were.
async fn stop_everywhere(case: Case) -> usize {
    let points = points(&verbs(case).await);
    let undisturbed = set_up(Case { before: Before::Prepared, ..case }).await;
    let mut stops = 0;
    for (index, when) in points {
        for then in [Then::SweptAndRetried, Then::Retried, Then::Deleted] {
            let at = format!(
                "{}: {:?} of {:?}: {when:?} verb {index}, {then:?}",
                case.name, case.during, case.before
            );
            let site = set_up(case).await;
            let life = site.life();
            life.host.stop_at(index, when);
            act(&life, case).await;
            assert!(life.host.stopped(), "{at}: ran through");
            life.check(&at);
            drop(life);
            site.check(&at);
            recover(&site, case, &undisturbed, then, &at).await;
            stops += 1;
        }
    }
    stops
}

async fn stop_all(before: Before, during: During, claims: &[(&'static str, fn() -> Claim)]) -> usize {
    let mut stops = 0;
    for (name, claim) in claims {
        stops += stop_everywhere(Case { name, claim: *claim, before, during }).await;
    }
    stops
}

#[tokio::test]
async fn stopped_while_preparing() {
    // Record, CDI file, two marks: 4 verbs of 3 points for each of 5 kinds, and the time slices.
    let stops = stop_all(Before::Nothing, During::Prepare, &CLAIMS).await;
    println!("{stops} points");
    assert!(stops >= 225, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_preparing_again_after_a_reboot() {
    let stops = stop_all(Before::PreparedInAnotherBoot, During::Prepare, &CLAIMS).await;
    println!("{stops} points");
    assert!(stops >= 225, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_restoring_lost_edits() {
    let stops = stop_all(Before::PreparedAndEditsLost, During::Prepare, &CLAIMS[..2]).await;
    println!("{stops} points");
    assert!(stops >= 18, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_clearing_a_half_done_preparation() {
    let stops = stop_all(Before::HalfPrepared, During::Prepare, &CLAIMS[..3]).await;
    println!("{stops} points");
    assert!(stops >= 150, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_unpreparing() {
    let stops = stop_all(Before::Prepared, During::Unprepare, &CLAIMS).await;
    println!("{stops} points");
    assert!(stops >= 120, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_unpreparing_what_another_boot_prepared() {
    let stops = stop_all(Before::PreparedInAnotherBoot, During::Unprepare, &CLAIMS[..3]).await;
    println!("{stops} points");
    assert!(stops >= 60, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_sweeping() {
    let mut stops = 0;
    for before in [
        Before::HalfPrepared,
        Before::PreparedAndDeleted,
        Before::PreparedAndEditsLost,
        Before::PreparedInAnotherBoot,
    ] {
        stops += stop_all(before, During::Sweep, &CLAIMS[..3]).await;
    }
    println!("{stops} points");
    assert!(stops >= 250, "the sweep has shrunk to {stops} points");
}

/// A life that dies of what killed the one before.
#[tokio::test]
async fn stopped_while_preparing_and_again_while_sweeping() {
    let case = Case { name: "twice", claim: sliced, before: Before::Nothing, during: During::Prepare };
    let undisturbed = set_up(Case { before: Before::Prepared, ..case }).await;
    let mut stops = 0;
    for (index, when) in points(&verbs(case).await) {
        for second in 0.. {
            let at = format!("{when:?} verb {index} of prepare, then verb {second} of the sweep");
            let site = set_up(case).await;
            let life = site.life();
            life.host.stop_at(index, when);
            act(&life, case).await;
            drop(life);
            let life = site.life();
            life.host.stop_at(second, When::After);
            drop(life.sweep().await);
            if !life.host.stopped() {
                break;
            }
            drop(life);
            site.check(&at);
            recover(&site, case, &undisturbed, Then::SweptAndRetried, &at).await;
            stops += 1;
        }
    }
    println!("{stops} points");
    assert!(stops >= 25, "the sweep has shrunk to {stops} points");
}
