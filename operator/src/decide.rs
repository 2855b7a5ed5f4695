//! What to do about one experiment: pure. Plain data and `now` in, actions as data out.
//!
//! `phase` is the state machine; `draw` chooses targets, `guard` refuses, `plan` says what each
//! node should be asked, `kill` runs podKill faults, `rollup` makes the status from what the
//! nodes reported, `cleanup` from what they found left. None of them has a client, a clock, a log
//! or chance.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjection,
    injection::{NodeContainer, NodeFault},
};

use crate::{
    cluster::Candidate,
    peers::{PeerError, PeerSet},
};

mod cleanup;
#[cfg(test)]
mod container_tests;
mod draw;
mod ending;
mod fit;
#[cfg(test)]
mod fit_tests;
mod guard;
mod kill;
#[cfg(test)]
mod kill_tests;
mod needs;
mod notices;
mod phase;
mod plan;
#[cfg(test)]
mod residue_tests;
mod rollup;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trouble_tests;

pub use kill::{Attempt, Kill};
pub use needs::{Needs, is_undelivered, needs};

/// How long nodes may take to prepare.
pub const PREPARE: SignedDuration = SignedDuration::from_secs(30);
/// How long after its bound a fault may still be reported as in place: what the layers of
/// reclamation below the agent's need, with room for a slow node.
pub const BOUNDS: SignedDuration = SignedDuration::from_secs(10);

/// All that a decision may depend on.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The experiment, with its status.
    pub experiment: ChaosExperiment,
    /// The node injections that carry its uid.
    pub injections: Vec<NodeInjection>,
    /// The agents of all nodes that have one, or have had one.
    pub fleet: Fleet,
    /// The emergency stop is in force.
    pub stop: bool,
    /// Pods by the fault whose selector they match; only for the faults of [`Needs::candidates`].
    pub candidates: BTreeMap<String, Vec<Candidate>>,
    /// Uids of the namespace's pods, and whether they are on their way out; where
    /// [`Needs::pods`] asks for them.
    pub pods: Option<BTreeMap<String, PodPresence>>,
    /// The running containers of the namespace's pods by uid; where [`Needs::containers`] asks for
    /// them.
    pub containers: Option<BTreeMap<String, Vec<NodeContainer>>>,
    /// Resolved peers by fault; only for the faults of [`Needs::peers`].
    pub peers: BTreeMap<String, Result<PeerSet, PeerError>>,
    /// Addresses of the cluster's DNS, its Service's before its pods'; where [`Needs::cluster_dns`]
    /// asks for them.
    pub cluster_dns: Vec<std::net::IpAddr>,
    /// The last try of this replica to remove a pod, by the pod's uid.
    pub attempts: BTreeMap<String, Attempt>,
    /// How this pass's reads or else this replica's last pass failed, if they did.
    pub trouble: Option<Trouble>,
    /// What the installation allows.
    pub policy: Policy,
}

/// How the passes of this replica fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// What went wrong last.
    pub message: String,
    /// Since when no pass went well, and all failed in this way.
    pub since: Timestamp,
    /// Why the pass could not read all that it needs, if that is how it failed.
    pub unread: Option<Unread>,
}

impl Trouble {
    /// Trouble that comes after this: one of the same kind has lasted since it began.
    pub(crate) fn after(mut self, before: Option<&Self>) -> Self {
        if let Some(before) = before.filter(|before| before.unread == self.unread) {
            self.since = before.since;
        }
        self
    }
}

/// Why something could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// As it happens: the API server is busy, or does not answer.
    Failed,
    /// It is not allowed; it may be once rights have come into force.
    Forbidden,
    /// The API server cannot make sense of what it was asked.
    Senseless,
}

/// A pod that still exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPresence {
    /// It is there.
    There,
    /// It was asked to end.
    Leaving,
}

/// What the installation allows and wants.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The release namespace.
    pub release_namespace: String,
    /// Namespaces whose pods are never hit, besides the release's own.
    pub protected_namespaces: BTreeSet<String>,
    /// Most pods that one experiment may hit.
    pub max_targets: usize,
    /// How long after the end nodes are checked again.
    pub recheck_after: SignedDuration,
    /// How long an agent without a control plane keeps its faults.
    pub control_plane_grace: SignedDuration,
}

/// The nodes' agents by node name.
pub type Fleet = BTreeMap<String, Agent>;

/// A node's agent as the operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agent {
    /// Its last heartbeat is not older than it may be, by the operator's own clock.
    pub live: bool,
    /// Nothing of an ended fault is left on the node.
    pub clean: bool,
    /// Its version is one that this operator knows.
    pub known_version: bool,
    /// Its version.
    pub version: String,
    /// Packets matched so far, by experiment uid and fault.
    pub matched: BTreeMap<(String, String), i64>,
    /// What faults on containers were measured to do, by experiment uid and fault.
    pub effects: BTreeMap<(String, String), BTreeMap<String, i64>>,
}

impl Agent {
    /// Why the node takes no new faults, if it does not.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        if !self.live {
            Some("its agent is silent".to_owned())
        } else if !self.known_version {
            Some(format!(
                "its agent has the unknown version {}",
                self.version
            ))
        } else if !self.clean {
            Some("residue of an earlier fault is left on it".to_owned())
        } else {
            None
        }
    }
}

/// What to do, in this order; where one action fails, those of other kinds behind it are not
/// tried, but the user is told. Aborts and the finalizer's end hold up nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// The actions.
    pub actions: Vec<Action>,
    /// When to look again even if nothing is seen to change.
    pub wake_at: Option<Timestamp>,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Put the finalizer on the experiment.
    AddFinalizer,
    /// Take it off.
    RemoveFinalizer,
    /// Write the experiment's status.
    WriteStatus(Box<ChaosExperimentStatus>),
    /// Create a node injection.
    Create(Box<NodeInjection>),
    /// Change a node injection.
    Patch {
        /// Its name.
        name: String,
        /// The version that this was decided on.
        resource_version: Option<String>,
        /// What to change.
        change: Change,
    },
    /// Delete a node injection.
    Delete {
        /// Its name.
        name: String,
        /// Its uid.
        uid: Option<String>,
    },
    /// Delete or evict a pod.
    Kill(kill::Kill),
    /// Delete the experiment: its time to live is over.
    DeleteExperiment,
    /// Tell the user.
    Notify(Notice),
}

impl Action {
    /// It ends a node's part.
    #[must_use]
    pub fn is_abort(&self) -> bool {
        matches!(
            self,
            Self::Patch {
                change: Change::Abort,
                ..
            }
        )
    }
}

/// A change of a node injection's spec.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Let the clock run from this moment.
    Start(Timestamp),
    /// End everything.
    Abort,
    /// The faults with other targets or peers.
    Faults(Vec<NodeFault>),
}

/// An event on the experiment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Something is not as it should be.
    pub warning: bool,
    /// One word.
    pub reason: String,
    /// One sentence.
    pub note: String,
}

/// Decides what to do about an experiment.
#[must_use]
pub fn decide(observed: &Observed, now: Timestamp) -> Decision {
    phase::decide(observed, now)
}
