//! What kubelet's caller sees: which claims are refused, in which words, and what a plan says.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::cdi::{
    Arch, DeviceNode, DeviceNodeState, DeviceNodes, DriverFiles, DriverNode, HostPath, RootFiles,
};
use crate::ledger::{HoldMode, Intent, Phase, Placer, Record, Step};
use crate::model::claim::{Access, Allocated, AllocatedClaim, Config, ConfigSource};
use crate::model::gpu::*;
use crate::model::names::{BootId, ClaimUid, DeviceUuid};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation, MpsGroup, MpsLimits, Percent};
use crate::sharing::{DefaultRequest, SharingPolicy, ShmScope};

mod carved;
mod whole;

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
        pods: Vec::new(),
        reserved_for_others: false,
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
    let node = |node: DriverNode, minor: u32| {
        let path = format!("/dev/{node}");
        let host = HostPath { inside: path.clone().into(), host: path.clone() };
        (node, DeviceNode { container: path, host, major: 195, minor, state: DeviceNodeState::Present })
    };
    let mut nodes = BTreeMap::from([node(DriverNode::Control, 255)]);
    nodes.extend((0..3).map(|minor| node(DriverNode::Gpu { minor }, minor)));
    for instance in [7, 8] {
        nodes.extend([node(DriverNode::GpuInstance { gpu: 2, instance }, instance)]);
        nodes.extend([node(DriverNode::ComputeInstance { gpu: 2, instance, compute: 0 }, 30 + instance)]);
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
    planned_by(&SharingPolicy::default(), gpus, claim, held)
}

