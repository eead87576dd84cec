//! The controller against an API server in memory: its lease, its holds, its allocations.

use std::time::Duration;

use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tranche::admission::ShareClasses;
use tranche::cluster::KubeCluster;
use tranche::cluster::makers::MakerKind;
use tranche::controller::config::{ControllerSettings, Leasing, Rules};
use tranche::controller::holds::HoldPace;
use tranche::controller::{ControllerMetrics, start};
use tranche::ops::drain::Signals;
use tranche::ops::metrics::{registry, text};
use tranche::ops::tasks::Tasks;

use crate::mock_api::{Failure, MockApi, PATIENCE, Verb};
use crate::objects::{put_node, share};

const CLAIMS: &str = "resourceclaims";
const DRIVER: &str = "gpu.nvidia.com";
const NAMESPACE: &str = "tranche-system";
const DRAIN: Duration = Duration::from_secs(5);

/// A controller at work.
struct Running {
    stop: CancellationToken,
    tasks: JoinHandle<Result<(), tranche::ops::OpsError>>,
}

impl Running {
    async fn end(self) {
        self.stop.cancel();
        self.tasks.await.unwrap().unwrap();
    }
}

/// A machine that stands still for some seconds costs nobody the lead.
const LONG_LEASE: Duration = Duration::from_secs(15);
/// Of tests that wait until a lease has run out; that which [`cluster`] has is given out for as long.
const SHORT_LEASE: Duration = Duration::from_secs(3);

fn settings(identity: &str) -> ControllerSettings {
    ControllerSettings {
        identity: identity.to_owned(),
        namespace: NAMESPACE.to_owned(),
        lease: Leasing {
            name: "tranche-controller".to_owned(),
            duration: LONG_LEASE,
            renew_every: Duration::from_millis(100),
        },
        deployment: Some("tranche-controller".to_owned()),
        kubeconfig: None,
        ops_address: "127.0.0.1:0".parse().unwrap(),
        mirror: false,
        makers: vec![],
        share_classes: ShareClasses::default(),
        rules: Rules {
            holds: HoldPace {
                settle: Duration::from_millis(50),
                keep_warm: Duration::from_secs(3600),
                leave: Duration::from_millis(50),
                ahead: 0,
            },
            ..Rules::default()
        },
    }
}

async fn begin(api: &MockApi, settings: ControllerSettings) -> Running {
    begin_counted(api, settings, &mut registry()).await
}

/// Its metrics are in the registry.
async fn begin_counted(api: &MockApi, settings: ControllerSettings, registry: &mut Registry) -> Running {
    let stop = CancellationToken::new();
    let mut tasks = Tasks::new(stop.clone());
    // Much less than the lease: what is begun must be over before somebody else may lead.
    let cluster = KubeCluster::with_client(api.client()).with_limit(settings.lease.duration / 3);
    let metrics = ControllerMetrics::register(registry);
    start(&settings, cluster, metrics, None, &mut tasks).await.unwrap();
    let tasks = tokio::spawn(tasks.run(Signals::catch().unwrap(), DRAIN));
    Running { stop, tasks }
}

/// A cluster with one node of so many GPUs of 80 GiB, and a given-up lease, so that nobody is waited for.
fn cluster(gpus: u32) -> MockApi {
    let api = MockApi::new();
    api.put(
        "deployments",
        json!({"metadata": {"name": "tranche-controller", "namespace": NAMESPACE, "uid": "own"}}),
    );
    api.put(
        "leases",
        json!({"metadata": {"name": "tranche-controller", "namespace": NAMESPACE},
        "spec": {"holderIdentity": "", "leaseDurationSeconds": SHORT_LEASE.as_secs()}}),
    );
    put_node(&api, "node-a", gpus, json!({}));
    api
}

fn put_claim(api: &MockApi, name: &str, amount: Value) {
    api.put(CLAIMS, share(name, amount));
}

