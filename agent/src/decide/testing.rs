//! A model of a node for tests of decisions: steps are applied to it as they would be to the real
//! one.

use std::{collections::BTreeMap, time::Duration};

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    NodeInjection, NodeInjectionStatus,
    injection::{TargetState, TargetStatus},
};

use super::{Decision, Now, Observed, Preparation, Step, decide};
use crate::{
    kernel::proc::ProcessId,
    model::{Ended, Entry, Key, Objects, State, Sweep},
    supervisor::Live,
    testing::{all_traffic, container_entry, entry, injection},
    wire::{NetworkTask, Order, Task},
};

pub(super) const UID: &str = "inj-uid";

pub(super) struct Sim {
    pub(super) o: Observed,
    pub(super) now: Now,
    pub(super) told: Vec<NodeInjectionStatus>,
    pub(super) starts: usize,
}

impl Sim {
    pub(super) fn new(pods: &[&str]) -> Self {
        let injection = injection(UID, pods, all_traffic());
        Self {
            o: Observed {
                boot_id: "boot".to_owned(),
                injections: Some([(UID.to_owned(), injection)].into()),
                stop: Some(false),
                has_control_plane: true,
                clock_offset: Some(3),
                sweep: Some(sweep(Duration::from_secs(90))),
                entries: BTreeMap::new(),
                live: BTreeMap::new(),
                kills: BTreeMap::new(),
                unstarted: BTreeMap::new(),
                unwritten: BTreeMap::new(),
                deserted: Vec::new(),
                revived: Vec::new(),
                preparations: BTreeMap::new(),
                reports: BTreeMap::new(),
                node_addresses: vec!["10.0.0.1".parse().unwrap()],
                is_unclean: false,
            },
            now: Now {
                boot: Duration::from_secs(100),
                wall: "2026-01-01T00:00:00Z".parse().unwrap(),
            },
            told: Vec::new(),
            starts: 0,
        }
    }

    /// Prepared, started and injected on every pod.
    pub(super) fn injected(pods: &[&str]) -> Self {
        Self::new(pods).in_place()
    }

    pub(super) fn in_place(mut self) -> Self {
        self.settle();
        self.start(0);
        self.settle();
        self.apply_all();
        self.settle();
        self
    }

    pub(super) fn injection(&mut self) -> &mut NodeInjection {
        self.o.injections.as_mut().unwrap().get_mut(UID).unwrap()
    }

    /// The operator starts the run, so many milliseconds from now.
    pub(super) fn start(&mut self, millis: i64) {
        let at = self.now.wall + SignedDuration::from_millis(millis);
        self.injection().spec.start_time = Some(MicroTime(at));
    }

    pub(super) fn advance(&mut self, millis: u64) {
        self.now.boot += Duration::from_millis(millis);
        self.now.wall += SignedDuration::from_millis(i64::try_from(millis).unwrap());
        for live in self.o.live.values_mut().filter(|l| !l.has_exited) {
            live.heard_at = self.now.boot;
        }
    }

    /// Every injector says that its effect was read back.
    pub(super) fn apply_all(&mut self) {
        for live in self.o.live.values_mut() {
            live.applied_at = Some(self.now.wall);
        }
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..20 {
            if self.pass().is_empty() {
                return;
            }
        }
        panic!("decisions do not come to an end");
    }

    pub(super) fn decide(&self) -> Vec<Step> {
        decide(&self.o, self.now).steps
    }

    pub(super) fn pass(&mut self) -> Vec<Step> {
        self.o.note_pending(self.now.boot);
        let Decision { steps, .. } = decide(&self.o, self.now);
        assert_eq!(
            steps,
            decide(&self.o, self.now).steps,
            "equal observations, equal decisions"
        );
        for step in &steps {
            self.perform(step.clone());
        }
        steps
    }

    pub(super) fn entry(&mut self, key: &Key) -> &mut Entry {
        self.o.entries.get_mut(key).unwrap()
    }

    fn ended(&mut self, key: &Key) -> &mut Ended {
        let State::Ended(ended) = &mut self.entry(key).state else {
            panic!("checked before its end")
        };
        ended
    }

