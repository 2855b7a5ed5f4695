//! What the agent knows of one fault on one target: plain data, written to the journal as it is.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use windtunnel_crds::{
    NodeInjection,
    injection::{ExperimentRef, NodeFault, TargetState},
    residue::{ReclaimedBy, Residue, has_left},
};

use crate::kernel::{
    link::LinkName,
    netns::NetNsId,
    nft::{Device, Direction},
    proc::ProcessId,
    qdisc::Netem,
};

/// The form of a journal entry. An agent reads its own form only; entries of any other are set aside
/// and reported.
pub const FORMAT: u32 = 1;

/// Which fault on which target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Uid of the node injection.
    pub injection: String,
    /// Name of the fault.
    pub fault: String,
    /// Uid of the pod.
    pub pod: String,
    /// Name of the container; empty for a fault on the whole pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container: String,
}

impl Key {
    /// The injection and the fault in it, by what the API shows of all injections; `None` where it is
    /// not there any more.
    #[must_use]
    pub fn meant<'a>(
        &self,
        injections: &'a BTreeMap<String, NodeInjection>,
    ) -> Option<(&'a NodeInjection, &'a NodeFault)> {
        let injection = injections.get(&self.injection)?;
        let mut faults = injection.spec.faults.iter();
        let fault = faults.find(|fault| fault.name == self.fault)?;
        Some((injection, fault))
    }
}

/// A fault on a target, from before the first change to the kernel until the last check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// [`FORMAT`].
    pub format: u32,
    /// Boot id of the kernel that all of this is about.
    pub boot_id: String,
    /// Which fault on which target.
    pub key: Key,
    /// Name of the node injection.
    pub injection_name: String,
    /// The experiment.
    pub experiment: ExperimentRef,
    /// Name of the pod.
    pub pod_name: String,
    /// Directory of the pod's control group.
    pub pod_cgroup: PathBuf,
    /// How long after the end the node is checked again.
    pub recheck_after: Duration,
    /// What it is done to, and what of it is built.
    #[serde(flatten)]
    pub objects: Objects,
    /// When it was prepared, on the boot clock.
    pub prepared_at: Duration,
    /// When the effect may be there; unset until the run has started.
    pub window: Option<Window>,
    /// What was counted on containers that have ended since.
    #[serde(default)]
    pub counts_before: Counts,
    /// When the effect was first read back on a container that has ended since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injected_before: Option<Timestamp>,
    /// How far it is.
    pub state: State,
}

/// What a fault acts on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Objects {
    /// The pod's network.
    Network(NetworkEntry),
    /// A container.
    Container(ContainerEntry),
}

/// A container, and what is done to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerEntry {
    /// Its id, with the runtime's scheme.
    pub id: String,
    /// Directory of its control group.
    pub cgroup: PathBuf,
    /// Its first process.
    pub init: ProcessId,
    /// What is done.
    pub act: Act,
    /// It has taken the place of a container that was hit.
    #[serde(default)]
    pub is_successor: bool,
}

/// What is done to a container, with all that was found out about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Act {
    /// CPU time is burnt.
    Cpu {
        /// So much, in thousandths of a core.
        millicores: u64,
    },
    /// Memory is held.
    Memory(MemoryAct),
    /// Calls on a volume are held, late or refused.
    Io(IoAct),
    /// A volume's file system is filled.
    Fill(FillAct),
    /// Its first process is sent a signal.
    Kill {
        /// Which.
        signal: i32,
        /// How long after the container is back, or after the last, another is sent.
        every: Option<Duration>,
    },
    /// Its threads are stopped.
    Pause,
}

/// Memory that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryAct {
    /// How much.
    pub bytes: u64,
    /// Over how long it is taken.
    pub ramp: Duration,
    /// How much may be used in the control group; `None`: the kernel may be brought to kill.
    pub most: Option<u64>,
    /// How much stays available on the node.
    pub spare: u64,
    /// The container has a limit.
    pub is_limited: bool,
}

