//! The DRA service, v1 and v1beta1 over one implementation: asks [`Claims`], keeps the deadline,
//! and answers for every asked claim whatever comes back.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tracing::warn;

use super::pb::dra::dra_plugin_server::DraPlugin as V1;
use super::pb::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use super::pb::dra_v1beta1::dra_plugin_server::DraPlugin as V1beta1;
use super::{Claims, Counters, Prepared};
use crate::model::claim::{ClaimRef, PreparedDevice};
use crate::model::names::{ClaimUid, RequestName};

/// Claims in one call. Kubelet sends one pod's, of which there are at most some dozens.
pub const MAX_CLAIMS: usize = 256;

/// Calls under way at once, those that kubelet gave up on included.
pub const MAX_CALLS: usize = 512;

/// What [`Claims`] answered, by claim.
type Answers<T> = BTreeMap<ClaimUid, Result<T, String>>;

#[derive(Clone)]
pub(super) struct Dra {
    claims: Arc<dyn Claims>,
    limit: Duration,
    places: Arc<Semaphore>,
    work: TaskTracker,
    counters: Arc<Counters>,
}

impl Dra {
    pub(super) fn new(claims: Arc<dyn Claims>, limit: Duration, counters: Arc<Counters>) -> Self {
        let places = Arc::new(Semaphore::new(MAX_CALLS));
        Self { claims, limit, places, work: TaskTracker::new(), counters }
    }

    /// The calls' work, which goes on when a caller leaves: wait for it before the process ends.
    pub(super) fn work(&self) -> &TaskTracker {
        &self.work
    }

    async fn prepare(
        &self,
        asked: NodePrepareResourcesRequest,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let answers = self
            .call("preparing", asked.claims, |claims, asked| async move { claims.prepare(asked).await })
            .await?;
        let claims = answers.into_iter().map(|(uid, answer)| (uid, prepared(answer))).collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn unprepare(
        &self,
        asked: NodeUnprepareResourcesRequest,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let answers = self
            .call("unpreparing", asked.claims, |claims, asked| async move { claims.unprepare(asked).await })
            .await?;
        let claims = answers
            .into_iter()
            .map(|(uid, answer)| {
                (uid, NodeUnprepareResourceResponse { error: answer.err().unwrap_or_default() })
            })
            .collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }

    /// One answer per asked UID: that of [`Claims`], or words why there is none.
    async fn call<T, W, F>(
        &self,
        verb: &str,
        asked: Vec<Claim>,
        work: W,
    ) -> Result<HashMap<String, Result<T, String>>, Status>
    where
        T: Send + 'static,
        W: FnOnce(Arc<dyn Claims>, Vec<ClaimRef>) -> F + Send + 'static,
        F: Future<Output = Answers<T>> + Send + 'static,
    {
        let (sound, mut answers) = sorted(self.admitted(asked)?);
        if sound.is_empty() {
            return Ok(answers);
        }
        let (mut given, missing) = self.bounded(verb, sound.clone(), work).await?;
        for claim in sound {
            let answer = given.remove(&claim.uid).unwrap_or_else(|| {
                self.counters.missing_answers.fetch_add(1, Relaxed);
                warn!(%claim, "{verb}: {missing}");
                Err(format!("{verb} claim {claim}: {missing}"))
            });
            answers.insert(claim.uid.to_string(), answer.map_err(|error| never_empty(verb, &claim, error)));
        }
        for uid in given.keys() {
            warn!(%uid, "{verb}: an answer for a claim that was not asked for is dropped");
        }
        Ok(answers)
    }

    fn admitted(&self, asked: Vec<Claim>) -> Result<Vec<Claim>, Status> {
        if asked.len() <= MAX_CLAIMS {
            return Ok(asked);
        }
        self.counters.refused_calls.fetch_add(1, Relaxed);
        Err(Status::invalid_argument(format!(
            "{} claims in one call; the limit is {MAX_CLAIMS}: ask in smaller batches",
            asked.len()
        )))
    }

    /// Runs the work in a task of its own, which outlives a caller that leaves, and waits for it up
    /// to the limit. Second: what to say about a claim that has no answer.
    async fn bounded<T, W, F>(
        &self,
        verb: &str,
        asked: Vec<ClaimRef>,
        work: W,
    ) -> Result<(Answers<T>, String), Status>
    where
        T: Send + 'static,
        W: FnOnce(Arc<dyn Claims>, Vec<ClaimRef>) -> F + Send + 'static,
        F: Future<Output = Answers<T>> + Send + 'static,
    {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            self.counters.refused_calls.fetch_add(1, Relaxed);
            Status::resource_exhausted(format!(
                "{MAX_CALLS} calls are under way, which is the limit; {verb} again later"
            ))
        })?;
        let claims = Arc::clone(&self.claims);
        let task = self.work.spawn(async move {
            let answers = work(claims, asked).await;
            drop(place);
            answers
        });
        Ok(match timeout(self.limit, task).await {
            Ok(Ok(given)) => (given, "the driver gave no answer; kubelet will ask again".to_owned()),
            Ok(Err(_)) => {
                (Answers::new(), "the driver failed (its log says where); kubelet will ask again".to_owned())
            }
            Err(_) => {
                self.counters.late_calls.fetch_add(1, Relaxed);
                (Answers::new(), late(self.limit))
            }
        })
    }
}

