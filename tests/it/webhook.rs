//! The webhook server over real TLS: whom it lets in, what it answers, how it keeps its certificates, and
//! what it does with callers that are slow, large or talk nonsense.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tranche::cluster::webhooks::WebhookApi;
use tranche::ops::metrics::{self, Registry};
use tranche::ops::readiness::Readiness;
use tranche::webhook::{
    Callers, Certificates, Lifetimes, Own, Webhook, WebhookContext, WebhookMetrics, WebhookSettings,
    WebhookTiming,
};

use crate::mock_api::{Failure, MockApi, PATIENCE, Verb};

const NAMESPACE: &str = "tranche-system";
const SECRET: &str = "tranche-webhook-tls";
const NAME: &str = "tranche-webhook.tranche-system.svc";
const SHORT: Duration = Duration::from_secs(10);

/// One process's webhook server.
struct Replica {
    address: SocketAddr,
    stop: CancellationToken,
    readiness: Readiness,
    registry: Registry,
    served: JoinSet<()>,
}

fn own(serving: Duration) -> Certificates {
    Certificates::Own(Own {
        namespace: NAMESPACE.to_owned(),
        secret: SECRET.to_owned(),
        configuration: "tranche".to_owned(),
        names: vec![NAME.to_owned(), "127.0.0.1".to_owned()],
        lifetimes: Lifetimes { authority: serving * 4, serving },
    })
}

async fn start(api: &MockApi, certificates: Certificates) -> Replica {
    start_for(api, certificates, None).await
}

async fn start_for(api: &MockApi, certificates: Certificates, callers: Option<Callers>) -> Replica {
    let address = "127.0.0.1:0".parse().unwrap();
    let timing = WebhookTiming { check: Duration::from_millis(100), linger: Duration::ZERO };
    let settings = WebhookSettings { address, certificates, callers, timing };
    let (stop, readiness) = (CancellationToken::new(), Readiness::default());
    let mut registry = metrics::registry();
    let parts = WebhookContext {
        api: WebhookApi::with_client(api.client()),
        metrics: WebhookMetrics::register(&mut registry),
        ready: readiness.wait_for("a certificate"),
        stop: stop.clone(),
    };
    let webhook = Webhook::bind(settings, parts).await.unwrap();
    let address = webhook.address();
    let mut served = JoinSet::new();
    served.spawn(webhook.serve());
    Replica { address, stop, readiness, registry, served }
}

/// A cluster with the configurations as the chart makes them.
fn cluster() -> MockApi {
    let api = MockApi::new();
    for (resource, names) in [
        ("validatingwebhookconfigurations", &["claims.tranche.dev", "templates.tranche.dev"][..]),
        ("mutatingwebhookconfigurations", &["pods.tranche.dev"][..]),
    ] {
        let webhooks: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "unknown": "kept", "clientConfig": {"service": {"name": "tranche-webhook"}}}))
            .collect();
        api.put(resource, json!({"metadata": {"name": "tranche"}, "webhooks": webhooks}));
    }
    let webhook = json!({"name": "kai.pods.tranche.dev", "unknown": "kept", "clientConfig": {}});
    let before_kai = json!({"metadata": {"name": "before-kai.tranche"}, "webhooks": [webhook]});
    api.put("mutatingwebhookconfigurations", before_kai);
    api
}

/// The CA bundles of all webhooks, each once.
fn bundles(api: &MockApi) -> Vec<Option<Vec<u8>>> {
    let configurations = ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
    let mut all: Vec<_> = configurations
        .iter()
        .flat_map(|resource| api.list(resource))
        .flat_map(|object| object["webhooks"].as_array().cloned().unwrap())
        .map(|webhook| {
            assert_eq!(webhook["unknown"], "kept");
            let bundle = webhook["clientConfig"].get("caBundle")?;
            Some(serde_json::from_value::<ByteString>(bundle.clone()).unwrap().0)
        })
        .collect();
    all.sort();
    all.dedup();
    all
}

