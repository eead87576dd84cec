//! A100 80 GB, SXM4 (Ampere).

use super::{BRAND_NVIDIA, Board, HALF, InstanceIds, MigProfile, ONE, ONE_DOUBLE, TWO, WHOLE, mig};

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
static MIG: &[MigProfile] = &[
    mig(0, 19, "1g.10gb", 1, 7, 14, [1, 0, 0, 0, 0], 9728, ONE, 1),
    mig(7, 20, "1g.10gb+me", 1, 1, 14, [1, 1, 0, 1, 1], 9728, ONE, 1),
    mig(9, 15, "1g.20gb", 1, 4, 14, [1, 1, 0, 0, 0], 19968, ONE_DOUBLE, 2),
    mig(1, 14, "2g.20gb", 2, 3, 28, [2, 1, 0, 0, 0], 19968, TWO, 2),
    mig(2, 9, "3g.40gb", 3, 2, 42, [3, 2, 0, 0, 0], 40192, HALF, 4),
    mig(3, 5, "4g.40gb", 4, 1, 56, [4, 2, 0, 0, 0], 40192, WHOLE, 4),
    mig(4, 0, "7g.80gb", 7, 1, 98, [7, 5, 0, 1, 1], 80640, WHOLE, 8),
];

pub(super) static A100_80GB: Board = Board {
    key: "a100-80gb",
    name: "NVIDIA A100-SXM4-80GB",
    brand: BRAND_NVIDIA,
    architecture: 7,
    compute: (8, 0),
    memory_mib: 81920,
    reserved_mib: 617, // uncertain: differs between drivers
    bar1_mib: 131_072,
    multiprocessors: 108,
    cores: 6912,
    pci_device: 0x20B2_10DE,
    pci_subsystem: 0x147F_10DE,
    vbios: "92.00.9E.00.01",    // uncertain
    part: "692-2G506-0212-002", // uncertain
    power_limit_mw: 400_000,
    power_min_mw: 100_000,
    power_idle_mw: 62_000,
    clock_sm: 1410,
    clock_memory: 1593,
    bus_width: 5120,
    pcie_generation: 4,
    nvlinks: 12,
    nvlink_version: 3,
    remaps_rows: true,
    hmm: true,
    mig: MIG,
    instance_ids: InstanceIds::TreeSwapped,
};
