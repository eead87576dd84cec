//! A real Prometheus that scrapes the driver as the chart's PodMonitor does, with the chart's alerts, and what answers
//! HorizontalPodAutoscalers from it by the rules of `deploy/autoscaling/prometheus-adapter*.yaml`. Both run as a pod of
//! the test's namespace, from programs that `rig build-prometheus` and `rig build-adapter` keep in the cache.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::rig::{SLOWER, root, wait_until};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, ask_at, is_ready, node_of};

/// Where its programs lie on the node, and the list of what is scraped.
const PROGRAMS: &str = "/var/lib/rig-monitoring";
const NODE: &str = "node-a";
/// Where autoscalers ask.
const API: &str = "v1beta2.custom.metrics.k8s.io";

/// What must be seen in Prometheus is there within this: a look of the node plugin, two scrapes and an average.
pub const SEEN: Duration = Duration::from_secs(60);

pub struct Monitoring<'a> {
    cluster: &'a TestCluster,
    pod: Pod,
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The driver's pods as Prometheus' operator finds them by the chart's PodMonitors: all, and those of the node plugin.
async fn targets(cluster: &TestCluster) -> [Value; 2] {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let labels = ListParams::default().labels("app.kubernetes.io/name=tranche");
    let ready = || async {
        let pods = pods.list(&labels).await.ok()?.items;
        (!pods.is_empty() && pods.iter().all(is_ready)).then_some(pods)
    };
    let pods = wait_until("all pods of the driver to be ready", PATIENCE, ready).await;
    let target = |pod: &Pod| {
        let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()).expect("it has an address");
        let container = &pod.spec.as_ref().expect("it has a spec").containers[0].name;
        json!({"targets": [format!("{ip}:8080")], "labels": {
            "node": node_of(pod), "namespace": SYSTEM, "pod": pod.metadata.name, "container": container}})
    };
    let is_plugin = |pod: &&Pod| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get("app.kubernetes.io/component")).is_some_and(|of| of == "node")
    };
    [pods.iter().map(target).collect(), pods.iter().filter(is_plugin).map(target).collect()]
}

