//! What a claim gets of a GPU, and how far it can be seen and touched from inside.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::daemons::condition;
use super::{Board, asking, bed, limits, mps_env, wait_event, wait_unschedulable};
use crate::test_cluster::{TestCluster, PATIENCE, SOON, minor_of};
use crate::manifests::{as_nobody, claim, container, gpu, of_gpu, parameters, pod, share, user_of};
use crate::rig::wait_until;

/// A MIG device is one claim's; its containers share it under limits as on a whole GPU.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_mig_device_carries_mps_within_one_claim() {
    let Some(bed) = bed("a_mig_device_carries_mps_within_one_claim").await else { return };
    let mps = json!({"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "4Gi"});
    let sharing = json!({"sharing": {"strategy": "MPS", "mpsConfig": mps}});
    let config = parameters("resource.nvidia.com/v1beta1", "MigDeviceConfig", sharing);
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "mig.nvidia.com"}});
    bed.create(claim("mig", json!({"requests": [request], "config": config}))).await;
    let containers =
        json!([container("left", json!([{"name": "c"}])), container("right", json!([{"name": "c"}]))]);
    bed.create(as_nobody(pod("mig", json!([{"name": "c", "resourceClaimName": "mig"}]), containers))).await;
    bed.wait_ready("mig").await;
    let device = bed.devices_of("mig").await.remove(0);
    let published = bed.published(super::NODE).await.into_iter().find(|one| one.name == device);
    let uuid = published.and_then(|one| one.attributes?.get("uuid")?.string.clone());
    let uuid = uuid.expect("a MIG device has a UUID");
    for side in ["left", "right"] {
        let env = mps_env(&bed, "mig", side);
        let expected = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps",
        ];
        assert_eq!(env, expected, "{side}");
        assert_eq!(bed.exec("mig", side, "ls -A /run/nvidia-mps"), "control\nlog\n", "{side}");
    }
    let state = bed.mps_state(super::NODE).await;
    let serves = |daemon: &&Value| daemon["phase"]["Serving"].is_object();
    let serving: Vec<_> = state["daemons"].as_array().unwrap().iter().filter(serves).collect();
    assert_eq!(serving.len(), 1, "{state:#}");
    assert_eq!(serving[0]["group"], json!([uuid]));

    // What happens to its daemon is told to the claim and its pod, as of a whole GPU.
    bed.on_node(
        super::NODE,
        &format!("kill -9 $(cat /run/tranche/mps/{uuid}/pipe/nvidia-cuda-mps-control.pid)"),
    );
    let ill = wait_event(&bed, "mig", "MpsUnhealthy").await;
    assert!(ill.contains(&uuid) && ill.contains("ended"), "{ill}");
    wait_event(&bed, "mig", "MpsRecovered").await;
    let healthy = || async { (condition(&bed, "mig", "DeviceHealthy").await? == "True").then_some(()) };
    wait_until("the claim to be told healthy", PATIENCE, healthy).await;
    assert_eq!(bed.exec("mig", "left", "ls -A /run/nvidia-mps"), "control\nlog\n", "the new daemon's");
    bed.delete("mig").await;
    bed.wait_clean().await;
    bed.end().await;
}

