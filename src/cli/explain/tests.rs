use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};

use super::carried::{Carried, carried};
use super::draw::{Rows, draw};
use super::find::{ExplainTarget, NamedObject, no_claim, no_pod};
use super::pod::{Template, ended, lacks};
use super::report::{ExplainReport, ExplainedClaim, Leader};
use super::{ExplainArgs, ExplainOutput};
use crate::cli::as_controller::AsControllerArgs;
use crate::cli::reach::ReachArgs;
use crate::cluster::WorkloadKind;
use crate::cluster::feed::{Change, WatchEvent};
use crate::cluster::lease::LeaseName;
use crate::controller::config::Rules;
use crate::controller::core::Core;
use crate::controller::explain::{Answer, Listing, Subject, explain};
use crate::model::names::SHARED_CLASS;
use crate::model::time::Moment;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn args(what: &str, namespace: Option<&str>) -> ExplainArgs {
    ExplainArgs {
        what: Some(what.to_owned()),
        name: None,
        filename: None,
        namespace: namespace.map(str::to_owned),
        output: ExplainOutput::Table,
        controller: AsControllerArgs {
            policy: "pack".to_owned(),
            never_hold: None,
            kai_memory_class: SHARED_CLASS.to_owned(),
            kai_fraction_class: SHARED_CLASS.to_owned(),
            controller_namespace: "tranche-system".to_owned(),
        },
        preemption: true,
        lease_name: "tranche-controller".to_owned(),
        reach: ReachArgs::default(),
    }
}

fn listed<K: serde::de::DeserializeOwned>(
    core: &mut Core,
    wrap: fn(WatchEvent<K>) -> Change,
    all: Vec<Value>,
) {
    stored(core, wrap, all.into_iter().map(|one| serde_json::from_value(one).unwrap()));
}

fn stored<K>(core: &mut Core, wrap: fn(WatchEvent<K>) -> Change, all: impl Iterator<Item = K>) {
    core.apply(wrap(WatchEvent::Anew), Moment::ZERO);
    for one in all {
        core.apply(wrap(WatchEvent::Listed(Box::new(one))), Moment::ZERO);
    }
    core.apply(wrap(WatchEvent::Complete), Moment::ZERO);
}

fn node(name: &str, spec: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec,
        "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110"}}})
}

/// A slice with eight GPUs, to be made another node's.
fn slice() -> ResourceSlice {
    let device = |minor: u32| {
        json!({"name": format!("gpu-{minor}"), "attributes": {
            "type": {"string": "gpu"}, "uuid": {"string": "GPU"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"}, "isolation": {"string": "mps"},
            "grantableMemoryMiB": {"int": 0}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}}})
    };
    serde_json::from_value(json!({"metadata": {"name": "slice"}, "spec": {"driver": "gpu.nvidia.com",
        "devices": (0..8).map(device).collect::<Vec<_>>(),
        "pool": {"name": "node", "generation": 1, "resourceSliceCount": 1}}}))
    .unwrap()
}

fn slice_of(node: &str, memory_mib: i64, slice: &ResourceSlice) -> ResourceSlice {
    let mut slice = slice.clone();
    slice.metadata.name = Some(format!("{node}-slice"));
    slice.spec.node_name = Some(node.to_owned());
    slice.spec.pool.name = node.to_owned();
    for device in slice.spec.devices.iter_mut().flatten() {
        let attributes = device.attributes.as_mut().unwrap();
        attributes.get_mut("uuid").unwrap().string = Some(format!("GPU-{node}-{}", device.name));
        attributes.get_mut("grantableMemoryMiB").unwrap().int = Some(memory_mib);
    }
    slice
}

fn claim(name: &str, memory: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "1"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
            "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {
                "apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory}}}]}}})
}

fn pod(name: &str, claim: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ml", "uid": format!("pod-{name}")}, "spec": {
        "containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}})
}

/// So many nodes with eight GPUs, of fifty sizes; every fifth is cordoned, every tenth has a taint of its own.
fn large(nodes: i64) -> Core {
    let mut core = Core::new(Rules::default(), "tranche-system");
    let name = |nth: i64| format!("node-{nth:04}");
    let spec = |nth: i64| match nth {
        nth if nth % 5 == 1 => json!({"unschedulable": true}),
        nth if nth % 10 == 2 => json!({"taints": [{"key": format!("rack-{nth}"), "effect": "NoSchedule"}]}),
        _ => json!({}),
    };
    listed(&mut core, Change::Node, (0..nodes).map(|nth| node(&name(nth), &spec(nth))).collect());
    let slice = slice();
    stored(&mut core, Change::Slice, (0..nodes).map(|nth| slice_of(&name(nth), 40_000 + nth % 50, &slice)));
    listed(&mut core, Change::Class, vec![]);
    listed(&mut core, Change::Claim, vec![claim("large", "79Gi"), claim("small", "1Gi")]);
    listed(&mut core, Change::Pod, vec![pod("large", "large"), pod("small", "small")]);
    core
}

