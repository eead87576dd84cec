//! What is kept of pods for those beside whom they may run: their labels, and what they require of one another. Many pods
//! have the same: each set of labels, and each template's terms, are kept once. A pod has 8 bytes for its labels, and one
//! with terms as many for these; a set of five labels takes some 250 bytes, which the first of its pods pays, and names and
//! values that the set next to it has as well are shared with that.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;

use crate::controller::view::pod::{PodExtras, PodTable};
use crate::controller::view::{ClusterView, News, Pod};
use crate::feasible::{PodLabels, Terms, TooLarge};
use crate::model::names::PodUid;

/// Bytes of the terms of all pods, equal ones counted once: more than a hundred thousand templates.
const BYTES_MAX: usize = 64 << 20;

/// What equals something that is here is kept there.
#[derive(Debug)]
pub(super) struct Once<T> {
    all: BTreeMap<Arc<T>, usize>,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self { all: BTreeMap::new() }
    }
}

impl<T: Ord> Once<T> {
    fn has(&self, one: &T) -> bool {
        self.all.contains_key(one)
    }

    /// Counted once more; it is to be released as often.
    fn keep(&mut self, one: &Arc<T>) -> Arc<T> {
        let known = self.all.get_key_value(one).map_or(one, |(known, _)| known).clone();
        *self.all.entry(known.clone()).or_default() += 1;
        known
    }

    /// True: nobody else has it.
    fn release(&mut self, one: &Arc<T>) -> bool {
        let Some(count) = self.all.get_mut(one) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.all.remove(one);
        }
        is_last
    }
}

/// Sets of labels, and terms of pods.
#[derive(Debug, Default)]
pub(super) struct Alike {
    labels: Once<PodLabels>,
    terms: Once<Terms>,
    /// Of the terms.
    bytes: usize,
    /// That there are too many was told.
    is_full: bool,
}

impl Alike {
    /// Takes what others have, too, from there. False: there is no room for the pod's terms, which are dropped.
    pub fn keep(&mut self, pod: &mut Pod, rest: &mut PodExtras) -> bool {
        if let Some(labels) = &mut pod.standing.labels {
            if !self.labels.has(&**labels)
                && let Some((like, _)) = self.labels.all.range::<PodLabels, _>(..=&**labels).next_back()
            {
                Arc::make_mut(labels).share(like);
            }
            *labels = self.labels.keep(labels);
        }
        let Some(terms) = &mut rest.terms else { return true };
        if !self.terms.has(terms) {
            let with = self.bytes.saturating_add(terms.bytes());
            if with > BYTES_MAX {
                rest.terms = None;
                return false;
            }
            self.bytes = with;
        }
        *terms = self.terms.keep(terms);
        true
    }

    pub fn release(&mut self, pod: &Pod, rest: &PodExtras) {
        if let Some(labels) = &pod.standing.labels {
            self.labels.release(labels);
        }
        if let Some(terms) = rest.terms.as_ref().filter(|terms| self.terms.release(terms)) {
            self.bytes = self.bytes.saturating_sub(terms.bytes());
            // Where it is about as much all the time, it is told once.
            self.is_full &= self.bytes > BYTES_MAX / 2;
        }
    }
}

/// What a pod requires of others, or how much too long that is. Of one that nobody waits for and that is not bound nothing.
pub(super) fn terms(object: &core::Pod, pod: &Pod) -> Result<Option<Arc<Terms>>, TooLarge> {
    let (Some(spec), Some(labels)) = (&object.spec, &pod.standing.labels) else { return Ok(None) };
    if pod.node.is_none() && pod.demands.is_none() {
        return Ok(None);
    }
    let terms = Terms::of(spec, &pod.at.namespace, labels)?;
    Ok((!terms.is_none()).then(|| Arc::new(terms)))
}

/// Tells of a pod that waits that its terms are not read.
pub(super) fn too_large(pod: &Pod, why: TooLarge) -> Option<News> {
    pod.demands.as_ref()?;
    Some(News::Trouble(format!(
        "pod {}/{}: its required affinities to pods and topologySpreadConstraints {why}: it may be placed where these keep \
         it off, until kube-scheduler refuses it there; write fewer terms and values",
        pod.at.namespace, pod.at.name
    )))
}

impl PodTable {
    /// What the pod requires of others; none: nothing that is known.
    pub fn terms(&self, uid: &PodUid) -> Option<&Arc<Terms>> {
        self.rest(uid)?.terms.as_ref()
    }

    /// Takes what is alike from there. Tells, once, that there is no room for terms.
    pub(super) fn keep_alike(&mut self, pod: &mut Pod, rest: &mut PodExtras) -> Option<News> {
        let is_told = !self.alike.keep(pod, rest) && !std::mem::replace(&mut self.alike.is_full, true);
        is_told.then(|| {
            News::Trouble(format!(
                "pod {}/{}: the required affinities between pods and topologySpreadConstraints of all pods have more than \
                 {BYTES_MAX} bytes, which is what is kept: pods may be placed where these keep them off, until \
                 kube-scheduler refuses them there",
                pod.at.namespace, pod.at.name
            ))
        })
    }
}

impl ClusterView {
    /// What the pod requires of others, and is required of it by its labels.
    pub fn terms_of(&self, uid: &PodUid) -> Option<&Arc<Terms>> {
        self.pods.terms(uid)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::controller::view::pod;

    fn read(name: &str, labels: Value) -> (Pod, PodExtras) {
        let term = json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "web"}}});
        let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
        let object = json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "labels": labels},
            "spec": {"containers": [], "nodeName": "n", "affinity": apart}});
        let object: core::Pod = serde_json::from_value(object).unwrap();
        let pod = pod::read(&object);
        let mut rest = PodExtras::of(&object, &pod);
        rest.terms = terms(&object, &pod).unwrap();
        (pod, rest)
    }

    #[test]
    fn what_is_alike_is_there_once_and_goes_with_its_last_pod() {
        let mut alike = Alike::default();
        let labels = [json!({"app": "web"}), json!({"app": "web"}), json!({"app": "db"})];
        let mut pods: Vec<(Pod, PodExtras)> = labels.into_iter().map(|labels| read("p", labels)).collect();
        for (pod, rest) in &mut pods {
            assert!(alike.keep(pod, rest));
        }
        let labels = |nth: usize| pods[nth].0.standing.labels.as_ref().unwrap();
        assert!(Arc::ptr_eq(labels(0), labels(1)) && !Arc::ptr_eq(labels(0), labels(2)));
        let terms = |nth: usize| pods[nth].1.terms.as_ref().unwrap();
        assert!(Arc::ptr_eq(terms(0), terms(2)));
        assert_eq!((alike.labels.all.len(), alike.terms.all.len(), alike.bytes), (2, 1, terms(0).bytes()));
        for (pod, rest) in &pods {
            alike.release(pod, rest);
        }
        assert_eq!((alike.labels.all.len(), alike.terms.all.len(), alike.bytes), (0, 0, 0));
        // Beyond what is kept of all pods.
        alike.bytes = BYTES_MAX;
        let (mut pod, mut rest) = read("q", json!({}));
        assert!(!alike.keep(&mut pod, &mut rest));
        assert!(rest.terms.is_none());
    }
}
