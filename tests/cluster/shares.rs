//! Shares of a GPU, with NVIDIA's own MPS control daemon: what containers get, what the daemon, the board and
//! the cluster say of it, and what is left of it when something fails.

mod churn;
pub mod daemons;
mod ear;
mod grants;
pub mod metrics;
mod placed;
mod refusals;
mod rest;
pub mod settings;
mod top;
mod watchdog;
mod whole_only;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::manifests::{as_nobody, claim, of_gpu, share, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_run, minor_of};

const NODE: &str = "node-a";
/// NVIDIA's program, as the node has it.
const CONTROL: &str = "/driver/usr/bin/nvidia-cuda-mps-control";

/// What a daemon is asked for its limits.
const LIMITS: [&str; 2] = ["get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage"];

/// A shell's words that ask a daemon until it listens: it hears one asker at a time, and its supervisor asks
/// every two seconds. It says nothing to the others, or breaks off.
pub fn asking(control: &str, commands: &[&str]) -> String {
    let script = commands.join("\n");
    let whole = match commands {
        [.., "get_default_active_thread_percentage"] => "*.*",
        _ => "?*",
    };
    format!(
        r#"i=0
        while said=$(echo '{script}' | {control} 2>&1); [ $i -lt 100 ]; do
            case $said in *'Cannot send command'*) ;; {whole}) break ;; esac
            i=$((i + 1))
            sleep 0.05
        done
        echo "$said""#
    )
}

/// A test cluster that keeps shares; None where the API server keeps none.
pub async fn cluster(test: &str) -> Option<TestCluster> {
    let cluster = TestCluster::of_env(test).await;
    if cluster.release().await < 36 {
        skipped("the API server keeps no shares before Kubernetes 1.36");
        return None;
    }
    Some(cluster)
}

/// A GPU that can be shared, and its daemon.
#[derive(Debug, Clone)]
pub struct Board {
    pub node: String,
    pub device: String,
    pub uuid: String,
    /// What may be granted of it.
    grantable_mib: u64,
}

/// What must not change while somebody has a share.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    daemon: Option<u32>,
    /// The files that clients use, with their inodes.
    door: Vec<String>,
    limits: Limits,
    /// Containers, and how often they were restarted.
    lives: Vec<(String, i32)>,
}

/// The daemon's defaults, in its own words: memory (none: empty) and percent of threads.
pub type Limits = (String, String);

pub fn limits(memory: &str, compute: &str) -> Limits {
    (memory.to_owned(), compute.to_owned())
}

impl Board {
    /// Every GPU of the node that is offered in shares, by number.
    pub async fn all(cluster: &TestCluster, node: &str) -> Vec<Self> {
        let mut boards = Vec::new();
        for device in cluster.published(node).await {
            if device.allow_multiple_allocations != Some(true) {
                continue;
            }
            let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid")?.string.clone());
            let memory = device.capacity.as_ref().and_then(|all| all.get("memory"));
            boards.push(Self {
                node: node.to_owned(),
                uuid: uuid.expect("a GPU has a UUID"),
                grantable_mib: mib(&memory.expect("a shareable GPU has memory").value.0),
                device: device.name,
            });
        }
        boards.sort_by_key(|board| minor_of(&board.device));
        boards
    }

    pub async fn first(cluster: &TestCluster) -> Self {
        Self::all(cluster, NODE).await.into_iter().next().expect("the node has GPUs that can be shared")
    }

    pub fn folder(&self) -> String {
        format!("/run/tranche/mps/{}", self.uuid)
    }

    /// What NVIDIA's program answers on the daemon's own socket, by lines.
    fn ask(&self, cluster: &TestCluster, commands: &[&str]) -> Vec<String> {
        let control = format!("CUDA_MPS_PIPE_DIRECTORY={}/pipe {CONTROL}", self.folder());
        cluster.on_node(&self.node, &asking(&control, commands)).lines().map(str::to_owned).collect()
    }

    pub fn limits(&self, cluster: &TestCluster) -> Limits {
        match &self.ask(cluster, &LIMITS)[..] {
            [compute] => limits("", compute),
            [memory, compute] => limits(memory, compute),
            other => panic!("the daemon of {} answers {other:?}", self.device),
        }
    }

