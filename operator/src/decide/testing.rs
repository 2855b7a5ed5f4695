//! Builders for tests of decisions.

use std::{collections::BTreeMap, sync::LazyLock};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, MicroTime};
use serde::Serialize;
use serde_json::Value;
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjectionStatus,
    conditions::{ConditionType, condition},
    fault::Target,
    injection::{Audit, InjectionPhase, NodeContainer, TargetState, TargetStatus},
    names::FINALIZER,
    residue::ReclaimedBy,
    status::{FaultStatus, Phase},
};

use super::{Action, Agent, Change, Kill, Notice, Observed, PodPresence, Policy, decide, needs};
use crate::{
    cluster::Candidate,
    peers::{PeerError, PeerSet},
};

pub(crate) fn agent() -> Agent {
    Agent {
        live: true,
        clean: true,
        known_version: true,
        version: "0.1.0".to_owned(),
        matched: BTreeMap::new(),
        effects: BTreeMap::new(),
    }
}

pub(crate) fn candidate(name: &str, node: &str) -> Candidate {
    Candidate {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        node: node.to_owned(),
        host_network: false,
        eligible: true,
        containers: vec![NodeContainer {
            name: "app".to_owned(),
            id: format!("containerd://{name}"),
            volume_mounts: Vec::new(),
            storage_limits: std::collections::BTreeMap::new(),
        }],
        default_container: "app".to_owned(),
        addresses: Vec::new(),
    }
}

pub(crate) fn target(app: &str) -> Target {
    Target {
        selector: LabelSelector {
            match_labels: Some([("app".to_owned(), app.to_owned())].into()),
            match_expressions: None,
        },
        count: None,
        percent: None,
        containers: Vec::new(),
    }
}

/// A delay on two pods of two nodes.
pub(crate) const DELAY: &str = "
duration: 1m
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}}
";

/// A load on the only container of a pod.
pub(crate) const LOAD: &str = "
duration: 1m
faults:
- name: hot
  target: {selector: {matchLabels: {app: x}}}
  cpu: {load: 50}
";

/// Half of the pods are killed after ten seconds.
pub(crate) const KILL_HALF: &str = "
duration: 1m
faults:
- name: half
  startAfter: 10s
  target: {selector: {matchLabels: {app: orders}}, percent: 50}
  podKill: {gracePeriod: 1s}
";

pub(crate) fn pods(count: usize) -> Vec<Candidate> {
    (0..count)
        .map(|i| candidate(&format!("p{i}"), ["node1", "node2"][i % 2]))
        .collect()
}

pub(crate) fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

pub(crate) fn is(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

/// One experiment with what the API server would hold of it: decisions are applied to it as they
/// would be there, reports of agents are put in by the test.
pub(crate) struct Sim {
    pub(crate) observed: Observed,
    pub(crate) now: Timestamp,
    pub(crate) kills: Vec<Kill>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) deleted: Vec<String>,
    /// What peers are resolved to.
    pub(crate) peers: Result<PeerSet, PeerError>,
    pods: Vec<Candidate>,
    gone: Vec<String>,
}

/// An experiment from the YAML of its spec.
pub(crate) fn experiment(spec: &str) -> ChaosExperiment {
    let mut experiment = ChaosExperiment::new("run", serde_saphyr::from_str(spec).unwrap());
    experiment.metadata.namespace = Some("shop".to_owned());
    experiment.metadata.uid = Some("run-uid".to_owned());
    experiment.metadata.generation = Some(1);
    experiment
}

/// Nothing in it is longer than its schema allows: a part of the definition of this number.
fn fits(definition: usize, part: &str, value: &impl Serialize) {
    static SCHEMAS: LazyLock<Vec<Value>> = LazyLock::new(|| {
        let crds = windtunnel_crds::definitions();
        crds.iter()
            .map(|crd| serde_json::to_value(&crd.spec.versions[0].schema).unwrap())
            .collect()
    });
    let schema = &SCHEMAS[definition]["openAPIV3Schema"]["properties"][part];
    is_within(schema, &serde_json::to_value(value).unwrap(), part);
}

fn is_within(schema: &Value, value: &Value, at: &str) {
    let fits = |length: usize, name: &str| {
        let bound = schema[name].as_u64().unwrap_or(u64::MAX);
        assert!(
            length as u64 <= bound,
            "{at}: {length} is beyond {name} {bound}"
        );
    };
    match value {
        Value::String(text) => fits(text.chars().count(), "maxLength"),
        Value::Array(items) => {
            fits(items.len(), "maxItems");
            for item in items {
                is_within(&schema["items"], item, at);
            }
        }
        Value::Object(fields) => {
            fits(fields.len(), "maxProperties");
            for (name, field) in fields {
                let known = &schema["properties"][name];
                let schema = if known.is_null() {
                    &schema["additionalProperties"]
                } else {
                    known
                };
                is_within(schema, field, &format!("{at}.{name}"));
            }
        }
        _ => {}
    }
}

