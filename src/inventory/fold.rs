//! Folds one look after another into the inventory.
//!
//! One failed call must not un-publish a device under a running pod, and a device that is gone must
//! not be offered for long:
//! * a GPU that was known and cannot be read stays, unhealthy; lost only where NVML says so of it for sure
//! * a GPU that NVML no longer counts stays, unhealthy, until [`ABSENT_LOOKS`] looks in a row miss it
//! * when looks fail altogether, all stays as it is until [`UNHEALTHY_AFTER`] in a row have failed,
//!   then all GPUs are unhealthy, and after [`FORGET_AFTER`] nothing is offered any more

use std::collections::BTreeMap;

use crate::model::gpu::{Gpu, Health, MigMode, MigSwitch, NodeGpus, OnDemand};
use crate::model::names::DeviceUuid;

use super::change::changes;
use super::normalize::normalize;
use super::{Change, FailedGpu, Inventory, Look};

/// So many looks in a row must miss a GPU before it is taken for gone.
pub const ABSENT_LOOKS: u32 = 2;
/// So many looks in a row must fail before known GPUs are called unhealthy.
pub const UNHEALTHY_AFTER: u32 = 3;
/// So many looks in a row must fail before known GPUs are forgotten.
pub const FORGET_AFTER: u32 = 10;

/// The inventory, and the failures of earlier looks by which the next one is judged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InventoryTracker {
    inventory: Inventory,
    /// How many looks in a row missed a GPU that is still listed.
    absent: BTreeMap<DeviceUuid, u32>,
    /// How many looks in a row failed altogether.
    failed_looks: u32,
    left_out: Vec<String>,
}

impl InventoryTracker {
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Devices that NVML tells of and that are not listed, in words.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// How many looks in a row failed altogether.
    pub fn failed_looks(&self) -> u32 {
        self.failed_looks
    }

    /// Returns the inventory after one more look, and what changed; an `Err` is the reason of a look that failed.
    pub fn fold(&self, look: Result<Look, String>) -> (Self, Vec<Change>) {
        let next = match look {
            Ok(look) => self.after(look),
            Err(reason) => self.after_failure(reason),
        };
        let mut changes = changes(&self.inventory, &next.inventory);
        let news = next.left_out.iter().filter(|words| !self.left_out.contains(words));
        changes.extend(news.map(|words| Change::LeftOut { words: words.clone() }));
        (next, changes)
    }

    fn after(&self, look: Look) -> Self {
        let mut left_out = look.left_out;
        let mut gpus = normalize(look.gpus.gpus, &mut left_out);
        let missing: Vec<_> =
            self.listed().filter(|old| !gpus.iter().any(|gpu| gpu.uuid == old.uuid)).collect();
        left_out.extend(strangers(&look.failed, &missing));
        let nameless = Nameless::of(&look.failed, &missing);
        let mut absent = BTreeMap::new();
        for old in missing {
            let misses = self.absent.get(&old.uuid).copied().unwrap_or(0) + 1;
            // Another board in its place: the name is taken.
            let replaced = gpus.iter().any(|gpu| gpu.minor == old.minor);
            let own = look.failed.iter().find(|failed| failed.uuid.as_ref() == Some(&old.uuid));
            match own.map(|own| health(&own.reason, own.lost)).or_else(|| nameless.health()) {
                _ if replaced => {}
                Some(health) => gpus.push(Gpu { health, ..old.clone() }),
                None if misses < ABSENT_LOOKS => {
                    absent.insert(old.uuid.clone(), misses);
                    gpus.push(unhealthy(old, "NVML did not list it at the last look"));
                }
                None => {}
            }
        }
        gpus.sort_by_key(|gpu| gpu.minor);
        left_out.sort();
        left_out.dedup();
        let inventory = Inventory::Found(NodeGpus { driver: look.gpus.driver, gpus });
        Self { inventory, absent, failed_looks: 0, left_out }
    }

