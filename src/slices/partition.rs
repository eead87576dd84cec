//! A board that is carved on demand, as partitionable devices (KEP-4815): a set of counters for the board, and a device
//! for each instance that may be made, which consumes what the instance takes.
//!
//! Names are those of NVIDIA's driver. Counted is what bounds instances on a board: memory slices one by one, compute
//! slices, engines. Memory in bytes is not: NVML's figures of several instances may add up to more than that of the
//! largest, and the slices say it exactly.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceCounterConsumption};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::COUNTERS_PER_SET;
use crate::model::gpu::{Gpu, MigMode, OnDemand};
use crate::model::mig::{MigPlace, PossibleMig};

/// The name of a board's counter set.
pub(super) fn set_name(gpu: &Gpu) -> String {
    format!("gpu-{}-counter-set", gpu.minor)
}

/// What there is of a board that is carved on demand, less what instances take that were made for no claim. None of other
/// boards, and of one with more memory slices than a set has counters.
pub(super) fn counter_set(gpu: &Gpu) -> Option<CounterSet> {
    let MigMode::OnDemand(cut) = &gpu.mig else { return None };
    let mut left = all(cut);
    if !fits(&left) {
        return None;
    }
    for foreign in &cut.foreign {
        for (name, taken) in taken_by(cut, foreign) {
            if let Some(count) = left.get_mut(&name) {
                *count = count.saturating_sub(taken);
            }
        }
    }
    // A counter of which nothing is left stays: devices name it.
    Some(CounterSet { name: set_name(gpu), counters: counters(left) })
}

fn fits(counts: &Counts) -> bool {
    !counts.is_empty() && counts.len() <= COUNTERS_PER_SET
}

/// All that the board has, of one that is given whole or cut: there is no whole board while an instance is on it, whoever
/// made the instance. None of other boards, or if there is no counter set.
pub(super) fn consumption_of_whole(gpu: &Gpu) -> Option<DeviceCounterConsumption> {
    let MigMode::OnDemand(cut) = &gpu.mig else { return None };
    let mut all = all(cut);
    if !gpu.is_whole_or_cut() || !fits(&all) {
        return None;
    }
    all.retain(|_, count| *count > 0);
    Some(DeviceCounterConsumption {
        counter_set: set_name(gpu),
        counters: counters(all),
        ..Default::default()
    })
}

/// What an instance takes.
pub(super) fn consumption(gpu: &Gpu, place: &PossibleMig) -> DeviceCounterConsumption {
    let taken = of_place(place).into_iter().filter(|(_, count)| *count > 0);
    DeviceCounterConsumption {
        counter_set: set_name(gpu),
        counters: counters(taken.collect()),
        ..DeviceCounterConsumption::default()
    }
}

/// All that instances leave which were made for no claim: who has it shares the board with nobody. None if they leave
/// nothing, or if there is no counter set.
pub(super) fn consumption_of_all(gpu: &Gpu) -> Option<DeviceCounterConsumption> {
    let mut counters = counter_set(gpu)?.counters;
    counters.retain(|_, counter| counter.value.0 != "0");
    let some = !counters.is_empty();
    some.then(|| DeviceCounterConsumption { counter_set: set_name(gpu), counters, ..Default::default() })
}

/// What the name of a memory slice's counter begins with; its number follows.
const MEMORY_SLICE: &str = "memory-slice-";

type Counts = BTreeMap<String, u32>;

fn counters(counts: Counts) -> BTreeMap<String, Counter> {
    counts.into_iter().map(|(name, count)| (name, Counter { value: Quantity(count.to_string()) })).collect()
}

/// Of each counter as much as those instances of one profile have together that have most of it. Of a memory slice there
/// is one.
fn all(cut: &OnDemand) -> Counts {
    let mut most = Counts::new();
    for place in &cut.places {
        for (name, count) in of_place(place) {
            let times = if name.starts_with(MEMORY_SLICE) { 1 } else { place.most };
            let known = most.entry(name).or_default();
            *known = count.saturating_mul(times).max(*known);
        }
    }
    most
}

fn of_place(place: &PossibleMig) -> Counts {
    let capacity = &place.capacity;
    let mut counts = Counts::from([
        ("compute-slices".to_owned(), place.slices),
        ("copy-engines".to_owned(), capacity.copy_engines),
        ("decoders".to_owned(), capacity.decoders),
        ("encoders".to_owned(), capacity.encoders),
        ("jpeg-engines".to_owned(), capacity.jpeg_engines),
        ("ofa-engines".to_owned(), capacity.ofa_engines),
    ]);
    counts.extend(memory_slices(place.place));
    counts
}

fn memory_slices(place: MigPlace) -> impl Iterator<Item = (String, u32)> {
    let placement = place.placement;
    // More than a set has room for is nonsense, and leaves the board out.
    let slices = (placement.start..placement.end()).take(COUNTERS_PER_SET + 1);
    slices.map(|slice| (format!("{MEMORY_SLICE}{slice}"), 1))
}

/// What an instance takes that is there already, maybe of a profile that is not listed.
fn taken_by(cut: &OnDemand, foreign: &MigPlace) -> Counts {
    let profile = cut.places.iter().find(|place| place.place.profile_id == foreign.profile_id);
    let mut counts = profile.map(of_place).unwrap_or_default();
    counts.retain(|name, _| !name.starts_with(MEMORY_SLICE));
    counts.extend(memory_slices(*foreign));
    counts
}

#[cfg(test)]
#[path = "partition_tests.rs"]
mod tests;