fn put_pod(api: &MockApi, name: &str, claims: &[&str]) {
    let claims: Vec<Value> =
        claims.iter().map(|one| json!({"name": one, "resourceClaimName": one})).collect();
    api.put("pods", json!({"metadata": {"name": name, "namespace": "ml", "uid": format!("pod-{name}")},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": claims}, "status": {"phase": "Pending"}}));
}

fn claim(api: &MockApi, name: &str) -> Value {
    api.list(CLAIMS).into_iter().find(|one| one["metadata"]["name"] == name).unwrap_or_default()
}

fn is_allocated(api: &MockApi, name: &str) -> bool {
    claim(api, name)["status"]["allocation"].is_object()
}

fn results(claim: &Value) -> Vec<Value> {
    claim["status"]["allocation"]["devices"]["results"].as_array().cloned().unwrap_or_default()
}

fn holds(api: &MockApi) -> Vec<Value> {
    let all = api.list(CLAIMS);
    all.into_iter().filter(|one| one["metadata"]["labels"]["tranche.dev/hold"] == "true").collect()
}

#[tokio::test]
async fn products_are_mirrored_for_queues_until_that_is_switched_off() {
    let api = cluster(2);
    let mirrors = |api: &MockApi| -> Vec<Value> {
        let all = api.list("resourceslices").into_iter();
        all.filter(|slice| slice["metadata"]["labels"]["tranche.dev/mirror"] == "true").collect()
    };
    let on = ControllerSettings { mirror: true, ..settings("one") };
    let controller = begin(&api, on).await;
    api.until("the only product to be mirrored", |api| mirrors(api).len() == 1).await;
    let slice = mirrors(&api).remove(0);
    assert_eq!((&slice["spec"]["nodeName"], &slice["spec"]["driver"]), (&Value::Null, &json!(DRIVER)));
    assert_eq!(slice["spec"]["devices"].as_array().map(Vec::len), Some(32));
    // What is mirrored is no GPU to the controller.
    put_claim(&api, "small", json!({"memory": "2000Mi"}));
    put_pod(&api, "user", &["small"]);
    api.until("the claim is allocated", |api| is_allocated(api, "small")).await;
    assert_eq!(results(&claim(&api, "small"))[0]["pool"], "node-a");
    controller.end().await;
    let controller = begin(&api, settings("two")).await;
    api.until("no product to be mirrored", |api| mirrors(api).is_empty()).await;
    assert!(!api.list("resourceslices").is_empty(), "the nodes' own slices stay");
    controller.end().await;
}

#[tokio::test]
async fn a_labelled_job_gets_its_template_where_an_administrator_allows_it() {
    let api = cluster(1);
    let opted = json!({"tranche.dev/kai-annotations": "enabled"});
    api.put("namespaces", json!({"metadata": {"name": "ml", "labels": opted}}));
    api.put("namespaces", json!({"metadata": {"name": "other"}}));
    let share = |amount: &str| {
        let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": amount});
        json!({"share": share, "count": 1}).to_string()
    };
    let put_job = |namespace: &str, name: &str, share: &str| {
        let annotations = json!({"tranche.dev/share-template-name": format!("{name}-gpu-share"),
            "tranche.dev/gpu-share": share});
        api.put(
            "jobs",
            json!({"metadata": {"name": name, "namespace": namespace, "uid": name,
            "labels": {"tranche.dev/share-template": "true"}, "annotations": annotations}, "spec": {}}),
        );
    };
    put_job("other", "stranger", &share("2000Mi"));
    put_job("ml", "odd", "none that the webhook writes");
    put_job("ml", "train", &share("2000Mi"));
    let kind = |part: &str| part.to_owned();
    let makers = vec![MakerKind {
        group: kind("batch"),
        version: kind("v1"),
        plural: kind("jobs"),
        kind: kind("Job"),
    }];
    let controller = begin(&api, ControllerSettings { makers, ..settings("one") }).await;
    let there = |api: &MockApi| !api.list("resourceclaimtemplates").is_empty();
    api.until("the template", there).await;
    put_job("ml", "later", &share("1Gi"));
    let both = |api: &MockApi| api.list("resourceclaimtemplates").len() == 2;
    api.until("the template of what came later", both).await;
    let all = api.list("resourceclaimtemplates");
    let named: Vec<&Value> = all.iter().map(|one| &one["metadata"]["ownerReferences"][0]["name"]).collect();
    assert!(named.contains(&&json!("train")) && named.contains(&&json!("later")), "{named:?}");
    let train = all.iter().find(|one| one["metadata"]["name"] == "train-gpu-share").unwrap();
    let request = &train["spec"]["spec"]["devices"]["requests"][0]["exactly"];
    assert_eq!(request["capacity"]["requests"]["memory"], "2000Mi");
    controller.end().await;
}

#[tokio::test]
async fn templates_of_another_kind_are_made_too_and_one_that_was_refused_is_tried_again() {
    let api = cluster(1);
    let opted = json!({"tranche.dev/kai-annotations": "enabled"});
    api.put("namespaces", json!({"metadata": {"name": "ml", "labels": opted}}));
    let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "2000Mi"});
    let share = json!({"share": share, "count": 1}).to_string();
    let put = |plural: &str, name: &str| {
        let annotations = json!({"tranche.dev/share-template-name": format!("{name}-gpu-share"),
            "tranche.dev/gpu-share": share});
        api.put(
            plural,
            json!({"metadata": {"name": name, "namespace": "ml", "uid": name,
            "labels": {"tranche.dev/share-template": "true"}, "annotations": annotations}, "spec": {}}),
        );
    };
    let kind = |group: &str, plural: &str, kind: &str| MakerKind {
        group: group.to_owned(),
        version: "v1".to_owned(),
        plural: plural.to_owned(),
        kind: kind.to_owned(),
    };
    let makers = vec![kind("batch", "jobs", "Job"), kind("kubeflow.org", "pytorchjobs", "PyTorchJob")];
    let mut registry = registry();
    let settings = ControllerSettings { makers, ..settings("one") };
    let controller = begin_counted(&api, settings, &mut registry).await;
    put("jobs", "job");
    api.until("the Job's template", |api| api.list("resourceclaimtemplates").len() == 1).await;
    api.fail(Verb::Create, "resourceclaimtemplates", Failure::Status(403, "Forbidden"));
    put("pytorchjobs", "train");
    api.until("the first try to be refused", MockApi::has_failed).await;
    api.until("the other kind's template", |api| api.list("resourceclaimtemplates").len() == 2).await;
    let all = api.list("resourceclaimtemplates");
    let train = all.iter().find(|one| one["metadata"]["name"] == "train-gpu-share").unwrap();
    let owner = &train["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["apiVersion"], &owner["kind"], &owner["name"], &owner["uid"]),
        (&json!("kubeflow.org/v1"), &json!("PyTorchJob"), &json!("train"), &json!("train"))
    );
    controller.end().await;
    let counted = text(&registry).unwrap();
    for (result, times) in [("created", 2), ("retried", 1)] {
        let line = format!("tranche_controller_templates_total{{result=\"{result}\"}} {times}");
        assert!(counted.lines().any(|one| one == line), "{line}: {counted}");
    }
}

fn class(name: &str, selector: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": selector}}]}})
}

/// A queue counts a class in one unit: amounts and fractions may each have one.
#[tokio::test]
async fn claims_of_kais_annotations_are_of_the_classes_that_an_administrator_names_once_these_are_ours() {
    const MARK: &str = "device.driver == 'gpu.nvidia.com' && \
                        device.attributes['gpu.nvidia.com'].type == 'placed-by-controller'";
    let api = cluster(1);
    let opted = json!({"tranche.dev/kai-annotations": "enabled"});
    api.put("namespaces", json!({"metadata": {"name": "ml", "labels": opted}}));
    // It is there, and kube-scheduler's: a claim of it would be given a whole GPU.
    api.put("deviceclasses", class("parts.example.com", "device.driver == 'gpu.nvidia.com'"));
    api.put("deviceclasses", class("gib.example.com", MARK));
    let share = |field: &str, amount: &str| {
        let share = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", field: amount});
        json!({"share": share, "count": 1}).to_string()
    };
    let put_pod = |name: &str, share: &str| {
        let claim = format!("{name}-gpu-share");
        api.put(
            "pods",
            json!({"metadata": {"name": name, "namespace": "ml", "uid": name,
                "annotations": {"tranche.dev/gpu-share": share}},
                "spec": {"containers": [{"name": "main"}],
                    "resourceClaims": [{"name": "gpu-share", "resourceClaimName": claim}]}}),
        );
    };
    let (memory, fraction) = (share("memory", "2000Mi"), share("fraction", "0.25"));
    for (name, share) in [("gib", &memory), ("part", &fraction)] {
        put_pod(name, share);
        let annotations = json!({"tranche.dev/share-template-name": format!("{name}-job"),
            "tranche.dev/gpu-share": share});
        api.put(
            "jobs",
            json!({"metadata": {"name": name, "namespace": "ml", "uid": format!("job-{name}"),
                "labels": {"tranche.dev/share-template": "true"}, "annotations": annotations}, "spec": {}}),
        );
    }
    let [group, version, plural, kind] = ["batch", "v1", "jobs", "Job"].map(str::to_owned);
    let settings = ControllerSettings {
        makers: vec![MakerKind { group, version, plural, kind }],
        share_classes: ShareClasses::new("gib.example.com".to_owned(), "parts.example.com".to_owned()),
        ..settings("one")
    };
    let mut registry = registry();
    let controller = begin_counted(&api, settings, &mut registry).await;
    api.until("the claim of an amount", |api| is_allocated(api, "gib-gpu-share")).await;
    let of = |object: &Value| object["devices"]["requests"][0]["exactly"]["deviceClassName"].clone();
    assert_eq!(of(&claim(&api, "gib-gpu-share")["spec"]), "gib.example.com");
    api.until("the template of an amount", |api| api.list("resourceclaimtemplates").len() == 1).await;
    assert_eq!(of(&api.list("resourceclaimtemplates")[0]["spec"]["spec"]), "gib.example.com");
    let told = |pod: &'static str, words: &'static str| {
        move |api: &MockApi| {
            let of_pod = |event: &&Value| event["involvedObject"]["name"] == pod;
            api.list("events").iter().filter(of_pod).any(|event| event["message"].to_string().contains(words))
        }
    };
    let other = "DeviceClass parts.example.com, of which an administrator wants such claims \
                 (webhook.kaiClasses), is not placed by Tranche's controller";
    api.until("the pod of a fraction to be told", told("part", other)).await;
    let line = "tranche_controller_templates_total{result=\"retried\"} ";
    let waits = |_: &MockApi| text(&registry).unwrap().lines().any(|one| one.starts_with(line));
    api.until("the template to wait for its class", waits).await;
    assert_eq!(api.list("resourceclaimtemplates").len(), 1);
    assert!(!api.list(CLAIMS).iter().any(|claim| claim["metadata"]["name"] == "part-gpu-share"));
    api.put("deviceclasses", class("parts.example.com", MARK));
    api.until("the claim of a fraction", |api| is_allocated(api, "part-gpu-share")).await;
    assert_eq!(of(&claim(&api, "part-gpu-share")["spec"]), "parts.example.com");
    // With its class goes what is only planned; a claim that exists stays.
    put_pod("large", &share("memory", "900Gi"));
    api.until("the large one to wait", told("large", "too small even idle")).await;
    api.remove("deviceclasses", "gib.example.com");
    put_pod("late", &memory);
    api.until("a late one to be told", told("late", "(webhook.kaiClasses), does not exist")).await;
    api.put("deviceclasses", class("gib.example.com", MARK));
    api.until("the claim of the late one", |api| is_allocated(api, "late-gpu-share")).await;
    assert!(is_allocated(&api, "gib-gpu-share"));
    controller.end().await;
}

/// However long a round takes, the lease is renewed.
#[tokio::test]
async fn the_lease_has_a_thread_without_rounds_and_writes() {
    let api = cluster(1);
    let mut tasks = Tasks::new(CancellationToken::new());
    let client = KubeCluster::with_client(api.client());
    let metrics = ControllerMetrics::register(&mut registry());
    start(&settings("one"), client, metrics, None, &mut tasks).await.unwrap();
    let of =
        |task: &str| *tasks.places().get(task).unwrap_or_else(|| panic!("{task} has no thread of its own"));
    for other in ["controller", "writer", "events", "mirror", "templates"] {
        assert_ne!(of("lease"), of(other), "{other} may hold up the lease");
    }
}

#[tokio::test]
async fn claims_that_nobody_can_read_cost_nobody_else() {
    let api = cluster(1);
    api.serve_bytes("@bytes", b"\xff\xfe");
    api.serve_bytes("@half", b"\\ud800");
    let strange = |name: &str, driver: &str, parameters: Value| {
        let mut claim = share(name, json!({"memory": "1Gi"}));
        let entry = json!({"opaque": {"driver": driver, "parameters": parameters}});
        claim["spec"]["devices"]["config"].as_array_mut().unwrap().push(entry);
        claim
    };
    let maps: Vec<Value> = (0..1400).map(|_| json!({"": 0})).collect();
    api.put(CLAIMS, strange("bytes", "nic.example.com", json!({"x": "@bytes"})));
    api.put(CLAIMS, strange("half", "nic.example.com", json!({"x": "@half"})));
    api.put(CLAIMS, strange("ours-bytes", DRIVER, json!({"x": "@bytes"})));
    api.put(CLAIMS, strange("ours-fat", DRIVER, json!({"a": maps})));
    put_claim(&api, "usual", json!({"memory": "2000Mi"}));
    for name in ["usual", "bytes", "half", "ours-bytes", "ours-fat"] {
        put_pod(&api, name, &[name]);
    }
    let controller = begin(&api, settings("one")).await;
    // What others are told is none of our business, and our own writes to such a claim are understood.
    for name in ["usual", "bytes", "half"] {
        api.until(&format!("{name} is allocated"), |api| is_allocated(api, name)).await;
    }
    let config = claim(&api, "bytes")["status"]["allocation"]["devices"]["config"].clone();
    let drivers: Vec<&Value> =
        config.as_array().unwrap().iter().map(|one| &one["opaque"]["driver"]).collect();
    assert_eq!(drivers, [DRIVER, DRIVER], "{config}");
    for (name, words) in [("ours-bytes", "apiVersion"), ("ours-fat", "must be a JSON object")] {
        let told = |api: &MockApi| {
            let waiting = claim(api, name)["metadata"]["annotations"]["tranche.dev/waiting"].to_string();
            waiting.contains("spec.devices.config[1].opaque.parameters") && waiting.contains(words)
        };
        api.until(&format!("{name} is told why it waits"), told).await;
    }
    controller.end().await;
}

#[tokio::test]
async fn a_claim_is_held_placed_and_told_of() {
    let api = cluster(2);
    put_claim(&api, "small", json!({"memory": "2000Mi"}));
    put_pod(&api, "user", &["small"]);
    let controller = begin(&api, settings("one")).await;
    api.until("the claim is allocated", |api| is_allocated(api, "small")).await;

    let hold = holds(&api).remove(0);
    assert_eq!(hold["metadata"]["namespace"], NAMESPACE);
    assert_eq!(hold["metadata"]["ownerReferences"][0]["uid"], "own");
    assert_eq!(hold["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"], "gpu.nvidia.com");
    let held = results(&hold).remove(0);
    assert_eq!(
        (&held["pool"], &held["device"], &held["shareID"]),
        (&json!("node-a"), &json!("gpu-0"), &Value::Null)
    );

    let claim = claim(&api, "small");
    assert_eq!(claim["metadata"]["finalizers"], json!(["resource.kubernetes.io/delete-protection"]));
    let allocation = &claim["status"]["allocation"];
    assert!(allocation["allocationTimestamp"].is_string(), "{allocation}");
    assert_eq!(
        allocation["nodeSelector"]["nodeSelectorTerms"],
        json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]}])
    );
    let result = results(&claim).remove(0);
    assert_eq!((&result["pool"], &result["device"]), (&json!("node-a"), &json!("gpu-0")));
    assert_eq!(result["consumedCapacity"], json!({"memory": "2000Mi", "compute": "0", "shares": "1"}));
    assert_eq!(
        allocation["devices"]["config"][0],
        json!({"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": {
            "apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [{
                "device": "gpu-0", "gpu": "GPU-node-a-0", "memory": "2000Mi", "slots": 1, "isolation": "mps"}]}}})
    );
    assert_eq!(allocation["devices"]["config"][1]["source"], "FromClaim");
    let placed = |api: &MockApi| api.list("events").iter().any(|event| event["reason"] == "GpuSharePlaced");
    api.until("the pod's event", placed).await;
    controller.end().await;
    let lease = api.list("leases").remove(0);
    assert_eq!(lease["spec"]["holderIdentity"], "", "the lease is given up");
}

