//! What a claim gets of a GPU, and how far it can be seen and touched from inside.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::daemons::condition;
use super::{Board, asking, cluster, limits, mps_env, wait_event, wait_unschedulable};
use crate::manifests::{as_nobody, claim, container, gpu, of_gpu, parameters, pod, share, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SOON, TestCluster, minor_of};

/// A MIG device is one claim's; its containers share it under limits as on a whole GPU.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_mig_device_carries_mps_within_one_claim() {
    let Some(cluster) = cluster("a_mig_device_carries_mps_within_one_claim").await else { return };
    let mps = json!({"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "4Gi"});
    let sharing = json!({"sharing": {"strategy": "MPS", "mpsConfig": mps}});
    let config = parameters("resource.nvidia.com/v1beta1", "MigDeviceConfig", sharing);
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "mig.nvidia.com"}});
    cluster.create(claim("mig", json!({"requests": [request], "config": config}))).await;
    let containers =
        json!([container("left", json!([{"name": "c"}])), container("right", json!([{"name": "c"}]))]);
    cluster
        .create(as_nobody(pod("mig", json!([{"name": "c", "resourceClaimName": "mig"}]), containers)))
        .await;
    cluster.wait_ready("mig").await;
    let device = cluster.devices_of("mig").await.remove(0);
    let published = cluster.published(super::NODE).await.into_iter().find(|one| one.name == device);
    let uuid = published.and_then(|one| one.attributes?.get("uuid")?.string.clone());
    let uuid = uuid.expect("a MIG device has a UUID");
    for side in ["left", "right"] {
        let env = mps_env(&cluster, "mig", side);
        let expected = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps",
        ];
        assert_eq!(env, expected, "{side}");
        assert_eq!(cluster.exec("mig", side, "ls -A /run/nvidia-mps"), "control\nlog\n", "{side}");
    }
    let state = cluster.mps_state(super::NODE).await;
    let serves = |daemon: &&Value| daemon["phase"]["Serving"].is_object();
    let serving: Vec<_> = state["daemons"].as_array().unwrap().iter().filter(serves).collect();
    assert_eq!(serving.len(), 1, "{state:#}");
    assert_eq!(serving[0]["group"], json!([uuid]));

    // What happens to its daemon is told to the claim and its pod, as of a whole GPU.
    cluster.on_node(
        super::NODE,
        &format!("kill -9 $(cat /run/tranche/mps/{uuid}/pipe/nvidia-cuda-mps-control.pid)"),
    );
    let ill = wait_event(&cluster, "mig", "MpsUnhealthy").await;
    assert!(ill.contains(&uuid) && ill.contains("ended"), "{ill}");
    wait_event(&cluster, "mig", "MpsRecovered").await;
    let healthy = || async { (condition(&cluster, "mig", "DeviceHealthy").await? == "True").then_some(()) };
    wait_until("the claim to be told healthy", PATIENCE, healthy).await;
    assert_eq!(cluster.exec("mig", "left", "ls -A /run/nvidia-mps"), "control\nlog\n", "the new daemon's");
    cluster.delete("mig").await;
    cluster.wait_clean().await;
    cluster.end().await;
}

