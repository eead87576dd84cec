//! What an administrator sets for the plugin: which GPUs are shared, what who asks for nothing gets, and what is
//! done about those who take too much.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::watchdog::Process;
use super::{Board, NODE, cluster, mps_env, wait_event, wait_unschedulable};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, parameters, share, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run, minor_of, sum};

const SET: &str = "tranche-node";

/// Gives the plugin these flags, `--name=value`, in place of its own of the same names or beside its own, until the test
/// ends.
pub async fn set(cluster: &TestCluster, flags: &[&str]) {
    let text = cluster.rig.kubectl(&["-n", SYSTEM, "get", "daemonset", SET, "-o", "json"]);
    let stored: Value = serde_json::from_str(&text).expect("a DaemonSet is JSON");
    let before: Vec<String> =
        serde_json::from_value(stored["spec"]["template"]["spec"]["containers"][0]["args"].clone()).unwrap();
    let mut args = before.clone();
    for flag in flags {
        let (name, _) = flag.split_once('=').expect("a flag with a value");
        match args.iter_mut().find(|arg| arg.starts_with(&format!("{name}="))) {
            Some(place) => *place = (*flag).to_owned(),
            None => args.push((*flag).to_owned()),
        }
    }
    let patch = |args: &[String]| {
        let containers = json!([{"name": "node", "args": args}]);
        json!({"spec": {"template": {"spec": {"containers": containers}}}}).to_string()
    };
    let rollout = ["kubectl", "-n", SYSTEM, "rollout", "status", "daemonset", SET, "--timeout=170s"];
    cluster.rig.on_end(&rollout);
    cluster.rig.on_end(&["kubectl", "-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(&before)]);
    cluster.rig.kubectl(&["-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(&args)]);
    cluster.rig.run(&rollout);
    let alone = || async { (cluster.plugins(NODE).await.len() == 1).then_some(()) };
    wait_until("the old plugin to be gone", PATIENCE, alone).await;
}

async fn is_offered_in_shares(cluster: &TestCluster, device: &str) -> bool {
    let published = cluster.published(NODE).await;
    let found = published.iter().find(|one| one.name == device).expect("the GPU is published");
    found.allow_multiple_allocations == Some(true)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_is_kept_from_sharing_is_given_whole_and_the_others_in_shares() {
    let test = "a_gpu_that_is_kept_from_sharing_is_given_whole_and_the_others_in_shares";
    let Some(cluster) = cluster(test).await else { return };
    let boards = Board::all(&cluster, NODE).await;
    let (whole, shared) = (&boards[0], &boards[1]);
    set(&cluster, &[&format!("--exclusive-gpus={}", whole.uuid)]).await;
    let kept = || async { (!is_offered_in_shares(&cluster, &whole.device).await).then_some(()) };
    wait_until("the GPU to be offered whole only", PATIENCE, kept).await;
    assert!(is_offered_in_shares(&cluster, &shared.device).await);

    cluster.create(claim("part", json!({"requests": [of_gpu(&whole.uuid, share("2000Mi", 0))]}))).await;
    cluster.create(as_nobody(user_of("part", "part"))).await;
    cluster.wait_ready("part").await;
    assert_eq!(cluster.inside("part", "main").gpus, [minor_of(&whole.device)]);
    assert_eq!(
        mps_env(&cluster, "part", "main"),
        [""; 0],
        "all of it: an amount is the least that it must have"
    );
    cluster.create(claim("more", json!({"requests": [of_gpu(&whole.uuid, share("2000Mi", 0))]}))).await;
    cluster.create(as_nobody(user_of("more", "more"))).await;
    println!("beside it: {}", wait_unschedulable(&cluster, "more").await);
    // The controller has none of it to give either, and says so.
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "2000Mi"}));
    let mut request = of_gpu(&whole.uuid, gpu("gpu"));
    request["exactly"]["deviceClassName"] = json!("shared.gpu.nvidia.com");
    cluster.create(claim("ours", json!({"requests": [request], "config": config}))).await;
    cluster.create(as_nobody(user_of("ours", "ours"))).await;
    let told = || async {
        let events = cluster.events("ours").await;
        let words = "not shared, though selectors match: 1 GPU kept from sharing";
        events.iter().any(|event| event.contains(words)).then_some(())
    };
    wait_until("the pod to be told that the GPU is kept from sharing", PATIENCE, told).await;
    cluster.delete("ours").await;
    shared.tenant(&cluster, "tenant", "2000Mi", 0).await;
    assert!(shared.is_exclusive(&cluster) && !whole.is_exclusive(&cluster), "only the shared one needs MPS");
    cluster.end().await;
}

/// As with NVIDIA's driver: whoever asks for no capacity is neither counted nor bounded.
#[tokio::test]
#[ignore = "needs a rig"]
async fn who_asks_for_nothing_may_be_counted_as_nothing() {
    let Some(cluster) = cluster("who_asks_for_nothing_may_be_counted_as_nothing").await else { return };
    let board = Board::first(&cluster).await;
    set(&cluster, &["--default-request=nothing"]).await;
    let of = |request: Value| json!({"requests": [of_gpu(&board.uuid, request)]});
    let free = || async {
        let published = cluster.published(NODE).await;
        let found = published.iter().find(|one| one.name == board.device)?;
        let policy = found.capacity.as_ref()?.get("memory")?.request_policy.clone()?;
        (policy.default.as_ref()?.0 == "0").then_some(())
    };
    wait_until("the default to be nothing", PATIENCE, free).await;
    for name in ["one", "two"] {
        cluster.create(claim(name, of(gpu("gpu")))).await;
        cluster.create(as_nobody(user_of(name, name))).await;
        cluster.wait_ready(name).await;
        assert_eq!(cluster.inside(name, "main").gpus, [minor_of(&board.device)]);
        assert!(
            !mps_env(&cluster, name, "main").iter().any(|env| env.contains("LIMIT")),
            "nothing is enforced"
        );
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_watchdog_that_may_only_observe_tells_and_ends_nobody() {
    let Some(cluster) = cluster("a_watchdog_that_may_only_observe_tells_and_ends_nobody").await else {
        return;
    };
    let board = Board::first(&cluster).await;
    set(&cluster, &["--watchdog=observe"]).await;
    let greedy = board.tenant(&cluster, "greedy", "2000Mi", 25).await;
    let process = Process::of(&cluster, &board, &greedy, 4096);
    let event = wait_event(&cluster, "greedy", "GrantExceeded").await;
    assert!(event.contains("4096 MiB of the 2000 MiB"), "{event}");
    let looks = sum(&cluster.metrics(NODE).await, "tranche_watchdog_tick_duration_seconds_count");
    let more = || async {
        let now = sum(&cluster.metrics(NODE).await, "tranche_watchdog_tick_duration_seconds_count");
        (now >= looks + 8.0).then_some(())
    };
    wait_until("eight more looks", PATIENCE, more).await;
    let row =
        |name: &str| format!("tranche_claim_{name}{{namespace=\"{}\",pod=\"greedy\"", cluster.namespace);
    let metrics = cluster.metrics(NODE).await;
    let counted = |name: &str| sum(&metrics, &row(name));
    assert_eq!((counted("violations_total"), counted("terminations_total")), (1.0, 0.0));
    assert_eq!(counted("memory_used_bytes"), 4096.0 * 1_048_576.0);
    assert_eq!(
        container_run(&cluster.wait_ready("greedy").await),
        container_run(&greedy),
        "ended though only to be told"
    );
    drop(process);
    cluster.end().await;
}

/// Programs of one share may then end in any way, and those of the others do not notice (seen on a GPU: E27 of tests/gpu).
#[tokio::test]
#[ignore = "needs a rig"]
async fn each_share_may_have_an_mps_daemon_of_its_own() {
    let Some(cluster) = cluster("each_share_may_have_an_mps_daemon_of_its_own").await else { return };
    let board = Board::first(&cluster).await;
    set(&cluster, &["--mps-daemon=share"]).await;
    let published = || async {
        let published = cluster.published(NODE).await;
        let found = published.into_iter().find(|one| one.name == board.device)?;
        (found.attributes?.get("mpsDaemon")?.string.as_deref() == Some("share")).then_some(())
    };
    wait_until("the attribute to say so", PATIENCE, published).await;
    let small = board.tenant(&cluster, "small", "2000Mi", 25).await;
    let large = board.tenant(&cluster, "large", "5000Mi", 50).await;
    assert!(!board.is_exclusive(&cluster), "the board takes a server for each");
    for (pod, memory, compute) in [("small", 2000, 25), ("large", 5000, 50)] {
        let env = mps_env(&cluster, pod, "main");
        assert!(env.contains(&format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}M")), "{env:?}");
        assert!(env.contains(&format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={compute}")), "{env:?}");
    }
    let daemons = || async {
        let own =
            cluster.files(NODE, "/run/tranche/mps").into_iter().filter(|folder| folder.starts_with("claim-"));
        let mut own: Vec<_> = own.collect();
        own.sort();
        own
    };
    assert_eq!(daemons().await.len(), 2);

    // One that takes too much is ended all the same, by its own daemon.
    let process = Process::of(&cluster, &board, &small, 4096);
    let event = wait_event(&cluster, "small", "GrantExceeded").await;
    assert!(event.contains("4096 MiB of the 2000 MiB"), "{event}");
    drop(process);

    // One that goes around its daemon, which has no server here: the real daemon is asked, and names nobody.
    let around = Process::of_kind(&cluster, &board, &large, (100, "compute"));
    for reason in ["AroundMps", "ProcessEnded"] {
        let told =
            || async { cluster.events("large").await.into_iter().find(|event| event.starts_with(reason)) };
        let event = wait_until(&format!("the event {reason}"), PATIENCE, told).await;
        assert!(event.contains("CUDA_MPS_PIPE_DIRECTORY"), "{event}");
    }
    let again = || async {
        let pod: Pod = cluster.api().get("large").await.ok()?;
        let status = pod.status?.container_statuses?.into_iter().next()?;
        (status.restart_count > container_run(&large).1).then_some(())
    };
    wait_until("its container to be started again", PATIENCE, again).await;
    drop(around);
    cluster.delete("small").await;
    let one = || async { (daemons().await.len() == 1).then_some(()) };
    wait_until("the daemon of the share that left to be gone", PATIENCE, one).await;
    cluster.end().await;
}

/// As recipes for PyTorch and vLLM have it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_shares_containers_may_keep_their_own_dev_shm() {
    let Some(cluster) = cluster("a_shares_containers_may_keep_their_own_dev_shm").await else { return };
    let board = Board::first(&cluster).await;
    set(&cluster, &["--shm=container"]).await;
    for name in ["volume", "plain"] {
        cluster.create(claim(name, json!({"requests": [of_gpu(&board.uuid, share("2000Mi", 10))]}))).await;
    }
    let mut pod = as_nobody(user_of("volume", "volume"));
    pod["spec"]["volumes"] = json!([{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "shm", "mountPath": "/dev/shm"}]);
    cluster.create(pod).await;
    cluster.create(as_nobody(user_of("plain", "plain"))).await;
    for name in ["volume", "plain"] {
        cluster.wait_ready(name).await;
        assert!(!mps_env(&cluster, name, "main").is_empty(), "{name} is a client of the GPU's daemon");
    }
    // More than the 64 MiB that a container has without a volume.
    cluster.exec("volume", "main", "head -c 100000000 /dev/zero >/dev/shm/weights");
    assert_eq!(cluster.exec("volume", "main", "ls /dev/shm"), "weights\n");
    assert_eq!(cluster.exec("plain", "main", "ls /dev/shm"), "", "nobody else's files");
    assert_eq!(cluster.exec("plain", "main", "df -m /dev/shm | awk 'END {print $2}'"), "64\n");
    cluster.end().await;
}
