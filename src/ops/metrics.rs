//! The registry of a process, and its text. Which metrics there are is said by the `metrics` of each loop. Names follow
//! Prometheus' rules: base units, `_total` on counters (the encoder adds it), prefix `tranche_`.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
pub use prometheus_client::registry::Registry;

use super::exposition;

/// A float that only ever is set.
pub type FloatGauge = Gauge<f64, AtomicU64>;

/// A registry with our prefix that already tells which build this is.
pub fn registry() -> Registry {
    let mut registry = Registry::with_prefix("tranche");
    let build = [("version", env!("CARGO_PKG_VERSION")), ("commit", env!("TRANCHE_COMMIT"))];
    registry.register("build", "Which build this is", Info::new(build));
    registry
}

/// All metrics as OpenMetrics text, in the order in which they were registered.
///
/// # Errors
/// A metric cannot be encoded.
pub fn text(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    text::encode(&mut text, registry).map(|()| text)
}

/// The same in Prometheus' text format 0.0.4, as it is served to whoever does not ask for OpenMetrics.
///
/// # Errors
/// A metric cannot be encoded.
pub fn plain_text(registry: &Registry) -> Result<String, fmt::Error> {
    text(registry).map(|open| exposition::as_text(&open))
}

/// A count as a gauge takes it; one that is too large is the largest that there is.
pub fn gauge_value(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_registry_tells_its_build() {
        let text = text(&registry()).unwrap();
        assert!(text.contains("tranche_build_info{version=\"0.1.0\",commit=\""), "{text}");
    }

    #[test]
    fn a_count_that_no_gauge_holds_is_the_largest() {
        assert_eq!((gauge_value(3_usize), gauge_value(u64::MAX)), (3, i64::MAX));
    }
}