/// `tranche top`, as somebody with a kubeconfig runs it.
fn top(cluster: &TestCluster, output: &str) -> String {
    let kubeconfig = cluster.rig.run(&["kubeconfig"]);
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_tranche"))
        .args(["top", "--once", "--use=false", "-o", output, "--kubeconfig", kubeconfig.trim()])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// What `tranche top` says of a device.
fn row(cluster: &TestCluster, device: &str) -> Value {
    let map: Value = serde_json::from_str(&top(cluster, "json")).unwrap();
    let nodes = map["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|node| node["name"] == super::NODE).expect("the node is on the map");
    let mut rows = node["devices"].as_array().unwrap().iter();
    rows.find(|row| row["device"] == json!(device)).expect("the device is on the map").clone()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn whoever_looks_at_the_cluster_sees_who_has_what() {
    let Some(cluster) = cluster("whoever_looks_at_the_cluster_sees_who_has_what").await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "tenant", "2000Mi", 25).await;
    let expected = json!([{"namespace": cluster.namespace, "claim": "tenant", "pods": ["tenant"],
        "part": {"share": {"memoryMiB": 2000, "computePercent": 25}}}]);
    assert_eq!(row(&cluster, &board.device)["claims"], expected);
    let line = format!("A {}/tenant", cluster.namespace);
    let text = top(&cluster, "map");
    assert!(text.lines().any(|text| text.contains(&line) && text.ends_with("2000 MiB, 25 %")), "{text}");
    cluster.end().await;
}

/// A claim's one entry of status.devices.
async fn told_of(cluster: &TestCluster, claim: &str) -> Value {
    let told = || async {
        let claim = cluster.api::<ResourceClaim>().get(claim).await.ok()?;
        serde_json::to_value(claim.status?.devices?.first()?).ok()
    };
    wait_until(&format!("claim {claim} to be told of its device"), SOON, told).await
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_claim_has_its_own_share_and_the_daemon_is_as_loose_as_the_loosest() {
    let Some(cluster) =
        cluster("each_claim_has_its_own_share_and_the_daemon_is_as_loose_as_the_loosest").await
    else {
        return;
    };
    let board = Board::first(&cluster).await;
    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";
    board.tenant(&cluster, "small", "2000Mi", 25).await;
    // Memory is answered in whole GiB, rounded down.
    assert_eq!(board.limits(&cluster), limits("1G", "25.0"));
    board.tenant(&cluster, "large", "10Gi", 50).await;
    assert_eq!(board.limits(&cluster), limits("10G", "50.0"));
    board.tenant(&cluster, "uncapped", "500Mi", 0).await;
    assert_eq!(board.limits(&cluster), limits("10G", "100.0"));
    assert!(board.is_exclusive(&cluster), "only the MPS server may open the GPU");
    let own = |memory: &str| format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}");
    let cap = |percent: u32| format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}");
    assert_eq!(mps_env(&cluster, "small", "main"), [cap(25), own("2000M"), pipe.to_owned()]);
    assert_eq!(mps_env(&cluster, "large", "main"), [cap(50), own("10240M"), pipe.to_owned()]);
    assert_eq!(mps_env(&cluster, "uncapped", "main"), [own("500M"), pipe.to_owned()]);
    for tenant in ["small", "large", "uncapped"] {
        let inside = cluster.inside(tenant, "main");
        assert_eq!((&inside.gpus[..], inside.cuda), (&[minor_of(&board.device)][..], true), "{tenant}");
        assert_eq!(cluster.exec(tenant, "main", "ls -A /run/nvidia-mps"), "control\nlog\n", "{tenant}");
        // The daemon's own is a pipe that anybody could fill.
        let log = "readlink /run/nvidia-mps/log && echo x >/run/nvidia-mps/log && echo wrote";
        assert_eq!(cluster.exec(tenant, "main", log), "/dev/null\nwrote\n", "{tenant}");
    }

    let told = told_of(&cluster, "small").await;
    let expected = json!({"memoryMiB": 2000, "memoryPerProcessMiB": 2000, "computePercent": 25,
        "maxProcesses": 1, "isolation": "mps", "uuid": board.uuid});
    assert_eq!(told["data"], expected);
    let conditions = told["conditions"].as_array().unwrap();
    let good = |one: &Value| one["status"] == "True";
    assert!(conditions.len() == 3 && conditions.iter().all(good), "{conditions:#?}");
    let stored = cluster.api::<ResourceClaim>().get("small").await.unwrap();
    let result = &stored.status.unwrap().allocation.unwrap().devices.unwrap().results.unwrap()[0];
    assert!(result.share_id.is_some() && told["shareID"].as_str() == result.share_id.as_deref());
    assert!(
        told_of(&cluster, "uncapped").await["data"]["computePercent"].is_null(),
        "what is not capped has no number"
    );
    let event = wait_event(&cluster, "small", "SharePrepared").await;
    let words = format!("{}: 2000 MiB, 25 % of compute, isolation mps", board.device);
    assert!(event.contains(&words), "{event}");

    // Who goes takes along what only it needed.
    cluster.delete("uncapped").await;
    board.wait_limits(&cluster, &limits("10G", "50.0")).await;
    cluster.delete("large").await;
    board.wait_limits(&cluster, &limits("1G", "25.0")).await;
    assert_eq!(cluster.exec("small", "main", "ls -A /run/nvidia-mps"), "control\nlog\n");
    cluster.delete("small").await;
    cluster.wait_clean().await;
    board.wait_rest(&cluster).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_without_an_amount_has_the_gpu_for_itself() {
    let Some(cluster) = cluster("a_claim_without_an_amount_has_the_gpu_for_itself").await else { return };
    let board = Board::first(&cluster).await;
    let of = |request| json!({"requests": [of_gpu(&board.uuid, request)]});
    for name in ["whole", "again"] {
        cluster.create(claim(name, of(gpu("gpu")))).await;
    }
    cluster.create(claim("part", of(share("1Gi", 0)))).await;
    cluster.create(as_nobody(user_of("whole", "whole"))).await;
    cluster.wait_ready("whole").await;
    assert_eq!(cluster.inside("whole", "main").gpus, [minor_of(&board.device)]);
    assert_eq!(mps_env(&cluster, "whole", "main"), [""; 0]);
    assert!(!board.is_exclusive(&cluster), "nobody needs MPS");
    cluster.create(as_nobody(user_of("part", "part"))).await;
    println!("beside a whole GPU: {}", wait_unschedulable(&cluster, "part").await);
    cluster.delete("whole").await;
    cluster.wait_ready("part").await;
    cluster.create(as_nobody(user_of("again", "again"))).await;
    println!("beside a share: {}", wait_unschedulable(&cluster, "again").await);
    cluster.delete("part").await;
    cluster.wait_ready("again").await;
    assert!(!board.is_exclusive(&cluster), "the share's mode is gone");
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_is_divided_among_the_processes_that_its_author_declares() {
    let Some(cluster) = cluster("a_share_is_divided_among_the_processes_that_its_author_declares").await
    else {
        return;
    };
    let board = Board::first(&cluster).await;
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"maxProcesses": 3}));
    let request = of_gpu(&board.uuid, share("1500Mi", 0));
    cluster.create(claim("three", json!({"requests": [request], "config": config}))).await;
    cluster.create(as_nobody(user_of("three", "three"))).await;
    cluster.wait_ready("three").await;
    let env = mps_env(&cluster, "three", "main");
    assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=500M".to_owned()), "{env:?}");
    assert_eq!(board.limits(&cluster), limits("500M", "100.0"));
    assert_eq!(told_of(&cluster, "three").await["data"]["memoryPerProcessMiB"], 500);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_that_demands_more_isolation_is_told_what_is_offered() {
    let Some(cluster) = cluster("a_claim_that_demands_more_isolation_is_told_what_is_offered").await else {
        return;
    };
    let board = Board::first(&cluster).await;
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"minimumIsolation": "kernel"}));
    let request = of_gpu(&board.uuid, share("1Gi", 0));
    cluster.create(claim("firm", json!({"requests": [request], "config": config}))).await;
    cluster.create(as_nobody(user_of("firm", "firm"))).await;
    cluster.wait_refused("firm", &["minimumIsolation is kernel", &board.device, "offers mps"]).await;
    cluster.wait_clean().await;
    cluster.end().await;
}

