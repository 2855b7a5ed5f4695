//! What an agent does on its node: a plain copy of its `act`, which can die between any two steps.

use std::time::Duration;

use windtunnel_agent::audit::merge;
use windtunnel_agent::decide::{
    Kill, Now, Observed, Preparation, Step, Unwritten, keys, node_refusal,
};
use windtunnel_agent::kernel::netns::NetNsId;
use windtunnel_agent::kernel::nft::Table;
use windtunnel_agent::kernel::proc::ProcessId;
use windtunnel_agent::model::{
    Act, ContainerEntry, Counts, Ended, Entry, FORMAT, Key, NetworkEntry, Objects, State, Sweep,
};
use windtunnel_agent::supervisor::Live;
use windtunnel_agent::wire::{NetworkTask, Order, Task};
use windtunnel_crds::NodeInjection;
use windtunnel_crds::injection::{NodeFault, NodeTarget, TargetState, TargetStatus};
use windtunnel_crds::residue::{Residue, ResidueKind, has_left};

use super::super::api::Api;
use super::{Died, Node};

impl Node {
    /// One thing less until the agent dies.
    fn burn(&mut self, now: Duration) -> Result<(), Died> {
        match &mut self.fuse {
            Some((0, orphans)) => {
                let orphans = *orphans;
                self.die(now, orphans);
                Err(Died)
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Writes an entry down, of what is about to be done; false where the journal cannot be written.
    fn write(
        &mut self,
        now: Duration,
        key: &Key,
        change: impl FnOnce(&mut Entry),
    ) -> Result<bool, Died> {
        if now < self.full_until {
            self.burn(now)?;
            let since = self.clocks(now).boot;
            if let Some(agent) = &mut self.agent {
                let message = "full".to_owned();
                let unwritten = Unwritten { since, message };
                agent.unwritten.entry(key.clone()).or_insert(unwritten);
            }
            return Ok(false);
        }
        self.note(now, key, change)
    }

    /// Takes note of what has happened.
    fn note(
        &mut self,
        now: Duration,
        key: &Key,
        change: impl FnOnce(&mut Entry),
    ) -> Result<bool, Died> {
        self.burn(now)?;
        self.fall_behind(now, key);
        if let Some(entry) = self.journal.get_mut(key) {
            change(entry);
        }
        Ok(true)
    }

    pub(super) fn forget(&mut self, now: Duration, key: &Key) {
        self.fall_behind(now, key);
        self.journal.remove(key);
    }

    /// What is written of an entry stays as it is where the journal cannot be written.
    pub(super) fn fall_behind(&mut self, now: Duration, key: &Key) {
        if now < self.full_until {
            let written = self.journal.get(key).cloned();
            self.unsaved.entry(key.clone()).or_insert(written);
        } else {
            self.unsaved.remove(key);
        }
    }

    /// Does one step; false if it failed, and is to be tried again.
    pub(super) fn perform(
        &mut self,
        now: Duration,
        step: Step,
        observed: &Observed,
        api: &Api,
    ) -> Result<bool, Died> {
        self.burn(now)?;
        match step {
            Step::Sweep => {
                self.sweep(now);
                Ok(true)
            }
            Step::Prepare { injection } => self.prepare(now, &injection, observed, api),
            Step::Open { key, window } => self.note(now, &key, |entry| entry.window = Some(window)),
            Step::Inject { key, table } => self.inject(now, &key, table),
            Step::Await { key } => self.wait_for_container(now, &key),
            Step::Follow { key, id } => self.follow(now, &key, id, api),
            Step::Confirm { key, at } => self.note(now, &key, |entry| {
                if let Some(injector) = entry.injector() {
                    entry.state = State::Injected { injector, at };
                }
            }),
            Step::Update { .. } => Ok(true),
            Step::Kill { key, why } => {
                self.kill(key, why);
                Ok(true)
            }
            Step::End { key, ended } => self.end(now, &key, *ended),
            Step::Clean { key } => {
                let clocks = self.clocks(now);
                self.check(now, &key, |ended| {
                    ended.checked = Some((clocks.wall, clocks.boot));
                })
            }
            Step::Recheck { key } => {
                let at = self.clocks(now).wall;
                self.check(now, &key, |ended| ended.rechecked = Some(at))
            }
            Step::Forget { key } => {
                self.forget(now, &key);
                Ok(true)
            }
            Step::Report {
                injection,
                name,
                status,
            } => {
                if let Some(agent) = &mut self.agent {
                    let reported = agent.reports.entry(injection.clone()).or_default();
                    reported.status = Some((*status).clone());
                    reported.pending_since = None;
                    agent.outbox.insert(injection, (name, *status));
                }
                Ok(true)
            }
        }
    }

    /// Whatever no entry speaks of goes.
    fn sweep(&mut self, now: Duration) {
        let Now { boot, wall } = self.clocks(now);
        let clings = now < self.clings_until;
        let journal = &self.journal;
        let kernel = &mut self.kernel;
        kernel.injectors.retain(|_, i| journal.contains_key(&i.key));
        let strange = kernel.inert.iter().filter(|key| !journal.contains_key(key));
        let found: Vec<Residue> = strange.map(|key| residue(key, !clings)).collect();
        kernel
            .inert
            .retain(|key| journal.contains_key(key) || clings);
        self.is_journal_lost = has_left(&found);
        if let Some(agent) = &mut self.agent {
            let before = agent.sweep.take().map(|s| s.residue);
            agent.sweep = Some(Sweep {
                at: wall,
                swept_at: boot,
                residue: merge(before.unwrap_or_default(), found),
                unread: None,
            });
        }
    }

    fn wait_for_container(&mut self, now: Duration, key: &Key) -> Result<bool, Died> {
        let since = self.clocks(now).boot;
        let live = self.agent.as_ref().and_then(|agent| agent.live.get(key));
        let known = live.map(|l| (l.applied_at, l.counts.clone()));
        let (applied_at, counts) = known.unwrap_or_default();
        self.note(now, key, |entry| {
            entry.outlive(applied_at, counts, since);
        })?;
        if let Some(agent) = &mut self.agent {
            agent.live.remove(key);
        }
        Ok(true)
    }

    fn kill(&mut self, key: Key, why: Kill) {
        if let Some(agent) = &mut self.agent {
            if let Some(live) = agent.live.get(&key) {
                self.kernel.injectors.remove(&live.process.pid);
            }
            agent.kills.entry(key).or_insert(why);
        }
    }

    fn end(&mut self, now: Duration, key: &Key, ended: Ended) -> Result<bool, Died> {
        self.note(now, key, |entry| entry.state = State::Ended(ended))?;
        if let Some(agent) = &mut self.agent {
            agent.live.remove(key);
            agent.kills.remove(key);
        }
        Ok(true)
    }

    fn check(
        &mut self,
        now: Duration,
        key: &Key,
        done: impl FnOnce(&mut Ended),
    ) -> Result<bool, Died> {
        let was_there = self.kernel.inert.contains(key);
        let found = (was_there && !self.remove(now, key)).then(|| residue(key, false));
        self.note(now, key, |entry| {
            if let State::Ended(ended) = &mut entry.state {
                let before = std::mem::take(&mut ended.residue);
                ended.residue = merge(before, found.into_iter().collect());
                done(ended);
            }
        })
    }

    /// Removes what was built for a fault; whether it is gone.
    pub(super) fn remove(&mut self, now: Duration, key: &Key) -> bool {
        if now >= self.clings_until {
            self.kernel.inert.remove(key);
        }
        !self.kernel.inert.contains(key)
    }

    /// Finds the container that has taken the place of an entry's.
    fn follow(&mut self, now: Duration, key: &Key, id: String, api: &Api) -> Result<bool, Died> {
        // A pass that changes nothing is not made again at once.
        if api.container(key).as_ref() != Some(&id) {
            return Ok(false);
        }
        self.note(now, key, |entry| {
            let is_successor = entry.injected_before.is_some();
            if let Objects::Container(container) = &mut entry.objects {
                container.id = id;
                container.is_successor = is_successor;
                entry.state = State::Prepared;
            }
        })
    }

    fn inject(&mut self, now: Duration, key: &Key, table: Option<Table>) -> Result<bool, Died> {
        let Some(entry) = self.journal.get(key).cloned() else {
            return Ok(true);
        };
        let Some(window) = entry.window else {
            return Ok(true);
        };
        // Nothing is started that could not be written down; and until it has its order, which is
        // last, a process does nothing.
        if !self.write(now, key, |_| {})? {
            return Ok(false);
        }
        self.burn(now)?;
        let process = ProcessId {
            pid: self.kernel.next_pid(),
            start_time: 1,
        };
        let is_written = self.write(now, key, |entry| {
            entry.state = State::Injecting { injector: process };
        })?;
        if !is_written {
            return Ok(false);
        }
        self.burn(now)?;
        let end = self.at(window.end);
        let container = entry.container().map(|c| c.id.clone());
        let container = container.unwrap_or_default();
        self.kernel.spawn(process.pid, key.clone(), container, end);
        let heard_at = self.clocks(now).boot;
        if let Some(agent) = &mut self.agent {
            let order = Order {
                deadline: window.end,
                task: match (entry.objects, table) {
                    (Objects::Container(container), _) => Task::Container(container),
                    (Objects::Network(network), table) => Task::Network(NetworkTask {
                        netns: network.netns,
                        pid: 1,
                        pod: entry.pod_cgroup,
                        table: table.unwrap_or_else(|| Table {
                            name: String::new(),
                            chains: Vec::new(),
                        }),
                        queues: Vec::new(),
                    }),
                },
            };
            let live = Live::new(process, order, heard_at);
            agent.live.insert(key.clone(), live);
            agent.unwritten.remove(key);
        }
        Ok(true)
    }

    fn prepare(
        &mut self,
        now: Duration,
        uid: &str,
        observed: &Observed,
        api: &Api,
    ) -> Result<bool, Died> {
        let found = observed.injections.as_ref().and_then(|all| all.get(uid));
        let Some(injection) = found.cloned() else {
            return Ok(true);
        };
        let refusal = node_refusal(observed).or_else(|| {
            (now < self.refuse_until).then(|| ("LinkKind", "refused by the script".to_owned()))
        });
        let mut verdicts = Vec::new();
        for fault in &injection.spec.faults {
            for target in &fault.targets {
                for key in keys(uid, fault, target) {
                    let verdict = match &refusal {
                        Some((reason, _)) => Some((TargetState::Failed, *reason)),
                        None => self.prepare_target(now, &injection, (key, target), api)?,
                    };
                    verdicts
                        .extend(verdict.map(|(state, reason)| told(fault, target, state, reason)));
                }
            }
        }
        if verdicts.iter().any(|v| v.state == TargetState::Failed) {
            let prepared: Vec<Key> = self
                .journal
                .values()
                .filter(|e| e.key.injection == uid && e.state == State::Prepared)
                .map(|e| e.key.clone())
                .collect();
            for key in prepared {
                self.burn(now)?;
                if self.remove(now, &key) {
                    self.forget(now, &key);
                }
            }
        }
        if let Some(agent) = &mut self.agent {
            let generation = injection.metadata.generation;
            agent.preparations.insert(
                uid.to_owned(),
                Preparation {
                    generation,
                    verdicts,
                },
            );
        }
        Ok(true)
    }

    /// What is to be told of a target; nothing where the journal says it.
    fn prepare_target(
        &mut self,
        now: Duration,
        injection: &NodeInjection,
        (key, target): (Key, &NodeTarget),
        api: &Api,
    ) -> Result<Option<(TargetState, &'static str)>, Died> {
        let mut containers = target.containers.iter();
        let container = containers.find(|c| c.name == key.container);
        let id = container.map_or_else(String::new, |c| c.id.clone());
        match self.journal.get(&key).map(|e| &e.state) {
            None => {}
            Some(State::Prepared) => return Ok(None),
            Some(_) => return Ok(Some((TargetState::Failed, "AgentRestarted"))),
        }
        if api.container(&key).is_none_or(|current| current != id) {
            return Ok(Some((TargetState::Gone, "TargetGone")));
        }
        if injection.spec.dry_run {
            return Ok(Some((TargetState::Prepared, "")));
        }
        self.burn(now)?;
        if now < self.full_until {
            return Ok(Some((TargetState::Failed, "JournalUnwritable")));
        }
        let entry = self.entry(now, injection, &key, (target, id));
        self.unsaved.remove(&key);
        self.journal.insert(key.clone(), entry);
        self.burn(now)?;
        if key.container.is_empty() {
            self.kernel.inert.insert(key);
        }
        Ok(None)
    }

    fn entry(
        &self,
        now: Duration,
        injection: &NodeInjection,
        key: &Key,
        (target, id): (&NodeTarget, String),
    ) -> Entry {
        let container = ContainerEntry {
            id,
            cgroup: "/sys/fs/cgroup".into(),
            init: ProcessId {
                pid: 1,
                start_time: 1,
            },
            act: Act::Cpu { millicores: 500 },
            is_successor: false,
        };
        let network = NetworkEntry {
            netns: NetNsId {
                device: 4,
                inode: 1,
            },
            table: "windtunnel-x".to_owned(),
            priority: 0,
            detours: Vec::new(),
            resets: Vec::new(),
            name_servers: Vec::new(),
            drain: Duration::from_secs(1),
        };
        Entry {
            format: FORMAT,
            boot_id: self.boot_id(),
            key: key.clone(),
            injection_name: injection.metadata.name.clone().unwrap_or_default(),
            experiment: injection.spec.experiment.clone(),
            pod_name: target.pod_name.clone(),
            pod_cgroup: "/sys/fs/cgroup".into(),
            recheck_after: injection.spec.recheck_after.get(),
            objects: if key.container.is_empty() {
                Objects::Network(network)
            } else {
                Objects::Container(container)
            },
            prepared_at: self.clocks(now).boot,
            window: None,
            counts_before: Counts::default(),
            injected_before: None,
            state: State::Prepared,
        }
    }
}

/// What is found of what was built for a fault.
fn residue(key: &Key, removed: bool) -> Residue {
    Residue {
        node: String::new(),
        kind: ResidueKind::Link,
        name: format!("{}-{}", key.fault, key.pod),
        pod: String::new(),
        removed,
        message: String::new(),
    }
}

fn told(fault: &NodeFault, target: &NodeTarget, state: TargetState, reason: &str) -> TargetStatus {
    TargetStatus {
        fault: fault.name.clone(),
        pod_name: target.pod_name.clone(),
        pod_uid: target.pod_uid.clone(),
        state,
        reason: reason.to_owned(),
        ..TargetStatus::default()
    }
}
