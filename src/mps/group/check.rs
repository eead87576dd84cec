//! The check of a group every few seconds: is the daemon alive, does it answer, is its state the desired one?

use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, error, info, instrument, warn};

use super::limits::Agreed;
use super::{Group, GroupError, GroupState};
use crate::daemon::{DaemonError, Process};
use crate::model::error_chain;
use crate::model::share::{DaemonScope, MpsLimits};
use crate::mps::record::DesiredState;
use crate::nvml::{ComputeMode, ComputeModes};

/// A daemon that served for so long did not fail at its start: back-off begins anew.
const STEADY: Duration = Duration::from_secs(60);

impl<B: ComputeModes> Group<B> {
    #[instrument(level = "error", name = "check", skip_all, fields(group = %self.group))]
    pub async fn check(&self) {
        let mut state = self.state.lock().await;
        if state.retired {
            return;
        }
        match state.record.desired.clone() {
            DesiredState::Rest => self.check_resting(&mut state).await,
            DesiredState::Serve { exclusive, limits } => {
                self.check_serving(&mut state, exclusive, &limits).await;
                self.look_at_shm(&mut state).await;
            }
        }
        if !state.retired
            && let Err(error) = self.folder.trim_logs()
        {
            debug!(group = %self.group, error = error_chain(&error), "logs cannot be truncated");
        }
        self.publish(&state);
    }

    async fn check_serving(&self, state: &mut GroupState, exclusive: bool, limits: &MpsLimits) {
        if let Some(daemon) = state.record.daemon.filter(|daemon| !daemon.is_alive()) {
            self.died(state, daemon);
        }
        if state.record.daemon.is_none() || state.outage.reason().is_some() {
            self.try_again(state).await;
            return;
        }
        if let Some(mode) = self.mode(exclusive) {
            self.check_boards(state, mode).await;
        }
        match self.put_in_force(state, limits).await {
            Ok(agreed) => {
                state.outage.answered();
                state.logged.busy = false;
                state.serving_since.get_or_insert_with(Instant::now);
                if agreed == Agreed::AfterSetting {
                    warn!(group = %self.group, "the daemon's limits were not what was asked for; set again");
                    self.tools.metrics.reassertion("limits");
                }
            }
            Err(error) if state.in_force => {
                self.tools.metrics.unheard.inc();
                if !std::mem::replace(&mut state.logged.busy, true) {
                    warn!(group = %self.group, error = error_chain(&error), "limits stay as they are meanwhile");
                }
            }
            // It may have ended while it was asked.
            Err(error) => match state.record.daemon.filter(|daemon| !daemon.is_alive()) {
                Some(daemon) => self.died(state, daemon),
                None => self.failed(state, &error),
            },
        }
    }

    async fn try_again(&self, state: &mut GroupState) {
        if state.outage.is_pausing() {
            return;
        }
        match self.serve(state).await {
            Ok(()) => info!(group = %self.group, "the MPS daemon serves again"),
            Err(error) => self.failed(state, &error),
        }
    }

    /// What it left behind would hold the boards: its servers are ended, too. Their clients are lost
    /// already: a server does not outlive its daemon's socket.
    pub(super) fn died(&self, state: &mut GroupState, daemon: Process) {
        self.keep_clients_out();
        error!(group = %self.group, pid = daemon.pid, "the MPS daemon ended; its tenants' CUDA processes fail");
        self.tools.metrics.deaths.inc();
        for server in daemon.servers() {
            self.tools.metrics.termination("server");
            if let Err(error) = server.kill() {
                warn!(group = %self.group, pid = server.pid, %error, "a server without a daemon cannot be ended");
            }
        }
        let steady = state.serving_since.is_some_and(|since| since.elapsed() >= STEADY);
        if steady {
            state.outage.forget_failures();
        }
        state.in_force = false;
        state.serving_since = None;
        state.servers.clear();
        state.record.daemon = None;
        state.record.deaths += 1;
        if let Err(error) = self.note(state) {
            warn!(group = %self.group, error = error_chain(&error), "the end of a daemon cannot be recorded");
        }
        let reason = format!("the daemon (process {}) ended; it is started again", daemon.pid);
        state.outage.begin(reason, self.tools.timing().backoff);
    }

    fn failed(&self, state: &mut GroupState, error: &GroupError) {
        let silent = matches!(
            error,
            GroupError::Daemon(DaemonError::Mute { .. } | DaemonError::Gone { .. })
                | GroupError::NotUp { .. }
        );
        let words = error_chain(error);
        // Clients are kept out already.
        if silent && state.outage.may_be_slow(&words) {
            return;
        }
        warn!(group = %self.group, error = words, "the MPS daemon does not serve");
        if silent && let Some(daemon) = state.record.daemon {
            self.end_if_useless(daemon);
        }
        state.outage.begin(words, self.tools.timing().backoff);
    }

    /// One that does not answer and has no servers serves nobody: the next check finds it dead. With
    /// servers, tenants may still be at work, and it is left to people.
    fn end_if_useless(&self, daemon: Process) {
        if !daemon.servers().is_empty() {
            warn!(group = %self.group, pid = daemon.pid, "left alone: its servers may still be at work");
            return;
        }
        self.tools.metrics.termination("daemon");
        if let Err(error) = daemon.kill() {
            warn!(group = %self.group, pid = daemon.pid, %error, "the MPS daemon, which does not answer, cannot be ended");
        }
    }

    /// A driver that was loaded again has forgotten the mode.
    async fn check_boards(&self, state: &mut GroupState, wanted: ComputeMode) {
        for gpu in self.group.devices() {
            let checked = match self.tools.boards.compute_mode(gpu).await {
                Ok(mode) if mode == Some(wanted) => Ok(()),
                Ok(_) => {
                    warn!(%gpu, "the compute mode was not what was asked for; set again");
                    self.tools.metrics.reassertion("compute_mode");
                    self.tools.boards.set_compute_mode(gpu, wanted).await
                }
                Err(error) => Err(error),
            };
            let told = checked.err().map(|error| format!("{gpu}: {}", error_chain(&error)));
            if let Some(words) = &told
                && state.logged.boards != told
            {
                error!(
                    words,
                    "the compute mode is not certain: processes may get past MPS, or find no server"
                );
            }
            state.logged.boards = told;
        }
    }

    async fn check_resting(&self, state: &mut GroupState) {
        if state.record.boards_taken
            && let Err(error) = self.release_boards(state).await
        {
            debug!(group = %self.group, error = error_chain(&error), "boards are not back in DEFAULT mode yet");
        }
        let alive = state.record.daemon.is_some_and(Process::is_alive);
        let must_go = alive && state.shm.to_empty && !self.empty_shm(state).await;
        // The claim of a daemon of its own does not come back.
        let is_over = self.group.scope() == DaemonScope::Share;
        if !alive || must_go || is_over || state.resting_since.elapsed() >= self.tools.timing().keep_warm {
            self.retire(state).await;
        }
    }
}
