//! Bound PersistentVolumes that some nodes cannot reach, and the pods that wait with them. A volume names the
//! PersistentVolumeClaim that it is bound to: the claims themselves are not read. Where volumes may not be seen none is
//! known, and the controller learns of them by kube-scheduler's refusals.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;

use crate::controller::view::{ClusterView, News, Pod};
use crate::feasible::{Demands, Reach, TooLong, Volume};
use crate::model::names::PodUid;

/// PersistentVolumeClaims of a pod that are looked at, again whenever a volume of theirs changes. Pods have a few.
const CLAIMS_MAX: usize = 32;
/// Bytes of what volumes demand, equal demands counted once: hundreds of thousands of volumes with a node each.
const BYTES_MAX: usize = 64 << 20;

/// Namespace and name.
type ClaimName = (String, String);

#[derive(Debug, Default)]
pub(super) struct Volumes {
    /// By their names.
    all: BTreeMap<Arc<str>, BoundVolume>,
    /// The same by their claims.
    of_claims: BTreeMap<Arc<ClaimName>, Vec<Arc<str>>>,
    /// What they demand, each once, and how many of them do.
    reaches: BTreeMap<Arc<Reach>, usize>,
    /// Of these.
    bytes: usize,
    /// That there are too many bytes was told.
    is_full: bool,
}

#[derive(Debug, PartialEq)]
struct BoundVolume {
    claim: Arc<ClaimName>,
    reach: Arc<Reach>,
}

impl Volumes {
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.keys().map(|name| &**name)
    }

    /// What the volume demands that the claim is bound to. None: nothing that is known.
    fn of(&self, namespace: &str, claim: &str) -> Option<&Arc<Reach>> {
        if self.all.is_empty() {
            return None;
        }
        // Two are of two claims that had this name one after the other, and nobody says which is today's.
        match &self.of_claims.get(&(namespace.to_owned(), claim.to_owned()))?[..] {
            [volume] => self.all.get(volume).map(|bound| &bound.reach),
            _ => None,
        }
    }

    /// Takes it in place of what was known of a volume of this name. False: there is no room for it.
    fn set(&mut self, name: &str, claim: ClaimName, reach: Reach) -> bool {
        self.remove(name);
        let with = self.bytes.saturating_add(reach.bytes());
        let reach = match self.reaches.get_key_value(&reach) {
            Some((known, _)) => known.clone(),
            None if with > BYTES_MAX => return false,
            None => {
                self.bytes = with;
                Arc::new(reach)
            }
        };
        *self.reaches.entry(reach.clone()).or_default() += 1;
        let (name, claim) = (Arc::<str>::from(name), Arc::new(claim));
        self.of_claims.entry(claim.clone()).or_default().push(name.clone());
        self.all.insert(name, BoundVolume { claim, reach });
        true
    }

    /// The claim of a volume that was known.
    fn remove(&mut self, name: &str) -> Option<Arc<ClaimName>> {
        let BoundVolume { claim, reach } = self.all.remove(name)?;
        if let Some(names) = self.of_claims.get_mut(&claim) {
            names.retain(|one| **one != *name);
            if names.is_empty() {
                self.of_claims.remove(&claim);
            }
        }
        if let Some(count) = self.reaches.get_mut(&reach) {
            *count -= 1;
            if *count == 0 {
                self.reaches.remove(&reach);
                self.bytes -= reach.bytes();
                self.is_full = false;
            }
        }
        Some(claim)
    }
}

/// The PersistentVolumeClaims that a pod names, also those that are made for it. Of more than [`CLAIMS_MAX`] the first.
pub(super) fn claims(pod: &core::Pod) -> Vec<String> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claims = volumes.filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{name}-{}", volume.name)),
        (None, None) => None,
    });
    claims.take(CLAIMS_MAX).collect()
}

/// Tells that volumes of the pod are not looked at, if that is new.
pub(super) fn left_out(pod: &Pod, before: Option<&Demands>) -> Option<News> {
    let count = pod.demands.as_ref()?.left_out();
    let is_new = count > 0 && before.is_none_or(|before| before.left_out() == 0);
    is_new.then(|| {
        News::Trouble(format!(
            "pod {}/{}: {count} of its volumes have node affinities that are not read, since all its demands together \
             would have more bytes than are kept: it may be placed where they cannot be reached, until kube-scheduler \
             refuses it there",
            pod.at.namespace, pod.at.name
        ))
    })
}

