//! Targets are drawn and their nodes asked; when all are prepared, the clock starts.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    conditions::{ConditionStatus as Is, ConditionType},
    fault::{Fault, Kind},
    injection::{InjectionPhase, TargetState},
    status::{DrawnPod, FaultStatus, Phase},
};

use super::{Pass, delete, early_message, patch, stopped_early};
use crate::{
    cluster::Candidate,
    decide::{
        Action, Change, PREPARE,
        draw::{Draw, Refusal},
        ending::Ending,
        guard, needs,
        plan::{self, Draws},
        rollup,
    },
};

/// The longest that a start on many nodes is put into the future.
const MAX_LEAD: SignedDuration = SignedDuration::from_secs(2);

/// How soon a host's addresses are looked for again, if nothing is heard before.
const LOOK: SignedDuration = SignedDuration::from_secs(1);

/// Refuses a pod that has not every container that the fault is for.
fn has_containers(
    fault: &Fault,
    candidates: &[Candidate],
    drawn: &[DrawnPod],
) -> Result<(), Refusal> {
    for pod in candidates
        .iter()
        .filter(|c| drawn.iter().any(|d| d.uid == c.uid))
    {
        let has = |name: &&str| pod.containers.iter().any(|c| c.name == **name);
        if let Some(missing) = plan::chosen(fault, pod).into_iter().find(|name| !has(name)) {
            return Err(Refusal::new(
                Ending::TargetsMissing,
                format!(
                    "fault {}: pod {} has no container {missing} that has started",
                    fault.name, pod.name
                ),
            ));
        }
    }
    Ok(())
}

impl Pass<'_> {
    /// Draws every fault's targets, and checks what can be checked before any node is asked.
    pub(super) fn select(&self) -> Result<Draws, Refusal> {
        let experiment = &self.observed.experiment;
        let mut draws = Draws::new();
        let mut everybody = Vec::new();
        for fault in &experiment.spec.faults {
            let on_node = fault.kind().is_some_and(Kind::is_on_node);
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
            has_containers(fault, candidates.map_or(&[], Vec::as_slice), &pods)?;
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
    pub(super) fn ask_nodes(&mut self, draws: &Draws) {
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
        self.status.message = self.checking();
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
    pub(super) fn drop_injections_without(&mut self, draws: &Draws) {
        let used = |node: &str| draws.values().flatten().any(|pod| pod.node == node);
        let idle = self
            .observed
            .injections
            .iter()
            .filter(|i| !used(&i.spec.node_name));
        let deletions: Vec<Action> = idle.map(delete).collect();
        self.actions.extend(deletions);
    }

    pub(super) fn preparing(&mut self) {
        if let Some(ending) = stopped_early(&self.observed.experiment, self.observed.stop) {
            return self.recover(ending, early_message(ending));
        }
        if let Some(message) = self.refusal() {
            self.set(ConditionType::Prepared, Is::False, "Refused", &message);
            return self.recover(Ending::PrepareRefused, &message);
        }
        let is_late = needs::preparing_is_over(&self.observed.experiment, self.now);
        if !is_late && !self.observed.candidates.is_empty() {
            if let Some(host) = self.awaited() {
                return self.wait_for(&host);
            }
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
        let waiting = self.unprepared();
        if waiting.is_empty() {
            return self.prepared();
        }
        if is_late {
            let (bound, waiting) = (PREPARE.as_secs(), waiting.join(", "));
            let message = self.with_trouble(&format!("no answer within {bound} s from {waiting}"));
            self.set(ConditionType::Prepared, Is::False, "Timeout", &message);
            return self.recover(Ending::PrepareTimeout, &message);
        }
        self.status.message = self.checking();
        let asked = self.status.prepare_time.as_ref().map_or(self.now, |t| t.0);
        self.wake(asked + PREPARE);
    }

    /// A host among the peers that nobody has answered for yet.
    pub(super) fn awaited(&self) -> Option<String> {
        let peers = self.observed.peers.values().flatten();
        peers.flat_map(|peers| &peers.awaited).next().cloned()
    }

    /// Says that it waits for a host's addresses. The pass is repeated when they come.
    pub(super) fn wait_for(&mut self, host: &str) {
        self.status.phase.get_or_insert(Phase::Pending);
        self.status.message = format!("waiting for the addresses of host {host}");
        self.wake(self.now + LOOK);
    }

    /// What is going on while the nodes prepare.
    fn checking(&self) -> String {
        self.with_trouble("checking the targets on their nodes")
    }

    /// With how the last pass failed, if it did.
    fn with_trouble(&self, message: &str) -> String {
        match &self.observed.trouble {
            Some(trouble) => format!("{message} ({})", trouble.message),
            None => message.to_owned(),
        }
    }

    /// What a node said against its part, if one did.
    pub(super) fn refusal(&self) -> Option<String> {
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
    pub(super) fn unprepared(&self) -> Vec<String> {
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
    pub(super) fn prepared(&mut self) {
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
        for fault in plan::node_faults(&self.observed.experiment) {
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

    pub(super) fn finish_dry_run(&mut self) {
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
}
