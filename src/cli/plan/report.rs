//! What is told of a plan, for programs as JSON and for people as tables.

use serde::Serialize;
use serde_json::Value;

use crate::cli::inspect::OfferCells;
use crate::cli::manifest::{RequestedAccess, RequestedDevices, placer_of};
use crate::cli::table::{listed, or_none, render};
use crate::model::claim::ClaimRef;
use crate::model::names::{DeviceName, DeviceUuid, NodeName};
use crate::select::Placer;

/// Of a node where the controller has no MIG device made.
const NONE_IS_CUT: &str = "No GPU of this node is set to be cut into MIG devices on demand (mig.onDemandGPUs), so none \
                           can be made here.";

#[derive(Debug, Serialize)]
pub struct PlanReport {
    pub claim: ClaimRef,
    pub node: NodeName,
    /// Our driver's results, as the allocation has them.
    pub allocation: Vec<AllocatedDevice>,
    #[serde(flatten)]
    pub verdict: PlanResult,
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "result", rename_all_fields = "camelCase")]
pub enum PlanResult {
    Planned {
        devices: Vec<Planned>,
        steps: Vec<PlannedStep>,
        cdi: Cdi,
    },
    /// What kubelet would be told, and the pod's events would show.
    Refused {
        message: String,
    },
    NotAllocated {
        requests: Vec<RequestedDevices>,
        offers: Vec<DeviceOffer>,
    },
}

