//! The tools as a newcomer calls them, with what is usually wrong: each mistake is answered by words that say what was
//! wrong and where, with exit code 1 or 2, and never by a type of Rust. The real program runs; the API servers here answer
//! one sentence each.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

const KUBECONFIG: &str = "current-context: here\n\
    contexts: [{name: here, context: {cluster: c, user: u, namespace: ml}}, {name: there, context: {cluster: d, user: u}}]\n\
    clusters: [{name: c, cluster: {server: 'http://ADDRESS'}}]\nusers: [{name: u, user: {}}]\n";
const POD: &str =
    "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: main, image: i}]}\n";
const CLAIM: &str = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: train}\nspec:\n  devices:\n    \
    requests: [{name: gpu, exactly: {deviceClassName: shared.gpu.nvidia.com}}]\n    config:\n    - opaque:\n        \
    driver: gpu.nvidia.com\n        parameters: {apiVersion: tranche.dev/v1alpha1, kind: GpuShare, SHARE}\n";
const GPUS: &str = r#"{"driver": {"driver": "550.163.01", "cuda": "12.4"}, "gpus": []}"#;

/// Runs the program in a folder, with a file on standard input.
fn run(folder: &Path, line: &str, input: &str) -> (Option<i32>, String, String) {
    run_with(folder, &[], line, input)
}

/// The same with variables in its environment.
fn run_with(
    folder: &Path,
    variables: &[(&str, &str)],
    line: &str,
    input: &str,
) -> (Option<i32>, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tranche"))
        .args(line.split(' ').filter(|word| !word.is_empty()))
        .current_dir(folder)
        .env_clear()
        .env("HOME", folder)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Whoever reads no standard input may be gone already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// An API server that answers every request with one status and one message, for as long as the test runs.
fn api_server(code: u16, reason: &'static str, message: &str) -> SocketAddr {
    let body = serde_json::json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code, "details": {"name": "train"}})
    .to_string();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            read_head(&mut stream);
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 {code} {reason}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                 connection: close\r\n\r\n{body}"
            );
        }
    });
    address
}

fn kubeconfig(folder: &Path, name: &str, address: &str) {
    fs::write(folder.join(name), KUBECONFIG.replace("ADDRESS", address)).unwrap();
}

/// The mistakes: the command, what is on standard input, the exit code, and words of the answer.
struct Case {
    line: &'static str,
    input: &'static str,
    code: i32,
    words: &'static [&'static str],
}