    /// Brings a board that was carved, and of which NVML does not tell any more what it can be cut into, or not at this look, to
    /// what it could be: what claims have of it is to stay published. Comes before [`super::settle`], which says what of that
    /// is not there any more, and gives the board whole if no claim has a part of it.
    pub fn keep_places(&self, gpu: &mut Gpu) {
        if gpu.mig == MigMode::Off
            && let Some(old) = self.listed().find(|old| old.uuid == gpu.uuid)
            && let MigMode::OnDemand(old) = &old.mig
        {
            let (switch, places) = (MigSwitch::OffByOthers, old.places.clone());
            gpu.mig = MigMode::OnDemand(OnDemand { switch, places, ..OnDemand::default() });
        }
    }

    fn after_failure(&self, reason: String) -> Self {
        let failed_looks = self.failed_looks.saturating_add(1);
        let inventory = match &self.inventory {
            Inventory::Found(known) if failed_looks < UNHEALTHY_AFTER => Inventory::Found(known.clone()),
            Inventory::Found(known) if failed_looks < FORGET_AFTER => {
                let gpus = known.gpus.iter().map(|gpu| unhealthy(gpu, &reason)).collect();
                Inventory::Found(NodeGpus { driver: known.driver.clone(), gpus })
            }
            _ => Inventory::Unavailable { reason },
        };
        let forgotten = matches!(inventory, Inventory::Unavailable { .. });
        let (absent, left_out) =
            if forgotten { Default::default() } else { (self.absent.clone(), self.left_out.clone()) };
        Self { inventory, absent, failed_looks, left_out }
    }

    fn listed(&self) -> impl Iterator<Item = &Gpu> {
        match &self.inventory {
            Inventory::Found(known) => known.gpus.as_slice(),
            _ => &[],
        }
        .iter()
    }
}

/// Failing GPUs that were never known: there is nothing to list. `missing`: known ones that were not
/// read, so that the first failures without a name are taken to be theirs.
fn strangers(failed: &[FailedGpu], missing: &[&Gpu]) -> Vec<String> {
    let is_missing = |uuid: &DeviceUuid| missing.iter().any(|gpu| gpu.uuid == *uuid);
    let (named, nameless): (Vec<_>, Vec<_>) = failed.iter().partition(|failed| failed.uuid.is_some());
    let own = named.iter().filter(|f| f.uuid.as_ref().is_some_and(is_missing)).count();
    let named = named.into_iter().filter(|f| !f.uuid.as_ref().is_some_and(is_missing));
    let nameless = nameless.into_iter().skip(missing.len().saturating_sub(own));
    named
        .chain(nameless)
        .map(|failed| match &failed.uuid {
            Some(uuid) => format!("{uuid}: {}", failed.reason),
            None => format!("the GPU at NVML index {}: {}", failed.index, failed.reason),
        })
        .collect()
}

/// GPUs that failed before they could say who they are. They cannot be told apart: the first one's
/// words stand for all.
struct Nameless<'a> {
    first: Option<&'a FailedGpu>,
    /// Whichever is meant, it is lost.
    lost: bool,
}

impl<'a> Nameless<'a> {
    /// `missing`: known GPUs that were not read.
    fn of(failed: &'a [FailedGpu], missing: &[&Gpu]) -> Self {
        let named = |gpu: &Gpu| failed.iter().any(|failed| failed.uuid.as_ref() == Some(&gpu.uuid));
        let nameless: Vec<_> = failed.iter().filter(|failed| failed.uuid.is_none()).collect();
        let for_each = nameless.len() >= missing.iter().filter(|gpu| !named(gpu)).count();
        Self { first: nameless.first().copied(), lost: for_each && nameless.iter().all(|failed| failed.lost) }
    }

    /// What they say of a known GPU that was not read and has no failure of its own.
    fn health(&self) -> Option<Health> {
        self.first.map(|first| health(&first.reason, self.lost))
    }
}

fn health(reason: &str, lost: bool) -> Health {
    match lost {
        true => Health::Lost(reason.to_owned()),
        false => Health::Unhealthy(reason.to_owned()),
    }
}

fn unhealthy(gpu: &Gpu, reason: &str) -> Gpu {
    Gpu { health: Health::Unhealthy(reason.to_owned()), ..gpu.clone() }
}
