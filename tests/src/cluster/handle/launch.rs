//! Starting a cluster: builds what is missing, starts its holder, and waits until it works.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Cluster;
use crate::cluster::control::{Phase, Step};
use crate::cluster::guardian::{DETACH, Order};
use crate::cluster::poll::until;
use crate::cluster::{Cache, addresses, build, entry};

const HOLDER_BOUND: Duration = Duration::from_mins(1);
/// The steps have bounds of their own; this one is for a supervisor that hangs.
const START_BOUND: Duration = Duration::from_mins(10);

/// What cluster to start.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its name: clusters of different names run side by side.
    pub name: String,
    /// How many nodes it has.
    pub nodes: u8,
    /// Whether it outlives the process that starts it, until it is stopped.
    pub is_detached: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "default".into(),
            nodes: 2,
            is_detached: false,
        }
    }
}

/// Builds what is missing, starts a cluster and tells each step as it is over.
///
/// # Errors
/// When something cannot be built, or does not come up in time; then nothing is left running.
pub fn launch(options: &Options, mut on_step: impl FnMut(&Step)) -> Result<Cluster> {
    ensure!(
        (1..=addresses::MOST_NODES).contains(&options.nodes),
        "a cluster has 1 to {} nodes",
        addresses::MOST_NODES
    );
    if Cluster::find(&options.name)?.is_some() {
        bail!("cluster {:?} is running", options.name);
    }
    let parts = build::all(&Cache::open()?)?;
    let order = Order {
        name: options.name.clone(),
        nodes: options.nodes,
        parts,
        seconds_before: 0.0,
    };
    let mut holder = start_holder(&order)?;
    let mut cluster = wait_for_holder(&options.name, &mut holder)?;
    // From here on the holder ends with the value, whatever goes wrong.
    cluster.owned = Some(holder);
    follow(&cluster, &mut on_step)?;
    if options.is_detached {
        detach(&mut cluster)?;
    }
    Ok(cluster)
}

/// Lets the cluster outlive this process.
fn detach(cluster: &mut Cluster) -> Result<()> {
    let Some(holder) = &mut cluster.owned else {
        return Ok(());
    };
    let mut stdin = holder.stdin.take().context("the holder has no input")?;
    stdin.write_all(DETACH).context("detach from the holder")?;
    cluster.owned = None;
    Ok(())
}

fn start_holder(order: &Order) -> Result<Child> {
    let program = entry::lab_program()?;
    let order = serde_json::to_string(order).context("write the order")?;
    Command::new(&program)
        .args(["internal", "guardian", &order])
        // The holder ends when this is closed, which the end of this process does.
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {}", program.display()))
}

fn wait_for_holder(name: &str, holder: &mut Child) -> Result<Cluster> {
    until("the cluster's holder", HOLDER_BOUND, || {
        if let Some(status) = holder.try_wait().context("wait for the cluster's holder")? {
            let mut text = String::new();
            if let Some(mut stderr) = holder.stderr.take() {
                stderr.read_to_string(&mut text).context("read its error")?;
            }
            bail!("the cluster's holder ended, {status}: {}", text.trim_end());
        }
        Cluster::find(name)
    })
}

/// Tells the steps of the start until it is over.
fn follow(cluster: &Cluster, on_step: &mut impl FnMut(&Step)) -> Result<()> {
    let start = Instant::now();
    let mut told = 0;
    until("the cluster", START_BOUND, || {
        let status = cluster.status()?;
        for step in status.steps.iter().skip(told) {
            on_step(step);
        }
        told = status.steps.len();
        match status.phase {
            Phase::Starting => Ok(None),
            Phase::Ready => Ok(Some(())),
            Phase::Failed(text) => {
                bail!(
                    "the cluster did not come up ({:.0} s): {text}",
                    start.elapsed().as_secs_f64()
                )
            }
        }
    })
}