impl<'a> Monitoring<'a> {
    /// Starts both, and waits until the API server has them.
    pub async fn of(cluster: &'a TestCluster) -> Self {
        let folder = cluster.host(NODE, PROGRAMS);
        fs::create_dir_all(&folder).expect("the node's folder can be made");
        for (verb, name) in [("build-prometheus", "prometheus"), ("build-adapter", "adapter")] {
            let program = cluster.rig.run(&[verb]);
            // Whole, and beside one that still runs for the test before.
            let new = folder.join(format!("{name}.new"));
            fs::copy(Path::new(program.trim()), &new).expect("the program can be copied");
            fs::rename(&new, folder.join(name)).expect("it can take its name");
        }
        let [all, plugins] = targets(cluster).await;
        for (name, targets) in [("targets", all), ("plugins", plugins)] {
            fs::write(folder.join(format!("{name}.json")), targets.to_string()).expect("it can be written");
        }
        // One configuration of both files, with means over seconds where they have a minute.
        let rules = text("deploy/autoscaling/prometheus-adapter.yaml");
        let of_dcgm = text("deploy/autoscaling/prometheus-adapter-dcgm.yaml").replace("\nrules:\n", "\n");
        assert!(rules.contains("[1m]") && of_dcgm.contains("[1m]"), "the rules have means over a minute");
        let rules = format!("{rules}{of_dcgm}").replace("[1m]", "[10s]");
        let data = json!({
            "prometheus.yaml": text("tests/cluster/data/monitoring/prometheus.yaml"),
            "alerts.yaml": text("charts/tranche/monitoring/alerts.yaml"),
            "adapter.yaml": rules});
        let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "monitoring"}, "data": data});
        cluster.create(config).await;
        let name = format!("{}-monitoring", cluster.namespace);
        let auth = format!("{name}-auth");
        for (kind, name) in [
            ("clusterrole", name.as_str()),
            ("clusterrolebinding", &name),
            ("clusterrolebinding", &auth),
            ("rolebinding", &name),
            // Before the pod that serves it: no namespace can be deleted while an API does not answer.
            ("apiservice", API),
        ] {
            cluster.rig.on_end(&["kubectl", "-n", "kube-system", "delete", kind, name, "--ignore-not-found"]);
        }
        let manifest = text("tests/cluster/data/monitoring/monitoring.yaml");
        apply(cluster, &manifest.replace("NAMESPACE", &cluster.namespace), false);
        let pod = cluster.wait_ready("monitoring").await;
        let monitoring = Self { cluster, pod };
        let told = || async {
            cluster.rig.attempt(&["kubectl", "get", "--raw", "/apis/custom.metrics.k8s.io/v1beta2"]).ok()
        };
        wait_until("the API server to serve custom metrics", PATIENCE, told).await;
        monitoring.rows_of("tranche_slices_published == 1").await;
        monitoring
    }

    /// Takes away what would keep other namespaces from going.
    pub fn end(self) {
        self.cluster.rig.kubectl(&["delete", "apiservice", API]);
    }

    /// What Prometheus answers; Err where it does not, or refuses the query.
    fn ask(&self, path: &str) -> Result<Value, String> {
        let answer = ask_at(&self.pod, 9090, path).ok_or("Prometheus refuses this, or does not answer")?;
        serde_json::from_str(&answer).map_err(|error| error.to_string())
    }

    /// The rows of a query as soon as there are as many as wanted.
    async fn wait_rows(&self, query: &str, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let (path, begin) = (format!("/api/v1/query?query={}", encoded(query)), Instant::now());
        loop {
            let said = match self.ask(&path) {
                Ok(answer) => {
                    let rows = answer["data"]["result"].as_array().cloned().unwrap_or_default();
                    if enough(&rows) {
                        return rows;
                    }
                    format!("{} rows, such as {:?}", rows.len(), rows.first())
                }
                Err(error) => error,
            };
            assert!(begin.elapsed() < SEEN * SLOWER, "{query}: {said}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// The rows of a query, once there is one at least.
    pub async fn rows_of(&self, query: &str) -> Vec<Value> {
        self.wait_rows(query, |rows| !rows.is_empty()).await
    }

    /// Waits until a query has one row, and this value.
    pub async fn wait_value(&self, query: &str, wanted: std::ops::RangeInclusive<f64>) {
        let is =
            |rows: &[Value]| matches!(rows, [row] if value(row).is_some_and(|now| wanted.contains(&now)));
        println!("{query}: {}", self.wait_rows(query, is).await[0]);
    }

    /// Waits until a query has no row.
    pub async fn wait_none(&self, query: &str) {
        self.wait_rows(query, <[Value]>::is_empty).await;
    }

    /// What Prometheus says of its rules.
    pub async fn rules(&self) -> Vec<Value> {
        let told = || async { self.ask("/api/v1/rules").ok() };
        let answer = wait_until("Prometheus to tell its rules", SEEN, told).await;
        let groups = answer["data"]["groups"].as_array().cloned().unwrap_or_default();
        groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default()).collect()
    }

    /// What an autoscaler is told of a pod, in thousandths.
    pub fn milli(&self, metric: &str, pod: &str) -> Option<i64> {
        let namespace = &self.cluster.namespace;
        let path = format!("/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/{pod}/{metric}");
        let said = self.cluster.rig.attempt(&["kubectl", "get", "--raw", &path]).ok()?;
        let said: Value = serde_json::from_str(&said).ok()?;
        milli(said["items"][0]["value"].as_str()?)
    }

    /// Waits until an autoscaler is told this of a pod, in thousandths.
    pub async fn wait_milli(&self, metric: &str, pod: &str, wanted: std::ops::RangeInclusive<i64>) {
        let is = || async { self.milli(metric, pod).filter(|now| wanted.contains(now)) };
        wait_until(&format!("{metric} of {pod} to be {wanted:?} thousandths"), SEEN, is).await;
    }
}

/// The value of a row that Prometheus tells.
pub fn value(row: &Value) -> Option<f64> {
    row["value"][1].as_str()?.parse().ok()
}

/// A quantity such as `700m`, `1` or `2k`, in thousandths.
pub fn milli(quantity: &str) -> Option<i64> {
    let units = [("m", 1), ("k", 1_000_000)];
    let unit = units.iter().find_map(|(unit, times)| Some((quantity.strip_suffix(unit)?, *times)));
    let (number, times) = unit.unwrap_or((quantity, 1000));
    number.parse::<i64>().ok()?.checked_mul(times)
}

/// Applies a text: in the test's namespace, or where its objects say.
pub fn apply(cluster: &TestCluster, manifest: &str, own_namespace: bool) {
    let file = std::env::temp_dir().join(format!("{}-{}.yaml", cluster.namespace, manifest.len()));
    fs::write(&file, manifest).expect("a file can be written");
    let (path, namespace) = (file.display().to_string(), ["-n", cluster.namespace.as_str()]);
    let namespace = if own_namespace { &namespace[..] } else { &[] };
    let said = cluster.rig.attempt(&[&["kubectl", "apply", "-f", &path], namespace].concat());
    fs::remove_file(&file).expect("the file is there");
    said.unwrap_or_else(|said| panic!("{said}"));
}

/// As a part of a URL.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte.is_ascii_alphanumeric() {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect()
}
