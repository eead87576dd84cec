//! Which nodes other pods keep a pod off: each rule beside a case that it decides.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};

use super::*;

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

fn labels(value: &Value) -> PodLabels {
    let all = value.as_object().unwrap().iter();
    all.map(|(key, value)| (key.as_str(), value.as_str().unwrap())).collect()
}

fn spec(value: &Value) -> PodSpec {
    let mut spec = value.clone();
    spec.as_object_mut().unwrap().entry("containers").or_insert(json!([]));
    serde_json::from_value(spec).unwrap()
}

/// Nodes `a0` and `a1` of zone a, `b0` of zone b, and `x` of no zone.
fn nodes() -> Vec<Node> {
    let of = |name: &str, zone: &str| {
        let mut labels = json!({HOST: name});
        if !zone.is_empty() {
            labels[ZONE] = zone.into();
        }
        let taints = if name == "a1" { json!([{"key": "t", "effect": "NoSchedule"}]) } else { json!([]) };
        let node = json!({"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}});
        Node::of(&serde_json::from_value(node).unwrap())
    };
    vec![of("a0", "a"), of("a1", "a"), of("b0", "b"), of("x", "")]
}

/// Another pod: its node, its labels, and whether it is bound.
type Other<'a> = (&'a str, Value, bool);

/// The nodes where a pod of namespace `ml` with this spec and these labels may go, and why not of the others.
fn open(pod: &Value, own: &Value, others: &[Other<'_>]) -> (Vec<String>, Vec<String>) {
    let (nodes, own, spec) = (nodes(), labels(own), spec(pod));
    let (terms, demands) = (Terms::of(&spec, "ml", &own).unwrap(), Demands::of(&spec));
    let count = |are: &dyn Fn(&PodLabels) -> bool| {
        let mut counts = BTreeMap::<&str, Count>::new();
        for (node, labelled, is_bound) in others {
            if are(&labels(labelled)) {
                let count = counts.entry(node).or_default();
                *(if *is_bound { &mut count.bound } else { &mut count.placed }) += 1;
            }
        }
        let with = |node| (node, counts.get(Node::name(node).as_str()).copied().unwrap_or_default());
        nodes.iter().map(with).collect::<Vec<_>>().into_iter()
    };
    let mut judged = Vec::new();
    for term in &terms.apart {
        judged.push(Judged::apart(term, count(&|one| term.whom.are("ml", one))));
    }
    if !terms.near.is_empty() {
        let all = count(&|one| terms.near.iter().all(|term| term.whom.are("ml", one)));
        judged.push(Judged::near(&terms.near, (terms.is_near_itself("ml", &own), false), all));
    }
    for (nth, one) in terms.spread.iter().enumerate() {
        let all = count(&|labelled| one.whom.are("ml", labelled));
        judged.push(Judged::spread((&terms.spread, nth), (one.whom.are("ml", &own), false), &demands, all));
    }
    let (mut fit, mut why) = (Vec::new(), Vec::new());
    for node in &nodes {
        let found = judged.iter().find_map(|one| one.why(node));
        assert_eq!(found.is_some(), judged.iter().any(|one| one.rules_out(node)), "{node:?}: {found:?}");
        match found {
            None => fit.push(node.name().to_string()),
            Some(unfit) => why.push(format!("{} {unfit}", node.name())),
        }
    }
    (fit, why)
}

fn term(key: &str, wanted: &Value) -> Value {
    json!({"topologyKey": key, "labelSelector": {"matchLabels": wanted}})
}

fn required(terms: &Value) -> Value {
    json!({"requiredDuringSchedulingIgnoredDuringExecution": terms})
}

fn apart(terms: Value) -> Value {
    json!({"affinity": {"podAntiAffinity": required(&terms)}})
}

fn near(terms: Value) -> Value {
    json!({"affinity": {"podAffinity": required(&terms)}})
}

/// With maxSkew 1, of pods with the label app=web.
fn spread(key: &str, more: &Value) -> Value {
    let mut one = json!({"topologyKey": key, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}}});
    one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    one
}

fn spreads(all: Value) -> Value {
    json!({"topologySpreadConstraints": all})
}

