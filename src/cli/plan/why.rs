//! Which of the claim's configurations count for which device, in words. `params::resolve` decides it; this
//! tells by the same rule (KEP-3063) which entry it was.

use crate::model::claim::{Access, AllocatedClaim, Config, ConfigSource};
use crate::model::gpu::Device;
use crate::model::share::MpsLimits;
use crate::params::{Interval, Params, Sharing, decode};
use crate::prepare::Target;

/// Indices of the entries that are meant for the target; the last one counts.
pub fn meant(claim: &AllocatedClaim, target: &Target<'_>) -> Vec<usize> {
    let results = claim.results.iter().filter(|result| result.access == Access::Exclusive);
    let requests: Vec<_> =
        results.filter(|result| result.device == target.name).map(|result| &result.request).collect();
    let for_target = |config: &Config| {
        requests.iter().any(|request| config.applies_to(request)) && of_kind(config, target.device)
    };
    claim.configs.iter().enumerate().filter(|(_, c)| for_target(c)).map(|(index, _)| index).collect()
}

fn of_kind(config: &Config, device: Device<'_>) -> bool {
    matches!(
        (decode(&config.parameters), device),
        (Ok(Params::Gpu(_)), Device::Whole(_)) | (Ok(Params::Mig(_)), Device::Mig { .. })
    )
}

/// `config[1] of the claim`.
pub fn entry(claim: &AllocatedClaim, index: usize) -> String {
    let source = match claim.configs.get(index).map(|config| config.source) {
        Some(ConfigSource::FromClass) => "class",
        Some(ConfigSource::FromClaim) | None => "claim",
    };
    format!("config[{index}] of the {source}")
}

/// Why entries that stand in the claim count for nothing.
pub fn passed_over(claim: &AllocatedClaim, targets: &[Target<'_>]) -> Vec<String> {
    let meant: Vec<_> = targets.iter().map(|target| meant(claim, target)).collect();
    let mut words = Vec::new();
    for index in 0..claim.configs.len() {
        if meant.iter().any(|entries| entries.last() == Some(&index)) {
            continue;
        }
        let later = meant.iter().find(|entries| entries.contains(&index)).and_then(|entries| entries.last());
        words.push(match later {
            Some(later) => format!(
                "{} counts for nothing: {} is meant for the same devices and comes later.",
                entry(claim, index),
                entry(claim, *later)
            ),
            None => format!("{} is meant for none of these devices.", entry(claim, index)),
        });
    }
    words
}

/// What is set on the device.
pub fn settings(sharing: Option<&Sharing>) -> String {
    match sharing {
        None => "the driver's defaults".to_owned(),
        Some(Sharing::TimeSlicing(interval)) => format!("TimeSlicing, interval {}", interval.as_str()),
        Some(Sharing::Mps(_)) => "MPS".to_owned(),
    }
}

/// What an MPS client may take.
pub fn limits(limits: &MpsLimits) -> String {
    let memory = limits.memory.iter().map(|limit| match limit {
        Some(bytes) => format!("{} MiB", bytes.mib_floor()),
        None => "unlimited memory".to_owned(),
    });
    let compute =
        limits.compute.map_or_else(|| "no cap on compute".to_owned(), |percent| percent.to_string());
    memory.chain([compute]).collect::<Vec<_>>().join(", ")
}

/// The word for a time slice's level.
pub fn interval(level: u8) -> &'static str {
    let all = [Interval::Default, Interval::Short, Interval::Medium, Interval::Long];
    all.into_iter().find(|interval| interval.level() == level).map_or("unknown", Interval::as_str)
}
