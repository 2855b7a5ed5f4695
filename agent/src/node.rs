//! This node as the agent holds it: the journal, the injectors, what the API server said, and
//! what is remembered between passes. `observe` makes the plain view that decisions are made on.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    time::Duration,
};

use jiff::Timestamp;
use windtunnel_crds::{
    NodeInjection,
    injection::{NodeKind, TargetState},
    node_agent::Capability,
    residue::{Residue, ResidueKind, has_left},
};

use crate::{
    api::Sighting,
    decide::{DESERTED, Kill, LINGER, Observed, Preparation, Reported, Unwritten},
    journal::{Journal, JournalError, SetAside},
    kernel::{
        link::{LinkError, RouteSocket},
        netns::{NetNs, NetNsError},
        proc::{Proc, ProcError, boottime},
    },
    metrics::Metrics,
    model::{Key, State, Sweep},
    probe, replay,
    supervisor::{Leave, Supervisor},
    targets::{Places, is_alive, is_deserted},
};

/// Where kube-proxy in IPVS mode has the addresses of Services.
const SERVICES: &str = "kube-ipvs0";
/// How often the node's addresses and its targets' processes are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What is known from the API server.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The injections of this node by uid; `None` until they were listed.
    pub injections: Option<BTreeMap<String, NodeInjection>>,
    /// The emergency stop is in force; `None` until that was looked up.
    pub stop: Option<bool>,
    /// When the operator's lease was last seen to change, on the boot clock.
    pub lease_seen: Option<Duration>,
    /// Who held it then, and when its holder had renewed it.
    renewal: Option<(String, Timestamp)>,
    /// When a fresh listing of the own injections last succeeded, on the boot clock.
    pub listed: Option<Duration>,
    /// How far the node's clock is ahead of the operator's, in milliseconds.
    pub clock_offset: Option<i64>,
}

impl Known {
    /// Takes a sighting of the operator's lease into account. Only a change is a sign of life: what
    /// a watch lists when it begins anew may be a dead operator's.
    pub fn see_lease(&mut self, sighting: &Sighting) {
        let renewal = (sighting.holder.clone(), sighting.renewed);
        if self.renewal.as_ref() != Some(&renewal) {
            self.renewal = Some(renewal);
            self.lease_seen = self.lease_seen.max(Some(sighting.at));
        }
    }
}

/// Settings of this agent.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the node's own files are seen.
    pub places: Places,
    /// How long faults are kept without a control plane.
    pub grace: Duration,
    /// Disks that the node itself needs may be filled, but for a reserve.
    pub fill_node_disk: bool,
}

/// The node.
#[derive(Debug)]
pub struct Node {
    pub(crate) settings: Settings,
    pub(crate) boot_id: String,
    pub(crate) journal: Journal,
    pub(crate) supervisor: Supervisor,
    pub(crate) known: Known,
    pub(crate) kills: BTreeMap<Key, Kill>,
    /// Why injectors could not be started.
    pub(crate) unstarted: BTreeMap<Key, String>,
    /// Faults that are due and cannot be written down.
    pub(crate) unwritten: BTreeMap<Key, Unwritten>,
    pub(crate) preparations: BTreeMap<String, Preparation>,
    pub(crate) reports: BTreeMap<String, Reported>,
    pub(crate) set_aside: Vec<SetAside>,
    /// The last look at the whole node.
    pub(crate) sweep: Option<Sweep>,
    pub(crate) metrics: Metrics,
    /// When injectors were first killed, on the boot clock.
    pub(crate) killed_at: BTreeMap<Key, Duration>,
    /// Since when something of an ended fault has been dying, on the boot clock.
    pub(crate) dying: BTreeMap<Key, Duration>,
    /// When containers are looked for again whose volumes do not answer, on the boot clock.
    pub(crate) follow_after: BTreeMap<Key, Duration>,
    /// What this node's kernel can do.
    pub(crate) capabilities: Vec<Capability>,
    addresses: Vec<IpAddr>,
    /// Since when targets have had no process, on the boot clock.
    deserted: BTreeMap<Key, Duration>,
    /// Targets that were found to be gone, and whose pod has processes again.
    revived: Vec<Key>,
    looked_at: Option<Duration>,
}

impl Node {
    /// Takes the node over: opens the journal in `directory`, and ends what the agent before had begun,
    /// before anything else that may take its time.
    ///
    /// # Errors
    /// Where the journal or the boot id cannot be read.
    pub fn new(settings: Settings, directory: &Path, metrics: Metrics) -> Result<Self, NodeError> {
        let (journal, set_aside) = Journal::open(directory)?;
        for file in &set_aside {
            tracing::warn!(
                name = file.name,
                message = file.message,
                "a journal entry was set aside"
            );
        }
        let mut node = Self {
            boot_id: settings.places.proc.boot_id()?,
            settings,
            journal,
            supervisor: Supervisor::default(),
            known: Known::default(),
            kills: BTreeMap::new(),
            unstarted: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            preparations: BTreeMap::new(),
            reports: BTreeMap::new(),
            set_aside,
            sweep: None,
            metrics,
            killed_at: BTreeMap::new(),
            dying: BTreeMap::new(),
            follow_after: BTreeMap::new(),
            capabilities: Vec::new(),
            addresses: Vec::new(),
            deserted: BTreeMap::new(),
            revived: Vec::new(),
            looked_at: None,
        };
        replay::replay(&mut node, now()?);
        Ok(node)
    }

