//! Events of a claim and its pods: what happened, with numbers, and what follows from it.

use super::claim_health::{
    DetourStage, GpuPart, GrantEvent, GrantEventKind, GrantUsage, MpsDetour, PartHealth,
};
use crate::ledger::{HeldDevice, HeldMig, HoldMode, Placer};
use crate::model::claim::ClaimRef;
use crate::model::names::DeviceUuid;
use crate::model::share::Grant;

/// One event, for the claim and its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimEvent {
    /// One word in CamelCase. Also the kind by which repetitions are told from news.
    pub reason: &'static str,
    pub event_type: EventType,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventType {
    Normal,
    Warning,
}

/// A claim that asked for shares is ready. None for devices that the scheduler gave: there is no number to tell.
pub fn prepared(devices: &[HeldDevice]) -> Option<ClaimEvent> {
    let is_share = |held: &&HeldDevice| match held.mode {
        HoldMode::Share(_) => true,
        HoldMode::Whole | HoldMode::Mig => held.placer == Placer::Controller,
        HoldMode::Admin => false,
    };
    let shares: Vec<String> = devices
        .iter()
        .filter(is_share)
        .map(|held| format!("{}: {}", held.answer.device, self::held(held)))
        .collect();
    (!shares.is_empty()).then(|| claim_event("SharePrepared", EventType::Normal, shares.join("; ")))
}

/// The claim exceeded its grant, lost a process for that, or is within the grant again.
pub fn grant_event(event: &GrantEvent) -> ClaimEvent {
    let GrantEvent { gpu, usage, .. } = event;
    match event.kind {
        GrantEventKind::Over => claim_event("GrantExceeded", EventType::Warning, over(gpu, *usage)),
        GrantEventKind::Ended { pid } => claim_event(
            "ProcessEnded",
            EventType::Warning,
            format!(
                "process {pid} was ended: the claim {}. Ask for more memory, or use less",
                over(gpu, *usage)
            ),
        ),
        GrantEventKind::Within => claim_event(
            "GrantKept",
            EventType::Normal,
            format!("within its grant on {gpu} again: {} of {}", mib(usage.used), mib(usage.granted)),
        ),
    }
}

/// A process goes around the claim's MPS daemon, or was ended for it.
pub fn detour_event(detour: &MpsDetour) -> ClaimEvent {
    let MpsDetour { gpu, pid, .. } = detour;
    let what_to_do = "Leave CUDA_MPS_PIPE_DIRECTORY in the container as it is";
    match detour.stage {
        DetourStage::Found => claim_event(
            "AroundMps",
            EventType::Warning,
            format!(
                "process {pid} works on {gpu} without the claim's MPS daemon, and has no limits. {what_to_do}"
            ),
        ),
        DetourStage::Ended => claim_event(
            "ProcessEnded",
            EventType::Warning,
            format!(
                "process {pid} was ended: it worked on {gpu} without the claim's MPS daemon. {what_to_do}"
            ),
        ),
    }
}

/// Nobody should have the claim's devices any more, and somebody holds them: which and who, as `who` says.
pub fn withheld(claim: &ClaimRef, who: &str) -> String {
    format!(
        "claim {claim} has ended or was taken away, but its devices are held: {who}. No other claim gets them \
         until these processes have ended; delete the pod"
    )
}

/// Why a device that a claim holds is not healthy: the node does not have it any more. `as_board`: its board is still
/// there, divided otherwise (MIG).
pub fn gone(device: &DeviceUuid, as_board: bool) -> String {
    let why = match as_board {
        true => "its GPU is divided otherwise now (MIG)",
        false => "a GPU was replaced, or the node moved to another machine",
    };
    format!(
        "{device} is not on the node any more: {why}. Delete the pods that use the claim, and new ones get a GPU that is there"
    )
}

/// The claim's container edits were written again.
pub fn edits_renewed() -> ClaimEvent {
    let message = "the driver's files or device nodes on the node have changed: containers of the claim that start \
                   from now on get the present ones, those that run keep the old ones";
    claim_event("ContainerEditsRenewed", EventType::Normal, message.to_owned())
}

