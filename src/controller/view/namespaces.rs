//! What namespaces say: how much their shares may come to, and whether their administrator lets the controller make claims
//! for pods. The webhook's annotation counts in those alone that have opted in: anybody who may create a pod can write
//! it, and the controller's right to create claims is not theirs.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Namespace;

use crate::cluster::feed::WatchEvent;
use crate::controller::bounds::Bounds;
use crate::controller::view::{ClusterView, Kind, News, Pod, same_pod};
use crate::model::names::{MOVABLE, OPT_IN_LABEL, OPT_IN_VALUE, PodUid};

#[derive(Debug, Default)]
pub(super) struct Namespaces {
    pub opted_in: BTreeSet<String>,
    /// Pods of these may be moved.
    pub movable: BTreeSet<String>,
    pub bounds: BTreeMap<String, Bounds>,
    /// Pods with the annotation, by their namespaces.
    pub askers: BTreeMap<String, BTreeSet<PodUid>>,
}

impl Namespaces {
    pub fn asks(&mut self, pod: &Pod) {
        if pod.requested.share.is_some() {
            self.askers.entry(pod.at.namespace.clone()).or_default().insert(pod.at.uid.clone());
        }
    }

    pub fn asks_no_more(&mut self, pod: &Pod) {
        if let Some(pods) = self.askers.get_mut(&pod.at.namespace) {
            pods.remove(&pod.at.uid);
            if pods.is_empty() {
                self.askers.remove(&pod.at.namespace);
            }
        }
    }

    /// Pods of this namespace with the annotation.
    pub fn of(&self, namespace: &str) -> Vec<PodUid> {
        self.askers.get(namespace).into_iter().flatten().cloned().collect()
    }
}

impl ClusterView {
    pub(super) fn follow_namespaces(&mut self, seen: WatchEvent<Namespace>) -> Vec<News> {
        let known = self.lists.complete.contains(&Kind::Namespaces);
        let mut news = self.follow(Kind::Namespaces, seen, Self::set_namespace, Self::drop_namespace);
        // Only now is it known who has not opted in: their pods are to be told.
        if !known && self.lists.complete.contains(&Kind::Namespaces) {
            let pods: Vec<PodUid> = self.namespaces.askers.values().flatten().cloned().collect();
            news.extend(pods.into_iter().map(same_pod));
        }
        news
    }

    /// What the shares of a namespace may come to; none: it does not say.
    pub fn bounds(&self, namespace: &str) -> Option<&Bounds> {
        self.namespaces.bounds.get(namespace)
    }

    fn set_namespace(&mut self, object: Namespace) -> Vec<News> {
        let name = object.metadata.name.unwrap_or_default();
        let mut news = self.set_bounds(&name, Bounds::of(object.metadata.annotations.as_ref()));
        let mark = object.metadata.annotations.as_ref().and_then(|all| all.get(MOVABLE));
        match mark.is_some_and(|text| text == "true") {
            true => self.namespaces.movable.insert(name.clone()),
            false => self.namespaces.movable.remove(&name),
        };
        let labels = object.metadata.labels.unwrap_or_default();
        news.extend(match labels.get(OPT_IN_LABEL).is_some_and(|value| value == OPT_IN_VALUE) {
            true => self.opt_in(&name),
            false => self.opt_out(&name),
        });
        news
    }

    fn drop_namespace(&mut self, name: &str) -> Vec<News> {
        self.namespaces.movable.remove(name);
        let mut news = self.set_bounds(name, Bounds::default());
        news.extend(self.opt_out(name));
        news
    }

    fn set_bounds(&mut self, name: &str, bounds: Bounds) -> Vec<News> {
        let before = match bounds.is_none() {
            true => self.namespaces.bounds.remove(name),
            false => self.namespaces.bounds.insert(name.to_owned(), bounds.clone()),
        };
        let is_same = before.unwrap_or_default() == bounds;
        if is_same { Vec::new() } else { vec![News::Bounds(name.to_owned())] }
    }

    fn opt_in(&mut self, name: &str) -> Vec<News> {
        if !self.namespaces.opted_in.insert(name.to_owned()) {
            return Vec::new();
        }
        let pods = self.namespaces.of(name);
        pods.iter().for_each(|pod| self.promise(pod));
        pods.into_iter().map(same_pod).collect()
    }

    /// Claims that exist, and their pods, go on; what was promised only is taken back.
    fn opt_out(&mut self, name: &str) -> Vec<News> {
        if !self.namespaces.opted_in.remove(name) {
            return Vec::new();
        }
        self.take_back(name, |_| true)
    }
}
