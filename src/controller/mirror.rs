//! Keeps the slices that mirror the cluster's products as they are to be, while this process leads: for queues that count
//! shares by their amount (docs/quotas.md). Where they are not wanted, those of an earlier setting are deleted.

mod products;

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::cluster::{CallError, KubeCluster};
use crate::controller::lease::Gate;
use crate::model::error_chain;
use crate::model::names::MIRROR_LABEL;

pub use products::{Product, products};

use products::is_same;

/// The ClusterRole that lets the controller write such slices, and that owns them: without it, they go.
const OWNER: &str = "tranche-mirror";
/// How often it is looked whether they are still there.
const LOOK_EVERY: Duration = Duration::from_secs(300);
/// After a failure.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// What there is to be mirrored. None: not known yet, and nothing is done. Empty: nothing.
pub type WantedProducts = Option<Vec<Product>>;

pub struct Mirror {
    pub api: KubeCluster,
    pub gate: Gate,
    pub wanted: watch::Receiver<WantedProducts>,
}

impl Mirror {
    /// Runs until told.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut next = LOOK_EVERY;
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                changed = self.wanted.changed() => if changed.is_err() {
                    // Whoever knows has ended.
                    stop.cancelled().await;
                    return Ok(());
                },
                () = tokio::time::sleep(next) => {}
            }
            let Some(wanted) = self.wanted.borrow_and_update().clone() else { continue };
            next = match self.keep(&wanted).await {
                Ok(()) => LOOK_EVERY,
                Err(error) => {
                    warn!(
                        error = error_chain(&error),
                        "the slices with label {MIRROR_LABEL} are not as they should be; where controller.mirrorSlices is \
                         off, delete them: kubectl delete resourceslices -l {MIRROR_LABEL}"
                    );
                    RETRY_AFTER
                }
            };
        }
    }

    /// Writes what differs. A product that is no more is no longer mirrored.
    async fn keep(&self, wanted: &[Product]) -> Result<(), CallError> {
        let stored = self.api.mirror_slices().await?;
        if wanted.is_empty() && stored.is_empty() {
            return Ok(());
        }
        let wanted: Vec<ResourceSlice> = wanted.iter().map(Product::slice).collect();
        let named = |slice: &ResourceSlice, all: &[ResourceSlice]| {
            all.iter().find(|one| one.metadata.name == slice.metadata.name).cloned()
        };
        for slice in stored.iter().filter(|slice| named(slice, &wanted).is_none()) {
            if self.gate.is_open() {
                self.api.delete_slice(slice).await?;
                info!(slice = slice.metadata.name, "a product is no longer mirrored");
            }
        }
        let different =
            |slice: &&ResourceSlice| named(slice, &stored).is_none_or(|one| !is_same(&one, slice));
        let different: Vec<&ResourceSlice> = wanted.iter().filter(different).collect();
        if different.is_empty() {
            return Ok(());
        }
        let owner = self.owner().await?;
        for slice in different {
            let mut slice = slice.clone();
            slice.metadata.owner_references = owner.clone().map(|owner| vec![owner]);
            let before = named(&slice, &stored);
            if let Some(before) = &before {
                slice.metadata.resource_version.clone_from(&before.metadata.resource_version);
                slice.spec.pool.generation = before.spec.pool.generation.saturating_add(1);
            }
            if self.gate.is_open() {
                self.api.write_slice(&slice, before.is_some()).await?;
                info!(slice = slice.metadata.name, "a product is mirrored");
            }
        }
        Ok(())
    }

    async fn owner(&self) -> Result<Option<OwnerReference>, CallError> {
        let uid = self.api.cluster_role_uid(OWNER).await?;
        Ok(uid.map(|uid| OwnerReference {
            api_version: "rbac.authorization.k8s.io/v1".to_owned(),
            kind: "ClusterRole".to_owned(),
            name: OWNER.to_owned(),
            uid,
            ..OwnerReference::default()
        }))
    }
}
