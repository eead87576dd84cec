//! The shared memory folder of a GPU's shares: full of bytes, full of files, or wanted by the pod itself.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::tenant;
use crate::manifests::{as_nobody, claim, of_gpu, share, user_of};
use crate::rig::wait_until;
use crate::shares::daemons::{replace, taints};
use crate::shares::{Board, asking, cluster, wait_event};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_run, from};

const KEEPER: &str = "tranche-mps";
const SYSTEM: &str = "tranche-system";
const FULL: &str = "gpu.nvidia.com/shm-full:NoSchedule";
const RESERVED: &str = "cuda_injection_path_shm";
const BYTES: &str = "head -c 200000000 /dev/zero >/dev/shm/fill";
const FILES: &str =
    "mkdir /dev/shm/f; i=0; while [ $i -lt 150000 ]; do true >/dev/shm/f/$i || break; i=$((i+1)); done";

/// Sets how much all shares of a GPU may put there, as an administrator would, until the next call.
async fn set_size(cluster: &TestCluster, node: &str, size: &str) {
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let env = json!([{"name": "TRANCHE_SHM_SIZE", "value": size}]);
    let patch = json!({"spec": {"template": {"spec": {"containers": [{"name": "mps", "env": env}]}}}});
    sets.patch(KEEPER, &PatchParams::default(), &Patch::Strategic(patch)).await.expect("the keeper is set");
    // It is updated only when its pod is deleted.
    replace(cluster, "mps", node).await;
}

/// A tenant's own share of the board, and a pod of that user that does something first and stays.
async fn share_of(
    tenant: &Client,
    cluster: &TestCluster,
    board: &Board,
    (name, user): (&str, u32),
    script: &str,
) {
    let request = of_gpu(&board.uuid, share("1Gi", 10));
    let made: ResourceClaim = from(claim(name, json!({"requests": [request]})));
    let claims: Api<ResourceClaim> = Api::namespaced(tenant.clone(), &cluster.namespace);
    claims.create(&PostParams::default(), &made).await.expect("a tenant may create claims");
    let pods: Api<Pod> = Api::namespaced(tenant.clone(), &cluster.namespace);
    pods.create(&PostParams::default(), &from(program(name, user, script))).await.expect("and pods");
    cluster.wait_ready(name).await;
}

fn program(name: &str, user: u32, script: &str) -> Value {
    let mut pod = as_nobody(user_of(name, name));
    pod["spec"]["securityContext"]["runAsUser"] = json!(user);
    pod["spec"]["containers"][0]["command"] =
        json!(["sh", "-c", format!("trap 'exit 0' TERM; {script}; while :; do sleep 1; done")]);
    pod
}

async fn end(tenant: &Client, cluster: &TestCluster, name: &str) {
    let pods: Api<Pod> = Api::namespaced(tenant.clone(), &cluster.namespace);
    pods.delete(name, &DeleteParams::default()).await.expect("a tenant may delete its pods");
    cluster.gone(name).await;
}

