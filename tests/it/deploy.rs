//! deploy/ and charts/: one content, only fields that exist, and values that are refused when wrong.
//! helm is taken from HELM, from PATH or from the rig's cache (`hack/rig/rig build-helm`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1 as admission;
use k8s_openapi::api::{
    apps::v1 as apps, autoscaling::v2 as autoscaling, batch::v1 as batch, core::v1 as core,
    networking::v1 as networking, policy::v1 as disruption, rbac::v1 as rbac, resource::v1 as resource,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tranche::cli::args::{ControllerArgs, LogArgs, MpsArgs, WebhookRunArgs};
use tranche::inventory::labels;
use tranche::model::names::{OPT_IN_LABEL, OPT_IN_VALUE};
use tranche::node::config::{NodeLabels, WatchdogAction};
use tranche::select::NOT_FOR_THE_SCHEDULER;
use tranche::sharing::SharingPolicy;
use tranche::webhook::Certificates;

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub fn helm() -> PathBuf {
    std::env::var_os("HELM").map(PathBuf::from).expect("HELM names what hack/rig/rig build-helm prints")
}

/// `helm template` with values; Err is what helm says.
fn render(helm: &Path, set: &[&str]) -> Result<String, String> {
    render_with(helm, set, &[])
}

/// The same where the API server is OpenShift's.
fn render_on_openshift(helm: &Path, set: &[&str]) -> Result<String, String> {
    render_with(helm, set, &["--api-versions", "security.openshift.io/v1"])
}

pub fn render_with(helm: &Path, set: &[&str], more: &[&str]) -> Result<String, String> {
    let mut command = Command::new(helm);
    command.args([
        "template",
        "tranche",
        "charts/tranche",
        "-n",
        "tranche-system",
        "--kube-version",
        "1.37.0",
        "--api-versions",
        "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
    ]);
    command.args(more);
    for value in set {
        command.args(["--set-json", value]);
    }
    let out = command.current_dir(root()).output().expect("helm can be run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if out.status.success() { Ok(text(&out.stdout)) } else { Err(text(&out.stderr)) }
}

pub fn objects(yaml: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(yaml).unwrap_or_else(|err| panic!("not YAML: {err}\n{yaml}"))
}

fn files(dir: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(dir)).unwrap_or_else(|err| panic!("{dir}: {err}"));
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "yaml"));
    files.retain(|path| !path.ends_with("kustomization.yaml"));
    files.sort();
    assert!(!files.is_empty(), "{dir} holds no manifests");
    files
}

/// With numbers as strings: `1` and `"1"` are the same quantity.
fn as_text(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::String(number.to_string()),
        Value::Array(items) => items.iter().map(as_text).collect(),
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), as_text(value))).collect(),
        other => other.clone(),
    }
}

/// Fails when the object has a field that its kind does not know, or lacks one that it needs.
fn only_known_fields(object: &Value, place: &str) {
    fn through<T: DeserializeOwned + Serialize>(object: &Value, place: &str) {
        let typed: T = serde_json::from_value(object.clone()).unwrap_or_else(|err| panic!("{place}: {err}"));
        let back = serde_json::to_value(&typed).expect("an API object becomes JSON");
        assert_eq!(as_text(&back), as_text(object), "{place}: a field is misplaced or misspelt");
    }
    match object["kind"].as_str().expect("an object has a kind") {
        "Namespace" => through::<core::Namespace>(object, place),
        "ServiceAccount" => through::<core::ServiceAccount>(object, place),
        "Pod" => through::<core::Pod>(object, place),
        "Deployment" => through::<apps::Deployment>(object, place),
        "DaemonSet" => through::<apps::DaemonSet>(object, place),
        "Job" => through::<batch::Job>(object, place),
        "HorizontalPodAutoscaler" => through::<autoscaling::HorizontalPodAutoscaler>(object, place),
        "Service" => through::<core::Service>(object, place),
        "Secret" => through::<core::Secret>(object, place),
        "Role" => through::<rbac::Role>(object, place),
        "RoleBinding" => through::<rbac::RoleBinding>(object, place),
        "ValidatingWebhookConfiguration" => {
            through::<admission::ValidatingWebhookConfiguration>(object, place)
        }
        "MutatingWebhookConfiguration" => through::<admission::MutatingWebhookConfiguration>(object, place),
        "PodDisruptionBudget" => through::<disruption::PodDisruptionBudget>(object, place),
        "NetworkPolicy" => through::<networking::NetworkPolicy>(object, place),
        "ClusterRole" => through::<rbac::ClusterRole>(object, place),
        "ClusterRoleBinding" => through::<rbac::ClusterRoleBinding>(object, place),
        "DeviceClass" => through::<resource::DeviceClass>(object, place),
        "ResourceClaim" => through::<resource::ResourceClaim>(object, place),
        "ResourceClaimTemplate" => through::<resource::ResourceClaimTemplate>(object, place),
        "ValidatingAdmissionPolicy" => through::<admission::ValidatingAdmissionPolicy>(object, place),
        "ValidatingAdmissionPolicyBinding" => {
            through::<admission::ValidatingAdmissionPolicyBinding>(object, place);
        }
        "MutatingAdmissionPolicy" => through::<admission::MutatingAdmissionPolicy>(object, place),
        "MutatingAdmissionPolicyBinding" => {
            through::<admission::MutatingAdmissionPolicyBinding>(object, place);
        }
        other => panic!("{place}: the kind {other} is not expected here"),
    }
}

fn daemonset(yaml: &str, name: &str) -> Value {
    let mut objects = objects(yaml).into_iter();
    let found = objects.find(|object| object["kind"] == "DaemonSet" && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("the chart renders no DaemonSet {name}"))
}

/// The pod of a DaemonSet as the chart renders it.
fn pod(yaml: &str, name: &str) -> Value {
    daemonset(yaml, name)["spec"]["template"]["spec"].clone()
}

fn by_name<'a>(list: &'a Value, name: &str) -> &'a Value {
    let found = list.as_array().into_iter().flatten().find(|item| item["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {list}"))
}

#[test]
fn every_manifest_has_only_fields_that_exist() {
    for path in [files("deploy"), files("deploy/since-1.36"), files("deploy/examples")].concat() {
        let text = fs::read_to_string(&path).expect("the file can be read");
        for object in objects(&text) {
            only_known_fields(&object, &path.display().to_string());
        }
    }
}

