//! From claim and node to a report, through the node plugin's own checks, plan and refusals.

use std::collections::{BTreeMap, BTreeSet};

use super::report::{
    AllocatedDevice, Cdi, DeviceOffer, PlanReport, PlanResult, Planned, PlannedStep, is_made,
};
use super::site::NodeSite;
use super::{DriverArgs, driver, why};
use crate::cli::UsageError;
use crate::cli::inspect::{OfferCells, kind, only_whole, profile};
use crate::cli::manifest::Manifest;
use crate::cluster::ClaimError;
use crate::inventory::Inventory;
use crate::ledger::{self, HoldMode, Intent, Placer};
use crate::model::claim::{Access, Allocated, AllocatedClaim};
use crate::model::error_chain;
use crate::model::gpu::{Device, Gpu, MigMode, MigSwitch, NodeGpus};
use crate::model::names::{BootId, PoolName};
use crate::node::executor::ExecuteError;
use crate::node::preparer::PrepareError;
use crate::params;
use crate::prepare::{self, Facts, Plan, Target};
use crate::sharing::SharingPolicy;

/// Where `tranche mps` has its folder unless told otherwise.
const MPS_DIR: &str = "/run/tranche/mps";

/// What preparing the claim on that node would come to.
///
/// # Errors
/// The claim is no claim at all.
pub fn decide(manifest: &Manifest, site: &NodeSite, args: &DriverArgs) -> Result<PlanReport, UsageError> {
    let mut report = PlanReport {
        claim: manifest.claim.clone(),
        node: site.node.clone(),
        allocation: Vec::new(),
        verdict: PlanResult::Refused { message: String::new() },
        notes: site.notes.clone(),
    };
    if manifest.is_of_template {
        report.notes.push(
            "The claim is one that a pod would get by the ResourceClaimTemplate of this name.".to_owned(),
        );
    } else if manifest.without_uid {
        report.notes.push(
            "The claim has no metadata.uid, which the API server sets: zeros are used instead.".to_owned(),
        );
    }
    let unknown = manifest.unknown_fields().into_iter();
    report.notes.extend(unknown.map(|field| {
        format!(
            "unknown field {field:?}: is it misspelt? (This release knows Kubernetes' fields up to 1.37.)"
        )
    }));
    let foreign = manifest.foreign();
    if !foreign.is_empty() {
        report.notes.push(format!("Left to their own drivers: {}.", foreign.join(", ")));
    }
    report.verdict = match manifest.allocated()? {
        Ok(claim) => {
            report.allocation = claim.results.iter().map(|result| given(&claim, result)).collect();
            let planned =
                found(&site.inventory).and_then(|gpus| planned(&claim, gpus, site, args, &mut report.notes));
            planned.unwrap_or_else(|refused| PlanResult::Refused { message: error_chain(&refused) })
        }
        Err(ClaimError::NotAllocated { .. }) => not_allocated(manifest, site, &mut report.notes),
        Err(other) => PlanResult::Refused { message: error_chain(&other) },
    };
    Ok(report)
}

fn found(inventory: &Inventory) -> Result<&NodeGpus, PrepareError> {
    match inventory {
        Inventory::Found(gpus) => Ok(gpus),
        Inventory::Unavailable { reason } => Err(PrepareError::NoGpus { reason: reason.clone() }),
        Inventory::Unknown => {
            Err(PrepareError::NoGpus { reason: "the first look at the GPUs is not finished".to_owned() })
        }
    }
}

fn planned(
    claim: &AllocatedClaim,
    gpus: &NodeGpus,
    site: &NodeSite,
    args: &DriverArgs,
    notes: &mut Vec<String>,
) -> Result<PlanResult, PrepareError> {
    let refused = |refusal| PrepareError::from(ExecuteError::Refused(refusal));
    notes.extend(own_record(claim, site));
    let pool = PoolName::Published(site.node.clone());
    let held: Vec<Intent> = site.held.iter().map(|holder| holder.intent.clone()).collect();
    let sharing = SharingPolicy::default();
    let here = prepare::Site { node: &site.node, pool: &pool, gpus, sharing: &sharing, held: &held };
    let targets = prepare::targets(claim, here).map_err(refused)?;
    notes.extend(why::passed_over(claim, &targets));
    let wanted = prepare::nodes(&targets);
    let version = &gpus.driver.driver;
    let files = driver::found(args, version, &wanted).map_err(ExecuteError::Driver)?;
    if files.is_none() {
        notes.push(driver::STAND_IN.to_owned());
    }
    let files = files.unwrap_or_else(|| driver::stand_in(version, &wanted));
    let facts = Facts { boot: &BootId::from("none"), driver: &files, mps_dir: MPS_DIR };
    let plan = prepare::plan(claim, &targets, here, facts).map_err(refused)?;
    Ok(told(claim, &targets, plan))
}

