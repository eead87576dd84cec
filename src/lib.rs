#![doc = include_str!("README.md")]
//
// Rooms in reading order. What each may import is stated in its first lines and kept by tests/tidy.rs.

// Ring 0, words.
pub mod model;

// Ring 1, decisions: pure, synchronous, no clock, no randomness.
pub mod admission;
pub mod allocate;
pub mod cdi;
pub mod conditions;
pub mod feasible;
pub mod inventory;
pub mod ledger;
pub mod params;
pub mod prepare;
pub mod select;
pub mod sharing;
pub mod slices;

// Ring 2, edges: one peer each, no decisions.
pub mod cluster;
pub mod daemon;
pub mod host;
pub mod kubelet;
pub mod nvml;
pub mod supervisor;

// Ring 3, loops: own tasks, queues, timers.
pub mod controller;
pub mod mps;
pub mod node;
pub mod ops;
pub mod webhook;

// Ring 4, for people and for main.
pub mod cli;
