//! Which of the claim's configurations count for which device, in words. `params::resolve` decides it; this
//! tells by the same rule (KEP-3063) which entry it was.

use crate::ledger::HoldMode;
use crate::model::claim::{Access, AllocatedClaim, Config, ConfigSource};
use crate::model::gpu::Device;
use crate::model::share::MpsLimits;
use crate::params::{Interval, Params, Sharing, decode};
use crate::prepare::Target;

/// What an entry decides. Of the entries of one aspect, the last one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aspect {
    /// How the claim's containers share a device.
    Sharing,
    /// How firmly a share must hold, and for how many processes.
    Share,
    /// How much the controller gave.
    Grant,
}

const ASPECTS: [Aspect; 3] = [Aspect::Sharing, Aspect::Share, Aspect::Grant];

/// Indices of the entries that are meant for the target in that aspect; the last one counts.
pub fn meant(claim: &AllocatedClaim, target: &Target<'_>, aspect: Aspect) -> Vec<usize> {
    let results = claim.results.iter().filter(|result| result.access != Access::Admin);
    let requests: Vec<_> =
        results.filter(|result| result.device == target.name).map(|result| &result.request).collect();
    let for_target = |config: &Config| {
        requests.iter().any(|request| config.applies_to(request))
            && aspect_of(config, target.device) == Some(aspect)
    };
    claim.configs.iter().enumerate().filter(|(_, c)| for_target(c)).map(|(index, _)| index).collect()
}

/// What the entry decides for such a device, if anything.
fn aspect_of(config: &Config, device: Device<'_>) -> Option<Aspect> {
    match (decode(&config.parameters).ok()?, device) {
        (Params::Gpu(_), Device::Whole(_))
        | (Params::Mig(_), Device::Mig { .. } | Device::Place { .. } | Device::Parent(_)) => {
            Some(Aspect::Sharing)
        }
        (Params::Share(_), _) => Some(Aspect::Share),
        (Params::Grant(_), _) => Some(Aspect::Grant),
        (Params::Gpu(_) | Params::Mig(_), _) => None,
    }
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
    let of = |target| ASPECTS.into_iter().map(move |aspect| meant(claim, target, aspect));
    let meant: Vec<_> = targets.iter().flat_map(of).collect();
    let mut words = Vec::new();
    for index in 0..claim.configs.len() {
        if meant.iter().any(|entries| entries.last() == Some(&index)) {
            continue;
        }
        let later = meant.iter().find(|entries| entries.contains(&index)).and_then(|entries| entries.last());
        words.push(match later {
            Some(later) => format!(
                "{} has no effect: {} is for the same devices and comes later.",
                entry(claim, index),
                entry(claim, *later)
            ),
            None => format!("{} is for none of these devices.", entry(claim, index)),
        });
    }
    words
}

/// What is set on the device.
pub fn settings(target: &Target<'_>) -> String {
    if let HoldMode::Share(grant) = &target.mode {
        let most = target.settings.share.max_processes.map(|most| format!(", at most {most} processes"));
        return format!("isolation {}{}", grant.isolation, most.unwrap_or_default());
    }
    match &target.settings.sharing {
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
