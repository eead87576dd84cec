//! Which API server a person means.

use std::env;
use std::path::PathBuf;

use super::Usage;
use crate::cluster::Endpoint;

/// The kubeconfig that was named, else the pod's service account, else `~/.kube/config`.
///
/// # Errors
/// There is none of them.
pub fn endpoint(kubeconfig: Option<PathBuf>) -> Result<Endpoint, Usage> {
    if let Some(path) = kubeconfig.filter(|path| !path.as_os_str().is_empty()) {
        return Ok(Endpoint::Kubeconfig(path));
    }
    if env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        return Ok(Endpoint::InCluster);
    }
    let home = env::home_dir().map(|home| home.join(".kube/config")).filter(|path| path.exists());
    home.map(Endpoint::Kubeconfig)
        .ok_or_else(|| Usage("no cluster to ask: there is no ~/.kube/config; give --kubeconfig".to_owned()))
}
