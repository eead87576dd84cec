//! How much memory the controller takes for what it follows, and how long its rounds are: a quarter of a large cluster, or all of it where
//! TRANCHE_MEMORY is set. `TRANCHE_MEMORY=1 cargo test --test it -- --ignored --nocapture --exact memory::NAME`, each in
//! a process of its own.

use std::convert::Infallible;
use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body as AnswerBody;
use futures::StreamExt;
use http::{Request, Response};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tranche::cluster::KubeCluster;
use tranche::cluster::feed::{Change, WatchEvent};
use tranche::controller::config::Rules;
use tranche::controller::core::Core;
use tranche::controller::write::{Write, WriteOutcome};

use crate::objects::share;
use crate::pace::slowness;

/// Another namespace's pod is placed long before.
const MOST_ROUNDS: usize = 100;

/// What an API server has: of each resource so many objects, made as they are asked for.
type Make = fn(&str, usize) -> Option<String>;

fn client(make: Make) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| async move {
        let resource = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let body = if watch {
            AnswerBody::from_stream(futures::stream::pending::<Nothing>())
        } else {
            list(make, resource)
        };
        Ok::<_, std::io::Error>(Response::new(body))
    });
    Client::new(service, "default")
}

type Nothing = Result<String, Infallible>;

fn list(make: Make, resource: String) -> AnswerBody {
    let objects = (0..).map_while(move |nth| {
        let comma = if nth > 0 { "," } else { "" };
        make(&resource, nth).map(|object| format!("{comma}{object}"))
    });
    let head = r#"{"kind":"List","metadata":{"resourceVersion":"1"},"items":["#.to_owned();
    let parts = std::iter::once(head).chain(objects).chain(std::iter::once("]}".to_owned()));
    AnswerBody::from_stream(futures::stream::iter(parts.map(Ok::<_, Infallible>)))
}

/// One in so many of a large cluster's objects.
fn part() -> usize {
    if std::env::var_os("TRANCHE_MEMORY").is_some() { 1 } else { 4 }
}

/// MiB of this process now, and at most so far.
fn resident() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |field: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    };
    (of("VmRSS:"), of("VmHWM:"))
}

