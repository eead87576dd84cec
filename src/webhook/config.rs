//! What the webhook server is told at its start. `cli::settings` makes it from flags and environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::certificate::Lifetimes;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookSettings {
    /// Where HTTPS is served.
    pub address: SocketAddr,
    pub certificates: Certificates,
    /// None: whoever reaches the address may call.
    pub callers: Option<Callers>,
    pub timing: WebhookTiming,
}

/// Who may call: whoever shows a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Callers {
    /// PEM of the CAs of such certificates, read again when it changes.
    pub authorities: PathBuf,
    /// Common names or DNS names of which the certificate has one; empty: any.
    pub names: Vec<String>,
}

/// Who makes the certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Certificates {
    /// We do.
    Own(Own),
    /// Somebody else, into `tls.crt` and `tls.key` of this folder.
    Files(PathBuf),
}

/// Certificates of our own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// Where the Secret is.
    pub namespace: String,
    pub secret: String,
    /// Name of the validating and the mutating configuration; see [`Own::configurations`].
    pub configuration: String,
    /// Names and addresses by which the API server reaches us; the first is in the certificate's subject.
    pub names: Vec<String>,
    pub lifetimes: Lifetimes,
}

impl Own {
    /// Names of the configurations that call us. The second, which need not be there, is the mutating one for pods of
    /// KAI's scheduler: mutating webhooks are asked in the order of their configurations' names (Kubernetes' dynamic
    /// admission), and KAI's own comes by `mutating-kai-admission` as it is installed.
    pub fn configurations(&self) -> [String; 2] {
        [self.configuration.clone(), format!("before-kai.{}", self.configuration)]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WebhookTiming {
    /// How often certificates, configurations and the class are looked at when nothing else asks for it.
    pub check: Duration,
    /// How long new connections are still taken after the end was asked for: the API server learns of it a
    /// little later.
    pub linger: Duration,
}

impl WebhookTiming {
    pub const DEFAULT: Self = Self { check: Duration::from_secs(30), linger: Duration::from_secs(3) };
}
