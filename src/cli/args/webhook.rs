//! How webhooks are served, as it was typed.

use clap::Args;

use super::OpsArgs;

/// How to serve webhooks.
#[derive(Debug, Clone, Default, Args)]
pub struct WebhookArgs {
    /// Where webhooks are served, by HTTPS; port 0 takes any, off serves none [default: 0.0.0.0:9443].
    #[arg(long, env = "WEBHOOK_ADDRESS", hide_env_values = true)]
    pub webhook_address: Option<String>,
    /// Folder with tls.crt and tls.key that somebody else keeps, such as cert-manager [default: none, they
    /// are made and renewed here].
    #[arg(long, env = "WEBHOOK_CERTIFICATES", hide_env_values = true)]
    pub webhook_certificates: Option<String>,
    /// Names and addresses by which the API server reaches the webhook, separated by commas [default:
    /// tranche-webhook.<namespace>.svc].
    #[arg(long, env = "WEBHOOK_NAMES", hide_env_values = true)]
    pub webhook_names: Option<String>,
    /// File with the CAs of those who may call, such as the one by which the API server is known: callers without a
    /// certificate of these CAs are turned away. The API server presents one only if its admission configuration
    /// says so [default: none, everybody may call].
    #[arg(long, env = "WEBHOOK_CLIENT_CA", hide_env_values = true)]
    pub webhook_client_ca: Option<String>,
    /// Common names or DNS names of which the caller's certificate must have one, separated by commas [default: any].
    #[arg(long, env = "WEBHOOK_CLIENT_NAMES", hide_env_values = true)]
    pub webhook_client_names: Option<String>,
    /// Secret in this process's namespace that keeps the certificates made here [default:
    /// tranche-webhook-tls].
    #[arg(long, env = "WEBHOOK_SECRET", hide_env_values = true)]
    pub webhook_secret: Option<String>,
    /// Name of the webhook configurations in which the API server is told of the CA [default: tranche].
    #[arg(long, env = "WEBHOOK_CONFIGURATION", hide_env_values = true)]
    pub webhook_configuration: Option<String>,
    /// How long a certificate made here lasts; it is renewed when a third of that is left [default: 2160h].
    #[arg(long, env = "WEBHOOK_CERTIFICATE_LIFE", hide_env_values = true)]
    pub webhook_certificate_life: Option<String>,
    /// How often certificates and configurations are looked at [default: 30s].
    #[arg(long, env = "WEBHOOK_CHECK_INTERVAL", hide_env_values = true)]
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
