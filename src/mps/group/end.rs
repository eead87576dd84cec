//! The end of a group that no claim needs: servers end, GPUs go back to their default mode, and at last the daemon
//! ends.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::{Group, GroupError, GroupState};
use crate::daemon::{Process, protocol};
use crate::model::error_chain;
use crate::mps::record::DesiredState;
use crate::nvml::ComputeModes;

/// A server ends when it is asked to, as soon as its clients have gone; then it is ended.
const SERVER_LIMIT: Duration = Duration::from_secs(4);
const QUIT_LIMIT: Duration = Duration::from_secs(3);
/// Ends of processes cannot be waited for here: they are not our children.
const POLL: Duration = Duration::from_millis(20);

impl<B: ComputeModes> Group<B> {
    /// Keeps clients out, ends the servers, gives the boards back. The daemon may stay for a while.
    pub async fn rest(&self) -> Result<(), GroupError> {
        let mut state = self.state.lock().await;
        if state.retired || (state.record.desired == DesiredState::Rest && !state.record.boards_taken) {
            return Ok(());
        }
        self.keep_clients_out();
        state.record.desired = DesiredState::Rest;
        state.in_force = false;
        state.outage.end();
        state.resting_since = Instant::now();
        state.shm.to_empty = true;
        let noted = self.note(&state);
        self.publish(&state);
        let ended = self.end_servers(&mut state).await;
        let released = self.release_boards(&mut state).await;
        // With its servers alive its clients may be, too: then the next check does it.
        if ended.is_ok() && !self.empty_shm(&mut state).await {
            self.retire(&mut state).await;
        }
        self.publish(&state);
        // Reserved meanwhile: whoever did it waits for the lock and says so again.
        self.wanted.store(false, std::sync::atomic::Ordering::Relaxed);
        noted.and(ended).and(released)
    }

    async fn end_servers(&self, state: &mut GroupState) -> Result<(), GroupError> {
        state.servers.clear();
        let Some(daemon) = state.record.daemon else { return Ok(()) };
        if daemon.is_alive() {
            for force in ["", " -f"] {
                match self.shut_down_servers(force).await {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => {
                        warn!(group = %self.group, error = error_chain(&error), "servers cannot be shut down in order");
                        break;
                    }
                }
            }
        }
        self.end_daemon(state).await
    }

    /// True if none is left.
    async fn shut_down_servers(&self, force: &str) -> Result<bool, GroupError> {
        let list = || self.pids("get_server_list".to_owned());
        for server in list().await? {
            info!(group = %self.group, server, force = !force.is_empty(), "ending a server");
            if !force.is_empty() {
                self.tools.metrics.termination("server");
            }
            let said = self.tools.ask(&self.folder, &[format!("shutdown_server {server}{force}")]).await?;
            if protocol::is_not_found(&said) {
                continue;
            }
        }
        let deadline = Instant::now() + SERVER_LIMIT;
        loop {
            if list().await?.is_empty() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            sleep(POLL).await;
        }
    }

    /// Asked to quit, and ended with its servers if it does not.
    async fn end_daemon(&self, state: &mut GroupState) -> Result<(), GroupError> {
        let Some(daemon) = state.record.daemon else { return Ok(()) };
        if daemon.is_alive() {
            if let Err(error) = self.tools.tell(&self.folder, "quit").await {
                warn!(group = %self.group, error = error_chain(&error), "the MPS daemon cannot be asked to quit");
            }
            if !gone(&[daemon], QUIT_LIMIT).await {
                warn!(group = %self.group, pid = daemon.pid, "the MPS daemon does not quit; it is ended");
                self.tools.metrics.termination("daemon");
            }
        }
        let mut left = daemon.servers();
        left.push(daemon);
        for process in &left {
            if let Err(error) = process.kill() {
                warn!(group = %self.group, pid = process.pid, %error, "cannot be ended");
            }
        }
        if !gone(&left, QUIT_LIMIT).await {
            let alive = left.iter().filter(|process| process.is_alive());
            let pids = alive.map(|process| process.pid).collect();
            return Err(GroupError::Lingering { group: self.group.clone(), pids });
        }
        state.record.daemon = None;
        self.note(state)
    }

    /// Ends the daemon and takes the folder away; the folder stays while boards are still owed.
    pub(super) async fn retire(&self, state: &mut GroupState) {
        self.keep_clients_out();
        let had_daemon = state.record.daemon.is_some();
        let ended = match self.end_daemon(state).await {
            Ok(()) if state.record.boards_taken => Ok(()),
            Ok(()) => self.leave(state),
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) if had_daemon => info!(group = %self.group, "the MPS daemon was ended: no claim needs it"),
            Ok(()) => {}
            Err(error) => {
                warn!(group = %self.group, error = error_chain(&error), "an MPS daemon that no claim needs has not ended");
            }
        }
    }

    fn leave(&self, state: &mut GroupState) -> Result<(), GroupError> {
        self.folder.remove()?;
        let removed = self.tools.records.remove(&self.group.folder());
        removed.map_err(|source| GroupError::Record { group: self.group.clone(), source })?;
        state.retired = true;
        Ok(())
    }

    /// Ends the daemon if nobody needs it. True if nothing of the group is left.
    pub async fn retire_if_resting(&self) -> bool {
        let mut state = self.state.lock().await;
        if !state.retired && state.record.desired == DesiredState::Rest {
            if let Err(error) = self.release_boards(&mut state).await {
                warn!(group = %self.group, error = error_chain(&error), "boards are not back in DEFAULT mode yet");
            }
            self.retire(&mut state).await;
        }
        self.publish(&state);
        state.retired
    }
}

/// True if they end within the time.
async fn gone(processes: &[Process], limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while processes.iter().any(|process| process.is_alive()) {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(POLL).await;
    }
    true
}
