//! What all allocations of the cluster say together: no GPU may have two parties, none may be given twice over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::rig::wait_until;
use crate::shares::mib;
use crate::test_cluster::PATIENCE;

/// Node and device.
type Gpu = (String, String);

#[derive(Debug, Default)]
struct Users {
    /// Claims of whole GPUs.
    whole: Vec<String>,
    held: bool,
    /// Shares, in MiB.
    shares: Vec<(String, u64)>,
}

impl Users {
    /// At no time. A hold beside a claim of the whole GPU is one that has lost its race: it ends, and no share
    /// comes before it is known to have won.
    fn is_wrong(&self, grantable: Option<&u64>) -> bool {
        let sum: u64 = self.shares.iter().map(|(_, mib)| mib).sum();
        let parties = self.whole.len() + usize::from(!self.shares.is_empty());
        parties > 1 || grantable.is_some_and(|all| sum > *all)
    }

    fn is_contested(&self) -> bool {
        self.held && !self.whole.is_empty()
    }
}

fn name(claim: &ResourceClaim) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&claim.metadata.namespace), part(&claim.metadata.name))
}

/// Device and MiB of everything that the controller granted the claim.
fn granted(claim: &ResourceClaim) -> Vec<(String, u64)> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let configs = allocation.iter().filter_map(|one| one.devices.as_ref()?.config.as_ref()).flatten();
    let grants = configs.filter_map(|config| Some(&config.opaque.as_ref()?.parameters.0));
    let devices = grants
        .filter(|grant| grant["kind"] == "ShareGrant")
        .flat_map(|grant| grant["devices"].as_array().cloned().unwrap_or_default());
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    devices.map(|device| (text(&device["device"]), mib(&text(&device["memory"])))).collect()
}

fn users<'a>(claims: impl IntoIterator<Item = &'a ResourceClaim>) -> BTreeMap<Gpu, Users> {
    let mut users: BTreeMap<Gpu, Users> = BTreeMap::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.iter().filter_map(|one| one.devices.as_ref()?.results.as_ref()).flatten();
        let hold = claim.metadata.labels.as_ref().is_some_and(|all| all.contains_key("tranche.dev/hold"));
        let granted = granted(claim);
        for result in results {
            let node = result.pool.split('/').next().unwrap_or_default().to_owned();
            let gpu = users.entry((node, result.device.clone())).or_default();
            match granted.iter().find(|(device, _)| *device == result.device) {
                Some((_, mib)) => gpu.shares.push((name(claim), *mib)),
                None if hold => gpu.held = true,
                None => gpu.whole.push(name(claim)),
            }
        }
    }
    users
}

/// What is wrong with these claims; `grantable`: MiB of each GPU.
fn wrong<'a>(
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
    grantable: &BTreeMap<Gpu, u64>,
) -> Vec<String> {
    let wrong =
        |gpu: &Gpu, users: &Users| users.is_wrong(grantable.get(gpu)).then(|| format!("{gpu:?}: {users:?}"));
    users(claims).iter().filter_map(|(gpu, users)| wrong(gpu, users)).collect()
}

/// Waits until no GPU is held that somebody else has.
pub async fn wait_settled(client: &Client) {
    let all = Api::<ResourceClaim>::all(client.clone());
    let settled = || async {
        let claims = all.list(&ListParams::default()).await.ok()?.items;
        (!users(&claims).values().any(Users::is_contested)).then_some(())
    };
    wait_until("holds that lost their race to end", PATIENCE, settled).await;
}

async fn grantable(client: &Client) -> BTreeMap<Gpu, u64> {
    let slices =
        Api::<ResourceSlice>::all(client.clone()).list(&ListParams::default()).await.expect("slices");
    let mut all = BTreeMap::new();
    for slice in slices.items {
        for device in slice.spec.devices.into_iter().flatten() {
            let mib = device.attributes.as_ref().and_then(|all| all.get("grantableMemoryMiB")?.int);
            if let Some(mib) = mib.and_then(|mib| u64::try_from(mib).ok()) {
                all.insert((slice.spec.pool.name.clone(), device.name), mib);
            }
        }
    }
    all
}

/// Follows all claims until it is ended, and looks at every state that they were in.
pub struct Auditor {
    end: oneshot::Sender<()>,
    at_work: JoinHandle<(usize, Vec<String>)>,
}

