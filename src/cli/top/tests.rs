use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::bounds::bounds;
use super::draw::{PictureStyle, cut, table};
use super::map::{Map, map};
use super::used::Uses;

/// As it is printed into a file, 82 columns wide.
fn draw(map: &Map, width: usize) -> String {
    super::draw::draw(map, PictureStyle { width, reverse: false })
}

fn device(name: &str, grantable: Option<i64>) -> Value {
    let mut device = json!({"name": name, "attributes": {
        "type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "uuid": {"string": format!("GPU-{name}")}, "isolation": {"string": "mps"}}});
    if let Some(mib) = grantable {
        device["attributes"]["grantableMemoryMiB"] = json!({"int": mib});
        device["attributes"]["shareSlots"] = json!({"int": 16});
        device["attributes"]["processesPerSlot"] = json!({"int": 3});
    }
    device
}

fn slice(node: &str, devices: Value) -> Value {
    json!({"metadata": {"name": format!("{node}-gpu.nvidia.com")}, "spec": {
        "driver": "gpu.nvidia.com", "nodeName": node, "devices": devices,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}})
}

fn claim(name: &str, result: Value, config: Value) -> Value {
    let mut result = result;
    result["request"] = json!("gpu");
    result["driver"] = json!("gpu.nvidia.com");
    json!({"metadata": {"namespace": "team", "name": name}, "spec": {}, "status": {
        "reservedFor": [{"resource": "pods", "name": format!("{name}-pod"), "uid": "u"}],
        "allocation": {"devices": {"results": [result], "config": config}}}})
}

fn seen() -> Map {
    map(&serde_json::from_value::<Vec<_>>(slices_seen()).unwrap(), &claims_seen())
}

fn slices_seen() -> Value {
    let all = json!([device("gpu-0", Some(80_000)), device("gpu-1", Some(80_000)), device("gpu-2", None)]);
    // No GPUs of anybody's: what queues count shares by.
    let mut mirror = slice("mirror.tranche.dev/1", json!([device("share-0", None)]));
    mirror["spec"].as_object_mut().unwrap().remove("nodeName");
    mirror["spec"]["nodeSelector"] = json!({"nodeSelectorTerms": []});
    json!([slice("node-b", json!([device("gpu-0", Some(40_000))])), mirror, slice("node-a", all)])
}

fn claims_seen() -> Vec<ResourceClaim> {
    let by_scheduler = json!({"pool": "node-a", "device": "gpu-0", "shareID": "s",
        "consumedCapacity": {"memory": "20000Mi", "compute": "25", "shares": "1"}});
    let grant = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
        {"device": "gpu-1", "gpu": "GPU-gpu-1", "memory": "2000Mi", "slots": 1, "isolation": "mps"}]});
    let entry = |source: &str| {
        json!([{"source": source, "requests": ["gpu"],
                "opaque": {"driver": "gpu.nvidia.com", "parameters": grant}}])
    };
    let mut hold = claim("hold", json!({"pool": "node-a", "device": "gpu-1"}), json!([]));
    hold["metadata"]["labels"] = json!({"tranche.dev/hold": "true"});
    let claims = json!([
        claim("small", by_scheduler, json!([])),
        claim("placed", json!({"pool": "node-a", "device": "gpu-1"}), entry("FromClass")),
        claim("whole", json!({"pool": "node-b", "device": "gpu-0"}), entry("FromClaim")),
        hold,
        json!({"metadata": {"namespace": "team", "name": "waiting"}, "spec": {}}),
    ]);
    serde_json::from_value(claims).unwrap()
}

