//! Tesla T4 (Turing): no MIG, page retirement, no NVLink.

use super::{BRAND_NVIDIA, Board, EIGHTHS, InstanceIds};

pub(super) static T4: Board = Board {
    key: "t4",
    name: "Tesla T4",
    brand: BRAND_NVIDIA,
    architecture: 6,
    compute: (7, 5),
    memory_mib: 15360,
    reserved_mib: 449, // uncertain: reported as about 450
    bar1_mib: 256,
    multiprocessors: 40,
    cores: 2560,
    pci_device: 0x1EB8_10DE,
    pci_subsystem: 0x12A2_10DE,
    vbios: "90.04.96.00.9F",
    part: "900-2G183-0300-000",
    power_limit_mw: 70_000,
    power_min_mw: 60_000,
    power_idle_mw: 9_000,
    clock_sm: 1590,
    clock_memory: 5001,
    bus_width: 256,
    pcie_generation: 3,
    nvlinks: 0,
    nvlink_version: 0,
    remaps_rows: false,
    hmm: true, // uncertain: open kernel modules from Turing on
    mig: &[],
    slices: EIGHTHS,
    mig_wants_reset: false,
    instance_ids: InstanceIds::Tree,
};