impl Sim {
    /// The node faults of a spec, in place on these pods.
    pub(crate) fn in_place(spec: &str, pods: Vec<Candidate>) -> Self {
        let mut sim = Self::new(spec, pods);
        sim.settle();
        sim.all(InjectionPhase::Prepared, TargetState::Prepared);
        sim.advance(seconds(1));
        sim.all(InjectionPhase::Running, TargetState::Injected);
        let injected = sim.condition(ConditionType::Injected);
        assert_eq!(injected, is("True", "ReadBack"));
        sim
    }

    pub(crate) fn new(spec: &str, pods: Vec<Candidate>) -> Self {
        let nodes = pods.iter().map(|p| (p.node.clone(), agent())).collect();
        Self {
            observed: Observed {
                experiment: experiment(spec),
                injections: Vec::new(),
                fleet: nodes,
                stop: false,
                candidates: BTreeMap::new(),
                pods: None,
                containers: None,
                peers: BTreeMap::new(),
                cluster_dns: Vec::new(),
                attempts: BTreeMap::new(),
                trouble: None,
                policy: Policy {
                    release_namespace: "windtunnel".to_owned(),
                    protected_namespaces: ["kube-system".to_owned()].into(),
                    max_targets: 100,
                    recheck_after: SignedDuration::from_mins(10),
                    control_plane_grace: SignedDuration::from_secs(30),
                },
            },
            now: "2026-01-01T00:00:00Z".parse().unwrap(),
            kills: Vec::new(),
            notices: Vec::new(),
            deleted: Vec::new(),
            peers: Ok(PeerSet::default()),
            pods,
            gone: Vec::new(),
        }
    }

    pub(crate) fn status(&self) -> ChaosExperimentStatus {
        self.observed.experiment.status.clone().unwrap_or_default()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.status().phase.unwrap_or_default()
    }

    /// Status and reason of a condition.
    pub(crate) fn condition(&self, type_: ConditionType) -> (String, String) {
        let status = self.status();
        let found = condition(&status.conditions, type_).cloned();
        found.map(|c| (c.status, c.reason)).unwrap_or_default()
    }

    pub(crate) fn fault(&self, name: &str) -> FaultStatus {
        self.status()
            .faults
            .into_iter()
            .find(|f| f.name == name)
            .unwrap()
    }

    pub(crate) fn advance(&mut self, duration: SignedDuration) {
        self.now += duration;
    }

    /// A container of a pod has restarted.
    pub(crate) fn restart_container(&mut self, pod: &str, id: &str) {
        let pod = self.pods.iter_mut().find(|p| p.name == pod).unwrap();
        id.clone_into(&mut pod.containers[0].id);
    }

    /// Somebody deletes the node injection of a node.
    pub(crate) fn withdraw(&mut self, node: &str) {
        let injections = &mut self.observed.injections;
        injections.retain(|i| i.spec.node_name != node);
    }

    /// A pod has come up.
    pub(crate) fn add_pod(&mut self, pod: Candidate) {
        self.pods.push(pod);
    }

    /// A pod is gone from the API.
    pub(crate) fn remove_pod(&mut self, name: &str) {
        self.gone.push(name.to_owned());
        self.pods.retain(|p| p.name != name);
    }

