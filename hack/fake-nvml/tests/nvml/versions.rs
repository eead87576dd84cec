//! Structs that carry their version: the right one is taken, others are refused.

use nvml_wrapper_sys::bindings::*;

use crate::rig::Rig;

/// Calls with the version word that the struct should have, then with others.
macro_rules! versioned {
    ($sys:ident, $gpu:ident, $($call:ident, $struct:ty, $version:literal $(, $field:ident = $value:expr)*;)*) => {$(
        // SAFETY: plain data for which zero is a value; a live handle.
        unsafe {
            let mut data: $struct = std::mem::zeroed();
            $(data.$field = $value;)*
            data.version = size_of::<$struct>() as u32 | $version << 24;
            assert_eq!($sys.$call($gpu, &raw mut data as *mut _), 0, "{} v{}", stringify!($call), $version);
            for wrong in [0, $version << 24, data.version + 1, size_of::<$struct>() as u32 | 9 << 24] {
                data.version = wrong;
                assert_eq!($sys.$call($gpu, &raw mut data as *mut _), 25, "{} {wrong:#x}", stringify!($call));
            }
        }
    )*};
}

#[test]
fn structs_of_a_board() {
    let rig = Rig::new(r#"{"profile":"h100","gpus":{"0":{"processes":[]}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    // SAFETY: used only while `gpu` lives.
    let h = unsafe { gpu.handle() };
    versioned! { sys, h,
        nvmlDeviceGetMemoryInfo_v2, nvmlMemory_v2_t, 2;
        nvmlDeviceGetPciInfoExt, nvmlPciInfoExt_v1_t, 1;
        nvmlDeviceGetAddressingMode, nvmlDeviceAddressingMode_v1_t, 1;
        nvmlDeviceGetCapabilities, nvmlDeviceCapabilities_v1_t, 1;
        nvmlDeviceGetTemperatureV, nvmlTemperature_v1_t, 1;
        nvmlDeviceGetRepairStatus, nvmlRepairStatus_v1_t, 1;
        nvmlDeviceGetRunningProcessDetailList, nvmlProcessDetailList_v1_t, 1;
    }
}

#[test]
fn structs_of_mig_profiles() {
    let rig = Rig::new(r#"{"profile":"h100","gpus":{"0":{"mig":{"instances":[{"profile":"2g.20gb"}]}}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    // SAFETY: plain data, live handles, pointers to structs of the stated version.
    unsafe {
        let h = gpu.handle();
        let mut two: nvmlGpuInstanceProfileInfo_v2_t = std::mem::zeroed();
        two.version = size_of_val(&two) as u32 | 2 << 24;
        assert_eq!(sys.nvmlDeviceGetGpuInstanceProfileInfoV(h, 1, &mut two), 0);
        assert_eq!(std::ffi::CStr::from_ptr(two.name.as_ptr()), c"MIG 2g.20gb");
        let mut three: nvmlGpuInstanceProfileInfo_v3_t = std::mem::zeroed();
        three.version = size_of_val(&three) as u32 | 3 << 24;
        assert_eq!(sys.nvmlDeviceGetGpuInstanceProfileInfoV(h, 7, (&raw mut three).cast()), 0);
        assert_eq!(std::ffi::CStr::from_ptr(three.name.as_ptr()), c"MIG 1g.10gb+me");
        assert_eq!(sys.nvmlDeviceGetGpuInstanceProfileInfoByIdV(h, 14, &mut two), 0);
        two.version = 0;
        assert_eq!(sys.nvmlDeviceGetGpuInstanceProfileInfoV(h, 1, &mut two), 25);

        let mut gi = std::ptr::null_mut();
        assert_eq!(sys.nvmlDeviceGetGpuInstanceById(h, 3, &mut gi), 0);
        let mut ci: nvmlComputeInstanceProfileInfo_v2_t = std::mem::zeroed();
        ci.version = size_of_val(&ci) as u32 | 2 << 24;
        assert_eq!(sys.nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, &mut ci), 0);
        assert_eq!(std::ffi::CStr::from_ptr(ci.name.as_ptr()), c"MIG 1c.2g.20gb");
        let mut ci: nvmlComputeInstanceProfileInfo_v3_t = std::mem::zeroed();
        ci.version = size_of_val(&ci) as u32 | 3 << 24;
        assert_eq!(sys.nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 1, 0, (&raw mut ci).cast()), 0);
    }
}

#[test]
fn field_values_answer_one_by_one() {
    let rig = Rig::new(r#"{"profile":"h100","gpus":{"0":{"recovery_action":1,"remapped_uncorrected":2}}}"#);
    let nvml = rig.nvml();
    let gpu = nvml.device_by_index(0).expect("gpu");
    let sys = rig.sys();
    // SAFETY: plain data; a live handle.
    unsafe {
        let mut values: [nvmlFieldValue_t; 3] = std::mem::zeroed();
        values[0].fieldId = 230;
        values[1].fieldId = 143;
        values[2].fieldId = 999;
        assert_eq!(sys.nvmlDeviceGetFieldValues(gpu.handle(), 3, values.as_mut_ptr()), 0);
        assert_eq!((values[0].nvmlReturn, values[0].value.uiVal), (0, 1));
        assert_eq!((values[1].nvmlReturn, values[1].value.uiVal), (0, 2));
        assert_eq!(values[2].nvmlReturn, 3);
    }
}
