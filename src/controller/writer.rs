//! Does what was decided, several claims at a time, as long as this process leads.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClaim, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use tokio::sync::mpsc;
use tracing::{Instrument, Span, debug, error_span};

use crate::cluster::allocation::{ClaimVersion, Marks};
use crate::cluster::eviction::Eviction;
use crate::cluster::{CallError, KubeCluster};
use crate::controller::grant;
use crate::controller::holds::ReleaseStep;
use crate::controller::lease::Gate;
use crate::controller::view::GpuRef;
use crate::controller::view::claim::{HOLD_DEVICE, HOLD_NODE, LOOKED, version};
use crate::controller::view::movable::{OwnerKind, PodOwner};
use crate::controller::write::{FINALIZER, Failure, Write, WriteOutcome};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::error_chain;
use crate::model::fnv1a;
use crate::model::names::HOLD_LABEL;
use crate::slices::ShareParts;

/// Writes under way at once: as many connections to the API server. Where a thousand claims came at once and the
/// scheduler bound their pods meanwhile, on two cores, 128 placed them 1.17 times as fast as 64 did, and 256 no
/// faster; an API server serves 600 by default.
const AT_ONCE: usize = 128;
/// Writes that are next, whatever is decided meanwhile; the others wait where they can still be passed.
pub const QUEUE_CAPACITY: usize = 16;
/// Answers that wait to be heard.
pub const ANSWERS_MAX: usize = 256;
/// The only request of a hold.
const HOLD_REQUEST: &str = "gpu";
const NAME_BYTES_MAX: usize = 253;

pub struct Writer {
    pub api: KubeCluster,
    pub gate: Gate,
    /// Of the holds.
    pub namespace: String,
    pub owner: Option<OwnerReference>,
}

impl Writer {
    /// Until the queue is closed and everything under way has ended.
    pub async fn run(self, mut writes: mpsc::Receiver<Write>, outcomes: mpsc::Sender<WriteOutcome>) {
        let mut at_work = FuturesUnordered::new();
        let mut open = true;
        while open || !at_work.is_empty() {
            tokio::select! {
                write = writes.recv(), if open && at_work.len() < AT_ONCE => match write {
                    Some(write) => {
                        let span = span(&write);
                        at_work.push(self.told(write).instrument(span));
                    }
                    None => open = false,
                },
                Some(outcome) = at_work.next() => {
                    // Nobody listens any more: the process ends.
                    let _ = outcomes.send(outcome).await;
                }
            }
        }
    }

    async fn told(&self, write: Write) -> WriteOutcome {
        let outcome = self.write(write).await;
        let (what, result) = outcome.labels();
        debug!(what, result, "answered");
        outcome
    }

    async fn write(&self, write: Write) -> WriteOutcome {
        match write {
            Write::Hold(gpu, parts) => {
                let result = self.hold(&gpu, parts).await;
                WriteOutcome::Held(gpu, result)
            }
            Write::WatchBarrier(at) => {
                // The same text again would change nothing, and the watch would bring nothing.
                let text = at.resource_version.clone();
                let marks = Marks { finalizers: None, annotations: vec![(LOOKED.to_owned(), Some(text))] };
                let result = self.gated(|| self.api.mark_claim(&at, &marks)).await;
                WriteOutcome::BarrierWritten(at.claim.uid, result.map(Box::new))
            }
            Write::Release(gpu, step) => {
                let uid = step.at().claim.uid.clone();
                WriteOutcome::Released(gpu.clone(), uid, self.release(&gpu, step).await)
            }
            Write::Allocate { claim, at, marks, allocation } => {
                WriteOutcome::Allocated(claim, self.allocate(at, &marks, *allocation).await.map(Box::new))
            }
            Write::Clear(claim, at) => {
                let result = self.gated(|| self.api.set_allocation(&at, None)).await;
                WriteOutcome::Cleared(claim, result.map(Box::new))
            }
            Write::Mark(claim, at, marks) => {
                let result = self.gated(|| self.api.mark_claim(&at, &marks)).await;
                WriteOutcome::Marked(claim, result.map(Box::new))
            }
            Write::Evict(pod) => {
                let result = self.gated(|| self.api.evict_pod(&pod)).await;
                WriteOutcome::Evicted(pod, result)
            }
            Write::Create(claim, object, allocation) => {
                let made = self.gated(|| self.api.create_claim(&object)).await;
                WriteOutcome::Created(claim, self.after_creation(made, allocation).await.map(Box::new))
            }
            Write::Move(pod, owner) => {
                let result = self.evict(&pod, &owner).await;
                WriteOutcome::Moved(pod.uid, result)
            }
        }
    }

    /// Nothing is begun that may end after somebody else has begun to lead.
    async fn gated<T, F>(&self, call: impl FnOnce() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        if !self.gate.is_open() {
            return Err(Failure::NotLeading);
        }
        call().await.map_err(failure)
    }

    /// Evicts a pod, if its owner makes another.
    async fn evict(&self, pod: &PodRef, owner: &PodOwner) -> Result<(), Failure> {
        if owner.kind == OwnerKind::Job {
            let why =
                self.gated(|| self.api.why_job_gives_up(&pod.namespace, &owner.name, &owner.uid)).await?;
            why.map_or(Ok(()), |why| Err(Failure::Refused(why)))?;
        }
        match self.gated(|| self.api.evict_pod(pod)).await? {
            Eviction::Evicted | Eviction::Gone => Ok(()),
            Eviction::Protected(words) => Err(Failure::Refused(words)),
        }
    }