#[tokio::test]
async fn the_next_share_of_a_held_gpu_waits_for_nothing_and_stands_beside_it() {
    let api = cluster(2);
    let controller = begin(&api, settings("one")).await;
    for (name, share) in [("a", json!({"memory": "20Gi"})), ("b", json!({"fraction": "0.25"}))] {
        put_claim(&api, name, share);
        put_pod(&api, name, &[name]);
        api.until("the claim is allocated", |api| is_allocated(api, name)).await;
    }
    let devices: Vec<Value> =
        ["a", "b"].map(|name| results(&claim(&api, name))[0]["device"].clone()).to_vec();
    assert_eq!(devices[0], devices[1], "packed");
    assert_eq!(results(&claim(&api, "b"))[0]["consumedCapacity"]["memory"], "20Gi");
    assert_eq!(results(&claim(&api, "b"))[0]["consumedCapacity"]["compute"], "25");
    assert_eq!(holds(&api).len(), 1);
    controller.end().await;
}

#[tokio::test]
async fn taint_rules_count_where_the_api_server_has_them_and_are_not_missed_elsewhere() {
    for served in [true, false] {
        let api = cluster(2);
        if !served {
            api.unserve("devicetaintrules");
        }
        api.put(
            "devicetaintrules",
            json!({"metadata": {"name": "repair", "uid": "repair"}, "spec": {
                "deviceSelector": {"pool": "node-a", "device": "gpu-0"},
                "taint": {"key": "repair", "effect": "NoSchedule"}}}),
        );
        put_claim(&api, "a", json!({"memory": "10Gi"}));
        put_pod(&api, "user", &["a"]);
        let controller = begin(&api, settings("one")).await;
        api.until("the claim to be placed", |api| is_allocated(api, "a")).await;
        let device = if served { "gpu-1" } else { "gpu-0" };
        assert_eq!(results(&claim(&api, "a"))[0]["device"], device, "served: {served}");
        controller.end().await;
    }
}