const fn case(line: &'static str, code: i32, words: &'static [&'static str]) -> Case {
    Case { line, input: "", code, words }
}

const KIND_MISSING: &str = "kind is missing; an object of Kubernetes begins with apiVersion and kind";
const FILES: &[Case] = &[
    case("explain -f none.yaml", 2, &["error: the path \"none.yaml\" does not exist"]),
    case("explain -f folder", 2, &["error: folder is a folder; give a file"]),
    case("explain -f empty.yaml", 2, &["error: empty.yaml is empty"]),
    case("explain -f comments.yaml", 2, &["error: there is no object in comments.yaml"]),
    case("explain -f -", 2, &["error: nothing came on standard input"]),
    case("explain -f binary", 2, &["error: binary is not a text file (UTF-8)"]),
    case("explain -f utf16.yaml", 2, &["error: utf16.yaml is text in UTF-16", "save it as UTF-8"]),
    case(
        "explain -f tab.yaml",
        2,
        &[
            "error: tab.yaml is not valid YAML: ",
            " at line 3, column 2, in the line \"name: a\"",
            "indented with spaces",
        ],
    ),
    case("explain -f cut.yaml", 2, &["error: cut.yaml is not valid YAML: ", " at line "]),
    case("explain -f cut.json", 2, &["error: cut.json is not valid JSON: it ends before its last bracket"]),
    case(
        "explain -f twice.yaml",
        2,
        &["error: twice.yaml is not valid YAML: duplicate mapping key `kind` is not allowed here at line 3"],
    ),
    case("explain -f word.yaml", 2, &["error: word.yaml is a text, not an object of Kubernetes"]),
    case("explain -f kindless.yaml", 2, &["error: kindless.yaml, document 2: ", KIND_MISSING]),
    case("explain -f service.yaml", 2, &["error: there is no Pod in service.yaml, nor a Deployment"]),
    case(
        "explain -f typed.yaml",
        2,
        &[
            "error: typed.yaml, document 2: Pod \"b\": spec.containers[0].image: must be a string, not the number 5",
        ],
    ),
    case(
        "explain -f deployment.yaml",
        2,
        &["error: deployment.yaml: Deployment \"web\": spec.template.spec.containers: must be a list"],
    ),
    case(
        "explain -f old.yaml",
        2,
        &[
            "error: old.yaml: ResourceClaim \"train\": apiVersion is \"resource.k8s.io/v1beta1\", but resource.k8s.io/v1 is",
        ],
    ),
    Case {
        line: "explain -f -",
        input: "kind: Pod\nmetadata: {name: 5}\n",
        code: 2,
        words: &["error: standard input: Pod: metadata.name: must be a string, not the number 5"],
    },
    case(
        "plan -f pod.yaml --gpus gpus.json",
        2,
        &["error: there are only objects of kind Pod, but a ResourceClaim"],
    ),
    case("plan -f none.yaml", 2, &["error: --claim: there is no file \"none.yaml\"; give the path of"]),
    case("plan -f train", 2, &["there is no file \"train\"", "or namespace/name for a claim in the cluster"]),
    case(
        "plan -f ml/train -n team",
        2,
        &["error: --claim ml/train and -n team name two namespaces; give one"],
    ),
    case(
        "plan -f old.yaml --gpus gpus.json",
        2,
        &["old.yaml: ResourceClaim \"train\": apiVersion is", "kubectl get"],
    ),
    case(
        "plan -f shallow.yaml --gpus gpus.json",
        2,
        &["ResourceClaimTemplate \"t\": spec.devices belongs below spec.spec"],
    ),
    case(
        "plan -f nameless.yaml --gpus gpus.json",
        2,
        &["error: nameless.yaml: ResourceClaim: metadata.name is missing"],
    ),
    case(
        "plan -f count.yaml --gpus gpus.json",
        2,
        &[
            "count.yaml: ResourceClaim \"train\": spec.devices.requests[0].exactly.count: must be a whole number, not the string \"2\"",
        ],
    ),
    case("plan -f claim.yaml --gpus none.json", 2, &["error: the path \"none.json\" does not exist"]),
    case("plan -f claim.yaml --gpus pod.yaml", 2, &["error: pod.yaml does not list a node's GPUs"]),
    case(
        "plan -f claim.yaml --gpus gpus.json --ledger none",
        2,
        &["cannot read the ledger none: no such file or directory"],
    ),
    case("simulate --nodes none.csv --pods none.csv", 2, &["error: the path \"none.csv\" does not exist"]),
    case(
        "inspect --socket none.sock",
        1,
        &["error: nothing answers at none.sock (no such file or directory). Ask inside a pod"],
    ),
    case("inspect metrics -o json", 2, &["error: -o is for the state"]),
];

const CLUSTER: &[Case] = &[
    case("top", 2, &["error: no cluster to ask: there is no ~/.kube/config; give --kubeconfig"]),
    case(
        "top --kubeconfig none",
        2,
        &["error: kubeconfig none cannot be used: the path \"none\" does not exist"],
    ),
    case("top --kubeconfig folder", 2, &["error: kubeconfig folder cannot be used: folder is a folder"]),
    case(
        "top --kubeconfig binary",
        2,
        &["error: kubeconfig binary cannot be used: binary is not a text file"],
    ),
    case(
        "top --kubeconfig cut.yaml",
        2,
        &["kubeconfig cut.yaml cannot be used: it is not valid YAML of a kubeconfig: line "],
    ),
    case(
        "top --kubeconfig pod.yaml",
        2,
        &["kubeconfig pod.yaml cannot be used: it has no current context; name one"],
    ),
    case(
        "top --kubeconfig refused --context nowhere",
        2,
        &["context \"nowhere\" does not exist; its contexts are here, there"],
    ),
    case(
        "top --kubeconfig refused --context there",
        2,
        &["the context names cluster \"d\", which is not in its clusters"],
    ),
    case(
        "plan -f ml/train --gpus gpus.json --kubeconfig refused --context nowhere",
        2,
        &["context \"nowhere\" does not exist; its contexts are here, there"],
    ),
    case(
        "plan -f ml/train --gpus gpus.json --kubeconfig refused --context there",
        2,
        &["the context names cluster \"d\", which is not in its clusters"],
    ),
    case(
        "top --kubeconfig refused",
        1,
        &["error: the API server http://127.0.0.1:", "cannot be reached: connection refused;"],
    ),
    case(
        "explain train --kubeconfig refused",
        1,
        &["cannot be reached: connection refused;", "kubectl config view --minify"],
    ),
    case("explain -f pod.yaml", 1, &["cannot be reached: connection refused;"]),
    case(
        "rebalance --kubeconfig refused",
        1,
        &["error: the API server http://127.0.0.1:", "cannot be reached: connection refused;"],
    ),
    case(
        "rebalance --kubeconfig forbidden",
        1,
        &["Error from server (Forbidden): ", "see kubectl auth can-i list"],
    ),
    case(
        "plan -f ml/train --gpus gpus.json --kubeconfig refused",
        1,
        &["cannot be reached: connection refused;"],
    ),
    case(
        "top --kubeconfig forbidden",
        1,
        &[
            "Error from server (Forbidden): resourceclaims.resource.k8s.io is forbidden: User \"eve\"",
            "; see kubectl auth can-i list resourceclaims.resource.k8s.io -n ml, and ask for ClusterRole tranche-viewer",
        ],
    ),
    case(
        "explain train --kubeconfig forbidden",
        1,
        &["Error from server (Forbidden): ", "see kubectl auth can-i list"],
    ),
    case(
        "plan -f ml/train --kubeconfig forbidden",
        1,
        &["Error from server (Forbidden): ", "see kubectl auth can-i list"],
    ),
    case(
        "top --kubeconfig unauthorized",
        1,
        &["Error from server (Unauthorized): the API server does not know who you are"],
    ),
    case(
        "top --kubeconfig no-impersonation --as eve",
        1,
        &[
            "Error from server (Forbidden): users \"eve\" is forbidden: User \"bob\" cannot impersonate",
            "; see kubectl auth can-i impersonate users\n",
        ],
    ),
    case(
        "plan -f train -n ml --gpus gpus.json --kubeconfig absent",
        1,
        &["Error from server (NotFound): resourceclaims.resource.k8s.io \"train\" not found in namespace ml"],
    ),
];

const ARGUMENTS: &[Case] = &[
    case(
        "top --kubeconfig refused --as-group a",
        2,
        &["error: --as-group and --as-uid are of a user: give --as USER"],
    ),
    case("explain train --kubeconfig refused --as-uid 7", 2, &["give --as USER as well"]),
    case("plan -f ml/train --kubeconfig refused --as \u{e9}", 2, &["printable ASCII only"]),
    case("top --use=no", 2, &["error: invalid value 'no' for '--use"]),
    case("rebalance --yes", 2, &["error: the following required arguments were not provided:", "--apply"]),
    case("rebalance --timeout 5 --kubeconfig refused", 2, &["error: --timeout "]),
    case(
        "rebalance -o table",
        2,
        &["error: invalid value 'table' for '--output", "[possible values: map, json, yaml]"],
    ),
    case("explian", 2, &["error: unrecognized subcommand 'explian'", "'explain'"]),
    case(
        "top -o yml",
        2,
        &["error: invalid value 'yml' for '--output", "[possible values: map, table, json, yaml]"],
    ),
    case("explain", 2, &["error: the following required arguments were not provided"]),
    case("explain a/b/c", 2, &["error: \"a/b/c\" has too many parts; give NAME, NAMESPACE/NAME, pod/NAME"]),
    case(
        "explain service web",
        2,
        &["error: \"service\" is not a kind that can be explained; give pod, resourceclaim, deployment"],
    ),
    case("explain ml/a -n team", 2, &["and -n team name two namespaces"]),
    case("top --interval 0", 2, &["error: --interval 0: write a number of seconds, at least 0.5"]),
    case("simulate --nodes a --pods b --load 11", 2, &["error: --load 11: write a number above 0"]),
];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("folder")).unwrap();
    let claim = CLAIM.replace("SHARE", "memory: 2Gi");
    for (name, text) in [
        ("empty.yaml", ""),
        ("comments.yaml", "# nothing\n---\n"),
        ("tab.yaml", "kind: Pod\nmetadata:\n\tname: a\n"),
        ("cut.yaml", "kind: Pod\nmetadata: {name: a\n"),
        ("cut.json", "{\"kind\": \"Pod\", "),
        ("twice.yaml", "kind: Pod\nmetadata: {name: a}\nkind: Job\n"),
        ("word.yaml", "hello\n"),
        ("kindless.yaml", &format!("{POD}---\nmetadata: {{name: b}}\n")),
        ("service.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n"),
        (
            "typed.yaml",
            &format!("{POD}---\n{}", POD.replace("name: a", "name: b").replace("image: i", "image: 5")),
        ),
        (
            "deployment.yaml",
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {containers: main}}}\n",
        ),
        ("old.yaml", &claim.replace("k8s.io/v1", "k8s.io/v1beta1")),
        ("pod.yaml", POD),
        ("crlf.yaml", &POD.replace('\n', "\r\n")),
        ("claim.yaml", &claim),
        ("nameless.yaml", &claim.replace("name: train", "labels: {}")),
        ("count.yaml", &claim.replace("shared.gpu.nvidia.com}", "gpu.nvidia.com, count: \"2\"}")),
        (
            "shallow.yaml",
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\nspec: {devices: {requests: []}}\n",
        ),
        ("gpus.json", GPUS),
    ] {
        fs::write(at.join(name), text).unwrap();
    }
    fs::write(at.join("binary"), [0x7f, b'E', b'L', b'F', 0, 0xc3, 0x28]).unwrap();
    fs::write(at.join("utf16.yaml"), [0xff, 0xfe, b'k', 0, b'i', 0]).unwrap();
    // Nobody listens there, and nobody gets it who asks for any port.
    kubeconfig(at, "refused", "127.0.0.1:9");
    let forbidden = "resourceclaims.resource.k8s.io is forbidden: User \"eve\" cannot list resource \"resourceclaims\" in \
                     API group \"resource.k8s.io\" in the namespace \"ml\"";
    kubeconfig(at, "forbidden", &api_server(403, "Forbidden", forbidden).to_string());
    kubeconfig(at, "unauthorized", &api_server(401, "Unauthorized", "Unauthorized").to_string());
    let absent = "resourceclaims.resource.k8s.io \"train\" not found";
    let other = "users \"eve\" is forbidden: User \"bob\" cannot impersonate resource \"users\" in API group \"\" at the \
                 cluster scope";
    kubeconfig(at, "no-impersonation", &api_server(403, "Forbidden", other).to_string());
    kubeconfig(at, "absent", &api_server(404, "NotFound", absent).to_string());
    folder
}

