//! A run can be ended in every phase, by `spec.abort` and by deletion, and then nothing of it is
//! left: no effect, no object, no finalizer.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use windtunnel_tests::cluster::success;

use super::scene::{GONE, SOON, Scene, Stopped, ended, silence};
use super::stage::{Stage, Test, kubectl};
use super::traces;

/// How long a deletion may take while everybody is there to see to it.
const DELETED: Duration = Duration::from_secs(30);

pub(crate) const GENTLE: &[Test] = &[
    (
        "abort_ends_a_run_in_every_phase",
        abort_ends_a_run_in_every_phase,
    ),
    (
        "deletion_ends_a_run_in_every_phase",
        deletion_ends_a_run_in_every_phase,
    ),
    (
        "what_a_long_delay_holds_back_holds_up_no_end",
        what_a_long_delay_holds_back_holds_up_no_end,
    ),
];

pub(crate) const ROUGH: &[Test] = &[(
    "a_run_held_up_by_its_node_can_be_ended",
    a_run_held_up_by_its_node_can_be_ended,
)];

/// Packets wait for longer than the run lasts, up to its end: their queues go all the same, and
/// nothing is in doubt.
fn what_a_long_delay_holds_back_holds_up_no_end(stage: &Stage) -> Result<()> {
    let scene = Scene::set(
        stage,
        "what_a_long_delay_holds_back_holds_up_no_end",
        "node1",
    )?;
    let applied = Instant::now();
    let spec = "
duration: 8s
faults:
- name: slow
  target: {selector: {matchLabels: {app: echo}}}
  network: {delay: {latency: 60s}, direction: Both}
";
    let run = scene.space.run("run", spec)?;
    run.wait("Injected", SOON)?;
    scene.lamp.goes_out(applied, GONE)?;
    ended(&run, "Completed", "WindowsClosed")?;
    let status = run.status()?;
    let held = status["faults"][0]["matchedPackets"].as_u64();
    ensure!(held > Some(0), "status: {status}");
    scene.is_as_before()
}

/// `spec.abort` at birth, before the window, with the fault in place and after the end.
fn abort_ends_a_run_in_every_phase(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "abort_ends_a_run_in_every_phase", "node1")?;
    let over = scene.silence("over", "1s", "0s")?;
    ended(&over, "Completed", "WindowsClosed")?;
    over.abort()?;

    let spec = format!("{}abort: true\n", silence("60s", "0s"));
    let born = scene.space.run("born", &spec)?;
    ended(&born, "Aborted", "AbortRequested")?;
    let uid = traces::uid(&scene.space, "born")?;
    let asked = traces::injections(stage, &uid)?;
    ensure!(asked.is_empty(), "a node was asked: {asked:?}");

    let early = scene.silence("early", "60s", "50s")?;
    early.until("a run that waits for its window", SOON, |s| {
        s["phase"] == "Running"
    })?;
    early.abort()?;
    ended(&early, "Aborted", "AbortRequested")?;
    let status = early.status()?;
    ensure!(status["summary"]["injected"] == "0/1", "status: {status}");
    ensure!(
        early.condition("Injected")?.0 == "False",
        "status: {status}"
    );

    let (run, uid) = scene.silenced("in-place", "60s")?;
    let aborted = Instant::now();
    run.abort()?;
    let took = scene.lamp.comes_back(aborted, SOON)?;
    ensure!(took < GONE, "the fault ended {took:?} after the abort");
    ended(&run, "Aborted", "AbortRequested")?;
    let target = traces::target(stage, &uid, &scene.echo)?;
    ensure!(
        target["state"] == "Recovered" && target["reason"] == "Aborted",
        "the agent says {target}"
    );
    ensure!(run.condition("Injected")?.0 == "True", "{}", run.status()?);
    scene.is_as_before()?;
    abort_stays(&scene)?;
    // It has been looked at since: later changes of others were.
    ensure!(over.phase()? == "Completed", "{}", over.status()?);
    Ok(())
}

