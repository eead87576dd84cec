//! A claim's entries of `status.devices`.

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde_json::{Value, json};

use super::claim_health::{ClaimHealth, GpuPart};
use super::messages;
use crate::ledger::{HeldDevice, HoldMode, MigAsked};
use crate::model::gpu::Placement;
use crate::model::names::DRIVER;
use crate::model::share::{Grant, Isolation};

/// The types of condition that an entry can have. Kubernetes takes 8.
pub const CONDITIONS: [&str; 3] = [READY, WITHIN_LIMITS, DEVICE_HEALTHY];
const READY: &str = "Ready";
const WITHIN_LIMITS: &str = "WithinLimits";
const DEVICE_HEALTHY: &str = "DeviceHealthy";
/// What the API server takes of a condition's message.
const MESSAGE_BYTES: usize = 32 << 10;

/// One entry per held device, in the record's order. `before` are the entries that are stored now: a
/// condition that they have already keeps its time, others changed at `now`.
pub fn entries(
    devices: &[HeldDevice],
    claim_health: &ClaimHealth,
    before: &[AllocatedDeviceStatus],
    now: Timestamp,
) -> Vec<AllocatedDeviceStatus> {
    let mut entries: Vec<AllocatedDeviceStatus> = Vec::with_capacity(devices.len());
    for held in devices {
        let entry = entry(held, claim_health, now);
        // Two requests may look at one device with administrative access.
        if !entries.iter().any(|other| key(other) == key(&entry)) {
            let stored = before.iter().find(|stored| key(stored) == key(&entry));
            entries.push(stored.map_or_else(|| entry.clone(), |stored| keep_times(entry.clone(), stored)));
        }
    }
    entries
}

/// True if people would learn something from `after` that `before` does not say. How much a claim is over its
/// grant is no news: that number never stands still.
pub fn differ(before: &[AllocatedDeviceStatus], after: &[AllocatedDeviceStatus]) -> bool {
    let same = |after: &AllocatedDeviceStatus| {
        before.iter().any(|before| {
            key(before) == key(after)
                && before.data == after.data
                && gist(before).len() == gist(after).len()
                && gist(after).iter().all(|one| gist(before).contains(one))
        })
    };
    !after.iter().all(same)
}

/// The map key of the list.
fn key(entry: &AllocatedDeviceStatus) -> (&str, &str, &str, Option<&str>) {
    (&entry.driver, &entry.pool, &entry.device, entry.share_id.as_deref())
}

fn gist(entry: &AllocatedDeviceStatus) -> Vec<[&str; 4]> {
    fn of(one: &Condition) -> [&str; 4] {
        let message = if one.type_ == WITHIN_LIMITS { "" } else { &one.message };
        [&one.type_, &one.status, &one.reason, message]
    }
    entry.conditions.iter().flatten().map(of).collect()
}

fn keep_times(mut entry: AllocatedDeviceStatus, stored: &AllocatedDeviceStatus) -> AllocatedDeviceStatus {
    for condition in entry.conditions.iter_mut().flatten() {
        let mut old = stored.conditions.iter().flatten();
        if let Some(old) = old.find(|old| old.type_ == condition.type_ && old.status == condition.status) {
            condition.last_transition_time = old.last_transition_time.clone();
        }
    }
    entry
}

fn entry(held: &HeldDevice, claim_health: &ClaimHealth, now: Timestamp) -> AllocatedDeviceStatus {
    let mut conditions = vec![ready(held, now)];
    conditions.extend(within_limits(held, claim_health, now));
    conditions.push(healthy(held, claim_health, now));
    AllocatedDeviceStatus {
        driver: DRIVER.to_owned(),
        pool: held.answer.pool.to_string(),
        device: held.answer.device.to_string(),
        share_id: held.answer.share_id.clone(),
        data: Some(RawExtension(data(held))),
        conditions: Some(conditions),
        network_data: None,
    }
}

/// In place of a rung: nobody else uses the device.
const WHOLE: &str = "whole";

/// For programs. What does not apply is left out, so that no 0 is taken for a grant.
fn data(held: &HeldDevice) -> Value {
    let mut data = match held.mode {
        HoldMode::Whole => json!({"exclusive": true, "isolation": WHOLE}),
        HoldMode::Mig => json!({"exclusive": true, "isolation": Isolation::Mig.as_str()}),
        HoldMode::Admin => json!({"adminAccess": true}),
        HoldMode::Share(grant) => granted(&grant),
    };
    data["uuid"] = json!(held.uuid);
    if let Some(mig) = &held.mig {
        let Placement { start, size } = mig.place.placement;
        data["profile"] = json!(mig.profile);
        data["placement"] = json!({"start": start, "size": size});
        data["parentUUID"] = json!(held.gpu);
        if !mig.asked.is_nothing() {
            data["asked"] = asked(&mig.asked);
        }
    }
    data
}

