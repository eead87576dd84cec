use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde_json::{Value, json};

use super::*;

fn node(value: Value) -> Node {
    Node::of(&serde_json::from_value(value).unwrap())
}

fn spec(value: Value) -> PodSpec {
    let mut spec = value;
    spec.as_object_mut().unwrap().entry("containers").or_insert(json!([]));
    serde_json::from_value(spec).unwrap()
}

fn pod(value: Value) -> Demands {
    Demands::of(&spec(value))
}

/// A ready node `n1` with these labels.
fn labelled(labels: Value) -> Node {
    let status = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    node(json!({"metadata": {"name": "n1", "labels": labels}, "status": status}))
}

fn affinity(terms: Value) -> Value {
    let required = json!({"nodeSelectorTerms": terms});
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}})
}

fn required(terms: Value) -> Demands {
    pod(json!({"affinity": affinity(terms)}))
}

fn words(pod: &Demands, node: &Node) -> String {
    why_not(pod, node).map(|unfit| unfit.to_string()).unwrap_or_default()
}

#[test]
fn labels_are_matched_by_every_operator() {
    let node = labelled(json!({"zone": "a", "cores": "64", "negative": "-3", "empty": ""}));
    let expression = |key: &str, operator: &str, values: &[&str]| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
    for (key, operator, values, fits) in [
        ("zone", "In", &["a", "b"][..], true),
        ("zone", "In", &["b"], false),
        ("zone", "In", &[], false),
        ("none", "In", &["a"], false),
        ("none", "In", &[""], false),
        ("empty", "In", &[""], true),
        ("zone", "NotIn", &["b"], true),
        ("zone", "NotIn", &["a", "b"], false),
        ("none", "NotIn", &["a"], true),
        ("empty", "Exists", &[], true),
        ("none", "Exists", &[], false),
        ("none", "DoesNotExist", &[], true),
        ("empty", "DoesNotExist", &[], false),
        ("cores", "Gt", &["63"], true),
        ("cores", "Gt", &["64"], false),
        ("cores", "Lt", &["65"], true),
        ("cores", "Lt", &["64"], false),
        ("negative", "Lt", &["-2"], true),
        ("none", "Gt", &["1"], false),
        ("none", "Lt", &["1"], false),
        ("zone", "Gt", &["1"], false),
        ("cores", "Gt", &["1", "2"], false),
        ("cores", "Gt", &["many"], false),
        ("zone", "Like", &["a"], false),
    ] {
        let found = why_not(&required(expression(key, operator, values)), &node);
        assert_eq!(found.is_none(), fits, "{key} {operator} {values:?}: {found:?}");
    }
}

#[test]
fn terms_are_alternatives_and_requirements_are_not() {
    let node = labelled(json!({"zone": "a", "gpu": "h100"}));
    let one = |key: &str, value: &str| json!({"key": key, "operator": "In", "values": [value]});
    let name = |operator: &str, values: &[&str]| json!({"matchFields": [{"key": "metadata.name", "operator": operator, "values": values}]});
    let both = |gpu: &str| json!({"matchExpressions": [one("zone", "a"), one("gpu", gpu)]});
    let mixed = |wanted: &str| {
        json!({"matchExpressions": [one("zone", "a")],
               "matchFields": [{"key": "metadata.name", "operator": "In", "values": [wanted]}]})
    };
    for (terms, fits) in [
        (json!([both("h100")]), true),
        (json!([both("t4")]), false),
        (json!([both("t4"), both("h100")]), true),
        (json!([]), false),
        (json!([{}]), false),
        (json!([{}, both("h100")]), true),
        (json!([{"matchExpressions": [], "matchFields": []}]), false),
        (json!([name("In", &["n1"])]), true),
        (json!([name("In", &["n2"])]), false),
        (json!([name("NotIn", &["n2"])]), true),
        (json!([name("NotIn", &["n1"])]), false),
        (json!([name("In", &["n1", "n2"])]), false),
        (json!([name("Exists", &["n1"])]), false),
        (json!([mixed("n1")]), true),
        (json!([mixed("n2")]), false),
    ] {
        let found = why_not(&required(terms.clone()), &node);
        assert_eq!(found.is_none(), fits, "{terms}: {found:?}");
    }
    assert_eq!(
        words(&required(json!([{}, both("t4")])), &node),
        "matches none of the 2 terms of the pod's required node affinity; of the last, \
         gpu In [t4] fails: it is \"h100\""
    );
}