/// An abort cannot be taken back.
fn abort_stays(scene: &Scene<'_>) -> Result<()> {
    let patched = scene.space.stage.cluster.kubectl(&[
        "patch",
        "chaosexperiment",
        "in-place",
        "--namespace",
        &scene.space.name,
        "--type=merge",
        "--patch={\"spec\": {\"abort\": false}}",
    ])?;
    let refused = success(&patched).err().map(|e| e.to_string());
    ensure!(
        refused
            .as_ref()
            .is_some_and(|e| e.contains("cannot be taken back")),
        "taking an abort back: {refused:?}"
    );
    Ok(())
}

/// Deletion right after creation, before the window, with the fault in place and after the end.
fn deletion_ends_a_run_in_every_phase(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "deletion_ends_a_run_in_every_phase", "node2")?;
    for _ in 0..4 {
        let run = scene.silence("at-once", "60s", "0s")?;
        let uid = traces::uid(&scene.space, "at-once")?;
        run.delete(DELETED)?;
        traces::is_forgotten(&scene.space, "at-once", &uid)?;
        scene.is_as_before()?;
    }

    let run = scene.silence("early", "60s", "50s")?;
    run.until("a run that waits for its window", SOON, |s| {
        s["phase"] == "Running"
    })?;
    let uid = traces::uid(&scene.space, "early")?;
    run.delete(DELETED)?;
    traces::is_forgotten(&scene.space, "early", &uid)?;
    scene.is_as_before()?;

    let (run, uid) = scene.silenced("in-place", "60s")?;
    let deleted = Instant::now();
    run.delete(DELETED)?;
    let took = scene.lamp.comes_back(deleted, SOON)?;
    ensure!(took < GONE, "the fault ended {took:?} after the deletion");
    traces::is_forgotten(&scene.space, "in-place", &uid)?;
    scene.is_as_before()?;
    let events = traces::events(&scene.space, "in-place")?;
    ensure!(
        events.iter().any(|e| e.starts_with("Finished: Deleted")),
        "the events say {events:?}"
    );

    let run = scene.silence("over", "1s", "0s")?;
    ended(&run, "Completed", "WindowsClosed")?;
    let uid = traces::uid(&scene.space, "over")?;
    run.delete(DELETED)?;
    traces::is_forgotten(&scene.space, "over", &uid)?;
    scene.is_as_before()
}

/// The same in Preparing and in Recovering, which a run passes quickly: here the node's agent
/// stands still meanwhile.
fn a_run_held_up_by_its_node_can_be_ended(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_run_held_up_by_its_node_can_be_ended", "node1")?;
    let node = &scene.echo.node;

    let stopped = Stopped::agent(stage, node)?;
    let aborted = scene.silence("aborted", "60s", "0s")?;
    let deleted = scene.silence("deleted", "60s", "0s")?;
    for run in [&aborted, &deleted] {
        run.until("a run in preparation", SOON, |s| s["phase"] == "Preparing")?;
    }
    let uid = traces::uid(&scene.space, "deleted")?;
    aborted.abort()?;
    delete_later(&scene, "deleted")?;
    aborted.until("an end that the node holds up", SOON, |s| {
        s["phase"] == "Recovering"
    })?;
    stopped.resume()?;
    ended(&aborted, "Aborted", "AbortRequested")?;
    deleted.delete(DELETED)?;
    traces::is_forgotten(&scene.space, "deleted", &uid)?;
    scene.is_as_before()?;

    let (run, uid) = scene.silenced("recovering", "60s")?;
    let stopped = Stopped::agent(stage, node)?;
    run.abort()?;
    run.until("a recovery that the node holds up", SOON, |s| {
        s["phase"] == "Recovering"
    })?;
    delete_later(&scene, "recovering")?;
    stopped.resume()?;
    run.delete(DELETED)?;
    traces::is_forgotten(&scene.space, "recovering", &uid)?;
    scene.is_as_before()
}

/// Deletes an experiment and does not wait for its end.
fn delete_later(scene: &Scene<'_>, name: &str) -> Result<()> {
    let arguments = [
        "delete",
        "chaosexperiment",
        name,
        "--namespace",
        &scene.space.name,
        "--wait=false",
    ];
    kubectl(scene.space.stage, &arguments).map(drop)
}
