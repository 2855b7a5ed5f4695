//! What the harness can do inside a node, and the wire that it is asked over.
//!
//! A server on the management network, so that it answers when the cluster network is cut. Each
//! connection carries one request and one reply: a line of JSON, then the bytes that it announces.

mod client;
mod server;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cluster::service::{Action, ServiceStatus};

pub(crate) use client::{Hands, PATIENCE};
pub(super) use server::serve;

/// What can be asked of a node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    /// Run a command. So many bytes of standard input follow.
    Run {
        argv: Vec<String>,
        stdin: usize,
        bound: Duration,
    },
    /// Signal every process whose command line contains the pattern.
    SignalMatching { pattern: String, signal: i32 },
    /// Signal one process.
    Signal { pid: i32, signal: i32 },
    /// Act on containerd, kubelet or proxy.
    Service { name: String, action: Action },
    /// Give containerd the images of an archive.
    Import { archive: PathBuf },
    /// Tell how the node is.
    Facts,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Done,
    Pids(Vec<i32>),
    Facts(NodeFacts),
    /// So many bytes of output and of error output follow.
    Ran {
        end: End,
        stdout: usize,
        stderr: usize,
    },
    Failed(String),
}

/// How a command on a node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// With an exit code.
    Exited(i32),
    /// By a signal.
    Signaled(i32),
    /// It took longer than it may, and was killed.
    TimedOut,
}

/// What a command on a node wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub end: End,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Standard output as text.
    ///
    /// # Errors
    /// When the command did not succeed, with what it wrote to standard error.
    pub fn text(&self) -> Result<String> {
        if self.end != End::Exited(0) {
            bail!(
                "{:?}: {}",
                self.end,
                String::from_utf8_lossy(&self.stderr).trim_end()
            );
        }
        Ok(String::from_utf8_lossy(&self.stdout).into_owned())
    }
}

/// How a node is, as it says itself.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Steps of its start, with the seconds since its boot.
    pub steps: Vec<(String, f64)>,
    /// containerd, kubelet and proxy.
    pub services: Vec<ServiceStatus>,
}

fn write_line(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(message).context("write a message")?;
    line.push('\n');
    stream.write_all(line.as_bytes()).context("send a message")
}

fn read_line<T: DeserializeOwned>(reader: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    reader.read_line(&mut line).context("receive a message")?;
    serde_json::from_str(&line).with_context(|| format!("understand {line:?}"))
}
