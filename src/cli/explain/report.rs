//! All that is told, and as JSON.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::carried::Carried;
use super::find::NamedObject;
use crate::cluster::ToldEvent;
use crate::cluster::lease::{LeaseName, StoredLease};
use crate::controller::explain::{Answer, ClaimPlace, Explained, How, Origin, Preemption};
use crate::model::gpu::Placement;
use crate::model::share::Extent;

#[derive(Debug)]
pub struct ExplainReport {
    pub named: NamedObject,
    pub told: Vec<ExplainedClaim>,
    /// None: it does not matter who leads.
    pub leader: Option<Leader>,
    /// What the pod that was asked about needs and does not have.
    pub lacks: Vec<String>,
    pub remarks: Vec<String>,
    /// Warnings about it that others told.
    pub events: Vec<ToldEvent>,
    /// The time of day.
    pub at: Timestamp,
}

/// A claim, and what stands in it.
#[derive(Debug)]
pub struct ExplainedClaim {
    pub explained: Explained,
    pub carried: Vec<Carried>,
}

/// Who of the controllers writes.
#[derive(Debug)]
pub enum Leader {
    Stored { at: LeaseName, lease: StoredLease },
    None { at: LeaseName },
    Unknown { words: String },
}

impl Leader {
    /// The pod that leads, or why nobody does.
    pub fn words(&self, now: Timestamp) -> Result<String, String> {
        let (at, lease) = match self {
            Self::Unknown { words } => return Err(format!("not known: {words}")),
            Self::None { at } => {
                return Err(format!(
                    "no controller leads, so nothing is placed: there is no lease {}/{}; is the controller \
                     installed? (kubectl -n {} get pods)",
                    at.namespace, at.name, at.namespace
                ));
            }
            Self::Stored { at, lease } => (at, lease),
        };
        let name = format!("{}/{}", at.namespace, at.name);
        let Some(holder) = &lease.holder else {
            return Err(format!("no controller leads, so nothing is placed: the lease {name} was given up"));
        };
        // What stands behind the last _ tells two lives of a pod apart.
        let pod = holder.rsplit_once('_').map_or(holder.as_str(), |(pod, _)| pod);
        let Some(renewed) = lease.renewed else { return Ok(format!("{pod} leads")) };
        let age = now.duration_since(renewed).as_secs_f64().max(0.0);
        let span = super::super::inspect::span(age);
        match age > 2.0 * lease.duration.as_secs_f64() {
            true => Err(format!(
                "no controller leads, so nothing is placed: {pod} has given no sign of life for {span} (lease \
                 {name}, by its clock)"
            )),
            false => Ok(format!("{pod} leads, last sign of life {span} ago")),
        }
    }
}

impl ExplainReport {
    pub fn json(&self) -> Value {
        let leader = self.leader.as_ref().map(|leader| match leader.words(self.at) {
            Ok(words) => json!({"leads": true, "words": words}),
            Err(words) => json!({"leads": false, "words": words}),
        });
        json!({
            "asked": {"kind": self.named.kind, "namespace": self.named.namespace, "name": self.named.name},
            "claims": self.told.iter().map(claim).collect::<Vec<_>>(),
            "controller": leader,
            "lacks": self.lacks,
            "remarks": self.remarks,
            "events": self.events.iter().map(event).collect::<Vec<_>>(),
        })
    }
}

fn event(told: &ToldEvent) -> Value {
    json!({"reason": told.reason, "message": told.message, "at": told.at.map(|at| at.to_string())})
}

fn claim(told: &ExplainedClaim) -> Value {
    let Explained { namespace, name, origin, created, pods, answer } = &told.explained;
    let promised = *origin == Origin::Promised;
    let pods = pods.iter().map(|pod| json!({"name": pod.name, "node": pod.node, "reserved": pod.reserved}));
    let carried = told.carried.iter().map(|one| {
        json!({"field": one.field, "words": one.words, "since": one.since.map(|since| since.to_string())})
    });
    let mut object = json!({
        "namespace": namespace, "name": name, "promised": promised, "byLimits": *origin == Origin::Limits,
        "created": created.map(|created| created.to_string()),
        "pods": pods.collect::<Vec<_>>(), "carried": carried.collect::<Vec<_>>(),
    });
    let answer = self::answer(answer);
    if let (Value::Object(object), Value::Object(answer)) = (&mut object, answer) {
        object.extend(answer);
    }
    object
}

fn answer(answer: &Answer) -> Value {
    match answer {
        Answer::Placed { place, remarks } => {
            json!({"answer": "placed", "place": self::place(place), "remarks": remarks})
        }
        Answer::Would { place, holdups } => {
            json!({"answer": "would-be-placed", "place": self::place(place), "first": holdups})
        }
        Answer::Waits { because, words, first, kept, moves, preemption, nodes } => {
            let nodes = nodes.iter().map(|(node, verdict)| {
                json!({"node": node, "kind": verdict.kind().as_str(), "verdict": verdict.to_string()})
            });
            json!({"answer": "waits", "because": because.as_str(), "words": words, "first": first, "kept": kept,
                   "moves": moves, "preemption": preemption.as_ref().map(self::preemption), "nodes": nodes.collect::<Vec<_>>()})
        }
        Answer::Open { nodes, words } => {
            json!({"answer": "scheduler-has-room", "nodes": nodes, "words": words})
        }
        Answer::Refused { words } => json!({"answer": "refused", "words": words}),
        Answer::Hold { place, words } => {
            json!({"answer": "hold", "place": place.as_ref().map(self::place), "words": words})
        }
        Answer::NotOurs { place, words } => {
            json!({"answer": "not-ours", "place": place.as_ref().map(self::place), "words": words})
        }
    }
}

fn preemption(told: &Preemption) -> Value {
    let pods = told.prospect.pods().iter().map(|pod| json!({"namespace": pod.namespace, "name": pod.name}));
    json!({"outcome": told.prospect.as_str(), "words": told.to_string(), "node": told.prospect.node(),
        "pods": pods.collect::<Vec<_>>(), "budgets": told.prospect.budgets()})
}

fn place(place: &ClaimPlace) -> Value {
    let devices = place.devices.iter().map(|part| {
        let (share, by_scheduler) = match &part.how {
            How::Whole => (Value::Null, false),
            How::Granted(share) => {
                let compute = share.compute.map(|one| one.get());
                let mut told = json!({"memoryMiB": share.memory.mib_floor(), "computePercent": compute,
                    "slots": share.slots, "isolation": share.isolation.as_str()});
                if share.extent == Extent::Whole {
                    told["whole"] = true.into();
                }
                if let Extent::Mig(at) = share.extent {
                    let Placement { start, size } = at.placement;
                    told["mig"] = json!({"profile": at.profile_id, "start": start, "size": size});
                }
                (told, false)
            }
            How::Scheduled { memory_mib, compute } => {
                (json!({"memoryMiB": memory_mib, "computePercent": compute}), true)
            }
        };
        json!({"node": part.gpu.node, "device": part.gpu.device, "share": share, "byScheduler": by_scheduler})
    });
    json!({"node": place.node, "devices": devices.collect::<Vec<_>>()})
}