fn planned_by(
    sharing: &SharingPolicy,
    gpus: &NodeGpus,
    claim: &AllocatedClaim,
    held: &[Intent],
) -> Result<Plan, Refusal> {
    let (node, pool) = (NodeName::from("node-a"), PoolName::from("node-a"));
    let site = Site { node: &node, pool: &pool, gpus, sharing, held };
    let targets = targets(claim, site)?;
    let (boot, driver) = (BootId::from("boot"), driver());
    plan(claim, &targets, site, Facts { boot: &boot, driver: &driver, mps_dir: "/run/tranche/mps" })
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
    for (result, parts) in
        [(elsewhere, ["node-b", "node-a"]), (result("gpu", "gpu-9"), ["gpu-9", "gpu-0, gpu-1"])]
    {
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

/// What may be granted of a board: 80 GiB less 512 MiB for the MPS server.
const GRANTABLE_MIB: u64 = (80 << 10) - 512;

fn share(request: &str, device: &str, mib: u64, compute: u64) -> Allocated {
    let quantity = |text: String| text.parse().unwrap();
    let consumed = vec![
        ("memory".to_owned(), quantity(format!("{mib}Mi"))),
        ("compute".to_owned(), quantity(compute.to_string())),
        ("shares".to_owned(), quantity("1".to_owned())),
    ];
    let id = format!("share-of-{request}");
    Allocated { access: Access::Share { id, consumed }, ..result(request, device) }
}

fn gpu_share(fields: serde_json::Value) -> Config {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    Config { source: ConfigSource::FromClaim, requests: vec![], parameters }
}

fn limits(mib: &[u64], compute: u8) -> MpsLimits {
    let memory = mib.iter().map(|mib| Some(Bytes::from_mib(*mib))).collect();
    MpsLimits { memory, compute: Percent::try_from(compute).ok() }
}

fn env(plan: &Plan, device: usize) -> Vec<String> {
    let file: serde_json::Value = serde_json::from_str(&plan.cdi.content).unwrap();
    let env = file["devices"][device]["containerEdits"]["env"].as_array().cloned().unwrap_or_default();
    env.iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_share_is_a_daemon_with_limits_and_a_container_with_its_own() {
    let plan = planned(&claim("c1", vec![share("gpu", "gpu-0", 2000, 25)]), &[]).unwrap();
    let group = MpsGroup::new(["GPU-0".into()]);
    let needs = limits(&[2000], 25);
    assert_eq!(plan.intent.steps[0], Step::Mps { group, exclusive: true, needs });
    assert!(matches!(plan.intent.steps[1], Step::WriteCdi { .. }));
    let device = &plan.intent.devices[0];
    assert_eq!(device.answer.share_id.as_deref(), Some("share-of-gpu"));
    assert_eq!(device.answer.cdi_ids, ["k8s.gpu.nvidia.com/claim=c1-gpu-0-share-of-gpu"]);
    let HoldMode::Share(grant) = device.mode else { panic!("{:?}", device.mode) };
    assert_eq!((grant.memory, grant.isolation), (Bytes::from_mib(2000), Isolation::Mps));
    let env = env(&plan, 0);
    assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()), "{env:?}");
    assert!(env.contains(&"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25".to_owned()), "{env:?}");
    let file: serde_json::Value = serde_json::from_str(&plan.cdi.content).unwrap();
    let mounts = file["devices"][0]["containerEdits"]["mounts"].as_array().unwrap();
    let paths: Vec<_> = mounts.iter().map(|mount| mount["hostPath"].as_str().unwrap()).collect();
    assert_eq!(paths, ["/run/tranche/mps/GPU-0/client", "/run/tranche/mps/GPU-0/shm"]);
    assert!(mounts[0]["options"].as_array().unwrap().contains(&json!("ro")));
}

#[test]
fn a_container_keeps_its_own_dev_shm_where_mps_does_not_use_it_or_an_administrator_says_so() {
    let places = |driver: &str, shm| {
        let mut gpus = node_gpus();
        driver.clone_into(&mut gpus.driver.driver);
        let policy = SharingPolicy { shm, ..SharingPolicy::default() };
        let plan = planned_by(&policy, &gpus, &claim("c1", vec![share("gpu", "gpu-0", 2000, 25)]), &[]);
        let file: serde_json::Value = serde_json::from_str(&plan.unwrap().cdi.content).unwrap();
        let mounts = file["devices"][0]["containerEdits"]["mounts"].as_array().unwrap().clone();
        mounts.iter().map(|mount| mount["containerPath"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (own, the_gpus) = (vec!["/run/nvidia-mps"], vec!["/run/nvidia-mps", "/dev/shm"]);
    for driver in ["580.159.04", "590.1", "1000"] {
        assert_eq!(places(driver, ShmScope::ByDriver), own, "{driver}");
        assert_eq!(places(driver, ShmScope::Gpu), the_gpus, "{driver}");
    }
    for driver in ["550.163.01", "575.64", "579", "", "unknown"] {
        assert_eq!(places(driver, ShmScope::ByDriver), the_gpus, "{driver}");
        assert_eq!(places(driver, ShmScope::Container), own, "{driver}");
    }
}

#[test]
fn max_processes_divides_the_memory() {
    let mut claim = claim("c1", vec![share("gpu", "gpu-0", 3000, 0)]);
    claim.configs = vec![gpu_share(json!({"maxProcesses": 3}))];
    let plan = planned(&claim, &[]).unwrap();
    assert!(env(&plan, 0).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000M".to_owned()));
    claim.configs = vec![gpu_share(json!({"maxProcesses": 4}))];
    assert!(words(planned(&claim, &[])).contains("maxProcesses is 4"));
}

#[test]
fn all_of_a_board_is_the_board_itself() {
    let plan = planned(&claim("c1", vec![share("gpu", "gpu-0", GRANTABLE_MIB, 0)]), &[]).unwrap();
    assert_eq!(plan.intent.devices[0].mode, HoldMode::Whole);
    assert_eq!(plan.intent.steps.len(), 1, "no daemon: {:?}", plan.intent.steps);
    assert_eq!(plan.intent.devices[0].answer.share_id.as_deref(), Some("share-of-gpu"));
    let capped = planned(&claim("c1", vec![share("gpu", "gpu-0", GRANTABLE_MIB, 50)]), &[]).unwrap();
    assert!(matches!(capped.intent.devices[0].mode, HoldMode::Share(_)));
}

#[test]
fn a_limit_on_a_device_that_is_given_whole_is_refused() {
    let mut whole = claim("c1", vec![result("gpu", "gpu-0")]);
    let mut mig = claim("c1", vec![result("gpu", "gpu-2-mig-1g10gb-19-0")]);
    let mut all = claim("c1", vec![share("gpu", "gpu-0", GRANTABLE_MIB, 0)]);
    for claim in [&mut whole, &mut mig, &mut all] {
        let device = claim.results[0].device.to_string();
        let mut refused = |config: Config, field: &str| {
            claim.configs = vec![config];
            let told = words(planned(claim, &[]));
            assert_eq!(told, crate::params::limit_of_whole(field, &format!("device {device}")));
        };
        refused(gpu_share(json!({"memory": "10Gi"})), "memory");
        refused(gpu_share(json!({"fraction": "0.25"})), "fraction");
        refused(gpu_share(json!({"compute": 50})), "compute");
        refused(gpu_share(json!({"maxProcesses": 2})), "maxProcesses");
        let of_class = Config { source: ConfigSource::FromClass, ..gpu_share(json!({"memory": "10Gi"})) };
        refused(Config { requests: vec!["gpu".to_owned()], ..of_class }, "memory");
        // Nobody else is on the device.
        claim.configs = vec![gpu_share(json!({"minimumIsolation": "mps"}))];
        assert!(planned(claim, &[]).is_ok());
    }
    // An entry for all requests means the claim's shares.
    let mut both = claim("c1", vec![result("whole", "gpu-0"), share("part", "gpu-1", 3000, 0)]);
    both.configs = vec![gpu_share(json!({"maxProcesses": 2}))];
    assert!(planned(&both, &[]).is_ok());
    both.configs[0].requests = vec!["whole".to_owned()];
    assert!(words(planned(&both, &[])).contains("maxProcesses limits a share"));
}

#[test]
fn shares_add_up_and_never_beyond_the_board() {
    let first = planned(&claim("c1", vec![share("a", "gpu-0", 40 << 10, 50)]), &[]).unwrap().intent;
    let second = planned(&claim("c2", vec![share("b", "gpu-0", 30 << 10, 50)]), std::slice::from_ref(&first));
    let held = [first, second.unwrap().intent];
    let rest = GRANTABLE_MIB - (70 << 10);
    assert!(planned(&claim("c3", vec![share("c", "gpu-0", rest, 0)]), &held).is_ok());
    for (over, part) in [(share("c", "gpu-0", rest + 1, 0), "MiB"), (share("c", "gpu-0", 1, 1), "1 %")] {
        let refused = planned(&claim("c3", vec![over]), &held);
        assert!(refused.as_ref().is_err_and(Refusal::is_double_allocation));
        assert!(words(refused).contains(part));
    }
    // Its own record does not stand in a claim's way, and a claim's shares count together.
    assert!(planned(&claim("c1", vec![share("a", "gpu-0", 40 << 10, 50)]), &held).is_ok());
    let twice = vec![share("c", "gpu-0", rest, 0), share("d", "gpu-0", 1, 0)];
    assert!(planned(&claim("c3", twice), &held).is_err());
}

#[test]
fn whole_boards_and_shares_do_not_mix() {
    let part = planned(&claim("c1", vec![share("a", "gpu-0", 1024, 0)]), &[]).unwrap().intent;
    let whole = planned(&claim("c2", vec![result("gpu", "gpu-1")]), &[]).unwrap().intent;
    let held = [part, whole];
    for other in
        [result("gpu", "gpu-0"), share("gpu", "gpu-0", GRANTABLE_MIB, 0), share("gpu", "gpu-1", 1, 0)]
    {
        let refused = planned(&claim("c3", vec![other.clone()]), &held);
        assert!(refused.is_err_and(|refusal| refusal.is_double_allocation()), "{other:?}");
    }
}

#[test]
fn what_cannot_be_shared_says_why() {
    let mig = planned(&claim("c1", vec![share("gpu", "gpu-2-mig-1g10gb-19-0", 1024, 0)]), &[]);
    assert!(words(mig).contains("MIG"));
    let only_whole = SharingPolicy { exclusive: vec!["0".parse().unwrap()], ..SharingPolicy::default() };
    let claim_0 = claim("c1", vec![share("gpu", "gpu-0", 1024, 0)]);
    assert!(words(planned_by(&only_whole, &node_gpus(), &claim_0, &[])).contains("--exclusive-gpus 0"));
    let with = |config: Config| {
        let mut claim = claim_0.clone();
        claim.configs = vec![config];
        words(planned(&claim, &[]))
    };
    assert!(with(config(&["gpu"], "Long")).contains("sharing.strategy"));
    assert!(with(gpu_share(json!({"memory": "1Gi"}))).contains("capacity.requests.memory"));
    assert!(with(gpu_share(json!({"compute": 10}))).contains("capacity.requests.compute"));
    assert!(with(gpu_share(json!({"minimumIsolation": "kernel"}))).contains("offers mps"));
    assert!(words(planned(&claim("c1", vec![share("gpu", "gpu-0", 0, 0)]), &[])).contains("no memory"));
}

#[test]
fn without_limits_there_is_no_daemon_and_no_mixing_with_limits() {
    let policy = SharingPolicy { default_request: DefaultRequest::Nothing, ..SharingPolicy::default() };
    let gpus = node_gpus();
    let bare = planned_by(&policy, &gpus, &claim("c1", vec![share("a", "gpu-0", 0, 0)]), &[]).unwrap();
    assert_eq!(bare.intent.steps.len(), 1);
    let HoldMode::Share(grant) = bare.intent.devices[0].mode else { panic!() };
    assert_eq!(grant.isolation, Isolation::None);
    let held = [bare.intent];
    assert!(planned_by(&policy, &gpus, &claim("c2", vec![share("b", "gpu-0", 0, 0)]), &held).is_ok());
    let limited = planned_by(&policy, &gpus, &claim("c2", vec![share("b", "gpu-0", 10, 0)]), &held);
    assert!(words(limited).contains("cannot be mixed"));
    let mut demanding = claim("c2", vec![share("b", "gpu-0", 0, 0)]);
    demanding.configs = vec![gpu_share(json!({"minimumIsolation": "mps"}))];
    assert!(words(planned_by(&policy, &gpus, &demanding, &held)).contains("offers none"));
}

#[test]
fn shares_of_several_boards_have_one_daemon_and_the_same_variables() {
    let plan = planned(&claim("c1", vec![share("a", "gpu-1", 2000, 25), share("b", "gpu-0", 1000, 25)]), &[])
        .unwrap();
    let group = MpsGroup::new(["GPU-0".into(), "GPU-1".into()]);
    let step = Step::Mps { group, exclusive: true, needs: limits(&[1000, 2000], 25) };
    assert_eq!(plan.intent.steps[0], step);
    for device in 0..2 {
        let env = env(&plan, device);
        assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000M,1=2000M".to_owned()), "{env:?}");
    }
    let alone = planned(&claim("c2", vec![share("a", "gpu-1", 10, 0)]), &[plan.intent]);
    assert!(words(alone).contains("one MPS daemon"));
    let differ = vec![share("a", "gpu-1", 2000, 25), share("b", "gpu-0", 1000, 50)];
    assert_eq!(planned(&claim("c1", differ), &[]), Err(Refusal::ComputeDiffers));
}

#[test]
fn each_share_may_have_a_daemon_of_its_own() {
    let policy = SharingPolicy { daemon: DaemonScope::Share, ..SharingPolicy::default() };
    let of = |uid: &str, results| planned_by(&policy, &node_gpus(), &claim(uid, results), &[]).unwrap();
    let plan = of("c1", vec![share("a", "gpu-0", 2000, 25)]);
    let group = MpsGroup::new(["GPU-0".into()]).of_claim("c1".into());
    let folder = group.folder();
    assert_eq!(plan.intent.steps[0], Step::Mps { group, exclusive: false, needs: limits(&[2000], 25) });
    assert!(plan.cdi.content.contains(&format!("/run/tranche/mps/{folder}/client")), "{}", plan.cdi.content);
    assert!(env(&plan, 0).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()));

    // Beside it on the same board there is room for a claim on several.
    let both = claim("c2", vec![share("a", "gpu-0", 1000, 0), share("b", "gpu-1", 1000, 0)]);
    let both = planned_by(&policy, &node_gpus(), &both, std::slice::from_ref(&plan.intent)).unwrap();
    assert!(
        matches!(&both.intent.steps[0], Step::Mps { group, exclusive: false, .. } if group.devices().len() == 2)
    );
    let records = [plan.intent, both.intent].map(|intent| Record { intent, phase: Phase::Ready });
    assert_eq!(crate::ledger::audit(&records), []);
}

#[test]
fn another_scope_of_daemons_takes_effect_on_a_board_when_its_last_share_has_left() {
    let own = SharingPolicy { daemon: DaemonScope::Share, ..SharingPolicy::default() };
    let scope = |policy: &SharingPolicy, held: &[Intent]| {
        let next = claim("next", vec![share("a", "gpu-0", 1000, 0)]);
        match &planned_by(policy, &node_gpus(), &next, held).unwrap().intent.steps[0] {
            Step::Mps { group, .. } => group.scope(),
            other => panic!("{other:?}"),
        }
    };
    for (policy, other) in [(&own, DaemonScope::Gpu), (&SharingPolicy::default(), DaemonScope::Share)] {
        let before = SharingPolicy { daemon: other, ..SharingPolicy::default() };
        let there = claim("there", vec![share("a", "gpu-0", 1000, 0)]);
        let there = planned_by(&before, &node_gpus(), &there, &[]).unwrap().intent;
        assert_eq!(scope(policy, &[there]), other);
        let elsewhere = claim("elsewhere", vec![share("a", "gpu-1", 1000, 0)]);
        let elsewhere = planned_by(&before, &node_gpus(), &elsewhere, &[]).unwrap().intent;
        assert_eq!(scope(policy, &[elsewhere]), policy.daemon);
        // Asked again, or with other files of the driver, the claim keeps what it has.
        let alone = claim("alone", vec![share("a", "gpu-0", 1000, 0)]);
        let recorded = planned_by(&before, &node_gpus(), &alone, &[]).unwrap().intent;
        let again = planned_by(policy, &node_gpus(), &alone, std::slice::from_ref(&recorded)).unwrap();
        assert!(recorded.holds_as(&again.intent), "{:?}", again.intent.steps);
    }
}

#[test]
fn a_claim_may_share_its_own_devices_by_mps() {
    let mps = |kind: &str| Config {
        source: ConfigSource::FromClaim,
        requests: vec![],
        parameters: json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": {
            "strategy": "MPS", "mpsConfig": {
                "defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi",
                "defaultPerDevicePinnedMemoryLimit": {"1": "5Gi"}}}}),
    };
    let mut whole = claim("c1", vec![result("a", "gpu-0"), result("b", "gpu-1")]);
    whole.configs = vec![mps("GpuConfig")];
    let plan = planned(&whole, &[]).unwrap();
    let group = MpsGroup::new(["GPU-0".into(), "GPU-1".into()]);
    let needs = limits(&[10 << 10, 5 << 10], 50);
    assert_eq!(plan.intent.steps[0], Step::Mps { group, exclusive: true, needs });
    assert_eq!(plan.intent.devices[0].mode, HoldMode::Whole);
    assert!(env(&plan, 0).iter().any(|line| line.starts_with("CUDA_MPS_PIPE_DIRECTORY=")));

    let mut cut = claim("c1", vec![result("a", "gpu-2-mig-1g10gb-19-0")]);
    cut.configs = vec![mps("MigDeviceConfig")];
    let steps = planned(&cut, &[]).unwrap().intent.steps;
    assert!(matches!(&steps[0], Step::Mps { exclusive: false, group, .. } if group.folder() == "MIG-0"));
}

#[test]
fn a_limit_of_mps_without_its_unit_is_refused_unless_the_claim_is_prepared_with_it() {
    let limited = |limit: &str| {
        let mut claim = claim("c1", vec![result("gpu", "gpu-0")]);
        claim.configs = vec![Config {
            source: ConfigSource::FromClaim,
            requests: vec![],
            parameters: json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {
                "strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": limit}}}),
        }];
        claim
    };
    let said = words(planned(&limited("2000"), &[]));
    assert!(said.contains("config[0]") && said.contains("did you mean 2000Mi?"), "{said}");
    // As it was recorded before such limits were refused: rounded up to what MPS can count.
    let recorded = planned(&limited("1Mi"), &[]).unwrap();
    let again = planned(&limited("2000"), std::slice::from_ref(&recorded.intent)).unwrap();
    assert!(recorded.intent.holds_as(&again.intent), "{:?}", again.intent.steps);
    assert_eq!(recorded.cdi, again.cdi);
    // Another claim's record is no reason.
    let other = planned(&claim("c2", vec![result("gpu", "gpu-1")]), &[]).unwrap().intent;
    assert!(planned(&limited("2000"), &[other]).is_err());
    // Administrative access changes nothing, so nothing is read.
    let mut admin = limited("2000");
    admin.results[0].access = Access::Admin;
    assert!(planned(&admin, &[]).is_ok());
}

