//! Which containers use the claims of this node, for the label `container` of their metrics. Kubelet alone knows: claims and
//! container edits name no containers, and the node plugin may not read pods.
//!
//! ledger changes, now and then → `kubelet::PodResources` → `watch<Containers>` → the watchdog's rows

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::executor::Executor;
use crate::kubelet::{ContainerClaim, PodResources};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::error_chain;

/// From a change of the ledger to the first question: kubelet knows of a claim once its preparation was answered.
const SOON: Duration = Duration::from_secs(1);
/// Each pause is twice the last one, up to this: pods that come to a claim later need no preparation.
const LONG: Duration = Duration::from_secs(30);

/// By namespace, pod and claim, the containers that use the claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Containers(BTreeMap<(String, String, String), BTreeSet<String>>);

impl Containers {
    pub(super) fn new(all: Vec<ContainerClaim>) -> Self {
        let mut found: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for ContainerClaim { namespace, pod, container, claim } in all {
            found.entry((namespace, pod, claim)).or_default().insert(container);
        }
        Self(found)
    }

    /// Names of the pod's containers that use the claim, with commas between them; empty while it is not known.
    pub fn named(&self, claim: &ClaimRef, pod: &PodRef) -> String {
        let key = (claim.namespace.clone(), pod.name.clone(), claim.name.clone());
        let names: Vec<&str> = self.0.get(&key).into_iter().flatten().map(String::as_str).collect();
        names.join(",")
    }
}

/// The loop that asks kubelet. Made by [`ContainerWatch::new`], driven by [`ContainerWatch::run`].
pub struct ContainerWatch {
    kubelet: PodResources,
    executor: Arc<Executor>,
    failures: Counter,
    soon: Duration,
    out: watch::Sender<Containers>,
}

impl ContainerWatch {
    /// `failures` counts the questions that kubelet did not answer.
    pub fn new(
        kubelet: PodResources,
        executor: Arc<Executor>,
        failures: Counter,
    ) -> (Self, watch::Receiver<Containers>) {
        let (out, told) = watch::channel(Containers::default());
        (Self { kubelet, executor, failures, soon: SOON, out }, told)
    }

    /// Another time from a change to the first question.
    #[must_use]
    pub fn with_pace(self, soon: Duration) -> Self {
        Self { soon, ..self }
    }

    /// Asks until `stop`; nothing while no claim has a device.
    ///
    /// # Errors
    /// None.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut changes = self.executor.store.changes();
        let mut pause = self.soon;
        let mut due = Instant::now();
        let mut said = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                // The sender is the executor's, which is ours too.
                Ok(()) = changes.changed() => {
                    pause = self.soon;
                    due = due.min(Instant::now() + pause);
                    continue;
                }
                () = tokio::time::sleep_until(due) => {}
            }
            if stop.run_until_cancelled(self.ask(&mut said)).await.is_none() {
                return Ok(());
            }
            pause = (pause * 2).min(LONG.max(self.soon));
            due = Instant::now() + pause;
        }
    }

    /// What kubelet told last stays while it does not answer.
    async fn ask(&self, said: &mut Option<String>) {
        if self.executor.store.phases() == [0; 3] {
            self.tell(Containers::default());
            return;
        }
        match self.kubelet.container_claims().await {
            Ok(all) => {
                self.tell(Containers::new(all));
                if said.take().is_some() {
                    info!("kubelet tells again which containers have claims");
                }
            }
            Err(error) => {
                self.failures.inc();
                let error = error_chain(&error);
                if said.as_ref() != Some(&error) {
                    warn!(
                        error,
                        "metrics of claims do not name new pods' containers; kubelet is asked again"
                    );
                    *said = Some(error);
                }
            }
        }
    }

    fn tell(&self, now: Containers) {
        self.out.send_if_modified(|before| {
            let differs = *before != now;
            *before = now;
            differs
        });
    }
}