/// Where volumes may not be seen shares are placed all the same.
#[tokio::test]
async fn a_volume_of_a_node_takes_its_pod_there_where_volumes_may_be_seen() {
    for seen in [true, false] {
        let api = cluster(2);
        put_node(&api, "node-b", 2, json!({}));
        if !seen {
            // More often than is asked while the test runs.
            (0..100)
                .for_each(|_| api.fail(Verb::List, "persistentvolumes", Failure::Status(403, "Forbidden")));
        }
        let here = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"]}]);
        api.put(
            "persistentvolumes",
            json!({"metadata": {"name": "pv", "uid": "pv"}, "spec": {
                "claimRef": {"namespace": "ml", "name": "home"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}}},
                "status": {"phase": "Bound"}}),
        );
        api.edit("nodes", |node| {
            node["metadata"]["labels"]["kubernetes.io/hostname"] = node["metadata"]["name"].clone();
        });
        put_claim(&api, "a", json!({"memory": "10Gi"}));
        put_pod(&api, "user", &["a"]);
        api.edit("pods", |pod| {
            pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "home"}}]);
        });
        let controller = begin(&api, settings("one")).await;
        api.until("the claim to be placed", |api| is_allocated(api, "a")).await;
        let pool = results(&claim(&api, "a"))[0]["pool"].as_str().unwrap_or_default().to_owned();
        let node = if seen { "node-b" } else { "node-a" };
        assert!(pool.starts_with(node), "volumes are seen: {seen}; {pool}");
        controller.end().await;
    }
}

