//! The status of a `ChaosExperiment`, written by the operator and nobody else.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::{KubeSchema, core::Rule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::residue::Residue;

/// What happened, as the nodes' kernels were seen to hold it. Written by windtunnel.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = write_once("startTime"), validation = write_once("deadline"))]
pub struct ChaosExperimentStatus {
    /// Where the run is: Pending, Preparing, Running, Recovering, then Completed, Failed or
    /// Aborted for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,

    /// The generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// When the targets were drawn and their nodes asked to prepare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_time: Option<MicroTime>,

    /// The moment from which every offset of the run counts. Written once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,

    /// The moment after which no fault exists: startTime + spec.duration. Written once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<MicroTime>,

    /// When the run was over: its last window had closed, or it was ended. Faults are taken back
    /// from then on at the latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_time: Option<MicroTime>,

    /// Prepared, Injected, Recovered, Clean and Finished.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// What `kubectl get` shows.
    #[serde(default)]
    pub summary: Summary,

    /// One sentence on where the run stands.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,

    /// Each fault's progress, in the order of the spec.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub faults: Vec<FaultStatus>,

    /// What the nodes were checked for after the faults ended, and what was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleanup: Option<Cleanup>,
}

fn write_once(field: &str) -> Rule {
    Rule::new(format!(
        "!has(oldSelf.{field}) || (has(self.{field}) && self.{field} == oldSelf.{field})"
    ))
    .message(format!("{field} is written once").as_str())
    .field_path(format!(".{field}"))
}

/// Where a run is.
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
pub enum Phase {
    /// Not looked at yet.
    #[default]
    Pending,
    /// Targets are drawn and being checked on their nodes; nothing is injected.
    Preparing,
    /// The clock runs.
    Running,
    /// The run is over; faults are being taken back.
    Recovering,
    /// Every window was opened, and every fault has ended as planned.
    Completed,
    /// Something did not happen as asked; the reason is in the conditions.
    Failed,
    /// Ended early by abort, deletion or the emergency stop.
    Aborted,
}

impl Phase {
    /// No phase follows this one.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Aborted)
    }
}

/// Columns of `kubectl get`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Targets injected so far, of all targets of all faults: "3/4".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub injected: String,
    /// Targets whose fault has ended, of those injected: "3/3".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub recovered: String,
    /// Whether the nodes were found clean: "", "Checked", "Rechecked", "Residue" or "Unknown".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub clean: String,
    /// The deadline, to the second.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub deadline: String,
}

/// The progress of one fault. Counts are cumulative over its targets.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(oldSelf.drawnAt) || (has(self.drawnAt) && self.drawnAt == oldSelf.drawnAt && has(self.draw) == has(oldSelf.draw) && (!has(self.draw) || self.draw == oldSelf.draw))")
    .message("a final draw is written once").field_path(".draw"))]
pub struct FaultStatus {
    /// The fault's name in the spec.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Where the fault is.
    #[serde(default)]
    pub phase: FaultPhase,
    /// How many targets it is to hit.
    #[serde(default)]
    pub desired: u32,
    /// How many it was seen to hit: read back from the kernel, or (podKill) from the API.
    #[serde(default)]
    pub injected: u32,
    /// How many of those it has ended on.
    #[serde(default)]
    pub recovered: u32,
    /// On how many it ended before its time.
    #[serde(default)]
    pub interrupted: u32,
    /// On how many it could not be injected.
    #[serde(default)]
    pub failed: u32,
    /// Packets that the fault's rules selected. Zero on an injected fault means that the fault is
    /// in place but met no traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_packets: Option<i64>,
    /// What a fault on containers was measured to do, summed over its targets: cpu: millicores
    /// (used in the last second) and cpuMilliseconds; io: asked, hit and waiting (calls);
    /// containerKill: signals; containerPause: threads;
    /// memory: bytes and oomKills; diskFill: bytes and freeBytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub effect: BTreeMap<String, i64>,
    /// Where the fault stands, in a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub message: String,
    /// What the reader should know of how the peers were chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub notes: Vec<String>,
    /// When the draw became final: at the start of the run, for podKill at the start of its window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drawn_at: Option<MicroTime>,
    /// The drawn pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2000))]
    pub draw: Vec<DrawnPod>,
}

/// Where a fault is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum FaultPhase {
    /// Its window is not open yet.
    #[default]
    Pending,
    /// Its window is open.
    Active,
    /// It has ended.
    Ended,
    /// It could not be injected, or ended before its time, on at least one target.
    Failed,
}

/// A drawn pod.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrawnPod {
    /// The pod's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The pod's uid.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The node it runs on.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node: String,
}

/// What took the faults back, what the nodes were checked for, and what was found.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cleanup {
    /// When the last node was first checked, right after its faults had ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_at: Option<MicroTime>,
    /// When the last node was checked again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rechecked_at: Option<MicroTime>,
    /// What was found, and what became of it. Empty: the nodes are as they were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residue: Vec<Residue>,
    /// What took the faults back, and on how many targets: Agent (at the end of its time, or as it
    /// was told), Kernel (their injector had died), InjectorLease (their agent was silent), Journal
    /// (by the agent after theirs), Deadline (by the injector's own clock).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reclaimed_by: BTreeMap<String, u32>,
    /// The nodes that were not heard of until the end, and not since. By the bounds of agent and
    /// kernel nothing is in place there, but nobody has looked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_reported: Vec<String>,
}
