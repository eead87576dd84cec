//! What people are to be told waits while claims are under way: an event costs the API server as much as a claim's
//! write, and with a thousand claims at once these are what everybody waits for.

use std::collections::VecDeque;
use std::time::Duration;

use crate::cluster::events::Note;
use crate::controller::Moment;

/// So many wait at most: a burst of a thousand pods, with claims. What comes beyond is lost, and counted.
const NOTES_MAX: usize = 4096;
/// None waits for longer, however much there is to do.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub struct EventBacklog {
    waiting: VecDeque<(Moment, Note)>,
}

impl EventBacklog {
    /// How many of them were lost.
    pub fn add(&mut self, notes: Vec<Note>, now: Moment) -> u64 {
        let room = NOTES_MAX.saturating_sub(self.waiting.len());
        let lost = notes.len().saturating_sub(room);
        self.waiting.extend(notes.into_iter().take(room).map(|note| (now, note)));
        lost as u64
    }

    /// Whether the first may be sent. `busy`: claims are being written, or are to be.
    pub fn is_due(&self, busy: bool, now: Moment) -> bool {
        self.waiting.front().is_some_and(|(since, _)| !busy || *since + PATIENCE <= now)
    }

    /// The first.
    pub fn take(&mut self) -> Option<Note> {
        self.waiting.pop_front().map(|(_, note)| note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::events::{EventSubject, Severity};

    const NOW: Moment = Duration::from_secs(100);

    fn notes(count: usize) -> Vec<Note> {
        let note = |nth: usize| Note {
            subject: EventSubject::Pod { namespace: "ml".into(), name: format!("p{nth}"), uid: "u".into() },
            severity: Severity::Normal,
            reason: "GpuSharePlaced",
            message: nth.to_string(),
        };
        (0..count).map(note).collect()
    }

    #[test]
    fn claims_go_first_but_not_for_ever() {
        let mut waiting = EventBacklog::default();
        assert!(!waiting.is_due(false, NOW), "there is none");
        assert_eq!(waiting.add(notes(2), NOW), 0);
        assert!(waiting.is_due(false, NOW) && !waiting.is_due(true, NOW));
        assert!(!waiting.is_due(true, NOW + PATIENCE - Duration::from_millis(1)));
        assert!(waiting.is_due(true, NOW + PATIENCE));
        let told: Vec<String> = std::iter::from_fn(|| waiting.take()).map(|note| note.message).collect();
        assert_eq!(told, ["0", "1"]);
    }

    #[test]
    fn what_there_is_no_room_for_is_counted() {
        let mut waiting = EventBacklog::default();
        assert_eq!(waiting.add(notes(NOTES_MAX - 1), NOW), 0);
        assert_eq!(waiting.add(notes(3), NOW), 2);
        assert_eq!(waiting.add(notes(1), NOW), 1);
        assert_eq!(std::iter::from_fn(|| waiting.take()).count(), NOTES_MAX);
    }
}
