//! The faults of a device as taints (KEP-5055).

use super::{Effect, Taint, Taints};
use crate::inventory::{DeviceFault, DeviceFaults, FaultEffect, FaultKind};
use crate::model::gpu::{Device, Gpu, Health, NodeGpus};
use crate::model::names::DRIVER;

/// The taints of each device with faults, the worst first; a fault that is reported only has none. Keys are those of
/// NVIDIA's driver where it has them (`gpu.nvidia.com/xid`, its value the code; `gpu.nvidia.com/gpu-lost`).
pub fn taints(gpus: &NodeGpus, device_faults: &DeviceFaults) -> Taints {
    let of = |device: &Device<'_>| {
        let faults = device_faults.of(device).into_iter().filter_map(taint);
        faults.chain(changing(device.gpu())).collect::<Vec<_>>()
    };
    let devices = gpus.gpus.iter().flat_map(Gpu::devices);
    devices.map(|device| (device.name(), of(&device))).filter(|(_, taints)| !taints.is_empty()).collect()
}

/// A board that is to be used otherwise takes no new pods.
fn changing(gpu: &Gpu) -> Option<Taint> {
    let Health::Changing(_) = gpu.health else { return None };
    Some(Taint { key: format!("{DRIVER}/use-changes"), value: String::new(), effect: Effect::NoSchedule })
}

fn taint(fault: &DeviceFault) -> Option<Taint> {
    let effect = match fault.kind.effect() {
        FaultEffect::ReportOnly => return None,
        FaultEffect::NoNewPods => Effect::NoSchedule,
        FaultEffect::NoPods => Effect::NoExecute,
    };
    let value = match fault.kind {
        FaultKind::Xid(code) => code.to_string(),
        FaultKind::Lost
        | FaultKind::Unreachable
        | FaultKind::MpsDaemonDown
        | FaultKind::ShmFull
        | FaultKind::Withheld
        | FaultKind::NotMade
        | FaultKind::NotEnded => String::new(),
    };
    Some(Taint { key: key_of(fault.kind), value, effect })
}

pub(super) fn key_of(kind: FaultKind) -> String {
    format!("{DRIVER}/{}", kind.word())
}

#[cfg(test)]
mod tests {
    use super::super::content::tests::{node_gpus, whole};
    use super::*;
    use crate::inventory::{DaemonsDown, Inventory, Xid};
    use crate::model::names::NodeName;
    use crate::slices::{PublishOptions, desired, violations};

    #[test]
    fn what_keeps_pods_off_is_a_taint_and_the_rest_is_not() {
        let mut gpus = node_gpus(4);
        gpus.gpus[1].health = Health::Unhealthy("it fails".into());
        gpus.gpus[3].health = Health::Lost("it has left the bus".into());
        let xid = |code| Xid { gpu: gpus.gpus[0].uuid.clone(), code, gpu_instance: None };
        let down = DaemonsDown { device: gpus.gpus[0].uuid.clone(), reason: "it exited".into() };
        let device_faults = [63, 48, 79, u64::MAX]
            .iter()
            .fold(DeviceFaults::default(), |all, code| all.with_xid(&xid(*code), 1));
        let device_faults = device_faults.with_facts(&Inventory::Found(gpus.clone()), &[down], 1);
        let taints = taints(&gpus, &device_faults);
        let words = |name: &str| -> Vec<String> {
            let all = taints.get(&name.into()).into_iter().flatten();
            all.map(|taint| format!("{}={}:{}", taint.key, taint.value, taint.effect.as_str())).collect()
        };
        assert_eq!(
            words("gpu-0"),
            [
                "gpu.nvidia.com/gpu-lost=79:NoExecute",
                "gpu.nvidia.com/xid=48:NoSchedule",
                "gpu.nvidia.com/xid=18446744073709551615:NoSchedule",
                "gpu.nvidia.com/mps-daemon-down=:NoSchedule",
            ]
        );
        assert_eq!(words("gpu-1"), ["gpu.nvidia.com/unreachable=:NoSchedule"]);
        assert_eq!(words("gpu-2"), [""; 0]);
        assert_eq!(words("gpu-3"), ["gpu.nvidia.com/gpu-lost=:NoExecute"]);
        let slices = desired(&gpus, &NodeName::new("n"), PublishOptions { taints: &taints, ..whole() });
        assert_eq!(violations(&slices), []);
    }
}
