//! The map of GPUs as it is, and as it would be once the moves are made: the nodes in question alone.

use std::collections::BTreeSet;

use super::super::top::map::{ClaimShare, DeviceRow, HeldAmount, Map, NodeMap};
use crate::allocate::Placement;
use crate::controller::explain::rebalance::{Help, HelpedUnit};

/// Nodes that pods would leave or come to, before and after.
pub fn maps(all: &Map, waits: &[HelpedUnit]) -> (Map, Map) {
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for found in waits.iter().filter_map(proposed) {
        names.insert(found.node.as_str());
        names.extend(found.moves.iter().map(|one| one.to.node.as_str()));
        names.extend(found.then.iter().map(|(_, place)| place.node.as_str()));
    }
    let mut before = all.clone();
    before.nodes.retain(|node| names.contains(node.name.as_str()));
    let mut after = before.clone();
    for one in waits {
        let Some(found) = proposed(one) else { continue };
        for moved in &found.moves {
            let name = &moved.pod.name;
            let is_its =
                |holder: &ClaimShare| holder.namespace == moved.pod.namespace && holder.pods.contains(name);
            for row in after.nodes.iter_mut().flat_map(|node| &mut node.devices) {
                row.claims.retain(|holder| !is_its(holder));
            }
            put(&mut after, &moved.pod.namespace, name, &moved.to);
        }
        for (pod, (_, place)) in one.pods.iter().zip(&found.then) {
            put(&mut after, &pod.namespace, &pod.name, place);
        }
    }
    after.nodes.iter_mut().for_each(NodeMap::close);
    (before, after)
}

fn proposed(one: &HelpedUnit) -> Option<&crate::controller::moves::Proposed> {
    match &one.help {
        Help::Moves(found) => Some(found),
        Help::Fits | Help::None(_) | Help::Spent(_) | Help::Later => None,
    }
}

/// A pod that is made anew has another name, and so have its claims: the name that is known stands for both.
fn put(map: &mut Map, namespace: &str, pod: &str, place: &Placement) {
    let Some(node) = map.nodes.iter_mut().find(|node| node.name == place.node.as_str()) else { return };
    for grant in &place.gpus {
        let Some(row) = node.devices.iter_mut().find(|row| row.device == grant.device.as_str()) else {
            continue;
        };
        let DeviceRow { claims, held, .. } = row;
        *held = true;
        claims.push(ClaimShare {
            namespace: namespace.to_owned(),
            claim: pod.to_owned(),
            pods: vec![pod.to_owned()],
            part: HeldAmount::Share {
                memory_mib: grant.memory.mib_ceil(),
                compute: grant.compute.map(|percent| percent.get().into()),
            },
            used: None,
        });
    }
}