#[test]
fn every_mistake_is_told_in_the_words_of_yaml_and_kubectl() {
    let folder = folder();
    let mut wrong = Vec::new();
    for Case { line, input, code, words } in FILES.iter().chain(CLUSTER).chain(ARGUMENTS) {
        // Whatever is wrong with the file, there is a cluster to ask.
        let with_cluster = if line.starts_with("explain -f") { " --kubeconfig refused" } else { "" };
        let (seen, out, said) = run(folder.path(), &format!("{line}{with_cluster}"), input);
        let missing: Vec<&&str> = words.iter().filter(|words| !said.contains(**words)).collect();
        let rust =
            ["os error", "invalid type", "expected u", "expected struct", "Some(", "ServiceError", "kube::"];
        let rust: Vec<&&str> = rust.iter().filter(|word| said.contains(**word)).collect();
        let begins = said.starts_with("error: ") || said.starts_with("Error from server (");
        if seen != Some(*code) || !missing.is_empty() || !rust.is_empty() || !begins || !out.is_empty() {
            wrong.push(format!(
                "$ tranche {line}\n{out}{said}[exit {seen:?}, not {code}; lacks {missing:?}, has {rust:?}]"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn what_would_be_refused_is_told_with_the_path_of_the_field() {
    let folder = folder();
    let plan = |claim: &str| {
        fs::write(folder.path().join("one.yaml"), claim).unwrap();
        let (code, out, said) = run(folder.path(), "plan -f one.yaml --gpus gpus.json --node n", "");
        assert_eq!(code, Some(3), "{out}{said}");
        out
    };
    let at = "spec.devices.config[0].opaque.parameters";
    for (share, words) in [
        (
            "memory: 2000",
            format!("{at}.memory would be refused: 2000 bytes are less than 1 MiB; did you mean 2000Mi?\n"),
        ),
        (
            "memroy: 2Gi",
            format!("{at}.memroy would be refused: unknown field \"memroy\"; use apiVersion, kind, memory,"),
        ),
        ("maxProcesses: 1", format!("{at} would be refused: does not say how much of a GPU request \"gpu\"")),
        (
            "maxProcesses: 1",
            "(unless DeviceClass shared.gpu.nvidia.com says it; put the class into the file".to_owned(),
        ),
    ] {
        let out = plan(&CLAIM.replace("SHARE", share));
        assert!(out.contains(&words), "{share}:\n{out}");
    }
    let class = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: shared.gpu.nvidia.com}\nspec:\n  \
                 config:\n  - opaque:\n      driver: gpu.nvidia.com\n      parameters: {apiVersion: tranche.dev/v1alpha1, \
                 kind: GpuShare, memory: 1Gi}\n";
    let with_class = plan(&format!("{}{class}", CLAIM.replace("SHARE", "maxProcesses: 1")));
    assert!(!with_class.contains("would be refused"), "{with_class}");
    let without_amount = class.replace(", memory: 1Gi", "");
    let out = plan(&format!("{}{without_amount}", CLAIM.replace("SHARE", "maxProcesses: 1")));
    assert!(out.contains("does not say how much") && !out.contains("unless DeviceClass"), "{out}");
    let misspelt = plan(
        &CLAIM.replace("SHARE", "memory: 2Gi").replace("    config:", "    tolerations: [x]\n    config:"),
    );
    assert!(misspelt.contains("unknown field \"spec.devices.tolerations\": is it misspelt?"), "{misspelt}");
}

#[test]
fn an_administrators_own_class_for_whole_gpus_has_no_limit_of_memory_either() {
    const CLASS: &str = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: team-gpus}\nspec:\n  \
                         selectors:\n  - cel: {expression: \"device.driver == 'gpu.nvidia.com'\"}\n";
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/plan/given-whole");
    let plan = |text: &str| {
        let (code, out, said) = run(&case, "plan -f - --gpus gpus.json --node node-a", text);
        assert_eq!((code, said.as_str()), (Some(3), ""), "{out}");
        out
    };
    let text = |name: &str| fs::read_to_string(case.join(name)).unwrap();
    let of_team = |claim: &str| {
        let own = claim.replace("deviceClassName: gpu.nvidia.com", "deviceClassName: team-gpus");
        assert_ne!(own, claim);
        own
    };
    let refusal = |out: &str| {
        let line = out.lines().find(|line| line.contains("GpuShare.memory limits a share"));
        line.unwrap_or_else(|| panic!("it is not refused:\n{out}")).to_owned()
    };
    // Before it is allocated.
    let waiting = text("waiting.yaml");
    let shipped = refusal(&plan(&waiting));
    let own = refusal(&plan(&format!("{}{CLASS}", of_team(&waiting))));
    assert!(shipped.contains("request \"gpu\" of class gpu.nvidia.com is given whole"), "{shipped}");
    assert_eq!(own, shipped.replace("of class gpu.nvidia.com", "of class team-gpus"));
    // Of a class that nobody has read, it is not known whose it is.
    let unread = plan(&of_team(&waiting));
    assert!(!unread.contains("would be refused"), "{unread}");
    // And once it is.
    let allocated = text("claim.yaml");
    let shipped = plan(&allocated);
    assert!(refusal(&shipped).contains("device gpu-0 is given whole"), "{shipped}");
    assert_eq!(plan(&format!("{}{CLASS}", of_team(&allocated))), shipped);
}

#[test]
fn line_ends_of_windows_are_no_mistake() {
    let folder = folder();
    let (_, _, said) = run(folder.path(), "explain -f crlf.yaml --kubeconfig refused", "");
    assert!(said.contains("cannot be reached"), "{said}");
}

#[test]
fn json_and_yaml_say_the_same() {
    let folder = folder();
    let told = |line: &str| {
        let (_, out, said) = run(folder.path(), line, "");
        assert_eq!(said, "", "{line}");
        out
    };
    for line in [
        "plan -f claim.yaml --gpus gpus.json --node n",
        "version",
        "simulate --nodes nodes.csv --pods pods.csv --seeds 1 --policy pack",
    ] {
        fs::write(folder.path().join("nodes.csv"), "sn,cpu_milli,memory_mib,gpu,model\nn,64000,262144,4,B\n")
            .unwrap();
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,8000,8192,1,1000\nb,2000,4096,1,500\n";
        fs::write(folder.path().join("pods.csv"), pods).unwrap();
        let json: Value = serde_json::from_str(&told(&format!("{line} -o json"))).unwrap();
        let mut yaml: Value = serde_saphyr::from_str(&told(&format!("{line} -o yaml"))).unwrap();
        if line.starts_with("simulate") {
            // How long a decision took differs.
            for field in ["decisionP50Us", "decisionP99Us"] {
                assert!(json["policies"][0][field].is_number(), "{json}");
                yaml["policies"][0][field] = json["policies"][0][field].clone();
            }
        }
        assert_eq!(json, yaml, "{line}");
    }
    let version: Value = serde_json::from_str(&told("version -o json")).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_shipped_example_is_read() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/examples");
    let folder = folder();
    let mut planned = 0;
    for file in fs::read_dir(&examples).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&file).unwrap();
        if !text.contains("kind: ResourceClaim") {
            continue;
        }
        let line = format!("plan -f {} --gpus gpus.json --node n", file.display());
        let (code, out, said) = run(folder.path(), &line, "");
        assert_eq!(code, Some(3), "{line}: {out}{said}");
        assert!(!out.contains("would be refused") && !out.contains("unknown field"), "{line}: {out}");
        planned += 1;
    }
    assert!(planned > 3, "only {planned} examples have claims");
}

/// A cluster of two nodes, each with a GPU that is shared: node-a's plugin answers what is used, node-b's as the test says.
fn cluster(node_b: &'static str) -> (SocketAddr, Heads) {
    let slice = |node: &str| {
        json!({"metadata": {"name": node}, "spec": {"driver": "gpu.nvidia.com", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"},
                "productName": {"string": "NVIDIA T4"}, "isolation": {"string": "mps"},
                "grantableMemoryMiB": {"int": 16_000}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}}}]}})
    };
    let claim = |name: &str, node: &str| {
        json!({"metadata": {"name": name, "namespace": "ml"}, "spec": {}, "status": {
            "reservedFor": [{"resource": "pods", "name": name, "uid": "u"}],
            "allocation": {"devices": {"results": [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": node,
                "device": "gpu-0", "shareID": "s", "consumedCapacity": {"memory": "4000Mi", "compute": "25"}}]}}}})
    };
    let pod = |node: &str| {
        json!({"metadata": {"name": format!("plugin-{node}"), "namespace": "tranche-system"}, "spec": {
            "nodeName": node, "containers": [{"name": "node", "ports": [{"name": "ops", "containerPort": 8080}]}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})
    };
    let list = |items: Value| {
        json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}).to_string()
    };
    let row = |name: &str, value: &str| {
        format!(
            "tranche_claim_{name}{{namespace=\"ml\",pod=\"a\",container=\"\",claim=\"a\",request=\"gpu\",device=\"gpu-0\",\
             pool=\"node-a\",UUID=\"GPU-0\"}} {value}\n"
        )
    };
    let page = [row("memory_used_bytes", "1048576000"), row("multiprocessor_activity_ratio", "0.5")].concat();
    let proxy = "/api/v1/namespaces/tranche-system/pods/";
    let answers = [
        (
            "/apis/resource.k8s.io/v1/resourceslices".to_owned(),
            list(json!([slice("node-a"), slice("node-b")])),
        ),
        (
            "/apis/resource.k8s.io/v1/resourceclaims".to_owned(),
            list(json!([claim("a", "node-a"), claim("b", "node-b")])),
        ),
        (
            "/api/v1/namespaces".to_owned(),
            list(json!([{"metadata": {"name": "ml", "annotations": {"tranche.dev/max-share-gpus": "2"}}}])),
        ),
        (format!("{proxy}plugin-node-a:8080/proxy/metrics"), page),
        (format!("{proxy}plugin-node-b:8080/proxy/metrics"), node_b.to_owned()),
        ("/api/v1/namespaces/tranche-system/pods".to_owned(), list(json!([pod("node-a"), pod("node-b")]))),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let heads = Heads::default();
    let seen = heads.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let head = head_of(&mut stream);
            let path = head.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default();
            let body = answers.iter().find(|(known, _)| known == path).map_or("", |(_, body)| body.as_str());
            seen.lock().unwrap().push(head.clone());
            // A body that begins with a number is refused with this status.
            let code = body.get(..3).and_then(|code| code.parse::<u16>().ok()).unwrap_or(200);
            let body = if code == 200 { body } else { &body[3..] };
            let _ = write!(
                stream,
                "HTTP/1.1 {code} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    (address, heads)
}

/// All of it, however many pieces it comes in.
fn head_of(stream: &mut impl Read) -> String {
    let (mut head, mut piece) = (Vec::new(), [0; 8192]);
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut piece).unwrap_or(0) {
            0 => break,
            length => head.extend_from_slice(&piece[..length]),
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

/// The heads of all requests.
type Heads = Arc<Mutex<Vec<String>>>;

fn top(node_b: &'static str, line: &str) -> (String, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let (address, heads) = cluster(node_b);
    kubeconfig(folder.path(), "k", &address.to_string());
    let (code, out, said) = run(folder.path(), &format!("top --kubeconfig k {line}"), "");
    assert_eq!((code, said.as_str()), (Some(0), ""), "{out}");
    (out, heads.lock().unwrap().clone())
}

#[test]
fn top_reads_what_is_used_through_the_pod_proxy_and_says_what_it_may_not_read() {
    let refused = "403{\"kind\":\"Status\",\"status\":\"Failure\",\"code\":403,\"message\":\"pods \\\"x\\\" is forbidden: User \
                   \\\"eve\\\" cannot get resource \\\"pods/proxy\\\" in API group\"}";
    let (table, _) = top(refused, "-o table");
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows[1],
        ["node-a", "gpu-0", "ml", "a", "a", "4000", "25%", "1000", "-", "50%", "-"],
        "{table}"
    );
    assert_eq!(rows[2], ["node-b", "gpu-0", "ml", "b", "b", "4000", "25%", "-", "-", "-", "-"], "{table}");
    // Nothing was granted by the controller.
    assert!(table.contains("\n\nnamespace ml: shares of 0 MiB on 0 of 2 GPUs\n"), "{table}");
    let lack = "\n\nwhat is used on node-b is not known: you may not get pods/proxy in namespace tranche-system; ask for \
                Role tranche-use-viewer (kubectl -n tranche-system create rolebinding tranche-use-viewer --role \
                tranche-use-viewer --user NAME)\n";
    assert!(table.ends_with(lack), "{table}");
    let (map, heads) = top(refused, "");
    assert!(
        map.contains(
            "A ml/a                                     4000 MiB, 25 %   1000 MiB used, 50 % active\n"
        ),
        "{map}"
    );
    assert!(map.contains("A ml/b                                     4000 MiB, 25 %\n"), "{map}");
    assert!(map.ends_with(lack) && !map.contains('\u{1b}'), "no terminal, no colours: {map}");
    let asked = heads.iter().find(|head| head.contains("/pods?")).expect("it looked for the plugins");
    assert!(asked.contains("fieldSelector=spec.serviceAccountName%3Dtranche-node"), "{asked}");
    let (json, _) = top(refused, "-o json");
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["nodes"][0]["devices"][0]["claims"][0]["use"][0]["memoryUsedMiB"], 1000);
    assert_eq!(json["lacks"].as_array().map(Vec::len), Some(1), "{json}");
    assert_eq!(
        (&json["namespaces"][0]["name"], &json["namespaces"][0]["maxGpus"]),
        (&json!("ml"), &json!(2))
    );
    let (yaml, _) = top(refused, "-o yaml");
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), json);
}

