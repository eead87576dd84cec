//! The cluster as it is asked: everything into the controller's core and beside it, as far as the caller may look. Reads
//! from the API server and writes nothing.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::DeviceClass;

use super::super::reach::BINDING;
use super::classes::NamedClasses;
use super::file::FileObjects;
use crate::cli::as_controller::AsControllerArgs;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::{CallError, Denied, KubeCluster};
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::explain::{Listing, may_not};
use crate::model::names::HOLD_LABEL;
use crate::model::time::Moment;

pub struct ClusterSite {
    pub core: Core,
    pub listing: Listing,
    /// Words about what the caller may not see, and what is odd.
    pub remarks: Vec<String>,
    /// The file's objects that are in the cluster under the same name.
    pub in_cluster: Vec<String>,
    /// The caller may not list the quotas of the namespace.
    pub quotas_denied: bool,
}

impl ClusterSite {
    /// `rules`: how the controller decides. `namespace`: that of what is asked about. `file`: what is asked about as if it were there.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller look at the namespace.
    pub async fn read(
        cluster: &KubeCluster,
        (controller, rules): (&AsControllerArgs, Rules),
        namespace: &str,
        file: Option<&FileObjects>,
    ) -> Result<Self, CallError> {
        let mut core = controller.core(rules);
        let mut listing = Listing::new(namespace);
        let (mut holders, mut in_cluster, mut named) = (BTreeSet::new(), Vec::new(), NamedClasses::default());
        let denied = cluster
            .tour(namespace, |mut change| {
                holders.extend(holder(&change));
                named.see(&change, namespace);
                if file.is_some_and(|file| file.stand_aside(&mut change)) {
                    in_cluster.extend(name(&change));
                }
                listing.see(&change);
                core.apply(change, Moment::ZERO);
            })
            .await?;
        for change in file.iter().flat_map(|file| file.changes()) {
            named.see(&change, namespace);
            listing.see(&change);
            core.apply(change, Moment::ZERO);
        }
        let (mut remarks, mut classes_known) = (Vec::new(), false);
        if denied.contains(&Denied::of::<DeviceClass>()) {
            let asked = named.read(cluster).await?;
            for class in asked.read {
                let change = Change::Class(WatchEvent::Stored(Box::new(class)));
                listing.see(&change);
                core.apply(change, Moment::ZERO);
            }
            remarks.extend(asked.unread);
            classes_known = asked.complete;
        }
        let quotas = cluster.quotas(namespace).await;
        let quotas_denied = matches!(quotas, Err(CallError::Forbidden { .. }));
        match quotas {
            Ok(quotas) => listing.set_quotas(quotas),
            Err(CallError::Forbidden { .. }) => {}
            Err(error) => return Err(error),
        }
        if !denied.is_empty() {
            remarks.push(format!("{} ({BINDING})", may_not(&denied)));
        }
        // Who has opted in decides for claims that are promised, which are others'; the own namespace was asked.
        let opted = Denied::of::<Namespace>();
        let classes = Denied::of::<DeviceClass>();
        let is_lack = |kind: &Denied| *kind != opted && !(classes_known && *kind == classes);
        listing.deny(denied.into_iter().filter(is_lack).collect());
        let (_, troubles) = core.recorder.take();
        remarks.extend(troubles);
        remarks.extend(elsewhere(&holders, &controller.controller_namespace));
        Ok(Self { core, listing, remarks, in_cluster, quotas_denied })
    }
}

/// What a claim or a pod is called.
fn name(change: &Change) -> Option<String> {
    match change {
        Change::Claim(WatchEvent::Listed(claim)) => claim.metadata.name.clone(),
        Change::Pod(WatchEvent::Listed(pod)) => pod.metadata.name.clone(),
        _ => None,
    }
}

/// The namespace of a claim that looks like a hold.
fn holder(change: &Change) -> Option<String> {
    let Change::Claim(WatchEvent::Listed(claim)) = change else { return None };
    let labels = claim.metadata.labels.as_ref()?;
    labels.get(HOLD_LABEL).is_some_and(|value| value == "true").then(|| claim.metadata.namespace.clone())?
}

fn elsewhere(holders: &BTreeSet<String>, namespace: &str) -> Option<String> {
    let other = holders.iter().find(|one| *one != namespace).filter(|_| !holders.contains(namespace))?;
    Some(format!(
        "claims in namespace {other} are labelled {HOLD_LABEL}, and none in {namespace}: if the controller runs in \
         {other}, give --controller-namespace {other}; otherwise the GPUs of these claims count as taken by \
         others here"
    ))
}

/// The templates of a namespace that are there, of these names.
///
/// # Errors
/// The API server does not answer, or does not let the caller look.
pub async fn templates(
    cluster: &KubeCluster,
    namespace: &str,
    names: &BTreeSet<String>,
) -> Result<BTreeMap<String, k8s_openapi::api::resource::v1::ResourceClaimTemplate>, CallError> {
    let mut found = BTreeMap::new();
    for name in names {
        match cluster.template_named(namespace, name).await {
            Ok(template) => drop(found.insert(name.clone(), template)),
            Err(CallError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}
