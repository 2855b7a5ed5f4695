//! The state machine of a run: Pending → Preparing → Running → Recovering → a terminal phase.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjection,
    conditions::{ConditionStatus as Is, ConditionType, condition, set_condition},
    fault::Kind,
    injection::{InjectionPhase, TargetState},
    names::FINALIZER,
    status::{DrawnPod, FaultPhase, FaultStatus, Phase},
};

use super::{
    Action, BOUNDS, Change, Decision, Observed, PREPARE,
    draw::{Draw, Refusal},
    ending::Ending,
    guard, kill, notices,
    plan::{self, Draws},
    rollup,
};

/// How often the pods of a kill are looked at until they are gone.
const KILL_POLL: SignedDuration = SignedDuration::from_millis(500);
/// How long after the deadline nodes may take to report before they are told again.
const REPORT: SignedDuration = SignedDuration::from_secs(2);
/// The longest that a start on many nodes is put into the future.
const MAX_LEAD: SignedDuration = SignedDuration::from_secs(2);

/// One pass over one experiment: what is known, and what the pass has decided so far.
struct Pass<'a> {
    observed: &'a Observed,
    now: Timestamp,
    status: ChaosExperimentStatus,
    actions: Vec<Action>,
    wake_at: Option<Timestamp>,
}

/// Moves the experiment on.
pub(crate) fn decide(observed: &Observed, now: Timestamp) -> Decision {
    let mut pass = Pass {
        observed,
        now,
        status: observed.experiment.status.clone().unwrap_or_default(),
        actions: Vec::new(),
        wake_at: None,
    };
    match pass.status.phase.unwrap_or_default() {
        Phase::Pending => pass.pending(),
        Phase::Preparing => pass.preparing(),
        Phase::Running => pass.running(),
        Phase::Recovering => pass.recovering(),
        Phase::Completed | Phase::Failed | Phase::Aborted => pass.finished(),
    }
    pass.finish()
}

/// Whether the run is to end before its time, and why.
pub(crate) fn stopped_early(experiment: &ChaosExperiment, stop: bool) -> Option<Ending> {
    if experiment.metadata.deletion_timestamp.is_some() {
        Some(Ending::Deleted)
    } else if experiment.spec.abort {
        Some(Ending::AbortRequested)
    } else if stop {
        Some(Ending::EmergencyStop)
    } else {
        None
    }
}