/// `tranche top`, as somebody with a kubeconfig runs it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn whoever_looks_at_the_cluster_sees_who_has_what() {
    let Some(bed) = bed("whoever_looks_at_the_cluster_sees_who_has_what").await else { return };
    let board = Board::first(&bed).await;
    board.tenant(&bed, "tenant", "2000Mi", 25).await;
    let kubeconfig = bed.rig.run(&["kubeconfig"]);
    let top = |output: &str| {
        let mut top = std::process::Command::new(env!("CARGO_BIN_EXE_tranche"));
        let out =
            top.args(["top", "--once", "-o", output, "--kubeconfig", kubeconfig.trim()]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let map: Value = serde_json::from_str(&top("json")).unwrap();
    let nodes = map["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|node| node["name"] == super::NODE).expect("the node is on the map");
    let row = node["devices"].as_array().unwrap().iter().find(|row| row["device"] == json!(board.device));
    let expected = json!([{"namespace": bed.namespace, "claim": "tenant", "pods": ["tenant"],
        "part": {"share": {"memoryMiB": 2000, "computePercent": 25}}}]);
    assert_eq!(row.unwrap()["claims"], expected);
    let line = format!("A {}/tenant", bed.namespace);
    let text = top("map");
    assert!(text.lines().any(|text| text.contains(&line) && text.ends_with("2000 MiB, 25 %")), "{text}");
    bed.end().await;
}

/// A claim's one entry of status.devices.
async fn told_of(bed: &TestCluster, claim: &str) -> Value {
    let told = || async {
        let claim = bed.api::<ResourceClaim>().get(claim).await.ok()?;
        serde_json::to_value(claim.status?.devices?.first()?).ok()
    };
    wait_until(&format!("claim {claim} to be told of its device"), SOON, told).await
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn each_claim_has_its_own_share_and_the_daemon_is_as_loose_as_the_loosest() {
    let Some(bed) = bed("each_claim_has_its_own_share_and_the_daemon_is_as_loose_as_the_loosest").await
    else {
        return;
    };
    let board = Board::first(&bed).await;
    let pipe = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps";
    board.tenant(&bed, "small", "2000Mi", 25).await;
    // Memory is answered in whole GiB, rounded down.
    assert_eq!(board.limits(&bed), limits("1G", "25.0"));
    board.tenant(&bed, "large", "10Gi", 50).await;
    assert_eq!(board.limits(&bed), limits("10G", "50.0"));
    board.tenant(&bed, "uncapped", "500Mi", 0).await;
    assert_eq!(board.limits(&bed), limits("10G", "100.0"));
    assert!(board.is_exclusive(&bed), "only the MPS server may open the GPU");
    let own = |memory: &str| format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}");
    let cap = |percent: u32| format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}");
    assert_eq!(mps_env(&bed, "small", "main"), [cap(25), own("2000M"), pipe.to_owned()]);
    assert_eq!(mps_env(&bed, "large", "main"), [cap(50), own("10240M"), pipe.to_owned()]);
    assert_eq!(mps_env(&bed, "uncapped", "main"), [own("500M"), pipe.to_owned()]);
    for tenant in ["small", "large", "uncapped"] {
        let inside = bed.inside(tenant, "main");
        assert_eq!((&inside.gpus[..], inside.cuda), (&[minor_of(&board.device)][..], true), "{tenant}");
        assert_eq!(bed.exec(tenant, "main", "ls -A /run/nvidia-mps"), "control\nlog\n", "{tenant}");
    }

    let told = told_of(&bed, "small").await;
    let expected = json!({"memoryMiB": 2000, "memoryPerProcessMiB": 2000, "computePercent": 25,
        "maxProcesses": 1, "isolation": "mps", "uuid": board.uuid});
    assert_eq!(told["data"], expected);
    let conditions = told["conditions"].as_array().unwrap();
    let good = |one: &Value| one["status"] == "True";
    assert!(conditions.len() == 3 && conditions.iter().all(good), "{conditions:#?}");
    let stored = bed.api::<ResourceClaim>().get("small").await.unwrap();
    let result = &stored.status.unwrap().allocation.unwrap().devices.unwrap().results.unwrap()[0];
    assert!(result.share_id.is_some() && told["shareID"].as_str() == result.share_id.as_deref());
    assert!(
        told_of(&bed, "uncapped").await["data"]["computePercent"].is_null(),
        "what is not capped has no number"
    );
    let event = wait_event(&bed, "small", "SharePrepared").await;
    let words = format!("{}: 2000 MiB, 25 % of compute, isolation mps", board.device);
    assert!(event.contains(&words), "{event}");

    // Who goes takes along what only it needed.
    bed.delete("uncapped").await;
    board.wait_limits(&bed, &limits("10G", "50.0")).await;
    bed.delete("large").await;
    board.wait_limits(&bed, &limits("1G", "25.0")).await;
    assert_eq!(bed.exec("small", "main", "ls -A /run/nvidia-mps"), "control\nlog\n");
    bed.delete("small").await;
    bed.wait_clean().await;
    board.wait_rest(&bed).await;
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_without_an_amount_has_the_gpu_for_itself() {
    let Some(bed) = bed("a_claim_without_an_amount_has_the_gpu_for_itself").await else { return };
    let board = Board::first(&bed).await;
    let of = |request| json!({"requests": [of_gpu(&board.uuid, request)]});
    for name in ["whole", "again"] {
        bed.create(claim(name, of(gpu("gpu")))).await;
    }
    bed.create(claim("part", of(share("1Gi", 0)))).await;
    bed.create(as_nobody(user_of("whole", "whole"))).await;
    bed.wait_ready("whole").await;
    assert_eq!(bed.inside("whole", "main").gpus, [minor_of(&board.device)]);
    assert_eq!(mps_env(&bed, "whole", "main"), [""; 0]);
    assert!(!board.is_exclusive(&bed), "nobody needs MPS");
    bed.create(as_nobody(user_of("part", "part"))).await;
    println!("beside a whole GPU: {}", wait_unschedulable(&bed, "part").await);
    bed.delete("whole").await;
    bed.wait_ready("part").await;
    bed.create(as_nobody(user_of("again", "again"))).await;
    println!("beside a share: {}", wait_unschedulable(&bed, "again").await);
    bed.delete("part").await;
    bed.wait_ready("again").await;
    assert!(!board.is_exclusive(&bed), "the share's mode is gone");
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_is_divided_among_the_processes_that_its_author_declares() {
    let Some(bed) = bed("a_share_is_divided_among_the_processes_that_its_author_declares").await else {
        return;
    };
    let board = Board::first(&bed).await;
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"maxProcesses": 3}));
    let request = of_gpu(&board.uuid, share("1500Mi", 0));
    bed.create(claim("three", json!({"requests": [request], "config": config}))).await;
    bed.create(as_nobody(user_of("three", "three"))).await;
    bed.wait_ready("three").await;
    let env = mps_env(&bed, "three", "main");
    assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=500M".to_owned()), "{env:?}");
    assert_eq!(board.limits(&bed), limits("500M", "100.0"));
    assert_eq!(told_of(&bed, "three").await["data"]["memoryPerProcessMiB"], 500);
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_that_demands_more_isolation_is_told_what_is_offered() {
    let Some(bed) = bed("a_claim_that_demands_more_isolation_is_told_what_is_offered").await else { return };
    let board = Board::first(&bed).await;
    let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"minimumIsolation": "kernel"}));
    let request = of_gpu(&board.uuid, share("1Gi", 0));
    bed.create(claim("firm", json!({"requests": [request], "config": config}))).await;
    bed.create(as_nobody(user_of("firm", "firm"))).await;
    bed.wait_refused("firm", &["minimumIsolation is kernel", &board.device, "offers mps"]).await;
    bed.wait_clean().await;
    bed.end().await;
}

