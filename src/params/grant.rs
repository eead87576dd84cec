//! `ShareGrant`: what our controller gave a claim of its GPUs. It travels in the allocation, because API
//! servers before 1.36 keep no `consumedCapacity` (KEP-5075), as an entry with source FromClass: those of
//! source FromClaim are copies of what the claim's author wrote, and nobody grants himself anything.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Value, json};

use super::ParamsError;
use super::decode::read;
use super::gpu_share::API_VERSION;
use crate::model::gpu::Placement;
use crate::model::mig::MigPlace;
use crate::model::names::{DeviceName, DeviceUuid};
use crate::model::quantity::{Bytes, MIB, Quantity};
use crate::model::share::{Extent, Isolation, Percent};

pub(super) const KIND: &str = "ShareGrant";

/// What the controller granted one request: a part of each of its devices. At least one; each device and
/// each GPU once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareGrant {
    pub devices: Vec<GrantedDevice>,
}

/// A part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedDevice {
    /// As the result names it.
    pub device: DeviceName,
    /// The board that the controller meant: names go from board to board, UUIDs do not.
    pub gpu: DeviceUuid,
    /// For all processes of the claim together; whole MiB, at least one.
    pub memory: Bytes,
    /// Of the multiprocessors, for each process; none: not capped.
    pub compute: Option<Percent>,
    /// Blocks of client slots, at least one.
    pub slots: u32,
    /// The rung that was promised; the node may do better.
    pub isolation: Isolation,
    /// Of a GPU that is granted whole, memory, compute and slots are all that it has.
    pub extent: Extent,
}

impl ShareGrant {
    /// The part of `device`, if the grant has one.
    pub fn of(&self, device: &DeviceName) -> Option<&GrantedDevice> {
        self.devices.iter().find(|granted| granted.device == *device)
    }

    /// The opaque parameters that [`super::decode`] reads back.
    pub fn to_parameters(&self) -> Value {
        let devices: Vec<Value> = self.devices.iter().map(GrantedDevice::to_json).collect();
        json!({"apiVersion": API_VERSION, "kind": KIND, "devices": devices})
    }
}

