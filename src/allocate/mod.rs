//! Which GPUs a pod's shares are placed on, over all nodes: the controller's decision, and `tranche simulate`'s.
//!
//! * [`ask`]: what a pod asks: how many GPUs, how much of each, what its node must have left
//! * [`index`]: nodes, GPUs and what is granted of them; cheap to change
//! * [`decide`]: ask + index + policy → placements, or an [`Explanation`] with numbers
//! * `fit`: does it fit; `score`: how well; `fragment`: what a placement makes unusable; `board`: scores kept
//! * `facts`: what GPUs are; `choice`: which of them selectors choose; `taints`: which ones tolerations bear; `search`: GPUs for several wants of a pod at once
//! * [`victims`]: which pods would have to end on a node for another
//! * [`moves`]: which pods have to move so that one fits that does not
//! * [`mig`]: which MIG instance is made for an ask, and where on its board; `cut`: such boards in the index
//! * [`audit`]: is anything granted twice; [`verdicts`]: how each GPU looks to a pod that waits
//!
//! Same index, same ask, same policy: same answer. A pod is placed on one node, with all of its GPUs, or not at
//! all; so is a gang of pods.
//!
//! May import: model, params, select. May name: thiserror.

pub mod ask;
mod audit;
mod choice;
mod cut;
mod decide;
mod explain;
mod facts;
mod fit;
mod fragment;
pub mod index;
pub mod mig;
pub mod moves;
mod node;
mod score;
mod score_table;
mod search;
mod sought;
mod taints;
#[cfg(test)]
mod tests;
mod verdict;
pub mod victims;

pub use ask::{AttributeConstraint, Nodes, Part, PodAsk, Rule, Shape, Want};
pub use audit::{AuditFinding, audit};
pub use choice::Studied;
pub use decide::{Decision, decide, in_order, places};
pub use explain::{Explanation, MigShortage, Shortage, Skipped};
pub use index::{Index, PlacementKey, Unknown};
pub use mig::MigAsk;
pub use node::{Division, GpuGrant, GpuSpec, GpuView, MigBoard, NodeSpec, NodeView, Placement, ShareRoom};
pub use score::Policy;
pub use verdict::{GpuVerdict, NodeShort, NodeVerdict, verdicts};
