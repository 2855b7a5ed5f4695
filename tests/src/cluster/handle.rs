//! A running cluster, as tests and the `lab` program hold it.
//!
//! Works from any network namespace: what must happen in the cluster's happens on threads or
//! programs that are moved there. A cluster that was started through [`Cluster::start`] ends with
//! the value, or with the process that holds it.

mod launch;
mod parts;
mod tools;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::control::{Phase, Reply, Request, Status};
use super::poll::until;
use super::{addresses, api, control, layout, netns};

pub use launch::{Options, launch};
pub use parts::{Component, Node, NodeService};
pub use tools::success;

const STOP_BOUND: Duration = Duration::from_secs(30);

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    name: String,
    /// The process that holds the cluster's namespaces.
    holder: i32,
    /// The network namespace that the control socket is in.
    home: File,
    namespace: File,
    /// The holder, if the cluster is to end with this value.
    owned: Option<Child>,
}

impl Cluster {
    /// The cluster of a name, if it is running.
    ///
    /// # Errors
    /// When its namespaces cannot be opened.
    pub fn find(name: &str) -> Result<Option<Self>> {
        let Some((_, holder)) = control::connect(name)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            name: name.to_owned(),
            holder,
            home: netns::of("thread-self")?,
            namespace: netns::of(&holder.to_string())?,
            owned: None,
        }))
    }

    /// The running and ready cluster of a name.
    ///
    /// # Errors
    /// When there is none, or it is not ready.
    pub fn attach(name: &str) -> Result<Self> {
        let cluster = Self::find(name)?.with_context(|| {
            format!("no cluster {name:?} is running: cargo lab up --name {name}")
        })?;
        let phase = cluster.status()?.phase;
        ensure!(
            phase == Phase::Ready,
            "cluster {name:?} is not ready: {phase:?}"
        );
        Ok(cluster)
    }

    /// Builds what is missing and starts a cluster that ends with the returned value.
    ///
    /// # Errors
    /// When something cannot be built, or does not come up in time.
    pub fn start(options: &Options) -> Result<Self> {
        launch(options, |_| {})
    }

    /// The running cluster that `WINDTUNNEL_LAB_NAME` names, else `default`; if it is not running,
    /// a new one of that name, which ends with the returned value.
    ///
    /// # Errors
    /// When it is running but not ready, or does not come up.
    pub fn attach_or_start() -> Result<Self> {
        let name = std::env::var("WINDTUNNEL_LAB_NAME").unwrap_or_else(|_| "default".into());
        Self::attach_or_start_named(&name)
    }

    /// The running cluster of a name; if it is not running, a new one, which ends with the returned
    /// value.
    ///
    /// # Errors
    /// When it is running but not ready, or does not come up.
    pub fn attach_or_start_named(name: &str) -> Result<Self> {
        if let Some(cluster) = Self::find(name)? {
            let Err(silence) = cluster.status() else {
                return Self::attach(name);
            };
            // One that ends does not answer any more, and frees its name last.
            until("end of a cluster that does not answer", STOP_BOUND, || {
                Ok((!is_running(cluster.holder)).then_some(()))
            })
            .context(silence)?;
        }
        Self::start(&Options {
            name: name.to_owned(),
            ..Options::default()
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process whose end, by any means, ends the cluster.
    #[must_use]
    pub fn holder(&self) -> i32 {
        self.holder
    }

    /// How it is.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn status(&self) -> Result<Status> {
        match self.ask(&Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("unexpected reply {other:?}"),
        }
    }

    /// Ends it, and returns when nothing of it is left.
    ///
    /// # Errors
    /// When it is still there after some time.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.ask(&Request::Stop)?;
        match self.owned.take() {
            Some(mut holder) => {
                holder.wait().context("wait for the cluster's end")?;
                Ok(())
            }
            None => until("end of the cluster", STOP_BOUND, || {
                Ok((!is_running(self.holder)).then_some(()))
            }),
        }
    }

    /// Moves the calling thread, and threads that it starts later, into the cluster's network.
    ///
    /// A test program calls it first, before it has other threads.
    ///
    /// # Errors
    /// When that is not allowed.
    pub fn enter(&self) -> Result<()> {
        netns::enter(&self.namespace)
    }

    /// Runs `work` on a thread in the network that this value was made in: the machine's, also
    /// after [`Self::enter`]. Other clusters are found only there.
    ///
    /// # Errors
    /// What the work failed with.
    pub fn beside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        netns::within(&self.home, work)
    }

    /// Runs `work` on a thread in the cluster's network.
    ///
    /// # Errors
    /// What the work failed with.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        netns::within(&self.namespace, work)
    }

    /// A client with all rights. Needs the context of a tokio runtime, and a thread that has
    /// entered the cluster's network.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client(&self) -> Result<kube::Client> {
        api::client(&self.kubeconfig()).await
    }

    /// The kubeconfig of an administrator. Its server is only reached from the cluster's network.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.path("pki/admin.kubeconfig")
    }

    /// A path below the cluster's state directory, as the machine sees it.
    #[must_use]
    pub fn path(&self, relative: &str) -> PathBuf {
        let state = layout::state(relative);
        let state = state.strip_prefix("/").unwrap_or(&state);
        Path::new("/proc")
            .join(self.holder.to_string())
            .join("root")
            .join(state)
    }

    /// All nodes.
    ///
    /// # Errors
    /// When the cluster does not answer.
    pub fn nodes(&self) -> Result<Vec<Node<'_>>> {
        self.status()?
            .nodes
            .iter()
            .map(|node| self.node(&node.kernel.name))
            .collect()
    }

    /// A node by its name: `node1`, `node2`.
    ///
    /// # Errors
    /// When no node can have that name.
    pub fn node(&self, name: &str) -> Result<Node<'_>> {
        let index = addresses::node_index(name).with_context(|| format!("no node {name}"))?;
        Ok(Node::new(self, index))
    }

    /// A component of the control plane: `etcd`, `apiserver`, `manager`, `scheduler`.
    #[must_use]
    pub fn component<'a>(&'a self, name: &'a str) -> Component<'a> {
        Component::new(self, name)
    }

    fn ask(&self, request: &Request) -> Result<Reply> {
        let connection = netns::within(&self.home, || control::connect(&self.name))?;
        let (stream, holder) =
            connection.with_context(|| format!("cluster {:?} has ended", self.name))?;
        ensure!(
            holder == self.holder,
            "cluster {:?} is another one now",
            self.name
        );
        control::ask(stream, request)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(mut holder) = self.owned.take() {
            // It has ended if it cannot be killed, and then there is nothing left to end.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Whether a process is there and no zombie.
pub(crate) fn is_running(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.trim_start().chars().next());
    state.is_some_and(|state| state != 'Z' && state != 'X')
}