#[test]
fn each_rule_decides_where_a_pod_may_go() {
    let (web, db, none) = (json!({"app": "web"}), json!({"app": "db"}), json!({}));
    let on = |node: &'static str, labels: &Value| (node, labels.clone(), true);
    let placed = |node: &'static str, labels: &Value| (node, labels.clone(), false);
    let skew = |more: Value| spreads(json!([spread(ZONE, &more)]));
    let other = spread("other", &json!({}));
    let only_b = json!({"nodeSelector": {ZONE: "b"}});
    let with = |mut pod: Value, more: &Value| {
        pod.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        pod
    };
    let all = "a0 a1 b0 x";
    for (what, pod, own, others, fits) in [
        ("nothing required", json!({}), &web, vec![on("a0", &web)], all),
        ("apart by host", apart(json!([term(HOST, &web)])), &none, vec![on("a0", &web)], "a1 b0 x"),
        ("apart by zone", apart(json!([term(ZONE, &web)])), &none, vec![on("a0", &web)], "b0 x"),
        (
            "apart from who is placed",
            apart(json!([term(ZONE, &web)])),
            &none,
            vec![placed("a0", &web)],
            "b0 x",
        ),
        ("apart from others", apart(json!([term(ZONE, &web)])), &web, vec![on("a0", &db)], all),
        (
            "apart, each term",
            apart(json!([term(HOST, &web), term(HOST, &db)])),
            &none,
            vec![on("a0", &web), on("b0", &db)],
            "a1 x",
        ),
        ("near", near(json!([term(ZONE, &db)])), &web, vec![on("a0", &db)], "a0 a1"),
        ("near one that is not bound", near(json!([term(ZONE, &db)])), &web, vec![placed("a0", &db)], ""),
        ("near nobody", near(json!([term(ZONE, &db)])), &web, vec![], ""),
        ("near itself, the first", near(json!([term(ZONE, &web)])), &web, vec![], "a0 a1 b0"),
        ("near itself, the second", near(json!([term(ZONE, &web)])), &web, vec![placed("b0", &web)], "b0"),
        (
            "near itself, one on a node of no zone",
            near(json!([term(ZONE, &web)])),
            &web,
            vec![on("x", &web)],
            "a0 a1 b0",
        ),
        (
            "near, all terms of one pod",
            near(json!([term(ZONE, &web), term(HOST, &db)])),
            &none,
            vec![on("a0", &web), on("a0", &db)],
            "",
        ),
        (
            "near, all terms",
            near(json!([term(ZONE, &web), term(HOST, &json!({"tier": "1"}))])),
            &none,
            vec![on("a0", &json!({"app": "web", "tier": "1"}))],
            "a0",
        ),
        ("spread, level", skew(json!({})), &web, vec![on("a0", &web), on("b0", &web)], "a0 a1 b0"),
        ("spread, one ahead", skew(json!({})), &web, vec![on("a0", &web)], "b0"),
        ("spread, who is placed fills a zone", skew(json!({})), &web, vec![placed("a0", &web)], "b0"),
        (
            "spread, who is placed raises no level",
            skew(json!({})),
            &web,
            vec![placed("a0", &web), placed("b0", &web)],
            "",
        ),
        ("spread by two", skew(json!({"maxSkew": 2})), &web, vec![on("a0", &web)], "a0 a1 b0"),
        ("spread of others", skew(json!({})), &db, vec![on("a0", &web)], "a0 a1 b0"),
        ("spread of others, two ahead", skew(json!({})), &db, vec![on("a0", &web), on("a1", &web)], "b0"),
        (
            "spread over more domains than there are",
            skew(json!({"minDomains": 3})),
            &web,
            vec![on("a0", &web), on("b0", &web)],
            "",
        ),
        (
            "spread over as many",
            skew(json!({"minDomains": 2})),
            &web,
            vec![on("a0", &web), on("b0", &web)],
            "a0 a1 b0",
        ),
        (
            "spread that is only wished for",
            skew(json!({"whenUnsatisfiable": "ScheduleAnyway"})),
            &web,
            vec![on("a0", &web)],
            all,
        ),
        (
            "spread where the pod may go",
            with(skew(json!({})), &only_b),
            &web,
            vec![on("b0", &web)],
            "a0 a1 b0",
        ),
        (
            "spread wherever",
            with(skew(json!({"nodeAffinityPolicy": "Ignore"})), &only_b),
            &web,
            vec![on("b0", &web)],
            "a0 a1",
        ),
        (
            "spread, tainted nodes count",
            spreads(json!([spread(HOST, &json!({}))])),
            &web,
            vec![on("a0", &web), on("b0", &web), on("x", &web)],
            "a1",
        ),
        (
            "spread, tainted nodes do not",
            spreads(json!([spread(HOST, &json!({"nodeTaintsPolicy": "Honor"}))])),
            &web,
            vec![on("a0", &web), on("b0", &web), on("x", &web)],
            all,
        ),
        (
            "spread by a label that no node has",
            spreads(json!([spread(ZONE, &json!({})), other])),
            &web,
            vec![on("a0", &web)],
            "",
        ),
        (
            "spread by two labels, one of which a node lacks",
            spreads(json!([spread(HOST, &json!({})), spread(ZONE, &json!({"maxSkew": 9}))])),
            &web,
            vec![on("a0", &web), on("a1", &web), on("b0", &web)],
            "a0 a1 b0",
        ),
        (
            "spread of any labels counts nobody",
            skew(json!({"labelSelector": {}})),
            &web,
            vec![on("a0", &web), on("a1", &web)],
            "a0 a1 b0",
        ),
        ("spread of no labels", skew(json!({"labelSelector": null})), &web, vec![on("a0", &web)], "a0 a1 b0"),
        (
            "spread of one revision",
            skew(json!({"matchLabelKeys": ["rev", "missing"]})),
            &json!({"app": "web", "rev": "2"}),
            vec![on("a0", &json!({"app": "web", "rev": "1"})), on("b0", &json!({"app": "web", "rev": "2"}))],
            "a0 a1",
        ),
    ] {
        let (open, why) = open(&pod, own, &others);
        assert_eq!(open.join(" "), fits, "{what}: {why:?}");
    }
}

