//! The states of `tranche mps` and `tranche controller` as tables.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::show;
use crate::cli::table::{listed, or_none, render};
use crate::model::gpu::NodeGpus;
use crate::supervisor::protocol::DaemonState;

/// What `tranche mps` says of itself.
#[derive(Debug, Deserialize)]
pub struct SupervisorState {
    daemons: Vec<DaemonState>,
}

/// What `tranche controller` says of itself. A part that another release does not tell is empty.
#[derive(Debug, Deserialize)]
pub struct ControllerState {
    controller: Controller,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Controller {
    leading: bool,
    complete: bool,
    waiting: WaitingPods,
    plans: usize,
    /// `node/device` → in which phase its hold is.
    holds: BTreeMap<String, String>,
    kept: Vec<KeptRoom>,
    contested: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WaitingPods {
    pods: usize,
    by_reason: BTreeMap<String, usize>,
}

/// Room that is kept for a pod that waits.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KeptRoom {
    namespace: String,
    #[serde(rename = "for")]
    pod: String,
    gpus: Vec<String>,
}

/// The MPS daemons by their GPUs' UUIDs: the supervisor knows no other names.
pub fn supervisor(state: &SupervisorState) -> String {
    match state.daemons.is_empty() {
        true => "No GPU of this node has an MPS daemon: no share has been prepared here lately.\n".to_owned(),
        false => show::daemons(&NodeGpus::default(), &state.daemons).trim_start().to_owned(),
    }
}

/// What the controller does, what waits, and which GPUs it has.
pub fn controller(state: &ControllerState) -> String {
    let Controller { leading, complete, waiting, plans, holds, kept, contested } = &state.controller;
    if !leading {
        return "This replica does not lead: it waits for the lease, and knows nothing of the cluster until then. Ask \
                the other one.\n"
            .to_owned();
    }
    let view = if *complete { "complete" } else { "being read: nothing is placed yet" };
    let numbers = [waiting.pods, *plans, holds.len(), kept.len(), contested.len()].map(|n| n.to_string());
    let row = std::iter::once(view.to_owned()).chain(numbers);
    let header = ["VIEW", "PODS WAITING", "PLANS", "GPUS HELD", "PLACES KEPT", "CONTESTED GPUS"];
    let mut text = render(&header, [row]);
    let mut table = |header: &[&str], rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            text.push('\n');
            text.push_str(&render(header, rows));
        }
    };
    // The controller tells every reason, those that keep nobody waiting, too.
    let reasons = waiting.by_reason.iter().filter(|(_, pods)| **pods > 0);
    let reasons = reasons.map(|(reason, pods)| vec![reason.clone(), pods.to_string()]);
    table(&["WAITS BECAUSE", "PODS"], reasons.collect());
    table(&["HELD GPU", "HOLD"], holds.iter().map(|(gpu, phase)| vec![gpu.clone(), phase.clone()]).collect());
    let kept = kept
        .iter()
        .map(|kept| vec![format!("{}/{}", kept.namespace, kept.pod), or_none(Some(listed(&kept.gpus)))]);
    table(&["KEPT FOR", "GPUS"], kept.collect());
    table(&["CONTESTED GPU"], contested.iter().map(|gpu| vec![gpu.clone()]).collect());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn of_controller(state: Value) -> String {
        controller(&serde_json::from_value(json!({"controller": state})).unwrap())
    }

    #[test]
    fn a_controller_that_leads_tells_what_waits_and_what_it_holds() {
        let state = json!({"leading": true, "complete": true, "plans": 2, "contested": [],
            "waiting": {"pods": 3, "byReason": {"no-room": 3, "gang": 0}},
            "holds": {"node-a/gpu-0": "held", "node-a/gpu-1": "idle"},
            "kept": [{"namespace": "team", "for": "train-0", "gpus": ["node-b/gpu-2"],
                "fromItsNamespaceOnly": false, "untilSecond": 7}]});
        assert_eq!(
            of_controller(state),
            "VIEW       PODS WAITING   PLANS   GPUS HELD   PLACES KEPT   CONTESTED GPUS\n\
             complete   3              2       2           1             0\n\n\
             WAITS BECAUSE   PODS\nno-room         3\n\n\
             HELD GPU       HOLD\nnode-a/gpu-0   held\nnode-a/gpu-1   idle\n\n\
             KEPT FOR       GPUS\nteam/train-0   node-b/gpu-2\n"
        );
    }

    #[test]
    fn a_replica_that_does_not_lead_says_so() {
        assert!(of_controller(json!({"leading": false})).contains("does not lead"));
        let begun = of_controller(json!({"leading": true, "complete": false, "later": 1}));
        assert!(begun.contains("being read"), "{begun}");
    }

    #[test]
    fn the_supervisor_tells_its_daemons_by_uuid() {
        let daemon = json!({"group": ["GPU-1"], "exclusive": true, "phase": {"Down": {"reason": "mute"}},
            "limits": null, "memory_answers": [], "compute_answer": "", "deaths": 2, "servers": []});
        let state = |daemons: Value| serde_json::from_value(json!({"daemons": daemons})).unwrap();
        let text = supervisor(&state(json!([daemon])));
        assert!(text.starts_with("MPS DAEMON OF ") && text.contains("GPU-1"), "{text}");
        assert!(text.contains("Down: mute"), "{text}");
        assert!(supervisor(&state(json!([]))).starts_with("No GPU of this node"));
    }
}
