//! Creates the ResourceClaimTemplates that the webhook has named in Jobs and the like, for queues that count what a template
//! asks for. Each is owned by the object that it was created for, and goes with it.

use std::convert::Infallible;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{pending, select_all};
use k8s_openapi::api::resource::v1::{ResourceClaimTemplate, ResourceClaimTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admission::template_spec;
use crate::cluster::KubeCluster;
use crate::cluster::makers::{Maker, MakerKind};
use crate::controller::lease::Gate;
use crate::model::error_chain;

/// One that could not be created is tried again after so long, or when its object changes.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// So many are remembered for that; the others wait until the watch begins anew.
const FAILED_MAX: usize = 1024;

pub struct Templates {
    pub api: KubeCluster,
    pub gate: Gate,
    pub kinds: Vec<MakerKind>,
}

impl Templates {
    /// Runs until told, from when this process leads.
    pub async fn run(
        self,
        mut led: watch::Receiver<bool>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        let leads = async {
            if self.kinds.is_empty() || led.wait_for(|led| *led).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = leads => {}
        }
        let watches = self.kinds.iter().map(|kind| self.api.labelled_makers(kind));
        let mut makers = select_all(watches).chain(pending()).boxed();
        let mut failed: Vec<Maker> = Vec::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(maker) = makers.next() => {
                    failed.retain(|one| one.owner.uid != maker.owner.uid);
                    self.serve(maker, &mut failed).await;
                }
                () = tokio::time::sleep(RETRY_AFTER), if !failed.is_empty() => {
                    for maker in std::mem::take(&mut failed) {
                        self.serve(maker, &mut failed).await;
                    }
                }
            }
        }
    }

    async fn serve(&self, maker: Maker, failed: &mut Vec<Maker>) {
        match self.create(&maker).await {
            Ok(()) => {}
            Err(words) => {
                let Maker { namespace, template, owner, .. } = &maker;
                warn!(namespace, template, of = owner.name, "no ResourceClaimTemplate: {words}");
                if failed.len() < FAILED_MAX {
                    failed.push(maker);
                }
            }
        }
    }

    /// Whoever may create a Job can write the label and the annotations, so that nothing is done where an administrator
    /// does not let the controller create claims, and nothing that the webhook would not have asked for.
    async fn create(&self, maker: &Maker) -> Result<(), String> {
        let spec = match template_spec(&maker.share) {
            Ok(spec) => spec,
            Err(error) => {
                info!(namespace = maker.namespace, of = maker.owner.name, "{}", error_chain(&error));
                return Ok(());
            }
        };
        let opted_in = self.api.has_opted_in(&maker.namespace).await;
        if !opted_in.map_err(|error| error_chain(&error))? {
            return Ok(());
        }
        let metadata = ObjectMeta {
            namespace: Some(maker.namespace.clone()),
            name: Some(maker.template.clone()),
            owner_references: Some(vec![maker.owner.clone()]),
            ..ObjectMeta::default()
        };
        let spec = ResourceClaimTemplateSpec { spec: Some(spec), ..ResourceClaimTemplateSpec::default() };
        let spec = Some(spec);
        if !self.gate.is_open() {
            return Err("another controller may be leading".to_owned());
        }
        let made = self.api.create_template(&ResourceClaimTemplate { metadata, spec }).await;
        made.map_err(|error| error_chain(&error))
    }
}
