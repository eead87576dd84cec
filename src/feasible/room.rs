//! What a pod asks of its node, what a node has, and what is left of it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::{Node, Unfit};
use crate::model::quantity::{Bytes, Quantity};

/// Requested, there, or left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    pub memory: Bytes,
    pub pods: u64,
}

type Quantities = BTreeMap<String, ApiQuantity>;

impl Resources {
    /// Rounded up, as kube-scheduler does. What cannot be read counts as nothing: the API server has read it.
    pub(super) fn of(list: Option<&Quantities>) -> Self {
        let quantity = |name: &str| list?.get(name)?.0.parse::<Quantity>().ok();
        Self {
            cpu_milli: quantity("cpu").and_then(Quantity::millis_ceil).unwrap_or(0),
            memory: Bytes(quantity("memory").and_then(Quantity::units_ceil).unwrap_or(0)),
            pods: quantity("pods").and_then(Quantity::units_ceil).unwrap_or(0),
        }
    }

    pub fn plus(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory: Bytes(self.memory.0.saturating_add(other.memory.0)),
            pods: self.pods.saturating_add(other.pods),
        }
    }

    /// Nothing where more is taken than there is.
    pub fn minus(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_sub(other.cpu_milli),
            memory: Bytes(self.memory.0.saturating_sub(other.memory.0)),
            pods: self.pods.saturating_sub(other.pods),
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.max(other.cpu_milli),
            memory: self.memory.max(other.memory),
            pods: self.pods.max(other.pods),
        }
    }
}

/// What a pod asks that waits for a node.
pub fn requests(pod: &PodSpec) -> Resources {
    total(pod, &|_, container| Resources::of(requested(container.resources.as_ref())))
}

/// What a pod takes of its node: as asked, or more where a resize is not yet done; nothing once it has ended.
pub fn taken(pod: &Pod) -> Resources {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    let Some(spec) = pod.spec.as_ref().filter(|_| !matches!(phase, Some("Succeeded" | "Failed"))) else {
        return Resources::default();
    };
    let running = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    let init = status.and_then(|status| status.init_container_statuses.as_deref()).unwrap_or_default();
    total(spec, &|kind, container| {
        let statuses = if kind == ContainerKind::Main { running } else { init };
        let status = statuses.iter().find(|status| status.name == container.name);
        let asked = Resources::of(requested(container.resources.as_ref()));
        // A plain init container cannot be resized.
        status.filter(|_| kind != ContainerKind::Init).map_or(asked, |status| asked.max(in_force(status)))
    })
}

fn in_force(status: &ContainerStatus) -> Resources {
    Resources::of(status.allocated_resources.as_ref())
        .max(Resources::of(requested(status.resources.as_ref())))
}

fn requested(resources: Option<&ResourceRequirements>) -> Option<&Quantities> {
    resources?.requests.as_ref()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ContainerKind {
    Main,
    Sidecar,
    Init,
}

/// Containers and sidecars run at once. Init containers run one after another, each beside the sidecars that were
/// started before it: the most of all these moments counts. Requests of the pod itself stand for those of its
/// containers; overhead comes on top.
fn total(pod: &PodSpec, of: &dyn Fn(ContainerKind, &Container) -> Resources) -> Resources {
    let mut sum =
        pod.containers.iter().fold(Resources::default(), |sum, one| sum.plus(of(ContainerKind::Main, one)));
    let (mut sidecars, mut peak) = (Resources::default(), Resources::default());
    for container in pod.init_containers.iter().flatten() {
        if container.restart_policy.as_deref() == Some("Always") {
            let room = of(ContainerKind::Sidecar, container);
            sum = sum.plus(room);
            sidecars = sidecars.plus(room);
            peak = peak.max(sidecars);
        } else {
            peak = peak.max(sidecars.plus(of(ContainerKind::Init, container)));
        }
    }
    let mut room = sum.max(peak);
    if let Some(list) = requested(pod.resources.as_ref()) {
        let whole = Resources::of(Some(list));
        room.cpu_milli = if list.contains_key("cpu") { whole.cpu_milli } else { room.cpu_milli };
        room.memory = if list.contains_key("memory") { whole.memory } else { room.memory };
    }
    Resources { pods: 1, ..room.plus(Resources::of(pod.overhead.as_ref())) }
}

/// What a pod asks of each resource, in thousandths, by the list that is meant of each container: sums of containers and
/// sidecars, or what an init container asks if that is more. What cannot be read counts as nothing.
pub fn all_requests<'a>(
    pod: &'a PodSpec,
    list: &dyn Fn(&'a ResourceRequirements) -> Option<&'a Quantities>,
) -> BTreeMap<String, u64> {
    let of = |container: &'a Container| {
        let resources = container.resources.as_ref().and_then(list).into_iter().flatten();
        resources.filter_map(|(name, one)| Some((name, one.0.parse::<Quantity>().ok()?.millis_ceil()?)))
    };
    let is_sidecar = |one: &&Container| one.restart_policy.as_deref() == Some("Always");
    let init = || pod.init_containers.iter().flatten();
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    for (name, milli) in pod.containers.iter().chain(init().filter(is_sidecar)).flat_map(of) {
        let sum = all.entry(name.clone()).or_default();
        *sum = sum.saturating_add(milli);
    }
    for (name, milli) in init().filter(|one| !is_sidecar(one)).flat_map(of) {
        let most = all.entry(name.clone()).or_default();
        *most = milli.max(*most);
    }
    all.retain(|_, milli| *milli > 0);
    all
}

/// What a pod asks of resources other than CPU, memory and its place among the pods, in units rounded up: extended
/// resources, huge pages, storage. kube-scheduler counts what other pods take of them; here a node has them or not.
pub fn other_requests(pod: &PodSpec) -> BTreeMap<String, u64> {
    let all = all_requests(pod, &|one| one.requests.as_ref());
    let others = all.into_iter().filter(|(name, _)| is_other(name));
    others.map(|(name, milli)| (name, milli.div_ceil(1000))).collect()
}

/// How much a list has of resources other than CPU, memory and number of pods, in units. What cannot be read counts as
/// nothing.
pub(super) fn units_of_others(list: Option<&Quantities>) -> impl Iterator<Item = (&str, u64)> {
    list.into_iter()
        .flatten()
        .filter(|(name, _)| is_other(name))
        .filter_map(|(name, one)| Some((name.as_str(), one.0.parse::<Quantity>().ok()?.units_ceil()?)))
}

fn is_other(resource: &str) -> bool {
    !["cpu", "memory", "pods"].contains(&resource)
}

/// What is left of a node beside the pods that are bound to it.
pub fn left<'a>(node: &Node, pods: impl IntoIterator<Item = &'a Pod>) -> Resources {
    let used = pods.into_iter().fold(Resources::default(), |sum, pod| sum.plus(taken(pod)));
    node.allocatable().minus(used)
}

/// What is short for a pod that asks so much; none: it fits. Who asks for none of a thing is not refused for the
/// lack of it.
pub fn short_of(asked: Resources, left: Resources) -> Option<Unfit> {
    if asked.pods > left.pods {
        return Some(Unfit::Pods);
    }
    if asked.cpu_milli > left.cpu_milli {
        return Some(Unfit::Cpu { needed: asked.cpu_milli, left: left.cpu_milli });
    }
    (asked.memory > left.memory).then_some(Unfit::Memory { needed: asked.memory, left: left.memory })
}
