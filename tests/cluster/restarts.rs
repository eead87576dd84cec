//! Everything that can be restarted, with pods alive: they run on, and what is new works.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::manifests::{claim, gpu, on, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run, minor_of, node_of, sum};

const NODE: &str = "node-a";
/// Kubelet deletes the slices of a plugin that is away for longer, half a minute.
const KUBELET_KEEPS_SLICES: Duration = Duration::from_secs(25);

/// A pod that was there before, and what it has.
struct Living {
    pod: Pod,
    minor: u32,
    published: Vec<Device>,
}

impl Living {
    async fn on(cluster: &TestCluster) -> Self {
        cluster.create(claim("living", json!({"requests": [gpu("gpu")]}))).await;
        cluster.create(on(NODE, user_of("living", "living"))).await;
        let pod = cluster.wait_ready("living").await;
        let minor = minor_of(&cluster.devices_of("living").await[0]);
        Self { pod, minor, published: cluster.published(NODE).await }
    }

    /// The same container still runs with the same GPU, the same devices are offered, and a new pod works.
    async fn goes_on(&self, cluster: &TestCluster) {
        cluster.create(claim("new", json!({"requests": [gpu("gpu")]}))).await;
        cluster.create(on(NODE, user_of("new", "new"))).await;
        cluster.wait_ready("new").await;
        assert_eq!(cluster.inside("new", "main").gpus, [minor_of(&cluster.devices_of("new").await[0])]);
        // A kubelet that has just started shows its pods a moment later.
        assert_eq!(
            container_run(&cluster.wait_ready("living").await),
            container_run(&self.pod),
            "the living pod was disturbed"
        );
        assert_eq!(cluster.inside("living", "main").gpus, [self.minor]);
        cluster.delete("living").await;
    }

    async fn slices_are_back(&self, cluster: &TestCluster, limit: Duration) -> Duration {
        let begin = Instant::now();
        let same = || async { (cluster.published(NODE).await == self.published).then_some(()) };
        wait_until("the same devices to be published again", limit, same).await;
        begin.elapsed()
    }
}

async fn uids(cluster: &TestCluster) -> Vec<Option<String>> {
    cluster.slices(NODE).await.into_iter().map(|slice| slice.metadata.uid).collect()
}

/// Waits, too, until what the node had before is published again, and kubelet knows the plugin.
async fn restart_kubelet(cluster: &TestCluster, living: &Living) {
    let before = uids(cluster).await;
    cluster.rig.run(&["restart", NODE, "kubelet"]);
    let begin = Instant::now();
    // Kubelet wipes the slices of its node at its start, and the plugin puts them back.
    let wiped = || async { uids(cluster).await.iter().all(|uid| !before.contains(uid)).then_some(()) };
    wait_until("kubelet to wipe the slices", Duration::from_secs(60), wiped).await;
    living.slices_are_back(cluster, Duration::from_secs(60)).await;
    println!("the same devices {} ms after kubelet was seen up", begin.elapsed().as_millis());
    cluster.registered(NODE, Duration::from_secs(30)).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn kubelet_is_restarted() {
    let cluster = TestCluster::of_env("kubelet_is_restarted").await;
    let living = Living::on(&cluster).await;
    restart_kubelet(&cluster, &living).await;
    living.goes_on(&cluster).await;
    living.slices_are_back(&cluster, Duration::from_secs(5)).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_is_killed() {
    let cluster = TestCluster::of_env("the_plugin_is_killed").await;
    let living = Living::on(&cluster).await;
    let before = uids(&cluster).await;
    let plugin = cluster.plugin(NODE).await;
    let killed = Instant::now();
    cluster.kill9(NODE, &plugin);
    let restarted = || async {
        let pod = cluster.plugins(NODE).await.into_iter().next()?;
        (pod.status.as_ref()?.container_statuses.as_ref()?.first()?.restart_count > container_run(&plugin).1)
            .then_some(())
    };
    wait_until("kubelet to start the plugin again", PATIENCE, restarted).await;
    let took = cluster.registered(NODE, Duration::from_secs(30)).await;
    let away = killed.elapsed();
    println!("ready {:.1} s after it was seen restarted", took.as_secs_f64());
    living.goes_on(&cluster).await;
    match away < KUBELET_KEEPS_SLICES {
        true => assert_eq!(uids(&cluster).await, before, "the slices were published anew for nothing"),
        false => println!("away for {away:?}: kubelet may have deleted the slices"),
    }
    cluster.end().await;
}

/// A driver of another version in place of the node's own, until dropped: its files, and what NVML says of it. No GPU is
/// there meanwhile, and what was set on boards is gone, as when the kernel module is unloaded and another one loaded.
pub struct OtherDriver<'a> {
    cluster: &'a TestCluster,
    own: String,
    other: &'a str,
}

impl<'a> OtherDriver<'a> {
    /// The module is unloaded, and the files are replaced.
    pub fn unloaded(cluster: &'a TestCluster, other: &'a str) -> Self {
        let own = cluster.rig.run(&["driver-version"]).trim().to_owned();
        let driver = Self { cluster, own, other };
        cluster.fake(NODE, &["driver", "unload"]);
        // Absent: nothing was set.
        let _ = fs::remove_file(cluster.host(NODE, "/run/fake-nvml/state.json"));
        driver.rename(&driver.own, other).expect("the driver's files can be replaced");
        driver
    }

    /// The module of the other version is loaded.
    pub fn load(&self) {
        self.cluster.fake(NODE, &["driver", self.other]);
        self.cluster.fake(NODE, &["driver", "load"]);
    }

    /// Gives each file the name that it has in another version, and each link the new name.
    fn rename(&self, from: &str, to: &str) -> Result<String, String> {
        const RENAME: &str = r#"
            cd /driver/usr
            find . -type f -name "*.$1" | while read -r file; do mv "$file" "${file%"$1"}$2"; done
            find . -type l -lname "*.$1" | while read -r link; do
                to=$(readlink "$link")
                ln -sfn "${to%"$1"}$2" "$link"
            done"#;
        self.cluster.rig.attempt(&["node-exec", NODE, "sh", "-ec", RENAME, "sh", from, to])
    }
}

impl Drop for OtherDriver<'_> {
    fn drop(&mut self) {
        let renamed = self.rename(self.other, &self.own).map(|_| ());
        for done in [renamed, self.cluster.try_fake(NODE, &["driver", &self.own])] {
            if let Err(said) = done {
                println!("putting the driver back: {said}");
            }
        }
        if let Err(said) = self.cluster.try_fake(NODE, &["driver", "load"]) {
            println!("putting the driver back: {said}");
        }
    }
}