fn files(cluster: &TestCluster, board: &Board) -> Vec<String> {
    let listed = cluster.on_node(&board.node, &format!("ls -A {}/shm", board.folder()));
    listed.lines().filter(|name| *name != RESERVED).map(str::to_owned).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_that_fills_its_memory_stops_no_neighbour_and_goes_without_a_trace() {
    let Some(cluster) =
        cluster("a_share_that_fills_its_memory_stops_no_neighbour_and_goes_without_a_trace").await
    else {
        return;
    };
    let (tenant, board) = (tenant(&cluster).await, Board::first(&cluster).await);
    set_size(&cluster, &board.node, "64Mi").await;
    share_of(&tenant, &cluster, &board, ("neighbour", 65534), "echo mine >/dev/shm/mine").await;
    let before = (
        container_run(&cluster.wait_ready("neighbour").await),
        board.pid(&cluster).await.expect("a daemon serves"),
    );
    for (name, fill, number) in [("bytes", BYTES, "64 of 64 MiB"), ("files", FILES, "of 8194 files")] {
        share_of(&tenant, &cluster, &board, (name, 1000), fill).await;
        let tainted = || async { (taints(&cluster, &board).await == [FULL]).then_some(()) };
        wait_until("the GPU to be tainted", SOON, tainted).await;
        let told = wait_event(&cluster, name, "SharedMemoryFull").await;
        assert!(told.contains(number) && told.contains("of user 1000"), "{told}");
        println!("{told}");

        // Neither the neighbour nor what is ours notices, whoever is replaced meanwhile.
        replace(&cluster, "mps", &board.node).await;
        let serves = || async { board.pid(&cluster).await };
        assert_eq!(wait_until("the daemon to serve", PATIENCE, serves).await, before.1);
        assert_eq!(container_run(&cluster.wait_ready("neighbour").await), before.0);
        let reach = asking("timeout 10 nvidia-cuda-mps-control", &["get_default_active_thread_percentage"]);
        assert_eq!(cluster.exec("neighbour", "main", &reach), "10.0\n");
        assert_eq!(cluster.exec("neighbour", "main", "cat /dev/shm/mine"), "mine\n");
        let record = format!("cat /run/tranche/mps/.records/{}.json", board.uuid);
        assert!(cluster.on_node(&board.node, &record).contains("Serve"));

        end(&tenant, &cluster, name).await;
        let clean = || async { taints(&cluster, &board).await.is_empty().then_some(()) };
        wait_until("the taint to be gone", SOON, clean).await;
        assert_eq!(files(&cluster, &board), ["mine"], "what the one who left has written is gone");
        wait_event(&cluster, "neighbour", "SharedMemoryFreed").await;
    }
    share_of(&tenant, &cluster, &board, ("later", 1000), "true").await;
    assert_eq!(board.pid(&cluster).await, Some(before.1), "one more share on the same daemon");
    for name in ["later", "neighbour"] {
        end(&tenant, &cluster, name).await;
    }
    cluster.wait_clean().await;
    let empty = || async { files(&cluster, &board).is_empty().then_some(()) };
    wait_until("nothing to be left", SOON, empty).await;
    set_size(&cluster, &board.node, "half").await;
    cluster.end().await;
}

/// What the API server warns of.
async fn warnings(tenant: &Client, namespace: &str, pod: &Value) -> Vec<String> {
    let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All");
    let request = http::Request::post(path).header("content-type", "application/json");
    let request = request.body(Body::from(pod.to_string().into_bytes())).expect("a whole request");
    let answer = tenant.send(request).await.expect("the API server answers");
    assert!(answer.status().is_success(), "{}", answer.status());
    let all = answer.headers().get_all("warning").iter();
    all.map(|value| value.to_str().expect("text").to_owned()).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_with_a_volume_at_dev_shm_is_told_what_it_gets_and_has_room() {
    let Some(cluster) = cluster("a_pod_with_a_volume_at_dev_shm_is_told_what_it_gets_and_has_room").await
    else {
        return;
    };
    let (tenant, board) = (tenant(&cluster).await, Board::first(&cluster).await);
    // As recipes for PyTorch and vLLM have it, and more than a container runtime's 64 MiB in it.
    let mut pod =
        program("model", 65534, "head -c 100000000 /dev/zero >/dev/shm/weights && echo ok >/tmp/done");
    pod["spec"]["volumes"] =
        json!([{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "tmp", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]);
    let warned = warnings(&tenant, &cluster.namespace, &pod).await;
    let about =
        warned.iter().find(|words| words.contains("/dev/shm")).unwrap_or_else(|| panic!("{warned:?}"));
    assert!(about.contains("container 'main'") && about.contains("remove the mount"), "{about}");

    let request = of_gpu(&board.uuid, share("1Gi", 10));
    let made: ResourceClaim = from(claim("model", json!({"requests": [request]})));
    let claims: Api<ResourceClaim> = Api::namespaced(tenant.clone(), &cluster.namespace);
    claims.create(&PostParams::default(), &made).await.expect("a tenant may create claims");
    let pods: Api<Pod> = Api::namespaced(tenant.clone(), &cluster.namespace);
    pods.create(&PostParams::default(), &from(pod)).await.expect("it is not refused");
    cluster.wait_ready("model").await;
    let done =
        || async { (cluster.exec("model", "main", "cat /tmp/done 2>&- || true") == "ok\n").then_some(()) };
    wait_until("100 MB to be written", SOON, done).await;
    assert_eq!(cluster.exec("model", "main", "grep -c ' /dev/shm .*noexec' /proc/mounts"), "1\n");
    assert_eq!(files(&cluster, &board), ["weights"]);
    end(&tenant, &cluster, "model").await;
    cluster.wait_clean().await;
    let empty = || async { files(&cluster, &board).is_empty().then_some(()) };
    wait_until("nothing to be left for the next tenant", SOON, empty).await;
    cluster.end().await;
}