    /// The node with what its kernel was found to be able to do.
    #[must_use]
    pub fn with_capabilities(self, capabilities: Vec<Capability>) -> Self {
        Self {
            capabilities,
            ..self
        }
    }

    /// The node with its process that looks at what targets control: no run waits for its start.
    #[must_use]
    pub fn ready_to_look(mut self) -> Self {
        let program = self.supervisor.program().to_owned();
        // It is started again when it is needed.
        if let Err((_, message)) = self.supervisor.looks().open(&program) {
            tracing::warn!(message, "there is no process to look at targets");
        }
        self
    }

    /// Whether this kernel was found to be able to do something.
    pub(crate) fn has(&self, name: &str) -> bool {
        let mut capabilities = self.capabilities.iter();
        capabilities.any(|c| c.name == name && c.available)
    }

    /// Takes in what was found to work by now.
    pub(crate) fn learn(&mut self, capability: Capability) {
        let mut all = self.capabilities.iter_mut();
        if let Some(known) = all.find(|known| known.name == capability.name) {
            tracing::info!(name = capability.name, "this node can do what it could not");
            *known = capability;
        }
    }

    /// Whether a kind of fault can be injected here, as was tried last.
    ///
    /// # Errors
    /// A reason and a sentence.
    pub(crate) fn can(&self, kind: NodeKind<'_>) -> Result<(), (&'static str, String)> {
        let name = probe::name(kind);
        match self.capabilities.iter().find(|c| c.name == name) {
            Some(tried) if !tried.available => Err((
                "KernelFeature",
                format!("this node cannot do {name}: {}", tried.message),
            )),
            _ => Ok(()),
        }
    }

    /// The node with other injectors than this very program.
    #[must_use]
    pub fn with_supervisor(self, supervisor: Supervisor) -> Self {
        Self { supervisor, ..self }
    }

    /// Looks at what changes by itself: the node's addresses, whether targets still live, and
    /// whether the journal takes what it could not.
    pub fn look(&mut self, now: Duration) {
        if self.looked_at.is_some_and(|at| now < at + LOOK) {
            return;
        }
        self.looked_at = Some(now);
        self.journal.flush();
        let live = self
            .journal
            .entries()
            .values()
            .filter(|e| !matches!(e.state, State::Ended(_)));
        let empty: BTreeSet<Key> = live
            .clone()
            .filter(|e| is_deserted(&e.pod_cgroup))
            .map(|e| e.key.clone())
            .collect();
        if live.count() > 0 {
            match node_addresses(&self.settings.places.proc) {
                Ok(addresses) => self.addresses = addresses,
                Err(error) => tracing::warn!(%error, "cannot read the node's addresses"),
            }
        }
        let injectors = self.supervisor.live();
        let gone = self.journal.entries().values().filter(|e| {
            let is_gone = match e.ended() {
                Some(ended) => ended.outcome == TargetState::Gone,
                None => injectors
                    .get(&e.key)
                    .is_some_and(|i| i.leave == Some(Leave::PodEnded)),
            };
            is_gone && e.window.is_some_and(|window| now < window.end)
        });
        let revived = gone.filter(|e| is_alive(&e.pod_cgroup));
        self.revived = revived.map(|e| e.key.clone()).collect();
        self.deserted.retain(|key, _| empty.contains(key));
        for key in empty {
            self.deserted.entry(key).or_insert(now);
        }
    }

    /// The node's own addresses; read at once where they were never needed before.
    pub(crate) fn addresses(&mut self) -> &[IpAddr] {
        if self.addresses.is_empty() {
            match node_addresses(&self.settings.places.proc) {
                Ok(addresses) => self.addresses = addresses,
                Err(error) => tracing::warn!(%error, "cannot read the node's addresses"),
            }
        }
        &self.addresses
    }

    /// The plain view for a pass at `now`, with what is to be remembered of it.
    pub fn observe_pass(&mut self, now: Duration) -> Observed {
        let mut observed = self.observe(now);
        observed.note_pending(now);
        self.reports.clone_from(&observed.reports);
        observed
    }

