//! The webhook, health, metrics and state: who may speak to them, and what it costs to shout.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::tenant;
use crate::manifests;
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, ask_within, container_run, from, is_ready, sum};

const METRICS: u16 = 8080;
const HEALTH: u16 = 8081;
const WEBHOOK: u16 = 9443;
/// As many as had the node plugin killed by its probes.
const IDLE: usize = 1_400;
/// kubelet kills a pod whose liveness probe failed three times, ten seconds apart; with five seconds for each.
const UNTIL_KILLED: Duration = Duration::from_secs(45);

fn address(pod: &Pod, port: u16) -> SocketAddr {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()).expect("the pod has an address");
    format!("{ip}:{port}").parse().expect("it is one")
}

async fn controllers(cluster: &TestCluster) -> Vec<Pod> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM);
    let all = ListParams::default().labels("app.kubernetes.io/component=controller");
    pods.list(&all).await.expect("the controller's pods can be listed").items
}

/// Posts to the webhook as whoever reaches it may; the head of the answer, empty if the connection was ended.
async fn post(bundle: &[u8], at: SocketAddr, path: &str, body: &[u8]) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle) {
        roots.add(certificate.expect("a certificate")).expect("a CA");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("versions").with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(format!("tranche-webhook.{SYSTEM}.svc")).expect("a name");
    let stream = TcpStream::connect(at).await?;
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    // It may answer before it has read all.
    let _ = stream.write_all(body).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
}

/// 4 MiB of the smallest objects, where a claim has its devices.
fn dense() -> Vec<u8> {
    let head = br#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE","namespace":"x","kind":{"group":"resource.k8s.io","version":"v1","kind":"ResourceClaim"},"object":{"spec":{"devices":{"requests":["#;
    let count = ((4 << 20) - head.len() - 16) / 7;
    [&head[..], &br#"{"":0},"#.repeat(count), b"0]}}}}}"].concat()
}

/// What a tenant's bad claim is told, which is by the webhook.
async fn refused(tenant: &Client, cluster: &TestCluster) -> Option<String> {
    let mut claim = manifests::claim(
        "bad",
        json!({
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
        "config": manifests::parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "much"}))}),
    );
    claim["metadata"]["namespace"] = json!(cluster.namespace);
    let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
        Api::namespaced(tenant.clone(), &cluster.namespace);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let said = claims.create(&dry, &from(claim)).await.err()?.to_string();
    said.contains("parameters.memory").then_some(said)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a rig"]
async fn reviews_of_anybody_do_not_end_the_webhook() {
    let cluster = TestCluster::of_env("reviews_of_anybody_do_not_end_the_webhook").await;
    let tenant = tenant(&cluster).await;
    wait_until("the webhook to be asked", PATIENCE, || refused(&tenant, &cluster)).await;
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let webhooks = configurations.get("tranche").await.expect("the configuration is there").webhooks;
    let bundle = webhooks.into_iter().flatten().find_map(|webhook| webhook.client_config.ca_bundle);
    let bundle = bundle.expect("the controller's CA").0;
    let before = controllers(&cluster).await;
    let body = dense();
    for pod in &before {
        for path in ["/validate", "/mutate"] {
            let posts = (0..8).map(|_| post(&bundle, address(pod, WEBHOOK), path, &body));
            let heads = futures::future::join_all(posts).await;
            for head in &heads {
                // Turned away where there was no room or no time, and never without an answer.
                let head = head.as_ref().expect("a connection");
                let answered = [" 200 ", " 503 ", " 408 "].iter().any(|code| head.contains(code));
                assert!(answered, "{path}: {heads:?}");
            }
        }
    }
    wait_until("the webhook to be asked again", PATIENCE, || refused(&tenant, &cluster)).await;
    for pod in controllers(&cluster).await {
        let name = &pod.metadata.name;
        let earlier = before.iter().find(|pod| pod.metadata.name == *name).expect("the same pods");
        assert_eq!(container_run(&pod), container_run(earlier), "{name:?} was not ended");
    }
    cluster.end().await;
}

