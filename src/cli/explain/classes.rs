//! DeviceClasses for who may not list them: those that claims name are asked for one by one, and which could not be read is
//! said. Reads from the API server.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceClass;

use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::{CallError, KubeCluster};
use crate::controller::classes;
use crate::model::names::SHARED_CLASS;

/// Classes that are asked for; of more it is said that they were not read.
const ASKED_MAX: usize = 32;
/// Names that are remembered.
const NAMED_MAX: usize = 256;
/// Classes of ours, whose claims' placer is known without reading them. They are asked for in any case: of one may be
/// what pods ask for by their limits.
const SHIPPED: [&str; 3] = [SHARED_CLASS, "gpu.nvidia.com", "mig.nvidia.com"];

/// The classes that claims name: those of the namespace that is asked about, and all.
#[derive(Debug, Default)]
pub struct NamedClasses {
    here: BTreeSet<String>,
    elsewhere: BTreeSet<String>,
}

/// What became of asking for them.
#[derive(Debug, Default)]
pub struct Asked {
    pub read: Vec<DeviceClass>,
    /// All that claims name were read, or do not exist.
    pub complete: bool,
    /// Words about those of the namespace that were not.
    pub unread: Option<String>,
}

impl NamedClasses {
    /// Remembers what a claim names.
    pub fn see(&mut self, change: &Change, namespace: &str) {
        let Change::Claim(WatchEvent::Listed(claim) | WatchEvent::Stored(claim)) = change else { return };
        let is_here = claim.metadata.namespace.as_deref() == Some(namespace);
        let names = if is_here { &mut self.here } else { &mut self.elsewhere };
        let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
        for name in devices.into_iter().flat_map(classes::names) {
            if names.len() < NAMED_MAX && !names.contains(name) {
                names.insert(name.to_owned());
            }
        }
    }

    /// Asks for them.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn read(&self, cluster: &KubeCluster) -> Result<Asked, CallError> {
        let first = SHIPPED.into_iter().chain(self.here.iter().map(String::as_str));
        let mut left: Vec<&str> = first.chain(self.elsewhere.iter().map(String::as_str)).collect();
        let mut known = BTreeSet::new();
        left.retain(|name| known.insert(*name));
        let (mut asked, mut unread) = (Asked::default(), Vec::new());
        for (nth, name) in left.into_iter().enumerate() {
            match if nth < ASKED_MAX { Some(cluster.class_named(name).await) } else { None } {
                Some(Ok(class)) => asked.read.push(class),
                // There is none: a claim waits for it.
                Some(Err(CallError::NotFound { .. })) => {}
                Some(Err(CallError::Forbidden { .. })) | None => unread.push(name),
                Some(Err(error)) => return Err(error),
            }
        }
        asked.complete = unread.is_empty();
        unread.retain(|name| self.here.contains(*name) && !SHIPPED.contains(name));
        asked.unread = words(&unread);
        Ok(asked)
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
