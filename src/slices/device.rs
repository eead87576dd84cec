//! One device as a slice lists it: NVIDIA's attributes and capacities unchanged, then ours.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device as ApiDevice, DeviceAttribute, DeviceCapacity,
    DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::{
    Counters, ENTRIES_PER_DEVICE, Offer, PublishOptions, TAINTS_PER_DEVICE, Taint, Taints, VALUE_BYTES,
    partition, taint,
};
use crate::inventory::FaultKind;
use crate::model::gpu::{Device, DriverVersions, Gpu, Memory, MigCapacity, MigDevice, MigMode};
use crate::model::mig::{MigPlace, PossibleMig};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation};
use crate::sharing::{
    COMPUTE, DAEMON, DefaultRequest, GRANTABLE_MIB, ISOLATION, MEMORY, MIG_PARENT, MigBoard,
    PROCESSES_PER_SLOT, SHARES, SLOTS, Shareable,
};

/// Attributes and capacities at most that a board has beside what it can be cut into.
const BOARD_ENTRIES: usize = 16;
/// The attribute with all memory of a device, in MiB.
const TOTAL_MIB: &str = "totalMemoryMiB";

/// `device` as it is published. Names without a domain belong to the driver.
pub(super) fn published(driver: &DriverVersions, device: Device<'_>, how: PublishOptions<'_>) -> ApiDevice {
    let mut entries = Entries::default();
    entries.board(driver, device.gpu());
    let shared = match device {
        Device::Whole(gpu) if gpu.is_whole_or_cut() => {
            entries.parent(gpu, "gpu", how.taints);
            false
        }
        Device::Whole(gpu) => entries.gpu(gpu, how.offer),
        Device::Mig { parent, mig } => {
            entries.mig(parent, mig);
            false
        }
        Device::Place { parent, place } => {
            entries.part(parent, &place.profile, &place.capacity);
            false
        }
        Device::Parent(gpu) => {
            entries.parent(gpu, MIG_PARENT, how.taints);
            false
        }
    };
    let consumes_counters = match (device, how.counters) {
        (Device::Whole(gpu), Counters::Kept) => partition::consumption_of_whole(gpu),
        (Device::Place { parent, place }, _) => Some(partition::consumption(parent, place)),
        (Device::Parent(gpu), Counters::Kept) => partition::consumption_of_all(gpu),
        (Device::Whole(_) | Device::Parent(_), Counters::NotKept) | (Device::Mig { .. }, _) => None,
    };
    let name = device.name();
    let taints = how.taints.get(&name).map(Vec::as_slice).unwrap_or_default();
    ApiDevice {
        name: name.to_string(),
        attributes: some(entries.attributes),
        capacity: some(entries.capacity),
        allow_multiple_allocations: shared.then_some(true),
        consumes_counters: consumes_counters.map(|one| vec![one]),
        taints: (!taints.is_empty()).then(|| taints.iter().take(TAINTS_PER_DEVICE).map(tainted).collect()),
        ..ApiDevice::default()
    }
}

/// The API server says when it was added.
fn tainted(taint: &Taint) -> DeviceTaint {
    DeviceTaint {
        key: taint.key.clone(),
        value: (!taint.value.is_empty()).then(|| taint.value.clone()),
        effect: taint.effect.as_str().to_owned(),
        time_added: None,
    }
}

/// An empty map is not sent: the API server would store none, and it would look changed for ever.
fn some<V>(map: BTreeMap<String, V>) -> Option<BTreeMap<String, V>> {
    (!map.is_empty()).then_some(map)
}

#[derive(Default)]
struct Entries {
    attributes: BTreeMap<String, DeviceAttribute>,
    capacity: BTreeMap<String, DeviceCapacity>,
}

