//! Nodes that go, that are emptied, and that the scheduler would not have.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::books::Auditor;
use super::explain::{has_row, why};
use super::{NODE, create, share, wait_not_placed, wait_told};
use crate::hollow::{self, on_hollow, wait_node};
use crate::manifests::{as_nobody, claim, gpu, template, user_of};
use crate::rig::{skipped, wait_until};
use crate::test_cluster::{PATIENCE, SYSTEM, TestCluster, container_run, is_ready, node_of};

/// The node that a claim's allocation is for; waits for one.
async fn wait_node_of_claim(cluster: &TestCluster, name: &str, but: Option<&str>) -> String {
    let node = || async {
        let claim = cluster.api::<ResourceClaim>().get_opt(name).await.ok()??;
        let results = claim.status?.allocation?.devices?.results?;
        let pool = results.first()?.pool.split('/').next()?.to_owned();
        (but != Some(pool.as_str())).then_some(pool)
    };
    wait_until(&format!("claim {name} to be placed, and not on {but:?}"), hollow::LONG, node).await
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_was_placed_on_a_node_that_is_lost_is_placed_on_another() {
    let test = "what_was_placed_on_a_node_that_is_lost_is_placed_on_another";
    let cluster = super::bed_beside(test, 2).await;
    let auditor = Auditor::begin(&cluster.client).await;
    cluster.create(claim("bound", share(json!({"memory": "4Gi"})))).await;
    cluster.create(on_hollow(as_nobody(user_of("bound", "bound")))).await;
    let lost = wait_node(&cluster, "bound").await;
    // Beside it, and no scheduler binds it.
    cluster.create(claim("waiting", share(json!({"memory": "4Gi"})))).await;
    let mut waiting = on_hollow(as_nobody(user_of("waiting", "waiting")));
    waiting["spec"]["schedulerName"] = json!("nobody");
    cluster.create(waiting).await;
    assert_eq!(wait_node_of_claim(&cluster, "waiting", None).await, lost, "packed");

    cluster.rig.run(&["hollow-end", &lost]);
    let other = wait_node_of_claim(&cluster, "waiting", Some(&lost)).await;
    assert_ne!(other, lost);
    let told = || async { cluster.events("waiting").await.into_iter().find(|event| event.contains(&lost)) };
    println!("told: {}", wait_until("an event that names the lost node", PATIENCE, told).await);
    // As the pod's controller and an administrator would: the pod is ended and made again.
    // Unless the cluster has done so, which it does after 40 s without the node.
    match cluster.api::<Pod>().delete("bound", &DeleteParams::default().grace_period(0)).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => panic!("it can be deleted: {error}"),
    }
    cluster.gone("bound").await;
    wait_not_placed(&cluster, "bound").await;
    cluster.create(on_hollow(as_nobody(user_of("bound", "bound")))).await;
    assert_eq!(wait_node(&cluster, "bound").await, other);
    println!("{} looks", auditor.end().await);
    hollow::end(cluster).await;
}

/// The second pod must not be beside the first, by a term that the controller does not read: the scheduler takes the
/// allocation back (PostFilter), once, and the next one is elsewhere.
#[tokio::test]
#[ignore = "needs a rig"]
async fn where_the_scheduler_will_not_have_a_pod_its_claim_goes_elsewhere() {
    let test = "where_the_scheduler_will_not_have_a_pod_its_claim_goes_elsewhere";
    let cluster = super::bed_beside(test, 2).await;
    let apart = |name: &str| {
        let mut pod = on_hollow(as_nobody(user_of(name, name)));
        super::keep_apart_unseen(&cluster.namespace, &mut pod);
        pod
    };
    let auditor = Auditor::begin(&cluster.client).await;
    for name in ["first", "second"] {
        cluster.create(claim(name, share(json!({"memory": "4Gi"})))).await;
    }
    cluster.create(apart("first")).await;
    let first = wait_node(&cluster, "first").await;
    cluster.create(apart("second")).await;
    let second = wait_node(&cluster, "second").await;
    assert_ne!(first, second);
    assert_eq!(wait_node_of_claim(&cluster, "second", None).await, second);
    let moved = || async {
        let events = cluster.events("second").await;
        let moved: Vec<_> = events.into_iter().filter(|event| event.starts_with("GpuShareMoved")).collect();
        (!moved.is_empty()).then_some(moved)
    };
    let moved = wait_until("an event about the move", PATIENCE, moved).await;
    assert!(moved.len() == 1 && moved[0].contains(&first), "{moved:?}");
    auditor.end().await;
    hollow::end(cluster).await;
}

