//! What a node's agent reports of its part of an experiment.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::residue::{ReclaimedBy, Residue};

/// What the agent has done and seen.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeInjectionStatus {
    /// Where the node is with it.
    #[serde(default)]
    pub phase: InjectionPhase,
    /// The boot id of the kernel that this status speaks of.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// The generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Why it is in this phase, as one word, where there is something to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The same in a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub message: String,
    /// Each target of each fault.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetStatus>,
    /// What the node was checked for after the last fault had ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Audit>,
}

/// Where a node is with its part of an experiment.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[schemars(inline)]
pub enum InjectionPhase {
    /// Not looked at yet.
    #[default]
    Pending,
    /// Every target can be injected; nothing is.
    Prepared,
    /// The clock runs.
    Running,
    /// Nothing is in place any more.
    Recovered,
    /// It was refused in Prepare; nothing was injected.
    Refused,
}

/// One target of one fault.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The fault's name.
    pub fault: String,
    /// The pod's name.
    pub pod_name: String,
    /// The pod's uid.
    pub pod_uid: String,
    /// Where the target is.
    pub state: TargetState,
    /// Why, as one word.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why, in a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When the effect was first read back from the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injected_at: Option<MicroTime>,
    /// When it was gone again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverted_at: Option<MicroTime>,
    /// When the fault ended early on one of the target's containers, while it goes on on others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupted_at: Option<MicroTime>,
    /// What took it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimed_by: Option<ReclaimedBy>,
    /// Packets that the fault's rules selected, as last read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_packets: Option<i64>,
    /// Packets dropped because the delay queue was full, as last read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_drops: Option<i64>,
    /// What the fault was measured to do, by the name of the counter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub effect: BTreeMap<String, i64>,
}

/// Where a target is.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[schemars(inline)]
pub enum TargetState {
    /// Nothing was done yet.
    #[default]
    Pending,
    /// It can be injected.
    Prepared,
    /// The effect was read back from the kernel.
    Injected,
    /// The effect has ended as planned.
    Recovered,
    /// It was never injected.
    Failed,
    /// The effect ended before its time.
    Interrupted,
    /// The target itself is gone.
    Gone,
}

impl TargetState {
    /// Nothing more will happen to the target.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(
            self,
            Self::Recovered | Self::Failed | Self::Interrupted | Self::Gone
        )
    }
}

/// An audit's outcome.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Audit {
    /// When the node was first checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_at: Option<MicroTime>,
    /// When it was checked again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rechecked_at: Option<MicroTime>,
    /// What was found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residue: Vec<Residue>,
}
