//! A GPU that is given whole or cut, through random days: claims come and go, the process is stopped amid whatever it does,
//! the node boots, and somebody makes and ends instances and switches the MIG mode by hand. `TRANCHE_STEPS`: how many steps.
//!
//! What is looked at after each step knows nothing of the driver but its files: instances, their records, the mode.

use std::time::Duration;

use tranche::ledger::{HoldMode, Phase, Record};
use tranche::model::gpu::Placement;
use tranche::model::mig::{MadeMig, MigPlace};
use tranche::node::mig_mode::FOLDER;

use crate::site::{Claim, PluginRun, Site, uuid};
use crate::stop_at::When;

const STEPS: u64 = 1_000;
const SLOTS: usize = 5;
/// The process is stopped within so many verbs, if the call has as many.
const VERBS: usize = 6;

/// A small generator, so that the walk is the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % most.max(1)
    }
}

/// What a claim asks for: all of the GPU, or a MIG device at this place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    Whole,
    Cut(MigPlace),
}

/// What became of the steps, so that a walk in which nothing happens fails.
#[derive(Debug, Default)]
struct Counts {
    prepared: u64,
    refused: u64,
    stopped: u64,
    boots: u64,
    by_hand: u64,
    switched_by_hand: u64,
}

struct Walk {
    site: Site,
    plugin: Option<PluginRun>,
    slots: Vec<Option<(Claim, Ask)>>,
    /// Instances that somebody made by hand.
    foreign: Vec<(MigPlace, String)>,
    /// Somebody has switched MIG on while nothing said that it were ours.
    theirs: bool,
    dice: Dice,
    number: u64,
    counts: Counts,
}

fn place(profile_id: u32, start: u32, size: u32) -> MigPlace {
    MigPlace { profile_id, placement: Placement { start, size } }
}

impl Walk {
    fn new() -> Self {
        let site = Site::whole_or_cut();
        *site.keep.lock().unwrap() = Duration::ZERO;
        let plugin = Some(site.start_plugin());
        let (foreign, counts) = Default::default();
        Self {
            site,
            plugin,
            slots: vec![None; SLOTS],
            foreign,
            theirs: false,
            dice: Dice(29),
            number: 0,
            counts,
        }
    }

    fn is_on(&self) -> bool {
        self.site.mig.is_on(&uuid(3))
    }

    /// The file that says that the mode is on for claims, of this boot.
    fn is_recorded(&self) -> bool {
        let file = self.site.path("state").join(FOLDER).join("GPU-3.json");
        std::fs::read_to_string(file).is_ok_and(|text| text.contains(&format!("\"{}\"", self.site.boot())))
    }

    fn any_place(&mut self) -> MigPlace {
        match self.dice.roll(3) {
            0 => place(14, [0, 2, 4][self.dice.roll(3)], 2),
            _ => place(19, self.dice.roll(7) as u32, 1),
        }
    }

    fn plugin(&self) -> &PluginRun {
        self.plugin.as_ref().unwrap()
    }

    fn restart(&mut self) {
        self.plugin = None;
        self.plugin = Some(self.site.start_plugin());
    }

    async fn step(&mut self) {
        match self.dice.roll(24) {
            0..=3 => _ = self.create(),
            4..=11 => self.prepare().await,
            12..=13 => self.release().await,
            14 => self.delete(),
            15..=17 => self.stop().await,
            18 => self.plugin().review_modes().await,
            19 => {
                self.plugin().sweep().await.unwrap();
            }
            20..=21 => self.foreign(),
            22 if self.dice.roll(4) == 0 => self.boot(),
            23 if self.dice.roll(2) == 0 => self.switch(),
            _ => {}
        }
    }

    /// A claim in place of the slot's last, which its pod has left; the slot.
    fn create(&mut self) -> usize {
        let slot = self.dice.roll(SLOTS);
        if let Some((old, _)) = &self.slots[slot] {
            self.site.api.remove(old);
        }
        let ask = if self.dice.roll(4) == 0 { Ask::Whole } else { Ask::Cut(self.any_place()) };
        let device = match ask {
            Ask::Whole => "gpu-3".to_owned(),
            Ask::Cut(MigPlace { profile_id: 14, placement }) => {
                format!("gpu-3-mig-2g20gb-14-{}", placement.start)
            }
            Ask::Cut(MigPlace { profile_id, placement }) => {
                format!("gpu-3-mig-1g10gb-{profile_id}-{}", placement.start)
            }
        };
        self.number += 1;
        let claim = Claim::new(&format!("slot-{slot}"), &[&device]).uid(&format!("uid-{}", self.number));
        self.site.api.put(&claim);
        self.slots[slot] = Some((claim, ask));
        slot
    }

