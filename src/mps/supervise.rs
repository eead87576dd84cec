//! All groups: which are requested, and which exclude each other.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::join_all;
use tracing::{error, info, instrument, warn};

use super::group::{Group, GroupError};
use super::tools::Tools;
use crate::daemon::Process;
use crate::model::error_chain;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;
use crate::model::share::{MpsGroup, MpsLimits};
use crate::nvml::ComputeModes;
use crate::supervisor::RequestHandler;
use crate::supervisor::protocol::{DaemonPhase, DaemonState, MpsClient, Request, Response};

/// A group that is being given up as it is asked for is made anew; more often than this it is not bad luck.
const ATTEMPTS: usize = 3;
/// `sun_path` has 108 bytes (unix(7)); the longest name below a daemon's folder.
const SOCKET_BYTES_MAX: usize = 107;
const LONGEST_SOCKET: &str = "pipe/control_privileged";

/// All groups of this node.
pub struct Supervisor<B> {
    tools: Arc<Tools<B>>,
    /// By the name of their folder.
    groups: Mutex<BTreeMap<String, Arc<Group<B>>>>,
}

type Groups<B> = BTreeMap<String, Arc<Group<B>>>;

impl<B: ComputeModes> Supervisor<B> {
    pub fn new(tools: Tools<B>) -> Self {
        Self { tools: Arc::new(tools), groups: Mutex::default() }
    }

