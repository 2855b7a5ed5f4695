//! The I/O fault: calls on one volume of a container hang, are late, or fail.

use kube::{KubeSchema, core::Rule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{GoDuration, Percent, at_most, positive};

/// What happens to a container's calls on one of its volumes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.hang), has(self.latency), has(self.error)].filter(x, x).size() == 1")
    .message("exactly one of hang, latency and error must be set"))]
#[x_kube(validation = Rule::new("!has(self.operations) || !self.operations.exists(o, o == 'Write') || self.operations.exists(o, o == 'Read')")
    .message("Write goes with Read: the kernel asks about both alike").field_path(".operations"))]
pub struct IoFault {
    /// The volume: the path that it is mounted at in the container, as in its volumeMounts; or `/`
    /// for the container's own file system (its volumes are not hit then).
    #[schemars(
        length(min = 1, max = 1024),
        regex(pattern = r"^/([^/\x00]+(/[^/\x00]+)*)?$")
    )]
    pub volume: String,

    /// Which calls: Open (files and directories are opened), Read (what is open is read), Write
    /// (what is open is written; where the node's kernel and the volume's file system can tell, the
    /// fault's message says so if they cannot). Default: all of them. What is done on a file that was
    /// open before the fault began is hit only by kernels that ask about it, which those since Linux
    /// 6.14 do not; the fault's message says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 3))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub operations: Vec<IoOperation>,

    /// Which share of the calls, above 0, to 100. Default: 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Option<Percent>,

    /// Calls do not return until the fault ends. A process that hangs in one can be killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang: Option<IoHang>,

    /// Calls take longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<IoLatency>,

    /// Calls fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<IoError>,
}

/// A kind of call.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub enum IoOperation {
    /// A file or directory is opened.
    Open,
    /// A file or directory that is open is read.
    Read,
    /// A file that is open is written.
    Write,
}

/// Calls do not return.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoHang {}

/// Calls take longer.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = jitter_within_delay())]
pub struct IoLatency {
    /// How long each call is held back: above 0s, to 60s.
    #[x_kube(validation = positive(), validation = at_most("60s"))]
    pub delay: GoDuration,

    /// How far a call's delay may lie from `delay`, evenly, on either side. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_most("60s"))]
    pub jitter: Option<GoDuration>,
}

fn jitter_within_delay() -> Rule {
    let pattern = crate::units::DURATION_PATTERN;
    Rule::new(format!(
        "!has(self.jitter) || !self.jitter.matches(r'{pattern}') || !self.delay.matches(r'{pattern}') \
         || duration(self.jitter) <= duration(self.delay)"
    ))
    .message("jitter must not exceed delay")
    .field_path(".jitter")
}

/// Calls fail.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IoError {
    /// With what. EPERM is what every kernel can do; the others need Linux 6.14, and are refused
    /// where the node's kernel cannot.
    pub errno: IoErrno,
}

/// What a call fails with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum IoErrno {
    /// Operation not permitted.
    EPERM,
    /// Input/output error.
    EIO,
    /// Device or resource busy.
    EBUSY,
    /// Resource temporarily unavailable.
    EAGAIN,
    /// No space left on device.
    ENOSPC,
    /// Disk quota exceeded.
    EDQUOT,
}
