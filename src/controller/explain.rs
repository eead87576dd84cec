//! Why a claim waits, or where it went: for people who ask. The core is fed as the controller's is, and the same
//! decisions are made in the same order, up to the claim's turn; nothing is written.
//!
//! What only a running controller remembers is not known here: nodes that have refused a pod a moment ago, writes under
//! way. Places kept for long waiters are reported from the claims; they play no part in the decision.
//!
//! * [`explain`]: the answer; `nodes`: how each node looks to the pod, with numbers; `scheduler`: what is kube-scheduler's to
//!   place, by `devices`
//! * [`Listing`]: what of the cluster the core does not keep; [`quota`]: what the namespace may still create

mod before;
mod chosen;
mod devices;
mod listing;
mod nodes;
mod own_class;
mod preemption;
pub mod quota;
pub mod rebalance;
mod scheduler;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::DeviceClaim;

use crate::allocate::moves::SEARCH_TICKS;
use crate::cluster::Denied;
use crate::controller::Moment;
use crate::controller::classes::{POLICY, names};
use crate::controller::core::Core;
use crate::controller::gang::Minimum;
use crate::controller::queue::UnitKey;
use crate::controller::recorder::{Reason, gathering, obstacle_words};
use crate::controller::steps::moving::{MoveSearch, MoverFilter, suggestion};
use crate::controller::view::{Asks, Claim, GpuRef, Pod, Use};
use crate::controller::wants::wants;
use crate::model::claim::ClaimKey;
use crate::model::names::{NodeName, PodUid, SHARED_CLASS};
use crate::params::GrantedDevice;

use before::{goes_first, holdups, kept};
pub use listing::Listing;
pub use nodes::{NodeObstacle, ObstacleKind};
pub use preemption::Preemption;

/// When the decision is made, the lists having come at 0: a gang without a size is complete by then.
const TURN: Moment = Duration::from_secs(3);

/// Where there is room for a claim that carries a reason to wait.
const OTHER_WORDS: &str = "the controller said otherwise (tranche.dev/waiting): that is older, or because of what only \
                           it remembers: nodes that refused the pod, what is kept for who goes before it";

/// So many scheduling gates are named.
const GATES_TOLD: usize = 5;

/// What is known of a claim, and what becomes of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub namespace: String,
    pub name: String,
    pub origin: Origin,
    pub created: Option<Timestamp>,
    /// The pods that name it.
    pub pods: Vec<User>,
    pub answer: Answer,
}

/// Whether there is such a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Exists,
    /// It is promised to its pod, and is created once it has its place.
    Promised,
    /// kube-scheduler makes it as it binds the pod, which asks by its limits (KEP-5004).
    Limits,
}

/// What is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    Claim(ClaimKey),
    /// The devices that a pod asks for by its limits, of which there is no claim.
    Limits(PodUid),
}

/// A pod that names the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    /// Where it is bound.
    pub node: Option<NodeName>,
    /// `status.reservedFor` has it.
    pub reserved: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// It has its share.
    Placed { place: ClaimPlace, remarks: Vec<String> },
    /// There is room now: what is still to happen first.
    Would { place: ClaimPlace, holdups: Vec<String> },
    /// There is no place, or something else is to come first.
    Waits {
        because: Because,
        words: String,
        /// What was counted as given to others, that is to be written yet.
        first: Option<String>,
        /// What the controller keeps free for others that wait, by what their claims carry.
        kept: Vec<String>,
        /// Which moves of others would make room, in a sentence.
        moves: Option<String>,
        /// Whether pods of lower priority end for it. None: it does not wait for room, or has the lowest priority.
        preemption: Option<Preemption>,
        /// Each node, if it is for want of room.
        nodes: Vec<(NodeName, NodeObstacle)>,
    },
    /// It can never be placed as it is: why, with the field's path.
    Refused { words: String },
    /// It is not to be placed: the controller keeps a GPU for shares with it.
    Hold { place: Option<ClaimPlace>, words: String },
    /// Somebody else allocates it.
    NotOurs { place: Option<ClaimPlace>, words: String },
    /// kube-scheduler has room for it now, on one of these nodes.
    Open { nodes: Vec<NodeName>, words: String },
}

