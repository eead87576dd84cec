//! Whether pods of lower priority end for what waits, as the controller would decide it now. What only a running controller
//! remembers is not known: for whom pods end already, and which namespaces rest.

use std::collections::BTreeMap;

use super::TURN;
use crate::controller::core::Core;
use crate::controller::queue::Turn;
use crate::controller::recorder::Reason;
use crate::controller::steps::preempting::Prospect;
use crate::model::names::PodUid;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preemption {
    pub prospect: Prospect,
    /// Who asks may not see PodDisruptionBudgets: that one keeps a pod shows only where it is to end.
    pub blind: bool,
}

impl std::fmt::Display for Preemption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.prospect)?;
        match (&self.prospect, self.blind) {
            (Prospect::Ends { .. }, true) => f.write_str(
                "; a PodDisruptionBudget may keep them, you may not list poddisruptionbudgets.policy",
            ),
            _ => Ok(()),
        }
    }
}

/// Of a unit that was refused in its turn. None: it lacks something else than room.
pub(super) fn of_turn(core: &mut Core, turn: &Turn, reason: Reason) -> Option<Preemption> {
    if !reason.is_for_room() {
        return None;
    }
    let prospect = core.prospect(turn, TURN)?;
    Some(Preemption { prospect, blind: !core.view.knows_budgets() })
}

/// Of those of the pods that wait for one whole GPU of kube-scheduler's.
pub(super) fn for_whole<'a>(
    core: &mut Core,
    pods: impl Iterator<Item = &'a PodUid>,
) -> BTreeMap<PodUid, Preemption> {
    let blind = !core.view.knows_budgets();
    let one = |uid: &PodUid| {
        let prospect = core.prospect_of_whole(uid, TURN)?;
        Some((uid.clone(), Preemption { prospect, blind }))
    };
    pods.filter_map(one).collect()
}
