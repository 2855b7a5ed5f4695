//! The control socket: what can be asked of a running cluster's supervisor, and how.
//!
//! An abstract socket in the machine's network namespace, so that it is gone with its holder. Each
//! connection carries one request and one reply, as lines of JSON.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt};
use serde::{Deserialize, Serialize};

use super::service::{Action, ServiceStatus};

/// A request takes at most as long as stopping the slowest component.
const REPLY_BOUND: Duration = Duration::from_mins(1);

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    Status,
    /// Ends the cluster.
    Stop,
    Component {
        component: String,
        action: Action,
    },
    Node {
        node: String,
        action: NodeAction,
    },
}

/// What can be done to a node from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeAction {
    /// Take its power away.
    Kill,
    /// Start it, with the disk that it had.
    Boot,
    /// Take it off the cluster network.
    Cut,
    /// Put it back on the cluster network.
    Heal,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reply {
    Done,
    Status(Box<Status>),
    Failed(String),
}

/// How a cluster is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Whether it is up.
    pub phase: Phase,
    /// Steps of the start that are over.
    pub steps: Vec<Step>,
    /// The control plane.
    pub components: Vec<ServiceStatus>,
    /// The nodes' kernels.
    pub nodes: Vec<NodeStatus>,
}

/// How far the start of a cluster is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Steps are still to come.
    Starting,
    /// All nodes are Ready, and DNS answers.
    Ready,
    /// A step failed.
    Failed(String),
}

/// A step of the start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What it waited for or did.
    pub name: String,
    /// Time from the start of the cluster until it was over.
    pub seconds: f64,
}

/// A node from outside.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its kernel, as a process.
    pub kernel: ServiceStatus,
    /// Whether it is off the cluster network.
    pub is_cut: bool,
}

fn address(name: &str) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("windtunnel-lab-{name}"))
        .with_context(|| format!("{name:?} cannot name a cluster"))
}

/// Takes the name of a cluster.
pub(crate) fn listen(name: &str) -> Result<UnixListener> {
    UnixListener::bind_addr(&address(name)?)
        .with_context(|| format!("cluster {name:?} is running, or was not ended"))
}

/// A connection, and the process that holds the cluster; none if no such cluster is running.
pub(crate) fn connect(name: &str) -> Result<Option<(UnixStream, i32)>> {
    match UnixStream::connect_addr(&address(name)?) {
        Ok(stream) => {
            let peer = getsockopt(&stream, sockopt::PeerCredentials)
                .context("find the cluster's process")?;
            Ok(Some((stream, peer.pid())))
        }
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error).context("connect to the cluster"),
    }
}

/// Sends a request and reads the reply.
pub(crate) fn ask(mut stream: UnixStream, request: &Request) -> Result<Reply> {
    stream
        .set_read_timeout(Some(REPLY_BOUND))
        .context("bound the reply")?;
    send(&mut stream, request)?;
    match receive(&stream).context("the cluster gave no reply")? {
        Reply::Failed(text) => bail!(text),
        reply => Ok(reply),
    }
}

/// Writes one line.
pub(crate) fn send(stream: &mut UnixStream, message: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(message).context("write a message")?;
    line.push('\n');
    stream.write_all(line.as_bytes()).context("send a message")
}

/// Reads one line.
pub(crate) fn receive<T: serde::de::DeserializeOwned>(stream: &UnixStream) -> Result<T> {
    let mut line = String::new();
    BufReader::new(stream)
        .read_line(&mut line)
        .context("receive a message")?;
    serde_json::from_str(&line).with_context(|| format!("understand {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let request = Request::Node {
            node: "node1".into(),
            action: NodeAction::Cut,
        };
        send(&mut here, &request).unwrap();
        assert_eq!(receive::<Request>(&there).unwrap(), request);
    }

    #[test]
    fn a_cluster_that_is_not_running_is_not_found_and_a_name_is_taken_once() {
        let name = format!("control-test-{}", std::process::id());
        assert!(connect(&name).unwrap().is_none());
        let listener = listen(&name).unwrap();
        let (_, holder) = connect(&name).unwrap().unwrap();
        assert_eq!(holder, i32::try_from(std::process::id()).unwrap());
        assert!(listen(&name).is_err());
        drop(listener);
        assert!(connect(&name).unwrap().is_none());
    }
}