/// Waits until the pod's container, which ran as `before` says, runs again.
pub async fn wait_run_again(cluster: &TestCluster, pod: &str, before: &str) {
    let pods: Api<Pod> = cluster.api();
    let again = || async {
        let pod = pods.get(pod).await.ok()?;
        (crate::test_cluster::is_ready(&pod) && container_run(&pod).0 != before).then_some(())
    };
    wait_until("the container to run again", Duration::from_secs(180), again).await;
}

/// Waits until an event tells the pod that its container edits were written anew.
pub async fn wait_edits_renewed(cluster: &TestCluster, pod: &str) {
    let told = || async {
        let events = cluster.events(pod).await;
        events.iter().any(|event| event.starts_with("ContainerEditsRenewed")).then_some(())
    };
    wait_until("the event ContainerEditsRenewed", PATIENCE, told).await;
}

/// NVIDIA's persistence daemon, of which containers get the socket while it listens.
pub struct DriverDaemon {
    folder: PathBuf,
    _listener: UnixListener,
}

impl DriverDaemon {
    /// Says in a container whether the socket is there.
    pub const SEEN: &str = "test -S /run/nvidia-persistenced/socket && echo there || echo gone";

    pub fn start(cluster: &TestCluster) -> Self {
        let folder = cluster.host(NODE, "/driver/run/nvidia-persistenced");
        fs::create_dir_all(&folder).expect("the driver root can be written");
        let listener = UnixListener::bind(folder.join("socket")).expect("a daemon of the driver can listen");
        Self { folder, _listener: listener }
    }
}

impl Drop for DriverDaemon {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            println!("putting the node right: {error}");
        }
    }
}

/// Before, runc failed on the missing path for good, also after restarts of plugin and kubelet.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_container_restarts_after_the_drivers_files_have_changed_under_it() {
    let cluster =
        TestCluster::of_env("a_container_restarts_after_the_drivers_files_have_changed_under_it").await;
    let daemon = DriverDaemon::start(&cluster);
    let living = Living::on(&cluster).await;
    assert_eq!(cluster.exec("living", "main", DriverDaemon::SEEN).trim(), "there");
    // The daemon is stopped, and its folder goes with it. The container goes on, also while kubelet is restarted, and
    // dies only then.
    drop(daemon);
    restart_kubelet(&cluster, &living).await;
    let before = container_run(&living.pod).0;
    assert_eq!(container_run(&cluster.wait_ready("living").await).0, before, "it was disturbed");
    cluster.kill9(NODE, &living.pod);
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    wait_run_again(&cluster, "living", &before).await;
    assert_eq!(cluster.exec("living", "main", DriverDaemon::SEEN).trim(), "gone");
    assert_eq!(cluster.inside("living", "main").gpus, [living.minor]);
    wait_edits_renewed(&cluster, "living").await;
    cluster.delete("living").await;
    cluster.end().await;
}

