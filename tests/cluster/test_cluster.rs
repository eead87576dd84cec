//! A rig with the driver at work, and a namespace of the test's own: what a user does and sees.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, DynamicObject, ListParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use crate::rig::{Rig, SLOWER, wait_until};

/// The driver's own namespace.
pub const SYSTEM: &str = "tranche-system";
/// A pod is up within this, also when it waits for others to end.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Many that come or go together are all there, or gone, within this: as long as each [`PATIENCE`] sees one more.
const MANY: Duration = Duration::from_secs(300);
/// What takes a moment is over by then.
pub const SOON: Duration = Duration::from_secs(20);
const STATE: &str = "/var/lib/kubelet/plugins/gpu.nvidia.com";

/// A rig with the driver at work, and a namespace of one test.
pub struct TestCluster {
    pub rig: Rig,
    pub client: Client,
    pub namespace: String,
    pub nodes: Vec<String>,
    dir: PathBuf,
    test: String,
    begin: Instant,
}

/// What a container finds.
#[derive(Debug, PartialEq, Eq)]
pub struct Inside {
    /// NVIDIA_VISIBLE_DEVICES, or "unset".
    pub visible: String,
    /// N of every /dev/nvidiaN.
    pub gpus: Vec<u32>,
    /// N of every /dev/nvidia-caps/nvidia-capN.
    pub caps: Vec<u32>,
    /// The loader finds libcuda.so.1.
    pub cuda: bool,
}

impl Inside {
    /// Nothing of any GPU.
    pub fn is_without_gpu(&self) -> bool {
        self.gpus.is_empty() && self.caps.is_empty() && !self.cuda
    }
}

impl TestCluster {
    /// The rig that TRANCHE_RIG names, with the driver staged on it.
    pub async fn of_env(test: &str) -> Self {
        Self::with_labels(test, json!({})).await
    }

