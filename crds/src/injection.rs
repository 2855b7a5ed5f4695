//! `NodeInjection`: what the operator asks of one node's agent, and what the agent reports.
//! Internal; it lives in the release namespace. Absent means: take everything back.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    container::{ContainerKill, ContainerPause},
    disk::DiskFill,
    io::IoFault,
    network::{Bandwidth, Chance, Delay, Direction, Loss, NetworkFault, Reorder, Reset, Spare},
    only,
    peers::PortRange,
    stress::{CpuFault, MemoryFault},
    units::{GoDuration, Percent},
};

mod report;

pub use report::{Audit, InjectionPhase, NodeInjectionStatus, TargetState, TargetStatus};

/// The reason of a target that its agent took back, or refused, because of the emergency stop.
pub const EMERGENCY_STOP: &str = "EmergencyStop";

/// The part of an experiment that one node carries. Internal: written by the operator, reported
/// on by that node's agent.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "windtunnel.dev",
    version = "v1alpha1",
    kind = "NodeInjection",
    namespaced,
    shortname = "inj",
    category = "windtunnel",
    derive = "PartialEq",
    status = "NodeInjectionStatus",
    selectable = ".spec.nodeName",
    doc = "The part of an experiment that one node carries. Internal: written by the operator, reported on by that node's agent.",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(
        name = "Namespace",
        type_ = "string",
        json_path = ".spec.experiment.namespace"
    ),
    printcolumn(
        name = "Experiment",
        type_ = "string",
        json_path = ".spec.experiment.name"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.message",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(oldSelf.startTime) || (has(self.startTime) && self.startTime == oldSelf.startTime)")
    .message("startTime is written once").field_path(".startTime"))]
pub struct NodeInjectionSpec {
    /// The node.
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("immutable"))]
    pub node_name: String,
    /// Whose part it is.
    #[x_kube(validation = Rule::new("self == oldSelf").message("immutable"))]
    pub experiment: ExperimentRef,
    /// The hard bound of the whole run.
    pub duration: GoDuration,
    /// The moment from which offsets count; unset until every node is prepared. Written once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,
    /// End everything now.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self || !oldSelf").message("an abort cannot be taken back"))]
    pub abort: bool,
    /// Check, report, touch nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// How long after the last fault's end the node is checked again.
    pub recheck_after: GoDuration,
    /// Addresses of the cluster's DNS service and its pods, for faults that spare it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub cluster_dns: Vec<Address>,
    /// The faults that have targets on this node.
    #[schemars(length(max = 32))]
    pub faults: Vec<NodeFault>,
}

/// An IPv4 or IPv6 address.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub struct Address(#[schemars(with = "String")] pub IpAddr);

/// An experiment's identity.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExperimentRef {
    /// Namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Uid.
    #[schemars(length(max = 64))]
    pub uid: String,
}

/// A fault's part on one node, with all that only the cluster knew filled in.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeFault {
    /// The fault's name in the experiment.
    pub name: String,
    /// When it begins, after the start of the run.
    pub start_after: GoDuration,
    /// How long it lasts; it never passes the end of the run.
    pub duration: GoDuration,
    /// Its targets on this node.
    #[schemars(length(max = 1000))]
    pub targets: Vec<NodeTarget>,
    /// A network fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NodeNetworkFault>,
    /// A CPU fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuFault>,
    /// A memory fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFault>,
    /// An I/O fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<IoFault>,
    /// A disk fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_fill: Option<DiskFill>,
    /// A signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_kill: Option<ContainerKill>,
    /// A pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_pause: Option<ContainerPause>,
}

/// What a [`NodeFault`] does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NodeKind<'a> {
    /// Packets of the pod are impaired.
    Network(&'a NodeNetworkFault),
    /// Something is done to containers of the pod.
    Container(ContainerKind<'a>),
}

/// What is done to a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerKind<'a> {
    /// CPU time is burnt.
    Cpu(&'a CpuFault),
    /// Memory is held.
    Memory(&'a MemoryFault),
    /// Calls on a volume hang, are late, or fail.
    Io(&'a IoFault),
    /// A volume's file system is filled.
    DiskFill(&'a DiskFill),
    /// Its first process is sent a signal.
    Kill(&'a ContainerKill),
    /// Its threads are stopped.
    Pause(&'a ContainerPause),
}

impl NodeFault {
    /// What it does; `None` where not exactly one kind that is known here is set.
    #[must_use]
    pub fn kind(&self) -> Option<NodeKind<'_>> {
        only([
            self.network.as_ref().map(NodeKind::Network),
            self.cpu
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::Cpu(f))),
            self.memory
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::Memory(f))),
            self.io
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::Io(f))),
            self.disk_fill
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::DiskFill(f))),
            self.container_kill
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::Kill(f))),
            self.container_pause
                .as_ref()
                .map(|f| NodeKind::Container(ContainerKind::Pause(f))),
        ])
    }
}

/// A target pod.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTarget {
    /// The pod's name.
    pub pod_name: String,
    /// The pod's uid.
    pub pod_uid: String,
    /// The ids of its containers, as the API shows them: `containerd://…`. For a fault on
    /// containers those that it is for; for others all that run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub containers: Vec<NodeContainer>,
}

/// A container of a target.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeContainer {
    /// The container's name in the pod.
    pub name: String,
    /// Its id, with the runtime's scheme: `containerd://…`.
    pub id: String,
    /// Where volumes are mounted in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub volume_mounts: Vec<String>,
    /// How many bytes the pod may store on the node's disk at a mount: its sizeLimit, or the
    /// ephemeral-storage limits of the pod's containers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub storage_limits: BTreeMap<String, i64>,
}

/// A network fault with its peers resolved to addresses.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkFault {
    /// What happens to packets.
    pub impairment: Impairment,
    /// Which way they go.
    pub direction: Direction,
    /// Whose packets: any of these groups. Unset: everybody's. Empty: nobody's, for now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub peers: Option<Vec<PeerGroup>>,
    /// The target's own ports. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub local_ports: Vec<PortRange>,
    /// What is left alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    pub spare: Vec<Spare>,
}

/// Peers that share a set of ports.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerGroup {
    /// Address ranges. Unset: any address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub addresses: Option<Vec<AddressRange>>,
    /// The peers' ports. Empty: any port and protocol.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub ports: Vec<PortRange>,
}

/// An address range in CIDR form.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub struct AddressRange(#[schemars(with = "String")] pub IpNet);

/// What happens to packets: the doses of a [`NetworkFault`].
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Impairment {
    /// Delay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,
    /// Loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<Loss>,
    /// Duplication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duplicate: Option<Chance>,
    /// Corruption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<Chance>,
    /// Reordering.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reorder: Option<Reorder>,
    /// Rate limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Connections are reset; nothing else is set then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<Reset>,
}

impl From<&NetworkFault> for Impairment {
    fn from(fault: &NetworkFault) -> Self {
        let NetworkFault {
            delay,
            loss,
            duplicate,
            corrupt,
            reorder,
            bandwidth,
            partition,
            reset,
            direction: _,
            peers: _,
            spare: _,
        } = fault.clone();
        // A cut cable is a link that loses everything.
        let all = || Loss {
            percent: Some(Percent::ALL),
            correlation: None,
            gilbert_elliott: None,
        };
        Self {
            delay,
            loss: loss.or_else(|| partition.map(|_| all())),
            duplicate,
            corrupt,
            reorder,
            bandwidth,
            reset,
        }
    }
}