/// What the claim's author wrote; the profile is the smallest that has it.
fn asked(asked: &MigAsked) -> Value {
    let MigAsked { memory, fraction, compute } = asked;
    let mut data = json!({});
    if let Some(memory) = memory {
        data["memoryMiB"] = json!(memory.mib_ceil());
    }
    if let Some(fraction) = fraction {
        data["fraction"] = json!(fraction);
    }
    if let Some(percent) = compute {
        data["computePercent"] = json!(percent.get());
    }
    data
}

fn granted(grant: &Grant) -> Value {
    let mut data = json!({"isolation": grant.isolation.as_str(), "maxProcesses": grant.processes});
    if messages::counts_memory(grant) {
        data["memoryMiB"] = json!(grant.memory.mib_floor());
        data["memoryPerProcessMiB"] = json!(grant.memory_per_process().mib_floor());
    }
    if let Some(percent) = grant.compute {
        data["computePercent"] = json!(percent.get());
    }
    data
}

fn ready(held: &HeldDevice, now: Timestamp) -> Condition {
    condition(READY, Ok("Prepared"), messages::held(held), now)
}

/// Only shares have limits that software keeps.
fn within_limits(held: &HeldDevice, claim_health: &ClaimHealth, now: Timestamp) -> Option<Condition> {
    let HoldMode::Share(grant) = held.mode else { return None };
    let (reason, message) = match claim_health.over(&held.gpu) {
        Some(usage) => (Err("OverGrant"), messages::over(&held.gpu, usage)),
        None if messages::counts_memory(&grant) => {
            (Ok("WithinGrant"), format!("not seen over its {} MiB", grant.memory.mib_floor()))
        }
        None => (Ok("NoGrant"), "no memory is counted for this share".to_owned()),
    };
    Some(condition(WITHIN_LIMITS, reason, message, now))
}

fn healthy(held: &HeldDevice, claim_health: &ClaimHealth, now: Timestamp) -> Condition {
    // MPS may be that of a MIG device.
    let places = [Some(&held.gpu), (held.uuid != held.gpu).then_some(&held.uuid)];
    let of = |place| claim_health.unhealthy_parts(place).map(move |(part, why)| (place, part, why));
    let unhealthy: Vec<_> = places.into_iter().flatten().flat_map(of).collect();
    let Some((_, first, _)) = unhealthy.first() else {
        return condition(DEVICE_HEALTHY, Ok("Healthy"), String::new(), now);
    };
    let reason = match first {
        GpuPart::Board => "DeviceUnhealthy",
        GpuPart::Mps => "MpsUnhealthy",
        GpuPart::Shm => "SharedMemoryFull",
        GpuPart::DriverFiles => "DriverFilesMissing",
    };
    let told: Vec<String> =
        unhealthy.iter().map(|(place, part, why)| messages::unhealthy(place, *part, why)).collect();
    condition(DEVICE_HEALTHY, Err(reason), told.join("; "), now)
}

