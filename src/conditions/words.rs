//! Events of a claim and its pods: what happened, with numbers, and what follows from it.

use super::standing::{Ailment, Finding, Part, Seen, Usage};
use crate::ledger::{HeldDevice, HoldMode};
use crate::model::claim::ClaimRef;
use crate::model::names::DeviceUuid;
use crate::model::share::{Grant, Isolation};

/// One event, for the claim and its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Telling {
    /// One word in CamelCase. Also the kind by which repetitions are told from news.
    pub reason: &'static str,
    pub tone: Tone,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Normal,
    Warning,
}

/// A claim with shares is ready. None without a share: there is no number to tell.
pub fn prepared(devices: &[HeldDevice]) -> Option<Telling> {
    let shares: Vec<String> = devices
        .iter()
        .filter(|held| matches!(held.mode, HoldMode::Share(_)))
        .map(|held| format!("{}: {}", held.answer.device, self::held(held)))
        .collect();
    let by_mps =
        |held: &HeldDevice| matches!(held.mode, HoldMode::Share(grant) if grant.isolation == Isolation::Mps);
    let shm = devices.iter().any(by_mps).then(|| SHM.to_owned());
    (!shares.is_empty()).then(|| {
        let all: Vec<_> = shares.into_iter().chain(shm).collect();
        telling("SharePrepared", Tone::Normal, all.join("; "))
    })
}

/// The watchdog found something.
pub fn found(finding: &Finding) -> Telling {
    let Finding { gpu, usage, .. } = finding;
    match finding.seen {
        Seen::Over => telling("GrantExceeded", Tone::Warning, over(gpu, *usage)),
        Seen::Ended { pid } => telling(
            "ProcessEnded",
            Tone::Warning,
            format!(
                "process {pid} was ended: the claim {}. Ask for more memory, or use less",
                over(gpu, *usage)
            ),
        ),
        Seen::Bypass { pid } => telling(
            "LimitBypassed",
            Tone::Warning,
            format!("{}; leave CUDA_MPS_PIPE_DIRECTORY as it is set", bypass(gpu, pid, *usage)),
        ),
        Seen::Within => telling(
            "GrantKept",
            Tone::Normal,
            format!("within its grant on {gpu} again: {} of {}", mib(usage.used), mib(usage.granted)),
        ),
    }
}

/// Nobody should have the claim's devices any more, and somebody holds them: which and who, as `who` says.
pub fn withheld(claim: &ClaimRef, who: &str) -> String {
    format!(
        "claim {claim} has ended or was taken away, but its devices are held: {who}. They are given to nobody else \
         until these processes have ended; delete the pod"
    )
}

/// A part of a board that the claim is on fell ill, or is well again.
pub fn ailing(ailment: &Ailment) -> Telling {
    let Ailment { gpu, part, health } = ailment;
    match (health.ill(), part) {
        (Some(why), Part::Board) => telling("DeviceUnhealthy", Tone::Warning, ill(gpu, *part, why)),
        (Some(why), Part::Mps) => telling("MpsUnhealthy", Tone::Warning, ill(gpu, *part, why)),
        (Some(why), Part::Shm) => telling("SharedMemoryFull", Tone::Warning, ill(gpu, *part, why)),
        (None, Part::Board) => telling("DeviceRecovered", Tone::Normal, format!("{gpu} works again")),
        (None, Part::Mps) => telling(
            "MpsRecovered",
            Tone::Normal,
            format!("MPS on {gpu} works again; programs that failed have to be started again"),
        ),
        (None, Part::Shm) => telling(
            "SharedMemoryFreed",
            Tone::Normal,
            format!("there is room in the /dev/shm of {gpu} again"),
        ),
    }
}

fn telling(reason: &'static str, tone: Tone, message: String) -> Telling {
    Telling { reason, tone, message }
}

