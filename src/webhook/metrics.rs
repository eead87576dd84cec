//! What the webhook server counts.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::ops::metrics::{FloatGauge, Registry};

/// Bounds in seconds. A decision takes microseconds; the largest objects some milliseconds.
const DECISION_SECONDS: [f64; 10] =
    [0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    kind: &'static str,
    verdict: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Clones count into the same metrics.
#[derive(Debug, Clone)]
pub struct WebhookMetrics {
    requests: Family<RequestLabels, Counter>,
    decisions: Histogram,
    unread: Family<ReasonLabels, Counter>,
    untried: Family<ReasonLabels, Counter>,
    pub failed_handshakes: Counter,
    pub dropped_connections: Counter,
    /// Seconds since 1970; 0 without a certificate.
    pub certificate_not_after: FloatGauge,
    pub certificate_renewals: Counter,
    pub certificate_failures: Counter,
    pub bundle_writes: Counter,
}

impl WebhookMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            decisions: Histogram::new(DECISION_SECONDS),
            unread: Family::default(),
            untried: Family::default(),
            failed_handshakes: Counter::default(),
            dropped_connections: Counter::default(),
            certificate_not_after: FloatGauge::default(),
            certificate_renewals: Counter::default(),
            certificate_failures: Counter::default(),
            bundle_writes: Counter::default(),
        };
        for kind in ["claim", "template", "pod"] {
            for verdict in ["allowed", "refused"] {
                drop(metrics.requests.get_or_create(&RequestLabels { kind, verdict }));
            }
        }
        for reason in ["too_large", "no_room", "too_slow"] {
            drop(metrics.unread.get_or_create(&ReasonLabels { reason }));
        }
        for reason in ["namespace", "peer", "all", "review", "queue"] {
            drop(metrics.untried.get_or_create(&ReasonLabels { reason }));
        }
        metrics.register_requests(registry);
        metrics.register_certificates(registry);
        metrics
    }

    /// One review was answered: about a `claim`, `template`, `pod` or `other`; it was `allowed`, `changed`,
    /// `refused` or `malformed`.
    pub fn request(&self, kind: &'static str, verdict: &'static str, took: Duration) {
        self.requests.get_or_create(&RequestLabels { kind, verdict }).inc();
        self.decisions.observe(took.as_secs_f64());
    }

    /// A request was turned away without being read: it was `too_large`, there was `no_room`, or it came `too_slow`.
    pub fn unread(&self, reason: &'static str) {
        self.unread.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// A claim was answered without a try of all its selectors: a budget was spent, or too many waited for their turn.
    pub fn untried(&self, reason: &'static str) {
        self.untried.get_or_create(&ReasonLabels { reason }).inc();
    }

    fn register_requests(&self, registry: &mut Registry) {
        registry.register(
            "webhook_requests",
            "Admission reviews answered, by kind of object and verdict",
            self.requests.clone(),
        );
        registry.register(
            "webhook_decision_duration_seconds",
            "How long deciding about one admission review took, without the network",
            self.decisions.clone(),
        );
        registry.register(
            "webhook_failed_handshakes",
            "TLS handshakes with the webhook that failed or took too long",
            self.failed_handshakes.clone(),
        );
        registry.register(
            "webhook_unread_requests",
            "Requests to the webhook that were refused without being read, by reason",
            self.unread.clone(),
        );
        registry.register(
            "webhook_untried_selectors",
            "Claims that were answered before all of their selectors were tried, by what was spent",
            self.untried.clone(),
        );
        registry.register(
            "webhook_dropped_connections",
            "Connections to the webhook that were ended, or not accepted, because it had too many",
            self.dropped_connections.clone(),
        );
    }

    fn register_certificates(&self, registry: &mut Registry) {
        registry.register(
            "webhook_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in seconds since 1970; 0 without one",
            self.certificate_not_after.clone(),
        );
        registry.register(
            "webhook_certificate_renewals",
            "Times that this process renewed the webhook's certificates",
            self.certificate_renewals.clone(),
        );
        registry.register(
            "webhook_certificate_failures",
            "Failed attempts to renew or read the webhook's certificates; the reason is in the log",
            self.certificate_failures.clone(),
        );
        registry.register(
            "webhook_bundle_writes",
            "Times that this process wrote its CA into a webhook configuration",
            self.bundle_writes.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::{registry, text};

    #[test]
    fn what_is_counted_is_shown() {
        let mut registry = registry();
        let metrics = WebhookMetrics::register(&mut registry);
        metrics.request("pod", "changed", Duration::from_micros(30));
        metrics.unread("too_large");
        metrics.certificate_not_after.set(1_800_000_000.0);
        let text = text(&registry).unwrap();
        for line in [
            "tranche_webhook_requests_total{kind=\"pod\",verdict=\"changed\"} 1",
            "tranche_webhook_requests_total{kind=\"claim\",verdict=\"refused\"} 0",
            "tranche_webhook_decision_duration_seconds_bucket{le=\"0.00005\"} 1",
            "tranche_webhook_certificate_expiry_timestamp_seconds 1800000000.0",
            "tranche_webhook_bundle_writes_total 0",
            "tranche_webhook_unread_requests_total{reason=\"too_large\"} 1",
            "tranche_webhook_dropped_connections_total 0",
            "tranche_webhook_untried_selectors_total{reason=\"queue\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing from\n{text}");
        }
    }
}
