//! The driver restarts and daemons die, with shares in use.

use std::fs;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use super::{Board, CONTROL, LIMITS, asking, cluster, limits, wait_event, wait_unschedulable};
use crate::manifests::{as_nobody, claim, of_gpu, share, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run};

/// Deletes the driver's pod of a component and waits for the next one to be ready.
pub async fn replace(cluster: &TestCluster, component: &str, node: &str) {
    let old = cluster.pod_of(component, node).await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    pods.delete(old.metadata.name.as_deref().unwrap(), &DeleteParams::default()).await.unwrap();
    let gone = || async {
        let now = cluster.pods_of(component, node).await;
        now.iter().all(|pod| pod.metadata.uid != old.metadata.uid).then_some(())
    };
    wait_until(&format!("the old pod of {component} to be gone"), PATIENCE, gone).await;
    cluster.pod_of(component, node).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_driver_restarts_and_no_share_notices() {
    let Some(cluster) = cluster("the_driver_restarts_and_no_share_notices").await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "one", "2000Mi", 25).await;
    board.tenant(&cluster, "two", "10Gi", 30).await;
    let living = ["one", "two"];
    let before = board.standing(&cluster, &living).await;
    assert!(before.daemon.is_some() && before.door.len() == 2, "{before:?}");
    assert_eq!(before.limits, limits("10G", "30.0"));
    replace(&cluster, "node", &board.node).await;
    cluster.registered(&board.node, PATIENCE).await;
    assert_eq!(board.standing(&cluster, &living).await, before, "the node plugin was replaced");
    replace(&cluster, "mps", &board.node).await;
    // The supervisor answers before it has found the daemons that run.
    let same = || async { (board.pid(&cluster).await == before.daemon).then_some(()) };
    wait_until("the same daemon to serve", PATIENCE, same).await;
    assert_eq!(board.standing(&cluster, &living).await, before, "the supervisor was replaced");
    let supervisor = cluster.pod_of("mps", &board.node).await;
    cluster.kill9(&board.node, &supervisor);
    let again = || async {
        let now = cluster.pod_of("mps", &board.node).await;
        (container_run(&now).1 > container_run(&supervisor).1).then_some(())
    };
    wait_until("kubelet to start the supervisor again", PATIENCE, again).await;
    wait_until("the same daemon to serve", PATIENCE, same).await;
    assert_eq!(board.standing(&cluster, &living).await, before, "the supervisor was killed");

    // What is new works, and the same daemon serves it.
    board.tenant(&cluster, "three", "20Gi", 45).await;
    let after = board.standing(&cluster, &living).await;
    assert_eq!((after.daemon, &after.door, &after.lives), (before.daemon, &before.door, &before.lives));
    assert_eq!(after.limits, limits("20G", "45.0"));
    for pod in ["one", "two", "three"] {
        cluster.delete(pod).await;
    }
    cluster.wait_clean().await;
    board.wait_rest(&cluster).await;
    cluster.end().await;
}

/// The program's own record of what became of clients' files and of the limits: asked the moment that the
/// files are there again.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_daemon_that_is_killed_comes_back_with_its_limits_before_any_client() {
    let Some(cluster) = cluster("a_daemon_that_is_killed_comes_back_with_its_limits_before_any_client").await
    else {
        return;
    };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "one", "2000Mi", 25).await;
    board.tenant(&cluster, "two", "500Mi", 30).await;
    let before = board.standing(&cluster, &["one", "two"]).await;
    let deaths = board.daemon(&cluster).await.unwrap()["deaths"].as_u64().unwrap();
    let watch = format!(
        r#"cd {folder} || exit 1
        kill -9 $(cat pipe/nvidia-cuda-mps-control.pid)
        timeout 20 sh -c 'while [ -e client/control ]; do sleep 0.01; done' && echo "clients are kept out"
        timeout 60 sh -c 'until [ -e client/control ]; do sleep 0.01; done' && echo "clients are let in"
        {look}"#,
        folder = board.folder(),
        look = asking(&format!("CUDA_MPS_PIPE_DIRECTORY=$PWD/client {CONTROL}"), &LIMITS)
    );
    let seen = cluster.on_node(&board.node, &watch);
    assert_eq!(seen, "clients are kept out\nclients are let in\n1G\n30.0\n");
    for pod in ["one", "two"] {
        let ill = wait_event(&cluster, pod, "MpsUnhealthy").await;
        assert!(ill.contains(&board.uuid) && ill.contains("ended"), "{ill}");
        wait_event(&cluster, pod, "MpsRecovered").await;
    }
    let after = board.standing(&cluster, &["one", "two"]).await;
    assert_eq!(
        (&after.limits, &after.lives),
        (&before.limits, &before.lives),
        "containers are not restarted"
    );
    assert_ne!(after.daemon, before.daemon);
    assert_eq!(board.daemon(&cluster).await.unwrap()["deaths"], deaths + 1);
    assert!(board.is_exclusive(&cluster));
    // Containers that run find the new daemon where the old one was.
    let reach = asking("timeout 10 nvidia-cuda-mps-control", &[LIMITS[1]]);
    assert_eq!(cluster.exec("one", "main", &reach), "30.0\n");
    let healthy = || async { (condition(&cluster, "one", "DeviceHealthy").await? == "True").then_some(()) };
    wait_until("the claim to be told healthy", PATIENCE, healthy).await;
    cluster.end().await;
}

