//! The thread that waits for NVML's events: Xids, ECC errors, MIG changes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::{EventSet, Nvml};
use nvml_wrapper_sys::bindings as sys;
use tokio::sync::broadcast;

use crate::model::names::DeviceUuid;

use super::worker::{CallProgress, STACK};
use super::{GpuEvent, NvmlError, raw};

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
const ECC: u64 = sys::nvmlEventTypeDoubleBitEccError as u64;
const MIG: u64 = sys::nvmlEventMigConfigChange as u64;

/// How long one wait lasts: the thread notices within this time that it should end.
const WAIT: Duration = Duration::from_secs(1);
/// A library that says "nothing" faster than this does not wait at all.
const TOO_FAST: Duration = Duration::from_millis(20);
/// How long the end of the thread is waited for: a wait, and as much again for slow calls.
const END: Duration = Duration::from_secs(2);

/// A GPU whose events are waited for: its index is the name in events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EventSource {
    pub index: u32,
    pub uuid: DeviceUuid,
}

/// A running event thread. Ends, and lets go of the library, when this is dropped.
pub(super) struct Events {
    boards: Vec<EventSource>,
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Events {
    pub fn start(
        nvml: Arc<Nvml>,
        boards: Vec<EventSource>,
        sender: broadcast::Sender<GpuEvent>,
        progress: Arc<CallProgress>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let (end, ended) = channel();
        let listener =
            EventListener { boards: boards.clone(), sender, stopped, progress, wait_failed: false };
        thread::Builder::new().name("nvml-events".to_owned()).stack_size(STACK).spawn(move || {
            listener.run(&nvml);
            drop(nvml);
            drop::<Sender<()>>(end);
        })?;
        Ok(Self { boards, stop: Some(stop), ended })
    }

    /// True if it waits for the events of all these boards.
    pub fn cover(&self, boards: &[EventSource]) -> bool {
        boards.iter().all(|board| self.boards.contains(board))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stop = None;
        if self.ended.recv_timeout(END) == Err(RecvTimeoutError::Timeout) {
            // It holds the library until it ends; a new one is loaded beside it.
            tracing::warn!("the wait for NVML events does not end; the library stays loaded until it does");
        }
    }
}

struct EventListener {
    boards: Vec<EventSource>,
    sender: broadcast::Sender<GpuEvent>,
    /// Closed when the thread should end.
    stopped: Receiver<()>,
    /// That of the thread that opened the library: left behind, its events are another's too.
    progress: Arc<CallProgress>,
    /// True while waiting fails, so that it is told once.
    wait_failed: bool,
}

impl EventListener {
    fn run(mut self, nvml: &Nvml) {
        let set = match nvml.create_event_set() {
            Ok(set) => set,
            Err(code) => return self.report_failure("nvmlEventSetCreate", None, code),
        };
        let known = self.register(nvml, &set);
        let mut pause = known.is_empty();
        while !self.should_end(pause) {
            let before = Instant::now();
            match raw::wait(&set, WAIT.as_millis() as u32) {
                Ok(event) => {
                    (self.wait_failed, pause) = (false, false);
                    self.deliver(&known, &event);
                }
                Err(Code::Timeout) => (self.wait_failed, pause) = (false, before.elapsed() < TOO_FAST),
                Err(code) => {
                    self.report_failure("nvmlEventSetWait_v2", None, code);
                    pause = true;
                }
            }
        }
    }

    /// Asks for the events of every board; one that refuses does not silence the others.
    fn register(&mut self, nvml: &Nvml, set: &EventSet<'_>) -> Vec<(raw::Handle, DeviceUuid)> {
        let mut known = Vec::new();
        for board in self.boards.clone() {
            let Ok(device) = nvml.device_by_index(board.index) else { continue };
            match raw::register(&device, XID | ECC | MIG, set) {
                Ok(0) | Err(Code::NotSupported) => {}
                Ok(_) => known.push((raw::handle(&device), board.uuid)),
                Err(code) => self.report_failure("nvmlDeviceRegisterEvents", Some(board.index), code),
            }
        }
        known
    }

    fn should_end(&self, pause: bool) -> bool {
        let wait = if pause { WAIT } else { Duration::ZERO };
        self.stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) || self.progress.is_left_behind()
    }

    fn deliver(&self, known: &[(raw::Handle, DeviceUuid)], event: &raw::Event) {
        let Some((_, gpu)) = known.iter().find(|(handle, _)| *handle == event.board) else { return };
        let gpu = gpu.clone();
        let (gpu_instance, compute_instance) = (event.gpu_instance, event.compute_instance);
        let event = match event.kind {
            XID => GpuEvent::Xid { gpu, code: event.data, gpu_instance, compute_instance },
            ECC => GpuEvent::EccDoubleBit { gpu },
            MIG => GpuEvent::MigChanged { gpu },
            _ => return,
        };
        // Without a reader there is nobody to tell.
        let _ = self.sender.send(event);
    }

    fn report_failure(&mut self, call: &'static str, index: Option<u32>, code: Code) {
        if !std::mem::replace(&mut self.wait_failed, true) {
            let words = NvmlError::of_call(call, index, code).to_string();
            let _ = self.sender.send(GpuEvent::EventWaitFailed { words });
        }
    }
}
