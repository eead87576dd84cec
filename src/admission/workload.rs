//! What makes pods of a template with KAI's annotations (a Job), where a queue is to count it: the template names a
//! ResourceClaimTemplate, which queues read, instead of a claim that nobody but the controller knows of. The controller
//! creates the ResourceClaimTemplate once it sees the object itself: a review is no proof that there is one.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::json;

use super::kai;
use super::pod::{ClaimOf, changed, claim_name, share_text};
use super::review::{Problem, ReviewDecision, ReviewRequest};
use super::share::SHARE_ANNOTATION;
use crate::model::names::{TEMPLATE_ANNOTATION, TEMPLATE_LABEL};

/// Where the pods' template stands.
const AT: &str = "spec.template";

pub(super) fn with_share(request: &ReviewRequest) -> ReviewDecision {
    let template = &request.object["spec"]["template"];
    if !template.is_object() {
        return ReviewDecision::Allow;
    }
    let below = |problem: Problem| Problem { field: format!("{AT}.{}", problem.field), ..problem };
    let wanted = match kai::wanted(template) {
        Ok(None) => return ReviewDecision::Allow,
        Ok(Some(wanted)) => wanted,
        Err(problems) => return ReviewDecision::Refuse(problems.into_iter().map(below).collect()),
    };
    // Below, fields are written where they are expected to be.
    let refused =
        |field: &str, words: String| ReviewDecision::Refuse(vec![Problem { field: field.to_owned(), words }]);
    if let Err(error) = PodTemplateSpec::deserialize(template) {
        return refused(AT, format!("is not a valid template of pods: {error}"));
    }
    if let Err(error) = ObjectMeta::deserialize(&request.object["metadata"]) {
        return refused("metadata", format!("is not valid: {error}"));
    }
    let name = claim_name(request);
    match changed(template, &wanted, ClaimOf::Template(&name)) {
        Err(problem) => ReviewDecision::Refuse(vec![below(problem)]),
        Ok(template) => {
            let mut object = request.object.clone();
            object["spec"]["template"] = template;
            let metadata = &mut object["metadata"];
            metadata["labels"][TEMPLATE_LABEL] = json!("true");
            metadata["annotations"][TEMPLATE_ANNOTATION] = json!(name);
            metadata["annotations"][SHARE_ANNOTATION] = json!(share_text(&wanted));
            let words = wanted.chosen.map(|words| format!("{AT}.{words}"));
            ReviewDecision::Change(json_patch::diff(&request.object, &object), words.into_iter().collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use json_patch::Patch;
    use serde_json::{Value, json};

    use super::*;
    use crate::admission::{ReviewAnswer, ReviewVerdict, ShareClasses, claim_spec, mutate};

    const UID: &str = "705ab4f5-6393-11e8-b7cc-42010a800002";

    fn asked(group: &str, kind: &str, operation: &str, object: &Value) -> ReviewAnswer {
        let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": UID, "operation": operation, "namespace": "ml",
            "kind": {"group": group, "version": "v1", "kind": kind}, "object": object}});
        mutate(&serde_json::to_vec(&body).unwrap()).unwrap()
    }

    fn patched(object: &Value, answer: &ReviewAnswer) -> Value {
        let mut object = object.clone();
        let encoded = answer.review["response"]["patch"].clone();
        let bytes: k8s_openapi::ByteString = serde_json::from_value(encoded).expect("a patch");
        let patch: Patch = serde_json::from_slice(&bytes.0).unwrap();
        json_patch::patch(&mut object, &patch).unwrap();
        object
    }

    fn job(annotations: Value) -> Value {
        json!({"apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "train", "labels": {"kueue.x-k8s.io/queue-name": "ml"}},
            "spec": {"parallelism": 2, "template": {"metadata": {"annotations": annotations},
                "spec": {"containers": [{"name": "main", "image": "x"}], "restartPolicy": "Never"}}}})
    }

    #[test]
    fn the_pods_template_names_a_claim_template_that_a_queue_can_read() {
        let before = job(json!({"gpu-memory": "2000", "gpu-fraction-num-devices": "2"}));
        let answer = asked("batch", "Job", "CREATE", &before);
        assert_eq!(answer.verdict, ReviewVerdict::Changed, "{}", answer.review);
        let after = patched(&before, &answer);
        let pod = &after["spec"]["template"];
        let name = "train-gpu-share-705ab4f56393";
        assert_eq!(
            pod["spec"]["resourceClaims"],
            json!([{"name": "gpu-share", "resourceClaimTemplateName": name}])
        );
        assert_eq!(pod["spec"]["containers"][0]["resources"]["claims"], json!([{"name": "gpu-share"}]));
        assert!(
            pod["metadata"]["annotations"][SHARE_ANNOTATION].is_null(),
            "the controller is to plan no claim"
        );
        assert_eq!(pod["metadata"]["annotations"]["gpu-memory"], "2000", "applying it again changes nothing");
        let metadata = &after["metadata"];
        assert_eq!(metadata["labels"], json!({"kueue.x-k8s.io/queue-name": "ml", TEMPLATE_LABEL: "true"}));
        assert_eq!(metadata["annotations"][TEMPLATE_ANNOTATION], name);
        let text = metadata["annotations"][SHARE_ANNOTATION].as_str().unwrap();
        let spec = claim_spec(text, &ShareClasses::default()).unwrap();
        let spec = serde_json::to_value(spec).unwrap();
        assert_eq!(spec["devices"]["requests"][0]["exactly"]["count"], 2);
        assert_eq!(spec["devices"]["config"][0]["opaque"]["parameters"]["memory"], "2000Mi");
        assert_eq!(after["spec"]["parallelism"], 2);
        // Asked again, and for the pods that the Job makes.
        assert_eq!(asked("batch", "Job", "CREATE", &after).verdict, ReviewVerdict::Allowed);
        let mut pod = after["spec"]["template"].clone();
        pod["metadata"]["generateName"] = json!("train-");
        pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] = json!("job-train");
        assert_eq!(asked("", "Pod", "CREATE", &pod).verdict, ReviewVerdict::Allowed, "it was counted");
    }

    #[test]
    fn mistakes_are_told_where_they_stand_and_what_is_not_ours_is_let_be() {
        let answer = asked("batch", "Job", "CREATE", &job(json!({"gpu-fraction": "2"})));
        let message = answer.review["response"]["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("spec.template.metadata.annotations[gpu-fraction]: "), "{message}");
        let share = job(json!({"gpu-fraction": "0.5"}));
        for operation in ["UPDATE", "DELETE"] {
            assert_eq!(asked("batch", "Job", operation, &share).verdict, ReviewVerdict::Allowed);
        }
        assert_eq!(asked("batch", "Job", "CREATE", &job(json!({}))).verdict, ReviewVerdict::Allowed);
        let mut own = share;
        own["spec"]["template"]["spec"]["resourceClaims"] =
            json!([{"name": "gpu-share", "resourceClaimName": "mine"}]);
        let answer = asked("batch", "Job", "CREATE", &own);
        let message = answer.review["response"]["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("spec.template.spec.resourceClaims[0].name: "), "{message}");
        for odd in [json!(null), json!({"spec": 5}), json!({"spec": {"template": "x"}})] {
            assert_eq!(asked("batch", "Job", "CREATE", &odd).verdict, ReviewVerdict::Allowed, "{odd}");
        }
        for (pointer, value) in [
            ("/spec/template/spec/resourceClaims", json!("x")),
            ("/spec/template/spec/containers", json!([{"name": "a", "resources": 5}])),
            ("/metadata/labels", json!(["x"])),
        ] {
            let mut odd = job(json!({"gpu-fraction": "0.5"}));
            odd["spec"]["template"]["spec"]["resourceClaims"] = json!([]);
            *odd.pointer_mut(pointer).unwrap() = value;
            assert_eq!(asked("batch", "Job", "CREATE", &odd).verdict, ReviewVerdict::Refused, "{pointer}");
        }
    }
}
