//! Something that is so or not from look to look, and is believed after two looks in a row.

use std::time::Duration;

use super::BELIEVED;
use crate::model::time::Moment;

/// Something that is so, or not, from look to look.
#[derive(Debug, Default)]
pub(super) struct Episode {
    /// Looks in a row that speak against what is believed.
    against: u32,
    /// Since when it is so, once it is believed.
    since: Option<Moment>,
    first: Moment,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum EpisodeChange {
    None,
    Began,
    Ended { lasted: Duration },
}

impl Episode {
    pub fn look(&mut self, is: bool, now: Moment) -> EpisodeChange {
        if is == self.since.is_some() {
            self.against = 0;
            return EpisodeChange::None;
        }
        if self.against == 0 {
            self.first = now;
        }
        self.against += 1;
        if self.against < BELIEVED {
            return EpisodeChange::None;
        }
        self.against = 0;
        match self.since.take() {
            Some(since) => EpisodeChange::Ended { lasted: self.first.saturating_sub(since) },
            None => {
                self.since = Some(self.first);
                EpisodeChange::Began
            }
        }
    }

    pub fn is_on(&self) -> bool {
        self.since.is_some()
    }
}
