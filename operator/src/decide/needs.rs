//! What a decision needs to know of the cluster, so that nothing else is read.

use jiff::Timestamp;
use windtunnel_crds::{
    ChaosExperiment, NodeInjection,
    fault::{Fault, Kind},
    injection::TargetState,
    names::FINALIZER,
    network::Spare,
    status::{FaultStatus, Phase},
};

use super::{PREPARE, phase::stopped_early, plan};

/// What to read before deciding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Faults whose selector's pods are needed.
    pub candidates: Vec<String>,
    /// The namespace's pods by uid are needed.
    pub pods: bool,
    /// The containers of the namespace's pods are needed.
    pub containers: bool,
    /// Faults whose peers are needed.
    pub peers: Vec<String>,
    /// The addresses of the cluster's DNS are needed.
    pub cluster_dns: bool,
}

/// Says what [`super::decide`] will read for this experiment.
#[must_use]
pub fn needs(
    experiment: &ChaosExperiment,
    injections: &[NodeInjection],
    stop: bool,
    now: Timestamp,
) -> Needs {
    let phase = experiment
        .status
        .as_ref()
        .and_then(|s| s.phase)
        .unwrap_or_default();
    if phase.is_terminal()
        || phase == Phase::Recovering
        || stopped_early(experiment, stop).is_some()
    {
        return Needs::default();
    }
    match phase {
        Phase::Pending
            if !experiment
                .metadata
                .finalizers
                .iter()
                .flatten()
                .any(|f| f == FINALIZER) =>
        {
            Needs::default()
        }
        Phase::Pending => select(experiment),
        Phase::Preparing
            if !preparing_is_over(experiment, now) && is_stale(experiment, injections) =>
        {
            select(experiment)
        }
        Phase::Running if !deadline_has_passed(experiment, now) => running(experiment, now),
        _ => Needs::default(),
    }
}

/// The nodes have had their time to prepare.
pub(super) fn preparing_is_over(experiment: &ChaosExperiment, now: Timestamp) -> bool {
    let asked = experiment.status.as_ref();
    let asked = asked.and_then(|s| s.prepare_time.as_ref());
    asked.is_some_and(|asked| now >= asked.0 + PREPARE)
}

fn deadline_has_passed(experiment: &ChaosExperiment, now: Timestamp) -> bool {
    let deadline = experiment.status.as_ref().and_then(|s| s.deadline.as_ref());
    deadline.is_some_and(|deadline| now >= deadline.0)
}

/// Everything that planning the nodes' parts takes.
fn select(experiment: &ChaosExperiment) -> Needs {
    let faults = &experiment.spec.faults;
    let spares_dns = |f: &Fault| {
        f.network
            .as_ref()
            .is_some_and(|n| n.spare.contains(&Spare::ClusterDNS))
    };
    Needs {
        candidates: faults.iter().map(|f| f.name.clone()).collect(),
        pods: false,
        containers: false,
        peers: faults
            .iter()
            .filter(|f| has_peers(f))
            .map(|f| f.name.clone())
            .collect(),
        cluster_dns: faults.iter().any(spares_dns),
    }
}

/// A drawn pod of a run that is not over has no node injection.
#[must_use]
pub fn is_undelivered(experiment: &ChaosExperiment, injections: &[NodeInjection]) -> bool {
    let Some(status) = &experiment.status else {
        return false;
    };
    !status.phase.unwrap_or_default().is_terminal()
        && plan::undelivered(experiment, status, injections)
            .next()
            .is_some()
}

/// A drawn pod has no node injection yet, or is gone.
fn is_stale(experiment: &ChaosExperiment, injections: &[NodeInjection]) -> bool {
    let missing = is_undelivered(experiment, injections);
    let gone = injections
        .iter()
        .flat_map(|i| i.status.iter().flat_map(|s| &s.targets))
        .any(|t| t.state == TargetState::Gone);
    missing || gone
}

fn has_peers(fault: &Fault) -> bool {
    fault.network.as_ref().is_some_and(|n| n.peers.is_some())
}

/// While the clock runs: peers that may change, and the pods of kills that are due.
fn running(experiment: &ChaosExperiment, now: Timestamp) -> Needs {
    let mut needs = Needs::default();
    let statuses: &[FaultStatus] = experiment.status.as_ref().map_or(&[], |s| &s.faults);
    for fault in &experiment.spec.faults {
        let status = statuses.iter().find(|s| s.name == fault.name);
        match fault.kind() {
            Some(Kind::Network(_)) if has_peers(fault) => needs.peers.push(fault.name.clone()),
            Some(kind) if kind.is_on_containers() => needs.containers = true,
            Some(Kind::PodKill(_)) if super::kill::is_due(experiment, fault, now) => {
                needs.pods = true;
                if status.is_none_or(|s| s.drawn_at.is_none()) {
                    needs.candidates.push(fault.name.clone());
                }
            }
            _ => {}
        }
    }
    needs
}
