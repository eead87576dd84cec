//! A webhook that demands a certificate of its callers, and an API server that is told to show one: the way that
//! docs/webhook.md describes, with the certificate that the API server shows to kubelets, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{KAI, LIMIT, OTHER, Stage, Webhook, claim, kai_pod};
use crate::rig::wait_until;
use crate::test_cluster::sum;

const HOST: &str = "tranche-webhook.tranche-system.svc";
/// The common name of the certificate, as kubeadm has it as well.
const NAME: &str = "kube-apiserver-kubelet-client";
const HANDSHAKES: &str = "tranche_webhook_failed_handshakes_total";

/// Certificate and key, as files.
struct Caller {
    certificate: PathBuf,
    key: PathBuf,
}

impl Caller {
    /// One that the cluster's CA has signed.
    fn of_cluster(etc: &Path, name: &str) -> Self {
        Self { certificate: etc.join(format!("{name}.crt")), key: etc.join(format!("{name}.key")) }
    }

    /// The same name, signed by a CA of its own.
    fn stranger(folder: &Path) -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = rcgen::Issuer::new(params, rcgen::KeyPair::generate().unwrap());
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, NAME);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        let made = Self { certificate: folder.join("stranger.crt"), key: folder.join("stranger.key") };
        fs::write(&made.certificate, params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        fs::write(&made.key, key.serialize_pem()).unwrap();
        made
    }
}

impl Stage {
    /// Where the API server's keys are, and its admission configuration.
    fn etc(&self) -> PathBuf {
        PathBuf::from(self.rig.run(&["dir"]).trim()).join("etc")
    }

    /// What docs/webhook.md has: two files beside the API server's keys, and its flag. Taken back in the end.
    fn show_certificate(&self) {
        let etc = self.etc();
        let of = |name: &str| etc.join(name).display().to_string();
        let plugin = |name: &str| {
            json!({"name": name, "configuration": {"apiVersion": "apiserver.config.k8s.io/v1",
                "kind": "WebhookAdmissionConfiguration", "kubeConfigFile": of("webhooks.kubeconfig")}})
        };
        let admission = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration",
            "plugins": [plugin("ValidatingAdmissionWebhook"), plugin("MutatingAdmissionWebhook")]});
        let user =
            json!({"client-certificate": of("kubelet-client.crt"), "client-key": of("kubelet-client.key")});
        let kubeconfig =
            json!({"apiVersion": "v1", "kind": "Config", "users": [{"name": HOST, "user": user}]});
        self.rig.on_end(&["restart", "control", "apiserver"]);
        fs::write(of("webhooks.kubeconfig"), kubeconfig.to_string()).unwrap();
        fs::write(of("admission.yaml"), admission.to_string()).unwrap();
        self.rig.run(&["restart", "control", "apiserver"]);
    }

    fn bundle(&self) -> Vec<u8> {
        let secret: Value = serde_json::from_str(&self.rig.kubectl(&[
            "-n",
            super::SYSTEM,
            "get",
            "secret",
            "tranche-webhook-tls",
            "-o",
            "json",
        ]))
        .unwrap();
        let secret: k8s_openapi::api::core::v1::Secret = serde_json::from_value(secret).unwrap();
        secret.data.unwrap()["ca.crt"].0.clone()
    }

    /// Is a caller with this certificate answered at this port? In TLS 1.3 a client learns only from its first read that it was
    /// turned away.
    async fn is_let_in(&self, port: u16, caller: Option<&Caller>) -> bool {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&self.bundle()) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots);
        let config = match caller {
            None => config.with_no_client_auth(),
            Some(Caller { certificate, key }) => {
                let chain = vec![CertificateDer::from_pem_file(certificate).unwrap()];
                config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(key).unwrap()).unwrap()
            }
        };
        let exchange = async {
            let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("the webhook listens");
            let name = ServerName::try_from(HOST).unwrap();
            let Ok(mut stream) = TlsConnector::from(Arc::new(config)).connect(name, stream).await else {
                return false;
            };
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            answer.starts_with(b"HTTP/1.1 404")
        };
        tokio::time::timeout(LIMIT, exchange).await.expect("an end")
    }
}

