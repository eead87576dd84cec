//! DeviceClasses for who may not list them: those that the namespace's claims name are asked for one by one, and which
//! could not be read is said. Reads from the API server.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass};

use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::{CallError, KubeCluster};
use crate::model::names::SHARED_CLASS;

/// Classes that are asked for; of more it is said that they were not read.
const ASKED_MAX: usize = 32;
/// Classes of ours, whose claims' placer is known without reading them.
const SHIPPED: [&str; 3] = [SHARED_CLASS, "gpu.nvidia.com", "mig.nvidia.com"];

/// The classes that claims of a namespace name.
#[derive(Debug, Default)]
pub struct Named(BTreeSet<String>);

impl Named {
    /// Remembers what a claim of the namespace names.
    pub fn see(&mut self, change: &Change, namespace: &str) {
        let Change::Claim(WatchEvent::Listed(claim) | WatchEvent::Stored(claim)) = change else { return };
        if claim.metadata.namespace.as_deref() == Some(namespace) {
            let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
            self.0.extend(devices.into_iter().flat_map(names).map(str::to_owned));
        }
    }

    /// Asks for them: those that are read, and words about the others.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn read(&self, cluster: &KubeCluster) -> Result<(Vec<DeviceClass>, Option<String>), CallError> {
        let (mut read, mut unread) = (Vec::new(), Vec::new());
        for (nth, name) in self.0.iter().enumerate() {
            match if nth < ASKED_MAX { Some(cluster.class_named(name).await) } else { None } {
                Some(Ok(class)) => read.push(class),
                // There is none: a claim waits for it.
                Some(Err(CallError::NotFound { .. })) => {}
                Some(Err(CallError::Forbidden { .. })) | None => unread.push(name.as_str()),
                Some(Err(error)) => return Err(error),
            }
        }
        unread.retain(|name| !SHIPPED.contains(name));
        Ok((read, words(&unread)))
    }
}

fn words(unread: &[&str]) -> Option<String> {
    let names = match unread {
        [] => return None,
        [one] => format!("DeviceClass {one}"),
        all => format!("DeviceClasses {}", all.join(", ")),
    };
    Some(format!(
        "{names} could not be read, so whether the controller or kube-scheduler places such claims, and how much of a GPU \
         they get, is not known: see kubectl auth can-i get deviceclasses.resource.k8s.io"
    ))
}

fn names(claim: &DeviceClaim) -> impl Iterator<Item = &str> {
    claim.requests.iter().flatten().flat_map(|request| {
        let exactly = request.exactly.iter().map(|one| one.device_class_name.as_str());
        let alternatives = request.first_available.iter().flatten();
        exactly.chain(alternatives.map(|one| one.device_class_name.as_str()))
    })
}
