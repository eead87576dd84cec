//! Moves in words.

use std::collections::BTreeSet;

use crate::allocate::Placement;
use crate::controller::moves::{Move, Proposed};
use crate::model::names::DeviceName;

/// What would have to be done for what waits. `reader`: the namespace of who reads it; names of others' pods are nobody's
/// business there. None: whoever may see all pods.
pub fn suggestion(found: &Proposed, reader: Option<&str>) -> String {
    let is_others = |one: &&Move| reader.is_some_and(|namespace| one.pod.namespace != namespace);
    let count = found.moves.len();
    if found.moves.iter().any(|one| is_others(&one)) {
        let pods = if count == 1 { "1 pod".to_owned() } else { format!("{count} pods") };
        let mib: u64 = found.moves.iter().map(|one| mib(&one.from)).sum();
        return format!(
            "moving {pods} of other namespaces among them ({mib} MiB) would make room on node {}; `kubectl tranche \
             rebalance` tells an administrator which",
            found.node
        );
    }
    let one = |one: &Move| {
        let name = match reader {
            Some(_) => one.pod.name.clone(),
            None => format!("{}/{}", one.pod.namespace, one.pod.name),
        };
        format!("evict {name} ({}); it fits {}", amount_of(&one.from), spot(&one.to))
    };
    let moves: Vec<String> = found.moves.iter().map(one).collect();
    let then: Vec<String> = found.then.iter().map(|(_, place)| spot(place)).collect();
    format!("{}; then this fits {}", moves.join("; "), then.join(" and "))
}

/// What a pod has, without its node: `4000 MiB of gpu-0`, or `2 GPUs`.
pub fn amount_of(place: &Placement) -> String {
    match devices(place).len() {
        0 => "no GPU".to_owned(),
        1 => {
            let device = place.gpus.first().map(|grant| grant.device.to_string()).unwrap_or_default();
            format!("{} MiB of {device}", mib(place))
        }
        count => format!("{count} GPUs, {} MiB", mib(place)),
    }
}

/// `node-2/gpu-1`, or for several GPUs `node-2 (gpu-1, gpu-2)`.
pub fn spot(place: &Placement) -> String {
    let names: Vec<&str> = devices(place).into_iter().map(DeviceName::as_str).collect();
    match names[..] {
        [] => place.node.to_string(),
        [one] => format!("{}/{one}", place.node),
        _ => format!("{} ({})", place.node, names.join(", ")),
    }
}

fn devices(place: &Placement) -> BTreeSet<&DeviceName> {
    place.gpus.iter().map(|grant| &grant.device).collect()
}

fn mib(place: &Placement) -> u64 {
    place.gpus.iter().map(|grant| grant.memory.mib_ceil()).sum()
}
