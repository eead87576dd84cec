//! Tells claims of the MPS daemons and the /dev/shm that they need: all claims of a GPU, or the one that the daemon serves.

use std::collections::BTreeMap;
use std::convert::Infallible;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::device_faults::DaemonDown;
use super::reporter::Reporter;
use crate::conditions::{Concerned, GpuPart, PartHealth};
use crate::inventory::{DeviceFaults, FaultKind, FaultLocation};
use crate::model::gpu::Health;
use crate::model::names::DeviceUuid;
use crate::model::share::MpsGroup;
use crate::supervisor::protocol::{DaemonPhase, DaemonState};

/// What the loop watches: see [`super::device_faults::FaultReceivers`].
pub struct ReportSources {
    pub device_faults: watch::Receiver<DeviceFaults>,
    pub states: watch::Receiver<Vec<DaemonState>>,
    pub daemons_down: watch::Receiver<Vec<DaemonDown>>,
}

/// Tells claims of the MPS daemons that they need: each time that one dies, and that it serves again. One that
/// died and came back from one look to the next was never seen down: its deaths tell. Tells them likewise when the
/// /dev/shm that they have together is full, and when it has room again.
pub async fn run(
    ReportSources { mut device_faults, mut states, mut daemons_down }: ReportSources,
    reporter: Reporter,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    let (mut unhealthy, mut full) = (BTreeMap::new(), BTreeMap::new());
    let mut deaths = Deaths::default();
    loop {
        turned(&mut unhealthy, down(&daemons_down.borrow_and_update()), GpuPart::Mps, &reporter);
        turned(&mut full, full_shm(&device_faults.borrow_and_update()), GpuPart::Shm, &reporter);
        let unseen = deaths.unseen(&states.borrow_and_update());
        for whose in unseen.iter().filter(|whose| !unhealthy.contains_key(*whose)) {
            let words = "the daemon ended; it was started again".to_owned();
            reporter.health_changed(of(whose, GpuPart::Mps, Health::Unhealthy(words)));
            reporter.health_changed(of(whose, GpuPart::Mps, Health::Healthy));
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            Ok(()) = device_faults.changed() => {}
            Ok(()) = daemons_down.changed() => {}
            Ok(()) = states.changed() => {}
        }
    }
}

/// A device (a board, unless the daemon serves MIG devices), and which claims on it.
type ConcernedDevice = (DeviceUuid, Concerned);

/// How often each daemon had died when it was last looked at. While no claim needs one nobody looks, and deaths of
/// that time are nobody's news.
#[derive(Debug, Default)]
struct Deaths(BTreeMap<MpsGroup, u32>);

impl Deaths {
    /// Whose daemons died since the last look, and serve again: who is down is told as that.
    fn unseen(&mut self, states: &[DaemonState]) -> Vec<ConcernedDevice> {
        let now = states.iter().map(|state| (state.group.clone(), state.deaths)).collect();
        let before = std::mem::replace(&mut self.0, now);
        let died =
            |state: &&DaemonState| before.get(&state.group).is_some_and(|before| *before < state.deaths);
        let is_down = |state: &DaemonState| matches!(state.phase, DaemonPhase::Down { .. });
        let unseen = states.iter().filter(died).filter(|state| !is_down(state));
        unseen.flat_map(|state| whose(&state.group)).collect()
    }
}

/// Whose MPS daemons are down, and why.
fn down(daemons: &[DaemonDown]) -> BTreeMap<ConcernedDevice, String> {
    let mut down = BTreeMap::new();
    for DaemonDown { group, reason } in daemons {
        let daemon = if group.claim().is_some() { "the claim's own" } else { "its" };
        for whose in whose(group) {
            down.entry(whose).or_insert_with(|| format!("{daemon} MPS daemon does not serve: {reason}"));
        }
    }
    down
}

fn full_shm(device_faults: &DeviceFaults) -> BTreeMap<ConcernedDevice, String> {
    let full = device_faults.iter().filter(|fault| fault.kind == FaultKind::ShmFull);
    let full = full.filter_map(|fault| match &fault.location {
        FaultLocation::Device(device) => Some(((device.clone(), Concerned::EveryClaim), fault.words.clone())),
        _ => None,
    });
    full.collect()
}

/// The claims that a daemon serves, on each of its devices.
fn whose(group: &MpsGroup) -> impl Iterator<Item = ConcernedDevice> + '_ {
    let concerned = group.claim().map_or(Concerned::EveryClaim, |claim| Concerned::OneClaim(claim.clone()));
    group.devices().iter().map(move |device| (device.clone(), concerned.clone()))
}

/// Tells what is over and what is new, or told otherwise.
fn turned(
    before: &mut BTreeMap<ConcernedDevice, String>,
    now: BTreeMap<ConcernedDevice, String>,
    part: GpuPart,
    reporter: &Reporter,
) {
    for whose in before.keys().filter(|whose| !now.contains_key(*whose)) {
        reporter.health_changed(of(whose, part, Health::Healthy));
    }
    for (whose, words) in now.iter().filter(|(whose, words)| before.get(*whose) != Some(words)) {
        reporter.health_changed(of(whose, part, Health::Unhealthy(words.clone())));
    }
    *before = now;
}

fn of((gpu, concerned): &ConcernedDevice, part: GpuPart, health: Health) -> PartHealth {
    PartHealth { gpu: gpu.clone(), concerned: concerned.clone(), part, health }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(phase: DaemonPhase) -> DaemonState {
        DaemonState {
            group: MpsGroup::new(["a".into()]),
            exclusive: true,
            phase,
            limits: None,
            memory_answers: Vec::new(),
            compute_answer: String::new(),
            deaths: 0,
            servers: Vec::new(),
            shm: None,
        }
    }

    #[test]
    fn a_death_is_news_once_and_to_those_who_were_there() {
        let look = |phase: DaemonPhase, deaths| vec![DaemonState { deaths, ..state(phase) }];
        let serving = |deaths| look(DaemonPhase::Serving { pid: 1 }, deaths);
        let news: Vec<ConcernedDevice> = vec![("a".into(), Concerned::EveryClaim)];
        let mut deaths = Deaths::default();
        assert_eq!(deaths.unseen(&serving(3)), [], "of before");
        assert_eq!(deaths.unseen(&serving(4)), news);
        assert_eq!(deaths.unseen(&serving(4)), []);
        assert_eq!(deaths.unseen(&look(DaemonPhase::Down { reason: String::new() }, 5)), [], "seen down");
        assert_eq!(deaths.unseen(&serving(5)), []);
        // Nobody needed it for a while.
        assert_eq!(deaths.unseen(&[]), []);
        assert_eq!(deaths.unseen(&serving(6)), []);
        assert_eq!(deaths.unseen(&serving(7)), news);
    }
}