async fn measure(what: &str, make: Make) -> Core {
    let (before, _) = resident();
    let begin = std::time::Instant::now();
    let mut core = follow(make).await;
    core.round(Duration::ZERO, &mut String::new);
    let (now, most) = resident();
    println!(
        "{what}: {before} MiB before, {now} MiB now, {most} MiB at most; {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    core
}

/// A controller that knows all there is, and has decided nothing.
async fn follow(make: Make) -> Core {
    let cluster = KubeCluster::with_client(client(make));
    let mut core = Core::new(Rules::default(), "tranche-system");
    let mut feed = cluster.feed();
    while !core.view.is_complete() {
        core.apply(feed.next().await.unwrap(), Duration::ZERO);
    }
    core
}

/// Of the six kinds one; the kinds are written once.
fn fat(nth: usize) -> String {
    static KINDS: OnceLock<Vec<String>> = OnceLock::new();
    let kinds = KINDS.get_or_init(|| (0..6).map(|kind| fat_of(kind).to_string()).collect());
    kinds[nth % kinds.len()].replace("\"fat-name\"", &format!("\"fat-{nth}\""))
}

fn fat_of(kind: usize) -> Value {
    let mut claim = share("fat-name", json!({"memory": "1Gi"}));
    let maps: Vec<Value> = (0..1400).map(|_| json!({"": 0})).collect();
    let entries = |driver: &str| -> Vec<Value> {
        let entry = json!({"opaque": {"driver": driver, "parameters": {"a": maps}}});
        vec![entry; 31]
    };
    let selector = json!({"cel": {"expression": "x".repeat(10 << 10)}});
    let exactly = |class: &str| {
        json!({"name": "r", "exactly": {"deviceClassName": class,
        "selectors": vec![selector.clone(); 16]}})
    };
    match kind {
        0 => claim["spec"]["devices"]["config"] = entries("nic.example.com").into(),
        1 => claim["spec"]["devices"]["config"] = entries("gpu.nvidia.com").into(),
        2 => claim["spec"]["devices"]["requests"] = vec![exactly("shared.gpu.nvidia.com"); 8].into(),
        3 => claim["spec"]["devices"]["requests"] = vec![exactly("gpu.nvidia.com"); 8].into(),
        4 => {
            let finalizers: Vec<String> = (0..20_000).map(|nth| format!("example.com/{nth:050}")).collect();
            claim["metadata"]["finalizers"] = finalizers.into();
        }
        _ => {
            claim["metadata"]["annotations"] = json!({"tranche.dev/waiting": "x".repeat(200 << 10)});
            // The largest that are read.
            claim["spec"]["devices"]["requests"] = json!([{"name": "r", "exactly": {"deviceClassName": "shared.gpu.nvidia.com",
                    "selectors": vec![selector; 5]}}]);
        }
    }
    claim
}

#[tokio::test]
#[ignore = "measures the memory of its process, which it wants for itself"]
async fn of_ordinary_claims_and_the_fattest() {
    let core = measure("10,000 ordinary claims and 1,000 of the fattest", |resource, nth| {
        match (resource, nth * part()) {
            ("resourceclaims", 0..10_000) => {
                Some(share(&format!("claim-{nth}"), json!({"memory": "1Gi"})).to_string())
            }
            ("resourceclaims", 10_000..11_000) => Some(fat(nth)),
            _ => None,
        }
    })
    .await;
    assert_eq!((core.view.claims().count(), core.view.unreadables()), (11_000 / part(), 0));
    // When this was written 86 for all of it, 59 for a quarter, in a process that has 14 before.
    assert!(resident().0 <= 60 + 140 / part() as u64, "{:?} MiB", resident());
}

#[tokio::test]
#[ignore = "measures the memory of its process, which it wants for itself"]
async fn of_nodes_with_gpus() {
    let core = measure("6,000 nodes with 8 GPUs each", |resource, nth| match (resource, nth * part()) {
        ("nodes", 0..6_000) => Some(node(nth).to_string()),
        ("resourceslices", 0..6_000) => Some(slice(nth).to_string()),
        _ => None,
    })
    .await;
    assert_eq!(core.view.nodes().count(), 6_000 / part());
    // When this was written 128 for all of it, 73 for a quarter, in a process that has 17 before.
    assert!(resident().0 <= 70 + 80 / part() as u64, "{:?} MiB", resident());
}

/// Rounds, until nothing is left over, of many pods that each have a selector of their own, which is another question
/// for each GPU; and of one pod of another namespace that comes last. When this was written, for all of it 10 rounds,
/// the longest of 4.2 s in an unoptimised build; for a quarter 3, the longest of 1.8 s.
#[tokio::test]
#[ignore = "measures the memory of its process, which it wants for itself"]
async fn of_pods_with_selectors_of_their_own() {
    let mut core = follow(|resource, nth| match (resource, nth * part()) {
        ("nodes", 0..5_000) => Some(node(nth).to_string()),
        ("resourceslices", 0..5_000) => Some(slice(nth).to_string()),
        ("resourceclaims", 0..300) => {
            let mut claim = share(&format!("claim-{nth}"), json!({"memory": "1Gi"}));
            let text = format!("device.attributes['gpu.nvidia.com'].uuid != 'GPU-{nth}'");
            claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
                json!([{"cel": {"expression": text}}]);
            Some(claim.to_string())
        }
        ("pods", 0..300) => Some(pod("ml", nth).to_string()),
        _ => None,
    })
    .await;
    let one_more = |mut object: Value, namespace: &str| {
        object["metadata"]["namespace"] = namespace.into();
        object
    };
    let claim = one_more(share("claim-1000000", json!({"memory": "1Gi"})), "other");
    core.apply(Change::Claim(WatchEvent::Stored(serde_json::from_value(claim).unwrap())), Duration::ZERO);
    core.apply(
        Change::Pod(WatchEvent::Stored(serde_json::from_value(pod("other", 1_000_000)).unwrap())),
        Duration::ZERO,
    );
    let (mut decided, mut longest, mut rounds) = (0, Duration::ZERO, 0);
    loop {
        let begin = std::time::Instant::now();
        let round = core.round(Duration::from_secs(1), &mut String::new);
        longest = longest.max(begin.elapsed());
        (decided, rounds) = (decided + round.decided, rounds + 1);
        if rounds == 1 {
            assert!(
                round.decided >= 1,
                "{round:?}: the other namespace's pod has its part of the first round"
            );
            let waits = core.queue.pods().any(|pod| pod.as_str() == "pod-1000000");
            assert!(!waits, "it is placed in the first round");
        }
        if round.next != Some(Duration::from_secs(1)) && round.decided == 0 {
            break;
        }
        assert!(rounds < 1000, "{decided} decided after {rounds} rounds");
    }
    println!("300 pods with selectors of their own, 5,000 nodes with 8 GPUs each, or a quarter of both");
    println!("{decided} decided in {rounds} rounds, the longest of {longest:?}; {:?} MiB", resident());
    assert_eq!(decided, 300 / part() + 1);
}

/// What `count` claims and pods of one namespace that no GPU has room for do to the one pod of another that comes
/// before the first round, and to the one that comes in the midst of them. Times are of the processor, so
/// that it does not matter what else is at work; the API server does every write at once.
struct Crowd {
    core: Core,
    begin: std::time::Instant,
    longest: Duration,
    version: usize,
}

/// What this thread has had of a processor.
fn on_processor() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

impl Crowd {
    fn one_round(&mut self) -> Option<Duration> {
        let (begin, now) = (on_processor(), self.begin.elapsed());
        let round = self.core.round(now, &mut String::new);
        self.longest = self.longest.max(on_processor() - begin);
        let again = (round.decided > 0 || !round.writes.is_empty()).then_some(now);
        for write in round.writes {
            if let Write::Mark(key, at, marks) = write {
                self.version += 1;
                let mut claim = crowd_claim(at.claim.name.trim_start_matches("claim-").parse().unwrap());
                claim["metadata"]["resourceVersion"] = self.version.to_string().into();
                let annotations =
                    marks.annotations.into_iter().filter_map(|(name, text)| Some((name, text?.into())));
                claim["metadata"]["annotations"] = Value::Object(annotations.collect());
                let claim: ResourceClaim = serde_json::from_value(claim).unwrap();
                self.core.done(WriteOutcome::Marked(key, Ok(Box::new(claim.clone()))), now);
                self.core.apply(Change::Claim(WatchEvent::Stored(Box::new(claim))), now);
            }
        }
        again.or(round.next)
    }

    /// How many rounds, and how much of a processor, another namespace's pod waits for its place.
    fn another(&mut self, nth: usize) -> (usize, Duration) {
        let now = self.begin.elapsed();
        let mut claim = share(&format!("claim-{nth}"), json!({"memory": "1Gi"}));
        claim["metadata"]["namespace"] = "other".into();
        self.core.apply(Change::Claim(WatchEvent::Stored(serde_json::from_value(claim).unwrap())), now);
        self.core
            .apply(Change::Pod(WatchEvent::Stored(serde_json::from_value(pod("other", nth)).unwrap())), now);
        let (begin, uid) = (on_processor(), format!("pod-{nth}"));
        for rounds in 1..=MOST_ROUNDS {
            self.one_round();
            if !self.core.queue.pods().any(|pod| pod.as_str() == uid) {
                return (rounds, on_processor() - begin);
            }
        }
        panic!("{uid} has no place after {MOST_ROUNDS} rounds");
    }
}

/// More than any GPU has; every tenth has a selector of its own, which is another question for each GPU.
fn crowd_claim(nth: usize) -> Value {
    let mut claim = share(&format!("claim-{nth}"), json!({"memory": "900Gi"}));
    if nth.is_multiple_of(10) {
        let text = format!("device.attributes['gpu.nvidia.com'].uuid != 'GPU-{nth}'");
        claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
            json!([{"cel": {"expression": text}}]);
    }
    claim["metadata"]["resourceVersion"] = "1".into();
    claim
}

/// docs/threats.md has the figures, those of all as far as they were measured.
#[tokio::test]
#[ignore = "measures the memory of its process, which it wants for itself"]
async fn of_a_namespace_whose_pods_find_no_place() {
    let core = follow(|resource, nth| match (resource, nth * part()) {
        ("nodes", 0..1_000) => Some(node(nth).to_string()),
        ("resourceslices", 0..1_000) => Some(slice(nth).to_string()),
        ("resourceclaims", 0..20_000) => Some(crowd_claim(nth).to_string()),
        ("pods", 0..20_000) => Some(pod("ml", nth).to_string()),
        _ => None,
    })
    .await;
    let mut crowd = Crowd { core, begin: std::time::Instant::now(), longest: Duration::ZERO, version: 1 };
    println!("20,000 claims and pods that find no place, 1,000 nodes with 8 GPUs each, or a quarter of all");
    println!("{} MiB once they are known", resident().0);
    // Processors of machines that many share are fast and slow by turns.
    let before = slowness();
    let (rounds, first) = crowd.another(1_000_000);
    let slower = before.max(slowness());
    println!("another namespace's pod is placed after {first:?}; the longest round {:?}", crowd.longest);
    assert_eq!(rounds, 1, "it is placed in the first round");
    crowd.longest = Duration::ZERO;
    // A round is due at once as long as somebody is left over.
    for _ in 0..50 {
        if crowd.one_round().is_none_or(|next| next > crowd.begin.elapsed()) {
            break;
        }
    }
    let (rounds, later) = crowd.another(1_000_001);
    let (now, most) = resident();
    println!(
        "50 rounds later after {later:?}, the longest of them {:?}; {now} MiB, {most} MiB at most",
        crowd.longest
    );
    assert!(most < 512, "{most} MiB");
    assert_eq!(rounds, 1, "it is placed in the next round");
    let (took, most) = (first.max(later), Duration::from_secs(5).mul_f64(slower.max(slowness())));
    println!("{most:?} are the most on this machine");
    assert!(took < most, "{first:?} {later:?}; {most:?} are the most");
}

fn pod(namespace: &str, nth: usize) -> Value {
    json!({"metadata": {"name": format!("pod-{nth}"), "namespace": namespace, "uid": format!("pod-{nth}"),
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "main", "image": "a"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": format!("claim-{nth}")}]},
        "status": {"phase": "Pending"}})
}

fn node(nth: usize) -> Value {
    let name = format!("ip-10-0-{}-{}.eu-central-1.compute.internal", nth / 256, nth % 256);
    let mut labels: Value = (0..15)
        .map(|one| (format!("example.com/label-{one:02}"), "some value".into()))
        .collect::<serde_json::Map<_, _>>()
        .into();
    labels["kubernetes.io/hostname"] = name.clone().into();
    let condition = |kind: &str, status: &str| {
        json!({"type": kind, "status": status, "reason": "KubeletHasWhatItNeeds",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "all is well"})
    };
    let amounts = json!({"cpu": "192", "memory": "2113409556Ki", "pods": "110", "ephemeral-storage": "1Ti", "hugepages-2Mi": "0"});
    let images: Vec<Value> =
        (0..50).map(|one| json!({"names": [format!("example.com/image:{one}")], "sizeBytes": 1})).collect();
    json!({"metadata": {"name": name, "uid": format!("uid-{nth}"), "labels": labels, "annotations": {"a": "b"}},
        "spec": {"podCIDR": "10.0.0.0/24", "providerID": format!("aws:///eu-central-1a/i-{nth:017x}")},
        "status": {"allocatable": amounts, "capacity": amounts, "images": images,
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": name}],
            "conditions": [condition("MemoryPressure", "False"), condition("DiskPressure", "False"),
                condition("PIDPressure", "False"), condition("Ready", "True")],
            "nodeInfo": {"kernelVersion": "6.8.0", "osImage": "Ubuntu 24.04", "machineID": format!("{nth:032x}"),
                "systemUUID": format!("{nth:032x}"), "bootID": format!("{nth:032x}"), "kubeletVersion": "v1.37.0",
                "containerRuntimeVersion": "containerd://2.0.0", "architecture": "amd64",
                "operatingSystem": "linux", "kubeProxyVersion": ""}}})
}

fn slice(nth: usize) -> Value {
    let node = format!("ip-10-0-{}-{}.eu-central-1.compute.internal", nth / 256, nth % 256);
    let device = |minor: usize| {
        let text = |value: &str| json!({"string": value});
        json!({"name": format!("gpu-{minor}"), "allowMultipleAllocations": true,
            "attributes": {"type": text("gpu"), "uuid": text(&format!("GPU-{nth:08x}-0000-0000-0000-{minor:012x}")),
                "productName": text("NVIDIA H100 80GB HBM3"), "isolation": text("mps"), "architecture": text("Hopper"),
                "brand": text("Nvidia"), "cudaComputeCapability": {"version": "9.0.0"},
                "cudaDriverVersion": {"version": "13.0.0"}, "driverVersion": {"version": "615.20.1"},
                "multiprocessors": {"int": 132}, "numaNode": {"int": minor / 4},
                "resource.kubernetes.io/pciBusID": text(&format!("0000:{minor:02x}:00.0")),
                "resource.kubernetes.io/pcieRoot": text(&format!("pci0000:{minor:02x}")),
                "grantableMemoryMiB": {"int": 81_920}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}},
            "capacity": {"memory": {"value": "80Gi"}, "compute": {"value": "100"}, "shares": {"value": "16"}}})
    };
    let devices: Vec<Value> = (0..8).map(device).collect();
    json!({"metadata": {"name": format!("{node}-slice"), "uid": format!("slice-{nth}")},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": node, "devices": devices,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}})
}
