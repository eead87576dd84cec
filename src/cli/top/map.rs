//! Slices and claims → who has what of which GPU. Pure: what the API server says, in order.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    Device, DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice,
};
use serde::Serialize;

use super::bounds::NamespaceBounds;
use super::used::PodUse;
use crate::allocate::mig::{MigLayout, memory_slices};
use crate::model::gpu::Placement;
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::names::{DRIVER, DeviceName, HOLD_LABEL, PoolName};
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::{DaemonScope, Extent};
use crate::params::{self, GrantedDevice, Params};
use crate::sharing::{COMPUTE, MEMORY};
use crate::slices::{BoardParts, Grantable};

/// The source of entries that only administrators and our controller write (KEP-3063).
const FROM_CLASS: &str = "FromClass";

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Map {
    pub nodes: Vec<NodeMap>,
    /// Namespaces that have a bound, and what their shares come to in the whole cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<NamespaceBounds>,
    /// What could not be read, and why, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMap {
    pub name: String,
    pub devices: Vec<DeviceRow>,
}

/// A device of the node, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRow {
    pub device: String,
    pub product: String,
    /// `gpu` or `mig`; `mig-parent` of a GPU that is cut into MIG devices on demand.
    #[serde(rename = "type")]
    pub kind: String,
    /// What shares may come to together; none: it is only given whole, or cut into MIG devices.
    #[serde(rename = "grantableMiB")]
    pub grantable_mib: Option<u64>,
    /// Of a GPU that is cut into MIG devices on demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<MigCut>,
    #[serde(skip)]
    pub from_slice: FromSlice,
    /// Taken by our controller, to be filled with shares.
    pub held: bool,
    /// Its shares belong to a claim with shares of several GPUs: one MPS daemon serves them together, and no other share
    /// is placed here.
    pub closed: bool,
    /// Keys of its taints.
    pub taints: Vec<String>,
    pub claims: Vec<ClaimShare>,
}

/// What a device's slice says of it that is not shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FromSlice {
    /// It is made once a claim is given it.
    pub possible: bool,
    /// One MPS daemon serves all of its shares.
    pub one_daemon: bool,
}

/// What a GPU is cut into, beside what claims of our controller's have of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigCut {
    #[serde(skip)]
    pub profiles: Vec<MigProfile>,
    /// Instances that were made for no claim.
    #[serde(skip)]
    pub foreign: Vec<MigPlace>,
    pub memory_slices: u32,
    /// The largest MIG device that can still be made for our controller, and its MiB; none: none can.
    pub largest: Option<String>,
    #[serde(rename = "largestMiB")]
    pub largest_mib: u64,
    /// kube-scheduler has given MIG devices of it: as long as it has, our controller cuts nothing off.
    pub by_scheduler: bool,
}

/// A claim's part of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimShare {
    pub namespace: String,
    pub claim: String,
    /// Pods that the claim is reserved for.
    pub pods: Vec<String>,
    pub part: HeldAmount,
    /// What its pods use. None: not asked for, or the node did not say.
    #[serde(rename = "use", skip_serializing_if = "Option::is_none")]
    pub used: Option<Vec<PodUse>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum HeldAmount {
    Whole,
    Share {
        #[serde(rename = "memoryMiB")]
        memory_mib: u64,
        #[serde(rename = "computePercent")]
        compute: Option<u64>,
    },
    /// A MIG device that our controller gave: NVML's id of its profile, its first memory slice, and how many.
    Mig {
        #[serde(rename = "memoryMiB")]
        memory_mib: u64,
        profile: u32,
        start: u32,
        size: u32,
    },
    /// Looks only (KEP-5018).
    Admin,
}

impl Map {
    /// Nodes of which something is given to a claim.
    pub fn used_nodes(&self) -> impl Iterator<Item = &str> {
        let is_used = |node: &&NodeMap| node.devices.iter().any(|row| !row.claims.is_empty());
        self.nodes.iter().filter(is_used).map(|node| node.name.as_str())
    }