    fn delete(&mut self) {
        let slot = self.dice.roll(SLOTS);
        if let Some((claim, _)) = self.slots[slot].take() {
            self.site.api.remove(&claim);
        }
    }

    fn any(&mut self) -> Option<(Claim, Ask)> {
        let slot = self.dice.roll(SLOTS);
        self.slots[slot].clone()
    }

    /// Is there anything in the claim's way? None: what it has already may be as good.
    fn obstacle(&self, claim: &Claim, ask: Ask) -> Option<bool> {
        let records = self.site.records();
        let (own, others): (Vec<_>, Vec<_>) =
            records.iter().partition(|record| record.intent.claim.uid == claim.id().uid);
        let over = |at: MigPlace| {
            let held = others.iter().flat_map(|record| record.intent.places());
            let by_hand = self.foreign.iter().map(|(one, _)| *one);
            held.map(|(_, one)| one).chain(by_hand).any(|one| one.placement.overlaps(at.placement))
        };
        match ask {
            Ask::Whole if !own.is_empty() => None,
            Ask::Whole => Some(!others.is_empty() || self.theirs || !self.foreign.is_empty()),
            Ask::Cut(at) => Some(others.iter().any(|record| is_whole(record)) || over(at)),
        }
    }

    async fn prepare(&mut self) {
        let Some((claim, ask)) = self.any() else { return };
        let obstacle = self.obstacle(&claim, ask);
        let answer = self.plugin().prepare(&claim).await;
        let at = format!("step with {} for {ask:?}: {answer:?}", claim.id().uid);
        if let Some(obstacle) = obstacle {
            assert_eq!(answer.is_err(), obstacle, "{at}");
        }
        match (&answer, ask) {
            (Ok(_), Ask::Cut(place)) => {
                assert!(self.site.mig.all().contains(&(uuid(3), place)), "{at}: it has its device");
                self.counts.prepared += 1;
            }
            (Ok(_), Ask::Whole) => self.counts.prepared += 1,
            (Err(_), _) => self.counts.refused += 1,
        }
        self.plugin().check("I1");
    }

    async fn release(&mut self) {
        let Some((claim, _)) = self.any() else { return };
        self.plugin().unprepare(&claim).await.unwrap();
        let left = self.site.records().iter().any(|record| record.intent.claim.uid == claim.id().uid);
        assert!(!left, "released");
    }

    /// The process is stopped somewhere, and started again.
    async fn stop(&mut self) {
        let plugin = self.plugin.take().unwrap();
        let when = [When::Before, When::Half, When::After][self.dice.roll(3)];
        plugin.host.stop_at(self.dice.roll(VERBS), when);
        let recorded = self.site.records().into_iter().map(|record| record.intent.claim.uid);
        let recorded: Vec<_> = recorded.collect();
        let has_record = |(claim, _): &&(Claim, Ask)| recorded.contains(&claim.id().uid);
        match self.dice.roll(6) {
            0 => _ = plugin.sweep().await,
            1 => plugin.review_modes().await,
            2 | 3 => {
                if let Some((claim, _)) = self.slots.iter().flatten().find(has_record) {
                    drop(plugin.unprepare(claim).await);
                }
            }
            _ => {
                let slot = self.create();
                if let Some((claim, _)) = &self.slots[slot] {
                    drop(plugin.prepare(claim).await);
                }
            }
        }
        self.counts.stopped += u64::from(plugin.host.stopped());
        plugin.check("I1");
        drop(plugin);
        self.plugin = Some(self.site.start_plugin());
    }

