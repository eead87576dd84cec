//! Evictions of pods (the subresource `pods/eviction` of policy/v1). The API server keeps PodDisruptionBudgets, sets the
//! condition `DisruptionTarget` (reason `EvictionByEvictionAPI`) and deletes the pod with the grace that the pod asks for.
//! Which pods end is decided elsewhere.

use http::{Request, header};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Resource;
use kube::core::Status;
use serde_json::json;

use super::CallError;
use super::client::{KubeCluster, call};
use super::reader::answer;
use super::sieve::fields;
use crate::model::claim::PodRef;

/// The cause that the API server names where a PodDisruptionBudget forbids an eviction. Its answer for too many requests has
/// the same code and no such cause.
const BUDGET: &str = "DisruptionBudget";
/// What a conflict says of a pod with another UID.
const OTHER_UID: &str = "UID in";
/// Of the words of a budget.
const WORDS_BYTES_MAX: usize = 400;

/// What became of an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eviction {
    /// The pod ends, or has ended. Its `deletionTimestamp` is set, if it still exists.
    Evicted,
    /// A PodDisruptionBudget does not let it go now, in the API server's words. Nothing was done.
    Protected(String),
    /// There is no such pod, or another has its name: the pod that was meant is gone.
    Gone,
}

impl KubeCluster {
    /// Evicts a pod if it still is the one of this UID, once: the caller decides when to ask again.
    ///
    /// # Errors
    /// The call failed, or was refused for another reason than a budget: nobody may know whether the pod ends.
    pub async fn evict_pod(&self, pod: &PodRef) -> Result<Eviction, CallError> {
        let what = || format!("EVICT pods {}/{}", pod.namespace, pod.name);
        let evict = async {
            let asked = answer(&self.client(), request(pod)?).await;
            let status = match asked {
                Ok(piece) => failure(&piece.bytes),
                Err(kube::Error::Api(status)) => Some(status),
                Err(error) => return Err(error),
            };
            match status {
                None => Ok(Eviction::Evicted),
                Some(status) => budget(&status).map(Eviction::Protected).ok_or(kube::Error::Api(status)),
            }
        };
        match call(self.limit(), what, evict).await {
            Err(CallError::NotFound { .. }) => Ok(Eviction::Gone),
            Err(CallError::Conflict { message, .. }) if message.contains(OTHER_UID) => Ok(Eviction::Gone),
            answer => answer,
        }
    }
}

/// Made here: the field of kube's own request is not the one that the API server reads, so that the UID would not count.
fn request(pod: &PodRef) -> Result<Request<Vec<u8>>, kube::Error> {
    let body = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": pod.namespace, "name": pod.name},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    });
    let path = format!("{}/{}/eviction", Pod::url_path(&(), Some(&pod.namespace)), pod.name);
    let post = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    post.body(serde_json::to_vec(&body).map_err(kube::Error::SerdeError)?).map_err(kube::Error::HttpError)
}

/// A failure that is answered with the code of a success: so is a pod that several budgets are about.
fn failure(body: &[u8]) -> Option<Box<Status>> {
    let [status] = fields(body, ["status"]);
    status.filter(|status| *status == b"\"Failure\"")?;
    serde_json::from_slice(body).ok()
}

/// What forbids the eviction, if a budget does.
fn budget(status: &Status) -> Option<String> {
    let causes = || status.details.iter().flat_map(|details| &details.causes);
    let cause = causes().find(|cause| cause.reason == BUDGET);
    let several = status.message.contains("more than one PodDisruptionBudget");
    let words = match (status.code, cause) {
        (403 | 429, Some(cause)) => format!("{} {}", status.message, cause.message),
        (500, _) if several => status.message.clone(),
        _ => return None,
    };
    Some(words[..words.floor_char_boundary(WORDS_BYTES_MAX.min(words.len()))].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, message: &str, cause: Option<&str>) -> Status {
        let causes: Vec<_> =
            cause.iter().map(|reason| json!({"reason": reason, "message": "budget b needs 2"})).collect();
        let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": message,
            "reason": "TooManyRequests", "details": {"name": "p", "causes": causes}});
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn a_budget_is_told_from_an_api_server_that_has_too_much_to_do() {
        let words = "Cannot evict pod as it would violate the pod's disruption budget.";
        let forbidden = budget(&status(429, words, Some(BUDGET))).unwrap();
        assert_eq!(forbidden, format!("{words} budget b needs 2"));
        assert!(budget(&status(403, "pdb disruptions allowed is negative", Some(BUDGET))).is_some());
        assert_eq!(budget(&status(403, "pods \"p\" is forbidden", None)), None);
        assert_eq!(budget(&status(429, "Too many requests, please try again later.", None)), None);
        assert_eq!(budget(&status(500, "etcdserver: request timed out", None)), None);
        let several = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        assert!(budget(&status(500, several, None)).is_some());
        let long = budget(&status(429, &"é".repeat(1000), Some(BUDGET))).unwrap();
        assert!(long.len() <= WORDS_BYTES_MAX);
    }

    #[test]
    fn a_failure_hides_behind_the_code_of_a_success() {
        let several =
            json!({"kind": "Status", "metadata": {}, "status": "Failure", "code": 500, "message": "m"});
        assert_eq!(failure(several.to_string().as_bytes()).unwrap().code, 500);
        let success = json!({"kind": "Status", "metadata": {}, "status": "Success"});
        assert_eq!(failure(success.to_string().as_bytes()), None);
        assert_eq!(failure(b"garbled"), None);
    }
}