fn report(core: &mut Core, name: &str) -> ExplainReport {
    let claim = core.view.claim_named("ml", name).unwrap().key;
    let told = explain(core, &Listing::default(), &[Subject::Claim(claim)], NOW)
        .into_iter()
        .map(|explained| ExplainedClaim { explained, carried: vec![] });
    ExplainReport {
        named: NamedObject { kind: "claim".to_owned(), namespace: "ml".to_owned(), name: name.to_owned() },
        told: told.collect(),
        leader: None,
        lacks: vec![],
        remarks: vec![],
        events: vec![],
        at: NOW,
    }
}

#[test]
fn a_thousand_nodes_are_told_in_a_few_rows() {
    let mut core = large(1000);
    let report = report(&mut core, "large");
    let text = draw(&report, Rows::Grouped);
    let expected = "\
Claim:      ml/large
Pods:       large
Answer:     waits (candidates)
Why:        needs 1 GPU; there is no candidate; left out: 5600 GPUs too small even idle (largest 40049 MiB, asked 80896), 300 nodes that the pod may not run on; node node-0001 is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it

NODE        VERDICT
700 nodes   too small even idle: 40049 MiB of 8 GPUs, needs 80896 (node node-0049, the nearest)
100 nodes   has the taint rack-2:NoSchedule, which the pod does not tolerate (node node-0002; the others are similar)
200 nodes   is cordoned; tolerate node.kubernetes.io/unschedulable or uncordon it

-o wide shows each node.
";
    assert_eq!(text, expected);
    let wide = draw(&report, Rows::Each);
    assert_eq!(wide.lines().filter(|line| line.starts_with("node-")).count(), 1000);
    assert_eq!(report.json()["claims"][0]["nodes"].as_array().unwrap().len(), 1000);
}

#[test]
fn names_of_claims_and_pods_are_told_apart() {
    let claim = |namespace: Option<&str>, name: &str| {
        let namespace = namespace.map(str::to_owned);
        Some(ExplainTarget::Claim { namespace, name: name.to_owned() })
    };
    let pod = |namespace: Option<&str>| {
        Some(ExplainTarget::Pod { namespace: namespace.map(str::to_owned), name: "a".to_owned() })
    };
    let workload =
        |kind| Some(ExplainTarget::Workload { kind, namespace: Some("ml".to_owned()), name: "a".to_owned() });
    for (what, namespace, expected) in [
        ("a", None, claim(None, "a")),
        ("a", Some("ml"), claim(Some("ml"), "a")),
        ("ml/a", None, claim(Some("ml"), "a")),
        ("ml/a", Some("ml"), claim(Some("ml"), "a")),
        ("resourceclaim/a", Some("ml"), claim(Some("ml"), "a")),
        ("pod/a", None, pod(None)),
        ("po/a", Some("ml"), pod(Some("ml"))),
        ("deployment/a", Some("ml"), workload(WorkloadKind::Deployment)),
        ("sts/a", Some("ml"), workload(WorkloadKind::StatefulSet)),
        ("jobs/a", Some("ml"), workload(WorkloadKind::Job)),
        ("rs/a", Some("ml"), workload(WorkloadKind::ReplicaSet)),
        ("ds/a", Some("ml"), workload(WorkloadKind::DaemonSet)),
        ("cj/a", Some("ml"), workload(WorkloadKind::CronJob)),
        ("ml/a", Some("team"), None),
        ("", None, None),
        ("a/", None, None),
        ("a/b/c", None, None),
        ("a b", None, None),
    ] {
        assert_eq!(ExplainTarget::parse(&args(what, namespace)).ok(), expected, "{what} {namespace:?}");
    }
    let two = |kind: &str| {
        ExplainTarget::parse(&ExplainArgs { name: Some("a".to_owned()), ..args(kind, Some("ml")) })
    };
    assert_eq!(two("pod").ok(), pod(Some("ml")));
    assert_eq!(two("deploy").ok(), workload(WorkloadKind::Deployment));
    let words = two("service").unwrap_err().to_string();
    assert!(words.contains("\"service\" is not a kind that can be explained; give pod, "), "{words}");
    let words = ExplainTarget::parse(&args("ml/a", Some("team"))).unwrap_err().to_string();
    assert!(words.contains("-n team name two namespaces"), "{words}");
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let mut core = Core::new(Rules::default(), "tranche-system");
    let mut other = claim("train", "1Gi");
    other["metadata"]["namespace"] = json!("team");
    other["metadata"]["uid"] = json!("other");
    listed(&mut core, Change::Claim, vec![claim("infer-gpu-x7k2p", "1Gi"), claim("tran", "1Gi"), other]);
    listed(&mut core, Change::Pod, vec![pod("web", "tran")]);
    let named = |kind: &str, namespace: &str, name: &str| NamedObject {
        kind: kind.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    let claim =
        |namespace: &str, name: &str| no_claim(&core.view, &named("claim", namespace, name)).to_string();
    assert_eq!(
        claim("ml", "train"),
        "there is no claim train in namespace ml; similar there: tran; there is one of that name in team"
    );
    assert_eq!(
        claim("ml", "infer"),
        "there is no claim infer in namespace ml; similar there: infer-gpu-x7k2p"
    );
    assert_eq!(
        claim("ml", "web"),
        "there is no claim web in namespace ml, but a pod of that name: ask for pod/web"
    );
    assert_eq!(
        claim("ml", "nothing"),
        "there is no claim nothing in namespace ml, and none of a similar name among the 2 there"
    );
    assert_eq!(
        claim("mll", "nothing"),
        "there is no claim nothing in namespace mll, and no other claim either; is it in another namespace? (-n)"
    );
    let words = no_pod(&core.view, &named("pod", "ml", "wen")).to_string();
    assert_eq!(words, "there is no pod wen in namespace ml; similar there: web");
}

#[test]
fn a_pod_tells_what_it_lacks() {
    let read = |value: Value| serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(value).unwrap();
    let over = read(json!({"status": {"phase": "Failed"}}));
    assert_eq!(ended(&over).unwrap(), "the pod has ended (Failed): its devices were released");
    let template = read(json!({"metadata": {"namespace": "ml"}, "spec": {"containers": [],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "share"}]}}));
    assert_eq!(ended(&template), None);
    let told = |found: Option<Template>| {
        lacks(&template, &found.into_iter().map(|one| ("share".to_owned(), one)).collect()).remove(0)
    };
    let begin =
        "kube-controller-manager has not created the claim of its entry gpu from the template share yet: ";
    for (found, words) in [
        (None, "does the template exist?"),
        (Some(Template::Unknown), "does the template exist?"),
        (Some(Template::Missing), "there is no ResourceClaimTemplate share in namespace ml"),
        (Some(Template::There { full: vec!["full".to_owned()] }), "full"),
        (Some(Template::There { full: vec![] }), "the pod's events tell why"),
    ] {
        assert!(told(found.clone()).starts_with(&format!("{begin}{words}")), "{words}: {}", told(found));
    }
    let kai = read(json!({"metadata": {"annotations": {"gpu-memory": "2000"}}, "spec": {"containers": []}}));
    let words = lacks(&kai, &std::collections::BTreeMap::new());
    assert!(words[0].contains("tranche.dev/kai-annotations=enabled"), "{words:?}");
}