/// Only the last of the nodes has what the pod asks for beside its share.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_goes_at_once_to_the_node_that_has_its_extended_resource() {
    let test = "a_pod_goes_at_once_to_the_node_that_has_its_extended_resource";
    let cluster = super::bed_beside(test, 4).await;
    let has =
        json!({"status": {"capacity": {"example.com/hca": "1"}, "allocatable": {"example.com/hca": "1"}}});
    cluster.rig.kubectl(&["patch", "node", "hollow-3", "--subresource=status", "--patch", &has.to_string()]);
    super::create_hollow(&cluster, "rdma", share(json!({"memory": "4Gi"})), |pod| {
        pod["spec"]["containers"][0]["resources"]["limits"] = json!({"example.com/hca": "1"});
    })
    .await;
    assert_eq!(wait_node(&cluster, "rdma").await, "hollow-3");
    wait_told(&cluster, "rdma", "GpuSharePlaced").await;
    let told = cluster.events("rdma").await;
    assert!(!told.iter().any(|event| event.starts_with("GpuShareMoved")), "it was tried elsewhere: {told:?}");
    hollow::end(cluster).await;
}

/// The fuller node comes first, and kube-scheduler refuses it, by a term that the controller does not read. One replica finds
/// out, and the others are not tried there, although all nodes are in the zone of the one that refuses.
#[tokio::test]
#[ignore = "needs a rig"]
async fn what_has_refused_one_replica_is_not_tried_by_the_others() {
    let test = "what_has_refused_one_replica_is_not_tried_by_the_others";
    let cluster = super::bed_beside(test, 2).await;
    let zone = "topology.kubernetes.io/zone=only";
    cluster.rig.kubectl(&["label", "node", "-l", "rig/hollow=yes", zone]);
    let auditor = Auditor::begin(&cluster.client).await;
    super::create_hollow(&cluster, "keeper", share(json!({"memory": "40Gi"})), |pod| {
        pod["metadata"]["labels"]["role"] = json!("keeper");
    })
    .await;
    let refuses = wait_node(&cluster, "keeper").await;
    cluster.create(template("part", share(json!({"memory": "4Gi"})))).await;
    let mut pod = on_hollow(as_nobody(crate::manifests::by_template("part", "x")));
    super::keep_apart_unseen(&cluster.namespace, &mut pod);
    pod["metadata"] = json!({"labels": {"app": "web"}});
    let terms =
        &mut pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    terms[0]["labelSelector"] = json!({"matchLabels": {"role": "keeper"}});
    cluster
        .create(json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "web"}},
                     "template": {"metadata": pod["metadata"], "spec": pod["spec"]}}}))
        .await;
    let moves =
        |events: Vec<String>| events.into_iter().filter(|event| event.starts_with("GpuShareMoved")).count();
    let first = wait_replicas(&cluster, 1).await;
    assert_eq!(
        moves(cluster.events(&first[0].0).await),
        1,
        "the controller reads the term, and nothing is tried here"
    );
    cluster.rig.kubectl(&["-n", &cluster.namespace, "scale", "deployment/web", "--replicas=5"]);
    for (name, node) in wait_replicas(&cluster, 5).await {
        assert_ne!(node, refuses, "{name}");
        if name != first[0].0 {
            assert_eq!(moves(cluster.events(&name).await), 0, "{name} was tried on {refuses}");
        }
    }
    auditor.end().await;
    cluster.rig.kubectl(&["-n", &cluster.namespace, "delete", "deployment", "web"]);
    hollow::end(cluster).await;
}

/// The names and nodes of so many pods of the Deployment, once all of them are bound.
async fn wait_replicas(cluster: &TestCluster, count: usize) -> Vec<(String, String)> {
    let bound = || async {
        let pods = cluster.api::<Pod>().list(&ListParams::default().labels("app=web")).await.ok()?.items;
        let at = |pod: Pod| Some((pod.metadata.name?, pod.spec?.node_name?));
        let all: Vec<_> = pods.into_iter().filter_map(at).collect();
        (all.len() == count).then_some(all)
    };
    wait_until(&format!("{count} replicas to be bound"), hollow::LONG, bound).await
}

