//! The owner of a process: the pod and container that its control group names.
//!
//! kubelet names a pod's group in one of two ways, whatever stands before it (the kubelet's `cgroupRoot`, a
//! container that the whole node runs in, `..` where the reader lives in a namespace of its own):
//!
//! | driver | group |
//! |---|---|
//! | cgroupfs | `kubepods/burstable/pod<uid>/<container>` |
//! | systemd | `kubepods-burstable-pod<uid, _ for ->.slice/cri-containerd-<container>.scope` |
//!
//! Pods of QoS class guaranteed have no level of their own. The runtime writes the container's group:
//! `cri-containerd-`, `crio-` or `docker-` before the id, or just the id.

use crate::model::names::PodUid;

/// The owner of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ProcessOwner {
    /// A pod's; the container's id as the runtime names it, where it could be read.
    Pod { pod: PodUid, container: Option<String> },
    /// No pod: a process of the host itself.
    Host,
    /// A pod's, nobody can say which: the name of its control group is longer than the kernel tells (`PATH_MAX`). No
    /// runtime makes such a name. Who may make groups below his own can.
    Hidden,
}

/// Reads `/proc/<pid>/cgroup`: one line in v2, one for each controller in v1, `number:controllers:path`. Whoever is
/// [`ProcessOwner::Hidden`] has no such text.
pub fn owner(text: &str) -> ProcessOwner {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(of_path).find(|owner| *owner != ProcessOwner::Host).unwrap_or(ProcessOwner::Host)
}

/// True if one of the lines names the root of its hierarchy.
pub fn is_at_a_root(text: &str) -> bool {
    text.lines().any(|line| line.splitn(3, ':').nth(2) == Some("/"))
}

/// The topmost pod in the path. What is below a pod's group belongs to the pod, whatever name its processes
/// gave it: a tenant who may make groups of its own must not pass for another.
fn of_path(path: &str) -> ProcessOwner {
    let mut parts = path.split('/');
    while let Some(part) = parts.next() {
        if let Some((pod, rest)) = pod(part) {
            let container = rest.or_else(|| parts.next()).and_then(container);
            return ProcessOwner::Pod { pod, container };
        }
    }
    ProcessOwner::Host
}

/// The pod that a group is of, and what else its name says. containerd with the wrong driver set keeps
/// `<slice>:cri-containerd:<container>` as one name.
fn pod(part: &str) -> Option<(PodUid, Option<&str>)> {
    if let Some(uid) = part.strip_prefix("pod") {
        return Some((uid_of(uid)?, None));
    }
    let (slice, rest) = part.split_once(':').map_or((part, None), |(slice, rest)| (slice, Some(rest)));
    let (_, uid) = slice.strip_suffix(".slice")?.rsplit_once("-pod")?;
    Some((uid_of(&uid.replace('_', "-"))?, rest))
}

/// A UUID, or the hash that a static pod has for one (32 digits without dashes). Groups such as
/// `podruntime.slice` and `podman` are none.
fn uid_of(text: &str) -> Option<PodUid> {
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_hexdigit());
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    let uid = matches!(lengths.as_slice(), [8, 4, 4, 4, 12] | [32]) && text.split('-').all(hex);
    uid.then(|| PodUid::new(text.to_ascii_lowercase()))
}

fn container(part: &str) -> Option<String> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit([':', '-']).next()?;
    (id.len() >= 12 && id.bytes().all(|b| b.is_ascii_hexdigit())).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
    const CID: &str = "8d3f0a6f0b5c4f7d9e1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f70";

    fn found(text: &str) -> Option<(String, Option<String>)> {
        match owner(&text.replace("UID", UID).replace("U_I_D", &UID.replace('-', "_")).replace("CID", CID)) {
            ProcessOwner::Pod { pod, container } => Some((pod.to_string(), container)),
            ProcessOwner::Host | ProcessOwner::Hidden => None,
        }
    }

    #[test]
    fn every_layout_names_pod_and_container() {
        let both = Some((UID.to_owned(), Some(CID.to_owned())));
        for text in [
            // v2, systemd: containerd, CRI-O, cri-dockerd
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/cri-containerd-CID.scope",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podU_I_D.slice/crio-CID.scope",
            "0::/kubepods.slice/kubepods-podU_I_D.slice/docker-CID.scope",
            // v2, cgroupfs, with and without a QoS level
            "0::/kubepods/burstable/podUID/CID",
            "0::/kubepods/podUID/CID",
            "0::/kubepods/besteffort/podUID/crio-CID",
            // below the container: CRI-O's split, a tenant with groups of its own
            "0::/kubepods.slice/kubepods-podU_I_D.slice/crio-CID.scope/container",
            "0::/kubepods/podUID/CID/init.scope/worker",
            // the reader in a namespace of its own
            "0::/../../kubepods-burstable-podU_I_D.slice/cri-containerd-CID.scope",
            "0::/../../../podUID/CID",
            // kind, a kubelet with a cgroupRoot, a node in a container
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podU_I_D.slice/cri-containerd-CID.scope",
            "0::/system.slice/docker-0123456789abcdef0123456789abcdef.scope/kubelet/kubepods/podUID/CID",
            "0::/edge-nodes.slice/edge-nodes-kubepods-burstable-podU_I_D.slice/cri-containerd-CID.scope",
            // v1 with many lines, some of them elsewhere
            "12:pids:/\n11:memory:/kubepods/burstable/podUID/CID\n1:name=systemd:/kubepods/burstable/podUID/CID\n0::/",
            "9:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/cri-containerd-CID.scope\n0::/",
            "4:cpu,cpuacct:/kubepods/burstable/podUID/CID",
            // containerd whose driver is not kubelet's
            "11:memory:/system.slice/containerd.service/kubepods-burstable-podU_I_D.slice:cri-containerd:CID",
        ] {
            assert_eq!(found(text), both, "{text}");
        }
    }

    #[test]
    fn a_static_pod_has_a_hash_and_a_pause_may_have_no_id() {
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(
            found(&format!("0::/kubepods/burstable/pod{hash}/CID")),
            Some((hash.into(), Some(CID.into())))
        );
        assert_eq!(found("0::/kubepods/podUID"), Some((UID.into(), None)));
        assert_eq!(found("0::/kubepods/podUID/init"), Some((UID.into(), None)));
        let upper = format!("0::/kubepods/pod{}/CID", UID.to_uppercase());
        assert_eq!(found(&upper), Some((UID.into(), Some(CID.into()))));
    }

    #[test]
    fn a_tenant_cannot_pass_for_another_pod() {
        let other = "ffffffff-4e5f-6071-8293-a4b5c6d7e8f9";
        let text = format!("0::/kubepods/podUID/CID/kubepods/pod{other}/CID");
        assert_eq!(found(&text), Some((UID.into(), Some(CID.into()))));
    }

    #[test]
    fn what_is_no_pods_is_the_hosts() {
        for text in [
            "",
            "0::/",
            "0::/system.slice/sshd.service",
            "0::/user.slice/user-0.slice/session-1.scope",
            "0::/podruntime.slice/kubelet.service",
            "0::/machine.slice/libpod-CID.scope/container",
            "0::/podman/CID",
            "0::/machine.slice/machine-podUI.slice/x",
            "0::/kubepods/pod0a1b2c3d/CID",
            "0::/kubepods/podzzzzzzzz-4e5f-6071-8293-a4b5c6d7e8f9/CID",
            "no line of this form",
            "1:2",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
    }
}
