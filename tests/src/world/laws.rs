//! What must hold at every moment, and at the end.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use windtunnel_agent::model::{Ended, Key};
use windtunnel_agent::wire::LEASE;
use windtunnel_crds::conditions::ConditionType;
use windtunnel_crds::fault::{Fault, Kind};
use windtunnel_crds::residue::has_left;
use windtunnel_crds::status::Phase;
use windtunnel_crds::{ChaosExperimentStatus, NodeInjection};
use windtunnel_operator::decide::Kill;

use super::api::Api;
use super::node::{GRACE, Node};
use super::script::Run;
use super::{Story, wall};

/// How far a node's clock may move the windows of a run: what a late node may have missed.
const SHIFT: Duration = Duration::from_millis(3_100);
/// How long a lease may keep the next operator waiting.
const FAILOVER: Duration = Duration::from_secs(20);
/// What may lie between a decision and its effect.
const SLACK: Duration = Duration::from_secs(1);

/// A law was broken.
#[derive(Debug)]
pub struct Violation {
    at: Duration,
    what: String,
}

impl Violation {
    pub(super) fn new(at: Duration, what: impl Into<String>) -> Self {
        Self {
            at,
            what: what.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {:.3} s: {}", self.at.as_secs_f64(), self.what)
    }
}

impl std::error::Error for Violation {}

pub(super) struct Laws {
    run: Run,
    /// When the user or the emergency stop ended the run.
    ended: Option<Duration>,
    /// The run's deadline, once it was written.
    deadline: Option<Duration>,
    /// The effects that began, by key and container.
    begun: BTreeSet<(Key, String)>,
    killed: Vec<String>,
    /// A node injection was deleted by hand: who had it cannot say that it is clean.
    is_withdrawn: bool,
}

impl Laws {
    pub(super) fn new(run: Run) -> Self {
        Self {
            run,
            ended: None,
            deadline: None,
            begun: BTreeSet::new(),
            killed: Vec::new(),
            is_withdrawn: false,
        }
    }

    pub(super) fn story(&self) -> Story {
        Story {
            effects: u64::try_from(self.begun.len()).unwrap_or(u64::MAX),
            kills: self.killed.len(),
            ..Story::default()
        }
    }

    pub(super) fn ended(&mut self, now: Duration) {
        self.ended.get_or_insert(now);
    }

    pub(super) fn withdrawn(&mut self) {
        self.is_withdrawn = true;
    }

    pub(super) fn told(&mut self, status: &ChaosExperimentStatus) {
        if let (None, Some(deadline)) = (self.deadline, &status.deadline) {
            let since = deadline.0.duration_since(wall(Duration::ZERO));
            self.deadline = since.try_into().ok();
        }
    }

    /// An effect is in place.
    pub(super) fn began(
        &mut self,
        now: Duration,
        key: &Key,
        container: String,
    ) -> Result<(), Violation> {
        if !self.begun.insert((key.clone(), container)) {
            return Err(Violation::new(now, format!("{key:?} was injected again")));
        }
        if self.run == Run::Dry {
            return Err(Violation::new(now, "a dry run injected"));
        }
        Ok(())
    }