/// Where a claim is, or would be.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClaimPlace {
    /// None: usable on several nodes.
    pub node: Option<NodeName>,
    pub devices: Vec<ClaimedDevice>,
}

/// A claim's part of a device of our driver.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimedDevice {
    pub gpu: GpuRef,
    pub how: How,
}

#[derive(Debug, Clone, PartialEq)]
pub enum How {
    Whole,
    /// A share that the controller gave, or would give.
    Granted(GrantedDevice),
    /// A share that kube-scheduler gave: MiB and percent of compute, as far as they are told.
    Scheduled {
        memory_mib: Option<u64>,
        compute: Option<u64>,
    },
}

/// Why a claim waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// Nobody has asked for it.
    NoPod,
    /// Its pod is not to be scheduled yet.
    Gated,
    /// Other claims of the pod are not there.
    OtherClaims,
    /// Not all pods of the gang are there.
    Gang,
    Ending,
    /// A ResourceQuota of the namespace is used up.
    Quota,
    /// There is no such DeviceClass.
    Class,
    /// No device of the cluster is chosen.
    Selector,
    /// Devices that are meant are in use, or on nodes that do not take the pod.
    Devices,
    /// No node has enough of a resource that is no device.
    Resources,
    /// The caller may not see what decides it.
    Unseen,
    /// As the controller counts it in its metrics.
    Short(Reason),
}

impl Because {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoPod => "no-pod",
            Self::Gated => "gated",
            Self::OtherClaims => "other-claims",
            Self::Gang => "gang",
            Self::Ending => "ending",
            Self::Quota => "quota",
            Self::Class => "device-class",
            Self::Selector => "selector",
            Self::Devices => "devices",
            Self::Resources => "node-resources",
            Self::Unseen => "not-visible",
            Self::Short(reason) => reason.as_str(),
        }
    }
}

/// Why a pod was not placed in its turn, and how each node looked then.
struct NoPlace {
    reason: Reason,
    words: String,
    moves: Option<String>,
    preemption: Option<Preemption>,
    nodes: Vec<(NodeName, NodeObstacle)>,
}

/// What the turn of a pod, or of its gang, came to.
struct Turned {
    refused: Option<NoPlace>,
    /// Units that were given something before it.
    before: usize,
}

/// What was found out of pods before their claims are told of.
#[derive(Default)]
struct PodFindings {
    turns: BTreeMap<PodUid, Turned>,
    /// Of those that wait for a whole GPU of kube-scheduler's.
    whole: BTreeMap<PodUid, Preemption>,
}

/// Answers for what is known of the subjects, in their order. The core and the listing were fed with everything at
/// moment 0, and the core is of no use afterwards: what it has decided is never written. `at`: the time of day.
pub fn explain(core: &mut Core, listing: &Listing, subjects: &[Subject], at: Timestamp) -> Vec<Explained> {
    core.recorder.begins(at);
    core.catch_up(Moment::ZERO, TURN);
    let known = subjects.iter().filter_map(|subject| match subject {
        Subject::Claim(claim) => core.view.claim(*claim),
        Subject::Limits(_) => None,
    });
    let pods: BTreeSet<PodUid> =
        known.flat_map(|claim| core.view.pods_of(claim)).map(|pod| pod.at.uid.clone()).collect();
    pods.iter().for_each(|pod| refuse_where_short(core, listing, pod));
    let by_limits = subjects.iter().filter_map(|subject| match subject {
        Subject::Limits(pod) => Some(pod),
        Subject::Claim(_) => None,
    });
    let looked = match listing.denied() {
        [] => PodFindings {
            whole: preemption::for_whole(core, pods.iter().chain(by_limits)),
            turns: take_turns(core, listing, &pods),
        },
        _ => PodFindings::default(),
    };
    let one = |subject: &Subject| match subject {
        Subject::Claim(claim) => of_claim(core, listing, core.view.claim(*claim)?, &looked, at),
        Subject::Limits(pod) => scheduler::of_limits(core, listing, core.view.pod(pod)?, &looked),
    };
    subjects.iter().filter_map(one).collect()
}