fn secret(api: &MockApi) -> BTreeMap<String, ByteString> {
    let secrets = api.list("secrets");
    secrets.first().map(|one| serde_json::from_value(one["data"].clone()).unwrap()).unwrap_or_default()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl Replica {
    async fn until_ready(&self) {
        until("a certificate", || self.readiness.awaited().is_empty()).await;
    }

    /// A connection, as by an API server that trusts this bundle.
    async fn connect(&self, bundle: &[u8]) -> std::io::Result<TlsStream<TcpStream>> {
        self.connect_as(bundle, None).await
    }

    /// The same with a certificate and its key, in PEM.
    async fn connect_as(
        &self,
        bundle: &[u8],
        caller: Option<&(String, String)>,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots);
        let config = match caller {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = vec![CertificateDer::from_pem_slice(chain.as_bytes()).unwrap()];
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from(NAME).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    /// Sends bytes, returns the whole answer.
    async fn send(&self, bundle: &[u8], bytes: &[u8]) -> String {
        let stream = self.connect(bundle).await.expect("a trusted connection");
        Self::send_on(stream, bytes).await
    }

    async fn send_on(stream: TlsStream<TcpStream>, bytes: &[u8]) -> String {
        Self::send_within(PATIENCE, stream, bytes).await
    }

    async fn send_within(limit: Duration, mut stream: TlsStream<TcpStream>, bytes: &[u8]) -> String {
        let exchange = async {
            // A server that refuses early may close while we still write.
            let _ = stream.write_all(bytes).await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8(answer).unwrap()
        };
        tokio::time::timeout(limit, exchange).await.expect("an answer in time")
    }

    /// Status code and body.
    async fn post(&self, bundle: &[u8], path: &str, body: &[u8]) -> (u16, String) {
        let stream = self.connect(bundle).await.expect("a trusted connection");
        Self::post_on(stream, path, body).await
    }

    async fn post_on(stream: TlsStream<TcpStream>, path: &str, body: &[u8]) -> (u16, String) {
        Self::post_within(PATIENCE, stream, path, body).await
    }

    async fn post_within(
        limit: Duration,
        stream: TlsStream<TcpStream>,
        path: &str,
        body: &[u8],
    ) -> (u16, String) {
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        let answer = Self::send_within(limit, stream, &request).await;
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        (status, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned())
    }

    async fn review(&self, bundle: &[u8], path: &str, kind: (&str, &str), object: Value) -> Value {
        let stream = self.connect(bundle).await.expect("a trusted connection");
        Self::review_on(stream, path, kind, object).await
    }

    async fn review_on(stream: TlsStream<TcpStream>, path: &str, kind: (&str, &str), object: Value) -> Value {
        let (group, kind) = kind;
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": "CREATE", "namespace": "ml",
            "kind": {"group": group, "version": "v1", "kind": kind}, "object": object}});
        let (status, body) = Self::post_on(stream, path, review.to_string().as_bytes()).await;
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).unwrap();
        answer["response"].clone()
    }

    fn metrics(&self) -> String {
        metrics::text(&self.registry).unwrap()
    }

    fn metric(&self, line: &str) -> bool {
        self.metrics().lines().any(|have| have == line)
    }

    fn failures(&self) -> u64 {
        let name = "tranche_webhook_certificate_failures_total ";
        self.metrics().lines().find_map(|line| line.strip_prefix(name)?.parse().ok()).unwrap()
    }

    async fn stop(mut self) {
        self.stop.cancel();
        let ended = async { while self.served.join_next().await.is_some() {} };
        tokio::time::timeout(PATIENCE, ended).await.expect("it ends");
    }
}

fn claim(memory: &str) -> Value {
    json!({"metadata": {"name": "c"}, "spec": {"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
        "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {
            "apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": memory}}}]}}})
}

const CLAIM: (&str, &str) = ("resource.k8s.io", "ResourceClaim");

#[tokio::test]
async fn a_fresh_server_makes_its_certificate_and_is_trusted_by_it() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    assert_eq!(bundles(&api), [Some(bundle.clone())]);
    let good = replica.review(&bundle, "/validate", CLAIM, claim("2000Mi")).await;
    assert_eq!(good["allowed"], true);
    let bad = replica.review(&bundle, "/validate", CLAIM, claim("much")).await;
    let message = bad["status"]["message"].as_str().unwrap();
    assert!(message.starts_with("spec.devices.config[0].opaque.parameters.memory: "), "{message}");
    let pod = json!({"metadata": {"name": "p", "annotations": {"gpu-memory": "2000"}},
        "spec": {"containers": [{"name": "main"}]}});
    let changed = replica.review(&bundle, "/mutate", ("", "Pod"), pod).await;
    assert_eq!(changed["patchType"], "JSONPatch");
    for line in [
        "tranche_webhook_requests_total{kind=\"claim\",verdict=\"allowed\"} 1",
        "tranche_webhook_requests_total{kind=\"claim\",verdict=\"refused\"} 1",
        "tranche_webhook_requests_total{kind=\"pod\",verdict=\"changed\"} 1",
        "tranche_webhook_certificate_renewals_total 1",
        "tranche_webhook_bundle_writes_total 3",
    ] {
        assert!(replica.metric(line), "{line}");
    }
    assert!(!replica.metric("tranche_webhook_certificate_expiry_timestamp_seconds 0.0"));
    replica.stop().await;
}