#[test]
fn several_kubeconfigs_are_taken_as_kubectl_takes_them() {
    let folder = tempfile::tempdir().unwrap();
    let (address, heads) = cluster("");
    kubeconfig(folder.path(), "k", &address.to_string());
    let line = "top --once --use=false -o json";
    let (code, out, said) = run_with(folder.path(), &[("KUBECONFIG", "missing:k")], line, "");
    assert_eq!((code, said.as_str()), (Some(0), ""), "{out}");
    let map: Value = serde_json::from_str(&out).unwrap();
    let names: Vec<&str> =
        map["nodes"].as_array().unwrap().iter().filter_map(|node| node["name"].as_str()).collect();
    assert_eq!(names, ["node-a", "node-b"]);
    // The first file that names a thing counts.
    let before = heads.lock().unwrap().len();
    kubeconfig(folder.path(), "other", "127.0.0.1:1");
    let (code, ..) = run_with(folder.path(), &[("KUBECONFIG", "other:k")], line, "");
    assert_eq!((code, heads.lock().unwrap().len()), (Some(1), before));
    let (code, ..) = run_with(folder.path(), &[("KUBECONFIG", "k:other")], line, "");
    assert_eq!(code, Some(0));
    // None of them is there.
    let (code, _, said) = run_with(folder.path(), &[("KUBECONFIG", "missing:gone")], line, "");
    let words = "error: kubeconfig missing:gone cannot be used: ";
    assert!(code == Some(2) && said.starts_with(words), "{code:?}: {said}");
}