fn of_claim(
    core: &Core,
    listing: &Listing,
    claim: &Claim,
    looked: &PodFindings,
    at: Timestamp,
) -> Option<Explained> {
    let user = |pod: &Pod| User {
        name: pod.at.name.clone(),
        node: pod.node.clone(),
        reserved: claim.users.pods.contains(&pod.at.uid),
    };
    Some(Explained {
        namespace: claim.namespace().to_owned(),
        name: claim.name().to_owned(),
        origin: if claim.is_planned() { Origin::Promised } else { Origin::Exists },
        created: claim.meta.created,
        pods: core.view.pods_of(claim).map(user).collect(),
        answer: answer(core, listing, claim, looked, at),
    })
}

/// kube-scheduler would refuse the pod on nodes that lack what it alone counts; the controller then looks elsewhere.
fn refuse_where_short(core: &mut Core, listing: &Listing, pod: &PodUid) {
    let Some(found) = core.view.pod(pod) else { return };
    let lacks = |state: &crate::controller::view::NodeState| {
        nodes::lack(listing, found, state.object.as_deref()).is_some()
    };
    let short: Vec<NodeName> =
        core.view.nodes().filter(|(_, state)| lacks(state)).map(|(name, _)| name.clone()).collect();
    short.iter().for_each(|node| core.queue.refusals.exclude(pod, node, None, TURN));
}

/// Decides in the controller's order until all of these pods have had their turn.
fn take_turns(core: &mut Core, listing: &Listing, pods: &BTreeSet<PodUid>) -> BTreeMap<PodUid, Turned> {
    let (mut turned, mut before) = (BTreeMap::new(), 0);
    let mut open: BTreeSet<PodUid> = pods.iter().filter(|pod| core.queue.contains(pod)).cloned().collect();
    for turn in core.queue.turns(TURN, |key| core.placed(key)) {
        if open.is_empty() {
            break;
        }
        let outcome = core.place(&turn, TURN);
        let asked: Vec<PodUid> = turn.pods.iter().filter(|pod| open.remove(*pod)).cloned().collect();
        if asked.is_empty() {
            before += usize::from(matches!(outcome, Ok(true)));
            continue;
        }
        let refused = outcome.err();
        let moves =
            refused.as_ref().and_then(|_| match core.propose(&turn, MoverFilter::Any, SEARCH_TICKS, TURN) {
                MoveSearch::Found(found) => Some(suggestion(&found, None)),
                MoveSearch::Nothing | MoveSearch::Spent => None,
            });
        let preemption =
            refused.as_ref().and_then(|refused| preemption::of_turn(core, &turn, refused.reason));
        for pod in asked {
            let refused = refused.as_ref().map(|refused| {
                let nodes = nodes::verdicts(core, listing, &pod, TURN).unwrap_or_default();
                let (moves, preemption) = (moves.clone(), preemption.clone());
                NoPlace { reason: refused.reason, words: refused.words.clone(), moves, preemption, nodes }
            });
            turned.insert(pod, Turned { refused, before });
        }
    }
    turned
}

