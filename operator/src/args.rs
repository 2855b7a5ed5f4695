//! The operator's command line; in a cluster the chart writes it.

use std::{net::SocketAddr, time::Duration};

use clap::{Parser, Subcommand};
use jiff::SignedDuration;
use windtunnel_crds::units::GoDuration;
use windtunnel_runtime::LogFormat;

use crate::decide::Policy;

/// windtunnel's operator.
#[derive(Clone, Debug, Parser)]
#[command(version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What a process of this program does.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Runs the operator.
    Run(Args),
    /// Ends all runs and releases what they hold, before windtunnel is uninstalled.
    Uninstall(Uninstall),
}

/// Settings of an uninstallation.
#[derive(Clone, Debug, clap::Args)]
pub struct Uninstall {
    /// The namespace that windtunnel is installed in.
    #[arg(long, env = "WINDTUNNEL_NAMESPACE")]
    pub namespace: String,

    /// How long agents may take to give faults back by themselves.
    #[arg(long, default_value = "30s")]
    pub wait: GoDuration,
}

/// Settings of the operator.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The namespace that windtunnel is installed in.
    #[arg(long, env = "WINDTUNNEL_NAMESPACE")]
    pub namespace: String,

    /// This replica's name in the competition for the lease.
    #[arg(long, env = "WINDTUNNEL_IDENTITY")]
    pub identity: String,

    /// Namespaces whose pods are never hit, besides the release's own.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "kube-system,kube-node-lease,kube-public"
    )]
    pub protected_namespaces: Vec<String>,

    /// Most pods that one experiment may hit.
    #[arg(long, default_value_t = 1000)]
    pub max_targets: usize,

    /// How long after the end of a run its nodes are checked again.
    #[arg(long, default_value = "10m")]
    pub recheck_after: GoDuration,

    /// How long an agent that has lost the control plane keeps its faults; 25s at least.
    #[arg(long, default_value = "30s")]
    pub control_plane_grace: GoDuration,

    /// The Service of the cluster's DNS, as namespace/name.
    #[arg(long, default_value = "kube-system/kube-dns")]
    pub cluster_dns: String,

    /// Where probes and metrics are served.
    #[arg(long, default_value = "[::]:8080")]
    pub admin: SocketAddr,

    /// How log lines look.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// What is logged: target=level directives.
    #[arg(long, env = "WINDTUNNEL_LOG", default_value = "info")]
    pub log: String,
}

impl Args {
    /// Namespace and name of the cluster's DNS Service.
    pub(crate) fn cluster_dns(&self) -> (String, String) {
        let (namespace, name) = self.cluster_dns.split_once('/').unwrap_or_default();
        (namespace.to_owned(), name.to_owned())
    }

    /// What the installation allows and wants.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy {
            release_namespace: self.namespace.clone(),
            protected_namespaces: self.protected_namespaces.iter().cloned().collect(),
            max_targets: self.max_targets,
            recheck_after: signed(self.recheck_after.get()),
            control_plane_grace: signed(self.control_plane_grace.get()),
        }
    }
}

/// Durations of this API are at most a few centuries: they always fit.
fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}