#[test]
fn the_node_selector_wants_all_its_labels_beside_the_affinity() {
    let node = labelled(json!({"zone": "a", "gpu": "h100"}));
    let select = |selector: Value| words(&pod(json!({"nodeSelector": selector})), &node);
    assert_eq!(select(json!({"zone": "a", "gpu": "h100"})), "");
    assert_eq!(select(json!({})), "");
    assert_eq!(select(json!({"zone": "b"})), "has the label zone=a where the pod's nodeSelector wants b");
    assert_eq!(select(json!({"disk": "ssd"})), "lacks the label disk=ssd of the pod's nodeSelector");
    let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]);
    let both = pod(json!({"nodeSelector": {"gpu": "t4"}, "affinity": affinity(terms)}));
    assert!(words(&both, &node).contains("wants t4"));
    let elsewhere = pod(json!({"nodeName": "n2"}));
    assert_eq!(words(&elsewhere, &node), "is not the node n2 that the pod names");
    assert_eq!(why_not(&pod(json!({"nodeName": "n1"})), &node), None);
}

#[test]
fn taints_keep_off_who_does_not_tolerate_them() {
    let taint = |effect: &str| json!({"key": "gpu", "value": "only", "effect": effect});
    let all = json!({"operator": "Exists"});
    for (effect, toleration, fits) in [
        ("NoSchedule", json!(null), false),
        ("NoExecute", json!(null), false),
        ("PreferNoSchedule", json!(null), true),
        ("NoSchedule", all.clone(), true),
        ("NoExecute", all, true),
        ("NoSchedule", json!({"key": "gpu", "operator": "Exists"}), true),
        ("NoSchedule", json!({"key": "gpu", "value": "only"}), true),
        ("NoSchedule", json!({"key": "gpu", "operator": "Equal", "value": "only"}), true),
        ("NoSchedule", json!({"key": "gpu", "operator": "Equal", "value": "other"}), false),
        ("NoSchedule", json!({"key": "gpu"}), false),
        ("NoSchedule", json!({"key": "cpu", "operator": "Exists"}), false),
        ("NoSchedule", json!({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}), true),
        ("NoSchedule", json!({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}), false),
        (
            "NoExecute",
            json!({"key": "gpu", "operator": "Exists", "effect": "", "tolerationSeconds": 5}),
            true,
        ),
        ("NoSchedule", json!({"key": "gpu", "operator": "Gt", "value": "only"}), false),
    ] {
        let node = node(json!({"metadata": {"name": "n1"}, "spec": {"taints": [taint(effect)]}}));
        let tolerations = if toleration.is_null() { json!([]) } else { json!([toleration]) };
        let found = why_not(&pod(json!({"tolerations": tolerations})), &node);
        assert_eq!(found.is_none(), fits, "{effect} {toleration}: {found:?}");
    }
    let two = node(
        json!({"spec": {"taints": [taint("NoSchedule"), {"key": "maintenance", "effect": "NoExecute"}]}}),
    );
    let one_tolerated = pod(json!({"tolerations": [{"key": "gpu", "operator": "Exists"}]}));
    assert_eq!(
        words(&one_tolerated, &two),
        "has the taint maintenance:NoExecute, which the pod does not tolerate"
    );
    assert!(words(&pod(json!({})), &two).starts_with("has the taint gpu=only:NoSchedule"));
}

