//! A30 24 GB (Ampere): four memory slices, four compute slices.

use super::{BRAND_NVIDIA, Board, InstanceIds, MigProfile, MigSlices, WHOLE, mig};

const QUARTER: &[u32] = &[0, 1, 2, 3];
const HALF: &[u32] = &[0, 2];

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
static MIG: &[MigProfile] = &[
    mig(0, 14, "1g.6gb", 1, 4, 14, [1, 1, 0, 0, 0], 5952, QUARTER, 1),
    mig(7, 21, "1g.6gb+me", 1, 1, 14, [1, 1, 0, 1, 1], 5952, QUARTER, 1),
    mig(1, 5, "2g.12gb", 2, 2, 28, [2, 2, 0, 0, 0], 11968, HALF, 2),
    mig(8, 6, "2g.12gb+me", 2, 1, 28, [2, 2, 0, 1, 1], 11968, HALF, 2),
    mig(3, 0, "4g.24gb", 4, 1, 56, [4, 4, 0, 1, 1], 24000, WHOLE, 4),
];

pub(super) static A30: Board = Board {
    key: "a30",
    name: "NVIDIA A30",
    brand: BRAND_NVIDIA,
    architecture: 7,
    compute: (8, 0),
    memory_mib: 24576,
    reserved_mib: 317, // uncertain: differs between drivers
    bar1_mib: 32768,
    multiprocessors: 56,
    cores: 3584,
    pci_device: 0x20B7_10DE,
    pci_subsystem: 0x1532_10DE,
    vbios: "92.00.66.00.02",    // uncertain
    part: "900-21001-0040-100", // uncertain
    power_limit_mw: 165_000,
    power_min_mw: 100_000,
    power_idle_mw: 29_000,
    clock_sm: 1440,
    clock_memory: 1215,
    bus_width: 3072,
    pcie_generation: 4,
    nvlinks: 4,
    nvlink_version: 3,
    remaps_rows: true,
    hmm: true,
    mig: MIG,
    slices: MigSlices { memory: 4, compute: 4 },
    mig_wants_reset: true,
    instance_ids: InstanceIds::Tree, // uncertain
};
