//! The agent's command line; in a cluster the chart writes it.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, Subcommand};
use windtunnel_crds::units::GoDuration;
use windtunnel_runtime::LogFormat;

use crate::{fill::Fill, hog::Hog};

/// windtunnel's node agent.
#[derive(Clone, Debug, Parser)]
#[command(version, about)]
pub struct Args {
    /// What to be.
    #[command(subcommand)]
    pub command: Command,
}

/// What a process of this program is.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// The agent of a node.
    Run(Run),
    /// An injector; started by the agent, with a line to it as standard input.
    #[command(hide = true)]
    Inject,
    /// Looks at what targets control; started by the agent, with questions as standard input.
    #[command(hide = true)]
    Look,
    /// What an injector needs inside its target's control group.
    #[command(hide = true, subcommand)]
    Child(Child),
    /// Tries a kind of fault on the agent's own container; started by the agent.
    #[command(hide = true)]
    Try {
        /// Where the node's control groups are mounted.
        #[arg(long)]
        cgroups: PathBuf,
        /// The kind.
        kind: String,
    },
}

/// What a child of an injector does.
#[derive(Clone, Debug, Subcommand)]
pub enum Child {
    /// Uses CPU time.
    Burn {
        /// Thousandths of a core.
        millicores: u64,
    },
    /// Holds memory.
    Hog(Hog),
    /// Takes space.
    Fill(Fill),
}

/// Settings of an agent.
#[derive(Clone, Debug, clap::Args)]
pub struct Run {
    /// The node that this agent is on.
    #[arg(long, env = "WINDTUNNEL_NODE")]
    pub node: String,

    /// The namespace that windtunnel is installed in.
    #[arg(long, env = "WINDTUNNEL_NAMESPACE")]
    pub namespace: String,

    /// How long faults are kept without a sign of life from the operator and the API server;
    /// 25s at least.
    #[arg(long, default_value = "30s")]
    pub control_plane_grace: GoDuration,

    /// The journal's directory: on a tmpfs of the node.
    #[arg(long, default_value = "/run/windtunnel")]
    pub journal: PathBuf,

    /// Where the node's control groups are mounted.
    #[arg(long, default_value = "/host/sys/fs/cgroup")]
    pub cgroups: PathBuf,

    /// kubelet's directory of pod logs.
    #[arg(long, default_value = "/host/var/log/pods")]
    pub pod_logs: PathBuf,

    /// Disk faults may fill a disk that the node itself needs, but for a reserve.
    #[arg(long)]
    pub fill_node_disk: bool,

    /// Where probes and metrics are served.
    #[arg(long, default_value = "[::]:8081")]
    pub admin: SocketAddr,

    /// How log lines look.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// What is logged: target=level directives.
    #[arg(long, env = "WINDTUNNEL_LOG", default_value = "info")]
    pub log: String,
}
