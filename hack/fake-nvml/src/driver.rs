//! What a driver version means: its series, its CUDA version, and which names its library exports.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::strip;

include!(concat!(env!("OUT_DIR"), "/names.rs"));

/// The version that is played where nobody names another.
pub const DEFAULT: &str = "580.159.04";

/// The oldest series of which the names are known; older ones are taken to have the same.
const OLDEST: u32 = 550;

/// `550` of `550.163.01`; 0 of what is no version.
pub fn series(version: &str) -> u32 {
    version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
}

/// The driver series from which on a function is there; 0: always.
pub fn since(name: &str) -> u32 {
    static INDEX: OnceLock<HashMap<&str, u32>> = OnceLock::new();
    let since = INDEX.get_or_init(|| NAMES.iter().copied().collect()).get(name).copied().unwrap_or(0);
    if since <= OLDEST { 0 } else { since }
}

/// Takes from a copy of this library the names that come after the version, so that looking them up fails as it does
/// with that driver.
///
/// # Errors
/// In words, when the version is none, or the file is no such library.
pub fn keep_names_of(version: &str, file: &mut [u8]) -> Result<(), String> {
    let well_formed =
        version.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    let series = series(version);
    if !well_formed || series == 0 {
        return Err(format!("{version} is no driver version; one is {DEFAULT}"));
    }
    let there = strip::names(file)?;
    let newer = NAMES.iter().map(|(name, _)| *name).filter(|name| since(name) > series);
    let unwanted: Vec<_> = newer.filter(|name| there.contains(*name)).map(str::to_owned).collect();
    strip::strip(file, &unwanted)
}

/// The CUDA version that a driver series brings, as major * 1000 + minor * 10.
pub fn cuda(series: u32) -> i32 {
    match series {
        ..=534 => 12010,
        535..=544 => 12020,
        545..=549 => 12030,
        550..=554 => 12040,
        555..=559 => 12050,
        560..=564 => 12060,
        565..=569 => 12070,
        570..=574 => 12080,
        575..=579 => 12090,
        580..=589 => 13000,
        590..=594 => 13010,
        595..=604 => 13020,
        605..=614 => 13030,
        _ => 13040,
    }
}
