//! How fast this machine is now: limits of time are written for a fast one, and a slow one may take longer.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// What [`yardstick`] takes, not optimised, on a machine for which the limits of time are meant.
const YARDSTICK: Duration = Duration::from_millis(40);

/// How many times slower this machine is now than the one for which the limits are meant; 1 at the least.
pub fn slowness() -> f64 {
    let (begun, before) = (Instant::now(), processor());
    yardstick();
    let took = begun.elapsed().min(processor().saturating_sub(before));
    took.div_duration_f64(YARDSTICK).max(1.0)
}

/// Work of the kinds that tests do, always the same.
fn yardstick() {
    let mut words: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for nth in 0..100_000_u64 {
        words.entry(format!("word {}", nth % 977)).or_default().push(nth);
    }
    black_box(words.values().flatten().sum::<u64>());
}

/// What this process has had of processors: fields 14 and 15 of proc_pid_stat(5), in ticks of 10 ms.
pub fn processor() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    Duration::from_millis(10) * u32::try_from(ticks.sum::<u64>()).unwrap_or(u32::MAX)
}