fn answer(core: &Core, listing: &Listing, claim: &Claim, looked: &PodFindings, at: Timestamp) -> Answer {
    if !claim.is_shares() {
        return scheduler::not_ours(core, listing, claim, looked);
    }
    if let Some(place) = placed(listing, claim) {
        return Answer::Placed { remarks: remarks(core, listing, claim, &place), place };
    }
    let spec = match &claim.asks {
        Asks::Shares(spec) => spec,
        Asks::Unreadable(words) => return Answer::Refused { words: words.clone() },
        Asks::Scheduler(_) => return scheduler::not_ours(core, listing, claim, looked),
    };
    if let Err(words) = wants(spec, core.view.classes()) {
        // What the claim does not say the class may say.
        return match listing.denied() {
            [] => Answer::Refused { words },
            denied => unseen(claim, denied, &format!("unless {} says it, {words}; ", class_of(spec))),
        };
    }
    if claim.is_ending() {
        return waits(Because::Ending, "is being deleted; it is not placed any more");
    }
    let full = if claim.is_planned() {
        quota::exceeded(listing.quotas(), &quota::of_claim(spec, listing.classes()))
    } else {
        Vec::new()
    };
    if !full.is_empty() {
        let words = format!("the controller may not create the claim: {}", full.join("; "));
        return waits(Because::Quota, words);
    }
    if let denied @ [_, ..] = listing.denied() {
        return not_ready(core, listing, claim).unwrap_or_else(|| unseen(claim, denied, ""));
    }
    if let Some(planned) = core.tracker.planned(claim.key) {
        let given = planned.given.iter().flat_map(|given| &given.devices);
        let part = |device: &GrantedDevice| ClaimedDevice {
            gpu: GpuRef::new(&planned.node, &device.device),
            how: How::Granted(device.clone()),
        };
        let place = ClaimPlace { node: Some(planned.node.clone()), devices: given.map(part).collect() };
        let before =
            core.view.pods_of(claim).filter_map(|pod| looked.turns.get(&pod.at.uid)).map(|one| one.before);
        let mut holdups = holdups(core, &place, before.max().unwrap_or(0), at);
        if claim.waiting.is_some() {
            holdups.push(OTHER_WORDS.to_owned());
            holdups.extend(kept(core, claim, at).into_iter().map(|words| format!("kept for {words}")));
        }
        return Answer::Would { place, holdups };
    }
    unplaced(core, listing, (claim, spec), looked, at)
}

/// Of a claim for which no place was found.
fn unplaced(
    core: &Core,
    listing: &Listing,
    (claim, spec): (&Claim, &DeviceClaim),
    looked: &PodFindings,
    at: Timestamp,
) -> Answer {
    let of_pods = core.view.pods_of(claim).filter_map(|pod| looked.turns.get(&pod.at.uid));
    let refused = of_pods.filter_map(|one| Some((one.refused.as_ref()?, one.before))).next();
    match refused {
        Some((no, _)) if no.reason == Reason::Claim && !is_anothers(core, claim, &no.words) => {
            Answer::Refused { words: no.words.clone() }
        }
        Some((no, before)) => {
            let lacks: Vec<_> =
                no.nodes.iter().filter_map(|(node, verdict)| Some((node, verdict.lack()?))).collect();
            let lacking = nodes::lacking(&lacks);
            Answer::Waits {
                because: if lacking.is_some() { Because::Resources } else { Because::Short(no.reason) },
                words: lacking.unwrap_or_else(|| own_class::words(core, spec, &no.words)),
                first: goes_first(before),
                kept: kept(core, claim, at),
                moves: no.moves.clone(),
                preemption: no.preemption.clone(),
                nodes: no.nodes.clone(),
            }
        }
        None => not_ready(core, listing, claim).unwrap_or_else(|| no_turn(core, claim)),
    }
}

fn class_of(spec: &DeviceClaim) -> String {
    format!("DeviceClass {}", names(spec).next().unwrap_or(SHARED_CLASS))
}

/// Where there is room is not known to the caller.
fn unseen(claim: &Claim, denied: &[Denied], before: &str) -> Answer {
    let said =
        claim.waiting.as_ref().map_or(String::new(), |words| format!("; the controller said: {words}"));
    waits(Because::Unseen, format!("{before}where there is room is not known: {}{said}", may_not(denied)))
}