#[tokio::test]
async fn replicas_that_start_together_share_one_certificate() {
    for there in [None, Some(json!({"metadata": {"name": SECRET, "namespace": NAMESPACE}, "type": "Opaque"}))]
    {
        let api = cluster();
        there.map(|empty| api.put("secrets", empty));
        let mut replicas = Vec::new();
        for _ in 0..3 {
            replicas.push(start(&api, own(SHORT * 360)).await);
        }
        for replica in &replicas {
            replica.until_ready().await;
        }
        let bundle = secret(&api)["ca.crt"].0.clone();
        assert_eq!(bundles(&api), [Some(bundle.clone())]);
        for replica in replicas {
            assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
            replica.stop().await;
        }
    }
}

/// A connection as the API server makes one: it trusts what the configurations say, not what the Secret does; of two that
/// are told one after the other, either will do. Tried twenty times: whoever is held up for longer than certificates of
/// such a short life wait before they are renewed may find one that has ended, and what renews it shares this thread: it
/// has its turn between two tries, however slow the machine is.
async fn until_connected(replica: &Replica, api: &MockApi) -> TlsStream<TcpStream> {
    const TRIES: u32 = 20;
    let mut tries = 0;
    loop {
        let trusted = bundles(api)[0].clone().expect("a bundle");
        tries += 1;
        match replica.connect(&trusted).await {
            Ok(stream) => return stream,
            Err(error) => assert!(tries < TRIES, "not trusted at {tries} tries: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn certificates_and_cas_are_renewed_while_requests_go_on() {
    let api = cluster();
    // Of three seconds, with a CA of twelve: several of each within the test.
    let replica = start(&api, own(Duration::from_secs(3))).await;
    replica.until_ready().await;
    let (mut leaves, mut authorities) = (Vec::new(), Vec::new());
    let end = Instant::now() + PATIENCE * 2;
    while leaves.len() < 5 || authorities.len() < 3 {
        assert!(Instant::now() < end, "{} certificates, {} CAs", leaves.len(), authorities.len());
        let held = secret(&api);
        for (seen, part) in [(&mut leaves, "tls.crt"), (&mut authorities, "ca.key")] {
            if !seen.contains(&held[part]) {
                seen.push(held[part].clone());
            }
        }
        let stream = until_connected(&replica, &api).await;
        let answer = Replica::review_on(stream, "/validate", CLAIM, claim("1Gi")).await;
        assert_eq!(answer["allowed"], true);
    }
    replica.stop().await;
}

#[tokio::test]
async fn a_bundle_that_somebody_overwrites_comes_back() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    for foreign in [json!("Zm9yZWlnbg=="), Value::Null] {
        api.edit("mutatingwebhookconfigurations", |object| {
            object["webhooks"][0]["clientConfig"]["caBundle"] = foreign.clone();
        });
        until("the CA to be trusted again", || bundles(&api) == [Some(bundle.clone())]).await;
    }
    replica.stop().await;
}

#[tokio::test]
async fn a_damaged_or_deleted_secret_is_made_anew() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let first = secret(&api)["tls.crt"].0.clone();
    api.edit("secrets", |object| object["data"]["tls.key"] = json!("bm8ga2V5"));
    until("another certificate", || secret(&api)["tls.crt"].0 != first).await;
    let second = secret(&api)["tls.crt"].0.clone();
    api.remove("secrets", SECRET);
    until("a third certificate", || secret(&api).get("tls.crt").is_some_and(|third| third.0 != second)).await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    until("trust in it", || bundles(&api) == [Some(bundle.clone())]).await;
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    replica.stop().await;
}

#[tokio::test]
async fn an_api_server_that_fails_is_waited_for() {
    let api = cluster();
    for failure in [Failure::Broken, Failure::Status(500, "InternalError")] {
        api.fail(Verb::Get, "secrets", failure);
    }
    api.fail(Verb::Create, "secrets", Failure::AnswerLost);
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    assert!(replica.failures() > 0);
    // Later failures leave the service as it is.
    for _ in 0..3 {
        api.fail(Verb::Get, "secrets", Failure::Broken);
    }
    let bundle = secret(&api)["ca.crt"].0.clone();
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    replica.stop().await;
}

#[tokio::test]
async fn the_class_may_say_how_much_a_share_is() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    let mut without = claim("1Gi");
    without["spec"]["devices"]["config"] = json!([]);
    let mut answers = Vec::new();
    for amount in [json!({}), json!({"memory": "1Gi"})] {
        let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
        parameters.as_object_mut().unwrap().extend(amount.as_object().unwrap().clone());
        let seen = api.count(Verb::List, "deviceclasses");
        api.put(
            "deviceclasses",
            json!({"metadata": {"name": "shared.gpu.nvidia.com"}, "spec": {"config": [
            {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]}}),
        );
        until("the class to be read", || api.count(Verb::List, "deviceclasses") > seen + 1).await;
        answers.push(replica.review(&bundle, "/validate", CLAIM, without.clone()).await["allowed"].clone());
    }
    assert_eq!(answers, [json!(false), json!(true)]);
    replica.stop().await;
}

#[tokio::test]
async fn a_share_of_kube_schedulers_with_a_forgotten_unit_is_refused() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    let part = |memory: &str| {
        let capacity = json!({"requests": {"memory": memory}});
        let request = json!({"deviceClassName": "gpu.nvidia.com", "capacity": capacity});
        json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}}})
    };
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, part("2000Mi")).await["allowed"], true);
    let answer = replica.review(&bundle, "/validate", CLAIM, part("2000")).await;
    assert_eq!(answer["allowed"], false);
    let said = answer["status"]["message"].as_str().unwrap();
    let at = "spec.devices.requests[0].exactly.capacity.requests[memory]";
    assert!(said.contains(&format!("{at}: 2000 bytes are less than 1 MiB; did you mean 2000Mi?")), "{said}");
    replica.stop().await;
}