/// The files do not outlast the test, also if it fails; the API server is started again without them.
struct Files(PathBuf);

impl Drop for Files {
    fn drop(&mut self) {
        for name in ["admission.yaml", "webhooks.kubeconfig"] {
            // Never written, perhaps.
            let _ = fs::remove_file(self.0.join(name));
        }
    }
}

fn failed(webhook: &Webhook) -> f64 {
    sum(&webhook.ask("/metrics").expect("metrics"), HANDSHAKES)
}

/// The webhook counts a failed handshake after the caller was told of it.
async fn until_failed(what: &str, webhook: &Webhook, is_enough: impl Fn(f64) -> bool) {
    wait_until(what, LIMIT, || async { is_enough(failed(webhook)).then_some(()) }).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn an_api_server_that_shows_its_certificate_is_answered_and_nobody_else_is() {
    let stage = Stage::set("webhook::callers");
    let etc = stage.etc();
    let _files = Files(etc.clone());
    let webhook = stage
        .start(&[
            format!("--webhook-client-ca={}", etc.join("ca.crt").display()),
            format!("--webhook-client-names={NAME}"),
        ])
        .await;
    let bad = stage.file("bad", &claim("bad", json!({"memory": "much"})));
    let good = stage.file("good", &claim("good", json!({"memory": "1Gi"})));
    let pod = stage.file("pod", &kai_pod("pod", json!({"gpu-fraction": "0.5"})));

    // An API server that shows none is turned away like anybody else: what may go unchecked goes.
    let said = stage.create(KAI, &pod, true).expect_err("it would run without a GPU");
    assert!(said.contains("failed calling webhook \"pods.tranche.dev\""), "{said}");
    stage.create(OTHER, &bad, true).unwrap_or_else(|said| panic!("{said}"));
    until_failed("the API server's handshakes to be counted", &webhook, |count| count > 0.0).await;

    stage.show_certificate();
    let refused = || async { stage.create(OTHER, &bad, true).err() };
    let said = wait_until("the API server to call the webhook", LIMIT, refused).await;
    assert!(said.contains("spec.devices.config[0].opaque.parameters.memory: "), "{said}");
    stage.create(OTHER, &good, true).unwrap_or_else(|said| panic!("{said}"));
    let made = stage.create(KAI, &pod, false).unwrap_or_else(|said| panic!("{said}"));
    assert!(made.contains("created"), "{made}");
    let claims = ["get", "pod", "pod", "-o", "jsonpath={.spec.resourceClaims[*].resourceClaimName}"];
    let named = stage.rig.kubectl(&[&["-n", KAI], &claims[..]].concat());
    assert!(named.contains("pod-gpu-share-"), "{named}");

    let before = failed(&webhook);
    assert!(stage.is_let_in(webhook.port, Some(&Caller::of_cluster(&etc, "kubelet-client"))).await);
    assert_eq!(failed(&webhook), before, "the API server is not turned away any more");
    assert!(!stage.is_let_in(webhook.port, None).await, "without a certificate");
    let other = Caller::of_cluster(&etc, "front-proxy");
    assert!(
        !stage.is_let_in(webhook.port, Some(&other)).await,
        "another name of the same CA, as every kubelet has one"
    );
    assert!(!stage.is_let_in(webhook.port, Some(&Caller::stranger(stage.files.path()))).await, "another CA");
    until_failed("three callers to be counted", &webhook, |count| count >= before + 3.0).await;
    assert_eq!(failed(&webhook), before + 3.0, "{}", stage.log());
    stage.create(OTHER, &bad, true).expect_err("the API server is still answered");
}
