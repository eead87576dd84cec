//! Names of CDI devices and files.

use super::render::CdiError;
use crate::model::names::{ClaimUid, DeviceName};

/// Vendor and class of every CDI device of ours.
pub const KIND: &str = "k8s.gpu.nvidia.com/claim";

/// The qualified CDI device id that kubelet passes to the runtime:
/// `k8s.gpu.nvidia.com/claim=<claim UID>-<device>[-<share id>]`. The same arguments give the same id
/// for ever: kubelet keeps the ids of an earlier answer. The share id
/// keeps two shares of one device apart (kubernetes/kubernetes#134519).
pub fn id(claim: &ClaimUid, device: &DeviceName, share_id: Option<&str>) -> String {
    format!("{KIND}={}", local_name(claim, device, share_id))
}

/// `k8s.gpu.nvidia.com-claim_<uid>.json`: the CDI convention for files that do not outlive a boot.
pub fn file_name(claim: &ClaimUid) -> String {
    format!("k8s.gpu.nvidia.com-claim_{claim}.json")
}

/// The claim whose file has this name, or `None` for a name that is not of our making.
pub fn claim_of(file_name: &str) -> Option<ClaimUid> {
    let uid = file_name.strip_prefix("k8s.gpu.nvidia.com-claim_")?.strip_suffix(".json")?;
    (!uid.is_empty()).then(|| ClaimUid::new(uid))
}

/// The part of [`id`] after `=`.
pub(super) fn local_name(claim: &ClaimUid, device: &DeviceName, share_id: Option<&str>) -> String {
    match share_id {
        None => format!("{claim}-{device}"),
        Some(share) => format!("{claim}-{device}-{share}"),
    }
}

/// CDI's rule for device names: ASCII letters, digits and `_-.:`, a letter or digit at both ends.
/// It also keeps path separators out of the file's name.
pub(super) fn checked(name: String) -> Result<String, CdiError> {
    let inner = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    let ends = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric());
    if ends && name.chars().all(inner) { Ok(name) } else { Err(CdiError::Name { name }) }
}