impl GrantedDevice {
    fn to_json(&self) -> Value {
        let mut object = json!({
            "device": self.device,
            "gpu": self.gpu,
            "memory": self.memory.to_quantity_string(),
            "slots": self.slots,
            "isolation": self.isolation,
        });
        if let (Some(percent), Some(fields)) = (self.compute, object.as_object_mut()) {
            fields.insert("compute".to_owned(), percent.get().into());
        }
        // A share is written as nodes of earlier versions read it.
        if let Some(fields) = object.as_object_mut() {
            match self.extent {
                Extent::Part => {}
                Extent::Whole => {
                    fields.insert("whole".to_owned(), true.into());
                }
                Extent::Mig(MigPlace { profile_id, placement: Placement { start, size } }) => {
                    let place = json!({"profile": profile_id, "start": start, "size": size});
                    fields.insert("mig".to_owned(), place);
                }
            }
        }
        object
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Raw {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    devices: Vec<RawDevice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawDevice {
    device: String,
    gpu: String,
    memory: Quantity,
    compute: Option<u64>,
    slots: u32,
    isolation: String,
    #[serde(default)]
    whole: bool,
    mig: Option<RawMig>,
}

/// A place of a MIG device: NVML's id of the profile, the first memory slice, and how many.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawMig {
    profile: u32,
    start: u32,
    size: u32,
}

pub(super) fn decode(parameters: &Value) -> Result<ShareGrant, ParamsError> {
    let raw: Raw = read(parameters)?;
    if raw.devices.is_empty() {
        return Err(ParamsError::new("devices", "is empty; a grant is for at least one device"));
    }
    let devices: Vec<GrantedDevice> = raw
        .devices
        .into_iter()
        .enumerate()
        .map(|(index, device)| granted(&format!("devices[{index}]"), device))
        .collect::<Result<_, _>>()?;
    each_once(&devices)?;
    Ok(ShareGrant { devices })
}

fn granted(at: &str, raw: RawDevice) -> Result<GrantedDevice, ParamsError> {
    let wrong = |field: &str, problem: String| ParamsError { path: format!("{at}.{field}"), problem };
    for (field, name) in [("device", &raw.device), ("gpu", &raw.gpu)] {
        if name.is_empty() {
            return Err(wrong(field, "is empty".to_owned()));
        }
    }
    let memory = raw.memory.is_whole().then(|| raw.memory.units_ceil()).flatten();
    let Some(memory) = memory.filter(|bytes| *bytes > 0 && bytes % MIB == 0) else {
        let problem =
            format!("{} is not a whole number of MiB above 0; write one such as 2000Mi", raw.memory);
        return Err(wrong("memory", problem));
    };
    let compute = raw.compute.map(Percent::try_from).transpose();
    let compute = compute.map_err(|error| wrong("compute", error.to_string()))?;
    if raw.slots == 0 {
        return Err(wrong("slots", "0 is out of range; a share has at least 1 block of slots".to_owned()));
    }
    let isolation = Isolation::ALL.into_iter().find(|rung| rung.as_str() == raw.isolation);
    let isolation = isolation.ok_or_else(|| {
        wrong("isolation", format!("{:?} is not known; use none, mps, kernel or mig", raw.isolation))
    })?;
    let extent = match (raw.whole, raw.mig) {
        (false, None) => Extent::Part,
        (true, None) => Extent::Whole,
        (false, Some(RawMig { size: 0, .. })) => {
            return Err(wrong(
                "mig.size",
                "0 is out of range; a MIG device has at least 1 memory slice".to_owned(),
            ));
        }
        (false, Some(RawMig { profile, start, size })) => {
            Extent::Mig(MigPlace { profile_id: profile, placement: Placement { start, size } })
        }
        (true, Some(_)) => {
            return Err(wrong(
                "mig",
                "stands beside whole; a grant is of the whole GPU or of a MIG device".to_owned(),
            ));
        }
    };
    Ok(GrantedDevice {
        device: DeviceName::new(raw.device),
        gpu: DeviceUuid::new(raw.gpu),
        memory: Bytes(memory),
        compute,
        slots: raw.slots,
        isolation,
        extent,
    })
}

/// Two parts of one device would be one part of twice the size: nobody could tell whether it was meant.
fn each_once(devices: &[GrantedDevice]) -> Result<(), ParamsError> {
    let (mut names, mut boards) = (BTreeSet::new(), BTreeSet::new());
    for (index, granted) in devices.iter().enumerate() {
        let path = |field: &str| format!("devices[{index}].{field}");
        let again = |what: &str| format!("{what} is listed twice; a grant has each device once");
        if !names.insert(&granted.device) {
            return Err(ParamsError { path: path("device"), problem: again(granted.device.as_str()) });
        }
        if !boards.insert(&granted.gpu) {
            return Err(ParamsError { path: path("gpu"), problem: again(granted.gpu.as_str()) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::claim::ConfigSource;
    use crate::params::{self, Params};

    fn device(fields: Value) -> Value {
        let mut device =
            json!({"device": "gpu-3", "gpu": "GPU-3", "memory": "2000Mi", "slots": 1, "isolation": "mps"});
        device.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        device
    }

    fn grant(devices: &[Value]) -> Value {
        json!({"apiVersion": API_VERSION, "kind": "ShareGrant", "devices": devices})
    }

    fn decoded(parameters: &Value) -> Result<ShareGrant, ParamsError> {
        params::decode(parameters).map(|params| match params {
            Params::Grant(grant) => grant,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_grant_is_read_in_its_units() {
        let two = device(json!({"device": "gpu-4", "gpu": "GPU-4", "memory": "10Gi", "slots": 2}));
        let found = decoded(&grant(&[device(json!({"compute": 25})), two])).unwrap();
        let first = GrantedDevice {
            device: "gpu-3".into(),
            gpu: "GPU-3".into(),
            memory: Bytes::from_mib(2000),
            compute: Percent::try_from(25_u8).ok(),
            slots: 1,
            isolation: Isolation::Mps,
            extent: Extent::Part,
        };
        assert_eq!(found.of(&"gpu-3".into()), Some(&first));
        let second = found.of(&"gpu-4".into()).unwrap();
        assert_eq!((second.memory, second.compute, second.slots), (Bytes(10 << 30), None, 2));
        assert_eq!(found.of(&"gpu-5".into()), None);
    }

    #[test]
    fn the_form_on_the_wire_is_fixed() {
        let parameters =
            grant(&[device(json!({"compute": 25})), device(json!({"device": "gpu-4", "gpu": "GPU-4"}))]);
        assert_eq!(decoded(&parameters).unwrap().to_parameters(), parameters);
        let whole = grant(&[device(json!({"whole": true}))]);
        let read = decoded(&whole).unwrap();
        assert_eq!((read.devices[0].extent, read.to_parameters()), (Extent::Whole, whole));
        let carved = grant(&[device(json!({"mig": {"profile": 9, "start": 4, "size": 4}}))]);
        let read = decoded(&carved).unwrap();
        let place = MigPlace { profile_id: 9, placement: Placement { start: 4, size: 4 } };
        assert_eq!((read.devices[0].extent, read.to_parameters()), (Extent::Mig(place), carved));
    }

    #[test]
    fn each_mistake_is_named_with_its_path() {
        let one =
            |fields: Value| grant(&[device(json!({"device": "gpu-0", "gpu": "GPU-0"})), device(fields)]);
        let mut unknown = grant(&[device(json!({}))]);
        unknown["node"] = json!("a");
        for (parameters, path, word) in [
            (grant(&[]), "devices", "empty"),
            (unknown, "node", "unknown field"),
            (json!({"apiVersion": API_VERSION, "kind": "ShareGrant"}), "parameters", "devices"),
            (one(json!({"device": ""})), "devices[1].device", "empty"),
            (one(json!({"gpu": ""})), "devices[1].gpu", "empty"),
            (one(json!({"device": "gpu-0"})), "devices[1].device", "gpu-0 is listed twice"),
            (one(json!({"gpu": "GPU-0"})), "devices[1].gpu", "GPU-0 is listed twice"),
            (one(json!({"memory": "0"})), "devices[1].memory", "MiB"),
            (one(json!({"memory": "-1Mi"})), "devices[1].memory", "MiB"),
            (one(json!({"memory": "1048577"})), "devices[1].memory", "1048577"),
            (one(json!({"memory": "1048576500m"})), "devices[1].memory", "MiB"),
            (one(json!({"memory": "much"})), "devices[1].memory", "much"),
            (one(json!({"compute": 0})), "devices[1].compute", "1 to 100"),
            (one(json!({"compute": 101})), "devices[1].compute", "101"),
            (one(json!({"compute": "25"})), "devices[1].compute", "string"),
            (one(json!({"whole": "yes"})), "devices[1].whole", "true or false"),
            (one(json!({"mig": {"profile": 9, "start": 4, "size": 0}})), "devices[1].mig.size", "at least 1"),
            (one(json!({"mig": {"profile": 9, "start": 4}})), "devices[1].mig", "size"),
            (
                one(json!({"mig": {"profile": 9, "start": 0, "size": 1}, "whole": true})),
                "devices[1].mig",
                "whole",
            ),
            (one(json!({"slots": 0})), "devices[1].slots", "at least 1"),
            (one(json!({"slots": -1})), "devices[1].slots", "-1"),
            (one(json!({"isolation": "hard"})), "devices[1].isolation", "hard"),
            (one(json!({"memoryMiB": 5})), "devices[1].memoryMiB", "unknown field"),
        ] {
            let error = decoded(&parameters).expect_err(&parameters.to_string());
            assert_eq!(error.path, path, "{parameters}: {error}");
            assert!(error.problem.contains(word), "{parameters}: {error}");
        }
    }

    #[test]
    fn only_the_allocation_grants() {
        let params = params::decode(&grant(&[device(json!({}))])).unwrap();
        assert_eq!(params.check_source(ConfigSource::FromClass), Ok(()));
        let words = params.check_source(ConfigSource::FromClaim).unwrap_err().to_string();
        assert!(words.starts_with("kind: ") && words.contains("GpuShare"), "{words}");
        let share = params::decode(&json!({"apiVersion": API_VERSION, "kind": "GpuShare"})).unwrap();
        assert_eq!(share.check_source(ConfigSource::FromClaim), Ok(()));
    }

    fn extents() -> impl Strategy<Value = Extent> {
        let mig = (any::<u32>(), any::<u32>(), 1..=u32::MAX).prop_map(|(profile_id, start, size)| {
            Extent::Mig(MigPlace { profile_id, placement: Placement { start, size } })
        });
        prop_oneof![Just(Extent::Part), Just(Extent::Whole), mig]
    }

    proptest! {
        #[test]
        fn writing_and_reading_are_inverse(
            parts in proptest::collection::vec(
                (1..1_u64 << 30, 0..=100_u8, 1..=u32::MAX, 0..4_usize, extents()),
                1..32,
            ),
        ) {
            let devices = parts.into_iter().enumerate().map(|(n, (mib, percent, slots, rung, extent))| GrantedDevice {
                device: DeviceName::new(format!("gpu-{n}")),
                gpu: DeviceUuid::new(format!("GPU-{n}")),
                memory: Bytes::from_mib(mib),
                compute: Percent::try_from(percent).ok(),
                slots,
                isolation: Isolation::ALL[rung],
                extent,
            });
            let grant = ShareGrant { devices: devices.collect() };
            prop_assert_eq!(decoded(&grant.to_parameters()), Ok(grant));
        }
    }
}
