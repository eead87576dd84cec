//! PodGroups of those who start pods together, as far as the controller reads them. On nodes without a machine; the
//! APIs are CustomResourceDefinitions with no more than their documented fields, and no scheduler of theirs runs.

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

use super::{create_hollow, results, share, wait_told};
use crate::hollow::{self, wait_bound};
use crate::rig::wait_until;
use crate::test_cluster::{PATIENCE, TestCluster};

/// Most of a GPU: two of these do not fit on one.
fn most() -> Value {
    share(json!({"fraction": "0.9"}))
}

/// An API that has PodGroups, and how pods name theirs.
#[derive(Clone, Copy)]
struct Groups {
    group: &'static str,
    version: &'static str,
    annotation: &'static str,
    scheduler: &'static str,
}

const VOLCANO: Groups = Groups {
    group: "scheduling.volcano.sh",
    version: "v1beta1",
    annotation: "scheduling.k8s.io/group-name",
    scheduler: "volcano",
};
const KAI: Groups = Groups {
    group: "scheduling.run.ai",
    version: "v2alpha2",
    annotation: "pod-group-name",
    scheduler: "kai-scheduler",
};

/// Serves a kind of objects with any fields until the test ends; a moment after this returns.
pub(super) async fn define(cluster: &TestCluster, group: &str, version: &str, kind: &str) {
    let singular = kind.to_lowercase();
    let plural = format!("{singular}s");
    let name = format!("{plural}.{group}");
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version = json!({"name": version, "served": true, "storage": true,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": name}, "spec": {"group": group, "scope": "Namespaced",
        "names": {"kind": kind, "plural": plural, "singular": singular}, "versions": [version]}});
    cluster.rig.on_end(&["kubectl", "delete", "crd", &name, "--ignore-not-found"]);
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.rig.client().await);
    let definition = serde_json::from_value(definition).expect("it is a definition");
    definitions.create(&PostParams::default(), &definition).await.expect("it can be created");
}

impl Groups {
    /// Serves it until the test ends, and waits until the controller knows of it.
    async fn serve(self, cluster: &TestCluster) {
        define(cluster, self.group, self.version, "PodGroup").await;
        // Served a moment after that; the controller asks again every half minute.
        self.put(cluster, "probe", json!({"minMember": 1})).await;
        self.member(cluster, "probe", "probe", self.scheduler).await;
        wait_placed(cluster, "probe", 1).await;
        super::end_hollow(cluster, "probe").await;
    }

    async fn put(self, cluster: &TestCluster, name: &str, spec: Value) {
        let version = format!("{}/{}", self.group, self.version);
        let metadata = json!({"name": name, "namespace": cluster.namespace});
        let object = json!({"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": spec});
        let made = || async { cluster.try_create(object.clone(), false).await.ok() };
        wait_until(&format!("PodGroup {name} to be created"), PATIENCE, made).await;
    }

    async fn member(self, cluster: &TestCluster, name: &str, group: &str, scheduler: &str) {
        let of_group = |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({self.annotation: group});
            pod["spec"]["schedulerName"] = scheduler.into();
        };
        create_hollow(cluster, name, most(), of_group).await;
    }
}

/// How many claims are placed whose names begin so.
async fn placed(cluster: &TestCluster, prefix: &str) -> Option<usize> {
    let claims = cluster.api::<ResourceClaim>().list(&ListParams::default()).await.ok()?.items;
    let of_name = |claim: &&ResourceClaim| {
        claim.metadata.name.as_ref().is_some_and(|name| name.starts_with(prefix))
            && !results(claim).is_empty()
    };
    Some(claims.iter().filter(of_name).count())
}

async fn wait_placed(cluster: &TestCluster, prefix: &str, count: usize) {
    let done = || async { (placed(cluster, prefix).await? == count).then_some(()) };
    wait_until(&format!("{count} claims {prefix}… to be placed"), hollow::LONG, done).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_podgroups_minimum_starts_together_and_the_rest_one_by_one() {
    let cluster = super::bed_beside("a_podgroups_minimum_starts_together_and_the_rest_one_by_one", 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    for api in [VOLCANO, KAI] {
        api.serve(&cluster).await;
        // One more than a node has GPUs; a minimum of all, then of two.
        api.put(&cluster, "all", json!({"minMember": gpus + 1})).await;
        for nth in 0..=gpus {
            api.member(&cluster, &format!("all-{nth}"), "all", "default-scheduler").await;
        }
        wait_told(&cluster, "all-0", "pods do not fit together").await;
        assert_eq!(placed(&cluster, "all").await, Some(0), "{}: none of them", api.group);
        api.put(&cluster, "two", json!({"minMember": 2})).await;
        for nth in 0..=gpus {
            api.member(&cluster, &format!("two-{nth}"), "two", "default-scheduler").await;
        }
        wait_bound(&cluster, gpus).await;
        wait_placed(&cluster, "two", gpus).await;
        assert_eq!(placed(&cluster, "all").await, Some(0), "{}", api.group);
        hollow::clear(&cluster).await;
    }
    hollow::end(cluster).await;
}

/// A batch Job or a Deployment in Volcano's hands: each of its pods starts by itself, whatever becomes of the others.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_of_a_group_that_starts_by_ones_wait_for_no_other() {
    let cluster = super::bed_beside("pods_of_a_group_that_starts_by_ones_wait_for_no_other", 1).await;
    VOLCANO.serve(&cluster).await;
    let gpus = cluster.published("hollow-0").await.len();
    // Their scheduler groups every pod: nothing is placed before the group is there.
    for nth in 0..=gpus {
        VOLCANO.member(&cluster, &format!("w-{nth}"), "web", VOLCANO.scheduler).await;
    }
    wait_told(&cluster, "w-0", "PodGroup web, which the pod names, does not exist yet").await;
    assert_eq!(placed(&cluster, "w-").await, Some(0));
    VOLCANO.put(&cluster, "web", json!({"minMember": 1})).await;
    wait_placed(&cluster, "w-", gpus).await;
    hollow::end(cluster).await;
}
