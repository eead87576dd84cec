//! How much there is to read of a pod's claims, and what it costs.

use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceRequest};

use super::{POD_REQUESTS_MAX, POD_TRIES_MAX, WAYS_MAX};
use crate::select::CONSTRAINED_MAX;

/// In ticks of [`crate::select::TICKS_PER_UNIT`]: of counting what a claim has; of reading one request in one combination
/// of alternatives; of reading an entry of its configuration; and of comparing a request's name with another.
const CLAIM_TICKS: u64 = 20;
const WANT_TICKS: u64 = 50;
const CONFIG_TICKS: u64 = 50;
const NAME_TICKS: u64 = 2;

/// How much there is to read of a pod's claims. It is counted before any of it is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    pub requests: usize,
    /// Combinations of alternatives.
    pub ways: usize,
    /// Requests that constraints name, each as often as it is named; a constraint without names is about all.
    pub constrained: usize,
    /// What it cost to count, and what it costs to read.
    pub counted: u64,
    pub read: u64,
}

impl Size {
    pub fn of<'a>(claims: impl Iterator<Item = &'a DeviceClaim>) -> Self {
        let (mut all, mut of_way) = (Self { ways: 1, ..Self::default() }, 0_u64);
        for claim in claims {
            let requests = claim.requests.as_deref().unwrap_or_default();
            let (count, ways) = (requests.len(), ways_of(claim));
            let alternatives =
                requests.iter().map(|one| one.first_available.as_ref().map_or(1, Vec::len).max(1));
            let alternatives: usize = alternatives.sum();
            let names = |names: &Option<Vec<String>>| names.as_ref().map_or(0, Vec::len);
            let constraints = claim.constraints.as_deref().unwrap_or_default();
            let named: usize = constraints.iter().map(|one| names(&one.requests)).sum();
            let about_all = constraints.iter().filter(|one| names(&one.requests) == 0).count();
            let config = claim.config.as_deref().unwrap_or_default();
            let config_names: usize = config.iter().map(|one| names(&one.requests)).sum();
            all.requests += count;
            all.ways = all.ways.saturating_mul(ways);
            all.constrained += named + about_all * count;
            all.counted += CLAIM_TICKS + constraints.len() as u64 + config.len() as u64 + count as u64;
            all.read +=
                CONFIG_TICKS * config.len() as u64 + NAME_TICKS * (alternatives * config_names) as u64;
            of_way += WANT_TICKS * count as u64 + NAME_TICKS * (count * (named + constraints.len())) as u64;
        }
        all.read = all.read.saturating_add(of_way.saturating_mul(all.ways.min(WAYS_MAX) as u64));
        all
    }

    /// # Errors
    /// It is more than is read of a pod's claims: in words.
    pub fn check(&self) -> Result<(), String> {
        let Self { requests, ways, constrained, .. } = self;
        if *requests > POD_REQUESTS_MAX {
            return Err(format!(
                "its claims have {requests} requests together; a pod is placed with at most {POD_REQUESTS_MAX}"
            ));
        }
        if *constrained > CONSTRAINED_MAX {
            return Err(format!(
                "the constraints of its claims name {constrained} requests, each counted as often as it is named; a pod \
                 is placed with at most {CONSTRAINED_MAX}: write fewer constraints, or name fewer requests in them"
            ));
        }
        if *ways > WAYS_MAX {
            return Err(format!(
                "its claims have more than {WAYS_MAX} combinations of alternatives (firstAvailable); name fewer"
            ));
        }
        if ways.saturating_mul(*requests) > POD_TRIES_MAX {
            return Err(format!(
                "its claims have {requests} requests in {ways} combinations of alternatives (firstAvailable); \
                 {POD_TRIES_MAX} are the most of both multiplied: name fewer"
            ));
        }
        Ok(())
    }
}

/// So many combinations of alternatives.
pub fn ways_of(claim: &DeviceClaim) -> usize {
    let alternatives = |one: &DeviceRequest| one.first_available.as_ref().map_or(1, Vec::len).max(1);
    claim.requests.iter().flatten().map(alternatives).fold(1, usize::saturating_mul)
}
