//! What agents and operators count, read as a monitoring system reads it: what ARCHITECTURE.md names
//! is there and nothing else is, and what happens moves its counter.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::refuse::Foreign;
use super::scene::{SOON, Scene, agent_is_ready, ended, restarts};
use super::stage::{Stage, Test, kubectl};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[("what_happens_is_counted", what_happens_is_counted)];

const NODE: &str = "node1";
/// What says which there are.
const NAMED: &str = include_str!("../../../ARCHITECTURE.md");

/// What a pod of the release has counted.
struct Counters(String);

impl Counters {
    /// Read through the API server, from the port that probes and scrapers use.
    fn of(stage: &Stage, pod: &str) -> Result<Self> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/proxy/metrics");
        kubectl(stage, &["get", "--raw", &path]).map(Self)
    }

    /// The sum of a metric's values over all series with these labels.
    fn sum(&self, name: &str, labels: &[&str]) -> Result<i64> {
        let series = self.0.lines().filter_map(|line| line.rsplit_once(' '));
        let meant = series.filter(|(series, _)| {
            let (found, of) = series.split_once('{').unwrap_or((series, ""));
            found == name && labels.iter().all(|label| of.contains(label))
        });
        let values = meant.map(|(_, value)| value.parse::<i64>().context("read a value"));
        values.sum()
    }

    /// The names of all metrics, as their series begin.
    fn names(&self) -> BTreeSet<String> {
        let types = self.0.lines().filter_map(|l| l.strip_prefix("# TYPE "));
        let name = |of: &str| {
            let (name, kind) = of.split_once(' ').unwrap_or((of, ""));
            let end = if kind == "counter" { "_total" } else { "" };
            format!("{name}{end}")
        };
        types.map(name).collect()
    }
}

fn what_happens_is_counted(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "what_happens_is_counted", NODE)?;
    ends_are_counted(&scene)?;
    residue_is_counted(&scene)?;
    the_names_are_those_told(stage)?;
    a_new_agent_counts_what_it_found(&scene)?;
    passes_are_counted(&scene)?;
    scene.is_as_before()
}

/// After something has ended: what has a label of the case at hand is not there before the case.
fn the_names_are_those_told(stage: &Stage) -> Result<()> {
    let words = NAMED.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let told: BTreeSet<String> = words
        .filter(|w| w.starts_with("windtunnel_agent_") || w.starts_with("windtunnel_operator_"))
        .map(str::to_owned)
        .collect();
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let mut found = Counters::of(stage, &stage.windtunnel.agent_on(NODE)?)?.names();
    found.extend(Counters::of(stage, &leader)?.names());
    ensure!(
        told == found,
        "ARCHITECTURE.md names {told:?}, there are {found:?}"
    );
    Ok(())
}

/// How a fault can end on a node whose agent lives, and what is one more then.
fn ends_are_counted(scene: &Scene<'_>) -> Result<()> {
    let aborted = Watch::begin(scene, "aborted")?;
    aborted.run.abort()?;
    let counts = aborted.end()?;
    counts.one_more(ENDED, &["outcome=\"Recovered\"", "reclaimed_by=\"Agent\""])?;
    counts.one_more("windtunnel_agent_revert_seconds_count", &[])?;
    let killed = Watch::begin(scene, "killed")?;
    killed.signal(Signal::SIGKILL)?;
    let died = ["outcome=\"Interrupted\"", "reason=\"InjectorDied\""];
    killed.end()?.one_more(ENDED, &died)?;
    let stopped = Watch::begin(scene, "stopped")?;
    stopped.signal(Signal::SIGSTOP)?;
    let counts = stopped.end()?;
    let silent = ["outcome=\"Interrupted\"", "reason=\"InjectorSilent\""];
    counts.one_more(ENDED, &silent)?;
    // The injector's own timer may have been first.
    let by_agent = counts.more(ENDED, &[silent[1], "reclaimed_by=\"Agent\""])?;
    let missed = counts.more("windtunnel_agent_heartbeats_missed_total", &[])?;
    ensure!(
        (by_agent..=1).contains(&missed),
        "{missed} heartbeats missed, {by_agent} silent injectors killed"
    );
    Ok(())
}

/// What bears our mark and can be removed, and what cannot.
fn residue_is_counted(scene: &Scene<'_>) -> Result<()> {
    let table = [
        "nft",
        "add",
        "table",
        "netdev",
        "windtunnel-fedcba9876543210",
    ];
    let stage = scene.space.stage;
    let removable = Watch::begin(scene, "removable")?;
    stage.in_netns(&scene.echo, &table)?;
    removable.run.abort()?;
    removable.end()?.one_more(RESIDUE, &["removed=\"true\""])?;
    let kept = Watch::begin(scene, "kept")?;
    let foreign = Foreign::table(scene)?;
    kept.run.abort()?;
    let counts = kept.end();
    foreign.end()?;
    counts?.one_more(RESIDUE, &["removed=\"false\""])
}

