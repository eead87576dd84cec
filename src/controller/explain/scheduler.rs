//! What is told of claims that are not the controller's to place: its own holds, and what kube-scheduler gives.

use k8s_openapi::api::core::v1::Pod as PodObject;

use super::chosen::Spent;
use super::devices::{self, Outlook, SoughtDevices};
use super::{
    Answer, Because, Explained, Listing, Origin, PodFindings, Preemption, User, gated, may_not, nodes,
    not_ready, placed, quota, waits,
};
use crate::controller::core::Core;
use crate::controller::view::{Claim, GpuRef, Pod, PublishedGpu, Use};
use crate::model::names::{NodeName, SHARED_CLASS};
use crate::select::{Selector, untolerated};

/// Nodes that are named in a row.
const NODES_TOLD: usize = 3;

pub(super) fn not_ours(core: &Core, listing: &Listing, claim: &Claim, looked: &PodFindings) -> Answer {
    let place = placed(listing, claim);
    if let Some(gpu) = &claim.hold {
        let shares = nodes::names(core, gpu, |_, how| matches!(how, Use::Share(_)));
        let has =
            if shares.is_empty() { "there are none now".to_owned() } else { format!("it has {shares}") };
        let words = format!("keeps {gpu} for shares that the controller places; {has}");
        return Answer::Hold { place, words };
    }
    if place.is_some() {
        let words = match by_limits(listing, claim) {
            None => "was allocated by kube-scheduler".to_owned(),
            Some(limits) => format!("was made and allocated by kube-scheduler for the pod's limits {limits}"),
        };
        return Answer::NotOurs { place, words };
    }
    open(core, listing, claim, looked)
}

/// The limits of the pod that kube-scheduler made the claim for; none: somebody else made it.
fn by_limits(listing: &Listing, claim: &Claim) -> Option<String> {
    let is_made_for = |pod: &&PodObject| {
        let status = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
        status.is_some_and(|status| status.resource_claim_name == claim.name())
            && pod.metadata.namespace.as_deref() == Some(claim.namespace())
    };
    let pod = listing.pods().find(is_made_for)?;
    let limits: Vec<String> =
        listing.limits(pod).into_iter().map(|(name, _, count)| format!("{name}: {count}")).collect();
    Some(if limits.is_empty() { "of extended resources".to_owned() } else { limits.join(", ") })
}

fn open(core: &Core, listing: &Listing, claim: &Claim, looked: &PodFindings) -> Answer {
    let elsewhere = || {
        let words = counted(core, claim).unwrap_or_else(foreign);
        Answer::NotOurs { place: None, words }
    };
    if claim.is_ending() {
        return waits(Because::Ending, "is being deleted; it is not placed any more");
    }
    let pods: Vec<&Pod> = core.view.pods_of(claim).filter(|pod| !pod.ending).collect();
    let Some(object) = listing.claim(claim.name()).filter(|_| !pods.is_empty()) else { return elsewhere() };
    if let Some(answer) = not_ready(core, listing, claim).filter(is_of_the_pod) {
        return answer;
    }
    if let denied @ [_, ..] = listing.denied() {
        return waits(Because::Unseen, format!("kube-scheduler allocates it; {}", may_not(denied)));
    }
    let objects: Vec<&PodObject> = pods.iter().filter_map(|pod| listing.pod(&pod.at.name)).collect();
    let whole = pods.iter().find_map(|pod| looked.whole.get(&pod.at.uid));
    match told(devices::outlook(core, listing, &devices::of_claim(object), &objects), whole) {
        Some(answer) => answer,
        None => elsewhere(),
    }
}

/// kube-scheduler knows no gangs of ours.
fn is_of_the_pod(answer: &Answer) -> bool {
    !matches!(answer, Answer::Waits { because: Because::Gang, .. })
}

/// None: devices of another driver are meant.
fn told(outlook: Outlook, whole: Option<&Preemption>) -> Option<Answer> {
    let busy = |because| (because == Because::Devices).then(|| whole.cloned()).flatten();
    let because = |because, words, nodes| Answer::Waits {
        preemption: busy(because),
        because,
        words,
        first: None,
        kept: Vec::new(),
        moves: None,
        nodes,
    };
    Some(match outlook {
        Outlook::Foreign => return None,
        Outlook::NoClass(words) => because(Because::Class, words, Vec::new()),
        Outlook::NoMatch(words) => because(Because::Selector, words, Vec::new()),
        Outlook::Busy { words, nodes } => {
            let lacks = nodes.iter().any(|(_, verdict)| verdict.lack().is_some());
            because(if lacks { Because::Resources } else { Because::Devices }, words, nodes)
        }
        Outlook::Room { nodes, held } => Answer::Open { words: room(&nodes, held), nodes },
    })
}

