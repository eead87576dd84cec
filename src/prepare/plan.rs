//! Second half: from checked targets to a plan that holds every choice.

use super::{Refusal, Site, Target, carved, mps};
use crate::cdi::{self, CdiDevice, CdiFile, CdiNodes, DeviceNodes, DriverFiles, DriverNode};
use crate::ledger::{HeldDevice, HoldMode, Intent, Standing, Step};
use crate::model::claim::{AllocatedClaim, PreparedDevice};
use crate::model::gpu::{Device, MigMode};
use crate::model::mig::{MadeMig, MigPlace};
use crate::model::names::{BootId, DeviceName, DeviceUuid};
use crate::params::{Interval, Sharing};

/// All that will be done for a claim, decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What goes into the ledger before the first step.
    pub intent: Intent,
    /// The file that step `WriteCdi` writes.
    pub cdi: CdiFile,
    /// What of it must be open nowhere else.
    pub exclusive: Vec<ExclusiveDevice>,
}

/// A device that is the claim's alone, and the numbers (major, minor) of the nodes without which nobody uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExclusiveDevice {
    pub device: DeviceName,
    pub uuid: DeviceUuid,
    pub numbers: Vec<(u32, u32)>,
}

/// What a plan needs to know beside the claim's targets.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    pub boot: &'a BootId,
    pub driver: &'a DriverFiles,
    /// Folder of `tranche mps`: the same path on the host and in this process.
    pub mps_dir: &'a str,
}

