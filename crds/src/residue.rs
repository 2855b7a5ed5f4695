//! What an audit finds: something of ours that should not exist any more.

use std::fmt;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Something that a fault left behind.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Residue {
    /// The node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node: String,
    /// What kind of thing: Table, Link, Process or JournalEntry.
    pub kind: ResidueKind,
    /// Its name there.
    pub name: String,
    /// The pod it belongs to, if any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// Whether it was removed. False: it is still there, and the node takes no new faults.
    pub removed: bool,
    /// Why it could not be removed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl Residue {
    /// Whether it and another are one thing, however it is with it by now. A look at the whole node
    /// does not say whose pod it is in.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let is_one_pod = self.pod == other.pod || self.pod.is_empty() || other.pod.is_empty();
        self.kind == other.kind && self.name == other.name && is_one_pod
    }
}

/// Whether anything is still there.
#[must_use]
pub fn has_left<'a>(found: impl IntoIterator<Item = &'a Residue>) -> bool {
    found.into_iter().any(|residue| !residue.removed)
}

/// A kind of thing that can be left behind.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub enum ResidueKind {
    /// An nftables table.
    Table,
    /// A network link.
    Link,
    /// A process.
    Process,
    /// An entry of the agent's journal that cannot be read.
    JournalEntry,
}

impl fmt::Display for ReclaimedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "Agent",
            Self::Kernel => "Kernel",
            Self::InjectorLease => "InjectorLease",
            Self::Journal => "Journal",
            Self::Deadline => "Deadline",
        })
    }
}

/// What took a fault back.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub enum ReclaimedBy {
    /// The agent ended it: its time was over, or it was told to.
    Agent,
    /// The kernel: the injector died, and all it held with it.
    Kernel,
    /// The injector's own lease: the agent had fallen silent.
    InjectorLease,
    /// A new agent, from the journal of the one before.
    Journal,
    /// The deadline on the injector's boot clock.
    Deadline,
}
