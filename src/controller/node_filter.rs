//! Which nodes pods are kept off, whatever is free there. Pods of one template demand the same, and nodes change
//! seldom: what was found is kept until the node changes, so that a thousand pods cost as much as one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::feasible::Demands;
use crate::model::names::NodeName;

/// Demands that are remembered. With more it begins anew.
const DEMANDS_MAX: usize = 64;

#[derive(Debug, Default)]
pub struct NodeFilterCache {
    nodes: BTreeMap<Arc<Demands>, Arc<BTreeSet<NodeName>>>,
}

impl NodeFilterCache {
    /// Of all nodes those that do not meet the demands; `is_barred` is asked of each only the first time.
    pub fn by<'a>(
        &mut self,
        demands: &Arc<Demands>,
        all: impl Iterator<Item = &'a NodeName>,
        is_barred: impl Fn(&NodeName) -> bool,
    ) -> Arc<BTreeSet<NodeName>> {
        if let Some(known) = self.nodes.get(demands) {
            return known.clone();
        }
        if self.nodes.len() >= DEMANDS_MAX {
            self.nodes.clear();
        }
        let found = Arc::new(all.filter(|name| is_barred(name)).cloned().collect());
        self.nodes.insert(demands.clone(), Arc::clone(&found));
        found
    }

    pub fn knows(&self, demands: &Arc<Demands>) -> bool {
        self.nodes.contains_key(demands)
    }

    /// What keeps pods off nodes is another now, whichever node.
    pub fn forget(&mut self) {
        self.nodes.clear();
    }

    /// A node has come, gone or changed.
    pub fn judge(&mut self, name: &NodeName, is_barred: impl Fn(&Demands) -> bool) {
        for (demands, nodes) in &mut self.nodes {
            match is_barred(demands) {
                false if !nodes.contains(name) => {}
                true if nodes.contains(name) => {}
                true => drop(Arc::make_mut(nodes).insert(name.clone())),
                false => drop(Arc::make_mut(nodes).remove(name)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use k8s_openapi::api::core::v1::PodSpec;

    use super::*;

    fn demands(node: usize) -> Arc<Demands> {
        let spec = PodSpec { node_name: Some(format!("n{node}")), ..PodSpec::default() };
        Arc::new(Demands::of(&spec))
    }

    #[test]
    fn pods_that_demand_the_same_are_judged_once_and_a_node_again_when_it_changes() {
        let (a, b) = (NodeName::new("a"), NodeName::new("b"));
        let asked = Cell::new(0);
        let mut kept_off = NodeFilterCache::default();
        let off = |kept_off: &mut NodeFilterCache, of: usize| {
            let is_barred = |name: &NodeName| {
                asked.set(asked.get() + 1);
                *name == a
            };
            kept_off.by(&demands(of), [&a, &b].into_iter(), is_barred)
        };
        for _ in 0..3 {
            assert_eq!(*off(&mut kept_off, 0), BTreeSet::from([a.clone()]));
        }
        assert_eq!(asked.get(), 2);
        kept_off.judge(&b, |_| true);
        kept_off.judge(&a, |_| false);
        assert_eq!(*off(&mut kept_off, 0), BTreeSet::from([b.clone()]));
        assert_eq!(asked.get(), 2);
        for of in 1..=DEMANDS_MAX {
            assert_eq!(*off(&mut kept_off, of), BTreeSet::from([a.clone()]));
        }
        assert!(kept_off.nodes.len() <= DEMANDS_MAX);
    }
}