    /// The same with labels on the test's namespace.
    pub async fn with_labels(test: &str, labels: Value) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let rig = Rig::staged(test);
        let begin = Instant::now();
        let client = rig.client().await;
        let namespace = format!("e2e-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let object = json!({"metadata": {"name": namespace, "labels": labels}});
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &from(object)).await.expect("a namespace can be made");
        rig.on_end(&["kubectl", "delete", "namespace", &namespace, "--wait=false", "--ignore-not-found"]);
        let real = ListParams::default().labels("!rig/hollow");
        let nodes = Api::<Node>::all(client.clone()).list(&real).await.expect("nodes");
        let nodes = nodes.items.into_iter().filter_map(|node| node.metadata.name).collect();
        let dir = PathBuf::from(rig.run(&["dir"]).trim());
        let cluster = Self { rig, client, namespace, nodes, dir, test: test.to_owned(), begin };
        // Pods need it, and a cluster whose API server was just restarted makes it late.
        let account = || async { cluster.api::<ServiceAccount>().get_opt("default").await.ok()?.map(|_| ()) };
        wait_until("the namespace's service account", PATIENCE, account).await;
        // What the test before left has ended, also if it failed.
        cluster.wait_clean().await;
        wait_until("all controllers to answer", PATIENCE, || cluster.controllers_answer()).await;
        for node in &cluster.nodes {
            cluster.registered(node, PATIENCE).await;
            wait_until(&format!("{node}'s only plugin to have published"), PATIENCE, || {
                cluster.only_plugin_has_published(node)
            })
            .await;
        }
        cluster
    }

    /// Minor version of Kubernetes.
    pub async fn release(&self) -> u32 {
        let version = self.client.apiserver_version().await.expect("the API server tells its version");
        version.minor.trim_end_matches('+').parse().expect("the minor version is a number")
    }

    /// Removes what the test made, and ends it if the driver keeps anything of it.
    pub async fn end(self) {
        let kinds = "deployments,pods,resourceclaims,resourceclaimtemplates";
        self.rig.kubectl(&["-n", &self.namespace, "delete", kinds, "--all", "--timeout=170s"]);
        self.wait_clean().await;
        self.replace_restarted().await;
        println!("{}: {:.1} s", self.test, self.begin.elapsed().as_secs_f64());
    }

    /// Deletes the driver's pods whose containers were restarted, and waits for those that come after them: kubelet
    /// waits longer before each start of a container, up to minutes, and the next test would have to wait with it.
    async fn replace_restarted(&self) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let ours = ListParams::default().labels("app.kubernetes.io/name=tranche");
        let all = pods.list(&ours).await.expect("the driver's pods can be listed").items;
        let old: Vec<Pod> = all.into_iter().filter(has_restarted).collect();
        for pod in &old {
            let name = pod.metadata.name.as_deref().expect("a pod has a name");
            self.rig.kubectl(&["-n", SYSTEM, "delete", "pod", name, "--ignore-not-found", "--timeout=170s"]);
        }
        for pod in &old {
            let component =
                pod.metadata.labels.as_ref().and_then(|all| all.get("app.kubernetes.io/component"));
            if let Some(component @ ("node" | "mps")) = component.map(String::as_str) {
                self.pod_of(component, &node_of(pod)).await;
            }
        }
    }

    /// Waits until no node has a record, container edits, a temporary file or a board for MPS alone left.
    pub async fn wait_clean(&self) {
        let left = || self.nodes.iter().flat_map(|node| self.left_on(node)).collect::<Vec<_>>();
        let end = Instant::now() + PATIENCE * SLOWER;
        while !left().is_empty() {
            assert!(Instant::now() < end, "left on the nodes for {:?}: {:?}", PATIENCE * SLOWER, left());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn left_on(&self, node: &str) -> Vec<String> {
        let mut left = self.files(node, &format!("{STATE}/ledger"));
        left.extend(self.files(node, "/var/run/cdi"));
        left.extend(
            self.exclusive_boards(node).into_iter().map(|board| format!("board {board} is exclusive")),
        );
        left.into_iter().map(|file| format!("{node}: {file}")).collect()
    }

    // What a user does.

    pub fn api<T>(&self) -> Api<T>
    where
        T: Resource<Scope = NamespaceResourceScope>,
        T::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates an object of any kind in the test's namespace.
    pub async fn create(&self, object: Value) {
        self.try_create(object, false).await.unwrap_or_else(|said| panic!("{said}"));
    }

    /// The same, or only as if: `dry`. In the API server's words if it refuses.
    pub async fn try_create(&self, object: Value, dry: bool) -> Result<(), String> {
        let object: DynamicObject = from(object);
        let types = object.types.clone().expect("the object says its kind");
        let kind = GroupVersionKind::try_from(&types).expect("apiVersion and kind are whole");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::from_gvk(&kind));
        let name = object.metadata.name.clone().unwrap_or_default();
        let params = PostParams { dry_run: dry, ..PostParams::default() };
        let created = api.create(&params, &object).await;
        created.map(|_| ()).map_err(|error| format!("{} {name} cannot be created: {error}", kind.kind))
    }

    /// Creates a claim that is already given a device.
    pub async fn create_allocated(&self, name: &str, node: &str, device: &str) {
        let (request, status) = (crate::manifests::gpu("gpu"), crate::manifests::allocation(node, device));
        self.create_with_status(name, request, status).await;
    }

    /// Creates a claim with one request and gives it a status by hand.
    pub async fn create_with_status(&self, name: &str, request: Value, status: Value) {
        self.create_of(name, json!({"requests": [request]}), status).await;
    }

    /// The same of any `spec.devices`.
    pub async fn create_of(&self, name: &str, devices: Value, status: Value) {
        let mut object = crate::manifests::claim(name, devices);
        object["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
        self.create(object).await;
        let claims: Api<ResourceClaim> = self.api();
        let mut claim = claims.get(name).await.expect("the claim was created");
        claim.status = from(status);
        claims
            .replace_status(name, &PostParams::default(), &claim)
            .await
            .expect("an administrator may allocate");
    }

    /// Waits until the pod is Ready; on failure tells what became of it.
    pub async fn wait_ready(&self, pod: &str) -> Pod {
        let pods: Api<Pod> = self.api();
        let end = Instant::now() + PATIENCE * SLOWER;
        loop {
            let now = pods.get_opt(pod).await.ok().flatten();
            if let Some(now) = now.filter(is_ready) {
                return now;
            }
            if Instant::now() >= end {
                let said = self.rig.kubectl(&["-n", &self.namespace, "describe", "pod", pod]);
                panic!("pod {pod} is not Ready after {:?}:\n{said}", PATIENCE * SLOWER);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until all of these pods are Ready. On failure names those that are not, and tells what became of the
    /// first of them.
    pub async fn wait_all_ready(&self, names: &[String]) {
        let short = |pods: &[Pod]| {
            let ready = |name: &String| {
                pods.iter().any(|pod| pod.metadata.name.as_ref() == Some(name) && is_ready(pod))
            };
            names.iter().filter(|name| !ready(name)).cloned().collect()
        };
        self.wait_none_left("not Ready", short).await;
    }

    /// Deletes all of these pods and waits until they are gone.
    pub async fn delete_all(&self, names: &[String]) {
        let pods: Api<Pod> = self.api();
        for name in names {
            pods.delete(name, &DeleteParams::default()).await.expect("the pod can be deleted");
        }
        let left = |pods: &[Pod]| {
            let there = |name: &String| pods.iter().any(|pod| pod.metadata.name.as_ref() == Some(name));
            names.iter().filter(|name| there(name)).cloned().collect()
        };
        self.wait_none_left("still there", left).await;
    }

    /// Looks at the test's pods until `left` finds no name among them. However busy the machine is, one name fewer
    /// within [`PATIENCE`] is asked for: what takes long is told from what stands still.
    async fn wait_none_left(&self, what: &str, left: impl Fn(&[Pod]) -> Vec<String>) {
        let pods: Api<Pod> = self.api();
        let begin = Instant::now();
        let (mut fewest, mut since) = (usize::MAX, begin);
        loop {
            if let Ok(now) = pods.list(&ListParams::default()).await {
                let left = left(&now.items);
                let Some(first) = left.first() else { return };
                if left.len() < fewest {
                    (fewest, since) = (left.len(), Instant::now());
                }
                if since.elapsed() > PATIENCE * SLOWER || begin.elapsed() > MANY * SLOWER {
                    let said = self.rig.kubectl(&["-n", &self.namespace, "describe", "pod", first]);
                    panic!(
                        "{what} after {:?}, the last change {:?} ago: {}\n{said}",
                        begin.elapsed(),
                        since.elapsed(),
                        left.join(" ")
                    );
                }
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Deletes the pod and waits until it is gone.
    pub async fn delete(&self, pod: &str) {
        let pods: Api<Pod> = self.api();
        pods.delete(pod, &DeleteParams::default()).await.expect("the pod can be deleted");
        self.gone(pod).await;
    }

    pub async fn gone(&self, pod: &str) {
        let pods: Api<Pod> = self.api();
        let gone = || async { pods.get_opt(pod).await.ok()?.is_none().then_some(()) };
        wait_until(&format!("pod {pod} to be gone"), PATIENCE, gone).await;
    }

    // What a user sees.

    /// The names of the devices that were given to the claim, in order.
    pub async fn devices_of(&self, claim: &str) -> Vec<String> {
        let claim = self.api::<ResourceClaim>().get(claim).await.expect("the claim is there");
        devices_of(&claim)
    }

    /// The claim that the pod was given by its template.
    pub async fn claim_of(&self, pod: &str) -> ResourceClaim {
        let pod = self.api::<Pod>().get(pod).await.expect("the pod is there");
        let statuses = pod.status.and_then(|status| status.resource_claim_statuses).unwrap_or_default();
        let name = statuses.into_iter().find_map(|status| status.resource_claim_name);
        let name = name.expect("the pod's status names its claim");
        self.api::<ResourceClaim>().get(&name).await.expect("the claim is there")
    }

    pub fn exec(&self, pod: &str, container: &str, script: &str) -> String {
        self.rig.kubectl(&["-n", &self.namespace, "exec", pod, "-c", container, "--", "sh", "-c", script])
    }

    /// What a container finds of GPUs. Ends the test if a device node is not what its name says.
    pub fn inside(&self, pod: &str, container: &str) -> Inside {
        const LOOK: &str = r#"
            echo "visible ${NVIDIA_VISIBLE_DEVICES-unset}"
            for f in /dev/nvidia[0-9]* /dev/nvidia-caps/nvidia-cap[0-9]*; do
                [ ! -c "$f" ] || echo "node $f $((0x$(stat -c %T "$f")))"
            done
            /lib64/ld-linux-x86-64.so.2 --preload libcuda.so.1 --list /lib/x86_64-linux-gnu/libm.so.6 2>/dev/null |
                grep -q 'libcuda.so.1 => /' && echo cuda
            true"#;
        let said = self.exec(pod, container, LOOK);
        let mut inside = Inside { visible: String::new(), gpus: Vec::new(), caps: Vec::new(), cuda: false };
        for line in said.lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["visible", what] => what.clone_into(&mut inside.visible),
                ["node", path, minor] => {
                    let number = path.trim_start_matches(|c: char| !c.is_ascii_digit());
                    assert_eq!(number, minor, "{pod}/{container}: {path} is another device's node");
                    let list = if path.contains("-cap") { &mut inside.caps } else { &mut inside.gpus };
                    list.push(minor.parse().expect("a minor is a number"));
                }
                ["cuda"] => inside.cuda = true,
                _ => panic!("{pod}/{container} says {line:?}"),
            }
        }
        inside.gpus.sort_unstable();
        inside.caps.sort_unstable();
        inside
    }

    /// What events say about the pod: `Reason: message`.
    pub async fn events(&self, pod: &str) -> Vec<String> {
        let about = ListParams::default().fields(&format!("involvedObject.name={pod}"));
        let events = self.api::<Event>().list(&about).await.expect("events can be listed").items;
        let words = |event: Event| {
            format!("{}: {}", event.reason.unwrap_or_default(), event.message.unwrap_or_default())
        };
        events.into_iter().map(words).collect()
    }

    /// Waits until an event says that the pod's claims cannot be prepared, in all these words.
    pub async fn wait_refused(&self, pod: &str, words: &[&str]) -> String {
        let end = Instant::now() + PATIENCE * SLOWER;
        loop {
            let said = self.events(pod).await;
            let prepare = |event: &&String| event.starts_with("FailedPrepareDynamicResources");
            let all = |event: &&String| words.iter().all(|word| event.contains(word));
            if let Some(event) = said.iter().filter(prepare).find(all) {
                return event.clone();
            }
            assert!(Instant::now() < end, "no event of {pod} says {words:?}, but: {said:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    // What an administrator sees.

    /// All slices of the driver on this node.
    pub async fn slices(&self, node: &str) -> Vec<ResourceSlice> {
        let of_node =
            ListParams::default().fields(&format!("spec.nodeName={node},spec.driver=gpu.nvidia.com"));
        Api::<ResourceSlice>::all(self.client.clone()).list(&of_node).await.expect("slices").items
    }

    /// What changes whenever a slice of any node is written.
    pub async fn versions(&self) -> Vec<Option<String>> {
        let mut versions = Vec::new();
        for node in &self.nodes {
            versions.extend(self.slices(node).await.into_iter().map(|slice| slice.metadata.resource_version));
        }
        versions
    }

    /// Their devices, by name.
    pub async fn published(&self, node: &str) -> Vec<Device> {
        let slices = self.slices(node).await;
        let mut devices: Vec<_> =
            slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect();
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        devices
    }

    /// An attribute of one of them, as text: a string or a version.
    pub async fn attribute(&self, node: &str, device: &str, name: &str) -> String {
        let device = self.published(node).await.into_iter().find(|one| one.name == device);
        let value = device.and_then(|one| one.attributes?.remove(name));
        value
            .and_then(|value| value.string.or(value.version))
            .unwrap_or_else(|| panic!("no {name} on {node}"))
    }

    /// Those of them that can be given in shares.
    pub async fn shareable(&self, node: &str) -> Vec<Device> {
        let mut devices = self.published(node).await;
        let is = |device: &Device| {
            device.attributes.as_ref().is_some_and(|all| all.contains_key("grantableMemoryMiB"))
        };
        devices.retain(is);
        devices
    }

    pub async fn published_names(&self, node: &str) -> BTreeSet<String> {
        self.published(node).await.into_iter().map(|device| device.name).collect()
    }

    /// The plugin's pods on this node, newest first.
    pub async fn plugins(&self, node: &str) -> Vec<Pod> {
        self.pods_of("node", node).await
    }

    /// The driver's pods of a component, `node` or `mps`, on this node, newest first.
    pub async fn pods_of(&self, component: &str, node: &str) -> Vec<Pod> {
        let list = ListParams::default()
            .labels(&format!("app.kubernetes.io/component={component}"))
            .fields(&format!("spec.nodeName={node}"));
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let mut pods = pods.list(&list).await.expect("the driver's pods can be listed").items;
        pods.sort_by_key(|pod| std::cmp::Reverse(pod.metadata.creation_timestamp.clone()));
        pods
    }

    /// As many controllers as the Deployment wants, where there is one, are ready, and each answers: kubelet calls a
    /// container ready for a while after its process ended.
    async fn controllers_answer(&self) -> Option<()> {
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), SYSTEM);
        let deployment = deployments.get_opt("tranche-controller").await.ok()?;
        let wanted = deployment.and_then(|found| found.spec.replicas).unwrap_or(0);
        let list = ListParams::default().labels("app.kubernetes.io/component=controller");
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let mut pods = pods.list(&list).await.ok()?.items;
        pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        let answers = |pod: &Pod| is_ready(pod) && ask(pod, "/healthz").is_some();
        // An old leader that is ending keeps the lease for some seconds.
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), SYSTEM);
        let holder =
            leases.get_opt("tranche-controller").await.ok()?.and_then(|lease| lease.spec?.holder_identity);
        let leader = holder.as_deref().and_then(|holder| holder.rsplit_once('_')).map(|(pod, _)| pod);
        let leads = wanted == 0 || pods.iter().any(|pod| pod.metadata.name.as_deref() == leader);
        (leads && i32::try_from(pods.len()) == Ok(wanted) && pods.iter().all(answers)).then_some(())
    }

    /// A plugin is ready before it has written its slices, and the one before it may be ending still.
    async fn only_plugin_has_published(&self, node: &str) -> Option<()> {
        let plugins = self.plugins(node).await;
        let [plugin] = &plugins[..] else { return None };
        let told = is_ready(plugin) && self.state(node).await["slices"]["phase"] == "Published";
        (told && !self.published(node).await.is_empty()).then_some(())
    }

    /// The plugin's pod on this node that is ready and not on its way out.
    pub async fn plugin(&self, node: &str) -> Pod {
        self.pod_of("node", node).await
    }

    /// The driver's pod of a component that is ready and not on its way out.
    pub async fn pod_of(&self, component: &str, node: &str) -> Pod {
        let ready = || async {
            let pods = self.pods_of(component, node).await;
            pods.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_none() && is_ready(pod))
        };
        wait_until(&format!("{component} to be ready on {node}"), PATIENCE, ready).await
    }

    /// Waits until the node's newest plugin says that kubelet knows it; how long that took.
    pub async fn registered(&self, node: &str, limit: Duration) -> Duration {
        let begin = Instant::now();
        let ready = || async { ask(self.plugins(node).await.first()?, "/readyz") };
        wait_until(&format!("the plugin on {node} to be registered"), limit, ready).await;
        begin.elapsed()
    }

    /// What the plugin on the node tells of itself.
    pub async fn state(&self, node: &str) -> Value {
        self.told_privately("node", node).await
    }

    /// How often the plugin on the node has written slices. Its metric says the same a moment later.
    pub async fn slice_writes(&self, node: &str) -> f64 {
        self.state(node).await["slices"]["writes"].as_f64().expect("the state tells the writes")
    }

    /// What `tranche mps` on the node tells of itself.
    pub async fn mps_state(&self, node: &str) -> Value {
        self.told_privately("mps", node).await
    }

    pub async fn metrics(&self, node: &str) -> String {
        self.told("node", node, "/metrics", Some).await
    }

    /// What the driver's component answers; asks again where it has no time at the moment.
    async fn told<T>(
        &self,
        component: &str,
        node: &str,
        path: &str,
        read: impl Fn(String) -> Option<T>,
    ) -> T {
        let told = || async { read(ask(&self.pod_of(component, node).await, path)?) };
        wait_until(&format!("{component} on {node} to answer {path}"), SOON, told).await
    }

    /// What the driver's component tells on its socket, which is in a volume of its pod.
    async fn told_privately(&self, component: &str, node: &str) -> Value {
        let told = || async {
            let pod = self.pod_of(component, node).await;
            let uid = pod.metadata.uid.as_ref()?;
            let volume = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/ops/private");
            let text = match fs::File::open(self.host(node, &volume)) {
                Ok(folder) => ask_socket(&folder)?,
                // A node with disks of its own.
                Err(_) => {
                    let name = pod.metadata.name.as_ref()?;
                    let exec = ["kubectl", "-n", SYSTEM, "exec", name, "--"];
                    self.rig.attempt(&[&exec[..], &["tranche", "inspect", "-o", "json"]].concat()).ok()?
                }
            };
            serde_json::from_str(&text).ok()
        };
        wait_until(&format!("{component} on {node} to tell its state"), SOON, told).await
    }

    // What an administrator, or fate, does.

    /// Where a node's folder or file lies outside.
    pub fn host(&self, node: &str, path: &str) -> PathBuf {
        let path = path.strip_prefix("/var/run/").map_or(path.to_owned(), |rest| format!("/run/{rest}"));
        self.dir.join(node).join(path.trim_start_matches('/'))
    }

    pub fn files(&self, node: &str, folder: &str) -> Vec<String> {
        names(&self.host(node, folder))
    }

    /// `fake-nvml ...` on a node.
    pub fn fake(&self, node: &str, words: &[&str]) {
        self.try_fake(node, words).unwrap_or_else(|said| panic!("fake-nvml {words:?}: {said}"));
    }

    pub fn try_fake(&self, node: &str, words: &[&str]) -> Result<(), String> {
        let tool = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("fake/release/fake-nvml");
        let dir = self.host(node, "/run/fake-nvml");
        let out = Command::new(&tool).arg("--dir").arg(dir).args(words).output();
        let out = out.map_err(|error| format!("{} cannot be run: {error}", tool.display()))?;
        out.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&out.stderr).into_owned())
    }

    /// What set-calls changed on a node's board.
    pub fn fake_state(&self, node: &str, board: &str) -> Value {
        let text = fs::read_to_string(self.host(node, "/run/fake-nvml/state.json")).unwrap_or_default();
        let state: Value = serde_json::from_str(&text).unwrap_or_default();
        state["gpus"][board].clone()
    }

    /// True if a set-call has switched the board's MIG mode on: not if the control file has it on, or has changed since.
    pub fn is_switched_on(&self, node: &str, board: &str) -> bool {
        let state = self.fake_state(node, board);
        let by_file = state["mig"]["over"].as_str().is_some_and(|over| over.contains("\"enabled\":true"));
        state["mig"]["value"]["enabled"] == true && !by_file
    }

    /// The boards that MPS has for itself, in NVML's EXCLUSIVE_PROCESS mode (3).
    pub fn exclusive_boards(&self, node: &str) -> Vec<String> {
        let text = fs::read_to_string(self.host(node, "/run/fake-nvml/state.json")).unwrap_or_default();
        let state: Value = serde_json::from_str(&text).unwrap_or_default();
        let boards = state["gpus"].as_object().cloned().unwrap_or_default();
        let exclusive = boards.into_iter().filter(|(_, board)| board["compute_mode"]["value"] == 3);
        exclusive.map(|(minor, _)| minor).collect()
    }

    /// Runs a script on a node, among its processes and mounts.
    pub fn on_node(&self, node: &str, script: &str) -> String {
        self.rig.run(&["node-exec", node, "sh", "-c", script])
    }

    /// The process of a pod's first container, as its node numbers it.
    pub fn pid_of(&self, node: &str, pod: &Pod) -> u32 {
        let id = container_id(pod);
        let id = id.strip_prefix("containerd://").expect("the runtime is containerd");
        let list = self.rig.run(&["ctr", node, "-n", "k8s.io", "tasks", "ls"]);
        let words = list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let pid =
            words.filter(|words| words.first() == Some(&id)).find_map(|words| words.get(1)?.parse().ok());
        pid.expect("the container has a task")
    }

    /// A boot takes every container, the CDI folder, what was set on boards, and the boot id; disks and the API server stay.
    pub fn boot(&self, node: &str) {
        self.rig.on_end(&["start", node, "kubelet"]);
        self.rig.run(&["stop", node, "kubelet"]);
        let list = self.rig.run(&["ctr", node, "-n", "k8s.io", "tasks", "ls", "-q"]);
        for id in list.lines() {
            // A container may end with its sandbox.
            let _ = self.rig.attempt(&["ctr", node, "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id]);
        }
        let cdi = self.host(node, "/var/run/cdi");
        for name in names(&cdi) {
            fs::remove_file(cdi.join(name)).expect("a CDI file can be removed");
        }
        self.fake(node, &["clear"]);
        // Absent: nothing was set.
        let _ = fs::remove_file(self.host(node, "/run/fake-nvml/state.json"));
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("the kernel makes identifiers");
        fs::write(self.host(node, "/run/fake-nvml/boot_id"), id).expect("the boot id can be written");
        self.rig.run(&["start", node, "kubelet"]);
    }

    /// Ends a container with SIGKILL.
    pub fn kill9(&self, node: &str, pod: &Pod) {
        let id = container_id(pod);
        let id = id.strip_prefix("containerd://").expect("the runtime is containerd");
        self.rig.run(&["ctr", node, "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id]);
    }
}

pub fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the test's own object is whole")
}

pub fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"))
}

fn has_restarted(pod: &Pod) -> bool {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    containers.map(|container| container.restart_count).sum::<i32>() > 0
}

/// The first container's id and how often it was restarted.
pub fn container_run(pod: &Pod) -> (String, i32) {
    let status = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let first = status.and_then(|all| all.first()).expect("the pod's container has a status");
    (first.container_id.clone().unwrap_or_default(), first.restart_count)
}

pub fn container_id(pod: &Pod) -> String {
    container_run(pod).0
}

pub fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).expect("the pod is on a node")
}

pub fn devices_of(claim: &ResourceClaim) -> Vec<String> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results.map(|all| all.iter().map(|one| one.device.clone()).collect()).unwrap_or_default()
}

