//! Readings of the whole ledger. The disk may be slow, and prepares and looks use the index meanwhile, so a reading holds no
//! lock: what it found is taken over afterwards, but for the records that changed in the index since it began.
//!
//! A change of ours is on the disk before it is in the index. So a record that did not change in the index while it was read
//! was read as it is there, or with a change that comes to the index next. Of two readings the one that began later counts,
//! whichever ends first: whoever holds a lane has begun one since another process had the lane.

use std::collections::{BTreeMap, BTreeSet};

use crate::ledger::RecordKey;

/// More records than that change only while the disk stands still; then the reading comes to nothing.
const CHANGED_MAX: usize = 1024;

/// The readings that are under way: one for each thread that reads, of which the callers have few.
#[derive(Debug, Default)]
pub(super) struct Readings {
    /// Number of the last one that began.
    begun: u64,
    /// The highest number of those that were taken over.
    taken_over: u64,
    /// Records that changed since it began; none: too many.
    changed: BTreeMap<u64, Option<BTreeSet<RecordKey>>>,
}

/// What is to become of a reading that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadingEnd {
    /// All of it counts but these records.
    TakeOver { except: BTreeSet<RecordKey> },
    /// One that began later has been taken over.
    Overtaken,
    /// Too many records changed.
    Void,
}

impl Readings {
    /// Begins a reading. Each is to be ended, also one that fails.
    pub fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.changed.insert(self.begun, Some(BTreeSet::new()));
        self.begun
    }

    /// A record has changed in the index.
    pub fn note_change(&mut self, key: &RecordKey) {
        for changed in self.changed.values_mut() {
            let Some(keys) = changed else { continue };
            keys.insert(key.clone());
            if keys.len() > CHANGED_MAX {
                *changed = None;
            }
        }
    }

    /// Ends a reading that came to nothing.
    pub fn give_up(&mut self, reading: u64) {
        self.changed.remove(&reading);
    }

    /// Ends a reading, which is taken over.
    pub fn end(&mut self, reading: u64) -> ReadingEnd {
        let changed = self.changed.remove(&reading).flatten();
        if reading < self.taken_over {
            return ReadingEnd::Overtaken;
        }
        let Some(except) = changed else { return ReadingEnd::Void };
        self.taken_over = reading;
        ReadingEnd::TakeOver { except }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> RecordKey {
        RecordKey::of_name(name)
    }

    #[test]
    fn what_changed_since_a_reading_began_is_not_taken_from_it() {
        let mut readings = Readings::default();
        readings.note_change(&key("before"));
        let first = readings.begin();
        readings.note_change(&key("a"));
        let second = readings.begin();
        readings.note_change(&key("b"));
        let except =
            |names: &[&str]| ReadingEnd::TakeOver { except: names.iter().copied().map(key).collect() };
        assert_eq!(readings.end(first), except(&["a", "b"]));
        assert_eq!(readings.end(second), except(&["b"]));
        assert!(readings.changed.is_empty());
    }

    #[test]
    fn of_two_readings_the_one_that_began_later_counts() {
        let mut readings = Readings::default();
        let [first, second, third] = [(); 3].map(|()| readings.begin());
        readings.give_up(third);
        assert_eq!(readings.end(second), ReadingEnd::TakeOver { except: BTreeSet::new() });
        assert_eq!(readings.end(first), ReadingEnd::Overtaken);
        let fourth = readings.begin();
        assert_eq!(readings.end(fourth), ReadingEnd::TakeOver { except: BTreeSet::new() });
    }

    #[test]
    fn a_reading_that_stands_still_remembers_no_changes_without_end() {
        let mut readings = Readings::default();
        let reading = readings.begin();
        for number in 0..=CHANGED_MAX {
            readings.note_change(&key(&format!("c{number}")));
        }
        assert_eq!(readings.changed[&reading], None);
        assert_eq!(readings.end(reading), ReadingEnd::Void);
    }
}
