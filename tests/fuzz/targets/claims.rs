//! What tenants write into claims, pods and their annotations.

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use tranche::admission::{self, KnownClasses, SHARE_ANNOTATION};
use tranche::cdi;
use tranche::cluster::allocation::{ClaimVersion, Marks};
use tranche::cluster::read_claim;
use tranche::cluster::verbatim::marked;
use tranche::model::claim::{Access, ClaimRef, ConfigSource};
use tranche::model::names::ClaimUid;
use tranche::model::quantity::Bytes;
use tranche::model::share::Isolation;
use tranche::params::{self, Params};
use tranche::select::{DeviceFacts, Taint};
use tranche::sharing::{self, Shareable};
use tranche::slices;

use super::jsons;
use crate::driver::meter::ready;
use crate::driver::{Form, Limits, Target};

/// Keys and values of our parts of the API.
pub const FIELDS: &[&str] = &[
    "apiVersion",
    "kind",
    "tranche.dev/v1alpha1",
    "resource.nvidia.com/v1beta1",
    "GpuShare",
    "ShareGrant",
    "GpuConfig",
    "MigDeviceConfig",
    "memory",
    "fraction",
    "compute",
    "minimumIsolation",
    "maxProcesses",
    "sharing",
    "strategy",
    "TimeSlicing",
    "MPS",
    "timeSlicingConfig",
    "interval",
    "mpsConfig",
    "defaultActiveThreadPercentage",
    "defaultPinnedDeviceMemoryLimit",
    "multiUser",
    "devices",
    "device",
    "gpu",
    "slots",
    "isolation",
    "mps",
    "kernel",
    "10Gi",
    "1Mi",
    "0.25",
    "100",
    "metadata",
    "name",
    "namespace",
    "uid",
    "annotations",
    "labels",
    "ownerReferences",
    "deletionTimestamp",
    "finalizers",
    "resourceVersion",
    "spec",
    "status",
    "requests",
    "exactly",
    "firstAvailable",
    "deviceClassName",
    "shared.gpu.nvidia.com",
    "gpu.nvidia.com",
    "count",
    "allocationMode",
    "All",
    "ExactCount",
    "selectors",
    "cel",
    "expression",
    "tolerations",
    "capacity",
    "constraints",
    "matchAttribute",
    "config",
    "opaque",
    "driver",
    "parameters",
    "allocation",
    "results",
    "pool",
    "request",
    "shareID",
    "consumedCapacity",
    "adminAccess",
    "source",
    "FromClass",
    "FromClaim",
    "nodeSelector",
    "reservedFor",
    "gpu-0",
    "tranche.dev/gpu-share",
    "tranche.dev/gang",
    "tranche.dev/policy",
    "tranche.dev/hold",
    "tranche.dev/node",
    "tranche.dev/device",
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-num-devices",
    "gpu-fraction-container-name",
    "gpu-memory-num-devices",
    "nvidia.com/gpu",
    "creationTimestamp",
    "-9999-01-02T01:59:59Z",
    "9999-12-30T22:00:00.999999999Z",
];

pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "params",
            seeds: || jsons(&parameters()),
            words: FIELDS,
            form: Form::Json,
            limits: Limits { length: 16 << 10, ..Limits::PARSER },
            run: parameters_of,
        },
        Target {
            name: "claim",
            seeds: || jsons(&[claim(), granted()]),
            words: FIELDS,
            form: Form::Json,
            limits: Limits { length: 32 << 10, ..Limits::PARSER },
            run: allocated,
        },
        Target {
            name: "annotation",
            seeds: || {
                jsons(&[json!({"share": parameters()[0], "count": 1}), json!({"share": {}, "count": 33})])
            },
            words: FIELDS,
            form: Form::Json,
            limits: Limits { length: 16 << 10, bytes: 1 << 20, per_byte: 100, ..Limits::PARSER },
            run: annotation,
        },
        Target {
            name: "review",
            seeds: || jsons(&reviews()),
            words: FIELDS,
            form: Form::Json,
            // A body of the size that a webhook takes at most may not cost more than some of it.
            limits: Limits { length: 64 << 10, millis: 1000, bytes: 1 << 20, per_byte: 40 },
            run: review,
        },
        Target {
            name: "slice",
            seeds: || jsons(&[slice()]),
            words: &[
                "attributes",
                "string",
                "int",
                "bool",
                "version",
                "strings",
                "capacity",
                "value",
                "taints",
                "key",
                "effect",
                "NoSchedule",
                "NoExecute",
                "allowMultipleAllocations",
                "devices",
                "requestPolicy",
                "nodeName",
                "pool",
                "generation",
                "resourceSliceCount",
                "1.2.3",
                "80Gi",
                "sharedCounters",
            ],
            form: Form::Json,
            limits: Limits { length: 32 << 10, bytes: 1 << 20, per_byte: 100, ..Limits::PARSER },
            run: published,
        },
        Target {
            name: "verbatim",
            seeds: || {
                vec![
                    [b"k8s\0\x12\x12".as_slice(), b"\x0a\x10\x2a\x03u-1\x32\x02\x31\x32\x72\x05other"]
                        .concat(),
                    b"k8s\0\x12\x0f\x0a\x0d\x2a\x03u-1\x62\x06\x0a\x01a\x12\x01b".to_vec(),
                ]
            },
            words: &[
                "\n",
                "\x12",
                "*",
                "2",
                "b",
                "r",
                "k8s\0",
                "u-1",
                "12",
                "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}",
            ],
            form: Form::Text,
            limits: Limits::PARSER,
            run: verbatim,
        },
    ]
}

