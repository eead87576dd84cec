//! The device status of claims and the events, written with the rights that deploy/ gives, on a real API
//! server.

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tranche::cluster::status::{ClaimReports, ReportError};
use tranche::cluster::{KubeCluster, NodeCluster};
use tranche::conditions::{self, ClaimHealth, GrantEvent, GrantEventKind, GrantUsage};
use tranche::ledger::{HeldDevice, HoldMode, Placer};
use tranche::model::claim::{ClaimRef, PreparedDevice};
use tranche::model::error_chain;
use tranche::model::names::{ClaimUid, DeviceName, DeviceUuid, NodeName, PoolName};
use tranche::model::quantity::Bytes;
use tranche::model::share::{Grant, Isolation, Percent};

use super::{LIMIT, NAMESPACE, NODE, allocated_claim, apply_plain, plugin, policy_in_force, wait_until};
use crate::rig::{Rig, skipped};

fn held() -> HeldDevice {
    let grant = Grant {
        memory: Bytes::from_mib(2000),
        compute: Percent::try_from(25_u8).ok(),
        slots: 1,
        processes: 1,
        isolation: Isolation::Mps,
    };
    let answer = PreparedDevice {
        requests: vec!["gpu".to_owned()],
        pool: PoolName::new(NODE),
        device: DeviceName::new("gpu-0"),
        cdi_ids: Vec::new(),
        share_id: None,
    };
    let gpu = DeviceUuid::new("GPU-0");
    HeldDevice {
        answer,
        uuid: gpu.clone(),
        gpu,
        mode: HoldMode::Share(grant),
        placer: Placer::default(),
        mig: None,
    }
}

fn reference(claim: &ResourceClaim) -> ClaimRef {
    let meta = &claim.metadata;
    let text = |field: &Option<String>| field.clone().expect("a stored claim has it");
    ClaimRef { namespace: text(&meta.namespace), name: text(&meta.name), uid: ClaimUid::new(text(&meta.uid)) }
}