    /// The plain view of the node at `now`.
    #[must_use]
    pub fn observe(&self, now: Duration) -> Observed {
        let fresh = |at: Option<Duration>| at.is_some_and(|at| now <= at + self.settings.grace);
        Observed {
            boot_id: self.boot_id.clone(),
            injections: self.known.injections.clone(),
            stop: self.known.stop,
            has_control_plane: fresh(self.known.lease_seen) && fresh(self.known.listed),
            clock_offset: self.known.clock_offset,
            sweep: self.sweep.clone(),
            entries: self.journal.entries().clone(),
            live: self.supervisor.live(),
            kills: self.kills.clone(),
            unstarted: self.unstarted.clone(),
            unwritten: self.unwritten.clone(),
            deserted: self
                .deserted
                .iter()
                .filter(|(key, since)| now >= **since + self.patience(key))
                .map(|(key, _)| key.clone())
                .collect(),
            revived: self.revived.clone(),
            preparations: self.preparations.clone(),
            reports: self.reports.clone(),
            node_addresses: self.addresses.clone(),
            is_unclean: has_left(&self.residue()),
        }
    }

    /// For how long a pod has no process before it is gone.
    fn patience(&self, key: &Key) -> Duration {
        let entry = self.journal.entries().get(key);
        if entry.is_some_and(|entry| entry.pod_cgroup.exists()) {
            LINGER
        } else {
            DESERTED
        }
    }

    /// Forgets what belongs to injections that are gone.
    pub fn tidy(&mut self) {
        let Some(injections) = &self.known.injections else {
            return;
        };
        self.preparations
            .retain(|uid, _| injections.contains_key(uid));
        self.reports.retain(|uid, _| injections.contains_key(uid));
        let entries = self.journal.entries();
        let is_open = |key: &Key| entries.get(key).is_some_and(|e| e.ended().is_none());
        self.kills.retain(|key, _| is_open(key));
        self.unstarted.retain(|key, _| is_open(key));
        self.unwritten.retain(|key, _| is_open(key));
        self.follow_after.retain(|key, _| is_open(key));
        self.dying.retain(|key, _| entries.contains_key(key));
    }

    /// What is left of ended faults, and what cannot be read of the journal.
    #[must_use]
    pub fn residue(&self) -> Vec<Residue> {
        let ended = self.journal.entries().values().filter_map(|e| e.ended());
        let mut residue: Vec<Residue> = ended.flat_map(|e| e.residue.clone()).collect();
        residue.extend(self.sweep.iter().flat_map(|s| s.residue.clone()));
        // What such an entry spoke of may be there until the whole node was looked at.
        let is_looked_for = self.sweep.as_ref().is_some_and(Sweep::is_complete);
        residue.extend(self.set_aside.iter().map(|file| Residue {
            node: String::new(),
            kind: ResidueKind::JournalEntry,
            name: file.name.clone(),
            pod: String::new(),
            removed: is_looked_for,
            message: file.message.clone(),
        }));
        residue
    }
}

/// The two clocks, read together.
///
/// # Errors
/// Where the boot clock cannot be read.
pub fn now() -> Result<crate::decide::Now, ProcError> {
    Ok(crate::decide::Now {
        boot: boottime()?,
        wall: Timestamp::now(),
    })
}

/// Every address of every link of the node's own namespace: probes come from any of them. The link on
/// which kube-proxy in IPVS mode has the addresses of all Services is none of the node's.
fn node_addresses(proc: &Proc) -> Result<Vec<IpAddr>, AddressError> {
    let netns = NetNs::of_pid(proc, 1)?;
    let mut route = RouteSocket::open(&netns)?;
    let links = route.links()?;
    let services = links.iter().find(|link| link.name == SERVICES);
    let mut addresses: Vec<IpAddr> = route
        .addresses()?
        .into_iter()
        .filter(|a| services.is_none_or(|link| link.index != a.link))
        .map(|a| a.address.addr())
        .filter(|a| !a.is_loopback())
        .collect();
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}

/// Why the node's own addresses cannot be read.
#[derive(Debug, thiserror::Error)]
enum AddressError {
    #[error("the node's network namespace")]
    NetNs(#[from] NetNsError),
    #[error("its links")]
    Links(#[from] LinkError),
}

/// Why the agent cannot take its node over.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The journal cannot be used.
    #[error("no journal")]
    Journal(#[from] JournalError),
    /// `/proc` cannot be read.
    #[error("no boot id")]
    Proc(#[from] ProcError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lease_that_changes_is_a_sign_of_life() {
        let mut known = Known::default();
        let second = Duration::from_secs;
        // Holder, when it was renewed, when it was seen, and the last sign of life by then.
        for (holder, renewed, at, expected) in [
            ("a", 10, 1, 1),
            ("a", 10, 8, 1),
            ("a", 12, 9, 9),
            ("a", 12, 90, 9),
            ("b", 12, 91, 91),
        ] {
            known.see_lease(&Sighting {
                holder: holder.to_owned(),
                renewed: Timestamp::from_second(renewed).unwrap(),
                arrived: Timestamp::UNIX_EPOCH,
                at: second(at),
                is_live: false,
            });
            assert_eq!(known.lease_seen, Some(second(expected)), "{holder} at {at}");
        }
    }
}
