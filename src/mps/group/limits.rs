//! Sets the limits of a daemon, reads them back, and tells whether they are in force.

use tracing::{debug, warn};

use super::{Group, GroupError, GroupState};
use crate::daemon::{DaemonError, protocol};
use crate::model::error_chain;
use crate::model::share::MpsLimits;
use crate::nvml::ComputeModes;
use crate::supervisor::protocol::Server;

/// What it took to agree with the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Agreed {
    Already,
    AfterSetting,
}

/// What a daemon says of itself.
struct Reading {
    defaults: protocol::Limits,
    servers: Vec<(Server, Option<protocol::Limits>)>,
}

impl Reading {
    fn fits(&self, limits: &MpsLimits) -> bool {
        let server_fits = |found: &Option<protocol::Limits>| {
            found.as_ref().is_none_or(|found| protocol::fit_server(limits, found))
        };
        protocol::fit(limits, &self.defaults) && self.servers.iter().all(|(_, found)| server_fits(found))
    }
}

impl<B: ComputeModes> Group<B> {
    /// Agrees with the daemon on its limits and lets clients in; keeps them out if that fails. What was in
    /// force still is while the daemon hears somebody else: only root on the node changes it.
    pub(super) async fn put_in_force(
        &self,
        state: &mut GroupState,
        limits: &MpsLimits,
    ) -> Result<Agreed, GroupError> {
        if !state.in_force {
            self.publish(state);
        }
        let agreed = match self.agree(state, limits).await {
            Ok(agreed) => self.folder.open().map(|()| agreed).map_err(GroupError::from),
            Err(error) => Err(error),
        };
        if state.in_force && agreed.as_ref().is_err_and(GroupError::is_busy) {
            return agreed;
        }
        state.in_force = agreed.is_ok();
        if agreed.is_err() {
            self.keep_clients_out();
        }
        agreed
    }

    /// Removes the links. If that fails, the next check tries again; the daemon is known to be in doubt.
    pub(super) fn keep_clients_out(&self) {
        if let Err(error) = self.folder.close() {
            warn!(group = %self.group, error = error_chain(&error), "clients may still come in");
        }
    }

    /// Sets nothing if all is as it should be.
    async fn agree(&self, state: &mut GroupState, limits: &MpsLimits) -> Result<Agreed, GroupError> {
        let found = self.read(state).await?;
        if found.fits(limits) {
            return Ok(Agreed::Already);
        }
        // Until it is read back, nobody knows: not even those who look without waiting.
        state.in_force = false;
        self.publish(state);
        self.set(limits).await?;
        let found = self.read(state).await?;
        match found.fits(limits) {
            true => Ok(Agreed::AfterSetting),
            false => Err(GroupError::NotTaken { wanted: asked(limits), found: told(&found) }),
        }
    }

    /// Defaults first: a server that starts from now on has them, and the others are listed afterwards.
    async fn set(&self, limits: &MpsLimits) -> Result<(), GroupError> {
        self.tools.ask(&self.folder, &protocol::set_defaults(limits)).await?;
        for server in self.pids("get_server_list".to_owned()).await? {
            let said = self.tools.ask(&self.folder, &protocol::set_server(server, limits)).await?;
            debug!(group = %self.group, server, said = said.trim(), "limits of a running server set");
        }
        Ok(())
    }

    async fn read(&self, state: &mut GroupState) -> Result<Reading, GroupError> {
        let devices = self.group.devices().len();
        let commands = protocol::read_defaults(devices);
        let answer = self.tools.ask(&self.folder, &commands).await?;
        let Some((defaults, pids)) = protocol::defaults(&answer, devices) else {
            return Err(DaemonError::NotUnderstood { command: commands.join("; "), answer }.into());
        };
        let mut servers = Vec::new();
        for pid in pids {
            let answer = self.tools.ask(&self.folder, &protocol::read_server(pid, devices)).await?;
            match protocol::server(&answer, devices) {
                Some((state, found)) => servers.push((Server { pid, state }, Some(found))),
                None if protocol::is_not_found(&answer) => {}
                None => {
                    let state = answer.lines().next().unwrap_or_default().trim().to_owned();
                    debug!(group = %self.group, pid, answer, "a server's limits are not understood");
                    servers.push((Server { pid, state }, None));
                }
            }
        }
        state.answers = defaults.clone();
        state.servers = servers.iter().map(|(server, _)| server.clone()).collect();
        Ok(Reading { defaults, servers })
    }
}

/// For people.
fn asked(limits: &MpsLimits) -> String {
    protocol::set_defaults(limits).join("; ")
}

fn told(found: &Reading) -> String {
    let one = |limits: &protocol::Limits| {
        let memory: Vec<_> = limits
            .memory
            .iter()
            .map(|answer| if answer.is_empty() { "no limit" } else { answer.as_str() })
            .collect();
        format!("memory {}, threads {}", memory.join(", "), limits.compute)
    };
    let servers = found.servers.iter().filter_map(|(server, limits)| {
        limits.as_ref().map(|limits| format!("; server {}: {}", server.pid, one(limits)))
    });
    [one(&found.defaults)].into_iter().chain(servers).collect()
}
