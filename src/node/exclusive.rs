//! Before a device is given that is a claim's alone: who else has it open? A descriptor can be handed to a process of
//! another pod, where no record knows of it. And when a claim is released: who has its devices still?

use std::collections::BTreeMap;

use tracing::warn;

use super::executor::{ExecuteError, Executor};
use super::file_looks::Openers;
use super::holders::{ReleaseCause, Withheld};
use super::holding::{self, Holding};
use super::unclaimed::located;
use crate::ledger::{HeldDevice, HoldMode, Intent, Record};
use crate::model::claim::PodRef;
use crate::model::names::DeviceUuid;
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
        let numbers = exclusive.iter().flat_map(|one| one.numbers.iter().copied()).collect();
        self.check_known(exclusive, intent, &rightful)?;
        let openers = match self.holders.openers(&numbers, &rightful) {
            Ok(found) => found.openers,
            Err(problem) => {
                self.check_before(exclusive, intent, &problem)?;
                warn!(
                    problem,
                    "who else has the claim's devices open cannot be told, and it gets them all the same"
                );
                Openers::new()
            }
        };
        let Some(number) = openers.values().flat_map(BTreeMap::values).next() else {
            self.note_given(exclusive, intent);
            return Ok(());
        };
        self.note_open(exclusive, intent, &openers);
        let device = exclusive.iter().find(|one| one.numbers.contains(number)).or(exclusive.first());
        let device = device.map_or_else(|| "?".into(), |one| one.device.clone());
        Err(Refusal::Open { device, by: holding::listed(&holding::holders_of(openers)) }.into())
    }

    /// Of nobody who is known to have these devices open it is unknown whether he still has. Who has them open for sure is
    /// found with everybody.
    fn check_known(
        &self,
        exclusive: &[ExclusiveDevice],
        intent: &Intent,
        rightful: &[PodRef],
    ) -> Result<(), ExecuteError> {
        for (one, _, location) in located(exclusive, intent) {
            let unclaimed = self.holders.unclaimed();
            let known = unclaimed.holders_at(&location);
            let numbers = one.numbers.iter().copied().collect();
            let still = self.holders.known_openers(&numbers, rightful, &known);
            if still.untold.is_some() {
                let by = still.to_string();
                unclaimed.still_held(&location, still);
                return Err(Refusal::Open { device: one.device.clone(), by }.into());
            }
        }
        Ok(())
    }

    /// None of these devices was held when an earlier process ended: who has them open cannot be told.
    fn check_before(
        &self,
        exclusive: &[ExclusiveDevice],
        intent: &Intent,
        problem: &str,
    ) -> Result<(), ExecuteError> {
        for (one, _, location) in located(exclusive, intent) {
            if self.holders.were_held_before([location].into_iter()) {
                let untold = Some(problem.to_owned());
                let by = Holding { untold, before: true, ..Holding::default() }.to_string();
                return Err(Refusal::Open { device: one.device.clone(), by }.into());
            }
        }
        Ok(())
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