impl ClusterView {
    pub(super) fn set_volume(&mut self, object: core::PersistentVolume) -> Vec<News> {
        let name = object.metadata.name.unwrap_or_default();
        let spec = object.spec.unwrap_or_default();
        let is_bound = object.status.is_some_and(|status| status.phase.as_deref() == Some("Bound"));
        let claim = spec.claim_ref.filter(|_| is_bound);
        let required = spec.node_affinity.and_then(|affinity| affinity.required);
        let (Some(claim), Some(required)) = (claim, required) else { return self.drop_volume(&name) };
        let claim = (claim.namespace.unwrap_or_default(), claim.name.unwrap_or_default());
        let reach = match Reach::of(required) {
            Ok(Some(reach)) => reach,
            Ok(None) => return self.drop_volume(&name),
            Err(TooLong(bytes)) => {
                let mut news = self.drop_volume(&name);
                news.push(News::Trouble(format!(
                    "PersistentVolume {name}: its node affinity has {bytes} bytes (64 more for each entry), and {} \
                     are read at most: pods may be placed where it cannot be reached, until kube-scheduler refuses \
                     them there; write fewer terms and values",
                    TooLong::MAX
                )));
                return news;
            }
        };
        let volumes = &mut self.optional.volumes;
        let known = volumes.all.get(name.as_str());
        if known.is_some_and(|known| *known.claim == claim && *known.reach == reach) {
            return Vec::new();
        }
        let before = known.map(|known| known.claim.clone());
        let fits = volumes.set(&name, claim.clone(), reach);
        let is_told = !fits && !std::mem::replace(&mut volumes.is_full, true);
        let mut news = self.claim_bound(&claim);
        news.extend(
            before.filter(|before| **before != claim).into_iter().flat_map(|one| self.claim_bound(&one)),
        );
        news.extend(is_told.then(|| {
            News::Trouble(format!(
                "PersistentVolume {name}: the node affinities of all volumes have more than {BYTES_MAX} bytes, which \
                 is what is kept: pods may be placed where their volumes cannot be reached, until kube-scheduler \
                 refuses them there"
            ))
        }));
        news
    }

    pub(super) fn drop_volume(&mut self, name: &str) -> Vec<News> {
        let claim = self.optional.volumes.remove(name);
        claim.map(|claim| self.claim_bound(&claim)).unwrap_or_default()
    }

    /// A volume was bound to the claim, or is no longer: what the pods demand that wait with it.
    fn claim_bound(&mut self, claim: &ClaimName) -> Vec<News> {
        let waiting: Vec<PodUid> = self.pods.waiting_with(claim).cloned().collect();
        let mut news = Vec::new();
        for uid in waiting {
            let Some(pod) = self.pods.get(&uid) else { continue };
            let Some(before) = pod.demands.clone() else { continue };
            let fresh = self.with_volumes((*before).clone(), &pod.at.namespace, self.pods.volumes(&uid));
            if fresh != *before {
                self.pods.set_demands(&uid, Arc::new(fresh));
                news.extend(self.pods.get(&uid).and_then(|pod| left_out(pod, Some(&before))));
                news.push(News::Pod { uid, demands_changed: true });
            }
        }
        news
    }

    /// What a pod demands of its node, with what its bound volumes do.
    pub fn demands_of(&self, pod: &core::Pod) -> Option<Demands> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        Some(self.with_volumes(Demands::of(pod.spec.as_ref()?), namespace, &claims(pod)))
    }

    pub(super) fn with_volumes(&self, demands: Demands, namespace: &str, claims: &[String]) -> Demands {
        let volumes = claims.iter().filter_map(|claim| {
            let reach = self.optional.volumes.of(namespace, claim)?.clone();
            Some(Volume { claim: claim.as_str().into(), reach })
        });
        demands.with_volumes(volumes)
    }
}
