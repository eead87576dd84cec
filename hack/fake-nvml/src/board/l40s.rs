//! L40S (Ada): no MIG, no NVLink.

use super::{BRAND_NVIDIA, Board, EIGHTHS, InstanceIds};

pub(super) static L40S: Board = Board {
    key: "l40s",
    name: "NVIDIA L40S",
    brand: BRAND_NVIDIA,
    architecture: 8,
    compute: (8, 9),
    memory_mib: 46068,
    reserved_mib: 597, // uncertain
    bar1_mib: 65536,
    multiprocessors: 142,
    cores: 18176,
    pci_device: 0x26B9_10DE,
    pci_subsystem: 0x1851_10DE, // uncertain
    vbios: "95.02.66.00.02",    // uncertain
    part: "900-2G133-0080-000", // uncertain
    power_limit_mw: 350_000,
    power_min_mw: 100_000,
    power_idle_mw: 34_000,
    clock_sm: 2520,
    clock_memory: 9001,
    bus_width: 384,
    pcie_generation: 4,
    nvlinks: 0,
    nvlink_version: 0,
    remaps_rows: true,
    hmm: true,
    mig: &[],
    slices: EIGHTHS,
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree,
};
