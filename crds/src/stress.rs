//! Faults that use up what a container may use.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::units::{ByteSize, Cores, GoDuration, Percent, at_most};

/// CPU time is burnt inside the container's own control group.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuFault {
    /// How much CPU time is burnt: a percentage of `cores`, above 0, to 100. It is what the burner
    /// itself uses, kept by measuring it; where the container is busy too, both get less.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub load: Percent,

    /// The number of cores that `load` is a percentage of: 500m, 2. Default: the container's CPU
    /// limit; a container without a limit is refused unless this is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
}

/// Memory is held inside the container's own control group.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.size) != has(self.percent)")
    .message("give either size or percent"))]
pub struct MemoryFault {
    /// How much is held: 64Mi, 1.5Gi. As much of it as fits: `effect.bytes` in the status says how
    /// much is. A tenth of the node's memory always stays available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<ByteSize>,

    /// How much is held, as a percentage of the container's memory limit, above 0, to 100; a
    /// container without a limit is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Option<Percent>,

    /// Over how long the memory is taken, evenly. Default: at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_most("24h"))]
    pub ramp: Option<GoDuration>,

    /// Go on where the limit is reached, and have the kernel kill: what holds the memory first, or
    /// the whole container where the node has it so (memory.oom.group, kubelet's default). Each such
    /// kill is counted, and what holds the memory is started again. Default: false; a twentieth of
    /// the limit, 16Mi at least, is left free then, and memory is given back when the container
    /// itself needs it. What the kernel keeps of files does not count as used: it is pushed out.
    #[serde(default)]
    pub oom_kill: bool,
}
