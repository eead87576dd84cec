//! The driver on a node as users have it: systemd, control groups v2, user namespaces, and a boot that is one.
//! The node is `node-vm`, the rig's virtual machine (RIG_MACHINE=1), which runs without KVM and takes its time.
//! Nothing of its disks is seen from outside, so that what lies there is asked of it by `rig node-exec`.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::manifests::{as_nobody, claim, gpu, of_gpu, on, share, user_of};
use crate::rig::wait_until;
use crate::shares::{Board, limits, mps_env};
use crate::test_cluster::{TestCluster, container_run, minor_of};

const NODE: &str = "node-vm";
/// What an emulated processor does within this, also while others use the real ones.
const PATIENCE: Duration = Duration::from_secs(300);
const LEDGER: &str = "/var/lib/kubelet/plugins/gpu.nvidia.com/ledger";
const CDI: &str = "/var/run/cdi";

/// The rig's virtual machine with the driver on it.
async fn machine(test: &str) -> TestCluster {
    let cluster = TestCluster::of_env(test).await;
    assert!(
        cluster.nodes.iter().any(|node| node == NODE),
        "{test} needs {NODE}: RIG_MACHINE=1 hack/rig/rig up"
    );
    wait_clean(&cluster).await;
    cluster
}

/// Waits until the machine has no record and no container edits left, and no board is for MPS alone.
async fn wait_clean(cluster: &TestCluster) {
    let left = || async {
        let left = [files(cluster, LEDGER), files(cluster, CDI), exclusive_boards(cluster)].concat();
        left.is_empty().then_some(())
    };
    wait_until(&format!("{NODE} to have nothing of a claim left"), PATIENCE, left).await;
}

async fn end(cluster: TestCluster) {
    let kinds = "pods,resourceclaims";
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", kinds, "--all", "--timeout=150s"]);
    wait_clean(&cluster).await;
    cluster.end().await;
}

fn files(cluster: &TestCluster, folder: &str) -> Vec<String> {
    cluster.on_node(NODE, &format!("ls -A {folder}")).lines().map(str::to_owned).collect()
}

/// Every file of the folder with its content.
fn contents(cluster: &TestCluster, folder: &str) -> String {
    cluster.on_node(NODE, &format!("cd {folder} && grep -r '' . | sort"))
}

fn exclusive_boards(cluster: &TestCluster) -> Vec<String> {
    let text = cluster.on_node(NODE, "cat /run/fake-nvml/state.json 2>&- || echo '{}'");
    let state: Value = serde_json::from_str(&text).expect("the simulated boards' state is whole");
    let boards = state["gpus"].as_object().cloned().unwrap_or_default();
    let exclusive = boards.into_iter().filter(|(_, board)| board["compute_mode"]["value"] == 3);
    exclusive.map(|(minor, _)| format!("board {minor} is exclusive")).collect()
}

/// `fake-nvml WORDS` on the machine.
fn fake(cluster: &TestCluster, words: &str) {
    let tool = "exec -a fake-nvml /driver/usr/lib/nvidia/current/nvidia-smi";
    cluster.rig.run(&["node-exec", NODE, "bash", "-c", &format!("{tool} {words}")]);
}

fn boot_id(cluster: &TestCluster) -> String {
    cluster.on_node(NODE, "cat /proc/sys/kernel/random/boot_id")
}

/// Creates a claim with this request and a pod of its name that uses it; Ready, however long that takes.
async fn tenant(
    cluster: &TestCluster,
    name: &str,
    request: Value,
    shape: impl FnOnce(Value) -> Value,
) -> Pod {
    cluster.create(claim(name, json!({"requests": [request]}))).await;
    cluster.create(on(NODE, shape(user_of(name, name)))).await;
    wait_container_run(cluster, name, |_| true).await
}

