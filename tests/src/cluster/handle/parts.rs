//! The parts of a running cluster that tests take hold of.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::Cluster;
use crate::cluster::addresses;
use crate::cluster::control::{NodeAction, Request};
use crate::cluster::node::{Hands, NodeFacts, Output, PATIENCE};
use crate::cluster::poll::until;
use crate::cluster::service::Action;

const RUN_BOUND: Duration = Duration::from_mins(1);
const BOOT_BOUND: Duration = Duration::from_mins(3);

/// A node of a cluster. Commands reach it also when it is cut off the cluster's network.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    cluster: &'a Cluster,
    index: u8,
    patience: Duration,
}

impl<'a> Node<'a> {
    pub(super) fn new(cluster: &'a Cluster, index: u8) -> Self {
        Self {
            cluster,
            index,
            patience: PATIENCE,
        }
    }

    /// The same node, asked only once: for whoever asks again himself, or at a certain moment.
    #[must_use]
    pub fn at_once(self) -> Self {
        Self {
            patience: Duration::ZERO,
            ..self
        }
    }

    pub(super) fn hands(&self) -> Hands<'a> {
        Hands {
            namespace: &self.cluster.namespace,
            index: self.index,
            patience: self.patience,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> String {
        addresses::node_name(self.index)
    }

    /// Its addresses on the cluster's network, IPv4 first.
    #[must_use]
    pub fn addresses(&self) -> [String; 2] {
        [
            addresses::node_v4(self.index),
            addresses::node_v6(self.index),
        ]
    }

    /// Whether its kernel is running.
    ///
    /// # Errors
    /// When the cluster does not answer.
    pub fn is_running(&self) -> Result<bool> {
        let name = self.name();
        let status = self.cluster.status()?;
        let node = status.nodes.iter().find(|node| node.kernel.name == name);
        Ok(node
            .with_context(|| format!("no node {name}"))?
            .kernel
            .pid
            .is_some())
    }

    /// Runs a command as root, for a minute at most.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn run(&self, argv: &[&str]) -> Result<Output> {
        self.run_with(argv, &[], RUN_BOUND)
    }

    /// Runs a command as root, with input and a bound of its own.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn run_with(&self, argv: &[&str], input: &[u8], bound: Duration) -> Result<Output> {
        self.hands().run(argv, input, bound)
    }

    /// Signals one process of the node.
    ///
    /// # Errors
    /// When the node does not answer.
    pub fn signal(&self, pid: i32, signal: Signal) -> Result<()> {
        self.hands().signal(pid, signal as i32)
    }

    /// Signals every process of the node whose command line contains the pattern, and returns
    /// their pids.
    ///
    /// # Errors
    /// When the node does not answer.
    pub fn signal_matching(&self, pattern: &str, signal: Signal) -> Result<Vec<i32>> {
        self.hands().signal_matching(pattern, signal as i32)
    }

    /// How the node is, as it says itself.
    ///
    /// # Errors
    /// When the node does not answer.
    pub fn facts(&self) -> Result<NodeFacts> {
        self.hands().facts()
    }

    /// containerd, kubelet or proxy of the node.
    #[must_use]
    pub fn service(&self, name: &'a str) -> NodeService<'a> {
        NodeService { node: *self, name }
    }

    /// Takes its power away.
    ///
    /// # Errors
    /// When its kernel does not end.
    pub fn kill(&self) -> Result<()> {
        self.act(NodeAction::Kill)
    }

    /// Starts it, with the disk that it had, and returns when it answers.
    ///
    /// # Errors
    /// When it is running, or does not answer in time.
    pub fn boot(&self) -> Result<()> {
        self.act(NodeAction::Boot)?;
        let what = format!("{} after its boot", self.name());
        until(&what, BOOT_BOUND, || Ok(self.at_once().facts().ok())).map(drop)
    }

    /// Takes it off the cluster's network.
    ///
    /// # Errors
    /// When the cluster does not answer.
    pub fn cut(&self) -> Result<()> {
        self.act(NodeAction::Cut)
    }

    /// Puts it back on the cluster's network.
    ///
    /// # Errors
    /// When the cluster does not answer.
    pub fn heal(&self) -> Result<()> {
        self.act(NodeAction::Heal)
    }

    /// The log of a service of the node, or of its kernel and init if `service` is `console`.
    ///
    /// # Errors
    /// When there is no such log.
    pub fn log(&self, service: &str) -> Result<String> {
        let name = self.name();
        let relative = match service {
            "console" => format!("log/{name}.log"),
            _ => format!("nodes/{name}/{service}.log"),
        };
        read_log(&self.cluster.path(&relative))
    }

    fn act(&self, action: NodeAction) -> Result<()> {
        self.cluster
            .ask(&Request::Node {
                node: self.name(),
                action,
            })
            .map(drop)
    }
}

/// A service of a node. It is started again when it ends by itself.
#[derive(Debug, Clone, Copy)]
pub struct NodeService<'a> {
    node: Node<'a>,
    name: &'a str,
}

impl NodeService<'_> {
    /// Starts, stops, kills, pauses or resumes it.
    ///
    /// # Errors
    /// When the node does not answer, or the service does not do it.
    pub fn act(&self, action: Action) -> Result<()> {
        self.node.hands().service(self.name, action)
    }
}

/// A component of the control plane. It is started again when it ends by itself.
#[derive(Debug, Clone, Copy)]
pub struct Component<'a> {
    cluster: &'a Cluster,
    name: &'a str,
}

impl<'a> Component<'a> {
    pub(super) fn new(cluster: &'a Cluster, name: &'a str) -> Self {
        Self { cluster, name }
    }

    /// Starts, stops, kills, pauses or resumes it.
    ///
    /// # Errors
    /// When there is no such component, or it does not do it.
    pub fn act(&self, action: Action) -> Result<()> {
        let component = self.name.to_owned();
        self.cluster
            .ask(&Request::Component { component, action })
            .map(drop)
    }

    /// Its log.
    ///
    /// # Errors
    /// When there is no such component.
    pub fn log(&self) -> Result<String> {
        read_log(&self.cluster.path(&format!("log/{}.log", self.name)))
    }
}

fn read_log(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
