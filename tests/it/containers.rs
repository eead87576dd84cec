//! Which containers have claims, as kubelet tells on its pod-resources socket: a server of the same protocol stands for
//! kubelet.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tranche::kubelet::pb::pod_resources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use tranche::kubelet::pb::pod_resources::{
    ContainerResources, DynamicResource, ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use tranche::kubelet::{self, ContainerClaim};
use tranche::model::claim::PodRef;
use tranche::node::containers::{ContainerWatch, Containers};

use crate::mock_api::PATIENCE;
use crate::site::{Claim, Site};

const POD: &str = "11111111-0000-4000-8000-000000000001";
const QUICK: Duration = Duration::from_millis(20);

/// What kubelet knows of its pods.
#[derive(Clone, Default)]
struct FakeKubelet {
    pods: Arc<Mutex<Vec<PodResources>>>,
}

#[tonic::async_trait]
impl PodResourcesLister for FakeKubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.pods.lock().unwrap().clone();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}

impl FakeKubelet {
    /// Serves below kubelet's folder until the test ends.
    fn serve(&self, kubelet_dir: &Path) {
        let folder = kubelet_dir.join("pod-resources");
        std::fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("kubelet.sock")).unwrap();
        let service = PodResourcesListerServer::new(self.clone());
        let incoming = UnixListenerStream::new(listener);
        tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(service, incoming));
    }

    /// A pod of the namespace; each container with the claims that it names.
    fn runs(&self, namespace: &str, name: &str, containers: &[(&str, &[&str])]) {
        let claims = |names: &[&str]| {
            let claim = |name: &&str| DynamicResource {
                claim_name: (*name).to_owned(),
                claim_namespace: namespace.to_owned(),
            };
            names.iter().map(claim).collect()
        };
        let containers = containers.iter().map(|(name, names)| ContainerResources {
            name: (*name).to_owned(),
            dynamic_resources: claims(names),
        });
        let (name, namespace) = (name.to_owned(), namespace.to_owned());
        self.pods.lock().unwrap().push(PodResources { name, namespace, containers: containers.collect() });
    }
}

/// The loop on a node that is called `team`'s.
struct Run {
    told: watch::Receiver<Containers>,
    failures: Counter,
    stop: CancellationToken,
}

impl Run {
    fn start(site: &Site, plugin: &crate::site::PluginRun) -> Self {
        let kubelet = kubelet::PodResources::new(&site.path("kubelet"));
        let (failures, stop) = (Counter::default(), CancellationToken::new());
        let (containers, told) =
            ContainerWatch::new(kubelet, plugin.preparer.executor.clone(), failures.clone());
        tokio::spawn(containers.with_pace(QUICK).run(stop.clone()));
        Self { told, failures, stop }
    }

    /// Waits until kubelet did not tell.
    async fn until_counted(&self) {
        let counted = async {
            while self.failures.get() == 0 {
                tokio::time::sleep(QUICK).await;
            }
        };
        tokio::time::timeout(PATIENCE, counted).await.expect("kubelet is asked");
    }

    async fn until_named(&mut self, claim: &Claim, pod: &str, names: &str) {
        let pod = PodRef { namespace: claim.id().namespace, name: pod.into(), uid: POD.into() };
        let named = self.told.wait_for(|told| told.named(&claim.id(), &pod) == names);
        let found = tokio::time::timeout(PATIENCE, named).await.is_ok();
        assert!(found, "{names:?} of {pod}: {:?}", self.told.borrow());
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test]
async fn containers_are_named_while_a_claim_has_a_device() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let kubelet = FakeKubelet::default();
    kubelet.serve(&site.path("kubelet"));
    kubelet.runs("team", "p", &[("main", &["mine", "other"]), ("helper", &["mine"]), ("idle", &[])]);
    kubelet.runs("team", "second", &[("worker", &["mine"])]);
    kubelet.runs("elsewhere", "p", &[("thief", &["mine"])]);
    let mut run = Run::start(&site, &plugin);
    let mine = Claim::new("mine", &["gpu-0"]).reserved_for(&[POD]);
    site.api.put(&mine);
    plugin.prepared(&mine, "first").await;
    run.until_named(&mine, "p", "helper,main").await;
    run.until_named(&mine, "second", "worker").await;
    run.until_named(&mine, "third", "").await;
    // A pod that comes to the claim later changes nothing in the ledger.
    kubelet.runs("team", "third", &[("late", &["mine"])]);
    run.until_named(&mine, "third", "late").await;
    plugin.unprepare(&mine).await.unwrap();
    run.until_named(&mine, "p", "").await;
    assert_eq!((run.told.borrow().clone(), run.failures.get()), (Containers::default(), 0));
}

#[tokio::test]
async fn what_kubelet_does_not_tell_is_counted_and_asked_again() {
    let site = Site::new();
    let plugin = site.start_plugin();
    let mine = Claim::new("mine", &["gpu-0"]).reserved_for(&[POD]);
    site.api.put(&mine);
    let mut run = Run::start(&site, &plugin);
    plugin.prepared(&mine, "without kubelet's socket").await;
    run.until_counted().await;
    let kubelet = FakeKubelet::default();
    kubelet.runs("team", "p", &[("main", &["mine"])]);
    kubelet.serve(&site.path("kubelet"));
    run.until_named(&mine, "p", "main").await;
}

#[tokio::test]
async fn an_answer_is_bounded_and_a_kubelet_that_is_not_there_is_told_with_its_place() {
    let site = Site::new();
    let folder = site.path("kubelet");
    let asked = kubelet::PodResources::new(&folder);
    let error = asked.container_claims().await.unwrap_err().to_string();
    assert!(error.contains("pod-resources/kubelet.sock") && error.contains("mounted"), "{error}");
    let kubelet = FakeKubelet::default();
    kubelet.serve(&folder);
    kubelet.runs("team", "p", &[("main", &["mine"])]);
    let one = ContainerClaim {
        namespace: "team".into(),
        pod: "p".into(),
        container: "main".into(),
        claim: "mine".into(),
    };
    assert_eq!(asked.container_claims().await.unwrap(), [one]);
    kubelet.runs("team", &"x".repeat(17 << 20), &[]);
    let error = tranche::model::error_chain(&asked.container_claims().await.unwrap_err());
    assert!(error.contains("does not tell") && error.contains("too large"), "{error}");
}
