//! Who asks for more than comes free stops nobody else's shares, at any time. On nodes without a machine.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::controller::metrics;
use crate::hollow::{self, on_hollow};
use crate::manifests::{as_nobody, claim, of_gpu, parameters, user_of};
use crate::rig::{SLOWER, wait_until};
use crate::test_cluster::{PATIENCE, TestCluster, from, sum};

/// Everybody else's shares start within this.
const AT_ONCE: Duration = Duration::from_secs(5);
/// A place is kept after 32 passes or a minute, and for a minute.
const LONG: Duration = Duration::from_secs(300);
/// Shares of the others that are there at a time.
const AT_A_TIME: usize = 8;

/// Somebody who acts in a namespace.
struct Who<'a> {
    client: &'a Client,
    namespace: &'a str,
}

impl Who<'_> {
    fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// A claim with this share of such GPUs, and a pod of its name.
    async fn ask(&self, name: &str, amount: Value, request: Value) {
        let config = parameters("tranche.dev/v1alpha1", "GpuShare", amount);
        let claim = claim(name, json!({"requests": [request], "config": config}));
        let created = self.claims().create(&PostParams::default(), &from(claim)).await;
        created.unwrap_or_else(|error| panic!("claim {name}: {error}"));
        let pod = on_hollow(as_nobody(user_of(name, name)));
        let created = self.pods().create(&PostParams::default(), &from(pod)).await;
        created.unwrap_or_else(|error| panic!("pod {name}: {error}"));
    }

    async fn is_placed(&self, name: &str) -> bool {
        let claim = self.claims().get(name).await.ok();
        claim.and_then(|claim| claim.status?.allocation).is_some()
    }

    async fn wait_placed(&self, name: &str, limit: Duration) {
        let placed = || async { self.is_placed(name).await.then_some(()) };
        wait_until(&format!("claim {name} to be placed"), limit, placed).await;
    }

    async fn end(&self, name: &str) {
        let now = DeleteParams::default().grace_period(0);
        self.pods().delete(name, &now).await.expect("a pod can be deleted");
        self.claims().delete(name, &DeleteParams::default()).await.expect("a claim can be deleted");
    }

    async fn end_all(&self) {
        let (now, all) = (DeleteParams::default().grace_period(0), ListParams::default());
        self.pods().delete_collection(&now, &all).await.expect("pods can be deleted");
        self.claims().delete_collection(&DeleteParams::default(), &all).await.expect("claims can be deleted");
    }
}

/// So many GPUs for shares, any or of this product.
fn gpus(count: usize, product: Option<&str>) -> Value {
    let mut request =
        json!({"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com", "count": count}});
    if let Some(product) = product {
        let text = format!("device.attributes['gpu.nvidia.com'].productName == '{product}'");
        request["exactly"]["selectors"] = json!([{"cel": {"expression": text}}]);
    }
    request
}

/// A second namespace, with the account that its pods run as.
async fn neighbours(cluster: &TestCluster) -> String {
    let name = format!("{}-others", cluster.namespace);
    let namespace: Namespace = from(json!({"metadata": {"name": name}}));
    cluster.rig.on_end(&["kubectl", "delete", "namespace", &name, "--wait=false"]);
    let namespaces = Api::<Namespace>::all(cluster.client.clone());
    namespaces.create(&PostParams::default(), &namespace).await.expect("a namespace can be made");
    let accounts = Api::<ServiceAccount>::namespaced(cluster.client.clone(), &name);
    let there = || async { accounts.get_opt("default").await.ok()?.map(drop) };
    wait_until("the namespace's account", PATIENCE, there).await;
    name
}

/// Something small on each GPU of both nodes, for good.
async fn on_each_gpu(cluster: &TestCluster, others: &Who<'_>) -> usize {
    let devices = cluster.published("hollow-0").await;
    let names = (0..2).flat_map(|node| devices.iter().map(move |device| (node, device.name.as_str())));
    for (node, device) in names.clone() {
        let request = of_gpu(&format!("GPU-hollow-{node}-{device}"), gpus(1, None));
        others.ask(&format!("stays-{node}-{device}"), json!({"memory": "1Gi"}), request).await;
    }
    for (node, device) in names {
        others.wait_placed(&format!("stays-{node}-{device}"), PATIENCE).await;
    }
    devices.len()
}

async fn kept_in_vain(cluster: &TestCluster) -> f64 {
    sum(&metrics(cluster).await, "tranche_controller_kept_in_vain_total")
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn who_asks_for_all_gpus_of_a_node_stops_nobodys_small_shares() {
    let cluster = TestCluster::of_env("who_asks_for_all_gpus_of_a_node_stops_nobodys_small_shares").await;
    let products = ["NVIDIA H100 80GB HBM3", "NVIDIA L40S"];
    hollow::add_changed(&cluster, 2, "node-a", |nth, gpu| {
        let product = gpu.attributes.as_mut().and_then(|all| all.get_mut("productName"));
        product.expect("a GPU has a product").string = Some(products[nth].to_owned());
    })
    .await;
    let namespace = neighbours(&cluster).await;
    let others = Who { client: &cluster.client, namespace: &namespace };
    let all = on_each_gpu(&cluster, &others).await;
    let tenant = super::tenant(&cluster).await;
    let mallory = Who { client: &tenant, namespace: &cluster.namespace };
    mallory.ask("all", json!({"fraction": "1"}), gpus(all, Some(products[0]))).await;
    mallory.ask("two", json!({"fraction": "1"}), gpus(2, Some(products[1]))).await;

    let (begin, before) = (Instant::now(), kept_in_vain(&cluster).await);
    let (mut slowest, mut count) = (Duration::ZERO, 0);
    while kept_in_vain(&cluster).await <= before {
        assert!(begin.elapsed() < LONG, "nothing was kept");
        let (name, asked) = (format!("small-{count}"), Instant::now());
        others.ask(&name, json!({"memory": "1Gi"}), gpus(1, None)).await;
        others.wait_placed(&name, AT_ONCE).await;
        slowest = slowest.max(asked.elapsed());
        if let Some(old) = usize::checked_sub(count, AT_A_TIME) {
            others.end(&format!("small-{old}")).await;
        }
        count += 1;
    }
    println!("{count} shares in {:?}, the slowest after {slowest:?}", begin.elapsed());
    assert!(slowest < AT_ONCE * SLOWER, "{slowest:?}");
    let told = [cluster.events("all").await, cluster.events("two").await].concat();
    let told: Vec<String> = told.into_iter().filter(|event| event.contains("kept for it until ")).collect();
    assert!(!told.is_empty(), "whom a place was kept for is told");
    println!("{told:?}");

    // They get their turn once there is room.
    others.end_all().await;
    for name in ["all", "two"] {
        mallory.wait_placed(name, PATIENCE).await;
    }
    hollow::end(cluster).await;
}
