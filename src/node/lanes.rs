//! Lanes: a task that changes the state of a GPU, or a record that names the GPU, must hold the lane of that GPU.
//!
//! A lane has two halves: a lock between the tasks of this process, which is awaited without blocking a thread, and a
//! file lock between processes, which is contended only while two instances overlap in a rolling update. Several
//! lanes are taken in the order of their UUIDs, so that two claims can never wait for each other.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::OwnedMutexGuard;

use crate::host::{FileLock, LockError};
use crate::model::names::DeviceUuid;

/// Kubelet gives a call 45 s; what waits longer than this is better told so and retried.
pub const LANE_WAIT_S: u64 = 20;

#[derive(Debug, Error)]
pub enum LaneError {
    #[error("GPU {gpu} is still being changed for another claim after {LANE_WAIT_S} s")]
    Busy { gpu: DeviceUuid },
    #[error("cannot take the lane of GPU {gpu}")]
    Lock { gpu: DeviceUuid, source: LockError },
    #[error("GPU UUID {0:?} cannot be a file name")]
    Name(DeviceUuid),
}

/// All lanes of the node.
#[derive(Debug)]
pub struct Lanes {
    folder: PathBuf,
    tasks: Mutex<HashMap<DeviceUuid, Arc<tokio::sync::Mutex<()>>>>,
}

/// The task half of some lanes, in order.
#[derive(Debug)]
pub struct Queued {
    folder: PathBuf,
    lanes: Vec<(DeviceUuid, OwnedMutexGuard<()>)>,
}

/// Some lanes, held in full until dropped.
#[derive(Debug)]
pub struct Held {
    lanes: Vec<(DeviceUuid, FileLock, OwnedMutexGuard<()>)>,
}

impl Lanes {
    /// `folder` must exist; it holds one small file per GPU.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, tasks: Mutex::default() }
    }

    pub fn folder(&self) -> &PathBuf {
        &self.folder
    }

    /// Waits for the task half of the lanes of `gpus`, at most [`LANE_WAIT_S`] in all.
    pub async fn queue(&self, mut gpus: Vec<DeviceUuid>) -> Result<Queued, LaneError> {
        gpus.sort();
        gpus.dedup();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(LANE_WAIT_S);
        let mut lanes = Vec::with_capacity(gpus.len());
        for gpu in gpus {
            if !gpu.is_well_formed() {
                return Err(LaneError::Name(gpu));
            }
            let lane = self.lane(&gpu);
            match tokio::time::timeout_at(deadline, lane.lock_owned()).await {
                Ok(guard) => lanes.push((gpu, guard)),
                Err(_) => return Err(LaneError::Busy { gpu }),
            }
        }
        Ok(Queued { folder: self.folder.clone(), lanes })
    }

    fn lane(&self, gpu: &DeviceUuid) -> Arc<tokio::sync::Mutex<()>> {
        // A panic elsewhere cannot leave this map half changed.
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.entry(gpu.clone()).or_default().clone()
    }
}

impl Queued {
    /// Takes the file half too. Blocks the thread, at most [`LANE_WAIT_S`] per lane.
    pub fn hold(self) -> Result<Held, LaneError> {
        let mut lanes = Vec::with_capacity(self.lanes.len());
        for (gpu, guard) in self.lanes {
            let path = self.folder.join(format!("{gpu}.lane"));
            let lock = FileLock::acquire(&path, Duration::from_secs(LANE_WAIT_S))
                .map_err(|source| LaneError::Lock { gpu: gpu.clone(), source })?;
            lanes.push((gpu, lock, guard));
        }
        Ok(Held { lanes })
    }
}

impl Held {
    /// The GPUs whose lanes are held, with their file locks, in order.
    pub fn locks(&self) -> impl Iterator<Item = (&DeviceUuid, &FileLock)> {
        self.lanes.iter().map(|(gpu, lock, _)| (gpu, lock))
    }

    /// True if the lanes of all of `gpus` are held.
    pub fn covers(&self, gpus: &[DeviceUuid]) -> bool {
        gpus.iter().all(|gpu| self.lanes.iter().any(|(held, _, _)| held == gpu))
    }
}