impl Entries {
    /// What a whole GPU and its MIG devices have in common.
    fn board(&mut self, driver: &DriverVersions, gpu: &Gpu) {
        self.string("productName", &gpu.product_name);
        self.string("brand", &gpu.brand);
        self.string("architecture", &gpu.architecture);
        let (major, minor) = gpu.compute_capability;
        self.version("cudaComputeCapability", &format!("{major}.{minor}"));
        self.version("driverVersion", &driver.driver);
        self.version("cudaDriverVersion", &driver.cuda);
        self.string("addressingMode", gpu.addressing_mode.as_deref().unwrap_or_default());
        self.string("resource.kubernetes.io/pciBusID", &gpu.pci.bus_id);
        self.string("resource.kubernetes.io/pcieRoot", gpu.pci.root.as_deref().unwrap_or_default());
        if let Some(node) = gpu.pci.numa_node {
            self.int("resource.kubernetes.io/numaNode", node.into());
        }
    }

    /// True if it can be allocated several times.
    fn gpu(&mut self, gpu: &Gpu, offer: Offer<'_>) -> bool {
        self.string("type", "gpu");
        self.string("uuid", gpu.uuid.as_str());
        if let Some(count) = gpu.multiprocessors {
            self.int("multiprocessors", count.into());
        }
        if let Memory::Known { total, .. } = gpu.memory {
            self.total(total);
        }
        match (offer.of(gpu), offer) {
            (Ok(shareable), Offer::Shares(policy)) => {
                self.grantable(&shareable, policy.daemon);
                self.shares(&shareable, policy.default_request);
                return true;
            }
            (Ok(shareable), Offer::WholeOnly(policy)) => self.grantable(&shareable, policy.daemon),
            (Err(_), _) => self.string(ISOLATION, "none"),
        }
        // A board whose memory is not known has none to be counted.
        if let Memory::Known { total, .. } = gpu.memory {
            self.bytes(MEMORY, total);
        }
        false
    }

    /// A board that our controller cuts: what it has, and what [`cut_of`] says. `kind`: the attribute `type`.
    fn parent(&mut self, gpu: &Gpu, kind: &str, taints: &Taints) {
        self.string("type", kind);
        self.string("uuid", gpu.uuid.as_str());
        self.string(ISOLATION, Isolation::Mig.as_str());
        if let Some(count) = gpu.multiprocessors {
            self.int("multiprocessors", count.into());
        }
        if let Memory::Known { total, .. } = gpu.memory {
            self.total(total);
            self.bytes(MEMORY, total);
        }
        // Where all of it is more than there is room for, places that are to be avoided are left out.
        let said = cut_avoiding(gpu, avoided(gpu, taints)).or_else(|| cut_of(gpu));
        for (name, value) in said.unwrap_or_default() {
            self.string(&name, &value);
        }
    }

    /// All memory that NVML reports, for selectors: the capacity is less where it is counted for shares.
    fn total(&mut self, total: Bytes) {
        self.int(TOTAL_MIB, i64::try_from(total.mib_floor()).unwrap_or(i64::MAX));
    }

    /// What shares may come to, for our controller: the same words whatever the API server keeps.
    fn grantable(&mut self, shareable: &Shareable, daemon: DaemonScope) {
        self.string(ISOLATION, shareable.isolation.as_str());
        // Less than 2^44: a board of more bytes than a quantity can hold is not shared.
        self.int(GRANTABLE_MIB, i64::try_from(shareable.memory.mib_floor()).unwrap_or(i64::MAX));
        self.int(SLOTS, shareable.slots.into());
        self.int(PROCESSES_PER_SLOT, shareable.slots_per_share.into());
        self.string(DAEMON, daemon.as_str());
    }

    /// The same for the scheduler. Each capacity has a default: of one without, the first share would take
    /// all.
    fn shares(&mut self, shareable: &Shareable, default_request: DefaultRequest) {
        let memory = shareable.memory.to_quantity_string();
        let mib = Bytes::from_mib(1).to_quantity_string();
        match default_request {
            DefaultRequest::Whole => {
                self.policed(MEMORY, &memory, Range { min: &mib, step: &mib, default: &memory })
            }
            DefaultRequest::Nothing => {
                self.policed(MEMORY, &memory, Range { min: "0", step: &mib, default: "0" })
            }
        }
        self.policed(COMPUTE, "100", Range { min: "0", step: "1", default: "0" });
        self.policed(SHARES, &shareable.slots.to_string(), Range { min: "1", step: "1", default: "1" });
    }