/// The status of a condition of the claim's one device.
pub async fn condition(cluster: &TestCluster, claim: &str, type_: &str) -> Option<String> {
    let claim = cluster.api::<ResourceClaim>().get(claim).await.ok()?;
    let conditions = claim.status?.devices?.first()?.conditions.clone()?;
    conditions.into_iter().find(|one| one.type_ == type_).map(|one| one.status)
}

pub async fn taints(cluster: &TestCluster, board: &Board) -> Vec<String> {
    let devices = cluster.published(&board.node).await;
    let device = devices.into_iter().find(|device| device.name == board.device).expect("it stays published");
    device.taints.into_iter().flatten().map(|taint| format!("{}:{}", taint.key, taint.effect)).collect()
}

/// Puts the node's control program back when dropped, whatever became of the test.
struct Hidden<'a>(&'a TestCluster, String);

impl<'a> Hidden<'a> {
    fn new(cluster: &'a TestCluster, node: &str) -> Self {
        let hidden = Self(cluster, node.to_owned());
        fs::rename(hidden.program(), hidden.program().with_extension("hidden"))
            .expect("the program is there");
        hidden
    }

    fn program(&self) -> std::path::PathBuf {
        self.0.host(&self.1, CONTROL)
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        if let Err(error) = fs::rename(self.program().with_extension("hidden"), self.program()) {
            println!("putting the node right: {error}");
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_whose_daemon_stays_down_is_tainted_until_it_serves() {
    let Some(cluster) = cluster("a_gpu_whose_daemon_stays_down_is_tainted_until_it_serves").await else {
        return;
    };
    let board = Board::first(&cluster).await;
    let one = board.tenant(&cluster, "one", "2000Mi", 25).await;
    let hidden = Hidden::new(&cluster, &board.node);
    cluster
        .on_node(&board.node, &format!("kill -9 $(cat {}/pipe/nvidia-cuda-mps-control.pid)", board.folder()));
    let shut = || async { board.door(&cluster).is_empty().then_some(()) };
    wait_until("clients to be kept out", PATIENCE, shut).await;
    let tainted = || async {
        (taints(&cluster, &board).await == ["gpu.nvidia.com/mps-daemon-down:NoSchedule"]).then_some(())
    };
    wait_until("the GPU to be tainted", PATIENCE, tainted).await;
    let ill = || async { (condition(&cluster, "one", "DeviceHealthy").await? == "False").then_some(()) };
    wait_until("the claim to be told unhealthy", PATIENCE, ill).await;
    wait_event(&cluster, "one", "MpsUnhealthy").await;
    let request = of_gpu(&board.uuid, share("1Gi", 0));
    cluster.create(claim("late", json!({"requests": [request]}))).await;
    cluster.create(as_nobody(user_of("late", "late"))).await;
    println!("beside a tainted GPU: {}", wait_unschedulable(&cluster, "late").await);
    assert!(board.door(&cluster).is_empty(), "clients are still kept out");
    assert_eq!(board.pid(&cluster).await, None);

    drop(hidden);
    let serves = || async { board.pid(&cluster).await };
    wait_until("a daemon to serve again", PATIENCE, serves).await;
    wait_event(&cluster, "one", "MpsRecovered").await;
    cluster.wait_ready("late").await;
    let clean = || async { taints(&cluster, &board).await.is_empty().then_some(()) };
    wait_until("the taint to be gone", PATIENCE, clean).await;
    assert_eq!(board.limits(&cluster), limits("1G", "100.0"));
    assert_eq!(
        container_run(&cluster.wait_ready("one").await),
        container_run(&one),
        "the container was restarted"
    );
    cluster.end().await;
}
