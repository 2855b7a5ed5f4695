//! Which faults may be in place together: pure. The table in README.md says it to users.

use std::{collections::BTreeMap, time::Duration};

use windtunnel_crds::{
    NodeInjection,
    injection::{NodeFault, NodeNetworkFault},
};

use super::{MAX_FAULTS, Refusal, Run};
use crate::{
    model::{Act, Entry, Key, NetworkEntry},
    network,
    node::Node,
};

/// How long after the end of one fault on a container another of its kind may begin: by then the
/// first injector is gone.
const GAP: Duration = Duration::from_secs(1);

/// What may be in place beside a fault that is being prepared.
pub(super) struct Beside<'a> {
    pub(super) injections: Option<&'a BTreeMap<String, NodeInjection>>,
    pub(super) entries: Vec<&'a Entry>,
}

impl<'a> Beside<'a> {
    /// What the journal holds, and what it would hold of a dry run.
    pub(super) fn new(node: &'a Node, run: &'a Run<'_>) -> Self {
        let entries = node.journal.entries().values().chain(&run.rehearsed);
        Self {
            injections: node.known.injections.as_ref(),
            entries: entries.filter(|e| e.ended().is_none()).collect(),
        }
    }

    /// Refuses more faults than a node can have.
    pub(super) fn has_room(&self) -> Result<(), Refusal> {
        let held = self.entries.len();
        if held < MAX_FAULTS {
            return Ok(());
        }
        let message = format!(
            "this node has {held} faults on targets, of {MAX_FAULTS} at most; each takes a process"
        );
        Err(("TooManyFaults", message))
    }

    /// The faults on networks.
    pub(super) fn networks(&self) -> impl Iterator<Item = &'a NetworkEntry> {
        self.entries.iter().filter_map(|e| e.network())
    }

    /// A place among the chains of other faults on the same pod: the older keeps the packets if two
    /// come to select the same.
    pub(super) fn priority(&self, key: &Key) -> i32 {
        let others = self.neighbours(key).filter_map(Entry::network);
        others.map(|other| other.priority + 1).max().unwrap_or(0)
    }

    /// Refuses a fault that selects packets which another one on the same pod selects.
    pub(super) fn network(&self, key: &Key, fault: &NodeNetworkFault) -> Result<(), Refusal> {
        // Back to back there is a moment at which both are there, and the older has the packets.
        for other in self.rivals(key, Duration::ZERO) {
            let theirs = self.fault(&other.key).and_then(|f| f.network.as_ref());
            if other.network().is_some()
                && theirs.is_none_or(|theirs| network::compete(fault, theirs))
            {
                return Err(conflict(
                    other,
                    "acts on the same packets of this pod; give them different peers, ports, directions or windows, or put both doses into one fault",
                ));
            }
        }
        Ok(())
    }

    /// Refuses what cannot act beside another fault on the same container.
    pub(super) fn container(&self, key: &Key, act: &Act) -> Result<(), Refusal> {
        let others = self.rivals(key, GAP);
        for other in others.filter(|e| e.key.container == key.container) {
            if let Some(what) = other.container().and_then(|c| act.competes(&c.act)) {
                return Err(conflict(
                    other,
                    &format!(
                        "acts on {what} of this container already; give them windows with a second between"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Other faults on the same pod.
    fn neighbours(&self, key: &Key) -> impl Iterator<Item = &'a Entry> {
        let entries = self.entries.iter().copied();
        entries.filter(move |e| e.key.pod == key.pod && e.key != *key)
    }

    /// Other faults on the same pod that may be in place at the same time, or closer than `gap`.
    fn rivals(&self, key: &Key, gap: Duration) -> impl Iterator<Item = &'a Entry> {
        let own = self.fault(key);
        self.neighbours(key).filter(move |other| {
            // Another run has a clock of its own.
            other.key.injection != key.injection
                || match (own, self.fault(&other.key)) {
                    (Some(one), Some(other)) => !are_apart(one, other, gap),
                    _ => true,
                }
        })
    }

    fn fault(&self, key: &Key) -> Option<&'a NodeFault> {
        Some(key.meant(self.injections?)?.1)
    }
}

fn conflict(other: &Entry, does: &str) -> Refusal {
    let (fault, experiment) = (&other.key.fault, &other.experiment.name);
    let message = format!("fault {fault} of experiment {experiment} {does}");
    ("Conflict", message)
}

/// Whether the window of one of two faults on one clock closes `gap` or more before that of the
/// other opens.
fn are_apart(one: &NodeFault, other: &NodeFault, gap: Duration) -> bool {
    let window = |fault: &NodeFault| {
        let begin = fault.start_after.get();
        (begin, begin.saturating_add(fault.duration.get()))
    };
    let (one, other) = (window(one), window(other));
    one.1.saturating_add(gap) <= other.0 || other.1.saturating_add(gap) <= one.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_has_room_for_so_many_faults_and_no_more() {
        let entry = crate::testing::entry("a");
        let beside = |held| Beside {
            injections: None,
            entries: vec![&entry; held],
        };
        assert!(beside(MAX_FAULTS - 1).has_room().is_ok());
        let (reason, message) = beside(MAX_FAULTS).has_room().unwrap_err();
        assert_eq!(reason, "TooManyFaults");
        assert!(message.contains("300"), "{message}");
    }

    #[test]
    fn windows_are_apart_if_one_closes_before_the_other_opens() {
        let fault = |begin: u64, seconds: u64| -> NodeFault {
            let (begin, seconds) = (format!("{begin}s"), format!("{seconds}s"));
            let fault = json!({
                "name": "f", "startAfter": begin, "duration": seconds, "targets": []
            });
            serde_json::from_value(fault).unwrap()
        };
        let second = Duration::from_secs(1);
        for (one, other, gap, apart) in [
            ((0, 10), (5, 10), Duration::ZERO, false),
            ((0, 10), (10, 10), Duration::ZERO, true),
            ((0, 10), (10, 10), second, false),
            ((0, 10), (11, 10), second, true),
            ((0, 60), (20, 5), Duration::ZERO, false),
        ] {
            let (one, other) = (fault(one.0, one.1), fault(other.0, other.1));
            assert_eq!(are_apart(&one, &other, gap), apart, "{one:?} {other:?}");
            assert_eq!(are_apart(&other, &one, gap), apart, "{other:?} {one:?}");
        }
    }
}