/// Space that is taken of a volume's file system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FillAct {
    /// Where the volume is mounted in the container.
    pub volume: String,
    /// How much.
    pub until: Until,
    /// How many bytes stay available.
    pub reserve: u64,
    /// How many bytes the pod may store there itself.
    pub limit: Option<u64>,
}

/// Until when space is taken.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Until {
    /// So many bytes are.
    Size(u64),
    /// So many percent of the file system are in use.
    Percent(f64),
}

/// What is done to the calls on a volume.
#[expect(clippy::struct_excessive_bools, reason = "each is there by itself")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IoAct {
    /// Where the volume is mounted in the container.
    pub volume: String,
    /// Opens are hit.
    pub open: bool,
    /// Reads are hit.
    pub read: bool,
    /// Writes are hit.
    pub write: bool,
    /// They are hit on files that were open before, too.
    #[serde(default)]
    pub opened: bool,
    /// Which share of them, 0 to 100.
    pub percent: f64,
    /// What becomes of those.
    pub mode: IoMode,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IoMode {
    /// It does not return.
    Hang,
    /// It is held back.
    Latency {
        /// For so long,
        delay: Duration,
        /// more or less.
        jitter: Duration,
    },
    /// It fails with this errno.
    Error(i32),
}

impl Act {
    /// What this and another act on the same container would quarrel over, if anything.
    #[must_use]
    pub fn competes(&self, other: &Self) -> Option<&'static str> {
        match (self, other) {
            (Self::Cpu { .. }, Self::Cpu { .. }) => Some("the CPU time"),
            (Self::Io(IoAct { volume, .. }) | Self::Fill(FillAct { volume, .. }), other)
                if other.volume() == Some(volume) =>
            {
                Some("the volume")
            }
            (Self::Memory(_), Self::Memory(_)) => Some("the memory"),
            (Self::Pause, Self::Pause) => Some("the threads"),
            _ => None,
        }
    }

    /// The volume that it acts on, if it does.
    fn volume(&self) -> Option<&String> {
        match self {
            Self::Io(IoAct { volume, .. }) | Self::Fill(FillAct { volume, .. }) => Some(volume),
            _ => None,
        }
    }
}

/// The kernel objects of a network fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkEntry {
    /// The target's network namespace.
    pub netns: NetNsId,
    /// Name of the injector's table.
    pub table: String,
    /// Order of its chains among those of other faults on the target.
    pub priority: i32,
    /// The ways that packets take through an impairment.
    pub detours: Vec<Detour>,
    /// The target's links whose connections are reset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resets: Vec<Device>,
    /// The target's own name servers.
    pub name_servers: Vec<std::net::IpAddr>,
    /// How long packets can stay in an impairment after the last has entered it.
    pub drain: Duration,
}

/// One direction of one link of the target, and the ifb that its selected packets go through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Detour {
    /// The direction.
    pub direction: Direction,
    /// The target's link.
    pub device: Device,
    /// Name of the ifb.
    pub ifb: LinkName,
    /// Its index, once it is there.
    pub ifb_index: Option<u32>,
    /// Its queueing discipline.
    pub netem: Netem,
}

/// When an effect may be there, on the boot clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// From when.
    pub begin: Duration,
    /// Until when; never after the deadline of the run.
    pub end: Duration,
}

/// How far a fault on a target is.
#[expect(clippy::large_enum_variant, reason = "there is one a target")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum State {
    /// What is inert may be there; nothing has an effect.
    Prepared,
    /// An injector may be at work; whether the effect is there is not known.
    Injecting {
        /// The injector.
        injector: ProcessId,
    },
    /// The effect was read back.
    Injected {
        /// The injector.
        injector: ProcessId,
        /// When it was first read back.
        at: Timestamp,
    },
    /// The container ended, and the injector with it; a new container is waited for.
    Waiting {
        /// Since when, on the boot clock.
        since: Duration,
    },
    /// The injector is gone, and the effect with it.
    Ended(Ended),
}

