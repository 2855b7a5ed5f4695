//! `lab bench`: the figures that the README gives, measured on the embedded cluster.

mod cost;
mod doses;
mod layers;
mod scale;
mod speed;

use std::time::Duration;

use anyhow::{Context, Result};
use windtunnel_tests::cluster::Cluster;
use windtunnel_tests::product::{Installation, Profile};
use windtunnel_tests::spread;

use crate::print;

/// The node of all pods that are measured on.
const NODE: &str = "node1";

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How often each speed is measured
    #[arg(long, default_value_t = 50)]
    runs: usize,
    /// Build as tests are, not as releases: quicker, and slower
    #[arg(long)]
    dev: bool,
    /// Measure only a part
    #[arg(long)]
    only: Option<Part>,
}

/// A part of the measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// How quickly a run begins and ends, and what windtunnel takes and writes
    Speed,
    /// How long each layer of reclamation takes
    Layers,
    /// How exact faults are, and how quickly each kind is undone
    Doses,
    /// How long faults on many pods take
    Scale,
}

pub(crate) fn run(name: &str, arguments: &Arguments) -> Result<()> {
    let cluster = Cluster::attach_or_start_named(name)?;
    let profile = if arguments.dev {
        Profile::Dev
    } else {
        Profile::Release
    };
    let windtunnel = Installation::load(&cluster, profile)?;
    windtunnel.install(&["audit.recheckAfter=5s", "agent.fillNodeDisk=true"])?;
    cluster.enter()?;
    print::line(&format!(
        "{} build, {} runs of each",
        if arguments.dev { "dev" } else { "release" },
        arguments.runs
    ));
    let is_wanted = |part| arguments.only.is_none_or(|only| only == part);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start a runtime")?;
    runtime.block_on(async {
        let client = cluster.client().await?;
        let bed = speed::Bed::make(&cluster, &windtunnel, client).await?;
        if is_wanted(Part::Speed) {
            cost::idle(&cluster, &windtunnel)?;
            speed::measure(&bed, arguments.runs).await?;
            cost::writes(&bed).await?;
        }
        if is_wanted(Part::Layers) {
            layers::measure(&bed, &windtunnel, arguments.runs).await?;
        }
        if is_wanted(Part::Scale) {
            scale::measure(&bed, &windtunnel, arguments.runs.div_ceil(5)).await?;
        }
        anyhow::Ok(())
    })?;
    if is_wanted(Part::Doses) {
        doses::measure(&cluster, &windtunnel, arguments.runs)?;
    }
    Ok(())
}

/// A series of measurements.
#[derive(Debug, Default)]
pub(crate) struct Series(Vec<Duration>);

impl Series {
    fn add(&mut self, duration: Duration) {
        self.0.push(duration);
    }

    /// Median and the largest.
    fn brief(&self) -> String {
        let [half, _, all] = self.millis();
        format!("{half:.1} / {all:.1}")
    }

    /// What half of them, 99 in 100, and all are within, in milliseconds.
    fn millis(&self) -> [f64; 3] {
        spread(&self.0).map(|duration| duration.as_secs_f64() * 1000.0)
    }

    /// A row of a table: median, 99th percentile, and the largest.
    fn row(&self, what: &str) -> String {
        let [half, most, all] = self.millis();
        format!(
            "| {what} | {half:.1} | {most:.1} | {all:.1} | {} |",
            self.0.len()
        )
    }
}

/// The manifest of a pod that echoes, by its name, its label, and its node.
fn echo((name, app, node): (&str, &str, &str), namespace: &str, tag: &str) -> String {
    format!(
        "
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}, labels: {{app: {app}}}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 0
  containers: [{{name: echo, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [echo]}}]
"
    )
}