/// As users of NVIDIA's driver write it: the claim's own containers share the GPU.
#[tokio::test]
#[ignore = "needs a rig"]
async fn nvidias_mps_settings_hold_within_one_claim() {
    let Some(bed) = bed("nvidias_mps_settings_hold_within_one_claim").await else { return };
    let board = Board::first(&bed).await;
    let mps = json!({"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"});
    let sharing = json!({"sharing": {"strategy": "MPS", "mpsConfig": mps}});
    let config = parameters("resource.nvidia.com/v1beta1", "GpuConfig", sharing);
    let request = of_gpu(&board.uuid, gpu("gpu"));
    bed.create(claim("both", json!({"requests": [request], "config": config}))).await;
    let containers =
        json!([container("left", json!([{"name": "c"}])), container("right", json!([{"name": "c"}]))]);
    bed.create(as_nobody(pod("both", json!([{"name": "c", "resourceClaimName": "both"}]), containers))).await;
    bed.wait_ready("both").await;
    assert_eq!(board.limits(&bed), limits("10G", "50.0"));
    assert!(board.is_exclusive(&bed));
    for side in ["left", "right"] {
        let env = mps_env(&bed, "both", side);
        let expected = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps",
        ];
        assert_eq!(env, expected, "{side}");
        assert_eq!(bed.exec("both", side, "ls -A /run/nvidia-mps"), "control\nlog\n", "{side}");
    }
    bed.delete("both").await;
    bed.wait_clean().await;
    board.wait_rest(&bed).await;
    bed.end().await;
}

