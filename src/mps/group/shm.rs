//! The memory that tenants share as /dev/shm: how full it is, and when it is emptied.

use tracing::{info, warn};

use super::{Group, GroupState};
use crate::daemon::{DaemonError, Folder, Process};
use crate::model::error_chain;
use crate::model::share::SharedMemory;
use crate::nvml::ComputeModes;

/// What one look found, and did.
struct ShmSurvey {
    guarded: Result<(), DaemonError>,
    before: Option<SharedMemory>,
    cleared: Result<usize, DaemonError>,
    after: Option<SharedMemory>,
}

impl ShmSurvey {
    fn at(folder: &Folder, daemon: Option<Process>) -> Self {
        let guarded = folder.guard_shm();
        let before = folder.shm_usage();
        if !before.is_some_and(|usage| usage.is_full()) {
            return Self { guarded, before, cleared: Ok(0), after: before };
        }
        let own = daemon.into_iter().flat_map(|daemon| daemon.servers().into_iter().chain([daemon]));
        let cleared = folder.clear_departed(&own.map(|process| process.pid).collect::<Vec<_>>());
        let after = if matches!(cleared, Ok(0)) { before } else { folder.shm_usage() };
        Self { guarded, before, cleared, after }
    }
}

impl<B: ComputeModes> Group<B> {
    /// How full it is. If it is, what users wrote who have gone makes room for those who are there.
    pub(super) async fn look_at_shm(&self, state: &mut GroupState) {
        let (folder, daemon) = (self.folder.clone(), state.record.daemon);
        // Tenants decide how much there is to look at.
        let Ok(look) = tokio::task::spawn_blocking(move || ShmSurvey::at(&folder, daemon)).await else {
            return;
        };
        let told = look.guarded.err().map(|error| error_chain(&error));
        if let Some(words) = told.as_ref().filter(|_| state.logged.shm != told) {
            warn!(group = %self.group, words, "the tenants' /dev/shm is not as it should be");
        }
        state.logged.shm = told;
        let was_full = state.shm.usage.is_some_and(|before| before.is_full());
        if let Some(usage) = look.before.filter(|usage| usage.is_full() && !was_full) {
            warn!(group = %self.group, %usage, "the tenants' /dev/shm is full");
        }
        match look.cleared {
            Ok(0) => {}
            Ok(removed) => {
                info!(group = %self.group, removed, "files of users who have no process left are removed");
                self.tools.metrics.shm_removed.inc_by(u64::try_from(removed).unwrap_or(u64::MAX));
            }
            Err(error) => {
                warn!(group = %self.group, error = error_chain(&error), "nothing is removed from a full /dev/shm");
            }
        }
        state.shm.usage = look.after;
    }

    /// Removes all that tenants wrote: the next ones must not find it. True if nothing is left; then the daemon may
    /// stay. One whose folder is an earlier version's goes in any case.
    pub(super) async fn empty_shm(&self, state: &mut GroupState) -> bool {
        let folder = self.folder.clone();
        let is_empty = tokio::task::spawn_blocking(move || folder.empty_shm()).await.unwrap_or(false);
        if !is_empty {
            warn!(group = %self.group, "what tenants left in /dev/shm cannot be removed; the daemon goes with it");
        }
        state.shm.usage = self.folder.shm_usage();
        state.shm.to_empty = !is_empty;
        is_empty && (self.folder.is_apart() || !self.tools.has_mounts())
    }
}
