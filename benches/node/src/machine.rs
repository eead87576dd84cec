//! What the figures were measured on.

use std::fs;
use std::path::Path;

/// Processors, kernel, and the file system that the ledger lies on.
pub fn describe(ledger: &Path) -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let kernel = read("/proc/sys/kernel/osrelease");
    let load = read("/proc/loadavg");
    format!(
        "{cores} cores ({}), Linux {}, ledger on {}, load average at the start {}",
        model.unwrap_or("unknown"),
        kernel.trim(),
        file_system(ledger, &read("/proc/self/mounts")),
        load.split(' ').next().unwrap_or("unknown"),
    )
}

/// Type and device of the mount that a path lies on.
fn file_system(path: &Path, mounts: &str) -> String {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (device, place, kind) = (words.next()?, words.next()?, words.next()?);
        path.starts_with(place).then_some((place.len(), format!("{kind} ({device})")))
    });
    // Of mounts on one place the last is in force.
    mounts.max_by_key(|(length, _)| *length).map_or_else(|| "unknown".to_owned(), |(_, what)| what)
}
