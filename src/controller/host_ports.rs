//! Which ports of nodes pods have taken, or will take where their claims are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::feasible::{HostPort, Protocol};
use crate::model::names::{NodeName, PodUid};

/// Those of a pod.
pub type Ports = Arc<[HostPort]>;

/// Who has a port of a node, by its address; none: all addresses.
type Takers = BTreeMap<Option<Box<str>>, BTreeSet<PodUid>>;

#[derive(Debug, Default)]
pub struct HostPorts {
    of_pods: BTreeMap<PodUid, (NodeName, Ports)>,
    takers: BTreeMap<(Protocol, u16), BTreeMap<NodeName, Takers>>,
    /// What was found last of pods that have no ports yet: those of one template take the same.
    last: Option<(Ports, Arc<BTreeSet<NodeName>>)>,
}

impl HostPorts {
    /// The pod has these ports of this node now, in place of any that it had.
    pub fn set(&mut self, pod: &PodUid, place: Option<(&NodeName, &Ports)>) {
        let place = place.filter(|(_, ports)| !ports.is_empty());
        let known = self.of_pods.get(pod).map(|(node, ports)| (node, ports));
        if known == place {
            return;
        }
        self.last = None;
        if let Some((node, ports)) = self.of_pods.remove(pod) {
            ports.iter().for_each(|port| self.give(&node, port, pod));
        }
        if let Some((node, ports)) = place {
            for port in ports.iter() {
                let on_nodes = self.takers.entry((port.protocol, port.port)).or_default();
                let takers = on_nodes.entry(node.clone()).or_default();
                takers.entry(port.address.clone()).or_default().insert(pod.clone());
            }
            self.of_pods.insert(pod.clone(), (node.clone(), ports.clone()));
        }
    }

    fn give(&mut self, node: &NodeName, port: &HostPort, pod: &PodUid) {
        let at = (port.protocol, port.port);
        let Some(on_nodes) = self.takers.get_mut(&at) else { return };
        let Some(takers) = on_nodes.get_mut(node) else { return };
        if let Some(pods) = takers.get_mut(&port.address) {
            pods.remove(pod);
            if pods.is_empty() {
                takers.remove(&port.address);
            }
        }
        if takers.is_empty() {
            on_nodes.remove(node);
        }
        if on_nodes.is_empty() {
            self.takers.remove(&at);
        }
    }

    /// The nodes on which others than the pod have one of these ports, and how many were looked at.
    pub fn nodes_without(&mut self, ports: &Ports, pod: &PodUid) -> (Arc<BTreeSet<NodeName>>, u64) {
        let has_none = !self.of_pods.contains_key(pod);
        if let Some((_, nodes)) = self.last.as_ref().filter(|(of, _)| has_none && of == ports) {
            return (Arc::clone(nodes), 1);
        }
        let (mut nodes, mut looked) = (BTreeSet::new(), 0);
        for port in ports.iter() {
            for (node, takers) in self.takers.get(&(port.protocol, port.port)).into_iter().flatten() {
                looked += 1;
                if !nodes.contains(node) && is_taken(port, takers, pod) {
                    nodes.insert(node.clone());
                }
            }
        }
        let nodes = Arc::new(nodes);
        if has_none {
            self.last = Some((ports.clone(), Arc::clone(&nodes)));
        }
        (nodes, looked)
    }

    /// The first of these ports that others than the pod have on the node.
    pub fn taken<'a>(&self, node: &NodeName, ports: &'a [HostPort], pod: &PodUid) -> Option<&'a HostPort> {
        ports.iter().find(|port| {
            let on_nodes = self.takers.get(&(port.protocol, port.port));
            on_nodes.and_then(|nodes| nodes.get(node)).is_some_and(|takers| is_taken(port, takers, pod))
        })
    }
}

fn is_taken(port: &HostPort, takers: &Takers, but: &PodUid) -> bool {
    let others = |pods: &BTreeSet<PodUid>| pods.len() > usize::from(pods.contains(but));
    match &port.address {
        None => takers.values().any(others),
        Some(_) => [&None, &port.address].into_iter().filter_map(|address| takers.get(address)).any(others),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(addresses: &[&str]) -> Ports {
        let of = |address: &&str| HostPort {
            protocol: Protocol::Tcp,
            port: 80,
            address: (!address.is_empty()).then(|| (*address).into()),
        };
        addresses.iter().map(of).collect()
    }

    #[test]
    fn a_port_is_taken_at_its_address_and_at_all_and_by_others_alone() {
        let (node, mut all) = (NodeName::new("n"), HostPorts::default());
        all.set(&"a".into(), Some((&node, &ports(&["10.0.0.1", "10.0.0.2"]))));
        let taken = |all: &HostPorts, address: &str, pod: &str| {
            all.taken(&node, &ports(&[address]), &pod.into()).is_some()
        };
        for (address, by_b, by_a) in
            [("10.0.0.1", true, false), ("10.0.0.3", false, false), ("", true, false)]
        {
            assert_eq!((taken(&all, address, "b"), taken(&all, address, "a")), (by_b, by_a), "{address:?}");
        }
        all.set(&"b".into(), Some((&node, &ports(&[""]))));
        assert!(taken(&all, "10.0.0.3", "c") && taken(&all, "10.0.0.1", "a") && taken(&all, "10.0.0.1", "b"));
        let wanted = ports(&["10.0.0.9"]);
        assert_eq!(*all.nodes_without(&wanted, &"c".into()).0, BTreeSet::from([node.clone()]));
        all.set(&"b".into(), None);
        assert!(all.nodes_without(&wanted, &"c".into()).0.is_empty(), "what was found before is forgotten");
        all.set(&"a".into(), None);
        assert!(all.takers.is_empty() && all.of_pods.is_empty());
    }
}