#[test]
fn cordoned_and_unready_nodes_take_only_who_tolerates_it() {
    let tolerates = |key: &str, effect: &str| {
        pod(json!({"tolerations": [{"key": key, "operator": "Exists", "effect": effect}]}))
    };
    let cordoned = node(json!({"spec": {"unschedulable": true}}));
    assert!(words(&pod(json!({})), &cordoned).starts_with("is cordoned"));
    assert_eq!(why_not(&tolerates("node.kubernetes.io/unschedulable", ""), &cordoned), None);
    assert!(why_not(&tolerates("node.kubernetes.io/unschedulable", "NoExecute"), &cordoned).is_some());
    let ready = |status: &str| {
        let condition =
            json!({"type": "Ready", "status": status, "reason": "KubeletNotReady", "message": "no network"});
        node(json!({"status": {"conditions": [{"type": "DiskPressure", "status": "False"}, condition]}}))
    };
    assert_eq!(why_not(&pod(json!({})), &ready("True")), None);
    assert_eq!(words(&pod(json!({})), &ready("False")), "is not ready: KubeletNotReady: no network");
    // What admission adds to every pod: for 300 s it stays there, but none is sent there.
    let default = tolerates("node.kubernetes.io/not-ready", "NoExecute");
    assert!(why_not(&default, &ready("False")).is_some());
    let daemon = tolerates("node.kubernetes.io/not-ready", "NoSchedule");
    assert_eq!(why_not(&daemon, &ready("False")), None);
    assert!(why_not(&daemon, &ready("Unknown")).is_some(), "that is unreachable, another taint");
    assert_eq!(why_not(&pod(json!({})), &node(json!({}))), None, "nothing is said against it");
}

fn asks(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}})
}

fn container(name: &str, cpu: &str, memory: &str) -> Value {
    json!({"name": name, "image": "i", "resources": asks(cpu, memory)})
}

fn sidecar(name: &str, cpu: &str, memory: &str) -> Value {
    let mut container = container(name, cpu, memory);
    container["restartPolicy"] = json!("Always");
    container
}

#[test]
fn a_pod_asks_for_its_dearest_moment() {
    let main = json!([container("a", "500m", "1Gi"), container("b", "0.25", "512Mi")]);
    let init = |list: Value| json!({"containers": main, "initContainers": list});
    let bare = json!({"name": "c", "image": "i"});
    for (what, spec, cpu, mib) in [
        ("nothing", json!({}), 0, 0),
        ("a container without requests", json!({"containers": [bare]}), 0, 0),
        ("the sum", json!({"containers": main}), 750, 1536),
        ("a smaller init container", init(json!([container("i", "700m", "1Gi")])), 750, 1536),
        ("per resource", init(json!([container("i", "2", "1Gi")])), 2000, 1536),
        (
            "init containers one by one",
            init(json!([container("i", "1", "1Gi"), container("j", "1", "2Gi")])),
            1000,
            2048,
        ),
        ("a sidecar beside the containers", init(json!([sidecar("s", "100m", "100Mi")])), 850, 1636),
        (
            "an init container beside the sidecar before it",
            init(json!([sidecar("s", "100m", "100Mi"), container("i", "1", "2Gi")])),
            1100,
            2148,
        ),
        (
            "not beside the sidecar after it",
            init(json!([container("i", "1", "2Gi"), sidecar("s", "100m", "100Mi")])),
            1000,
            2048,
        ),
        (
            "the pod's own requests",
            json!({"containers": main, "resources": {"requests": {"cpu": "100m"}}}),
            100,
            1536,
        ),
        (
            "overhead beside all of it",
            json!({"containers": main, "overhead": {"cpu": "50m", "memory": "64Mi"}, "resources": asks("1", "2Gi")}),
            1050,
            2112,
        ),
        ("rounded up", json!({"containers": [container("a", "100100u", "1")]}), 101, 0),
    ] {
        let found = requests(&self::spec(spec));
        assert_eq!((found.cpu_milli, found.memory.mib_floor(), found.pods), (cpu, mib, 1), "{what}");
    }
}

