//! What is to be published against what is stored: the fewest writes, in an order that never lets the
//! scheduler take a half-written pool for a whole one.
//!
//! The rules (those of the Go helper library's slice controller, KEP-4381): the slices of the highest
//! generation are the pool; if one slice changed and none comes or goes, it is replaced at the same
//! generation; otherwise the generation goes up by one and every slice is rewritten, so that until the
//! last write the pool is incomplete and nothing is allocated from it. What must go, goes first.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::SliceContent;
use super::compare::{Dropped, same};
use crate::model::names::{DRIVER, NodeName};

/// The Node object that owns the slices: they go when it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceOwner {
    pub node: NodeName,
    pub node_uid: String,
}

/// The pool as it is to be.
#[derive(Debug, Clone, Copy)]
pub struct DesiredPool<'a> {
    /// From [`super::desired`]: never empty, all of one pool.
    pub contents: &'a [SliceContent],
    pub owner: &'a SliceOwner,
    /// What this API server is known not to keep.
    pub dropped: &'a Dropped,
    /// The highest generation that was ever seen; 0 if none. Holds the generation up over a wipe.
    pub known_generation: i64,
}

/// The slices of this node and driver that the API server has.
#[derive(Debug, Clone, Default)]
pub struct ExistingSlices {
    pub readable: Vec<ResourceSlice>,
    /// Slices that do not fit our types: they cannot be ours.
    pub unreadable: Vec<Obsolete>,
}

/// A slice that is to be deleted, if it still is the one that was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obsolete {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    Create(Box<ResourceSlice>),
    /// With the name and resourceVersion that were seen.
    Update(Box<ResourceSlice>),
}

/// The writes that lead to the target: first all deletions, then the writes in their order. A crash may come after any
/// of them; the next diff continues from there.
#[derive(Debug, Clone, PartialEq)]
pub struct WritePlan {
    /// The pool's generation afterwards.
    pub generation: i64,
    pub deletes: Vec<Obsolete>,
    pub writes: Vec<Write>,
    /// A slice that should be there is not stored at all.
    pub missing: bool,
}

impl WritePlan {
    /// Everything is as it should be.
    pub fn is_empty(&self) -> bool {
        self.deletes.is_empty() && self.writes.is_empty()
    }
}

/// The writes that lead from `seen` to `target`.
pub fn diff(target: &DesiredPool<'_>, seen: &ExistingSlices) -> WritePlan {
    let pool = target.contents.first().map(|content| content.pool.to_string()).unwrap_or_default();
    let mut ours: Vec<&ResourceSlice> =
        seen.readable.iter().filter(|slice| slice.spec.pool.name == pool).collect();
    let top = ours.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    ours.sort_by_key(|slice| (std::cmp::Reverse(slice.spec.pool.generation), slice.metadata.name.clone()));

    let matched = Matched::new(target, &ours);
    let keeps = |slice: &ResourceSlice| matched.slots.iter().flatten().any(|kept| std::ptr::eq(*kept, slice));
    let gone: Vec<&ResourceSlice> = seen.readable.iter().filter(|slice| !keeps(slice)).collect();
    let deletes = gone.iter().map(|slice| obsolete(slice)).chain(seen.unreadable.iter().cloned()).collect();

    let state = |index: usize| SliceState::of(target, index, matched.slots[index], top);
    let states: Vec<SliceState> = (0..target.contents.len()).map(state).collect();
    let changed = states.iter().filter(|state| **state == SliceState::Changed).count();
    let added = states.iter().any(|state| matches!(state, SliceState::Missing | SliceState::Stale));
    let removed = gone.iter().any(|slice| slice.spec.pool.name == pool && slice.spec.pool.generation == top)
        || !seen.unreadable.is_empty();
    let went_back = top < target.known_generation;

    let in_place = !added && !went_back && (changed == 0 || (changed == 1 && !removed));
    let generation = if in_place { top } else { top.max(target.known_generation).max(0).saturating_add(1) };
    let due = |index: &usize| !in_place || states[*index] == SliceState::Changed;
    let write = |index: usize| match matched.slots[index] {
        Some(stored) => Write::Update(Box::new(updated(target, index, generation, stored))),
        None => Write::Create(Box::new(created(target, index, generation))),
    };
    WritePlan {
        generation,
        deletes,
        writes: (0..states.len()).filter(due).map(write).collect(),
        missing: states.contains(&SliceState::Missing),
    }
}

/// How one slice that should be there stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SliceState {
    Unchanged,
    Changed,
    /// Of a lower generation: not part of the pool.
    Stale,
    Missing,
}