/// A claim on the node, one elsewhere, and the API server as the node's plugin sees it.
async fn claims(rig: &Rig) -> (Client, NodeCluster, ClaimRef, ClaimRef) {
    apply_plain(rig);
    let admin = rig.client().await;
    rig.on_end(&["kubectl", "-n", NAMESPACE, "delete", "resourceclaims", "--all", "--wait=false"]);
    let here = reference(&allocated_claim(&admin, "here", NODE).await);
    let elsewhere = reference(&allocated_claim(&admin, "elsewhere", "node-x").await);
    let by_plugin = plugin(rig, &admin).await;
    policy_in_force(&Api::all(by_plugin.clone())).await;
    (admin, NodeCluster::new(KubeCluster::with_client(by_plugin), NodeName::new(NODE)), here, elsewhere)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn the_plugin_tells_a_claim_what_it_was_granted() {
    let rig = Rig::bare("the_plugin_tells_a_claim_what_it_was_granted");
    let (admin, cluster, here, elsewhere) = claims(&rig).await;
    let api: Api<ResourceClaim> = Api::namespaced(admin, NAMESPACE);
    let other = json!({"status": {"devices": [
        {"driver": "nic.example.com", "pool": NODE, "device": "nic-0", "data": {"vlan": 7}}]}});
    api.patch_status("here", &PatchParams::default(), &Patch::Merge(other)).await.expect("as another driver");

    let mut claim_health = ClaimHealth::default();
    let before = cluster.reported(&here).await.expect("the claim can be read").entries;
    let entries = conditions::entries(&[held()], &claim_health, &before, jiff::Timestamp::now());
    cluster.report(&here, &entries).await.unwrap_or_else(|error| panic!("{}", error_chain(&error)));
    let stored = cluster.reported(&here).await.expect("the claim can be read").entries;
    assert!(!conditions::differ(&stored, &entries), "what is stored is what was told: {stored:?}");

    let usage = GrantUsage { used: Bytes::from_mib(2300), granted: Bytes::from_mib(2000) };
    let over =
        GrantEvent { claim: here.clone(), gpu: DeviceUuid::new("GPU-0"), usage, kind: GrantEventKind::Over };
    assert!(claim_health.apply(&over));
    let entries = conditions::entries(&[held()], &claim_health, &stored, jiff::Timestamp::now());
    cluster.report(&here, &entries).await.unwrap_or_else(|error| panic!("{}", error_chain(&error)));
    let claim = api.get("here").await.expect("it is there");
    let devices: Value = serde_json::to_value(claim.status.expect("a status").devices).expect("JSON");
    let devices = devices.as_array().expect("entries");
    assert_eq!(devices.len(), 2, "one of ours, one of the other driver's: {devices:?}");
    let ours = devices.iter().find(|entry| entry["driver"] == "gpu.nvidia.com").expect("ours");
    assert_eq!((&ours["data"]["memoryMiB"], &ours["data"]["isolation"]), (&json!(2000), &json!("mps")));
    let limits = ours["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "WithinLimits");
    assert_eq!(limits.expect("the condition")["status"], "False");

    let gone = ClaimRef { uid: ClaimUid::new("11111111-2222-3333-4444-555555555555"), ..here };
    let error = cluster.report(&gone, &entries).await.expect_err("another claim of that name");
    assert!(matches!(error, ReportError::Gone { .. }), "{}", error_chain(&error));
    assert_eq!(cluster.reported(&gone).await.expect_err("the same").label(), "gone");

    let held =
        HeldDevice { answer: PreparedDevice { pool: PoolName::new("node-x"), ..held().answer }, ..held() };
    let entries = conditions::entries(&[held], &ClaimHealth::default(), &[], jiff::Timestamp::now());
    let error = cluster.report(&elsewhere, &entries).await.expect_err("a claim of another node");
    println!("another node's claim: {}", error_chain(&error));
    let stored = cluster.reported(&elsewhere).await.expect("it can be read").entries;
    assert!(stored.is_empty(), "{stored:?}");
}

/// Two shares of one board: the share's id is a part of the entry's key.
#[tokio::test]
#[ignore = "needs a rig"]
async fn two_shares_of_one_gpu_are_told_apart() {
    let rig = Rig::bare("two_shares_of_one_gpu_are_told_apart");
    let (admin, cluster, _, _) = claims(&rig).await;
    if minor(&admin).await < 36 {
        skipped("older API servers know no shares");
        return;
    }
    let ids = ["0b6d3c1e-57d1-4d0e-9a55-1f2f8a6e1a01", "9f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f9"];
    let api: Api<ResourceClaim> = Api::namespaced(admin.clone(), NAMESPACE);
    let result = |id: &str| {
        json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-0", "shareID": id,
               "consumedCapacity": {"memory": "2000Mi"}})
    };
    let mut claim = json!({
        "metadata": {"name": "shares"},
        "spec": {"devices": {"requests": [{"name": "gpu",
            "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}]}}});
    let made: ResourceClaim =
        api.create(&PostParams::default(), &super::from(claim.clone())).await.expect("it may be created");
    claim["metadata"] = serde_json::to_value(&made.metadata).expect("JSON");
    claim["status"] = json!({"allocation": {
        "devices": {"results": ids.map(result)},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [NODE]}]}]}}});
    let made = api.replace_status("shares", &PostParams::default(), &super::from(claim)).await;
    let claim = reference(&made.expect("an administrator may allocate"));

    let share = |id: &str| {
        let answer = PreparedDevice { share_id: Some(id.to_owned()), ..held().answer };
        HeldDevice { answer, ..held() }
    };
    let devices = ids.map(share);
    for second in [100, 200] {
        let at = jiff::Timestamp::from_second(second).expect("a time");
        let entries = conditions::entries(&devices, &ClaimHealth::default(), &[], at);
        cluster.report(&claim, &entries).await.unwrap_or_else(|error| panic!("{}", error_chain(&error)));
        let stored = cluster.reported(&claim).await.expect("the claim can be read").entries;
        assert_eq!(stored.len(), 2, "{stored:?}");
        assert!(!conditions::differ(&stored, &entries), "{stored:?}");
    }
}

async fn minor(admin: &Client) -> u32 {
    admin.apiserver_version().await.expect("a version").minor.parse().expect("a number")
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_permission_that_is_missing_is_named() {
    let rig = Rig::bare("a_permission_that_is_missing_is_named");
    let (admin, cluster, here, _) = claims(&rig).await;
    // Different each time: what changes nothing needs no permission.
    let seconds = std::sync::atomic::AtomicI64::new(0);
    let told = || async {
        let second = seconds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let at = jiff::Timestamp::from_second(second).expect("a time");
        cluster.report(&here, &conditions::entries(&[held()], &ClaimHealth::default(), &[], at)).await
    };
    let rules = rig.kubectl(&["get", "clusterrole", "tranche-node", "-o", "json"]);
    let rules: Value = serde_json::from_str(&rules).expect("JSON");
    let without = |resource: &str| -> Vec<Value> {
        let rules = rules["rules"].as_array().expect("rules").iter();
        rules.filter(|rule| rule["resources"][0] != resource).cloned().collect()
    };
    let needed = ["resourceclaims/status", "resourceclaims/driver"];
    // The second only from 1.36 on.
    for resource in &needed[..if minor(&admin).await >= 36 { 2 } else { 1 }] {
        let patch = json!({"rules": without(resource)}).to_string();
        rig.kubectl(&["patch", "clusterrole", "tranche-node", "--type=merge", "-p", &patch]);
        let error = wait_until("a refusal", LIMIT, || async { told().await.err() }).await;
        println!("without {resource}: {}", error_chain(&error));
        assert!(matches!(error, ReportError::Forbidden { .. }), "{}", error_chain(&error));
        assert!(error.to_string().contains(*resource), "{error}");
        let patch = json!({"rules": rules["rules"]}).to_string();
        rig.kubectl(&["patch", "clusterrole", "tranche-node", "--type=merge", "-p", &patch]);
        wait_until("the permission to be back", LIMIT, || async { told().await.ok() }).await;
    }
}