#[test]
fn what_is_left_counts_every_pod_that_has_not_ended() {
    let node = node(json!({"status": {
        "capacity": {"cpu": "8", "memory": "16Gi", "pods": "10"},
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "3"},
    }}));
    let on = |phase: &str, status: Value| -> Pod {
        let mut status = status;
        status["phase"] = json!(phase);
        let spec = json!({"containers": [container("a", "1", "1Gi")]});
        serde_json::from_value(json!({"spec": spec, "status": status})).unwrap()
    };
    let room = |pods: &[Pod]| {
        let room = left(&node, pods);
        (room.cpu_milli, room.memory.mib_floor(), room.pods)
    };
    let status = |more: Value| {
        let mut status = json!({"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0});
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"containerStatuses": [status]})
    };
    assert_eq!(room(&[]), (4000, 8192, 3));
    assert_eq!(room(&[on("Running", json!({})), on("Pending", json!({}))]), (2000, 6144, 1));
    assert_eq!(room(&[on("Succeeded", json!({})), on("Failed", json!({}))]), (4000, 8192, 3));
    let shrinking = status(json!({"allocatedResources": {"cpu": "2", "memory": "512Mi"}}));
    assert_eq!(room(&[on("Running", shrinking)]), (2000, 7168, 2), "not given back yet");
    let growing = status(json!({"resources": asks("500m", "1536Mi")}));
    assert_eq!(room(&[on("Running", growing)]), (3000, 6656, 2));
    let many: Vec<_> = (0..5).map(|_| on("Running", json!({}))).collect();
    assert_eq!(room(&many), (0, 3072, 0), "more than there is: nothing is left");
}

#[test]
fn what_is_short_is_said_with_numbers() {
    let room = |cpu_milli, mib, pods| Resources { cpu_milli, memory: Bytes::from_mib(mib), pods };
    let short = |asked, left| short_of(asked, left).map(|unfit| unfit.to_string()).unwrap_or_default();
    assert_eq!(short(room(100, 100, 1), room(100, 100, 1)), "");
    assert_eq!(short(room(101, 100, 1), room(100, 100, 1)), "has 100m of CPU left, 101m are needed");
    assert_eq!(short(room(1, 200, 1), room(1, 100, 1)), "has 100 MiB of memory left, 200 MiB are needed");
    assert_eq!(short(room(0, 0, 1), room(9, 9, 0)), "is at its pod limit");
    assert_eq!(short(room(0, 0, 1), room(0, 0, 1)), "", "who asks for nothing fits on a full node");
}

#[test]
fn demands_that_are_too_large_are_not_kept_and_match_no_node() {
    let node = labelled(json!({}));
    let tolerations = |count: usize| -> Vec<Value> {
        (0..count).map(|nth| json!({"key": format!("k{nth:05}"), "operator": "Exists"})).collect()
    };
    let values: Vec<String> = (0..60_000).map(|nth| format!("v{nth}")).collect();
    let fat = [
        json!({"tolerations": tolerations(30_000)}),
        json!({"affinity": affinity(json!([{"matchExpressions": [{"key": "a", "operator": "NotIn", "values": values}]}]))}),
        json!({"nodeSelector": (0..1000).map(|nth| (format!("k{nth}"), json!("v"))).collect::<serde_json::Map<_, _>>()}),
    ];
    for spec in fat {
        let demands = pod(spec);
        let unfit = why_not(&demands, &node).unwrap().to_string();
        assert!(unfit.contains("bytes") && unfit.contains("65536 are read at most"), "{unfit}");
        assert!(format!("{demands:?}").len() < 300, "nothing of them is kept");
    }
    let many = pod(json!({"tolerations": tolerations(800)}));
    assert_eq!(why_not(&many, &node).map(|unfit| unfit.to_string()), None);
}

fn reach(terms: Value) -> Option<Reach> {
    let required = serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap();
    Reach::of(required).unwrap()
}

fn in_zone(zones: &[&str]) -> Value {
    json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": zones}]})
}

fn with_volumes(pod: Demands, volumes: &[(&str, Value)]) -> Demands {
    let volume = |(claim, terms): &(&str, Value)| {
        Some(Volume { claim: (*claim).into(), reach: reach(terms.clone())?.into() })
    };
    pod.with_volumes(volumes.iter().filter_map(volume))
}

/// kube-scheduler puts the label of today in its place, which the node has.
#[test]
fn what_a_volume_demands_by_an_old_label_is_left_to_the_scheduler() {
    let zone = |key: &str| json!([{"matchExpressions": [{"key": key, "operator": "In", "values": ["a"]}]}]);
    assert!(reach(zone("failure-domain.beta.kubernetes.io/zone")).is_none());
    assert!(reach(zone("topology.kubernetes.io/zone")).is_some());
}

