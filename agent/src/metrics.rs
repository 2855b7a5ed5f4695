//! What the agent counts.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use windtunnel_crds::{
    injection::TargetState,
    residue::{ReclaimedBy, Residue},
};

use crate::model::Ended;

/// How a fault on a target ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct End {
    /// `Recovered`, `Failed`, `Interrupted` or `Gone`.
    pub outcome: &'static str,
    /// What took it back: `Agent`, `Kernel`, `InjectorLease`, `Journal`, `Deadline`; or `None`.
    pub reclaimed_by: &'static str,
    /// Why it ended before its time, as in the status: `ControlPlaneLost`, `LeaseExpired`, …; empty if
    /// it did not.
    pub reason: String,
}

/// What became of residue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Found {
    /// Whether it was removed: `true` or `false`.
    pub removed: &'static str,
}

/// The agent's metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Injector processes alive.
    pub injectors: Gauge,
    /// Faults on targets that have ended.
    pub ended: Family<End, Counter>,
    /// Seconds from the decision to end a fault until its injector was seen to be gone.
    pub revert_seconds: Histogram,
    /// Injectors that were killed because they were silent.
    pub heartbeats_missed: Counter,
    /// Faults that a new agent took back from the journal of the one before.
    pub journal_replays: Counter,
    /// What audits found.
    pub residue: Family<Found, Counter>,
}

impl Metrics {
    /// Metrics, and the registry that shows them.
    #[must_use]
    pub fn new() -> (Self, Registry) {
        let metrics = Self {
            injectors: Gauge::default(),
            ended: Family::default(),
            revert_seconds: Histogram::new([0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0]),
            heartbeats_missed: Counter::default(),
            journal_replays: Counter::default(),
            residue: Family::default(),
        };
        // There from the start: who watches for an increase would miss the first one.
        for removed in ["true", "false"] {
            let _ = metrics.residue.get_or_create(&Found { removed });
        }
        let mut registry = Registry::with_prefix("windtunnel_agent");
        registry.register(
            "injectors",
            "Injector processes alive",
            metrics.injectors.clone(),
        );
        registry.register(
            "faults_ended",
            "Faults on targets that have ended",
            metrics.ended.clone(),
        );
        registry.register(
            "revert_seconds",
            "Seconds from the decision to end a fault until its injector was gone",
            metrics.revert_seconds.clone(),
        );
        registry.register(
            "heartbeats_missed",
            "Injectors that were killed because they were silent",
            metrics.heartbeats_missed.clone(),
        );
        registry.register(
            "journal_replays",
            "Faults that were taken back from the journal",
            metrics.journal_replays.clone(),
        );
        registry.register("residue", "What audits found", metrics.residue.clone());
        (metrics, registry)
    }

    /// A fault on a target has ended.
    pub fn count_end(&self, ended: &Ended) {
        let outcome = match ended.outcome {
            TargetState::Recovered => "Recovered",
            TargetState::Failed => "Failed",
            TargetState::Interrupted => "Interrupted",
            _ => "Gone",
        };
        let reclaimed_by = match ended.reclaimed_by {
            Some(ReclaimedBy::Agent) => "Agent",
            Some(ReclaimedBy::Kernel) => "Kernel",
            Some(ReclaimedBy::InjectorLease) => "InjectorLease",
            Some(ReclaimedBy::Journal) => "Journal",
            Some(ReclaimedBy::Deadline) => "Deadline",
            None => "None",
        };
        self.ended
            .get_or_create(&End {
                outcome,
                reclaimed_by,
                reason: ended.reason.clone(),
            })
            .inc();
    }

    /// An audit has found something; what it had found before is counted no more.
    pub fn count_residue(&self, found: &[Residue], before: &[Residue]) {
        let is_known = |new: &Residue| {
            let what = |r: &Residue| (r.kind, r.name.clone(), r.removed);
            before.iter().any(|old| what(old) == what(new))
        };
        for residue in found.iter().filter(|residue| !is_known(residue)) {
            let removed = if residue.removed { "true" } else { "false" };
            self.residue.get_or_create(&Found { removed }).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::Timestamp;
    use prometheus_client::encoding::text::encode;
    use windtunnel_crds::residue::ResidueKind;

    use super::*;
    use crate::model::Counts;

    #[test]
    fn what_an_operator_of_the_fleet_looks_for_is_there_under_its_name() {
        let (metrics, registry) = Metrics::new();
        metrics.count_end(&Ended {
            outcome: TargetState::Interrupted,
            reason: "LeaseExpired".to_owned(),
            message: String::new(),
            reclaimed_by: Some(ReclaimedBy::InjectorLease),
            injected_at: None,
            reverted_at: Timestamp::UNIX_EPOCH,
            ended_at: Duration::ZERO,
            counts: Counts::default(),
            checked: None,
            rechecked: None,
            residue: Vec::new(),
        });
        let residue = |removed| Residue {
            node: String::new(),
            kind: ResidueKind::Table,
            name: "windtunnel-x".to_owned(),
            pod: String::new(),
            removed,
            message: String::new(),
        };
        // It is tried to be removed again and again, and is one thing all the same.
        metrics.count_residue(&[residue(false)], &[]);
        metrics.count_residue(&[residue(false)], &[residue(false)]);
        metrics.count_residue(&[residue(true)], &[residue(false)]);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for name in [
            "windtunnel_agent_injectors 0",
            "windtunnel_agent_faults_ended_total{outcome=\"Interrupted\",reclaimed_by=\"InjectorLease\",reason=\"LeaseExpired\"} 1",
            "windtunnel_agent_revert_seconds_bucket{le=\"3.0\"} 0",
            "windtunnel_agent_heartbeats_missed_total 0",
            "windtunnel_agent_journal_replays_total 0",
            "windtunnel_agent_residue_total{removed=\"true\"} 1",
            "windtunnel_agent_residue_total{removed=\"false\"} 1",
        ] {
            assert!(text.contains(name), "{name} is not in\n{text}");
        }
    }
}
