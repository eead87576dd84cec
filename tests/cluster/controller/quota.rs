//! What namespaces may have: bounds as annotations of the Namespace, amounts where queues count them, slices that mirror
//! products, and templates of claims for queued Jobs.

use std::process::Command;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::explain::why;
use super::place::env;
use super::settings::set;
use super::{WAITS, share, wait_placed, wait_told};
use crate::manifests::{as_nobody, claim, container, gpu, pod, user_of};
use crate::rig::{root, wait_until};
use crate::tenants::tenant;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, from};

const MIRROR: &str = "tranche.dev/mirror";

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenant_stays_within_its_namespaces_bound_and_cannot_raise_it() {
    let cluster = super::cluster("a_tenant_stays_within_its_namespaces_bound_and_cannot_raise_it").await;
    let bound = "tranche.dev/max-share-memory";
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, &format!("{bound}=5Gi")]);
    let client = tenant(&cluster).await;
    let raise = json!({"metadata": {"annotations": {bound: "500Gi"}}});
    let namespaces = Api::<Namespace>::all(client.clone());
    let raised = namespaces.patch(&cluster.namespace, &PatchParams::default(), &Patch::Merge(&raise)).await;
    assert!(
        matches!(raised, Err(kube::Error::Api(status)) if status.code == 403),
        "edit is no right to namespaces"
    );
    let claims = Api::<ResourceClaim>::namespaced(client.clone(), &cluster.namespace);
    let pods = Api::<Pod>::namespaced(client, &cluster.namespace);
    let create = async |name: &str, memory: &str| {
        let object = from(claim(name, share(json!({"memory": memory}))));
        claims.create(&PostParams::default(), &object).await.expect("a tenant may create claims");
        let object = from(as_nobody(user_of(name, name)));
        pods.create(&PostParams::default(), &object).await.expect("a tenant may create pods");
    };
    create("first", "4000Mi").await;
    cluster.wait_ready("first").await;
    create("second", "2000Mi").await;
    let told =
        wait_told(&cluster, "second", "may have 5120 MiB of shares; 4000 are used and 2000 are asked for")
            .await;
    assert!(told.contains(WAITS) && told.contains(bound), "{told}");
    let waiting = || async {
        let found = claims.get("second").await.ok()?.metadata.annotations?.remove("tranche.dev/waiting")?;
        found.contains("4000 are used").then_some(())
    };
    wait_until("the claim to carry the reason", PATIENCE, waiting).await;
    let said = why(&cluster, "second");
    assert!(
        said.contains("namespace-bound") && said.contains("4000 are used and 2000 are asked for"),
        "{said}"
    );
    let line = format!("namespace {}: shares of 4000 of 5120 MiB on 1 GPU", cluster.namespace);
    let seen = top(&cluster);
    assert!(seen.lines().any(|one| one == line), "{line}: {seen}");
    cluster.delete("first").await;
    claims.delete("first", &DeleteParams::default()).await.expect("a tenant may delete claims");
    cluster.wait_ready("second").await;
    // A value that nobody can read lets nothing more through, and ends nothing.
    let bad = format!("{bound}=lots");
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, "--overwrite", &bad]);
    create("third", "10Mi").await;
    wait_told(&cluster, "third", "\"lots\", which is no amount of memory; write one such as 64Gi").await;
    let none = format!("{bound}-");
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, &none]);
    cluster.wait_ready("third").await;
    // Each share counts once for each GPU that it is on.
    cluster.rig.kubectl(&["annotate", "namespace", &cluster.namespace, "tranche.dev/max-share-gpus=2"]);
    create("fourth", "10Mi").await;
    wait_told(&cluster, "fourth", "may have 2 GPUs of shares; 2 are used and 1 are asked for").await;
    let line = format!("namespace {}: shares of 2010 MiB on 2 of 2 GPUs", cluster.namespace);
    let seen = top(&cluster);
    assert!(seen.lines().any(|one| one == line), "{line}: {seen}");
    cluster.delete("third").await;
    claims.delete("third", &DeleteParams::default()).await.expect("a tenant may delete claims");
    cluster.wait_ready("fourth").await;
    cluster.end().await;
}

