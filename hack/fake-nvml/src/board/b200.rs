//! B200 180 GB, SXM (Blackwell).

use super::{BRAND_NVIDIA, Board, EIGHTHS, HALF, InstanceIds, MigProfile, ONE, ONE_DOUBLE, TWO, WHOLE, mig};

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
/// The first four rows were seen in the vendor's listing. Multiprocessors, decoders
/// and memory of the last three are uncertain (copy engines are from the MIG guide).
static MIG: &[MigProfile] = &[
    mig(0, 19, "1g.23gb", 1, 7, 18, [2, 1, 0, 1, 0], 20992, ONE, 1),
    mig(7, 20, "1g.23gb+me", 1, 1, 18, [2, 1, 0, 1, 1], 20992, ONE, 1),
    mig(9, 15, "1g.45gb", 1, 4, 30, [2, 1, 0, 1, 0], 45312, ONE_DOUBLE, 2),
    mig(1, 14, "2g.45gb", 2, 3, 36, [4, 2, 0, 2, 0], 45312, TWO, 2),
    mig(2, 9, "3g.90gb", 3, 2, 70, [6, 3, 0, 3, 0], 91648, HALF, 4),
    mig(3, 5, "4g.90gb", 4, 1, 72, [8, 4, 0, 4, 0], 91648, WHOLE, 4),
    mig(4, 0, "7g.180gb", 7, 1, 148, [16, 7, 0, 7, 1], 182_528, WHOLE, 8),
];

pub(super) static B200: Board = Board {
    key: "b200",
    name: "NVIDIA B200",
    brand: BRAND_NVIDIA,
    architecture: 10,
    compute: (10, 0),
    memory_mib: 183_359,
    reserved_mib: 728, // uncertain
    bar1_mib: 262_144,
    multiprocessors: 148,
    cores: 18944,
    pci_device: 0x2901_10DE,
    pci_subsystem: 0x1999_10DE, // uncertain
    vbios: "97.00.82.00.18",    // uncertain
    part: "692-2G525-0220-000", // uncertain
    power_limit_mw: 1_000_000,
    power_min_mw: 200_000,
    power_idle_mw: 140_000,
    clock_sm: 1965,
    clock_memory: 3996,
    bus_width: 7680,
    pcie_generation: 6, // uncertain: 5 behind most hosts
    nvlinks: 18,
    nvlink_version: 5,
    remaps_rows: true,
    hmm: true,
    mig: MIG,
    slices: EIGHTHS,
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree,
};
