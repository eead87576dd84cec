//! Events: a node's token writes those of its own plugin, about claims and pods.

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::{LIMIT, NODE, apply_plain, from, merge, plugin, refusal, says};
use crate::rig::{Rig, wait_until};

/// As the plugin writes them, changed as JSON merge patches change.
fn event(change: Value) -> Event {
    let mut event = json!({
        "metadata": {"generateName": "c."},
        "involvedObject": {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "namespace": "default", "name": "c"},
        "reason": "PrepareFailed", "message": "said by a test", "type": "Warning",
        "source": {"component": "gpu.nvidia.com", "host": NODE},
        "reportingComponent": "gpu.nvidia.com", "reportingInstance": NODE});
    merge(&mut event, change);
    from(event)
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_nodes_token_writes_events_of_its_own_plugin_alone() {
    let rig = Rig::bare("deploy::a_nodes_token_writes_events");
    apply_plain(&rig);
    let admin = rig.client().await;
    let events: Api<Event> = Api::namespaced(plugin(&rig, &admin).await, "default");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let anothers = event(json!({"reportingInstance": "node-x"}));
    let refused = || async {
        let said = events.create(&dry, &anothers).await.err()?.to_string();
        said.contains("ValidatingAdmissionPolicy").then_some(())
    };
    wait_until("the policy for events to be in force", LIMIT, refused).await;
    let as_own = "may write events of the driver gpu.nvidia.com on that node only";
    for (what, change, words) in [
        ("of another node", json!({"reportingInstance": "node-x"}), as_own),
        ("of the scheduler", json!({"reportingComponent": "default-scheduler"}), as_own),
        ("of nobody", json!({"reportingComponent": null}), as_own),
        (
            "about a node",
            json!({"involvedObject": {"apiVersion": "v1", "kind": "Node", "name": NODE}}),
            "about claims and pods only",
        ),
    ] {
        says(what, &refusal(what, events.create(&dry, &event(change)).await), words);
    }
    events.create(&dry, &event(json!({}))).await.expect("the plugin's own events are taken");
    let of_pod = json!({"involvedObject": {"apiVersion": "v1", "kind": "Pod"}});
    events.create(&dry, &event(of_pod)).await.expect("about a pod, too");
}