/// Waits until the pod is Ready with a life that is wanted: its container's id and how often it was restarted.
async fn wait_container_run(
    cluster: &TestCluster,
    name: &str,
    wanted: impl Fn(&(String, i32)) -> bool,
) -> Pod {
    let ready = || async {
        let pod = cluster.api::<Pod>().get(name).await.ok()?;
        (crate::test_cluster::is_ready(&pod) && wanted(&container_run(&pod))).then_some(pod)
    };
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(pod) = ready().await {
            return pod;
        }
        if Instant::now() >= end {
            let said = cluster.rig.kubectl(&["-n", &cluster.namespace, "describe", "pod", name]);
            panic!("pod {name} is not Ready after {PATIENCE:?}:\n{said}");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// As the pod is.
fn plain(pod: Value) -> Value {
    pod
}

async fn has_only(cluster: &TestCluster, pod: &str) -> u32 {
    let minor = minor_of(&cluster.devices_of(pod).await[0]);
    let inside = cluster.inside(pod, "main");
    assert_eq!((&inside.gpus[..], &inside.caps[..], inside.cuda), (&[minor][..], &[][..], true), "{pod}");
    minor
}

/// Root in a container may make any device node. What keeps it from a GPU that is not its own is the filter
/// of its control group, in v2 a BPF program: EPERM. What is its own has no driver here: ENXIO.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_whole_gpu_and_no_other_by_the_filter_of_cgroup_v2() {
    let cluster = machine("a_whole_gpu_and_no_other_by_the_filter_of_cgroup_v2").await;
    let kinds = cluster.on_node(NODE, "stat -f -c %T /sys/fs/cgroup; cat /proc/1/comm");
    assert_eq!(kinds, "cgroup2fs\nsystemd\n");
    tenant(&cluster, "whole", gpu("gpu"), plain).await;
    let own = has_only(&cluster, "whole").await;
    let script = "for m in $(seq 0 15); do mknod /tmp/$m c 195 $m && echo \"$m $(cat /tmp/$m 2>&1)\"; done";
    let said = cluster.exec("whole", "main", script);
    assert_eq!(said.lines().count(), 16, "root may make device nodes: {said}");
    for (line, minor) in said.lines().zip(0..) {
        let expected = if minor == own { "No such device or address" } else { "Operation not permitted" };
        assert!(line.ends_with(expected), "GPU {minor}, with a claim for {own}: {line}");
    }
    end(cluster).await;
}

/// Root of the container is nobody outside, and has the GPU all the same.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_in_a_user_namespace_has_its_gpu() {
    let cluster = machine("a_pod_in_a_user_namespace_has_its_gpu").await;
    let own_users = |mut pod: Value| {
        pod["spec"]["hostUsers"] = json!(false);
        pod
    };
    tenant(&cluster, "own-users", gpu("gpu"), own_users).await;
    let map = cluster.exec("own-users", "main", "cat /proc/self/uid_map");
    let outside: Vec<u32> = map.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert!(
        matches!(outside[..], [0, first, 65536] if first >= 65536),
        "root is root outside as well: {map}"
    );
    let own = has_only(&cluster, "own-users").await;
    let said = cluster.exec("own-users", "main", &format!("cat /dev/nvidia{own} 2>&1 || true"));
    assert!(said.trim().ends_with("No such device or address"), "it cannot open its GPU: {said}");
    end(cluster).await;
}

/// Two shares with limits; who takes more than its own is found by a path of systemd's slices, and ended.
#[tokio::test]
#[ignore = "needs a rig"]
async fn shares_have_limits_and_who_exceeds_them_is_ended() {
    let cluster = machine("shares_have_limits_and_who_exceeds_them_is_ended").await;
    let board = first_board(&cluster).await;
    let greedy = tenant(&cluster, "greedy", of_gpu(&board.uuid, share("2000Mi", 25)), as_nobody).await;
    let modest = tenant(&cluster, "modest", of_gpu(&board.uuid, share("10Gi", 50)), as_nobody).await;
    assert_eq!(board.limits(&cluster), limits("10G", "50.0"));
    assert_eq!(exclusive_boards(&cluster), [format!("board {} is exclusive", minor_of(&board.device))]);
    has_limits(&cluster, "greedy", "2000M", 25);
    has_limits(&cluster, "modest", "10240M", 50);

    let pid = cluster.pid_of(NODE, &greedy);
    let group = cluster.on_node(NODE, &format!("cat /proc/{pid}/cgroup"));
    assert!(group.starts_with("0::/kubepods.slice/") && group.trim().ends_with(".scope"), "{group}");
    let minor = minor_of(&board.device);
    fake(
        &cluster,
        &format!("process add {minor} {} 10000 --kind mps --only-if-alive", cluster.pid_of(NODE, &modest)),
    );
    fake(&cluster, &format!("process add {minor} {pid} 4096 --kind mps --only-if-alive"));
    let begin = Instant::now();
    let ended = || async {
        let status = cluster.api::<Pod>().get("greedy").await.ok()?.status?.container_statuses?.remove(0);
        (status.last_state?.terminated?.exit_code == 137).then_some(())
    };
    wait_until("the greedy one to be ended", PATIENCE, ended).await;
    println!("seen ended after {:.1} s", begin.elapsed().as_secs_f64());
    let told = || async {
        cluster.events("greedy").await.into_iter().find(|event| event.starts_with("ProcessEnded"))
    };
    let event = wait_until("an event of it", PATIENCE, told).await;
    assert!(event.contains("4096 MiB of the 2000 MiB"), "{event}");
    wait_container_run(&cluster, "greedy", |(_, restarts)| *restarts == 1).await;
    let now = cluster.api::<Pod>().get("modest").await.unwrap();
    assert_eq!(container_run(&now), container_run(&modest), "the neighbour was disturbed");
    end(cluster).await;
}