#[test]
fn top_of_a_node_without_gpus_fails_and_names_those_that_have_some() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _) = cluster("");
    kubeconfig(folder.path(), "k", &address.to_string());
    let (code, out, said) = run(folder.path(), "top --kubeconfig k --node nope", "");
    assert_eq!((code, out.as_str()), (Some(1), ""), "{said}");
    let words = "error: no GPUs are published for node nope; nodes that have some: node-a, node-b\n";
    assert_eq!(said, words);
}

/// A request without a body may come in parts.
fn read_head(stream: &mut impl Read) {
    let (mut head, mut part) = (Vec::new(), [0; 4096]);
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut part) {
            Ok(0) | Err(_) => break,
            Ok(read) => head.extend_from_slice(&part[..read]),
        }
    }
}

/// A process that tells this state on a socket, to everybody who asks.
fn tells(socket: &Path, state: String) {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            read_head(&mut stream);
            let length = state.len();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n\
                 {state}"
            );
        }
    });
}

#[test]
fn the_state_of_a_process_is_the_same_as_json_and_as_yaml() {
    let folder = tempfile::tempdir().unwrap();
    let state = json!({"node": {"name": "node-a", "version": "0.1.0"}, "kubelet": {"registration": "Registered"},
        "inventory": "Unknown", "mps": [], "toolkit": {"missing": "/opt/toolkit has no hook"}, "more": {"kept": [1, null]}});
    tells(&folder.path().join("s.sock"), state.to_string());
    let told = |line: &str| {
        let (code, out, said) = run(folder.path(), &format!("inspect --socket s.sock {line}"), "");
        assert_eq!((code, said.as_str()), (Some(0), ""), "{line}: {out}");
        out
    };
    assert_eq!(serde_json::from_str::<Value>(&told("-o json")).unwrap(), state);
    assert_eq!(serde_saphyr::from_str::<Value>(&told("-o yaml")).unwrap(), state);
    assert!(told("").contains("\n/opt/toolkit has no hook.\n"));
}