    fn mig(&mut self, parent: &Gpu, mig: &MigDevice) {
        self.string("uuid", mig.uuid.as_str());
        self.part(parent, &mig.profile, &mig.capacity);
        // Today's boards have 8 or 12 memory slices; no number that NVML makes up may overfill the device.
        let room = ENTRIES_PER_DEVICE - self.attributes.len() - self.capacity.len();
        let slices = mig.placement.start..mig.placement.start.saturating_add(mig.placement.size);
        for slice in slices.take(room) {
            self.count(&format!("memorySlice{slice}"), 1);
        }
    }

    /// What a MIG device has, whether it is made or not.
    fn part(&mut self, parent: &Gpu, profile: &str, capacity: &MigCapacity) {
        self.string("type", "mig");
        self.string("parentUUID", parent.uuid.as_str());
        self.string("profile", profile);
        self.string(ISOLATION, "mig");
        self.total(capacity.memory);
        self.bytes("memory", capacity.memory);
        self.count("multiprocessors", capacity.multiprocessors);
        self.count("copyEngines", capacity.copy_engines);
        self.count("decoders", capacity.decoders);
        self.count("encoders", capacity.encoders);
        self.count("jpegEngines", capacity.jpeg_engines);
        self.count("ofaEngines", capacity.ofa_engines);
    }

    /// Left out if there is nothing to say; cut to what the API server takes.
    fn string(&mut self, name: &str, value: &str) {
        let value = value[..value.floor_char_boundary(VALUE_BYTES)].to_owned();
        if !value.is_empty() {
            self.attribute(name, DeviceAttribute { string: Some(value), ..DeviceAttribute::default() });
        }
    }

    fn int(&mut self, name: &str, value: i64) {
        self.attribute(name, DeviceAttribute { int: Some(value), ..DeviceAttribute::default() });
    }

    /// Left out if it is no version.
    fn version(&mut self, name: &str, value: &str) {
        if let Some(version) = semver(value) {
            self.attribute(name, DeviceAttribute { version: Some(version), ..DeviceAttribute::default() });
        }
    }

    fn attribute(&mut self, name: &str, value: DeviceAttribute) {
        self.attributes.insert(name.to_owned(), value);
    }

    /// Beyond what a quantity can hold (2^63 - 1) is left out: no board has it.
    fn bytes(&mut self, name: &str, value: Bytes) {
        if i64::try_from(value.0).is_ok() {
            self.capacity(name, value.to_quantity_string());
        }
    }

    fn count(&mut self, name: &str, value: u32) {
        self.capacity(name, value.to_string());
    }

    fn capacity(&mut self, name: &str, value: String) {
        let capacity = DeviceCapacity { value: ApiQuantity(value), ..DeviceCapacity::default() };
        self.capacity.insert(name.to_owned(), capacity);
    }

    /// A capacity of which a share takes what it asks for, rounded up to a step.
    fn policed(&mut self, name: &str, value: &str, range: Range<'_>) {
        let quantity = |text: &str| ApiQuantity(text.to_owned());
        let policy = CapacityRequestPolicy {
            default: Some(quantity(range.default)),
            valid_range: Some(CapacityRequestPolicyRange {
                min: quantity(range.min),
                // The capacity itself.
                max: None,
                step: Some(quantity(range.step)),
            }),
            valid_values: None,
        };
        let capacity = DeviceCapacity { value: quantity(value), request_policy: Some(policy) };
        self.capacity.insert(name.to_owned(), capacity);
    }
}

/// What a board that is carved on demand can be cut into, as attributes. None of other boards, of one that has more to say
/// than a device has room for, and of one whose memory cannot be told: what consumes counters has a capacity.
pub(super) fn cut_of(gpu: &Gpu) -> Option<Vec<(String, String)>> {
    cut_avoiding(gpu, Vec::new())
}

