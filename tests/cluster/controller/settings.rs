//! What an administrator sets for the controller: GPUs that it holds in advance, and such that it leaves alone.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, DeviceTaintRule, ResourceClaim};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

use super::explain::why;
use super::{create, fail_over, holds, holds_beside, metrics, results, wait_metric, wait_placed, wait_told};
use crate::manifests::{as_nobody, claim, gpu, of_gpu, user_of};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, from, sum};

const DEPLOYMENT: &str = "deployment/tranche-controller";

/// Sets a variable of the controller until the test ends, and waits until a replica leads that has it: one that is
/// replaced may lead, and give back, a moment longer than the rollout lasts. `before`: what it is by default.
pub(super) async fn set(cluster: &TestCluster, name: &str, value: &str, before: &str) {
    let of = |value: &str| format!("{name}={value}");
    let rollout = ["kubectl", "-n", SYSTEM, "rollout", "status", DEPLOYMENT, "--timeout=170s"];
    cluster.rig.on_end(&rollout);
    cluster.rig.on_end(&["kubectl", "-n", SYSTEM, "set", "env", DEPLOYMENT, &of(before)]);
    cluster.rig.kubectl(&["-n", SYSTEM, "set", "env", DEPLOYMENT, &of(value)]);
    cluster.rig.run(&rollout);
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM);
    let leads = || async {
        let leader = fail_over::leader(cluster).await?;
        let pod = pods.get(leader.rsplit_once('_')?.0).await.ok()?;
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut vars = containers.flat_map(|container| container.env.iter().flatten());
        vars.any(|var| var.name == name && var.value.as_deref() == Some(value)).then_some(())
    };
    wait_until(&format!("a leader with {}", of(value)), PATIENCE, leads).await;
}

/// A claim with this one request, and a pod of its name that uses it.
async fn request(cluster: &TestCluster, name: &str, request: Value) {
    cluster.create(claim(name, json!({"requests": [request]}))).await;
    cluster.create(as_nobody(user_of(name, name))).await;
}

fn uuid(device: &Device) -> String {
    let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid")?.string.clone());
    uuid.expect("it has a UUID")
}

