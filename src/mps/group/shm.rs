//! What tenants write in the memory that they share: how full it is, and when it goes.

use tracing::{info, warn};

use super::{Group, State};
use crate::model::error_chain;
use crate::model::share::SharedMemory;
use crate::nvml::ComputeModes;

impl<B: ComputeModes> Group<B> {
    /// How full it is. If it is, what users wrote who have gone makes room for those who are there.
    pub(super) async fn look_at_shm(&self, state: &mut State) {
        let told = self.folder.guard_shm().err().map(|error| error_chain(&error));
        if let Some(words) = told.as_ref().filter(|_| state.shm_told != told) {
            warn!(group = %self.group, words, "the tenants' /dev/shm is not as it should be");
        }
        state.shm_told = told;
        let usage = self.folder.shm_usage();
        let was_full = state.shm.is_some_and(|before| before.is_full());
        state.shm = usage;
        let Some(usage) = usage.filter(SharedMemory::is_full) else { return };
        if !was_full {
            warn!(group = %self.group, %usage, "the tenants' /dev/shm is full");
        }
        let own: Vec<u32> = state
            .record
            .daemon
            .into_iter()
            .flat_map(|daemon| daemon.servers().into_iter().chain([daemon]))
            .map(|process| process.pid)
            .collect();
        let folder = self.folder.clone();
        let cleared = tokio::task::spawn_blocking(move || folder.clear_departed(&own)).await;
        match cleared {
            Ok(Ok(0)) | Err(_) => {}
            Ok(Ok(removed)) => {
                info!(group = %self.group, removed, "files of users who have no process any more are removed");
                self.tools.metrics.shm_removed.inc_by(u64::try_from(removed).unwrap_or(u64::MAX));
                state.shm = self.folder.shm_usage();
            }
            Ok(Err(error)) => {
                warn!(group = %self.group, error = error_chain(&error), "nothing is removed from a full /dev/shm");
            }
        }
    }

    /// Removes all that tenants wrote: the next ones must not find it. True if nothing is left; then the daemon may
    /// stay. One whose folder is of version 0.1.0 goes in any case.
    pub(super) async fn empty_shm(&self, state: &mut State) -> bool {
        let folder = self.folder.clone();
        let is_empty = tokio::task::spawn_blocking(move || folder.empty_shm()).await.unwrap_or(false);
        if !is_empty {
            warn!(group = %self.group, "what tenants left in /dev/shm cannot be removed; the daemon goes with it");
        }
        state.shm = self.folder.shm_usage();
        state.to_empty = !is_empty;
        is_empty && (self.folder.is_apart() || !self.tools.has_mounts())
    }
}
