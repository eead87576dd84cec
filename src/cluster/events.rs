//! Events on claims and pods, for whoever looks there. Best effort: a full queue or a failed write costs
//! an event, never a claim, and is counted.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tracing::debug;

use super::client::call;
use crate::model::claim::ClaimRef;
use crate::model::names::{DRIVER, NodeName};

/// Events that may wait: a full node (64 claims of a batch) complaining at once.
pub const QUEUE_CAPACITY: usize = 64;
/// The API server refuses longer messages.
const MESSAGE_LIMIT_BYTES: usize = 1024;

/// Whose events they are, as `reportingInstance` has it: the node's name of a node plugin, the pod's of a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportingInstance(String);

impl ReportingInstance {
    pub fn of_pod(name: &str) -> Self {
        Self(name.to_owned())
    }
}

impl From<&NodeName> for ReportingInstance {
    fn from(node: &NodeName) -> Self {
        Self(node.to_string())
    }
}

/// What an event is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventSubject {
    Claim(ClaimRef),
    Pod { namespace: String, name: String, uid: String },
}

/// What an event says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub subject: EventSubject,
    pub severity: Severity,
    /// One word in CamelCase, e.g. `PrepareFailed`.
    pub reason: &'static str,
    /// For people; cut to 1024 bytes.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Normal,
    Warning,
}

/// Takes events and never waits.
#[derive(Debug, Clone)]
pub struct Events {
    queue: mpsc::Sender<Note>,
    counts: Arc<EventCounts>,
}

#[derive(Debug, Default)]
struct EventCounts {
    posted: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

impl Events {
    /// Queues `note`, or drops and counts it if the queue is full.
    pub fn tell(&self, note: Note) {
        if self.queue.try_send(note).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for room in the queue; none: nobody posts any more.
    pub async fn room(&self) -> Option<mpsc::Permit<'_, Note>> {
        self.queue.reserve().await.ok()
    }

    /// Events that the API server took.
    pub fn posted(&self) -> u64 {
        self.counts.posted.load(Ordering::Relaxed)
    }

    /// Events lost because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }

    /// Events lost because the API server did not take them.
    pub fn failed(&self) -> u64 {
        self.counts.failed.load(Ordering::Relaxed)
    }
}

/// The sender and the task that posts what is queued, one after the other.
pub(super) fn queue(
    client: Client,
    reporter: ReportingInstance,
    limit: Duration,
) -> (Events, impl Future<Output = ()> + Send + use<>) {
    let (sender, mut receiver) = mpsc::channel(QUEUE_CAPACITY);
    let counts = Arc::new(EventCounts::default());
    let events = Events { queue: sender, counts: Arc::clone(&counts) };
    let task = async move {
        while let Some(note) = receiver.recv().await {
            let event = event(&note, &reporter, Timestamp::now());
            let namespace = event.involved_object.namespace.clone().unwrap_or_default();
            let api = Api::<Event>::namespaced(client.clone(), &namespace);
            let what = || format!("CREATE events {} in {namespace}", note.reason);
            match call(limit, what, api.create(&PostParams::default(), &event)).await {
                Ok(_) => counts.posted.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    debug!(%error, "event lost");
                    counts.failed.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
    };
    (events, task)
}

fn event(note: &Note, reporter: &ReportingInstance, now: Timestamp) -> Event {
    let involved = involved(&note.subject);
    let now = Time(now);
    let kind = match note.severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    };
    Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}.", involved.name.as_deref().unwrap_or("tranche"))),
            namespace: involved.namespace.clone(),
            ..ObjectMeta::default()
        },
        involved_object: involved,
        reason: Some(note.reason.to_owned()),
        message: Some(cut(&note.message).to_owned()),
        type_: Some(kind.to_owned()),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        source: Some(EventSource { component: Some(DRIVER.to_owned()), host: Some(reporter.0.clone()) }),
        reporting_component: Some(DRIVER.to_owned()),
        reporting_instance: Some(reporter.0.clone()),
        ..Event::default()
    }
}

fn involved(subject: &EventSubject) -> ObjectReference {
    let (api_version, kind, namespace, name, uid) = match subject {
        EventSubject::Claim(claim) => {
            ("resource.k8s.io/v1", "ResourceClaim", &claim.namespace, &claim.name, claim.uid.as_str())
        }
        EventSubject::Pod { namespace, name, uid } => ("v1", "Pod", namespace, name, uid.as_str()),
    };
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        namespace: Some(namespace.clone()),
        name: Some(name.clone()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

fn cut(message: &str) -> &str {
    &message[..message.floor_char_boundary(MESSAGE_LIMIT_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let long = "é".repeat(600);
        assert_eq!(cut(&long).len(), 1024);
        let odd = format!("x{long}");
        assert_eq!(cut(&odd).len(), 1023);
    }
}