#[test]
fn each_gpu_has_its_bar_and_each_share_its_line() {
    let text = draw(&seen(), 82);
    let expected = "\
2 nodes, 4 devices: 1 free, 138000 MiB left in shares, 78000 MiB at most on one GPU

node-a: 3 devices, 0 whole, 2 in shares, 1 free
  gpu-0                  [AAAAA...............] 20000 of 80000 MiB
    A team/small-pod (claim small)             20000 MiB, 25 %
  gpu-1                  [A...................] 2000 of 80000 MiB   held
    A team/placed-pod (claim placed)           2000 MiB
  gpu-2                  [....................] free

node-b: 1 device, 1 whole, 0 in shares, 0 free
  gpu-0                  [####################] team/whole-pod (claim whole)
";
    assert_eq!(text, expected);
}

#[test]
fn bounds_of_namespaces_stand_beside_what_their_shares_come_to() {
    let namespace =
        |name: &str, annotations: Value| json!({"metadata": {"name": name, "annotations": annotations}});
    let namespaces = json!([
        namespace("unbound", json!({"other": "1"})),
        namespace("team", json!({"tranche.dev/max-share-memory": "64Gi", "tranche.dev/max-share-gpus": "4"})),
        namespace("odd", json!({"tranche.dev/max-share-memory": "lots\u{1b}[2J"})),
        namespace("idle", json!({"tranche.dev/max-share-gpus": "2"})),
    ]);
    let namespaces = serde_json::from_value::<Vec<_>>(namespaces).unwrap();
    let mut seen = seen();
    seen.namespaces = bounds(&namespaces, &claims_seen());
    let expected = "
namespace idle: shares of 0 MiB on 0 of 2 GPUs
namespace odd: shares of 0 MiB on 0 GPUs; no more is placed: its annotation tranche.dev/max-share-memory is \
\"lots\\u{1b}[2J\", which is no amount of memory; write one such as 64Gi
namespace team: shares of 2000 of 65536 MiB on 1 of 4 GPUs
";
    // What kube-scheduler gave, what a claim's author says of his grant, and holds do not count.
    for text in [draw(&seen, 82), table(&seen)] {
        assert!(text.ends_with(expected), "{text}");
    }
    let json = serde_json::to_value(&seen).unwrap();
    let team = json!({"name": "team", "usedMiB": 2000, "usedGpus": 1, "maxMiB": 65_536, "maxGpus": 4});
    assert_eq!(json["namespaces"][2], team);
    assert_eq!(
        (&json["namespaces"][0]["maxMiB"], &json["namespaces"][0]["maxGpus"]),
        (&Value::Null, &json!(2))
    );
    seen.keep_only("team");
    assert_eq!(seen.namespaces.len(), 1);
}

#[test]
fn a_gpu_that_is_cut_shows_its_memory_slices() {
    let board = |name: &str, foreign: &str| {
        json!({"name": name, "consumesCounters": [{"counterSet": "s", "counters": {"memory-slice-0": {"value": "1"}}}],
            "attributes": {"type": {"string": "mig-parent"}, "uuid": {"string": format!("GPU-{name}")},
            "isolation": {"string": "mig"}, "migInstances": {"string": foreign},
            "migProfile0": {"string": "7g.80gb 7/1 81152 132 8@0"},
            "migProfile9": {"string": "3g.40gb 3/2 40448 60 4@0,4"},
            "migProfile19": {"string": "1g.10gb 1/7 9984 16 1@0,1,2,3,4,5,6"}}})
    };
    let part = |name: &str| {
        json!({"name": name, "attributes": {"type": {"string": "mig"}},
            "consumesCounters": [{"counterSet": "s", "counters": {"memory-slice-0": {"value": "1"}}}]})
    };
    let devices = json!([
        board("gpu-0", "19:1@1"),
        board("gpu-1", "19:1@0"),
        part("gpu-0-mig-3g40gb-9-4"),
        part("gpu-1-mig-3g40gb-9-4"),
        part("gpu-1-mig-1g10gb-19-1")
    ]);
    let grant = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": [
        {"device": "gpu-0", "gpu": "GPU-gpu-0", "memory": "40448Mi", "slots": 1, "isolation": "mig",
         "mig": {"profile": 9, "start": 4, "size": 4}}]});
    let config = json!([{"source": "FromClass", "requests": ["gpu"],
        "opaque": {"driver": "gpu.nvidia.com", "parameters": grant}}]);
    let claims = json!([
        claim("ours", json!({"pool": "node-a/shares", "device": "gpu-0"}), config),
        claim("theirs", json!({"pool": "node-a", "device": "gpu-1-mig-3g40gb-9-4"}), json!([])),
    ]);
    let map = map(
        &serde_json::from_value::<Vec<_>>(json!([slice("node-a", devices)])).unwrap(),
        &serde_json::from_value::<Vec<_>>(claims).unwrap(),
    );
    let expected = "\
1 node, 3 devices: 0 free, 0 MiB left in shares, 0 MiB at most on one GPU

node-a: 3 devices, 1 whole, 0 in shares, 2 cut, 0 free
  gpu-0                  [...--.....AAAAAAAAAA] MIG, largest free 1g.10gb (9984 MiB)
    A team/ours-pod (claim ours)               40448 MiB, MIG 3g.40gb
  gpu-1                  [---.................] MIG, cut by kube-scheduler
  gpu-1-mig-3g40gb-9-4   [####################] team/theirs-pod (claim theirs)
";
    assert_eq!(draw(&map, 82), expected);
    let whole: Value = serde_json::to_value(&map).unwrap();
    assert_eq!(whole["nodes"][0]["devices"][0]["cut"]["largestMiB"], 9984);
    assert_eq!(whole["nodes"][0]["devices"][0]["claims"][0]["part"]["mig"]["profile"], 9);
}

