//! Second half: from checked targets to a plan that holds every choice.

use super::{Refusal, Target};
use crate::cdi::{self, CdiDevice, CdiFile, CdiNodes, DriverFiles};
use crate::ledger::{HeldDevice, HoldMode, Intent, Step};
use crate::model::claim::{AllocatedClaim, PreparedDevice};
use crate::model::gpu::Device;
use crate::model::names::{BootId, PoolName};
use crate::params::{Interval, Sharing};

/// All that will be done for a claim, decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What goes into the ledger before the first step.
    pub intent: Intent,
    /// The file that step `WriteCdi` writes.
    pub cdi: CdiFile,
}

/// What a plan needs to know beside the claim's targets.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    pub boot: &'a BootId,
    pub driver: &'a DriverFiles,
}

/// Which device nodes the targets stand for, in their order.
pub fn nodes(targets: &[Target<'_>]) -> Vec<CdiNodes> {
    targets.iter().map(|target| cdi_nodes(target.device)).collect()
}

/// Decides what preparing `claim` means here. `targets` are the claim's, found and free.
pub fn plan(
    claim: &AllocatedClaim,
    targets: &[Target<'_>],
    pool: &PoolName,
    facts: Facts<'_>,
) -> Result<Plan, Refusal> {
    let devices: Vec<CdiDevice> = targets.iter().map(cdi_device).collect();
    let cdi = cdi::render(&claim.claim.uid, &devices, facts.driver)?;
    let mut steps = Vec::new();
    for target in targets {
        steps.extend(sharing_step(target)?);
    }
    steps.push(Step::WriteCdi { file: cdi.file_name.clone() });
    let held = targets.iter().zip(&cdi.ids).map(|(target, id)| held(target, id, pool)).collect();
    let intent = Intent { claim: claim.claim.clone(), boot: facts.boot.clone(), devices: held, steps };
    Ok(Plan { intent, cdi })
}

/// What the claim's own sharing setting asks of the device.
fn sharing_step(target: &Target<'_>) -> Result<Option<Step>, Refusal> {
    match &target.settings.sharing {
        // The driver's default is what every release leaves behind.
        None | Some(Sharing::TimeSlicing(Interval::Default)) => Ok(None),
        Some(Sharing::TimeSlicing(interval)) => {
            let gpu = target.device.gpu().uuid.clone();
            Ok(Some(Step::TimeSlice { gpu, level: interval.level() }))
        }
        Some(Sharing::Mps(_)) => Err(Refusal::MpsNotServed { device: target.name.clone() }),
    }
}

fn cdi_nodes(device: Device<'_>) -> CdiNodes {
    match device {
        Device::Whole(gpu) => CdiNodes::Whole { minor: gpu.minor },
        Device::Mig { parent, mig } => CdiNodes::Mig {
            parent_minor: parent.minor,
            gpu_instance: mig.gpu_instance,
            compute_instance: mig.compute_instance,
        },
    }
}

fn cdi_device(target: &Target<'_>) -> CdiDevice {
    let nodes = cdi_nodes(target.device);
    CdiDevice { name: target.name.clone(), share_id: None, nodes, env: Vec::new(), mounts: Vec::new() }
}

fn held(target: &Target<'_>, cdi_id: &str, pool: &PoolName) -> HeldDevice {
    let mode: HoldMode = target.mode;
    HeldDevice {
        answer: PreparedDevice {
            requests: target.requests.clone(),
            pool: pool.clone(),
            device: target.name.clone(),
            cdi_ids: vec![cdi_id.to_owned()],
            share_id: None,
        },
        uuid: target.device.uuid().clone(),
        gpu: target.device.gpu().uuid.clone(),
        mode,
    }
}
