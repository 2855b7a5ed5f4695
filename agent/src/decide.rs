//! What to do next on this node: pure. Plain data and two clocks in, steps as data out.
//!
//! `lifecycle` moves one fault on one target on, `prepare` looks at injections that have not
//! started, `report` says what to tell the operator. None of them has I/O, a clock or chance.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use jiff::Timestamp;
use windtunnel_crds::{
    NodeInjection, NodeInjectionStatus,
    injection::{NodeFault, NodeKind, NodeTarget, TargetStatus},
};

use crate::{
    kernel::nft::Table,
    model::{Ended, Entry, Key, Sweep, Window},
    supervisor::Live,
};

mod checks;
mod combine;
mod lifecycle;
#[cfg(test)]
mod lost;
mod overlap;
mod prepare;
mod report;
#[cfg(test)]
mod restarts;
mod sandbox;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod window;

/// How late after the start of a run a node may learn of it and still inject; and how long a journal
/// that cannot be written may hold a fault up.
pub const LATE: Duration = Duration::from_secs(3);
/// How long after Prepared a start is waited for.
pub const WAIT: Duration = Duration::from_mins(1);
/// How far the node's clock may be from the operator's.
pub const SKEW: i64 = 1_000;
/// How long an injector may be silent.
pub const SILENCE: Duration = Duration::from_secs(3);
/// How long a pod may have no process before its faults are given up.
pub const DESERTED: Duration = Duration::from_secs(2);
/// The same where the pod's control group is still there.
pub const LINGER: Duration = Duration::from_secs(10);
/// How long a container that has ended may have no successor before its faults are given up.
pub const RESTART: Duration = Duration::from_mins(1);
/// How often residue that could not be removed is tried again.
pub const AGAIN: Duration = Duration::from_secs(5);
/// How often a node that could not be looked at as a whole is looked at again.
pub const LOOK_AGAIN: Duration = Duration::from_mins(1);
/// How long reports are held back while more is about to happen.
pub const HOLD: Duration = Duration::from_millis(500);

/// The reason of what ended with the agent that had begun it.
pub(crate) const RESTARTED: &str = "AgentRestarted";

/// All that a decision may depend on.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Boot id of the running kernel.
    pub boot_id: String,
    /// The injections of this node by uid; `None` until they were listed.
    pub injections: Option<BTreeMap<String, NodeInjection>>,
    /// The emergency stop is in force; `None` until that was looked up.
    pub stop: Option<bool>,
    /// The control plane was seen to be alive within the grace.
    pub has_control_plane: bool,
    /// How far the node's clock is ahead of the operator's, in milliseconds; `None` while unknown.
    pub clock_offset: Option<i64>,
    /// The last look at the whole node; `None` until this agent has looked.
    pub sweep: Option<Sweep>,
    /// The journal.
    pub entries: BTreeMap<Key, Entry>,
    /// The injectors.
    pub live: BTreeMap<Key, Live>,
    /// Why an injector was killed, while it is still to be seen off.
    pub kills: BTreeMap<Key, Kill>,
    /// Why an injector could not be started.
    pub unstarted: BTreeMap<Key, String>,
    /// Faults that are due and cannot be written down.
    pub unwritten: BTreeMap<Key, Unwritten>,
    /// Targets whose pod has had no process for [`DESERTED`], or for [`LINGER`] where it still has its
    /// control group: then kubelet may give it another sandbox.
    pub deserted: Vec<Key>,
    /// Targets that were found to be gone, and whose pod has processes again.
    pub revived: Vec<Key>,
    /// What Prepare found, by uid of the injection.
    pub preparations: BTreeMap<String, Preparation>,
    /// What was last reported, by uid of the injection, and what waits since when.
    pub reports: BTreeMap<String, Reported>,
    /// Addresses of the node itself.
    pub node_addresses: Vec<IpAddr>,
    /// The node has residue that could not be removed.
    pub is_unclean: bool,
}

/// What Prepare found for an injection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Preparation {
    /// The generation of the spec that it is about.
    pub generation: Option<i64>,
    /// Targets that cannot be injected or are gone; for a dry run, all targets.
    pub verdicts: Vec<TargetStatus>,
}

/// A fault that is due and cannot be written down, so that it must not be injected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// Since when, on the boot clock.
    pub since: Duration,
    /// Why.
    pub message: String,
}

/// What the operator was last told of an injection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reported {
    /// What it was told.
    pub status: Option<NodeInjectionStatus>,
    /// Since when there has been something else to tell.
    pub pending_since: Option<Duration>,
}

/// Why an injector is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    /// Its window is over.
    WindowOver,
    /// The run was ended.
    Aborted,
    /// The injection is gone.
    Withdrawn,
    /// The emergency stop is in force.
    Stopped,
    /// The control plane was lost for longer than the grace.
    NoControlPlane,
    /// It was silent.
    Silent,
    /// Its effect is gone although it lives.
    Vanished,
    /// Its target is gone.
    Deserted,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Look at the whole node for what is ours and stands in no entry, and remove it.
    Sweep,
    /// Check every target of an injection and, unless it is a dry run, build what is inert.
    Prepare {
        /// Uid of the injection.
        injection: String,
    },
    /// Write down when an effect may be there.
    Open {
        /// Of which fault on which target.
        key: Key,
        /// When.
        window: Window,
    },
    /// Start the injector.
    Inject {
        /// Of which fault on which target.
        key: Key,
        /// Its rules, for a network fault.
        table: Option<Table>,
    },
    /// Write down that the container has ended, and the effect with it; another is awaited.
    Await {
        /// Of which fault on which target.
        key: Key,
    },
    /// Find the container that has taken the place of the one before.
    Follow {
        /// Of which fault on which target.
        key: Key,
        /// Its id.
        id: String,
    },
    /// Write down that the effect was read back.
    Confirm {
        /// Of which fault on which target.
        key: Key,
        /// When.
        at: Timestamp,
    },
    /// Give an injector other rules.
    Update {
        /// Of which fault on which target.
        key: Key,
        /// The rules.
        table: Table,
    },
    /// Kill an injector, and with it its effect.
    Kill {
        /// Of which fault on which target.
        key: Key,
        /// Why.
        why: Kill,
    },
    /// Write down that the effect is gone.
    End {
        /// Of which fault on which target.
        key: Key,
        /// How.
        ended: Box<Ended>,
    },
    /// Remove what is inert by now, where it has drained, and check the target.
    Clean {
        /// Of which fault on which target.
        key: Key,
    },
    /// Check the target again.
    Recheck {
        /// Of which fault on which target.
        key: Key,
    },
    /// Drop an entry that has nothing left to say.
    Forget {
        /// Of which fault on which target.
        key: Key,
    },
    /// Tell the operator.
    Report {
        /// Uid of the injection.
        injection: String,
        /// Its name.
        name: String,
        /// What.
        status: Box<NodeInjectionStatus>,
    },
}