/// Which device nodes the targets stand for, in their order.
pub fn nodes(targets: &[Target<'_>]) -> Vec<CdiNodes> {
    targets.iter().filter_map(|target| nodes_of(target.device)).collect()
}

/// What is recorded before MIG instances are made for a claim: everything that undoing needs. `None` if there is none to
/// be made. Only once they are made is it known what else the claim needs: [`plan`] says it then.
pub fn to_make(claim: &AllocatedClaim, targets: &[Target<'_>], boot: &BootId) -> Option<Intent> {
    let is_unmade =
        |target: &Target<'_>| matches!(target.device, Device::Place { .. }) && target.mode != HoldMode::Admin;
    if !targets.iter().any(is_unmade) {
        return None;
    }
    let uid = &claim.claim.uid;
    let mut steps: Vec<Step> = targets.iter().filter_map(make_mig).collect();
    steps.push(Step::WriteCdi { file: cdi::file_name(uid) });
    let id = |target: &Target<'_>| cdi::id(uid, &target.name, target.share_id.as_deref());
    Some(Intent {
        claim: claim.claim.clone(),
        boot: boot.clone(),
        devices: targets.iter().map(|target| held(target, &id(target))).collect(),
        steps,
        pods: claim.pods.clone(),
        standing: Standing::Current,
    })
}

/// The step that makes, or has made, the target's instance.
fn make_mig(target: &Target<'_>) -> Option<Step> {
    let gpu = target.device.gpu().uuid.clone();
    if target.mode == HoldMode::Admin {
        return None;
    }
    match target.device {
        Device::Whole(_) | Device::Parent(_) => None,
        Device::Place { place, .. } => Some(Step::MakeMig { gpu, place: place.place, made: None }),
        Device::Mig { parent, mig } => {
            let MigMode::OnDemand(cut) = &parent.mig else { return None };
            // Others are somebody else's: used as they are.
            let ours = cut.made.iter().any(|made| made.uuid == mig.uuid);
            let place = MigPlace::of(mig);
            let made = Some(MadeMig {
                uuid: mig.uuid.clone(),
                gpu_instance: mig.gpu_instance,
                compute_instance: mig.compute_instance,
            });
            ours.then_some(Step::MakeMig { gpu, place, made })
        }
    }
}

/// Decides what preparing `claim` means here. `targets` are the claim's, found and free on `site`.
pub fn plan(
    claim: &AllocatedClaim,
    targets: &[Target<'_>],
    site: Site<'_>,
    facts: Facts<'_>,
) -> Result<Plan, Refusal> {
    let daemons = mps::daemons(claim, targets, site)?;
    let with_shm = site.sharing.shm.is_the_gpus(&site.gpus.driver.driver);
    let device = |target| cdi_device(target, &daemons, facts, with_shm);
    let devices: Vec<CdiDevice> = targets.iter().map(device).collect::<Result<_, _>>()?;
    let cdi = cdi::render(&claim.claim.uid, &devices, facts.driver)?;
    let mut steps: Vec<Step> = targets.iter().filter_map(make_mig).collect();
    steps.extend(targets.iter().filter_map(time_slice));
    steps.extend(daemons.iter().map(mps::Daemon::step));
    steps.push(Step::WriteCdi { file: cdi.file_name.clone() });
    let held = targets.iter().zip(&cdi.ids).map(|(target, id)| held(target, id)).collect();
    let (boot, pods) = (facts.boot.clone(), claim.pods.clone());
    let (claim, standing) = (claim.claim.clone(), Standing::Current);
    let intent = Intent { claim, boot, devices: held, steps, pods, standing };
    let exclusive = targets.iter().filter_map(|target| exclusive(target, &facts.driver.nodes)).collect();
    Ok(Plan { intent, cdi, exclusive })
}

fn exclusive(target: &Target<'_>, nodes: &DeviceNodes) -> Option<ExclusiveDevice> {
    match target.mode {
        HoldMode::Whole | HoldMode::Mig => {
            let own = exclusive_of(target.device, nodes)?;
            Some(ExclusiveDevice { device: target.name.clone(), ..own })
        }
        HoldMode::Share(_) | HoldMode::Admin => None,
    }
}

/// What of a device must be open nowhere else while a claim has it alone. None of a board that is not given whole.
pub fn exclusive_of(device: Device<'_>, nodes: &DeviceNodes) -> Option<ExclusiveDevice> {
    let is_its_own = |node: &DriverNode| match device {
        Device::Whole(_) => true,
        // The board's node is everybody's who has a part of it, and so is an instance's of which this is a part.
        Device::Mig { mig, .. } if mig.is_part_of_instance() => {
            matches!(node, DriverNode::ComputeInstance { .. })
        }
        Device::Mig { .. } => {
            matches!(node, DriverNode::GpuInstance { .. } | DriverNode::ComputeInstance { .. })
        }
        Device::Parent(_) | Device::Place { .. } => false,
    };
    let own = nodes_of(device)?.nodes().into_iter().filter(is_its_own);
    let found = own.filter_map(|node| nodes.0.get(&node));
    // WSL has one node for all GPUs.
    let of_one = found.filter(|node| node.container.starts_with("/dev/nvidia"));
    let numbers: Vec<_> = of_one.map(|node| (node.major, node.minor)).collect();
    let (name, uuid) = (device.name(), device.uuid().clone());
    (!numbers.is_empty()).then_some(ExclusiveDevice { device: name, uuid, numbers })
}

fn time_slice(target: &Target<'_>) -> Option<Step> {
    match &target.settings.sharing {
        // The driver's default is what every release leaves behind.
        None | Some(Sharing::TimeSlicing(Interval::Default) | Sharing::Mps(_)) => None,
        Some(Sharing::TimeSlicing(interval)) => {
            let gpu = target.device.gpu().uuid.clone();
            Some(Step::TimeSlice { gpu, level: interval.level() })
        }
    }
}

/// Which device nodes a device stands for. None of one that is yet to be made.
pub fn nodes_of(device: Device<'_>) -> Option<CdiNodes> {
    match device {
        // Of a board that is carved only administrative access is given.
        Device::Whole(gpu) | Device::Parent(gpu) => Some(CdiNodes::Whole { minor: gpu.minor }),
        Device::Mig { parent, mig } => Some(CdiNodes::Mig {
            parent_minor: parent.minor,
            gpu_instance: mig.gpu_instance,
            compute_instance: mig.compute_instance,
        }),
        Device::Place { .. } => None,
    }
}

fn cdi_device(
    target: &Target<'_>,
    daemons: &[mps::Daemon],
    facts: Facts<'_>,
    with_shm: bool,
) -> Result<CdiDevice, Refusal> {
    let daemon = daemons.iter().find(|daemon| daemon.serves(target));
    Ok(CdiDevice {
        name: target.name.clone(),
        share_id: target.share_id.clone(),
        nodes: nodes_of(target.device).ok_or_else(|| Refusal::NotMade { device: target.name.clone() })?,
        env: daemon.map(|daemon| daemon.env(target)).unwrap_or_default(),
        mounts: daemon.map(|daemon| daemon.mounts(facts.mps_dir, with_shm)).unwrap_or_default(),
    })
}

fn held(target: &Target<'_>, cdi_id: &str) -> HeldDevice {
    HeldDevice {
        answer: PreparedDevice {
            requests: target.requests.clone(),
            pool: target.pool.clone(),
            device: target.name.clone(),
            cdi_ids: vec![cdi_id.to_owned()],
            share_id: target.share_id.clone(),
        },
        uuid: target.device.uuid().clone(),
        gpu: target.device.gpu().uuid.clone(),
        mode: target.mode,
        placer: target.placer(),
        mig: carved::held(target),
    }
}
