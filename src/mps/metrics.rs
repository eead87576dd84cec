//! What the supervisor of MPS daemons counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::ops::metrics::{Registry, gauge_value};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WhatLabels {
    what: &'static str,
}

/// Clones count into the same metrics.
#[derive(Debug, Clone, Default)]
pub struct MpsMetrics {
    daemons: Family<PhaseLabels, Gauge>,
    reassertions: Family<WhatLabels, Counter>,
    terminations: Family<WhatLabels, Counter>,
    pub deaths: Counter,
    pub starts: Counter,
    pub unheard: Counter,
    pub shm_removed: Counter,
    pub questions: Counter,
    pub refusals: Counter,
}

impl MpsMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        metrics.daemons(0, 0, 0);
        for what in ["limits", "compute_mode"] {
            drop(metrics.reassertions.get_or_create(&WhatLabels { what }));
        }
        for what in ["client", "server", "daemon"] {
            drop(metrics.terminations.get_or_create(&WhatLabels { what }));
        }
        registry.register("mps_daemons", "MPS daemons of this node, by phase", metrics.daemons.clone());
        registry.register(
            "mps_daemon_deaths",
            "MPS daemons that ended although they were needed",
            metrics.deaths.clone(),
        );
        registry.register("mps_daemon_starts", "MPS daemons started", metrics.starts.clone());
        registry.register(
            "mps_reassertions",
            "Settings of daemons and boards that somebody else had changed and that were set again",
            metrics.reassertions.clone(),
        );
        registry.register(
            "mps_terminations",
            "Clients ended on request; servers and daemons that had to be ended by force",
            metrics.terminations.clone(),
        );
        registry.register(
            "mps_unheard_checks",
            "Checks of a daemon that failed because somebody else had a session of its control program open",
            metrics.unheard.clone(),
        );
        registry.register(
            "mps_shm_files_removed",
            "Files removed from a full /dev/shm because their users have no process left there",
            metrics.shm_removed.clone(),
        );
        registry.register("mps_questions", "Requests from the node plugin", metrics.questions.clone());
        registry.register(
            "mps_refusals",
            "Requests from the node plugin that were refused; the reason is in the log",
            metrics.refusals.clone(),
        );
        metrics
    }

    /// How many daemons there are now in each phase.
    pub fn daemons(&self, serving: usize, resting: usize, down: usize) {
        for (phase, count) in [("serving", serving), ("resting", resting), ("down", down)] {
            self.daemons.get_or_create(&PhaseLabels { phase }).set(gauge_value(count));
        }
    }

    /// `limits` or `compute_mode` was set again.
    pub fn reassertion(&self, what: &'static str) {
        self.reassertions.get_or_create(&WhatLabels { what }).inc();
    }

    /// A `client`, `server` or `daemon` was ended.
    pub fn termination(&self, what: &'static str) {
        self.terminations.get_or_create(&WhatLabels { what }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::{registry, text};

    #[test]
    fn a_fresh_supervisor_shows_zeroes_and_then_what_happened() {
        let mut registry = registry();
        let metrics = MpsMetrics::register(&mut registry);
        metrics.daemons(2, 1, 0);
        metrics.deaths.inc();
        metrics.reassertion("limits");
        let text = text(&registry).unwrap();
        for line in [
            "tranche_mps_daemons{phase=\"serving\"} 2",
            "tranche_mps_daemons{phase=\"down\"} 0",
            "tranche_mps_daemon_deaths_total 1",
            "tranche_mps_reassertions_total{what=\"limits\"} 1",
            "tranche_mps_reassertions_total{what=\"compute_mode\"} 0",
            "tranche_mps_terminations_total{what=\"client\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing from\n{text}");
        }
    }
}
