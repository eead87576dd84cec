//! Who may still get a GPU that we have just taken?
//!
//! A scheduler that decided before it knew of our hold writes what it decided later, on a claim that it knew by then.
//! Claims come to every watch in the order in which they were stored: whoever knows one that was stored after the hold
//! knows the hold as well. So once our own watch has brought the mark of the look, whoever can still come is among the
//! claims that we know and that have no allocation. Where there are none, nobody is waited for.
//!
//! A pod that asks by a name among its containers' limits has no claim before it is bound, and pods come in no order
//! with claims: those that were known when the look began count like claims. Whoever was bound by then was given what
//! they have before the mark was written, so that their claims have come with it. What a hold settles at least is for
//! pods that nobody here knew.

use std::collections::BTreeSet;

use crate::controller::core::Core;
use crate::controller::view::{GpuRef, Sought};

impl Core {
    /// The look ends. Those of its GPUs that the scheduler may have given to somebody for whom it has not been written
    /// yet.
    pub(super) fn contestable(&mut self, gpus: Vec<GpuRef>) -> BTreeSet<GpuRef> {
        let mut sought = self.holds.take_sought();
        sought.and(self.view.sought_by_limits());
        sought.and(self.view.sought_by_claims());
        match sought {
            Sought::Anything => gpus.into_iter().collect(),
            Sought::Chosen(kinds) => {
                let index = &mut self.capacity.index;
                let mut may = |gpu: &GpuRef| {
                    kinds.iter().any(|selectors| {
                        index.may_choose(selectors, &gpu.node, &gpu.device)
                            || index.may_choose_part(selectors, &gpu.node, &gpu.device)
                    })
                };
                gpus.into_iter().filter(|gpu| may(gpu)).collect()
            }
        }
    }
}
