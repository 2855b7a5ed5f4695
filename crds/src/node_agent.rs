//! `NodeAgent`: one node's agent, as it sees itself. Internal; written by that agent alone.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::residue::Residue;

/// The agent of one node. Internal: written by that agent; the fleet at a glance.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "windtunnel.dev",
    version = "v1alpha1",
    kind = "NodeAgent",
    namespaced,
    category = "windtunnel",
    derive = "PartialEq",
    status = "NodeAgentStatus",
    doc = "The agent of one node, as it sees itself. Internal: written by that agent alone.",
    printcolumn(name = "Version", type_ = "string", json_path = ".status.version"),
    printcolumn(name = "Kernel", type_ = "string", json_path = ".status.kernel"),
    printcolumn(name = "Faults", type_ = "string", json_path = ".status.summary"),
    printcolumn(name = "Injectors", type_ = "integer", json_path = ".status.injectors"),
    printcolumn(name = "Clean", type_ = "boolean", json_path = ".status.clean"),
    printcolumn(
        name = "Heartbeat",
        type_ = "date",
        json_path = ".status.heartbeatTime"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeAgentSpec {
    /// The node; the same as the object's name.
    pub node_name: String,
}

/// What the agent last said of itself.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeAgentStatus {
    /// When it said it; every 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_time: Option<MicroTime>,
    /// The agent's version.
    #[serde(default)]
    pub version: String,
    /// The node's kernel release.
    #[serde(default)]
    pub kernel: String,
    /// The boot id of the node's kernel.
    #[serde(default)]
    pub boot_id: String,
    /// What this node's kernel can do, found out by doing it at the agent's start; what failed
    /// is tried again, after a minute at first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<Capability>,
    /// The kinds of fault that can be injected here.
    #[serde(default)]
    pub summary: String,
    /// Injector processes alive.
    #[serde(default)]
    pub injectors: u32,
    /// Whether nothing of an ended fault is left. If false, the node takes no new faults.
    #[serde(default)]
    pub clean: bool,
    /// What is left of ended faults, and what audits found after the report's object was gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residue: Vec<Residue>,
    /// How far the node's clock is ahead of the operator's, in milliseconds; unset while unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_offset_millis: Option<i64>,
    /// Counters of the faults that are in place now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<FaultCounters>,
}

/// One thing that a kernel can or cannot do.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Capability {
    /// The kind of fault.
    pub name: String,
    /// Whether trying it worked.
    pub available: bool,
    /// What the kernel answered if not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What a fault on this node has met so far, over all its targets here.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultCounters {
    /// The experiment's uid.
    pub experiment_uid: String,
    /// The fault's name.
    pub fault: String,
    /// Packets that the fault's rules selected.
    pub matched_packets: i64,
    /// What the fault was measured to do, by the name of the counter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub effect: BTreeMap<String, i64>,
}
