//! The process is stopped before, amid and after every verb that it does to its host, and started again.
//! However it went: nothing is half prepared, nothing is held twice, and kubelet's next call succeeds.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tranche::ledger::Phase;

use crate::site::{Claim, PluginRun, Site};
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

fn share() -> Claim {
    Claim::new("share", &["gpu-0"]).share("2000Mi", "25")
}

/// Shares of two GPUs: one daemon for both.
fn shares() -> Claim {
    Claim::new("shares", &["gpu-0", "gpu-1"]).share("4000Mi", "0")
}

/// A MIG device that is made for the claim.
fn carved() -> Claim {
    Claim::new("carved", &["gpu-3-mig-1g10gb-19-0"])
}

/// Two of them.
fn carved_twice() -> Claim {
    Claim::new("carved-twice", &["gpu-3-mig-1g10gb-19-0", "gpu-3-mig-2g20gb-14-2"])
}

/// One that the controller chose.
fn carved_for_share() -> Claim {
    Claim::new("carved-for-share", &["gpu-3"]).granted(9984, 0).carved(19, 0, 1)
}

const CARVED: [Named; 3] = [
    ("a carved device", carved),
    ("two carved devices", carved_twice),
    ("a carved device of the controller's", carved_for_share),
];

/// A MIG device of a GPU that is whole until then.
fn switched_on() -> Claim {
    Claim::new("switched-on", &["gpu-3-mig-1g10gb-19-0"])
}

/// The whole GPU, off which a MIG device was cut a moment before.
fn switched_off() -> Claim {
    Claim::new("switched-off", &["gpu-3"])
}

const SWITCHED: [Named; 2] =
    [("a MIG device of a whole GPU", switched_on), ("a GPU that was cut", switched_off)];