fn room(nodes: &[NodeName], held: bool) -> String {
    let names: Vec<&str> = nodes.iter().map(NodeName::as_str).take(NODES_TOLD).collect();
    let more = match nodes.len().saturating_sub(NODES_TOLD) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let held = if held {
        ", on GPUs that the controller keeps for shares and that have none: it gives them back when a pod waits for them"
    } else {
        ""
    };
    format!("kube-scheduler allocates it as it binds the pod; free on {}{more}{held}", names.join(", "))
}

fn foreign() -> String {
    format!(
        "asks for no device of class {SHARED_CLASS}: kube-scheduler allocates it; `kubectl describe pod` tells why it \
         waits"
    )
}

/// What a pod asks for by its limits, before there is a claim of it.
pub(super) fn of_limits(
    core: &Core,
    listing: &Listing,
    pod: &Pod,
    looked: &PodFindings,
) -> Option<Explained> {
    let object = listing.pod(&pod.at.name)?;
    let limits = listing.limits(object);
    let names: Vec<String> = limits.iter().map(|(name, _, count)| format!("{name}: {count}")).collect();
    let sought = devices::of_limits(&limits);
    Some(Explained {
        namespace: pod.at.namespace.clone(),
        name: names.join(", "),
        origin: Origin::Limits,
        created: None,
        pods: vec![User { name: pod.at.name.clone(), node: pod.node.clone(), reserved: false }],
        answer: answer_of_limits(core, listing, (pod, object), &limits, &sought, looked),
    })
}

fn answer_of_limits(
    core: &Core,
    listing: &Listing,
    (pod, object): (&Pod, &PodObject),
    limits: &[(String, &str, u32)],
    sought: &[SoughtDevices],
    looked: &PodFindings,
) -> Answer {
    if let Some(node) = &pod.node {
        let words = format!("node {node} gave the pod its devices without a claim: by a device plugin");
        return Answer::NotOurs { place: Some(super::ClaimPlace::default()), words };
    }
    if let Some(words) = gated(listing, pod) {
        return waits(Because::Gated, words);
    }
    let usage = quota::of_limits(limits.iter().map(|(_, class, count)| (*class, *count)));
    let full = quota::exceeded(listing.quotas(), &usage);
    if !full.is_empty() {
        let words = format!("kube-scheduler may not create the claim: {}", full.join("; "));
        return waits(Because::Quota, words);
    }
    if let denied @ [_, ..] = listing.denied() {
        return waits(
            Because::Unseen,
            format!("kube-scheduler makes and allocates the claim; {}", may_not(denied)),
        );
    }
    told(devices::outlook(core, listing, sought, &[object]), looked.whole.get(&pod.at.uid))
        .unwrap_or_else(|| Answer::NotOurs { place: None, words: foreign() })
}

/// Words for a claim that kube-scheduler is to give GPUs, with what there is. None: it may have none that can be
/// shared.
fn counted(core: &Core, claim: &Claim) -> Option<String> {
    let compile =
        |texts: &[String]| texts.iter().map(|text| Selector::compile(text)).collect::<Result<Vec<_>, _>>();
    let mut kinds = Vec::new();
    for kind in core.view.needs_of(claim).flat_map(|need| need.kinds) {
        kinds.push((compile(&kind.selectors).ok()?, kind.tolerations));
    }
    let mut spent = Spent::default();
    let mut is_chosen = |gpu: &PublishedGpu| {
        kinds.iter().any(|(selectors, tolerations)| {
            selectors.iter().all(|selector| spent.on(selector, &gpu.facts).unwrap_or(false))
                && untolerated(&gpu.taints, tolerations).is_none()
        })
    };
    let all = core
        .view
        .nodes()
        .flat_map(|(name, node)| node.gpus.iter().map(move |(device, gpu)| (GpuRef::new(name, device), gpu)));
    let chosen: Vec<GpuRef> = all.filter(|(_, gpu)| is_chosen(gpu)).map(|(at, _)| at).collect();
    let untouched = chosen.iter().filter(|at| core.view.uses(at).next().is_none()).count();
    let held = chosen.iter().filter(|at| core.holds.is_ours(at) && !core.capacity.is_granted(at)).count();
    (!chosen.is_empty()).then(|| {
        format!(
            "kube-scheduler allocates it, and tells why it waits in the pod's events; of {} shareable GPU{} that its \
             requests choose {untouched} are nobody's, and {held} are kept for shares without having any (given back \
             when a pod waits for them)",
            chosen.len(),
            if chosen.len() == 1 { "" } else { "s" },
        )
    })
}
