//! Whether kube-scheduler can give a claim, or a pod by its limits, the devices of our driver that it wants: classes,
//! selectors, taints, what others have. Each request is looked at by itself; constraints between requests are not.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ExactDeviceRequest, ResourceClaim};

use super::chosen::{Chosen, DeviceMatch, Spent};
use super::listing::{HeldDevicePart, ListedDevice, Listing};
use super::nodes::{Miss, NodeObstacle, TooFewGpus, list, whole};
use crate::controller::core::Core;
use crate::controller::requests::{exact, expressions};
use crate::controller::view::GpuRef;
use crate::controller::view::class::doubtful;
use crate::feasible::Node;
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::{Bytes, Quantity};
use crate::select::{Toleration, untolerated};

const MEMORY: &str = "memory";
/// Names of classes that are told in place of one that is not there.
const CLASSES_TOLD: usize = 8;

/// One request, with its alternatives.
#[derive(Debug, Clone)]
pub struct SoughtDevices {
    request: String,
    choices: Vec<DeviceChoice>,
}

/// Devices of one class.
#[derive(Debug, Clone)]
struct DeviceChoice {
    class: String,
    selectors: Vec<String>,
    tolerations: Vec<Toleration>,
    /// None: all that there are.
    count: Option<usize>,
    /// What is asked of capacities, in whole units.
    capacity: BTreeMap<String, u64>,
    /// The resource among limits by which it is asked for.
    resource: Option<String>,
}

/// What becomes of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Outlook {
    /// Devices of another driver are meant, which are not known here.
    Foreign,
    NoClass(String),
    /// No device of the cluster is chosen by it, or a selector fails.
    NoMatch(String),
    /// On these nodes. `held`: there only on GPUs that the controller keeps for shares, and that have none.
    Room {
        nodes: Vec<NodeName>,
        held: bool,
    },
    /// No node has enough for it now.
    Busy {
        words: String,
        nodes: Vec<(NodeName, NodeObstacle)>,
    },
}

/// What a claim seeks. Requests for a look at devices in use take nothing.
pub fn of_claim(claim: &ResourceClaim) -> Vec<SoughtDevices> {
    let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    let requests = devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let one = |request: &k8s_openapi::api::resource::v1::DeviceRequest| {
        let exactly = request.exactly.iter().filter(|one| one.admin_access != Some(true)).map(choice);
        let alternatives = request.first_available.iter().flatten().map(|sub| choice(&exact(sub)));
        SoughtDevices { request: request.name.clone(), choices: exactly.chain(alternatives).collect() }
    };
    requests.map(one).filter(|sought| !sought.choices.is_empty()).collect()
}

/// What a pod seeks by its limits: (resource, class, how many).
pub fn of_limits(limits: &[(String, &str, u32)]) -> Vec<SoughtDevices> {
    let one = |(resource, class, count): &(String, &str, u32)| SoughtDevices {
        request: resource.clone(),
        choices: vec![DeviceChoice {
            class: (*class).to_owned(),
            selectors: Vec::new(),
            tolerations: Vec::new(),
            count: Some(*count as usize),
            capacity: BTreeMap::new(),
            resource: Some(resource.clone()),
        }],
    };
    limits.iter().map(one).collect()
}

fn choice(one: &ExactDeviceRequest) -> DeviceChoice {
    let capacity = one.capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten());
    let units = |text: &str| text.parse::<Quantity>().ok()?.units_ceil();
    DeviceChoice {
        class: one.device_class_name.clone(),
        selectors: expressions(one.selectors.as_deref()),
        tolerations: one.tolerations.iter().flatten().filter_map(Toleration::of).collect(),
        count: match one.allocation_mode.as_deref() {
            Some("All") => None,
            _ => Some(usize::try_from(one.count.unwrap_or(1)).unwrap_or(1)),
        },
        capacity: capacity.filter_map(|(name, one)| Some((name.clone(), units(&one.0)?))).collect(),
        resource: None,
    }
}

/// A choice, with the devices that it chooses.
struct ExaminedChoice<'a> {
    choice: &'a DeviceChoice,
    chosen: Chosen,
}