impl Auditor {
    /// Of the GPUs that there are now.
    pub async fn begin(client: &Client) -> Self {
        let grantable = grantable(client).await;
        assert!(!grantable.is_empty(), "no GPU can be shared");
        let (end, ended) = oneshot::channel::<()>();
        let all = Api::<ResourceClaim>::all(client.clone());
        // Begins anew where the API server was away for a while.
        let mut events = watcher(all, watcher::Config::default()).default_backoff().boxed();
        let at_work = tokio::spawn(async move {
            let (mut known, mut listed) = (BTreeMap::new(), BTreeMap::new());
            let (mut looks, mut found) = (0, Vec::new());
            let mut ended = std::pin::pin!(ended);
            loop {
                let event = tokio::select! {
                    _ = &mut ended => return (looks, found),
                    event = events.next() => event.expect("a watch has no end"),
                };
                match event {
                    Ok(Event::Init) => listed.clear(),
                    Ok(Event::InitApply(claim)) => drop(listed.insert(claim.metadata.uid.clone(), claim)),
                    Ok(Event::InitDone) => known = std::mem::take(&mut listed),
                    Ok(Event::Apply(claim)) => drop(known.insert(claim.metadata.uid.clone(), claim)),
                    Ok(Event::Delete(claim)) => drop(known.remove(&claim.metadata.uid)),
                    Err(_) => continue,
                }
                found.extend(wrong(known.values(), &grantable));
                looks += 1;
            }
        });
        Self { end, at_work }
    }

    /// Fails if anything was wrong at any time. How many states were looked at.
    pub async fn end(self) -> usize {
        self.end.send(()).expect("the auditor is at work");
        let (looks, found) = self.at_work.await.expect("the auditor ends");
        assert!(found.is_empty(), "{found:#?}");
        assert!(looks > 0, "nothing was looked at");
        looks
    }
}

/// Counts what is written to a claim, and how often it is given an allocation that it did not have.
pub struct Writes {
    counts: Arc<Counts>,
    at_work: JoinHandle<()>,
}

#[derive(Default)]
struct Counts {
    all: AtomicUsize,
    allocations: AtomicUsize,
}

impl Writes {
    /// Returns when the claim, which is not made yet, is watched.
    pub async fn begin(client: &Client, namespace: &str, name: &str) -> Self {
        let claims = Api::<ResourceClaim>::namespaced(client.clone(), namespace);
        let one = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut events = watcher(claims, one).default_backoff().boxed();
        let counts = Arc::new(Counts::default());
        let begun = async { while !matches!(events.next().await, Some(Ok(Event::InitDone))) {} };
        tokio::time::timeout(PATIENCE, begun).await.expect("claims can be watched");
        let counter = counts.clone();
        let at_work = tokio::spawn(async move {
            let mut had = false;
            while let Some(event) = events.next().await {
                let (Ok(Event::Apply(claim)) | Ok(Event::InitApply(claim))) = event else { continue };
                let has = claim.status.is_some_and(|status| status.allocation.is_some());
                counter.allocations.fetch_add(usize::from(has && !had), Ordering::Relaxed);
                counter.all.fetch_add(1, Ordering::Relaxed);
                had = has;
            }
        });
        Self { counts, at_work }
    }

    /// Its creation is one.
    pub fn all(&self) -> usize {
        self.counts.all.load(Ordering::Relaxed)
    }

    pub fn allocations(&self) -> usize {
        self.counts.allocations.load(Ordering::Relaxed)
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        self.at_work.abort();
    }
}

#[test]
#[ignore = "needs a rig"]
fn what_is_wrong_is_found() {
    let claim = |name: &str, hold: bool, mib: Option<u64>| -> ResourceClaim {
        let grant = mib.map(|mib| {
            serde_json::json!([{"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com",
                "parameters": {"kind": "ShareGrant", "devices": [{"device": "gpu-0", "memory": format!("{mib}Mi")}]}}}])
        });
        let labels =
            if hold { serde_json::json!({"tranche.dev/hold": "true"}) } else { serde_json::json!({}) };
        let result =
            serde_json::json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "a", "device": "gpu-0"});
        crate::test_cluster::from(
            serde_json::json!({"metadata": {"name": name, "namespace": "x", "labels": labels},
            "spec": {}, "status": {"allocation": {"devices": {"results": [result], "config": grant}}}}),
        )
    };
    let gpus = BTreeMap::from([(("a".to_owned(), "gpu-0".to_owned()), 1000)]);
    let found = |claims: &[ResourceClaim]| wrong(claims, &gpus).len();
    let (hold, whole) = (claim("hold", true, None), claim("whole", false, None));
    let (half, more) = (claim("half", false, Some(500)), claim("more", false, Some(501)));
    assert_eq!(found(&[hold.clone(), half.clone(), claim("other", false, Some(500))]), 0);
    assert_eq!(found(std::slice::from_ref(&whole)), 0);
    assert_eq!(found(&[hold.clone(), half.clone(), more]), 1, "over-committed");
    assert_eq!(found(&[whole.clone(), half]), 1, "a whole GPU and a share");
    assert_eq!(found(&[whole.clone(), hold.clone()]), 0, "a hold that lost its race");
    assert!(users(&[whole.clone(), hold]).values().all(Users::is_contested));
    assert_eq!(found(&[whole.clone(), whole]), 1, "given twice");
}
