//! The nodes' agents as this operator has seen them: silent is judged by this process's own
//! clock, from when a heartbeat was last seen to change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kube::ResourceExt as _;
use tokio::time::Instant;
use windtunnel_crds::NodeAgent;

use crate::decide::{Agent, Fleet};

/// After how long without a new heartbeat an agent is silent.
pub(crate) const SILENT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Record {
    agent: NodeAgent,
    /// When its heartbeat was last seen to change.
    heard: Instant,
    /// Whether it was live when [`Tracker::changes`] last looked.
    was_live: bool,
}

/// All agents, with when they were last heard of.
#[derive(Debug, Default)]
pub(crate) struct Tracker(Mutex<BTreeMap<String, Record>>);

impl Tracker {
    /// An agent was seen; true if anything but its heartbeat changed.
    pub(crate) fn see(&self, agent: NodeAgent, now: Instant) -> bool {
        let mut records = self.lock();
        let node = agent.name_any();
        let heartbeat = |a: &NodeAgent| a.status.as_ref().and_then(|s| s.heartbeat_time.clone());
        let clean = |a: &NodeAgent| a.status.as_ref().is_some_and(|s| s.clean);
        let counters = |a: &NodeAgent| a.status.as_ref().map(|s| s.counters.clone());
        match records.get_mut(&node) {
            None => {
                let record = Record {
                    agent,
                    heard: now,
                    was_live: true,
                };
                records.insert(node, record);
                true
            }
            Some(record) => {
                let changed = clean(&record.agent) != clean(&agent)
                    || counters(&record.agent) != counters(&agent)
                    || !record.was_live;
                if heartbeat(&record.agent) != heartbeat(&agent) {
                    record.heard = now;
                    record.was_live = true;
                }
                record.agent = agent;
                changed
            }
        }
    }

    /// An agent's object is gone.
    pub(crate) fn forget(&self, node: &str) {
        self.lock().remove(node);
    }

    /// All objects of agents were listed: others are gone, and are forgotten. Returns those.
    pub(crate) fn keep(&self, listed: &BTreeSet<String>) -> Vec<String> {
        let is_gone = |node: &String, _: &mut Record| !listed.contains(node);
        let mut records = self.lock();
        let gone = records.extract_if(.., is_gone);
        gone.map(|(node, _)| node).collect()
    }

    /// The nodes whose agents fell silent since this was last asked.
    pub(crate) fn fallen_silent(&self, now: Instant) -> Vec<String> {
        let mut records = self.lock();
        let silent = records
            .iter_mut()
            .filter(|(_, r)| r.was_live && !is_live(r, now));
        silent
            .map(|(node, record)| {
                record.was_live = false;
                node.clone()
            })
            .collect()
    }

    /// The names of all nodes that have an agent.
    pub(crate) fn nodes(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The fleet as decisions see it.
    pub(crate) fn fleet(&self, now: Instant) -> Fleet {
        let view = |record: &Record| {
            let status = record.agent.status.clone().unwrap_or_default();
            Agent {
                live: is_live(record, now),
                clean: status.clean,
                known_version: is_known(&status.version),
                version: status.version,
                effects: status
                    .counters
                    .iter()
                    .map(|c| {
                        (
                            (c.experiment_uid.clone(), c.fault.clone()),
                            c.effect.clone(),
                        )
                    })
                    .collect(),
                matched: status
                    .counters
                    .into_iter()
                    .map(|c| ((c.experiment_uid, c.fault), c.matched_packets))
                    .collect(),
            }
        };
        self.lock()
            .iter()
            .map(|(node, record)| (node.clone(), view(record)))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        // Every change is one statement: a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_live(record: &Record, now: Instant) -> bool {
    now.saturating_duration_since(record.heard) <= SILENT
}

/// Agents of the same minor version speak the same protocol.
fn is_known(version: &str) -> bool {
    let minor = |v: &str| v.rsplit_once('.').map(|(head, _)| head.to_owned());
    minor(version) == minor(env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use windtunnel_crds::{NodeAgentSpec, NodeAgentStatus};

    use super::*;

    fn agent(heartbeat: i64) -> NodeAgent {
        let mut agent = NodeAgent::new(
            "node1",
            NodeAgentSpec {
                node_name: "node1".to_owned(),
            },
        );
        agent.status = Some(NodeAgentStatus {
            heartbeat_time: Some(MicroTime(Timestamp::from_second(heartbeat).unwrap())),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            clean: true,
            ..NodeAgentStatus::default()
        });
        agent
    }

    /// Its deletion fell between two watches.
    #[test]
    fn an_agent_that_is_not_listed_any_more_is_forgotten() {
        let tracker = Tracker::default();
        tracker.see(agent(1), Instant::now());
        assert!(
            tracker
                .keep(&BTreeSet::from(["node1".to_owned()]))
                .is_empty()
        );
        assert_eq!(tracker.nodes(), ["node1"]);
        assert_eq!(tracker.keep(&BTreeSet::new()), ["node1"]);
        assert!(tracker.nodes().is_empty());
    }

    #[test]
    fn an_agent_that_repeats_itself_is_silent() {
        let tracker = Tracker::default();
        let start = Instant::now();
        tracker.see(agent(1), start);
        // A relist shows the same heartbeat again: no sign of life.
        tracker.see(agent(1), start + SILENT);
        assert!(tracker.fallen_silent(start + SILENT).is_empty());
        let late = start + SILENT + Duration::from_secs(1);
        assert_eq!(tracker.fallen_silent(late), ["node1"]);
        assert!(tracker.fallen_silent(late).is_empty(), "told once");
        assert!(!tracker.fleet(late)["node1"].live);
        assert!(tracker.see(agent(2), late), "its return is news");
        assert!(tracker.fleet(late)["node1"].live);
    }

    #[test]
    fn versions_of_one_minor_are_known() {
        let own = env!("CARGO_PKG_VERSION");
        assert!(is_known(own));
        assert!(!is_known("99.0.0"));
        assert!(!is_known(""));
    }
}
