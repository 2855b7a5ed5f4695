//! One fault of an experiment: its window, its targets and its kind.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{KubeSchema, core::Rule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    container::{ContainerKill, ContainerPause},
    disk::DiskFill,
    io::IoFault,
    network::NetworkFault,
    only,
    stress::{CpuFault, MemoryFault},
    units::{GoDuration, Percent, at_most, positive, whole_seconds},
};

/// The fields of [`Fault`] of which exactly one must be set.
pub const KINDS: [&str; 8] = [
    "network",
    "podKill",
    "cpu",
    "memory",
    "io",
    "diskFill",
    "containerKill",
    "containerPause",
];

/// Those of [`KINDS`] that act on containers rather than on whole pods.
pub const CONTAINER_KINDS: [&str; 6] = [
    "cpu",
    "memory",
    "io",
    "diskFill",
    "containerKill",
    "containerPause",
];

/// One fault: when, on which pods, and what. Exactly one kind must be set.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = exactly_one_kind(), validation = one_shot_takes_no_duration())]
#[x_kube(validation = containers_go_with_container_kinds())]
pub struct Fault {
    /// The fault's name, of its own within the experiment. It is part of what the draw of targets
    /// depends on.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub name: String,

    /// When the fault begins, counted from the start of the run. Default: 0s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_most("24h"))]
    pub start_after: Option<GoDuration>,

    /// How long the fault lasts. Default: to the end of the run. Faults that happen once
    /// (podKill, containerKill without `every`) take none: their window closes when every drawn
    /// target was hit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = positive(), validation = at_most("24h"))]
    pub duration: Option<GoDuration>,

    /// Which pods the fault is for.
    pub target: Target,

    /// Bad network: packets of the target's network namespace are delayed, lost, duplicated,
    /// corrupted, reordered or slowed down, by peer, port and direction. At least one of delay, loss,
    /// duplicate, corrupt, reorder and bandwidth; any mix of them acts together on the same packets.
    /// Or partition, or reset, by itself. The pod's own traffic control is not touched; loopback, ARP
    /// and IPv6 neighbour discovery are never hit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkFault>,

    /// Kill pods: each drawn pod is deleted or evicted, once, when the fault begins. The pods are
    /// drawn at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_kill: Option<PodKill>,

    /// Burn CPU time of a container: a share of its own limit, inside its own control group. The
    /// container and the burner share what the container may use, and nobody else is starved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuFault>,

    /// Hold memory of a container: against its own limit, inside its own control group. It is what
    /// the container cannot have. Exactly one of size and percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFault>,

    /// Bad disk: calls of a container on one of its volumes hang, are late, or fail. Exactly one of
    /// hang, latency and error. Other containers, other pods on the same volume, and the node are not
    /// touched. When the fault ends, calls that hang go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<IoFault>,

    /// Full disk: space on the file system of one of a container's volumes is taken, by a file that
    /// has no name and is gone with the fault. Exactly one of size and percent. Everybody who writes
    /// to that file system meets it, through whatever mount. It must be one of the node's own (ext4,
    /// xfs, btrfs, f2fs, tmpfs); a disk that the node itself needs, as below an emptyDir, is filled
    /// only where the chart's value `agent.fillNodeDisk` allows it, and a fifth of it always stays
    /// free. No more is taken than the pod may store there itself: the emptyDir's sizeLimit, the
    /// containers' ephemeral-storage limits. What is taken of a volume in memory is memory of the
    /// container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_fill: Option<DiskFill>,

    /// Send a container's first process a signal, SIGKILL by default, once or every so often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_kill: Option<ContainerKill>,

    /// Stop every thread of a container; all go on when the fault ends. Programs that are started in
    /// it meanwhile are stopped too. Probes fail as they would, and may have the container restarted:
    /// the fault follows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_pause: Option<ContainerPause>,
}