#[test]
fn kustomization_names_every_manifest() {
    let text = fs::read_to_string(root().join("deploy/kustomization.yaml")).expect("it is there");
    let kustomization: Value = serde_saphyr::from_str(&text).expect("it is YAML");
    let mut named: Vec<&str> =
        kustomization["resources"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    named.sort_unstable();
    let there = files("deploy");
    let there: Vec<&str> = there.iter().filter_map(|path| path.file_name()?.to_str()).collect();
    assert_eq!(named, there);
}

#[test]
#[ignore = "needs helm"]
fn the_plain_manifests_are_what_the_chart_renders() {
    let helm = helm();
    let fresh = tempfile::tempdir().expect("a temporary folder");
    let made = Command::new(root().join("deploy/generate.sh")).arg(fresh.path()).env("HELM", &helm).output();
    let made = made.expect("deploy/generate.sh can be run");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut compared = Vec::new();
    for path in [files("deploy"), files("deploy/since-1.36")].concat() {
        let name = path.strip_prefix(root().join("deploy")).expect("it lies below");
        let Ok(new) = fs::read_to_string(fresh.path().join(name)) else { continue };
        let old = fs::read_to_string(&path).expect("the file can be read");
        assert_eq!(old, new, "{} is not what the chart says: run deploy/generate.sh", path.display());
        compared.extend(objects(&new));
    }
    // Nothing that the chart makes is missing from the plain form.
    let rendered = objects(&render(&helm, &[]).expect("the defaults render"));
    assert_eq!(compared.len(), rendered.iter().filter(|object| !object.is_null()).count());
}

#[test]
#[ignore = "needs helm"]
fn admission_knows_the_names_of_classes_that_the_controller_places() {
    let helm = helm();
    let yaml = render(&helm, &[r#"deviceClasses={"placedByController":["team-a-shares","b.example.com"]}"#]);
    let yaml = yaml.unwrap_or_else(|said| panic!("{said}"));
    let names = "in ['shared.gpu.nvidia.com', 'team-a-shares', 'b.example.com']";
    let all = objects(&yaml);
    let webhook =
        all.iter().find(|one| one["kind"] == "ValidatingWebhookConfiguration").expect("there is one");
    let conditions: Vec<String> = webhook["webhooks"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| one["matchConditions"].to_string())
        .collect();
    assert!(conditions.iter().all(|one| one.matches(names).count() == 2), "{conditions:?}");
    assert!(!yaml.contains("deviceClassName.orValue('') == 'shared.gpu.nvidia.com'"), "each rule knows them");
    let said = render(&helm, &[r#"deviceClasses={"placedByController":["Team A"]}"#]).unwrap_err();
    assert!(said.contains("placedByController"), "{said}");
}

/// The controller is told the classes of KAI's annotations, and admission knows their claims for shares.
#[test]
#[ignore = "needs helm"]
fn the_classes_of_kais_annotations_reach_the_controller_and_admission() {
    let helm = helm();
    let variables = |values: &[&str]| {
        let all = objects(&render(&helm, values).unwrap_or_else(|said| panic!("{said}")));
        let controller = all.iter().find(|object| object["kind"] == "Deployment").expect("the controller");
        let env = &controller["spec"]["template"]["spec"]["containers"][0]["env"];
        ["TRANCHE_KAI_MEMORY_CLASS", "TRANCHE_KAI_FRACTION_CLASS"]
            .map(|name| by_name(env, name)["value"].clone())
    };
    assert_eq!(variables(&[]), ["shared.gpu.nvidia.com", "shared.gpu.nvidia.com"]);
    let set = r#"webhook.kaiClasses={"fraction":"parts.example.com"}"#;
    assert_eq!(variables(&[set]), ["shared.gpu.nvidia.com", "parts.example.com"]);
    let yaml = render(&helm, &[set]).expect("it renders");
    assert!(yaml.contains("deviceClassName.orValue('') in ['shared.gpu.nvidia.com', 'parts.example.com']"));
    for bad in ["gpu.nvidia.com", "mig.nvidia.com", "Team A"] {
        let said = render(&helm, &[&format!(r#"webhook.kaiClasses={{"memory":"{bad}"}}"#)]).unwrap_err();
        assert!(said.contains("kaiClasses"), "{bad}: {said}");
    }
}

/// What is rendered without any value, in `deploy`.
fn shipped(file: &str, kind: &str, name: &str) -> Value {
    let text = fs::read_to_string(root().join("deploy").join(file)).expect("it is there");
    let mut all = objects(&text).into_iter();
    all.find(|one| one["kind"] == kind && one["metadata"]["name"] == name)
        .unwrap_or_else(|| panic!("no {kind} {name} in {file}"))
}

/// Nodes with GPUs are often tainted so, by providers and by GPU operators, with one effect or another.
#[test]
fn pods_of_nodes_run_on_nodes_that_are_tainted_for_gpus_whatever_the_effect() {
    for (file, name) in [("daemonset.yaml", "tranche-node"), ("mps.yaml", "tranche-mps")] {
        let tolerations = &shipped(file, "DaemonSet", name)["spec"]["template"]["spec"]["tolerations"];
        let all = json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]);
        assert_eq!(*tolerations, all, "{name}");
    }
}

#[test]
fn pods_of_the_controller_pass_pod_security_restricted() {
    let deployment = shipped("controller.yaml", "Deployment", "tranche-controller");
    let spec = &deployment["spec"]["template"]["spec"];
    assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
    for container in spec["containers"].as_array().expect("a list") {
        let context = &container["securityContext"];
        assert_eq!(context["allowPrivilegeEscalation"], false, "{}", container["name"]);
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]), "{}", container["name"]);
    }
}

#[test]
#[ignore = "needs helm"]
fn every_value_reaches_the_manifests() {
    let helm = helm();
    let yaml = render(
        &helm,
        &[
            r#"image={"repository":"registry.example.com:5000/gpu/tranche","tag":"1.2.3","pullPolicy":"Always","pullSecrets":["key",{"name":"other"}]}"#,
            r#"deviceClasses={"extendedResource":false,"hints":"off"}"#,
            r#"admissionPolicy.enabled=false"#,
            r#"podPolicy={"env":"off","privileged":"off","capabilities":"off","procMount":false,"hostNamespaces":false,
                "hostPath":"off","root":"off","sharedMemory":"off","hints":"off",
                "wholeGpus":{"env":"off","privileged":"off","capabilities":"off","procMount":false,"hostNamespaces":false,"hostPath":"off"}}"#,
            r#"metrics={"scrapeAnnotations":true,"dcgm":true}"#,
            r#"webhook={"enabled":true,"port":9444,"timeoutSeconds":7,"certificates":"self",
                "clientCA":{"configMap":"callers","key":"api.crt","names":["kube-apiserver","front-proxy"]}}"#,
            r#"networkPolicy={"webhookFrom":[{"ipBlock":{"cidr":"192.0.2.0/24"}}],"metricsFrom":[{"podSelector":{}}]}"#,
            r#"sharing={"exclusiveGPUs":[0,"T4"],"mpsServerMemory":"1Gi","processesPerShare":4,"defaultRequest":"nothing"}"#,
            r#"mig={"onDemandGPUs":[3,"H200"],"keep":"10m"}"#,
            r#"watchdog={"action":"observe","period":"500ms","grace":"128Mi"}"#,
            r#"controller={"enabled":true,"replicas":3,"leaseDuration":"20s","policy":"spread",
                "holds":{"settle":"3s","keepWarm":"91s","ahead":4,"never":["node-x","T4"]},"maxOvertakes":7,"starvationTimeout":"92s","reservationDuration":"93s",
                "logFormat":"text","ops":{"host":"[::]","port":9001,"healthPort":9003},"nodeSelector":{"infra":"yes"},
                "affinity":{"podAntiAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[]}},
                "tolerations":[{"key":"infra","operator":"Exists"}],"priorityClassName":"third",
                "terminationGracePeriodSeconds":66,"resources":{"limits":{"memory":"66Mi"}},"podAnnotations":{"team":"ctl"},
                "podLabels":{"zone":"z"},"extraEnv":[{"name":"RUST_LOG","value":"warn"}]}"#,
            r#"mps={"enabled":true,"daemon":"share","keepWarm":"90s","sharedMemory":{"size":"16Gi","files":99999},"updateStrategy":{"type":"RollingUpdate"},
                "priorityClassName":"other","terminationGracePeriodSeconds":77,"resources":{"limits":{"memory":"65Mi"}},
                "podAnnotations":{"team":"mps"},"podLabels":{"zone":"y"},"extraEnv":[{"name":"RUST_LOG","value":"trace"}],
                "extraHostPaths":[{"name":"fake","hostPath":"/run/fake-nvml"}]}"#,
            r#"node={"driverRoot":"/run/nvidia/driver","driverLibraryDirs":["opt/one","two"],"toolkitDir":"/usr/local/nvidia/toolkit","kubeletDir":"/data/kubelet","cdiDir":"/etc/cdi","openDescriptors":false,"logFormat":"text",
                "ops":{"host":"[::]","port":9000,"healthPort":9002},"nodeSelector":{"gpu":"yes"},
                "affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[
                    {"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}},
                "tolerations":[{"operator":"Exists"}],"priorityClassName":"mine",
                "updateStrategy":{"type":"OnDelete","rollingUpdate":null},"terminationGracePeriodSeconds":30,
                "resources":{"limits":{"memory":"64Mi"}},"podAnnotations":{"team":"gpu"},"podLabels":{"zone":"x"},
                "extraArgs":["--one=1"],"extraEnv":[{"name":"RUST_LOG","value":"debug"}],
                "extraHostPaths":[{"name":"fake","hostPath":"/run/fake-nvml","readOnly":false,"type":"Directory"}]}"#,
        ],
    )
    .unwrap_or_else(|said| panic!("{said}"));
    for object in objects(&yaml).iter().filter(|object| !object.is_null()) {
        only_known_fields(object, "charts/tranche");
        assert!(!object["kind"].as_str().expect("a kind").starts_with("ValidatingAdmission"));
        for webhook in object["webhooks"].as_array().into_iter().flatten() {
            assert_eq!(webhook["timeoutSeconds"], 7);
        }
        assert!(object["spec"].get("extendedResourceName").is_none());
    }
    let rendered = daemonset(&yaml, "tranche-node").to_string();
    for part in [
        r#""image":"registry.example.com:5000/gpu/tranche:1.2.3""#,
        r#""imagePullPolicy":"Always""#,
        r#""imagePullSecrets":[{"name":"key"},{"name":"other"}]"#,
        "--driver-root-on-host=/run/nvidia/driver",
        "--driver-library-dirs=opt/one,two",
        "--toolkit-root=/toolkit-root",
        "--toolkit-dir=/usr/local/nvidia/toolkit",
        r#""mountPath":"/toolkit-root/usr/local/nvidia/toolkit""#,
        r#""path":"/usr/local/nvidia/toolkit""#,
        "--kubelet-dir=/data/kubelet",
        "--cdi-dir=/etc/cdi",
        "--ops-address=[::]:9000",
        "--health-address=[::]:9002",
        r#""containerPort":9002"#,
        "--log-format=text",
        "--exclusive-gpus=0,T4",
        "--mig-on-demand=3,H200",
        "--mig-keep=10m",
        "--mps-daemon=share",
        "--mps-server-memory=1Gi",
        "--processes-per-share=4",
        "--default-request=nothing",
        "--watchdog=observe",
        "--watchdog-period=500ms",
        "--watchdog-grace=128Mi",
        "--open-descriptors=off",
        "--dcgm-metrics=on",
        "--one=1",
        r#""path":"/run/nvidia/driver""#,
        r#""mountPath":"/data/kubelet/plugins_registry""#,
        r#""path":"/data/kubelet/plugins/gpu.nvidia.com""#,
        r#""mountPath":"/etc/cdi""#,
        r#""containerPort":9000"#,
        r#""prometheus.io/port":"9000""#,
        r#""gpu":"yes""#,
        r#""key":"a""#,
        r#""priorityClassName":"mine""#,
        r#""type":"OnDelete""#,
        r#""terminationGracePeriodSeconds":30"#,
        r#""memory":"64Mi""#,
        r#""team":"gpu""#,
        r#""zone":"x""#,
        r#""name":"RUST_LOG""#,
        r#""path":"/run/fake-nvml""#,
        r#""mountPath":"/run/fake-nvml""#,
    ] {
        assert!(rendered.contains(part), "{part} is not in {rendered}");
    }
    let all = objects(&yaml);
    let rendered = all.iter().find(|one| one["kind"] == "Deployment").expect("a Deployment").to_string();
    for part in [
        r#""replicas":3"#,
        r#""value":"20s""#,
        r#""value":"spread""#,
        r#""value":"3s""#,
        r#""value":"91s""#,
        r#""value":"4""#,
        r#""value":"node-x,T4""#,
        r#""value":"7""#,
        r#""value":"92s""#,
        r#""value":"93s""#,
        r#""value":"[::]:9001""#,
        r#""value":"[::]:9003""#,
        r#""value":"/client-ca/api.crt""#,
        r#""value":"kube-apiserver,front-proxy""#,
        r#""configMap":{"name":"callers"}"#,
        r#""containerPort":9003"#,
        r#""containerPort":9001"#,
        r#""infra":"yes""#,
        r#""podAntiAffinity""#,
        r#""key":"infra""#,
        r#""priorityClassName":"third""#,
        r#""terminationGracePeriodSeconds":66"#,
        r#""memory":"66Mi""#,
        r#""team":"ctl""#,
        r#""zone":"z""#,
        r#""value":"warn""#,
        r#""imagePullSecrets":[{"name":"key"},{"name":"other"}]"#,
        r#""prometheus.io/port":"9001""#,
    ] {
        assert!(rendered.contains(part), "{part} is not in {rendered}");
    }
    let policies: Vec<&Value> = all.iter().filter(|one| one["kind"] == "NetworkPolicy").collect();
    assert_eq!(policies.len(), 2);
    for rule in policies.iter().flat_map(|policy| policy["spec"]["ingress"].as_array().expect("rules")) {
        let from = match rule["ports"][0]["port"].as_str() {
            Some("ops") => json!([{"podSelector": {}}]),
            Some("webhook") => json!([{"ipBlock": {"cidr": "192.0.2.0/24"}}]),
            other => panic!("{other:?}"),
        };
        assert_eq!(rule["from"], from);
    }
    let rendered = daemonset(&yaml, "tranche-mps").to_string();
    for part in [
        r#""image":"registry.example.com:5000/gpu/tranche:1.2.3""#,
        r#""imagePullSecrets":[{"name":"key"},{"name":"other"}]"#,
        r#""value":"90s""#,
        r#""value":"16Gi""#,
        r#""value":"99999""#,
        r#""value":"[::]:9000""#,
        r#""value":"[::]:9002""#,
        r#""value":"text""#,
        r#""containerPort":9000"#,
        r#""prometheus.io/port":"9000""#,
        r#""path":"/run/nvidia/driver""#,
        r#""gpu":"yes""#,
        r#""key":"a""#,
        r#""type":"RollingUpdate""#,
        r#""priorityClassName":"other""#,
        r#""terminationGracePeriodSeconds":77"#,
        r#""memory":"65Mi""#,
        r#""team":"mps""#,
        r#""zone":"y""#,
        r#""value":"trace""#,
        r#""path":"/run/fake-nvml""#,
    ] {
        assert!(rendered.contains(part), "{part} is not in {rendered}");
    }
}

