//! Keeps the node's labels as the inventory wants them, where that is switched on. They are ours by a field manager of their
//! own and nothing is forced: what somebody else has set is left alone, and said once.
//!
//! inventory → `inventory::labels` → server-side apply → log, event on our own pod

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::config::NodeLabels;
use crate::cluster::events::{EventSubject, Events, Note, Severity};
use crate::cluster::{CallError, NodeCluster};
use crate::inventory::{Inventory, labels};
use crate::model::error_chain;
use crate::ops::metrics::Registry;

/// How often they are written again though nothing has changed: somebody may have taken them away, or may leave them to
/// us now.
const AGAIN: Duration = Duration::from_secs(600);
/// How long after a failure that may pass.
const RETRY: Duration = Duration::from_secs(30);

/// Keeps the labels of one node.
pub struct LabelKeeper {
    api: Arc<NodeCluster>,
    mode: NodeLabels,
    inventory: watch::Receiver<Inventory>,
    /// On which pod a conflict is told, and by what.
    teller: Option<(EventSubject, Events)>,
    conflicts: Counter,
    again: Duration,
}

impl LabelKeeper {
    pub fn new(api: Arc<NodeCluster>, mode: NodeLabels, inventory: watch::Receiver<Inventory>) -> Self {
        Self { api, mode, inventory, teller: None, conflicts: Counter::default(), again: AGAIN }
    }

    /// Says conflicts in events on `pod`, too.
    #[must_use]
    pub fn telling(self, pod: EventSubject, events: Events) -> Self {
        Self { teller: Some((pod, events)), ..self }
    }

    #[must_use]
    pub fn counting(self, registry: &mut Registry) -> Self {
        let help =
            "Writes of the node's labels that were left because somebody else has set one of them otherwise";
        registry.register("node_label_conflicts", help, self.conflicts.clone());
        self
    }

    /// Another time until the labels are written again.
    #[must_use]
    pub fn with_pace(self, again: Duration) -> Self {
        Self { again, ..self }
    }

    /// Until `stop`. The labels stay when the process ends: the next one finds them, and an update of the driver changes
    /// nothing.
    ///
    /// # Errors
    /// None.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut told = None;
        while !stop.is_cancelled() {
            let wait = match self.wanted() {
                Some(wanted) => self.write(&wanted, &mut told).await,
                None => self.again,
            };
            let due = Instant::now() + wait;
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep_until(due) => {}
                changed = self.inventory.changed() => if changed.is_err() { stop.cancelled().await }
            }
        }
        Ok(())
    }

    /// None: nothing is known yet, or nothing is to be done.
    fn wanted(&mut self) -> Option<BTreeMap<&'static str, String>> {
        let known = self.inventory.borrow_and_update();
        match self.mode {
            NodeLabels::Off => None,
            NodeLabels::On => labels::labels(&known),
            NodeLabels::Remove => Some(BTreeMap::new()),
        }
    }

    /// Writes them, and says what is new about that; how long until the next try.
    async fn write(
        &self,
        wanted: &BTreeMap<&'static str, String>,
        told: &mut Option<LabelNotice>,
    ) -> Duration {
        let (now, wait) = match self.api.set_labels(wanted).await {
            Ok(()) => (LabelNotice::Set(wanted.clone()), self.again),
            Err(CallError::Conflict { message, .. }) => {
                self.conflicts.inc();
                (LabelNotice::Conflict(message), self.again)
            }
            Err(error) => (LabelNotice::Failed(error_chain(&error)), RETRY.min(self.again)),
        };
        if told.as_ref() == Some(&now) {
            return wait;
        }
        match &now {
            LabelNotice::Set(labels) if labels.is_empty() => info!("the node has no labels of ours"),
            LabelNotice::Set(labels) => info!(?labels, "the node is labelled"),
            LabelNotice::Conflict(words) => self.tell_conflict(words),
            LabelNotice::Failed(problem) => {
                warn!(problem, "the node's labels were not written; it will be tried again")
            }
        }
        *told = Some(now);
        wait
    }

    fn tell_conflict(&self, words: &str) {
        let message = format!(
            "the node's labels are left alone, because somebody else has set them: {words}; switch one of the two off \
             (chart value nodeLabels)"
        );
        warn!("{message}");
        if let Some((subject, events)) = &self.teller {
            let (subject, severity) = (subject.clone(), Severity::Warning);
            events.tell(Note { subject, severity, reason: "NodeLabelsConflict", message });
        }
    }
}

/// What was said last, so that nothing is said twice in a row.
#[derive(Debug, PartialEq, Eq)]
enum LabelNotice {
    Set(BTreeMap<&'static str, String>),
    Conflict(String),
    Failed(String),
}
