//! The steps of the controller: each reads and changes the owners of state in [`Core`](super::core::Core), and keeps
//! nothing itself. [`round`](super::round) runs them in order.
//!
//! * `changes`: a change in the API; `answers`: what became of a write
//! * `units`: what follows for a unit; `gpus`: what follows for a GPU
//! * `spend`: what a unit may cost; `bounded`: whether its namespace may have more; `place`: where it goes; `reserving`: what is kept for it; `preempting`: who ends for it
//! * `tell`: what its pods are told
//! * `holding`: which GPUs are held; `contenders`: who may still be given one that was just taken
//! * `moving`: room that moves of others would make
//! * `reclaim`: allocations that nobody uses; `send`: the writes

mod answers;
pub mod bounded;
mod changes;
mod contenders;
mod gpus;
mod holding;
pub mod moving;
pub mod place;
pub mod preempting;
mod reclaim;
mod reserving;
mod send;
mod spend;
mod tell;
mod units;
