//! Claims that the webhook promised to pods with KAI's annotations: planned where an administrator has opted in, and where
//! their class is ours. A class that is not ours is kube-scheduler's, which would give a whole device for such a claim.

use k8s_openapi::api::resource::v1::DeviceClass;

use crate::admission::{SHARE_ANNOTATION, claim_spec};
use crate::cluster::feed::WatchEvent;
use crate::controller::classes::names;
use crate::controller::view::{Asks, Claim, ClusterView, Kind, News, Pod, claim, same_pod};
use crate::model::claim::ClaimKey;
use crate::model::names::{OPT_IN_LABEL, OPT_IN_VALUE, PodUid};

impl ClusterView {
    pub(super) fn follow_classes(&mut self, seen: WatchEvent<DeviceClass>) -> Vec<News> {
        let known = self.lists.complete.contains(&Kind::Classes);
        let mut news = self.follow(Kind::Classes, seen, Self::set_class, Self::drop_class);
        // Only now is it known which classes there are not: pods with shares of these are to be told.
        if !known && self.lists.complete.contains(&Kind::Classes) {
            let pods: Vec<PodUid> = self.namespaces.askers.values().flatten().cloned().collect();
            news.extend(pods.into_iter().map(same_pod));
        }
        news
    }

    /// Notes the claim that the webhook promised the pod, unless there is one of that name. Where nobody has opted in
    /// the webhook has promised nothing, whatever the pod says.
    pub(super) fn promise(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid).filter(|pod| !pod.ending) else { return };
        let Some((text, name)) = &pod.requested.share else { return };
        let namespace = &pod.at.namespace;
        if !self.namespaces.opted_in.contains(namespace) || self.claims.named(namespace, name).is_some() {
            return;
        }
        if self.foreign_class(text).is_some() {
            return;
        }
        let key = self.claims.new_key();
        self.claims.insert(claim::planned(key, &pod.at, (text, name), &self.classes.promised));
        self.note_promised(key, uid);
    }

    /// The class of the claim that the annotation asks for, if it is not ours.
    fn foreign_class(&self, text: &str) -> Option<String> {
        let spec = claim_spec(text, &self.classes.promised).ok()?;
        names(spec.devices.as_ref()?).find(|name| !self.classes.ours().has(name)).map(str::to_owned)
    }

    /// A class has come, changed or gone: of those of promised claims, what is promised is another now.
    pub(super) fn promise_again(&mut self, mut news: Vec<News>, class: &str) -> Vec<News> {
        if news.is_empty() || !self.classes.promised.has(class) {
            return news;
        }
        let namespaces: Vec<String> = self.namespaces.opted_in.iter().cloned().collect();
        for namespace in namespaces {
            if self.classes.ours().has(class) {
                let pods = self.namespaces.of(&namespace);
                pods.iter().for_each(|pod| self.promise(pod));
                news.extend(pods.into_iter().map(same_pod));
            } else {
                let of_class = |claim: &Claim| match &claim.asks {
                    Asks::Shares(devices) => names(devices).any(|name| name == class),
                    Asks::Scheduler(_) | Asks::Unreadable(_) => false,
                };
                news.extend(self.take_back(&namespace, of_class));
            }
        }
        news
    }

    /// Claims of the namespace's pods that are only planned and are of this kind are planned no more.
    pub(super) fn take_back(&mut self, namespace: &str, which: impl Fn(&Claim) -> bool) -> Vec<News> {
        let pods = self.namespaces.of(namespace);
        let shares = pods
            .iter()
            .filter_map(|uid| self.pods.get(uid)?.requested.share.as_ref().map(|(_, claim)| claim));
        let planned = |claim: &&Claim| claim.is_planned() && which(claim);
        let planned: Vec<ClaimKey> = shares
            .filter_map(|claim| self.claim_named(namespace, claim).filter(planned))
            .map(|claim| claim.key)
            .collect();
        let gone: Vec<News> = planned
            .into_iter()
            .filter_map(|key| Some(News::ClaimGone(Box::new(self.claims.remove(key)?))))
            .collect();
        gone.into_iter().chain(pods.into_iter().map(same_pod)).collect()
    }

    /// Why the annotation of a pod makes no claim, for the pod's events. None: it need not, or it does, or that is not
    /// known yet.
    pub fn not_promised(&self, pod: &Pod) -> Option<String> {
        let (text, name) = pod.requested.share.as_ref().filter(|_| !pod.ending)?;
        let namespace = &pod.at.namespace;
        let is_known = |kind| self.lists.complete.contains(&kind);
        if self.claim_named(namespace, name).is_some() || !is_known(Kind::Namespaces) {
            return None;
        }
        if !self.namespaces.opted_in.contains(namespace) {
            return Some(format!(
                "the annotation {SHARE_ANNOTATION} makes no claim here: it counts in namespaces that an administrator \
                 has labelled {OPT_IN_LABEL}={OPT_IN_VALUE}, and {namespace} is none; create the claim {name} \
                 yourself, or have the namespace labelled"
            ));
        }
        let class = self.foreign_class(text).filter(|_| is_known(Kind::Classes))?;
        let what = match self.classes.has(&class) {
            true => "is not placed by Tranche's controller, since it lacks the selector for that",
            false => "does not exist",
        };
        Some(format!(
            "the annotation {SHARE_ANNOTATION} makes no claim: DeviceClass {class}, of which an administrator wants such \
             claims (webhook.kaiClasses), {what}; have it created with that selector"
        ))
    }
}
