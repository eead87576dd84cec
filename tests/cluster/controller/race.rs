//! Pods for whole GPUs and for shares at once: no GPU serves both.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

use super::{create, results};
use crate::manifests::{as_nobody, claim, gpu, user_of};

/// Rounds; more with TRANCHE_ROUNDS.
const ROUNDS: usize = 3;

/// Looks at all claims again and again: how often was looked, and what was wrong.
async fn watch(all: Api<ResourceClaim>, over: Arc<AtomicBool>, looks: Arc<AtomicUsize>) -> Vec<String> {
    let mut wrong = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let claims = all.list(&ListParams::default()).await.expect("claims can be listed").items;
        let mut users: BTreeMap<String, Vec<(String, bool)>> = BTreeMap::new();
        for claim in
            claims.iter().filter(|claim| claim.metadata.namespace.as_deref() != Some("tranche-system"))
        {
            for (device, granted) in results(claim) {
                let name = claim.metadata.name.clone().unwrap_or_default();
                users.entry(device).or_default().push((name, granted));
            }
        }
        let contested = |users: &Vec<(String, bool)>| {
            let whole = users.iter().filter(|(_, granted)| !granted).count();
            whole > 1 || (whole == 1 && users.len() > 1)
        };
        wrong.extend(
            users.into_iter().filter(|(_, users)| contested(users)).map(|found| format!("{found:?}")),
        );
        looks.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
    }
    wrong
}

#[tokio::test]
async fn whole_gpus_and_shares_race_and_no_gpu_serves_both() {
    let Some(bed) = super::bed("whole_gpus_and_shares_race_and_no_gpu_serves_both").await else { return };
    let rounds =
        std::env::var("TRANCHE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    let gpus = bed
        .published(super::NODE)
        .await
        .into_iter()
        .filter(|one| one.attributes.as_ref().is_some_and(|all| all.contains_key("grantableMemoryMiB")));
    let gpus = gpus.count();
    assert!(gpus >= 2, "the node has {gpus} GPUs");
    let (over, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let watcher = tokio::spawn(watch(Api::all(bed.client.clone()), over.clone(), looks.clone()));
    for round in 0..rounds {
        // As many as fit: whole ones on all GPUs but one, and two shares there.
        let whole: Vec<String> = (1..gpus).map(|nth| format!("whole-{round}-{nth}")).collect();
        let parts: Vec<String> = (0..2).map(|nth| format!("part-{round}-{nth}")).collect();
        let wholes = async {
            for name in &whole {
                bed.create(claim(name, json!({"requests": [gpu("gpu")]}))).await;
                bed.create(as_nobody(user_of(name, name))).await;
            }
        };
        let shares = async {
            for name in &parts {
                create(&bed, name, json!({"fraction": "0.4"})).await;
            }
        };
        tokio::join!(wholes, shares);
        for name in whole.iter().chain(&parts) {
            bed.wait_ready(name).await;
        }
        let pods = bed.api::<k8s_openapi::api::core::v1::Pod>();
        pods.delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("pods can be deleted");
        for name in whole.iter().chain(&parts) {
            bed.gone(name).await;
        }
        bed.api::<ResourceClaim>()
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("claims can be deleted");
    }
    over.store(true, Ordering::Relaxed);
    let wrong = watcher.await.expect("the watcher ends");
    println!("{rounds} rounds, {} looks", looks.load(Ordering::Relaxed));
    assert!(wrong.is_empty(), "{wrong:#?}");
    bed.end().await;
}
