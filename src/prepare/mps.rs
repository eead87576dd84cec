//! Which MPS daemons a claim needs: one for all of its shares, its own or that of the GPU's other shares; one for whole
//! GPUs that its author wants shared within the claim; one for each such MIG device.

use std::path::PathBuf;

use super::{Refusal, Site, Target, share};
use crate::cdi::{HostPath, Mount, MountAccess};
use crate::ledger::{HoldMode, Intent, Step};
use crate::model::claim::AllocatedClaim;
use crate::model::gpu::Device;
use crate::model::names::DeviceUuid;
use crate::model::quantity::Bytes;
use crate::model::share::{
    CLIENT_FOLDER, DaemonScope, Grant, Isolation, MpsGroup, MpsLimits, Percent, SHM_FOLDER,
};
use crate::params::{MpsSettings, Sharing};
use crate::sharing::{CLIENT_DIRECTORY, SHM_DIRECTORY, client_env};

/// One daemon, and what the claim's processes need of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Daemon {
    group: MpsGroup,
    exclusive: bool,
    needs: MpsLimits,
}

impl Daemon {
    pub fn step(&self) -> Step {
        Step::Mps { group: self.group.clone(), exclusive: self.exclusive, needs: self.needs.clone() }
    }

    pub fn serves(&self, target: &Target<'_>) -> bool {
        let by_mps = match &target.mode {
            HoldMode::Share(grant) => grant.isolation == Isolation::Mps,
            HoldMode::Whole | HoldMode::Mig => settings(target).is_some(),
            HoldMode::Admin => false,
        };
        by_mps && self.group.ordinal(target.device.uuid()).is_some()
    }

    /// The client's variables. On one device each share has its own numbers; on several all have the same,
    /// because a container gets the variables of all of its devices and the last would win.
    pub fn env(&self, target: &Target<'_>) -> Vec<(String, String)> {
        let limits = match (&target.mode, self.group.devices().len()) {
            (HoldMode::Share(grant), 1) => {
                MpsLimits { memory: vec![Some(grant.memory_per_process())], compute: grant.compute }
            }
            _ => self.needs.clone(),
        };
        client_env(&self.group, &limits)
    }

    /// The daemon's socket, and, where `with_shm`, the memory that client and server may share: nothing else of its
    /// folder.
    pub fn mounts(&self, mps_dir: &str, with_shm: bool) -> Vec<Mount> {
        let folder = format!("{}/{}", mps_dir.trim_end_matches('/'), self.group.folder());
        let mount = |below: &str, container: &str, access| {
            let host = format!("{folder}/{below}");
            Mount {
                host: HostPath { inside: PathBuf::from(&host), host },
                container: container.to_owned(),
                access,
            }
        };
        let mut mounts = vec![mount(CLIENT_FOLDER, CLIENT_DIRECTORY, MountAccess::ReadOnly)];
        if with_shm {
            mounts.push(mount(SHM_FOLDER, SHM_DIRECTORY, MountAccess::NoExecute));
        }
        mounts
    }
}