#[test]
fn who_starts_together_counts_as_who_is_bound() {
    let nodes = nodes();
    let spec = spec(&spreads(json!([spread(ZONE, &json!({}))])));
    let own = labels(&json!({"app": "web"}));
    let terms = Terms::of(&spec, "ml", &own).unwrap();
    let one = |node| (node, Count { bound: 0, placed: 1 });
    let with = |together| {
        let all = nodes.iter().filter(|node| node.name().as_str() != "a1").map(one);
        let judged = Judged::spread((&terms.spread, 0), (true, together), &Demands::of(&spec), all);
        judged.rules_out(&nodes[0])
    };
    assert_eq!((with(false), with(true)), (true, false));
}

#[test]
fn namespaces_are_the_own_one_those_that_are_named_or_all() {
    let of = |more: Value| {
        let mut one = term(HOST, &json!({"app": "web"}));
        one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Terms::of(&spec(&apart(json!([one]))), "ml", &PodLabels::default()).unwrap()
    };
    let named = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": operator, "values": values}]});
    let by_name = json!({"matchLabels": {"kubernetes.io/metadata.name": "x"}});
    let both = json!({"matchLabels": {"kubernetes.io/metadata.name": "x", "team": "a"}});
    for (more, names) in [
        (json!({}), Some("ml")),
        (json!({"namespaces": ["x", "y"]}), Some("x y")),
        (json!({"namespaces": ["y"], "namespaceSelector": by_name}), Some("x y")),
        (json!({"namespaceSelector": {}}), Some("ml x y z")),
        (json!({"namespaceSelector": named("In", &["x", "z"])}), Some("x z")),
        // What labels other namespaces have is not known: the term is not read.
        (json!({"namespaceSelector": named("Exists", &[])}), None),
        (json!({"namespaceSelector": named("NotIn", &["x"])}), None),
        (json!({"namespaceSelector": {"matchLabels": {"team": "a"}}}), None),
        (json!({"namespaceSelector": both, "namespaces": ["y"]}), None),
    ] {
        let terms = of(more.clone());
        let have = |name: &&str| terms.apart[0].whom.are(name, &labels(&json!({"app": "web"})));
        let found = (!terms.apart.is_empty())
            .then(|| ["ml", "x", "y", "z"].into_iter().filter(have).collect::<Vec<_>>());
        assert_eq!(found.map(|all| all.join(" ")).as_deref(), names, "{more}");
    }
    // All terms of an affinity are about the same pods: with one that is not read none is.
    let unread = json!({"topologyKey": ZONE, "namespaceSelector": {"matchLabels": {"team": "a"}}, "labelSelector": {}});
    let terms = Terms::of(&spec(&near(json!([term(ZONE, &json!({})), unread]))), "ml", &PodLabels::default());
    assert!(terms.unwrap().is_none());
}