#[test]
fn all_volumes_must_be_reached_and_the_pods_own_affinity_met() {
    let node = labelled(json!({"zone": "a", "disk": "ssd"}));
    let on = |volumes: &[(&str, Value)]| words(&with_volumes(pod(json!({})), volumes), &node);
    assert_eq!(on(&[]), "");
    assert_eq!(on(&[("data", json!([in_zone(&["a", "b"])])), ("home", json!([in_zone(&["a"])]))]), "");
    assert_eq!(
        on(&[("data", json!([in_zone(&["a"])])), ("home", json!([in_zone(&["b"])]))]),
        "cannot reach the volume of the PersistentVolumeClaim home: zone In [b] fails: it is \"a\""
    );
    assert_eq!(on(&[("data", json!([in_zone(&["b"]), in_zone(&["a"])]))]), "");
    assert_eq!(
        on(&[("data", json!([in_zone(&["b"]), in_zone(&["c"])]))]),
        "cannot reach the volume of the PersistentVolumeClaim data: none of the 2 terms of its node affinity matches; \
         of the last, zone In [c] fails: it is \"a\""
    );
    assert!(
        on(&[("data", json!([]))])
            .ends_with("data: none of the 0 terms of its node affinity matches; of the last, it has none")
    );
    let selected =
        with_volumes(pod(json!({"nodeSelector": {"disk": "hdd"}})), &[("data", json!([in_zone(&["b"])]))]);
    assert!(words(&selected, &node).contains("nodeSelector"), "the pod's own comes first");
    let cordoned = with_volumes(pod(json!({"nodeName": "n2"})), &[("data", json!([in_zone(&["b"])]))]);
    assert!(words(&cordoned, &node).contains("is not the node n2"));
}

/// kube-scheduler holds only labels against a volume.
#[test]
fn fields_of_a_volumes_affinity_are_passed_over() {
    let node = labelled(json!({"zone": "a"}));
    let name = json!([{"key": "metadata.name", "operator": "In", "values": ["n2"]}]);
    assert_eq!(reach(json!([{"matchFields": name}])), None);
    let mut both = in_zone(&["a"]);
    both["matchFields"] = name;
    assert_eq!(words(&with_volumes(pod(json!({})), &[("data", json!([both]))]), &node), "");
}

#[test]
fn volumes_count_by_what_they_demand() {
    let bare = || pod(json!({"nodeSelector": {"a": "b"}}));
    let a = || json!([in_zone(&["a"])]);
    let b = || json!([in_zone(&["b"])]);
    let one = with_volumes(bare(), &[("data", a())]);
    assert_ne!(one, bare());
    assert_eq!(one, with_volumes(bare(), &[("other", a())]), "whichever claim it is");
    assert_eq!(one, with_volumes(bare(), &[("data", a()), ("home", a())]), "once");
    assert_ne!(one, with_volumes(bare(), &[("data", b())]));
    let two = with_volumes(bare(), &[("data", a()), ("home", b())]);
    assert_eq!(two, with_volumes(bare(), &[("home", b()), ("data", a())]), "in any order");
    assert_ne!(one, two);
    assert_eq!((bare().terms(), one.terms(), two.terms()), (2, 5, 8));
    assert_eq!(with_volumes(two, &[]), bare(), "they are replaced");
}

#[test]
fn what_volumes_demand_is_held_to_a_limit() {
    let zones: Vec<String> = (0..190).map(|nth| format!("zone-{nth}")).collect();
    let volume = |nth: usize| {
        let mut values: Vec<&str> = zones.iter().map(String::as_str).collect();
        values.rotate_left(nth);
        (["c0", "c1", "c2", "c3", "c4", "c5"][nth], json!([in_zone(&values)]))
    };
    let few = with_volumes(pod(json!({})), &(0..4).map(volume).collect::<Vec<_>>());
    assert_eq!((few.volumes().len(), few.left_out()), (4, 0));
    let many = with_volumes(pod(json!({})), &(0..6).map(volume).collect::<Vec<_>>());
    assert_eq!((many.volumes().len(), many.left_out()), (4, 2));
    let values: Vec<String> = (0..400).map(|nth| format!("zone-{nth}")).collect();
    let required = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": values}]}]});
    let TooLong(bytes) = Reach::of(serde_json::from_value(required).unwrap()).unwrap_err();
    assert!(bytes > TooLong::MAX, "{bytes}");
}