#[tokio::test]
async fn what_does_not_fit_is_told_with_numbers_on_pod_and_claim() {
    let api = cluster(1);
    put_claim(&api, "big", json!({"memory": "90Gi"}));
    put_pod(&api, "user", &["big"]);
    let controller = begin(&api, settings("one")).await;
    let told = |api: &MockApi| {
        let events = api.list("events");
        let of = |kind: &str| {
            events.iter().any(|event| {
                event["involvedObject"]["kind"] == kind && event["reason"] == "WaitingForGpuShare"
            })
        };
        of("Pod") && of("ResourceClaim")
    };
    api.until("events on pod and claim", told).await;
    let words = |api: &MockApi| claim(api, "big")["metadata"]["annotations"]["tranche.dev/waiting"].clone();
    api.until("the text on the claim", |api| words(api).is_string()).await;
    let text = words(&api).as_str().unwrap().to_owned();
    assert!(text.contains("1 GPU too small even idle"), "{text}");
    assert!(holds(&api).is_empty());
    controller.end().await;
}

#[tokio::test]
async fn of_two_controllers_one_is_quiet_and_takes_over_when_the_other_ends() {
    let api = cluster(2);
    let first = begin(&api, settings("one")).await;
    api.until("somebody leads", |api| {
        api.list("leases")[0]["spec"]["holderIdentity"].as_str().unwrap_or_default().starts_with("one_")
    })
    .await;
    let second = begin(&api, settings("two")).await;
    put_claim(&api, "a", json!({"memory": "10Gi"}));
    put_pod(&api, "a", &["a"]);
    api.until("the claim is allocated", |api| is_allocated(api, "a")).await;
    assert_eq!(api.count(Verb::Watch, CLAIMS), 1, "who does not lead does not even look");
    first.end().await;
    put_claim(&api, "b", json!({"memory": "10Gi"}));
    put_pod(&api, "b", &["b"]);
    api.until("the other places the next", |api| is_allocated(api, "b")).await;
    assert_eq!(results(&claim(&api, "a"))[0]["device"], results(&claim(&api, "b"))[0]["device"]);
    assert_eq!(holds(&api).len(), 1, "it reads who holds what");
    second.end().await;
}