/// Of pods that take one port each gets a node of its own, and none is refused.
#[tokio::test]
#[ignore = "needs a rig"]
async fn pods_that_take_one_port_of_their_nodes_are_bound_without_another_try() {
    let test = "pods_that_take_one_port_of_their_nodes_are_bound_without_another_try";
    let cluster = super::bed_beside(test, 3).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let mut nodes = std::collections::BTreeSet::new();
    for name in ["first", "second", "third"] {
        super::create_hollow(&cluster, name, share(json!({"memory": "4Gi"})), |pod| {
            pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 7777, "hostPort": 7777}]);
        })
        .await;
        nodes.insert(wait_node(&cluster, name).await);
        let events = cluster.events(name).await;
        assert!(!events.iter().any(|event| event.starts_with("GpuShareMoved")), "{events:?}");
    }
    assert_eq!(nodes.len(), 3);
    auditor.end().await;
    hollow::end(cluster).await;
}

/// Replicas that must be apart, and those that are spread, come to their nodes at once: none is refused anywhere.
#[tokio::test]
#[ignore = "needs a rig"]
async fn replicas_that_must_be_apart_or_spread_are_bound_without_another_try() {
    let test = "replicas_that_must_be_apart_or_spread_are_bound_without_another_try";
    let cluster = super::bed_beside(test, 4).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let names = |what: &str, count: usize| (0..count).map(|nth| format!("{what}-{nth}")).collect::<Vec<_>>();
    let apart = names("apart", 4);
    for name in &apart {
        super::create_hollow(&cluster, name, share(json!({"memory": "4Gi"})), super::keep_apart).await;
    }
    let nodes = bound_at_once(&cluster, &apart).await;
    assert_eq!(nodes.values().copied().collect::<Vec<_>>(), [1, 1, 1, 1], "{nodes:?}");
    super::create_hollow(&cluster, "one-more", share(json!({"memory": "4Gi"})), super::keep_apart).await;
    super::wait_told(&cluster, "one-more", super::WAITS).await;
    let said = why(&cluster, "pod/one-more");
    assert!(has_row(&said, "hollow-0", "where 1 pod matches the pod's required anti-affinity"), "{said}");
    let spread = names("spread", 8);
    for name in &spread {
        super::create_hollow(&cluster, name, share(json!({"memory": "1Gi"})), |pod| {
            pod["metadata"]["labels"]["spread"] = json!("yes");
            pod["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
                "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"spread": "yes"}}}]);
        })
        .await;
    }
    let nodes = bound_at_once(&cluster, &spread).await;
    assert_eq!(nodes.values().copied().collect::<Vec<_>>(), [2, 2, 2, 2], "{nodes:?}");
    auditor.end().await;
    hollow::end(cluster).await;
}

/// Each share that is there leaves its GPU room for one pod of the gang, and the gang is one larger: packing alone would begin
/// it on that node.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_gang_that_must_be_together_is_bound_where_there_is_room_for_all() {
    let cluster =
        super::bed_beside("a_gang_that_must_be_together_is_bound_where_there_is_room_for_all", 2).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let gpus = cluster.published("hollow-0").await.len();
    for nth in 0..gpus {
        let name = format!("used-{nth}");
        super::create_hollow(&cluster, &name, share(json!({"memory": "45Gi"})), |pod| {
            pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!("hollow-0");
        })
        .await;
        assert_eq!(wait_node(&cluster, &name).await, "hollow-0");
    }
    let gang: Vec<String> = (0..=gpus).map(|nth| format!("worker-{nth}")).collect();
    for name in &gang {
        super::create_hollow(&cluster, name, share(json!({"memory": "30Gi"})), |pod| {
            pod["metadata"]["labels"]["pod-group-name"] = json!("train");
            pod["metadata"]["annotations"] = json!({"tranche.dev/gang-size": gang.len().to_string()});
            let own = json!({"topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"pod-group-name": "train"}}});
            pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                json!([own]);
        })
        .await;
    }
    let nodes = bound_at_once(&cluster, &gang).await;
    assert_eq!(nodes, [("hollow-1".to_owned(), gang.len())].into());
    auditor.end().await;
    hollow::end(cluster).await;
}

/// How many of these pods are on each node, once all of them are bound. No node has refused one.
async fn bound_at_once(cluster: &TestCluster, names: &[String]) -> std::collections::BTreeMap<String, usize> {
    let mut nodes = std::collections::BTreeMap::new();
    for name in names {
        *nodes.entry(wait_node(cluster, name).await).or_default() += 1;
        let events = cluster.events(name).await;
        assert!(!events.iter().any(|event| event.starts_with("GpuShareMoved")), "{events:?}");
    }
    nodes
}

/// A PersistentVolume of this node alone, bound to a PersistentVolumeClaim of the test. The volume goes with the test.
async fn bind_volume(cluster: &TestCluster, claim: &str, node: &str) {
    let name = format!("{}-{claim}", cluster.namespace);
    cluster.rig.on_end(&[
        "kubectl",
        "delete",
        "persistentvolume",
        &name,
        "--wait=false",
        "--ignore-not-found",
    ]);
    let here = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]);
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "local": {"path": "/mnt/home"},
        "claimRef": {"namespace": cluster.namespace, "name": claim},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}}}});
    let volumes = Api::<PersistentVolume>::all(cluster.client.clone());
    volumes
        .create(&PostParams::default(), &crate::test_cluster::from(volume))
        .await
        .expect("a volume can be made");
    cluster
        .create(
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name,
            "resources": {"requests": {"storage": "1Gi"}}}}),
        )
        .await;
    let bound = || async {
        let claim = cluster.api::<PersistentVolumeClaim>().get_opt(claim).await.ok()??.status?.phase?;
        let volume = volumes.get_opt(&name).await.ok()??.status?.phase?;
        (claim == "Bound" && volume == "Bound").then_some(())
    };
    wait_until("the volume to be bound", PATIENCE, bound).await;
}

