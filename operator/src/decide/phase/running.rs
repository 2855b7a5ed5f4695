//! The clock runs: pods are killed when due, peers and containers are kept current, reports are
//! rolled up.

use jiff::SignedDuration;
use windtunnel_crds::{
    ChaosExperimentStatus,
    fault::{Fault, Kind},
    injection::EMERGENCY_STOP,
    injection::{NodeContainer, NodeFault},
    status::{DrawnPod, FaultPhase},
};

use super::{Pass, early_message, patch, stopped_early, trouble};
use crate::decide::{Action, Change, Observed, ending::Ending, kill, plan, rollup};

/// How often host names among the peers are resolved again.
const RESOLVE: SignedDuration = SignedDuration::from_mins(1);
/// How soon a host name that has no address is asked for again.
const RETRY: SignedDuration = SignedDuration::from_secs(5);
/// How soon after a try to remove pods they are looked at; changes among them are seen anyhow.
const KILL_LOOK: SignedDuration = SignedDuration::from_millis(500);

impl Pass<'_> {
    pub(super) fn running(&mut self) {
        if let Some(ending) = stopped_early(&self.observed.experiment, self.observed.stop) {
            return self.recover(ending, early_message(ending));
        }
        if was_stopped(self.observed) {
            let ending = Ending::EmergencyStop;
            return self.recover(ending, early_message(ending));
        }
        let deadline = self.status.deadline.as_ref().map_or(self.now, |t| t.0);
        if self.now >= deadline {
            return self.recover(Ending::DeadlineReached, "the deadline has passed");
        }
        self.start_nodes();
        self.refresh_nodes();
        self.kill_pods();
        rollup::roll_up(self.observed, &mut self.status, self.now);
        if rollup::is_over(self.observed, &self.status) {
            let message = "every window has closed";
            if self.nodes_left().is_empty() {
                return self.end(Ending::WindowsClosed, message);
            }
            // Nobody can report for a node injection that is gone: its bound is waited for.
            if self.nodes_left() == plan::withdrawn(self.observed, &self.status) {
                return self.recover(Ending::WindowsClosed, message);
            }
        }
        self.status.message = progress(&self.status);
        rollup::summarize(&mut self.status);
        self.wake(deadline);
        self.wake_at_edges();
    }

    /// Lets the clock run on every node that does not know the start yet.
    pub(super) fn start_nodes(&mut self) {
        let Some(start) = self.status.start_time.clone() else {
            return;
        };
        let idle = self
            .observed
            .injections
            .iter()
            .filter(|i| i.spec.start_time.is_none() && !i.spec.abort);
        let actions: Vec<Action> = idle.map(|i| patch(i, Change::Start(start.0))).collect();
        self.actions.extend(actions);
    }

    pub(super) fn kill_pods(&mut self) {
        for fault in &self.observed.experiment.spec.faults {
            let Some(Kind::PodKill(settings)) = fault.kind() else {
                continue;
            };
            let others: Vec<DrawnPod> = self.drawn().cloned().collect();
            let Some(status) = self.status.faults.iter_mut().find(|f| f.name == fault.name) else {
                continue;
            };
            let progress = (&mut *status, others.as_slice());
            let kills = kill::proceed(self.observed, (fault, settings), progress, self.now);
            let is_active = status.phase == FaultPhase::Active;
            let look = if kills.is_empty() {
                kill::AGAIN
            } else {
                KILL_LOOK
            };
            self.actions.extend(kills.into_iter().map(Action::Kill));
            if is_active {
                self.wake(self.now + look);
            }
        }
    }

    /// Brings the nodes' peers and containers up to date; agents apply each change as one batch.
    pub(super) fn refresh_nodes(&mut self) {
        for fault in plan::node_faults(&self.observed.experiment) {
            let notes = match self.observed.peers.get(&fault.name) {
                None => continue,
                Some(Ok(peers)) if !peers.awaited.is_empty() => continue,
                Some(Ok(peers)) => {
                    let stay = "the peers found before stay in force meanwhile".to_owned();
                    let stay = peers.is_doubtful.then_some(stay);
                    peers.notes.iter().cloned().chain(stay).collect()
                }
                Some(Err(error)) => vec![format!("{error}: those found before stay in force")],
            };
            if let Some(status) = self.status.faults.iter_mut().find(|f| f.name == fault.name) {
                status.notes = notes;
            }
        }
        let mut actions = Vec::new();
        for injection in self.observed.injections.iter().filter(|i| !i.spec.abort) {
            let mut faults = injection.spec.faults.clone();
            for fault in &mut faults {
                refresh(self.observed, fault);
            }
            if faults != injection.spec.faults {
                actions.push(patch(injection, Change::Faults(faults)));
            }
        }
        self.actions.extend(actions);
        if self.observed.experiment.spec.faults.iter().any(has_hosts) {
            let mut peers = self.observed.peers.values().flatten();
            let is_partial = peers.any(|peers| peers.is_partial);
            self.wake(self.now + if is_partial { RETRY } else { RESOLVE });
        }
    }

    /// The next moment at which a window opens or closes.
    pub(super) fn wake_at_edges(&mut self) {
        let Some(start) = self.status.start_time.as_ref().map(|t| t.0) else {
            return;
        };
        for fault in &self.observed.experiment.spec.faults {
            let begin = plan::at(start, fault.start_after.unwrap_or_default());
            let end = plan::at(start, plan::window_end(&self.observed.experiment, fault));
            for edge in [begin, end] {
                self.wake(edge);
            }
        }
    }
}

/// An agent saw the emergency stop, which may be over before an operator is there to see it.
fn was_stopped(observed: &Observed) -> bool {
    let statuses = observed.injections.iter().filter_map(|i| i.status.as_ref());
    let mut targets = statuses.flat_map(|s| &s.targets);
    targets.any(|t| t.reason == EMERGENCY_STOP)
}

/// Nothing in the cluster changes when a name server's answer does.
fn has_hosts(fault: &Fault) -> bool {
    let peers = fault.network.as_ref().and_then(|n| n.peers.as_ref());
    peers.is_some_and(|p| !p.hosts.is_empty())
}

/// A node's fault with the peers that are to be met, and the containers that are there, now.
fn refresh(observed: &Observed, fault: &mut NodeFault) {
    match (&mut fault.network, observed.peers.get(&fault.name)) {
        // A new leader does not know yet what the old one did, and may be unable to learn it.
        (Some(network), Some(Ok(peers))) if peers.awaited.is_empty() && !peers.is_doubtful => {
            if let Some(groups) = &mut network.peers {
                groups.clone_from(&peers.groups);
            }
        }
        (None, _) => {
            for target in &mut fault.targets {
                let now = observed.containers.as_ref();
                let now = now.and_then(|pods| pods.get(&target.pod_uid));
                for container in &mut target.containers {
                    let same = |c: &&NodeContainer| c.name == container.name;
                    if let Some(now) = now.and_then(|all| all.iter().find(same)) {
                        container.clone_from(now);
                    }
                }
            }
        }
        _ => {}
    }
}

/// The running run in a sentence.
fn progress(status: &ChaosExperimentStatus) -> String {
    let names = |phase: FaultPhase| {
        status
            .faults
            .iter()
            .filter(|f| f.phase == phase)
            .map(|f| f.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    match (names(FaultPhase::Failed), names(FaultPhase::Active)) {
        (failed, _) if !failed.is_empty() => trouble(status),
        (_, active) if !active.is_empty() => format!("active: {active}"),
        _ => "no window is open".to_owned(),
    }
}
