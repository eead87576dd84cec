//! H100 80 GB HBM3 and H200, SXM5 (Hopper).

use super::{BRAND_NVIDIA, Board, EIGHTHS, HALF, InstanceIds, MigProfile, ONE, ONE_DOUBLE, TWO, WHOLE, mig};

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
static H100_MIG: &[MigProfile] = &[
    mig(0, 19, "1g.10gb", 1, 7, 16, [1, 1, 0, 1, 0], 9984, ONE, 1),
    mig(7, 20, "1g.10gb+me", 1, 1, 16, [1, 1, 0, 1, 1], 9984, ONE, 1),
    mig(9, 15, "1g.20gb", 1, 4, 26, [1, 1, 0, 1, 0], 20096, ONE_DOUBLE, 2),
    mig(1, 14, "2g.20gb", 2, 3, 32, [2, 2, 0, 2, 0], 20096, TWO, 2),
    mig(2, 9, "3g.40gb", 3, 2, 60, [3, 3, 0, 3, 0], 40448, HALF, 4),
    mig(3, 5, "4g.40gb", 4, 1, 64, [4, 4, 0, 4, 0], 40448, WHOLE, 4),
    mig(4, 0, "7g.80gb", 7, 1, 132, [8, 7, 0, 7, 1], 81152, WHOLE, 8),
];

pub(super) static H100: Board = Board {
    key: "h100",
    name: "NVIDIA H100 80GB HBM3",
    brand: BRAND_NVIDIA,
    architecture: 9,
    compute: (9, 0),
    memory_mib: 81559,
    reserved_mib: 551, // uncertain: differs between drivers
    bar1_mib: 131_072,
    multiprocessors: 132,
    cores: 16896,
    pci_device: 0x2330_10DE,
    pci_subsystem: 0x16C1_10DE,
    vbios: "96.00.89.00.01",    // uncertain
    part: "692-2G520-0200-000", // uncertain
    power_limit_mw: 700_000,
    power_min_mw: 200_000,
    power_idle_mw: 69_000,
    clock_sm: 1980,
    clock_memory: 2619,
    bus_width: 5120,
    pcie_generation: 5,
    nvlinks: 18,
    nvlink_version: 4,
    remaps_rows: true,
    hmm: true,
    mig: H100_MIG,
    slices: EIGHTHS,
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree,
};

/// The memory of 7g.141gb is uncertain; the other rows were seen in the vendor's listing.
static H200_MIG: &[MigProfile] = &[
    mig(0, 19, "1g.18gb", 1, 7, 16, [1, 1, 0, 1, 0], 16384, ONE, 1),
    mig(7, 20, "1g.18gb+me", 1, 1, 16, [1, 1, 0, 1, 1], 16384, ONE, 1),
    mig(9, 15, "1g.35gb", 1, 4, 26, [1, 1, 0, 1, 0], 33024, ONE_DOUBLE, 2),
    mig(1, 14, "2g.35gb", 2, 3, 32, [2, 2, 0, 2, 0], 33024, TWO, 2),
    mig(2, 9, "3g.71gb", 3, 2, 60, [3, 3, 0, 3, 0], 71168, HALF, 4),
    mig(3, 5, "4g.71gb", 4, 1, 64, [4, 4, 0, 4, 0], 71168, WHOLE, 4),
    mig(4, 0, "7g.141gb", 7, 1, 132, [8, 7, 0, 7, 1], 143_360, WHOLE, 8),
];

pub(super) static H200: Board = Board {
    key: "h200",
    name: "NVIDIA H200",
    brand: BRAND_NVIDIA,
    architecture: 9,
    compute: (9, 0),
    memory_mib: 143_771,
    reserved_mib: 613, // uncertain
    bar1_mib: 262_144,
    multiprocessors: 132,
    cores: 16896,
    pci_device: 0x2335_10DE,
    pci_subsystem: 0x18BE_10DE, // uncertain
    vbios: "96.00.BC.00.01",    // uncertain
    part: "692-2G525-0200-000", // uncertain
    power_limit_mw: 700_000,
    power_min_mw: 200_000,
    power_idle_mw: 76_000,
    clock_sm: 1980,
    clock_memory: 3201,
    bus_width: 6144,
    pcie_generation: 5,
    nvlinks: 18,
    nvlink_version: 4,
    remaps_rows: true,
    hmm: true,
    mig: H200_MIG,
    slices: EIGHTHS,
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree,
};
