//! HorizontalPodAutoscalers on what pods use of their GPUs: `deploy/examples/autoscale-*.yaml` as they are, with a real
//! Prometheus and the rules for prometheus-adapter. And what the chart has for Prometheus and Grafana, asked of the
//! same Prometheus.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim};
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::manifests::{as_nobody, claim, gpu, on, user_of};
use crate::monitoring::{Monitoring, SEEN, apply, milli};
use crate::rig::{root, wait_until};
use crate::shares::metrics::Work;
use crate::shares::settings::set;
use crate::test_cluster::{PATIENCE, TestCluster, is_ready, minor_of};

const NODE: &str = "node-a";
const MEMORY: &str = "gpu_memory_ratio";
const ACTIVITY: &str = "gpu_activity_ratio";

/// A test cluster on which only one node takes pods: whose GPU is loaded is then known.
async fn cluster(test: &str) -> TestCluster {
    let cluster = TestCluster::of_env(test).await;
    for node in cluster.nodes.iter().filter(|node| *node != NODE) {
        cluster.rig.on_end(&["kubectl", "uncordon", node]);
        cluster.rig.kubectl(&["cordon", node]);
    }
    cluster
}

/// spec.devices of a claim for a share of a GPU that the controller chooses.
fn share(memory: &str) -> Value {
    let config = crate::manifests::parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": memory}));
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}], "config": config})
}

/// An example whose autoscaler asks for another metric.
fn with_target(example: &str, metric: &str, mean: &str) -> String {
    let (target, names) = ("averageValue: 700m", [MEMORY, ACTIVITY].map(|name| format!("name: {name}\n")));
    let name = names.iter().find(|name| example.contains(*name)).expect("it names a metric");
    assert!(example.contains(target), "it has a target");
    example.replace(name, &format!("name: {metric}\n")).replace(target, &format!("averageValue: {mean}"))
}

/// A Deployment of the examples with its autoscaler.
struct Scaled<'a> {
    cluster: &'a TestCluster,
    name: &'a str,
}

impl<'a> Scaled<'a> {
    /// Applies the file with an image that the rig has, and with no wait before pods are taken away.
    async fn of(cluster: &'a TestCluster, name: &'a str) -> Self {
        Self::by(cluster, name, None).await
    }

    /// The same with an autoscaler that asks for another metric, and the pods' mean of which there is to be.
    async fn by(cluster: &'a TestCluster, name: &'a str, other: Option<(&str, &str)>) -> Self {
        let path = root().join(format!("deploy/examples/{name}.yaml"));
        let example = std::fs::read_to_string(path).expect("it is there");
        let window = "stabilizationWindowSeconds: ";
        assert!(example.contains(&format!("{window}300")), "the example waits");
        let example = example
            .replace("docker.io/library/ubuntu:24.04", "docker.io/local/glibc:1")
            .replace(&format!("{window}300"), &format!("{window}0"));
        let example = match other {
            None => example,
            Some((metric, mean)) => with_target(&example, metric, mean),
        };
        apply(cluster, &example, true);
        cluster.rig.on_end(&[
            "kubectl",
            "-n",
            &cluster.namespace,
            "delete",
            "hpa",
            name,
            "--ignore-not-found",
        ]);
        let scaled = Self { cluster, name };
        scaled.wait_pods(1).await;
        scaled
    }

    async fn pods(&self) -> Vec<Pod> {
        let label = format!("app={}", self.name);
        let list = self.cluster.api::<Pod>().list(&ListParams::default().labels(&label)).await;
        let mut pods = list.map(|list| list.items).unwrap_or_default();
        pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        pods.sort_by_key(|pod| pod.metadata.creation_timestamp.clone());
        pods
    }

    /// Waits until there are so many, all of them ready, the oldest first.
    async fn wait_pods(&self, wanted: usize) -> Vec<Pod> {
        let there = || async {
            let pods = self.pods().await;
            (pods.len() == wanted && pods.iter().all(is_ready)).then_some(pods)
        };
        wait_until(&format!("{} to have {wanted} pods", self.name), PATIENCE, there).await
    }

    /// Waits until the autoscaler has counted with this mean of its pods, in thousandths.
    async fn wait_looked(&self, wanted: std::ops::RangeInclusive<i64>) {
        let looked = || async {
            let scaler = self.cluster.api::<HorizontalPodAutoscaler>().get(self.name).await.ok()?;
            let metrics = scaler.status?.current_metrics?;
            let value = metrics.first()?.pods.as_ref()?.current.average_value.as_ref()?;
            wanted.contains(&milli(&value.0)?).then_some(())
        };
        wait_until(&format!("the autoscaler of {} to see {wanted:?} thousandths", self.name), SEEN, looked)
            .await;
    }