/// What the claim has of a device.
pub(super) fn held(held: &HeldDevice) -> String {
    match held.mode {
        HoldMode::Whole => format!("all of {}, for this claim alone", held.uuid),
        HoldMode::Mig => format!("{}, for this claim alone, isolation mig", held.uuid),
        HoldMode::Admin => format!("administrative access to {}", held.uuid),
        HoldMode::Share(grant) => format!("{} on {}", share(&grant), held.gpu),
    }
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

/// A pod that mounts something of its own there finds the GPU's instead.
const SHM: &str = "/dev/shm in its containers is the GPU's, shared with the GPU's other shares, in place of any volume \
                   that the pod mounts there";

/// A share without memory is one that nothing is counted for.
pub(super) fn counts_memory(grant: &Grant) -> bool {
    grant.memory.mib_floor() > 0
}

pub(super) fn over(gpu: &DeviceUuid, usage: Usage) -> String {
    format!("uses {} of the {} that it was granted on {gpu}", mib(usage.used), mib(usage.granted))
}

pub(super) fn bypass(gpu: &DeviceUuid, pid: u32, usage: Usage) -> String {
    format!("process {pid} uses {gpu} past the MPS server, where no limit holds it: {}", over(gpu, usage))
}

pub(super) fn ill(gpu: &DeviceUuid, part: Part, why: &str) -> String {
    match part {
        Part::Board => format!("{gpu} is not healthy: {why}"),
        Part::Mps => format!("MPS on {gpu} does not work: {why}"),
        Part::Shm => format!("{gpu}: {why}"),
    }
}

fn mib(bytes: crate::model::quantity::Bytes) -> String {
    format!("{} MiB", bytes.mib_ceil())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ledger::Placer;
    use crate::model::claim::PreparedDevice;
    use crate::model::gpu::Health;
    use crate::model::names::{ClaimUid, DeviceName, PoolName};
    use crate::model::quantity::Bytes;
    use crate::model::share::Percent;

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
        }
    }

    pub fn usage(used: u64, granted: u64) -> Usage {
        Usage { used: Bytes::from_mib(used), granted: Bytes::from_mib(granted) }
    }

    /// Of the claim ml/train, granted 2000 MiB.
    pub fn finding(seen: Seen, used: u64) -> Finding {
        let claim = ClaimRef { namespace: "ml".into(), name: "train".into(), uid: ClaimUid::new("uid-1") };
        Finding { claim, gpu: "GPU-0".into(), usage: usage(used, 2000), seen }
    }

    #[test]
    fn a_prepared_share_says_what_was_granted() {
        let share = held(HoldMode::Share(grant(2000, 4, Some(25))));
        let told = prepared(&[held(HoldMode::Whole), share]).unwrap();
        assert_eq!((told.reason, told.tone), ("SharePrepared", Tone::Normal));
        assert_eq!(
            told.message,
            format!(
                "gpu-0: 2000 MiB for at most 4 processes (500 MiB each), 25 % of compute, isolation mps on GPU-0; {SHM}"
            )
        );
        assert_eq!(prepared(&[held(HoldMode::Whole), held(HoldMode::Mig)]), None);
    }

    #[test]
    fn findings_have_both_numbers_and_what_to_do() {
        for (seen, reason, tone) in [
            (Seen::Over, "GrantExceeded", Tone::Warning),
            (Seen::Ended { pid: 4711 }, "ProcessEnded", Tone::Warning),
            (Seen::Bypass { pid: 4711 }, "LimitBypassed", Tone::Warning),
            (Seen::Within, "GrantKept", Tone::Normal),
        ] {
            let told = found(&finding(seen, 2300));
            assert_eq!((told.reason, told.tone), (reason, tone));
            assert!(told.message.contains("2300 MiB") && told.message.contains("2000 MiB"), "{told:?}");
        }
        assert!(found(&finding(Seen::Ended { pid: 4711 }, 2300)).message.contains("process 4711 was ended"));
    }

    #[test]
    fn illness_and_recovery_are_told_apart() {
        let told = |part, health| ailing(&Ailment { gpu: "GPU-0".into(), part, health });
        let ill = told(Part::Board, Health::Unhealthy("Xid 79".to_owned()));
        assert_eq!((ill.reason, ill.tone), ("DeviceUnhealthy", Tone::Warning));
        assert!(ill.message.ends_with("Xid 79"), "{ill:?}");
        assert_eq!(told(Part::Mps, Health::Unhealthy(String::new())).reason, "MpsUnhealthy");
        assert_eq!(told(Part::Board, Health::Healthy).reason, "DeviceRecovered");
        assert_eq!(told(Part::Mps, Health::Healthy).reason, "MpsRecovered");
        let full = told(Part::Shm, Health::Unhealthy("64 of 64 MiB".to_owned()));
        assert_eq!((full.reason, full.message.as_str()), ("SharedMemoryFull", "GPU-0: 64 of 64 MiB"));
        assert_eq!(told(Part::Shm, Health::Healthy).reason, "SharedMemoryFreed");
    }
}
