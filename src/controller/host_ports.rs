//! Which ports of nodes pods have taken, or will take where their claims are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::feasible::{HostPort, Protocol};
use crate::model::names::{NodeName, PodUid};

/// Those of a pod.
pub type Ports = Arc<[HostPort]>;

#[derive(Debug, Default)]
pub struct HostPorts {
    of_pods: BTreeMap<PodUid, (NodeName, Ports)>,
    /// Who has a port, whatever the address.
    takers: BTreeMap<(Protocol, u16), BTreeMap<NodeName, BTreeSet<PodUid>>>,
}

impl HostPorts {
    /// The pod has these ports of this node now, in place of any that it had.
    pub fn set(&mut self, pod: &PodUid, place: Option<(&NodeName, &Ports)>) {
        let place = place.filter(|(_, ports)| !ports.is_empty());
        let known = self.of_pods.get(pod).map(|(node, ports)| (node, ports));
        if known == place {
            return;
        }
        if let Some((node, ports)) = self.of_pods.remove(pod) {
            ports.iter().for_each(|port| self.give(&node, port, pod));
        }
        if let Some((node, ports)) = place {
            for port in ports.iter() {
                let on_nodes = self.takers.entry((port.protocol, port.port)).or_default();
                on_nodes.entry(node.clone()).or_default().insert(pod.clone());
            }
            self.of_pods.insert(pod.clone(), (node.clone(), ports.clone()));
        }
    }

    fn give(&mut self, node: &NodeName, port: &HostPort, pod: &PodUid) {
        let at = (port.protocol, port.port);
        let Some(on_nodes) = self.takers.get_mut(&at) else { return };
        if let Some(pods) = on_nodes.get_mut(node) {
            pods.remove(pod);
            if pods.is_empty() {
                on_nodes.remove(node);
            }
        }
        if on_nodes.is_empty() {
            self.takers.remove(&at);
        }
    }

    /// The nodes on which others than the pod have one of these ports, and how many were looked at.
    pub fn nodes_without(&self, ports: &[HostPort], pod: &PodUid) -> (BTreeSet<NodeName>, u64) {
        let (mut nodes, mut looked) = (BTreeSet::new(), 0);
        for port in ports {
            for (node, pods) in self.takers.get(&(port.protocol, port.port)).into_iter().flatten() {
                looked += 1;
                if !nodes.contains(node) && self.is_taken(port, pods, pod) {
                    nodes.insert(node.clone());
                }
            }
        }
        (nodes, looked)
    }

    /// The first of these ports that others than the pod have on the node.
    pub fn taken<'a>(&self, node: &NodeName, ports: &'a [HostPort], pod: &PodUid) -> Option<&'a HostPort> {
        ports.iter().find(|port| {
            let on_nodes = self.takers.get(&(port.protocol, port.port));
            on_nodes.and_then(|nodes| nodes.get(node)).is_some_and(|pods| self.is_taken(port, pods, pod))
        })
    }

    fn is_taken(&self, port: &HostPort, by: &BTreeSet<PodUid>, but: &PodUid) -> bool {
        by.iter().filter(|pod| *pod != but).any(|pod| {
            let theirs = self.of_pods.get(pod);
            theirs.is_some_and(|(_, ports)| ports.iter().any(|one| one.conflicts(port)))
        })
    }
}