    async fn replicas(&self) -> Option<i32> {
        self.cluster.api::<Deployment>().get(self.name).await.expect("it is there").spec.replicas
    }

    async fn device_of(&self, pod: &Pod) -> String {
        let name = pod.metadata.name.as_deref().expect("it has a name");
        crate::test_cluster::devices_of(&self.cluster.claim_of(name).await).remove(0)
    }

    /// A process of this pod on its GPU.
    async fn work(&self, pod: &Pod, kind: &str) -> Work<'a> {
        Work::on(self.cluster, NODE, &self.device_of(pod).await, pod, kind)
    }

    /// Ends it before its pods, so that no more come.
    fn end(self) {
        self.cluster.rig.kubectl(&["-n", &self.cluster.namespace, "delete", "hpa", self.name]);
    }
}

/// What KEDA asks Prometheus by `deploy/autoscaling/keda.yaml`, for this namespace, and with the mean over seconds that the
/// adapter's rules have here.
fn query_of_keda(namespace: &str) -> String {
    let file = std::fs::read_to_string(root().join("deploy/autoscaling/keda.yaml")).expect("it is there");
    let scaled: Value = serde_saphyr::from_str(&file).expect("it is YAML");
    let query = scaled["spec"]["triggers"][0]["metadata"]["query"].as_str().expect("it has a query");
    let (here, window) = ("namespace=\"default\"", "[1m]");
    assert!(query.contains(here) && query.contains(window), "{query}");
    query.replace(here, &format!("namespace=\"{namespace}\"")).replace(window, "[10s]")
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().expect("it has a name")
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_with_shares_are_scaled_by_their_own_memory_and_not_by_a_neighbours() {
    let cluster = cluster("pods_with_shares_are_scaled_by_their_own_memory_and_not_by_a_neighbours").await;
    let monitoring = Monitoring::of(&cluster).await;
    let scaled = Scaled::of(&cluster, "autoscale-share").await;
    let first = scaled.pods().await.remove(0);
    cluster.create(claim("neighbour", share("8Gi"))).await;
    cluster.create(as_nobody(user_of("neighbour", "neighbour"))).await;
    let neighbour = cluster.wait_ready("neighbour").await;
    let device = scaled.device_of(&first).await;
    assert_eq!(cluster.devices_of("neighbour").await.first(), Some(&device), "both have a part of one GPU");

    // Of 8192 MiB.
    let mine = scaled.work(&first, "mps").await;
    mine.is(100, 1, "mps");
    scaled.wait_looked(5..=20).await;
    let others = Work::on(&cluster, NODE, &device, &neighbour, "mps");
    others.is(7800, 90, "mps");
    monitoring.wait_milli(MEMORY, "neighbour", 940..=960).await;
    // The autoscaler has looked since: it knows of what came later.
    mine.is(1640, 1, "mps");
    scaled.wait_looked(190..=210).await;
    assert_eq!(scaled.replicas().await, Some(1), "a neighbour's load is not theirs");

    mine.is(7370, 1, "mps");
    let both = scaled.wait_pods(2).await;
    // The second has nothing to do: half of 0.9 is not too much for two.
    scaled.wait_looked(440..=460).await;
    assert_eq!(scaled.replicas().await, Some(2));
    let second = both.iter().find(|pod| name(pod) != name(&first)).expect("there are two");
    let second = scaled.work(second, "mps").await;
    second.is(7370, 1, "mps");
    scaled.wait_pods(3).await;

    mine.is(400, 1, "mps");
    second.is(400, 1, "mps");
    scaled.wait_pods(1).await;
    monitoring.wait_milli(MEMORY, "neighbour", 940..=960).await;

    drop((mine, second, others));
    scaled.end();
    monitoring.end();
    cluster.end().await;
}

/// A process of this pod on its MIG device.
async fn work_on_mig<'a>(cluster: &'a TestCluster, device: &str, pod: &Pod) -> Work<'a> {
    let uuid = cluster.attribute(NODE, device, "uuid").await;
    let state = cluster.state(NODE).await;
    let boards = state["inventory"]["Found"]["gpus"].as_array().expect("the state tells the boards");
    let mut instances = boards.iter().filter_map(|board| board["mig"]["On"].as_array()).flatten();
    let own = instances.find(|one| one["uuid"] == uuid.as_str()).expect("the board has the instance");
    let instance = own["gpu_instance"].as_u64().expect("NVML's id of the instance");
    Work::on_mig(cluster, NODE, device, pod, instance)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_with_mig_devices_are_scaled_by_their_own_memory_and_not_by_a_neighbours() {
    let test = "pods_with_mig_devices_are_scaled_by_their_own_memory_and_not_by_a_neighbours";
    let cluster = cluster(test).await;
    let monitoring = Monitoring::of(&cluster).await;
    let scaled = Scaled::of(&cluster, "autoscale-mig").await;
    let first = scaled.pods().await.remove(0);
    let other = json!({"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"}}]}});
    cluster.create(claim("neighbour", json!({"requests": [other]}))).await;
    cluster.create(on(NODE, user_of("neighbour", "neighbour"))).await;
    let neighbour = cluster.wait_ready("neighbour").await;
    let own = scaled.device_of(&first).await;
    let others = cluster.devices_of("neighbour").await.remove(0);
    assert_eq!(minor_of(&own), minor_of(&others), "both are of one board");
    let sizes = async |pod: &str| {
        let of = format!("{{namespace=\"{}\",pod=\"{pod}\"}}", cluster.namespace);
        let rows = monitoring.rows_of(&format!("tranche_claim_memory_limit_bytes{of}")).await;
        let bytes = rows[0]["value"][1].as_str().and_then(|text| text.parse::<f64>().ok());
        bytes.expect("a number") / 1_048_576.0
    };
    let (own_mib, others_mib) = (sizes(name(&first)).await, sizes("neighbour").await);
    assert!(own_mib > 9_000.0 && others_mib > 1.9 * own_mib, "{own_mib} and {others_mib} MiB");
    let part = |of: f64, all: f64| (of * all).round() as u32;

    let mine = work_on_mig(&cluster, &own, &first).await;
    mine.is(part(0.01, own_mib), 0, "compute");
    scaled.wait_looked(5..=20).await;
    let theirs = work_on_mig(&cluster, &others, &neighbour).await;
    theirs.is(part(0.95, others_mib), 0, "compute");
    monitoring.wait_milli(MEMORY, "neighbour", 940..=960).await;
    // The autoscaler has looked since: it knows of what came later.
    mine.is(part(0.2, own_mib), 0, "compute");
    scaled.wait_looked(190..=210).await;
    assert_eq!(scaled.replicas().await, Some(1), "a neighbour's load is not theirs");

    mine.is(part(0.9, own_mib), 0, "compute");
    let both = scaled.wait_pods(2).await;
    let mut devices = Vec::new();
    for pod in &both {
        devices.push(scaled.device_of(pod).await);
    }
    assert!(devices[0] != devices[1] && minor_of(&devices[0]) == minor_of(&devices[1]), "{devices:?}");
    scaled.wait_looked(440..=460).await;
    assert_eq!(scaled.replicas().await, Some(2), "half of 0.9 is not too much for two");
    mine.is(part(0.05, own_mib), 0, "compute");
    scaled.wait_pods(1).await;
    monitoring.wait_milli(MEMORY, "neighbour", 940..=960).await;

    drop((mine, theirs));
    scaled.end();
    monitoring.end();
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_with_whole_gpus_are_scaled_by_their_own_activity_and_not_by_another_teams() {
    let test = "pods_with_whole_gpus_are_scaled_by_their_own_activity_and_not_by_another_teams";
    let cluster = cluster(test).await;
    let monitoring = Monitoring::of(&cluster).await;
    let scaled = Scaled::of(&cluster, "autoscale-gpu").await;
    let first = scaled.pods().await.remove(0);
    cluster.create(claim("other", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("other", "other"))).await;
    let other = cluster.wait_ready("other").await;

    // Idle ones are known, too.
    scaled.wait_looked(0..=0).await;
    let mine = scaled.work(&first, "compute").await;
    let others = Work::on(&cluster, NODE, &cluster.devices_of("other").await[0], &other, "compute");
    others.is(70_000, 100, "compute");
    monitoring.wait_milli(ACTIVITY, "other", 990..=1000).await;
    mine.is(1000, 30, "compute");
    scaled.wait_looked(290..=310).await;
    assert_eq!(scaled.replicas().await, Some(1), "another team's load is not theirs");
    // KEDA would be told the sum of what the autoscaler here is told.
    let keda = query_of_keda(&cluster.namespace);
    monitoring.wait_value(&keda, 0.29..=0.31).await;

    mine.is(1000, 90, "compute");
    scaled.wait_pods(2).await;
    scaled.wait_looked(440..=460).await;
    assert_eq!(scaled.replicas().await, Some(2), "half of 0.9 is not too much for two");
    monitoring.wait_value(&keda, 0.88..=0.92).await;
    mine.is(1000, 10, "compute");
    scaled.wait_pods(1).await;

    drop((mine, others));
    scaled.end();
    monitoring.end();
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn autoscalers_that_ask_for_dcgms_names_see_each_pods_own_use() {
    let cluster = cluster("autoscalers_that_ask_for_dcgms_names_see_each_pods_own_use").await;
    set(&cluster, &["--dcgm-metrics=on"]).await;
    let monitoring = Monitoring::of(&cluster).await;
    let (percent, ratio) = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE");
    let memory = "DCGM_FI_DEV_FB_USED";
    let whole = Scaled::by(&cluster, "autoscale-gpu", Some((ratio, "700m"))).await;
    let shares = Scaled::by(&cluster, "autoscale-share", Some((memory, "6000"))).await;
    let cut = Scaled::by(&cluster, "autoscale-mig", Some((ratio, "700m"))).await;
    let (first, of_share) = (whole.pods().await.remove(0), shares.pods().await.remove(0));
    let of_cut = cut.pods().await.remove(0);
    cluster.create(claim("neighbour", share("8Gi"))).await;
    cluster.create(as_nobody(user_of("neighbour", "neighbour"))).await;
    let neighbour = cluster.wait_ready("neighbour").await;
    let device = shares.device_of(&of_share).await;
    assert_eq!(cluster.devices_of("neighbour").await.first(), Some(&device), "both have a part of one GPU");
    let thousandths = |low: i64, high: i64| low * 1000..=high * 1000;

    let others = Work::on(&cluster, NODE, &device, &neighbour, "mps");
    others.is(7800, 90, "mps");
    monitoring.wait_milli(memory, "neighbour", thousandths(7800, 7800)).await;
    // The autoscalers have looked since: they know of what came later.
    let (mine, at_share) = (whole.work(&first, "compute").await, shares.work(&of_share, "mps").await);
    let at_cut = work_on_mig(&cluster, &cut.device_of(&of_cut).await, &of_cut).await;
    mine.is(1000, 30, "compute");
    at_share.is(1640, 1, "mps");
    at_cut.is(2000, 20, "compute");
    whole.wait_looked(290..=310).await;
    shares.wait_looked(thousandths(1640, 1640)).await;
    cut.wait_looked(190..=210).await;
    let replicas = async || [whole.replicas().await, shares.replicas().await, cut.replicas().await];
    assert_eq!(replicas().await, [Some(1); 3]);
    monitoring.wait_milli(percent, name(&first), thousandths(29, 31)).await;

    mine.is(1000, 90, "compute");
    at_share.is(7370, 1, "mps");
    at_cut.is(2000, 90, "compute");
    for scaled in [&whole, &shares, &cut] {
        scaled.wait_pods(2).await;
    }
    // The second ones have nothing to do.
    whole.wait_looked(440..=460).await;
    shares.wait_looked(thousandths(3685, 3685)).await;
    cut.wait_looked(440..=460).await;
    assert_eq!(replicas().await, [Some(2); 3]);
    monitoring.wait_milli(percent, name(&first), thousandths(89, 91)).await;
    mine.is(1000, 10, "compute");
    at_share.is(400, 1, "mps");
    at_cut.is(2000, 5, "compute");
    for scaled in [&whole, &shares, &cut] {
        scaled.wait_pods(1).await;
    }

    drop((mine, at_share, at_cut, others));
    whole.end();
    shares.end();
    cut.end();
    monitoring.end();
    cluster.end().await;
}

/// Panels that rightly have no rows: all is well.
const EMPTY_PANELS: &[&str] = &["GPUs that ail"];

/// The share's MPS server at work for it. NVIDIA's program starts none without a GPU: its daemon, which the driver knows
/// as well as its servers, stands for one.
async fn server_of<'a>(cluster: &'a TestCluster, device: &str, claim: &str) -> Work<'a> {
    let uid = cluster.api::<ResourceClaim>().get(claim).await.expect("the claim is there").metadata.uid;
    let serves = || async {
        let state = cluster.mps_state(NODE).await;
        let mut daemons = state["daemons"].as_array()?.iter();
        let own = daemons.find(|daemon| daemon["group"]["claim"].as_str() == uid.as_deref())?;
        own["phase"]["Serving"]["pid"].as_u64()
    };
    let pid = wait_until("the share's daemon to serve", PATIENCE, serves).await;
    Work::of_process(cluster, NODE, device, pid, "server")
}