#[test]
fn demands_are_equal_only_if_all_of_them_are() {
    let requirement = |key: &str, values: &[&str]| json!({"key": key, "operator": "In", "values": values});
    let term = |field: &str, one: Value| affinity(json!([{field: [one]}]));
    let a = || requirement("a", &["x"]);
    let specs = [
        json!({}),
        json!({"nodeName": "a"}),
        json!({"nodeSelector": {"a": "b"}}),
        json!({"nodeSelector": {"a": "c"}}),
        json!({"tolerations": [{"key": "a", "operator": "Exists"}]}),
        json!({"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute"}]}),
        json!({"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}]}),
        json!({"affinity": affinity(json!([]))}),
        json!({"affinity": affinity(json!([{}]))}),
        json!({"affinity": term("matchExpressions", a())}),
        json!({"affinity": term("matchFields", a())}),
        json!({"affinity": term("matchExpressions", requirement("b", &["x"]))}),
        json!({"affinity": term("matchExpressions", requirement("a", &["x", "y"]))}),
        json!({"affinity": affinity(json!([{"matchExpressions": [a()]}, {"matchExpressions": [a()]}]))}),
        json!({"affinity": affinity(json!([{"matchExpressions": [a(), a()]}, {}]))}),
    ];
    for (nth, one) in specs.iter().enumerate() {
        for (other_nth, other) in specs.iter().enumerate() {
            assert_eq!(pod(one.clone()) == pod(other.clone()), nth == other_nth, "{one} {other}");
        }
    }
}

#[test]
fn other_resources_are_summed_over_containers_and_the_most_of_init_containers_counts() {
    let asks = |name: &str, list: Value| json!({"name": name, "resources": {"requests": list}});
    let spec = spec(json!({
        "containers": [asks("a", json!({"cpu": "1", "example.com/fpga": "1"})), asks("b", json!({"example.com/fpga": "2"}))],
        "initContainers": [asks("i", json!({"example.com/fpga": "2", "ephemeral-storage": "1Gi"}))]}));
    let found: Vec<(String, u64)> = other_requests(&spec).into_iter().collect();
    assert_eq!(found, [("ephemeral-storage".to_owned(), 1 << 30), ("example.com/fpga".to_owned(), 3)]);
    let node = node(json!({"status": {"allocatable": {"example.com/fpga": "4"}}}));
    assert_eq!((node.allocatable_of("example.com/fpga"), node.allocatable_of("example.com/none")), (4, 0));
}

#[test]
fn host_ports_are_those_of_containers_and_of_what_runs_beside_them() {
    let port = |port: u16| json!([{"containerPort": port, "hostPort": port}]);
    let of = |more: Value| {
        let ports = HostPort::of(&spec(more)).into_iter();
        ports.map(|one| format!("{}/{}", one.port, one.protocol.as_str())).collect::<Vec<_>>()
    };
    let containers = json!([{"name": "a", "ports": port(1)}, {"name": "b", "ports": [{"containerPort": 2}]}]);
    let init =
        json!([{"name": "c", "ports": port(3), "restartPolicy": "Always"}, {"name": "d", "ports": port(4)}]);
    assert_eq!(of(json!({"containers": containers, "initContainers": init})), ["1/TCP", "3/TCP"]);
    let odd = json!([{"name": "a", "ports": [{"containerPort": 1, "hostPort": 0}, {"containerPort": 1, "hostPort": 70000},
        {"containerPort": 1, "hostPort": 5, "protocol": "SCTP"}, {"containerPort": 1, "hostPort": 5, "protocol": "QUIC"}]}]);
    assert_eq!(of(json!({"containers": odd})), ["5/SCTP"]);
    let many: Vec<Value> = (1..1000).map(|port| json!({"containerPort": port, "hostPort": port})).collect();
    assert_eq!(of(json!({"containers": [{"name": "a", "ports": many}]})).len(), 32);
}
