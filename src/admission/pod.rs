//! A pod with KAI's annotations gets a claim of its own, which is named here and created by the controller
//! once it has decided: until then the scheduler does not try the pod (KEP-4381), so that nothing is tried in
//! vain.
//!
//! The pod's annotations stay, but for a pod that KAI is to bind: KAI would give it a part of a GPU by its own books, beside
//! the claim.

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};

use super::kai::{self, ContainerRef, KaiAmount, WantedShare};
use super::review::{Problem, ReviewDecision, ReviewRequest};
use super::share::{SHARE_ANNOTATION, annotation, parameters};
use crate::model::names::{QUEUE_LABEL, WORKLOAD_ANNOTATION};

/// The pod's entry in `spec.resourceClaims`.
const ENTRY: &str = "gpu-share";
/// What images made for KAI read: the part of a GPU that they have. With a given amount of memory it is known
/// only when the GPU is, so it is left out then.
const PORTIONS: [&str; 2] = ["GPU_PORTION", "RUNAI_NUM_OF_GPUS"];
const KAI_SCHEDULER: &str = "kai-scheduler";
const BEYOND_QUOTA: &str = "a queue of Kueue has admitted what this pod is of without counting the share that its \
                            annotations ask for; name a ResourceClaimTemplate of a class that the queue counts in the \
                            pod's template instead of the annotations, or have the kind of object added to webhook.podTemplates";
/// Behind the queue's name.
const NOT_ADMITTED: &str = "never admits this pod, since it names a claim and Kueue knows templates of claims alone; let a \
                            Job make the pod";
/// kubelet's image of a static pod: it cannot have claims.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Of the pod's name, within a claim's.
const NAME_BYTES_MAX: usize = 63;
/// Of the request's UID: 48 random bits, beside the pod's name.
const UNIQUE_DIGITS: usize = 12;

pub(super) fn with_share(request: &ReviewRequest) -> ReviewDecision {
    let pod = &request.object;
    if !pod["metadata"]["annotations"][MIRROR].is_null() {
        return ReviewDecision::Allow;
    }
    let mut wanted = match kai::wanted(pod) {
        Ok(None) => return ReviewDecision::Allow,
        Ok(Some(wanted)) => wanted,
        Err(problems) => return ReviewDecision::Refuse(problems),
    };
    // Below, fields are written where they are expected to be.
    if let Err(error) = Pod::deserialize(pod) {
        return ReviewDecision::Refuse(vec![Problem {
            field: "object".to_owned(),
            words: format!("is not a valid pod: {error}"),
        }]);
    }
    if is_of_template(pod) {
        return match is_kais(pod) {
            true => ReviewDecision::Change(
                json_patch::diff(pod, &without_kais_annotations(pod.clone())),
                Vec::new(),
            ),
            false => ReviewDecision::Allow,
        };
    }
    keep_container(pod, &mut wanted);
    let metadata = &pod["metadata"];
    if !metadata["annotations"][WORKLOAD_ANNOTATION].is_null() {
        return ReviewDecision::Refuse(vec![Problem {
            field: format!("metadata.annotations[{WORKLOAD_ANNOTATION}]"),
            words: BEYOND_QUOTA.to_owned(),
        }]);
    }
    let queue = metadata["labels"][QUEUE_LABEL].as_str();
    let warning = queue.map(|queue| format!("metadata.labels[{QUEUE_LABEL}]: queue {queue} {NOT_ADMITTED}"));
    let warnings = warning.into_iter().chain(wanted.chosen.clone()).collect();
    match changed(pod, &wanted, ClaimOf::Pod(&claim_name(request))) {
        Ok(changed) => {
            let changed = if is_kais(pod) { without_kais_annotations(changed) } else { changed };
            ReviewDecision::Change(json_patch::diff(pod, &changed), warnings)
        }
        Err(problem) => ReviewDecision::Refuse(vec![problem]),
    }
}