#[tokio::test]
async fn a_lease_that_was_not_given_up_is_waited_out_twice() {
    let api = cluster(1);
    api.edit("leases", |lease| lease["spec"]["holderIdentity"] = "dead_1".into());
    put_claim(&api, "a", json!({"memory": "10Gi"}));
    put_pod(&api, "a", &["a"]);
    let begun = std::time::Instant::now();
    let mut settings = settings("one");
    settings.lease.duration = SHORT_LEASE;
    let controller = begin(&api, settings).await;
    api.until("the claim is allocated", |api| is_allocated(api, "a")).await;
    let waited = begun.elapsed();
    assert!(waited >= 2 * SHORT_LEASE, "only {waited:?}");
    controller.end().await;
}

#[tokio::test]
async fn who_loses_the_lease_ends_and_writes_nothing_more() {
    let api = cluster(1);
    let controller = begin(&api, settings("one")).await;
    put_claim(&api, "a", json!({"memory": "10Gi"}));
    put_pod(&api, "a", &["a"]);
    api.until("the claim is allocated", |api| is_allocated(api, "a")).await;
    api.edit("leases", |lease| lease["spec"]["holderIdentity"] = "usurper".into());
    let ended = tokio::time::timeout(PATIENCE, controller.tasks).await.expect("it ends").unwrap();
    let words = tranche::model::error_chain(&ended.unwrap_err());
    assert!(words.contains("belongs to usurper now"), "{words}");
    let writes = api.writes(CLAIMS);
    put_claim(&api, "b", json!({"memory": "10Gi"}));
    put_pod(&api, "b", &["b"]);
    assert_eq!(api.writes(CLAIMS), writes);
}

