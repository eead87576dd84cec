//! DeviceClasses that were probably meant to be the controller's: whoever applies one is warned, or refused.

use kube::Client;
use serde_json::{Value, json};
use tranche::select::NOT_FOR_THE_SCHEDULER;

use super::{LIMIT, apply_plain, wait_until};
use crate::rig::Rig;
use crate::tried::tried_class;

const LACKS: &str = "lacks the selector that keeps kube-scheduler away";
const CHANGED: &str = "though a selector names the type placed-by-controller";

fn class(selectors: &[&str], config: Value) -> Value {
    let selectors: Vec<Value> = selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "team-a"},
        "spec": {"selectors": selectors, "config": config}})
}

fn share(fields: Value) -> Value {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}])
}

async fn said(client: &Client, class: &Value) -> String {
    match tried_class(client, class).await {
        Ok(warnings) => warnings.join("\n"),
        Err(said) => panic!("refused: {said}"),
    }
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn who_applies_a_class_that_misses_the_controllers_selector_is_warned() {
    let rig = Rig::bare("who_applies_a_class_that_misses_the_controllers_selector_is_warned");
    apply_plain(&rig);
    let client = rig.client().await;
    let h100 = "device.attributes['gpu.nvidia.com'].productName.contains('H100')";
    let missing = class(&[h100], share(json!({"memory": "3000Mi"})));
    let warned = || async { said(&client, &missing).await.contains(LACKS).then_some(()) };
    wait_until("the hint to be in force", LIMIT, warned).await;

    let more = format!("{NOT_FOR_THE_SCHEDULER} && {h100}");
    let folded = NOT_FOR_THE_SCHEDULER.replace("&&", "&&\n  ").replace('\'', "\"");
    let amount = || share(json!({"compute": 20, "fraction": "0.5"}));
    for (what, class, expected) in [
        ("a further condition", class(&[&more], amount()), vec![CHANGED, LACKS]),
        ("the type alone", class(&[&more], json!([])), vec![CHANGED]),
        ("no selector at all", class(&[], share(json!({"compute": 20}))), vec![LACKS]),
        ("the controller's", class(&[NOT_FOR_THE_SCHEDULER, h100], amount()), vec![]),
        ("the controller's, folded", class(&[h100, &folded], amount()), vec![]),
        ("kube-scheduler's", class(&[h100], share(json!({"maxProcesses": 2}))), vec![]),
        (
            "kube-scheduler's, of NVIDIA's kind",
            class(
                &[h100],
                json!([{"opaque": {"driver": "gpu.nvidia.com",
            "parameters": {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}}}]),
            ),
            vec![],
        ),
        (
            "another driver's",
            class(
                &[],
                json!([{"opaque": {"driver": "nic.example.com",
            "parameters": {"kind": "GpuShare", "memory": 1}}}]),
            ),
            vec![],
        ),
    ] {
        let said = said(&client, &class).await;
        assert_eq!(said.is_empty(), expected.is_empty(), "{what}: {said}");
        for words in expected {
            assert!(said.contains(words), "{what}: no {words:?} in {said}");
        }
    }
    rig.on_end(&["kubectl", "delete", "deviceclass", "team-a", "--ignore-not-found"]);

    let deny = r#"[{"op": "replace", "path": "/spec/validationActions", "value": ["Deny"]}]"#;
    let binding = "validatingadmissionpolicybinding/tranche-class-hints";
    rig.kubectl(&["patch", binding, "--type=json", "-p", deny]);
    let refused = || async {
        tried_class(&client, &missing).await.err().filter(|said| said.contains(LACKS)).map(|_| ())
    };
    wait_until("such a class to be refused", LIMIT, refused).await;
}