/// What the ledger says of this very claim.
fn own_record(claim: &AllocatedClaim, site: &NodeSite) -> Option<String> {
    let own = site.held.iter().find(|holder| holder.intent.claim.uid == claim.claim.uid)?;
    let recorded: BTreeSet<_> = own.intent.devices.iter().map(|device| &device.answer.device).collect();
    let allocated: BTreeSet<_> = claim.results.iter().map(|result| &result.device).collect();
    Some(match own.phase == "Ready" && recorded == allocated {
        true => "The claim is prepared already: while its CDI file is there, kubelet gets the recorded answer and \
                 nothing is done."
            .to_owned(),
        false => format!(
            "The ledger has a record of an earlier attempt or allocation of this claim ({}): that attempt is \
             undone first.",
            own.phase
        ),
    })
}

fn told(claim: &AllocatedClaim, targets: &[Target<'_>], plan: Plan) -> PlanResult {
    let devices = targets.iter().zip(&plan.intent.devices);
    let devices = devices.map(|(target, held)| device(claim, target, &held.answer.cdi_ids)).collect();
    let steps = plan.intent.steps.iter().map(step).collect();
    let file = serde_json::from_str(&plan.cdi.content).unwrap_or_default();
    let cdi = Cdi { file_name: plan.cdi.file_name, ids: plan.cdi.ids, file, content: plan.cdi.content };
    PlanResult::Planned { devices, steps, cdi }
}

fn device(claim: &AllocatedClaim, target: &Target<'_>, cdi_ids: &[String]) -> Planned {
    Planned {
        requests: target.requests.clone(),
        device: target.name.clone(),
        kind: kind(&target.device),
        product: target.device.gpu().product_name.clone(),
        profile: profile(&target.device),
        uuid: target.device.uuid().clone(),
        held_as: target.mode.to_string(),
        settings: why::settings(target),
        because: because(claim, target),
        cdi_ids: cdi_ids.to_vec(),
    }
}

/// Where what the claim gets of the device stands.
fn because(claim: &AllocatedClaim, target: &Target<'_>) -> String {
    let entry = |aspect| why::meant(claim, target, aspect).last().map(|index| why::entry(claim, *index));
    match (target.mode, target.placer()) {
        (HoldMode::Admin, _) => "administrative access changes no settings".to_owned(),
        (HoldMode::Share(_) | HoldMode::Whole, Placer::Controller) => {
            let granted = entry(why::Aspect::Grant).unwrap_or_default();
            format!("the controller granted it: {granted}")
        }
        (HoldMode::Share(_), Placer::Scheduler) => "the scheduler granted it: consumedCapacity".to_owned(),
        (HoldMode::Whole | HoldMode::Mig, _) => {
            entry(why::Aspect::Sharing).unwrap_or_else(|| "no config is for it".to_owned())
        }
    }
}

fn step(step: &ledger::Step) -> PlannedStep {
    let (does, undo) = match step {
        ledger::Step::MakeMig { gpu, place, .. } => {
            let at = place.placement;
            let what = format!(
                "make a MIG instance of profile {} at memory slice {} of {gpu}",
                place.profile_id, at.start
            );
            (what, "end it")
        }
        ledger::Step::TimeSlice { gpu, level } => (
            format!("set the time slice of {gpu} to {} (level {level})", why::interval(*level)),
            "set it to the driver's default (level 0)",
        ),
        ledger::Step::Mps { group, exclusive, needs } => {
            let mode = if *exclusive { ", in EXCLUSIVE_PROCESS mode" } else { "" };
            let what =
                format!("have an MPS daemon serve {group}{mode}, each client with {}", why::limits(needs));
            (what, "keep the daemon for the claims that remain; without any, let it rest, in DEFAULT mode")
        }
        ledger::Step::WriteCdi { file } => (format!("write {file}"), "remove it"),
    };
    PlannedStep { does, undo: undo.to_owned() }
}

fn given(claim: &AllocatedClaim, result: &Allocated) -> AllocatedDevice {
    // What is wrong with a grant is the refusal's to say.
    let granted = params::grant_of(claim, result).ok().flatten();
    let access = match (&result.access, granted) {
        (Access::Admin, _) => "Admin".to_owned(),
        (_, Some(granted)) => {
            let compute = granted.compute.map(|percent| format!(", {percent}")).unwrap_or_default();
            format!(
                "Share by the controller ({} MiB{compute} of {})",
                granted.memory.mib_floor(),
                granted.gpu
            )
        }
        (Access::Exclusive, None) => "Exclusive".to_owned(),
        (Access::Share { consumed, .. }, None) => {
            let consumed: Vec<_> =
                consumed.iter().map(|(name, quantity)| format!("{name}={quantity}")).collect();
            format!("Share ({})", consumed.join(", "))
        }
    };
    AllocatedDevice {
        request: result.request.to_string(),
        pool: result.pool.to_string(),
        device: result.device.to_string(),
        access,
    }
}

fn not_allocated(manifest: &Manifest, site: &NodeSite, notes: &mut Vec<String>) -> PlanResult {
    notes.extend(manifest.problems());
    let requests = manifest.asked();
    let offers = match found(&site.inventory) {
        Ok(gpus) => {
            notes.extend(only_whole(&site.offered));
            let made = is_made(&requests);
            let of_schedulers = gpus.gpus.iter().filter_map(|gpu| Some((gpu, schedulers(gpu, site)?)));
            notes.extend(of_schedulers.filter(|_| made).map(|(gpu, intent)| {
                let (device, claim) = (Device::Parent(gpu).name(), &intent.claim);
                format!(
                    "The controller leaves {device} alone: kube-scheduler has given claim {}/{} a MIG device of it.",
                    claim.namespace, claim.name
                )
            }));
            offers(gpus, site, made)
        }
        Err(error) => {
            notes.push(error_chain(&error));
            Vec::new()
        }
    };
    PlanResult::NotAllocated { requests, offers }
}

/// The node's devices by type, product and profile, with those that no claim holds. `made`: only what the controller can
/// have made.
fn offers(gpus: &NodeGpus, site: &NodeSite, made: bool) -> Vec<DeviceOffer> {
    let mut by_type = BTreeMap::<_, DeviceOffer>::new();
    let asked_for = |device: &Device<'_>| match device {
        // No request asks for a board that is cut.
        Device::Parent(_) => false,
        Device::Place { .. } => true,
        Device::Whole(_) | Device::Mig { .. } => !made,
    };
    for device in gpus.gpus.iter().flat_map(Gpu::devices).filter(asked_for) {
        let (kind, product, profile) = (kind(&device), device.gpu().product_name.clone(), profile(&device));
        let shares = OfferCells::of(&device, &site.offered);
        let key = (kind, product.clone(), profile.clone(), shares.clone());
        let offer = by_type.entry(key).or_insert_with(|| DeviceOffer {
            kind,
            product,
            profile,
            shares,
            devices: Vec::new(),
            free: Vec::new(),
        });
        offer.devices.push(device.name());
        let is_left_alone = made && schedulers(device.gpu(), site).is_some();
        if !is_left_alone && !is_held(&device, site) {
            offer.free.push(device.name());
        }
    }
    by_type.into_values().collect()
}

