//! What is shipped for Prometheus, Grafana and autoscalers: names of series that exist, alerts that fire when they
//! should, and objects of the chart that find the driver's pods. `tests/cluster/autoscaling.rs` asks a real Prometheus.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::deploy::{helm, objects, render_with, root};
use crate::metrics::families;

const ALERTS: &str = "charts/tranche/monitoring/alerts.yaml";
const DASHBOARD: &str = "charts/tranche/monitoring/dashboard.json";
const RULES: &str = "deploy/autoscaling/prometheus-adapter.yaml";
const KEDA: &str = "deploy/autoscaling/keda.yaml";
const API: &[&str] = &["--api-versions", "monitoring.coreos.com/v1"];

fn text(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every series that a process may serve. The listener's own is made with the listener (`ops::server`), that of labels with
/// who keeps them (`node::labels`).
fn served() -> BTreeSet<String> {
    let mut all = families();
    all.insert("tranche_ops_dropped_connections_total".to_owned());
    all.insert("tranche_node_label_conflicts_total".to_owned());
    all
}

/// The family that a series is of: those of histograms have further ones.
fn family<'a>(served: &BTreeSet<String>, name: &'a str) -> &'a str {
    let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
    base.filter(|base| served.contains(*base)).unwrap_or(name)
}

/// The names of series in a text. What ends with `_` is the beginning of several.
fn series(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("tranche_") && !word.ends_with('_'))
}

fn below(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect()
}

#[test]
fn every_series_that_is_named_anywhere_exists() {
    let served = served();
    let mut files = vec![root().join("README.md")];
    for folder in [
        "charts/tranche/monitoring",
        "deploy/autoscaling",
        "deploy/examples",
        "docs",
        "hack/demo",
        "tests/data/alerts",
    ] {
        files.extend(below(folder));
    }
    let mut looked_at = 0;
    for file in files {
        for name in series(&text(&file)) {
            assert!(served.contains(family(&served, name)), "{}: there is no series {name}", file.display());
            looked_at += 1;
        }
    }
    assert!(looked_at > 100, "only {looked_at} names were found");
}

/// The tables of docs/metrics.md: their heads have the beginning of the names, their first cells the rest.
fn documented() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut prefix = None;
    for line in text("docs/metrics.md").lines() {
        let Some(cell) = line.strip_prefix("| ").and_then(|line| line.split(" | ").next()) else {
            prefix = prefix.filter(|_| line.starts_with('|'));
            continue;
        };
        if let Some(head) = cell.strip_prefix('`').and_then(|head| head.strip_suffix("…`")) {
            prefix = Some(head.to_owned());
            continue;
        }
        let Some(prefix) = &prefix else { continue };
        // Labels may follow.
        let cell = cell.split(", with ").next().unwrap_or(cell);
        for name in cell.split('`').skip(1).step_by(2) {
            names.insert(format!("{prefix}{}", name.split('{').next().unwrap_or(name)));
        }
    }
    names
}

#[test]
fn the_page_about_metrics_has_every_series_and_no_other() {
    let documented = documented();
    // Told in words at the page's beginning.
    let told = ["tranche_build_info", "tranche_ops_dropped_connections_total"];
    let served: BTreeSet<String> =
        served().into_iter().filter(|name| !told.contains(&name.as_str())).collect();
    let missing: Vec<_> = served.difference(&documented).collect();
    let invented: Vec<_> = documented.difference(&served).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not on the page: {missing:?}; on the page alone: {invented:?}"
    );
    for name in told {
        assert!(text("docs/metrics.md").contains(name), "{name}");
    }
}

fn alerts() -> BTreeSet<String> {
    let file = yaml(ALERTS);
    let groups = file["groups"].as_array().expect("groups");
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules"));
    rules.map(|rule| rule["alert"].as_str().expect("each is an alert").to_owned()).collect()
}

