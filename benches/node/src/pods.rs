//! Pods on the rig's real node, with the driver as it is deployed: with a claim and without, in turns.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::api::{self, FirstSeen};
use crate::figures::{Report, Samples};

const NAMESPACE: &str = "bench-pods";
/// As many as the node has GPUs: no pod is deleted meanwhile.
const PAIRS: usize = 15;

pub async fn measure(client: &Client, report: &mut Report) -> Result<()> {
    set_up(client).await?;
    let seen = api::watch_pods(client, NAMESPACE).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    run(&pods, &seen, "warm-up", false).await?;
    run(&pods, &seen, "warm-up-claim", true).await?;
    let (mut without, mut with) = (Samples::default(), Samples::default());
    for pair in 0..PAIRS {
        // Either goes first in every other pair.
        for claim in [pair % 2 == 0, pair % 2 != 0] {
            let (name, samples) = match claim {
                true => (format!("claim-{pair}"), &mut with),
                false => (format!("plain-{pair}"), &mut without),
            };
            samples.push(run(&pods, &seen, &name, claim).await?);
        }
    }
    // Nothing that follows waits for their end.
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.delete(NAMESPACE, &DeleteParams::default()).await?;
    let extra = with.less(&without);
    report.samples("pod create to Running, no claim", &without, "", "p50 563");
    report.samples("pod create to Running, one GPU", &with, "", "p50 635");
    report.samples("  what the claim adds, pair by pair", &extra, "", "p50 72");
    report.figure("pod_plain_p50_ms", without.p50());
    report.figure("pod_claim_p50_ms", with.p50());
    report.figure("pod_claim_extra_ms", extra.p50());
    Ok(())
}

async fn set_up(client: &Client) -> Result<()> {
    let made = PostParams::default();
    let namespace = json!({"metadata": {"name": NAMESPACE}});
    Api::<Namespace>::all(client.clone()).create(&made, &serde_json::from_value(namespace)?).await?;
    let exactly = json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1});
    let template = json!({
        "metadata": {"name": "gpu"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    });
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client.clone(), NAMESPACE);
    templates.create(&made, &serde_json::from_value(template)?).await?;
    api::until_account(client, NAMESPACE).await
}

/// Creates the pod and waits until it is seen to run.
async fn run(pods: &Api<Pod>, seen: &FirstSeen, name: &str, claim: bool) -> Result<Duration> {
    let object = serde_json::from_value(pod(name, claim))?;
    let begun = Instant::now();
    pods.create(&PostParams::default(), &object).await?;
    let when = seen.until(name, |seen| seen.contains_key(name)).await?;
    Ok(*when.get(name).context("seen and gone")? - begun)
}

fn pod(name: &str, claim: bool) -> Value {
    let mut container =
        json!({"name": "main", "image": "docker.io/local/busybox:1", "imagePullPolicy": "Never"});
    let mut spec = json!({"terminationGracePeriodSeconds": 1});
    if claim {
        container["resources"] = json!({"claims": [{"name": "gpu"}]});
        spec["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "gpu"}]);
    }
    spec["containers"] = json!([container]);
    json!({"metadata": {"name": name}, "spec": spec})
}
