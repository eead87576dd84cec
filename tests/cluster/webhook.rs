//! The webhook and the real API server: deploy/webhook.yaml as it is, served by a process on this machine with
//! the rights of the controller's account. On a rig without the driver. `callers`: with an API server that shows a
//! certificate.

mod callers;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::manifests;
use crate::rig::{Rig, SLOWER, root, wait_until};
use crate::test_cluster::sum;

const SYSTEM: &str = "tranche-system";
/// With the label that KAI's annotations need.
const KAI: &str = "hook-kai";
/// Without it.
const OTHER: &str = "hook-other";
const LIMIT: Duration = Duration::from_secs(60);
/// Renewed twice as often as a busy machine may be late.
const LIFE: &str = "20s";

/// The process, and how to ask it.
struct Webhook {
    child: Child,
    port: u16,
    ops: SocketAddr,
}

impl Drop for Webhook {
    fn drop(&mut self) {
        // Ended already, perhaps.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rig with the configurations on it.
struct Stage {
    rig: Rig,
    /// The machine, as the API server reaches it.
    machine: String,
    files: tempfile::TempDir,
}

impl Stage {
    fn set(test: &str) -> Self {
        let rig = Rig::bare(test);
        let kubeconfig = fs::read_to_string(rig.run(&["kubeconfig"]).trim()).unwrap();
        let server =
            kubeconfig.split("https://").nth(1).expect("an address").split([':', '\n']).next().unwrap();
        let machine = format!("{}.1", server.rsplit_once('.').expect("an IPv4 address").0);
        let stage = Self { rig, machine, files: tempfile::tempdir().unwrap() };
        stage.install();
        stage
    }

    fn install(&self) {
        let rig = &self.rig;
        for namespace in [KAI, OTHER, SYSTEM] {
            rig.on_end(&["kubectl", "delete", "namespace", namespace, "--ignore-not-found", "--timeout=90s"]);
        }
        for file in ["deploy/namespace.yaml", "deploy/deviceclasses.yaml", "deploy/webhook.yaml"] {
            rig.on_end(&["kubectl", "delete", "-f", file, "--ignore-not-found", "--timeout=90s"]);
            rig.kubectl(&["apply", "-f", file]);
        }
        rig.kubectl(&["-n", SYSTEM, "create", "serviceaccount", "tranche-controller"]);
        rig.kubectl(&["create", "namespace", KAI]);
        rig.kubectl(&["create", "namespace", OTHER]);
        rig.kubectl(&["label", "namespace", KAI, "tranche.dev/kai-annotations=enabled"]);
        // The controller's pods are on this machine here.
        let without = r#"[{"op": "remove", "path": "/spec/selector"}]"#;
        rig.kubectl(&["-n", SYSTEM, "patch", "service", "tranche-webhook", "--type=json", "-p", without]);
    }

    /// Sends those who ask for the Service to this port of this machine.
    fn lead_to(&self, port: u16) {
        let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints",
            "metadata": {"name": "tranche-webhook", "namespace": SYSTEM}, "subsets": [{
                "addresses": [{"ip": self.machine}], "ports": [{"name": "webhook", "port": port}]}]});
        self.rig.kubectl(&["apply", "-f", &self.file("endpoints", &endpoints)]);
    }

    fn file(&self, name: &str, object: &Value) -> String {
        let path = self.files.path().join(format!("{name}.json"));
        fs::write(&path, object.to_string()).unwrap();
        path.display().to_string()
    }