#[test]
fn probes_have_a_door_of_their_own_and_others_reach_metrics_and_the_webhook_alone() {
    let text = |file: &str| fs::read_to_string(root().join("deploy").join(file)).expect("it is there");
    let pods =
        [("daemonset.yaml", "DaemonSet"), ("mps.yaml", "DaemonSet"), ("controller.yaml", "Deployment")];
    for (file, kind) in pods {
        let all = objects(&text(file));
        let found = all.iter().find(|one| one["kind"] == kind).expect("it is there");
        let pod = &found["spec"]["template"]["spec"];
        assert!(pod["hostNetwork"].is_null(), "{file}: the ports are the pod's own");
        let container = &pod["containers"][0];
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            assert_eq!(container[probe]["httpGet"]["port"], "health", "{file} {probe}");
        }
        assert_ne!(
            by_name(&container["ports"], "health")["containerPort"],
            by_name(&container["ports"], "ops")["containerPort"]
        );
        // In memory or on disk, but of this pod.
        assert!(by_name(&pod["volumes"], "ops")["emptyDir"].is_object(), "{file}");
        let mount = by_name(&container["volumeMounts"], "ops")["mountPath"].as_str().expect("a path");
        assert!(tranche::ops::addresses::SOCKET.starts_with(&format!("{mount}/")), "{mount}");
    }
    let rules: Vec<String> = objects(&text("networkpolicy.yaml"))
        .iter()
        .flat_map(|policy| policy["spec"]["ingress"].as_array().expect("rules").clone())
        .map(|rule| rule["ports"].to_string())
        .collect();
    let port = |name: &str| format!(r#"[{{"port":"{name}","protocol":"TCP"}}]"#);
    assert_eq!(rules, [port("ops"), port("ops"), port("webhook")]);
}

#[test]
fn kubelet_finds_the_sockets_under_the_path_it_is_told() {
    let text = fs::read_to_string(root().join("deploy/daemonset.yaml")).expect("it is there");
    let pod = pod(&text, "tranche-node");
    for name in ["plugins-registry", "plugin", "cdi"] {
        let volume = by_name(&pod["volumes"], name);
        let mount = by_name(&pod["containers"][0]["volumeMounts"], name);
        assert_eq!(volume["hostPath"]["path"], mount["mountPath"], "{name}");
    }
}

