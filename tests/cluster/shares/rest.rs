//! Daemons that nobody needs any more, and the root that daemons run in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::daemons::replace;
use super::{Board, CONTROL, NODE, cluster, limits};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, minor_of};

const SET: &str = "tranche-mps";

/// Tells the supervisors how long to keep daemons that nobody needs. They are replaced by hand (OnDelete).
async fn keep_warm(cluster: &TestCluster, how_long: &str) {
    let patch = |how_long: &str| {
        let env = json!([{"name": "TRANCHE_KEEP_WARM", "value": how_long}]);
        json!({"spec": {"template": {"spec": {"containers": [{"name": "mps", "env": env}]}}}}).to_string()
    };
    let text = cluster.rig.kubectl(&["-n", SYSTEM, "get", "daemonset", SET, "-o", "json"]);
    let stored: Value = serde_json::from_str(&text).expect("a DaemonSet is JSON");
    let env = stored["spec"]["template"]["spec"]["containers"][0]["env"].as_array().cloned();
    let before = env.iter().flatten().find(|one| one["name"] == "TRANCHE_KEEP_WARM").expect("it is set");
    let before = before["value"].as_str().expect("a value");
    let label = "app.kubernetes.io/component=mps";
    cluster.rig.on_end(&["kubectl", "-n", SYSTEM, "delete", "pod", "-l", label, "--timeout=60s"]);
    cluster.rig.on_end(&["kubectl", "-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(before)]);
    cluster.rig.kubectl(&["-n", SYSTEM, "patch", "daemonset", SET, "-p", &patch(how_long)]);
    replace(cluster, "mps", NODE).await;
}

/// The daemon's process, until it has ended and left nothing.
async fn wait_ended(cluster: &TestCluster, board: &Board, pid: u32) {
    let ended = || async {
        let alive = cluster.on_node(NODE, &format!("[ -e /proc/{pid} ] && echo alive || true"));
        let folder = cluster.on_node(NODE, &format!("ls -A {} 2>/dev/null || true", board.folder()));
        (alive.is_empty() && folder.is_empty() && board.daemon(cluster).await.is_none()).then_some(())
    };
    wait_until("a daemon that nobody needs to end", PATIENCE, ended).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_daemon_that_nobody_needs_ends_after_a_while_and_the_next_share_gets_another() {
    let test = "a_daemon_that_nobody_needs_ends_after_a_while_and_the_next_share_gets_another";
    let Some(cluster) = cluster(test).await else { return };
    keep_warm(&cluster, "2s").await;
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "one", "2000Mi", 25).await;
    let first = board.pid(&cluster).await.expect("a daemon serves it");
    cluster.delete("one").await;
    wait_ended(&cluster, &board, first).await;
    assert!(!board.is_exclusive(&cluster));

    board.tenant(&cluster, "two", "4Gi", 30).await;
    let second = board.pid(&cluster).await.expect("a daemon serves it");
    assert_ne!(first, second);
    assert_eq!(board.limits(&cluster), limits("4G", "30.0"));
    cluster.delete("two").await;
    wait_ended(&cluster, &board, second).await;
    cluster.end().await;
}

/// A C library in the driver's root, as a driver container has it; taken out again in the end.
struct Loader(Vec<PathBuf>);

impl Loader {
    fn into(root: &Path, program: &Path) -> Self {
        let folders = ["lib64", "lib", "tmp"].map(|name| root.join(name));
        assert!(!folders.iter().any(|folder| folder.exists()), "the root has a C library already");
        let loader = Self(folders.into());
        fs::create_dir_all(root.join("tmp")).unwrap();
        let listing = Command::new("ldd").arg(program).output().unwrap();
        let listing = String::from_utf8(listing.stdout).unwrap();
        for library in listing.split_whitespace().filter(|word| word.starts_with('/')) {
            let below = library.strip_prefix("/usr/").unwrap_or(library).trim_start_matches('/');
            let inside = root.join(below);
            fs::create_dir_all(inside.parent().unwrap()).unwrap();
            fs::copy(library, inside).unwrap();
        }
        loader
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn where_the_driver_brings_its_own_c_library_its_root_is_the_daemons() {
    let test = "where_the_driver_brings_its_own_c_library_its_root_is_the_daemons";
    let Some(cluster) = cluster(test).await else { return };
    // No daemon is left from before.
    keep_warm(&cluster, "2s").await;
    let board = Board::first(&cluster).await;
    let none = || async { board.daemon(&cluster).await.is_none().then_some(()) };
    wait_until("the GPU to have no daemon", PATIENCE, none).await;
    let loader = Loader::into(&cluster.host(NODE, "/driver"), &cluster.host(NODE, CONTROL));
    board.tenant(&cluster, "one", "2000Mi", 25).await;
    let pid = board.pid(&cluster).await.expect("a daemon serves it");
    let inode = |root: &str| {
        cluster
            .on_node(NODE, &format!("stat -L -c %d:%i {root}/lib64/ld-linux-x86-64.so.2"))
            .trim()
            .to_owned()
    };
    assert_eq!(inode(&format!("/proc/{pid}/root")), inode("/driver"));
    assert_eq!(board.limits(&cluster), limits("1G", "25.0"));
    assert_eq!(cluster.inside("one", "main").gpus, [minor_of(&board.device)]);
    assert_eq!(board.door(&cluster).len(), 2);
    cluster.delete("one").await;
    wait_ended(&cluster, &board, pid).await;
    drop(loader);
    cluster.end().await;
}