    /// Leaves the devices of which claims of the namespace have a part, with all who share them; and its bounds.
    pub fn keep_only(&mut self, namespace: &str) {
        for node in &mut self.nodes {
            node.devices.retain(|row| row.claims.iter().any(|holder| holder.namespace == namespace));
        }
        self.nodes.retain(|node| !node.devices.is_empty());
        self.namespaces.retain(|one| one.name == namespace);
    }
}

impl NodeMap {
    /// Marks the GPUs of claims that have shares of several.
    pub fn close(&mut self) {
        close(self);
    }

    /// Something is known of what is used here.
    pub fn tells_use(&self) -> bool {
        let mut parts = self.devices.iter().flat_map(|row| &row.claims);
        parts.any(|holder| holder.used.as_ref().is_some_and(|pods| !pods.is_empty()))
    }
}

impl ClaimShare {
    /// MiB that all of its pods use together. None: not known.
    pub fn used_mib(&self) -> Option<u64> {
        let known = self.used.as_ref()?.iter().filter_map(|one| one.memory_used);
        known.reduce(u64::saturating_add)
    }
}

impl DeviceRow {
    /// MiB that could still be granted; none: the device is given whole or not at all.
    pub fn free_mib(&self) -> Option<u64> {
        let grantable = self.grantable_mib?;
        match self.claims.iter().any(|holder| holder.part == HeldAmount::Whole) {
            true => Some(0),
            false if self.closed => Some(0),
            false => Some(grantable.saturating_sub(self.granted_mib())),
        }
    }

    pub fn granted_mib(&self) -> u64 {
        let mib = |holder: &ClaimShare| match holder.part {
            HeldAmount::Whole => self.grantable_mib.unwrap_or(0),
            HeldAmount::Share { memory_mib, .. } | HeldAmount::Mig { memory_mib, .. } => memory_mib,
            HeldAmount::Admin => 0,
        };
        self.claims.iter().map(mib).fold(0, u64::saturating_add)
    }

    /// The name of a MIG profile, as far as it is known.
    pub fn profile(&self, id: u32) -> Option<&str> {
        let profiles = self.cut.iter().flat_map(|cut| &cut.profiles);
        profiles.into_iter().find(|profile| profile.id == id).map(|profile| profile.name.as_str())
    }

    pub fn is_free(&self) -> bool {
        let is_cut = self.cut.as_ref().is_some_and(|cut| cut.by_scheduler || !cut.foreign.is_empty());
        !self.held && !is_cut && self.claims.iter().all(|holder| holder.part == HeldAmount::Admin)
    }
}

/// By pool and device.
type DeviceUses = BTreeMap<(String, String), Vec<DeviceUse>>;

enum DeviceUse {
    Hold,
    Claim(ClaimShare),
    /// A share of kube-scheduler's: all of the memory without a cap is the whole device.
    Scheduled(ClaimShare),
}

/// Nodes by name, devices as published. What is allocated of devices that nobody publishes is left out.
pub fn map(slices: &[ResourceSlice], claims: &[ResourceClaim]) -> Map {
    let mut holders = holders(claims);
    let mut nodes: BTreeMap<String, Vec<DeviceRow>> = BTreeMap::new();
    // One with a selector of nodes is no node's: it mirrors products for queues that count shares.
    let of_node = |slice: &&ResourceSlice| slice.spec.driver == DRIVER && slice.spec.node_selector.is_none();
    let mut slices: Vec<&ResourceSlice> = slices.iter().filter(of_node).collect();
    slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    for slice in slices {
        let pool = &slice.spec.pool.name;
        let node = slice.spec.node_name.clone().unwrap_or_else(|| pool.clone());
        let rows = slice.spec.devices.iter().flatten().map(|device| {
            let found = holders.remove(&(pool.clone(), device.name.clone())).unwrap_or_default();
            row(device, found)
        });
        nodes.entry(node).or_default().extend(rows);
    }
    let mut nodes: Vec<NodeMap> =
        nodes.into_iter().map(|(name, devices)| NodeMap { name, devices }).collect();
    nodes.iter_mut().for_each(close);
    nodes.iter_mut().for_each(cut);
    Map { nodes, namespaces: Vec::new(), lacks: Vec::new() }
}

