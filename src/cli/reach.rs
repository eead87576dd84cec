//! Which API server a person means.

use std::env;
use std::path::PathBuf;

use clap::Args;

use super::Usage;
use crate::cluster::{CallError, Endpoint};

/// How an administrator lets somebody see what `tranche top` and `tranche explain` look at: all pods, so not a tenant.
pub const BINDING: &str =
    "kubectl create clusterrolebinding tranche-viewer --clusterrole tranche-viewer --user NAME";

/// As kubectl is told it.
#[derive(Debug, Clone, Default, Args)]
pub struct ReachArgs {
    /// Kubeconfig, or several separated by colons [default: the pod's service account, else ~/.kube/config].
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

impl ReachArgs {
    /// The kubeconfig that was named, else the pod's service account, else `~/.kube/config`.
    ///
    /// # Errors
    /// There is none of them, or a context of the service account was named.
    pub fn endpoint(&self) -> Result<Endpoint, Usage> {
        let context = self.context.clone();
        if let Some(path) = self.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty()) {
            return Ok(Endpoint::Kubeconfig { path, context });
        }
        if env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            return match context {
                None => Ok(Endpoint::InCluster),
                Some(context) => Err(Usage(format!(
                    "--context {context}: a pod's service account has no contexts; give --kubeconfig as well"
                ))),
            };
        }
        let home = env::home_dir().map(|home| home.join(".kube/config")).filter(|path| path.exists());
        home.map(|path| Endpoint::Kubeconfig { path, context }).ok_or_else(|| {
            Usage("no cluster to ask: there is no ~/.kube/config; give --kubeconfig".to_owned())
        })
    }
}

/// A failed call, for the person who asked: who may not look is told whom to ask.
pub fn for_people(error: CallError) -> anyhow::Error {
    match error {
        CallError::Forbidden { what, message } => {
            anyhow::anyhow!(
                "{what}: you may not do that ({message}); ask for ClusterRole tranche-viewer ({BINDING})"
            )
        }
        other => other.into(),
    }
}
