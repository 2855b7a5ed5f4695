//! The harness's side of the hands.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Answer, NodeFacts, Output, Request, read_line, write_line};
use crate::cluster::poll::until;
use crate::cluster::service::Action;
use crate::cluster::{addresses, netns};

/// How long a node is given that stands still, with the machine that it runs on.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const CONNECT_BOUND: Duration = Duration::from_secs(3);
/// What a command may take longer than its own bound.
const RUN_SLACK: Duration = Duration::from_secs(10);
/// For what has no bound of its own.
const CALL_BOUND: Duration = Duration::from_mins(1);

/// The hands of one node, from any network namespace.
#[derive(Debug)]
pub(crate) struct Hands<'a> {
    pub(crate) namespace: &'a File,
    pub(crate) index: u8,
    /// How long to connect is tried. Nothing is asked for twice.
    pub(crate) patience: Duration,
}

impl Hands<'_> {
    pub(crate) fn run(&self, argv: &[&str], input: &[u8], bound: Duration) -> Result<Output> {
        let argv = argv.iter().map(ToString::to_string).collect();
        let request = Request::Run {
            argv,
            stdin: input.len(),
            bound,
        };
        let (answer, mut reader) = self.ask(&request, input, bound + RUN_SLACK)?;
        let Answer::Ran {
            end,
            stdout,
            stderr,
        } = answer
        else {
            bail!("unexpected {answer:?}")
        };
        let mut read = |length: usize| -> Result<Vec<u8>> {
            let mut bytes = vec![0; length];
            reader.read_exact(&mut bytes).context("read the output")?;
            Ok(bytes)
        };
        Ok(Output {
            end,
            stdout: read(stdout)?,
            stderr: read(stderr)?,
        })
    }

    pub(crate) fn signal_matching(&self, pattern: &str, signal: i32) -> Result<Vec<i32>> {
        match self.call(&Request::SignalMatching {
            pattern: pattern.into(),
            signal,
        })? {
            Answer::Pids(pids) => Ok(pids),
            other => bail!("unexpected {other:?}"),
        }
    }

    pub(crate) fn signal(&self, pid: i32, signal: i32) -> Result<()> {
        self.call(&Request::Signal { pid, signal }).map(drop)
    }

    pub(crate) fn service(&self, name: &str, action: Action) -> Result<()> {
        self.call(&Request::Service {
            name: name.into(),
            action,
        })
        .map(drop)
    }

    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        self.call(&Request::Import {
            archive: archive.into(),
        })
        .map(drop)
    }

    pub(crate) fn facts(&self) -> Result<NodeFacts> {
        match self.call(&Request::Facts)? {
            Answer::Facts(facts) => Ok(facts),
            other => bail!("unexpected {other:?}"),
        }
    }

    fn call(&self, request: &Request) -> Result<Answer> {
        self.ask(request, &[], CALL_BOUND).map(|(answer, _)| answer)
    }

    fn ask(
        &self,
        request: &Request,
        bytes: &[u8],
        bound: Duration,
    ) -> Result<(Answer, BufReader<TcpStream>)> {
        let name = addresses::node_name(self.index);
        let mut stream = self
            .connect()
            .with_context(|| format!("connect to {name}"))?;
        stream
            .set_read_timeout(Some(bound))
            .context("bound the reply")?;
        write_line(&mut stream, request)?;
        stream.write_all(bytes).context("send the input")?;
        let mut reader = BufReader::new(stream);
        match read_line(&mut reader).with_context(|| format!("{name} gave no reply"))? {
            Answer::Failed(text) => bail!("{name}: {text}"),
            answer => Ok((answer, reader)),
        }
    }

    fn connect(&self) -> Result<TcpStream> {
        let address = addresses::node_management(self.index)
            .parse()
            .context("node address")?;
        let address = SocketAddr::new(address, addresses::HANDS_PORT);
        let mut last = None;
        let connected = until("a connection", self.patience, || {
            let tried = netns::within(self.namespace, move || {
                Ok(TcpStream::connect_timeout(&address, CONNECT_BOUND)?)
            });
            Ok(tried.map_err(|error| last = Some(error)).ok())
        });
        connected.map_err(|error| last.unwrap_or(error))
    }
}