/// KAI is to bind it.
fn is_kais(pod: &Value) -> bool {
    pod["spec"]["schedulerName"] == KAI_SCHEDULER
}

/// What KAI would serve by itself says the claim now.
fn without_kais_annotations(mut pod: Value) -> Value {
    if let Some(annotations) = pod["metadata"]["annotations"].as_object_mut() {
        annotations.retain(|name, _| !kai::OF_A_SHARE.contains(&name.as_str()));
    }
    pod
}

/// A pod that is asked for a second time keeps its share where it is, whatever containers were added meanwhile.
fn keep_container(pod: &Value, wanted: &mut WantedShare) {
    let has_share = |index: &usize| {
        let uses = pod["spec"]["containers"][*index]["resources"]["claims"].as_array();
        uses.into_iter().flatten().any(|one| one["name"] == ENTRY)
    };
    let was_ours = !pod["metadata"]["annotations"][SHARE_ANNOTATION].is_null();
    let count = pod["spec"]["containers"].as_array().map_or(0, Vec::len);
    if let (true, true, Some(index)) = (was_ours, wanted.chosen.is_some(), (0..count).find(has_share)) {
        wanted.container = ContainerRef { list: "containers", index };
        wanted.chosen = None;
    }
}

/// What made the pod got the template of a claim (`workload`): the pod has its share by that.
fn is_of_template(pod: &Value) -> bool {
    let entries = pod["spec"]["resourceClaims"].as_array();
    let entry = entries.into_iter().flatten().find(|entry| entry["name"] == ENTRY);
    let template = entry.and_then(|entry| entry["resourceClaimTemplateName"].as_str());
    let digits = template.and_then(|name| name.rsplit_once(&format!("-{ENTRY}-"))).map(|(_, digits)| digits);
    let is_ours = digits.is_some_and(|digits| {
        digits.len() == UNIQUE_DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    });
    is_ours && pod["metadata"]["annotations"][SHARE_ANNOTATION].is_null()
}

/// `<pod's name>-gpu-share-<digits>`. The pod may have no name yet (generateName), and one that is created
/// again must not meet the claim of its predecessor: what is unique is taken from the request.
pub(super) fn claim_name(request: &ReviewRequest) -> String {
    let metadata = &request.object["metadata"];
    let name = ["name", "generateName"].into_iter().find_map(|field| metadata[field].as_str());
    // Both are DNS subdomains, in ASCII.
    let mut name = name.filter(|name| name.is_ascii()).unwrap_or_default().to_owned();
    name.truncate(NAME_BYTES_MAX);
    let name = name.trim_end_matches(['-', '.']);
    let name = if name.is_empty() { "pod" } else { name };
    let unique: String = request.uid.chars().filter(char::is_ascii_hexdigit).take(UNIQUE_DIGITS).collect();
    format!("{name}-{ENTRY}-{}", unique.to_ascii_lowercase())
}