    /// Somebody makes an instance, or ends one of theirs.
    fn foreign(&mut self) {
        if !self.foreign.is_empty() && self.dice.roll(2) == 0 {
            let at = self.dice.roll(self.foreign.len());
            let (place, _) = self.foreign.remove(at);
            return self.site.mig.end(&uuid(3), place);
        }
        let place = self.any_place();
        let taken = self.site.mig.all().iter().any(|(_, one)| one.placement.overlaps(place.placement));
        // What a crash left half made at that very place cannot be told from theirs: docs/mig.md.
        let records = self.site.records();
        let half = records.iter().filter(|record| record.phase != Phase::Ready);
        let unknown = half.flat_map(|record| record.intent.places()).any(|(_, one)| one == place);
        if !self.is_on() || taken || unknown {
            return;
        }
        self.number += 1;
        self.counts.by_hand += 1;
        let name = format!("MIG-theirs-{}", self.number);
        let id = 100 + u32::try_from(self.number).unwrap();
        let device = MadeMig { uuid: name.as_str().into(), gpu_instance: id, compute_instance: 0 };
        self.site.mig.put(&uuid(3), place, device);
        self.foreign.push((place, name));
    }

    /// Somebody switches the mode, whoever uses the GPU.
    fn switch(&mut self) {
        let on = !self.is_on();
        self.theirs = on && !self.is_recorded();
        self.foreign.clear();
        self.site.mig.switch(&uuid(3), on);
        self.counts.switched_by_hand += 1;
    }

    fn boot(&mut self) {
        self.site.reboot();
        self.foreign.clear();
        self.theirs = false;
        self.counts.boots += 1;
        self.restart();
    }

    fn check(&self, step: u64) {
        let at = format!("step {step}");
        let all = self.site.mig.on(&uuid(3));
        for (place, name) in &self.foreign {
            let is = |one: &tranche::model::mig::GpuInstance| {
                one.place == *place && one.devices.iter().any(|device| device.uuid.as_str() == name)
            };
            assert!(all.iter().any(is), "{at}: {name} at {place:?} is somebody else's, and gone: {all:?}");
        }
        for (nth, one) in all.iter().enumerate() {
            let apart = |other: &tranche::model::mig::GpuInstance| {
                !one.place.placement.overlaps(other.place.placement)
            };
            assert!(all[nth + 1..].iter().all(apart), "{at}: {all:?}");
            let by_hand = self.foreign.iter().any(|(place, _)| *place == one.place);
            let records = self.site.records();
            let places: Vec<MigPlace> =
                records.iter().flat_map(|record| record.intent.places()).map(|(_, place)| place).collect();
            assert!(by_hand || places.contains(&one.place), "{at}: nobody's instance {one:?}");
        }
        assert!(!self.theirs || self.is_on(), "{at}: a mode that somebody has switched on is off");
        assert!(
            !self.is_on() || self.theirs || self.is_recorded(),
            "{at}: the mode is on, and nothing says that it is to go off"
        );
    }

    /// However wild it was: once everybody has gone, the GPU is whole, or as somebody else has it.
    async fn end(mut self) -> Counts {
        for (claim, _) in self.slots.iter().flatten() {
            self.site.api.remove(claim);
        }
        self.restart();
        self.site.age_temporaries();
        self.plugin().sweep().await.unwrap();
        let left: Vec<_> = self.site.mig.all().into_iter().map(|(_, place)| place).collect();
        assert_eq!(self.site.records(), [], "nobody has a record");
        assert_eq!(left.len(), self.foreign.len(), "theirs is left: {left:?}");
        self.plugin().review_modes().await;
        assert!(self.foreign.is_empty() || self.is_on(), "not under instances of theirs");
        self.site.mig.clear();
        self.plugin().review_modes().await;
        assert_eq!(self.is_on(), self.theirs);
        self.counts
    }
}

fn is_whole(record: &Record) -> bool {
    record.intent.devices.iter().any(|held| held.mode == HoldMode::Whole)
}

#[tokio::test]
async fn whatever_happens_nothing_foreign_is_touched_and_a_gpu_is_whole_in_the_end() {
    let steps = std::env::var("TRANCHE_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(STEPS);
    let mut walk = Walk::new();
    for step in 0..steps {
        walk.step().await;
        walk.check(step);
    }
    let (on, least) = (walk.site.mig.switches(), steps / 100);
    let counts = walk.end().await;
    println!("{counts:?}, {on} switches");
    let Counts { prepared, refused, stopped, boots, by_hand, switched_by_hand } = counts;
    assert!(on as u64 > least && prepared > steps / 20 && refused > steps / 40 && stopped > steps / 50);
    assert!(boots > 0 && by_hand > steps / 100 && switched_by_hand > steps / 200);
}