    pub async fn wait_limits(&self, cluster: &TestCluster, wanted: &Limits) {
        let now = || async { (self.limits(cluster) == *wanted).then_some(()) };
        wait_until(&format!("the daemon of {} to have the limits {wanted:?}", self.device), SOON, now).await;
    }

    /// What clients find in the folder that containers get: name and inode. Nothing without a daemon.
    fn door(&self, cluster: &TestCluster) -> Vec<String> {
        // The keeper may empty it at this moment.
        let look = "find . -mindepth 1 -maxdepth 1 -ignore_readdir_race -printf '%P %i\\n' | sort";
        let script = format!("cd {}/client 2>&- || exit 0; {look}", self.folder());
        cluster.on_node(&self.node, &script).lines().map(str::to_owned).collect()
    }

    fn is_exclusive(&self, cluster: &TestCluster) -> bool {
        cluster.exclusive_boards(&self.node).contains(&minor_of(&self.device).to_string())
    }

    /// What `tranche mps` says of the daemon.
    pub async fn daemon(&self, cluster: &TestCluster) -> Option<Value> {
        cluster.mps_state(&self.node).await["daemons"]
            .as_array()?
            .iter()
            .find(|daemon| daemon["group"] == json!([self.uuid]))
            .cloned()
    }

    pub async fn pid(&self, cluster: &TestCluster) -> Option<u32> {
        self.daemon(cluster).await?["phase"]["Serving"]["pid"].as_u64()?.try_into().ok()
    }

    /// A claim for a part of this GPU, and a pod of its name that runs with it.
    async fn tenant(&self, cluster: &TestCluster, name: &str, memory: &str, compute: u32) -> Pod {
        let request = of_gpu(&self.uuid, share(memory, compute));
        cluster.create(claim(name, json!({"requests": [request]}))).await;
        cluster.create(as_nobody(user_of(name, name))).await;
        cluster.wait_ready(name).await
    }

    async fn standing(&self, cluster: &TestCluster, pods: &[&str]) -> Standing {
        let mut lives = Vec::new();
        for pod in pods {
            lives.push(container_run(&cluster.wait_ready(pod).await));
        }
        let (door, limits) = (self.door(cluster), self.limits(cluster));
        Standing { daemon: self.pid(cluster).await, door, limits, lives }
    }

    /// Waits until nobody is served: clients are kept out, and the board is anyone's.
    async fn wait_rest(&self, cluster: &TestCluster) {
        let rests = || async {
            let state = self.daemon(cluster).await?;
            let resting = state["phase"]["Resting"].is_object() && state["limits"].is_null();
            (resting && !self.is_exclusive(cluster) && self.door(cluster).is_empty()).then_some(())
        };
        wait_until(&format!("the daemon of {} to rest", self.device), SOON, rests).await;
    }
}

/// Whole MiB of a quantity with a binary suffix, as slices have it.
pub fn mib(quantity: &str) -> u64 {
    let number = |suffix| quantity.strip_suffix(suffix).and_then(|number: &str| number.parse::<u64>().ok());
    let gib = || number("Gi").map(|gib| gib * 1024);
    number("Mi").or_else(gib).unwrap_or_else(|| panic!("{quantity} is no number of Mi or Gi"))
}

/// The variables of a container that MPS reads, sorted.
pub fn mps_env(cluster: &TestCluster, pod: &str, container: &str) -> Vec<String> {
    let mut env: Vec<_> =
        cluster.exec(pod, container, "env | grep ^CUDA_MPS || true").lines().map(str::to_owned).collect();
    env.sort();
    env
}

/// Waits until the pod waits for the scheduler; its words.
pub async fn wait_unschedulable(cluster: &TestCluster, pod: &str) -> String {
    let told = || async {
        let conditions = cluster.api::<Pod>().get(pod).await.ok()?.status?.conditions?;
        conditions.into_iter().find(|one| one.type_ == "PodScheduled" && one.status == "False")?.message
    };
    wait_until(&format!("the scheduler to find no place for {pod}"), PATIENCE, told).await
}

/// Waits for an event of the pod that begins so.
pub async fn wait_event(cluster: &TestCluster, pod: &str, start: &str) -> String {
    let told = || async { cluster.events(pod).await.into_iter().find(|event| event.starts_with(start)) };
    wait_until(&format!("an event {start} of {pod}"), SOON, told).await
}