    pub(super) fn perform(&mut self, step: Step) {
        match step {
            Step::Sweep => self.o.sweep = Some(sweep(self.now.boot)),
            Step::Prepare { injection } => self.prepare(&injection, &[]),
            Step::Open { key, window } => self.entry(&key).window = Some(window),
            Step::Inject { key, table } => self.inject(&key, table),
            Step::Confirm { key, at } => {
                let injector = self.entry(&key).injector().unwrap();
                self.entry(&key).state = State::Injected { injector, at };
            }
            Step::Update { key, table } => {
                let task = &mut self.o.live.get_mut(&key).unwrap().order.task;
                let Task::Network(task) = task else {
                    panic!("only networks are updated")
                };
                task.table = table;
            }
            Step::Await { key } => {
                let since = self.now.boot;
                let live = self.o.live.remove(&key).unwrap();
                let entry = self.entry(&key);
                entry.outlive(live.applied_at, live.counts, since);
            }
            Step::Follow { key, id } => {
                let entry = self.entry(&key);
                let Objects::Container(container) = &mut entry.objects else {
                    panic!("only containers are followed")
                };
                container.id = id;
                entry.state = State::Prepared;
            }
            Step::Kill { key, why } => {
                self.o.kills.entry(key.clone()).or_insert(why);
                self.o.live.get_mut(&key).unwrap().has_exited = true;
            }
            Step::End { key, ended } => {
                self.entry(&key).state = State::Ended(*ended);
                self.o.live.remove(&key);
                self.o.kills.remove(&key);
                self.o.unstarted.remove(&key);
                self.o.unwritten.remove(&key);
            }
            Step::Clean { key } => {
                let now = self.now;
                self.ended(&key).checked = Some((now.wall, now.boot));
            }
            Step::Recheck { key } => {
                let at = self.now.wall;
                self.ended(&key).rechecked = Some(at);
            }
            Step::Forget { key } => drop(self.o.entries.remove(&key)),
            Step::Report {
                injection, status, ..
            } => {
                let reported = self.o.reports.entry(injection).or_default();
                assert_ne!(
                    reported.status.as_ref(),
                    Some(&*status),
                    "nothing is told twice"
                );
                reported.status = Some((*status).clone());
                reported.pending_since = None;
                self.told.push(*status);
            }
        }
    }

    /// What Prepare does where every target can be injected but those named.
    pub(super) fn prepare(&mut self, uid: &str, refused: &[&str]) {
        let spec = self.injection().clone();
        let mut verdicts = Vec::new();
        for target in &spec.spec.faults[0].targets {
            if refused.contains(&target.pod_uid.as_str()) {
                verdicts.push(verdict(&target.pod_uid, TargetState::Failed));
            } else if spec.spec.dry_run {
                verdicts.push(verdict(&target.pod_uid, TargetState::Prepared));
            } else {
                let made = if spec.spec.faults[0].network.is_some() {
                    entry(&target.pod_uid)
                } else {
                    container_entry(&target.pod_uid)
                };
                let prepared = Entry {
                    prepared_at: self.now.boot,
                    ..made
                };
                self.o.entries.insert(prepared.key.clone(), prepared);
            }
        }
        if verdicts.iter().any(|v| v.state == TargetState::Failed) {
            self.o.entries.clear();
        }
        let generation = spec.metadata.generation;
        self.o.preparations.insert(
            uid.to_owned(),
            Preparation {
                generation,
                verdicts,
            },
        );
    }

    pub(super) fn inject(&mut self, key: &Key, table: Option<crate::kernel::nft::Table>) {
        self.starts += 1;
        let now = self.now.boot;
        let entry = self.entry(key);
        assert_eq!(entry.state, State::Prepared, "nothing is injected twice");
        let window = entry.window.unwrap();
        assert!(window.begin <= now && now < window.end);
        let process = ProcessId {
            pid: 7,
            start_time: 7,
        };
        entry.state = State::Injecting { injector: process };
        let order = Order {
            deadline: window.end,
            task: match (&entry.objects, table) {
                (Objects::Container(container), None) => Task::Container(container.clone()),
                (Objects::Network(network), Some(table)) => Task::Network(NetworkTask {
                    netns: network.netns,
                    pid: 1,
                    pod: entry.pod_cgroup.clone(),
                    table,
                    queues: Vec::new(),
                }),
                _ => panic!("rules are for networks"),
            },
        };
        let live = Live::new(process, order, now);
        self.o.live.insert(key.clone(), live);
    }

    pub(super) fn last(&self) -> &NodeInjectionStatus {
        self.told.last().unwrap()
    }

    pub(super) fn target(&self, pod: &str) -> &TargetStatus {
        self.last()
            .targets
            .iter()
            .find(|t| t.pod_uid == pod)
            .unwrap()
    }

    /// The reason and the message of a target.
    pub(super) fn why(&self, pod: &str) -> (&str, &str) {
        let target = self.target(pod);
        (&target.reason, &target.message)
    }

    pub(super) fn live(&mut self, pod: &str) -> &mut Live {
        self.o.live.get_mut(&crate::testing::key(pod)).unwrap()
    }
}

/// A look at the node that found nothing.
pub(super) fn sweep(swept_at: Duration) -> Sweep {
    Sweep {
        at: "2025-12-31T23:59:50Z".parse().unwrap(),
        swept_at,
        residue: Vec::new(),
        unread: None,
    }
}

pub(super) fn verdict(pod: &str, state: TargetState) -> TargetStatus {
    TargetStatus {
        fault: "slow".to_owned(),
        pod_name: format!("pod-{pod}"),
        pod_uid: pod.to_owned(),
        state,
        reason: "LinkKind".to_owned(),
        message: "no".to_owned(),
        ..TargetStatus::default()
    }
}
