//! The ledger, /proc, MPS daemons, sockets, and files of people.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use tranche::cdi::CdiNodes;
use tranche::cli::simulate::profiles::Profiles;
use tranche::cli::simulate::trace;
use tranche::cli::top::used::Uses;
use tranche::cli::{manifest, reading};
use tranche::daemon::protocol;
use tranche::host::cgroup::{self, ProcessOwner};
use tranche::host::device_nodes::{DevRoot, look};
use tranche::host::driver_root::RootView;
use tranche::host::{LocalProcesses, PidNamespace, Processes, boot};
use tranche::ledger;
use tranche::model::quantity::Bytes;
use tranche::model::share::{MpsLimits, Percent};
use tranche::supervisor;

use super::texts;
use crate::driver::meter::ready;
use crate::driver::{Form, Limits, Target};

const READY: &[u8] = include_bytes!("../../data/ledger/v1-ready.rec");
const SHARE: &[u8] = include_bytes!("../../data/ledger/v1-controllers-share.rec");

pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "ledger",
            seeds: || vec![READY.to_vec(), SHARE.to_vec()],
            words: &[
                "\n",
                "{\"Applied\":1}",
                "\"Ready\"",
                "\"Releasing\"",
                "\"version\":1",
                "18446744073709551615",
                "Mps",
            ],
            form: Form::Text,
            limits: Limits { length: 8 << 10, bytes: 1 << 20, ..Limits::PARSER },
            run: record,
        },
        Target {
            name: "proc",
            seeds: || {
                texts(&[
                    "stat\n1 (a) b) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9 0 0",
                    "cgroup\n0::/kubepods/burstable/pod0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9/8d3f0a6f0b5c",
                    "devices\nCharacter devices:\n195 nvidia\n195 nvidiactl\n235 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n8 sd",
                    "boot_id\n6f1c0f2e-8d0a-4d1a-9d59-1f2b3c4d5e6f\n",
                    "mig-minors\nconfig 1\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13",
                    "maps\n204a00000-204c00000 rw-s 204a00000 00:06 144                        /dev/nvidia-uvm\n\
                     7f0000000000-7f0040000000 rw-s 00000000 00:06 145                     /tmp/a b (deleted)\n\
                     7ffd1000-7ffd2000 rw-p 00000000 00:00 0                          [stack]\n",
                ])
            },
            words: &[
                ")",
                "(",
                " ",
                "\n",
                "nvidia",
                "195 ",
                "4294967295 ",
                "Z",
                "-",
                "gpu0/gi1/access",
                "DeviceFileMinor: ",
                " rw-s ",
                "-ffffffffffffffff ",
                " /dev/nvidia-uvm\n",
            ],
            form: Form::Text,
            limits: Limits { millis: 1000, ..Limits::PARSER },
            run: files_of_proc,
        },
        Target {
            name: "metrics-page",
            seeds: || {
                texts(&[
                    "tranche_claim_memory_used_bytes{namespace=\"ml\",pod=\"a\",container=\"\",claim=\"c\",request=\"gpu\",\
                         device=\"gpu-0\",pool=\"node-a\",UUID=\"GPU-0\"} 1048576\n",
                ])
            },
            words: &[
                "tranche_claim_",
                "multiprocessor_activity_ratio",
                "gpu_processes",
                "{",
                "}",
                "=\"",
                "\",",
                "\\\"",
                "\\n",
                "pool=\"node-a\"",
                "} 1e308",
                "} NaN",
                "\n",
            ],
            form: Form::Text,
            limits: Limits { per_byte: 200, ..Limits::PARSER },
            run: metrics_page,
        },
        Target {
            name: "cgroup",
            seeds: || {
                texts(&[
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9.slice/cri-containerd-8d3f0a6f0b5c4f7d.scope",
                    "0::/kubepods/pod0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9/8d3f0a6f0b5c4f7d/init.scope",
                    "11:memory:/system.slice/containerd.service/kubepods-burstable-pod0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9.slice:cri-containerd:8d3f0a6f0b5c4f7d",
                ])
            },
            words: &[":", "/", "-pod", ".slice", ".scope", "pod", "kubepods", "..", "\n", "_", "é"],
            form: Form::Text,
            limits: Limits::PARSER,
            run: whose,
        },
        Target {
            name: "mps-words",
            seeds: || {
                texts(&[
                    "1G\n50.0\n2000M\n50.0\n4711\n4712\n50.0\n",
                    "ACTIVE\n1G\n50.0\n50.0",
                    "50.0",
                    "Cannot find MPS control daemon process\n",
                    "Failed to set\n100.0",
                ])
            },
            words: &[
                "\n",
                "G",
                "M",
                "K",
                "B",
                "100.0",
                "NaN",
                "inf",
                "-1",
                "4294967296",
                "ACTIVE",
                "IDLE",
                "Invalid ",
            ],
            form: Form::Text,
            limits: Limits::PARSER,
            run: daemon,
        },
        Target {
            name: "supervisor",
            seeds: || {
                texts(&[
                    r#"{"version":1,"ask":{"Keep":{"group":["GPU-1"],"exclusive":true,"limits":{"memory":[1073741824,null],"compute":50}}}}"#,
                    r#"{"version":1,"ask":"States"}"#,
                    r#"{"version":1,"ask":{"Terminate":{"group":["GPU-1"],"client":{"server":1,"pid":2}}}}"#,
                    r#"{"version":1,"say":{"States":[{"group":["GPU-1"],"exclusive":true,"phase":{"Serving":{"pid":1}},"limits":null,"memory_answers":["1G"],"compute_answer":"50.0","deaths":0,"servers":[{"pid":1,"state":"ACTIVE"}]}]}}"#,
                    r#"{"version":2,"say":"Done"}"#,
                ])
            },
            words: &[
                "version", "ask", "say", "Keep", "Rest", "Clients", "Refused", "Down", "reason", "../..",
                "group",
            ],
            form: Form::Json,
            limits: Limits { bytes: 1 << 20, ..Limits::PARSER },
            run: lines,
        },
        Target {
            name: "trace",
            seeds: || {
                texts(&[
                    "sn,cpu_milli,memory_mib,gpu,model\nn1,96000,786432,8,A100\nn2,64000,262144,0,\n",
                    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np1,4000,8192,1,460,V100|T4\np2,100,1,8,1000,\n",
                    "sn,cpu_milli,memory_mib,gpu,model,mig_gpus\nn1,96000,786432,8,A100,2\n",
                    "model,profile,compute_slices,memory_mib,memory_slices,fit,starts\nA100,1g.10gb,1,9728,1,7,0|1|2\n",
                ])
            },
            words: &[",", "\n", "sn", "gpu_milli", "num_gpu", "64", "65", "1000", "999", "|", "\r\n"],
            form: Form::Text,
            limits: Limits { bytes: 4 << 20, per_byte: 1000, ..Limits::PARSER },
            run: tables,
        },
        Target {
            name: "manifest",
            seeds: || {
                let yaml = include_str!("../../data/plan/mig/claim.yaml");
                texts(&[
                    yaml,
                    "a: &a [1, 2]\nb: [*a, *a, *a]\nc: &b {x: *a}\n",
                    "a: !!str Off\nb: |\n  text\n---\n",
                ])
            },
            words: &[
                "&a ", "*a", "[", "]", "{", "}", ": ", "\n  ", "- ", "|", ">", "<<: *a", "!!", "---", "...",
                "? ", "'",
            ],
            form: Form::Text,
            limits: Limits { millis: 2000, bytes: 16 << 20, per_byte: 2000, ..Limits::PARSER },
            run: yaml,
        },
    ]
}