/// A claim of one request with this selector.
fn selected(selector: &str, memory: &str) -> Value {
    let mut claim = claim(memory);
    claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
        json!([{"cel": {"expression": selector}}]);
    claim
}

/// The review of a claim that somebody in the namespace creates.
fn review_of(namespace: &str, claim: &Value) -> Vec<u8> {
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "operation": "CREATE", "namespace": namespace,
        "kind": {"group": CLAIM.0, "version": "v1", "kind": CLAIM.1}, "object": claim}});
    review.to_string().into_bytes()
}

/// Three times as long as the API server waits where its configuration says nothing else: this machine may be slow.
const LATE: Duration = Duration::from_secs(9);

/// So many connections, made a few at a time: the server gives each handshake five seconds, and this machine may be slow.
async fn connections(
    replica: &Arc<Replica>,
    bundle: &Arc<Vec<u8>>,
    count: usize,
) -> Vec<TlsStream<TcpStream>> {
    const AT_ONCE: usize = 8;
    let (mut connected, mut connecting) = (Vec::new(), JoinSet::new());
    for started in 0..count + AT_ONCE {
        if started < count {
            let (replica, bundle) = (replica.clone(), bundle.clone());
            connecting.spawn(async move { replica.connect(&bundle).await.expect("a trusted connection") });
        }
        if started >= AT_ONCE {
            connected.push(connecting.join_next().await.expect("one connects").unwrap());
        }
    }
    connected
}

/// The same review is asked for on all of these connections at once. Those who ask are patient: a build without
/// optimisation looks at one claim for seconds.
fn flood(connected: Vec<TlsStream<TcpStream>>, body: &Arc<Vec<u8>>) -> JoinSet<(u16, String)> {
    let mut flood = JoinSet::new();
    for stream in connected {
        let body = body.clone();
        flood.spawn(async move { Replica::post_within(PATIENCE * 6, stream, "/validate", &body).await });
    }
    flood
}

async fn a_pod_is_changed_in_time(stream: TlsStream<TcpStream>) {
    let pod = json!({"metadata": {"name": "p", "annotations": {"gpu-memory": "2000"}},
        "spec": {"containers": [{"name": "main"}]}});
    let asked = Instant::now();
    let changed = Replica::review_on(stream, "/mutate", ("", "Pod"), pod).await;
    assert_eq!(changed["patchType"], "JSONPatch");
    assert!(asked.elapsed() < LATE, "a pod was answered after {:?}", asked.elapsed());
}

