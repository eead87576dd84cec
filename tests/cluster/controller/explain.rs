//! `tranche explain` in the controller's own pod, with its rights.

use serde_json::{Value, json};

use super::{WAITS, create_hollow, share, wait_placed, wait_told};
use crate::hollow::{self, wait_node};
use crate::manifests::of_gpu;
use crate::test_cluster::{SYSTEM, TestCluster};

/// What it says. Err: also the exit status and what went wrong.
pub fn explain(cluster: &TestCluster, what: &[&str]) -> Result<String, String> {
    let exec = ["kubectl", "-n", SYSTEM, "exec", "deployment/tranche-controller", "--", "tranche", "explain"];
    cluster.rig.attempt(&[&exec[..], &["-n", &cluster.namespace], what].concat())
}

/// What it says of a claim or pod that waits.
pub fn why(cluster: &TestCluster, what: &str) -> String {
    let said = explain(cluster, &[what]).expect_err("it waits");
    assert!(said.starts_with("exit status: 3"), "{said}");
    said
}

/// These words stand in this row of nodes.
pub fn has_row(said: &str, node: &str, words: &str) -> bool {
    said.lines().any(|line| line.starts_with(node) && line.contains(words))
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn explain_tells_where_a_claim_is_why_one_waits_and_that_one_is_not_there() {
    let test = "explain_tells_where_a_claim_is_why_one_waits_and_that_one_is_not_there";
    let cluster = super::bed_beside(test, 1).await;
    let of_first = |fraction: &str| {
        let mut devices = share(json!({"fraction": fraction}));
        devices["requests"][0] = of_gpu("GPU-hollow-0-gpu-0", devices["requests"][0].clone());
        devices
    };
    create_hollow(&cluster, "large", of_first("0.75"), |_| {}).await;
    wait_node(&cluster, "large").await;
    create_hollow(&cluster, "half", of_first("0.5"), |_| {}).await;
    wait_told(&cluster, "half", WAITS).await;

    let device = wait_placed(&cluster, "large").await;
    let mib = super::place::grantable_mib(&cluster, &device).await;
    let most = mib * 3 / 4;
    for what in ["large", "pod/large"] {
        let said = explain(&cluster, &[what]).unwrap_or_else(|said| panic!("{said}"));
        assert!(said.contains("placed on node hollow-0"), "{said}");
        assert!(said.contains(&format!("{device}: {most} MiB, 75 % of compute")), "{said}");
    }

    let (half, left) = (mib / 2, mib - most);
    for what in ["half", "pod/half"] {
        let said = why(&cluster, what);
        let words =
            format!("needs {half} MiB; largest free on 1 candidate GPU is {left} MiB on node hollow-0/");
        assert!(said.contains(&words), "{said}");
        assert!(
            has_row(&said, "hollow-0", &format!("largest free {left} MiB of {device}, needs {half}")),
            "{said}"
        );
        assert!(said.contains(" leads, last sign of life "), "{said}");
    }
    let json = explain(&cluster, &["-o", "json", "large"]).unwrap_or_else(|said| panic!("{said}"));
    serde_json::from_str::<Value>(&json).expect("-o json prints JSON");

    let said = explain(&cluster, &["nobody"]).expect_err("there is none of that name");
    assert!(said.starts_with("exit status: 1"), "{said}");
    assert!(said.contains(&format!("there is no claim nobody in namespace {}", cluster.namespace)), "{said}");
    hollow::end(cluster).await;
}
