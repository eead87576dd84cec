//! A Lease (coordination.k8s.io): who of several controllers may write.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};

use super::CallError;
use super::client::{KubeCluster, call};

/// Which Lease object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

/// A lease as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredLease {
    /// None: given up in order.
    pub holder: Option<String>,
    pub duration: Duration,
    /// Any change of it is a sign of life; its time is another machine's.
    pub resource_version: String,
    pub transitions: i32,
    /// By the holder's clock.
    pub renewed: Option<Timestamp>,
    acquired: Option<MicroTime>,
}

/// Who is to hold it from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseHolder {
    /// None: given up.
    pub identity: Option<String>,
    pub duration: Duration,
}

impl KubeCluster {
    pub async fn lease(&self, at: &LeaseName) -> Result<Option<StoredLease>, CallError> {
        let what = || format!("GET leases {}/{}", at.namespace, at.name);
        match call(self.limit(), what, self.leases(at).get(&at.name)).await {
            Ok(lease) => Ok(Some(read(lease))),
            Err(CallError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates it, or writes over the version that was seen. [`CallError::Conflict`]: somebody else was first.
    pub async fn write_lease(
        &self,
        at: &LeaseName,
        seen: Option<&StoredLease>,
        holder: &LeaseHolder,
    ) -> Result<StoredLease, CallError> {
        let now = MicroTime(Timestamp::now());
        let same = seen.is_some_and(|seen| seen.holder == holder.identity);
        let transitions = seen.map_or(0, |seen| seen.transitions.saturating_add(i32::from(!same)));
        let acquired = seen.and_then(|seen| seen.acquired.clone()).filter(|_| same);
        let lease = Lease {
            metadata: ObjectMeta {
                namespace: Some(at.namespace.clone()),
                name: Some(at.name.clone()),
                resource_version: seen.map(|seen| seen.resource_version.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.identity.clone().unwrap_or_default()),
                lease_duration_seconds: i32::try_from(holder.duration.as_secs().max(1)).ok(),
                acquire_time: Some(acquired.unwrap_or_else(|| now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(transitions),
                ..LeaseSpec::default()
            }),
        };
        let (api, post) = (self.leases(at), PostParams::default());
        let stored = match seen {
            None => {
                let what = || format!("CREATE leases {}/{}", at.namespace, at.name);
                call(self.limit(), what, api.create(&post, &lease)).await
            }
            Some(_) => {
                let what = || format!("UPDATE leases {}/{}", at.namespace, at.name);
                call(self.limit(), what, api.replace(&at.name, &post, &lease)).await
            }
        };
        stored.map(read)
    }

    fn leases(&self, at: &LeaseName) -> Api<Lease> {
        Api::namespaced(self.client(), &at.namespace)
    }
}

fn read(lease: Lease) -> StoredLease {
    let spec = lease.spec.unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    StoredLease {
        holder: spec.holder_identity.filter(|holder| !holder.is_empty()),
        duration: Duration::from_secs(seconds.unwrap_or(0)),
        resource_version: lease.metadata.resource_version.unwrap_or_default(),
        transitions: spec.lease_transitions.unwrap_or(0),
        renewed: spec.renew_time.map(|time| time.0),
        acquired: spec.acquire_time,
    }
}