/// A part of a GPU that the claim uses became unhealthy, or is healthy again.
pub fn health_event(part_health: &PartHealth) -> ClaimEvent {
    let PartHealth { gpu, part, health, .. } = part_health;
    match (health.problem(), part) {
        (Some(why), GpuPart::Board) => {
            claim_event("DeviceUnhealthy", EventType::Warning, unhealthy(gpu, *part, why))
        }
        (Some(why), GpuPart::Mps) => {
            claim_event("MpsUnhealthy", EventType::Warning, unhealthy(gpu, *part, why))
        }
        (Some(why), GpuPart::Shm) => {
            claim_event("SharedMemoryFull", EventType::Warning, unhealthy(gpu, *part, why))
        }
        (Some(why), GpuPart::DriverFiles) => {
            claim_event("DriverFilesMissing", EventType::Warning, unhealthy(gpu, *part, why))
        }
        (None, GpuPart::Board) => {
            claim_event("DeviceRecovered", EventType::Normal, format!("{gpu} works again"))
        }
        (None, GpuPart::Mps) => claim_event(
            "MpsRecovered",
            EventType::Normal,
            format!("MPS on {gpu} works again; programs that failed have to be started again"),
        ),
        (None, GpuPart::Shm) => claim_event(
            "SharedMemoryFreed",
            EventType::Normal,
            format!("there is room in the /dev/shm of {gpu} again"),
        ),
        (None, GpuPart::DriverFiles) => claim_event(
            "DriverFilesFound",
            EventType::Normal,
            format!("the driver's files for {gpu} are there again; containers that start get them"),
        ),
    }
}

fn claim_event(reason: &'static str, event_type: EventType, message: String) -> ClaimEvent {
    ClaimEvent { reason, event_type, message }
}

/// What the claim has of a device.
pub(super) fn held(held: &HeldDevice) -> String {
    match held.mode {
        HoldMode::Whole => format!("all of {}, for this claim alone", held.uuid),
        HoldMode::Mig => {
            let what = held.mig.as_ref().map(|mig| format!(" ({})", mig_device(mig, &held.gpu)));
            format!("{}{}, for this claim alone, isolation mig", held.uuid, what.unwrap_or_default())
        }
        HoldMode::Admin => format!("administrative access to {}", held.uuid),
        HoldMode::Share(grant) => format!("{} on {}", share(&grant), held.gpu),
    }
}

/// `profile 1g.10gb at memory slice 4 of GPU-…`
fn mig_device(mig: &HeldMig, gpu: &DeviceUuid) -> String {
    format!("profile {} at memory slice {} of {gpu}", mig.profile, mig.place.placement.start)
}

fn share(grant: &Grant) -> String {
    let memory = match grant.processes {
        _ if !counts_memory(grant) => "memory not counted".to_owned(),
        0 | 1 => mib(grant.memory),
        several => format!(
            "{} for at most {several} processes ({} each)",
            mib(grant.memory),
            mib(grant.memory_per_process())
        ),
    };
    let compute = match grant.compute {
        Some(percent) => format!("{percent} of compute"),
        None => "compute not capped".to_owned(),
    };
    format!("{memory}, {compute}, isolation {}", grant.isolation)
}

/// A share without memory is one that nothing is counted for.
pub(super) fn counts_memory(grant: &Grant) -> bool {
    grant.memory.mib_floor() > 0
}

pub(super) fn over(gpu: &DeviceUuid, usage: GrantUsage) -> String {
    format!("uses {} of the {} that it was granted on {gpu}", mib(usage.used), mib(usage.granted))
}

pub(super) fn unhealthy(gpu: &DeviceUuid, part: GpuPart, why: &str) -> String {
    match part {
        GpuPart::Board => format!("{gpu} is not healthy: {why}"),
        GpuPart::Mps => format!("MPS on {gpu} does not work: {why}"),
        GpuPart::Shm => format!("{gpu}: {why}"),
        GpuPart::DriverFiles => format!(
            "a container of the claim that restarts cannot start: {why}. Containers that run go on with the files that they have"
        ),
    }
}

