//! RTX PRO 6000 Server Edition 96 GB (Blackwell): twelve memory slices, four compute slices, graphics.

use super::{BRAND_NVIDIA, Board, InstanceIds, MigProfile, MigSlices, WHOLE, mig};

const QUARTER: &[u32] = &[0, 3, 6, 9];
const HALF: &[u32] = &[0, 6];

/// Columns: kind, id, name, slices, instances, SMs, [CE, DEC, ENC, JPEG, OFA], MiB, starts, size.
static MIG: &[MigProfile] = &[
    mig(0, 14, "1g.24gb", 1, 4, 46, [1, 1, 1, 1, 0], 24192, QUARTER, 3),
    mig(7, 21, "1g.24gb+me", 1, 1, 46, [1, 1, 1, 1, 1], 24192, QUARTER, 3),
    mig(10, 47, "1g.24gb+gfx", 1, 4, 46, [1, 1, 1, 1, 0], 24192, QUARTER, 3),
    mig(15, 65, "1g.24gb+me.all", 1, 1, 46, [1, 4, 4, 4, 1], 24192, QUARTER, 3),
    mig(13, 67, "1g.24gb-me", 1, 4, 46, [1, 0, 0, 0, 0], 24192, QUARTER, 3),
    mig(1, 5, "2g.48gb", 2, 2, 94, [2, 2, 2, 2, 0], 48512, HALF, 6),
    mig(11, 35, "2g.48gb+gfx", 2, 2, 94, [2, 2, 2, 2, 0], 48512, HALF, 6),
    mig(16, 64, "2g.48gb+me.all", 2, 1, 94, [2, 4, 4, 4, 1], 48512, HALF, 6),
    mig(14, 66, "2g.48gb-me", 2, 2, 94, [2, 0, 0, 0, 0], 48512, HALF, 6),
    mig(3, 0, "4g.96gb", 4, 1, 188, [4, 4, 4, 4, 1], 97280, WHOLE, 12),
    mig(12, 32, "4g.96gb+gfx", 4, 1, 188, [4, 4, 4, 4, 1], 97280, WHOLE, 12),
];

pub(super) static RTX_PRO_6000: Board = Board {
    key: "rtx-pro-6000",
    name: "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    brand: BRAND_NVIDIA, // uncertain
    architecture: 10,
    compute: (12, 0),
    memory_mib: 97887,
    reserved_mib: 638, // uncertain
    bar1_mib: 131_072,
    multiprocessors: 188,
    cores: 24064,
    pci_device: 0x2BB5_10DE,
    pci_subsystem: 0x204E_10DE, // uncertain
    vbios: "98.02.6A.00.03",    // uncertain
    part: "900-2G153-0000-000", // uncertain
    power_limit_mw: 600_000,
    power_min_mw: 150_000,
    power_idle_mw: 33_000,
    clock_sm: 2430,
    clock_memory: 12481,
    bus_width: 512,
    pcie_generation: 5,
    nvlinks: 0,
    nvlink_version: 0,
    remaps_rows: true,
    hmm: true,
    mig: MIG,
    slices: MigSlices { memory: 12, compute: 4 },
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree, // uncertain
};