    fn groups(&self) -> std::sync::MutexGuard<'_, Groups<B>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<Group<B>>> {
        self.groups().values().cloned().collect()
    }

    /// Takes over what an earlier supervisor left, and looks at each once.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub async fn adopt(&self) -> io::Result<()> {
        for name in self.tools.records.names()? {
            match self.tools.records.read(&name) {
                Ok(None) => {}
                Ok(Some(record)) if record.group.folder() == name => {
                    info!(group = %record.group, wish = ?record.desired, daemon = ?record.daemon, "found a daemon's record");
                    let group = Group::adopted(self.tools.clone(), record);
                    self.groups().insert(name, Arc::new(group));
                }
                Ok(Some(record)) => {
                    error!(name, group = %record.group, "left alone: it is of another group");
                }
                Err(error) => error!(
                    record = %self.tools.records.path(&name).display(), %error,
                    "left alone: the record cannot be read; end the daemon of that name and remove the record"
                ),
            }
        }
        self.remove_leftovers();
        self.check().await;
        Ok(())
    }

    /// Folders of claims' own daemons that were made and not recorded before a crash: nobody asks for them again.
    fn remove_leftovers(&self) {
        let found = self.tools.folders_of_claims();
        let found = found.inspect_err(|error| warn!(%error, "folders of daemons cannot be listed"));
        for (name, folder) in found.unwrap_or_default() {
            let is_known = self.groups().contains_key(&name) || self.tools.records.path(&name).exists();
            if is_known || Process::daemon_of(&folder).is_some() {
                continue;
            }
            match folder.remove() {
                Ok(()) => info!(name, "removed: the folder of a daemon that was never started"),
                Err(error) => warn!(name, error = error_chain(&error), "a folder that nobody needs is left"),
            }
        }
    }

    /// Looks at every group once, all at the same time.
    pub async fn check(&self) {
        let all = self.all();
        join_all(all.iter().map(|group| group.check())).await;
        for group in all {
            if group.is_retired().await {
                self.forget(&group);
            }
        }
        let phases = self.states().into_iter().map(|state| state.phase);
        let (mut serving, mut resting, mut down) = (0, 0, 0);
        for phase in phases {
            match phase {
                DaemonPhase::Serving { .. } | DaemonPhase::Settling { .. } => serving += 1,
                DaemonPhase::Resting { .. } => resting += 1,
                DaemonPhase::Down { .. } => down += 1,
            }
        }
        self.tools.metrics.daemons(serving, resting, down);
    }

    fn forget(&self, gone: &Arc<Group<B>>) {
        self.groups().retain(|_, group| !Arc::ptr_eq(group, gone));
    }

    /// Ends the daemons that nobody needs; the others outlive this process.
    pub async fn end_resting(&self) {
        let all = self.all();
        join_all(all.iter().map(|group| group.retire_if_resting())).await;
    }

    pub fn states(&self) -> Vec<DaemonState> {
        self.all().iter().map(|group| group.snapshot()).collect()
    }

    /// The same with the servers that run now: whoever asks must not take one that has just started for a stranger.
    async fn states_now(&self) -> Vec<DaemonState> {
        let running = tokio::task::spawn_blocking(Process::servers_by_daemon).await.unwrap_or_default();
        self.all().iter().map(|group| group.snapshot_with(&running)).collect()
    }

    #[instrument(level = "error", name = "keep", skip_all, fields(%group))]
    pub async fn keep(
        &self,
        group: &MpsGroup,
        exclusive: bool,
        limits: &MpsLimits,
    ) -> Result<DaemonState, GroupError> {
        self.understand(group, limits)?;
        for _ in 0..ATTEMPTS {
            let (wanted, in_the_way) = self.reserve(group)?;
            for other in in_the_way {
                // What it still owes its boards would be set on ours.
                if !other.retire_if_resting().await {
                    wanted.settle().await;
                    return Err(GroupError::Overlap { group: group.clone(), other: other.group().clone() });
                }
                self.forget(&other);
            }
            match wanted.keep(exclusive, limits).await {
                Err(GroupError::Retired) => self.forget(&wanted),
                done => return done,
            }
        }
        Err(GroupError::Retired)
    }

    /// The group, and those that rest and have a device of it. From here on no other group gets its devices.
    #[expect(clippy::type_complexity, reason = "a group, and groups")]
    fn reserve(&self, group: &MpsGroup) -> Result<(Arc<Group<B>>, Vec<Arc<Group<B>>>), GroupError> {
        let mut groups = self.groups();
        let others = groups.values().filter(|other| group.excludes(other.group()));
        let others: Vec<_> = others.cloned().collect();
        if let Some(other) = others.iter().find(|other| other.is_wanted()) {
            return Err(GroupError::Overlap { group: group.clone(), other: other.group().clone() });
        }
        let tools = &self.tools;
        let make = || Arc::new(Group::new(tools.clone(), group.clone()));
        let wanted = groups.entry(group.folder()).or_insert_with(make).clone();
        wanted.reserve();
        Ok((wanted, others))
    }

    /// Refuses what would be misunderstood further down.
    fn understand(&self, group: &MpsGroup, limits: &MpsLimits) -> Result<(), GroupError> {
        let invalid = |words: String| Err(GroupError::Invalid(words));
        let devices = group.devices();
        if devices.is_empty() || !devices.iter().all(DeviceUuid::is_well_formed) {
            return invalid(format!("{group:?} is not a valid group of GPU UUIDs"));
        }
        if limits.memory.len() != devices.len() {
            return invalid(format!("{} memory limits for {} devices", limits.memory.len(), devices.len()));
        }
        // The daemon takes 0 for "no limit".
        let is_too_small = |limit: &Option<Bytes>| limit.is_some_and(|limit| limit.mib_floor() == 0);
        if limits.memory.iter().any(is_too_small) {
            return invalid("a memory limit below 1 MiB cannot be set".to_owned());
        }
        let socket = self.tools.folder(group).path().join(LONGEST_SOCKET);
        match socket.as_os_str().len() <= SOCKET_BYTES_MAX {
            true => Ok(()),
            false => invalid(format!(
                "{} is longer than the {SOCKET_BYTES_MAX} bytes of a socket's path; choose a shorter --mps-dir",
                socket.display()
            )),
        }
    }

    fn find(&self, group: &MpsGroup) -> Option<Arc<Group<B>>> {
        self.groups().get(&group.folder()).filter(|found| found.group() == group).cloned()
    }

    #[instrument(level = "error", name = "rest", skip_all, fields(%group))]
    pub async fn rest(&self, group: &MpsGroup) -> Result<(), GroupError> {
        match self.find(group) {
            Some(group) => group.rest().await,
            None => Ok(()),
        }
    }

    pub async fn clients(&self, group: &MpsGroup) -> Result<Vec<MpsClient>, GroupError> {
        match self.find(group) {
            Some(group) => group.clients().await,
            None => Ok(Vec::new()),
        }
    }

    #[instrument(level = "error", name = "terminate", skip_all, fields(%group))]
    pub async fn terminate(&self, group: &MpsGroup, client: MpsClient) -> Result<(), GroupError> {
        match self.find(group) {
            Some(group) => group.terminate(client).await,
            None => Err(GroupError::Invalid(format!("no MPS daemon serves {group}"))),
        }
    }
}

impl<B: ComputeModes> RequestHandler for Supervisor<B> {
    async fn handle(&self, request: Request) -> Response {
        self.tools.metrics.questions.inc();
        let done = match &request {
            Request::Keep { group, exclusive, limits } => {
                self.keep(group, *exclusive, limits).await.map(|state| Response::Kept(Box::new(state)))
            }
            Request::Rest { group } => self.rest(group).await.map(|()| Response::Done),
            Request::States => Ok(Response::States(self.states_now().await)),
            Request::Clients { group } => self.clients(group).await.map(Response::Clients),
            Request::Terminate { group, client } => {
                self.terminate(group, *client).await.map(|()| Response::Done)
            }
        };
        done.unwrap_or_else(|error| {
            let words = error_chain(&error);
            warn!(ask = ?request, words, "refused");
            self.tools.metrics.refusals.inc();
            Response::Refused(words)
        })
    }
}