/// The rows of a claim's pod under DCGM's names, as what was made for DCGM asks for them.
async fn asked_as_of_dcgm(monitoring: &Monitoring<'_>, namespace: &str) {
    let of = |name: &str, pod: &str| {
        format!("DCGM_FI_{name}{{namespace=\"{namespace}\",pod=\"{pod}\",Hostname=~\".+\",gpu=~\".+\"}}")
    };
    for (pod, mib) in [("part", 8000.0), ("whole", 1000.0), ("mig", 500.0)] {
        monitoring.wait_value(&of("DEV_FB_USED", pod), mib..=mib).await;
    }
    let percent = |pod: &str| format!("avg by (namespace, pod) ({})", of("DEV_GPU_UTIL", pod));
    let ratio = |pod: &str| format!("avg by (pod) ({})", of("PROF_GR_ENGINE_ACTIVE", pod));
    for (pod, activity) in [("part", 0.4), ("whole", 0.5), ("mig", 0.3)] {
        let (low, high) = (activity - 0.01, activity + 0.01);
        monitoring.wait_value(&percent(pod), 100.0 * low..=100.0 * high).await;
        monitoring.wait_value(&ratio(pod), low..=high).await;
    }
    // How much of its own each pod has used: of its grant, its GPU, its MIG device.
    let fill = |pod: &str| {
        let (used, free) = (of("DEV_FB_USED", pod), of("DEV_FB_FREE", pod));
        format!("sum by (pod) ({used}) / (sum by (pod) ({used}) + sum by (pod) ({free}))")
    };
    for (pod, wanted) in [("part", 0.97..=0.98), ("whole", 0.01..=0.02), ("mig", 0.04..=0.07)] {
        monitoring.wait_value(&fill(pod), wanted).await;
    }
    // One row for each, with the board's labels, and those of the MIG device beside them.
    let rows = monitoring.rows_of(&format!("DCGM_FI_DEV_FB_USED{{namespace=\"{namespace}\"}}")).await;
    assert_eq!(rows.len(), 3, "{rows:?}");
    for row in &rows {
        let labels = &row["metric"];
        let has = |name: &str, start: &str| labels[name].as_str().is_some_and(|text| text.starts_with(start));
        assert!(has("UUID", "GPU-") && has("device", "nvidia") && has("modelName", "NVIDIA"), "{labels}");
        assert_eq!((&labels["Hostname"], &labels["node"]), (&json!(NODE), &json!(NODE)), "{labels}");
        assert_eq!(labels["container"], "main", "{labels}");
        let is_mig = labels["pod"] == "mig";
        assert_eq!(
            (has("GPU_I_PROFILE", "1g.10gb"), labels["GPU_I_ID"].is_string()),
            (is_mig, is_mig),
            "{labels}"
        );
    }
}

