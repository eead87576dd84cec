//! What a scraper is told of claims: whole GPUs and shares, each pod for itself.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::{Board, cluster};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{SOON, TestCluster, minor_of};

const MIB: f64 = 1_048_576.0;

/// A simulated process of a pod on a GPU of its node, gone when dropped.
pub struct Work<'a> {
    cluster: &'a TestCluster,
    node: String,
    device: String,
    pid: String,
    /// NVML's id of the GPU instance, on a MIG device.
    instance: Option<String>,
}

impl<'a> Work<'a> {
    pub(super) fn of(cluster: &'a TestCluster, board: &Board, pod: &Pod, kind: &str) -> Self {
        Self::on(cluster, &board.node, &board.device, pod, kind)
    }

    pub fn on(cluster: &'a TestCluster, node: &str, device: &str, pod: &Pod, kind: &str) -> Self {
        let (node, device, pid) = (node.to_owned(), device.to_owned(), cluster.pid_of(node, pod).to_string());
        let work = Self { cluster, node, device, pid, instance: None };
        work.is(100, 1, kind);
        work
    }

    /// Of a process that is no pod's, by its number on the node.
    pub fn of_process(cluster: &'a TestCluster, node: &str, device: &str, pid: u64, kind: &str) -> Self {
        let (node, device, pid) = (node.to_owned(), device.to_owned(), pid.to_string());
        let work = Self { cluster, node, device, pid, instance: None };
        work.is(66, 0, kind);
        work
    }

    /// On a MIG device, of which NVML does not tell how busy it is.
    pub fn on_mig(cluster: &'a TestCluster, node: &str, device: &str, pod: &Pod, instance: u64) -> Self {
        let (node, device, pid) = (node.to_owned(), device.to_owned(), cluster.pid_of(node, pod).to_string());
        let work = Self { cluster, node, device, pid, instance: Some(instance.to_string()) };
        work.is(100, 0, "compute");
        work
    }

    /// What it has of the GPU from now on: memory in MiB, and part of the time in percent.
    pub fn is(&self, mib: u32, percent: u32, kind: &str) {
        let (minor, mib) = (minor_of(&self.device).to_string(), mib.to_string());
        let percent = percent.to_string();
        let words = ["process", "add", &minor, &self.pid, &mib, "--kind", kind, "--sm-util", &percent];
        let instance = self.instance.iter().flat_map(|id| ["--gi", id]);
        let words: Vec<&str> = words.into_iter().chain(instance).chain(["--only-if-alive"]).collect();
        self.cluster.fake(&self.node, &words);
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let minor = minor_of(&self.device).to_string();
        let words = ["process", "remove", &minor, &self.pid];
        if let Err(said) = self.cluster.try_fake(&self.node, &words) {
            println!("putting the node right: {said}");
        }
    }
}

/// The value of the one series of this name with all of these labels, if there is one.
fn value(metrics: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let start = format!("tranche_{name}{{");
    let has = |line: &str, (label, value): &(&str, &str)| {
        [format!("{{{label}=\"{value}\""), format!(",{label}=\"{value}\"")]
            .iter()
            .any(|part| line.contains(part))
    };
    let mut lines = metrics
        .lines()
        .filter(|line| line.starts_with(&start) && labels.iter().all(|label| has(line, label)));
    let line = lines.next()?;
    assert_eq!(lines.next(), None, "one series only");
    line.rsplit(' ').next()?.parse().ok()
}

/// All labels of a row: of that pod, claim and request.
fn labels<'a>(cluster: &'a TestCluster, names: [&'a str; 3], board: &'a Board) -> Vec<(&'a str, &'a str)> {
    let [pod, claim, request] = names;
    vec![
        ("namespace", &cluster.namespace),
        ("pod", pod),
        ("container", "main"),
        ("claim", claim),
        ("request", request),
        ("device", &board.device),
        ("pool", super::NODE),
        ("UUID", &board.uuid),
    ]
}

async fn wait_value(cluster: &TestCluster, name: &str, labels: &[(&str, &str)], wanted: f64) {
    let is = || async {
        let metrics = cluster.metrics(super::NODE).await;
        (value(&metrics, name, labels) == Some(wanted)).then_some(())
    };
    wait_until(&format!("{name} {labels:?} to be {wanted}"), SOON, is).await;
}

/// The labels of all series of a pod's claims, and the values of one of them by the device's UUID.
fn rows_of(metrics: &str, name: &str, namespace: &str, pod: &str) -> Vec<(String, f64)> {
    let start = format!("tranche_claim_{name}{{namespace=\"{namespace}\",pod=\"{pod}\",");
    let rows = metrics.lines().filter(|line| line.starts_with(&start));
    let row = |line: &str| {
        let uuid = line.split_once(",UUID=\"")?.1.split_once('"')?.0;
        Some((uuid.to_owned(), line.rsplit(' ').next()?.parse().ok()?))
    };
    rows.filter_map(row).collect()
}