#[test]
fn a_whole_gpu_that_kube_scheduler_counts_as_a_share_is_a_whole_gpu() {
    let of = |memory: &str, compute: &str| {
        let result = json!({"pool": "node-a", "device": "gpu-0", "shareID": "s",
            "consumedCapacity": {"memory": memory, "compute": compute, "shares": "1"}});
        let slices = json!([slice("node-a", json!([device("gpu-0", Some(80_000))]))]);
        let claims = json!([claim("c", result, json!([]))]);
        let map = map(
            &serde_json::from_value::<Vec<_>>(slices).unwrap(),
            &serde_json::from_value::<Vec<_>>(claims).unwrap(),
        );
        draw(&map, 82)
    };
    let whole = of("80000Mi", "0");
    assert!(whole.contains("node-a: 1 device, 1 whole, 0 in shares, 0 free"), "{whole}");
    assert!(whole.contains("[####################] team/c-pod"), "{whole}");
    assert!(of("80000Mi", "50").contains("0 whole, 1 in shares"));
    assert!(of("79999Mi", "0").contains("0 whole, 1 in shares"));
}

#[test]
fn gpus_of_a_claim_with_shares_of_several_are_closed_to_others() {
    let part = |device: &str| {
        json!({"pool": "node-a", "device": device, "shareID": "s", "request": "gpu", "driver": "gpu.nvidia.com",
            "consumedCapacity": {"memory": "20000Mi", "compute": "0", "shares": "1"}})
    };
    let mut both = claim("both", part("gpu-0"), json!([]));
    both["status"]["allocation"]["devices"]["results"] = json!([part("gpu-0"), part("gpu-1")]);
    let claims = json!([both, claim("one", part("gpu-2"), json!([]))]);
    let mut gpus: Vec<Value> = ["gpu-0", "gpu-1", "gpu-2"].map(|name| device(name, Some(80_000))).to_vec();
    let slices = json!([slice("node-a", json!(gpus))]);
    let map = map(
        &serde_json::from_value::<Vec<_>>(slices).unwrap(),
        &serde_json::from_value::<Vec<_>>(claims.clone()).unwrap(),
    );
    let closed: Vec<bool> = map.nodes[0].devices.iter().map(|row| row.closed).collect();
    assert_eq!(closed, [true, true, false]);
    let text = draw(&map, 82);
    assert!(
        text.starts_with("1 node, 3 devices: 0 free, 60000 MiB left in shares, 60000 MiB at most"),
        "{text}"
    );
    assert_eq!(text.matches("20000 of 80000 MiB   closed to other claims\n").count(), 2, "{text}");
    // Not where each share has a daemon of its own.
    for gpu in &mut gpus {
        gpu["attributes"]["mpsDaemon"] = json!({"string": "share"});
    }
    let slices = json!([slice("node-a", json!(gpus))]);
    let map = self::map(
        &serde_json::from_value::<Vec<_>>(slices).unwrap(),
        &serde_json::from_value::<Vec<_>>(claims).unwrap(),
    );
    assert!(map.nodes[0].devices.iter().all(|row| !row.closed));
}

/// A line of a page of metrics about node-a.
fn used(name: &str, device: &str, claim: &str, pod: &str, value: &str) -> String {
    format!(
        "tranche_claim_{name}{{namespace=\"team\",pod=\"{pod}\",container=\"\",claim=\"{claim}\",request=\"gpu\",\
         device=\"{device}\",pool=\"node-a\",UUID=\"GPU-x\"}} {value}\n"
    )
}

/// node-a answers, node-b does not.
fn seen_with_use() -> Map {
    let mib = |mib: u64| (mib << 20).to_string();
    let page = [
        used("memory_used_bytes", "gpu-0", "small", "small-pod", &mib(8_000)),
        used("memory_peak_bytes", "gpu-0", "small", "small-pod", &mib(9_000)),
        used("multiprocessor_activity_ratio", "gpu-0", "small", "small-pod", "0.4"),
        used("gpu_processes", "gpu-0", "small", "small-pod", "2"),
        used("memory_used_bytes", "gpu-1", "placed", "placed-pod", &mib(100)),
        used("memory_used_bytes", "gpu-1", "placed", "another", &mib(300)),
    ];
    let (mut map, mut uses) = (seen(), Uses::default());
    assert!(uses.read("node-a", &page.concat()));
    uses.put_on(&mut map, |node| node == "node-a");
    map.lacks.push("what is used on node-b is not known: no answer within 5 s".to_owned());
    map
}