impl Pass<'_> {
    /// The status first, unless nothing in it changed: what follows was decided on its being
    /// written.
    fn finish(mut self) -> Decision {
        let old = self.observed.experiment.status.as_ref();
        if old != Some(&self.status) && self.status != ChaosExperimentStatus::default() {
            self.status.observed_generation = self.observed.experiment.metadata.generation;
            let notices = notices::of_change(old, &self.status);
            self.actions
                .insert(0, Action::WriteStatus(Box::new(self.status)));
            self.actions.extend(notices.into_iter().map(Action::Notify));
        }
        Decision {
            actions: self.actions,
            wake_at: self.wake_at.filter(|at| *at > self.now),
        }
    }

    fn pending(&mut self) {
        let experiment = &self.observed.experiment;
        if experiment.metadata.deletion_timestamp.is_some() {
            self.release_finalizer();
            return;
        }
        if let Some(ending) = stopped_early(experiment, self.observed.stop) {
            return self.end_untouched(ending, early_message(ending));
        }
        if let Err(refusal) = guard::namespace(&self.observed.policy, &plan::namespace(experiment))
        {
            return self.end_untouched(refusal.ending, &refusal.message);
        }
        if !self.has_finalizer() {
            self.actions.push(Action::AddFinalizer);
            return;
        }
        match self.select() {
            Ok(draws) => self.ask_nodes(&draws),
            Err(refusal) => self.end_untouched(refusal.ending, &refusal.message),
        }
    }

    /// Draws every fault's targets, and checks what can be checked before any node is asked.
    fn select(&self) -> Result<Draws, Refusal> {
        let experiment = &self.observed.experiment;
        let mut draws = Draws::new();
        let mut everybody = Vec::new();
        for fault in &experiment.spec.faults {
            let on_node = matches!(fault.kind(), Some(Kind::Network(_)));
            let candidates = self.observed.candidates.get(&fault.name);
            let draw = Draw {
                seed: plan::seed(experiment),
                fault: &fault.name,
                target: &fault.target,
                candidates: candidates.map_or(&[], Vec::as_slice),
                fleet: on_node.then_some(&self.observed.fleet),
            };
            let kept = self.status.faults.iter().find(|f| f.name == fault.name);
            let pods = draw.draw(kept.map_or(&[], |f| &f.draw))?;
            everybody.extend(pods.clone());
            if on_node {
                draws.insert(fault.name.clone(), pods);
            }
            if let Some(Err(error)) = self.observed.peers.get(&fault.name) {
                return Err(Refusal::new(
                    Ending::PeersUnusable,
                    format!("fault {}: {error}", fault.name),
                ));
            }
        }
        guard::reach(&self.observed.policy, everybody.iter())?;
        Ok(draws)
    }

    /// The targets are drawn: writes them down and asks their nodes to prepare.
    fn ask_nodes(&mut self, draws: &Draws) {
        self.status.prepare_time.get_or_insert(MicroTime(self.now));
        self.status.phase = Some(Phase::Preparing);
        self.status.faults = self
            .observed
            .experiment
            .spec
            .faults
            .iter()
            .map(|fault| {
                let draw = draws.get(&fault.name).cloned().unwrap_or_default();
                let notes = self
                    .observed
                    .peers
                    .get(&fault.name)
                    .and_then(|p| p.as_ref().ok());
                FaultStatus {
                    name: fault.name.clone(),
                    desired: u32::try_from(draw.len()).unwrap_or(u32::MAX),
                    notes: notes.map(|p| p.notes.clone()).unwrap_or_default(),
                    draw,
                    ..FaultStatus::default()
                }
            })
            .collect();
        self.set(
            ConditionType::Prepared,
            Is::False,
            "Preparing",
            "the nodes are checking their targets",
        );
        self.set(
            ConditionType::Finished,
            Is::False,
            "Preparing",
            "the run has not ended",
        );
        "checking the targets on their nodes".clone_into(&mut self.status.message);
        rollup::summarize(&mut self.status);
        if draws.is_empty() {
            return self.prepared();
        }
        for (node, faults) in plan::by_node(self.observed, draws) {
            match self.injection_on(&node) {
                None => self.actions.push(Action::Create(Box::new(plan::injection(
                    self.observed,
                    &node,
                    faults,
                )))),
                Some(injection) if injection.spec.faults != faults => {
                    let action = patch(injection, Change::Faults(faults));
                    self.actions.push(action);
                }
                Some(_) => {}
            }
        }
        self.drop_injections_without(draws);
        self.wake(self.now + PREPARE);
    }

    /// A node that lost its last target when the draw was made anew has nothing to do.
    fn drop_injections_without(&mut self, draws: &Draws) {
        let used = |node: &str| draws.values().flatten().any(|pod| pod.node == node);
        let idle = self
            .observed
            .injections
            .iter()
            .filter(|i| !used(&i.spec.node_name));
        let deletions: Vec<Action> = idle.map(delete).collect();
        self.actions.extend(deletions);
    }

    fn preparing(&mut self) {
        if let Some(ending) = stopped_early(&self.observed.experiment, self.observed.stop) {
            return self.recover(ending, early_message(ending));
        }
        if let Some(message) = self.refusal() {
            self.set(ConditionType::Prepared, Is::False, "Refused", &message);
            return self.recover(Ending::PrepareRefused, &message);
        }
        if !self.observed.candidates.is_empty() {
            // A target is gone or was never asked for: draw anew, keeping the others.
            match self.select() {
                Ok(draws) if draws.values().all(Vec::is_empty) => {
                    return self.recover(
                        Ending::TargetsGone,
                        "every target was gone before it was prepared",
                    );
                }
                // Who is asked something new now says so by another generation.
                Ok(draws) => return self.ask_nodes(&draws),
                Err(refusal) => return self.recover(refusal.ending, &refusal.message),
            }
        }
        let asked = self.status.prepare_time.as_ref().map_or(self.now, |t| t.0);
        let waiting = self.unprepared();
        if waiting.is_empty() {
            return self.prepared();
        }
        if self.now >= asked + PREPARE {
            let message = format!(
                "no answer within {} s from {}",
                PREPARE.as_secs(),
                waiting.join(", ")
            );
            self.set(ConditionType::Prepared, Is::False, "Timeout", &message);
            return self.recover(Ending::PrepareTimeout, &message);
        }
        self.wake(asked + PREPARE);
    }

    /// What a node said against its part, if one did.
    fn refusal(&self) -> Option<String> {
        let refused = self.observed.injections.iter().find_map(|i| {
            let status = i
                .status
                .as_ref()
                .filter(|s| s.phase == InjectionPhase::Refused)?;
            Some((i, status))
        });
        let (injection, status) = refused?;
        let target = status
            .targets
            .iter()
            .find(|t| t.state == TargetState::Failed);
        let (reason, message) = target.map_or((&status.reason, &status.message), |t| {
            (&t.reason, &t.message)
        });
        let pod = target
            .map(|t| format!(", pod {}, fault {}", t.pod_name, t.fault))
            .unwrap_or_default();
        Some(format!(
            "node {}{pod}: {reason}: {message}",
            injection.spec.node_name
        ))
    }

    /// Nodes that have a target and have not said that they are prepared for what they are asked now.
    fn unprepared(&self) -> Vec<String> {
        let mut nodes: Vec<String> = self.drawn().map(|pod| pod.node.clone()).collect();
        nodes.sort();
        nodes.dedup();
        nodes.retain(|node| {
            !self.injection_on(node).is_some_and(|i| {
                i.status.as_ref().is_some_and(|s| {
                    s.phase == InjectionPhase::Prepared
                        && s.observed_generation == i.metadata.generation
                })
            })
        });
        nodes
    }

    /// Everything is prepared: a dry run is over, a real one starts.
    fn prepared(&mut self) {
        self.set(
            ConditionType::Prepared,
            Is::True,
            "Prepared",
            "every target can be injected",
        );
        if self.observed.experiment.spec.dry_run {
            return self.finish_dry_run();
        }
        let nodes = self.observed.injections.len();
        let asked = self.status.prepare_time.as_ref().map_or(self.now, |t| t.0);
        let lead = if nodes > 1 {
            (self.now.duration_since(asked) * 2).min(MAX_LEAD)
        } else {
            SignedDuration::ZERO
        };
        let start = self.now + lead;
        self.status.start_time = Some(MicroTime(start));
        self.status.deadline = Some(MicroTime(plan::at(
            start,
            self.observed.experiment.spec.duration,
        )));
        self.status.phase = Some(Phase::Running);
        for (fault, _) in plan::node_faults(&self.observed.experiment) {
            if let Some(status) = self.status.faults.iter_mut().find(|f| f.name == fault.name) {
                status.drawn_at = Some(MicroTime(self.now));
            }
        }
        self.set(
            ConditionType::Finished,
            Is::False,
            "Running",
            "the run has not ended",
        );
        self.running();
    }

    fn finish_dry_run(&mut self) {
        self.set(
            ConditionType::Injected,
            Is::False,
            "DryRun",
            "a dry run touches nothing",
        );
        self.set(
            ConditionType::Recovered,
            Is::True,
            "NothingToUndo",
            "a dry run touches nothing",
        );
        self.set(
            ConditionType::Clean,
            Is::True,
            "NothingInjected",
            "a dry run touches nothing",
        );
        self.end(
            Ending::DryRun,
            "every target can be injected; nothing was touched",
        );
    }

    fn running(&mut self) {
        if let Some(ending) = stopped_early(&self.observed.experiment, self.observed.stop) {
            return self.recover(ending, early_message(ending));
        }
        let deadline = self.status.deadline.as_ref().map_or(self.now, |t| t.0);
        if self.now >= deadline {
            return self.recover(Ending::DeadlineReached, "the deadline has passed");
        }
        self.start_nodes();
        self.kill_pods();
        self.refresh_peers();
        rollup::roll_up(self.observed, &mut self.status, self.now);
        if rollup::is_over(self.observed, &self.status) && self.nodes_left().is_empty() {
            return self.end(Ending::WindowsClosed, "every window has closed");
        }
        self.status.message = progress(&self.status);
        rollup::summarize(&mut self.status);
        self.wake(deadline);
        self.wake_at_edges();
    }

    /// Lets the clock run on every node that does not know the start yet.
    fn start_nodes(&mut self) {
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

    fn kill_pods(&mut self) {
        for fault in &self.observed.experiment.spec.faults {
            let Some(Kind::PodKill(settings)) = fault.kind() else {
                continue;
            };
            let Some(status) = self.status.faults.iter_mut().find(|f| f.name == fault.name) else {
                continue;
            };
            let kills = kill::proceed(self.observed, (fault, settings), status, self.now);
            let active = status.phase == FaultPhase::Active;
            self.actions.extend(kills.into_iter().map(Action::Kill));
            if active {
                self.wake(self.now + KILL_POLL);
            }
        }
    }

    /// Brings the nodes' peers up to date; agents apply each change as one batch.
    fn refresh_peers(&mut self) {
        for (fault, _) in plan::node_faults(&self.observed.experiment) {
            let Some(Ok(peers)) = self.observed.peers.get(&fault.name) else {
                continue;
            };
            if let Some(status) = self.status.faults.iter_mut().find(|f| f.name == fault.name) {
                status.notes.clone_from(&peers.notes);
            }
        }
        let mut actions = Vec::new();
        for injection in self.observed.injections.iter().filter(|i| !i.spec.abort) {
            let mut faults = injection.spec.faults.clone();
            for network in faults
                .iter_mut()
                .filter_map(|f| Some((f.name.clone(), f.network.as_mut()?)))
            {
                let (name, network) = network;
                if let (Some(groups), Some(Ok(peers))) =
                    (&mut network.peers, self.observed.peers.get(&name))
                {
                    groups.clone_from(&peers.groups);
                }
            }
            if faults != injection.spec.faults {
                actions.push(patch(injection, Change::Faults(faults)));
            }
        }
        self.actions.extend(actions);
    }

    /// The next moment at which a window opens or closes.
    fn wake_at_edges(&mut self) {
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

    /// The run is over; what is in place is taken back.
    fn recover(&mut self, ending: Ending, message: &str) {
        self.status.phase = Some(Phase::Recovering);
        self.status.end_time.get_or_insert(MicroTime(self.now));
        self.set(ConditionType::Finished, Is::False, ending.reason(), message);
        self.recovering();
    }

    fn recovering(&mut self) {
        let (ending, message) = self.ending();
        let ended = self.status.end_time.as_ref().map_or(self.now, |t| t.0);
        if ending != Ending::DeadlineReached || self.now >= ended + REPORT {
            let bound = self.observed.injections.iter().filter(|i| !i.spec.abort);
            let actions: Vec<Action> = bound.map(|i| patch(i, Change::Abort)).collect();
            self.actions.extend(actions);
        } else {
            self.wake(ended + REPORT);
        }
        if self.status.start_time.is_some() {
            rollup::roll_up(self.observed, &mut self.status, self.now);
        } else {
            self.nothing_started();
        }
        let left = self.nodes_left();
        let give_up = self.give_up_at(ended);
        if left.is_empty() || self.now >= give_up {
            if !left.is_empty() {
                self.doubt(&left);
            }
            return self.end(ending, &message);
        }
        self.status.message = format!(
            "taking faults back ({message}); waiting for {}",
            left.join(", ")
        );
        rollup::summarize(&mut self.status);
        self.wake(give_up);
    }

    /// Nothing was injected: says so, and whether the nodes are clean.
    fn nothing_started(&mut self) {
        self.set(
            ConditionType::Injected,
            Is::False,
            "NotStarted",
            "nothing was injected",
        );
        self.set(
            ConditionType::Recovered,
            Is::True,
            "NothingToUndo",
            "nothing was injected",
        );
        rollup::cleanup(self.observed, &mut self.status, self.now);
    }

    /// From when on a silent node is no longer waited for: by then its agent or the kernel has
    /// taken everything back, whether it can say so or not.
    fn give_up_at(&self, ended: Timestamp) -> Timestamp {
        let bound = ended + self.observed.policy.control_plane_grace;
        let deadline = self.status.deadline.as_ref().map_or(bound, |t| t.0);
        bound.min(deadline.max(ended)) + BOUNDS
    }

    /// Nodes were not heard of until the end.
    fn doubt(&mut self, nodes: &[String]) {
        let message = format!(
            "{} did not report within the bound; by the bounds of its agent and kernel nothing is in place there, but nobody has looked",
            nodes.join(", ")
        );
        self.set(
            ConditionType::Recovered,
            Is::Unknown,
            rollup::NOT_REPORTED,
            &message,
        );
        self.set(
            ConditionType::Clean,
            Is::Unknown,
            rollup::NOT_REPORTED,
            &message,
        );
    }

    /// Nodes whose injection still exists and is not known to be over and checked.
    fn nodes_left(&self) -> Vec<String> {
        let over = |i: &&NodeInjection| {
            i.status.as_ref().is_some_and(|s| match s.phase {
                InjectionPhase::Recovered | InjectionPhase::Refused => {
                    s.audit.as_ref().is_some_and(|a| a.checked_at.is_some())
                }
                _ => false,
            })
        };
        self.observed
            .injections
            .iter()
            .filter(|i| !over(i))
            .map(|i| i.spec.node_name.clone())
            .collect()
    }

    /// Ends a run that never reached a node.
    fn end_untouched(&mut self, ending: Ending, message: &str) {
        self.status.end_time.get_or_insert(MicroTime(self.now));
        self.set(ConditionType::Prepared, Is::False, ending.reason(), message);
        self.nothing_started();
        self.set(
            ConditionType::Clean,
            Is::True,
            "NothingToUndo",
            "nothing was injected",
        );
        self.end(ending, message);
    }

    /// Enters the terminal phase.
    fn end(&mut self, ending: Ending, message: &str) {
        self.status.end_time.get_or_insert(MicroTime(self.now));
        for fault in &self.observed.experiment.spec.faults {
            let status = self.status.faults.iter_mut().find(|f| f.name == fault.name);
            if let (Some(Kind::PodKill(_)), Some(status)) = (fault.kind(), status) {
                kill::give_up(status);
            }
        }
        if self.observed.injections.is_empty()
            && condition(&self.status.conditions, ConditionType::Clean).is_none()
        {
            self.set(
                ConditionType::Clean,
                Is::True,
                "NothingToUndo",
                "nothing was injected on a node",
            );
        }
        let phase = ending.phase(rollup::is_flawless(&self.status));
        self.status.phase = Some(phase);
        self.set(ConditionType::Finished, Is::True, ending.reason(), message);
        self.status.message = match phase {
            Phase::Failed if matches!(ending, Ending::WindowsClosed | Ending::DeadlineReached) => {
                trouble(&self.status)
            }
            _ => message.to_owned(),
        };
        rollup::summarize(&mut self.status);
        self.finished();
    }

    fn finished(&mut self) {
        let now = self.now;
        if !self.observed.injections.is_empty() && self.ending().0 != Ending::DryRun {
            rollup::cleanup(self.observed, &mut self.status, now);
            rollup::summarize(&mut self.status);
        }
        let leaving = self
            .observed
            .experiment
            .metadata
            .deletion_timestamp
            .is_some();
        let ended = self.status.end_time.as_ref().map_or(now, |t| t.0);
        let policy = &self.observed.policy;
        let late = ended + policy.recheck_after + policy.control_plane_grace + BOUNDS;
        let injected = self
            .status
            .faults
            .iter()
            .any(|f| f.injected > 0 && !f.draw.is_empty());
        let rechecked = |i: &NodeInjection| {
            i.status
                .as_ref()
                .and_then(|s| s.audit.as_ref())
                .is_some_and(|a| a.rechecked_at.is_some())
        };
        let done = |i: &&NodeInjection| leaving || !injected || rechecked(i) || now >= late;
        let deletions: Vec<Action> = self
            .observed
            .injections
            .iter()
            .filter(done)
            .map(delete)
            .collect();
        let all_done = deletions.len() == self.observed.injections.len();
        self.actions.extend(deletions);
        self.release_finalizer();
        if !self.observed.injections.is_empty() && !all_done {
            return self.wake(late);
        }
        let ttl = self.observed.experiment.spec.ttl_seconds_after_finished;
        if let (Some(ttl), false) = (ttl, leaving) {
            let due = ended
                .saturating_add(SignedDuration::from_secs(ttl))
                .unwrap_or(Timestamp::MAX);
            if now >= due {
                self.actions.push(Action::DeleteExperiment);
            } else {
                self.wake(due);
            }
        }
    }

    /// Why the run ends, as written down when it was decided.
    fn ending(&self) -> (Ending, String) {
        condition(&self.status.conditions, ConditionType::Finished)
            .and_then(|c| Some((Ending::from_reason(&c.reason)?, c.message.clone())))
            .unwrap_or((Ending::DeadlineReached, String::new()))
    }

    fn has_finalizer(&self) -> bool {
        self.observed
            .experiment
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|f| f == FINALIZER)
    }

    fn release_finalizer(&mut self) {
        if self.has_finalizer() {
            self.actions.push(Action::RemoveFinalizer);
        }
    }

    fn injection_on(&self, node: &str) -> Option<&NodeInjection> {
        self.observed
            .injections
            .iter()
            .find(|i| i.spec.node_name == node)
    }

    fn drawn(&self) -> impl Iterator<Item = &DrawnPod> {
        self.status.faults.iter().flat_map(|f| &f.draw)
    }

    fn set(&mut self, type_: ConditionType, is: Is, reason: &str, message: &str) {
        let generation = self.observed.experiment.metadata.generation;
        let condition = (is, reason, message.to_owned());
        set_condition(
            &mut self.status.conditions,
            type_,
            condition,
            generation,
            self.now,
        );
    }

    fn wake(&mut self, at: Timestamp) {
        if at > self.now {
            self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
        }
    }
}

fn early_message(ending: Ending) -> &'static str {
    match ending {
        Ending::Deleted => "the experiment was deleted",
        Ending::EmergencyStop => "the emergency stop is in force (ConfigMap windtunnel-stop)",
        _ => "spec.abort was set",
    }
}

fn patch(injection: &NodeInjection, change: Change) -> Action {
    Action::Patch {
        name: injection.metadata.name.clone().unwrap_or_default(),
        resource_version: injection.metadata.resource_version.clone(),
        change,
    }
}

fn delete(injection: &NodeInjection) -> Action {
    Action::Delete {
        name: injection.metadata.name.clone().unwrap_or_default(),
        uid: injection.metadata.uid.clone(),
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

/// What went wrong, in a sentence.
fn trouble(status: &ChaosExperimentStatus) -> String {
    status
        .faults
        .iter()
        .find(|f| f.phase == FaultPhase::Failed)
        .map_or_else(
            || "a window was never opened".to_owned(),
            |f| format!("fault {}: {}", f.name, f.message),
        )
}