/// A pod is put where its volume is at once, however many other nodes there are.
#[tokio::test]
#[ignore = "needs a rig"]
async fn a_pod_with_a_volume_of_one_node_is_bound_there_without_another_try() {
    let test = "a_pod_with_a_volume_of_one_node_is_bound_there_without_another_try";
    let cluster = super::bed_beside(test, 12).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let last = "hollow-11";
    bind_volume(&cluster, "home", last).await;
    let volumes = json!([{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]);
    super::create_hollow(&cluster, "notebook", share(json!({"memory": "4Gi"})), |pod| {
        pod["spec"]["volumes"] = volumes.clone();
    })
    .await;
    assert_eq!(wait_node(&cluster, "notebook").await, last);
    let events = cluster.events("notebook").await;
    assert!(!events.iter().any(|event| event.starts_with("GpuShareMoved")), "{events:?}");
    // One that may not go there waits, and is told why.
    super::create_hollow(&cluster, "kept-off", share(json!({"memory": "4Gi"})), |pod| {
        pod["spec"]["volumes"] = volumes;
        keep_off(pod, last);
    })
    .await;
    super::wait_told(&cluster, "kept-off", super::WAITS).await;
    let said = why(&cluster, "pod/kept-off");
    let words = "the volume of the PersistentVolumeClaim home";
    assert!(has_row(&said, "hollow-0", words) && !has_row(&said, last, words), "{said}");
    auditor.end().await;
    hollow::end(cluster).await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn what_is_drained_from_one_node_comes_up_on_another_under_its_limit() {
    let test = "what_is_drained_from_one_node_comes_up_on_another_under_its_limit";
    let cluster = super::cluster(test).await;
    let Some(other) = cluster.nodes.iter().find(|node| *node != NODE).cloned() else {
        skipped("needs two real nodes");
        return;
    };
    cluster.create(template("part", share(json!({"memory": "4Gi"})))).await;
    let mut pod = as_nobody(crate::manifests::by_template("part", "x"));
    pod["metadata"] = json!({"labels": {"app": "drained"}});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "drained"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "drained"}},
                 "template": {"metadata": pod["metadata"], "spec": pod["spec"]}}});
    cluster.create(deployment).await;
    wait_ready_on(&cluster, NODE, 2).await;
    cluster.rig.kubectl(&["uncordon", &other]);
    cluster.rig.on_end(&["kubectl", "uncordon", NODE]);
    let only =
        ["--ignore-daemonsets", "--delete-emptydir-data", "--pod-selector=app=drained", "--timeout=170s"];
    cluster.rig.kubectl(&[&["drain", NODE][..], &only].concat());
    for pod in wait_ready_on(&cluster, &other, 2).await {
        let env = cluster.exec(&pod, "main", "env | grep ^CUDA_MPS_PINNED || true");
        assert_eq!(env.trim(), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M");
    }
    cluster.end().await;
}