/// As it stands; and as lines to which their checksums are added, so that more than checksums is tried.
fn record(input: &[u8]) {
    known(input);
    let mut sealed = Vec::new();
    for line in input.split_inclusive(|byte| *byte == b'\n') {
        let (line, end) = line.strip_suffix(b"\n").map_or((line, &b""[..]), |line| (line, b"\n"));
        let json = line.get(9..).filter(|_| line[8] == b' ').unwrap_or(line);
        sealed.extend(format!("{:08x} ", crc32fast::hash(json)).into_bytes());
        sealed.extend([json, end].concat());
    }
    known(&sealed);
}

fn known(bytes: &[u8]) {
    let decoded = match ledger::decode(bytes) {
        Ok(decoded) => decoded,
        Err(damage) => return drop(damage.to_string()),
    };
    assert!(decoded.valid_len <= bytes.len());
    let record = decoded.record;
    let _ = (record.gpus(), record.answer(), record.undo().count(), record.cdi_file());
    let again = ledger::decode(&ledger::encode_intent(&record.intent).unwrap()).unwrap().record.intent;
    assert_eq!(again, record.intent, "an intent is read as it is written");
    let _ = ledger::audit([&record, &record]);
}

thread_local! {
    static ROOT: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

/// The first line names the file, the rest is what it says.
fn files_of_proc(input: &[u8]) {
    let root =
        ROOT.with_borrow_mut(|dir| dir.get_or_insert_with(|| tempfile::tempdir().unwrap()).path().to_owned());
    let (file, content) = match input.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &[][..]),
    };
    let path = match file {
        b"stat" => "7/stat",
        b"cgroup" => "7/cgroup",
        b"maps" => "7/maps",
        b"devices" => "devices",
        b"mig-minors" => "driver/nvidia-caps/mig-minors",
        b"access" => "driver/nvidia/capabilities/gpu0/mig/gi1/access",
        _ => "boot_id",
    };
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    if path.ends_with("maps") {
        // So that mappings of other files are looked at, too.
        fs::write(root.join("devices"), "Character devices:\n511 nvidia-uvm\n").unwrap();
    }
    ready();
    let processes = LocalProcesses { root: root.clone(), nvml_pids: PidNamespace::Own };
    let _ = (
        processes.started(7),
        processes.owner(7),
        processes.uses_gpu(7),
        processes.managed_memory(7),
        boot::boot_id(&root.join("boot_id")),
    );
    let view = RootView::new(root.join("empty"), "/");
    let nodes = CdiNodes::Mig { parent_minor: 0, gpu_instance: 1, compute_instance: 0 };
    let _ = look(&DevRoot { view, proc: root.clone() }, &[nodes]).map_err(|error| error.to_string());
    fs::remove_file(PathBuf::from(&path)).unwrap();
    _ = fs::remove_file(root.join("devices"));
}