    /// A kubeconfig with the rights of the controller's account and no others.
    fn kubeconfig(&self) -> PathBuf {
        let token = self.rig.kubectl(&["-n", SYSTEM, "create", "token", "tranche-controller"]);
        let text = fs::read_to_string(self.rig.run(&["kubeconfig"]).trim()).unwrap();
        let mut config: Value = serde_saphyr::from_str(&text).unwrap();
        for user in config["users"].as_array_mut().unwrap() {
            user["user"] = json!({"token": token.trim()});
        }
        let path = self.files.path().join("kubeconfig");
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Starts the process and waits until the API server trusts it.
    async fn serve(&self) -> Webhook {
        let webhook = self.start(&[]).await;
        // The API server learns of a new bundle a little later.
        let bad = self.file("probe", &claim("probe", json!({"memory": "much"})));
        let refused = || async { self.create(OTHER, &bad, true).err() };
        wait_until("the API server to call the webhook", LIMIT, refused).await;
        webhook
    }

    /// Starts the process, with these arguments beside the usual ones.
    async fn start(&self, more: &[String]) -> Webhook {
        let log = fs::File::create(self.files.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_tranche"))
            .args(["webhook", "--pod-namespace", SYSTEM, "--webhook-check-interval=500ms"])
            .args([
                "--webhook-certificate-life",
                LIFE,
                "--log-level=debug,kube_client=off,hyper=off,rustls=off",
            ])
            .args([
                "--webhook-address=0.0.0.0:0",
                "--ops-address=127.0.0.1:0",
                "--health-address=127.0.0.1:0",
            ])
            .args(["--ops-socket=off", "--log-format=json"])
            .args(more)
            .arg("--kubeconfig")
            .arg(self.kubeconfig())
            .current_dir(root())
            .stdin(Stdio::null())
            .stdout(Stdio::from(log.try_clone().unwrap()))
            .stderr(Stdio::from(log))
            .spawn()
            .expect("the program can be started");
        let mut webhook = Webhook { child, port: 0, ops: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let served = || async { self.address("webhooks are served") };
        webhook.port = wait_until("the webhook to be served", LIMIT, served).await.port();
        let ops = || async { self.address("health and metrics are served") };
        webhook.ops = wait_until("metrics to be served", LIMIT, ops).await;
        self.lead_to(webhook.port);
        wait_until("the webhook to be ready", LIMIT, || async { webhook.ask("/readyz") }).await;
        webhook
    }

    fn create(&self, namespace: &str, file: &str, dry: bool) -> Result<String, String> {
        let dry = if dry { "--dry-run=server" } else { "--dry-run=none" };
        self.rig.attempt(&["kubectl", "-n", namespace, "create", dry, "-f", file])
    }

    /// What the process says that it serves there, once it does.
    fn address(&self, what: &str) -> Option<SocketAddr> {
        let log = self.log();
        let told: Value = serde_json::from_str(log.lines().find(|line| line.contains(what))?).ok()?;
        told["address"].as_str()?.parse().ok()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.files.path().join("log")).unwrap_or_default()
    }
}

impl Webhook {
    fn ask(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&self.ops, Duration::from_secs(1)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nhost: x\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        head.contains(" 200 ").then(|| body.to_owned())
    }

    fn count(&self, start: &str) -> f64 {
        sum(&self.ask("/metrics").expect("metrics"), start)
    }

    fn end(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

/// A claim of the controller's class with these `GpuShare` fields.
fn claim(name: &str, fields: Value) -> Value {
    manifests::claim(name, devices(fields))
}

fn devices(fields: Value) -> Value {
    json!({
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
        "config": manifests::parameters("tranche.dev/v1alpha1", "GpuShare", fields)})
}

/// A pod as KAI's documentation has it, but for the scheduler's name.
fn kai_pod(name: &str, annotations: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations}, "spec": {
        "terminationGracePeriodSeconds": 1, "containers": [
            {"name": "gpu-workload", "image": "docker.io/local/busybox:1", "imagePullPolicy": "Never"}]}})
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn bad_claims_are_refused_through_kubectl_with_the_path_of_the_field() {
    let stage = Stage::set("webhook::bad_claims");
    let webhook = stage.serve().await;
    const AT: &str = "spec.devices.config[0].opaque.parameters";
    let mut old = claim("a", json!({"memory": "0"}));
    old["apiVersion"] = json!("resource.k8s.io/v1beta1");
    old["spec"]["devices"]["requests"] = json!([{"name": "gpu", "deviceClassName": "shared.gpu.nvidia.com"}]);
    let mps = json!({"sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 101}}});
    let with_mps = |mps: Value| {
        json!({"requests": [manifests::gpu("gpu")],
            "config": manifests::parameters("resource.nvidia.com/v1beta1", "GpuConfig", mps)})
    };
    let nvidia = with_mps(mps);
    let bytes = with_mps(json!({"sharing": {
        "strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "2000"}}}));
    let whole = |fields: Value| {
        json!({"requests": [manifests::gpu("gpu")],
            "config": manifests::parameters("tranche.dev/v1alpha1", "GpuShare", fields)})
    };
    let sliced = json!({"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}});
    let mig = |sharing: Value| {
        let mut request = manifests::gpu("gpu");
        request["exactly"]["deviceClassName"] = json!("mig.nvidia.com");
        json!({"requests": [request],
            "config": manifests::parameters("resource.nvidia.com/v1beta1", "MigDeviceConfig", sharing)})
    };
    let mut bad = vec![
        (manifests::claim("a", mig(sliced.clone())), format!("{AT}.sharing.timeSlicingConfig: ")),
        (
            manifests::template("a", mig(json!({"sharing": {"strategy": "none"}}))),
            format!("spec.{AT}.sharing.strategy: "),
        ),
        (
            manifests::claim("a", bytes),
            format!(
                "{AT}.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 2000 bytes are less than 1 MiB; did you mean \
                 2000Mi?"
            ),
        ),
        (
            manifests::claim("a", whole(json!({"memory": "10Gi"}))),
            format!("{AT}.memory: GpuShare.memory limits a share"),
        ),
        (
            manifests::claim("a", whole(json!({"fraction": "0.5"}))),
            format!("{AT}.fraction: GpuShare.fraction limits a share"),
        ),
        (
            manifests::template("a", whole(json!({"compute": 25}))),
            format!("spec.{AT}.compute: GpuShare.compute limits a share"),
        ),
        (claim("a", json!({"memory": "ten"})), format!("{AT}.memory: ")),
        (
            claim("a", json!({"memory": "2000"})),
            format!("{AT}.memory: 2000 bytes are less than 1 MiB; did you mean 2000Mi?"),
        ),
        (
            claim("a", json!({"memory": "1Gi", "fraction": "0.5"})),
            format!("{AT}.fraction: does not go with memory"),
        ),
        (claim("a", json!({"fraction": "NaN"})), format!("{AT}.fraction: ")),
        (claim("a", json!({"memory": "1Gi", "typo": 1})), format!("{AT}.typo: unknown field")),
        (claim("a", json!({})), format!("{AT}: does not say how much")),
        (
            manifests::claim("a", json!({"requests": devices(json!({}))["requests"]})),
            "spec.devices.requests[0].exactly: class shared.gpu.nvidia.com".to_owned(),
        ),
        (manifests::claim("a", nvidia), format!("{AT}.sharing.mpsConfig.defaultActiveThreadPercentage: 101")),
        (
            manifests::template("a", devices(json!({"compute": 0, "memory": "1Gi"}))),
            format!("spec.{AT}.compute: "),
        ),
    ];
    // Converted by the API server, where it serves that version.
    if stage.rig.kubectl(&["api-versions"]).contains("resource.k8s.io/v1beta1") {
        bad.push((old, format!("{AT}.memory: ")));
    }
    for (object, words) in bad {
        let said = stage.create(OTHER, &stage.file("bad", &object), false).expect_err(&words);
        assert!(said.contains(&words) && said.contains("\"a\" is invalid: "), "{words}: {said}");
    }
    let grant = json!({"requests": [manifests::gpu("gpu")], "config":
        manifests::parameters("tranche.dev/v1alpha1", "ShareGrant", json!({"devices": []}))});
    let said =
        stage.create(OTHER, &stage.file("grant", &manifests::claim("a", grant)), false).expect_err("a grant");
    assert!(said.contains("write a GpuShare"), "{said}");
    // Good ones are taken, and what is not ours is not even shown to us.
    let seen = webhook.count("tranche_webhook_requests_total");
    let foreign = json!({"requests": [manifests::gpu("gpu")], "config": [
        {"opaque": {"driver": "nic.example.com", "parameters": {"kind": "ShareGrant"}}}]});
    for object in [
        manifests::claim("foreign", foreign),
        manifests::claim("plain", json!({"requests": [manifests::gpu("gpu")]})),
    ] {
        stage.create(OTHER, &stage.file("good", &object), false).unwrap_or_else(|said| panic!("{said}"));
    }
    assert_eq!(webhook.count("tranche_webhook_requests_total"), seen);
    // As people write amounts: YAML makes a number of `0.25` without quotes.
    let good = [
        ("text", json!({"fraction": "0.25"})),
        ("number", json!({"fraction": 0.25})),
        ("percent", json!({"memory": "1Gi", "compute": "20%"})),
    ];
    for (name, fields) in &good {
        stage
            .create(OTHER, &stage.file("good", &claim(name, fields.clone())), false)
            .unwrap_or_else(|said| panic!("{name}: {said}"));
    }
    let all = seen + f64::from(u32::try_from(good.len()).unwrap());
    let shown = || async { (webhook.count("tranche_webhook_requests_total") >= all).then_some(()) };
    wait_until("the webhook to be shown the good ones", LIMIT, shown).await;
    assert_eq!(webhook.count("tranche_webhook_requests_total"), all);
    stage.rig.kubectl(&["-n", OTHER, "label", "resourceclaim", "text", "a=b"]);
    assert_eq!(webhook.count("tranche_webhook_requests_total"), all, "the spec stayed as it was");
    // Taken, and told what it means.
    let mut two = claim("two", json!({"memory": "1Gi"}));
    two["spec"]["devices"]["requests"][0]["exactly"]["count"] = json!(2);
    let warned =
        stage.rig.warnings(&["-n", OTHER, "create", "--dry-run=server", "-f", &stage.file("two", &two)]);
    assert!(warned.contains("the claim has shares of several GPUs, which one MPS daemon serves"), "{warned}");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_that_can_never_be_placed_are_refused_through_kubectl() {
    let stage = Stage::set("webhook::never");
    let _webhook = stage.serve().await;
    // Without it, the API server refuses adminAccess itself.
    stage.rig.kubectl(&["label", "namespace", OTHER, "resource.kubernetes.io/admin-access=true"]);
    let whole = json!({"deviceClassName": "gpu.nvidia.com"});
    let shared = json!({"deviceClassName": "shared.gpu.nvidia.com"});
    let with = |field: &str, value: Value| {
        let mut request = json!({"name": "gpu", "exactly": shared});
        request["exactly"][field] = value;
        json!([request])
    };
    let alternatives = json!([{"name": "share", "deviceClassName": "shared.gpu.nvidia.com"},
        {"name": "whole", "deviceClassName": "gpu.nvidia.com"}]);
    let quantity = json!({"requests": {"memory": "2Gi"}});
    let never = [
        (
            json!([{"name": "gpu", "exactly": shared}, {"name": "whole", "exactly": whole}]),
            "write two claims",
        ),
        (json!([{"name": "gpu", "firstAvailable": alternatives}]), "write two claims"),
        (with("allocationMode", json!("All")), "allocationMode: has no meaning for shares; write a count"),
        (
            with("adminAccess", json!(true)),
            "adminAccess: is for class gpu.nvidia.com; shares have no administrative access",
        ),
        (
            with("capacity", quantity.clone()),
            "capacity.requests[memory]: asks for 2048 MiB, but the claim's GpuShare says 1024 MiB",
        ),
    ];
    // The unit forgotten, of the class whose shares kube-scheduler places: once alone, once as an alternative.
    let bytes = json!({"deviceClassName": "gpu.nvidia.com", "capacity": {"requests": {"memory": "2000"}}});
    let mut alternative = bytes.clone();
    alternative["name"] = json!("share");
    let forgotten = [
        (
            json!([{"name": "gpu", "exactly": bytes}]),
            "capacity.requests[memory]: 2000 bytes are less than 1 MiB; did you mean 2000Mi?",
        ),
        (
            json!([{"name": "gpu", "firstAvailable": [alternative]}]),
            "capacity.requests[memory]: 2000 bytes are less than 1 MiB; did you mean 2000Mi?",
        ),
    ];
    // Clusters that do not know capacities drop them.
    let mut whole = manifests::claim("whole", json!({"requests": [manifests::gpu("gpu")]}));
    whole["spec"]["devices"]["requests"][0]["exactly"]["capacity"] = quantity;
    let stored = ["create", "--dry-run=server", "-o", "json", "-f", &stage.file("whole", &whole)];
    let stored = stage.rig.kubectl(&[&["-n", OTHER][..], &stored].concat());
    let knows_capacities = stored.contains("\"capacity\"");
    let with_amount = never.into_iter().map(|one| (one, true));
    for ((requests, words), has_amount) in with_amount.chain(forgotten.map(|one| (one, false))) {
        let mut bad = claim("a", json!({"memory": "1Gi"}));
        bad["spec"]["devices"]["requests"] = requests;
        if !has_amount {
            // Nothing else in it is for this driver.
            bad["spec"]["devices"]["config"] = json!([]);
        }
        let said = stage.create(OTHER, &stage.file("never", &bad), false);
        if words.contains("capacity.requests") && !knows_capacities {
            println!("not tried here: this cluster drops capacities");
            continue;
        }
        let said = said.expect_err(words);
        assert!(said.contains(words) && said.contains("\"a\" is invalid: "), "{words}: {said}");
        let template = manifests::template("a", bad["spec"]["devices"].clone());
        let said = stage.create(OTHER, &stage.file("never", &template), false).expect_err(words);
        assert!(said.contains(words), "{words}: {said}");
    }
}

fn share_of(pod: &Value) -> Value {
    let text =
        pod["metadata"]["annotations"]["tranche.dev/gpu-share"].as_str().expect("the webhook's annotation");
    serde_json::from_str(text).unwrap()
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_with_kais_annotations_get_a_claim_in_labelled_namespaces() {
    let stage = Stage::set("webhook::kai");
    let _webhook = stage.serve().await;
    let get = |namespace: &str, name: &str| -> Value {
        serde_json::from_str(&stage.rig.kubectl(&["-n", namespace, "get", "pod", name, "-o", "json"]))
            .unwrap()
    };
    let fraction = kai_pod("gpu-sharing", json!({"gpu-fraction": "0.5"}));
    let memory =
        kai_pod("gpu-sharing-memory", json!({"gpu-memory": "2000", "gpu-fraction-num-devices": "2"}));
    for (namespace, pod) in [(KAI, &fraction), (KAI, &memory), (OTHER, &fraction)] {
        stage.create(namespace, &stage.file("pod", pod), false).unwrap_or_else(|said| panic!("{said}"));
    }
    let stored = get(KAI, "gpu-sharing");
    let entry = &stored["spec"]["resourceClaims"][0];
    let claim = entry["resourceClaimName"].as_str().expect("the pod names a claim");
    assert!(entry["name"] == "gpu-share" && claim.starts_with("gpu-sharing-gpu-share-"), "{entry}");
    let container = &stored["spec"]["containers"][0];
    assert_eq!(container["resources"]["claims"], json!([{"name": "gpu-share"}]));
    assert_eq!(container["env"][0], json!({"name": "GPU_PORTION", "value": "0.5"}));
    assert_eq!(share_of(&stored)["share"]["fraction"], "0.5");
    let share = share_of(&get(KAI, "gpu-sharing-memory"));
    assert_eq!((&share["share"]["memory"], &share["count"]), (&json!("2000Mi"), &json!(2)));
    // What the controller will create of it is taken by the API server.
    let classes = tranche::admission::ShareClasses::default();
    let spec = tranche::admission::claim_spec(&share.to_string(), &classes).unwrap();
    let made = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": claim}, "spec": spec});
    stage.create(KAI, &stage.file("claim", &made), false).unwrap_or_else(|said| panic!("{said}"));
    let untouched = get(OTHER, "gpu-sharing");
    assert!(untouched["spec"]["resourceClaims"].is_null(), "{untouched}");
    // Without a name of its own, as a Deployment's pods are.
    let mut unnamed = fraction.clone();
    unnamed["metadata"] =
        json!({"generateName": "web-", "labels": {"app": "web"}, "annotations": {"gpu-fraction": "0.1"}});
    let mut claims = Vec::new();
    for _ in 0..2 {
        stage.create(KAI, &stage.file("unnamed", &unnamed), false).unwrap_or_else(|said| panic!("{said}"));
    }
    let pods: Value =
        serde_json::from_str(&stage.rig.kubectl(&["-n", KAI, "get", "pods", "-l", "app=web", "-o", "json"]))
            .unwrap();
    for pod in pods["items"].as_array().unwrap() {
        claims.push(pod["spec"]["resourceClaims"][0]["resourceClaimName"].as_str().unwrap().to_owned());
    }
    assert!(claims.len() == 2 && claims[0] != claims[1], "{claims:?}");
    for (annotations, words) in [
        (
            json!({"gpu-fraction": "1.5"}),
            "metadata.annotations[gpu-fraction]: \"1.5\" is not a valid fraction of a GPU",
        ),
        (
            json!({"gpu-fraction": "0.5", "gpu-memory": "1"}),
            "metadata.annotations[gpu-memory]: does not go with gpu-fraction",
        ),
        (json!({"gpu-fraction-num-devices": "2"}), "has an effect only with gpu-fraction or gpu-memory"),
        (
            json!({"gpu-memory": "1", "gpu-fraction-container-name": "none"}),
            "its containers are gpu-workload",
        ),
    ] {
        let said =
            stage.create(KAI, &stage.file("bad", &kai_pod("bad", annotations)), false).expect_err(words);
        assert!(said.contains(words) && said.contains("The Pod \"bad\" is invalid: "), "{words}: {said}");
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_outage_stops_only_pods_that_ask_for_shares() {
    let stage = Stage::set("webhook::outage");
    stage.serve().await.end();
    let plain = kai_pod("plain", json!({"other": "1"}));
    let fraction = kai_pod("fraction", json!({"gpu-fraction": "0.5"}));
    let bad = claim("bad", json!({"memory": "much"}));
    for (namespace, what, object) in [
        (KAI, "plain", &plain),
        (OTHER, "plain", &plain),
        (OTHER, "fraction", &fraction),
        (OTHER, "bad", &bad),
    ] {
        let start = Instant::now();
        stage
            .create(namespace, &stage.file(what, object), false)
            .unwrap_or_else(|said| panic!("{what}: {said}"));
        assert!(
            start.elapsed() < Duration::from_secs(10) * SLOWER,
            "{what} in {namespace}: {:?}",
            start.elapsed()
        );
    }
    let said =
        stage.create(KAI, &stage.file("fraction", &fraction), false).expect_err("it would run without a GPU");
    assert!(said.contains("failed calling webhook \"pods.tranche.dev\""), "{said}");
    // The claim that slipped through can still be changed and deleted.
    let _webhook = stage.serve().await;
    stage.rig.kubectl(&["-n", OTHER, "label", "resourceclaim", "bad", "a=b"]);
    stage.rig.kubectl(&["-n", OTHER, "delete", "resourceclaim", "bad", "--timeout=170s"]);
    stage.create(KAI, &stage.file("fraction", &fraction), false).unwrap_or_else(|said| panic!("{said}"));
}

/// Creates pods that need the webhook until told, each as a dry run; counts them.
async fn load(client: Client, until: tokio::sync::watch::Receiver<bool>) -> usize {
    let pods: Api<Pod> = Api::namespaced(client, KAI);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let pod: Pod = serde_json::from_value(kai_pod("load", json!({"gpu-memory": "100"}))).unwrap();
    let mut count = 0;
    while !*until.borrow() {
        let stored =
            pods.create(&dry, &pod).await.unwrap_or_else(|error| panic!("after {count} pods: {error}"));
        assert!(stored.spec.unwrap().resource_claims.is_some());
        count += 1;
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a rig"]
async fn certificates_are_renewed_under_load_and_trust_comes_back() {
    let stage = Stage::set("webhook::rotation");
    let webhook = stage.serve().await;
    let client = stage.rig.client().await;
    let (tell, told) = tokio::sync::watch::channel(false);
    let mut loads = tokio::task::JoinSet::new();
    for _ in 0..3 {
        loads.spawn(load(client.clone(), told.clone()));
    }
    let renewals = "tranche_webhook_certificate_renewals_total";
    let before = webhook.count(renewals);
    let renewed = || async { (webhook.count(renewals) >= before + 3.0).then_some(()) };
    wait_until("three renewals", LIMIT, renewed).await;
    tell.send(true).unwrap();
    let counts = loads.join_all().await;
    println!("pods during three renewals: {counts:?}");
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    assert_eq!(webhook.count("tranche_webhook_certificate_failures_total"), 0.0, "{}", stage.log());
    // Somebody overwrites the CA.
    let what = ["mutatingwebhookconfiguration", "tranche"];
    let bundle = || {
        stage.rig.kubectl(&["get", what[0], what[1], "-o", "jsonpath={.webhooks[0].clientConfig.caBundle}"])
    };
    let good = bundle();
    let path = "/webhooks/0/clientConfig/caBundle";
    let patch = json!([{"op": "remove", "path": path}]).to_string();
    stage.rig.kubectl(&["patch", what[0], what[1], "--type=json", "-p", &patch]);
    wait_until("the CA to be named again", LIMIT, || async { (bundle() == good).then_some(()) }).await;
    let pod = stage.file("pod", &kai_pod("after", json!({"gpu-memory": "100"})));
    let taken = || async { stage.create(KAI, &pod, true).ok() };
    wait_until("the webhook to be called again", LIMIT, taken).await;
}
