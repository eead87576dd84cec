//! The sweeper's part for MPS daemons: each daemon serves what the ledger's claims need, and no daemon is kept that
//! no claim needs.

use std::sync::Arc;

use tracing::{info, warn};

use super::executor::{Executor, StepError};
use super::lanes::LaneError;
use super::preparer::Preparer;
use super::store::MpsUsers;
use super::sweeper::Sweep;
use crate::inventory::Inventory;
use crate::ledger::Phase;
use crate::model::error_chain;
use crate::model::gpu::Gpu;
use crate::model::names::DeviceUuid;
use crate::model::share::MpsGroup;
use crate::sharing;
use crate::supervisor::SupervisorError;
use crate::supervisor::protocol::{DaemonPhase, DaemonState};

/// Compares daemons and ledger, and mends what differs, a group at a time.
pub async fn sweep(preparer: &Preparer, sweep: &mut Sweep) {
    let executor = &preparer.executor;
    let needed = executor.store.mps_groups(&executor.boot, |phase| *phase != Phase::Releasing);
    let states = match states(preparer).await {
        Ok(states) => states,
        // A node without shares does not need `tranche mps`.
        Err(_) if needed.is_empty() => return,
        Err(error) => {
            warn!(error = error_chain(&error), "cannot compare MPS daemons with the claims that need them");
            sweep.failed += 1;
            return;
        }
    };
    for (group, MpsUsers { exclusive, lanes }) in &needed {
        if !is_as_needed(preparer, &states, group) {
            mend(preparer, group, *exclusive, lanes.clone(), sweep).await;
        }
    }
    for state in states.iter().filter(|state| state.limits.is_some() && !needed.contains_key(&state.group)) {
        mend(preparer, &state.group, state.exclusive, boards(preparer, &state.group), sweep).await;
    }
}

async fn states(preparer: &Preparer) -> Result<Vec<DaemonState>, SupervisorError> {
    let executor = preparer.executor.clone();
    let asked = tokio::task::spawn_blocking(move || executor.daemons.states()).await;
    // The task panicked: as good as no answer.
    asked.unwrap_or_else(|error| Err(SupervisorError::Answer { problem: error.to_string() }))
}

fn is_as_needed(preparer: &Preparer, states: &[DaemonState], group: &MpsGroup) -> bool {
    let executor = &preparer.executor;
    let wanted = sharing::loosest(&executor.store.mps_needs(group, None, &executor.boot));
    states.iter().any(|state| {
        let serving = matches!(state.phase, DaemonPhase::Serving { .. });
        state.group == *group && serving && state.limits == wanted
    })
}

/// The boards that a group's devices are or are parts of; a device that is gone stands for itself.
fn boards(preparer: &Preparer, group: &MpsGroup) -> Vec<DeviceUuid> {
    let inventory = preparer.inventory.borrow();
    let gpus = match &*inventory {
        Inventory::Found(found) => found.gpus.as_slice(),
        _ => &[],
    };
    let has = |gpu: &&Gpu, uuid: &DeviceUuid| {
        gpu.uuid == *uuid || gpu.devices().iter().any(|device| device.uuid() == uuid)
    };
    let board = |uuid: &DeviceUuid| gpus.iter().find(|gpu| has(gpu, uuid)).map(|gpu| gpu.uuid.clone());
    group.devices().iter().map(|uuid| board(uuid).unwrap_or_else(|| uuid.clone())).collect()
}

async fn mend(
    preparer: &Preparer,
    group: &MpsGroup,
    exclusive: bool,
    lanes: Vec<DeviceUuid>,
    sweep: &mut Sweep,
) {
    let mended = settle(preparer, group, exclusive, lanes).await;
    preparer.metrics.repair("daemon");
    match mended {
        Ok(()) => {
            info!(%group, "MPS daemon set to what its claims need");
            sweep.daemons += 1;
        }
        Err(problem) => {
            warn!(%group, problem, "MPS daemon is not set to what its claims need; tried again at the next sweep");
            sweep.failed += 1;
        }
    }
}

async fn settle(
    preparer: &Preparer,
    group: &MpsGroup,
    exclusive: bool,
    lanes: Vec<DeviceUuid>,
) -> Result<(), String> {
    let queued = preparer.lanes.queue(lanes).await.map_err(|error: LaneError| error_chain(&error))?;
    let (executor, group): (Arc<Executor>, _) = (preparer.executor.clone(), group.clone());
    let work = move || {
        let held = queued.hold().map_err(|error| error_chain(&error))?;
        executor.store.refresh(&held).map_err(|error| error_chain(&error))?;
        executor.settle(&group, exclusive).map_err(|error: StepError| error_chain(&error))
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(error.to_string()))
}