/// GPUs of all nodes that are held and have no share.
async fn wait_idle(cluster: &TestCluster, count: u32) {
    wait_metric(cluster, "tranche_controller_held_idle_gpus", f64::from(count)).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn gpus_that_are_held_in_advance_are_there_at_once_and_go_to_who_wants_them_whole() {
    let test = "gpus_that_are_held_in_advance_are_there_at_once_and_go_to_who_wants_them_whole";
    let cluster = super::cluster(test).await;
    let gpus = cluster.shareable(super::NODE).await.len();
    // Nothing that tests before have left is taken for it: all GPUs but two are in use.
    let mut most = gpu("gpu");
    most["exactly"]["count"] = json!(gpus - 2);
    request(&cluster, "most", most).await;
    cluster.wait_ready("most").await;
    set(&cluster, "TRANCHE_HOLD_AHEAD", "2", "0").await;
    wait_idle(&cluster, 2).await;
    let ahead = holds_beside(&cluster, &cluster.devices_of("most").await).await;
    assert_eq!(ahead.len(), 2, "on the node that takes pods: {ahead:?}");
    let taken = sum(&metrics(&cluster).await, "tranche_controller_writes_total{what=\"hold\"");
    create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    assert!(ahead.contains(&wait_placed(&cluster, "share").await));
    cluster.wait_ready("share").await;
    let now = sum(&metrics(&cluster).await, "tranche_controller_writes_total{what=\"hold\"");
    assert!(now <= taken, "{taken} holds were written before, {now} after: it had to take one");
    // Whoever wants the last one whole is not kept waiting by a wish; also by a class of the administrator's own.
    let text = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
    let class = json!({"metadata": {"name": "own.example.com"},
        "spec": {"selectors": [{"cel": {"expression": text}}]}});
    let classes = Api::<DeviceClass>::all(cluster.client.clone());
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", "own.example.com"]);
    classes.create(&PostParams::default(), &from(class)).await.expect("a class can be made");
    let own = json!({"name": "gpu", "exactly": {"deviceClassName": "own.example.com"}});
    request(&cluster, "last", own).await;
    cluster.wait_ready("last").await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn only_the_gpus_that_a_request_chooses_are_given_back_to_it() {
    let test = "only_the_gpus_that_a_request_chooses_are_given_back_to_it";
    let cluster = super::cluster(test).await;
    let found = cluster.shareable(super::NODE).await;
    let names = found.iter().map(|device| device.name.clone()).collect::<BTreeSet<_>>();
    let [first, second, tainted, one, other, rest @ ..] = &found[..] else { panic!("too few: {names:?}") };
    set(&cluster, "TRANCHE_HOLD_AHEAD", "100", "0").await;
    set(&cluster, "TRANCHE_KEEP_WARM", "5s", "60s").await;
    wait_idle(&cluster, found.len() as u32).await;

    // By selectors; who chooses none gets none.
    let nothing = "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA Nothing'";
    let nothing = json!([{"cel": {"expression": nothing}}]);
    let mut none = gpu("gpu");
    none["exactly"]["selectors"] = nothing.clone();
    request(&cluster, "none", none).await;
    wait_told(&cluster, "none", "FailedScheduling").await;
    request(&cluster, "chosen", of_gpu(&uuid(first), gpu("gpu"))).await;
    cluster.wait_ready("chosen").await;
    let chosen = cluster.devices_of("chosen").await;
    assert_eq!(chosen, std::slice::from_ref(&first.name));
    let mut left = names;
    left.remove(&first.name);
    assert_eq!(holds_beside(&cluster, &chosen).await.into_iter().collect::<BTreeSet<_>>(), left);

    // The alternative that there is.
    let this = of_gpu(&uuid(second), gpu("gpu"))["exactly"]["selectors"].take();
    let class = "gpu.nvidia.com";
    let either = json!({"name": "gpu", "firstAvailable": [
        {"name": "none", "deviceClassName": class, "selectors": nothing},
        {"name": "this", "deviceClassName": class, "selectors": this}]});
    request(&cluster, "either", either).await;
    cluster.wait_ready("either").await;
    assert_eq!(cluster.devices_of("either").await, std::slice::from_ref(&second.name));

    // A tainted one, by who tolerates it.
    let rule: DeviceTaintRule = from(json!({"metadata": {"name": cluster.namespace}, "spec": {
        "deviceSelector": {"driver": class, "pool": super::NODE, "device": tainted.name},
        "taint": {"key": "example.com/repair", "value": "fan", "effect": "NoSchedule"}}}));
    match Api::<DeviceTaintRule>::all(cluster.client.clone()).create(&PostParams::default(), &rule).await {
        Ok(_) => cluster.rig.on_end(&["kubectl", "delete", "devicetaintrule", &cluster.namespace]),
        Err(error) => {
            println!("not tried here: a taint; no DeviceTaintRules of resource.k8s.io/v1: {error}")
        }
    }
    let mut tolerant = of_gpu(&uuid(tainted), gpu("gpu"));
    tolerant["exactly"]["tolerations"] = json!([{"key": "example.com/repair", "operator": "Exists"}]);
    request(&cluster, "tolerant", tolerant).await;
    cluster.wait_ready("tolerant").await;

    // All that there are, of those that are chosen.
    let mut all = gpu("gpu");
    let both = format!(
        "device.attributes['{class}'].uuid == '{}' || device.attributes['{class}'].uuid == '{}'",
        uuid(one),
        uuid(other)
    );
    all["exactly"]["selectors"] = json!([{"cel": {"expression": both}}]);
    all["exactly"]["allocationMode"] = json!("All");
    request(&cluster, "all", all).await;
    cluster.wait_ready("all").await;
    let given = cluster.devices_of("all").await.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(given, BTreeSet::from([one.name.clone(), other.name.clone()]));

    // Who comes too late is told of it.
    request(&cluster, "late", of_gpu(&uuid(first), gpu("gpu"))).await;
    wait_told(&cluster, "late", "FailedScheduling").await;
    let said = why(&cluster, "late");
    let taken = format!("{}: whole GPU of claim {}/chosen", first.name, cluster.namespace);
    assert!(said.contains(&taken) && said.contains("6 GPUs: not selected"), "{said}");

    // What is left is kept only where the next share could go.
    wait_idle(&cluster, rest.len() as u32).await;
    cluster.rig.on_end(&["kubectl", "uncordon", super::NODE]);
    cluster.rig.kubectl(&["cordon", super::NODE]);
    wait_idle(&cluster, 0).await;
    cluster.rig.kubectl(&["uncordon", super::NODE]);
    wait_idle(&cluster, rest.len() as u32).await;
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gpu_that_is_held_for_good_is_for_shares_only() {
    let cluster = super::cluster("a_gpu_that_is_held_for_good_is_for_shares_only").await;
    let found = cluster.shareable(super::NODE).await;
    let (device, gpus) = (found[0].name.clone(), found.len());
    let whole = async |name: &str, count: usize| {
        let mut all = gpu("gpu");
        all["exactly"]["count"] = json!(count);
        request(&cluster, name, all).await;
    };
    // What tests before it left held is given back. On 1.34 and 1.35 a hold of before would be, by a new leader, too.
    whole("before", gpus).await;
    cluster.wait_ready("before").await;
    cluster.delete("before").await;
    set(&cluster, "TRANCHE_ALWAYS_HOLD", &uuid(&found[0]), "").await;
    let held = || async { (holds(&cluster).await == [device.as_str()]).then_some(()) };
    wait_until("the GPU alone to be held", PATIENCE, held).await;
    whole("all", gpus).await;
    println!("told: {}", wait_told(&cluster, "all", "FailedScheduling").await);
    create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    cluster.wait_ready("share").await;
    assert_eq!(wait_placed(&cluster, "share").await, device);
    cluster.delete("all").await;
    whole("rest", gpus - 1).await;
    cluster.wait_ready("rest").await;
    assert!(holds(&cluster).await.contains(&device));
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn gpus_that_are_never_held_are_left_to_the_scheduler() {
    let cluster = super::cluster("gpus_that_are_never_held_are_left_to_the_scheduler").await;
    set(&cluster, "TRANCHE_NEVER_HOLD", super::NODE, "").await;
    create(&cluster, "share", json!({"memory": "2000Mi"})).await;
    println!("told: {}", wait_told(&cluster, "share", super::WAITS).await);
    request(&cluster, "whole", gpu("gpu")).await;
    cluster.wait_ready("whole").await;
    let open = cluster.api::<ResourceClaim>().get("share").await.expect("the claim is there");
    assert!(results(&open).is_empty(), "placed where nothing may be held");
    // What was held before goes back.
    let none = || async { holds(&cluster).await.is_empty().then_some(()) };
    wait_until("holds of before to be given back", PATIENCE, none).await;
    cluster.rig.kubectl(&["-n", SYSTEM, "set", "env", DEPLOYMENT, "TRANCHE_NEVER_HOLD=L40"]);
    cluster.wait_ready("share").await;
    let all = Api::<ResourceClaim>::namespaced(cluster.client.clone(), SYSTEM);
    let held = all.list(&ListParams::default().labels("tranche.dev/hold=true")).await.expect("holds").items;
    println!("held: {:?}", held.iter().filter_map(|one| one.metadata.name.as_deref()).collect::<Vec<_>>());
    cluster.end().await;
}
