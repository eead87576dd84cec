//! What KAI's scheduler has decided and KAI's binder has not written yet: GPUs that no claim names, and that are somebody's
//! all the same.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::bind_requests::BindRequest;
use crate::cluster::feed::WatchEvent;
use crate::controller::view::{ClusterView, GpuRef, Kind, News, Pod, groups};
use crate::model::names::{DRIVER, DeviceName, PoolName};

/// GPUs of one request that are kept. A claim has at most 32 devices, and a pod few claims.
const GPUS_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct BindRequests {
    /// Those that are not done, by namespace and name as one text.
    open: BTreeMap<String, Requested>,
}

/// For one pod.
#[derive(Debug)]
struct Requested {
    /// Namespace and name.
    pod: (String, String),
    gpus: BTreeSet<GpuRef>,
}

impl BindRequests {
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.open.keys()
    }
}

impl ClusterView {
    pub(super) fn follow_bind_requests(&mut self, seen: WatchEvent<BindRequest>) -> Vec<News> {
        let set = |view: &mut Self, object: BindRequest| view.set_bind_request(&object);
        let drop = |view: &mut Self, key: &str| {
            view.optional.bind_requests.open.remove(key);
            Vec::new()
        };
        self.follow(Kind::BindRequests, seen, set, drop)
    }

    fn set_bind_request(&mut self, object: &BindRequest) -> Vec<News> {
        let key = groups::key_of(&object.metadata);
        let gpus = gpus(object);
        if object.is_done() || gpus.is_empty() {
            self.optional.bind_requests.open.remove(&key);
            return Vec::new();
        }
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let pod = (namespace, object.spec.pod_name.clone().unwrap_or_default());
        self.optional.bind_requests.open.insert(key, Requested { pod, gpus });
        Vec::new()
    }

    /// KAI has decided where this pod goes, and waits for that to be written.
    pub fn is_being_bound(&self, pod: &Pod) -> bool {
        let at = (&pod.at.namespace, &pod.at.name);
        self.optional.bind_requests.open.values().any(|one| (&one.pod.0, &one.pod.1) == at)
    }

    /// GPUs that KAI has decided to give to pods that wait for them to be written. Of a pod that is bound, all is
    /// written; of one whose claim has an allocation already, the claim tells.
    pub fn named_by_bind_requests(&self) -> BTreeSet<GpuRef> {
        if self.optional.bind_requests.open.is_empty() {
            return BTreeSet::new();
        }
        let waits = |pod: &&Pod| pod.node.is_none() && !pod.ending;
        let pods = self.pods.iter().filter(waits);
        let pods: BTreeMap<(&str, &str), &Pod> =
            pods.map(|pod| ((pod.at.namespace.as_str(), pod.at.name.as_str()), pod)).collect();
        let mut named = BTreeSet::new();
        for requested in self.optional.bind_requests.open.values() {
            let (namespace, name) = &requested.pod;
            let Some(pod) = pods.get(&(namespace.as_str(), name.as_str())) else { continue };
            let claims = pod.requested.claims.iter().filter_map(|claim| self.claim_named(namespace, claim));
            let uses = claims.filter_map(|claim| claim.allocation.as_ref()).flat_map(|one| &one.uses);
            let told: BTreeSet<&GpuRef> = uses.map(|(gpu, _)| gpu).collect();
            named.extend(requested.gpus.iter().filter(|gpu| !told.contains(gpu)).cloned());
        }
        named
    }
}

/// Of our driver, save those that are only looked at.
fn gpus(object: &BindRequest) -> BTreeSet<GpuRef> {
    let claims = object.spec.resource_claim_allocations.iter().flatten();
    let devices = claims.filter_map(|claim| claim.allocation.as_ref()?.devices.as_ref());
    let results = devices.flat_map(|devices| devices.results.iter().flatten());
    let ours = results.filter(|result| result.driver == DRIVER && result.admin_access != Some(true));
    let gpu = |pool: &str, device: &str| GpuRef::new(PoolName::new(pool).node(), &DeviceName::new(device));
    ours.map(|result| gpu(&result.pool, &result.device)).take(GPUS_MAX).collect()
}