pub fn parameters() -> Vec<Value> {
    let nvidia = |sharing: Value| json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing});
    vec![
        json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "10Gi", "compute": 25,
            "minimumIsolation": "mps", "maxProcesses": 2}),
        json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "fraction": "0.25"}),
        grant(),
        nvidia(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})),
        nvidia(
            json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50, "multiUser": true,
            "defaultPinnedDeviceMemoryLimit": "10Gi", "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"}}}),
        ),
        json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig",
            "sharing": {"strategy": "TimeSlicing"}}),
    ]
}

fn grant() -> Value {
    json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [{"device": "gpu-0",
        "gpu": "GPU-node-0-0", "memory": "10Gi", "slots": 1, "isolation": "mps", "compute": 25}]})
}

pub fn claim() -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "a", "namespace": "evil", "uid": "u-1", "resourceVersion": "12",
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com", "count": 1,
                "selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}],
                "tolerations": [{"operator": "Exists"}]}}],
            "constraints": [{"requests": ["gpu"], "matchAttribute": "gpu.nvidia.com/productName"}],
            "config": [{"requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters()[0]}}]}}})
}

/// One that has its place.
pub fn granted() -> Value {
    let mut claim = claim();
    claim["status"] = json!({"reservedFor": [{"resource": "pods", "name": "p", "uid": "p-1"}], "allocation": {
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["node-0"]}]}]},
        "devices": {
            "results": [{"driver": "gpu.nvidia.com", "pool": "node-0", "device": "gpu-0", "request": "gpu",
                "shareID": "00000000-0000-4000-8000-000000000001",
                "consumedCapacity": {"memory": "10Gi", "compute": "25", "shares": "1"}}],
            "config": [{"source": "FromClass", "requests": ["gpu"],
                "opaque": {"driver": "gpu.nvidia.com", "parameters": grant()}}]}}});
    claim
}

fn reviews() -> Vec<Value> {
    let review = |group: &str, kind: &str, operation: &str, object: Value| {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "r-1",
            "kind": {"group": group, "version": "v1", "kind": kind}, "operation": operation, "namespace": "evil",
            "name": "a", "object": object.clone(), "oldObject": if operation == "UPDATE" { object } else { json!(null) }}})
    };
    let template = json!({"metadata": {"name": "t"}, "spec": {"spec": claim()["spec"]}});
    let pod = |annotations: Value| {
        json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {
            "containers": [{"name": "main", "resources": {"limits": {"cpu": "1"}}}], "initContainers": [{"name": "i"}]}})
    };
    vec![
        review("resource.k8s.io", "ResourceClaim", "CREATE", claim()),
        review("resource.k8s.io", "ResourceClaim", "UPDATE", claim()),
        review("resource.k8s.io", "ResourceClaimTemplate", "CREATE", template),
        review("", "Pod", "CREATE", pod(json!({"gpu-fraction": "0.25"}))),
        review("", "Pod", "CREATE", pod(json!({"gpu-memory": "2000", "gpu-fraction-num-devices": "2"}))),
        review(
            "",
            "Pod",
            "CREATE",
            pod(json!({"gpu-fraction": "2.5e-1", "gpu-fraction-container-name": "i"})),
        ),
        review(
            "",
            "Pod",
            "CREATE",
            pod(json!({SHARE_ANNOTATION: json!({"share": parameters()[0], "count": 1}).to_string()})),
        ),
        review("apps", "Deployment", "DELETE", json!(null)),
    ]
}

