//! Before a device is given that is a claim's alone: who else has it open? A descriptor can be handed to a process of
//! another pod, where no record knows of it.

use std::collections::BTreeMap;

use tracing::warn;

use super::executor::{ExecuteError, Executor};
use super::file_looks::Openers;
use super::holders;
use crate::ledger::{HeldDevice, HoldMode, Intent};
use crate::model::claim::PodRef;
use crate::model::names::DeviceUuid;
use crate::prepare::{ExclusiveDevice, Refusal};

impl Executor {
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
        let openers = match self.holders.openers(&numbers, &rightful, None) {
            Ok(openers) => openers,
            Err(problem) => {
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
        Err(Refusal::Open { device, by: holders::listed(&holders::holders_of(openers)) }.into())
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