#[test]
fn selectors_mean_what_the_api_server_makes_of_them() {
    let web = labels(&json!({"app": "web", "empty": ""}));
    let one = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    for (selector, right) in [
        (json!(null), Some(false)),
        (json!({}), Some(true)),
        (json!({"matchLabels": {"app": "web", "empty": ""}}), Some(true)),
        (json!({"matchLabels": {"app": "web", "missing": ""}}), Some(false)),
        (one("app", "In", &["z", "web", "a"]), Some(true)),
        (one("app", "In", &["z", "a"]), Some(false)),
        (one("missing", "In", &["a"]), Some(false)),
        (one("app", "NotIn", &["z", "web"]), Some(false)),
        (one("missing", "NotIn", &["web"]), Some(true)),
        (one("empty", "Exists", &[]), Some(true)),
        (one("app", "DoesNotExist", &[]), Some(false)),
        (one("missing", "DoesNotExist", &[]), Some(true)),
        (one("app", "Gt", &["1"]), None),
    ] {
        let pod = apart(json!([{"topologyKey": HOST, "labelSelector": selector}]));
        let terms = Terms::of(&spec(&pod), "ml", &web).unwrap();
        assert_eq!(terms.apart.first().map(|term| term.whom.are("ml", &web)), right, "{pod}");
    }
}

#[test]
fn what_is_too_long_is_not_read_and_of_bound_pods_anti_affinity_alone_is() {
    let web = json!({"app": "web"});
    let values: Vec<String> = (0..200).map(|nth| format!("web-{nth}")).collect();
    let one_of = json!({"matchExpressions": [{"key": "app", "operator": "In", "values": values}]});
    let long = json!([{"topologyKey": HOST, "labelSelector": one_of}, {"topologyKey": ZONE, "labelSelector": one_of}]);
    let found = Terms::of(&spec(&apart(long)), "ml", &labels(&web)).unwrap_err();
    assert!(matches!(found, TooLarge::Bytes(16_385..40_000)), "{found}");
    let many = |count: usize| -> Vec<Value> {
        (0..count).map(|nth| term(HOST, &json!({"app": format!("web-{nth}")}))).collect()
    };
    let found = Terms::of(&spec(&apart(json!(many(17)))), "ml", &labels(&web)).unwrap_err();
    assert_eq!(found, TooLarge::Many { terms: 17, constraints: 0 });
    assert_eq!(Terms::of(&spec(&apart(json!(many(16)))), "ml", &labels(&web)).unwrap().apart.len(), 16);
    let mut pod = apart(json!([term(HOST, &web)]));
    pod["affinity"]["podAffinity"] = required(&json!([term(ZONE, &web)]));
    pod["topologySpreadConstraints"] = json!([spread(ZONE, &json!({}))]);
    let parts = |pod: &Value| {
        let terms = Terms::of(&spec(pod), "ml", &labels(&web)).unwrap();
        assert!(terms.bytes() > 0);
        [terms.near.len(), terms.apart.len(), terms.spread.len()]
    };
    assert_eq!(parts(&pod), [1, 1, 1]);
    pod["nodeName"] = "a0".into();
    assert_eq!(parts(&pod), [0, 1, 0]);
}

#[test]
fn the_reason_names_the_domain_with_numbers() {
    let (web, db) = (json!({"app": "web"}), json!({"app": "db"}));
    let why = |pod: Value, others: &[Other<'_>]| open(&pod, &web, others).1;
    let two = [("a0", web.clone(), true), ("a1", web.clone(), true)];
    let in_a = "a0 is in topology.kubernetes.io/zone=a";
    assert_eq!(
        why(apart(json!([term(ZONE, &web)])), &two)[0],
        format!("{in_a}, where 2 pods match the pod's required anti-affinity")
    );
    assert_eq!(
        why(near(json!([term(ZONE, &db)])), &two),
        [
            format!("{in_a}, where no pod runs that matches the pod's required affinity"),
            format!("{in_a}, where no pod runs that matches the pod's required affinity").replace("a0", "a1"),
            "b0 is in topology.kubernetes.io/zone=b, where no pod runs that matches the pod's required affinity".to_owned(),
            "x lacks the label topology.kubernetes.io/zone of the pod's required affinity to other pods".to_owned(),
        ]
    );
    let said = why(spreads(json!([spread(ZONE, &json!({}))])), &two);
    assert_eq!(
        said[0],
        format!(
            "{in_a}, which has 2 of the pods that topologySpreadConstraints count; where fewest are bound are 0, and maxSkew is 1"
        )
    );
    assert_eq!(
        said[2],
        "x lacks the label topology.kubernetes.io/zone of the pod's topologySpreadConstraints"
    );
    let terms = Terms::of(&spec(&apart(json!([term(HOST, &web)]))), "ml", &PodLabels::default()).unwrap();
    let nodes = nodes();
    let mut judged = Judged::by_others(&terms.apart[0]);
    assert!(!judged.has_domains());
    judged.add_domains([(&nodes[0], Count { bound: 1, placed: 0 })].into_iter());
    let why = judged.why(&nodes[0]).unwrap().to_string();
    assert_eq!(why, "is in kubernetes.io/hostname=a0, where 1 pod has required anti-affinity to the pod");
}
