//! How webhooks are served, as it was typed.

use clap::Args;

use super::OpsArgs;

/// How to serve webhooks.
#[derive(Debug, Clone, Default, Args)]
pub struct WebhookArgs {
    /// Where webhooks are served, by HTTPS; port 0 takes any, off serves none [default: 0.0.0.0:9443].
    #[arg(long, env = "TRANCHE_WEBHOOK_ADDRESS", hide_env_values = true)]
    pub webhook_address: Option<String>,
    /// Folder with tls.crt and tls.key that another program, such as cert-manager, keeps up to date [default: none,
    /// they are made and renewed here].
    #[arg(long, env = "TRANCHE_WEBHOOK_CERTIFICATES", hide_env_values = true)]
    pub webhook_certificates: Option<String>,
    /// Names and addresses by which the API server reaches the webhook, separated by commas [default:
    /// tranche-webhook.<namespace>.svc].
    #[arg(long, env = "TRANCHE_WEBHOOK_NAMES", hide_env_values = true)]
    pub webhook_names: Option<String>,
    /// File with the CAs of permitted callers, such as the CA of the API server's client certificate: callers without a
    /// certificate of these CAs are rejected. The API server presents a certificate only if its admission
    /// configuration says so [default: none, everybody may call].
    #[arg(long, env = "TRANCHE_WEBHOOK_CLIENT_CA", hide_env_values = true)]
    pub webhook_client_ca: Option<String>,
    /// Common names or DNS names, separated by commas; the caller's certificate must have one of them [default: any].
    #[arg(long, env = "TRANCHE_WEBHOOK_CLIENT_NAMES", hide_env_values = true)]
    pub webhook_client_names: Option<String>,
    /// Secret in this process's namespace that keeps the certificates made here [default:
    /// tranche-webhook-tls].
    #[arg(long, env = "TRANCHE_WEBHOOK_SECRET", hide_env_values = true)]
    pub webhook_secret: Option<String>,
    /// Name of the webhook configurations into which the CA is written [default: tranche].
    #[arg(long, env = "TRANCHE_WEBHOOK_CONFIGURATION", hide_env_values = true)]
    pub webhook_configuration: Option<String>,
    /// How long a certificate made here is valid; it is renewed when a third of that time is left [default: 2160h].
    #[arg(long, env = "TRANCHE_WEBHOOK_CERTIFICATE_LIFE", hide_env_values = true)]
    pub webhook_certificate_life: Option<String>,
    /// How often certificates and configurations are checked [default: 30s].
    #[arg(long, env = "TRANCHE_WEBHOOK_CHECK_INTERVAL", hide_env_values = true)]
    pub webhook_check_interval: Option<String>,
}

/// How to serve webhooks in a process of their own.
#[derive(Debug, Clone, Default, Args)]
pub struct WebhookRunArgs {
    #[command(flatten)]
    pub webhook: WebhookArgs,
    /// Namespace of this process's own pod: the certificates' Secret is there (required).
    #[arg(long, env = "POD_NAMESPACE", hide_env_values = true)]
    pub pod_namespace: Option<String>,
    #[command(flatten)]
    pub ops: OpsArgs,
    /// Kubeconfig to use instead of the pod's service account.
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<String>,
}
