//! Creates the ResourceClaimTemplates that the webhook has named in Jobs and the like, for queues that count what a template
//! asks for. Each is owned by the object that it was created for, and goes with it.

use std::convert::Infallible;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{pending, select_all};
use k8s_openapi::api::resource::v1::{ResourceClaimSpec, ResourceClaimTemplate, ResourceClaimTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admission::{ShareClasses, template_spec};
use crate::cluster::makers::{Maker, MakerChange, MakerKind};
use crate::cluster::{CallError, KubeCluster};
use crate::controller::classes::names;
use crate::controller::lease::Gate;
use crate::controller::metrics::TemplateMetrics;
use crate::model::error_chain;
use crate::model::names::SHARED_CLASS;
use crate::model::time::back_off;
use crate::select::{Placer, placer};

/// One that could not be created is tried again after so long, or when its object changes; then after twice as long, up
/// to the last.
const RETRY_FIRST: Duration = Duration::from_secs(10);
const RETRY_LAST: Duration = Duration::from_secs(640);
/// So many are remembered for that, and of one namespace so many; the others wait until the watch begins anew.
const FAILED_MAX: usize = 1024;
const FAILED_OF_NAMESPACE_MAX: usize = 64;

/// One that could not be created.
struct Failed {
    maker: Maker,
    times: u32,
    due: Instant,
}

enum Created {
    Yes,
    /// The webhook would not have asked for it, or its namespace has not opted in.
    NotWanted,
}

/// Why a template was not created.
enum Refusal {
    /// It is tried again.
    Later(String),
    /// It never will be: its namespace or its name is none.
    Never(String),
}

pub struct Templates {
    pub api: KubeCluster,
    pub gate: Gate,
    pub kinds: Vec<MakerKind>,
    /// Of the templates' claims.
    pub classes: ShareClasses,
    pub metrics: TemplateMetrics,
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
        let mut failed: Vec<Failed> = Vec::new();
        loop {
            let next = failed.iter().map(|one| one.due).min();
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                Some(change) = makers.next() => match change {
                    MakerChange::Stored(maker) => {
                        failed.retain(|one| one.maker.owner.uid != maker.owner.uid);
                        self.serve(maker, 0, &mut failed).await;
                    }
                    MakerChange::Gone(uid) => failed.retain(|one| one.maker.owner.uid != uid),
                    MakerChange::Unreadable => self.metrics.count("unreadable"),
                },
                () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let now = Instant::now();
                    if let Some(at) = failed.iter().position(|one| one.due <= now) {
                        let Failed { maker, times, .. } = failed.swap_remove(at);
                        self.serve(maker, times, &mut failed).await;
                    }
                }
            }
        }
    }

    async fn serve(&self, maker: Maker, times: u32, failed: &mut Vec<Failed>) {
        let refusal = match self.create(&maker).await {
            Ok(Created::Yes) => return self.metrics.count("created"),
            Ok(Created::NotWanted) => return self.metrics.count("not_wanted"),
            Err(refusal) => refusal,
        };
        let Maker { namespace, template, owner, .. } = &maker;
        match refusal {
            Refusal::Never(words) => {
                self.metrics.count("refused");
                warn!(namespace, template, of = owner.name, "no ResourceClaimTemplate: {words}");
            }
            Refusal::Later(words) => {
                warn!(namespace, template, of = owner.name, times, "no ResourceClaimTemplate yet: {words}");
                let of_namespace = failed.iter().filter(|one| one.maker.namespace == *namespace).count();
                if failed.len() < FAILED_MAX && of_namespace < FAILED_OF_NAMESPACE_MAX {
                    let pause = back_off(RETRY_FIRST, times + 1, RETRY_LAST);
                    failed.push(Failed { maker, times: times + 1, due: Instant::now() + pause });
                    self.metrics.count("retried");
                } else {
                    self.metrics.count("forgotten");
                }
            }
        }
    }

    /// Whoever may create a Job can write the label and the annotations, so that nothing is done where an administrator
    /// does not let the controller create claims, and nothing that the webhook would not have asked for.
    async fn create(&self, maker: &Maker) -> Result<Created, Refusal> {
        let spec = match template_spec(&maker.share, &self.classes) {
            Ok(spec) => spec,
            Err(error) => {
                info!(namespace = maker.namespace, of = maker.owner.name, "{}", error_chain(&error));
                return Ok(Created::NotWanted);
            }
        };
        let opted_in = self.api.has_opted_in(&maker.namespace).await;
        if !opted_in.map_err(refusal)? {
            return Ok(Created::NotWanted);
        }
        self.check_classes(&spec).await?;
        let metadata = ObjectMeta {
            namespace: Some(maker.namespace.clone()),
            name: Some(maker.template.clone()),
            owner_references: Some(vec![maker.owner.clone()]),
            ..ObjectMeta::default()
        };
        let spec = ResourceClaimTemplateSpec { spec: Some(spec), ..ResourceClaimTemplateSpec::default() };
        let spec = Some(spec);
        if !self.gate.is_open() {
            return Err(Refusal::Later("another controller may be leading".to_owned()));
        }
        let made = self.api.create_template(&ResourceClaimTemplate { metadata, spec }).await;
        made.map_err(refusal).map(|()| Created::Yes)
    }
}

impl Templates {
    /// kube-scheduler would give whole devices for claims of a class that is not the controller's.
    async fn check_classes(&self, spec: &ResourceClaimSpec) -> Result<(), Refusal> {
        for class in spec.devices.iter().flat_map(names).filter(|class| *class != SHARED_CLASS) {
            let found = match self.api.class_named(class).await {
                Ok(found) => Some(found),
                Err(CallError::NotFound { .. }) => None,
                Err(error) => return Err(refusal(error)),
            };
            let what = match found.as_ref().map(placer) {
                Some(Placer::Controller) => continue,
                Some(Placer::Scheduler | Placer::Doubtful) => {
                    "lacks the selector by which the controller places it"
                }
                None => "does not exist",
            };
            return Err(Refusal::Later(format!(
                "DeviceClass {class}, of which such claims are to be (webhook.kaiClasses), {what}"
            )));
        }
        Ok(())
    }
}

fn refusal(error: CallError) -> Refusal {
    let words = error_chain(&error);
    match error {
        // No such namespace, or a name that no template can have.
        CallError::NotFound { .. } | CallError::Refused { code: 400 | 422, .. } => Refusal::Never(words),
        _ => Refusal::Later(words),
    }
}