fn mib(bytes: crate::model::quantity::Bytes) -> String {
    format!("{} MiB", bytes.mib_ceil())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::conditions::Concerned;
    use crate::ledger::{MigAsked, Placer};
    use crate::model::claim::PreparedDevice;
    use crate::model::gpu::{Health, Placement};
    use crate::model::mig::MigPlace;
    use crate::model::names::{ClaimUid, DeviceName, PoolName};
    use crate::model::quantity::Bytes;
    use crate::model::share::{Isolation, Percent};

    pub fn grant(mib: u64, processes: u32, compute: Option<u8>) -> Grant {
        Grant {
            memory: Bytes::from_mib(mib),
            compute: compute.map(|percent| Percent::try_from(percent).unwrap()),
            slots: 1,
            processes,
            isolation: Isolation::Mps,
        }
    }

    pub fn held(mode: HoldMode) -> HeldDevice {
        HeldDevice {
            answer: PreparedDevice {
                requests: vec!["gpu".to_owned()],
                pool: PoolName::new("node-a"),
                device: DeviceName::new("gpu-0"),
                cdi_ids: vec!["k8s.gpu.nvidia.com/claim=x".to_owned()],
                share_id: matches!(mode, HoldMode::Share(_)).then(|| "share-1".to_owned()),
            },
            uuid: "GPU-0".into(),
            gpu: "GPU-0".into(),
            mode,
            placer: Placer::default(),
            mig: None,
        }
    }

    /// Made for a claim that asked for 12 GiB.
    pub fn made() -> HeldDevice {
        let place = MigPlace { profile_id: 15, placement: Placement { start: 4, size: 2 } };
        let asked = MigAsked { memory: Some(Bytes(12 << 30)), ..MigAsked::default() };
        let mig = Some(HeldMig { profile: "1g.20gb".to_owned(), place, asked });
        HeldDevice { uuid: "MIG-1".into(), mig, ..held(HoldMode::Mig) }
    }

    pub fn usage(used: u64, granted: u64) -> GrantUsage {
        GrantUsage { used: Bytes::from_mib(used), granted: Bytes::from_mib(granted) }
    }

    /// Of the claim ml/train, granted 2000 MiB.
    pub fn grant_event_of(kind: GrantEventKind, used: u64) -> GrantEvent {
        let claim = ClaimRef { namespace: "ml".into(), name: "train".into(), uid: ClaimUid::new("uid-1") };
        GrantEvent { claim, gpu: "GPU-0".into(), usage: usage(used, 2000), kind }
    }

    #[test]
    fn a_prepared_share_says_what_was_granted() {
        let share = held(HoldMode::Share(grant(2000, 4, Some(25))));
        let told = prepared(&[held(HoldMode::Whole), share]).unwrap();
        assert_eq!((told.reason, told.event_type), ("SharePrepared", EventType::Normal));
        assert_eq!(
            told.message,
            "gpu-0: 2000 MiB for at most 4 processes (500 MiB each), 25 % of compute, isolation mps on GPU-0"
        );
        assert_eq!(prepared(&[held(HoldMode::Whole), held(HoldMode::Mig)]), None);
        // Its author wrote a GpuShare, with the fraction 1.
        let whole = HeldDevice { placer: Placer::Controller, ..held(HoldMode::Whole) };
        assert_eq!(prepared(&[whole]).unwrap().message, "gpu-0: all of GPU-0, for this claim alone");
        let made = HeldDevice { placer: Placer::Controller, ..made() };
        assert_eq!(
            prepared(&[made]).unwrap().message,
            "gpu-0: MIG-1 (profile 1g.20gb at memory slice 4 of GPU-0), for this claim alone, isolation mig"
        );
    }

    #[test]
    fn findings_have_both_numbers_and_what_to_do() {
        for (kind, reason, event_type) in [
            (GrantEventKind::Over, "GrantExceeded", EventType::Warning),
            (GrantEventKind::Ended { pid: 4711 }, "ProcessEnded", EventType::Warning),
            (GrantEventKind::Within, "GrantKept", EventType::Normal),
        ] {
            let told = grant_event(&grant_event_of(kind, 2300));
            assert_eq!((told.reason, told.event_type), (reason, event_type));
            assert!(told.message.contains("2300 MiB") && told.message.contains("2000 MiB"), "{told:?}");
        }
        assert!(
            grant_event(&grant_event_of(GrantEventKind::Ended { pid: 4711 }, 2300))
                .message
                .contains("process 4711 was ended")
        );
    }

    #[test]
    fn who_goes_around_mps_is_told_what_to_leave_alone() {
        let claim = ClaimRef { namespace: "team".into(), name: "c".into(), uid: "c".into() };
        let told =
            |stage| detour_event(&MpsDetour { claim: claim.clone(), gpu: "GPU-0".into(), pid: 4711, stage });
        for (stage, reason) in [(DetourStage::Found, "AroundMps"), (DetourStage::Ended, "ProcessEnded")] {
            let told = told(stage);
            assert_eq!((told.reason, told.event_type), (reason, EventType::Warning));
            for words in ["process 4711", "GPU-0", "CUDA_MPS_PIPE_DIRECTORY"] {
                assert!(told.message.contains(words), "{told:?}");
            }
        }
    }

    #[test]
    fn ill_health_and_recovery_have_events_of_their_own() {
        let concerned = Concerned::EveryClaim;
        let told = |part, health| {
            health_event(&PartHealth { gpu: "GPU-0".into(), concerned: concerned.clone(), part, health })
        };
        let ill = told(GpuPart::Board, Health::Unhealthy("Xid 79".to_owned()));
        assert_eq!((ill.reason, ill.event_type), ("DeviceUnhealthy", EventType::Warning));
        assert!(ill.message.ends_with("Xid 79"), "{ill:?}");
        assert_eq!(told(GpuPart::Mps, Health::Unhealthy(String::new())).reason, "MpsUnhealthy");
        assert_eq!(told(GpuPart::Board, Health::Healthy).reason, "DeviceRecovered");
        assert_eq!(told(GpuPart::Mps, Health::Healthy).reason, "MpsRecovered");
        let full = told(GpuPart::Shm, Health::Unhealthy("64 of 64 MiB".to_owned()));
        assert_eq!((full.reason, full.message.as_str()), ("SharedMemoryFull", "GPU-0: 64 of 64 MiB"));
        assert_eq!(told(GpuPart::Shm, Health::Healthy).reason, "SharedMemoryFreed");
    }
}