/// Leaves out the MIG devices that could be made of GPUs which are in the list themselves; works out what of these can still
/// be made.
fn cut(node: &mut NodeMap) {
    let boards: BTreeSet<String> =
        node.devices.iter().filter(|row| row.cut.is_some()).map(|row| row.device.clone()).collect();
    if boards.is_empty() {
        return;
    }
    let board = |row: &DeviceRow| DeviceName::new(&row.device).board().map(|board| board.to_string());
    let has = |row: &DeviceRow| row.claims.iter().any(|holder| holder.part != HeldAmount::Admin);
    let cut_by_scheduler: BTreeSet<String> =
        node.devices.iter().filter(|row| has(row)).filter_map(board).collect();
    node.devices.retain(|row| {
        let is_idle = row.from_slice.possible && row.claims.is_empty();
        !(is_idle && board(row).is_some_and(|board| boards.contains(&board)))
    });
    for row in &mut node.devices {
        let by_scheduler = cut_by_scheduler.contains(&row.device);
        let granted: Vec<MigPlace> = row.claims.iter().filter_map(|holder| holder.part.place()).collect();
        let Some(cut) = &mut row.cut else { continue };
        cut.by_scheduler = by_scheduler;
        let all = cut.foreign.iter().copied().chain(granted);
        let layout = MigLayout::new(&cut.profiles, all);
        let largest = layout.largest().filter(|_| !by_scheduler);
        let largest = largest.map(|one| (one.name.clone(), one.capacity.memory.mib_floor()));
        cut.largest_mib = largest.as_ref().map_or(0, |(_, mib)| *mib);
        cut.largest = largest.map(|(name, _)| name);
    }
}

impl HeldAmount {
    fn place(self) -> Option<MigPlace> {
        let Self::Mig { profile, start, size, .. } = self else { return None };
        Some(MigPlace { profile_id: profile, placement: Placement { start, size } })
    }
}

/// Marks the GPUs of claims that have shares of several.
fn close(node: &mut NodeMap) {
    fn shares(row: &DeviceRow) -> impl Iterator<Item = (String, String)> {
        let shares = row.claims.iter().filter(|holder| matches!(holder.part, HeldAmount::Share { .. }));
        shares.map(|holder| (holder.namespace.clone(), holder.claim.clone()))
    }
    let mut gpus: BTreeMap<(String, String), usize> = BTreeMap::new();
    for claim in node.devices.iter().flat_map(|row| BTreeSet::from_iter(shares(row))) {
        *gpus.entry(claim).or_default() += 1;
    }
    for row in &mut node.devices {
        let closed = shares(row).any(|claim| gpus.get(&claim).is_some_and(|gpus| *gpus > 1));
        row.closed = closed && row.from_slice.one_daemon;
    }
}

fn row(device: &Device, found: Vec<DeviceUse>) -> DeviceRow {
    let text = |name: &str| device.attributes.as_ref()?.get(name)?.string.clone();
    let held = found.iter().any(|one| matches!(one, DeviceUse::Hold));
    let parts = Grantable::of(device).map(|grantable| grantable.parts);
    let grantable_mib = match &parts {
        Some(BoardParts::Shares(shares)) => Some(shares.memory.mib_floor()),
        Some(BoardParts::Mig(_)) | None => None,
    };
    let one_daemon = matches!(&parts, Some(BoardParts::Shares(shares)) if shares.daemon == DaemonScope::Gpu);
    let cut = match parts {
        Some(BoardParts::Mig(mig)) => Some(MigCut {
            memory_slices: memory_slices(&mig.board.profiles),
            profiles: mig.board.profiles.clone(),
            foreign: mig.board.foreign.clone(),
            largest: None,
            largest_mib: 0,
            by_scheduler: false,
        }),
        Some(BoardParts::Shares(_)) | None => None,
    };
    let is_all = |part: HeldAmount| match part {
        HeldAmount::Share { memory_mib, compute: None | Some(100) } => {
            grantable_mib.is_some_and(|all| memory_mib >= all)
        }
        HeldAmount::Share { .. } | HeldAmount::Mig { .. } | HeldAmount::Whole | HeldAmount::Admin => false,
    };
    let claims = found.into_iter().filter_map(|one| match one {
        DeviceUse::Hold => None,
        DeviceUse::Scheduled(holder) if is_all(holder.part) => {
            Some(ClaimShare { part: HeldAmount::Whole, ..holder })
        }
        DeviceUse::Claim(holder) | DeviceUse::Scheduled(holder) => Some(holder),
    });
    DeviceRow {
        device: device.name.clone(),
        product: text("productName").unwrap_or_default(),
        kind: text("type").unwrap_or_default(),
        grantable_mib,
        cut,
        from_slice: FromSlice {
            possible: device.consumes_counters.as_ref().is_some_and(|all| !all.is_empty()),
            one_daemon,
        },
        held,
        closed: false,
        taints: device.taints.iter().flatten().map(|taint| taint.key.clone()).collect(),
        claims: claims.collect(),
    }
}

