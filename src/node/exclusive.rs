//! Before a device is given that is a claim's alone: who else has it open? A descriptor can be handed to a process of
//! another pod, where no record knows of it. And when a claim is released: who has its devices still?

use std::collections::BTreeMap;
use std::time::Instant;

use tracing::warn;

use super::executor::{ExecuteError, Executor};
use super::file_looks::Openers;
use super::holders::{Holders, ReleaseCause, Withheld};
use super::holding::{self, Holder, Holding, had_open};
use super::unclaimed::located;
use crate::host::DeviceNumber;
use crate::inventory::FaultLocation;
use crate::ledger::{HeldDevice, HoldMode, Intent, Record};
use crate::model::claim::PodRef;
use crate::model::names::{DeviceName, DeviceUuid};
use crate::prepare::{ExclusiveDevice, Refusal};

impl Executor {
    /// What holds the record's devices. Its container edits are taken away before: who has none by then gets none. An error:
    /// they cannot be, and nobody was looked for.
    pub(super) fn held_still(
        &self,
        record: &Record,
        cause: ReleaseCause,
    ) -> Result<Option<Withheld>, String> {
        if cause == ReleaseCause::Anew {
            return Ok(None);
        }
        let removed = record.cdi_file().map(|file| self.host.remove(&self.cdi_dir.join(file)));
        let in_use =
            removed.unwrap_or(Ok(false)).map_err(|error| format!("removing container edits: {error}"))?;
        Ok(self.holders.hold(record, cause, in_use, &self.watchers(&record.gpus())))
    }

    /// Nobody else has these devices open, as far as a look can tell. Blocks on it.
    ///
    /// # Errors
    /// Somebody has: the devices are tainted, as long as that is so.
    pub(super) fn check_unopened(
        &self,
        exclusive: &[ExclusiveDevice],
        intent: &Intent,
    ) -> Result<(), ExecuteError> {
        let gpus: Vec<_> = intent.devices.iter().map(|held| held.gpu.clone()).collect();
        let rightful = [intent.pods.as_slice(), &self.watchers(&gpus)].concat();
        let wanted: Vec<WantedDevice> = located(exclusive, intent)
            .map(|(one, _, location)| WantedDevice {
                known: had_open(&self.holders.unclaimed().holders_at(&location), &rightful),
                device: one.device.clone(),
                numbers: one.numbers.clone(),
                location,
            })
            .collect();
        let openers = self.holders.openers_of(&wanted, &rightful)?;
        let Some(number) = openers.values().flat_map(BTreeMap::values).next() else {
            self.note_given(exclusive, intent);
            return Ok(());
        };
        self.note_open(exclusive, intent, &openers);
        let device = exclusive.iter().find(|one| one.numbers.contains(number)).or(exclusive.first());
        let device = device.map_or_else(|| "?".into(), |one| one.device.clone());
        Err(Refusal::Open { device, by: holding::listed(&holding::holders_of(openers)) }.into())
    }

    /// The pods with administrative access to these GPUs.
    pub(super) fn watchers(&self, gpus: &[DeviceUuid]) -> Vec<PodRef> {
        let is_watched = |held: &HeldDevice| held.mode == HoldMode::Admin && gpus.contains(&held.gpu);
        let watching = self.store.held_on(gpus).into_iter();
        watching
            .filter(|intent| intent.devices.iter().any(is_watched))
            .flat_map(|intent| intent.pods)
            .collect()
    }
}

/// A device that a claim is to have alone.
struct WantedDevice {
    device: DeviceName,
    location: FaultLocation,
    numbers: Vec<DeviceNumber>,
    /// Who had it open at the last look, without a claim on it.
    known: Vec<Holder>,
}

impl Holders {
    /// Who has one of these devices open and is none of the rightful pods, as far as a look can tell. Those are looked at first
    /// who had one open the last time: one of them is enough. However many devices there are, it blocks on two listings and
    /// two looks at files at most; kubelet waits for the claim meanwhile.
    ///
    /// # Errors
    /// A look has seen that one of the devices is held, and no look can tell whether it is still.
    fn openers_of(&self, wanted: &[WantedDevice], rightful: &[PodRef]) -> Result<Openers, Refusal> {
        let seen: Vec<Holder> = wanted.iter().flat_map(|one| one.known.iter().cloned()).collect();
        let held = wanted.iter().filter(|one| !one.known.is_empty());
        let numbers = held.flat_map(|one| one.numbers.iter().copied()).collect();
        let still = self.known_openers(&numbers, rightful, &seen, Instant::now());
        if let Some(problem) = &still.unseen.untold {
            self.check_unseen(wanted, problem, |known| still.may_concern(known))?;
        }
        if !still.open.is_empty() {
            return Ok(still.open);
        }
        let numbers = wanted.iter().flat_map(|one| one.numbers.iter().copied()).collect();
        match self.openers_of_all(&numbers, rightful) {
            Ok(found) => Ok(found.openers),
            Err(problem) => {
                // Who had it open may have handed it on and ended.
                self.check_unseen(wanted, &problem, |_| true)?;
                warn!(
                    problem,
                    "who else has the claim's devices open cannot be told, and it gets them all the same"
                );
                Ok(Openers::new())
            }
        }
    }

    /// None of these devices was seen to be held, by those of the known holders that count or before this process started: who
    /// has them open cannot be told.
    fn check_unseen(
        &self,
        wanted: &[WantedDevice],
        problem: &str,
        counts: impl Fn(&Holder) -> bool,
    ) -> Result<(), Refusal> {
        let mut refused = None;
        for WantedDevice { device, location, known, .. } in wanted {
            let holders: Vec<Holder> = known.iter().filter(|one| counts(one)).cloned().collect();
            let before = holders.is_empty() && self.were_held_before([location.clone()].into_iter());
            if holders.is_empty() && !before {
                continue;
            }
            let by = Holding { holders, untold: Some(problem.to_owned()), before };
            let words = by.to_string();
            if !before {
                self.unclaimed().still_held(location, by);
            }
            refused.get_or_insert(Refusal::Open { device: device.clone(), by: words });
        }
        refused.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
#[path = "exclusive/tests.rs"]
mod tests;
