//! May a pod run on a node, and is there room? As kube-scheduler's filters say it, so that a GPU is never granted
//! on a node that the scheduler would refuse.
//!
//! * [`why_not`]: cordon, the node's name, Ready, taints, node selector, node affinity, the node affinity of bound volumes,
//!   against a pod's [`Demands`]
//! * [`lacking`]: resources other than CPU and memory of which a node has fewer in all than the pod asks for
//! * [`Node`]: what is looked at of a node
//! * [`requests`], [`taken`], [`left`], [`short_of`]: CPU, memory and number of pods
//! * [`HostPort`]: ports of its node that a pod takes
//! * [`Terms`], [`Judged`]: what a pod requires of other pods, and which nodes these keep it off
//! * [`other_requests`], [`Node::allocatable_of`]: the other resources, in all; [`all_requests`]: what a quota counts
//!
//! The order is that of kube-scheduler's plugins NodeUnschedulable, NodeName, TaintToleration (a node that is not Ready has
//! a taint), NodeAffinity, VolumeBinding, NodePorts, NodeResourcesFit; the first reason is told. Not looked at: how much of the other
//! resources is left beside other pods, volumes that are not bound yet and how many a node may have, what is only preferred.
//! The scheduler looks at these, and clears the allocation if one of them fails.
//!
//! May import: model. May name: k8s-openapi (as data only), thiserror.

mod affinity;
mod demands;
mod neighbours;
#[cfg(test)]
mod neighbours_tests;
mod node;
mod ports;
mod room;
mod taint;
#[cfg(test)]
mod tests;
mod volume;

use thiserror::Error;

pub use demands::Demands;
pub use neighbours::{Count, Judged, Namespaces, PodLabels, Spread, Term, Terms, TooLarge, Whom};
pub use node::Node;
pub use ports::{HostPort, Protocol};
pub use room::{Resources, all_requests, left, other_requests, requests, short_of, taken};
pub use volume::{Reach, TooLong, Volume};

use crate::model::quantity::Bytes;

/// Why a pod cannot run on a node. The words stand behind the node's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unfit {
    /// Of no node more than of another: what the pod asks for was not kept.
    #[error("cannot be matched: nodeSelector, required node affinity, tolerations and names of resources of the pod have {0} bytes (64 more for each entry), and {max} are read at most; write fewer", max = demands::BYTES_MAX)]
    TooLarge(usize),
    #[error("is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it")]
    Cordoned,
    #[error("is not the node {0} that the pod names")]
    OtherNode(String),
    #[error("is not ready: {0}")]
    NotReady(String),
    #[error("has the taint {key}{}:{effect}, which the pod does not tolerate", equals(.value))]
    Taint { key: String, value: String, effect: String },
    #[error("has the label {key}={found} where the pod's nodeSelector wants {wanted}")]
    Selector { key: String, wanted: String, found: String },
    #[error("lacks the label {key}={wanted} of the pod's nodeSelector")]
    SelectorLabel { key: String, wanted: String },
    /// The requirement that failed in the last term, and how many terms there are.
    #[error("matches none of the {terms} terms of the pod's required node affinity; of the last, {failed}")]
    Affinity { terms: usize, failed: String },
    /// By the node affinity of the PersistentVolume that a PersistentVolumeClaim of the pod is bound to.
    #[error("cannot reach the volume of the PersistentVolumeClaim {claim}: {failed}")]
    Volume { claim: String, failed: String },
    #[error("has host port {port}/{protocol} in use by another pod")]
    Port { port: u16, protocol: &'static str },
    /// By the pod's required anti-affinity to other pods.
    #[error("is in {key}={value}, where {} the pod's required anti-affinity", match_it(*.pods))]
    Avoids { key: String, value: String, pods: u32 },
    /// By that of other pods.
    #[error("is in {key}={value}, where {} required anti-affinity to the pod", have(*.pods))]
    AvoidedBy { key: String, value: String, pods: u32 },
    #[error("lacks the label {0} of the pod's required affinity to other pods")]
    NearLabel(String),
    #[error("is in {key}={value}, where no pod runs that matches the pod's required affinity")]
    Near { key: String, value: String },
    #[error("lacks the label {0} of the pod's topologySpreadConstraints")]
    SpreadLabel(String),
    #[error(
        "is in {key}={value}, which has {pods} of the pods that topologySpreadConstraints count; where fewest are bound are {least}, and maxSkew is {max_skew}"
    )]
    Spread { key: String, value: String, pods: u32, least: u32, max_skew: i64 },
    #[error("has {left}m of CPU left, {needed}m are needed")]
    Cpu { needed: u64, left: u64 },
    #[error("has {} of memory left, {} are needed", mib(*.left), mib(*.needed))]
    Memory { needed: Bytes, left: Bytes },
    #[error("is at its pod limit")]
    Pods,
    /// Whatever pods have taken of it.
    #[error("has {all} of {resource}, {needed} are needed")]
    Resource { resource: String, needed: u64, all: u64 },
}

/// For people: whole MiB, except where that would hide the difference between little and nothing.
fn mib(bytes: Bytes) -> String {
    if bytes.0 < 10 * crate::model::quantity::MIB {
        format!("{} bytes", bytes.0)
    } else {
        format!("{} MiB", bytes.mib_floor())
    }
}

fn match_it(pods: u32) -> String {
    if pods == 1 { "1 pod matches".to_owned() } else { format!("{pods} pods match") }
}

fn have(pods: u32) -> String {
    if pods == 1 { "1 pod has".to_owned() } else { format!("{pods} pods have") }
}

fn equals(value: &str) -> String {
    if value.is_empty() { String::new() } else { format!("={value}") }
}

/// The first reason that keeps the pod off the node; none: it may run there, if there is room ([`short_of`]).
pub fn why_not(pod: &Demands, node: &Node) -> Option<Unfit> {
    let named = pod.node_name().filter(|wanted| *wanted != node.name().as_str());
    let too_large = pod.too_large().map(Unfit::TooLarge);
    too_large
        .or_else(|| taint::cordoned(pod, node))
        .or_else(|| named.map(|wanted| Unfit::OtherNode(wanted.to_owned())))
        .or_else(|| taint::not_ready(pod, node))
        .or_else(|| taint::untolerated(pod, node))
        .or_else(|| affinity::unmatched(pod, node))
        .or_else(|| affinity::unreached(pod, node))
}

/// The first resource, other than CPU and memory, of which the node has less in all than the pod asks for. `by_claim`:
/// devices of the resource are given by claims (KEP-5004), whatever the node says that it has.
pub fn lacking(pod: &Demands, node: &Node, by_claim: impl Fn(&str) -> bool) -> Option<Unfit> {
    pod.others().iter().find_map(|(resource, needed)| {
        let all = node.allocatable_of(resource);
        let lacks = all < *needed && !by_claim(resource);
        lacks.then(|| Unfit::Resource { resource: resource.clone(), needed: *needed, all })
    })
}