/// What a node plugin, or whoever answers in its place, tells `tranche top`.
fn metrics_page(input: &[u8]) {
    let page = String::from_utf8_lossy(input);
    let mut uses = Uses::default();
    let known = uses.read("node-a", &page);
    assert_eq!(known, uses != Uses::default());
    assert!(page.contains("tranche_claim_") || !known, "{page:?}");
}

fn whose(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let ProcessOwner::Pod { pod, container } = cgroup::owner(&text) else { return };
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    assert!(plain(pod.as_str()) && container.is_none_or(|id| plain(&id)), "{pod} is no UID");
}

fn daemon(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let _ = (
        protocol::complete_answer(&text),
        protocol::complaint(&text),
        protocol::pids(&text),
        protocol::is_not_found(&text),
    );
    let limits = MpsLimits { memory: vec![Some(Bytes(1 << 30)); 2], compute: Percent::try_from(50_u8).ok() };
    for devices in [0, 1, 2] {
        if let Some((answers, _)) = protocol::defaults(&text, devices) {
            let _ = protocol::fit(&limits, &answers);
        }
        if let Some((_, answers)) = protocol::server(&text, devices) {
            let _ = protocol::fit_server(&limits, &answers);
        }
    }
    let _ = (protocol::memory_fits(Some(Bytes(1 << 30)), &text), protocol::compute_fits(None, &text));
}

fn lines(input: &[u8]) {
    if let Ok(request) = supervisor::protocol::parse_request(input) {
        let question =
            supervisor::protocol::RequestMessage { version: supervisor::protocol::VERSION, request };
        let again = supervisor::protocol::parse_request(&serde_json::to_vec(&question).unwrap());
        assert_eq!(again, Ok(question.request), "a question is read as it is written");
    }
    let _ = supervisor::protocol::parse_response(input).map_err(|error| error.to_string());
}

fn tables(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let profiles =
        Profiles::read("profiles.csv", &text).map_err(|error| error.to_string()).unwrap_or_default();
    let _ = trace::nodes("nodes.csv", &text, &profiles).map_err(|error| error.to_string());
    let _ = trace::pods("pods.csv", &text).map(|pods| pods.iter().map(trace::TracePod::milli).max());
}

fn yaml(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(documents) = reading::documents(text, "claim.yaml") else { return };
    let _ = manifest::classes(&documents).map_err(|error| error.to_string());
    for document in documents {
        let _ = (document.kind(), document.named());
        let Ok(manifest) = manifest::Manifest::new(document) else { continue };
        let _ = (manifest.allocated(), manifest.asked(), manifest.pool(), manifest.foreign());
        let _ = (manifest.problems(), manifest.unknown_fields());
    }
}