/// What a fault does, with the kind's own settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind<'a> {
    /// Packets are impaired.
    Network(&'a NetworkFault),
    /// Pods are deleted or evicted.
    PodKill(&'a PodKill),
    /// CPU time is burnt.
    Cpu(&'a CpuFault),
    /// Memory is held.
    Memory(&'a MemoryFault),
    /// Calls on a volume hang, are late, or fail.
    Io(&'a IoFault),
    /// A volume's file system is filled.
    DiskFill(&'a DiskFill),
    /// A container's first process is sent a signal.
    ContainerKill(&'a ContainerKill),
    /// A container's threads are stopped.
    ContainerPause(&'a ContainerPause),
}

impl Kind<'_> {
    /// Agents carry it out, rather than the operator.
    #[must_use]
    pub const fn is_on_node(self) -> bool {
        !matches!(self, Self::PodKill(_))
    }

    /// It acts on containers, and follows them through restarts.
    #[must_use]
    pub const fn is_on_containers(self) -> bool {
        !matches!(self, Self::PodKill(_) | Self::Network(_))
    }
}

impl Fault {
    /// The fault's kind; `None` where not exactly one is set, which the CRD refuses.
    #[must_use]
    pub fn kind(&self) -> Option<Kind<'_>> {
        only([
            self.network.as_ref().map(Kind::Network),
            self.pod_kill.as_ref().map(Kind::PodKill),
            self.cpu.as_ref().map(Kind::Cpu),
            self.memory.as_ref().map(Kind::Memory),
            self.io.as_ref().map(Kind::Io),
            self.disk_fill.as_ref().map(Kind::DiskFill),
            self.container_kill.as_ref().map(Kind::ContainerKill),
            self.container_pause.as_ref().map(Kind::ContainerPause),
        ])
    }
}

fn exactly_one_kind() -> Rule {
    let set: Vec<String> = KINDS
        .iter()
        .map(|kind| format!("has(self.{kind})"))
        .collect();
    Rule::new(format!("[{}].filter(x, x).size() == 1", set.join(", "))).message(
        format!(
            "exactly one kind of fault must be set, of: {}",
            KINDS.join(", ")
        )
        .as_str(),
    )
}

fn one_shot_takes_no_duration() -> Rule {
    Rule::new(
        "!has(self.duration) || !(has(self.podKill) || has(self.containerKill) && !has(self.containerKill.every))",
    )
    .message("podKill and containerKill without every happen once and take no duration")
    .field_path(".duration")
}

fn containers_go_with_container_kinds() -> Rule {
    let set: Vec<String> = CONTAINER_KINDS
        .iter()
        .map(|kind| format!("has(self.{kind})"))
        .collect();
    Rule::new(format!(
        "!has(self.target.containers) || {}",
        set.join(" || ")
    ))
    .message(
        format!(
            "containers goes with faults on containers: {}",
            CONTAINER_KINDS.join(", ")
        )
        .as_str(),
    )
    .field_path(".target.containers")
}

/// Which pods of the experiment's own namespace a fault is for.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.count) && has(self.percent))")
    .message("count and percent exclude each other").field_path(".percent"))]
pub struct Target {
    /// Labels of the pods. Must not be empty. A pod counts when it is Running and Ready at the
    /// moment of selection; a pod that replaces it later is not followed.
    #[schemars(schema_with = "crate::selector::schema")]
    pub selector: LabelSelector,

    /// How many of the selected pods. More than there are is refused, with both numbers.
    /// Default, where `percent` is not set either: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub count: Option<u32>,

    /// Which share of the selected pods, over all nodes: above 0, to 100. Rounds up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Option<Percent>,

    /// The names of the containers that a fault on containers is for; each drawn pod must have all
    /// of them running. A container that restarts meanwhile is followed. Default: the one that the
    /// annotation kubectl.kubernetes.io/default-container names, else the pod's first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 16), inner(length(min = 1, max = 63)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub containers: Vec<String>,
}

/// How pods are killed.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodKill {
    /// How long a pod may take to end by itself before it is killed, in whole seconds.
    /// 0s is a force delete: the object is gone at once, whatever the node still runs.
    /// Default: the pod's own terminationGracePeriodSeconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_most("24h"), validation = whole_seconds())]
    pub grace_period: Option<GoDuration>,

    /// Delete removes the pod regardless of any PodDisruptionBudget. Evict asks the eviction API,
    /// which respects it; an eviction that the budget forbids is tried again until the end of
    /// the run, and then reported.
    #[serde(default)]
    pub method: KillMethod,
}

/// How a pod is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum KillMethod {
    /// Delete the pod.
    #[default]
    Delete,
    /// Evict the pod through the eviction API.
    Evict,
}
