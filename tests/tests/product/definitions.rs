//! The definitions of windtunnel's kinds are deleted while faults are in place, and with a definition
//! every object of its kind: what is in place ends, nothing stays in Terminating, and applied again
//! they work.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::product::{Run, chart};

use super::lamp::Lamp;
use super::scene::{GONE, SOON, Scene};
use super::stage::{Pod, Stage, Test, Wanted, kubectl};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[
    (
        "without_the_definition_of_experiments_everything_ends",
        without_the_definition_of_experiments_everything_ends,
    ),
    (
        "without_the_definition_of_node_injections_faults_end",
        without_the_definition_of_node_injections_faults_end,
    ),
    (
        "without_any_definition_everything_ends",
        without_any_definition_everything_ends,
    ),
];

const EXPERIMENTS: &str = "crd/chaosexperiments.windtunnel.dev";
const INJECTIONS: &str = "crd/nodeinjections.windtunnel.dev";
/// By when a deleted experiment is let go whatever is missing: the chart's controlPlaneGrace, and what
/// the operator waits beyond it.
const LET_GO: Duration = Duration::from_secs(30 + 20);

/// Every experiment goes with the definition, as if each had been deleted.
fn without_the_definition_of_experiments_everything_ends(stage: &Stage) -> Result<()> {
    let held = Held::set(stage, "without_the_definition_of_experiments")?;
    let (_run, uid) = held.begin()?;
    let seen = delete(&held, &[EXPERIMENTS]);
    stage.windtunnel.install(&[])?;
    seen?;
    held.is_over(&uid)
}

/// The operator can ask nobody, and no agent can report: the faults end, and a run can be deleted.
/// One that is not says afterwards that it does not know.
fn without_the_definition_of_node_injections_faults_end(stage: &Stage) -> Result<()> {
    let held = Held::set(stage, "without_the_definition_of_injections")?;
    let (run, uid) = held.begin()?;
    let waiting = held.wait_for_a_window()?;
    let seen = delete(&held, &[INJECTIONS]).and_then(|()| waiting.delete(LET_GO + GONE));
    stage.windtunnel.install(&[])?;
    seen?;
    run.until("the doubt", SOON, |status| {
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let ends = conditions.filter(|c| c["type"] == "Recovered" || c["type"] == "Clean");
        let doubts = ends.filter(|c| c["status"] == "Unknown" && c["reason"] == "Withdrawn");
        doubts.count() == 2
    })?;
    run.delete(LET_GO + GONE)?;
    held.is_over(&uid)
}

/// All of them at once, as with `kubectl delete -f crds`.
fn without_any_definition_everything_ends(stage: &Stage) -> Result<()> {
    let held = Held::set(stage, "without_any_definition")?;
    let (_run, uid) = held.begin()?;
    let definitions = chart().join("crds");
    let definitions = definitions.to_str().context("the chart's path")?;
    let seen = delete(&held, &["--filename", definitions]);
    stage.windtunnel.install(&[])?;
    seen?;
    held.is_over(&uid)
}

/// Deletes definitions, sees what is in place end, and waits until they and all of their kind are gone.
fn delete(held: &Held<'_>, what: &[&str]) -> Result<()> {
    let stage = held.scene.space.stage;
    let moment = Instant::now();
    kubectl(stage, &[&["delete", "--wait=false"], what].concat())?;
    held.comes_back(moment)?;
    let timeout = format!("--timeout={}s", (LET_GO + GONE).as_secs());
    kubectl(stage, &[&["wait", "--for=delete", &timeout], what].concat()).map(drop)
}

/// An echo that a fault of the network silences, on one node, and another that stands still, on the
/// other node.
struct Held<'a> {
    scene: Scene<'a>,
    still: Pod,
    /// Of the one that stands still.
    lamp: Lamp,
    before: String,
}

impl<'a> Held<'a> {
    fn set(stage: &'a Stage, test: &str) -> Result<Self> {
        let scene = Scene::set(stage, test, "node1")?;
        let still = Wanted {
            name: "still",
            app: "still",
            node: "node2",
            args: &["echo"],
        };
        let still = scene.space.pods(&[still])?.pop().context("no pod")?;
        Ok(Self {
            lamp: Lamp::light(stage, &still)?,
            before: stage.snapshot(&still)?,
            scene,
            still,
        })
    }

    /// Applies a run with both faults, and waits until they are seen; the run and its uid.
    fn begin(&self) -> Result<(Run<'a>, String)> {
        let applied = Instant::now();
        let run = self.scene.space.run(
            "run",
            "
duration: 300s
faults:
- name: silent
  target: {selector: {matchLabels: {app: echo}}}
  network: {loss: {percent: 100}}
- name: still
  target: {selector: {matchLabels: {app: still}}}
  containerPause: {}
",
        )?;
        run.wait("Injected", SOON)?;
        for lamp in self.lamps() {
            lamp.goes_out(applied, GONE)?;
        }
        let uid = traces::uid(&self.scene.space, "run")?;
        Ok((run, uid))
    }

    /// A run whose nodes are prepared, and whose window does not open.
    fn wait_for_a_window(&self) -> Result<Run<'a>> {
        let run = self.scene.space.run(
            "waiting",
            "
duration: 300s
faults:
- name: later
  startAfter: 250s
  target: {selector: {matchLabels: {app: other}}}
  cpu: {load: 10, cores: 100m}
",
        )?;
        run.wait("Prepared", SOON)?;
        Ok(run)
    }

    /// Fails unless both echoes answer again soon after a moment, by what leaves them now.
    fn comes_back(&self, moment: Instant) -> Result<()> {
        for lamp in self.lamps() {
            lamp.comes_back(moment, SOON)?;
        }
        let took = moment.elapsed();
        ensure!(took < SOON, "the faults ended {took:?} after the deletion");
        Ok(())
    }

    /// With everything as it should be again: nothing is left of a run, and another one works.
    fn is_over(&self, uid: &str) -> Result<()> {
        let scene = &self.scene;
        let stage = scene.space.stage;
        traces::is_forgotten(&scene.space, "run", uid)?;
        scene.is_as_before()?;
        traces::is_as_before(stage, &self.still, &self.before)?;
        stage.windtunnel.wait_for_operators()?;
        let (run, uid) = self.begin()?;
        run.delete(SOON)?;
        traces::is_forgotten(&scene.space, "run", &uid)?;
        scene.is_as_before()?;
        traces::is_as_before(stage, &self.still, &self.before)
    }

    fn lamps(&self) -> [&Lamp; 2] {
        [&self.scene.lamp, &self.lamp]
    }
}
