//! GPUs that the controller granted whole: held, and given to the container, as kube-scheduler's.

use super::*;

/// A claim for the fraction 1 that the controller gave one board. `fields` of its GpuShare.
fn granted_whole(uid: &str, result: Allocated, fields: serde_json::Value) -> AllocatedClaim {
    let mut claim = granted(uid, result, GRANTABLE_MIB, 100);
    claim.configs[0].parameters["devices"][0]["whole"] = json!(true);
    claim.configs[0].parameters["devices"][0]["slots"] = json!(16);
    let mut asked = json!({"fraction": "1"});
    asked.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    claim.configs.push(gpu_share(asked));
    claim
}

fn all(uid: &str, device: &str) -> AllocatedClaim {
    granted_whole(uid, result("gpu", device), json!({}))
}

#[test]
fn a_board_that_the_controller_gives_whole_is_as_one_of_the_schedulers_and_has_no_daemon() {
    let scheduled = planned(&claim("c1", vec![result("gpu", "gpu-0")]), &[]).unwrap();
    let plan = planned(&all("c1", "gpu-0"), &[]).unwrap();
    assert_eq!((&plan.cdi, &plan.intent.steps), (&scheduled.cdi, &scheduled.intent.steps));
    let device = &plan.intent.devices[0];
    assert_eq!((device.mode, device.placer), (HoldMode::Whole, Placer::Controller));
    // With the scheduler's form beside, where the API server keeps that.
    let mut counted = share("gpu", "gpu-0", GRANTABLE_MIB, 100);
    if let Access::Share { consumed, .. } = &mut counted.access {
        consumed.retain(|(name, _)| name != "shares");
        consumed.push(("shares".to_owned(), "16".parse().unwrap()));
    }
    let counted = planned(&granted_whole("c1", counted, json!({})), &[]).unwrap();
    assert_eq!(counted.intent.devices[0].mode, HoldMode::Whole);
    assert_eq!(counted.intent.steps.len(), 1, "{:?}", counted.intent.steps);
    // Whatever the node shares, and however.
    for policy in [
        SharingPolicy { exclusive: vec!["0".parse().unwrap()], ..SharingPolicy::default() },
        SharingPolicy { daemon: DaemonScope::Share, ..SharingPolicy::default() },
    ] {
        assert_eq!(planned_by(&policy, &node_gpus(), &all("c1", "gpu-0"), &[]), Ok(plan.clone()));
    }
}

#[test]
fn several_boards_of_one_claim_have_no_group() {
    let mut four = claim("c1", vec![result("gpus", "gpu-1"), result("gpus", "gpu-0")]);
    let mut entry = share_grant(&["gpus"], &[("gpu-1", "GPU-1", 1, 0), ("gpu-0", "GPU-0", 1, 0)]);
    for device in entry.parameters["devices"].as_array_mut().unwrap() {
        device["whole"] = json!(true);
    }
    four.configs = vec![entry];
    let plan = planned(&four, &[]).unwrap();
    assert!(
        !plan.intent.steps.iter().any(|step| matches!(step, Step::Mps { .. })),
        "{:?}",
        plan.intent.steps
    );
    assert!(plan.intent.devices.iter().all(|held| held.mode == HoldMode::Whole));
}

#[test]
fn nobody_else_gets_a_part_of_a_board_that_is_given_whole() {
    let held = [planned(&all("c1", "gpu-0"), &[]).unwrap().intent];
    for other in [
        all("c2", "gpu-0"),
        granted("c2", result("gpu", "gpu-0"), 1, 0),
        claim("c2", vec![share("gpu", "gpu-0", 1, 0)]),
        claim("c2", vec![result("gpu", "gpu-0")]),
    ] {
        let refused = planned(&other, &held);
        assert!(refused.as_ref().is_err_and(Refusal::is_double_allocation), "{refused:?}");
        assert!(words(refused).contains("in use by claim team/claim-c1"));
    }
    // And the other way round.
    for other in [granted("c1", result("gpu", "gpu-0"), 1, 0), claim("c1", vec![share("gpu", "gpu-0", 1, 0)])]
    {
        let held = [planned(&other, &[]).unwrap().intent];
        assert!(words(planned(&all("c2", "gpu-0"), &held)).contains("in use by claim team/claim-c1"));
        assert!(planned(&all("c2", "gpu-1"), &held).is_ok());
    }
}

#[test]
fn a_limit_beside_it_is_refused_and_every_level_of_isolation_is_met() {
    for (fields, field) in [(json!({"maxProcesses": 4}), "maxProcesses"), (json!({"compute": 50}), "compute")]
    {
        let words = words(planned(&granted_whole("c1", result("gpu", "gpu-0"), fields), &[]));
        assert!(words.contains(&format!("GpuShare.{field} limits a share, but device gpu-0")), "{words}");
    }
    let fields = json!({"minimumIsolation": "mig", "compute": 100, "maxProcesses": 1});
    assert!(planned(&granted_whole("c1", result("gpu", "gpu-0"), fields), &[]).is_ok());
    let mut sliced = all("c1", "gpu-0");
    sliced.configs.push(config(&[], "Long"));
    assert!(words(planned(&sliced, &[])).contains("sharing.strategy"));
    let mut mig = all("c1", "gpu-2-mig-1g10gb-19-0");
    mig.configs[0].parameters["devices"][0]["gpu"] = json!("MIG-0");
    assert!(words(planned(&mig, &[])).contains("MIG mode"));
}

/// Allocations of before say nothing of `whole`: such a claim goes on with MPS until its pod ends.
#[test]
fn what_was_granted_before_stays_a_share_with_mps() {
    let mut before = granted("c1", result("gpu", "gpu-0"), GRANTABLE_MIB, 100);
    before.configs.push(gpu_share(json!({"fraction": "1", "maxProcesses": 4})));
    before.configs[0].parameters["devices"][0]["slots"] = json!(2);
    let plan = planned(&before, &[]).unwrap();
    assert!(matches!(plan.intent.devices[0].mode, HoldMode::Share(_)));
    assert!(matches!(plan.intent.steps[0], Step::Mps { .. }));
    assert!(as_recorded(&before, &plan.intent));
    let whole = all("c1", "gpu-0");
    assert!(!as_recorded(&whole, &plan.intent), "allocated anew it is prepared anew");
    let recorded = planned(&whole, &[]).unwrap().intent;
    assert!(as_recorded(&whole, &recorded) && !as_recorded(&before, &recorded));
}
