//! What an agent process knows, and how it learns of it.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use windtunnel_agent::decide::{self, Kill, Observed, Preparation, Reported, Unwritten};
use windtunnel_agent::model::{Entry, Key, Sweep};
use windtunnel_agent::node::Known;
use windtunnel_agent::supervisor::{Leave, Live};
use windtunnel_crds::residue::has_left;
use windtunnel_crds::{NodeInjection, NodeInjectionStatus};

use super::super::api::Api;
use super::super::kernel::Kernel;
use super::GRACE;

/// What an agent process knows.
#[derive(Default)]
pub(super) struct Agent {
    pub(super) stopped_until: Option<Duration>,
    pub(super) seen_version: u64,
    pub(super) known: Known,
    pub(super) kills: BTreeMap<Key, Kill>,
    pub(super) unwritten: BTreeMap<Key, Unwritten>,
    pub(super) preparations: BTreeMap<String, Preparation>,
    pub(super) reports: BTreeMap<String, Reported>,
    pub(super) live: BTreeMap<Key, Live>,
    pub(super) deserted: BTreeMap<Key, Duration>,
    pub(super) sweep: Option<Sweep>,
    pub(super) outbox: BTreeMap<String, (String, NodeInjectionStatus)>,
    pub(super) wake: Option<Duration>,
    pub(super) is_dirty: bool,
}

impl Agent {
    /// Takes in what the API server has, and tells it what is waiting; whether there was anything.
    pub(super) fn talk(&mut self, node: &str, api: &mut Api) -> bool {
        let outbox = std::mem::take(&mut self.outbox);
        let mut is_busy = !outbox.is_empty();
        for (uid, (name, status)) in outbox {
            api.report(&name, &uid, status);
        }
        if self.seen_version != api.version || self.known.injections.is_none() {
            self.seen_version = api.version;
            let own = api.injections.values().filter(|i| i.spec.node_name == node);
            let own: BTreeMap<String, NodeInjection> = own
                .map(|i| (i.metadata.uid.clone().unwrap_or_default(), i.clone()))
                .collect();
            let stop = Some(api.stopped.is_some());
            if self.known.injections.as_ref() != Some(&own) || self.known.stop != stop {
                self.known.injections = Some(own);
                self.known.stop = stop;
                self.is_dirty = true;
                is_busy = true;
            }
        }
        is_busy
    }

    /// Sees which targets have no process any more.
    pub(super) fn look(
        &mut self,
        boot: Duration,
        journal: &BTreeMap<Key, Entry>,
        has_pod: impl Fn(&Key) -> bool,
    ) {
        let open = journal.values().filter(|e| e.ended().is_none());
        let empty: Vec<Key> = open
            .map(|e| e.key.clone())
            .filter(|key| !has_pod(key))
            .collect();
        self.deserted.retain(|key, _| empty.contains(key));
        for key in empty {
            self.deserted.entry(key).or_insert(boot);
        }
        self.is_dirty |= self
            .deserted
            .values()
            .any(|since| boot == *since + decide::DESERTED);
        if let Some(injections) = &self.known.injections {
            self.preparations
                .retain(|uid, _| injections.contains_key(uid));
            self.reports.retain(|uid, _| injections.contains_key(uid));
            let is_open = |key: &Key| journal.get(key).is_some_and(|e| e.ended().is_none());
            self.kills.retain(|key, _| is_open(key));
            self.unwritten.retain(|key, _| is_open(key));
        }
    }

    /// Listens to the injectors.
    pub(super) fn hear(&mut self, boot: Duration, wall: Timestamp, kernel: &Kernel) {
        for live in self.live.values_mut() {
            if kernel.last_words.contains(&live.process.pid) && !live.has_exited {
                live.leave = Some(Leave::ContainerEnded);
            }
            let Some(injector) = kernel.injectors.get(&live.process.pid) else {
                self.is_dirty |= !live.has_exited;
                live.has_exited = true;
                continue;
            };
            if injector.stopped_until.is_some() {
                continue;
            }
            live.heard_at = boot;
            if injector.has_applied {
                live.applied_at.get_or_insert(wall);
            }
            if injector.has_vanished {
                live.vanished
                    .get_or_insert_with(|| "the table is gone".to_owned());
                self.is_dirty = true;
            }
        }
    }

    pub(super) fn observe(
        &self,
        boot: Duration,
        boot_id: String,
        journal: &BTreeMap<Key, Entry>,
    ) -> Observed {
        let fresh = |at: Option<Duration>| at.is_some_and(|at| boot <= at + GRACE);
        let deserted = self
            .deserted
            .iter()
            .filter(|(_, since)| boot >= **since + decide::DESERTED);
        Observed {
            boot_id,
            injections: self.known.injections.clone(),
            stop: self.known.stop,
            has_control_plane: fresh(self.known.lease_seen) && fresh(self.known.listed),
            clock_offset: self.known.clock_offset,
            sweep: self.sweep.clone(),
            entries: journal.clone(),
            live: self.live.clone(),
            kills: self.kills.clone(),
            unstarted: BTreeMap::new(),
            unwritten: self.unwritten.clone(),
            deserted: deserted.map(|(key, _)| key.clone()).collect(),
            // A pod's sandbox stays what it is here.
            revived: Vec::new(),
            preparations: self.preparations.clone(),
            reports: self.reports.clone(),
            node_addresses: Vec::new(),
            is_unclean: is_unclean(journal, self.sweep.as_ref()),
        }
    }
}

/// Something that was found is still there.
fn is_unclean(journal: &BTreeMap<Key, Entry>, sweep: Option<&Sweep>) -> bool {
    let mut ended = journal.values().filter_map(Entry::ended);
    ended.any(|e| has_left(&e.residue)) || sweep.is_some_and(Sweep::has_left)
}
