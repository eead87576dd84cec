//! Keeps the metrics up to date: the rows of each look, and the figures of GPUs, which are read now and then.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::managed::Managed;
use super::measured::{self, Measured};
use super::rows::{self, GpuLabels, RowSources};
use super::shares::WatchedDevice;
use super::table::ProcessTable;
use super::{ALONE_TICKS, Finding, Watchdog};
use crate::host::ManagedMemory;
use crate::model::error_chain;
use crate::model::names::DeviceUuid;
use crate::nvml::GpuProcess;
use crate::sharing::Usage;
use crate::sharing::watch::BoardLook;

/// What the metrics show: of the last look at each device, and of the last figures.
#[derive(Default)]
pub(super) struct LatestFigures {
    usage: BTreeMap<DeviceUuid, Vec<Usage>>,
    measured: BTreeMap<DeviceUuid, Measured>,
    measured_at: Option<Instant>,
}

impl LatestFigures {
    pub fn measured(&self) -> &BTreeMap<DeviceUuid, Measured> {
        &self.measured
    }

    /// What these looks found. A device that did not answer keeps what was shown of it.
    pub fn note_usage(&mut self, looks: &[BoardLook], usage: Vec<Usage>) {
        self.usage.extend(looks.iter().map(|look| (look.gpu.clone(), Vec::new())));
        for row in usage {
            self.usage.entry(row.gpu.clone()).or_default().push(row);
        }
    }

    /// Figures are read, after so long a time, or because a device is new.
    fn are_due(&self, devices: &BTreeMap<DeviceUuid, WatchedDevice>, every: Duration) -> bool {
        self.measured_at.is_none_or(|at| at.elapsed() >= every)
            || devices.keys().any(|uuid| !self.measured.contains_key(uuid))
    }

    /// Figures are read now. Whatever happens, a device has been asked about.
    fn begin_reading(&mut self, devices: &BTreeMap<DeviceUuid, WatchedDevice>) {
        self.measured_at = Some(Instant::now());
        self.measured = devices.keys().map(|uuid| (uuid.clone(), Measured::default())).collect();
    }

    /// Forgets devices that no claim holds any more.
    pub fn keep(&mut self, devices: &BTreeMap<DeviceUuid, WatchedDevice>) {
        self.usage.retain(|device, _| devices.contains_key(device));
        let boards: BTreeSet<&DeviceUuid> = devices.values().map(|device| &device.board).collect();
        self.measured.retain(|uuid, _| devices.contains_key(uuid) || boards.contains(uuid));
    }
}

impl Watchdog {
    /// Brings the metrics up to date.
    pub(super) fn show(&self) {
        let (devices, knowledge) = (&self.devices, &self.knowledge);
        let LatestFigures { usage, measured, .. } = &self.shown;
        let containers = self.parts.containers.borrow().clone();
        let sources = RowSources { devices, knowledge, usage, measured, containers: &containers };
        self.parts.metrics.show(&sources.rows());
    }

    /// It is time, or a device is new.
    pub(super) fn figures_are_due(&self) -> bool {
        let period = self.parts.settings.period;
        // Half a tick less, since no tick comes when it should.
        self.shown.are_due(&self.devices, period * ALONE_TICKS - period / 2)
    }

    /// Reads the devices' figures, with these processes on them. What NVML does not answer is shown as absent.
    pub(super) async fn read_figures(&mut self, listed: Vec<(DeviceUuid, Vec<GpuProcess>)>) {
        self.shown.begin_reading(&self.devices);
        // A thread that hangs in NVML may do so because of a sensor: the lists are left the threads that there are.
        if self.parts.lists.stuck_threads() > 0 {
            return;
        }
        let figures = match self.parts.lists.figures(measured::subjects(&self.devices, &self.knowledge)).await
        {
            Ok(figures) => figures,
            Err(error) => {
                self.parts.metrics.failed_readings.inc();
                let words = error_chain(&error);
                if self.logged_failures.figures.replace(words.clone()).as_ref() != Some(&words) {
                    warn!(error = words, "figures of GPUs cannot be read; tried again");
                }
                return;
            }
        };
        self.logged_failures.figures = None;
        let listed: BTreeMap<_, _> = listed.into_iter().collect();
        for (uuid, figures) in figures {
            let measured = match (self.devices.get(&uuid), listed.get(&uuid)) {
                (Some(device), Some(listed)) => {
                    let process = |pid| self.table.as_ref().and_then(|table| table.get(pid));
                    measured::measure(device, figures, listed, &self.knowledge, process)
                }
                // The board of a MIG device, or one whose processes are not known now.
                _ => Measured { figures, ..Measured::default() },
            };
            self.shown.measured.insert(uuid, measured);
        }
    }

    /// What managed memory processes have, where somebody has some, as far as it can be read in time, or was read just before.
    pub(super) async fn read_managed(
        &mut self,
        listed: &[(DeviceUuid, Vec<GpuProcess>)],
        table: &ProcessTable,
    ) -> HashMap<u32, ManagedMemory> {
        let suspects = Managed::new(&self.devices, &self.shown.measured, listed).suspects();
        let suspects = suspects.into_iter();
        let suspects = suspects.filter_map(|(pid, used)| Some((table.get(pid)?.process, used))).collect();
        let found = self.threads.mappings.read(self.parts.processes.clone(), suspects).await;
        if found.is_late {
            self.parts.metrics.failed_readings.inc();
        }
        if std::mem::replace(&mut self.logged_failures.mappings, found.is_late) != found.is_late {
            match found.is_late {
                true => warn!(
                    "the mappings of processes on shared GPUs take long to be read; until they do not, managed memory \
                     counts a look later, or for nobody"
                ),
                false => info!("the mappings of processes on shared GPUs are read in time again"),
            }
        }
        found.by_pid
    }

    /// Counts something on the row of the finding's GPU.
    pub(super) fn of_gpu(&self, finding: &Finding, count: impl FnOnce(&GpuLabels)) {
        if let Some(device) = self.devices.get(&finding.gpu) {
            count(&rows::gpu_labels(&finding.gpu, device));
        }
    }
}