impl Step {
    /// Whether it looks at what a target controls, and may be held up by it.
    #[must_use]
    pub fn looks_at_targets(&self) -> bool {
        matches!(self, Self::Prepare { .. } | Self::Follow { .. })
    }
}

pub use prepare::refusal as node_refusal;

/// What to do, and when to look again at the latest (boot clock).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// What to do, in this order; a step that fails stops no other.
    pub steps: Vec<Step>,
    /// When to look again even if nothing is seen to change.
    pub wake_at: Option<Duration>,
}

/// The two clocks of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// The boot clock: all that is bounded is measured on it.
    pub boot: Duration,
    /// The wall clock: for the start of a run, and for people.
    pub wall: Timestamp,
}

/// Decides what to do.
#[must_use]
pub fn decide(observed: &Observed, now: Now) -> Decision {
    let mut decision = Decision::default();
    // What the journal does not know is looked for before anything is begun, or said.
    let Some(sweep) = &observed.sweep else {
        decision.push(Step::Sweep);
        return decision;
    };
    sweep_again(sweep, now, &mut decision);
    for (key, entry) in &observed.entries {
        lifecycle::advance(observed, key, entry, now, &mut decision);
    }
    for (uid, injection) in observed.injections.iter().flatten() {
        prepare::advance(observed, uid, injection, &mut decision);
        report::advance(observed, uid, injection, now, &mut decision);
    }
    decision
}

fn sweep_again(sweep: &Sweep, now: Now, decision: &mut Decision) {
    let pause = match sweep {
        _ if sweep.has_left() => AGAIN,
        Sweep {
            unread: Some(_), ..
        } => LOOK_AGAIN,
        _ => return,
    };
    let due = sweep.swept_at + pause;
    if now.boot >= due {
        decision.push(Step::Sweep);
    } else {
        decision.wake(due);
    }
}

impl Decision {
    fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    fn wake(&mut self, at: Duration) {
        self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
    }
}

impl Observed {
    /// Notes since when there has been something to tell of each injection; to be remembered for
    /// the next pass.
    pub fn note_pending(&mut self, now: Duration) {
        let injections = self.injections.iter().flatten();
        let pending: Vec<(String, bool)> = injections
            .map(|(uid, i)| (uid.clone(), report::news(self, uid, i).is_some()))
            .collect();
        for (uid, is_pending) in pending {
            let reported = self.reports.entry(uid).or_default();
            reported.pending_since = is_pending.then(|| reported.pending_since.unwrap_or(now));
        }
    }

    fn injection(&self, uid: &str) -> Option<&NodeInjection> {
        self.injections.as_ref()?.get(uid)
    }

    /// The part of an entry's injection that it is about.
    fn fault(&self, key: &Key) -> Option<(&NodeInjection, &NodeFault)> {
        let (injection, fault) = key.meant(self.injections.as_ref()?)?;
        fault
            .targets
            .iter()
            .any(|t| t.pod_uid == key.pod)
            .then_some((injection, fault))
    }

    /// The container that an entry is about, as the API shows it now.
    fn container_id(&self, key: &Key) -> Option<&str> {
        let (_, fault) = self.fault(key)?;
        let target = fault.targets.iter().find(|t| t.pod_uid == key.pod)?;
        let container = target.containers.iter().find(|c| c.name == key.container)?;
        Some(&container.id)
    }

    /// Why nothing of this entry may be in place, if so.
    fn forbidden(&self, key: &Key) -> Option<Kill> {
        if self.stop == Some(true) {
            return Some(Kill::Stopped);
        }
        if !self.has_control_plane {
            return Some(Kill::NoControlPlane);
        }
        // Until the first listing nobody knows what is wanted; the journal's replay has ended
        // what the agent before had begun.
        self.injections.as_ref()?;
        match self.fault(key) {
            None => Some(Kill::Withdrawn),
            Some((injection, _)) if injection.spec.abort => Some(Kill::Aborted),
            Some(_) => None,
        }
    }
}

/// The entries that a target of a fault has: one, or one for each of its containers.
#[must_use]
pub fn keys(injection: &str, fault: &NodeFault, target: &NodeTarget) -> Vec<Key> {
    let key = |container: &str| Key {
        injection: injection.to_owned(),
        fault: fault.name.clone(),
        pod: target.pod_uid.clone(),
        container: container.to_owned(),
    };
    match fault.kind() {
        Some(NodeKind::Container(_)) if !target.containers.is_empty() => {
            target.containers.iter().map(|c| key(&c.name)).collect()
        }
        _ => vec![key("")],
    }
}