/// A request, with its alternatives.
type ExaminedRequest<'a> = (&'a SoughtDevices, Vec<ExaminedChoice<'a>>);

/// How a device of a node looks to a choice.
enum DeviceFit {
    /// Of another class.
    Other,
    Missed(Miss),
    Fits {
        held: bool,
    },
}

/// `pods`: those that want it, all of which must be able to run on the node.
pub fn outlook(core: &Core, listing: &Listing, sought: &[SoughtDevices], pods: &[&Pod]) -> Outlook {
    let (mut spent, mut looked) = (Spent::default(), Vec::new());
    for one in sought {
        match look_at(listing, one, &mut spent) {
            Ok(choices) => looked.push((one, choices)),
            Err(outlook) => return outlook,
        }
    }
    if looked.iter().any(|(_, choices)| choices.iter().all(|one| one.chosen.is_foreign())) {
        return Outlook::Foreign;
    }
    if let Some(words) = looked.iter().find_map(|(one, choices)| unmatched(one, choices)) {
        let classes = sought.iter().flat_map(|one| &one.choices).map(|choice| &choice.class);
        let is_doubtful = |class: &&String| listing.classes().get(*class).is_some_and(|one| one.is_doubtful);
        let doubt = classes.into_iter().find(is_doubtful).map(|class| doubtful(class));
        return Outlook::NoMatch([Some(words), doubt].into_iter().flatten().collect::<Vec<_>>().join("; "));
    }
    let (mut free, mut held, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (name, state) in core.view.nodes() {
        let verdict = match state.object.as_deref() {
            None => Err(NodeObstacle::NoNode),
            Some(node) => of_node(core, listing, name, node, &looked, pods),
        };
        match verdict {
            Ok(false) => free.push(name.clone()),
            Ok(true) => held.push(name.clone()),
            Err(verdict) => rows.push((name.clone(), verdict)),
        }
    }
    match (free.is_empty(), held.is_empty()) {
        (false, _) => Outlook::Room { nodes: free, held: false },
        (true, false) => Outlook::Room { nodes: held, held: true },
        (true, true) => Outlook::Busy { words: busy(&looked, &rows), nodes: rows },
    }
}

fn look_at<'a>(
    listing: &Listing,
    sought: &'a SoughtDevices,
    spent: &mut Spent,
) -> Result<Vec<ExaminedChoice<'a>>, Outlook> {
    let mut all = Vec::new();
    for choice in &sought.choices {
        let Some(class) = listing.classes().get(&choice.class) else {
            return Err(Outlook::NoClass(no_class(listing, &sought.request, &choice.class)));
        };
        let chosen = Chosen::of(listing, &class.selectors, &choice.selectors, spent);
        let chosen = chosen.map_err(|(error, of_class)| {
            let whose = match of_class {
                true => format!("DeviceClass {}", choice.class),
                false => format!("request {}", sought.request),
            };
            Outlook::NoMatch(format!("{whose}: {error}"))
        })?;
        all.push(ExaminedChoice { choice, chosen });
    }
    Ok(all)
}

fn no_class(listing: &Listing, request: &str, class: &str) -> String {
    let names: Vec<&str> = listing.classes().keys().map(String::as_str).take(CLASSES_TOLD).collect();
    let there = match names.as_slice() {
        [] => "there is none at all".to_owned(),
        names => format!("there are {}", names.join(", ")),
    };
    format!("request {request}: there is no DeviceClass {class}; {there}")
}

