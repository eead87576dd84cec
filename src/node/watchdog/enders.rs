//! Threads on which MPS daemons are asked to terminate clients: for each GPU, one after the other. A tenant can keep a
//! daemon busy, and the others' ends on other GPUs must not wait for it: whoever is not ended in time is killed, and that
//! can end its neighbours.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::model::names::DeviceUuid;
use crate::node::leavable::{LeavableThread, LeavableThreads};

/// For one process to end by its daemon, with those that wait before it. A request to the supervisor takes 40 s at most, and
/// there may be several for a process.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Threads that may be at that for one GPU: beyond one, because the others were left or are about to end.
const GPU_MAX: usize = 8;
/// And for all GPUs. `tranche mps` hears 64 at a time, claims that are being prepared among them.
const MAX: usize = 32;

/// Clones share the threads. None runs while nothing is to be ended.
#[derive(Clone)]
pub(super) struct Enders {
    all: LeavableThreads,
    by_gpu: Arc<Mutex<BTreeMap<DeviceUuid, Ender>>>,
}

struct Ender {
    threads: LeavableThreads,
    /// Held by those that use it.
    now: Weak<LeavableThread>,
}

impl Default for Enders {
    fn default() -> Self {
        Self { all: LeavableThreads::new("watch-ends", MAX), by_gpu: Arc::default() }
    }
}

impl Enders {
    /// Returns the result of work that ends a process on this GPU.
    ///
    /// # Errors
    /// In words, if there is none in time, or too much waits already.
    pub async fn run<T: Send + 'static>(
        &self,
        gpu: &DeviceUuid,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let thread = self.thread(gpu);
        thread.run(work).await
    }

    fn thread(&self, gpu: &DeviceUuid) -> Arc<LeavableThread> {
        let mut by_gpu = self.by_gpu.lock().unwrap_or_else(PoisonError::into_inner);
        by_gpu.retain(|_, ender| ender.now.strong_count() > 0 || ender.threads.running() > 0);
        let ender = by_gpu
            .entry(gpu.clone())
            .or_insert_with(|| Ender { threads: self.all.part(GPU_MAX), now: Weak::new() });
        if let Some(thread) = ender.now.upgrade() {
            return thread;
        }
        let thread = Arc::new(LeavableThread::new(ender.threads.clone(), END_LIMIT));
        ender.now = Arc::downgrade(&thread);
        thread
    }
}
