//! Event sets: registering and waiting.

use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t};

use crate::abi::{Handle, put};
use crate::call::nvml;
use crate::code::{Answer, Code};
use crate::control::Event;
use crate::node::{self, Gpu, Node};
use crate::session::{self, EventSet};
use crate::watch::Watch;

/// ECC, performance state, Xid and clock events, which every board here has.
const COMMON: u64 = 0x1F;
const MIG_CONFIG: u64 = 0x100;
/// Storms, retirement, poison, unavailability, recovery: newer boards and drivers.
const NEWER: u64 = 0xFE00;

fn supported(node: &Node, gpu: &Gpu) -> u64 {
    let mig = if gpu.board.mig_capable() { MIG_CONFIG } else { 0 };
    let newer = if gpu.board.remaps_rows && node.driver_major >= 580 { NEWER } else { 0 };
    COMMON | mig | newer
}

fn set_id(set: nvmlEventSet_t) -> Answer<u32> {
    match Handle::decode(set as usize) {
        Some(Handle::EventSet { id }) => Ok(id),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn newest(node: &Node) -> u64 {
    node.control.events.iter().map(|e| e.seq).max().unwrap_or(0)
}

/// The next event that the set has not had, which then counts as had.
fn take<'n>(node: &'n Node, set: &mut EventSet) -> Answer<Option<&'n Event>> {
    for gpu in set.listens.keys() {
        node.present(*gpu)?;
    }
    let newest = newest(node);
    for (_, seen) in set.listens.values_mut() {
        // A new description of the node counts from the start.
        *seen = (*seen).min(newest);
    }
    let wanted = |e: &&Event| {
        set.listens.get(&e.gpu).is_some_and(|(bits, seen)| e.kind.bit() & bits != 0 && e.seq > *seen)
    };
    let next = node.control.events.iter().filter(wanted).min_by_key(|e| e.seq);
    if let Some(event) = next
        && let Some((_, seen)) = set.listens.get_mut(&event.gpu)
    {
        *seen = event.seq;
    }
    Ok(next)
}

fn wait(set: nvmlEventSet_t, out: *mut nvmlEventData_t, timeout_ms: u32) -> Answer {
    let id = set_id(set)?;
    if out.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let end = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    // Watching starts before the first look, so that nothing falls between.
    let mut watch = None;
    loop {
        let node = node::load()?;
        let event = session::with_set(id, |s| take(&node, s).map(|e| e.cloned()))?;
        if let Some(event) = event {
            return put(
                out,
                nvmlEventData_t {
                    device: Handle::Gpu { gpu: event.gpu }.pointer(),
                    eventType: event.kind.bit(),
                    eventData: event.value,
                    gpuInstanceId: event.gi.unwrap_or(u32::MAX),
                    computeInstanceId: event.ci.unwrap_or(u32::MAX),
                },
            );
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::TIMEOUT);
        }
        match &watch {
            None => watch = Some(Watch::new(&node.dir)),
            Some(watch) => watch.wait(left),
        }
    }
}

nvml! {
    fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) |_node| {
        if set.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(set, Handle::EventSet { id: session::create_set() }.pointer())
    }

    fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, types: *mut u64) |node| {
        put(types, supported(node, node.gpu(device)?))
    }

    fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: u64, set: nvmlEventSet_t) |node| {
        let gpu = node.gpu(device)?;
        let id = set_id(set)?;
        if types & !supported(node, gpu) != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let newest = newest(node);
        session::with_set(id, |s| {
            let entry = s.listens.entry(gpu.index).or_insert((0, newest));
            entry.0 |= types;
            Ok(())
        })
    }

    fn nvmlEventSetWait(set: nvmlEventSet_t, out: *mut nvmlEventData_t, timeout_ms: u32) |_node| {
        wait(set, out, timeout_ms)
    }

    fn nvmlEventSetWait_v2(set: nvmlEventSet_t, out: *mut nvmlEventData_t, timeout_ms: u32) |_node| {
        wait(set, out, timeout_ms)
    }

    fn nvmlEventSetFree(set: nvmlEventSet_t) |_node| {
        session::free_set(set_id(set)?)
    }
}