impl SliceState {
    fn of(target: &DesiredPool<'_>, index: usize, stored: Option<&ResourceSlice>, top: i64) -> Self {
        let Some(stored) = stored else { return Self::Missing };
        let count = stored.spec.pool.resource_slice_count;
        if stored.spec.pool.generation < top {
            Self::Stale
        } else if count == slice_count(target) && same(&spec(target, index, 0), &stored.spec, target.dropped)
        {
            Self::Unchanged
        } else {
            Self::Changed
        }
    }
}

/// Which stored slice is which of the target's, by index.
struct Matched<'a> {
    slots: Vec<Option<&'a ResourceSlice>>,
}

impl<'a> Matched<'a> {
    /// First by the index in the name, then, where a name has none, by content, then by device names.
    /// `ours` is sorted: the highest generation has the first choice.
    fn new(target: &DesiredPool<'_>, ours: &[&'a ResourceSlice]) -> Self {
        let mut this = Self { slots: vec![None; target.contents.len()] };
        for slice in ours {
            if let Some(index) = index_in(slice) {
                this.take(index, slice);
            }
        }
        let unnamed = || ours.iter().copied().filter(|slice| index_in(slice).is_none());
        for slice in unnamed() {
            let equal = |index: &usize| same(&spec(target, *index, 0), &slice.spec, target.dropped);
            this.take_first(slice, equal);
        }
        for slice in unnamed() {
            let names = device_names(&slice.spec);
            this.take_first(slice, |index| device_names(&spec(target, *index, 0)) == names);
        }
        this
    }

    fn take(&mut self, index: usize, slice: &'a ResourceSlice) {
        if let Some(slot @ None) = self.slots.get_mut(index) {
            *slot = Some(slice);
        }
    }

    fn take_first(&mut self, slice: &'a ResourceSlice, fits: impl Fn(&usize) -> bool) {
        if self.slots.iter().flatten().any(|taken| std::ptr::eq(*taken, slice)) {
            return;
        }
        let free = (0..self.slots.len()).filter(|index| self.slots[*index].is_none());
        if let Some(index) = free.collect::<Vec<_>>().into_iter().find(fits) {
            self.slots[index] = Some(slice);
        }
    }
}

/// The name's beginning: order of names is order of publication, which the scheduler's allocator goes by.
fn name_prefix(index: usize) -> String {
    format!("{index:05x}-{DRIVER}-")
}

fn index_in(slice: &ResourceSlice) -> Option<usize> {
    let (index, rest) = slice.metadata.name.as_deref()?.split_once('-')?;
    let ours = index.len() >= 5 && rest.starts_with(DRIVER);
    ours.then(|| usize::from_str_radix(index, 16).ok()).flatten()
}

fn device_names(spec: &ResourceSliceSpec) -> BTreeSet<String> {
    spec.devices.iter().flatten().map(|device| device.name.clone()).collect()
}

fn obsolete(slice: &ResourceSlice) -> Obsolete {
    Obsolete {
        name: slice.metadata.name.clone().unwrap_or_default(),
        uid: slice.metadata.uid.clone().unwrap_or_default(),
        resource_version: slice.metadata.resource_version.clone().unwrap_or_default(),
    }
}

fn slice_count(target: &DesiredPool<'_>) -> i64 {
    i64::try_from(target.contents.len()).unwrap_or(i64::MAX)
}

fn spec(target: &DesiredPool<'_>, index: usize, generation: i64) -> ResourceSliceSpec {
    let content = &target.contents[index];
    ResourceSliceSpec {
        driver: DRIVER.to_owned(),
        node_name: Some(content.node.to_string()),
        pool: ResourcePool {
            name: content.pool.to_string(),
            generation,
            resource_slice_count: slice_count(target),
        },
        devices: (!content.devices.is_empty()).then(|| content.devices.clone()),
        shared_counters: (!content.counters.is_empty()).then(|| content.counters.clone()),
        ..ResourceSliceSpec::default()
    }
}

fn owner_reference(owner: &SliceOwner) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: owner.node.to_string(),
        uid: owner.node_uid.clone(),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

fn created(target: &DesiredPool<'_>, index: usize, generation: i64) -> ResourceSlice {
    let metadata = ObjectMeta {
        generate_name: Some(format!("{}{}-", name_prefix(index), target.owner.node)),
        owner_references: Some(vec![owner_reference(target.owner)]),
        ..ObjectMeta::default()
    };
    ResourceSlice { metadata, spec: spec(target, index, generation) }
}

fn updated(target: &DesiredPool<'_>, index: usize, generation: i64, stored: &ResourceSlice) -> ResourceSlice {
    let metadata = ObjectMeta {
        // Sent back by the API server's rule, not ours to keep.
        managed_fields: None,
        owner_references: Some(vec![owner_reference(target.owner)]),
        ..stored.metadata.clone()
    };
    ResourceSlice { metadata, spec: spec(target, index, generation) }
}

#[cfg(test)]
#[path = "diff_tests.rs"]
mod tests;