/// What the controller writes for requests: a part of each device, `Mi` and percent (0: not capped).
fn share_grant(requests: &[&str], parts: &[(&str, &str, u64, u64)]) -> Config {
    let part = |(device, gpu, mib, compute): &(&str, &str, u64, u64)| {
        let mut part = json!({"device": device, "gpu": gpu, "memory": format!("{mib}Mi"), "slots": 1, "isolation": "mps"});
        if *compute > 0 {
            part["compute"] = json!(compute);
        }
        part
    };
    let devices: Vec<_> = parts.iter().map(part).collect();
    let parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": devices});
    let requests = requests.iter().map(|request| (*request).to_owned()).collect();
    Config { source: ConfigSource::FromClass, requests, parameters }
}

/// A claim with one request that the controller gave a part of one board.
fn granted(uid: &str, result: Allocated, mib: u64, compute: u64) -> AllocatedClaim {
    let gpu = format!("GPU-{}", result.device.as_str().trim_start_matches("gpu-"));
    let entry = share_grant(&[result.request.as_str()], &[(result.device.as_str(), &gpu, mib, compute)]);
    let mut claim = claim(uid, vec![result]);
    claim.configs = vec![entry];
    claim
}

#[test]
fn a_share_of_the_controllers_is_the_same_with_and_without_a_share_id() {
    let bare = planned(&granted("c1", result("gpu", "gpu-0"), 2000, 25), &[]).unwrap();
    let counted = planned(&granted("c1", share("gpu", "gpu-0", 2000, 25), 2000, 25), &[]).unwrap();
    for plan in [&bare, &counted] {
        let device = &plan.intent.devices[0];
        let HoldMode::Share(grant) = device.mode else { panic!("{:?}", device.mode) };
        assert_eq!((grant.memory, grant.isolation), (Bytes::from_mib(2000), Isolation::Mps));
        assert_eq!(device.placer, Placer::Controller);
        let group = MpsGroup::new(["GPU-0".into()]);
        assert_eq!(plan.intent.steps[0], Step::Mps { group, exclusive: true, needs: limits(&[2000], 25) });
        assert!(env(plan, 0).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M".to_owned()));
    }
    assert_eq!(bare.intent.devices[0].answer.cdi_ids, ["k8s.gpu.nvidia.com/claim=c1-gpu-0"]);
    assert_eq!(bare.intent.devices[0].answer.share_id, None);
    assert_eq!(counted.intent.devices[0].answer.cdi_ids, ["k8s.gpu.nvidia.com/claim=c1-gpu-0-share-of-gpu"]);
}

#[test]
fn the_entry_may_name_the_request_its_alternative_or_its_parent() {
    for name in ["gpu/small", "gpu"] {
        let mut claim = granted("c1", result("gpu/small", "gpu-0"), 2000, 0);
        claim.requests.push(RequestName::new("gpu/large"));
        claim.configs[0].requests = vec![name.to_owned()];
        let plan = planned(&claim, &[]).unwrap();
        assert_eq!(plan.intent.devices[0].placer, Placer::Controller, "{name}");
        assert_eq!(plan.intent.devices[0].answer.requests, ["gpu"], "{name}");
    }
}

#[test]
fn what_the_author_asked_for_stays_beside_what_the_controller_gave() {
    let mut claim = granted("c1", result("gpu", "gpu-0"), 3000, 0);
    let asked = json!({"fraction": "0.25", "compute": 30, "maxProcesses": 3, "minimumIsolation": "mps"});
    claim.configs.push(gpu_share(asked));
    let plan = planned(&claim, &[]).unwrap();
    assert!(env(&plan, 0).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000M".to_owned()));
    claim.configs[1] = gpu_share(json!({"memory": "3000Mi", "maxProcesses": 4}));
    assert!(words(planned(&claim, &[])).contains("maxProcesses is 4"));
    claim.configs[1] = gpu_share(json!({"memory": "3000Mi", "minimumIsolation": "kernel"}));
    assert!(words(planned(&claim, &[])).contains("offers mps"));
    claim.configs[1] = config(&[], "Long");
    assert!(words(planned(&claim, &[])).contains("sharing.strategy"));
}

#[test]
fn grants_of_the_controllers_add_up_and_never_beyond_the_board() {
    let first = planned(&granted("c1", result("a", "gpu-0"), 40 << 10, 50), &[]).unwrap().intent;
    let rest = GRANTABLE_MIB - (40 << 10);
    let held = [first];
    assert!(planned(&granted("c2", result("b", "gpu-0"), rest, 50), &held).is_ok());
    for (mib, compute, part) in [(rest + 1, 0, "40960 of 81408 MiB"), (1, 51, "51 %")] {
        let refused = planned(&granted("c2", result("b", "gpu-0"), mib, compute), &held);
        assert!(refused.as_ref().is_err_and(Refusal::is_double_allocation));
        assert!(words(refused).contains(part));
    }
    // All of a board is a share too: the controller may add nothing to it, but says so by its own books.
    let all = planned(&granted("c3", result("c", "gpu-1"), GRANTABLE_MIB, 0), &held).unwrap().intent;
    assert!(matches!(all.devices[0].mode, HoldMode::Share(_)));
}

#[test]
fn shares_of_the_scheduler_and_of_the_controller_do_not_meet_on_a_board() {
    let ours = planned(&granted("c1", result("a", "gpu-0"), 1024, 0), &[]).unwrap().intent;
    let theirs = planned(&claim("c2", vec![share("b", "gpu-1", 1024, 0)]), &[]).unwrap().intent;
    let whole = planned(&claim("c4", vec![result("w", "gpu-1")]), &[]).unwrap().intent;
    let held = [ours, theirs];
    for (other, parts) in [
        (claim("c3", vec![share("c", "gpu-0", 1, 0)]), ["team/claim-c1", "that the controller placed"]),
        (granted("c3", share("c", "gpu-1", 1, 0), 1, 0), ["team/claim-c2", "that the scheduler placed"]),
        (granted("c3", result("c", "gpu-1"), 1, 0), ["team/claim-c2", "that the scheduler placed"]),
        (claim("c3", vec![result("c", "gpu-0")]), ["gpu-0 is in use", "team/claim-c1"]),
    ] {
        let refused = planned(&other, &held);
        assert!(refused.as_ref().is_err_and(Refusal::is_double_allocation), "{refused:?}");
        let words = words(refused);
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
    }
    let refused = words(planned(&granted("c3", result("c", "gpu-1"), 1, 0), &[whole]));
    assert!(refused.contains("gpu-1 is in use by claim team/claim-c4"), "{refused}");
}

#[test]
fn several_boards_of_the_controllers_have_one_daemon_with_limits_of_their_own() {
    let mut claim = claim("c1", vec![result("gpus", "gpu-1"), result("gpus", "gpu-0")]);
    let parts = [("gpu-1", "GPU-1", 2000, 25), ("gpu-0", "GPU-0", 1000, 25)];
    claim.configs = vec![share_grant(&["gpus"], &parts)];
    let plan = planned(&claim, &[]).unwrap();
    let group = MpsGroup::new(["GPU-0".into(), "GPU-1".into()]);
    let needs = limits(&[1000, 2000], 25);
    assert_eq!(plan.intent.steps[0], Step::Mps { group, exclusive: true, needs });
    for device in 0..2 {
        assert!(env(&plan, device).contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000M,1=2000M".to_owned()));
    }
    assert!(plan.intent.devices.iter().all(|held| held.placer == Placer::Controller));
}

#[test]
fn a_grant_that_cannot_be_meant_is_refused() {
    let bare = || granted("c1", result("gpu", "gpu-0"), 2000, 25);
    let with = |config: Config| AllocatedClaim { configs: vec![config], ..bare() };
    let source = ConfigSource::FromClaim;
    let changed = |field: &str, value: serde_json::Value| {
        let mut entry = bare().configs.remove(0);
        entry.parameters["devices"][0][field] = value;
        with(entry)
    };
    let twice = AllocatedClaim { results: vec![result("gpu", "gpu-0"), result("gpu", "gpu-0")], ..bare() };
    let mut again = bare();
    again.configs.push(again.configs[0].clone());
    let two = AllocatedClaim { results: vec![result("gpu", "gpu-0"), result("gpu", "gpu-1")], ..bare() };
    let mut mig = granted("c1", result("gpu", "gpu-2-mig-1g10gb-19-0"), 2000, 0);
    mig.configs[0].parameters["devices"][0]["gpu"] = json!("MIG-0");
    for (claim, word) in [
        (with(Config { source, ..bare().configs.remove(0) }), "never a part of a claim"),
        (with(share_grant(&[], &[("gpu-0", "GPU-0", 1, 0)])), "names no request"),
        (with(share_grant(&["other"], &[("gpu-0", "GPU-0", 1, 0)])), "\"other\""),
        (with(share_grant(&["gpu"], &[("gpu-1", "GPU-1", 1, 0)])), "grants a share of gpu-1"),
        (
            changed("gpu", json!("GPU-1")),
            "granted a share of GPU-1, which is another GPU of this node now than gpu-0 (GPU-0)",
        ),
        (changed("memory", json!("0")), "devices[0].memory"),
        (changed("memory", json!(format!("{}Mi", GRANTABLE_MIB + 1))), "does not fit"),
        (changed("slots", json!(17)), "17 blocks of client slots"),
        (changed("isolation", json!("kernel")), "promised isolation kernel, but gpu-0 offers mps"),
        (changed("more", json!(1)), "devices[0].more"),
        (twice, "more than once"),
        (again, "more than once"),
        (two, "was given gpu-1, but its ShareGrant"),
        (mig, "MIG mode"),
        (granted("c1", share("gpu", "gpu-0", 2001, 25), 2000, 25), "bytes of memory, but"),
        (granted("c1", share("gpu", "gpu-0", 2000, 0), 2000, 25), "0 percent of compute"),
    ] {
        let words = words(planned(&claim, &[]));
        assert!(words.contains(word), "{word:?} is not in: {words}");
    }
    let only_whole = SharingPolicy { exclusive: vec!["0".parse().unwrap()], ..SharingPolicy::default() };
    assert!(words(planned_by(&only_whole, &node_gpus(), &bare(), &[])).contains("--exclusive-gpus 0"));
}

#[test]
fn a_record_is_of_the_allocation_as_long_as_its_numbers_are() {
    let bare = granted("c1", result("gpu", "gpu-0"), 2000, 25);
    let counted = granted("c1", share("gpu", "gpu-0", 2000, 25), 2000, 25);
    let scheduled = claim("c1", vec![share("gpu", "gpu-0", 2000, 25)]);
    let more = granted("c1", result("gpu", "gpu-0"), 2001, 25);
    let whole = claim("c1", vec![result("gpu", "gpu-0")]);
    let all = [bare, counted, scheduled, more, whole];
    for (n, recorded) in all.iter().enumerate() {
        let intent = planned(recorded, &[]).unwrap().intent;
        let same: Vec<bool> = all.iter().map(|claim| as_recorded(claim, &intent)).collect();
        assert_eq!(same, std::array::from_fn::<bool, 5, _>(|other| other == n));
    }
}

/// Whoever has another compute instance of the same GPU instance has that one's node open, and may.
#[test]
fn what_compute_instances_share_need_not_be_closed_to_others() {
    let mut gpus = node_gpus();
    let part = MigDevice { profile: "1c.2g.20gb".into(), ..mig(0) };
    gpus.gpus[2].mig = MigMode::On(vec![part, mig(1)]);
    let mut files = driver();
    for node in files.nodes.0.values_mut() {
        node.container = format!("/dev/nvidia-caps/nvidia-cap{}", node.minor);
    }
    let numbers = |name: &str| {
        let mut devices = gpus.gpus.iter().flat_map(Gpu::devices);
        let device = devices.find(|device| device.name().to_string() == name).unwrap();
        exclusive_of(device, &files.nodes).map(|one| one.numbers.len())
    };
    let names: Vec<String> =
        gpus.gpus[2].devices().into_iter().map(|device| device.name().to_string()).collect();
    let counts: Vec<_> = names.iter().filter_map(|name| numbers(name)).collect();
    assert_eq!(counts, [1, 2], "{names:?}");
}
