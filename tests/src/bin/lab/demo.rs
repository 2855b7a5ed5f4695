//! `lab install`, `lab demo`: windtunnel on the cluster, and a run of it to watch.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::{Cluster, Options, launch, poll, success};
use windtunnel_tests::product::{Installation, Profile, Reading, Sample};

use crate::print;

/// How long the sample is watched before the experiment begins.
const BASELINE: Duration = Duration::from_secs(5);
/// How long a demo may take from the experiment to its end.
const BOUND: Duration = Duration::from_mins(3);

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Build windtunnel and install it with its chart, and the sample with it
    Install {
        /// Build as for a release
        #[arg(long)]
        release: bool,
        /// Chart values, name=value
        #[arg(long = "set")]
        values: Vec<String>,
    },
    /// Start a cluster, install windtunnel and a sample, run an experiment, and show what happens
    Demo {
        /// Leave the cluster running
        #[arg(long)]
        keep: bool,
        /// The experiment, in namespace shop
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/demo.yaml"))]
        experiment: std::path::PathBuf,
    },
}

pub(crate) fn run(name: &str, command: &Command) -> Result<()> {
    match command {
        Command::Install { release, values } => {
            let cluster = Cluster::attach(name)?;
            let profile = if *release {
                Profile::Release
            } else {
                Profile::Dev
            };
            let installation = Installation::load(&cluster, profile)?;
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            installation.install(&values)?;
            Sample::install(&cluster, &installation.images)?;
            print::line(
                "windtunnel and its sample are installed: cargo lab kubectl get nodeagents -n windtunnel",
            );
            Ok(())
        }
        Command::Demo { keep, experiment } => demo(name, *keep, experiment),
    }
}

fn demo(name: &str, keep: bool, experiment: &Path) -> Result<()> {
    let start = Instant::now();
    let said =
        |text: &str| print::line(&format!("{:5.1} s  {text}", start.elapsed().as_secs_f64()));
    let cluster = match Cluster::find(name)? {
        Some(_) => Cluster::attach(name)?,
        None => launch(
            &Options {
                name: name.to_owned(),
                is_detached: keep,
                ..Options::default()
            },
            |step| print::line(&format!("{:5.1} s  {}", step.seconds, step.name)),
        )?,
    };
    said("cluster is up");
    let installation = Installation::load(&cluster, Profile::Dev)?;
    said("images are built and on the nodes");
    installation.install(&[])?;
    said("windtunnel is installed (helm)");
    let sample = Sample::install(&cluster, &installation.images)?;
    said("sample is ready: gateway → orders → inventory");
    watch(&cluster, &sample, experiment)
}

/// Runs the experiment, with what the sample sees before, during and after it.
fn watch(cluster: &Cluster, sample: &Sample<'_>, experiment: &Path) -> Result<()> {
    let manifest =
        fs::read_to_string(experiment).with_context(|| format!("read {}", experiment.display()))?;
    print::line("");
    print::line(&format!("$ kubectl apply -f {}", experiment.display()));
    print::line(&manifest);
    print::line("            gateway → orders             orders → inventory           pods of");
    print::line(
        "            ok fail    p50    p99 ms      ok fail    p50    p99 ms   inventory  experiment",
    );
    let mut table = Table {
        start: Instant::now(),
        last: 0,
    };
    poll::until("a baseline", BASELINE * 4, || {
        table.row(sample, "")?;
        Ok((table.start.elapsed() >= BASELINE).then_some(()))
    })?;
    cluster.apply(&manifest)?;
    let status = poll::until("the end of the experiment", BOUND, || {
        let object = cluster.get(&["--filename", &experiment.display().to_string()])?;
        let status = &object["status"];
        table.row(sample, &told(status))?;
        let is_over = condition(status, "Finished") == "True";
        Ok(is_over.then(|| status.clone()))
    })?;
    let after = Instant::now();
    poll::until("a look at what follows", BASELINE * 4, || {
        table.row(sample, &told(&status))?;
        Ok((after.elapsed() >= BASELINE).then_some(()))
    })?;
    report(cluster, experiment, &status)
}

/// The live view: a row a second.
struct Table {
    start: Instant,
    last: u64,
}

impl Table {
    fn row(&mut self, sample: &Sample<'_>, told: &str) -> Result<()> {
        // A pod may be between two lives, and the API server busy.
        let gateway = sample.reading("gateway").unwrap_or_default();
        if gateway.at == self.last {
            return Ok(());
        }
        self.last = gateway.at;
        let orders = sample.reading("orders").unwrap_or_default();
        let ready = sample.ready("inventory")?;
        let cells = |r: &Reading| {
            format!(
                "{:4} {:4} {:6} {:6}",
                r.ok, r.failed, r.p50_millis, r.p99_millis
            )
        };
        let seconds = self.start.elapsed().as_secs();
        print::line(&format!(
            "{seconds:5} s  {}       {}       {ready} ready   {told}",
            cells(&gateway),
            cells(&orders)
        ));
        Ok(())
    }
}

/// The experiment in a few words, from its status alone.
fn told(status: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let summary = &status["summary"];
    format!(
        "{} injected {} recovered {} {}",
        text(&status["phase"]),
        text(&summary["injected"]),
        text(&summary["recovered"]),
        text(&status["message"])
    )
}

fn condition(status: &Value, type_: &str) -> String {
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let found = conditions.into_iter().find(|c| c["type"] == type_);
    found
        .and_then(|c| c["status"].as_str())
        .unwrap_or_default()
        .to_owned()
}

/// What the experiment says of itself in the end, and whether it is clean.
fn report(cluster: &Cluster, experiment: &Path, status: &Value) -> Result<()> {
    let file = experiment.display().to_string();
    print::line("");
    print::line("$ kubectl get chaos -n shop");
    print::line(success(&cluster.kubectl(&["get", "--filename", &file])?)?.trim_end());
    print::line("");
    for fault in status["faults"].as_array().into_iter().flatten() {
        let draw: Vec<&str> = fault["draw"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|p| p["name"].as_str())
            .collect();
        print::line(&format!(
            "fault {}: {} on {}; injected {}, recovered {}. {}",
            fault["name"].as_str().unwrap_or_default(),
            fault["phase"].as_str().unwrap_or_default(),
            draw.join(", "),
            fault["injected"],
            fault["recovered"],
            fault["message"].as_str().unwrap_or_default()
        ));
    }
    for type_ in ["Prepared", "Injected", "Recovered", "Clean", "Finished"] {
        let conditions = status["conditions"].as_array().into_iter().flatten();
        for found in conditions.into_iter().filter(|c| c["type"] == type_) {
            let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
            print::line(&format!(
                "{type_:<10}{:<8}{}: {}",
                text("status"),
                text("reason"),
                text("message")
            ));
        }
    }
    let residue = status["cleanup"]["residue"].as_array().map_or(0, Vec::len);
    print::line(&format!(
        "clean-up: checked at {}, {residue} things left; checked again in ten minutes",
        status["cleanup"]["checkedAt"].as_str().unwrap_or("no time")
    ));
    ensure!(
        status["phase"] == "Completed",
        "the experiment did not complete"
    );
    ensure!(
        condition(status, "Clean") == "True",
        "the nodes are not clean"
    );
    Ok(())
}
