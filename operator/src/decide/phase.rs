//! The state machine of a run: Pending → Preparing → Running → Recovering → a terminal phase.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjection,
    conditions::{ConditionStatus as Is, ConditionType, condition, set_condition},
    fault::Kind,
    names::FINALIZER,
    status::{DrawnPod, FaultPhase, Phase},
};

use super::{
    Action, BOUNDS, Change, Decision, Observed, Trouble, Unread, ending::Ending, fit::fit, guard,
    kill, notices, plan, rollup,
};

mod finished;
mod preparing;
mod recovering;
mod running;

/// One pass over one experiment: what is known, and what the pass has decided so far.
pub(super) struct Pass<'a> {
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

/// How long after the grace of the control plane a deletion may take whatever fails: a silent node
/// is given up by then, and what else there is to write has been tried again and again.
const AT_LAST: SignedDuration = SignedDuration::from_secs(2 * BOUNDS.as_secs());

/// How long a run that cannot begin is tried in silence, and one that may not.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);

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
    /// Aborts first: nothing that cannot be written may keep a fault in place. Then the status, unless
    /// nothing in it changed: what follows was decided on its being written.
    fn finish(mut self) -> Decision {
        let old = self.observed.experiment.status.as_ref();
        if self.status != ChaosExperimentStatus::default() {
            self.observe_generation();
            fit(&mut self.status);
        }
        if old != Some(&self.status) && self.status != ChaosExperimentStatus::default() {
            let notices = notices::of_change(old, &self.status);
            let status = Box::new(std::mem::take(&mut self.status));
            self.actions.insert(0, Action::WriteStatus(status));
            self.actions.sort_by_key(|action| !action.is_abort());
            self.actions.extend(notices.into_iter().map(Action::Notify));
        }
        self.release_at_last();
        Decision {
            actions: self.actions,
            wake_at: self.wake_at.filter(|at| *at > self.now),
        }
    }

    /// Whatever is said is said of the spec as it is now: `kubectl wait` takes no condition of an
    /// older generation, and the only change there can be, an abort, makes none of them untrue.
    fn observe_generation(&mut self) {
        let generation = self.observed.experiment.metadata.generation;
        self.status.observed_generation = generation;
        for condition in &mut self.status.conditions {
            condition.observed_generation = generation;
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
        if let Some(trouble) = &self.observed.trouble {
            self.cannot_begin(trouble);
            // The pass is repeated soon.
            if trouble.unread.is_some() {
                return;
            }
        }
        if !self.has_finalizer() {
            self.actions.push(Action::AddFinalizer);
            return;
        }
        if let Some(host) = self.awaited() {
            return self.wait_for(&host);
        }
        match self.select() {
            Ok(draws) => self.ask_nodes(&draws),
            Err(refusal) => self.end_untouched(refusal.ending, &refusal.message),
        }
    }

    /// Ends the run where it is of no use to try again; else says what it waits for, if it does so for
    /// long.
    fn cannot_begin(&mut self, trouble: &Trouble) {
        // It may be pods that cannot be read, peers or the cluster's DNS: the trouble says so.
        let message = format!("cannot begin: {}", trouble.message);
        let is_lasting = self.now >= trouble.since + PATIENCE;
        match trouble.unread {
            Some(Unread::Senseless) => self.end_untouched(Ending::SelectionRefused, &message),
            Some(Unread::Forbidden) if is_lasting => {
                self.end_untouched(Ending::SelectionRefused, &message);
            }
            _ if is_lasting => {
                self.status.phase = Some(Phase::Pending);
                self.set(ConditionType::Prepared, Is::False, "NotSelected", &message);
                self.status.message = message;
            }
            _ => {}
        }
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
                let refusal = kill::refusal(self.observed, status);
                kill::give_up(status, refusal);
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
        let phase = ending.phase(rollup::is_flawless(self.observed, &self.status));
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

    /// No write that is refused for ever may keep a deleted experiment: by now no fault of it can be
    /// in place, and the sweep takes the node injections that are left.
    fn release_at_last(&mut self) {
        let Some(deleted) = &self.observed.experiment.metadata.deletion_timestamp else {
            return;
        };
        let last = deleted.0 + self.observed.policy.control_plane_grace + AT_LAST;
        if self.now < last {
            self.wake(last);
        } else if self.has_finalizer() {
            self.actions.retain(|a| *a != Action::RemoveFinalizer);
            let aborts = self.actions.iter().take_while(|a| a.is_abort()).count();
            self.actions.insert(aborts, Action::RemoveFinalizer);
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
