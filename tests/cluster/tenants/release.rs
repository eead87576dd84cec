//! Claims that are taken away under a running pod: no second tenant gets the device.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::tenant;
use crate::manifests::{as_nobody, claim, gpu, of_gpu, on, parameters, pod, share, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SOON, TestCluster, container_id, container_run, minor_of, sum};

const NODE: &str = "node-a";
const TAINT: &str = "gpu.nvidia.com/withheld";

/// A tenant's pod with a whole GPU.
struct Holder {
    client: Client,
    pod: Pod,
    device: String,
    uuid: String,
}

impl Holder {
    async fn on(cluster: &TestCluster) -> Self {
        let client = tenant(cluster).await;
        cluster.create(claim("mine", json!({"requests": [gpu("gpu")]}))).await;
        cluster.create(on(NODE, user_of("mine", "holder"))).await;
        let pod = cluster.wait_ready("holder").await;
        let device = cluster.devices_of("mine").await.remove(0);
        let published = one(cluster, &device).await;
        let uuid = published.attributes.as_ref().and_then(|all| all.get("uuid")?.string.clone());
        Self { client, pod, device, uuid: uuid.expect("a GPU has a UUID") }
    }

    /// With nothing but the rights of a tenant: the claim is no more, the pod runs on.
    async fn take_the_claim_away(&self, cluster: &TestCluster) {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &cluster.namespace);
        let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        claims.patch("mine", &PatchParams::default(), &none).await.expect("a tenant may patch his claim");
        claims.delete("mine", &DeleteParams::default()).await.expect("a tenant may delete his claim");
        let gone = || async { claims.get_opt("mine").await.ok()?.is_none().then_some(()) };
        wait_until("the claim to be gone", SOON, gone).await;
    }

    /// The same container runs, and has the GPU.
    async fn goes_on(&self, cluster: &TestCluster) {
        let now: Pod = cluster.api().get("holder").await.expect("the holder is there");
        assert_eq!(container_run(&now), container_run(&self.pod), "the holder was disturbed");
        assert_eq!(cluster.inside("holder", "main").gpus, [minor_of(&self.device)]);
    }

    async fn is_withheld(&self, cluster: &TestCluster) {
        let told =
            || async { withheld(cluster).await.into_iter().find(|words| words.contains(&self.pod_uid())) };
        let words = wait_until("the device to be withheld", PATIENCE, told).await;
        println!("withheld: {words}");
        let tainted = || async {
            let taints = one(cluster, &self.device).await.taints.unwrap_or_default();
            taints.iter().any(|taint| taint.key == TAINT && taint.effect == "NoSchedule").then_some(())
        };
        wait_until("the device to bear the taint", SOON, tainted).await;
        let counted =
            || async { (sum(&cluster.metrics(NODE).await, "tranche_withheld_claims") == 1.0).then_some(()) };
        wait_until("the metric to count it", SOON, counted).await;
    }

    /// A request for the same GPU, whatever keeps pods off it.
    fn same_gpu(&self) -> Value {
        let mut request = of_gpu(&self.uuid, gpu("gpu"));
        request["exactly"]["tolerations"] =
            json!([{"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}]);
        request
    }

    fn pod_uid(&self) -> String {
        self.pod.metadata.uid.clone().expect("a pod has a UID")
    }

    /// The tenant ends the pod, and the one who waits has the GPU.
    async fn ends_for(&self, cluster: &TestCluster, next: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &cluster.namespace);
        pods.delete("holder", &DeleteParams::default()).await.expect("a tenant may delete his pod");
        cluster.wait_ready(next).await;
        assert_eq!(cluster.inside(next, "main").gpus, [minor_of(&self.device)]);
        let free = || async { withheld(cluster).await.is_empty().then_some(()) };
        wait_until("nothing to be withheld", SOON, free).await;
        let clean =
            || async { one(cluster, &self.device).await.taints.unwrap_or_default().is_empty().then_some(()) };
        wait_until("the taint to be gone", SOON, clean).await;
    }
}

async fn one(cluster: &TestCluster, device: &str) -> Device {
    let found = || async { cluster.published(NODE).await.into_iter().find(|one| one.name == device) };
    wait_until(&format!("{device} to be published"), SOON, found).await
}

/// What the plugin says of each claim whose device is held.
async fn withheld(cluster: &TestCluster) -> Vec<String> {
    let state: Value = cluster.state(NODE).await;
    let claims = state["claims"].as_array().cloned().unwrap_or_default();
    claims.iter().filter_map(|one| one["withheld"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_taken_away_under_its_pod_gives_its_gpu_to_nobody_until_the_pod_has_ended() {
    let cluster = TestCluster::of_env(
        "a_claim_taken_away_under_its_pod_gives_its_gpu_to_nobody_until_the_pod_has_ended",
    )
    .await;
    let holder = Holder::on(&cluster).await;
    holder.take_the_claim_away(&cluster).await;
    // By the API server's word the GPU is free: the scheduler gives it to the next at once.
    cluster.create(claim("theirs", json!({"requests": [holder.same_gpu()]}))).await;
    cluster.create(on(NODE, user_of("theirs", "next"))).await;
    cluster.wait_refused("next", &[&holder.device, "mine"]).await;
    holder.is_withheld(&cluster).await;
    let told =
        || async { cluster.events("holder").await.into_iter().find(|one| one.starts_with("DeviceWithheld")) };
    let event = wait_until("an event of the holder", SOON, told).await;
    assert!(event.contains(&holder.uuid) && event.contains(&holder.pod_uid()), "{event}");
    cluster.wait_refused("next", &["not free yet", &holder.pod_uid()]).await;
    holder.goes_on(&cluster).await;
    holder.ends_for(&cluster, "next").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_made_anew_under_its_name_waits_for_the_old_ones_pod_also_with_a_new_plugin() {
    let cluster = TestCluster::of_env(
        "a_claim_made_anew_under_its_name_waits_for_the_old_ones_pod_also_with_a_new_plugin",
    )
    .await;
    let holder = Holder::on(&cluster).await;
    holder.take_the_claim_away(&cluster).await;
    cluster.create(claim("mine", json!({"requests": [holder.same_gpu()]}))).await;
    cluster.create(on(NODE, user_of("mine", "next"))).await;
    let plugin = cluster.plugin(NODE).await;
    cluster.kill9(NODE, &plugin);
    let restarted = || async {
        let now = cluster.plugins(NODE).await.into_iter().next()?;
        (container_id(&now) != container_id(&plugin)).then_some(())
    };
    wait_until("the plugin to be restarted", PATIENCE, restarted).await;
    cluster.registered(NODE, PATIENCE).await;
    holder.is_withheld(&cluster).await;
    // Kubelet itself refuses a claim whose name an older one has that it has prepared.
    cluster.wait_refused("next", &["mine"]).await;
    holder.goes_on(&cluster).await;
    holder.ends_for(&cluster, "next").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_without_a_claim_that_uses_a_whole_gpu_is_ended_and_its_holder_is_not() {
    let cluster =
        TestCluster::of_env("a_pod_without_a_claim_that_uses_a_whole_gpu_is_ended_and_its_holder_is_not")
            .await;
    let holder = Holder::on(&cluster).await;
    let mut alone = crate::manifests::container("main", json!([]));
    alone["resources"] = json!({});
    cluster.create(on(NODE, pod("stranger", json!([]), json!([alone])))).await;
    let stranger = cluster.wait_ready("stranger").await;
    let minor = minor_of(&holder.device).to_string();
    let pids = [&holder.pod, &stranger].map(|pod| cluster.pid_of(NODE, pod).to_string());
    for pid in &pids {
        cluster.fake(NODE, &["process", "add", &minor, pid, "500", "--kind", "compute", "--only-if-alive"]);
    }
    let ended = || async {
        let now: Pod = cluster.api().get("stranger").await.ok()?;
        let status = now.status?.container_statuses?.into_iter().next()?;
        let code = status.last_state?.terminated?.exit_code;
        (status.restart_count > container_run(&stranger).1 && code == 137).then_some(())
    };
    wait_until("the stranger to be ended", PATIENCE, ended).await;
    holder.goes_on(&cluster).await;
    for pid in &pids {
        let _ = cluster.try_fake(NODE, &["process", "remove", &minor, pid]);
    }
    cluster.end().await;
}

/// Shares of both placers: what it holds the API server counts as free.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_share_taken_away_under_its_pod_keeps_new_pods_off_its_gpu_and_its_neighbour_goes_on() {
    let cluster = TestCluster::of_env(
        "a_share_taken_away_under_its_pod_keeps_new_pods_off_its_gpu_and_its_neighbour_goes_on",
    )
    .await;
    let tenant = tenant(&cluster).await;
    let by_scheduler = |memory: &str| json!({"requests": [share(memory, 0)]});
    let by_controller = |memory: &str| {
        let mut request = gpu("gpu");
        request["exactly"]["deviceClassName"] = json!("shared.gpu.nvidia.com");
        let config = parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": memory}));
        json!({"requests": [request], "config": config})
    };
    withheld_share(&cluster, &tenant, "s", &by_scheduler).await;
    withheld_share(&cluster, &tenant, "c", &by_controller).await;
    cluster.end().await;
}

async fn withheld_share(
    cluster: &TestCluster,
    tenant: &Client,
    prefix: &str,
    asking: &dyn Fn(&str) -> Value,
) {
    let name = |what: &str| format!("{prefix}-{what}");
    let [mine, near, theirs, elsewhere] = ["mine", "near", "theirs", "elsewhere"].map(name);
    cluster.create(claim(&mine, asking("60Gi"))).await;
    cluster.create(on(NODE, as_nobody(user_of(&mine, &mine)))).await;
    let pod = cluster.wait_ready(&mine).await;
    let device = cluster.devices_of(&mine).await.remove(0);
    let attributes = one(cluster, &device).await.attributes.unwrap_or_default();
    let uuid = attributes.get("uuid").and_then(|uuid| uuid.string.clone()).expect("a GPU has a UUID");
    let there = |memory: &str| {
        let mut devices = asking(memory);
        devices["requests"][0] = of_gpu(&uuid, devices["requests"][0].clone());
        devices
    };
    cluster.create(claim(&near, there("10Gi"))).await;
    cluster.create(on(NODE, as_nobody(user_of(&near, &near)))).await;
    let neighbour = cluster.wait_ready(&near).await;

    let claims: Api<ResourceClaim> = Api::namespaced(tenant.clone(), &cluster.namespace);
    let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch(&mine, &PatchParams::default(), &none).await.expect("a tenant may patch his claim");
    claims.delete(&mine, &DeleteParams::default()).await.expect("a tenant may delete his claim");
    let uid = pod.metadata.uid.clone().expect("a pod has a UID");
    let told = || async { withheld(cluster).await.into_iter().find(|words| words.contains(&uid)) };
    wait_until("the share to be withheld", PATIENCE, told).await;
    let tainted = || async {
        let taints = one(cluster, &device).await.taints.unwrap_or_default();
        taints.iter().any(|taint| taint.key == TAINT && taint.effect == "NoSchedule").then_some(())
    };
    wait_until("the GPU to bear the taint", SOON, tainted).await;
    let event = || async {
        cluster
            .events(&mine)
            .await
            .into_iter()
            .find(|one| one.starts_with("DeviceWithheld") && one.contains(&uuid))
    };
    wait_until("an event of the holder", SOON, event).await;

    // By the API server's word there is room for it there. One that asks later and does not mind where is served.
    cluster.create(claim(&theirs, there("60Gi"))).await;
    cluster.create(on(NODE, as_nobody(user_of(&theirs, &theirs)))).await;
    cluster.create(claim(&elsewhere, asking("60Gi"))).await;
    cluster.create(on(NODE, as_nobody(user_of(&elsewhere, &elsewhere)))).await;
    cluster.wait_ready(&elsewhere).await;
    assert_ne!(cluster.devices_of(&elsewhere).await.remove(0), device);
    assert!(cluster.devices_of(&theirs).await.is_empty(), "it was given room that is taken");
    for (pod, before) in [(&mine, &pod), (&near, &neighbour)] {
        let now: Pod = cluster.api().get(pod).await.expect("the pod is there");
        assert_eq!(container_run(&now), container_run(before), "{pod} was disturbed");
        assert_eq!(cluster.inside(pod, "main").gpus, [minor_of(&device)]);
    }

    let pods: Api<Pod> = Api::namespaced(tenant.clone(), &cluster.namespace);
    pods.delete(&mine, &DeleteParams::default()).await.expect("a tenant may delete his pod");
    cluster.wait_ready(&theirs).await;
    assert_eq!(cluster.devices_of(&theirs).await.remove(0), device);
    let clean = || async { one(cluster, &device).await.taints.unwrap_or_default().is_empty().then_some(()) };
    wait_until("the taint to be gone", SOON, clean).await;
    cluster.delete_all(&[near, theirs, elsewhere]).await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "resourceclaims", "--all", "--timeout=170s"]);
}

/// Where both pods of a tenant see it: a volume that they share.
const SHARED: &str = "/srv/tranche-test-handed";

/// Gives whoever calls the descriptor of a device. Simulated nodes have no driver, so that their place alone can be opened.
const GIVE: &str = r#"
sysopen(G, "/dev/nvidia$ARGV[0]", 0x200000) or die "open: $!";
socket(S, 1, 1, 0) && bind(S, pack("S Z108", 1, "/shared/door")) && listen(S, 1) or die "listen: $!";
accept(C, S) or die "accept: $!";
my $data = join("", "x");
my $iov = pack("P Q", $data, 1);
my $control = pack("Q l l l x4", 20, 1, 1, fileno(G));
my $message = pack("Q Q P Q P Q Q", 0, 0, $iov, 1, $control, 24, 0);
syscall(46, fileno(C), $message, 0) == 1 or die "sendmsg: $!";
sleep;
"#;

const TAKE: &str = r#"
socket(S, 1, 1, 0) && connect(S, pack("S Z108", 1, "/shared/door")) or die "connect: $!";
my ($data, $control) = map { "\0" x $_ } (1, 24);
my $iov = pack("P Q", $data, 1);
my $message = pack("Q Q P Q P Q Q", 0, 0, $iov, 1, $control, 24, 0);
syscall(47, fileno(S), $message, 0) == 1 or die "recvmsg: $!";
my $got = readlink("/proc/self/fd/" . unpack("x16 l", $control));
open(my $told, ">", "/shared/got"); print $told $got; close($told);
sleep;
"#;

fn with_shared(mut pod: Value) -> Value {
    pod["spec"]["volumes"] = json!([{"name": "shared", "hostPath": {"path": SHARED, "type": "Directory"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "shared", "mountPath": "/shared"}]);
    pod
}

/// The interpreter is the machine's, which every Debian has.
fn share_programs(cluster: &TestCluster) {
    cluster.rig.on_end(&["node-exec", NODE, "rm", "-rf", SHARED]);
    let library = "$(ldd /usr/bin/perl | grep -o '/[^ ]*libcrypt[^ ]*')";
    cluster.on_node(
        NODE,
        &format!("rm -rf {SHARED} && mkdir -p {SHARED} && cp -L /usr/bin/perl {library} {SHARED}/"),
    );
    for (name, script) in [("give", GIVE), ("take", TAKE)] {
        std::fs::write(cluster.host(NODE, &format!("{SHARED}/{name}")), script).expect("a file of the node");
    }
}

fn runs(cluster: &TestCluster, pod: &str, program: &str) {
    let words =
        format!("LD_LIBRARY_PATH=/shared setsid /shared/perl /shared/{program} >/shared/{pod}.log 2>&1 &");
    cluster.exec(pod, "main", &words);
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_handed_to_a_stranger_is_given_to_nobody_until_the_stranger_has_ended() {
    let cluster =
        TestCluster::of_env("a_gpu_handed_to_a_stranger_is_given_to_nobody_until_the_stranger_has_ended")
            .await;
    share_programs(&cluster);
    let client = tenant(&cluster).await;
    cluster.create(claim("mine", json!({"requests": [gpu("gpu")]}))).await;
    cluster.create(on(NODE, with_shared(user_of("mine", "holder")))).await;
    let mut alone = crate::manifests::container("main", json!([]));
    alone["resources"] = json!({});
    cluster.create(on(NODE, with_shared(pod("stranger", json!([]), json!([alone]))))).await;
    let pod = cluster.wait_ready("holder").await;
    let stranger = cluster.wait_ready("stranger").await.metadata.uid.expect("a pod has a UID");
    let device = cluster.devices_of("mine").await.remove(0);
    let published = one(&cluster, &device).await;
    let uuid = published.attributes.as_ref().and_then(|all| all.get("uuid")?.string.clone());
    let holder = Holder { client, pod, device, uuid: uuid.expect("a GPU has a UUID") };

    let minor = minor_of(&holder.device);
    runs(&cluster, "holder", &format!("give {minor}"));
    let door = cluster.host(NODE, &format!("{SHARED}/door"));
    wait_until("the holder to listen", SOON, || async { door.exists().then_some(()) }).await;
    runs(&cluster, "stranger", "take");
    let got = cluster.host(NODE, &format!("{SHARED}/got"));
    let handed = || async { std::fs::read_to_string(&got).ok().filter(|place| !place.is_empty()) };
    assert_eq!(wait_until("the stranger to have it", SOON, handed).await, format!("/dev/nvidia{minor}"));

    let pods: Api<Pod> = Api::namespaced(holder.client.clone(), &cluster.namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(holder.client.clone(), &cluster.namespace);
    pods.delete("holder", &DeleteParams::default()).await.expect("a tenant may delete his pod");
    cluster.gone("holder").await;
    claims.delete("mine", &DeleteParams::default()).await.expect("a tenant may delete his claim");
    cluster.create(claim("theirs", json!({"requests": [holder.same_gpu()]}))).await;
    cluster.create(on(NODE, user_of("theirs", "next"))).await;
    let words = ["not free yet", "mine", &stranger, "has it open without a claim on it"];
    let refused = cluster.wait_refused("next", &words).await;
    println!("refused: {refused}");
    let tainted = || async {
        let taints = one(&cluster, &holder.device).await.taints.unwrap_or_default();
        taints.iter().any(|taint| taint.key == TAINT).then_some(())
    };
    wait_until("the device to bear the taint", SOON, tainted).await;
    let event =
        || async { cluster.events("mine").await.into_iter().find(|one| one.starts_with("DeviceWithheld")) };
    let event = wait_until("an event of the claim", SOON, event).await;
    assert!(event.contains(&holder.uuid) && event.contains(&stranger), "{event}");

    pods.delete("stranger", &DeleteParams::default()).await.expect("a tenant may delete his pod");
    cluster.wait_ready("next").await;
    assert_eq!(cluster.inside("next", "main").gpus, [minor]);
    let free = || async { withheld(&cluster).await.is_empty().then_some(()) };
    wait_until("nothing to be withheld", SOON, free).await;
    cluster.end().await;
}
