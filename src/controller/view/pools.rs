//! The GPUs of each node's pool: what the slices of our driver and the taint rules come to.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};

use crate::controller::view::PublishedGpu;
use crate::controller::view::node::{self, Slice, TaintRule};
use crate::controller::view::unshared::{SelectorLists, Unshared, UnsharedDevices};
use crate::model::names::{DeviceName, NodeName};
use crate::select::DeviceFacts;

#[derive(Debug, Default)]
pub(super) struct Pools {
    /// Of a node few, in the order of their names.
    slices: BTreeMap<NodeName, Vec<(String, Slice)>>,
    /// Of each slice, by name.
    slice_nodes: BTreeMap<String, NodeName>,
    rules: BTreeMap<String, TaintRule>,
    /// The facts of the GPU that was read last: the next has most of them as well.
    like: Arc<DeviceFacts>,
    /// Devices of all slices that no shares can be placed on.
    unshared: UnsharedDevices,
}

impl Pools {
    /// Names of slices that are known.
    pub fn slices(&self) -> impl Iterator<Item = &String> {
        self.slice_nodes.keys()
    }

    /// Names of taint rules that are known.
    pub fn rules(&self) -> impl Iterator<Item = &String> {
        self.rules.keys()
    }

    /// Nodes with slices.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.slices.keys()
    }

    /// The GPUs of a node's pool, with the taints of rules.
    pub fn gpus(&self, node: &NodeName) -> BTreeMap<DeviceName, Arc<PublishedGpu>> {
        let slices = self.slices.get(node).into_iter().flatten().map(|(_, slice)| slice);
        node::pool(node, slices, &self.rules)
    }

    /// How many devices that no shares can be placed on these selectors choose, and what it cost to find out, in ticks.
    pub fn unshared(&mut self, lists: &SelectorLists) -> (Option<Unshared>, u64) {
        self.unshared.chosen(lists)
    }

    /// Returns the nodes whose pools may be others now.
    pub fn set_slice(&mut self, object: ResourceSlice) -> Vec<NodeName> {
        let name = object.metadata.name.clone().unwrap_or_default();
        let Some(mut fresh) = node::slice(object, &mut self.like) else {
            return self.drop_slice(&name).into_iter().collect();
        };
        let node = fresh.node.clone();
        let moved = self.slice_nodes.insert(name.clone(), node.clone()).filter(|old| *old != node);
        moved.iter().for_each(|old| self.forget_slice(old, &name));
        self.unshared.set(&name, mem::take(&mut fresh.unshared));
        let of_node = self.slices.entry(node.clone()).or_default();
        match of_node.binary_search_by(|(one, _)| one.cmp(&name)) {
            Ok(at) => of_node[at].1 = fresh,
            Err(at) => {
                of_node.reserve_exact(1);
                of_node.insert(at, (name, fresh));
            }
        }
        moved.into_iter().chain([node]).collect()
    }

    /// Returns the node whose pool may be another now.
    pub fn drop_slice(&mut self, name: &str) -> Option<NodeName> {
        let node = self.slice_nodes.remove(name)?;
        self.unshared.set(name, Vec::new());
        self.forget_slice(&node, name);
        Some(node)
    }

    fn forget_slice(&mut self, node: &NodeName, name: &str) {
        if let Some(of_node) = self.slices.get_mut(node) {
            of_node.retain(|(one, _)| one != name);
            if of_node.is_empty() {
                self.slices.remove(node);
            }
        }
    }

    /// True if pools may be others now.
    pub fn set_rule(&mut self, object: DeviceTaintRule) -> bool {
        let name = object.metadata.name.clone().unwrap_or_default();
        let rule = TaintRule::of(object);
        self.rules.insert(name, rule.clone()) != Some(rule)
    }

    /// True if pools may be others now.
    pub fn drop_rule(&mut self, name: &str) -> bool {
        self.rules.remove(name).is_some()
    }
}
