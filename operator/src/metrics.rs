//! What the operator counts.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// Labels of an API write.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Write {
    /// What was written.
    pub(crate) action: &'static str,
    /// `ok`, `conflict` or `error`.
    pub(crate) outcome: &'static str,
}

/// The operator's metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Passes over experiments.
    pub(crate) passes: Counter,
    /// Passes that failed, stale ones not counted.
    pub(crate) failures: Counter,
    /// Writes to the API, by kind and outcome.
    pub(crate) writes: Family<Write, Counter>,
    /// How long a pass took, in seconds.
    pub(crate) pass_seconds: Histogram,
    /// 1 while this replica holds the lease.
    pub(crate) leader: Gauge,
}

impl Metrics {
    /// Metrics, and the registry that shows them.
    #[must_use]
    pub(crate) fn new() -> (Self, Registry) {
        let metrics = Self {
            passes: Counter::default(),
            failures: Counter::default(),
            writes: Family::default(),
            pass_seconds: Histogram::new([0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0]),
            leader: Gauge::default(),
        };
        let mut registry = Registry::with_prefix("windtunnel_operator");
        registry.register("passes", "Passes over experiments", metrics.passes.clone());
        registry.register(
            "pass_failures",
            "Passes that failed",
            metrics.failures.clone(),
        );
        registry.register(
            "api_writes",
            "Writes to the API server",
            metrics.writes.clone(),
        );
        registry.register(
            "pass_seconds",
            "Duration of a pass in seconds",
            metrics.pass_seconds.clone(),
        );
        registry.register(
            "leader",
            "Whether this replica holds the lease",
            metrics.leader.clone(),
        );
        (metrics, registry)
    }
}
