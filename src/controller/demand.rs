//! Pods that kube-scheduler found no place for, and the devices that they ask it for (whole GPUs, maybe). Filled and
//! read by `steps::holding`.

use std::collections::BTreeMap;

use crate::controller::view::Need;
use crate::model::names::PodUid;

/// One need of a pod, by number.
pub type NeedAt = (PodUid, usize);

#[derive(Debug, Default)]
pub struct Demand {
    needs: BTreeMap<PodUid, Vec<Need>>,
}

impl Demand {
    /// What the pod waits for now.
    pub fn set(&mut self, pod: &PodUid, needs: Vec<Need>) {
        match needs.is_empty() {
            true => drop(self.needs.remove(pod)),
            false => drop(self.needs.insert(pod.clone(), needs)),
        }
    }

    pub fn forget(&mut self, pod: &PodUid) {
        self.needs.remove(pod);
    }

    pub fn contains(&self, pod: &PodUid) -> bool {
        self.needs.contains_key(pod)
    }

    pub fn is_empty(&self) -> bool {
        self.needs.is_empty()
    }

    /// What a pod needs.
    pub fn of(&self, pod: &PodUid) -> &[Need] {
        self.needs.get(pod).map(Vec::as_slice).unwrap_or_default()
    }

    /// Pods in order, with what they need.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &[Need])> {
        self.needs.iter().map(|(pod, needs)| (pod, needs.as_slice()))
    }
}
