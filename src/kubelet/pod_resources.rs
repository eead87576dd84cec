//! Asks kubelet which containers have which claims: its PodResources service (KEP-3695), which tells claims from
//! Kubernetes 1.34 on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::time::timeout;
use tonic::transport::Endpoint;

use super::pb::pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use super::pb::pod_resources::{ListPodResourcesRequest, ListPodResourcesResponse};

/// For connection and answer together.
const LIMIT: Duration = Duration::from_secs(5);
/// An answer of so many bytes is read. Kubelet tells of all pods: 256 with some containers are 100 KiB.
const BYTES_MAX: usize = 16 << 20;

/// A container that uses a claim; the claim is of the pod's namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerClaim {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    pub claim: String,
}

/// Kubelet did not tell.
#[derive(Debug, Error)]
pub enum PodResourcesError {
    #[error("kubelet cannot be reached at {socket}; is its folder pod-resources mounted?")]
    Unreachable { socket: PathBuf, source: tonic::transport::Error },
    #[error("kubelet did not answer at {socket} within {} s", LIMIT.as_secs())]
    TooSlow { socket: PathBuf },
    #[error("kubelet does not tell which containers have claims")]
    Refused(#[from] Box<tonic::Status>),
}

/// Kubelet's service; nothing is kept between two questions.
#[derive(Debug, Clone)]
pub struct PodResources {
    socket: PathBuf,
}

impl PodResources {
    /// Below kubelet's root directory.
    pub fn new(kubelet_dir: &Path) -> Self {
        Self { socket: kubelet_dir.join("pod-resources").join("kubelet.sock") }
    }

    /// All containers of the node that use claims, of whatever driver, in order.
    ///
    /// # Errors
    /// Kubelet is not there, takes longer than 5 s, refuses, or answers with more than 16 MiB.
    pub async fn container_claims(&self) -> Result<Vec<ContainerClaim>, PodResourcesError> {
        let answer = timeout(LIMIT, self.list()).await;
        let answer = answer.map_err(|_| PodResourcesError::TooSlow { socket: self.socket.clone() })??;
        let mut all = Vec::new();
        for pod in answer.pod_resources {
            for container in pod.containers {
                let claims = container.dynamic_resources.into_iter();
                all.extend(claims.filter(|claim| claim.claim_namespace == pod.namespace).map(|claim| {
                    ContainerClaim {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        container: container.name.clone(),
                        claim: claim.claim_name,
                    }
                }));
            }
        }
        all.sort();
        all.dedup();
        Ok(all)
    }

    async fn list(&self) -> Result<ListPodResourcesResponse, PodResourcesError> {
        let unreachable = |source| PodResourcesError::Unreachable { socket: self.socket.clone(), source };
        let endpoint =
            Endpoint::from_shared(format!("unix://{}", self.socket.display())).map_err(unreachable)?;
        let channel = endpoint.connect().await.map_err(unreachable)?;
        let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(BYTES_MAX);
        let answer = client.list(ListPodResourcesRequest {}).await.map_err(Box::new)?;
        Ok(answer.into_inner())
    }
}
