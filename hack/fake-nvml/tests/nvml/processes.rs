//! The process lists.

use std::ptr;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::*;

use crate::rig::Rig;

#[test]
fn a_list_that_grows_says_how_much_room_it_needs() {
    let rig = Rig::new(r#"{"profile":"h100"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    let mut count = 0;
    // SAFETY: a live handle, valid pointers, room as stated.
    unsafe {
        let h = gpu.handle();
        assert_eq!(sys.nvmlDeviceGetComputeRunningProcesses_v3(h, &mut count, ptr::null_mut()), 0, "none");
        rig.cli(&["process", "add", "0", "10", "100"]);
        assert_eq!(sys.nvmlDeviceGetComputeRunningProcesses_v3(h, &mut count, ptr::null_mut()), 7);
        assert_eq!(count, 1);
        rig.cli(&["process", "add", "0", "11", "200"]);
        let mut room = [std::mem::zeroed::<nvmlProcessInfo_t>(); 2];
        assert_eq!(
            sys.nvmlDeviceGetComputeRunningProcesses_v3(h, &mut count, room.as_mut_ptr()),
            7,
            "one came between"
        );
        assert_eq!(count, 2);
        assert_eq!(sys.nvmlDeviceGetComputeRunningProcesses_v3(h, &mut count, room.as_mut_ptr()), 0);
        assert_eq!(room.map(|p| (p.pid, p.usedGpuMemory >> 20)), [(10, 100), (11, 200)]);
        assert_eq!(sys.nvmlDeviceGetComputeRunningProcesses_v3(h, ptr::null_mut(), ptr::null_mut()), 2);
    }
    assert_eq!(gpu.memory_info().expect("memory").used >> 20, 300);
}

#[test]
fn each_list_has_its_kind() {
    let rig = Rig::new(
        r#"{"profile":"h100","gpus":{"0":{"processes":[
            {"pid":1,"used_mib":418,"kind":"compute"},
            {"pid":2,"used_mib":438,"kind":"mps"},
            {"pid":3,"kind":"graphics"}]}}}"#,
    );
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let pids = |list: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| {
        list.iter().map(|p| p.pid).collect::<Vec<_>>()
    };
    assert_eq!(pids(gpu.running_compute_processes().expect("compute")), [1, 2]);
    assert_eq!(pids(gpu.running_compute_processes_v2().expect("compute v2")), [1, 2]);
    assert_eq!(pids(gpu.mps_running_compute_processes().expect("mps")), [2]);
    let graphics = gpu.running_graphics_processes().expect("graphics");
    assert!(matches!(graphics[0].used_gpu_memory, UsedGpuMemory::Unavailable));
    let sys = rig.sys();
    let mut room = [nvmlProcessDetail_v1_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
        usedGpuCcProtectedMemory: 0,
    }; 4];
    let mut list = nvmlProcessDetailList_v1_t {
        version: (size_of::<nvmlProcessDetailList_v1_t>() as u32) | 1 << 24,
        mode: 2,
        numProcArrayEntries: 4,
        procArray: room.as_mut_ptr(),
    };
    // SAFETY: a live handle and room as stated.
    assert_eq!(unsafe { sys.nvmlDeviceGetRunningProcessDetailList(gpu.handle(), &mut list) }, 0);
    assert_eq!((list.numProcArrayEntries, room[0].pid), (1, 2));
}

#[test]
fn only_the_living_when_asked_so() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("started");
    let rig = Rig::new(r#"{"profile":"t4"}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    rig.cli(&["process", "add", "0", &child.id().to_string(), "100", "--only-if-alive"]);
    assert_eq!(gpu.running_compute_processes_count().expect("count"), 1);
    child.kill().expect("killed");
    child.wait().expect("gone");
    assert_eq!(gpu.running_compute_processes_count().expect("count"), 0);
    assert_eq!(gpu.memory_info().expect("memory").used, 0);
}

#[test]
fn a_mig_device_lists_its_own() {
    let rig = Rig::new(
        r#"{"profile":"h100","gpus":{"0":{"mig":{"instances":[{"profile":"1g.10gb"},{"profile":"1g.10gb"}]},
            "processes":[{"pid":1,"used_mib":5,"gi":7},{"pid":2,"used_mib":5,"gi":8}]}}}"#,
    );
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert_eq!(gpu.running_compute_processes().expect("all").len(), 2);
    let second = gpu.mig_device_by_index(1).expect("second").running_compute_processes().expect("its own");
    assert_eq!(
        second.iter().map(|p| (p.pid, p.gpu_instance_id, p.compute_instance_id)).collect::<Vec<_>>(),
        [(2, Some(8), Some(0))]
    );
}

/// PID and percent of the samples since then, with the newest stamp; or the error.
fn samples(gpu: &nvml_wrapper::Device<'_>, since: u64) -> Result<(Vec<(u32, u32)>, u64), NvmlError> {
    let all = gpu.process_utilization_stats(since)?;
    let newest = all.iter().map(|sample| sample.timestamp).max().unwrap_or(0);
    Ok((all.iter().map(|sample| (sample.pid, sample.sm_util)).collect(), newest))
}

#[test]
fn samples_of_utilisation_are_told_once_and_those_of_mps_clients_as_their_servers() {
    let rig = Rig::new(r#"{"profile":"h100","gpus":{"0":{"processes":[{"pid":1,"used_mib":418}]}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    assert!(matches!(samples(&gpu, 0), Err(NvmlError::NotFound)), "nobody works");
    rig.cli(&["process", "add", "0", "1", "418", "--sm-util", "30"]);
    let (told, newest) = samples(&gpu, 0).expect("samples");
    assert_eq!(told, [(1, 30)]);
    assert!(matches!(samples(&gpu, newest + 60_000_000), Err(NvmlError::NotFound)), "nothing is newer");
    for (pid, kind) in [("2", "mps"), ("3", "mps")] {
        rig.cli(&["process", "add", "0", pid, "438", "--kind", kind, "--sm-util", "60"]);
    }
    assert_eq!(samples(&gpu, 0).expect("samples").0, [(1, 30)], "no server");
    rig.cli(&["process", "add", "0", "9", "66", "--kind", "server"]);
    assert_eq!(samples(&gpu, 0).expect("samples").0, [(1, 30), (9, 100)]);
    let pids: Vec<_> = gpu.running_compute_processes().expect("compute").iter().map(|p| p.pid).collect();
    assert_eq!(pids, [1, 2, 3, 9]);
    assert_eq!(gpu.mps_running_compute_processes().expect("mps").len(), 2, "the server is no client");
    rig.cli(&["set-mig", "0", "1g.10gb"]);
    assert!(matches!(samples(&gpu, 0), Err(NvmlError::NotSupported)));
}