/// Words for a request that no device of the cluster can serve, whatever is free.
fn unmatched(sought: &SoughtDevices, choices: &[ExaminedChoice<'_>]) -> Option<String> {
    let whys: Option<Vec<String>> =
        choices.iter().map(|one| one.chosen.why_none(&one.choice.class)).collect();
    whys?.pop().map(|why| format!("request {}: {why}", sought.request))
}

/// True if there is room only on GPUs that are kept for shares and have none.
fn of_node(
    core: &Core,
    listing: &Listing,
    name: &NodeName,
    node: &Node,
    sought: &[ExaminedRequest<'_>],
    pods: &[&Pod],
) -> Result<bool, NodeObstacle> {
    let devices = listing.devices(name);
    let mut used = BTreeMap::new();
    let (mut any_held, mut short) = (false, None);
    for (_, choices) in sought {
        let resource = choices.iter().filter_map(|one| one.choice.resource.as_deref()).next();
        if resource.is_some_and(|resource| listing.is_by_plugin(resource, node)) {
            continue;
        }
        let mut failed = None;
        let served =
            choices.iter().any(|one| match of_choice(core, listing, name, &devices, one, &mut used) {
                Ok(held) => {
                    any_held |= held;
                    true
                }
                Err(verdict) => {
                    failed = Some(verdict);
                    false
                }
            });
        if !served {
            short = short.or(failed);
        }
    }
    if short == Some(NodeObstacle::NoDevices) {
        return Err(NodeObstacle::NoDevices);
    }
    if let Some(unfit) = pods.iter().find_map(|pod| listing.unfit(pod, &core.view.demands_of(pod)?, node)) {
        return Err(NodeObstacle::Barred(unfit));
    }
    let lack = || pods.iter().find_map(|pod| listing.lack(pod, node)).map(NodeObstacle::Lacks);
    short.or_else(lack).map_or(Ok(any_held), Err)
}

/// What requests before it have been given of each device.
type Used = BTreeMap<DeviceName, Vec<BTreeMap<String, u64>>>;

/// Takes what the choice needs of a node's devices, those first that nobody keeps. True: one of them is kept for shares.
fn of_choice(
    core: &Core,
    listing: &Listing,
    node: &NodeName,
    devices: &BTreeMap<DeviceName, ListedDevice>,
    one: &ExaminedChoice<'_>,
    used: &mut Used,
) -> Result<bool, NodeObstacle> {
    let (mut free, mut held, mut misses) = (Vec::new(), Vec::new(), BTreeMap::<Miss, Vec<DeviceName>>::new());
    for (name, device) in devices {
        let gpu = GpuRef::new(node, name);
        let before = used.get(name).map_or(&[][..], Vec::as_slice);
        match look(core, listing, &gpu, device, one, before) {
            DeviceFit::Other => {}
            DeviceFit::Fits { held: false } => free.push(name.clone()),
            DeviceFit::Fits { held: true } => held.push(name.clone()),
            DeviceFit::Missed(miss) => misses.entry(miss).or_default().push(name.clone()),
        }
    }
    let unselected = |miss: &Miss| matches!(miss, Miss::NotSelected(_));
    let chosen = misses.iter().filter(|(miss, _)| !unselected(miss)).map(|(_, all)| all.len()).sum::<usize>();
    let there = free.len() + held.len() + chosen;
    if there == 0 && misses.is_empty() {
        return Err(NodeObstacle::NoDevices);
    }
    let needed = one.choice.count.unwrap_or(there).max(1);
    let fit: Vec<DeviceName> = free.iter().chain(&held).cloned().collect();
    if fit.len() < needed {
        return Err(NodeObstacle::Gpus(TooFewGpus::new(needed, fit, misses)));
    }
    let taken = &fit[..needed];
    for name in taken {
        let asked = devices.get(name).map(|device| needs(device, one.choice)).unwrap_or_default();
        used.entry(name.clone()).or_default().push(asked);
    }
    Ok(needed > free.len())
}

/// What the choice takes of each capacity of a device.
fn needs(device: &ListedDevice, choice: &DeviceChoice) -> BTreeMap<String, u64> {
    let all = device.capacity.iter();
    all.map(|(name, one)| (name.clone(), choice.capacity.get(name).copied().unwrap_or(one.default))).collect()
}

fn look(
    core: &Core,
    listing: &Listing,
    gpu: &GpuRef,
    device: &ListedDevice,
    one: &ExaminedChoice<'_>,
    before: &[BTreeMap<String, u64>],
) -> DeviceFit {
    match one.chosen.seen(gpu) {
        DeviceMatch::Chosen => {}
        DeviceMatch::Other => return DeviceFit::Other,
        DeviceMatch::NotSelected => return DeviceFit::Missed(Miss::NotSelected(one.chosen.words())),
        DeviceMatch::Failed(words) => return DeviceFit::Missed(Miss::Failed(words.clone())),
    }
    if let Some(taint) = untolerated(&device.taints, &one.choice.tolerations) {
        return DeviceFit::Missed(Miss::Tainted(taint.to_string()));
    }
    let is_idle = core.holds.is_ours(gpu) && !core.capacity.is_granted(gpu);
    let given: Vec<&HeldDevicePart> =
        listing.given(gpu).iter().filter(|given| !(given.is_hold && is_idle)).collect();
    if is_idle && given.is_empty() && before.is_empty() {
        return DeviceFit::Fits { held: true };
    }
    match taken(core, listing, gpu, device, one.choice, &given, before) {
        Some(miss) => DeviceFit::Missed(miss),
        None => DeviceFit::Fits { held: false },
    }
}

/// Why what is left of a device is not enough.
fn taken(
    core: &Core,
    listing: &Listing,
    gpu: &GpuRef,
    device: &ListedDevice,
    choice: &DeviceChoice,
    given: &[&HeldDevicePart],
    before: &[BTreeMap<String, u64>],
) -> Option<Miss> {
    if let Some(words) = whole(core, listing, gpu) {
        return Some(Miss::Closed(words));
    }
    if given.iter().any(|one| one.consumed.is_none()) {
        return Some(shared(given));
    }
    if !device.multiple {
        let own =
            (!before.is_empty()).then(|| Miss::Closed("another request of the claim has it".to_owned()));
        return if given.is_empty() { own } else { Some(shared(given)) };
    }
    let parts = given.iter().filter_map(|one| one.consumed.as_ref()).chain(before);
    let of = |name: &str| {
        parts.clone().filter_map(|part| part.get(name)).fold(0_u64, |sum, one| sum.saturating_add(*one))
    };
    for (name, needed) in needs(device, choice) {
        let all = device.capacity.get(&name).map_or(0, |one| one.value);
        let left = all.saturating_sub(of(&name));
        if needed <= left {
            continue;
        }
        let asks = choice.capacity.contains_key(&name);
        return Some(match name.as_str() {
            MEMORY if asks => {
                Miss::Memory { needed: Bytes(needed).mib_ceil(), free: Bytes(left).mib_floor() }
            }
            _ if asks => Miss::Capacity { needed, free: left, name },
            _ => shared(given),
        });
    }
    None
}

/// Others have parts of the device.
fn shared(given: &[&HeldDevicePart]) -> Miss {
    let holders = given.iter().filter(|one| !one.is_hold);
    let names: Vec<String> = holders.map(|one| format!("{}/{}", one.namespace, one.claim)).collect();
    Miss::Closed(match names.as_slice() {
        [] if given.is_empty() => "another request of the claim has it".to_owned(),
        [] => "is kept for shares".to_owned(),
        [one] => format!("has a share of claim {one}"),
        names => format!("has shares of claims {}", list(names)),
    })
}

/// The nearest node, if there is one that takes the pods.
fn busy(sought: &[ExaminedRequest<'_>], rows: &[(NodeName, NodeObstacle)]) -> String {
    let begin = match sought {
        [(one, _)] => format!("request {}: ", one.request),
        _ => String::new(),
    };
    let with: Vec<&(NodeName, NodeObstacle)> =
        rows.iter().filter(|(_, verdict)| !matches!(verdict, NodeObstacle::NoDevices)).collect();
    let lacks: Vec<_> = with.iter().filter_map(|(node, verdict)| Some((node, verdict.lack()?))).collect();
    if let Some(words) = super::nodes::lacking(&lacks) {
        return words;
    }
    let open = with.iter().filter(|(_, verdict)| matches!(verdict, NodeObstacle::Gpus(_)));
    let nearest = open.max_by_key(|(_, verdict)| verdict.fits());
    match (nearest, with.first()) {
        (Some((node, verdict)), _) => {
            format!("{begin}no node has what it wants free; nearest is node {node}: {verdict}")
        }
        (None, Some((node, verdict))) => format!(
            "{begin}of {} with such devices none takes the pod; node {node} {verdict}",
            if with.len() == 1 { "1 node".to_owned() } else { format!("{} nodes", with.len()) }
        ),
        (None, None) => format!("{begin}no node with such devices is there"),
    }
}
