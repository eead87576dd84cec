//! What an administrator sets for the plugin: which GPUs are shared, what who asks for nothing gets, and what is
//! done about those who take too much.

use serde_json::{Value, json};

use super::watchdog::Process;
use super::{Board, NODE, bed, mps_env, wait_event, wait_unschedulable};
use crate::test_cluster::{TestCluster, PATIENCE, SYSTEM, container_run, minor_of, sum};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, share, user_of};
use crate::rig::wait_until;

const SET: &str = "tranche-node";

/// Gives the plugin these flags, `--name=value`, in place of its own of the same names, until the test ends.
async fn set(bed: &TestCluster, flags: &[&str]) {
    let text = bed.rig.kubectl(&["-n", SYSTEM, "get", "daemonset", SET, "-o", "json"]);
    let stored: Value = serde_json::from_str(&text).expect("a DaemonSet is JSON");
    let before: Vec<String> =
        serde_json::from_value(stored["spec"]["template"]["spec"]["containers"][0]["args"].clone()).unwrap();
    let mut args = before.clone();
    for flag in flags {
        let (name, _) = flag.split_once('=').expect("a flag with a value");
        let place = args.iter_mut().find(|arg| arg.starts_with(&format!("{name}=")));
        *place.unwrap_or_else(|| panic!("the plugin has no {name}: {before:?}")) = (*flag).to_owned();
    }
    let patch = |args: &[String]| {
        let containers = json!([{"name": "node", "args": args}]);
        json!({"spec": {"template": {"spec": {"containers": containers}}}}).to_string()
    };
    let rollout = ["kubectl", "-n", SYSTEM, "rollout", "status", "daemonset", SET, "--timeout=120s"];
    bed.rig.on_end(&rollout);
    bed.rig.on_end(&["kubectl", "-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(&before)]);
    bed.rig.kubectl(&["-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(&args)]);
    bed.rig.run(&rollout);
    let alone = || async { (bed.plugins(NODE).await.len() == 1).then_some(()) };
    wait_until("the old plugin to be gone", PATIENCE, alone).await;
}

async fn is_offered_in_shares(bed: &TestCluster, device: &str) -> bool {
    let published = bed.published(NODE).await;
    let found = published.iter().find(|one| one.name == device).expect("the GPU is published");
    found.allow_multiple_allocations == Some(true)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_is_kept_from_sharing_is_given_whole_and_the_others_in_shares() {
    let test = "a_gpu_that_is_kept_from_sharing_is_given_whole_and_the_others_in_shares";
    let Some(bed) = bed(test).await else { return };
    let boards = Board::all(&bed, NODE).await;
    let (whole, shared) = (&boards[0], &boards[1]);
    set(&bed, &[&format!("--exclusive-gpus={}", whole.uuid)]).await;
    let kept = || async { (!is_offered_in_shares(&bed, &whole.device).await).then_some(()) };
    wait_until("the GPU to be offered whole only", PATIENCE, kept).await;
    assert!(is_offered_in_shares(&bed, &shared.device).await);

    bed.create(claim("part", json!({"requests": [of_gpu(&whole.uuid, share("2000Mi", 0))]}))).await;
    bed.create(as_nobody(user_of("part", "part"))).await;
    bed.wait_ready("part").await;
    assert_eq!(bed.inside("part", "main").gpus, [minor_of(&whole.device)]);
    assert_eq!(mps_env(&bed, "part", "main"), [""; 0], "all of it: an amount is the least that it must have");
    bed.create(claim("more", json!({"requests": [of_gpu(&whole.uuid, share("2000Mi", 0))]}))).await;
    bed.create(as_nobody(user_of("more", "more"))).await;
    println!("beside it: {}", wait_unschedulable(&bed, "more").await);
    shared.tenant(&bed, "tenant", "2000Mi", 0).await;
    assert!(shared.is_exclusive(&bed) && !whole.is_exclusive(&bed), "only the shared one needs MPS");
    bed.end().await;
}

/// As with NVIDIA's driver: whoever asks for no capacity is neither counted nor bounded.
#[tokio::test]
#[ignore = "needs a rig"]
async fn who_asks_for_nothing_may_be_counted_as_nothing() {
    let Some(bed) = bed("who_asks_for_nothing_may_be_counted_as_nothing").await else { return };
    let board = Board::first(&bed).await;
    set(&bed, &["--unasked=nothing"]).await;
    let of = |request: Value| json!({"requests": [of_gpu(&board.uuid, request)]});
    let free = || async {
        let published = bed.published(NODE).await;
        let found = published.iter().find(|one| one.name == board.device)?;
        let policy = found.capacity.as_ref()?.get("memory")?.request_policy.clone()?;
        (policy.default.as_ref()?.0 == "0").then_some(())
    };
    wait_until("the default to be nothing", PATIENCE, free).await;
    for name in ["one", "two"] {
        bed.create(claim(name, of(gpu("gpu")))).await;
        bed.create(as_nobody(user_of(name, name))).await;
        bed.wait_ready(name).await;
        assert_eq!(bed.inside(name, "main").gpus, [minor_of(&board.device)]);
        assert!(!mps_env(&bed, name, "main").iter().any(|env| env.contains("LIMIT")), "nothing is enforced");
    }
    bed.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_watchdog_that_may_only_observe_tells_and_ends_nobody() {
    let Some(bed) = bed("a_watchdog_that_may_only_observe_tells_and_ends_nobody").await else { return };
    let board = Board::first(&bed).await;
    set(&bed, &["--watchdog=observe"]).await;
    let greedy = board.tenant(&bed, "greedy", "2000Mi", 25).await;
    let process = Process::of(&bed, &board, &greedy, 4096);
    let event = wait_event(&bed, "greedy", "GrantExceeded").await;
    assert!(event.contains("4096 MiB of the 2000 MiB"), "{event}");
    let looks = sum(&bed.metrics(NODE).await, "tranche_watchdog_tick_duration_seconds_count");
    let more = || async {
        let now = sum(&bed.metrics(NODE).await, "tranche_watchdog_tick_duration_seconds_count");
        (now >= looks + 8.0).then_some(())
    };
    wait_until("eight more looks", PATIENCE, more).await;
    let row = |name: &str| format!("tranche_claim_{name}{{namespace=\"{}\",pod=\"greedy\"", bed.namespace);
    let metrics = bed.metrics(NODE).await;
    let counted = |name: &str| sum(&metrics, &row(name));
    assert_eq!((counted("violations_total"), counted("terminations_total")), (1.0, 0.0));
    assert_eq!(counted("memory_used_bytes"), 4096.0 * 1_048_576.0);
    assert_eq!(container_run(&bed.wait_ready("greedy").await), container_run(&greedy), "ended though only to be told");
    drop(process);
    bed.end().await;
}
