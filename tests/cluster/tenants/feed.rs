//! Objects that cannot be read, or are as fat as the API server admits: they cost whoever wrote them.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use crate::manifests::{as_nobody, claim, parameters, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{SYSTEM, TestCluster, from, is_ready};

/// A share of somebody else is placed and runs within this, whatever tenants have written.
const SECONDS: Duration = Duration::from_secs(20);
const DEPLOYMENT: &str = "deployment/tranche-controller";

/// spec.devices of a share of 1 GiB, with these entries beside its own.
fn share(more: &[Value]) -> Value {
    let mut config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "1Gi"}));
    config.as_array_mut().expect("a list of entries").extend_from_slice(more);
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}], "config": config})
}

/// An entry of configuration for another driver.
fn entry(parameters: &Value) -> Value {
    json!({"opaque": {"driver": "nic.example.com", "parameters": parameters}})
}

/// Creates a claim byte by byte: wherever `@` stands in it, these bytes are sent. No client that writes text can.
async fn create(tenant: &Client, cluster: &TestCluster, name: &str, devices: Value, bytes: &[u8]) {
    let text = claim(name, devices).to_string();
    let body = text.split('@').map(str::as_bytes).collect::<Vec<_>>().join(bytes);
    let path = ResourceClaim::url_path(&(), Some(&cluster.namespace));
    let request = http::Request::post(path).header("content-type", "application/json").body(body.into());
    let answer = tenant.send(request.expect("a request")).await.expect("the API server answers");
    assert_eq!(answer.status(), 201, "claim {name} is created");
}

/// A namespace beside the tenant's, with shares that are placed there.
struct Neighbour<'a> {
    cluster: &'a TestCluster,
    namespace: String,
}

impl<'a> Neighbour<'a> {
    async fn of(cluster: &'a TestCluster) -> Self {
        let namespace = format!("{}-beside", cluster.namespace);
        let object: Namespace = from(json!({"metadata": {"name": namespace}}));
        let created =
            Api::<Namespace>::all(cluster.client.clone()).create(&PostParams::default(), &object).await;
        created.expect("a namespace can be made");
        cluster.rig.on_end(&[
            "kubectl",
            "delete",
            "namespace",
            &namespace,
            "--wait=false",
            "--ignore-not-found",
        ]);
        let account = || async {
            let said =
                cluster.rig.attempt(&["kubectl", "-n", &namespace, "get", "serviceaccount", "default"]);
            said.ok()
        };
        wait_until("the namespace's service account", crate::test_cluster::PATIENCE, account).await;
        Self { cluster, namespace }
    }

    /// Wants a share, and waits until it runs.
    async fn runs(&self, name: &str) {
        let post = PostParams::default();
        let claims = Api::<ResourceClaim>::namespaced(self.cluster.client.clone(), &self.namespace);
        claims.create(&post, &from(claim(name, share(&[])))).await.expect("a claim can be made");
        let pods = Api::<Pod>::namespaced(self.cluster.client.clone(), &self.namespace);
        pods.create(&post, &from(as_nobody(user_of(name, name)))).await.expect("a pod can be made");
        let ready = || async { pods.get(name).await.ok().filter(is_ready) };
        wait_until(&format!("the neighbour's pod {name} to run"), SECONDS, ready).await;
    }

    fn end(&self) {
        let all = ["-n", &self.namespace, "delete", "pods,resourceclaims", "--all", "--timeout=170s"];
        self.cluster.rig.kubectl(&all);
    }
}

/// Ends all controllers and waits for those that come after them.
fn restart_controllers(cluster: &TestCluster) {
    cluster.rig.kubectl(&["-n", SYSTEM, "rollout", "restart", DEPLOYMENT]);
    cluster.rig.kubectl(&["-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=170s"]);
}

/// How often containers of controllers were restarted.
async fn restarts(cluster: &TestCluster) -> i32 {
    super::selectors::controllers(cluster).await.iter().map(|(_, restarts, _)| restarts).sum()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_that_no_text_can_hold_stop_nobody() {
    let cluster = TestCluster::of_env("claims_that_no_text_can_hold_stop_nobody").await;
    let tenant = super::tenant(&cluster).await;
    let neighbour = Neighbour::of(&cluster).await;
    let strange = [entry(&json!({"x": "@"}))];
    let deep = [vec![b'['; 200], vec![b']'; 200]].concat();
    create(&tenant, &cluster, "bytes", share(&strange), b"\xff\xfe").await;
    create(&tenant, &cluster, "half", share(&strange), b"\\ud800").await;
    create(
        &tenant,
        &cluster,
        "deep",
        share(&[entry(&json!({"x": ["@"]}))]),
        &[b"\",", &deep[..], b",\""].concat(),
    )
    .await;
    neighbour.runs("beside").await;
    // What other drivers are told is no concern of ours: the claims can be used, too.
    for name in ["bytes", "half", "deep"] {
        cluster.create(as_nobody(user_of(name, name))).await;
        cluster.wait_ready(name).await;
    }
    restart_controllers(&cluster);
    neighbour.runs("after").await;
    create(&tenant, &cluster, "later", share(&strange), b"\xff\xfe").await;
    neighbour.runs("later").await;
    // Nor is it of any, once it goes.
    // kube's client cannot read the answer.
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaim", "later"]);
    neighbour.runs("gone").await;
    neighbour.end();
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn fat_claims_cost_nobody_else() {
    let cluster = TestCluster::of_env("fat_claims_cost_nobody_else").await;
    let tenant = super::tenant(&cluster).await;
    let neighbour = Neighbour::of(&cluster).await;
    // Each takes 30 MB once it is parsed.
    let maps: Vec<Value> = (0..1400).map(|_| json!({"": 0})).collect();
    let entries: Vec<Value> = (0..31).map(|_| entry(&json!({"a": maps}))).collect();
    for nth in 0..20 {
        create(&tenant, &cluster, &format!("fat-{nth}"), share(&entries), b"").await;
    }
    let before = restarts(&cluster).await;
    neighbour.runs("beside").await;
    assert_eq!(restarts(&cluster).await, before, "a controller has ended");
    restart_controllers(&cluster);
    neighbour.runs("after").await;
    assert_eq!(restarts(&cluster).await, 0, "a controller has ended");
    neighbour.end();
    cluster.end().await;
}