#[test]
fn top_goes_on_whatever_a_node_answers() {
    let (map, _) = top("502<html>bad gateway</html>", "");
    assert!(
        map.contains("what is used on node-b is not known: status 502: <html>bad gateway</html>\n"),
        "{map}"
    );
    let (map, _) = top("# nothing\n", "");
    let silent = "what is used on node-b is not measured: watchdog.action is off, or it has just begun\n";
    assert!(map.contains("4000 MiB, 25 %   used: -\n") && map.ends_with(silent), "{map}");
    let (map, heads) = top("", "--use=false");
    assert!(!map.contains("used") && !heads.iter().any(|head| head.contains("/pods")), "{map}");
}

#[test]
fn a_page_without_an_end_is_cut_and_told() {
    static LONG: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| "# x\n".repeat(2 << 20));
    let (map, _) = top(LONG.as_str(), "");
    assert!(
        map.contains("what is used on node-b is not known: its metrics have more than 4 MiB; the rest"),
        "{map}"
    );
}

#[test]
fn every_tool_that_asks_the_cluster_asks_as_somebody_else_where_that_is_said() {
    for line in ["top", "explain ml/a", "plan -f ml/a --node node-a"] {
        let folder = tempfile::tempdir().unwrap();
        let (address, heads) = cluster("");
        kubeconfig(folder.path(), "k", &address.to_string());
        let whole = format!("{line} --kubeconfig k --as eve --as-group ml --as-group dev --as-uid 7");
        let (_, out, said) = run(folder.path(), &whole, "");
        let heads = heads.lock().unwrap();
        assert!(!heads.is_empty(), "{line}: {out}{said}");
        for head in heads.iter().map(|head| head.to_lowercase()) {
            for header in [
                "impersonate-user: eve",
                "impersonate-group: ml",
                "impersonate-group: dev",
                "impersonate-uid: 7",
            ] {
                assert!(head.contains(&format!("\r\n{header}\r\n")), "{line}: no {header} in\n{head}");
            }
        }
    }
}