#[test]
fn what_the_claim_carries_is_told_with_its_age() {
    let mut object = claim("a", "1Gi");
    object["metadata"]["annotations"] = json!({"tranche.dev/waiting": "needs 1024 MiB"});
    object["metadata"]["managedFields"] = json!([
        {"manager": "kubectl", "time": "1970-01-01T00:00:50Z", "fieldsV1": {"f:spec": {}}},
        {"manager": "tranche", "time": "1970-01-01T00:00:10Z",
         "fieldsV1": {"f:metadata": {"f:annotations": {"f:tranche.dev/waiting": {}}}}}]);
    object["status"] = json!({
        "allocation": {"allocationTimestamp": "1970-01-01T00:00:20Z"},
        "devices": [{"driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0", "conditions": [
            {"type": "Ready", "status": "True", "reason": "Prepared", "message": "",
             "lastTransitionTime": "1970-01-01T00:00:30Z"}]}]});
    let after = |seconds| Some(NOW + SignedDuration::from_secs(seconds));
    let one =
        |field: &str, words: &str, since| Carried { field: field.to_owned(), words: words.to_owned(), since };
    let all = [
        one("tranche.dev/waiting", "needs 1024 MiB", after(10)),
        one("status.allocation", "was written", after(20)),
        one("Ready of gpu-0", "True (Prepared)", after(30)),
    ];
    assert_eq!(carried(&serde_json::from_value(object).unwrap()), all);
    let mut core = large(1);
    let mut report = report(&mut core, "large");
    report.told[0].carried = all.to_vec();
    report.at = NOW + SignedDuration::from_mins(5);
    let text = draw(&report, Rows::Grouped);
    assert!(text.contains("\nOn it:      tranche.dev/waiting, 5m ago: needs 1024 MiB\n"), "{text}");
    assert!(text.contains("\n            Ready of gpu-0, 4m ago: True (Prepared)\n"), "{text}");
}

#[test]
fn who_leads_is_told_where_it_matters() {
    let at = LeaseName { namespace: "tranche-system".to_owned(), name: "tranche-controller".to_owned() };
    let mut core = large(1);
    let mut report = report(&mut core, "small");
    assert!(matches!(report.told[0].explained.answer, Answer::Would { .. }));
    report.leader = Some(Leader::None { at });
    let text = draw(&report, Rows::Grouped);
    let words = "\nController: no controller leads, so nothing is placed: there is no lease \
                 tranche-system/tranche-controller;";
    assert!(text.contains(words), "{text}");
    assert_eq!(report.exit_code(), 0);
    report.lacks.push("a claim".to_owned());
    assert_eq!(report.exit_code(), super::EXIT_REFUSED);
}