/// An agent is killed with a fault in place: the next one, which has counted nothing yet, counts it.
fn a_new_agent_counts_what_it_found(scene: &Scene<'_>) -> Result<()> {
    let stage = scene.space.stage;
    let watch = Watch::begin(scene, "journal")?;
    let (pod, agent) = (stage.windtunnel.agent_on(NODE)?, stage.agent(NODE)?);
    let before = restarts(stage, &pod)?;
    stage.cluster.node(NODE)?.signal(agent, Signal::SIGKILL)?;
    until("another container of the agent", SOON * 2, || {
        Ok((restarts(stage, &pod)? > before).then_some(()))
    })?;
    agent_is_ready(stage, NODE)?;
    watch.run.wait("Finished", SOON)?;
    let now = Counters::of(stage, &pod)?;
    let replays = now.sum("windtunnel_agent_journal_replays_total", &[])?;
    let restarted = now.sum(
        ENDED,
        &["outcome=\"Interrupted\"", "reason=\"AgentRestarted\""],
    )?;
    ensure!(
        (replays, restarted) == (1, 1),
        "{replays} replays, {restarted} ended by the restart: {}",
        now.0
    );
    Ok(())
}

/// One replica leads, and what it does for a run is counted.
fn passes_are_counted(scene: &Scene<'_>) -> Result<()> {
    let stage = scene.space.stage;
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let mut leads = 0;
    for pod in stage.windtunnel.pods("operator")? {
        let pod = pod["metadata"]["name"]
            .as_str()
            .context("a pod without a name")?;
        leads += Counters::of(stage, pod)?.sum("windtunnel_operator_leader", &[])?;
    }
    ensure!(leads == 1, "{leads} replicas lead");
    let before = Counters::of(stage, &leader)?;
    let run = scene.silence("passes", "1s", "0s")?;
    ended(&run, "Completed", "WindowsClosed")?;
    let after = Counters::of(stage, &leader)?;
    for (name, labels) in [
        ("windtunnel_operator_passes_total", &[][..]),
        ("windtunnel_operator_pass_seconds_count", &[]),
        (
            "windtunnel_operator_api_writes_total",
            &["action=\"create a node injection\"", "outcome=\"ok\""],
        ),
    ] {
        let more = after.sum(name, labels)? - before.sum(name, labels)?;
        ensure!(more >= 1, "{name} {labels:?} is {more} more");
    }
    Ok(())
}

const ENDED: &str = "windtunnel_agent_faults_ended_total";
const RESIDUE: &str = "windtunnel_agent_residue_total";

/// A fault that is in place, and what its agent had counted before.
struct Watch<'a, 'b> {
    scene: &'b Scene<'a>,
    run: Run<'a>,
    agent: String,
    before: Counters,
}

impl<'a, 'b> Watch<'a, 'b> {
    fn begin(scene: &'b Scene<'a>, name: &str) -> Result<Self> {
        let stage = scene.space.stage;
        let agent = stage.windtunnel.agent_on(NODE)?;
        let before = Counters::of(stage, &agent)?;
        let (run, _) = scene.silenced(name, "30s")?;
        let alive = Counters::of(stage, &agent)?.sum("windtunnel_agent_injectors", &[])?;
        ensure!(alive == 1, "{alive} injectors with one fault in place");
        Ok(Self {
            scene,
            run,
            agent,
            before,
        })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let stage = self.scene.space.stage;
        let injector = traces::injector(stage, &self.scene.echo)?;
        stage.cluster.node(NODE)?.signal(injector, signal)
    }

    /// Waits for the end; what was counted meanwhile.
    fn end(self) -> Result<Counted> {
        self.scene.lamp.comes_back(Instant::now(), SOON)?;
        self.run.wait("Finished", SOON * 2)?;
        let after = Counters::of(self.scene.space.stage, &self.agent)?;
        let alive = after.sum("windtunnel_agent_injectors", &[])?;
        ensure!(alive == 0, "{alive} injectors with no fault in place");
        Ok(Counted {
            before: self.before,
            after,
        })
    }
}

/// What was counted between two moments.
struct Counted {
    before: Counters,
    after: Counters,
}

impl Counted {
    fn more(&self, name: &str, labels: &[&str]) -> Result<i64> {
        Ok(self.after.sum(name, labels)? - self.before.sum(name, labels)?)
    }

    fn one_more(&self, name: &str, labels: &[&str]) -> Result<()> {
        let more = self.more(name, labels)?;
        ensure!(
            more == 1,
            "{name} {labels:?} is {more} more: {}",
            self.after.0
        );
        Ok(())
    }
}