/// All entries of a claim are held against each other: what the API server admits of that is not done on the thread that
/// answers pods, also where more wait than can be checked.
#[tokio::test]
async fn wide_claims_hold_up_nobody_and_pass_with_a_warning_where_too_many_wait() {
    /// Fewer than the server takes from one address, so that pods find room; more than may wait for a check.
    const FLOOD: usize = 100;
    let api = cluster();
    let replica = Arc::new(start(&api, own(SHORT * 360)).await);
    replica.until_ready().await;
    let bundle = Arc::new(secret(&api)["ca.crt"].0.clone());
    let alternatives: Vec<Value> = (0..8)
        .map(|nth| json!({"name": format!("s{nth}"), "deviceClassName": "shared.gpu.nvidia.com"}))
        .collect();
    let requests: Vec<Value> =
        (0..32).map(|nth| json!({"name": format!("r{nth}"), "firstAvailable": alternatives})).collect();
    let named: Vec<String> = (0..32).map(|nth| format!("r{nth}/s7")).collect();
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": "much"});
    let config = json!({"requests": named, "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}});
    let wide = json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests": requests, "config": vec![config; 32]}}});
    let body = Arc::new(review_of("evil", &wide));
    // Those who ask for pods have connected before, too: it is not the handshake that is tried.
    let connected = connections(&replica, &bundle, FLOOD).await;
    let of_pods = connections(&replica, &bundle, 4).await;
    let mut flood = flood(connected, &body);
    for stream in of_pods {
        a_pod_is_changed_in_time(stream).await;
    }
    let (mut refused, mut warned) = (0, 0);
    while let Some(answer) = flood.join_next().await {
        let (status, said) = answer.unwrap();
        assert_eq!(status, 200, "{said}");
        let was_checked = !said.contains("the claim was not checked: too many");
        assert_eq!(said.contains("\"allowed\":true"), !was_checked, "{said}");
        refused += usize::from(was_checked && said.contains("parameters.memory"));
        warned += usize::from(!was_checked);
    }
    println!("{FLOOD} wide claims: {refused} refused, {warned} let through");
    // More came at once than may wait.
    assert!(
        refused >= 1 && warned >= 1 && refused + warned == FLOOD,
        "{refused} refused, {warned} let through"
    );
    Arc::into_inner(replica).expect("nobody else has it").stop().await;
}

/// A tenant asks again and again whether such a claim would be taken. What the API server asks of others meanwhile is
/// answered before it gives up.
#[tokio::test]
async fn claims_with_dear_selectors_hold_up_nobody() {
    const FLOOD: usize = 40;
    let api = cluster();
    let replica = Arc::new(start(&api, own(SHORT * 360)).await);
    replica.until_ready().await;
    let bundle = Arc::new(secret(&api)["ca.crt"].0.clone());
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    let dear = (0..8).fold("false".to_owned(), |inner, nth| format!("{ten}.exists(x{nth}, {inner})"));
    let body = Arc::new(review_of("evil", &selected(&dear, "1Gi")));
    let connected = connections(&replica, &bundle, FLOOD).await;
    let (of_pods, of_claims) =
        (connections(&replica, &bundle, 4).await, connections(&replica, &bundle, 4).await);
    let mut flood = flood(connected, &body);
    // The first of them is there, and being looked at or answered.
    let begin = Instant::now();
    for (pod, claim) in of_pods.into_iter().zip(of_claims) {
        a_pod_is_changed_in_time(pod).await;
        let asked = Instant::now();
        let wrong = review_of("ml", &selected("true", "much"));
        let (status, said) = Replica::post_on(claim, "/validate", &wrong).await;
        assert!(status == 200 && said.contains("parameters.memory"), "{status} {said}");
        assert!(asked.elapsed() < LATE, "a claim was answered after {:?}", asked.elapsed());
    }
    let (mut refused, mut warned) = (0, 0);
    while let Some(answer) = flood.join_next().await {
        let (status, said) = answer.unwrap();
        assert_eq!(status, 200, "{said}");
        refused += usize::from(said.contains("costs more than 2000000"));
        warned += usize::from(said.contains("not all selectors of the claim were tried"));
    }
    println!("{FLOOD} dear claims: {refused} refused, {warned} warned, after {:?}", begin.elapsed());
    assert!(refused >= 1 && refused + warned == FLOOD, "{refused} refused, {warned} warned");
    let counted = |reason: &str| {
        let line = format!("tranche_webhook_untried_selectors_total{{reason=\"{reason}\"}} ");
        let count =
            replica.metrics().lines().find_map(|text| text.strip_prefix(&line)?.parse::<usize>().ok());
        count.expect("a counter")
    };
    assert!(counted("namespace") + counted("queue") >= warned, "{}", replica.metrics());
    // Another namespace has a budget of its own.
    let (_, said) = replica.post(&bundle, "/validate", &review_of("ml", &selected("true", "1Gi"))).await;
    assert!(said.contains("\"allowed\":true") && !said.contains("warnings"), "{said}");
    Arc::into_inner(replica).expect("nobody else has it").stop().await;
}

/// A folder with a certificate, as cert-manager would keep it, and the CA to trust.
struct Mounted {
    folder: tempfile::TempDir,
}

impl Mounted {
    fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// Writes a new pair; the answer is the CA's certificate.
    fn renew(&self) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(params, key);
        let leaf_key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
        std::fs::write(self.path().join("tls.crt"), leaf.pem()).unwrap();
        std::fs::write(self.path().join("tls.key"), leaf_key.serialize_pem()).unwrap();
        authority.pem().into_bytes()
    }
}

#[tokio::test]
async fn mounted_certificates_are_read_again_when_they_change_and_kept_while_they_are_damaged() {
    let api = cluster();
    let mounted = Mounted { folder: tempfile::tempdir().unwrap() };
    let replica = start(&api, Certificates::Files(mounted.path())).await;
    // Not there yet: it is waited for.
    until("a failed try", || replica.failures() > 0).await;
    assert!(!replica.readiness.awaited().is_empty());
    let first = mounted.renew();
    replica.until_ready().await;
    assert_eq!(replica.review(&first, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    std::fs::write(mounted.path().join("tls.key"), "half a k").unwrap();
    let before = replica.failures();
    until("another failed try", || replica.failures() > before).await;
    assert_eq!(replica.review(&first, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    let second = mounted.renew();
    let end = Instant::now() + PATIENCE;
    while replica.connect(&second).await.is_err() {
        assert!(Instant::now() < end, "the new certificate is never served");
    }
    assert_eq!(replica.review(&second, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    assert!(replica.connect(&first).await.is_err());
    // Others' certificates are theirs to tell of.
    assert_eq!((bundles(&api), api.list("secrets").len()), (vec![None], 0));
    replica.stop().await;
}

#[tokio::test]
async fn nonsense_is_refused_and_the_next_caller_served() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    for (path, body, status, words) in [
        ("/validate", &b"{"[..], 400, "not a valid AdmissionReview"),
        ("/validate", &b""[..], 400, "not a valid AdmissionReview"),
        ("/mutate", &b"\xff\xfe\x00"[..], 400, "not a valid AdmissionReview"),
        ("/mutate", &br#"{"apiVersion":"v1","kind":"Pod"}"#[..], 400, "answers an AdmissionReview"),
        ("/validate", &b"[[[[[[[[[[[[[[[["[..], 400, "not a valid AdmissionReview"),
        ("/other", &b"{}"[..], 404, "POST /validate, /mutate"),
    ] {
        let (code, said) = replica.post(&bundle, path, body).await;
        assert_eq!(code, status, "{path} {body:?}: {said}");
        assert!(said.contains(words), "{path} {body:?}: {said}");
    }
    let deep = "[".repeat(200_000);
    assert_eq!(replica.post(&bundle, "/validate", deep.as_bytes()).await.0, 400);
    let large = vec![b' '; (4 << 20) + 1];
    assert_eq!(replica.post(&bundle, "/validate", &large).await.0, 413);
    let answer =
        replica.send(&bundle, b"GET /validate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    let answer = replica.send(&bundle, b"no http at all\r\n\r\n").await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    // Not even TLS.
    let mut plain = TcpStream::connect(replica.address).await.unwrap();
    plain.write_all(b"POST /validate HTTP/1.1\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut rest)).await;
    ended.expect("the server ends it").ok();
    until("the failed handshake to be counted", || {
        replica.metric("tranche_webhook_failed_handshakes_total 1")
    })
    .await;
    assert!(replica.metric("tranche_webhook_requests_total{kind=\"other\",verdict=\"malformed\"} 6"));
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    replica.stop().await;
}

#[tokio::test]
async fn slow_callers_are_let_go_and_hold_up_nobody() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    // Fewer than there are places: half of them never speak, half never finish.
    let mut silent = Vec::new();
    let mut halting = Vec::new();
    for _ in 0..20 {
        silent.push(TcpStream::connect(replica.address).await.unwrap());
        let mut stream = replica.connect(&bundle).await.unwrap();
        stream
            .write_all(b"POST /validate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            .await
            .unwrap();
        halting.push(stream);
    }
    let start = Instant::now();
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let mut answer = Vec::new();
    let last = halting.last_mut().unwrap();
    let read = tokio::time::timeout(PATIENCE, last.read_to_end(&mut answer)).await.expect("it is let go");
    // Whether the other side says goodbye in TLS does not matter.
    let _ = read;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let mut byte = [0];
    let read = tokio::time::timeout(PATIENCE, silent[0].read(&mut byte)).await.expect("it is let go");
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    replica.stop().await;
}

#[tokio::test]
async fn at_its_end_it_answers_what_is_under_way() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    let mut idle = replica.connect(&bundle).await.unwrap();
    let mut under_way = replica.connect(&bundle).await.unwrap();
    let body = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE","kind":{"kind":"Other"}}}"#;
    let head = format!("POST /validate HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    // Asked and answered once, so that the connection is at its requests.
    let mut answer = vec![0; 4096];
    under_way.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    assert!(under_way.read(&mut answer).await.unwrap() > 0);
    let (first, rest) = body.split_at(10);
    under_way.write_all(format!("{head}{first}").as_bytes()).await.unwrap();
    under_way.flush().await.unwrap();
    replica.stop.cancel();
    // Idle connections end at once, and nobody new is let in.
    let mut end = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, idle.read_to_end(&mut end)).await.expect("it ends");
    under_way.write_all(rest.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, under_way.read_to_end(&mut answer)).await.expect("it is answered");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.contains("\"allowed\":true"), "{answer}");
    replica.stop().await;
}

/// A CA for callers, and what it signs for a name: certificate and key in PEM.
struct Authority {
    pem: String,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: rcgen::Issuer::new(params, key) }
    }

    fn sign(&self, name: &str) -> (String, String) {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

#[tokio::test]
async fn where_the_api_server_shows_a_certificate_nobody_else_may_call() {
    let api = cluster();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.crt");
    std::fs::write(&file, &authority.pem).unwrap();
    let callers = Callers { authorities: file.clone(), names: vec!["kube-apiserver".to_owned()] };
    let replica = start_for(&api, own(SHORT * 360), Some(callers)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    // In TLS 1.3 a client learns only from its first read that it was turned away.
    let is_let_in = async |caller: Option<(String, String)>| {
        let Ok(mut stream) = replica.connect_as(&bundle, caller.as_ref()).await else { return false };
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an end");
        answer.starts_with(b"HTTP/1.1 404")
    };
    assert!(is_let_in(Some(authority.sign("kube-apiserver"))).await);
    assert!(!is_let_in(None).await, "without a certificate");
    assert!(!is_let_in(Some(authority.sign("kubelet"))).await, "another name");
    assert!(!is_let_in(Some(stranger.sign("kube-apiserver"))).await, "another CA");
    // A failed handshake is counted after the caller was told of it.
    until("three callers to be counted", || replica.metric("tranche_webhook_failed_handshakes_total 3"))
        .await;
    // Another CA is taken without a restart, and what is no CA changes nothing.
    std::fs::write(&file, "none").unwrap();
    assert!(is_let_in(Some(authority.sign("kube-apiserver"))).await);
    std::fs::write(&file, &stranger.pem).unwrap();
    let end = Instant::now() + PATIENCE;
    while !is_let_in(Some(stranger.sign("kube-apiserver"))).await {
        assert!(Instant::now() < end, "the new CA is never taken");
    }
    assert!(!is_let_in(Some(authority.sign("kube-apiserver"))).await);
    replica.stop().await;
}

/// `tranche webhook` as a process of its own, so that its memory can be told from this one's.
struct Process {
    child: std::process::Child,
    at: Replica,
    authority: Vec<u8>,
    _mounted: Mounted,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where a process serves webhooks, once its log says so.
async fn address_in(log: &std::path::Path) -> SocketAddr {
    let mut address = None;
    until("an address in the log", || {
        let text = std::fs::read_to_string(log).unwrap();
        let told = text.lines().find(|line| line.contains("webhooks are served"));
        let told = told.and_then(|line| serde_json::from_str::<Value>(line).ok());
        address = told.map(|told| told["address"].as_str().unwrap().parse().unwrap());
        address.is_some()
    })
    .await;
    address.unwrap()
}

impl Process {
    async fn start() -> Self {
        let mounted = Mounted { folder: tempfile::tempdir().unwrap() };
        let authority = mounted.renew();
        let kubeconfig = mounted.path().join("kubeconfig");
        // Nobody is there: what the class says stays unknown.
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}], "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}]});
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        let log = mounted.path().join("log");
        let child = std::process::Command::new(env!("CARGO_BIN_EXE_tranche"))
            .args(["webhook", "--pod-namespace", NAMESPACE, "--ops-address=127.0.0.1:0", "--ops-socket=off"])
            .args(["--webhook-address=127.0.0.1:0", "--log-format=json"])
            .arg("--webhook-certificates")
            .arg(mounted.path())
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let address = address_in(&log).await;
        let at = Replica {
            address,
            stop: CancellationToken::new(),
            readiness: Readiness::default(),
            registry: metrics::registry(),
            served: JoinSet::new(),
        };
        let process = Self { child, at, authority, _mounted: mounted };
        process.until_it_listens().await;
        process
    }

    async fn until_it_listens(&self) {
        let end = Instant::now() + PATIENCE;
        while self.at.connect(&self.authority).await.is_err() {
            assert!(Instant::now() < end, "it never listens");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks again where others' bodies take all the room for too long, a request has its deadline behind it, or a large
    /// claim would have had to wait for its turn: this machine may be slow.
    async fn post_when_there_is_room(&self, path: &str, body: &[u8]) -> (u16, String) {
        let end = Instant::now() + PATIENCE * 9;
        loop {
            let stream = self.at.connect(&self.authority).await.expect("a trusted connection");
            let answer = Replica::post_within(PATIENCE * 3, stream, path, body).await;
            let has_room = ![408, 503].contains(&answer.0) && !answer.1.contains("the claim was not checked");
            if has_room || Instant::now() > end {
                return answer;
            }
        }
    }

    /// The most memory that it has had so far, MiB.
    fn peak_mib(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }
}

/// A review of so many bytes at most, full of the smallest objects, in a field of a claim or a pod; `inner` closes what
/// `place` opens.
fn dense((group, kind): (&str, &str), place: &str, inner: &str, bytes: usize) -> Vec<u8> {
    let head = format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u","operation":"CREATE",
        "namespace":"ml","kind":{{"group":"{group}","version":"v1","kind":"{kind}"}},"object":{{{place}["#
    );
    let tail = format!("0]{inner}}}}}}}");
    let count = (bytes - head.len() - tail.len() - 64) / 7;
    [head.as_bytes(), &br#"{"":0},"#.repeat(count), tail.as_bytes()].concat()
}

/// One such review had the process killed that has 512 MiB.
#[tokio::test]
async fn reviews_cost_little_more_than_their_bytes_however_they_are_filled() {
    const BYTES: usize = 4 << 20;
    let process = Process::start().await;
    let good = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "operation": "CREATE", "kind": {"group": CLAIM.0, "kind": CLAIM.1}, "object": claim("1Gi")}});
    assert_eq!(process.at.post(&process.authority, "/validate", good.to_string().as_bytes()).await.0, 200);
    let before = process.peak_mib();
    let claims = ("resource.k8s.io", "ResourceClaim");
    let mut reviews = Vec::new();
    for (path, of, place) in [
        ("/validate", claims, r#""":"#),
        ("/validate", claims, r#""metadata":"#),
        ("/mutate", ("", "Pod"), r#""status":"#),
    ] {
        reviews.push((path, dense(of, place, "", BYTES), "\"allowed\":true"));
    }
    for (path, of, place, inner) in [
        ("/mutate", ("", "Pod"), r#""spec":{"containers":[],"volumes":"#, "}"),
        ("/validate", claims, r#""spec":{"devices":{"requests":[],"constraints":"#, "}}"),
    ] {
        reviews.push((path, dense(of, place, inner, BYTES), "more than 16384 values"));
    }
    for (path, body, words) in &reviews {
        let posts = (0..8).map(|_| process.post_when_there_is_room(path, body));
        for (status, said) in futures::future::join_all(posts).await {
            assert!(status == 200 && said.contains(words), "{path} {words}: {status} {said}");
        }
    }
    let grown = process.peak_mib() - before;
    println!("8 reviews of 4 MiB at once, five times: {grown} MiB more at the peak, from {before} MiB");
    // Four of them are in at a time, and one is looked at.
    assert!(grown < 64, "{grown} MiB more");
    assert_eq!(process.at.post(&process.authority, "/validate", good.to_string().as_bytes()).await.0, 200);
}

#[tokio::test]
async fn who_stops_in_the_middle_of_large_bodies_keeps_nobody_out() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    let mut halting = Vec::new();
    for _ in 0..8 {
        let mut stream = replica.connect(&bundle).await.unwrap();
        let head = format!("POST /validate HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{{", 4 << 20);
        stream.write_all(head.as_bytes()).await.unwrap();
        halting.push(stream);
    }
    // From the same address, so that nobody is ended for it: the room comes back by itself.
    let mut answers = Vec::new();
    until("some to be turned away for want of room", || {
        replica
            .metrics()
            .lines()
            .any(|line| line == "tranche_webhook_unread_requests_total{reason=\"no_room\"} 4")
    })
    .await;
    for stream in &mut halting {
        let mut answer = vec![0; 12];
        let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut answer)).await.expect("an answer");
        read.unwrap();
        answers.push(String::from_utf8(answer).unwrap());
    }
    answers.sort();
    let counts =
        ["HTTP/1.1 408", "HTTP/1.1 503"].map(|code| answers.iter().filter(|one| *one == code).count());
    assert_eq!(counts, [4, 4], "{answers:?}");
    assert_eq!(replica.review(&bundle, "/validate", CLAIM, claim("1Gi")).await["allowed"], true);
    replica.stop().await;
}

#[tokio::test]
async fn chunks_are_counted() {
    let api = cluster();
    let replica = start(&api, own(SHORT * 360)).await;
    replica.until_ready().await;
    let bundle = secret(&api)["ca.crt"].0.clone();
    let head =
        b"POST /validate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let review = br#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE","kind":{"kind":"Other"}}}"#;
    let chunked = |bytes: &[u8]| {
        let chunks = bytes
            .chunks(60_000)
            .map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat());
        [&head[..], &chunks.collect::<Vec<_>>().concat(), b"0\r\n\r\n"].concat()
    };
    assert!(replica.send(&bundle, &chunked(review)).await.contains("\"allowed\":true"));
    let answer = replica.send(&bundle, &chunked(&vec![b' '; (4 << 20) + 1])).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(replica.metric("tranche_webhook_unread_requests_total{reason=\"too_large\"} 1"));
    replica.stop().await;
}