/// How a fault on a target ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Recovered, Failed, Interrupted or Gone.
    pub outcome: TargetState,
    /// One word, where there is something to say.
    pub reason: String,
    /// One sentence.
    pub message: String,
    /// What took the effect back.
    pub reclaimed_by: Option<ReclaimedBy>,
    /// When the effect was first read back.
    pub injected_at: Option<Timestamp>,
    /// When it was known to be gone.
    pub reverted_at: Timestamp,
    /// The same on the boot clock.
    pub ended_at: Duration,
    /// What the fault had met.
    pub counts: Counts,
    /// When the target was checked, and on the boot clock.
    pub checked: Option<(Timestamp, Duration)>,
    /// When it was checked again.
    pub rechecked: Option<Timestamp>,
    /// What the checks found.
    pub residue: Vec<Residue>,
}

/// A look at the whole node for what is ours and stands in no entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// When.
    pub at: Timestamp,
    /// The same on the boot clock.
    pub swept_at: Duration,
    /// What was found, by this look and those before it.
    pub residue: Vec<Residue>,
    /// What could not be looked at, if anything.
    pub unread: Option<String>,
}

impl Sweep {
    /// Everything was looked at, and nothing is left.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.unread.is_none() && !self.has_left()
    }

    /// Something that was found is still there.
    #[must_use]
    pub fn has_left(&self) -> bool {
        has_left(&self.residue)
    }
}

/// What a fault has met so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Packets that its rules selected.
    pub matched: u64,
    /// Packets that its queues dropped because they were full; unknown where the kernel does not
    /// tell them from packets that were to be lost.
    pub dropped: Option<u64>,
    /// What a fault on a container was measured to do, by the name of the counter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub effect: BTreeMap<String, u64>,
}

impl Counts {
    /// Names of what is counted, rather than measured anew each time.
    const COUNTED: [&str; 5] = ["asked", "cpuMilliseconds", "hit", "oomKills", "signals"];

    /// What a fault was measured to do, by the names of the counters.
    #[must_use]
    pub fn measured<const N: usize>(effect: [(&str, u64); N]) -> Self {
        Self {
            effect: effect.map(|(name, value)| (name.to_owned(), value)).into(),
            ..Self::default()
        }
    }

    /// These, and what was counted before.
    #[must_use]
    pub fn after(mut self, before: &Self) -> Self {
        for (name, value) in &before.effect {
            if Self::COUNTED.contains(&name.as_str()) {
                *self.effect.entry(name.clone()).or_default() += value;
            }
        }
        self
    }
}

impl Entry {
    /// The injector that may be at work.
    #[must_use]
    pub fn injector(&self) -> Option<ProcessId> {
        match &self.state {
            State::Injecting { injector } | State::Injected { injector, .. } => Some(*injector),
            State::Prepared | State::Waiting { .. } | State::Ended(_) => None,
        }
    }

    /// The container has ended, since then on the boot clock, and its injector with it: what that
    /// one had read back and counted is kept while a successor is waited for.
    pub fn outlive(&mut self, applied_at: Option<Timestamp>, counts: Counts, since: Duration) {
        self.injected_before = self.injected_at().or(applied_at);
        self.counts_before = counts.after(&self.counts_before);
        self.state = State::Waiting { since };
    }

    /// The network that it acts on, if it does.
    #[must_use]
    pub fn network(&self) -> Option<&NetworkEntry> {
        match &self.objects {
            Objects::Network(network) => Some(network),
            Objects::Container(_) => None,
        }
    }

    /// The container that it acts on, if it does.
    #[must_use]
    pub fn container(&self) -> Option<&ContainerEntry> {
        match &self.objects {
            Objects::Container(container) => Some(container),
            Objects::Network(_) => None,
        }
    }

    /// When the effect was first read back, if it was.
    #[must_use]
    pub fn injected_at(&self) -> Option<Timestamp> {
        match &self.state {
            State::Injected { at, .. } => self.injected_before.or(Some(*at)),
            _ => self.injected_before,
        }
    }

    /// How it ended, if it did.
    #[must_use]
    pub fn ended(&self) -> Option<&Ended> {
        match &self.state {
            State::Ended(ended) => Some(ended),
            _ => None,
        }
    }
}