/// What a viewer of the whole cluster sees.
fn top(cluster: &TestCluster) -> String {
    let kubeconfig = cluster.rig.run(&["kubeconfig"]);
    let mut top = Command::new(env!("CARGO_BIN_EXE_tranche"));
    let out = top.args(["top", "--once", "--use=false", "--kubeconfig", kubeconfig.trim()]).output();
    let out = out.expect("the program can be run");
    String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_request_may_say_its_amount_itself_where_the_api_server_keeps_it() {
    let cluster = super::cluster("a_request_may_say_its_amount_itself_where_the_api_server_keeps_it").await;
    let with_capacity = |mut devices: Value| {
        devices["requests"][0]["exactly"]["capacity"] = json!({"requests": {"memory": "2000Mi"}});
        devices
    };
    let memory = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned();
    // Both are there, and agree: on every release.
    cluster.create(claim("both", with_capacity(share(json!({"memory": "2000Mi"}))))).await;
    cluster.create(as_nobody(user_of("both", "both"))).await;
    cluster.wait_ready("both").await;
    assert!(env(&cluster, "both").contains(&memory));
    let alone = claim("alone", with_capacity(share(json!({"compute": 25}))));
    if cluster.release().await < 36 {
        let said = cluster.try_create(alone, false).await.expect_err("the API server has dropped the amount");
        assert!(said.contains("feature gate DRAConsumableCapacity"), "{said}");
    } else {
        cluster.create(alone).await;
        cluster.create(as_nobody(user_of("alone", "alone"))).await;
        cluster.wait_ready("alone").await;
        assert!(env(&cluster, "alone").contains(&memory));
        let differ = claim("differ", with_capacity(share(json!({"memory": "1000Mi"}))));
        let said = cluster.try_create(differ, false).await.expect_err("they differ");
        assert!(said.contains("asks for 2000 MiB, but the claim's GpuShare says 1000 MiB"), "{said}");
    }
    cluster.end().await;
}

/// The objects of a template of the chart that have this name.
fn rendered(cluster: &TestCluster, template: &str, name: &str) -> String {
    let chart = root().join("charts/tranche").display().to_string();
    let show = format!("templates/{template}.yaml");
    let args = [
        "template",
        "tranche",
        &chart,
        "--namespace",
        SYSTEM,
        "--kube-version",
        "1.34.0",
        "--set",
        "controller.mirrorSlices=true",
    ];
    let all =
        cluster.rig.helm(&[&args[..], &["--show-only", &show]].concat()).expect("the chart can be rendered");
    let named = format!("\n  name: {name}\n");
    all.split("\n---\n").filter(|object| object.contains(&named)).collect::<Vec<_>>().join("\n---\n")
}

async fn mirrors(cluster: &TestCluster) -> Vec<ResourceSlice> {
    let slices = Api::<ResourceSlice>::all(cluster.client.clone());
    slices.list(&ListParams::default().labels(MIRROR)).await.map(|list| list.items).unwrap_or_default()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn products_are_mirrored_for_queues_and_nobody_else_takes_them_for_gpus() {
    let test = "products_are_mirrored_for_queues_and_nobody_else_takes_them_for_gpus";
    let cluster = super::cluster(test).await;
    let objects = [
        rendered(&cluster, "controller", "tranche-mirror"),
        rendered(&cluster, "policy", "tranche-controller-slices"),
    ];
    let files = tempfile::tempdir().expect("a folder can be made");
    let file = files.path().join("mirror.yaml");
    std::fs::write(&file, objects.join("\n---\n")).expect("a file can be written");
    cluster.rig.on_end(&["kubectl", "delete", "resourceslices", "-l", MIRROR, "--ignore-not-found"]);
    for kind in ["clusterrole/tranche-mirror", "clusterrolebinding/tranche-mirror"] {
        cluster.rig.on_end(&["kubectl", "delete", kind, "--ignore-not-found"]);
    }
    for kind in ["validatingadmissionpolicy", "validatingadmissionpolicybinding"] {
        cluster.rig.on_end(&["kubectl", "delete", kind, "tranche-controller-slices", "--ignore-not-found"]);
    }
    cluster.rig.kubectl(&["apply", "-f", &file.display().to_string()]);
    set(&cluster, "TRANCHE_MIRROR_SLICES", "true", "false").await;
    // Other nodes of the rig have other products.
    let gpu_here = cluster.shareable(super::NODE).await[0].clone();
    let product = |device: &Device| device.attributes.as_ref()?.get("productName")?.string.clone();
    let mirror = || async {
        mirrors(&cluster)
            .await
            .into_iter()
            .find(|slice| slice.spec.devices.iter().flatten().any(|one| product(one) == product(&gpu_here)))
    };
    let slice = wait_until("the product to be mirrored", PATIENCE, mirror).await;
    let devices = slice.spec.devices.clone().expect("it has devices");
    assert_eq!((devices.len(), slice.spec.node_name.as_ref()), (32, None));
    let grantable = super::place::grantable_mib(&cluster, &gpu_here.name).await;
    let memory = &devices[0].capacity.as_ref().expect("it has capacities")["memory"];
    assert_eq!(memory.value.0, format!("{grantable}Mi"));
    assert_eq!(memory.request_policy.is_some(), cluster.release().await >= 36);

    // Whole GPUs and shares go where they went before.
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(as_nobody(user_of("whole", "whole"))).await;
    super::create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("whole").await;
    cluster.wait_ready("share").await;
    let pool = |claim: &ResourceClaim| {
        let allocation =
            claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref()?.results.as_ref()?.first()?;
        Some(allocation.pool.split('/').next()?.to_owned())
    };
    for name in ["whole", "share"] {
        let claim = cluster.api::<ResourceClaim>().get(name).await.expect("the claim is there");
        assert_eq!(pool(&claim).as_deref(), Some(super::NODE));
    }
    // A request that asks the scheduler for nothing would fit each device of the mirror. Our controller says no.
    super::create(&cluster, "huge", json!({"memory": "9000Gi"})).await;
    wait_told(&cluster, "huge", "too small even idle").await;
    let huge = cluster.api::<ResourceClaim>().get("huge").await.expect("the claim is there");
    let allocation = huge.status.and_then(|status| status.allocation);
    assert!(allocation.is_none(), "a mirrored device was taken for a GPU: {allocation:?}");
    let after = mirror().await.expect("the product is still mirrored");
    assert_eq!(after.metadata.resource_version, slice.metadata.resource_version, "written once");

    // The controller's account writes such slices and no others.
    let other = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "tranche-mirror-x"},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": super::NODE,
            "pool": {"name": "mirror.tranche.dev/x", "generation": 1, "resourceSliceCount": 1}, "devices": []}});
    let file = files.path().join("other.json");
    std::fs::write(&file, other.to_string()).expect("a file can be written");
    let account = format!("--as=system:serviceaccount:{SYSTEM}:tranche-controller");
    let refused = || async {
        let said = cluster.rig.attempt(&["kubectl", &account, "create", "-f", &file.display().to_string()]);
        said.err().filter(|words| words.contains("may write slices of no node only"))
    };
    wait_until("the policy to refuse a slice of a node", PATIENCE, refused).await;

    // Switched off: the role goes, and its slices with it.
    cluster.rig.kubectl(&["delete", "clusterrole/tranche-mirror"]);
    let gone = || async { mirrors(&cluster).await.is_empty().then_some(()) };
    set(&cluster, "TRANCHE_MIRROR_SLICES", "false", "false").await;
    wait_until("the slices to go with their owner", PATIENCE, gone).await;
    cluster.end().await;
}

