//! What all allocations of the cluster say together: no GPU may have two parties, none may be given twice over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::task::JoinHandle;

use crate::bed::PATIENCE;
use crate::rig::wait_until;
use crate::shares::mib;

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

fn users(claims: &[ResourceClaim]) -> BTreeMap<Gpu, Users> {
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
fn wrong(claims: &[ResourceClaim], grantable: &BTreeMap<Gpu, u64>) -> Vec<String> {
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

/// Looks at all claims again and again until it is ended.
pub struct Auditor {
    over: Arc<AtomicBool>,
    looks: Arc<AtomicUsize>,
    at_work: JoinHandle<Vec<String>>,
}

impl Auditor {
    /// Of the GPUs that there are now.
    pub async fn begin(client: &Client) -> Self {
        let grantable = grantable(client).await;
        assert!(!grantable.is_empty(), "no GPU can be shared");
        let (over, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let all = Api::<ResourceClaim>::all(client.clone());
        let (until, count) = (over.clone(), looks.clone());
        let at_work = tokio::spawn(async move {
            let mut found = Vec::new();
            while !until.load(Ordering::Relaxed) {
                // The API server may be away for a while.
                if let Ok(claims) = all.list(&ListParams::default()).await {
                    found.extend(wrong(&claims.items, &grantable));
                    count.fetch_add(1, Ordering::Relaxed);
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            found
        });
        Self { over, looks, at_work }
    }

    /// Fails if anything was wrong at any time. How often it was looked.
    pub async fn end(self) -> usize {
        self.over.store(true, Ordering::Relaxed);
        let found = self.at_work.await.expect("the auditor ends");
        assert!(found.is_empty(), "{found:#?}");
        let looks = self.looks.load(Ordering::Relaxed);
        assert!(looks > 0, "nothing was looked at");
        looks
    }
}

#[test]
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
        crate::bed::from(serde_json::json!({"metadata": {"name": name, "namespace": "x", "labels": labels},
            "spec": {}, "status": {"allocation": {"devices": {"results": [result], "config": grant}}}}))
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