/// Every query of the dashboard: the panel, and the query as Grafana asks it for everything.
fn panels() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root().join("charts/tranche/monitoring/dashboard.json"))
        .expect("it is there");
    let dashboard: Value = serde_json::from_str(&text).expect("it is JSON");
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().expect("it has panels") {
        let title = panel["title"].as_str().expect("a panel has a title");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().expect("a target has a query");
            let query =
                query.replace("$__rate_interval", "1m").replace("$node", ".*").replace("$namespace", ".*");
            assert!(!query.contains('$'), "{title}: a variable that is not known here: {query}");
            queries.push((title.to_owned(), query));
        }
    }
    queries
}

/// The names of all series in a text.
fn series(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("tranche_")).map(str::to_owned).collect()
}

/// Waits until each share will have an MPS daemon of its own.
async fn wait_own_daemons(cluster: &TestCluster) {
    let of_share = |device: &Device| {
        let attribute = device.attributes.as_ref().and_then(|all| all.get("mpsDaemon"));
        attribute.and_then(|one| one.string.as_deref()) == Some("share")
    };
    let published = || async {
        let all = cluster.published(NODE).await;
        let mut told = all.iter().filter(|device| {
            device.attributes.as_ref().is_some_and(|attributes| attributes.contains_key("mpsDaemon"))
        });
        (told.clone().next().is_some() && told.all(of_share)).then_some(())
    };
    wait_until("the GPUs to have a daemon for each share", PATIENCE, published).await;
}