/// A process is the client of one daemon: a claim's GPUs have one together.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claims_shares_of_two_gpus_have_one_daemon_and_a_limit_each() {
    let Some(bed) = bed("a_claims_shares_of_two_gpus_have_one_daemon_and_a_limit_each").await else { return };
    let boards = Board::all(&bed, super::NODE).await;
    let (one, two) = (&boards[0], &boards[1]);
    let (mut left, mut right) = (share("2000Mi", 25), share("4Gi", 25));
    (left["name"], right["name"]) = (json!("left"), json!("right"));
    let requests = json!([of_gpu(&one.uuid, left), of_gpu(&two.uuid, right)]);
    bed.create(claim("pair", json!({ "requests": requests }))).await;
    bed.create(as_nobody(user_of("pair", "pair"))).await;
    bed.wait_ready("pair").await;
    let mut both = [one.uuid.clone(), two.uuid.clone()];
    both.sort();
    let first: (u64, u64) = if both[0] == one.uuid { (2000, 4096) } else { (4096, 2000) };
    let expected = [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25".to_owned(),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={}M,1={}M", first.0, first.1),
        "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps".to_owned(),
    ];
    assert_eq!(mps_env(&bed, "pair", "main"), expected);
    let mut minors = [minor_of(&one.device), minor_of(&two.device)];
    minors.sort_unstable();
    assert_eq!(bed.inside("pair", "main").gpus, minors);
    assert!(one.is_exclusive(&bed) && two.is_exclusive(&bed));
    let state = bed.mps_state(super::NODE).await;
    let daemons = state["daemons"].as_array().unwrap();
    let serving: Vec<_> = daemons.iter().filter(|daemon| daemon["phase"]["Serving"].is_object()).collect();
    assert_eq!(serving.len(), 1, "{daemons:#?}");
    assert_eq!(serving[0]["group"], json!(both));
    assert_eq!(serving[0]["limits"]["memory"], json!([first.0 << 20, first.1 << 20]));

    // Who wants one of the two for its own has to wait: it would need another daemon on the same GPU.
    bed.create(claim("single", json!({"requests": [of_gpu(&one.uuid, share("1Gi", 0))]}))).await;
    bed.create(as_nobody(user_of("single", "single"))).await;
    bed.wait_refused("single", &["pair"]).await;
    bed.delete("pair").await;
    bed.wait_ready("single").await;
    bed.delete("single").await;
    bed.wait_clean().await;
    bed.end().await;
}

/// Containers have NVIDIA's control program, and the daemon's socket for clients. Its socket for the
/// settings they have not.
#[tokio::test]
#[ignore = "needs a rig"]
async fn root_in_a_container_asks_the_daemon_and_cannot_change_it() {
    let Some(bed) = bed("root_in_a_container_asks_the_daemon_and_cannot_change_it").await else { return };
    let board = Board::first(&bed).await;
    let neighbour = board.tenant(&bed, "neighbour", "2000Mi", 25).await;
    bed.create(claim("root", json!({"requests": [of_gpu(&board.uuid, share("500Mi", 10))]}))).await;
    bed.create(user_of("root", "root")).await;
    bed.wait_ready("root").await;
    assert_eq!(bed.exec("root", "main", "id -u"), "0\n");
    let before = board.standing(&bed, &["neighbour", "root"]).await;
    assert_eq!(before.lives[0], crate::test_cluster::container_run(&neighbour));
    let say = |pod: &str, command: &str| {
        bed.exec(pod, "main", &asking("timeout 10 nvidia-cuda-mps-control", &[command]))
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
    let said = bed.exec("root", "main", write);
    assert_eq!(said.matches("Read-only file system").count(), 2, "{said}");
    assert_eq!(board.standing(&bed, &["neighbour", "root"]).await, before);
    bed.end().await;
}
