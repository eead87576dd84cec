//! Names of boards and MIG devices, derived from the node's seed: the same on
//! every start and in every process.

use crate::board::Board;
use crate::control::GpuControl;

/// Who a board is.
#[derive(Clone, Debug)]
pub struct Identity {
    pub uuid: String,
    pub serial: String,
    pub minor: u32,
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
    pub host_numa_node: u32,
}

impl Identity {
    pub fn new(board: &Board, seed: &str, index: usize, count: usize, over: &GpuControl) -> Identity {
        let bits = spread(&format!("{seed}/{}/{index}", board.key));
        let (domain, bus, device) = over.bus_id.as_deref().and_then(parse_bus).unwrap_or((
            0,
            BUSES.get(index).copied().unwrap_or(0xF0),
            0,
        ));
        Identity {
            uuid: over.uuid.clone().unwrap_or_else(|| format!("GPU-{}", uuid(bits))),
            serial: over.serial.clone().unwrap_or_else(|| format!("165{:010}", bits % 10_000_000_000)),
            minor: over.minor.unwrap_or(index as u32),
            domain,
            bus,
            device,
            host_numa_node: over.host_numa_node.unwrap_or(u32::from(count > 1 && index >= count.div_ceil(2))),
        }
    }

    /// `00000000:3B:00.0`
    pub fn bus_id(&self) -> String {
        format!("{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// `0000:3B:00.0`
    pub fn bus_id_legacy(&self) -> String {
        format!("{:04X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// Buses as an eight-board server has them, then some more.
static BUSES: &[u32] =
    &[0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF, 0x0F, 0x2D, 0x3B, 0x76, 0x87, 0xA5, 0xB3, 0xE9];

/// The UUID of a MIG device: of the board, the instances and where they sit.
pub fn mig_uuid(board_uuid: &str, gi: u32, profile: u32, start: u32, ci: u32, ci_start: u32) -> String {
    format!("MIG-{}", uuid(spread(&format!("{board_uuid}/{gi}/{profile}/{start}/{ci}/{ci_start}"))))
}

/// Domain, bus and device of `[domain:]bus:device[.function]`, in hex.
pub fn parse_bus(text: &str) -> Option<(u32, u32, u32)> {
    let hex = |s: &str| u32::from_str_radix(s, 16).ok();
    let parts: Vec<&str> = text.trim().split(':').collect();
    let (domain, bus, rest) = match parts.as_slice() {
        [domain, bus, rest] => (hex(domain)?, hex(bus)?, rest),
        [bus, rest] => (0, hex(bus)?, rest),
        _ => return None,
    };
    let device = hex(rest.split('.').next()?)?;
    Some((domain, bus, device))
}

/// 128 bits that depend on every byte of the text (FNV-1a, then mixed).
fn spread(text: &str) -> u128 {
    let mut hash: u128 = 0x6C62_272E_07BB_0142_62B8_2175_6295_C58D;
    for byte in text.bytes() {
        hash ^= u128::from(byte);
        hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B);
    }
    hash ^= hash >> 61;
    hash = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    hash ^ hash >> 67
}

fn uuid(bits: u128) -> String {
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        bits >> 96,
        bits >> 80 & 0xFFFF,
        bits >> 64 & 0xFFFF,
        bits >> 48 & 0xFFFF,
        bits & 0xFFFF_FFFF_FFFF
    )
}