#[tokio::test]
async fn where_fields_of_shares_are_dropped_the_grant_is_the_same() {
    let api = cluster(1);
    api.drop_fields(&["shareID", "consumedCapacity", "allocationTimestamp", "allowMultipleAllocations"]);
    api.edit("resourceslices", |slice| {
        let devices = slice["spec"]["devices"].as_array_mut().unwrap();
        devices
            .iter_mut()
            .for_each(|device| drop(device.as_object_mut().unwrap().remove("allowMultipleAllocations")));
    });
    let controller = begin(&api, settings("one")).await;
    for name in ["a", "b"] {
        put_claim(&api, name, json!({"memory": "10Gi"}));
        put_pod(&api, name, &[name]);
        api.until("the claim is allocated", |api| is_allocated(api, name)).await;
        let result = results(&claim(&api, name)).remove(0);
        assert_eq!((&result["pool"], &result["device"]), (&json!("node-a/shares"), &json!("gpu-0")));
        let grant =
            claim(&api, name)["status"]["allocation"]["devices"]["config"][0]["opaque"]["parameters"].clone();
        assert_eq!((&grant["kind"], &grant["devices"][0]["memory"]), (&json!("ShareGrant"), &json!("10Gi")));
    }
    controller.end().await;
}

#[tokio::test]
async fn conflicts_lost_answers_and_cut_watches_do_no_harm() {
    let api = cluster(2);
    let controller = begin(&api, settings("one")).await;
    type Trouble = (&'static str, fn(&MockApi));
    let trouble: [Trouble; 8] = [
        ("conflict", |api| api.fail(Verb::Patch, CLAIMS, Failure::Status(409, "Conflict"))),
        ("lost", |api| api.fail(Verb::Patch, CLAIMS, Failure::AnswerLost)),
        ("broken", |api| api.fail(Verb::Create, CLAIMS, Failure::Broken)),
        ("cut", |api| api.cut_watches(true)),
        ("refused", |api| api.fail(Verb::Patch, CLAIMS, Failure::Status(500, "InternalError"))),
        ("conflict-allocating", |api| api.fail(Verb::Update, CLAIMS, Failure::Status(409, "Conflict"))),
        ("lost-allocating", |api| api.fail(Verb::Update, CLAIMS, Failure::AnswerLost)),
        ("refused-allocating", |api| api.fail(Verb::Update, CLAIMS, Failure::Status(500, "InternalError"))),
    ];
    for (name, happens) in trouble {
        happens(&api);
        put_claim(&api, name, json!({"memory": "20Gi"}));
        put_pod(&api, name, &[name]);
        api.until(name, |api| is_allocated(api, name)).await;
    }
    // One of them later than it was meant: the hold that cannot be made is that of the second GPU.
    assert!(api.has_failed(), "something was never asked that was to fail");
    let on = |device: &str| {
        let of = |claim: &Value| {
            results(claim).iter().any(|result| result["device"] == device && !result["shareID"].is_null())
        };
        api.list(CLAIMS).iter().filter(|claim| of(claim)).count()
    };
    let mut counts = [on("gpu-0"), on("gpu-1")];
    counts.sort_unstable();
    assert_eq!(counts, [4, 4], "four of 20 GiB fill 80");
    controller.end().await;
}

/// As an admission webhook of somebody else's may answer. The claims are protected already: one write is all they take.
#[tokio::test]
async fn a_conflict_that_comes_of_no_change_is_outlived() {
    let api = cluster(1);
    let controller = begin(&api, settings("one")).await;
    let ask = async |name| {
        let mut claim = share(name, json!({"memory": "10Gi"}));
        claim["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
        api.put(CLAIMS, claim);
        put_pod(&api, name, &[name]);
        api.until(name, |api| is_allocated(api, name)).await;
    };
    ask("first").await;
    // Its GPU is held now: the next that is updated is the second claim.
    api.fail(Verb::Update, CLAIMS, Failure::Status(409, "Conflict"));
    ask("second").await;
    assert!(api.has_failed());
    controller.end().await;
}

/// A round that takes seconds is no reason to be late with the lease, and those whose selectors it takes them for are
/// told.
#[tokio::test]
async fn the_lease_is_renewed_whatever_a_round_takes() {
    let api = cluster(2);
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    for nth in 0..3 {
        let name = format!("dear-{nth}");
        let dear = (0..9).fold("true".to_owned(), |inner, level| format!("{ten}.all(x{level}, {inner})"));
        let mut claim = share(&name, json!({"memory": "1Gi"}));
        let expression = format!("device.driver != 'x{nth}' && {dear}");
        claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
            json!([{"cel": {"expression": expression}}]);
        api.put(CLAIMS, claim);
        put_pod(&api, &name, &[&name]);
    }
    let mut other = share("other", json!({"memory": "1Gi"}));
    other["metadata"]["namespace"] = json!("quiet");
    api.put(CLAIMS, other);
    api.put("pods", json!({"metadata": {"name": "other", "namespace": "quiet", "uid": "pod-other"},
        "spec": {"containers": [{"name": "main"}],
            "resourceClaims": [{"name": "other", "resourceClaimName": "other"}]}, "status": {"phase": "Pending"}}));
    /// For three evaluations of the dearest selector, one after the other, by a build without optimisation.
    const LONG: Duration = Duration::from_secs(120);
    let controller = begin(&api, settings("one")).await;
    let (begun, writes) = (std::time::Instant::now(), api.writes("leases"));
    let waiting = |api: &MockApi, name: &str| {
        let words = claim(api, name)["metadata"]["annotations"]["tranche.dev/waiting"].clone();
        words.as_str().unwrap_or_default().to_owned()
    };
    for nth in 0..3 {
        let name = format!("dear-{nth}");
        let told = |api: &MockApi| waiting(api, &name).contains("costs more than 2000000 on one device");
        api.until_within(LONG, "the claim says what it costs", told).await;
    }
    api.until_within(LONG, "the other namespace has its share", |api| is_allocated(api, "other")).await;
    let renewed = api.writes("leases") - writes;
    assert!(renewed as u64 >= begun.elapsed().as_secs(), "renewed {renewed} times in {:?}", begun.elapsed());
    controller.end().await;
}
