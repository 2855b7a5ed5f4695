//! Containers killed and paused.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::poll::until;

use super::stage::{ECHO, Pod, Space, Stage, Test, Wanted, at};

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[
    (
        "a_paused_container_stands_still",
        a_paused_container_stands_still,
    ),
    (
        "a_container_is_killed_once_or_again",
        a_container_is_killed_once_or_again,
    ),
];

const SOON: Duration = Duration::from_mins(1);

fn echo_and_client(space: &Space<'_>) -> Result<(Pod, Pod)> {
    let wanted = |name, node, args| Wanted {
        name,
        app: name,
        node,
        args,
    };
    let mut pods = space.pods(&[
        wanted("echo", "node2", &["echo"]),
        wanted("client", "node1", &["idle"]),
    ])?;
    let (client, echo) = (pods.pop(), pods.pop());
    Ok((echo.context("no echo")?, client.context("no client")?))
}

/// A paused echo does not answer while the window is open, and answers afterwards what it was sent
/// in it.
pub(crate) fn a_paused_container_stands_still(stage: &Stage) -> Result<()> {
    let space = stage.space("a_paused_container_stands_still")?;
    let (echo, client) = echo_and_client(&space)?;
    let probe = || space.probe(&client, &at(&echo.v4, ECHO), 20, Duration::from_millis(20));
    ensure!(probe()?.answered > 0, "no answer before the fault");
    let run = space.run(
        "pause",
        "
duration: 90s
faults:
- name: pause
  target: {selector: {matchLabels: {app: echo}}}
  containerPause: {}
",
    )?;
    run.wait("Injected", SOON)?;
    let paused = probe()?;
    ensure!(paused.answered == 0, "a paused echo answers: {paused:?}");
    run.abort()?;
    run.wait("Finished", SOON)?;
    until("an answer after the fault", SOON, || {
        Ok((probe()?.answered > 0).then_some(()))
    })?;
    ensure!(
        run.condition("Clean")?.0 == "True",
        "status: {}",
        run.status()?
    );
    let status = run.status()?;
    ensure!(status["faults"][0]["recovered"] == 1, "status: {status}");
    Ok(())
}

/// How often the pod's container has been restarted.
fn restarts(space: &Space<'_>, pod: &str) -> Result<i64> {
    let pod = space
        .stage
        .cluster
        .get(&["pod", pod, "--namespace", &space.name])?;
    let count = pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
    count.context("no restartCount")
}

/// A container is killed once, and the run is over; another is killed again and again.
pub(crate) fn a_container_is_killed_once_or_again(stage: &Stage) -> Result<()> {
    let space = stage.space("a_container_is_killed_once_or_again")?;
    echo_and_client(&space)?;
    let run = space.run(
        "kill",
        "
duration: 120s
faults:
- name: once
  target: {selector: {matchLabels: {app: echo}}}
  containerKill: {}
- name: again
  duration: 100s
  target: {selector: {matchLabels: {app: client}}}
  containerKill: {every: 2s}
",
    )?;
    run.wait("Injected", SOON)?;
    run.until("the single kill is over", SOON, |status| {
        status["faults"][0]["phase"] == "Ended" && status["faults"][0]["recovered"] == 1
    })?;
    until("two kills", SOON, || {
        Ok((restarts(&space, "client")? >= 2).then_some(()))
    })?;
    run.abort()?;
    run.wait("Finished", SOON)?;
    until("the container is back", SOON, || {
        Ok((restarts(&space, "echo")? == 1).then_some(()))
    })?;
    let status = run.status()?;
    ensure!(
        status["faults"][1]["interrupted"] == 0 && status["faults"][1]["failed"] == 0,
        "status: {status}"
    );
    Ok(())
}
