//! A100 80 GB and 40 GB, SXM4 (Ampere).

use super::{BRAND_NVIDIA, Board, EIGHTHS, HALF, InstanceIds, MigProfile, ONE, ONE_DOUBLE, TWO, WHOLE, mig};

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
static MIG_80GB: &[MigProfile] = &[
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
    mig: MIG_80GB,
    slices: EIGHTHS,
    mig_wants_reset: true,
    instance_ids: InstanceIds::TreeSwapped,
};

static MIG_40GB: &[MigProfile] = &[
    mig(0, 19, "1g.5gb", 1, 7, 14, [1, 0, 0, 0, 0], 4864, ONE, 1),
    mig(7, 20, "1g.5gb+me", 1, 1, 14, [1, 1, 0, 1, 1], 4864, ONE, 1),
    mig(9, 15, "1g.10gb", 1, 4, 14, [1, 1, 0, 0, 0], 9856, ONE_DOUBLE, 2),
    mig(1, 14, "2g.10gb", 2, 3, 28, [2, 1, 0, 0, 0], 9856, TWO, 2),
    mig(2, 9, "3g.20gb", 3, 2, 42, [3, 2, 0, 0, 0], 19968, HALF, 4),
    mig(3, 5, "4g.20gb", 4, 1, 56, [4, 2, 0, 0, 0], 19968, WHOLE, 4),
    mig(4, 0, "7g.40gb", 7, 1, 98, [7, 5, 0, 1, 1], 40192, WHOLE, 8),
];

pub(super) static A100_40GB: Board = Board {
    key: "a100-40gb",
    name: "NVIDIA A100-SXM4-40GB",
    brand: BRAND_NVIDIA,
    architecture: 7,
    compute: (8, 0),
    memory_mib: 40960,
    reserved_mib: 617, // uncertain: differs between drivers
    bar1_mib: 65536,
    multiprocessors: 108,
    cores: 6912,
    pci_device: 0x20B0_10DE,
    pci_subsystem: 0x144E_10DE, // uncertain
    vbios: "92.00.19.00.01",    // uncertain
    part: "692-2G506-0200-002", // uncertain
    power_limit_mw: 400_000,
    power_min_mw: 100_000,
    power_idle_mw: 62_000,
    clock_sm: 1410,
    clock_memory: 1215,
    bus_width: 5120,
    pcie_generation: 4,
    nvlinks: 12,
    nvlink_version: 3,
    remaps_rows: true,
    hmm: true,
    mig: MIG_40GB,
    slices: EIGHTHS,
    mig_wants_reset: true,
    instance_ids: InstanceIds::TreeSwapped,
};