/// What the caller may not list, and whom to ask.
pub fn may_not(denied: &[Denied]) -> String {
    let kinds: Vec<String> = denied.iter().map(Denied::to_string).collect();
    format!("you may not list {} in the whole cluster: ask for ClusterRole tranche-viewer", kinds.join(", "))
}

/// The words are about another claim of the same pod.
fn is_anothers(core: &Core, claim: &Claim, words: &str) -> bool {
    let own = claim.name();
    let pods = core.view.pods_of(claim);
    let mut others =
        pods.flat_map(|pod| pod.requested.claims.iter().map(move |name| (&pod.at.namespace, name)));
    let about_policy = words.starts_with(&format!("annotation {POLICY}: "));
    others.any(|(namespace, name)| {
        let other = core.view.claim_named(namespace, name);
        name != own
            && (words.starts_with(&format!("claim {name}: "))
                || (about_policy && claim.policy.is_none())
                || other.is_some_and(|other| other.asks == Asks::Unreadable(words.to_owned())))
    })
}

fn waits(because: Because, words: impl Into<String>) -> Answer {
    let (kept, nodes) = (Vec::new(), Vec::new());
    Answer::Waits { because, words: words.into(), first: None, kept, moves: None, preemption: None, nodes }
}

/// What is still to come before the claim has a turn. None: nothing that is known here.
fn not_ready(core: &Core, listing: &Listing, claim: &Claim) -> Option<Answer> {
    let pods: Vec<&Pod> = core.view.pods_of(claim).filter(|pod| !pod.ending).collect();
    let Some(pod) = pods.first() else {
        return Some(waits(
            Because::NoPod,
            "no pod names it; a claim is placed once a pod that wants it is there",
        ));
    };
    if let Some(words) = gated(listing, pod) {
        return Some(waits(Because::Gated, words));
    }
    let name = &pod.at.name;
    if pod.requested.unnamed {
        let words = format!(
            "pod {name} waits for claims that kube-controller-manager is to make from their templates; \
             `kubectl describe pod` tells why it does not"
        );
        return Some(waits(Because::OtherClaims, words));
    }
    let view = &core.view;
    let missing = pod.requested.claims.iter().find(|one| view.claim_named(&pod.at.namespace, one).is_none());
    if let Some(missing) = missing {
        let words = format!("pod {name} also names the claim {missing}, which does not exist; create it");
        return Some(waits(Because::OtherClaims, words));
    }
    match view.minimum(pod) {
        Minimum::AllThere => None,
        Minimum::None(obstacle) => {
            let group = pod.gang().map(|gang| gang.name.as_str()).unwrap_or_default();
            Some(waits(Because::Gang, obstacle_words(group, &obstacle)))
        }
        Minimum::Pods(need) => {
            let UnitKey::Gang { name: gang, .. } = core.unit_of(pod) else { return None };
            let ready = ready(core, pod);
            let words = || gathering(&gang, ready, &need.count().to_string());
            (ready < need.count()).then(|| waits(Because::Gang, words()))
        }
    }
}

/// How many pods of a pod's unit are ready to be placed, or have been.
fn ready(core: &Core, pod: &Pod) -> usize {
    let key = core.unit_of(pod);
    core.view.pods().filter(|other| core.unit_of(other) == key && other.is_ready()).count()
}

/// Why the claim has no turn, though nothing of it is missing.
fn no_turn(core: &Core, claim: &Claim) -> Answer {
    let pods = core.view.pods_of(claim).filter(|pod| !pod.ending);
    let Some(pod) = pods.into_iter().next() else {
        return waits(Because::NoPod, "no pod names it");
    };
    if let UnitKey::Gang { name: gang, .. } = core.unit_of(pod) {
        return waits(Because::Gang, gathering(&gang, ready(core, pod), "some"));
    }
    let words = format!("pod {} is not ready to be placed; `kubectl describe pod` tells more", pod.at.name);
    waits(Because::OtherClaims, words)
}