#[derive(Debug, Serialize)]
pub struct AllocatedDevice {
    pub request: String,
    pub pool: String,
    pub device: String,
    pub access: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Planned {
    pub requests: Vec<String>,
    pub device: DeviceName,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub product: String,
    /// Of a MIG device.
    pub profile: Option<String>,
    pub uuid: DeviceUuid,
    pub held_as: String,
    pub settings: String,
    pub because: String,
    pub cdi_ids: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct PlannedStep {
    pub does: String,
    pub undo: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cdi {
    pub file_name: String,
    pub ids: Vec<String>,
    pub file: Value,
    /// The same, byte for byte.
    #[serde(skip)]
    pub content: String,
}

#[derive(Debug, Serialize)]
pub struct DeviceOffer {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub product: String,
    /// Of a MIG device.
    pub profile: Option<String>,
    #[serde(flatten)]
    pub shares: OfferCells,
    pub devices: Vec<DeviceName>,
    pub free: Vec<DeviceName>,
}

impl PlanReport {
    pub fn text(&self) -> String {
        let claim = format!("{}/{}", self.claim.namespace, self.claim.name);
        let head = [claim, self.claim.uid.to_string(), self.node.to_string(), self.verdict.word().to_owned()];
        let mut parts = vec![render(&["CLAIM", "UID", "NODE", "RESULT"], [head])];
        match &self.verdict {
            PlanResult::Planned { devices, steps, cdi } => {
                parts.extend([planned(devices), stepped(steps), ids(cdi)]);
            }
            PlanResult::Refused { message } => {
                if !self.allocation.is_empty() {
                    parts.push(allocation(&self.allocation));
                }
                parts.push(format!("Kubelet is told:\n  {message}\n"));
            }
            PlanResult::NotAllocated { requests, offers } => {
                parts.push(asked(requests));
                let chooses = format!("{} the devices once a pod uses the claim.", chooses(requests));
                match (is_made(requests), offers.is_empty()) {
                    (true, true) => parts.push(format!("{chooses} {NONE_IS_CUT}\n")),
                    (true, false) => {
                        parts.push(format!("{chooses} GPUs of this node that are cut on demand have:\n"));
                        parts.push(offered(offers));
                    }
                    (false, _) => {
                        parts.push(format!("{chooses} This node has:\n"));
                        parts.push(offered(offers));
                    }
                }
            }
        }
        let mut text = parts.join("\n");
        if !self.notes.is_empty() {
            text.push('\n');
            text.push_str(&self.noted());
        }
        text
    }

    /// The CDI file's text; empty where none would be written.
    pub fn cdi_file(&self) -> &str {
        match &self.verdict {
            PlanResult::Planned { cdi, .. } => &cdi.content,
            PlanResult::Refused { .. } | PlanResult::NotAllocated { .. } => "",
        }
    }

    /// What is to be said beside the CDI file.
    pub fn remarks(&self) -> String {
        let verdict = match &self.verdict {
            PlanResult::Planned { .. } => String::new(),
            PlanResult::Refused { message } => format!("refused: {message}\n"),
            PlanResult::NotAllocated { .. } => {
                format!("{}: there is no CDI file to show\n", self.verdict.word())
            }
        };
        format!("{verdict}{}", self.noted())
    }

    fn noted(&self) -> String {
        self.notes.iter().map(|note| format!("{note}\n")).collect()
    }
}

impl PlanResult {
    fn word(&self) -> &'static str {
        match self {
            Self::Planned { .. } => "can be prepared",
            Self::Refused { .. } => "refused",
            Self::NotAllocated { .. } => "not allocated yet",
        }
    }
}

fn planned(devices: &[Planned]) -> String {
    let header = ["REQUEST", "DEVICE", "TYPE", "PRODUCT", "PROFILE", "HELD AS", "SETTINGS", "BECAUSE"];
    let rows = devices.iter().map(|device| {
        [
            listed(&device.requests),
            device.device.to_string(),
            device.kind.to_owned(),
            device.product.clone(),
            or_none(device.profile.clone()),
            device.held_as.clone(),
            device.settings.clone(),
            device.because.clone(),
        ]
    });
    render(&header, rows)
}

fn stepped(steps: &[PlannedStep]) -> String {
    let rows = steps.iter().enumerate();
    let rows = rows.map(|(index, step)| [(index + 1).to_string(), step.does.clone(), step.undo.clone()]);
    render(&["STEP", "DOES", "UNDO"], rows)
}

fn ids(cdi: &Cdi) -> String {
    render(&["CDI DEVICE"], cdi.ids.iter().map(|id| [id.clone()]))
}

fn allocation(results: &[AllocatedDevice]) -> String {
    let rows = results.iter().map(|result| {
        [result.request.clone(), result.pool.clone(), result.device.clone(), result.access.clone()]
    });
    render(&["REQUEST", "POOL", "DEVICE", "ACCESS"], rows)
}

fn chooses(requests: &[RequestedDevices]) -> &'static str {
    let count = |placer| requests.iter().filter(|asked| placer_of(&asked.device_class) == placer).count();
    match (count(Some(Placer::Controller)), count(None)) {
        (0, 0) => "The scheduler chooses",
        (all, 0) if all == requests.len() => "The controller chooses",
        (_, 0) => "The controller chooses those of class shared.gpu.nvidia.com, the scheduler the rest of",
        _ => "The scheduler, or the controller for classes that are its own, chooses",
    }
}

/// The controller has all that the claim asks for made for it.
pub fn is_made(requests: &[RequestedDevices]) -> bool {
    !requests.is_empty() && requests.iter().all(|asked| asked.access == RequestedAccess::Mig)
}

fn asked(requests: &[RequestedDevices]) -> String {
    let rows = requests.iter().map(|asked| {
        [
            asked.request.clone(),
            asked.device_class.clone(),
            asked.count.clone(),
            listed(&asked.capacity),
            asked.access.as_str().to_owned(),
            listed(&asked.selectors),
        ]
    });
    render(&["REQUEST", "CLASS", "COUNT", "CAPACITY", "ACCESS", "SELECTORS"], rows)
}

fn offered(offers: &[DeviceOffer]) -> String {
    let rows = offers.iter().map(|offer| {
        let free: Vec<_> = offer.free.iter().map(DeviceName::as_str).collect();
        let what = [offer.kind.to_owned(), offer.product.clone(), or_none(offer.profile.clone())];
        let devices = [offer.devices.len().to_string(), listed(&free)];
        what.into_iter().chain(offer.shares.cells()).chain(devices)
    });
    let header = ["TYPE", "PRODUCT", "PROFILE"].into_iter().chain(OfferCells::HEADER);
    render(&header.chain(["DEVICES", "FREE"]).collect::<Vec<_>>(), rows)
}
