#![doc = include_str!("README.md")]
//
// Modules in reading order. What each may import is stated in its first lines; tests/tidy fails on anything else.

// A test may be long, spawn and measure; its pauses are looked at by tests/tidy.
#![cfg_attr(test, allow(clippy::too_many_lines, clippy::disallowed_methods))]

// Layer 0: types of the domain.
pub mod model;

// Layer 1, decisions: pure, synchronous, no clock, no randomness.
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

// Layer 2, edges: one peer each, no decisions.
pub mod cluster;
pub mod daemon;
pub mod host;
pub mod kubelet;
pub mod nvml;
pub mod supervisor;

// Layer 3, loops: own tasks, queues, timers.
pub mod controller;
pub mod mps;
pub mod node;
pub mod ops;
pub mod webhook;

// Layer 4, for people and for main.
pub mod cli;