/// The claim by which kube-scheduler has a MIG device of the board that was made for it: the controller leaves the board
/// alone.
fn schedulers<'a>(gpu: &Gpu, site: &'a NodeSite) -> Option<&'a Intent> {
    let intents = site.held.iter().map(|holder| &holder.intent);
    let mut made = intents.filter(|intent| intent.places().any(|(board, _)| *board == gpu.uuid));
    made.find(|intent| {
        intent.devices.iter().any(|held| held.gpu == gpu.uuid && held.placer == Placer::Scheduler)
    })
}

fn is_held(device: &Device<'_>, site: &NodeSite) -> bool {
    if let (Device::Place { place, .. }, MigMode::OnDemand(cut)) = (device, &device.gpu().mig) {
        let own = place.place.placement;
        // Nothing can be made of a board that somebody has switched off.
        let is_off = cut.switch == MigSwitch::OffByOthers;
        if is_off || cut.foreign.iter().any(|other| other.placement.overlaps(own)) {
            return true;
        }
    }
    if site.held.iter().any(|holder| prepare::is_carved_over(&holder.intent, device)) {
        return true;
    }
    let mut held = site.held.iter().flat_map(|holder| &holder.intent.devices);
    held.any(|held| match held.mode {
        HoldMode::Admin => false,
        HoldMode::Whole | HoldMode::Share(_) => held.gpu == device.gpu().uuid,
        HoldMode::Mig => held.uuid == *device.uuid(),
    })
}