/// True with an `Ok` reason, False with an `Err` one.
fn condition(type_: &str, reason: Result<&str, &str>, mut message: String, now: Timestamp) -> Condition {
    message.truncate(message.floor_char_boundary(MESSAGE_BYTES));
    Condition {
        type_: type_.to_owned(),
        status: if reason.is_ok() { "True" } else { "False" }.to_owned(),
        reason: reason.unwrap_or_else(|reason| reason).to_owned(),
        message,
        last_transition_time: Time(now),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conditions::messages::tests::{grant, grant_event_of, held, made, usage};
    use crate::conditions::{Concerned, GrantEvent, GrantEventKind, PartHealth};
    use crate::model::gpu::Health;
    use crate::model::quantity::Bytes;
    use crate::model::share::Percent;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn status<'a>(entry: &'a AllocatedDeviceStatus, type_: &str) -> (&'a str, &'a str, &'a str, i64) {
        let found = entry.conditions.iter().flatten().find(|one| one.type_ == type_).expect(type_);
        let since = found.last_transition_time.0.as_second();
        (&found.status, &found.reason, &found.message, since)
    }

    #[test]
    fn a_share_is_told_with_its_numbers() {
        let devices = [held(HoldMode::Share(grant(2000, 4, Some(25))))];
        let entries = entries(&devices, &ClaimHealth::default(), &[], at(100));
        let entry = serde_json::to_value(&entries[0]).unwrap();
        assert_eq!(entry["driver"], "gpu.nvidia.com");
        assert_eq!((&entry["pool"], &entry["device"]), (&json!("node-a"), &json!("gpu-0")));
        assert_eq!(entry["shareID"], "share-1");
        assert_eq!(
            entry["data"],
            json!({"memoryMiB": 2000, "memoryPerProcessMiB": 500, "computePercent": 25, "maxProcesses": 4,
                   "isolation": "mps", "uuid": "GPU-0"})
        );
        let (is, reason, message, since) = status(&entries[0], "Ready");
        assert_eq!((is, reason, since), ("True", "Prepared", 100));
        assert!(message.contains("2000 MiB") && message.contains("25 %"), "{message}");
        assert_eq!(status(&entries[0], "WithinLimits").0, "True");
        assert_eq!(status(&entries[0], "DeviceHealthy").0, "True");
        let types: Vec<_> = entries[0].conditions.iter().flatten().map(|one| one.type_.as_str()).collect();
        assert_eq!(types, CONDITIONS);
    }

    #[test]
    fn what_was_not_granted_is_not_made_a_number() {
        let devices = [HoldMode::Whole, HoldMode::Mig, HoldMode::Admin, HoldMode::Share(grant(0, 1, None))];
        for mode in devices {
            let entries = entries(&[held(mode)], &ClaimHealth::default(), &[], at(1));
            let data = entries[0].data.as_ref().unwrap().0.as_object().unwrap();
            assert!(!data.contains_key("memoryMiB") && !data.contains_key("computePercent"), "{data:?}");
            let limits = entries[0].conditions.iter().flatten().any(|one| one.type_ == "WithinLimits");
            assert_eq!(limits, matches!(mode, HoldMode::Share(_)), "only a share has limits");
            let alone = data.get("exclusive").map(|_| data["isolation"].as_str().unwrap());
            let expected = match mode {
                HoldMode::Whole => Some("whole"),
                HoldMode::Mig => Some("mig"),
                HoldMode::Admin | HoldMode::Share(_) => None,
            };
            assert_eq!(alone, expected, "{data:?}");
        }
    }

    #[test]
    fn a_mig_device_that_was_made_tells_what_it_is_and_what_was_asked() {
        let data = |held: HeldDevice| {
            entries(&[held], &ClaimHealth::default(), &[], at(1))[0].data.clone().unwrap().0
        };
        let mut by_name = made();
        by_name.mig.as_mut().unwrap().asked = MigAsked::default();
        let what = json!({"exclusive": true, "isolation": "mig", "uuid": "MIG-1", "profile": "1g.20gb",
            "placement": {"start": 4, "size": 2}, "parentUUID": "GPU-0"});
        assert_eq!(data(by_name), what);
        let mut expected = what;
        expected["asked"] = json!({"memoryMiB": 12_288});
        assert_eq!(data(made()), expected);
        let mut part = made();
        let asked = MigAsked {
            memory: None,
            fraction: Some("0.25".to_owned()),
            compute: Percent::try_from(30_u8).ok(),
        };
        part.mig.as_mut().unwrap().asked = asked;
        assert_eq!(data(part)["asked"], json!({"fraction": "0.25", "computePercent": 30}));
    }

    #[test]
    fn one_device_that_two_requests_look_at_is_one_entry() {
        let devices = [held(HoldMode::Admin), held(HoldMode::Admin)];
        assert_eq!(entries(&devices, &ClaimHealth::default(), &[], at(1)).len(), 1);
    }

    #[test]
    fn only_a_condition_that_turns_gets_a_new_time() {
        let devices = [held(HoldMode::Share(grant(2000, 1, None)))];
        let mut claim_health = ClaimHealth::default();
        let first = entries(&devices, &claim_health, &[], at(100));
        assert!(!differ(&first, &entries(&devices, &claim_health, &first, at(150))));

        assert!(claim_health.apply(&grant_event_of(GrantEventKind::Over, 2300)));
        let second = entries(&devices, &claim_health, &first, at(200));
        assert!(differ(&first, &second));
        let (is, reason, message, since) = status(&second[0], "WithinLimits");
        assert_eq!((is, reason, since), ("False", "OverGrant", 200));
        assert!(message.contains("2300 MiB") && message.contains("2000 MiB"), "{message}");
        assert_eq!(status(&second[0], "Ready").3, 100);

        // More of the same is no news.
        assert!(!claim_health.apply(&grant_event_of(GrantEventKind::Over, 2400)));
        assert!(!differ(&second, &entries(&devices, &claim_health, &second, at(250))));
        assert!(claim_health.apply(&grant_event_of(GrantEventKind::Within, 1000)));
        assert_eq!(status(&entries(&devices, &claim_health, &second, at(300))[0], "WithinLimits").3, 300);
        assert_eq!(claim_health, ClaimHealth::default());
    }

    #[test]
    fn an_unhealthy_gpu_is_reported_to_its_own_claims_only() {
        let mut claim_health = ClaimHealth::default();
        let part_health = |gpu: &str, part, health| PartHealth {
            gpu: gpu.into(),
            concerned: Concerned::EveryClaim,
            part,
            health,
        };
        let unhealthy = |why: &str| Health::Unhealthy(why.to_owned());
        assert!(claim_health.set_part_health(&part_health("GPU-0", GpuPart::Board, unhealthy("Xid 79"))));
        assert!(
            !claim_health.set_part_health(&part_health("GPU-0", GpuPart::Board, unhealthy("Xid 79"))),
            "known already"
        );
        assert!(claim_health.set_part_health(&part_health(
            "GPU-0",
            GpuPart::Mps,
            unhealthy("its server is in state FAULT")
        )));
        assert!(claim_health.set_part_health(&part_health("GPU-7", GpuPart::Board, unhealthy("Xid 48"))));
        let devices = [held(HoldMode::Whole)];
        let told = entries(&devices, &claim_health, &[], at(1));
        let (is, reason, message, _) = status(&told[0], "DeviceHealthy");
        assert_eq!((is, reason), ("False", "DeviceUnhealthy"));
        assert!(
            message.contains("Xid 79") && message.contains("FAULT") && !message.contains("48"),
            "{message}"
        );
        assert!(claim_health.set_part_health(&part_health("GPU-0", GpuPart::Board, Health::Healthy)));
        let told = entries(&devices, &claim_health, &[], at(1));
        assert_eq!(status(&told[0], "DeviceHealthy").1, "MpsUnhealthy");
    }

    #[test]
    fn mps_of_a_mig_device_is_told_to_the_claim_on_that_device() {
        let mut claim_health = ClaimHealth::default();
        let health = Health::Unhealthy("the daemon ended".to_owned());
        claim_health.set_part_health(&PartHealth {
            gpu: "MIG-1".into(),
            concerned: Concerned::EveryClaim,
            part: GpuPart::Mps,
            health,
        });
        let on = |uuid: &str| [HeldDevice { uuid: uuid.into(), ..held(HoldMode::Mig) }];
        let told = entries(&on("MIG-1"), &claim_health, &[], at(1));
        let (is, reason, message, _) = status(&told[0], "DeviceHealthy");
        assert_eq!((is, reason), ("False", "MpsUnhealthy"));
        assert_eq!(message, "MPS on MIG-1 does not work: the daemon ended");
        let beside = entries(&on("MIG-2"), &claim_health, &[], at(1));
        assert_eq!(status(&beside[0], "DeviceHealthy").0, "True");
    }

    #[test]
    fn entries_stay_within_what_kubernetes_takes() {
        let mut claim_health = ClaimHealth::default();
        let why = "é".repeat(40_000);
        claim_health.set_part_health(&PartHealth {
            gpu: "GPU-0".into(),
            concerned: Concerned::EveryClaim,
            part: GpuPart::Board,
            health: Health::Unhealthy(why),
        });
        claim_health.apply(&GrantEvent {
            usage: usage(u64::MAX >> 20, u64::MAX >> 20),
            ..grant_event_of(GrantEventKind::Over, 1)
        });
        let grant = Grant { memory: Bytes(u64::MAX), ..grant(1, 1, Some(100)) };
        let entries = entries(&[held(HoldMode::Share(grant))], &claim_health, &[], at(1));
        let conditions = entries[0].conditions.as_ref().unwrap();
        assert!(conditions.len() <= 8);
        for one in conditions {
            assert!(one.message.len() <= 32 << 10 && !one.reason.is_empty());
        }
        assert!(serde_json::to_vec(&entries[0].data).unwrap().len() <= 10 << 10);
    }
}
