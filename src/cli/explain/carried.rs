//! What the claim itself carries for people: why it waits, and how its devices are.

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::cluster::{CallError, KubeCluster};
use crate::controller::view::claim::WAITING;
use crate::model::names::DRIVER;

/// One thing that stands in the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carried {
    /// Where.
    pub field: String,
    pub words: String,
    /// Since when, as far as the claim tells.
    pub since: Option<Timestamp>,
}

/// Reads the claim once more. One that has gone meanwhile carries nothing.
///
/// # Errors
/// The API server does not answer.
pub async fn read(cluster: &KubeCluster, namespace: &str, name: &str) -> Result<Vec<Carried>, CallError> {
    match cluster.claim_named(namespace, name).await {
        Ok(object) => Ok(carried(&object)),
        Err(CallError::NotFound { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

pub fn carried(claim: &ResourceClaim) -> Vec<Carried> {
    let mut all = Vec::new();
    let waiting = claim.metadata.annotations.as_ref().and_then(|all| all.get(WAITING));
    all.extend(waiting.map(|words| Carried {
        field: WAITING.to_owned(),
        words: words.clone(),
        since: written(claim, WAITING),
    }));
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref());
    if let Some(at) = allocation.and_then(|allocation| allocation.allocation_timestamp.as_ref()) {
        let words = "was written".to_owned();
        all.push(Carried { field: "status.allocation".to_owned(), words, since: Some(at.0) });
    }
    let devices = status.iter().flat_map(|status| status.devices.iter().flatten());
    for device in devices.filter(|device| device.driver == DRIVER) {
        for condition in device.conditions.iter().flatten() {
            let message = match condition.message.as_str() {
                "" => String::new(),
                message => format!(": {message}"),
            };
            all.push(Carried {
                field: format!("{} of {}", condition.type_, device.device),
                words: format!("{} ({}){message}", condition.status, condition.reason),
                since: Some(condition.last_transition_time.0),
            });
        }
    }
    all
}

/// When somebody last wrote an annotation, as the API server notes it.
fn written(claim: &ResourceClaim, annotation: &str) -> Option<Timestamp> {
    let field = format!("f:{annotation}");
    let fields = claim.metadata.managed_fields.iter().flatten();
    let writers = fields.filter(|entry| {
        let fields = entry.fields_v1.as_ref();
        fields.is_some_and(|fields| !fields.0["f:metadata"]["f:annotations"][&field].is_null())
    });
    writers.filter_map(|entry| entry.time.as_ref()).map(|time| time.0).max()
}