/// NVIDIA's container toolkit on the node, until dropped: a hook that notes how it is called, and does nothing.
struct Toolkit {
    hook: PathBuf,
    calls: PathBuf,
}

impl Toolkit {
    const CALLS: &str = "/run/tranche-test-hook-calls";

    fn install(cluster: &TestCluster) -> Self {
        let (hook, calls) =
            (cluster.host(NODE, "/driver/usr/bin/nvidia-cdi-hook"), cluster.host(NODE, Self::CALLS));
        let toolkit = Self { hook, calls };
        // The runtime hands it the container's state, which it reads to the end.
        let script =
            format!("#!/bin/sh\necho \"$@\" >>{}\nwhile read -r line; do :; done\nexit 0\n", Self::CALLS);
        let fresh = toolkit.hook.with_extension("fresh");
        fs::write(&fresh, script).expect("the driver root can be written");
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).expect("it can be made a program");
        fs::rename(&fresh, &toolkit.hook).expect("it can be put into place");
        toolkit
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.calls).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Toolkit {
    fn drop(&mut self) {
        for file in [&self.hook, &self.calls] {
            // Gone already, perhaps.
            let _ = fs::remove_file(file);
        }
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_toolkits_hook_is_called_while_it_is_there_and_a_container_restarts_once_it_is_gone() {
    let test = "the_toolkits_hook_is_called_while_it_is_there_and_a_container_restarts_once_it_is_gone";
    let cluster = TestCluster::of_env(test).await;
    let toolkit = Toolkit::install(&cluster);
    let living = Living::on(&cluster).await;
    let calls = toolkit.calls();
    for command in ["create-symlinks ", "update-ldcache "] {
        assert!(calls.iter().any(|call| call.starts_with(command)), "no {command:?} in {calls:?}");
    }
    // It is uninstalled. The container runtime fails on a hook that the container edits name and that is gone.
    fs::remove_file(&toolkit.hook).expect("it can be removed");
    let before = container_run(&living.pod).0;
    cluster.kill9(NODE, &living.pod);
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    wait_run_again(&cluster, "living", &before).await;
    assert_eq!(cluster.inside("living", "main").gpus, [living.minor]);
    assert_eq!(toolkit.calls(), calls, "nobody could call it");
    wait_edits_renewed(&cluster, "living").await;
    cluster.delete("living").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn slices_that_somebody_deletes_come_back() {
    let cluster = TestCluster::of_env("slices_that_somebody_deletes_come_back").await;
    let before = cluster.published(NODE).await;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    for round in 0..3 {
        for slice in cluster.slices(NODE).await {
            slices.delete(&slice.metadata.name.unwrap(), &DeleteParams::default()).await.unwrap();
        }
        let begin = Instant::now();
        let back = || async { (cluster.published(NODE).await == before).then_some(()) };
        wait_until("the slices to be back", Duration::from_secs(5), back).await;
        println!("round {round}: back after {} ms", begin.elapsed().as_millis());
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_is_away_for_longer_than_kubelet_waits() {
    let cluster = TestCluster::of_env("the_plugin_is_away_for_longer_than_kubelet_waits").await;
    let living = Living::on(&cluster).await;
    cluster.create(claim("leaving", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("leaving", "leaving"))).await;
    cluster.wait_ready("leaving").await;
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let select = |value: serde_json::Value| {
        Patch::Merge(json!({"spec": {"template": {"spec": {"nodeSelector": {"tranche-test": value}}}}}))
    };
    cluster.rig.on_end(&[
        "kubectl",
        "-n",
        SYSTEM,
        "patch",
        "daemonset",
        "tranche-node",
        "--type=merge",
        "-p",
        r#"{"spec":{"template":{"spec":{"nodeSelector":{"tranche-test":null}}}}}"#,
    ]);
    sets.patch("tranche-node", &PatchParams::default(), &select(json!("nowhere"))).await.unwrap();
    let away = || async { cluster.plugins(NODE).await.is_empty().then_some(()) };
    wait_until("the plugin to be gone", PATIENCE, away).await;
    let wiped = || async { cluster.slices(NODE).await.is_empty().then_some(()) };
    wait_until("kubelet to wipe the slices", Duration::from_secs(60), wiped).await;
    // Both wait for the plugin: a pod that ends, for nobody is there to release its claim, and one that begins.
    let pods: Api<Pod> = cluster.api();
    pods.delete("leaving", &DeleteParams::default()).await.unwrap();
    cluster.create(claim("late", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, user_of("late", "late"))).await;
    sets.patch("tranche-node", &PatchParams::default(), &select(json!(null))).await.unwrap();
    cluster.plugin(NODE).await;
    living.slices_are_back(&cluster, Duration::from_secs(20)).await;
    cluster.wait_ready("late").await;
    cluster.gone("leaving").await;
    living.goes_on(&cluster).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_api_server_is_restarted() {
    let cluster = TestCluster::of_env("the_api_server_is_restarted").await;
    let living = Living::on(&cluster).await;
    cluster.rig.run(&["restart", "control", "apiserver"]);
    cluster.plugin(NODE).await;
    living.slices_are_back(&cluster, Duration::from_secs(30)).await;
    living.goes_on(&cluster).await;
    // The plugin watches again: what is deleted now comes back.
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    for slice in cluster.slices(NODE).await {
        slices.delete(&slice.metadata.name.unwrap(), &DeleteParams::default()).await.unwrap();
    }
    living.slices_are_back(&cluster, Duration::from_secs(30)).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_node_is_rebooted() {
    let cluster = TestCluster::of_env("the_node_is_rebooted").await;
    let living = Living::on(&cluster).await;
    let record = cluster.files(NODE, "/var/lib/kubelet/plugins/gpu.nvidia.com/ledger");
    let edits = cluster.files(NODE, "/var/run/cdi");
    assert_eq!((record.len(), edits.len()), (1, 1));
    let content = |name: &str| fs::read_to_string(cluster.host(NODE, "/var/run/cdi").join(name)).unwrap();
    let before = content(&edits[0]);

    cluster.boot(NODE);
    let pods: Api<Pod> = cluster.api();
    let again = || async {
        let pod = pods.get("living").await.ok()?;
        (crate::test_cluster::is_ready(&pod) && container_run(&pod).0 != container_run(&living.pod).0)
            .then_some(pod)
    };
    let pod = wait_until("the pod to run again", Duration::from_secs(180), again).await;
    assert_eq!(
        (node_of(&pod), container_run(&pod).1 >= 1),
        (NODE.to_owned(), true),
        "the same pod on the same node"
    );
    assert_eq!(cluster.inside("living", "main").gpus, [living.minor]);
    assert_eq!(cluster.files(NODE, "/var/run/cdi"), edits, "the same container edits");
    assert_eq!(content(&edits[0]), before);
    assert_eq!(cluster.files(NODE, "/var/lib/kubelet/plugins/gpu.nvidia.com/ledger"), record);
    living.slices_are_back(&cluster, Duration::from_secs(60)).await;
    cluster.delete("living").await;
    cluster.end().await;
}

/// The node's kubelet is set up anew and the pod deleted meanwhile: nobody ever asks to release the claim.
#[tokio::test]
#[ignore = "needs a rig"]
async fn what_kubelet_forgot_is_released() {
    let cluster = TestCluster::of_env("what_kubelet_forgot_is_released").await;
    let living = Living::on(&cluster).await;
    cluster.rig.on_end(&["start", NODE, "kubelet"]);
    cluster.rig.run(&["stop", NODE, "kubelet"]);
    let releases = "tranche_claim_operation_duration_seconds_count{operation=\"unprepare\"";
    let before = sum(&cluster.metrics(NODE).await, releases);
    fs::remove_file(cluster.host(NODE, "/var/lib/kubelet/dra_manager_state"))
        .expect("kubelet keeps its claims there");
    let pods: Api<Pod> = cluster.api();
    pods.delete("living", &DeleteParams::default().grace_period(0)).await.unwrap();
    cluster.gone("living").await;
    let claims: Api<ResourceClaim> = cluster.api();
    claims.delete("living", &DeleteParams::default()).await.unwrap();
    let gone = || async { claims.get_opt("living").await.ok()?.is_none().then_some(()) };
    wait_until("the claim to be gone", PATIENCE, gone).await;
    cluster.rig.run(&["start", NODE, "kubelet"]);
    living.slices_are_back(&cluster, Duration::from_secs(60)).await;
    assert_eq!(sum(&cluster.metrics(NODE).await, releases), before, "nobody asked");
    // The sweeper looks at its start, and every minute.
    cluster.kill9(NODE, &cluster.plugin(NODE).await);
    cluster.wait_clean().await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_is_ready_within_five_seconds_of_its_start() {
    let cluster = TestCluster::of_env("the_plugin_is_ready_within_five_seconds_of_its_start").await;
    let old = cluster.plugin(NODE).await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    pods.delete(&old.metadata.name.clone().unwrap(), &DeleteParams::default()).await.unwrap();
    let started = || async {
        let pods = cluster.plugins(NODE).await;
        let new = pods.into_iter().find(|pod| pod.metadata.uid != old.metadata.uid)?;
        new.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?.running.as_ref()?;
        Some(new)
    };
    wait_until("another plugin to be started", PATIENCE, started).await;
    let took = cluster.registered(NODE, Duration::from_secs(5)).await;
    println!("registered {} ms after the container was seen running", took.as_millis());
    cluster.plugin(NODE).await;
    cluster.end().await;
}
