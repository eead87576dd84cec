//! What kubelet's caller sees: which claims are refused, in which words, and what a plan says.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::cdi::{Arch, DeviceNode, DeviceNodes, DriverFiles, HostPath, Node, NodeState, RootFiles};
use crate::ledger::{HoldMode, Intent, Step};
use crate::model::claim::{Access, Allocated, AllocatedClaim, Config, ConfigSource};
use crate::model::gpu::*;
use crate::model::names::{BootId, ClaimUid, DeviceUuid};
use crate::model::quantity::Bytes;

fn gpu(minor: u32, mig: MigMode) -> Gpu {
    Gpu {
        uuid: DeviceUuid::new(format!("GPU-{minor}")),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".into(),
        brand: "Nvidia".into(),
        architecture: "Hopper".into(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes(80 << 30), reserved: Bytes(0) },
        multiprocessors: Some(132),
        addressing_mode: None,
        pci: Pci::default(),
        mig,
        health: Health::Healthy,
    }
}

fn mig(start: u32) -> MigDevice {
    MigDevice {
        uuid: DeviceUuid::new(format!("MIG-{start}")),
        profile: "1g.10gb".into(),
        gpu_instance: 7 + start,
        compute_instance: 0,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        capacity: MigCapacity::default(),
    }
}

/// gpu-0 and gpu-1 whole, gpu-2 cut into two.
fn node_gpus() -> NodeGpus {
    let gpus = vec![gpu(0, MigMode::Off), gpu(1, MigMode::Off), gpu(2, MigMode::On(vec![mig(0), mig(1)]))];
    NodeGpus { driver: DriverVersions { driver: "550.163.01".into(), cuda: "12.4".into() }, gpus }
}

fn result(request: &str, device: &str) -> Allocated {
    Allocated {
        request: RequestName::new(request),
        pool: PoolName::from("node-a"),
        device: DeviceName::from(device),
        access: Access::Exclusive,
    }
}

fn claim(uid: &str, results: Vec<Allocated>) -> AllocatedClaim {
    AllocatedClaim {
        claim: ClaimRef { namespace: "team".into(), name: format!("claim-{uid}"), uid: ClaimUid::from(uid) },
        requests: results.iter().map(|result| result.request.clone()).collect(),
        results,
        configs: Vec::new(),
    }
}