    pub(super) fn creates(
        now: Duration,
        api: &Api,
        injection: &NodeInjection,
    ) -> Result<(), Violation> {
        let is_held = api.experiment.as_ref().is_some_and(|e| {
            !e.metadata
                .finalizers
                .as_deref()
                .unwrap_or_default()
                .is_empty()
        });
        if !is_held {
            return Err(Violation::new(now, "a node injection before the finalizer"));
        }
        let drawn: Vec<&str> = draws(api);
        let all = injection.spec.faults.iter().flat_map(|f| &f.targets);
        for target in all {
            if !drawn.contains(&target.pod_uid.as_str()) {
                return Err(Violation::new(
                    now,
                    format!("{} was never drawn", target.pod_name),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn kills(&mut self, now: Duration, api: &Api, kill: &Kill) -> Result<(), Violation> {
        if !self.killed.contains(&kill.uid) {
            self.killed.push(kill.uid.clone());
        }
        if !draws(api).contains(&kill.uid.as_str()) {
            return Err(Violation::new(
                now,
                format!("{} was killed before it was drawn", kill.name),
            ));
        }
        if self.killed.len() > 2 {
            return Err(Violation::new(
                now,
                "more pods were killed than half of four",
            ));
        }
        if self.deadline.is_some_and(|deadline| now > deadline + SLACK) {
            return Err(Violation::new(now, "a pod was killed after the deadline"));
        }
        Ok(())
    }

    pub(super) fn check(&self, now: Duration, api: &Api, nodes: &[Node]) -> Result<(), Violation> {
        let mut effects = 0;
        for node in nodes {
            for injector in node.kernel.effects(|key| api.container(key)) {
                let is_there = api.pods.iter().any(|p| p.uid == injector.key.pod);
                effects += usize::from(is_there);
                self.check_bounds(now, api, &injector.key)?;
                check_control(now, api, node)?;
            }
            check_journal(now, node)?;
        }
        let inert = nodes.iter().map(|n| n.kernel.inert.len()).sum();
        self.check_status(now, api, (effects, inert))
    }

    fn check_bounds(&self, now: Duration, api: &Api, key: &Key) -> Result<(), Violation> {
        let broken = |what: String| Err(Violation::new(now, format!("{key:?}: {what}")));
        match self.deadline {
            None => return broken("an effect before there is a deadline".to_owned()),
            Some(deadline) if now > deadline + SHIFT + SLACK => {
                return broken(format!("an effect after the deadline {deadline:?}"));
            }
            Some(_) => {}
        }
        // Agents see the emergency stop for themselves; an end that the user asks for has to wait
        // for an operator, and no longer than for the next one.
        let bound = GRACE + LEASE + SLACK + super::TICK;
        let ends = [(self.ended, bound + FAILOVER), (api.stopped, bound)];
        for (at, bound) in ends {
            if let Some(at) = at
                && now > at + bound
            {
                return broken(format!("an effect although all was to end at {at:?}"));
            }
        }
        if key.pod == "pod4-uid" || key.pod == "pod5-uid" {
            return broken("not selected".to_owned());
        }
        Ok(())
    }

    /// The status is true.
    fn check_status(
        &self,
        now: Duration,
        api: &Api,
        (effects, inert): (usize, usize),
    ) -> Result<(), Violation> {
        let claims = [
            (ConditionType::Recovered, effects),
            (ConditionType::Clean, effects + inert),
        ];
        for (claim, left) in claims {
            let is_claimed = api
                .condition(claim)
                .is_some_and(|(status, _)| status == "True");
            if is_claimed && left > 0 {
                let what = format!("the status says {claim:?}, and {left} things are in place");
                return Err(Violation::new(now, what));
            }
        }
        let status = api.experiment.as_ref().and_then(|e| e.status.as_ref());
        let cleanup = status.and_then(|status| status.cleanup.as_ref());
        let clean = api.condition(ConditionType::Clean);
        if cleanup.is_some_and(|cleanup| has_left(&cleanup.residue))
            && clean.is_none_or(|(status, _)| status != "False")
        {
            let what = format!("something is left by status.cleanup, and Clean is {clean:?}");
            return Err(Violation::new(now, what));
        }
        let is_injected = api
            .condition(ConditionType::Injected)
            .is_some_and(|(status, _)| status == "True");
        if is_injected && self.begun.is_empty() && self.killed.is_empty() {
            return Err(Violation::new(
                now,
                "the status says Injected, and nothing ever was",
            ));
        }
        Ok(())
    }

    /// Long after everything is healed: nothing is left.
    pub(super) fn judge(&self, now: Duration, api: &Api, nodes: &[Node]) -> Result<(), Violation> {
        let broken = |what: String| Err(Violation::new(now, what));
        for node in nodes {
            if !node.kernel.injectors.is_empty() || !node.kernel.inert.is_empty() {
                return broken(format!("{:?} is left on {}", node.kernel, node.name));
            }
            if !node.journal.is_empty() {
                return broken(format!(
                    "{:?} is left in the journal of {}",
                    node.journal, node.name
                ));
            }
        }
        let is_all_there = nodes.iter().all(|n| !n.is_lost);
        if is_all_there && !api.injections.is_empty() {
            return broken(format!("{:?} are left", api.injections));
        }
        let Some(experiment) = &api.experiment else {
            return Ok(());
        };
        if experiment.metadata.deletion_timestamp.is_some() {
            return broken("the experiment is still in Terminating".to_owned());
        }
        let phase = api.phase().unwrap_or_default();
        if !phase.is_terminal() {
            return broken(format!("the run is still {phase:?}"));
        }
        if !experiment
            .metadata
            .finalizers
            .as_deref()
            .unwrap_or_default()
            .is_empty()
        {
            return broken("a finished run has a finalizer".to_owned());
        }
        let clean = api.condition(ConditionType::Clean);
        let is_told = is_all_there && !self.is_withdrawn;
        if is_told && clean.is_none_or(|(status, _)| status != "True") {
            return broken(format!("{phase:?}, but Clean is {clean:?}"));
        }
        if phase == Phase::Completed
            && self.run != Run::Dry
            && self.begun.is_empty()
            && self.killed.is_empty()
        {
            return broken("completed without any effect".to_owned());
        }
        Ok(())
    }
}

/// A node with an effect is led. Its agent may have seen the last sign of life when it came back
/// from as long as it does without one.
fn check_control(now: Duration, api: &Api, node: &Node) -> Result<(), Violation> {
    let bound = GRACE + LEASE + SLACK + super::TICK;
    let led_at = api.lease.map_or(Duration::ZERO, |(_, renewed)| renewed);
    if now > node.heard_at + bound {
        let what = format!("an effect on {}, cut off at {:?}", node.name, node.heard_at);
        return Err(Violation::new(now, what));
    }
    if now > led_at + GRACE + bound {
        let what = format!("an effect on {}, led until {led_at:?}", node.name);
        return Err(Violation::new(now, what));
    }
    Ok(())
}

/// What the kernel holds is written down.
fn check_journal(now: Duration, node: &Node) -> Result<(), Violation> {
    if node.is_journal_lost {
        return Ok(());
    }
    let injectors = node.kernel.injectors.values().map(|i| &i.key);
    for key in injectors.chain(&node.kernel.inert) {
        let is_over = |ended: &Ended| ended.checked.is_some() && !has_left(&ended.residue);
        let entry = node.journal.get(key);
        if entry.is_none_or(|e| e.ended().is_some_and(is_over)) {
            let what = format!("{key:?} on {} is not in the journal", node.name);
            return Err(Violation::new(now, what));
        }
    }
    Ok(())
}

/// The uids of all pods that were drawn.
fn draws(api: &Api) -> Vec<&str> {
    let Some(experiment) = &api.experiment else {
        return Vec::new();
    };
    let kills = |name: &str| {
        let fault = experiment.spec.faults.iter().find(|f| f.name == name);
        matches!(
            fault.and_then(Fault::kind),
            Some(Kind::PodKill(_) | Kind::Network(_) | Kind::Cpu(_))
        )
    };
    let faults = experiment.status.iter().flat_map(|s| &s.faults);
    let drawn = faults.filter(|f| kills(&f.name)).flat_map(|f| &f.draw);
    drawn.map(|pod| pod.uid.as_str()).collect()
}