    async fn hold(&self, gpu: &GpuRef, parts: Option<ShareParts>) -> Result<Box<ResourceClaim>, Failure> {
        let claim = self.hold_of(gpu);
        let made = self.gated(|| self.api.create_claim(&claim)).await?;
        let allocation = grant::hold(&gpu.node, HOLD_REQUEST, gpu.device.as_str(), parts);
        self.allocate(version(&made.metadata), &Marks::default(), allocation).await.map(Box::new)
    }

    async fn release(&self, gpu: &GpuRef, step: ReleaseStep) -> Result<(), Failure> {
        match step {
            ReleaseStep::Clear(at) => self.gated(|| self.api.set_allocation(&at, None)).await.map(drop),
            ReleaseStep::Restore(at) => {
                let allocation = grant::hold(&gpu.node, HOLD_REQUEST, gpu.device.as_str(), None);
                self.allocate(at, &Marks::default(), allocation).await.map(drop)
            }
            ReleaseStep::Delete(at) => self.gated(|| self.api.delete_claim(&at)).await,
        }
    }

    /// If the allocation fails, the claim is as any other that waits.
    async fn after_creation(
        &self,
        made: Result<ResourceClaim, Failure>,
        allocation: Option<Box<AllocationResult>>,
    ) -> Result<ResourceClaim, Failure> {
        let made = made?;
        let Some(allocation) = allocation else { return Ok(made) };
        let at = version(&made.metadata);
        Ok(self.allocate(at, &Marks::default(), *allocation).await.unwrap_or(made))
    }

    async fn allocate(
        &self,
        mut at: ClaimVersion,
        marks: &Marks,
        mut allocation: AllocationResult,
    ) -> Result<ResourceClaim, Failure> {
        if !marks.is_empty() {
            let marked = self.gated(|| self.api.mark_claim(&at, marks)).await?;
            at = version(&marked.metadata);
        }
        // Without it the scheduler of 1.36 and later tries in vain to add one.
        allocation.allocation_timestamp = Some(Time(Timestamp::now()));
        self.gated(|| self.api.set_allocation(&at, Some(&allocation))).await
    }

    fn hold_of(&self, gpu: &GpuRef) -> ResourceClaim {
        let exactly = ExactDeviceRequest {
            device_class_name: "gpu.nvidia.com".to_owned(),
            allocation_mode: Some("ExactCount".to_owned()),
            count: Some(1),
            ..ExactDeviceRequest::default()
        };
        let request = DeviceRequest {
            name: HOLD_REQUEST.to_owned(),
            exactly: Some(exactly),
            ..DeviceRequest::default()
        };
        let text = |pairs: &[(&str, &str)]| {
            Some(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
        };
        ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(self.namespace.clone()),
                name: Some(hold_name(gpu)),
                labels: text(&[(HOLD_LABEL, "true"), ("app.kubernetes.io/name", "tranche")]),
                annotations: text(&[(HOLD_NODE, gpu.node.as_str()), (HOLD_DEVICE, gpu.device.as_str())]),
                finalizers: Some(vec![FINALIZER.to_owned()]),
                owner_references: self.owner.clone().map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(ResourceClaimSpec {
                devices: Some(DeviceClaim { requests: Some(vec![request]), ..DeviceClaim::default() }),
            }),
            status: None,
        }
    }
}

/// The span of one write: with the claim that is written, or the GPU that a new claim is to hold.
fn span(write: &Write) -> Span {
    let of = |claim: &ClaimRef| {
        error_span!(
            "write",
            claim.uid = %claim.uid,
            claim.namespace = claim.namespace,
            claim.name = claim.name,
        )
    };
    match write {
        Write::Hold(gpu, _) => error_span!("write", %gpu),
        Write::Release(_, step) => of(&step.at().claim),
        Write::WatchBarrier(at)
        | Write::Clear(_, at)
        | Write::Mark(_, at, _)
        | Write::Allocate { at, .. } => of(&at.claim),
        Write::Evict(pod) | Write::Move(pod, _) => {
            error_span!("write", pod.uid = %pod.uid, pod.namespace = pod.namespace, pod.name = pod.name)
        }
        // It has no UID yet.
        Write::Create(_, claim, _) => {
            error_span!("write", claim.namespace = claim.metadata.namespace, claim.name = claim.metadata.name,)
        }
    }
}

/// One GPU, one name: a second hold of it cannot be created.
fn hold_name(gpu: &GpuRef) -> String {
    let name = format!("hold.{}.{}", gpu.device, gpu.node);
    if name.len() <= NAME_BYTES_MAX {
        return name;
    }
    let hash = fnv1a(name.bytes());
    format!("hold.{}.{hash:016x}", gpu.device)
}

fn failure(error: CallError) -> Failure {
    match &error {
        CallError::Conflict { .. } => Failure::Conflict,
        CallError::NotFound { .. } => Failure::Gone,
        CallError::Refused { code: 429, .. } => Failure::Busy(error_chain(&error)),
        CallError::Refused { code: 500.., .. } => Failure::Silent(error_chain(&error)),
        CallError::Refused { .. } | CallError::Forbidden { .. } => Failure::Refused(error_chain(&error)),
        CallError::TimedOut { .. } | CallError::Unreachable { .. } | CallError::Unreadable { .. } => {
            Failure::Silent(error_chain(&error))
        }
    }
}
