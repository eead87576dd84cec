//! Grants → MPS: what a client needs, what a daemon is set to, the client's environment.

use std::fmt::Write;

use crate::model::share::{MpsGroup, MpsLimits};

/// Where a container finds its daemon's socket.
pub const CLIENT_DIRECTORY: &str = "/run/nvidia-mps";
/// Where client and server exchange memory.
pub const SHM_DIRECTORY: &str = "/dev/shm";

/// What the daemon must be set to so that every claim on it gets what it was granted: the loosest of all.
/// None if nobody needs the daemon.
///
/// MPS has one default per device; a client's own variable can only lower it (MPS guide,
/// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`). So it is exact where all shares are of one size.
pub fn loosest<'a>(needs: impl IntoIterator<Item = &'a MpsLimits>) -> Option<MpsLimits> {
    needs.into_iter().cloned().reduce(|a, b| MpsLimits {
        memory: a.memory.iter().zip(&b.memory).map(|(a, b)| a.zip(*b).map(|(a, b)| a.max(b))).collect(),
        compute: a.compute.zip(b.compute).map(|(a, b)| a.max(b)),
    })
}

/// Variables of a client process of the group.
pub fn client_env(group: &MpsGroup, limits: &MpsLimits) -> Vec<(String, String)> {
    let mut env = vec![("CUDA_MPS_PIPE_DIRECTORY".to_owned(), CLIENT_DIRECTORY.to_owned())];
    let mut memory = String::new();
    for (ordinal, limit) in limits.memory.iter().take(group.devices().len()).enumerate() {
        if let Some(limit) = limit {
            let comma = if memory.is_empty() { "" } else { "," };
            // Writing to a String cannot fail.
            let _ = write!(memory, "{comma}{ordinal}={}M", limit.mib_floor());
        }
    }
    if !memory.is_empty() {
        env.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".to_owned(), memory));
    }
    if let Some(percent) = limits.compute {
        env.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), percent.get().to_string()));
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::quantity::Bytes;
    use crate::model::share::Percent;

    fn limits(mib: &[u64], compute: u8) -> MpsLimits {
        let memory = mib.iter().map(|mib| (*mib != 0).then(|| Bytes::from_mib(*mib))).collect();
        MpsLimits { memory, compute: Percent::try_from(compute).ok() }
    }

    #[test]
    fn a_daemon_is_as_loose_as_its_loosest_claim_and_no_looser() {
        assert_eq!(loosest(&[]), None);
        assert_eq!(loosest(&[limits(&[2000], 25)]), Some(limits(&[2000], 25)));
        let both = [limits(&[2000, 10], 25), limits(&[1000, 20], 50)];
        assert_eq!(loosest(&both), Some(limits(&[2000, 20], 50)));
        assert_eq!(loosest(&[limits(&[2000], 25), limits(&[0], 0)]), Some(limits(&[0], 0)));
    }

    #[test]
    fn the_client_gets_its_own_numbers() {
        let group = MpsGroup::new(["GPU-a".into(), "GPU-b".into()]);
        let env = client_env(&group, &limits(&[2000, 500], 25));
        let get = |name: &str| env.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        assert_eq!(get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), Some("0=2000M,1=500M"));
        assert_eq!(get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("25"));
        assert_eq!(get("CUDA_MPS_PIPE_DIRECTORY"), Some(CLIENT_DIRECTORY));
        let unlimited = client_env(&MpsGroup::new(["GPU-a".into()]), &limits(&[0], 0));
        assert_eq!(unlimited.len(), 1);
    }
}