/// As users of NVIDIA's driver write it: the claim's own containers share the GPU.
#[tokio::test]
#[ignore = "needs a rig"]
async fn nvidias_mps_settings_hold_within_one_claim() {
    let Some(cluster) = cluster("nvidias_mps_settings_hold_within_one_claim").await else { return };
    let board = Board::first(&cluster).await;
    let mps = json!({"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"});
    let sharing = json!({"sharing": {"strategy": "MPS", "mpsConfig": mps}});
    let config = parameters("resource.nvidia.com/v1beta1", "GpuConfig", sharing);
    let request = of_gpu(&board.uuid, gpu("gpu"));
    cluster.create(claim("both", json!({"requests": [request], "config": config}))).await;
    let containers =
        json!([container("left", json!([{"name": "c"}])), container("right", json!([{"name": "c"}]))]);
    cluster
        .create(as_nobody(pod("both", json!([{"name": "c", "resourceClaimName": "both"}]), containers)))
        .await;
    cluster.wait_ready("both").await;
    assert_eq!(board.limits(&cluster), limits("10G", "50.0"));
    assert!(board.is_exclusive(&cluster));
    for side in ["left", "right"] {
        let env = mps_env(&cluster, "both", side);
        let expected = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps",
        ];
        assert_eq!(env, expected, "{side}");
        assert_eq!(cluster.exec("both", side, "ls -A /run/nvidia-mps"), "control\nlog\n", "{side}");
    }
    cluster.delete("both").await;
    cluster.wait_clean().await;
    board.wait_rest(&cluster).await;
    cluster.end().await;
}

