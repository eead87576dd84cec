//! MIG devices of one board, and the names of their profiles.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use crate::model::gpu::{MigCapacity, MigDevice};
use crate::model::quantity::{Bytes, MIB};

use super::look::Session;
use super::{NvmlError, raw};

/// No board has more: what is beyond is taken for nonsense.
const MAX_DEVICES: u32 = 64;

/// A board whose MIG devices are listed.
#[derive(Clone, Copy)]
pub(super) struct ParentGpu<'a, 'nvml> {
    pub device: &'a Device<'nvml>,
    pub index: u32,
    /// Total memory in bytes, where NVML tells.
    pub memory: Option<u64>,
}

/// All MIG devices of a board. One that cannot be described is left out with words; when one vanishes
/// while it is read (somebody re-configures MIG), the list is read once more.
pub(super) fn devices(
    session: &Session<'_>,
    board: ParentGpu<'_, '_>,
    left_out: &mut Vec<String>,
) -> Result<Vec<MigDevice>, NvmlError> {
    match list(session, board, left_out) {
        Err(e) if e.is_not_found() => list(session, board, left_out),
        other => other,
    }
}

fn list(
    session: &Session<'_>,
    board: ParentGpu<'_, '_>,
    left_out: &mut Vec<String>,
) -> Result<Vec<MigDevice>, NvmlError> {
    let on = Some(board.index);
    let count = session.call("nvmlDeviceGetMaxMigDeviceCount", on, || board.device.mig_device_count())?;
    let mut devices = Vec::new();
    for slot in 0..count.min(MAX_DEVICES) {
        let by_index = || board.device.mig_device_by_index(slot);
        match session.call("nvmlDeviceGetMigDeviceHandleByIndex", on, by_index) {
            Ok(mig) => match describe(session, board, &mig) {
                Ok(mig) => devices.push(mig),
                Err(e) if e.is_absence() || matches!(e, NvmlError::Nonsense { .. }) => {
                    left_out.push(format!("MIG device {slot}: {e}"));
                }
                Err(e) => return Err(e),
            },
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(devices)
}

fn describe(
    session: &Session<'_>,
    board: ParentGpu<'_, '_>,
    mig: &Device<'_>,
) -> Result<MigDevice, NvmlError> {
    let on = Some(board.index);
    let uuid = session.uuid(mig, on, "MIG-")?;
    let gpu_instance = session.call("nvmlDeviceGetGpuInstanceId", on, || raw::gpu_instance_id(mig))?;
    let compute_instance =
        session.call("nvmlDeviceGetComputeInstanceId", on, || raw::compute_instance_id(mig))?;
    let instance =
        session.call("nvmlDeviceGetGpuInstanceById", on, || raw::gpu_instance(board.device, gpu_instance))?;
    let attributes = session.call("nvmlDeviceGetAttributes_v2", on, || mig.attributes())?;
    let Some(total) = board.memory.filter(|total| *total > 0) else {
        let (call, what) =
            ("nvmlDeviceGetMemoryInfo", "no memory size for a board with MIG devices".to_owned());
        return Err(NvmlError::Nonsense { call, index: on, what });
    };
    let profile = Profile {
        compute_slices: attributes.compute_instance_slice_count,
        gpu_slices: attributes.gpu_instance_slice_count,
        memory_mib: attributes.memory_size_mb,
        suffix: suffix(session, board, instance.profile_id),
    };
    Ok(MigDevice {
        uuid,
        profile: profile.name(total),
        gpu_instance,
        compute_instance,
        profile_id: instance.profile_id,
        placement: instance.placement,
        capacity: MigCapacity {
            memory: Bytes::from_mib(attributes.memory_size_mb),
            multiprocessors: attributes.multiprocessor_count,
            copy_engines: attributes.shared_copy_engine_count,
            decoders: attributes.shared_decoder_count,
            encoders: attributes.shared_encoder_count,
            jpeg_engines: attributes.shared_jpeg_count,
            ofa_engines: attributes.shared_ofa_count,
        },
    })
}

/// Kinds of profiles whose names do not end with the memory: media extensions, graphics, or the want of them.
const SUFFIXED: [(u32, &str); 9] = [
    (sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, "+me"),
    (sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1, "+me"),
    (sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX, "+gfx"),
    (sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX, "+gfx"),
    (sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX, "+gfx"),
    (sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, "-me"),
    (sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME, "-me"),
    (sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, "+me.all"),
    (sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME, "+me.all"),
];

/// The end of a profile's name by its kind (`NVML_GPU_INSTANCE_PROFILE_*`).
pub(super) fn suffix_of(kind: u32) -> &'static str {
    SUFFIXED.into_iter().find(|(suffixed, _)| *suffixed == kind).map_or("", |(_, suffix)| suffix)
}

/// The same by the profile's id. The kind is found by asking for each one's id; boards answer NOT_SUPPORTED to kinds
/// that they do not have.
fn suffix(session: &Session<'_>, board: ParentGpu<'_, '_>, profile_id: u32) -> &'static str {
    let is_kind = |kind: u32| {
        let ask = || raw::profile_id(board.device, kind);
        session
            .call("nvmlDeviceGetGpuInstanceProfileInfo", Some(board.index), ask)
            .is_ok_and(|id| id == profile_id)
    };
    SUFFIXED.into_iter().find(|(kind, _)| is_kind(*kind)).map_or("", |(_, suffix)| suffix)
}

/// What a profile's name is made of.
pub(super) struct Profile {
    pub compute_slices: u32,
    pub gpu_slices: u32,
    pub memory_mib: u64,
    pub suffix: &'static str,
}

impl Profile {
    /// `1g.10gb`, or `1c.2g.20gb` for a compute instance that is only a part of its GPU instance
    /// (NVIDIA MIG User Guide, "Device Naming").
    pub fn name(&self, board_bytes: u64) -> String {
        let Self { compute_slices, gpu_slices, suffix, .. } = self;
        let part = if compute_slices == gpu_slices { String::new() } else { format!("{compute_slices}c.") };
        format!("{part}{gpu_slices}g.{}gb{suffix}", self.gigabytes(board_bytes))
    }

    /// The memory in the name is that of the eighths of the board that the instance takes, in GiB and
    /// rounded: on a board of 79.6 GiB, called 80, one eighth is `10gb` though it has 9984 MiB.
    fn gigabytes(&self, board_bytes: u64) -> u64 {
        const EIGHTHS: u128 = 8;
        let board = u128::from(board_bytes.max(1));
        let board_gib = board.div_ceil(1 << 30);
        let eighths = (u128::from(self.memory_mib) * u128::from(MIB) * EIGHTHS).div_ceil(board);
        let rounded = (eighths * board_gib * 2 + EIGHTHS) / (EIGHTHS * 2);
        u64::try_from(rounded).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(board_mib: u64, gpu_slices: u32, memory_mib: u64) -> String {
        let compute_slices = gpu_slices;
        Profile { compute_slices, gpu_slices, memory_mib, suffix: "" }.name(board_mib * MIB)
    }

    #[test]
    fn profiles_are_called_as_in_nvidias_listings() {
        // `nvidia-smi mig -lgip` of A100 80 GB, A100 40 GB, H100 80 GB, H200 and B200.
        for (board, slices, memory, expected) in [
            (81_920, 1, 9_728, "1g.10gb"),
            (81_920, 7, 80_640, "7g.80gb"),
            (40_960, 1, 4_864, "1g.5gb"),
            (40_960, 3, 19_968, "3g.20gb"),
            (81_559, 1, 9_984, "1g.10gb"),
            (81_559, 1, 20_096, "1g.20gb"),
            (81_559, 4, 40_448, "4g.40gb"),
            (143_771, 1, 16_384, "1g.18gb"),
            (143_771, 2, 33_024, "2g.35gb"),
            (143_771, 3, 71_168, "3g.71gb"),
            (183_359, 1, 20_992, "1g.23gb"),
            (183_359, 3, 91_648, "3g.90gb"),
        ] {
            assert_eq!(name(board, slices, memory), expected);
        }
    }

    #[test]
    fn a_part_of_a_gpu_instance_says_so() {
        let profile = Profile { compute_slices: 1, gpu_slices: 2, memory_mib: 20_096, suffix: "+me" };
        assert_eq!(profile.name(81_559 * MIB), "1c.2g.20gb+me");
    }

    #[test]
    fn no_number_is_too_large() {
        let profile = Profile { compute_slices: 1, gpu_slices: 1, memory_mib: u64::MAX, suffix: "" };
        assert!(profile.name(0).starts_with("1g."));
        assert!(profile.name(u64::MAX).starts_with("1g."));
    }
}