pub fn slice() -> Value {
    let device = |minor: u32| {
        json!({"name": format!("gpu-{minor}"), "allowMultipleAllocations": true,
            "attributes": {"type": {"string": "gpu"}, "uuid": {"string": format!("GPU-node-0-{minor}")},
                "productName": {"string": "NVIDIA H100 80GB HBM3"}, "isolation": {"string": "mps"},
                "driverVersion": {"version": "580.65.6"}, "multiprocessors": {"int": 132},
                "grantableMemoryMiB": {"int": 81920}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}},
            "capacity": {"memory": {"value": "80Gi"}, "compute": {"value": "100"}, "shares": {"value": "16"}}})
    };
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "node-0-slice"},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": "node-0", "devices": [device(0), device(1)],
            "pool": {"name": "node-0", "generation": 1, "resourceSliceCount": 1}}})
}

fn parameters_of(input: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(input) else { return };
    ready();
    let Ok(params) = params::decode(&value) else { return };
    let _ = (params.kind(), params.check_source(ConfigSource::FromClaim));
    if let Params::Grant(grant) = params {
        let again = params::decode(&grant.to_parameters());
        assert_eq!(again, Ok(Params::Grant(grant)), "a grant is read as it is written");
    }
}

fn allocated(input: &[u8]) {
    let Ok(object) = serde_json::from_slice::<ResourceClaim>(input) else { return };
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let meta = &object.metadata;
    let at = ClaimRef {
        namespace: text(&meta.namespace),
        name: text(&meta.name),
        uid: ClaimUid::new(text(&meta.uid)),
    };
    ready();
    let Ok(claim) = read_claim::read(&at, &object) else { return };
    let board =
        Shareable { memory: Bytes(80 << 30), slots: 16, slots_per_share: 3, isolation: Isolation::Mps };
    for result in &claim.results {
        let _ = params::grant_of(&claim, result).map_err(|error| error.to_string());
        let _ = cdi::id(&at.uid, &result.device, result.access.share_id());
        if let Access::Share { consumed, .. } = &result.access {
            let _ = sharing::share_request(consumed, &board).map_err(|error| error.to_string());
        }
    }
}

fn annotation(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let _ =
        admission::claim_spec(text, &admission::ShareClasses::default()).map_err(|error| error.to_string());
}

fn review(input: &[u8]) {
    for answer in [admission::validate(input, &KnownClasses::default()), admission::mutate(input)] {
        let Ok(answer) = answer else { continue };
        let uid = &answer.review["response"]["uid"];
        assert!(
            uid.as_str().is_some_and(|uid| !uid.is_empty()),
            "an answer names its question: {}",
            answer.review
        );
    }
}

fn published(input: &[u8]) {
    let Ok(stored) = serde_json::from_slice::<ResourceSlice>(input) else { return };
    let sent: ResourceSlice = serde_json::from_value(slice()).unwrap();
    ready();
    let _ = slices::dropped(&sent.spec, &stored.spec).features();
    let _ = slices::dropped(&stored.spec, &sent.spec).features();
    for device in stored.spec.devices.iter().flatten() {
        let facts = DeviceFacts::of(&stored.spec.driver, device);
        assert!(facts.attributes.keys().count() <= device.attributes.as_ref().map_or(0, |all| all.len()));
        let _ = device.taints.iter().flatten().filter_map(Taint::of).count();
    }
}

fn verbatim(input: &[u8]) {
    let claim = ClaimRef { namespace: "evil".to_owned(), name: "a".to_owned(), uid: ClaimUid::new("u-1") };
    let at = ClaimVersion { claim, resource_version: "12".to_owned() };
    let annotations = vec![("a".to_owned(), Some("1".to_owned())), ("gone".to_owned(), None)];
    let marks = Marks { finalizers: Some(vec!["ours".to_owned()]), annotations };
    let Ok(Some(stored)) = marked(input, &at, &marks) else { return };
    let again =
        marked(&stored, &at, &marks).expect("what was written can be read").expect("it is the same object");
    assert_eq!(again.len(), stored.len(), "marking again changes nothing");
}