#[test]
fn each_alert_is_explained_and_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() {
    let alerts = alerts();
    let page = text("docs/metrics.md");
    let rows: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `Tranche")?.split('`').next())
        .map(|rest| format!("Tranche{rest}"))
        .collect();
    assert_eq!(rows, alerts, "docs/metrics.md has a row for each alert");
    let cases = yaml("tests/data/alerts/cases.yaml");
    let tests = cases["tests"].as_array().expect("tests").iter();
    let looks: Vec<&Value> =
        tests.flat_map(|test| test["alert_rule_test"].as_array().expect("looks")).collect();
    for alert in &alerts {
        let fires = |wanted: bool| {
            looks.iter().any(|look| {
                let fires = look["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty());
                look["alertname"] == **alert && fires == wanted
            })
        };
        assert!(fires(true) && fires(false), "{alert} has no case for both");
    }
}

#[test]
#[ignore = "needs promtool"]
fn promtool_finds_no_fault_with_alerts_and_their_cases_come_out() {
    let promtool = std::env::var_os("TRANCHE_PROMTOOL").expect("TRANCHE_PROMTOOL names promtool");
    for words in [["check", "rules", ALERTS], ["test", "rules", "tests/data/alerts/cases.yaml"]] {
        let done = Command::new(&promtool).args(words).current_dir(root()).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{words:?}: {said}");
    }
}

/// What KEDA asks Prometheus by the shipped file, as it is.
fn query_of_keda() -> String {
    let scaled = yaml(KEDA);
    let triggers = scaled["spec"]["triggers"].as_array().expect("triggers");
    let [trigger] = &triggers[..] else { panic!("one trigger: {triggers:?}") };
    // The sum over the pods divided by the threshold is how many pods there are to be.
    assert_eq!((&trigger["type"], &trigger["metricType"]), (&json!("prometheus"), &json!("AverageValue")));
    trigger["metadata"]["query"].as_str().expect("a query").trim().to_owned()
}

/// What the adapter asks of a metric for these pods.
fn query_of_adapter(metric: &str, namespace: &str, pods: &[&str]) -> String {
    let rules = yaml(RULES);
    let mut rules = rules["rules"].as_array().expect("rules").iter();
    let rule = rules.find(|rule| rule["name"]["as"] == metric).expect("a rule of this name");
    let matchers = format!("namespace=\"{namespace}\",pod=~\"{}\"", pods.join("|"));
    let query = rule["metricsQuery"].as_str().expect("a query");
    query.replace("<<.LabelMatchers>>", &matchers).replace("<<.GroupBy>>", "pod")
}

/// The query of KEDA's file adds up what a HorizontalPodAutoscaler is told of the same pods, and nothing of others'.
#[test]
#[ignore = "needs promtool"]
fn promtool_finds_no_fault_with_kedas_query_which_adds_up_what_the_pods_metric_has() {
    let own = ["autoscale-gpu-5d7b9c6f44-x7k2p", "autoscale-gpu-5d7b9c6f44-q9zzb"];
    let row = |namespace: &str, pod: &str, values: &str| {
        let labels = format!("namespace=\"{namespace}\",pod=\"{pod}\",UUID=\"GPU-{pod}\"");
        json!({"series": format!("tranche_claim_multiprocessor_activity_ratio{{{labels}}}"), "values": values})
    };
    let others = [
        row("team-b", own[0], "1x9"),
        row("default", "autoscale-gpu-a-0", "1x9"),
        row("default", "autoscale-gpu-large-5d7b9c6f44-x7k2p", "1x9"),
        row("default", "my-autoscale-gpu-5d7b9c6f44-x7k2p", "1x9"),
        // One of the Deployment's that has ended, half a minute ago.
        row("default", "autoscale-gpu-5d7b9c6f44-w2v8d", "1x5 stale"),
    ];
    let sum = |value: Option<f64>| {
        let samples: Vec<Value> = value.iter().map(|value| json!({"labels": "{}", "value": value})).collect();
        let of_pods = format!("sum({})", query_of_adapter("gpu_activity_ratio", "default", &own));
        let look = |query: String| json!({"expr": query, "eval_time": "2m", "exp_samples": samples});
        json!([look(query_of_keda()), look(of_pods)])
    };
    // Rows every 15 s: of the last minute the first pod was busy for a half, the second all the time.
    let busy = [row("default", own[0], "0 0 0 0 0.5 0.5 0.5 1 0 0"), row("default", own[1], "1x9")];
    let all = [&busy[..], &others].concat();
    let tests = json!({"rule_files": [], "evaluation_interval": "15s", "tests": [
        {"interval": "15s", "input_series": all, "promql_expr_test": sum(Some(1.5))},
        // Without a row there is no value: not 0, which would take pods away.
        {"interval": "15s", "input_series": others, "promql_expr_test": sum(None)}]});
    passes(&tests);
}

/// Has promtool try these cases.
fn passes(tests: &Value) {
    let promtool = std::env::var_os("TRANCHE_PROMTOOL").expect("TRANCHE_PROMTOOL names promtool");
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("cases.json");
    fs::write(&file, tests.to_string()).unwrap();
    let done = Command::new(&promtool).args(["test", "rules"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
}

#[test]
fn each_autoscaler_of_the_examples_names_a_metric_of_the_adapters_rules_and_a_ratio() {
    let rules = yaml(RULES);
    let rules = rules["rules"].as_array().expect("rules");
    let known: BTreeSet<&str> =
        rules.iter().map(|rule| rule["name"]["as"].as_str().expect("a name")).collect();
    for rule in rules {
        let query = rule["metricsQuery"].as_str().expect("a query");
        assert!(query.contains("by (<<.GroupBy>>)"), "for each pod by itself: {query}");
        assert_eq!(
            query.matches("tranche_").count(),
            query.matches("{<<.LabelMatchers>>}").count(),
            "{query}"
        );
    }
    let mut used = BTreeSet::new();
    for file in below("deploy/examples") {
        let all = objects(&text(&file));
        for scaler in all.iter().filter(|object| object["kind"] == "HorizontalPodAutoscaler") {
            for metric in scaler["spec"]["metrics"].as_array().expect("metrics") {
                assert_eq!(
                    metric["type"],
                    "Pods",
                    "{}: what is averaged over the cluster is others', too",
                    file.display()
                );
                let name = metric["pods"]["metric"]["name"].as_str().expect("a name");
                let target = metric["pods"]["target"]["averageValue"].as_str().expect("a quantity");
                let target: u32 = target.strip_suffix('m').and_then(|m| m.parse().ok()).expect("thousandths");
                assert!((1..1000).contains(&target), "{}: {target} thousandths of a ratio", file.display());
                used.insert(name.to_owned());
            }
            let target = &scaler["spec"]["scaleTargetRef"]["name"];
            assert!(all.iter().any(|one| one["kind"] == "Deployment" && one["metadata"]["name"] == *target));
        }
    }
    assert_eq!(used, known.into_iter().map(str::to_owned).collect());
}

#[test]
fn the_dashboard_is_whole() {
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut ids = BTreeSet::new();
    let mut taken: Vec<[u64; 4]> = Vec::new();
    for panel in panels {
        let title = panel["title"].as_str().expect("a title");
        assert!(ids.insert(panel["id"].as_u64()), "{title}: the id is another's");
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().expect("a place"));
        assert!(x + w <= 24, "{title} is out of the grid");
        for [left, top, width, height] in &taken {
            let beside = x + w <= *left || left + width <= x || y + h <= *top || top + height <= y;
            assert!(beside, "{title} lies upon another");
        }
        taken.push([x, y, w, h]);
        if panel["type"] != "row" {
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
            assert!(!panel["targets"].as_array().expect("targets").is_empty(), "{title}");
        }
    }
    let rows: Vec<_> =
        panels.iter().filter(|panel| panel["type"] == "row").map(|row| &row["title"]).collect();
    assert_eq!(rows, ["Cluster", "Node", "Claim"]);
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

#[test]
#[ignore = "needs helm"]
fn the_chart_has_pod_monitors_alerts_and_a_dashboard_for_those_who_ask() {
    let helm = helm();
    let set = r#"metrics={"dcgm":true,"podMonitor":{"enabled":true,"interval":"15s","labels":{"release":"prom"}},
        "alerts":{"enabled":true,"labels":{"role":"alerts"}},
        "dashboard":{"enabled":true,"labels":{"grafana_dashboard":"yes"},"annotations":{"grafana_folder":"GPUs"}}}"#;
    let all =
        objects(&render_with(&helm, &[set, r#"commonLabels={"team":"gpu"}"#], API).expect("it renders"));
    let monitors = of_kind(&all, "PodMonitor");
    let endpoints: Vec<&Value> = monitors.iter().map(|one| &one["spec"]["podMetricsEndpoints"][0]).collect();
    let paths: Vec<&Value> = endpoints.iter().map(|one| &one["path"]).collect();
    assert_eq!(paths, ["/metrics", "/metrics/dcgm"]);
    for (monitor, endpoint) in monitors.iter().zip(&endpoints) {
        assert_eq!((&endpoint["honorLabels"], &endpoint["interval"]), (&json!(true), &json!("15s")));
        let labels = &monitor["metadata"]["labels"];
        assert_eq!((&labels["release"], &labels["team"]), (&json!("prom"), &json!("gpu")));
        assert_eq!(endpoint["relabelings"][0]["targetLabel"], "node");
    }
    // The pods that each finds, and that these have the port.
    let selected = |monitor: &Value| {
        let wanted = monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels").clone();
        let workloads =
            all.iter().filter(|object| object["kind"] == "DaemonSet" || object["kind"] == "Deployment");
        let found = workloads.filter(|object| {
            let labels = &object["spec"]["template"]["metadata"]["labels"];
            wanted.iter().all(|(key, value)| labels[key] == *value)
        });
        let mut names: Vec<String> = found
            .inspect(|object| {
                let ports = object["spec"]["template"]["spec"]["containers"][0]["ports"].to_string();
                assert!(ports.contains(r#""name":"ops""#), "{ports}");
            })
            .map(|object| object["metadata"]["name"].as_str().expect("a name").to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(selected(monitors[0]), ["tranche-controller", "tranche-mps", "tranche-node"]);
    assert_eq!(selected(monitors[1]), ["tranche-node"]);

    let rules = of_kind(&all, "PrometheusRule");
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0]["spec"]["groups"], yaml(ALERTS)["groups"]);
    assert_eq!(rules[0]["metadata"]["labels"]["role"], "alerts");
    let maps = of_kind(&all, "ConfigMap");
    let [dashboard] = maps[..] else { panic!("one ConfigMap: {maps:?}") };
    let told = dashboard["data"]["tranche.json"].as_str().expect("it has the dashboard");
    assert_eq!(told, text(DASHBOARD).trim());
    assert_eq!(dashboard["metadata"]["labels"]["grafana_dashboard"], "yes");
    assert_eq!(dashboard["metadata"]["annotations"]["grafana_folder"], "GPUs");

    // Nobody is told that what is switched off does not work.
    let off = [
        r#"metrics.alerts.enabled=true"#,
        r#"mps.enabled=false"#,
        r#"controller.enabled=false"#,
        r#"webhook.enabled=false"#,
    ];
    let all = objects(&render_with(&helm, &off, API).expect("it renders"));
    let groups = of_kind(&all, "PrometheusRule")[0]["spec"]["groups"].clone();
    let names: Vec<&Value> = groups.as_array().expect("groups").iter().map(|group| &group["name"]).collect();
    assert_eq!(names, ["tranche-node"]);
    assert!(of_kind(&all, "PodMonitor").is_empty() && of_kind(&all, "ConfigMap").is_empty());

    let refused = render_with(&helm, &[r#"metrics.podMonitor.enabled=true"#], &[]).unwrap_err();
    assert!(refused.contains("Prometheus' operator brings"), "{refused}");
    let refused =
        render_with(&helm, &[r#"metrics.podMonitor={"enabled":true,"interval":"often"}"#], API).unwrap_err();
    assert!(refused.contains("interval"), "{refused}");
}