fn late(limit: Duration) -> String {
    format!(
        "not done after {} s, the deadline of a call; the work goes on, kubelet will ask again",
        limit.as_secs_f32()
    )
}

/// An empty error would read as success.
fn never_empty(verb: &str, claim: &ClaimRef, error: String) -> String {
    if error.is_empty() { format!("{verb} claim {claim} failed; no reason was given") } else { error }
}

/// The claims to work on, each once, in UID order; and the answers for those that make no sense.
fn sorted<T>(asked: Vec<Claim>) -> (Vec<ClaimRef>, HashMap<String, Result<T, String>>) {
    let mut sound: BTreeMap<String, ClaimRef> = BTreeMap::new();
    let mut refused = HashMap::new();
    for claim in asked {
        let uid = claim.uid.clone();
        let problem = match (as_ref(claim), sound.get(&uid)) {
            (Ok(claim), None) => {
                sound.insert(uid, claim);
                continue;
            }
            (Ok(again), Some(first)) if again == *first => continue,
            (Ok(again), Some(first)) => {
                format!(
                    "two claims with the same UID in one call: {first} and {}/{}",
                    again.namespace, again.name
                )
            }
            (Err(problem), _) => problem,
        };
        refused.insert(uid, Err(problem));
    }
    sound.retain(|uid, _| !refused.contains_key(uid));
    (sound.into_values().collect(), refused)
}

fn as_ref(claim: Claim) -> Result<ClaimRef, String> {
    let uid = ClaimUid::parse(&claim.uid)
        .map_err(|error| format!("claim {}/{}: {error}", claim.namespace, claim.name))?;
    if claim.namespace.is_empty() || claim.name.is_empty() {
        return Err(format!("claim with UID {uid} has no namespace or no name"));
    }
    Ok(ClaimRef { namespace: claim.namespace, name: claim.name, uid })
}

fn prepared(answer: Prepared) -> NodePrepareResourceResponse {
    match answer {
        Ok(devices) => NodePrepareResourceResponse {
            devices: devices.into_iter().map(device).collect(),
            error: String::new(),
        },
        Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error },
    }
}

/// Kubelet matches containers' requests with base names: one with a subrequest would match none.
fn device(device: PreparedDevice) -> Device {
    let base = |request: String| RequestName::new(request).base().to_owned();
    let mut request_names: Vec<String> = device.requests.into_iter().map(base).collect();
    request_names.dedup();
    Device {
        request_names,
        pool_name: device.pool.to_string(),
        device_name: device.device.to_string(),
        cdi_device_ids: device.cdi_ids,
        share_id: device.share_id,
    }
}

#[tonic::async_trait]
impl V1 for Dra {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        self.prepare(request.into_inner()).await
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        self.unprepare(request.into_inner()).await
    }
}

#[tonic::async_trait]
impl V1beta1 for Dra {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        self.prepare(request.into_inner()).await
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        self.unprepare(request.into_inner()).await
    }
}