/// Who keeps the pod from being scheduled, by name.
fn gated(listing: &Listing, pod: &Pod) -> Option<String> {
    if !pod.gated {
        return None;
    }
    let spec = listing.pod(&pod.at.name).and_then(|object| object.spec.as_ref());
    let gates = spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    let names: Vec<&str> = gates.map(|gate| gate.name.as_str()).take(GATES_TOLD).collect();
    let gates = match names.as_slice() {
        [] => "scheduling gates".to_owned(),
        [one] => format!("the scheduling gate {one}"),
        names => format!("the scheduling gates {}", names.join(", ")),
    };
    Some(format!(
        "pod {} has {gates} (spec.schedulingGates): it is placed once whoever set that has taken it away",
        pod.at.name
    ))
}

fn placed(listing: &Listing, claim: &Claim) -> Option<ClaimPlace> {
    let allocation = claim.allocation.as_ref()?;
    let scheduled = |gpu: &GpuRef| {
        let part = listing.part(gpu, claim.namespace(), claim.name());
        let (memory_mib, compute) =
            part.and_then(|part| part.consumed.as_ref()).map(listing::amounts).unwrap_or_default();
        match listing.has_all(gpu, claim.namespace(), claim.name()) {
            true => How::Whole,
            false => How::Scheduled { memory_mib, compute },
        }
    };
    let part = |(gpu, how): &(GpuRef, Use)| ClaimedDevice {
        gpu: gpu.clone(),
        how: match how {
            Use::Share(granted) => How::Granted(granted.clone()),
            Use::Scheduled => scheduled(gpu),
            Use::Hold | Use::Whole | Use::Cut(_) => How::Whole,
        },
    };
    let devices = allocation.uses.iter().filter(|(_, how)| !matches!(how, Use::Cut(_)));
    Some(ClaimPlace { node: allocation.node.clone(), devices: devices.map(part).collect() })
}

/// What is worth to be known of a place that the claim has.
fn remarks(core: &Core, listing: &Listing, claim: &Claim, place: &ClaimPlace) -> Vec<String> {
    let mut remarks = Vec::new();
    for part in place.devices.iter().filter(|part| core.holds.gpus.contested().contains(&part.gpu)) {
        let others = nodes::names(core, &part.gpu, |_, how| core.view.excludes_us(&part.gpu, how));
        remarks.push(format!(
            "{} is also named by {others}: it is given twice; the controller takes back what does not run yet",
            part.gpu
        ));
    }
    let (Some(node), false) = (&place.node, claim.is_reserved()) else { return remarks };
    let pods: Vec<&Pod> = core.view.pods_of(claim).filter(|pod| !pod.ending).collect();
    let bound = pods.iter().any(|pod| pod.node.as_ref() == Some(node));
    if !listing.denied().is_empty() {
        return remarks;
    }
    let object = core.view.node(node).and_then(|state| state.object.as_deref());
    let lack = pods.iter().find_map(|pod| nodes::lack(listing, pod, object)).filter(|_| !bound);
    if let Some(lack) = lack {
        remarks.push(format!(
            "kube-scheduler refuses the pod there: node {node} lacks {lack}; the controller then looks elsewhere"
        ));
        return remarks;
    }
    remarks.push(match core.unfit(claim, &pods, node).filter(|_| !pods.is_empty() && !bound) {
        _ if pods.is_empty() => "no pod names it any more; the controller takes it back".to_owned(),
        Some(why) => format!("it cannot be used there: {why}; the controller takes it back and looks elsewhere"),
        None if bound => "the pod is bound there; the claim is about to be reserved for it".to_owned(),
        None => format!(
            "no pod has reserved it yet: kube-scheduler is to bind the pod to node {node}; if it does not, the \
             pod's events tell why"
        ),
    });
    remarks
}
