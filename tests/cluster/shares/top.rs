//! `tranche top` of the real program: what pods use of their shares, for who may read it and who may not.

use std::process::Command;

use serde_json::{Value, json};

use super::metrics::Work;
use super::{Board, cluster};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{SOON, SYSTEM, TestCluster};

/// Somebody without rights of their own.
const EVE: &str = "eve@tranche.test";

fn top(cluster: &TestCluster, more: &[&str]) -> String {
    let kubeconfig = cluster.rig.run(&["kubeconfig"]);
    let mut top = Command::new(env!("CARGO_BIN_EXE_tranche"));
    let out = top.args(["top", "--once", "--kubeconfig", kubeconfig.trim()]).args(more).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The cells of the rows of the test's namespace, behind the namespace.
fn rows(cluster: &TestCluster, more: &[&str]) -> Vec<String> {
    let table = top(cluster, &[&["-o", "table", "-n", &cluster.namespace][..], more].concat());
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let own = table.lines().map(cells).filter(|row| row.get(2) == Some(&cluster.namespace));
    own.map(|row| row[3..].join(" ")).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn top_shows_what_each_pod_uses_to_whoever_may_read_it() {
    let Some(cluster) = cluster("top_shows_what_each_pod_uses_to_whoever_may_read_it").await else { return };
    let boards = Board::all(&cluster, super::NODE).await;
    let [shared, whole, ..] = &boards[..] else { panic!("the node has two GPUs that can be shared") };
    cluster.create(claim("whole", json!({"requests": [of_gpu(&whole.uuid, gpu("all"))]}))).await;
    for pod in ["mine", "other"] {
        cluster.create(as_nobody(user_of("whole", pod))).await;
    }
    let (mine, other) = (cluster.wait_ready("mine").await, cluster.wait_ready("other").await);
    let tenant = shared.tenant(&cluster, "tenant", "2000Mi", 25).await;
    let at_share = Work::of(&cluster, shared, &tenant, "mps");
    at_share.is(400, 20, "mps");
    let (at_whole, at_other) =
        (Work::of(&cluster, whole, &mine, "compute"), Work::of(&cluster, whole, &other, "compute"));
    at_whole.is(500, 35, "compute");
    at_other.is(300, 60, "compute");

    // NVML does not tell how busy a share of the GPU's common daemon is.
    let expected = [
        "mine whole whole - 500 500 35% 1",
        "other whole whole - 300 300 60% 1",
        "tenant tenant 2000 25% 400 400 - 1",
    ];
    let all = || async {
        let mut rows = rows(&cluster, &[]);
        rows.sort();
        (rows == expected).then_some(()).or_else(|| {
            println!("{rows:#?}");
            None
        })
    };
    wait_until("top to show what the pods use", SOON, all).await;
    let map = top(&cluster, &[]);
    let line = format!("A {:<40} 2000 MiB, 25 %   400 MiB used", format!("{}/tenant", cluster.namespace));
    assert!(map.lines().any(|text| text.trim() == line), "no {line:?} in\n{map}");
    let each = format!("{:<36} 500 MiB used, 35 % active", format!("{}/mine", cluster.namespace));
    assert!(map.lines().any(|text| text.trim() == each), "no {each:?} in\n{map}");
    assert!(map.contains("   800 MiB used\n"), "both pods of the whole GPU together: {map}");
    let json: Value = serde_json::from_str(&top(&cluster, &["-o", "json"])).unwrap();
    assert_eq!(json.get("lacks"), None, "nothing is missing: {json}");

    // Somebody who sees the cluster, and not what is used; then that, too.
    let bind = |kind: &str, words: &[&str]| {
        cluster.rig.on_end(
            &[&["kubectl", "-n", SYSTEM, "delete", kind, "top-eve", "--ignore-not-found"][..]].concat(),
        );
        cluster.rig.kubectl(&[&["-n", SYSTEM, "create", kind, "top-eve", "--user", EVE][..], words].concat());
    };
    bind("clusterrolebinding", &["--clusterrole=tranche-viewer"]);
    let by_eve = ["--as", EVE, "--as-group", "system:authenticated"];
    let seen = || async {
        let kubeconfig = cluster.rig.run(&["kubeconfig"]);
        let mut top = Command::new(env!("CARGO_BIN_EXE_tranche"));
        let out =
            top.args(["top", "--once", "--kubeconfig", kubeconfig.trim()]).args(by_eve).output().unwrap();
        out.status.success().then(|| String::from_utf8(out.stdout).unwrap())
    };
    let said = wait_until("the viewer to see the cluster", SOON, seen).await;
    let lack =
        "not known: you may not get pods/proxy in namespace tranche-system; ask for Role tranche-use-viewer";
    assert!(said.contains(lack) && !said.contains("MiB used"), "{said}");
    let kubeconfig = cluster.rig.run(&["kubeconfig"]);
    for (pod, words) in [("tenant", "2000 MiB"), ("mine", "the whole device")] {
        let mut explain = Command::new(env!("CARGO_BIN_EXE_tranche"));
        let line =
            ["explain", &format!("pod/{pod}"), "-n", &cluster.namespace, "--kubeconfig", kubeconfig.trim()];
        let out = explain.args(line).args(by_eve).output().unwrap();
        let said = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success(), "{pod}: {said}{}", String::from_utf8_lossy(&out.stderr));
        assert!(said.contains("placed on node ") && said.contains(words), "{pod}: {said}");
        assert!(!said.contains("may not"), "{pod}: {said}");
    }
    let unknown = rows(&cluster, &by_eve);
    assert!(unknown.contains(&"tenant tenant 2000 25% - - - -".to_owned()), "{unknown:#?}");
    bind("rolebinding", &["--role=tranche-use-viewer"]);
    let known = || async {
        let rows = rows(&cluster, &by_eve);
        rows.contains(&expected[2].to_owned()).then_some(())
    };
    wait_until("what is used to be shown to the viewer", SOON, known).await;
    drop((at_share, at_whole, at_other));
    cluster.end().await;
}