/// The names of so many pods that run on the node; waits for them.
async fn wait_ready_on(cluster: &TestCluster, node: &str, count: usize) -> Vec<String> {
    let ready = || async {
        let pods = cluster.api::<Pod>().list(&ListParams::default()).await.ok()?.items;
        let here =
            |pod: &Pod| pod.metadata.deletion_timestamp.is_none() && is_ready(pod) && node_of(pod) == node;
        let names: Vec<String> = pods.into_iter().filter(here).filter_map(|pod| pod.metadata.name).collect();
        (names.len() == count).then_some(names)
    };
    wait_until(&format!("{count} pods to run on {node}"), PATIENCE, ready).await
}

/// Creates a claim and a pod of its name in a namespace of any name.
async fn create_in(cluster: &TestCluster, namespace: &str, name: &str, amount: Value) {
    let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), namespace);
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let params = kube::api::PostParams::default();
    let object = crate::test_cluster::from(claim(name, share(amount)));
    claims.create(&params, &object).await.expect("a claim can be made");
    let object = crate::test_cluster::from(on_hollow(as_nobody(user_of(name, name))));
    pods.create(&params, &object).await.expect("a pod can be made");
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_namespace_that_is_deleted_gives_its_shares_back() {
    let cluster = super::bed_beside("a_namespace_that_is_deleted_gives_its_shares_back", 1).await;
    let gpus = cluster.published("hollow-0").await.len();
    let other = format!("{}-other", cluster.namespace);
    cluster.rig.on_end(&["kubectl", "delete", "namespace", &other, "--wait=false", "--ignore-not-found"]);
    cluster.rig.kubectl(&["create", "namespace", &other]);
    let accounts =
        Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(cluster.client.clone(), &other);
    let account = || async { accounts.get_opt("default").await.ok()?.map(|_| ()) };
    wait_until("the namespace's service account", PATIENCE, account).await;
    for nth in 0..gpus {
        create_in(&cluster, &other, &format!("most-{nth}"), json!({"fraction": "0.9"})).await;
    }
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &other);
    let all = || async {
        let pods = pods.list(&ListParams::default()).await.ok()?.items;
        let bound = pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
        (bound.count() == gpus).then_some(())
    };
    wait_until("all of them to be bound", hollow::LONG, all).await;
    cluster.create(claim("next", share(json!({"fraction": "0.9"})))).await;
    cluster.create(on_hollow(as_nobody(user_of("next", "next")))).await;
    let waits = || async {
        let events = cluster.events("next").await;
        events.into_iter().find(|event| event.starts_with("WaitingForGpuShare"))
    };
    println!("told: {}", wait_until("the pod to wait", PATIENCE, waits).await);
    cluster.rig.kubectl(&["delete", "namespace", &other, "--timeout=170s"]);
    wait_node(&cluster, "next").await;
    hollow::end(cluster).await;
}

