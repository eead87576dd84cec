//! Ports of a node that pods take for themselves, as kube-scheduler's filter NodePorts has it.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec};

/// Host ports of a pod that are looked at. Pods have a few.
const PORTS_MAX: usize = 32;
/// Bytes of an address: the longest of IPv6 has 45.
const ADDRESS_BYTES_MAX: usize = 45;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// A port that a pod takes of its node, and of which of its addresses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    pub protocol: Protocol,
    pub port: u16,
    /// None: all of them.
    pub address: Option<Box<str>>,
}

impl Protocol {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    fn of(text: &str) -> Option<Self> {
        match text {
            "" | "TCP" => Some(Self::Tcp),
            "UDP" => Some(Self::Udp),
            "SCTP" => Some(Self::Sctp),
            _ => None,
        }
    }
}

impl HostPort {
    /// Those of containers, and of init containers that run beside them. Of a pod with `hostNetwork` the API server writes
    /// each port of a container as a host port. Of more than [`PORTS_MAX`] the first.
    pub fn of(pod: &PodSpec) -> Vec<Self> {
        let beside = |one: &&Container| one.restart_policy.as_deref() == Some("Always");
        let containers = pod.containers.iter().chain(pod.init_containers.iter().flatten().filter(beside));
        let ports = containers.flat_map(|one| one.ports.iter().flatten()).filter_map(|one| {
            let port = one.host_port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)?;
            let protocol = Protocol::of(one.protocol.as_deref().unwrap_or_default())?;
            let address = one.host_ip.as_deref().filter(|address| {
                !address.is_empty() && *address != "0.0.0.0" && address.len() <= ADDRESS_BYTES_MAX
            });
            Some(Self { protocol, port, address: address.map(Into::into) })
        });
        let once: BTreeSet<Self> = ports.take(PORTS_MAX).collect();
        once.into_iter().collect()
    }
}