fn holders(claims: &[ResourceClaim]) -> DeviceUses {
    let mut holders = DeviceUses::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let Some(devices) = allocation.and_then(|allocation| allocation.devices.as_ref()) else { continue };
        let configs = devices.config.as_deref().unwrap_or_default();
        for result in devices.results.iter().flatten().filter(|result| result.driver == DRIVER) {
            let pool = PoolName::new(&result.pool);
            let place = (pool.node().to_string(), result.device.clone());
            holders.entry(place).or_default().push(found(claim, result, configs));
        }
    }
    holders
}

fn found(
    claim: &ResourceClaim,
    result: &DeviceRequestAllocationResult,
    configs: &[DeviceAllocationConfiguration],
) -> DeviceUse {
    if is_hold(claim) {
        return DeviceUse::Hold;
    }
    let reserved = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    let (kind, part): (fn(ClaimShare) -> DeviceUse, HeldAmount) = match result.admin_access {
        Some(true) => (DeviceUse::Claim, HeldAmount::Admin),
        _ => match (granted(result, configs), consumed(result)) {
            (Some(granted), _) => (DeviceUse::Claim, part(&granted)),
            (None, Some(consumed)) => (DeviceUse::Scheduled, consumed),
            (None, None) => (DeviceUse::Claim, HeldAmount::Whole),
        },
    };
    kind(ClaimShare {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        claim: claim.metadata.name.clone().unwrap_or_default(),
        pods: reserved.filter(|user| user.resource == "pods").map(|user| user.name.clone()).collect(),
        part,
        used: None,
    })
}

/// It takes GPUs for our controller, to be filled with shares.
pub(super) fn is_hold(claim: &ResourceClaim) -> bool {
    claim.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(HOLD_LABEL))
}

/// What our controller gave.
pub(super) fn granted(
    result: &DeviceRequestAllocationResult,
    configs: &[DeviceAllocationConfiguration],
) -> Option<GrantedDevice> {
    let ours = configs.iter().filter(|config| config.source == FROM_CLASS);
    let ours =
        ours.filter(|config| config.requests.iter().flatten().any(|request| *request == result.request));
    ours.filter_map(|config| config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER))
        .filter_map(|opaque| match params::decode(&opaque.parameters.0) {
            Ok(Params::Grant(grant)) => Some(grant),
            _ => None,
        })
        .find_map(|grant| grant.devices.into_iter().find(|one| one.device.as_str() == result.device))
}

fn part(device: &GrantedDevice) -> HeldAmount {
    let memory_mib = device.memory.mib_floor();
    match device.extent {
        Extent::Whole => HeldAmount::Whole,
        Extent::Part => {
            HeldAmount::Share { memory_mib, compute: device.compute.map(|percent| u64::from(percent.get())) }
        }
        Extent::Mig(MigPlace { profile_id, placement: Placement { start, size } }) => {
            HeldAmount::Mig { memory_mib, profile: profile_id, start, size }
        }
    }
}

/// What the scheduler gave.
fn consumed(result: &DeviceRequestAllocationResult) -> Option<HeldAmount> {
    result.share_id.as_ref()?;
    let consumed = result.consumed_capacity.as_ref()?;
    let number = |name: &str| consumed.get(name)?.0.parse::<Quantity>().ok()?.units_ceil();
    let memory_mib = Bytes(number(MEMORY)?).mib_floor();
    Some(HeldAmount::Share { memory_mib, compute: number(COMPUTE).filter(|percent| *percent > 0) })
}