/// Places at which no MIG device can be made for now: our controller sees the board alone, and goes around them. First where
/// one could not be ended, then where one could not be made lately.
fn avoided(gpu: &Gpu, taints: &Taints) -> Vec<MigPlace> {
    let MigMode::OnDemand(cut) = &gpu.mig else { return Vec::new() };
    let tainted = |kind: FaultKind| {
        let key = taint::key_of(kind);
        let of = move |place: &PossibleMig| taints.get(&place.device_name(gpu.minor));
        let is = move |place: &&PossibleMig| of(place).into_iter().flatten().any(|one| one.key == key);
        cut.places.iter().filter(is).map(|one| one.place)
    };
    let mut avoided = smallest(tainted(FaultKind::NotEnded).collect());
    for place in tainted(FaultKind::NotMade) {
        if !avoided.contains(&place) {
            avoided.push(place);
        }
    }
    avoided.retain(|place| !cut.foreign.contains(place));
    avoided
}

/// Those places that have no other of them within, each run of memory slices once. Whoever keeps clear of these keeps clear
/// of all, and can still use what is beside them: the whole board as a place would leave nothing.
fn smallest(places: Vec<MigPlace>) -> Vec<MigPlace> {
    let mut found: Vec<MigPlace> = Vec::new();
    for place in &places {
        let at = place.placement;
        let is_within = |other: &MigPlace| {
            other.placement != at && at.start <= other.placement.start && other.placement.end() <= at.end()
        };
        let is_told = found.iter().any(|told| told.placement == at);
        if !is_told && !places.iter().any(is_within) {
            found.push(*place);
        }
    }
    found
}

fn cut_avoiding(gpu: &Gpu, avoided: Vec<MigPlace>) -> Option<Vec<(String, String)>> {
    let MigMode::OnDemand(cut) = &gpu.mig else { return None };
    let Memory::Known { total, .. } = gpu.memory else { return None };
    i64::try_from(total.0).ok()?;
    let board = MigBoard::new(&cut.profiles(), &cut.foreign).avoiding(avoided);
    let said = board.attributes(VALUE_BYTES)?;
    (said.len() <= ENTRIES_PER_DEVICE - BOARD_ENTRIES).then_some(said)
}

/// What a share may ask for, and what it takes if it does not.
struct Range<'a> {
    min: &'a str,
    step: &'a str,
    default: &'a str,
}

/// `12.4` → `12.4.0`, `550.163.01` → `550.163.1`: what semver 2.0.0 takes, as NVIDIA's driver makes it.
/// `None` if the text does not begin with a number.
fn semver(text: &str) -> Option<String> {
    let mut parts = [0_u64; 3];
    for (part, text) in parts.iter_mut().zip(text.split('.')) {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        *part = text[..end].parse().ok()?;
    }
    Some(format!("{}.{}.{}", parts[0], parts[1], parts[2]))
}

#[cfg(test)]
mod tests {
    use super::super::content::tests::{gpu, mig, node_gpus, shared, whole};
    use super::*;
    use crate::sharing::SharingPolicy;
    use crate::slices::{Effect, Taints};

    #[test]
    fn versions_become_semantic() {
        for (text, expected) in [
            ("550.163.01", Some("550.163.1")),
            ("12.4", Some("12.4.0")),
            ("9.0", Some("9.0.0")),
            ("570", Some("570.0.0")),
            ("535.104.05.1", Some("535.104.5")),
            ("580.00.00", Some("580.0.0")),
            ("610.12-beta", Some("610.12.0")),
            ("", None),
            ("N/A", None),
            ("12.x", None),
            ("99999999999999999999999.1", None),
        ] {
            assert_eq!(semver(text).as_deref(), expected, "{text}");
        }
    }

    fn yaml(device: &ApiDevice) -> serde_json::Value {
        serde_json::to_value(device).unwrap()
    }