/// `gpu-3` is the device node nvidia3.
pub fn minor_of(device: &str) -> u32 {
    let number = device.strip_prefix("gpu-").and_then(|rest| rest.split('-').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{device} names no board"))
}

/// The sum of all samples whose line starts so.
pub fn sum(metrics: &str, start: &str) -> f64 {
    let lines = metrics.lines().filter(|line| line.starts_with(start));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Prepares and unprepares that did not go well.
pub fn failed_operations(metrics: &str) -> f64 {
    let all = "tranche_claim_operation_duration_seconds_count{";
    let failed = metrics.lines().filter(|line| line.starts_with(all) && !line.contains("result=\"ok\""));
    failed.map(|line| sum(line, all)).sum()
}

/// One request to a pod's metrics port.
pub fn ask(pod: &Pod, path: &str) -> Option<String> {
    ask_at(pod, 8080, path)
}

pub fn ask_at(pod: &Pod, port: u16, path: &str) -> Option<String> {
    ask_within(Duration::from_secs(1), pod, port, path)
}

/// `limit`: to connect, and to answer.
pub fn ask_within(limit: Duration, pod: &Pod, port: u16, path: &str) -> Option<String> {
    let ip = pod.status.as_ref()?.pod_ip.as_ref()?;
    let address = format!("{ip}:{port}").parse().ok()?;
    // A pod that is on its way out may not answer any more.
    let stream = TcpStream::connect_timeout(&address, limit).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    answer(stream, path)
}

/// The state, by the socket in this folder, whose path may be longer than a socket's may be.
fn ask_socket(folder: &fs::File) -> Option<String> {
    let path = format!("/proc/self/fd/{}/ops.sock", folder.as_raw_fd());
    let stream = UnixStream::connect(path).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    answer(stream, "/state")
}

fn answer(mut stream: impl Read + Write, path: &str) -> Option<String> {
    write!(stream, "GET {path} HTTP/1.0\r\nhost: x\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}