/// Of everything something: a share, a whole GPU, a MIG device, and a pod that waits.
async fn all_kinds(cluster: &TestCluster) {
    cluster.create(claim("part", share("8Gi"))).await;
    cluster.create(as_nobody(user_of("part", "part"))).await;
    cluster.create(claim("whole", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("whole", "whole"))).await;
    let mig = json!({"name": "gpu", "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]}});
    cluster.create(claim("mig", json!({"requests": [mig]}))).await;
    cluster.create(on(NODE, user_of("mig", "mig"))).await;
    cluster.create(claim("large", share("9000Gi"))).await;
    cluster.create(as_nobody(user_of("large", "large"))).await;
}

/// The rules, and that each knows its series. A share that is almost full is the only one who has something to tell.
async fn rules_find_their_series(monitoring: &Monitoring<'_>) {
    let rules = monitoring.rules().await;
    assert!(rules.len() >= 7, "{rules:?}");
    for rule in &rules {
        let (name, query) = (&rule["name"], rule["query"].as_str().expect("a rule has a query"));
        assert_eq!((&rule["health"], &rule["lastError"]), (&json!("ok"), &Value::Null), "{name}");
        for series in series(query) {
            monitoring.rows_of(&series).await;
        }
        // 8000 of 8192 MiB.
        let wanted = if name == "TrancheClaimAtItsLimit" { "pending" } else { "inactive" };
        let state = || async {
            let rules = monitoring.rules().await;
            rules.iter().any(|one| one["name"] == *name && one["state"] == wanted).then_some(())
        };
        wait_until(&format!("{name} to be {wanted}"), SEEN, state).await;
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn every_panel_and_every_alert_finds_its_series() {
    let cluster = cluster("every_panel_and_every_alert_finds_its_series").await;
    // A daemon for each share, so that it is known how busy shares are; and DCGM's names, which are off by default.
    set(&cluster, &["--mps-daemon=share", "--dcgm-metrics=on"]).await;
    wait_own_daemons(&cluster).await;
    all_kinds(&cluster).await;
    let (part, whole) = (cluster.wait_ready("part").await, cluster.wait_ready("whole").await);
    let mig = cluster.wait_ready("mig").await;
    let monitoring = Monitoring::of(&cluster).await;
    let device = cluster.devices_of("part").await.remove(0);
    let at_share = Work::on(&cluster, NODE, &device, &part, "mps");
    at_share.is(8000, 40, "mps");
    let server = server_of(&cluster, &device, "part").await;
    let at_whole = Work::on(&cluster, NODE, &cluster.devices_of("whole").await[0], &whole, "compute");
    at_whole.is(1000, 50, "compute");
    let at_mig = work_on_mig(&cluster, &cluster.devices_of("mig").await[0], &mig).await;
    at_mig.is(500, 30, "compute");

    let queries = panels();
    assert!(queries.len() > 30, "{}", queries.len());
    for (title, query) in queries {
        if EMPTY_PANELS.contains(&title.as_str()) {
            monitoring.wait_none(&query).await;
        } else {
            let rows = monitoring.rows_of(&query).await;
            println!("{title}: {} rows, {}", rows.len(), rows[0]);
        }
    }
    // What the panels say is what there is.
    let in_shares = "count(count by (pool, device) (tranche_claim_violations_total))";
    monitoring.wait_value(in_shares, 1.0..=1.0).await;
    let of_shares = format!("tranche_gpu_shares_activity_ratio{{device=\"{device}\",pool=\"{NODE}\"}}");
    monitoring.wait_value(&of_shares, 0.39..=0.41).await;
    let namespace = &cluster.namespace;
    let of_part = format!("{{namespace=\"{namespace}\",pod=\"part\",claim=\"part\"}}");
    let activity = format!("tranche_claim_multiprocessor_activity_ratio{of_part}");
    monitoring.wait_value(&activity, 0.39..=0.41).await;
    let rows = monitoring.rows_of(&format!("tranche_claim_memory_used_bytes{of_part}")).await;
    let labels = &rows[0]["metric"];
    assert_eq!((rows.len(), &labels["node"], &labels["pool"]), (1, &json!(NODE), &json!(NODE)), "{labels}");
    assert_eq!(labels["container"], "main", "the workload's container, and not our own: {labels}");

    rules_find_their_series(&monitoring).await;
    asked_as_of_dcgm(&monitoring, namespace).await;
    drop((at_share, server, at_whole, at_mig));
    monitoring.end();
    cluster.end().await;
}
