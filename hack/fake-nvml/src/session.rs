//! What one process holds of the library: how often it was initialised, how many
//! boards it saw then, its event sets and its GPM samples.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::code::{Answer, Code};
use crate::node::Node;

#[derive(Debug)]
struct Session {
    references: u32,
    next_set: u32,
    sets: BTreeMap<u32, EventSet>,
    next_sample: u32,
    samples: BTreeMap<u32, Option<GpmTaken>>,
}

/// Boards that an event set listens to.
#[derive(Clone, Debug, Default)]
pub struct EventSet {
    /// Per board: event bits, and the number of the last event that is not for it.
    pub listens: BTreeMap<usize, (u64, u64)>,
}

/// What a GPM sample holds once it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpmTaken {
    pub gpu: usize,
    /// None: of the whole board.
    pub gi: Option<u32>,
    pub busy_percent: u32,
}

static SESSION: Mutex<Session> = Mutex::new(Session {
    references: 0,
    next_set: 1,
    sets: BTreeMap::new(),
    next_sample: 1,
    samples: BTreeMap::new(),
});

/// Boards at the first initialisation; on its own, so that it can be asked under the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn session() -> MutexGuard<'static, Session> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One more user. The boards of the first one's moment are those of all.
pub fn open(node: &Node) {
    let mut s = session();
    if s.references == 0 {
        COUNT.store(node.gpus.len(), Ordering::Relaxed);
    }
    s.references = s.references.saturating_add(1);
}

/// One user less; the last one ends the event sets.
pub fn close() -> Answer {
    let mut s = session();
    s.references = s.references.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if s.references == 0 {
        s.sets.clear();
        s.samples.clear();
    }
    Ok(())
}

pub fn is_open() -> bool {
    session().references > 0
}

pub fn count_at_init() -> usize {
    COUNT.load(Ordering::Relaxed)
}

pub fn create_set() -> u32 {
    let mut s = session();
    let id = s.next_set;
    s.next_set = s.next_set.wrapping_add(1).max(1);
    s.sets.insert(id, EventSet::default());
    id
}

/// Works on an event set; it is an invalid argument once freed.
pub fn with_set<T>(id: u32, work: impl FnOnce(&mut EventSet) -> Answer<T>) -> Answer<T> {
    work(session().sets.get_mut(&id).ok_or(Code::INVALID_ARGUMENT)?)
}

pub fn free_set(id: u32) -> Answer {
    session().sets.remove(&id).map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
}

pub fn create_sample() -> u32 {
    let mut s = session();
    let id = s.next_sample;
    s.next_sample = s.next_sample.wrapping_add(1).max(1);
    s.samples.insert(id, None);
    id
}

/// A sample's place; it is an invalid argument once freed.
pub fn with_sample<T>(id: u32, work: impl FnOnce(&mut Option<GpmTaken>) -> Answer<T>) -> Answer<T> {
    work(session().samples.get_mut(&id).ok_or(Code::INVALID_ARGUMENT)?)
}

pub fn free_sample(id: u32) -> Answer {
    session().samples.remove(&id).map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
}
