//! Faults on a container's processes: killed, or stopped for a while.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{GoDuration, at_least, at_most};

/// A signal is sent to the container's first process: once, or again and again.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerKill {
    /// Which signal. SIGKILL ends the container at once; the others do what the program makes of
    /// them. The first process of a container ignores those that it does not handle.
    #[serde(default)]
    pub signal: Signal,

    /// Send it again so long after the container is back (or, where it did not end, after the last
    /// one), until the fault's window closes: from 1s. Default: only once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_least("1s"), validation = at_most("24h"))]
    pub every: Option<GoDuration>,
}

/// A signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Signal {
    /// Ends the process; it cannot be handled.
    #[default]
    SIGKILL,
    /// Asks the process to end.
    SIGTERM,
    /// As if interrupted from a keyboard.
    SIGINT,
    /// As if asked to quit from a keyboard.
    SIGQUIT,
    /// As if the terminal were gone; often: read the settings again.
    SIGHUP,
    /// As if the program had given up.
    SIGABRT,
    /// As if it had touched memory that it must not.
    SIGSEGV,
    /// The program's own first.
    SIGUSR1,
    /// The program's own second.
    SIGUSR2,
}

/// Every thread of the container is stopped.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerPause {}