/// Connects again whatever was ended, until there are so many.
async fn keep_idle(idle: &mut Vec<TcpStream>, at: SocketAddr) {
    idle.retain(|stream| match stream.try_read(&mut [0]) {
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        Ok(_) => false,
    });
    while idle.len() < IDLE {
        let connected = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(at)).await;
        // Refused, or not yet: the next turn tries again.
        let Ok(Ok(stream)) = connected else { return };
        idle.push(stream);
    }
}

/// Keeps the port of the pod full and asks for its health beside that, as kubelet does: how often, and after how long
/// there was no answer within the five seconds that kubelet waits.
async fn probed_until(end: Instant, pod: &Pod, port: u16) -> (usize, Vec<Duration>) {
    let (mut idle, mut probes, mut late) = (Vec::new(), 0, Vec::new());
    let begin = Instant::now();
    while Instant::now() < end {
        keep_idle(&mut idle, address(pod, port)).await;
        if ask_within(Duration::from_secs(5), pod, HEALTH, "/healthz").as_deref() != Some("ok\n") {
            late.push(begin.elapsed());
        }
        probes += 1;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    (probes, late)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a rig"]
async fn idle_connections_do_not_starve_the_probes() {
    let cluster = TestCluster::of_env("idle_connections_do_not_starve_the_probes").await;
    let node = cluster.nodes[0].clone();
    let before = cluster.plugin(&node).await;
    for port in [METRICS, HEALTH] {
        let (probes, late) = probed_until(Instant::now() + UNTIL_KILLED, &before, port).await;
        // On a busy machine connections take long to make, and a probe may be late; kubelet waits five seconds for
        // each, and for three of them.
        assert!(
            probes >= 5 && late.len() * 5 <= probes,
            "port {port}: of {probes} these were late: {late:?}"
        );
        println!("port {port}: {IDLE} idle connections, {probes} probes answered");
    }
    let after = cluster.plugin(&node).await;
    assert_eq!(
        (&after.metadata.name, container_run(&after)),
        (&before.metadata.name, container_run(&before))
    );
    assert!(is_ready(&after));
    let metrics = cluster.metrics(&node).await;
    for door in ["open", "health"] {
        let dropped = sum(&metrics, &format!("tranche_ops_dropped_connections_total{{door=\"{door}\"}}"));
        assert!(dropped >= IDLE as f64 / 2.0, "{door}: {dropped} dropped");
    }
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_learns_no_state_and_sets_no_log_level() {
    let cluster = TestCluster::of_env("a_pod_learns_no_state_and_sets_no_log_level").await;
    let tenant = tenant(&cluster).await;
    let pods: Api<Pod> = Api::namespaced(tenant, &cluster.namespace);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "curious"}, "spec": {
        "terminationGracePeriodSeconds": 1, "restartPolicy": "Never", "containers": [
            {"name": "main", "image": "docker.io/local/busybox:1", "imagePullPolicy": "Never",
             "command": ["sleep", "3600"]}]}});
    pods.create(&PostParams::default(), &from(pod)).await.expect("a tenant may have a pod");
    cluster.wait_ready("curious").await;
    let node = cluster.nodes[0].clone();
    let mut doors = vec![cluster.plugin(&node).await, cluster.pod_of("mps", &node).await];
    doors.extend(controllers(&cluster).await);
    for pod in &doors {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        for port in [METRICS, HEALTH] {
            for asked in ["GET /state", "GET /log-level", "PUT /log-level"] {
                let at = address(pod, port);
                let script =
                    format!(r"printf '{asked} HTTP/1.0\r\nhost: x\r\n\r\n' | nc -w 5 {} {port}", at.ip());
                let said = cluster.exec("curious", "main", &script);
                assert!(said.contains(" 404 "), "{name}:{port} answers {asked} with {said}");
            }
        }
        let inside = |words: &[&str]| {
            cluster
                .rig
                .kubectl(&[&["-n", SYSTEM, "exec", name, "--", "tranche", "inspect"][..], words].concat())
        };
        // An administrator does, in the pod.
        let state: Value = serde_json::from_str(&inside(&["-o", "json"])).expect("the state is JSON");
        assert!(state.as_object().is_some_and(|parts| !parts.is_empty()), "{name}: {state}");
        let level = inside(&["log-level"]);
        assert!(level.contains("info"), "{name}: {level}");
        assert_eq!(inside(&["log-level", "--set", level.trim()]), level);
    }
    cluster.end().await;
}