#[test]
#[ignore = "needs helm"]
fn the_old_name_of_a_value_is_understood() {
    let yaml = render(&helm(), &[r#"sharing.unasked="nothing""#]).unwrap_or_else(|said| panic!("{said}"));
    assert!(daemonset(&yaml, "tranche-node").to_string().contains("--default-request=nothing"));
    let old = r#"controller={"enabled":true,"patience":{"passes":0,"keep":"93s"}}"#;
    let yaml = render(&helm(), &[old]).unwrap_or_else(|said| panic!("{said}"));
    let all = objects(&yaml);
    let controller = all.iter().find(|object| object["kind"] == "Deployment").expect("the controller");
    for (name, value) in [
        ("TRANCHE_MAX_OVERTAKES", "0"),
        ("TRANCHE_STARVATION_TIMEOUT", "60s"),
        ("TRANCHE_RESERVATION_DURATION", "93s"),
    ] {
        let env = &controller["spec"]["template"]["spec"]["containers"][0]["env"];
        assert_eq!(by_name(env, name)["value"], value, "{name}");
    }
}

#[test]
#[ignore = "needs helm"]
fn each_kind_of_pod_templates_is_watched_and_sent_to_the_webhook() {
    let kinds = r#"webhook.podTemplates=[{"apiGroup":"batch","apiVersion":"v1","resource":"jobs","kind":"Job"},
        {"apiGroup":"kubeflow.org","apiVersion":"v1","resource":"pytorchjobs","kind":"PyTorchJob"}]"#;
    let rendered = |more: &[&str]| {
        let all = render(&helm(), &[&["controller.enabled=true"], more].concat());
        objects(&all.unwrap_or_else(|said| panic!("{said}")))
    };
    let named = |all: &[Value], kind: &str, name: &str| {
        let found = all.iter().find(|one| one["kind"] == kind && one["metadata"]["name"] == name);
        found.unwrap_or_else(|| panic!("no {kind} {name}")).clone()
    };
    let env = |all: &[Value]| {
        let pod = &named(all, "Deployment", "tranche-controller")["spec"]["template"]["spec"];
        by_name(&pod["containers"][0]["env"], "TRANCHE_POD_TEMPLATES")["value"].clone()
    };
    let rights = |all: &[Value]| named(all, "ClusterRole", "tranche-controller")["rules"].to_string();
    let both = rendered(&[kinds]);
    assert_eq!(env(&both), "batch/v1/jobs/Job,kubeflow.org/v1/pytorchjobs/PyTorchJob");
    let hooks = named(&both, "MutatingWebhookConfiguration", "tranche");
    let rules = &by_name(&hooks["webhooks"], "workloads.tranche.dev")["rules"];
    assert_eq!(
        rules[1],
        json!({"apiGroups": ["kubeflow.org"], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": ["pytorchjobs"], "scope": "Namespaced"})
    );
    assert_eq!(rules.as_array().map(Vec::len), Some(2));
    let right =
        json!({"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["list", "watch"]});
    assert!(rights(&both).contains(&right.to_string()), "{}", rights(&both));
    let none = rendered(&["webhook.podTemplates=[]"]);
    assert_eq!(env(&none), "none");
    assert!(!rights(&none).contains("resourceclaimtemplates") && !rights(&none).contains("jobs"));
    let hooks = named(&none, "MutatingWebhookConfiguration", "tranche");
    assert!(!hooks.to_string().contains("workloads.tranche.dev"));
}

#[test]
#[ignore = "needs helm"]
fn a_second_class_without_an_extended_resource_is_the_one_of_the_example() {
    let value =
        r#"deviceClasses={"extendedResource":true,"withoutExtendedResource":"memory.gpu.nvidia.com"}"#;
    let classes = |values: &[&str]| -> Vec<Value> {
        let all = objects(&render(&helm(), values).unwrap_or_else(|said| panic!("{said}")));
        all.into_iter().filter(|one| one["kind"] == "DeviceClass").collect()
    };
    let named = |all: &[Value], name: &str| {
        all.iter().find(|one| one["metadata"]["name"] == name).map(|one| one["spec"].clone())
    };
    let with = classes(&[value]);
    let gpu = named(&with, "gpu.nvidia.com").expect("the class of GPUs");
    let second = named(&with, "memory.gpu.nvidia.com").expect("the second class");
    assert_eq!(gpu["extendedResourceName"], "nvidia.com/gpu");
    assert_eq!(second["selectors"], gpu["selectors"], "the same devices");
    assert_eq!(second.get("extendedResourceName"), None);
    assert_eq!(named(&classes(&[]), "memory.gpu.nvidia.com"), None, "only where it is asked for");
    let text = fs::read_to_string(root().join("deploy/examples/memory-class.yaml")).expect("it is there");
    let example = objects(&text);
    let class = example.iter().find(|one| one["kind"] == "DeviceClass").expect("it has a class");
    assert_eq!((&class["metadata"]["name"], &class["spec"]), (&json!("memory.gpu.nvidia.com"), &second));
    let template =
        example.iter().find(|one| one["kind"] == "ResourceClaimTemplate").expect("it has a template");
    let request = &template["spec"]["spec"]["devices"]["requests"][0]["exactly"];
    assert_eq!(request["deviceClassName"], class["metadata"]["name"]);
}

#[test]
fn node_and_mps_meet_in_one_folder_of_the_host() {
    let text = |file: &str| fs::read_to_string(root().join(file)).expect("it is there");
    let node = pod(&text("deploy/daemonset.yaml"), "tranche-node");
    let mps = pod(&text("deploy/mps.yaml"), "tranche-mps");
    for (pod, propagation) in [(&node, "HostToContainer"), (&mps, "Bidirectional")] {
        // CDI files name it by its path on the host.
        let volume = by_name(&pod["volumes"], "mps");
        assert_eq!(volume["hostPath"]["path"], "/run/tranche/mps");
        assert_eq!(volume["hostPath"]["type"], "DirectoryOrCreate", "either may come first");
        let mount = by_name(&pod["containers"][0]["volumeMounts"], "mps");
        assert_eq!((&mount["mountPath"], mount["readOnly"].as_bool()), (&volume["hostPath"]["path"], None));
        assert_eq!(mount["mountPropagation"], propagation);
        assert_eq!(pod["hostPID"], true);
    }
    assert_eq!(by_name(&mps["containers"][0]["env"], "TRANCHE_MPS_DIR")["value"], "/run/tranche/mps");
}

#[test]
fn what_keeps_the_daemons_is_left_alone_by_upgrades_and_by_the_api_server() {
    let text = fs::read_to_string(root().join("deploy/mps.yaml")).expect("it is there");
    let mps = daemonset(&text, "tranche-mps");
    assert_eq!(mps["spec"]["updateStrategy"]["type"], "OnDelete");
    let pod = pod(&text, "tranche-mps");
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    let rbac = fs::read_to_string(root().join("deploy/rbac.yaml")).expect("it is there");
    assert!(!rbac.contains("tranche-mps"), "its account has no rights");
    let selector = &mps["spec"]["selector"]["matchLabels"];
    let node = fs::read_to_string(root().join("deploy/daemonset.yaml")).expect("it is there");
    assert_ne!(*selector, daemonset(&node, "tranche-node")["spec"]["selector"]["matchLabels"]);
    assert_eq!(*selector, mps["spec"]["template"]["metadata"]["labels"]);
}

#[test]
fn the_node_plugin_understands_what_the_chart_tells_it() {
    let text = fs::read_to_string(root().join("deploy/daemonset.yaml")).expect("it is there");
    let pod = pod(&text, "tranche-node");
    let args = pod["containers"][0]["args"].as_array().expect("args").iter().filter_map(Value::as_str);
    let words = ["tranche"].into_iter().chain(args).chain(["--node-name=node-a"]);
    let cli = tranche::cli::parse(words.map(Into::into)).unwrap_or_else(|said| panic!("{said}"));
    let tranche::cli::Command::Node(args) = cli.command else { panic!("not the node plugin") };
    let settings = tranche::cli::settings::node(*args).unwrap_or_else(|said| panic!("{said}"));
    assert_eq!(settings.sharing, SharingPolicy::default(), "the chart's defaults are the program's");
    assert_eq!(settings.watchdog.action, WatchdogAction::Terminate);
}

/// The flag that is read from an environment variable. A test gives the program its flags instead of its variables,
/// since one that the program does not know would be overlooked.
fn flag_of(variable: &str) -> String {
    let name = variable.strip_prefix("TRANCHE_").unwrap_or(variable);
    format!("--{}", name.to_lowercase().replace('_', "-"))
}

#[test]
fn the_keeper_of_the_daemons_understands_what_the_chart_tells_it() {
    let text = fs::read_to_string(root().join("deploy/mps.yaml")).expect("it is there");
    let pod = pod(&text, "tranche-mps");
    let env = pod["containers"][0]["env"].as_array().expect("env").iter();
    let flags: Vec<String> = env
        .map(|one| {
            let name = one["name"].as_str().expect("a name");
            format!("{}={}", flag_of(name), one["value"].as_str().expect("a value"))
        })
        .collect();
    let words = ["tranche", "mps"].into_iter().chain(flags.iter().map(String::as_str));
    let cli = tranche::cli::parse(words.map(Into::into)).unwrap_or_else(|said| panic!("{said}"));
    let tranche::cli::Command::Mps(args) = cli.command else { panic!("not the keeper of the daemons") };
    let told = tranche::cli::settings::mps(*args).unwrap_or_else(|said| panic!("{said}"));
    let usual = tranche::cli::settings::mps(MpsArgs::default()).expect("the defaults are usable");
    assert_eq!(told, usual, "the chart's defaults are the program's");
}

#[test]
fn the_controller_understands_what_the_chart_tells_it() {
    let text = fs::read_to_string(root().join("deploy/controller.yaml")).expect("it is there");
    let objects = objects(&text);
    let deployment = objects.iter().find(|one| one["kind"] == "Deployment").expect("a Deployment");
    let env = deployment["spec"]["template"]["spec"]["containers"][0]["env"].as_array().expect("env").iter();
    let given = [("POD_NAME", "tranche-controller-x"), ("POD_NAMESPACE", "tranche-system")];
    let flags: Vec<String> = env
        .map(|one| {
            let name = one["name"].as_str().expect("a name");
            let known = given.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            let value = known.unwrap_or_else(|| one["value"].as_str().expect("a value"));
            format!("{}={value}", flag_of(name))
        })
        .collect();
    let words = ["tranche", "controller"].into_iter().chain(flags.iter().map(String::as_str));
    let cli = tranche::cli::parse(words.map(Into::into)).unwrap_or_else(|said| panic!("{said}"));
    let tranche::cli::Command::Controller(args) = cli.command else { panic!("not the controller") };
    let told = tranche::cli::settings::controller(*args).unwrap_or_else(|said| panic!("{said}"));
    let usual = tranche::cli::settings::controller(ControllerArgs {
        pod_name: Some(given[0].1.to_owned()),
        pod_namespace: Some(given[1].1.to_owned()),
        deployment: Some("tranche-controller".to_owned()),
        ..ControllerArgs::default()
    });
    assert_eq!(told, usual.expect("the defaults are usable"), "the chart's defaults are the program's");
    assert_eq!(
        told.controller.deployment.as_deref(),
        deployment["metadata"]["name"].as_str(),
        "holds have an owner"
    );
    let names: Vec<&str> = objects
        .iter()
        .filter_map(|one| one["rules"].as_array())
        .flatten()
        .filter(|rule| rule["resources"][0] == "leases")
        .filter_map(|rule| rule["resourceNames"][0].as_str())
        .collect();
    assert_eq!(names, [told.controller.lease.name.as_str()], "its own lease, and no other");
}

/// Who labels nodes may patch them, and a policy says which and how; who does not has no such right.
#[test]
#[ignore = "needs helm"]
fn the_right_to_label_nodes_comes_with_the_policy_that_confines_it_and_with_the_flag() {
    let helm = helm();
    let unconfined = ["nodeLabels=true", "admissionPolicy.enabled=false"];
    let said = render(&helm, &unconfined).expect_err("each node could change every Node");
    assert!(said.contains("nodeLabels: needs admissionPolicy.enabled"), "{said}");
    for (value, flag) in
        [("false", None), ("true", Some("--node-labels=on")), ("\"remove\"", Some("--node-labels=remove"))]
    {
        let yaml = render(&helm, &[&format!("nodeLabels={value}")]).unwrap_or_else(|said| panic!("{said}"));
        let all = objects(&yaml);
        let named = |kind: &str, name: &str| {
            all.iter().find(|one| one["kind"] == kind && one["metadata"]["name"] == name)
        };
        let role = named("ClusterRole", "tranche-node").expect("the node plugin has a role");
        let rules = role["rules"].as_array().expect("with rules").iter();
        let of_nodes: Vec<&Value> = rules.filter(|rule| rule["resources"] == json!(["nodes"])).collect();
        let verbs: Vec<&Value> = of_nodes.iter().flat_map(|rule| rule["verbs"].as_array().unwrap()).collect();
        assert_eq!(verbs.contains(&&json!("patch")), flag.is_some(), "{value}: {verbs:?}");
        let policy = named("ValidatingAdmissionPolicy", "tranche-node-labels");
        assert_eq!(policy.is_some(), flag.is_some(), "{value}");
        let args =
            daemonset(&yaml, "tranche-node")["spec"]["template"]["spec"]["containers"][0]["args"].clone();
        let given = args.as_array().expect("args").iter().filter_map(Value::as_str);
        let given: Vec<&str> = given.filter(|arg| arg.starts_with("--node-labels")).collect();
        assert_eq!(given, flag.into_iter().collect::<Vec<_>>(), "{value}");
        if let Some(flag) = flag {
            let cli = tranche::cli::parse(["tranche", "node", "--node-name=a", flag].map(Into::into));
            let tranche::cli::Command::Node(args) = cli.expect("a flag of the program").command else {
                panic!()
            };
            let labels = tranche::cli::settings::node(*args).expect("a value of the flag").labels;
            assert_eq!(labels == NodeLabels::On, value == "true");
        }
        let ours = policy.map(ToString::to_string).unwrap_or_default();
        for key in [labels::PRODUCT, labels::COUNT, labels::MEMORY, labels::PRESENT] {
            assert_eq!(ours.contains(key), flag.is_some(), "{key}");
        }
    }
}

#[test]
#[ignore = "needs helm"]
fn near_misses_of_the_controllers_classes_are_warned_of_refused_or_left_alone() {
    let helm = helm();
    for (value, action) in [("Warn", Some("Warn")), ("Deny", Some("Deny")), ("off", None)] {
        let set = format!("deviceClasses={{\"hints\":\"{value}\"}}");
        let yaml = render(&helm, &[&set]).unwrap_or_else(|said| panic!("{said}"));
        let all = objects(&yaml);
        let of = |kind: &str| {
            all.iter().find(|one| one["kind"] == kind && one["metadata"]["name"] == "tranche-class-hints")
        };
        let binding = of("ValidatingAdmissionPolicyBinding");
        assert_eq!(binding.and_then(|one| one["spec"]["validationActions"][0].as_str()), action, "{value}");
        let policy = of("ValidatingAdmissionPolicy").map(ToString::to_string).unwrap_or_default();
        let plain: String = NOT_FOR_THE_SCHEDULER.chars().filter(|c| !c.is_whitespace()).collect();
        assert_eq!(policy.contains(&plain), action.is_some(), "the policy knows the program's selector");
    }
}

#[test]
#[ignore = "needs helm"]
fn each_rule_for_pods_has_the_action_that_is_asked_for() {
    let helm = helm();
    let actions = |set: &[&str]| -> Vec<String> {
        let yaml = render(&helm, set).unwrap_or_else(|said| panic!("{said}"));
        let bindings =
            objects(&yaml).into_iter().filter(|one| one["kind"] == "ValidatingAdmissionPolicyBinding");
        let told = bindings.map(|one| {
            let name = one["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            assert_eq!(one["spec"]["policyName"], name, "a binding binds the policy of its name");
            format!("{name} {}", one["spec"]["validationActions"][0].as_str().unwrap_or_default())
        });
        let of_pods =
            |one: &String| one.starts_with("tranche-pods-") || one.starts_with("tranche-whole-gpus-");
        let mut told: Vec<String> = told.filter(of_pods).collect();
        told.sort();
        told
    };
    assert_eq!(
        actions(&[]),
        [
            "tranche-pods-capabilities Deny",
            "tranche-pods-env Deny",
            "tranche-pods-host-namespaces Deny",
            "tranche-pods-host-path Deny",
            "tranche-pods-privileged Deny",
            "tranche-pods-proc-mount Deny",
            "tranche-pods-root Warn",
            "tranche-whole-gpus-capabilities Warn",
            "tranche-whole-gpus-claims Deny",
            "tranche-whole-gpus-env Warn",
            "tranche-whole-gpus-host-namespaces Warn",
            "tranche-whole-gpus-host-path Warn",
            "tranche-whole-gpus-privileged Warn",
            "tranche-whole-gpus-proc-mount Warn",
        ]
    );
    // A rule is never stricter for whole GPUs than for shares.
    let set = [
        r#"podPolicy={"env":"off","privileged":false,"procMount":"off","hostPath":"Warn","root":"Deny",
            "wholeGpus":{"privileged":"Deny","capabilities":"Deny","hostNamespaces":"off","hostPath":"Deny"}}"#,
    ];
    assert_eq!(
        actions(&set),
        [
            "tranche-pods-capabilities Deny",
            "tranche-pods-host-namespaces Deny",
            "tranche-pods-host-path Warn",
            "tranche-pods-root Deny",
            "tranche-whole-gpus-capabilities Deny",
            "tranche-whole-gpus-claims Deny",
            "tranche-whole-gpus-host-path Warn",
        ]
    );
    // Folders that were moved are guarded where they are.
    let moved = [r#"node={"kubeletDir":"/data/kubelet","cdiDir":"/data/cdi","driverRoot":"/home/nvidia"}"#];
    let yaml = render(&helm, &moved).expect("it renders");
    for path in ["/data/kubelet", "/data/cdi", "/home/nvidia", "/var/lib/kubelet", "/run/cdi", "/driver"] {
        assert!(yaml.contains(&format!("'path': '{path}'")), "{path}: {yaml}");
    }
    // The root of all is no folder to be kept from.
    assert!(!render(&helm, &[]).expect("it renders").contains("'path': '/',"));
}

#[test]
#[ignore = "needs helm"]
fn who_cannot_have_a_share_is_told_from_who_may_by_what_the_chart_gives() {
    let helm = helm();
    let groups = |set: &[&str]| {
        let yaml = render(&helm, set).unwrap_or_else(|said| panic!("{said}"));
        let policies = objects(&yaml).into_iter().filter(|one| one["kind"] == "ValidatingAdmissionPolicy");
        let mut groups: Vec<(String, Vec<String>)> = policies
            .filter_map(|one| {
                let name = one["metadata"]["name"].as_str()?.to_owned();
                let conditions = one["spec"]["matchConditions"].as_array()?.clone();
                let names = conditions.iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned());
                name.ends_with("-env").then(|| (name, names.collect()))
            })
            .collect();
        groups.sort();
        let text = groups.iter().map(|(name, conditions)| format!("{name}: {}", conditions.join(", ")));
        text.collect::<Vec<_>>()
    };
    let apart = ["tranche-pods-env: may-have-a-share", "tranche-whole-gpus-env: asks-for-devices"];
    assert_eq!(groups(&[]), apart);
    // No GPU is given in shares.
    assert_eq!(groups(&["mps.enabled=false"]), ["tranche-whole-gpus-env: asks-for-devices"]);
    // Whoever asks without an amount has neighbours on the GPU.
    for set in [r#"sharing.defaultRequest="nothing""#, r#"sharing.unasked="nothing""#] {
        assert_eq!(groups(&[set]), ["tranche-pods-env: asks-for-devices"]);
    }
}

#[test]
#[ignore = "needs helm"]
fn the_rules_for_pods_are_for_limits_that_stand_for_devices_of_ours() {
    let helm = helm();
    let rules = |set: &[&str], release: &str| {
        let mut command = Command::new(&helm);
        command.args(["template", "tranche", "charts/tranche", "--kube-version", release]);
        command.args(["--show-only", "templates/podpolicy.yaml"]);
        for value in set {
            command.args(["--set-json", value]);
        }
        let out = command.current_dir(root()).output().expect("helm can be run");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let (class, gpu) = ("name.startsWith('deviceclass.resource.kubernetes.io/')", "name == 'nvidia.com/gpu'");
    let more = r#"podPolicy.extendedResources=["example.com/gpu"]"#;
    for (set, release, names, not) in [
        (&[][..], "1.36.3", &[class, gpu][..], &["example.com"][..]),
        // There nvidia.com/gpu is whoever's device plugin serves it.
        (&[], "1.35.9", &[class], &[gpu]),
        (&["deviceClasses.extendedResource=false"], "1.37.0", &[class], &[gpu]),
        (&[more], "1.37.0", &[class, gpu, "name == 'example.com/gpu'"], &[]),
    ] {
        let yaml = rules(set, release);
        assert!(names.iter().all(|name| yaml.contains(name)), "{set:?} {release}: {yaml}");
        assert!(!not.iter().any(|name| yaml.contains(name)), "{set:?} {release}: {yaml}");
    }
}

#[test]
#[ignore = "needs helm"]
fn without_mps_every_gpu_is_given_whole() {
    let helm = helm();
    let yaml = render(&helm, &["mps.enabled=false", r#"sharing.exclusiveGPUs=["0"]"#]).expect("it renders");
    let node = daemonset(&yaml, "tranche-node").to_string();
    assert!(node.contains("--exclusive-gpus=all") && !node.contains("/run/tranche/mps"), "{node}");
    assert!(!yaml.contains("tranche-mps"), "{yaml}");
}

fn webhooks(yaml: &str) -> Vec<Value> {
    let all = objects(yaml)
        .into_iter()
        .flat_map(|object| object["webhooks"].as_array().cloned().unwrap_or_default());
    all.collect()
}

#[test]
fn a_webhook_that_is_down_stops_only_pods_that_ask_for_shares() {
    let text = fs::read_to_string(root().join("deploy/webhook.yaml")).expect("it is there");
    for webhook in webhooks(&text) {
        let name = webhook["name"].as_str().expect("a name");
        assert!(!webhook["matchConditions"].as_array().expect("conditions").is_empty(), "{name}");
        let chosen = &webhook["namespaceSelector"]["matchLabels"][OPT_IN_LABEL];
        match webhook["failurePolicy"].as_str().expect("a policy") {
            "Ignore" => {}
            "Fail" => assert_eq!(*chosen, OPT_IN_VALUE, "{name}"),
            other => panic!("{name}: {other}"),
        }
        assert_eq!(webhook["sideEffects"], "None", "{name}");
        assert!(webhook["timeoutSeconds"].as_u64().expect("a number") <= 5, "{name}");
    }
    assert_eq!(webhooks(&text).len(), 5);
}

#[test]
fn the_webhooks_names_are_those_that_the_program_expects() {
    let text = fs::read_to_string(root().join("deploy/webhook.yaml")).expect("it is there");
    let args =
        WebhookRunArgs { pod_namespace: Some("tranche-system".to_owned()), ..WebhookRunArgs::default() };
    let (_, settings) = tranche::cli::settings::log_and_webhook(LogArgs::default(), args).expect("usable");
    let Certificates::Own(own) = settings.webhook.certificates else {
        panic!("the chart's default is its own")
    };
    let named = |kind: &str| {
        let found = objects(&text).into_iter().find(|object| object["kind"] == kind);
        found.unwrap_or_else(|| panic!("no {kind}"))["metadata"]["name"].as_str().expect("a name").to_owned()
    };
    assert_eq!(named("ValidatingWebhookConfiguration"), own.configuration);
    let mutating = objects(&text).into_iter().filter(|one| one["kind"] == "MutatingWebhookConfiguration");
    let mutating: Vec<String> =
        mutating.map(|one| one["metadata"]["name"].as_str().expect("a name").to_owned()).collect();
    assert_eq!(mutating, own.configurations());
    // KAI's, as its operator makes it.
    assert!(mutating[1].as_str() < "mutating-kai-admission");
    assert_eq!(named("Secret"), own.secret);
    assert_eq!(own.names, [format!("{}.tranche-system.svc", named("Service"))]);
    for object in
        objects(&text).iter().filter(|object| object["kind"].as_str().is_some_and(|k| k.ends_with("Role")))
    {
        for rule in object["rules"].as_array().expect("rules") {
            let limited = rule["resourceNames"].as_array().is_some();
            // A class of an administrator's own may have any name, and keeps no secret.
            let classes =
                rule["resources"] == json!(["deviceclasses"]) && rule["verbs"] == json!(["list", "watch"]);
            assert!(limited || classes || rule["verbs"] == json!(["create"]), "{rule}");
        }
    }
}

#[test]
#[ignore = "needs helm"]
fn cert_manager_makes_the_certificate_where_that_is_asked_for() {
    let helm = helm();
    let yaml = render(&helm, &[r#"webhook.certificates="cert-manager""#]).expect("it renders");
    let all = objects(&yaml);
    let of = |kind: &str| all.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    let named = |kind: &str, name: &Value| {
        let is_it = |object: &&&Value| object["metadata"]["name"] == *name;
        of(kind).iter().find(is_it).unwrap_or_else(|| panic!("no {kind} {name}"))["spec"].clone()
    };
    let certificate = named("Certificate", &json!("tranche-webhook"));
    assert_eq!(certificate["dnsNames"][0], "tranche-webhook.tranche-system.svc");
    // Signed by a CA that stays when the certificate is renewed.
    let issuer = named("Issuer", &certificate["issuerRef"]["name"]);
    let ca = named("Certificate", &json!("tranche-webhook-ca"));
    assert_eq!((&issuer["ca"]["secretName"], &ca["isCA"]), (&ca["secretName"], &json!(true)));
    assert_eq!(named("Issuer", &ca["issuerRef"]["name"]), json!({"selfSigned": {}}));
    for kind in ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"] {
        let from = &of(kind)[0]["metadata"]["annotations"]["cert-manager.io/inject-ca-from"];
        assert_eq!(*from, "tranche-system/tranche-webhook");
    }
    let is_webhooks =
        |role: &&&Value| role["metadata"]["name"].as_str().is_some_and(|n| n.contains("webhook"));
    let roles = of("Role").iter().filter(is_webhooks).count();
    assert!(of("Secret").is_empty() && roles == 0, "the controller needs to write neither");
    let set = [
        r#"webhook={"enabled":true,"certificates":"cert-manager","certManager":{"issuerRef":{"kind":"ClusterIssuer","name":"ours"}}}"#,
    ];
    let yaml = render(&helm, &set).expect("it renders");
    assert!(
        yaml.contains("kind: ClusterIssuer") && !yaml.contains("selfSigned") && !yaml.contains("isCA"),
        "{yaml}"
    );
    let off = render(&helm, &["webhook.enabled=false"]).expect("it renders");
    assert!(webhooks(&off).is_empty() && !off.contains("tranche-webhook"), "{off}");
}

/// A here-document ends at a line that is its word and nothing else.
#[test]
fn what_the_notes_give_to_kubectl_can_be_pasted() {
    let notes = fs::read_to_string(root().join("charts/tranche/templates/NOTES.txt")).expect("it is there");
    let (_, rest) = notes.split_once("\nkubectl apply -f - <<'YAML'\n").expect("something to apply");
    let (pasted, after) = rest.split_once("\nYAML\n").expect("its end is at the left edge");
    assert!(!pasted.contains("{{"), "the chart fills nothing in: {pasted}");
    let objects = objects(pasted);
    let kinds: Vec<&str> = objects.iter().filter_map(|one| one["kind"].as_str()).collect();
    assert_eq!(kinds, ["ResourceClaimTemplate", "Pod"]);
    for object in &objects {
        only_known_fields(object, "NOTES.txt");
    }
    // Nobody is warned by the rules that the chart itself installs, refused by Pod Security of level restricted, or
    // asks for logs before there are any.
    let pod = &objects[1]["spec"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let of_container = &pod["containers"][0]["securityContext"];
    assert_eq!(of_container["allowPrivilegeEscalation"], false);
    assert_eq!(of_container["capabilities"]["drop"], json!(["ALL"]));
    assert!(after.starts_with("kubectl wait "), "{after}");
}

#[test]
#[ignore = "needs helm"]
fn labels_and_annotations_of_ones_own_stand_on_every_object_and_pod_and_choose_nothing() {
    let helm = helm();
    let set = [
        r#"commonLabels={"team":"ml","zone":"all"}"#,
        r#"commonAnnotations={"example.com/owner":"ops"}"#,
        r#"node.podLabels={"zone":"node"}"#,
        r#"controller.podAnnotations={"example.com/owner":"controllers"}"#,
        r#"openshift.securityContextConstraints=true"#,
    ];
    for certificates in [r#"webhook.certificates="self""#, r#"webhook.certificates="cert-manager""#] {
        let yaml = render_on_openshift(&helm, &[&set[..], &[certificates]].concat()).expect("it renders");
        let all: Vec<Value> = objects(&yaml).into_iter().filter(|one| !one.is_null()).collect();
        assert!(all.len() > 40, "{} objects", all.len());
        for one in &all {
            let place = format!("{} {}", one["kind"], one["metadata"]["name"]);
            let metadata = &one["metadata"];
            assert_eq!(metadata["labels"]["team"], "ml", "{place}");
            assert_eq!(metadata["labels"]["app.kubernetes.io/name"], "tranche", "{place}");
            assert_eq!(metadata["annotations"]["example.com/owner"], "ops", "{place}");
            assert!(one["spec"]["selector"]["matchLabels"].get("team").is_none(), "{place}: a selector");
        }
        // What a kind of pods says of itself goes before what all say.
        let pod_of = |name: &str| {
            let found = all.iter().find(|one| {
                one["metadata"]["name"] == name && one["spec"]["template"]["metadata"].is_object()
            });
            found.unwrap_or_else(|| panic!("no pods of {name}"))["spec"]["template"]["metadata"].clone()
        };
        for (name, zone, owner) in [
            ("tranche-node", "node", "ops"),
            ("tranche-mps", "all", "ops"),
            ("tranche-controller", "all", "controllers"),
        ] {
            let pod = pod_of(name);
            assert_eq!(
                (&pod["labels"]["team"], &pod["labels"]["zone"]),
                (&json!("ml"), &json!(zone)),
                "{name}"
            );
            assert_eq!(pod["annotations"]["example.com/owner"], owner, "{name}");
            assert!(pod["annotations"]["kubectl.kubernetes.io/default-container"].is_string(), "{name}");
        }
        let injected = all.iter().filter(|one| {
            one["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
                == "tranche-system/tranche-webhook"
        });
        assert_eq!(injected.count(), if certificates.contains("cert-manager") { 3 } else { 0 });
    }
}

#[test]
#[ignore = "needs helm"]
fn openshift_lets_the_pods_of_a_node_be_what_they_ask_for_and_nothing_else() {
    let helm = helm();
    let asked = "openshift.securityContextConstraints=true";
    let scc = |yaml: &str| objects(yaml).into_iter().find(|one| one["kind"] == "SecurityContextConstraints");
    assert!(scc(&render_on_openshift(&helm, &[]).expect("it renders")).is_none(), "off unless asked for");
    let said = render(&helm, &[asked]).expect_err("there is no such API");
    assert!(said.contains("security.openshift.io/v1, which only OpenShift has"), "{said}");

    let yaml = render_on_openshift(&helm, &[asked]).expect("it renders");
    let granted = scc(&yaml).expect("it was asked for");
    assert_eq!(granted["apiVersion"], "security.openshift.io/v1");
    let users = json!([
        "system:serviceaccount:tranche-system:tranche-node",
        "system:serviceaccount:tranche-system:tranche-mps"
    ]);
    assert_eq!(granted["users"], users);
    // What the pods ask for is granted, and what they do not is not.
    let mut kinds = std::collections::BTreeSet::from(["projected".to_owned()]);
    for name in ["tranche-node", "tranche-mps"] {
        let pod = pod(&yaml, name);
        let security = &pod["containers"][0]["securityContext"];
        assert_eq!(granted["allowPrivilegedContainer"], security["privileged"], "{name}");
        assert_eq!(granted["readOnlyRootFilesystem"], security["readOnlyRootFilesystem"], "{name}");
        assert_eq!(granted["allowHostPID"], pod["hostPID"], "{name}");
        for (may, asks) in [("allowHostNetwork", "hostNetwork"), ("allowHostIPC", "hostIPC")] {
            assert_eq!(granted[may], json!(pod[asks] == json!(true)), "{name}: {asks}");
        }
        for volume in pod["volumes"].as_array().expect("volumes") {
            kinds.extend(volume.as_object().expect("a volume").keys().filter(|key| *key != "name").cloned());
        }
    }
    assert_eq!(granted["volumes"], json!(kinds));
    let alone = render_on_openshift(&helm, &[asked, "mps.enabled=false"]).expect("it renders");
    assert_eq!(scc(&alone).expect("it was asked for")["users"], json!([users[0]]));
}

#[test]
#[ignore = "needs helm"]
fn wrong_values_are_refused_with_their_path() {
    let helm = helm();
    for (value, path) in [
        ("nodes={}", "'nodes' not allowed"),
        (r#"commonLabels={"app.kubernetes.io/name":"x"}"#, "/commonLabels"),
        (r#"commonLabels={"team":7}"#, "/commonLabels/team"),
        (r#"commonAnnotations=["x"]"#, "/commonAnnotations"),
        (r#"openshift.securityContextConstraints="yes""#, "/openshift/securityContextConstraints"),
        (r#"node.driverroot="/""#, "'driverroot' not allowed"),
        (r#"node.driverRoot="run/nvidia""#, "/node/driverRoot"),
        (r#"node.toolkitDir="usr/local""#, "/node/toolkitDir"),
        (r#"node.driverLibraryDirs=["a,b"]"#, "/node/driverLibraryDirs/0"),
        ("podPolicy.hints=\"Deny\"", "/podPolicy/hints"),
        (r#"node.kubeletDir="/var/lib/kubelet/""#, "/node/kubeletDir"),
        (r#"node.logFormat="xml""#, "/node/logFormat"),
        ("node.ops.port=0", "/node/ops/port"),
        (r#"node.extraArgs=["one"]"#, "/node/extraArgs/0"),
        (r#"node.extraHostPaths=[{"name":"x"}]"#, "/node/extraHostPaths/0"),
        (r#"image.repository="tranche:dev""#, "/image/repository"),
        (r#"image.pullPolicy="Sometimes""#, "/image/pullPolicy"),
        (r#"admissionPolicy.enabled="yes""#, "/admissionPolicy/enabled"),
        ("nodeLabels=\"off\"", "/nodeLabels"),
        ("deviceClasses.hints=true", "/deviceClasses/hints"),
        (r#"podPolicy.env="deny""#, "/podPolicy/env"),
        ("podPolicy.root=true", "/podPolicy/root"),
        ("podPolicy.all=false", "'all' not allowed"),
        (r#"podPolicy.wholeGpus="Deny""#, "/podPolicy/wholeGpus"),
        (r#"podPolicy.wholeGpus.env="deny""#, "/podPolicy/wholeGpus/env"),
        // It is about MPS daemons, which only shares have.
        (r#"podPolicy.wholeGpus.root="Warn""#, "'root' not allowed"),
        (r#"podPolicy.extendedResources=["gpu"]"#, "/podPolicy/extendedResources/0"),
        (r#"podPolicy.extendedResources=["a/'b"]"#, "/podPolicy/extendedResources/0"),
        (r#"sharing.exclusiveGPUs="all""#, "/sharing/exclusiveGPUs"),
        (r#"sharing.exclusiveGPUs=["0,1"]"#, "/sharing/exclusiveGPUs/0"),
        ("sharing.processesPerShare=25", "/sharing/processesPerShare"),
        (r#"sharing.defaultRequest="half""#, "/sharing/defaultRequest"),
        (r#"sharing.unasked="half""#, "/sharing/unasked"),
        (r#"sharing.mpsServerMemory="512MB""#, "/sharing/mpsServerMemory"),
        (r#"node.openDescriptors="deny""#, "/node/openDescriptors"),
        (r#"watchdog.action="kill""#, "/watchdog/action"),
        (r#"watchdog.period="1""#, "/watchdog/period"),
        (r#"watchdog.period="50ms""#, "/watchdog/period"),
        (r#"mps.keepWarm="soon""#, "/mps/keepWarm"),
        (r#"mps.keepWarm="25h""#, "/mps/keepWarm"),
        (r#"mps.sharedMemory.size="half a GiB""#, "/mps/sharedMemory/size"),
        (r#"mps.sharedMemory.size="63Mi""#, "/mps/sharedMemory/size"),
        ("mps.sharedMemory.files=10", "/mps/sharedMemory/files"),
        ("webhook.timeoutSeconds=31", "/webhook/timeoutSeconds"),
        (r#"webhook.certificates="vault""#, "/webhook/certificates"),
        (r#"webhook.certManager.issuerRef={"issuer":"x"}"#, "'issuer' not allowed"),
        (r#"controller.policy="best""#, "/controller/policy"),
        (r#"controller.leaseDuration="500ms""#, "/controller/leaseDuration"),
        (r#"controller.leaseDuration="4s""#, "/controller/leaseDuration"),
        (r#"controller.leaseDuration="301s""#, "/controller/leaseDuration"),
        (r#"controller.holds.settle="0s""#, "/controller/holds/settle"),
        ("controller.holds.ahead=1000000", "/controller/holds/ahead"),
        ("controller.maxOvertakes=5000000000", "/controller/maxOvertakes"),
        (r#"controller.starvationTimeout="0s""#, "/controller/starvationTimeout"),
        (r#"controller.reservationDuration="1500m""#, "/controller/reservationDuration"),
        ("controller.patience.passes=5000000000", "/controller/patience/passes"),
        (r#"controller.patience.keep="1500m""#, "/controller/patience/keep"),
        (r#"controller.ops.host="localhost""#, "/controller/ops/host"),
        (
            "controller.ops.healthPort=8080",
            "controller.ops.port, controller.ops.healthPort and webhook.port are 8080, 8080",
        ),
        (
            "webhook.port=8081",
            "controller.ops.port, controller.ops.healthPort and webhook.port are 8080, 8081, 8081",
        ),
        ("node.ops.healthPort=8080", "node.ops: port and healthPort are both 8080"),
        (r#"controller.holds.never=["a,b"]"#, "/controller/holds/never/0"),
        (r#"controller.holds.always=["a,b"]"#, "/controller/holds/always/0"),
        ("controller.replicas=0", "/controller/replicas"),
    ] {
        let said = render(&helm, &[value]).expect_err(value);
        assert!(said.contains(path), "{value}: {said}");
    }
}

/// `sha256:` of nothing.
const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
#[ignore = "needs helm"]
fn a_digest_names_the_image_of_every_pod() {
    let image =
        format!(r#"image={{"repository":"registry.example.com/tranche","tag":"1.2.3","digest":"{DIGEST}"}}"#);
    let yaml = render(&helm(), &[&image]).unwrap_or_else(|said| panic!("{said}"));
    let mut images = Vec::new();
    for object in objects(&yaml) {
        let pod = match object["kind"].as_str() {
            Some("DaemonSet" | "Deployment" | "Job") => &object["spec"]["template"]["spec"],
            Some("Pod") => &object["spec"],
            _ => continue,
        };
        for containers in ["initContainers", "containers"] {
            let containers = pod[containers].as_array().into_iter().flatten();
            images.extend(containers.map(|one| one["image"].as_str().expect("an image").to_owned()));
        }
    }
    assert!(images.len() >= 3, "tranche-node, tranche-mps, tranche-controller: {images:?}");
    let wanted = format!("registry.example.com/tranche@{DIGEST}");
    assert!(images.iter().all(|image| *image == wanted), "{images:?}");
    assert!(!yaml.contains("tranche:1.2.3"), "the tag is left out");
}

#[test]
#[ignore = "needs helm"]
fn a_budget_keeps_one_of_several_controllers_and_holds_up_no_node_with_the_only_one() {
    let helm = helm();
    for (replicas, budgets) in [(1, 0), (2, 1), (3, 1)] {
        let yaml = render(&helm, &[&format!("controller.replicas={replicas}")]);
        let all = objects(&yaml.unwrap_or_else(|said| panic!("{said}")));
        let of = |kind: &str| all.iter().filter(|one| one["kind"] == kind).collect::<Vec<_>>();
        let found = of("PodDisruptionBudget");
        assert_eq!(found.len(), budgets, "{replicas} replicas");
        for budget in found {
            assert_eq!(budget["spec"]["maxUnavailable"], 1);
            let labels = &of("Deployment")[0]["spec"]["template"]["metadata"]["labels"];
            let wanted = budget["spec"]["selector"]["matchLabels"].as_object().expect("labels");
            assert!(
                !wanted.is_empty() && wanted.iter().all(|(name, value)| labels[name] == *value),
                "{labels}"
            );
        }
    }
}

#[test]
#[ignore = "needs helm"]
fn the_chart_passes_lint() {
    let helm = helm();
    let lint = Command::new(helm).args(["lint", "--strict", "charts/tranche"]).current_dir(root()).output();
    let lint = lint.expect("helm can be run");
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stdout));
}