fn config(requests: &[&str], interval: &str) -> Config {
    Config {
        source: ConfigSource::FromClaim,
        requests: requests.iter().map(|request| (*request).to_owned()).collect(),
        parameters: json!({
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
            "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}}),
    }
}

fn driver() -> DriverFiles {
    let node = |node: Node, minor: u32| {
        let path = format!("/dev/{node}");
        let host = HostPath { inside: path.clone().into(), host: path.clone() };
        (node, DeviceNode { container: path, host, major: 195, minor, state: NodeState::Present })
    };
    let mut nodes = BTreeMap::from([node(Node::Control, 255)]);
    nodes.extend((0..3).map(|minor| node(Node::Gpu { minor }, minor)));
    for instance in [7, 8] {
        nodes.extend([node(Node::GpuInstance { gpu: 2, instance }, instance)]);
        nodes.extend([node(Node::ComputeInstance { gpu: 2, instance, compute: 0 }, 30 + instance)]);
    }
    let root = RootFiles {
        version: "550.163.01".into(),
        arch: Arch::X86_64,
        libraries: vec![],
        binaries: vec![],
        files: vec![],
        hook: None,
    };
    DriverFiles { root: Arc::new(root), nodes: DeviceNodes(nodes) }
}

/// Plans `claim` beside claims that were planned before it.
fn planned(claim: &AllocatedClaim, held: &[Intent]) -> Result<Plan, Refusal> {
    planned_on(&node_gpus(), claim, held)
}

fn planned_on(gpus: &NodeGpus, claim: &AllocatedClaim, held: &[Intent]) -> Result<Plan, Refusal> {
    let (node, pool) = (NodeName::from("node-a"), PoolName::from("node-a"));
    let targets = targets(claim, Site { node: &node, pool: &pool, gpus, held })?;
    plan(claim, &targets, &pool, Facts { boot: &BootId::from("boot"), driver: &driver() })
}

fn words(refusal: Result<Plan, Refusal>) -> String {
    crate::model::error_chain(&refusal.expect_err("it is refused"))
}

#[test]
fn a_whole_gpu_is_one_file_and_one_answer() {
    let plan = planned(&claim("c1", vec![result("gpu", "gpu-1")]), &[]).unwrap();
    assert_eq!(plan.intent.steps, [Step::WriteCdi { file: "k8s.gpu.nvidia.com-claim_c1.json".into() }]);
    let device = &plan.intent.devices[0];
    assert_eq!(device.answer.cdi_ids, ["k8s.gpu.nvidia.com/claim=c1-gpu-1"]);
    assert_eq!(device.answer.requests, ["gpu"]);
    assert_eq!((device.mode, device.gpu.as_str()), (HoldMode::Whole, "GPU-1"));
    assert!(plan.cdi.content.contains("/dev/nvidia1"), "{}", plan.cdi.content);
}

#[test]
fn planning_twice_gives_the_same_plan() {
    let claim = claim("c1", vec![result("a", "gpu-0"), result("b", "gpu-2-mig-1g10gb-19-1")]);
    assert_eq!(planned(&claim, &[]), planned(&claim, &[]));
}

#[test]
fn a_first_available_request_is_answered_by_its_base_name() {
    let mut claim = claim("c1", vec![result("gpu/large", "gpu-0")]);
    claim.configs = vec![config(&["gpu"], "Long")];
    let plan = planned(&claim, &[]).unwrap();
    assert_eq!(plan.intent.devices[0].answer.requests, ["gpu"]);
    assert_eq!(plan.intent.steps[0], Step::TimeSlice { gpu: "GPU-0".into(), level: 3 });
}

#[test]
fn a_config_for_a_subrequest_that_was_not_chosen_is_none_of_ours() {
    let mut claim = claim("c1", vec![result("gpu/large", "gpu-0")]);
    claim.requests.push(RequestName::new("gpu/small"));
    claim.configs = vec![config(&["gpu/small"], "Long")];
    assert_eq!(planned(&claim, &[]).unwrap().intent.steps.len(), 1);
}

#[test]
fn the_last_config_that_applies_counts() {
    let mut claim = claim("c1", vec![result("gpu", "gpu-0"), result("other", "gpu-1")]);
    claim.configs = vec![config(&[], "Short"), config(&["gpu"], "Medium")];
    let steps = planned(&claim, &[]).unwrap().intent.steps;
    assert_eq!(steps[0], Step::TimeSlice { gpu: "GPU-0".into(), level: 2 });
    assert_eq!(steps[1], Step::TimeSlice { gpu: "GPU-1".into(), level: 1 });
}

#[test]
fn a_device_has_one_holder() {
    let whole = planned(&claim("c1", vec![result("gpu", "gpu-0")]), &[]).unwrap().intent;
    let small = planned(&claim("c2", vec![result("mig", "gpu-2-mig-1g10gb-19-0")]), &[]).unwrap().intent;
    let held = [whole, small];
    let again = planned(&claim("c3", vec![result("gpu", "gpu-0")]), &held);
    assert!(again.as_ref().is_err_and(Refusal::is_double_allocation));
    assert!(words(again).contains("team/claim-c1"));
    assert!(planned(&claim("c3", vec![result("mig", "gpu-2-mig-1g10gb-19-0")]), &held).is_err());
    assert!(planned(&claim("c3", vec![result("mig", "gpu-2-mig-1g10gb-19-1")]), &held).is_ok());
    assert!(planned(&claim("c1", vec![result("gpu", "gpu-0")]), &held).is_ok(), "its own");
}

#[test]
fn a_board_that_was_repartitioned_under_a_holder_is_not_given_in_parts() {
    let before = NodeGpus { gpus: vec![gpu(2, MigMode::Off)], ..node_gpus() };
    let whole = planned_on(&before, &claim("c1", vec![result("gpu", "gpu-2")]), &[]).unwrap().intent;
    let part = planned(&claim("c2", vec![result("mig", "gpu-2-mig-1g10gb-19-0")]), &[whole]);
    assert!(part.is_err_and(|refusal| refusal.is_double_allocation()));
}

#[test]
fn administrative_access_sees_a_held_and_a_broken_device_and_changes_nothing() {
    let held = [planned(&claim("c1", vec![result("gpu", "gpu-0")]), &[]).unwrap().intent];
    let mut gpus = node_gpus();
    gpus.gpus[0].health = Health::Unhealthy("fell off the bus".into());
    let mut admin = claim("c2", vec![result("look", "gpu-0")]);
    admin.results[0].access = Access::Admin;
    admin.configs = vec![config(&[], "Long")];
    let plan = planned_on(&gpus, &admin, &held).unwrap();
    assert_eq!(plan.intent.devices[0].mode, HoldMode::Admin);
    assert_eq!(plan.intent.steps.len(), 1, "only the CDI file");
    // And it does not stand in the way of others.
    assert!(planned(&claim("c3", vec![result("gpu", "gpu-0")]), &[plan.intent]).is_ok());
}

#[test]
fn refusals_say_what_was_wrong_and_what_to_do() {
    let mut elsewhere = result("gpu", "gpu-0");
    elsewhere.pool = PoolName::from("node-b");
    let mut share = result("gpu", "gpu-0");
    share.access = Access::Share { id: "s".into(), consumed: vec![] };
    for (result, parts) in [
        (elsewhere, ["node-b", "node-a"]),
        (result("gpu", "gpu-9"), ["gpu-9", "gpu-0, gpu-1"]),
        (share, ["gpu-0", "not shareable"]),
    ] {
        let words = words(planned(&claim("c1", vec![result]), &[]));
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
    }
    let nothing = planned(&claim("c1", vec![]), &[]);
    assert_eq!(nothing, Err(Refusal::NothingAllocated));
}

#[test]
fn configs_that_cannot_be_meant_are_refused() {
    let with = |config: Config, device: &str| {
        let mut claim = claim("c1", vec![result("gpu", device)]);
        claim.configs = vec![config];
        words(planned(&claim, &[]))
    };
    assert!(with(config(&["gqu"], "Short"), "gpu-0").contains("\"gqu\""));
    assert!(with(config(&["gpu"], "Short"), "gpu-2-mig-1g10gb-19-0").contains("MigDeviceConfig"));
    assert!(with(config(&["gpu"], "Shortest"), "gpu-0").contains("sharing.timeSlicingConfig.interval"));
    let mut mps = config(&["gpu"], "Short");
    mps.parameters["sharing"] = json!({"strategy": "MPS"});
    assert!(with(mps, "gpu-0").contains("MPS"));
}

#[test]
fn a_broken_gpu_is_not_given() {
    let mut gpus = node_gpus();
    gpus.gpus[0].health = Health::Unhealthy("fell off the bus".into());
    assert!(
        words(planned_on(&gpus, &claim("c1", vec![result("gpu", "gpu-0")]), &[]))
            .contains("fell off the bus")
    );
}

#[test]
fn two_results_for_one_device_are_one_cdi_device() {
    let mut admin = result("look", "gpu-0");
    admin.access = Access::Admin;
    let plan = planned(&claim("c1", vec![admin, result("gpu", "gpu-0")]), &[]).unwrap();
    assert_eq!(plan.intent.devices.len(), 1);
    assert_eq!(plan.intent.devices[0].answer.requests, ["gpu", "look"]);
    assert_eq!(plan.intent.devices[0].mode, HoldMode::Whole);
}