/// A process is the client of one daemon: a claim's GPUs have one together.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claims_shares_of_two_gpus_have_one_daemon_and_a_limit_each() {
    let Some(cluster) = cluster("a_claims_shares_of_two_gpus_have_one_daemon_and_a_limit_each").await else {
        return;
    };
    let boards = Board::all(&cluster, super::NODE).await;
    let (one, two) = (&boards[0], &boards[1]);
    let (mut left, mut right) = (share("2000Mi", 25), share("4Gi", 25));
    (left["name"], right["name"]) = (json!("left"), json!("right"));
    let requests = json!([of_gpu(&one.uuid, left), of_gpu(&two.uuid, right)]);
    let pair = claim("pair", json!({ "requests": requests }));
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("pair.json");
    std::fs::write(&file, pair.to_string()).unwrap();
    let file = file.to_str().expect("its name is text");
    let warned = || {
        let said =
            cluster.rig.warnings(&["-n", &cluster.namespace, "create", "--dry-run=server", "-f", file]);
        async move { said.contains("the claim has shares of several GPUs").then_some(()) }
    };
    // The webhook may still be starting.
    wait_until("whoever applies the claim to be told what it does to others", PATIENCE, warned).await;
    cluster.create(pair).await;
    cluster.create(as_nobody(user_of("pair", "pair"))).await;
    cluster.wait_ready("pair").await;
    for board in [one, two] {
        assert_eq!(row(&cluster, &board.device)["closed"], true, "{}", board.device);
    }
    let text = top(&cluster, "map");
    let closed = |board: &Board| {
        text.lines().any(|line| {
            line.trim_start().starts_with(&board.device) && line.ends_with("closed to other claims")
        })
    };
    assert!(closed(one) && closed(two), "{text}");
    let mut both = [one.uuid.clone(), two.uuid.clone()];
    both.sort();
    let first: (u64, u64) = if both[0] == one.uuid { (2000, 4096) } else { (4096, 2000) };
    let expected = [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25".to_owned(),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={}M,1={}M", first.0, first.1),
        "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps".to_owned(),
    ];
    assert_eq!(mps_env(&cluster, "pair", "main"), expected);
    let mut minors = [minor_of(&one.device), minor_of(&two.device)];
    minors.sort_unstable();
    assert_eq!(cluster.inside("pair", "main").gpus, minors);
    assert!(one.is_exclusive(&cluster) && two.is_exclusive(&cluster));
    let state = cluster.mps_state(super::NODE).await;
    let daemons = state["daemons"].as_array().unwrap();
    let serving: Vec<_> = daemons.iter().filter(|daemon| daemon["phase"]["Serving"].is_object()).collect();
    assert_eq!(serving.len(), 1, "{daemons:#?}");
    assert_eq!(serving[0]["group"], json!(both));
    assert_eq!(serving[0]["limits"]["memory"], json!([first.0 << 20, first.1 << 20]));

    // Who wants one of the two for its own has to wait: it would need another daemon on the same GPU.
    cluster.create(claim("single", json!({"requests": [of_gpu(&one.uuid, share("1Gi", 0))]}))).await;
    cluster.create(as_nobody(user_of("single", "single"))).await;
    cluster.wait_refused("single", &["pair"]).await;
    cluster.delete("pair").await;
    cluster.wait_ready("single").await;
    cluster.delete("single").await;
    cluster.wait_clean().await;
    cluster.end().await;
}

/// Containers have NVIDIA's control program, and the daemon's socket for clients. Its socket for the
/// settings they have not.
#[tokio::test]
#[ignore = "needs a rig"]
async fn root_in_a_container_asks_the_daemon_and_cannot_change_it() {
    let Some(cluster) = cluster("root_in_a_container_asks_the_daemon_and_cannot_change_it").await else {
        return;
    };
    let board = Board::first(&cluster).await;
    let neighbour = board.tenant(&cluster, "neighbour", "2000Mi", 25).await;
    cluster.create(claim("root", json!({"requests": [of_gpu(&board.uuid, share("500Mi", 10))]}))).await;
    cluster.create(user_of("root", "root")).await;
    cluster.wait_ready("root").await;
    assert_eq!(cluster.exec("root", "main", "id -u"), "0\n");
    let before = board.standing(&cluster, &["neighbour", "root"]).await;
    assert_eq!(before.lives[0], crate::test_cluster::container_run(&neighbour));
    let say = |pod: &str, command: &str| {
        cluster.exec(pod, "main", &asking("timeout 10 nvidia-cuda-mps-control", &[command]))
    };
    for pod in ["root", "neighbour"] {
        assert_eq!(say(pod, "get_default_active_thread_percentage"), "25.0\n", "{pod} reaches its daemon");
        for (command, answer) in [
            ("set_default_active_thread_percentage 100", "Insufficient privileges"),
            ("set_default_device_pinned_mem_limit 0 70G", "Insufficient privileges"),
            ("set_default_client_priority 1", "Insufficient privileges"),
            ("quit", "Not enough privilege"),
            ("quit 1", "Not enough privilege"),
        ] {
            let said = say(pod, command);
            assert!(said.starts_with(answer), "{pod}: {command:?} is answered {said:?}");
        }
    }
    let write = "touch /run/nvidia-mps/x 2>&1; rm /run/nvidia-mps/control 2>&1; true";
    let said = cluster.exec("root", "main", write);
    assert_eq!(said.matches("Read-only file system").count(), 2, "{said}");
    assert_eq!(board.standing(&cluster, &["neighbour", "root"]).await, before);
    cluster.end().await;
}