/// NVML's id of the GPU instance that was made for the claim.
async fn instance_of(cluster: &TestCluster, claim: &str, device: &str) -> u64 {
    let told = || async {
        let claim = cluster.api::<ResourceClaim>().get(claim).await.ok()?;
        let devices = claim.status?.devices?;
        devices.first()?.data.as_ref()?.0["placement"]["start"].as_u64()
    };
    let start = match device.split_once("-mig-") {
        // A place by name: `1g10gb-19-4`.
        Some((_, place)) => {
            place.rsplit('-').next().and_then(|start| start.parse().ok()).expect("it begins somewhere")
        }
        None => wait_until("the claim's status to name the place", SOON, told).await,
    };
    let board = cluster.fake_state(super::NODE, &minor_of(device).to_string());
    let instances = board["mig"]["value"]["instances"].as_array().expect("the board is cut");
    let own = instances.iter().find(|one| one["start"] == start);
    own.and_then(|one| one["id"].as_u64()).unwrap_or_else(|| panic!("nothing at {start}: {board}"))
}

/// Two pods with MIG devices of one board that were made for their claims: each has its series, of its own device and
/// load, which go with it. Each by name, with its claim; the first has the smaller device, and is deleted in the end.
pub async fn are_of_their_own_mig_devices(cluster: &TestCluster, pods: [(&str, &str); 2]) {
    let device = async |claim: &str| cluster.devices_of(claim).await.remove(0);
    let devices = [device(pods[0].1).await, device(pods[1].1).await];
    let of = |at: usize| {
        let (pod, claim) = pods[at];
        let named = [("pod", pod), ("claim", claim), ("request", "gpu"), ("device", devices[at].as_str())];
        [&named[..], &[("namespace", &cluster.namespace), ("container", "main"), ("pool", super::NODE)]]
            .concat()
    };
    let mut work = Vec::new();
    for (at, (pod, claim)) in pods.into_iter().enumerate() {
        wait_value(cluster, "claim_gpu_processes", &of(at), 0.0).await;
        let (running, instance) =
            (cluster.wait_ready(pod).await, instance_of(cluster, claim, &devices[at]).await);
        work.push(Work::on_mig(cluster, super::NODE, &devices[at], &running, instance));
    }
    work[0].is(500, 0, "compute");
    work[1].is(12_000, 0, "compute");
    wait_value(cluster, "claim_memory_used_bytes", &of(0), 500.0 * MIB).await;
    wait_value(cluster, "claim_memory_used_bytes", &of(1), 12_000.0 * MIB).await;
    let metrics = cluster.metrics(super::NODE).await;
    let one = |name: &str, at: usize| {
        let rows = rows_of(&metrics, name, &cluster.namespace, pods[at].0);
        let [(uuid, value)] = &rows[..] else { panic!("{name} of {}: {rows:?}", pods[at].0) };
        assert!(uuid.starts_with("MIG-"), "{uuid}");
        (uuid.clone(), *value)
    };
    let (mine, others) = (one("memory_limit_bytes", 0), one("memory_limit_bytes", 1));
    assert!(mine.0 != others.0 && mine.1 > 9_000.0 * MIB && others.1 > 1.9 * mine.1, "{mine:?} {others:?}");
    for name in ["memory_used_bytes", "gpu_processes"] {
        assert_eq!((one(name, 0).0, one(name, 1).0), (mine.0.clone(), others.0.clone()), "{name}");
    }
    assert_eq!((one("gpu_processes", 0).1, one("gpu_processes", 1).1), (1.0, 1.0));
    let state = cluster.state(super::NODE).await;
    let has = |claim: &str| {
        let claims = state["claims"].as_array().cloned().unwrap_or_default();
        claims.into_iter().find(|one| one["name"] == claim).map(|one| one.to_string()).unwrap_or_default()
    };
    for (at, uuid) in [&mine.0, &others.0].into_iter().enumerate() {
        assert!(has(pods[at].1).contains(uuid.as_str()), "{uuid} is not of {}: {state}", pods[at].1);
    }

    drop(work.remove(0));
    cluster.delete(pods[0].0).await;
    let namespace = &cluster.namespace;
    let gone = || async {
        let metrics = cluster.metrics(super::NODE).await;
        let own = format!("namespace=\"{namespace}\",pod=\"{}\"", pods[0].0);
        let left = metrics.contains(&own) || metrics.contains(mine.0.as_str());
        (!left).then_some(())
    };
    wait_until("all series of the pod that ended to go", SOON, gone).await;
    let metrics = cluster.metrics(super::NODE).await;
    assert_eq!(value(&metrics, "claim_memory_used_bytes", &of(1)), Some(12_000.0 * MIB));
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_pod_is_told_of_by_itself_on_a_whole_gpu_and_on_a_share() {
    let test = "each_pod_is_told_of_by_itself_on_a_whole_gpu_and_on_a_share";
    let Some(cluster) = cluster(test).await else { return };
    let boards = Board::all(&cluster, super::NODE).await;
    let [shared, whole, ..] = &boards[..] else { panic!("the node has two GPUs that can be shared") };
    let request = of_gpu(&whole.uuid, gpu("all"));
    cluster.create(claim("whole", json!({"requests": [request]}))).await;
    for pod in ["mine", "other"] {
        cluster.create(as_nobody(user_of("whole", pod))).await;
    }
    let (mine, other) = (cluster.wait_ready("mine").await, cluster.wait_ready("other").await);
    let tenant = shared.tenant(&cluster, "tenant", "2000Mi", 25).await;
    let neighbour = shared.tenant(&cluster, "neighbour", "2000Mi", 25).await;

    let my = labels(&cluster, ["mine", "whole", "all"], whole);
    let others = labels(&cluster, ["other", "whole", "all"], whole);
    let tenants = labels(&cluster, ["tenant", "tenant", "gpu"], shared);
    let neighbours = labels(&cluster, ["neighbour", "neighbour", "gpu"], shared);

    // Idle ones are told of, too.
    wait_value(&cluster, "claim_multiprocessor_activity_ratio", &my, 0.0).await;
    wait_value(&cluster, "claim_memory_used_bytes", &tenants, 0.0).await;
    let at_work = Work::of(&cluster, whole, &mine, "compute");
    at_work.is(500, 35, "compute");
    let at_share = Work::of(&cluster, shared, &tenant, "mps");
    at_share.is(400, 20, "mps");
    wait_value(&cluster, "claim_multiprocessor_activity_ratio", &my, 0.35).await;
    wait_value(&cluster, "claim_memory_used_bytes", &my, 500.0 * MIB).await;
    wait_value(&cluster, "claim_memory_used_bytes", &tenants, 400.0 * MIB).await;

    // Others' load on the same GPUs.
    let others_work = Work::of(&cluster, whole, &other, "compute");
    others_work.is(300, 60, "compute");
    let neighbours_work = Work::of(&cluster, shared, &neighbour, "mps");
    neighbours_work.is(700, 50, "mps");
    wait_value(&cluster, "claim_multiprocessor_activity_ratio", &others, 0.6).await;
    wait_value(&cluster, "claim_memory_used_bytes", &neighbours, 700.0 * MIB).await;
    let board = [("UUID", whole.uuid.as_str()), ("device", whole.device.as_str()), ("pool", super::NODE)];
    wait_value(&cluster, "gpu_activity_ratio", &board, 0.95).await;
    let metrics = cluster.metrics(super::NODE).await;
    let of = |name: &str, labels: &[(&str, &str)]| value(&metrics, name, labels);
    assert_eq!(of("claim_multiprocessor_activity_ratio", &my), Some(0.35));
    assert_eq!(of("claim_gpu_activity_ratio", &my), Some(0.35));
    assert_eq!(of("claim_memory_used_bytes", &my), Some(500.0 * MIB));
    assert_eq!(of("claim_gpu_processes", &my), Some(1.0));
    assert_eq!(of("claim_memory_used_bytes", &tenants), Some(400.0 * MIB));
    assert_eq!(of("claim_memory_limit_bytes", &tenants), Some(2000.0 * MIB));
    assert_eq!(of("claim_multiprocessor_limit_ratio", &tenants), Some(0.25));
    assert_eq!(of("claim_multiprocessor_activity_ratio", &tenants), None, "NVML does not tell it of shares");
    assert_eq!(of("claim_violations_total", &my), None, "a whole GPU has no grant to exceed");
    let usable = of("gpu_memory_total_bytes", &board).zip(of("gpu_memory_reserved_bytes", &board));
    assert_eq!(of("claim_memory_limit_bytes", &my), usable.map(|(total, reserved)| total - reserved));
    assert_eq!(of("gpu_uncounted_memory_bytes", &board), Some(0.0));
    for name in ["gpu_temperature_celsius", "gpu_power_watts", "gpu_sm_clock_hertz", "gpu_memory_clock_hertz"]
    {
        assert!(of(name, &board).is_some_and(|value| value > 0.0), "{name}");
    }
    assert!(!metrics.contains("# EOF"), "the text format, to whoever asks for nothing");

    drop((at_work, others_work, at_share, neighbours_work));
    cluster.delete("mine").await;
    let gone = || async {
        let metrics = cluster.metrics(super::NODE).await;
        value(&metrics, "claim_memory_used_bytes", &my).is_none().then_some(())
    };
    // Of a claim with several pods it is asked once a minute who is left.
    wait_until("the row of a pod that ended to go", SOON + std::time::Duration::from_secs(60), gone).await;
    assert_eq!(value(&cluster.metrics(super::NODE).await, "claim_memory_used_bytes", &others), Some(0.0));
    cluster.end().await;
}
