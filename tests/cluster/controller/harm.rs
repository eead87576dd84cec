//! What is done behind the controller's back: to GPUs, to claims, to allocations.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::books::{Auditor, Writes};
use super::place::{env, grantable_mib};
use super::{
    CLASS, NODE, WAITS, create, create_hollow, create_waiting, results, share, wait_metric, wait_placed,
    wait_told,
};
use crate::discovery::{AtEnd, wait_well};
use crate::hollow::{self, wait_bound, wait_node};
use crate::manifests::{allocation, as_nobody, claim, gpu, of_gpu, parameters, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{PATIENCE, TestCluster, minor_of};

const OVERCOMMITTED: &str = "tranche_controller_overcommitted_gpus";

/// The cluster's own controller takes the pod off the GPU; ours sees to what had no pod there yet.
#[tokio::test]
#[ignore = "needs a rig"]
async fn shares_of_a_gpu_that_is_lost_come_up_on_another() {
    let cluster = super::cluster("shares_of_a_gpu_that_is_lost_come_up_on_another").await;
    if cluster.release().await < 36 {
        skipped("devices have no taints before Kubernetes 1.36");
        return cluster.end().await;
    }
    create(&cluster, "runs", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("runs").await;
    let lost = wait_placed(&cluster, "runs").await;
    create_waiting(&cluster, "waits", json!({"memory": "2000Mi"})).await;
    assert_eq!(wait_placed(&cluster, "waits").await, lost, "packed");
    let board = minor_of(&lost).to_string();
    let words = ["recover", board.as_str()];
    let undo = AtEnd(&cluster, &words);
    cluster.fake(NODE, &["xid", &board, "79"]);
    cluster.fake(NODE, &["lose", &board]);
    cluster.gone("runs").await;
    let moved = || async { Some(wait_placed(&cluster, "waits").await).filter(|device| *device != lost) };
    wait_until("what waits to be placed on another GPU", PATIENCE, moved).await;
    wait_told(&cluster, "waits", &format!("{lost} has the taint gpu.nvidia.com/gpu-lost")).await;
    create(&cluster, "next", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("next").await;
    assert_ne!(wait_placed(&cluster, "next").await, lost);
    assert_eq!(env(&cluster, "next")[0], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M");
    // The claim outlives its pod; for the next pod it is placed anew.
    cluster.create(as_nobody(user_of("runs", "again"))).await;
    cluster.wait_ready("again").await;
    assert_ne!(wait_placed(&cluster, "runs").await, lost);
    drop(undo);
    wait_well(&cluster).await;
    cluster.end().await;
}

/// An allocation that somebody wrote by hand, of a claim of this class, with a grant of this source, so much memory and so
/// many client slots.
async fn forge(
    cluster: &TestCluster,
    (node, device): (&str, &str),
    (class, source): (&str, &str),
    (memory, slots): (&str, u32),
) {
    let published = cluster.published(node).await.into_iter().find(|one| one.name == device);
    let attributes = published.expect("the GPU is published").attributes;
    let uuid = attributes.and_then(|all| all.get("uuid")?.string.clone()).expect("it has a UUID");
    let grant = json!({"devices": [
        {"device": device, "gpu": uuid, "memory": memory, "slots": slots, "isolation": "mps"}]});
    let mut config = parameters("tranche.dev/v1alpha1", "ShareGrant", grant);
    config[0]["source"] = json!(source);
    let mut status = allocation(node, device);
    status["allocation"]["devices"]["config"] = config;
    let devices = match class {
        CLASS => share(json!({"memory": "1Gi"})),
        _ => json!({"requests": [gpu("gpu")]}),
    };
    cluster.create_of("forged", devices, status).await;
}

async fn unforge(cluster: &TestCluster) {
    cluster
        .api::<ResourceClaim>()
        .delete("forged", &DeleteParams::default())
        .await
        .expect("it can be deleted");
    let gone =
        || async { cluster.api::<ResourceClaim>().get_opt("forged").await.ok()?.is_none().then_some(()) };
    wait_until("the forged claim to be gone", PATIENCE, gone).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn allocations_that_somebody_forged_are_shown_and_nothing_is_placed_beside_them() {
    let test = "allocations_that_somebody_forged_are_shown_and_nothing_is_placed_beside_them";
    let cluster = super::bed_beside(test, 1).await;
    create_hollow(&cluster, "runs", share(json!({"memory": "4Gi"})), |_| {}).await;
    let node = wait_node(&cluster, "runs").await;
    let device = wait_placed(&cluster, "runs").await;
    wait_metric(&cluster, OVERCOMMITTED, 0.0).await;
    let all = grantable_mib(&cluster, &device).await;
    // By a claim's own parameters nobody is granted anything, nor in a claim of another class: those have the whole
    // GPU. In one of ours it counts, and the sum is more than there is.
    let whole = format!("{all}Mi");
    let forged = [
        (("gpu.nvidia.com", "FromClaim"), ("1Gi", 1)),
        (("gpu.nvidia.com", "FromClass"), ("1Gi", 1)),
        ((CLASS, "FromClass"), (whole.as_str(), 1)),
        // With the slots of the pod that runs, the sum is beyond what a number of 32 bits holds.
        ((CLASS, "FromClass"), ("1Gi", u32::MAX)),
    ];
    for (nth, (how, amount)) in forged.into_iter().enumerate() {
        forge(&cluster, (&node, &device), how, amount).await;
        wait_metric(&cluster, OVERCOMMITTED, 1.0).await;
        let next = format!("next-{nth}");
        create_hollow(&cluster, &next, share(json!({"memory": "4Gi"})), |_| {}).await;
        wait_node(&cluster, &next).await;
        assert_ne!(wait_placed(&cluster, &next).await, device, "{how:?}");
        assert_eq!(wait_placed(&cluster, "runs").await, device, "nobody takes the GPU of a pod that runs");
        unforge(&cluster).await;
        wait_metric(&cluster, OVERCOMMITTED, 0.0).await;
    }
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_claim_that_is_deleted_before_its_pod_is_the_pods_to_its_end() {
    let cluster = super::cluster("a_claim_that_is_deleted_before_its_pod_is_the_pods_to_its_end").await;
    create(&cluster, "first", json!({"fraction": "0.9"})).await;
    cluster.wait_ready("first").await;
    let device = wait_placed(&cluster, "first").await;
    let published =
        cluster.published(NODE).await.into_iter().find(|one| one.name == device).expect("it is published");
    let uuid = published.attributes.and_then(|all| all.get("uuid")?.string.clone()).expect("it has a UUID");
    let mut same = share(json!({"fraction": "0.9"}));
    same["requests"][0] = of_gpu(&uuid, same["requests"][0].take());
    let claims = cluster.api::<ResourceClaim>();
    claims.delete("first", &DeleteParams::default()).await.expect("it can be deleted");
    cluster.create(claim("next", same)).await;
    cluster.create(as_nobody(user_of("next", "next"))).await;
    wait_told(&cluster, "next", WAITS).await;
    let ending = claims.get("first").await.expect("it is there while its pod is");
    assert!(ending.metadata.deletion_timestamp.is_some() && !results(&ending).is_empty());
    assert!(env(&cluster, "first").iter().any(|one| one.starts_with("CUDA_MPS_PINNED")), "it runs as it did");
    cluster.delete("first").await;
    cluster.wait_ready("next").await;
    assert_eq!(wait_placed(&cluster, "next").await, device);

    // One that was never used goes at once, and its pod gets the next one of its name.
    create_waiting(&cluster, "young", json!({"memory": "2000Mi"})).await;
    wait_placed(&cluster, "young").await;
    let old = claims.get("young").await.expect("it is there").metadata.uid;
    claims.delete("young", &DeleteParams::default()).await.expect("it can be deleted");
    let gone = || async { claims.get_opt("young").await.ok()?.is_none().then_some(()) };
    wait_until("the unused claim to be gone", PATIENCE, gone).await;
    cluster.create(claim("young", share(json!({"memory": "3000Mi"})))).await;
    wait_placed(&cluster, "young").await;
    assert_ne!(claims.get("young").await.expect("it is there").metadata.uid, old);
    cluster.end().await;
}

/// Somebody else writes onto claims as fast as he can while they are placed.
#[tokio::test]
#[ignore = "needs a rig"]
async fn claims_that_others_write_to_are_placed_all_the_same_and_nothing_is_lost() {
    let test = "claims_that_others_write_to_are_placed_all_the_same_and_nothing_is_lost";
    let cluster = super::bed_beside(test, 2).await;
    const COUNT: usize = 24;
    let names: Vec<String> = (0..COUNT).map(|nth| format!("c-{nth}")).collect();
    let auditor = Auditor::begin(&cluster.client).await;
    let claims = cluster.api::<ResourceClaim>();
    for name in &names {
        cluster.create(claim(name, share(json!({"memory": "4Gi"})))).await;
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let scribe = {
        let (claims, names) = (claims.clone(), names.clone());
        tokio::spawn(async move {
            let mut round = 0_usize;
            while !*stopped.borrow() {
                round += 1;
                for name in &names {
                    let note = json!({"metadata": {"annotations": {"example.com/round": round.to_string()},
                        "labels": {"example.com/touched": "yes"}}});
                    claims
                        .patch(name, &PatchParams::default(), &Patch::Merge(note))
                        .await
                        .expect("it can be annotated");
                }
            }
            round
        })
    };
    for name in &names {
        cluster.create(hollow::on_hollow(as_nobody(user_of(name, name)))).await;
    }
    wait_bound(&cluster, COUNT).await;
    stop.send_replace(true);
    let rounds = scribe.await.expect("the scribe ends");
    println!("{rounds} writes onto each of {COUNT} claims, {} looks", auditor.end().await);
    assert!(rounds > 1, "placed before anybody wrote");
    for stored in claims.list(&ListParams::default()).await.expect("claims").items {
        let meta = &stored.metadata;
        let round = meta.annotations.as_ref().and_then(|all| all.get("example.com/round"));
        assert_eq!(round, Some(&rounds.to_string()), "{:?}", meta.name);
        assert!(meta.labels.as_ref().is_some_and(|all| all.contains_key("example.com/touched")));
    }
    hollow::end(cluster).await;
}

/// On one node it must not be beside another pod, by a term that only the scheduler reads; on the other there is no GPU. The scheduler
/// takes the allocation back again and again, and each time the controller is longer in giving it.
#[tokio::test]
#[ignore = "needs a rig"]
async fn where_no_node_will_have_a_pod_its_claim_is_written_ever_more_rarely() {
    let test = "where_no_node_will_have_a_pod_its_claim_is_written_ever_more_rarely";
    let cluster = super::bed_beside(test, 2).await;
    let gpus = cluster.published("hollow-1").await.len();
    let most = || share(json!({"fraction": "0.9"}));
    for nth in 0..gpus {
        let there =
            |pod: &mut Value| pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!("hollow-1");
        create_hollow(&cluster, &format!("most-{nth}"), most(), there).await;
    }
    create_hollow(&cluster, "first", share(json!({"memory": "4Gi"})), |pod| {
        super::keep_apart_unseen(&cluster.namespace, pod);
        pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!("hollow-0");
    })
    .await;
    wait_bound(&cluster, gpus + 1).await;
    let count = Writes::begin(&cluster.client, &cluster.namespace, "nowhere").await;
    let begin = std::time::Instant::now();
    create_hollow(&cluster, "nowhere", most(), |pod| super::keep_apart_unseen(&cluster.namespace, pod)).await;
    // After 10 s and after 20 s more.
    let three = || async { (count.allocations() >= 3).then_some(()) };
    wait_until("the claim to be placed three times in vain", PATIENCE, three).await;
    let took = begin.elapsed().as_secs_f64();
    println!("3 allocations in {took:.0} s");
    assert!(took > 25.0, "three allocations within {took:.0} s");
    super::end_hollow(&cluster, "most-0").await;
    assert_eq!(wait_node(&cluster, "nowhere").await, "hollow-1");
    assert!(count.allocations() <= 5, "{} allocations", count.allocations());
    hollow::end(cluster).await;
}