/// The plugin's process dies with a pod alive: the pod runs on, and what is new works.
#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_is_killed_and_pods_live_on() {
    let cluster = machine("the_plugin_is_killed_and_pods_live_on").await;
    let living = tenant(&cluster, "living", gpu("gpu"), plain).await;
    let published = cluster.published(NODE).await;
    let plugin = cluster.plugin(NODE).await;
    cluster.kill9(NODE, &plugin);
    let restarted = || async {
        let pod = cluster.plugins(NODE).await.into_iter().next()?;
        (container_run(&pod).1 > container_run(&plugin).1).then_some(())
    };
    wait_until("kubelet to start the plugin again", PATIENCE, restarted).await;
    cluster.registered(NODE, PATIENCE).await;
    tenant(&cluster, "new", gpu("gpu"), plain).await;
    assert_ne!(has_only(&cluster, "new").await, has_only(&cluster, "living").await);
    let now = cluster.api::<Pod>().get("living").await.unwrap();
    assert_eq!(container_run(&now), container_run(&living), "the living pod was disturbed");
    assert_eq!(cluster.published(NODE).await, published);
    end(cluster).await;
}

/// systemd ends everything, the kernel starts anew, /run is empty: the same pods come back with the same GPUs,
/// limits and records.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_real_boot_brings_everything_back() {
    let cluster = machine("a_real_boot_brings_everything_back").await;
    let board = first_board(&cluster).await;
    let small = tenant(&cluster, "small", of_gpu(&board.uuid, share("2000Mi", 25)), as_nobody).await;
    let large = tenant(&cluster, "large", of_gpu(&board.uuid, share("10Gi", 50)), as_nobody).await;
    let whole = tenant(&cluster, "whole", gpu("gpu"), plain).await;
    let own = has_only(&cluster, "whole").await;
    assert_ne!(own, minor_of(&board.device));
    let (records, edits) = (files(&cluster, LEDGER), contents(&cluster, CDI));
    let (published, boot) = (cluster.published(NODE).await, boot_id(&cluster));
    assert_eq!((records.len(), files(&cluster, CDI).len()), (3, 3));

    let begin = Instant::now();
    cluster.rig.run(&["reboot", NODE]);
    println!("kubelet answers again after {:.1} s", begin.elapsed().as_secs_f64());
    assert_ne!(boot_id(&cluster), boot);
    for (name, before) in [("small", &small), ("large", &large), ("whole", &whole)] {
        let again = wait_container_run(&cluster, name, |now| now.0 != container_run(before).0).await;
        assert_eq!(again.metadata.uid, before.metadata.uid, "{name} is another pod");
    }
    println!("the same pods Ready after {:.1} s", begin.elapsed().as_secs_f64());
    assert_eq!(has_only(&cluster, "whole").await, own);
    has_limits(&cluster, "small", "2000M", 25);
    has_limits(&cluster, "large", "10240M", 50);
    board.wait_limits(&cluster, &limits("10G", "50.0")).await;
    assert_eq!(exclusive_boards(&cluster), [format!("board {} is exclusive", minor_of(&board.device))]);
    assert_eq!(files(&cluster, LEDGER), records);
    assert_eq!(contents(&cluster, CDI), edits, "the same container edits");
    cluster.registered(NODE, PATIENCE).await;
    let same = || async { (cluster.published(NODE).await == published).then_some(()) };
    wait_until("the same devices to be published again", PATIENCE, same).await;
    end(cluster).await;
}

async fn first_board(cluster: &TestCluster) -> Board {
    Board::all(cluster, NODE).await.into_iter().next().expect("the machine has GPUs that can be shared")
}

/// What MPS holds the pod's processes to, and the door to the daemon.
fn has_limits(cluster: &TestCluster, pod: &str, memory: &str, compute: u32) {
    let expected = [
        format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={compute}"),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}"),
        "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps".to_owned(),
    ];
    assert_eq!(mps_env(cluster, pod, "main"), expected, "{pod}");
    assert_eq!(cluster.exec(pod, "main", "ls -A /run/nvidia-mps"), "control\nlog\n", "{pod}");
}