/// The daemons for the claim's targets, in a fixed order.
pub(super) fn daemons(
    claim: &AllocatedClaim,
    targets: &[Target<'_>],
    site: Site<'_>,
) -> Result<Vec<Daemon>, Refusal> {
    let mut daemons = Vec::new();
    daemons.extend(for_shares(claim, targets, site)?);
    let whole = |target: &&Target<'_>| target.mode == HoldMode::Whole && settings(target).is_some();
    daemons.extend(for_devices(&targets.iter().filter(whole).collect::<Vec<_>>(), true)?);
    for target in targets.iter().filter(|t| t.mode == HoldMode::Mig && settings(t).is_some()) {
        daemons.extend(for_devices(&[target], false)?);
    }
    for daemon in &daemons {
        share::check_group(claim, &daemon.group, site)?;
    }
    Ok(daemons)
}

fn for_shares(
    claim: &AllocatedClaim,
    targets: &[Target<'_>],
    site: Site<'_>,
) -> Result<Option<Daemon>, Refusal> {
    let shares: Vec<(&DeviceUuid, &Grant)> = targets
        .iter()
        .filter_map(|target| match &target.mode {
            HoldMode::Share(grant) if grant.isolation == Isolation::Mps => {
                Some((target.device.uuid(), grant))
            }
            _ => None,
        })
        .collect();
    if shares.is_empty() {
        return Ok(None);
    }
    let group = MpsGroup::new(shares.iter().map(|(uuid, _)| (*uuid).clone()));
    let percents: Vec<Option<Percent>> = shares.iter().map(|(_, grant)| grant.compute).collect();
    if group.devices().len() > 1 && percents.iter().any(|percent| *percent != percents[0]) {
        return Err(Refusal::ComputeDiffers);
    }
    let most = |device: &DeviceUuid| {
        shares.iter().filter(|(uuid, _)| *uuid == device).map(|(_, grant)| grant.memory_per_process()).max()
    };
    let memory = group.devices().iter().map(most).collect();
    let capped: Option<Vec<Percent>> = percents.into_iter().collect();
    let compute = capped.and_then(|percents| percents.into_iter().max());
    let needs = MpsLimits { memory, compute };
    Ok(Some(match scope(claim, group.devices(), site) {
        DaemonScope::Gpu => Daemon { group, exclusive: true, needs },
        // In EXCLUSIVE_PROCESS mode a board takes one server alone.
        DaemonScope::Share => {
            Daemon { group: group.of_claim(claim.claim.uid.clone()), exclusive: false, needs }
        }
    }))
}

/// That of the claim's own record, of the shares which the boards have already, or, where they have none, the node's.
/// So a changed setting takes effect on a board when its last share has left, and touches no share that is there.
fn scope(claim: &AllocatedClaim, devices: &[DeviceUuid], site: Site<'_>) -> DaemonScope {
    let is_own = |holder: &&Intent| holder.is_current_of(&claim.claim.uid);
    let (own, others): (Vec<_>, Vec<_>) = site.held.iter().partition(is_own);
    scope_on(own.into_iter().chain(others), devices).unwrap_or(site.sharing.daemon)
}

/// Whom the daemons serve that these claims have on these boards; none without a daemon.
pub(super) fn scope_on<'a>(
    holders: impl IntoIterator<Item = &'a Intent>,
    devices: &[DeviceUuid],
) -> Option<DaemonScope> {
    let mut scopes = holders.into_iter().flat_map(|holder| &holder.steps).filter_map(|step| match step {
        Step::Mps { group, .. } => {
            devices.iter().any(|device| group.ordinal(device).is_some()).then(|| group.scope())
        }
        _ => None,
    });
    scopes.next()
}

/// One daemon for devices that the claim has for itself, limited as its author says.
fn for_devices(targets: &[&Target<'_>], exclusive: bool) -> Result<Option<Daemon>, Refusal> {
    let Some(first) = targets.first().and_then(|target| settings(target)) else { return Ok(None) };
    let group = MpsGroup::new(targets.iter().map(|target| target.device.uuid().clone()));
    if targets.iter().any(|target| {
        settings(target).is_none_or(|other| other.active_thread_percentage != first.active_thread_percentage)
    }) {
        return Err(Refusal::ComputeDiffers);
    }
    let limit = |(index, device): (usize, &DeviceUuid)| {
        let target = targets.iter().find(|target| target.device.uuid() == device)?;
        memory_limit(settings(target)?, index, target.device)
    };
    let memory = group.devices().iter().enumerate().map(limit).collect();
    let compute =
        first.active_thread_percentage.and_then(|percent| Percent::try_from(u64::from(percent)).ok());
    Ok(Some(Daemon { group, exclusive, needs: MpsLimits { memory, compute } }))
}

fn memory_limit(settings: &MpsSettings, index: usize, device: Device<'_>) -> Option<Bytes> {
    let named = |(name, _): &&(String, Bytes)| *name == index.to_string() || name == device.uuid().as_str();
    let own = settings.per_device_pinned_memory_limit.iter().rfind(named).map(|(_, limit)| *limit);
    // MPS takes whole MiB; less than one would be none. Less is in claims that were prepared before it was refused.
    own.or(settings.pinned_memory_limit).map(|limit| Bytes::from_mib(limit.mib_floor().max(1)))
}

fn settings<'a>(target: &'a Target<'_>) -> Option<&'a MpsSettings> {
    match &target.settings.sharing {
        Some(Sharing::Mps(settings)) => Some(settings),
        _ => None,
    }
}