#[test]
fn every_tool_that_asks_a_cluster_asks_that_of_the_context_that_is_named() {
    for line in ["top", "explain ml/a", "plan -f ml/a --node node-a"] {
        let folder = tempfile::tempdir().unwrap();
        let ((here, asked_here), (there, asked_there)) = (cluster(""), cluster(""));
        let text = format!(
            "{}clusters: [{{name: c, cluster: {{server: 'http://{here}'}}}}, {{name: d, cluster: {{server: 'http://{there}'}}}}]\n\
             users: [{{name: u, user: {{}}}}]\n",
            &KUBECONFIG[..KUBECONFIG.find("clusters:").unwrap()]
        );
        fs::write(folder.path().join("k"), text).unwrap();
        let counts = || [&asked_here, &asked_there].map(|heads| heads.lock().unwrap().len());
        let (_, out, said) = run(folder.path(), &format!("{line} --kubeconfig k --context there"), "");
        let [here, there] = counts();
        assert!(here == 0 && there > 0, "{line}: {here} and {there} requests\n{out}{said}");
        // The current one, if none is named.
        let (_, out, said) = run(folder.path(), &format!("{line} --kubeconfig k"), "");
        assert!(counts()[0] > 0 && counts()[1] == there, "{line}: {:?}\n{out}{said}", counts());
    }
}
