//! Whether a Job makes a pod anew that is evicted: it counts as failed, and a Job bears so many failures. Reads Jobs.

use http::Request;
use k8s_openapi::api::batch::v1::Job;
use kube::api::Resource;
use serde::Deserialize;

use super::CallError;
use super::client::{KubeCluster, call};
use super::reader::answer;
use super::sieve::{Keep, sieve};

/// What the API server takes for a Job that does not say how many failures it bears (batch/v1).
const BACKOFF_LIMIT: i64 = 6;
/// The condition of a pod that was evicted (KEP-3329).
const DISRUPTED: &str = "DisruptionTarget";
const KEEP: Keep = Keep::Only(&[
    ("metadata", Keep::Only(&[("uid", Keep::All), ("deletionTimestamp", Keep::All)])),
    (
        "spec",
        Keep::Only(&[("backoffLimit", Keep::All), ("podFailurePolicy", Keep::All), ("suspend", Keep::All)]),
    ),
    ("status", Keep::Only(&[("failed", Keep::All)])),
]);

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Seen {
    metadata: Meta,
    spec: Spec,
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    uid: String,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    backoff_limit: Option<i64>,
    pod_failure_policy: Option<Policy>,
    suspend: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Policy {
    rules: Vec<Rule>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Rule {
    action: String,
    on_pod_conditions: Vec<Condition>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    failed: Option<i64>,
}

impl Seen {
    /// Why it would make no other pod. None: it does.
    fn why_not(&self, uid: &str) -> Option<String> {
        let most = self.spec.backoff_limit.unwrap_or(BACKOFF_LIMIT);
        let failed = self.status.failed.unwrap_or(0);
        let is_meant = |rule: &Rule| rule.on_pod_conditions.iter().any(|one| one.r#type == DISRUPTED);
        // Of several rules for a condition the first decides.
        let rules = self.spec.pod_failure_policy.iter().flat_map(|policy| &policy.rules);
        let action = rules.into_iter().find(|rule| is_meant(rule)).map(|rule| rule.action.as_str());
        match action {
            _ if self.metadata.uid != uid => Some("its Job is gone".to_owned()),
            _ if self.metadata.deletion_timestamp.is_some() => Some("its Job is being deleted".to_owned()),
            _ if self.spec.suspend == Some(true) => Some("its Job is suspended".to_owned()),
            Some("Ignore") => None,
            Some("FailJob") => Some("its Job's podFailurePolicy lets the Job fail with it".to_owned()),
            _ if failed < most => None,
            _ => Some(format!(
                "its Job would fail with it: {failed} of its pods have failed, and spec.backoffLimit is {most}"
            )),
        }
    }
}

impl KubeCluster {
    /// Why the Job would not make another pod in place of one that is evicted. None: it does.
    ///
    /// # Errors
    /// The API server does not answer, or does not let us look.
    pub async fn why_job_gives_up(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Option<String>, CallError> {
        let what = || format!("GET jobs {namespace}/{name}");
        let path = format!("{}/{name}", Job::url_path(&(), Some(namespace)));
        let get = async {
            let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
            let piece = answer(&self.client(), request).await?;
            let wanted = sieve(&piece.bytes, KEEP).unwrap_or_else(|_| b"{}".to_vec());
            serde_json::from_slice::<Seen>(&wanted).map_err(kube::Error::SerdeError)
        };
        match call(self.limit(), what, get).await {
            Ok(job) => Ok(job.why_not(uid)),
            Err(CallError::NotFound { .. }) => Ok(Some("its Job is gone".to_owned())),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn why_not(spec: Value, failed: i64) -> Option<String> {
        let job = json!({"metadata": {"uid": "u"}, "spec": spec, "status": {"failed": failed}});
        serde_json::from_value::<Seen>(job).unwrap().why_not("u")
    }

    #[test]
    fn a_job_bears_an_eviction_while_it_may_fail() {
        assert_eq!(why_not(json!({}), 5), None);
        assert!(why_not(json!({}), 6).unwrap().contains("6 of its pods have failed"));
        assert!(why_not(json!({"backoffLimit": 0}), 0).unwrap().contains("spec.backoffLimit is 0"));
        assert!(why_not(json!({"suspend": true}), 0).is_some());
        let policy = |action: &str| {
            let other =
                json!({"action": "FailJob", "onPodConditions": [{"type": "ConfigIssue", "status": "True"}]});
            let rule = json!({"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]});
            json!({"backoffLimit": 0, "podFailurePolicy": {"rules": [other, rule]}})
        };
        assert_eq!(why_not(policy("Ignore"), 0), None);
        assert!(why_not(policy("FailJob"), 0).unwrap().contains("podFailurePolicy"));
        assert!(why_not(policy("Count"), 0).is_some());
        let other: Seen = serde_json::from_value(json!({"metadata": {"uid": "other"}})).unwrap();
        assert_eq!(other.why_not("u").as_deref(), Some("its Job is gone"));
    }
}