#[test]
fn what_is_used_stands_beside_what_was_granted() {
    let text = draw(&seen_with_use(), 82);
    let expected = "\
2 nodes, 4 devices: 1 free, 138000 MiB left in shares, 78000 MiB at most on one GPU

node-a: 3 devices, 0 whole, 2 in shares, 1 free
  gpu-0                  [AAAAA...............] 20000 of 80000 MiB
    A team/small-pod (claim small)             20000 MiB, 25 %   8000 MiB used, 40 % active
  gpu-1                  [A...................] 2000 of 80000 MiB   held
    A team/placed-pod (claim placed)           2000 MiB   400 MiB used
        team/another                         300 MiB used
        team/placed-pod                      100 MiB used
  gpu-2                  [....................] free

node-b: 1 device, 1 whole, 0 in shares, 0 free
  gpu-0                  [####################] team/whole-pod (claim whole)

what is used on node-b is not known: no answer within 5 s
";
    assert_eq!(text, expected);
}

#[test]
fn on_a_terminal_the_used_part_of_a_share_is_set_off_within_it() {
    let text = super::draw::draw(&seen_with_use(), PictureStyle { width: 82, reverse: true });
    assert!(text.contains("[\x1b[7mAA\x1b[27mAAA...............]"), "{text:?}");
    assert!(text.contains("[\x1b[7mA\x1b[27m...................]"), "a little is seen, too: {text:?}");
    assert!(text.contains("[####################] team/whole-pod"), "of node-b nothing is known: {text:?}");
    let mut whole = seen();
    let mut uses = Uses::default();
    let page = used("memory_used_bytes", "gpu-0", "whole", "whole-pod", &(20_000_u64 << 20).to_string());
    let limit = used("memory_limit_bytes", "gpu-0", "whole", "whole-pod", &(40_000_u64 << 20).to_string());
    uses.read("node-b", &format!("{page}{limit}").replace("node-a", "node-b"));
    uses.put_on(&mut whole, |node| node == "node-b");
    let text = super::draw::draw(&whole, PictureStyle { width: 82, reverse: true });
    assert!(text.contains("[\x1b[7m##########\x1b[27m##########] team/whole-pod"), "{text:?}");
}

#[test]
fn a_table_has_a_row_for_each_pod_and_a_dash_for_what_is_not_known() {
    let expected = "\
NODE     DEVICE   NAMESPACE   POD          CLAIM    GRANTED(MiB)   COMPUTE   USED(MiB)   PEAK(MiB)   ACTIVE   PROCESSES
node-a   gpu-0    team        small-pod    small    20000          25%       8000        9000        40%      2
node-a   gpu-1    team        another      placed   2000           -         300         -           -        -
node-a   gpu-1    team        placed-pod   placed   2000           -         100         -           -        -
node-b   gpu-0    team        whole-pod    whole    whole          -         -           -           -        -

what is used on node-b is not known: no answer within 5 s
";
    assert_eq!(table(&seen_with_use()), expected);
    let json = serde_json::to_value(seen_with_use()).unwrap();
    let small = &json["nodes"][0]["devices"][0]["claims"][0];
    let expected = json!([{"pod": "small-pod", "memoryUsedMiB": 8000, "memoryPeakMiB": 9000, "memoryLimitMiB": null,
        "activityPercent": 40, "processes": 2}]);
    assert_eq!(small["use"], expected);
    assert_eq!(json["nodes"][1]["devices"][0]["claims"][0].get("use"), None, "node-b did not answer");
    assert!(json["lacks"][0].as_str().unwrap().contains("node-b"));
}

#[test]
fn a_picture_that_is_taller_than_the_terminal_begins_at_its_beginning() {
    let picture = "1\n2\n3\n4\n5\n";
    assert_eq!(cut(picture, 6), picture);
    assert_eq!(cut(picture, 5), "1\n2\n3\n2 more lines: --once prints all, --node NAME one node\n");
    assert_eq!(cut(picture, 0).lines().count(), 2);
}

#[test]
fn what_a_claims_author_says_of_his_grant_counts_for_nothing() {
    let row = seen().nodes.remove(1).devices.remove(0);
    assert_eq!((row.free_mib(), row.granted_mib()), (Some(0), 40_000));
}

#[test]
fn as_json_it_has_the_units_in_its_names() {
    let json = serde_json::to_value(seen()).unwrap();
    let placed = &json["nodes"][0]["devices"][1];
    assert_eq!((&placed["held"], &placed["grantableMiB"]), (&json!(true), &json!(80_000)));
    let part = json!({"share": {"memoryMiB": 2000, "computePercent": null}});
    assert_eq!(
        placed["claims"],
        json!([{"namespace": "team", "claim": "placed", "pods": ["placed-pod"], "part": part}])
    );
}

#[test]
fn without_gpus_it_says_where_to_look() {
    assert!(draw(&map(&[], &[]), 80).contains("is `tranche node` running?"));
}
