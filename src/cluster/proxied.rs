//! Pages of the node plugins, read through the API server's pod proxy: whoever may `get` `pods/proxy` in the driver's
//! namespace needs no way of their own to the nodes. Bounded in bytes, in time and in how many are asked at once.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::CallError;
use super::client::{KubeCluster, call};
use super::feed::Which;
use super::guarded::Misfit;
use super::reader::answer_up_to;

/// The longest page that is read: a thousand claims take some 1.5 MiB.
pub const PAGE_BYTES_MAX: usize = 4 << 20;
/// Nodes that are asked at once.
const AT_ONCE: usize = 8;
/// What one page may take, and what all may take together.
const PAGE_LIMIT: Duration = Duration::from_secs(5);
const ALL_LIMIT: Duration = Duration::from_secs(15);
/// The service account of the node plugin, by which its pods are found.
const ACCOUNT: &str = "tranche-node";
/// The name of the port with the metrics.
const PORT: &str = "ops";

/// A node plugin's pod that runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodePlugin {
    pub node: String,
    pub pod: String,
    port: i32,
}

/// What a node plugin answered.
#[derive(Debug)]
pub struct NodePage {
    pub node: String,
    /// The page, and whether it is whole: of a longer one than [`PAGE_BYTES_MAX`] the beginning.
    pub answer: Result<(Vec<u8>, bool), CallError>,
}

impl KubeCluster {
    /// The node plugins that run, in a namespace, on one node or on all.
    ///
    /// # Errors
    /// The API server does not answer, or does not let the caller list pods there.
    pub async fn node_plugins(
        &self,
        namespace: &str,
        node: Option<&str>,
    ) -> Result<Vec<NodePlugin>, CallError> {
        let mut fields = format!("spec.serviceAccountName={ACCOUNT},status.phase=Running");
        if let Some(node) = node {
            fields.push_str(&format!(",spec.nodeName={node}"));
        }
        let which = Which::In { namespace: namespace.to_owned(), fields };
        let mut plugins = Vec::new();
        let add = |pod: Result<Pod, Misfit<Pod>>| plugins.extend(pod.ok().as_ref().and_then(plugin));
        self.each_object(&which, self.limit(), || format!("LIST pods of namespace {namespace}"), add).await?;
        Ok(plugins)
    }

    /// Asks node plugins for a page, a few at a time. Each has an entry in the answer, in no order.
    pub async fn node_pages(&self, namespace: &str, plugins: Vec<NodePlugin>, path: &str) -> Vec<NodePage> {
        let end = Instant::now() + ALL_LIMIT;
        let mut open: BTreeMap<String, String> =
            plugins.iter().map(|plugin| (plugin.pod.clone(), plugin.node.clone())).collect();
        let mut pages = Vec::new();
        let asked = stream::iter(plugins).map(|plugin| async move {
            let answer = self.page(namespace, &plugin, path).await;
            (plugin.pod, NodePage { node: plugin.node, answer })
        });
        let mut asked = asked.buffer_unordered(AT_ONCE);
        while let Ok(Some((pod, page))) = tokio::time::timeout_at(end, asked.next()).await {
            open.remove(&pod);
            pages.push(page);
        }
        pages.extend(open.into_iter().map(|(pod, node)| {
            let what = format!("GET pods/proxy {namespace}/{pod}");
            NodePage { node, answer: Err(CallError::TimedOut { what, limit: ALL_LIMIT }) }
        }));
        pages
    }

    async fn page(
        &self,
        namespace: &str,
        plugin: &NodePlugin,
        path: &str,
    ) -> Result<(Vec<u8>, bool), CallError> {
        let NodePlugin { pod, port, .. } = plugin;
        let what = || format!("GET pods/proxy {namespace}/{pod}");
        let uri = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}");
        let get = async {
            let request = Request::get(uri).body(Vec::new()).map_err(kube::Error::HttpError)?;
            answer_up_to(PAGE_BYTES_MAX, &self.client(), request).await
        };
        let piece = call(PAGE_LIMIT, what, get).await?;
        Ok((piece.bytes, piece.whole))
    }
}

/// None: it is not ready, or says nothing of its node or port.
fn plugin(pod: &Pod) -> Option<NodePlugin> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    let is_ready =
        |one: &k8s_openapi::api::core::v1::PodCondition| one.type_ == "Ready" && one.status == "True";
    if !status.conditions.iter().flatten().any(is_ready) {
        return None;
    }
    let mut ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(PORT))?.container_port;
    Some(NodePlugin { node: spec.node_name.clone()?, pod: pod.metadata.name.clone()?, port })
}
