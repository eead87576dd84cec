//! Converts NVML's values: strings are made harmless, numbers get the names that NVIDIA's DRA driver publishes.

use nvml_wrapper::enum_wrappers::device::{Brand, ComputeMode as RawMode};
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper_sys::bindings as sys;

use super::ComputeMode;
use crate::model::names::DeviceUuid;

/// The longest text that a DRA attribute can hold (resource.k8s.io/v1).
const MAX_TEXT: usize = 64;

/// A text from the driver, fit for logs and attributes: no control characters, at most 64 bytes.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    let mut clean = String::new();
    for c in String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).trim().chars() {
        let c = if c.is_control() { '\u{fffd}' } else { c };
        if clean.len() + c.len_utf8() > MAX_TEXT {
            break;
        }
        clean.push(c);
    }
    clean
}

/// A UUID: `GPU-…` or `MIG-…`. UUIDs become parts of file names, CDI names and environment variables, so anything else is
/// `None`.
pub(super) fn uuid(bytes: &[u8], prefix: &str) -> Option<DeviceUuid> {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    text.strip_prefix(prefix).filter(|rest| !rest.is_empty())?;
    DeviceUuid::parse(text).ok()
}

/// The brand as NVIDIA's DRA driver publishes it.
pub(super) fn brand(brand: &Brand) -> &'static str {
    match brand {
        Brand::Unknown => "Unknown",
        Brand::Quadro => "Quadro",
        Brand::Tesla => "Tesla",
        Brand::NVS => "NVS",
        Brand::GRID => "Grid",
        Brand::GeForce => "GeForce",
        Brand::Titan => "Titan",
        Brand::VApps => "NvidiaVApps",
        Brand::VPC => "NvidiaVPC",
        Brand::VCS => "NvidiaVCS",
        Brand::VWS => "NvidiaVWS",
        Brand::CloudGaming | Brand::VGaming => "NvidiaCloudGaming",
        Brand::QuadroRTX => "QuadroRTX",
        Brand::NvidiaRTX => "NvidiaRTX",
        Brand::Nvidia => "Nvidia",
        Brand::GeForceRTX => "GeForceRTX",
        Brand::TitanRTX => "TitanRTX",
    }
}

/// `None` for a mode that we never set.
pub(super) fn compute_mode(mode: &RawMode) -> Option<ComputeMode> {
    match mode {
        RawMode::Default => Some(ComputeMode::Default),
        RawMode::ExclusiveProcess => Some(ComputeMode::ExclusiveProcess),
        RawMode::ExclusiveThread | RawMode::Prohibited => None,
    }
}

pub(super) fn of_compute_mode(mode: ComputeMode) -> RawMode {
    match mode {
        ComputeMode::Default => RawMode::Default,
        ComputeMode::ExclusiveProcess => RawMode::ExclusiveProcess,
    }
}

/// The architecture as NVIDIA's DRA driver publishes it.
pub(super) fn architecture(architecture: &DeviceArchitecture) -> &'static str {
    match architecture {
        DeviceArchitecture::Kepler => "Kepler",
        DeviceArchitecture::Maxwell => "Maxwell",
        DeviceArchitecture::Pascal => "Pascal",
        DeviceArchitecture::Volta => "Volta",
        DeviceArchitecture::Turing => "Turing",
        DeviceArchitecture::Ampere => "Ampere",
        DeviceArchitecture::Ada => "Ada Lovelace",
        DeviceArchitecture::Hopper => "Hopper",
        DeviceArchitecture::Blackwell => "Blackwell",
        DeviceArchitecture::Unknown => "Unknown",
    }
}

/// CUDA cores per multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities"): NVML counts
/// cores and not multiprocessors of a whole GPU.
pub(super) fn cores_per_multiprocessor(compute_capability: (u32, u32)) -> Option<u32> {
    match compute_capability {
        (6, 0) | (7, _) | (8, 0) => Some(64),
        (5, _) | (6, _) | (8, _) | (9, _) | (10..=12, _) => Some(128),
        _ => None,
    }
}

/// NVML_DEVICE_ADDRESSING_MODE_* as NVIDIA's DRA driver publishes it.
pub(super) fn addressing_mode(number: u32) -> Option<&'static str> {
    match number {
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE => Some("None"),
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM => Some("HMM"),
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS => Some("ATS"),
        _ => None,
    }
}

/// `13.0` out of 13000.
pub(super) fn cuda_version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_end_at_the_first_zero_and_have_no_control_characters() {
        assert_eq!(text(b"NVIDIA H100\0garbage"), "NVIDIA H100");
        assert_eq!(text(b"a\nb\x1b[31m"), "a\u{fffd}b\u{fffd}[31m");
        assert_eq!(text(&[0xff, b'x']), "\u{fffd}x");
    }

    #[test]
    fn uuids_cannot_be_paths() {
        let good = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f";
        assert_eq!(uuid(format!("{good}\0rest").as_bytes(), "GPU-"), Some(good.into()));
        for bad in ["", "GPU-", "GPU-../x", "GPU-a/b", "MIG-1", "GPU-a b", "GPU-a\n", "GPU-é"] {
            assert_eq!(uuid(bad.as_bytes(), "GPU-"), None, "{bad:?}");
        }
        assert_eq!(uuid(format!("GPU-{}", "0".repeat(61)).as_bytes(), "GPU-"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_become_a_short_text(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let text = text(&bytes);
            prop_assert!(text.len() <= MAX_TEXT && !text.chars().any(char::is_control));
        }
    }
}