/// A queue counts a class in one unit, and KAI counts a GPU of the node for a class with `gpu` in its name.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_with_kais_annotations_have_claims_of_the_class_that_an_administrator_names() {
    let test = "pods_with_kais_annotations_have_claims_of_the_class_that_an_administrator_names";
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    let cluster = super::alone(TestCluster::with_labels(test, labels).await);
    let (example, class) = (root().join("deploy/examples/fraction-class.yaml"), "shares.example.com");
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", class, "--ignore-not-found"]);
    cluster.rig.kubectl(&["apply", "-f", &example.display().to_string()]);
    set(&cluster, "TRANCHE_KAI_FRACTION_CLASS", class, super::CLASS).await;
    let annotated = |annotation: &str, amount: &str| {
        let mut pod = as_nobody(pod("x", json!([]), json!([container("main", json!([]))])));
        pod["metadata"] = json!({"annotations": {annotation: amount}});
        pod
    };
    let claim_of = async |name: &str| {
        let pod = cluster.wait_ready(name).await;
        let entries = pod.spec.and_then(|spec| spec.resource_claims).unwrap_or_default();
        let name = entries.into_iter().find_map(|entry| entry.resource_claim_name).expect("it names a claim");
        serde_json::to_value(cluster.api::<ResourceClaim>().get(&name).await.expect("it is there"))
            .expect("it is JSON")
    };
    let class_of = |spec: &Value| spec["devices"]["requests"][0]["exactly"]["deviceClassName"].clone();
    for (name, annotation, amount, wanted) in
        [("part", "gpu-fraction", "0.25", class), ("gib", "gpu-memory", "2000", super::CLASS)]
    {
        let mut pod = annotated(annotation, amount);
        pod["metadata"]["name"] = json!(name);
        cluster.create(pod).await;
        assert_eq!(class_of(&claim_of(name).await["spec"]), wanted);
    }
    assert!(env(&cluster, "part").contains(&"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25".to_owned()));
    // What a queue reads of a Job.
    let template = annotated("gpu-fraction", "0.5");
    let mut job = json!({"metadata": template["metadata"], "spec": template["spec"]});
    job["spec"]["restartPolicy"] = json!("Never");
    cluster
        .create(json!({"apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "train", "labels": {"kueue.x-k8s.io/queue-name": "ml"}},
            "spec": {"suspend": true, "template": job}}))
        .await;
    let templates = cluster.api::<ResourceClaimTemplate>();
    let made = || async { templates.list(&ListParams::default()).await.ok()?.items.pop() };
    let made = wait_until("the template of its claims", PATIENCE, made).await;
    let made = serde_json::to_value(&made).expect("it is JSON");
    assert_eq!(class_of(&made["spec"]["spec"]), class);
    if cluster.release().await >= 36 {
        let request = &made["spec"]["spec"]["devices"]["requests"][0]["exactly"];
        assert_eq!(request["capacity"]["requests"]["thousandths"], "500");
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_queued_job_with_kais_annotations_gets_a_template_that_its_queue_can_count() {
    let test = "a_queued_job_with_kais_annotations_gets_a_template_that_its_queue_can_count";
    let labels = json!({"tranche.dev/kai-annotations": "enabled"});
    let cluster = super::alone(TestCluster::with_labels(test, labels).await);
    let mut template = as_nobody(pod("x", json!([]), json!([container("main", json!([]))])));
    template["spec"]["restartPolicy"] = json!("Never");
    let spec = json!({"metadata": {"annotations": {"gpu-memory": "2000"}}, "spec": template["spec"]});
    // Suspended, as Kueue has it until there is room.
    cluster
        .create(json!({"apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "train", "labels": {"kueue.x-k8s.io/queue-name": "ml"}},
            "spec": {"suspend": true, "template": spec}}))
        .await;
    let templates = cluster.api::<ResourceClaimTemplate>();
    let made = || async { templates.list(&ListParams::default()).await.ok()?.items.pop() };
    let made = wait_until("the template of its claims", PATIENCE, made).await;
    let owners = made.metadata.owner_references.clone().unwrap_or_default();
    assert_eq!((owners[0].kind.as_str(), owners[0].name.as_str()), ("Job", "train"));
    let made = serde_json::to_value(&made).expect("it is JSON");
    let request = &made["spec"]["spec"]["devices"]["requests"][0];
    assert_eq!(request["exactly"]["deviceClassName"], super::CLASS);
    if cluster.release().await >= 36 {
        assert_eq!(request["exactly"]["capacity"]["requests"]["memory"], "2000Mi");
    }
    // Admitted: Kueue marks the pods' template and lets it run.
    let admit = json!({"spec": {"suspend": false,
        "template": {"metadata": {"annotations": {"kueue.x-k8s.io/workload": "job-train"}}}}});
    let jobs = cluster.api::<Job>();
    jobs.patch("train", &PatchParams::default(), &Patch::Merge(&admit))
        .await
        .expect("a suspended Job can change");
    let named = ListParams::default().labels("batch.kubernetes.io/job-name=train");
    let run = || async { cluster.api::<Pod>().list(&named).await.ok()?.items.pop()?.metadata.name };
    let run = wait_until("the Job's pod", PATIENCE, run).await;
    cluster.wait_ready(&run).await;
    assert!(env(&cluster, &run).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()));
    let claim = cluster.claim_of(&run).await;
    wait_placed(&cluster, claim.metadata.name.as_deref().unwrap_or_default()).await;

    // A pod that was admitted without its share is refused; Kueue's mark alone is no share.
    let mut beyond = as_nobody(pod("beyond", json!([]), json!([container("main", json!([]))])));
    beyond["metadata"]["annotations"] = json!({"gpu-memory": "2000", "kueue.x-k8s.io/workload": "w"});
    let said = cluster.try_create(beyond, false).await.expect_err("nobody has counted it");
    assert!(said.contains("without counting the share"), "{said}");

    let background = DeleteParams::background();
    jobs.delete("train", &background).await.expect("it can be deleted");
    let gone = || async { templates.list(&ListParams::default()).await.ok()?.items.is_empty().then_some(()) };
    wait_until("the template to go with its Job", PATIENCE, gone).await;
    cluster.gone(&run).await;
    cluster.end().await;
}