    #[test]
    fn a_whole_gpu_has_nvidias_attributes_and_ours() {
        let gpus = node_gpus(1);
        let device = published(&gpus.driver, Device::Whole(&gpus.gpus[0]), whole());
        assert_eq!(
            yaml(&device),
            serde_json::json!({
                "name": "gpu-0",
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": "GPU-00000000-0000-0000-0000-000000000000"},
                    "productName": {"string": "NVIDIA H100 80GB HBM3"},
                    "brand": {"string": "Nvidia"},
                    "architecture": {"string": "Hopper"},
                    "cudaComputeCapability": {"version": "9.0.0"},
                    "driverVersion": {"version": "550.163.1"},
                    "cudaDriverVersion": {"version": "12.4.0"},
                    "addressingMode": {"string": "HMM"},
                    "resource.kubernetes.io/pciBusID": {"string": "0000:10:00.0"},
                    "resource.kubernetes.io/pcieRoot": {"string": "pci0000:15"},
                    "resource.kubernetes.io/numaNode": {"int": 1},
                    "isolation": {"string": "mps"},
                    "mpsDaemon": {"string": "gpu"},
                    "multiprocessors": {"int": 132},
                    "totalMemoryMiB": {"int": 81_920},
                    "grantableMemoryMiB": {"int": 80_808},
                    "shareSlots": {"int": 16},
                    "processesPerSlot": {"int": 3},
                },
                "capacity": {"memory": {"value": "80Gi"}},
            })
        );
    }

    fn capacity(default_request: DefaultRequest) -> serde_json::Value {
        let policy = SharingPolicy { default_request, ..SharingPolicy::default() };
        let gpus = node_gpus(1);
        let device = yaml(&published(&gpus.driver, Device::Whole(&gpus.gpus[0]), shared(&policy)));
        assert_eq!(device["allowMultipleAllocations"], true);
        assert_eq!(device["attributes"]["isolation"]["string"], "mps");
        assert_eq!(device["attributes"]["totalMemoryMiB"]["int"], 81_920, "whatever is counted");
        device["capacity"].clone()
    }

    #[test]
    fn a_shareable_gpu_grants_what_driver_and_server_leave() {
        let range = |min: &str, step: &str, default: &str| serde_json::json!({"default": default, "validRange": {"min": min, "step": step}});
        assert_eq!(
            capacity(DefaultRequest::Whole),
            serde_json::json!({
                "memory": {"value": "80808Mi", "requestPolicy": range("1Mi", "1Mi", "80808Mi")},
                "compute": {"value": "100", "requestPolicy": range("0", "1", "0")},
                "shares": {"value": "16", "requestPolicy": range("1", "1", "1")},
            })
        );
        let zero = capacity(DefaultRequest::Nothing);
        assert_eq!(zero["memory"]["requestPolicy"], range("0", "1Mi", "0"));
    }

    #[test]
    fn a_gpu_that_is_not_shared_is_published_alike_everywhere() {
        let gpus = node_gpus(1);
        let device = Device::Whole(&gpus.gpus[0]);
        let policy = SharingPolicy { exclusive: vec!["all".parse().unwrap()], ..SharingPolicy::default() };
        let alone = published(&gpus.driver, device, shared(&policy));
        let how = PublishOptions { offer: Offer::WholeOnly(&policy), ..whole() };
        assert_eq!(alone, published(&gpus.driver, device, how));
        let yaml = yaml(&alone);
        assert_eq!(yaml["attributes"]["isolation"]["string"], "none");
        assert!(yaml["attributes"]["grantableMemoryMiB"].is_null(), "{yaml}");
    }

    /// Selectors for whole GPUs count in all memory, as NVIDIA's driver publishes it; that they can do on every release.
    #[test]
    fn the_total_is_told_alike_on_all_releases_and_the_capacity_is_what_can_be_given() {
        let policy = SharingPolicy::default();
        for (product, total, reserved, granted) in [
            ("NVIDIA A100-SXM4-80GB", 81_920, 571, 80_837),
            ("Tesla T4", 15_360, 445, 14_403),
            ("NVIDIA H200", 143_771, 615, 142_644),
        ] {
            let mut gpu = gpu(0);
            gpu.product_name = product.to_owned();
            gpu.memory = Memory::Known { total: Bytes::from_mib(total), reserved: Bytes::from_mib(reserved) };
            for (offer, memory) in [(Offer::Shares(&policy), granted), (Offer::WholeOnly(&policy), total)] {
                let how = PublishOptions { offer, ..whole() };
                let device = published(&DriverVersions::default(), Device::Whole(&gpu), how);
                let attribute = |name: &str| device.attributes.as_ref().unwrap()[name].int;
                assert_eq!(attribute(TOTAL_MIB), i64::try_from(total).ok(), "{product}");
                assert_eq!(attribute(GRANTABLE_MIB), i64::try_from(granted).ok(), "{product}");
                let capacity = &device.capacity.as_ref().unwrap()[MEMORY].value.0;
                assert_eq!(*capacity, Bytes::from_mib(memory).to_quantity_string(), "{product}");
            }
        }
    }

    #[test]
    fn taints_are_those_of_the_device() {
        let gpus = node_gpus(2);
        let taint =
            Taint { key: "gpu.nvidia.com/xid".into(), value: "79".into(), effect: Effect::NoSchedule };
        let bare = Taint { value: String::new(), effect: Effect::NoExecute, ..taint.clone() };
        let taints = Taints::from([(Device::Whole(&gpus.gpus[1]).name(), vec![taint, bare])]);
        let how = PublishOptions { taints: &taints, ..whole() };
        assert_eq!(published(&gpus.driver, Device::Whole(&gpus.gpus[0]), how).taints, None);
        assert_eq!(
            yaml(&published(&gpus.driver, Device::Whole(&gpus.gpus[1]), how))["taints"],
            serde_json::json!([
                {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"},
                {"key": "gpu.nvidia.com/xid", "effect": "NoExecute"},
            ])
        );
    }

    #[test]
    fn what_nvml_cannot_tell_is_left_out() {
        let mut gpu = gpu(3);
        gpu.memory = Memory::Unknown;
        gpu.multiprocessors = None;
        gpu.addressing_mode = None;
        gpu.pci = crate::model::gpu::Pci::default();
        gpu.product_name = "é".repeat(50);
        let device = yaml(&published(&DriverVersions::default(), Device::Whole(&gpu), whole()));
        assert_eq!(
            device,
            serde_json::json!({
                "name": "gpu-3",
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": "GPU-00000000-0000-0000-0000-000000000003"},
                    "productName": {"string": "é".repeat(32)},
                    "brand": {"string": "Nvidia"},
                    "architecture": {"string": "Hopper"},
                    "cudaComputeCapability": {"version": "9.0.0"},
                    "isolation": {"string": "none"},
                },
            })
        );
    }

    #[test]
    fn a_mig_device_has_its_engines_and_memory_slices() {
        let gpus = node_gpus(1);
        let parent = &gpus.gpus[0];
        let mig = mig(4, 2);
        let device = yaml(&published(&gpus.driver, Device::Mig { parent, mig: &mig }, whole()));
        assert_eq!(device["name"], "gpu-0-mig-1g10gb-19-4");
        for (name, value) in [
            ("type", "mig"),
            ("uuid", "MIG-4"),
            ("parentUUID", "GPU-00000000-0000-0000-0000-000000000000"),
            ("profile", "1g.10gb"),
            ("productName", "NVIDIA H100 80GB HBM3"),
            ("isolation", "mig"),
            ("resource.kubernetes.io/pcieRoot", "pci0000:15"),
        ] {
            assert_eq!(device["attributes"][name]["string"], value, "{name}");
        }
        assert_eq!(
            device["capacity"],
            serde_json::json!({
                "memory": {"value": "9728Mi"}, "multiprocessors": {"value": "16"},
                "copyEngines": {"value": "1"}, "decoders": {"value": "1"}, "encoders": {"value": "0"},
                "jpegEngines": {"value": "0"}, "ofaEngines": {"value": "0"},
                "memorySlice4": {"value": "1"}, "memorySlice5": {"value": "1"},
            })
        );
    }
}