    /// Passes until nothing is left to do now.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20 {
            if !self.pass() {
                return;
            }
        }
        panic!("decisions do not come to an end");
    }

    /// One pass: observe, decide, apply. False if there was nothing to do.
    pub(crate) fn pass(&mut self) -> bool {
        let o = &mut self.observed;
        let needs = needs(&o.experiment, &o.injections, o.stop, self.now);
        o.candidates = needs
            .candidates
            .into_iter()
            .map(|f| (f, self.pods.clone()))
            .collect();
        o.peers = needs
            .peers
            .into_iter()
            .map(|f| (f, self.peers.clone()))
            .collect();
        o.pods = needs.pods.then(|| {
            let killed = |p: &Candidate| self.kills.iter().any(|k| k.uid == p.uid);
            let presence = |p: &Candidate| {
                if killed(p) {
                    PodPresence::Leaving
                } else {
                    PodPresence::There
                }
            };
            self.pods
                .iter()
                .map(|p| (p.uid.clone(), presence(p)))
                .collect()
        });
        o.containers = needs.containers.then(|| {
            let containers = |p: &Candidate| (p.uid.clone(), p.containers.clone());
            self.pods.iter().map(containers).collect()
        });
        let decision = decide(o, self.now);
        let same = decide(o, self.now);
        assert_eq!(decision, same, "equal observations, equal decisions");
        let has_done = !decision.actions.is_empty();
        for action in decision.actions {
            self.apply(action);
        }
        has_done
    }

    fn apply(&mut self, action: Action) {
        let experiment = &mut self.observed.experiment;
        match action {
            Action::AddFinalizer => {
                experiment.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
            }
            Action::RemoveFinalizer => experiment.metadata.finalizers = None,
            Action::WriteStatus(status) => {
                fits(0, "status", &*status);
                assert_ne!(
                    experiment.status.as_ref(),
                    Some(&*status),
                    "an unchanged status is not written"
                );
                let old = experiment.status.clone().unwrap_or_default();
                assert!(
                    old.start_time.is_none() || old.start_time == status.start_time,
                    "startTime is written once"
                );
                assert!(
                    old.deadline.is_none() || old.deadline == status.deadline,
                    "deadline is written once"
                );
                assert!(
                    !old.phase.unwrap_or_default().is_terminal() || old.phase == status.phase,
                    "terminal phases absorb"
                );
                assert!(old.phase <= status.phase, "phases never go back");
                experiment.status = Some(*status);
            }
            Action::Create(mut injection) => {
                assert!(
                    experiment.metadata.finalizers.is_some(),
                    "no node injection before the finalizer"
                );
                fits(1, "spec", &injection.spec);
                injection.metadata.uid = Some(format!("{}-uid", injection.spec.node_name));
                injection.metadata.generation = Some(1);
                self.observed.injections.push(*injection);
            }
            Action::Patch { name, change, .. } => {
                let injection = self
                    .observed
                    .injections
                    .iter_mut()
                    .find(|i| i.metadata.name.as_ref() == Some(&name))
                    .unwrap();
                *injection.metadata.generation.as_mut().unwrap() += 1;
                match change {
                    Change::Start(at) => injection.spec.start_time = Some(MicroTime(at)),
                    Change::Abort => injection.spec.abort = true,
                    Change::Faults(faults) => injection.spec.faults = faults,
                }
                fits(1, "spec", &injection.spec);
            }
            Action::Delete { name, .. } => {
                self.observed
                    .injections
                    .retain(|i| i.metadata.name.as_ref() != Some(&name));
                self.deleted.push(name);
            }
            Action::Kill(kill) => self.kills.push(kill),
            Action::DeleteExperiment => self.deleted.push("experiment".to_owned()),
            Action::Notify(notice) => self.notices.push(notice),
        }
    }

    /// The agent of a node reports a phase, and one state for all its targets.
    pub(crate) fn report(&mut self, node: &str, phase: InjectionPhase, state: TargetState) {
        self.report_faults(node, phase, |_| state);
    }

    /// The agent of a node reports a phase, and a state for each target by the fault's name.
    pub(crate) fn report_faults(
        &mut self,
        node: &str,
        phase: InjectionPhase,
        state: impl Fn(&str) -> TargetState,
    ) {
        let now = MicroTime(self.now);
        let injection = self
            .observed
            .injections
            .iter_mut()
            .find(|i| i.spec.node_name == node)
            .unwrap();
        let old = injection.status.clone().unwrap_or_default();
        let mut targets = Vec::new();
        for fault in &injection.spec.faults {
            for target in &fault.targets {
                let before = old
                    .targets
                    .iter()
                    .find(|t| t.fault == fault.name && t.pod_uid == target.pod_uid);
                let state = state(&fault.name);
                let injected = before.and_then(|b| b.injected_at.clone());
                targets.push(TargetStatus {
                    fault: fault.name.clone(),
                    pod_name: target.pod_name.clone(),
                    pod_uid: target.pod_uid.clone(),
                    state,
                    reason: String::new(),
                    message: String::new(),
                    injected_at: injected.or((state == TargetState::Injected).then(|| now.clone())),
                    reverted_at: state.is_final().then(|| now.clone()),
                    interrupted_at: None,
                    reclaimed_by: state.is_final().then_some(ReclaimedBy::Agent),
                    matched_packets: (state == TargetState::Injected).then_some(7),
                    queue_drops: None,
                    effect: BTreeMap::new(),
                });
            }
        }
        let over = matches!(phase, InjectionPhase::Recovered | InjectionPhase::Refused);
        injection.status = Some(NodeInjectionStatus {
            phase,
            observed_generation: injection.metadata.generation,
            targets,
            audit: over.then(|| Audit {
                checked_at: Some(now),
                ..Audit::default()
            }),
            ..NodeInjectionStatus::default()
        });
    }

    /// Every node reports, and passes are made.
    pub(crate) fn all(&mut self, phase: InjectionPhase, state: TargetState) {
        let nodes: Vec<String> = self
            .observed
            .injections
            .iter()
            .map(|i| i.spec.node_name.clone())
            .collect();
        for node in nodes {
            self.report(&node, phase, state);
        }
        self.settle();
    }

    /// Every node has checked its targets again.
    pub(crate) fn recheck(&mut self) {
        for injection in &mut self.observed.injections {
            let audit = injection.status.as_mut().unwrap().audit.as_mut().unwrap();
            audit.rechecked_at = Some(MicroTime(self.now));
        }
        self.settle();
    }
}