/// What happens while no controller runs is taken in by the next one. It is away for as long as this takes; for
/// TRANCHE_OUTAGE seconds where that is set.
#[tokio::test]
#[ignore = "needs a rig"]
async fn after_a_time_without_any_controller_all_is_as_it_should_be() {
    let cluster = super::bed_beside("after_a_time_without_any_controller_all_is_as_it_should_be", 2).await;
    let auditor = Auditor::begin(&cluster.client).await;
    let names = |what: &str, count: usize| (0..count).map(|nth| format!("{what}-{nth}")).collect::<Vec<_>>();
    let before = names("before", 8);
    make(&cluster, &before, "20Gi").await;
    hollow::wait_bound(&cluster, before.len()).await;
    let lost = wait_node(&cluster, "before-0").await;
    create(&cluster, "runs", json!({"memory": "3Gi"})).await;
    let runs = container_run(&cluster.wait_ready("runs").await);
    // What is held and idle stays so without a controller: one GPU is given back before, to a pod that goes again.
    let whole = json!({"requests": [gpu("gpu")]});
    super::create_hollow(&cluster, "whole-0", whole, |pod| keep_off(pod, &lost)).await;
    wait_node(&cluster, "whole-0").await;
    super::end_hollow(&cluster, "whole-0").await;

    end_controllers(&cluster).await;
    // Some go, some come, and a node is lost with what is on it.
    for name in &before[..4] {
        super::end_hollow(&cluster, name).await;
    }
    cluster.rig.run(&["hollow-end", &lost]);
    let pods = cluster.api::<Pod>();
    for name in &before[4..] {
        // Kubernetes may have deleted those of the lost node by now.
        let Some(pod) = pods.get_opt(name).await.expect("the API server answers") else { continue };
        if node_of(&pod) == lost {
            let _ = pods.delete(name, &DeleteParams::default().grace_period(0)).await;
            cluster.gone(name).await;
        }
    }
    let after = names("after", 12);
    make(&cluster, &after, "10Gi").await;
    create(&cluster, "real", json!({"memory": "2000Mi"})).await;
    let turns = be_without(&cluster, &after).await;
    assert_eq!(container_run(&cluster.wait_ready("runs").await), runs);

    let begin = Instant::now();
    cluster.rig.kubectl(&scale("--replicas=2"));
    for name in &after {
        assert_ne!(wait_node(&cluster, name).await, lost);
    }
    cluster.wait_ready("real").await;
    println!("{turns} turns without; all placed {:.1} s after its start", begin.elapsed().as_secs_f64());
    super::wait_metric(&cluster, "tranche_controller_overcommitted_gpus", 0.0).await;
    assert_eq!(container_run(&cluster.wait_ready("runs").await), runs);
    println!("{} looks", auditor.end().await);
    cluster.delete("real").await;
    cluster.delete("runs").await;
    hollow::end(cluster).await;
}

fn keep_off(pod: &mut Value, node: &str) {
    let other = json!({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]});
    pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
        json!({"nodeSelectorTerms": [{"matchExpressions": [other]}]});
}

/// Pods for nodes without a machine, each with a claim of this much memory.
async fn make(cluster: &TestCluster, names: &[String], memory: &str) {
    for name in names {
        super::create_hollow(cluster, name, share(json!({"memory": memory})), |_| {}).await;
    }
}

fn scale(replicas: &str) -> [&str; 5] {
    ["-n", SYSTEM, "scale", "deployment/tranche-controller", replicas]
}

/// Ends all controllers until the test ends.
async fn end_controllers(cluster: &TestCluster) {
    let status = ["-n", SYSTEM, "rollout", "status", "deployment/tranche-controller", "--timeout=170s"];
    cluster.rig.on_end(&[&["kubectl"][..], &status].concat());
    cluster.rig.on_end(&[&["kubectl"][..], &scale("--replicas=2")].concat());
    cluster.rig.kubectl(&scale("--replicas=0"));
    let list = ListParams::default().labels("app.kubernetes.io/component=controller");
    let system = Api::<Pod>::namespaced(cluster.client.clone(), SYSTEM);
    let none = || async { system.list(&list).await.ok()?.items.is_empty().then_some(()) };
    wait_until("the controllers to be gone", PATIENCE, none).await;
}

/// The time without a controller: who needs none gets its place, who needs one comes, waits and goes. How
/// often that was seen.
async fn be_without(cluster: &TestCluster, waiting: &[String]) -> usize {
    let outage = std::env::var("TRANCHE_OUTAGE").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(0);
    let (begin, outage) = (Instant::now(), Duration::from_secs(outage));
    let mut every = tokio::time::interval(Duration::from_secs(30));
    for turn in 1.. {
        every.tick().await;
        let (whole, part) = (format!("whole-{turn}"), format!("part-{turn}"));
        super::create_hollow(cluster, &part, share(json!({"memory": "5Gi"})), |_| {}).await;
        super::create_hollow(cluster, &whole, json!({"requests": [gpu("gpu")]}), |_| {}).await;
        wait_node(cluster, &whole).await;
        super::end_hollow(cluster, &whole).await;
        for name in waiting.iter().chain([&part]) {
            let pod = cluster.api::<Pod>().get(name).await.expect("it is there");
            assert_eq!(pod.spec.and_then(|spec| spec.node_name), None, "{name}");
        }
        super::end_hollow(cluster, &part).await;
        let passed = begin.elapsed();
        println!("turn {turn}, {:.0} s of {:.0} s", passed.as_secs_f64(), outage.as_secs_f64());
        if passed >= outage {
            return turn;
        }
    }
    unreachable!("turns have no end")
}
