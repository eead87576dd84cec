//! Boards as they are found.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::nvmlReturn_t;

use crate::rig::{Rig, load};

#[test]
#[allow(deprecated)] // the call by serial number
fn every_profile_tells_who_it_is() {
    for (profile, name, total_mib, compute) in [
        ("t4", "Tesla T4", 15360, (7, 5)),
        ("a30", "NVIDIA A30", 24576, (8, 0)),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, (8, 0)),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, (8, 0)),
        ("h100", "NVIDIA H100 80GB HBM3", 81559, (9, 0)),
        ("h200", "NVIDIA H200", 143_771, (9, 0)),
        ("b200", "NVIDIA B200", 183_359, (10, 0)),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0)),
        ("l40s", "NVIDIA L40S", 46068, (8, 9)),
    ] {
        let rig = Rig::new(&format!(r#"{{"profile":"{profile}","count":16,"host_seed":"one"}}"#));
        let nvml = rig.nvml();
        assert_eq!(nvml.device_count().expect("count"), 16);
        let mut seen = std::collections::BTreeSet::new();
        for index in 0..16 {
            let gpu = nvml.device_by_index(index).expect("by index");
            assert_eq!(gpu.name().expect("name"), name);
            assert_eq!(gpu.minor_number().expect("minor"), index);
            assert_eq!(gpu.index().expect("index"), index);
            let cc = gpu.cuda_compute_capability().expect("capability");
            assert_eq!((cc.major, cc.minor), compute);
            let memory = gpu.memory_info().expect("memory");
            assert_eq!(memory.total, total_mib << 20);
            assert_eq!(memory.free + memory.used + memory.reserved, memory.total);
            assert!(memory.reserved > 0);
            let uuid = gpu.uuid().expect("uuid");
            let pci = gpu.pci_info().expect("pci");
            let serial = gpu.serial().expect("serial");
            assert_eq!(nvml.device_by_uuid(uuid.as_str()).expect("by uuid").index().expect("index"), index);
            assert_eq!(
                nvml.device_by_pci_bus_id(pci.bus_id.as_str()).expect("by bus").index().expect("index"),
                index
            );
            assert_eq!(
                nvml.device_by_serial(serial.as_str()).expect("by serial").index().expect("index"),
                index
            );
            gpu.brand().expect("brand");
            gpu.architecture().expect("architecture");
            gpu.compute_mode().expect("compute mode");
            gpu.bar1_memory_info().expect("bar1");
            gpu.utilization_rates().expect("utilization");
            gpu.power_usage().expect("power");
            gpu.temperature(nvml_wrapper::enum_wrappers::device::TemperatureSensor::Gpu)
                .expect("temperature");
            assert!(matches!(gpu.fan_speed(0), Err(NvmlError::NotSupported)));
            assert!(matches!(gpu.numa_node_id(), Err(NvmlError::NotSupported)));
            assert!(seen.insert(uuid) && seen.insert(pci.bus_id) && seen.insert(serial));
        }
        assert!(matches!(nvml.device_by_index(16), Err(NvmlError::InvalidArg)));
        assert!(matches!(nvml.device_by_uuid("GPU-none"), Err(NvmlError::NotFound)));
    }
}

#[test]
fn names_stay_and_hosts_differ() {
    let uuid = |seed: &str| {
        let rig = Rig::new(&format!(r#"{{"profile":"h100","count":2,"host_seed":"{seed}"}}"#));
        rig.nvml().device_by_index(1).expect("gpu").uuid().expect("uuid")
    };
    assert_eq!(uuid("a"), uuid("a"));
    assert_ne!(uuid("a"), uuid("b"));
}

#[test]
fn versions_hang_together() {
    let rig = Rig::new(r#"{"profile":"h100","driver_version":"570.86.15"}"#);
    let nvml = rig.nvml();
    assert_eq!(nvml.sys_driver_version().expect("driver"), "570.86.15");
    assert_eq!(nvml.sys_nvml_version().expect("nvml"), "12.570.86.15");
    assert_eq!(nvml.sys_cuda_driver_version().expect("cuda"), 12080);
}

#[test]
fn without_a_driver_nothing_starts_and_nothing_works() {
    let rig = Rig::new(r#"{"profile":"h100","driver_loaded":false}"#);
    assert!(matches!(load(&rig.library()), Err(NvmlError::DriverNotLoaded)));
    let sys = rig.sys();
    let mut count = 0;
    // SAFETY: a valid pointer.
    assert_eq!(unsafe { sys.nvmlDeviceGetCount_v2(&mut count) }, 1);
    rig.cli(&["driver", "load"]);
    let nvml = rig.nvml();
    assert_eq!(nvml.device_count().expect("count"), 1);
}

#[test]
fn initialisations_are_counted() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let sys = rig.sys();
    // SAFETY: no arguments.
    let answers: Vec<nvmlReturn_t> = unsafe {
        vec![
            sys.nvmlShutdown(),
            sys.nvmlInit_v2(),
            sys.nvmlInitWithFlags(0),
            sys.nvmlShutdown(),
            sys.nvmlShutdown(),
            sys.nvmlShutdown(),
        ]
    };
    assert_eq!(answers, [1, 0, 0, 0, 0, 1]);
}

#[test]
fn a_board_lost_and_found() {
    let rig = Rig::new(r#"{"profile":"h100","count":2}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(1).expect("gpu");
    rig.cli(&["lose", "1"]);
    assert!(matches!(gpu.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(gpu.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(1), Err(NvmlError::GpuLost)));
    assert_eq!(nvml.device_count().expect("count"), 2);
    nvml.device_by_index(0).expect("the other").memory_info().expect("memory");
    rig.cli(&["recover", "1"]);
    gpu.memory_info().expect("memory");
}

#[test]
fn fields_of_a_board_can_be_set_while_it_runs() {
    let rig = Rig::new(r#"{"profile":"t4","count":1}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    rig.cli(&[
        "set",
        "0",
        "memory_mib=1000",
        "reserved_mib=100",
        "used_mib=50",
        "uuid=GPU-x",
        "numa_node_id=3",
        "compute_mode=3",
    ]);
    let memory = gpu.memory_info().expect("memory");
    assert_eq!((memory.total >> 20, memory.reserved >> 20, memory.used >> 20), (1000, 100, 50));
    assert_eq!(gpu.uuid().expect("uuid"), "GPU-x");
    assert_eq!(gpu.numa_node_id().expect("numa"), 3);
    assert_eq!(
        gpu.compute_mode().expect("mode"),
        nvml_wrapper::enum_wrappers::device::ComputeMode::ExclusiveProcess
    );
}

#[test]
fn what_a_model_lacks_is_not_supported() {
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(matches!(gpu.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(gpu.profile_info(0), Err(NvmlError::NotSupported)));
    assert_eq!(gpu.mig_device_count().expect("count"), 0);
    assert!(!gpu.mig_is_mig_device_handle().expect("is mig"));
    assert!(matches!(gpu.link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
}
