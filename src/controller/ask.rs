//! What waits, as the allocator is asked for it; and its answer, as claims are granted it.

use super::wants::Wants;
use crate::allocate::{GpuGrant, Placement, Shape};
use crate::feasible::Room;

/// All that a pod's open claims want, of one node.
///
/// # Errors
/// It cannot be asked for, in words.
pub fn shape(claims: &[Wants], room: Room) -> Result<Shape, String> {
    let wants: Vec<_> = claims.iter().flat_map(|wants| &wants.requests).collect();
    let [want] = wants.as_slice() else {
        return Err(format!("{} requests of one pod cannot be placed together yet", wants.len()));
    };
    if !want.selectors.is_empty() || claims.iter().any(|wants| !wants.same.is_empty()) {
        return Err("selectors and constraints cannot be followed yet".to_owned());
    }
    let shape = Shape::of(&want.share, want.gpus);
    Ok(Shape { cpu_milli: room.cpu_milli, memory: room.memory, ..shape })
}

/// The GPUs of each want, in the order in which they were asked for.
pub fn parts(claims: &[Wants], placement: &Placement) -> Vec<Vec<Vec<GpuGrant>>> {
    claims.iter().map(|wants| wants.requests.iter().map(|_| placement.gpus.clone()).collect()).collect()
}