/// What the pod's entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaimOf<'a> {
    /// A claim that the controller is to create.
    Pod(&'a str),
    /// A ResourceClaimTemplate that the controller is to create.
    Template(&'a str),
}

/// What the annotation says of a share.
pub(super) fn share_text(wanted: &WantedShare) -> String {
    let share = match &wanted.amount {
        KaiAmount::Memory(quantity) => parameters("memory", quantity),
        KaiAmount::Fraction(decimal) => parameters("fraction", decimal),
    };
    annotation(share, wanted.count)
}

pub(super) fn changed(pod: &Value, wanted: &WantedShare, claim: ClaimOf<'_>) -> Result<Value, Problem> {
    let mut pod = pod.clone();
    let (entry, was_ours) = match claim {
        ClaimOf::Pod(name) => {
            let had_annotation = !pod["metadata"]["annotations"][SHARE_ANNOTATION].is_null();
            pod["metadata"]["annotations"][SHARE_ANNOTATION] = json!(share_text(wanted));
            (json!({"name": ENTRY, "resourceClaimName": name}), had_annotation)
        }
        ClaimOf::Template(name) => {
            (json!({"name": ENTRY, "resourceClaimTemplateName": name}), is_of_template(&pod))
        }
    };
    let mut entries = items(&pod["spec"]["resourceClaims"]);
    match entries.iter().position(|entry| entry["name"] == ENTRY) {
        None => entries.push(entry),
        // Our own, asked for a second time, or copied along with the pod: then the claim is another pod's.
        Some(index) if was_ours => entries[index] = entry,
        Some(index) => {
            return Err(Problem {
                field: format!("spec.resourceClaims[{index}].name"),
                words: format!(
                    "{ENTRY:?} is the name of the claim that gpu-fraction or gpu-memory adds; give yours \
                     another name, or remove the annotation"
                ),
            });
        }
    }
    pod["spec"]["resourceClaims"] = json!(entries);
    let ContainerRef { list, index } = wanted.container;
    let container = &mut pod["spec"][list][index];
    let mut uses = items(&container["resources"]["claims"]);
    if !uses.iter().any(|entry| entry["name"] == ENTRY) {
        uses.push(json!({"name": ENTRY}));
    }
    container["resources"]["claims"] = json!(uses);
    if let KaiAmount::Fraction(decimal) = &wanted.amount {
        tell_portion(container, decimal);
    }
    Ok(pod)
}

/// What the author of the pod says himself is left as it is.
fn tell_portion(container: &mut Value, decimal: &str) {
    let mut env = items(&container["env"]);
    for name in PORTIONS {
        if !env.iter().any(|variable| variable["name"] == name) {
            env.push(json!({"name": name, "value": decimal}));
        }
    }
    container["env"] = json!(env);
}

fn items(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use json_patch::Patch;

    use super::*;
    use crate::admission::{ReviewAnswer, ReviewVerdict, ShareClasses, claim_spec, mutate};

    const UID: &str = "705ab4f5-6393-11e8-b7cc-42010a800002";

    fn asked(uid: &str, operation: &str, pod: &Value) -> ReviewAnswer {
        let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": uid, "operation": operation, "namespace": "ml",
            "kind": {"group": "", "version": "v1", "kind": "Pod"}, "object": pod}});
        mutate(&serde_json::to_vec(&body).unwrap()).unwrap()
    }

    /// The pod as the API server makes it of the answer.
    fn patched(uid: &str, pod: &Value) -> Value {
        let answer = asked(uid, "CREATE", pod);
        assert_ne!(answer.verdict, ReviewVerdict::Refused, "{}", answer.review);
        let mut pod = pod.clone();
        if let Some(encoded) = answer.review["response"]["patch"].as_str() {
            let bytes: k8s_openapi::ByteString = serde_json::from_value(json!(encoded)).unwrap();
            let patch: Patch = serde_json::from_slice(&bytes.0).unwrap();
            json_patch::patch(&mut pod, &patch).unwrap();
        }
        pod
    }

    fn pod(annotations: Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "train", "annotations": annotations},
            "spec": {"schedulerName": "default-scheduler", "containers": [
                {"name": "main", "image": "x", "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"cpu": "1"}}},
                {"name": "side", "image": "y", "resources": {}}]}})
    }

    fn claim_of(pod: &Value) -> String {
        pod["spec"]["resourceClaims"][0]["resourceClaimName"].as_str().unwrap().to_owned()
    }

    #[test]
    fn a_pod_with_memory_gets_a_claim_and_nothing_else() {
        let before = pod(json!({"gpu-memory": "2000"}));
        let after = patched(UID, &before);
        assert_eq!(claim_of(&after), "train-gpu-share-705ab4f56393");
        let text = after["metadata"]["annotations"][SHARE_ANNOTATION].as_str().unwrap();
        let spec = serde_json::to_value(claim_spec(text, &ShareClasses::default()).unwrap()).unwrap();
        assert_eq!(spec["devices"]["config"][0]["opaque"]["parameters"]["memory"], "2000Mi");
        // What was added, taken away again, leaves the pod as it was.
        let mut rest = after.clone();
        rest["metadata"]["annotations"].as_object_mut().unwrap().remove(SHARE_ANNOTATION);
        rest["spec"].as_object_mut().unwrap().remove("resourceClaims");
        let claims = rest["spec"]["containers"][0]["resources"].as_object_mut().unwrap().remove("claims");
        assert_eq!(claims, Some(json!([{"name": "gpu-share"}])));
        assert_eq!(rest, before);
    }

    #[test]
    fn a_pod_with_a_fraction_is_told_its_portion_as_by_kai() {
        let after = patched(UID, &pod(json!({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"})));
        let env = &after["spec"]["containers"][0]["env"];
        assert_eq!(
            *env,
            json!([{"name": "A", "value": "1"}, {"name": "GPU_PORTION", "value": "0.25"},
            {"name": "RUNAI_NUM_OF_GPUS", "value": "0.25"}])
        );
        let text = after["metadata"]["annotations"][SHARE_ANNOTATION].as_str().unwrap();
        let spec = serde_json::to_value(claim_spec(text, &ShareClasses::default()).unwrap()).unwrap();
        assert_eq!(spec["devices"]["requests"][0]["exactly"]["count"], 2);
        assert_eq!(spec["devices"]["config"][0]["opaque"]["parameters"]["fraction"], "0.25");
        let mut own = pod(json!({"gpu-fraction": "0.25"}));
        own["spec"]["containers"][0]["env"] = json!([{"name": "GPU_PORTION", "value": "mine"}]);
        let env = patched(UID, &own)["spec"]["containers"][0]["env"].clone();
        assert_eq!(env[0]["value"], "mine");
        assert_eq!((env.as_array().unwrap().len(), &env[1]["name"]), (2, &json!("RUNAI_NUM_OF_GPUS")));
    }

    #[test]
    fn the_share_goes_to_the_container_that_is_named() {
        for (name, list, index) in [("side", "containers", 1), ("setup", "initContainers", 0)] {
            let mut pod = pod(json!({"gpu-fraction": "0.5", "gpu-fraction-container-name": name}));
            pod["spec"]["initContainers"] = json!([{"name": "setup"}]);
            let after = patched(UID, &pod);
            assert_eq!(after["spec"][list][index]["resources"]["claims"], json!([{"name": "gpu-share"}]));
            assert!(after["spec"]["containers"][0]["resources"]["claims"].is_null());
        }
    }

    #[test]
    fn asking_again_changes_nothing_and_a_copied_pod_gets_a_claim_of_its_own() {
        let once = patched(UID, &pod(json!({"gpu-fraction": "0.5"})));
        assert_eq!(asked(UID, "CREATE", &once).verdict, ReviewVerdict::Allowed);
        assert_eq!(patched(UID, &once), once);
        // Invoked again for the same pod, or for a copy: only the claim's name is another.
        let other = "11111111-2222-4333-8444-555555555555";
        let mut copy = patched(other, &once);
        assert_eq!(claim_of(&copy), "train-gpu-share-111111112222");
        copy["spec"]["resourceClaims"] = once["spec"]["resourceClaims"].clone();
        assert_eq!(copy, once);
        // Another webhook has changed its mind about the amount in between.
        let mut more = once.clone();
        more["metadata"]["annotations"]["gpu-fraction"] = json!("0.75");
        let text = patched(UID, &more)["metadata"]["annotations"][SHARE_ANNOTATION].to_string();
        assert!(text.contains("0.75") && !text.contains("0.5"), "{text}");
    }

    #[test]
    fn names_are_claims_names_whatever_the_pod_is_called() {
        let mut names = BTreeSet::new();
        for (field, name) in [
            ("name", "a"),
            ("generateName", "web-5d4f8c-"),
            ("generateName", "x."),
            ("generateName", "-"),
            ("name", &"long.".repeat(50)),
            ("namespace", "ml"),
        ] {
            let mut pod = pod(json!({"gpu-memory": "1"}));
            pod["metadata"].as_object_mut().unwrap().remove("name");
            pod["metadata"][field] = json!(name);
            let claim = claim_of(&patched(UID, &pod));
            let labels = claim.split('.').all(|label| {
                let inner = label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
                inner && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
            });
            assert!(labels && claim.len() <= 253, "{claim}");
            names.insert(claim);
        }
        assert!(names.contains("web-5d4f8c-gpu-share-705ab4f56393"), "{names:?}");
        assert!(names.contains("pod-gpu-share-705ab4f56393"), "{names:?}");
    }

    #[test]
    fn claims_of_the_authors_own_stay_and_ours_is_added() {
        let mut own = pod(json!({"gpu-memory": "1"}));
        own["spec"]["resourceClaims"] = json!([{"name": "nic", "resourceClaimTemplateName": "nic"}]);
        own["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "nic"}]);
        let after = patched(UID, &own);
        assert_eq!(after["spec"]["resourceClaims"].as_array().unwrap().len(), 2);
        assert_eq!(
            after["spec"]["containers"][0]["resources"]["claims"],
            json!([{"name": "nic"}, {"name": "gpu-share"}])
        );
        own["spec"]["resourceClaims"][0]["name"] = json!("gpu-share");
        let answer = asked(UID, "CREATE", &own);
        assert_eq!(answer.verdict, ReviewVerdict::Refused);
        let message = answer.review["response"]["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("spec.resourceClaims[0].name: \"gpu-share\" is the name"), "{message}");
    }

    #[test]
    fn what_is_not_asked_for_is_let_be() {
        let share = pod(json!({"gpu-fraction": "0.5"}));
        for operation in ["UPDATE", "DELETE", "CONNECT"] {
            assert_eq!(asked(UID, operation, &share).verdict, ReviewVerdict::Allowed, "{operation}");
        }
        assert_eq!(asked(UID, "CREATE", &pod(json!({"other": "1"}))).verdict, ReviewVerdict::Allowed);
        let mirror = pod(json!({"gpu-fraction": "0.5", MIRROR: "hash"}));
        assert_eq!(asked(UID, "CREATE", &mirror).verdict, ReviewVerdict::Allowed);
    }

    #[test]
    fn what_is_no_pod_is_refused_and_disturbs_nobody() {
        let mut none = pod(json!({"gpu-fraction": "0.5"}));
        none["spec"]["containers"] = json!([]);
        let answer = asked(UID, "CREATE", &none);
        assert!(answer.review["response"]["status"]["message"].as_str().unwrap().contains("no container"));
        for (field, value) in [
            ("containers", json!(["text"])),
            ("containers", json!([{"name": "a", "resources": 5}])),
            ("containers", json!([{"name": "a", "env": {}, "resources": {"claims": "x"}}])),
            ("resourceClaims", json!(7)),
        ] {
            let mut odd = pod(json!({"gpu-fraction": "0.5"}));
            odd["spec"][field] = value.clone();
            assert_eq!(asked(UID, "CREATE", &odd).verdict, ReviewVerdict::Refused, "{value}");
        }
        for odd in [
            json!(null),
            json!([]),
            json!({"metadata": 5}),
            json!({"metadata": {"annotations": ["gpu-fraction"]}}),
        ] {
            assert_eq!(asked(UID, "CREATE", &odd).verdict, ReviewVerdict::Allowed, "{odd}");
        }
    }

    #[test]
    fn a_pod_that_a_queue_has_admitted_without_its_share_is_refused_and_one_that_may_be_is_warned() {
        let mut admitted = pod(json!({"gpu-memory": "2000", WORKLOAD_ANNOTATION: "job-train-1"}));
        let answer = asked(UID, "CREATE", &admitted);
        assert_eq!(answer.verdict, ReviewVerdict::Refused);
        let message = answer.review["response"]["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("metadata.annotations[kueue.x-k8s.io/workload]: a queue"), "{message}");
        assert!(message.contains("ResourceClaimTemplate"), "{message}");
        admitted["metadata"]["annotations"].as_object_mut().unwrap().remove("gpu-memory");
        assert_eq!(asked(UID, "CREATE", &admitted).verdict, ReviewVerdict::Allowed, "it asks for no share");
        let mut queued = pod(json!({"gpu-memory": "2000"}));
        queued["metadata"]["labels"] = json!({QUEUE_LABEL: "ml"});
        let answer = asked(UID, "CREATE", &queued);
        assert_eq!(answer.verdict, ReviewVerdict::Changed);
        let warning = answer.review["response"]["warnings"][0].as_str().unwrap();
        assert!(warning.contains("queue ml never admits this pod"), "{warning}");
        assert!(warning.ends_with("let a Job make the pod"), "{warning}");
    }

    #[test]
    fn a_pod_of_kais_scheduler_gets_its_claim_and_loses_what_kai_would_serve() {
        let annotations = json!({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2", "mps": "true",
            "gpu-fraction-container-name": "side", "other": "stays"});
        let mut kai = pod(annotations.clone());
        kai["metadata"]["labels"] = json!({"kai.scheduler/queue": "default-queue"});
        let ours = patched(UID, &kai);
        kai["spec"]["schedulerName"] = json!("kai-scheduler");
        let answer = asked(UID, "CREATE", &kai);
        assert_eq!(answer.verdict, ReviewVerdict::Changed);
        assert!(answer.review["response"]["warnings"].is_null(), "{}", answer.review);
        let after = patched(UID, &kai);
        let mut names: Vec<&String> = after["metadata"]["annotations"].as_object().unwrap().keys().collect();
        names.sort();
        assert_eq!(names, ["other", SHARE_ANNOTATION]);
        // All the rest is as for other schedulers, whose pods keep their annotations.
        let mut expected = ours;
        expected["metadata"]["annotations"] =
            json!({"other": "stays", SHARE_ANNOTATION: after["metadata"]["annotations"][SHARE_ANNOTATION]});
        expected["spec"]["schedulerName"] = json!("kai-scheduler");
        assert_eq!(after, expected);
        assert_eq!(asked(UID, "CREATE", &after).verdict, ReviewVerdict::Allowed, "asked again");
        assert_eq!(patched(UID, &after), after);
        // A pod of a Job whose template names a template of claims.
        let mut made = pod(annotations);
        made["spec"]["schedulerName"] = json!("kai-scheduler");
        made["spec"]["resourceClaims"] =
            json!([{"name": "gpu-share", "resourceClaimTemplateName": "job-gpu-share-0123456789ab"}]);
        assert_eq!(patched(UID, &made)["metadata"]["annotations"], json!({"other": "stays"}));
        // What KAI refuses is refused.
        kai["metadata"]["annotations"]["gpu-fraction"] = json!("2");
        assert_eq!(asked(UID, "CREATE", &kai).verdict, ReviewVerdict::Refused);
    }

    #[test]
    fn the_container_of_a_share_is_told_and_stays_whatever_is_put_beside_it() {
        let before = pod(json!({"gpu-fraction": "0.5"}));
        let answer = asked(UID, "CREATE", &before);
        let warning = answer.review["response"]["warnings"][0].as_str().unwrap();
        assert!(warning.contains("container \"main\" gets the share"), "{warning}");
        let mut more = patched(UID, &before);
        more["spec"]["containers"].as_array_mut().unwrap().insert(0, json!({"name": "agent", "image": "z"}));
        let after = patched(UID, &more);
        assert_eq!(after["spec"]["containers"][1]["resources"]["claims"], json!([{"name": "gpu-share"}]));
        assert!(after["spec"]["containers"][0]["resources"].is_null(), "{after}");
    }
}