type Named = (&'static str, fn() -> Claim);

const CLAIMS: [Named; 7] = [
    ("whole GPU", whole),
    ("time slice", sliced),
    ("two GPUs", two),
    ("share", share),
    ("shares of two GPUs", shares),
    ("MIG device", mig),
    ("admin", admin),
];

/// A site and what is on it before the process is stopped.
async fn set_up(case: Case) -> Site {
    let claim = (case.claim)();
    let site = match &claim.id().name {
        name if name.starts_with("carved") => Site::carved(),
        name if name.starts_with("switched") => Site::whole_or_cut(),
        _ => Site::new(),
    };
    if claim.id().name == "switched-off" {
        let (plugin, earlier) = (site.start_plugin(), switched_on().uid("uid-earlier"));
        site.api.put(&earlier);
        plugin.prepared(&earlier, case.name).await;
        plugin.unprepare(&earlier).await.unwrap();
        site.api.remove(&earlier);
    }
    site.api.put(&claim);
    if case.before == Before::Nothing {
        return site;
    }
    let plugin = site.start_plugin();
    if case.before == Before::HalfPrepared {
        // All steps are done, the last marks are missing.
        plugin.host.stop_at_next(Verb::WriteEdits, When::After);
        plugin.prepare(&claim).await.unwrap_err();
        return site;
    }
    plugin.prepared(&claim, case.name).await;
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

async fn act(plugin: &PluginRun, case: Case) {
    let claim = (case.claim)();
    // Whether the caller hears an error or nothing is not the point: the process is gone.
    match case.during {
        During::Prepare => drop(plugin.prepare(&claim).await),
        During::Unprepare => drop(plugin.unprepare(&claim).await),
        During::Sweep => _ = plugin.sweep().await,
    }
}

/// What an undisturbed run does to the host.
async fn verbs(case: Case) -> Vec<Verb> {
    let site = set_up(case).await;
    let plugin = site.start_plugin();
    act(&plugin, case).await;
    plugin.check(case.name);
    site.check(case.name);
    plugin.host.log()
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
async fn restart(site: &Site, at: &str) -> PluginRun {
    let plugin = site.start_plugin();
    site.age_temporaries();
    let swept = plugin.sweep().await.unwrap();
    assert_eq!(swept.failed, 0, "{at}");
    site.check(at);
    plugin
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
    let plugin = if then == Then::Retried { site.start_plugin() } else { restart(site, at).await };
    let claim_is_gone = case.before == Before::PreparedAndDeleted;
    if case.during != During::Unprepare && !claim_is_gone {
        is_prepared(site, &plugin, &claim, undisturbed, at).await;
    }
    plugin.unprepare(&claim).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    site.age_temporaries();
    plugin.sweep().await.unwrap();
    site.check_empty(at);
    plugin.check(at);
    drop(plugin);
    use_again(site, &claim, at).await;
}

/// Preparing gives what it gives on a site where nothing ever went wrong.
async fn is_prepared(site: &Site, plugin: &PluginRun, claim: &Claim, undisturbed: &Site, at: &str) {
    for _ in 0..2 {
        plugin.prepared(claim, at).await;
        assert!(site.is_ready(claim), "{at}");
        assert_eq!(site.edits(claim), undisturbed.edits(claim), "{at}");
        for minor in 0..3 {
            assert_eq!(site.time_slice(minor), undisturbed.time_slice(minor), "{at}: GPU {minor}");
        }
        assert_eq!(site.mps.kept(), undisturbed.mps.kept(), "{at}");
    }
    site.check(at);
}

/// Another claim gets the devices, and goes as the first did.
async fn use_again(site: &Site, claim: &Claim, at: &str) {
    let other = claim.clone().with("/metadata/name", "next".into()).uid("uid-next");
    site.api.put(&other);
    let plugin = site.start_plugin();
    plugin.prepared(&other, at).await;
    plugin.unprepare(&other).await.unwrap();
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
            let plugin = site.start_plugin();
            plugin.host.stop_at(index, when);
            act(&plugin, case).await;
            assert!(plugin.host.stopped(), "{at}: ran through");
            plugin.check(&at);
            drop(plugin);
            site.check(&at);
            recover(&site, case, &undisturbed, then, &at).await;
            stops += 1;
        }
    }
    stops
}

async fn stop_all(before: Before, during: During, claims: &[Named]) -> usize {
    let mut stops = 0;
    for (name, claim) in claims {
        stops += stop_everywhere(Case { name, claim: *claim, before, during }).await;
    }
    stops
}

#[tokio::test]
async fn stopped_while_preparing() {
    // For each kind: record, CDI file and two marks can be stopped at three points each, with three endings;
    // each time slice adds a mark and itself.
    let stops = stop_all(Before::Nothing, During::Prepare, &CLAIMS).await;
    assert!(stops >= 225, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_preparing_again_after_a_reboot() {
    let stops = stop_all(Before::PreparedInAnotherBoot, During::Prepare, &CLAIMS).await;
    assert!(stops >= 330, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_restoring_lost_edits() {
    let stops = stop_all(Before::PreparedAndEditsLost, During::Prepare, &CLAIMS[..5]).await;
    assert!(stops >= 18, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_clearing_a_half_done_preparation() {
    let stops = stop_all(Before::HalfPrepared, During::Prepare, &CLAIMS[..5]).await;
    assert!(stops >= 207, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_unpreparing() {
    let stops = stop_all(Before::Prepared, During::Unprepare, &CLAIMS).await;
    assert!(stops >= 123, "the sweep has shrunk to {stops} points");
}

#[tokio::test]
async fn stopped_while_unpreparing_what_another_boot_prepared() {
    let stops = stop_all(Before::PreparedInAnotherBoot, During::Unprepare, &CLAIMS[..5]).await;
    assert!(stops >= 63, "the sweep has shrunk to {stops} points");
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
        stops += stop_all(before, During::Sweep, &CLAIMS[..5]).await;
    }
    assert!(stops >= 378, "the sweep has shrunk to {stops} points");
}

/// The same with MIG instances that are made for the claim: half made, made and not recorded, half ended.
#[tokio::test]
async fn stopped_while_carving_a_board() {
    let mut stops = 0;
    for (before, during) in [
        (Before::Nothing, During::Prepare),
        (Before::PreparedInAnotherBoot, During::Prepare),
        (Before::PreparedAndEditsLost, During::Prepare),
        (Before::HalfPrepared, During::Prepare),
        (Before::Prepared, During::Unprepare),
        (Before::PreparedInAnotherBoot, During::Unprepare),
        (Before::HalfPrepared, During::Sweep),
        (Before::PreparedAndDeleted, During::Sweep),
        (Before::PreparedAndEditsLost, During::Sweep),
        (Before::PreparedInAnotherBoot, During::Sweep),
    ] {
        stops += stop_all(before, during, &CARVED).await;
    }
    assert!(stops >= 300, "the sweep has shrunk to {stops} points");
}

/// The same with MIG modes that are switched for the claim: recorded and not switched, switched and not yet in use.
#[tokio::test]
async fn stopped_while_switching_a_mig_mode() {
    let mut stops = 0;
    for (before, during) in [
        (Before::Nothing, During::Prepare),
        (Before::PreparedInAnotherBoot, During::Prepare),
        (Before::HalfPrepared, During::Prepare),
        (Before::Prepared, During::Unprepare),
        (Before::HalfPrepared, During::Sweep),
        (Before::PreparedAndDeleted, During::Sweep),
        (Before::PreparedInAnotherBoot, During::Sweep),
    ] {
        stops += stop_all(before, during, &SWITCHED).await;
    }
    assert!(stops >= 150, "the sweep has shrunk to {stops} points");
}

/// A run of the plugin that ends at the same point as the run before.
#[tokio::test]
async fn stopped_while_preparing_and_again_while_sweeping() {
    let case = Case { name: "twice", claim: sliced, before: Before::Nothing, during: During::Prepare };
    let undisturbed = set_up(Case { before: Before::Prepared, ..case }).await;
    let mut stops = 0;
    for (index, when) in points(&verbs(case).await) {
        for second in 0.. {
            let at = format!("{when:?} verb {index} of prepare, then verb {second} of the sweep");
            let site = set_up(case).await;
            let plugin = site.start_plugin();
            plugin.host.stop_at(index, when);
            act(&plugin, case).await;
            drop(plugin);
            let plugin = site.start_plugin();
            plugin.host.stop_at(second, When::After);
            _ = plugin.sweep().await;
            if !plugin.host.stopped() {
                break;
            }
            drop(plugin);
            site.check(&at);
            recover(&site, case, &undisturbed, Then::SweptAndRetried, &at).await;
            stops += 1;
        }
    }
    assert!(stops >= 37, "the sweep has shrunk to {stops} points");
}

/// What may happen to a node, in any order.
#[derive(Debug, Clone)]
enum Event {
    /// A claim is created, in place of the one of its name if there is one.
    Create {
        slot: usize,
        gpus: Vec<u32>,
        kind: Kind,
    },
    Delete {
        slot: usize,
    },
    Call(Call),
    Crash {
        during: Call,
        verb: usize,
        when: When,
    },
    Restart,
    Reboot,
    /// Somebody deletes a claim's CDI file.
    LoseEdits {
        claim: usize,
    },
    Silence(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Whole,
    Sliced,
    /// Of the first GPU only; two fit, and a third does not.
    Share,
}

#[derive(Debug, Clone, Copy)]
enum Call {
    /// Of any claim that ever was, the deleted ones too.
    Prepare(usize),
    Unprepare(usize),
    Sweep,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let call = prop_oneof![
        4 => (0_usize..12).prop_map(Call::Prepare),
        2 => (0_usize..12).prop_map(Call::Unprepare),
        1 => Just(Call::Sweep),
    ];
    let when = prop_oneof![Just(When::Before), Just(When::Half), Just(When::After)];
    let kind = prop_oneof![1 => Just(Kind::Whole), 1 => Just(Kind::Sliced), 2 => Just(Kind::Share)];
    let gpus = proptest::sample::subsequence(vec![0_u32, 1, 2], 1..=2);
    let event = prop_oneof![
        4 => (0_usize..4, gpus, kind).prop_map(|(slot, gpus, kind)| Event::Create { slot, gpus, kind }),
        1 => (0_usize..4).prop_map(|slot| Event::Delete { slot }),
        6 => call.clone().prop_map(Event::Call),
        4 => (call, 0_usize..9, when).prop_map(|(during, verb, when)| Event::Crash { during, verb, when }),
        1 => Just(Event::Restart),
        1 => Just(Event::Reboot),
        1 => (0_usize..12).prop_map(|claim| Event::LoseEdits { claim }),
        1 => any::<bool>().prop_map(Event::Silence),
    ];
    proptest::collection::vec(event, 1..30)
}

/// A claim that has a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    Ready {
        /// Its container edits are there, and its time slice is set.
        real: bool,
    },
    /// A crash left it between two steps.
    Half,
}

/// The node, and beside it what is expected of it: a page of rules instead of a ledger.
struct World {
    site: Site,
    plugin: Option<PluginRun>,
    /// All that ever were, in the order of their creation.
    claims: Vec<(usize, Vec<u32>, Kind, Claim)>,
    /// By slot: the claim that the API server has.
    stored: BTreeMap<usize, usize>,
    silent: bool,
    holds: BTreeMap<usize, Hold>,
}

impl World {
    fn new() -> Self {
        let site = Site::with_whole_gpus(3);
        let plugin = Some(site.start_plugin());
        let (claims, stored, holds) = Default::default();
        Self { site, plugin, claims, stored, silent: false, holds }
    }

    fn is_stored(&self, claim: usize) -> bool {
        self.stored.get(&self.claims[claim].0) == Some(&claim)
    }

    /// Words of the refusal, if other claims stand in the claim's way.
    fn obstacle(&self, claim: usize) -> Option<[&'static str; 2]> {
        let (_, gpus, kind, _) = &self.claims[claim];
        let others = self.holds.keys().filter(|other| **other != claim).map(|other| &self.claims[*other]);
        let on_mine: Vec<_> = others.filter(|other| other.1.iter().any(|gpu| gpus.contains(gpu))).collect();
        let shares = on_mine.iter().filter(|other| other.2 == Kind::Share).count();
        match kind {
            Kind::Share if shares == on_mine.len() => {
                (shares > 1).then_some(["does not fit", "2 other claims"])
            }
            _ => (!on_mine.is_empty()).then_some(["in use by claim", "team/slot-"]),
        }
    }

    /// Numbers of claims are meant modulo the claims that there are.
    fn meant(&self, call: Call) -> Call {
        let claims = self.claims.len();
        match call {
            Call::Prepare(claim) if claims > 0 => Call::Prepare(claim % claims),
            Call::Unprepare(claim) if claims > 0 => Call::Unprepare(claim % claims),
            _ => Call::Sweep,
        }
    }

    async fn happen(&mut self, event: Event) {
        match event {
            Event::Create { slot, gpus, kind } => self.create(slot, gpus, kind),
            Event::Delete { slot } => {
                if let Some(claim) = self.stored.remove(&slot) {
                    self.site.api.remove(&self.claims[claim].3);
                }
            }
            Event::Call(call) => self.call(self.meant(call)).await,
            Event::Crash { during, verb, when } => self.crash(self.meant(during), verb, when).await,
            Event::Restart => self.restart(),
            Event::Reboot => {
                self.site.reboot();
                self.restart();
                let ready = self.holds.values_mut().filter(|hold| **hold != Hold::Half);
                ready.for_each(|hold| *hold = Hold::Ready { real: false });
            }
            Event::LoseEdits { claim } => self.lose_edits(claim),
            Event::Silence(silent) => {
                self.silent = silent;
                self.site.api.silent.store(silent, std::sync::atomic::Ordering::SeqCst);
            }
        }
    }

    fn restart(&mut self) {
        self.plugin = None;
        self.plugin = Some(self.site.start_plugin());
    }

    fn create(&mut self, slot: usize, mut gpus: Vec<u32>, kind: Kind) {
        let number = self.claims.len();
        if kind == Kind::Share {
            gpus.truncate(1);
        }
        let devices: Vec<String> = gpus.iter().map(|gpu| format!("gpu-{gpu}")).collect();
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let claim = Claim::new(&format!("slot-{slot}"), &devices).uid(&format!("uid-{number}"));
        let claim = match kind {
            Kind::Whole => claim,
            Kind::Sliced => claim.interval("Long"),
            Kind::Share => claim.share("30Gi", "25"),
        };
        self.site.api.put(&claim);
        self.stored.insert(slot, number);
        self.claims.push((slot, gpus, kind, claim));
    }

    fn lose_edits(&mut self, claim: usize) {
        if let Some(hold @ Hold::Ready { .. }) = self.holds.get_mut(&claim) {
            let file = tranche::cdi::file_name(&self.claims[claim].3.id().uid);
            drop(std::fs::remove_file(self.site.path("cdi").join(file)));
            *hold = Hold::Ready { real: false };
        }
    }

    /// A call that runs through, and its rule.
    async fn call(&mut self, call: Call) {
        let plugin = self.plugin.take().unwrap();
        match call {
            Call::Prepare(claim) => {
                let object = &self.claims[claim].3;
                if self.silent {
                    plugin.refused(object, &["no route to host"]).await;
                } else if !self.is_stored(claim) {
                    plugin.refused(object, &["team/slot-"]).await;
                } else if let Some(words) = self.obstacle(claim) {
                    plugin.refused(object, &words).await;
                    // What was left of an earlier attempt is cleared before the refusal.
                    self.holds.remove(&claim);
                } else {
                    plugin.prepared(object, "prepare").await;
                    self.holds.insert(claim, Hold::Ready { real: true });
                }
            }
            Call::Unprepare(claim) => {
                plugin.unprepare(&self.claims[claim].3).await.unwrap();
                self.holds.remove(&claim);
            }
            Call::Sweep => {
                assert_eq!(plugin.sweep().await.unwrap().failed, 0);
                self.holds = self.swept();
            }
        }
        plugin.check("I1");
        self.plugin = Some(plugin);
    }

    fn swept(&self) -> BTreeMap<usize, Hold> {
        let ready = self.holds.iter().filter(|(_, hold)| **hold != Hold::Half);
        let kept = ready.filter(|(claim, _)| self.silent || self.is_stored(**claim));
        kept.map(|(claim, hold)| (*claim, if self.silent { *hold } else { Hold::Ready { real: true } }))
            .collect()
    }

    /// The process is stopped amid a call. Which of the possible states is left is read from the disk; what
    /// the call did not concern must be as it was.
    async fn crash(&mut self, during: Call, verb: usize, when: When) {
        let plugin = self.plugin.take().unwrap();
        plugin.host.stop_at(verb, when);
        let concerned: Vec<usize> = match during {
            Call::Prepare(claim) | Call::Unprepare(claim) => vec![claim],
            Call::Sweep => self.holds.keys().copied().collect(),
        };
        match during {
            Call::Prepare(claim) => drop(plugin.prepare(&self.claims[claim].3).await),
            Call::Unprepare(claim) => drop(plugin.unprepare(&self.claims[claim].3).await),
            Call::Sweep => _ = plugin.sweep().await,
        }
        plugin.check("I1");
        drop(plugin);
        let left = self.left();
        let others = |holds: &BTreeMap<usize, Hold>| -> BTreeMap<usize, Hold> {
            holds.iter().filter(|(claim, _)| !concerned.contains(claim)).map(|(c, h)| (*c, *h)).collect()
        };
        assert_eq!(others(&left), others(&self.holds), "{during:?} has touched another claim");
        self.holds = left;
        self.restart();
    }

    /// Who holds what, by the disk.
    fn left(&self) -> BTreeMap<usize, Hold> {
        let records = self.site.records().into_iter().map(|record| {
            let same = |(_, _, _, claim): &(usize, Vec<u32>, Kind, Claim)| claim.id() == record.intent.claim;
            let claim = self.claims.iter().position(same).unwrap();
            let real =
                record.intent.boot == self.site.boot() && self.site.edits(&self.claims[claim].3).is_some();
            (claim, if record.phase == Phase::Ready { Hold::Ready { real } } else { Hold::Half })
        });
        records.collect()
    }

    fn check(&self, after: &Event) {
        let at = format!("after {after:?}");
        self.site.check(&at);
        assert_eq!(self.left(), self.holds, "{at}");
        for (claim, hold) in self.holds.iter().filter(|(_, hold)| **hold == Hold::Ready { real: true }) {
            let (_, gpus, kind, _) = &self.claims[*claim];
            for gpu in gpus {
                let wanted = if *kind == Kind::Sliced { 3 } else { 0 };
                assert_eq!(self.site.time_slice(*gpu), wanted, "{at}: GPU {gpu} of {claim}, {hold:?}");
            }
        }
    }

    /// However wild it was: with everything deleted, one sweep leaves nothing.
    async fn end(mut self) {
        self.happen(Event::Silence(false)).await;
        for slot in 0..4 {
            self.happen(Event::Delete { slot }).await;
        }
        self.site.age_temporaries();
        self.call(Call::Sweep).await;
        self.site.check_empty("at the end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_node_is_as_the_rules_say(events in events()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new();
            for event in events {
                world.happen(event.clone()).await;
                world.check(&event);
            }
            world.end().await;
        });
    }
}
