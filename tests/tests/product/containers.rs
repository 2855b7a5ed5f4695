//! Containers killed and paused.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;

use super::stage::{ECHO, Pod, Space, Stage, Test, Wanted, at, kubectl};
use super::traces;

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[
    (
        "a_paused_container_stands_still",
        a_paused_container_stands_still,
    ),
    (
        "a_paused_container_that_its_probe_has_killed_stays_paused",
        a_paused_container_that_its_probe_has_killed_stays_paused,
    ),
    (
        "a_container_is_killed_once_or_again",
        a_container_is_killed_once_or_again,
    ),
    ("signals_are_those_asked_for", signals_are_those_asked_for),
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
    until("an answer before the fault", SOON, || {
        Ok((probe()?.answered > 0).then_some(()))
    })?;
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

/// What a pod says of its container.
fn container(space: &Space<'_>, pod: &str) -> Result<Value> {
    let pod = ["pod", pod, "--namespace", &space.name];
    let pod = space.stage.cluster.get(&pod)?;
    Ok(pod["status"]["containerStatuses"][0].clone())
}

/// How often the pod's container has been restarted.
fn restarts(space: &Space<'_>, pod: &str) -> Result<i64> {
    let count = container(space, pod)?["restartCount"].as_i64();
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

/// A service that kubelet kills because it does not answer: the pause follows its container, and with
/// the fault's end it serves again, held by nobody.
fn a_paused_container_that_its_probe_has_killed_stays_paused(stage: &Stage) -> Result<()> {
    let space = stage.space("a_paused_container_that_its_probe_has_killed")?;
    stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: served, namespace: {space}, labels: {{app: served}}}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers:
  - name: sample
    image: 'windtunnel/sample:{tag}'
    imagePullPolicy: Never
    args: [serve]
    livenessProbe: &probe {{httpGet: {{path: /stats, port: 8080}}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2}}
    readinessProbe: *probe
",
        space = space.name,
        tag = stage.windtunnel.images.tag,
    ))?;
    let pod = space.ready("served")?;
    let before = stage.snapshot(&pod)?;
    let run = space.run(
        "pause",
        "
duration: 5m
faults:
- name: pause
  target: {selector: {matchLabels: {app: served}}}
  containerPause: {}
",
    )?;
    run.wait("Injected", SOON)?;
    let first = held(stage, &pod)?;
    ensure!(!first.is_empty(), "nothing is held of a paused container");
    until(
        "a container that took its place, held as well",
        SOON * 2,
        || {
            let now = held(stage, &pod)?;
            let is_another = !now.is_empty() && now.iter().all(|pid| !first.contains(pid));
            Ok((is_another && restarts(&space, "served")? > 0).then_some(()))
        },
    )?;
    run.until(
        "the pause of the container that took its place",
        SOON,
        |status| {
            let fault = &status["faults"][0];
            fault["effect"]["threads"].as_i64() > Some(0) && fault["phase"] == "Active"
        },
    )?;
    run.abort()?;
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    let fault = &status["faults"][0];
    ensure!(
        status["phase"] == "Aborted"
            && fault["injected"] == 1
            && fault["recovered"] == 1
            && fault["interrupted"] == 0
            && fault["failed"] == 0,
        "status: {status}"
    );
    ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
    space.ready("served")?;
    let still = held(stage, &pod)?;
    ensure!(still.is_empty(), "still held: {still:?}");
    traces::is_as_before(stage, &pod, &before)
}

/// The processes of a pod that another process holds.
fn held(stage: &Stage, pod: &Pod) -> Result<Vec<i32>> {
    let mut held = stage.pids(&pod.node, &pod.uid)?;
    let script = "grep -l '^TracerPid:[[:space:]]*[1-9]' /proc/[0-9]*/status 2>/dev/null || true";
    let node = stage.cluster.node(&pod.node)?;
    let traced = node.run(&["sh", "-c", script])?.text()?;
    held.retain(|pid| traced.contains(&format!("/proc/{pid}/")));
    Ok(held)
}

/// A program hears the signals that are asked for, each so often and so far apart as is asked for, and
/// one that it ends by is told as what it is: not a kill.
fn signals_are_those_asked_for(stage: &Stage) -> Result<()> {
    let space = stage.space("signals_are_those_asked_for")?;
    let (_, client) = echo_and_client(&space)?;
    let signals = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2"];
    let fault = |(name, more): (&str, &str)| {
        format!(
            "- name: {}
  target: {{selector: {{matchLabels: {{app: client}}}}}}
  containerKill: {{signal: {name}{more}}}
",
            name.to_lowercase()
        )
    };
    let faults: String = signals.map(|name| fault((name, ""))).concat();
    let again =
        fault(("SIGUSR1", ", every: 2s")).replace("name: sigusr1", "name: again\n  startAfter: 1s");
    let run = space.run("heard", &format!("duration: 12s\nfaults:\n{faults}{again}"))?;
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    ensure!(status["phase"] == "Completed", "status: {status}");
    let heard = heard(&space, &client)?;
    let times = |name: &str| {
        let of_it = heard.iter().filter(|(_, heard)| heard == name);
        of_it.map(|(at, _)| *at).collect::<Vec<Timestamp>>()
    };
    for name in signals.iter().filter(|name| **name != "SIGUSR1") {
        ensure!(times(name).len() == 1, "{name} once: {heard:?}");
    }
    let sent = times("SIGUSR1");
    let told = status["faults"][5]["effect"]["signals"].as_u64();
    // The first of them is that of the fault that sends it once.
    ensure!(
        (4..=9).contains(&sent.len()) && told == Some(sent.len() as u64 - 1),
        "SIGUSR1 each 2 s for 11 s: {heard:?}; the status says {told:?}"
    );
    are_apart(&sent[1..]).with_context(|| format!("{heard:?}"))?;
    ensure!(restarts(&space, "client")? == 0, "the container ended");
    let spec = format!("duration: 60s\nfaults:\n{}", fault(("SIGTERM", "")));
    let run = space.run("ends", &spec)?;
    run.wait("Finished", SOON)?;
    ensure!(run.phase()? == "Completed", "status: {}", run.status()?);
    let last = until("a container that has ended", SOON, || {
        let last = &container(&space, "client")?["lastState"]["terminated"];
        Ok((!last.is_null()).then(|| last.clone()))
    })?;
    ensure!(last["exitCode"] == 0, "SIGTERM was not heard: {last}");
    Ok(())
}

/// Fails unless what is sent each 2 s is as far apart: on the whole, for a single line of a log may be
/// late and the next in time.
fn are_apart(sent: &[Timestamp]) -> Result<()> {
    let millis = |two: &[Timestamp]| two[1].duration_since(two[0]).as_millis();
    let apart: Vec<i128> = sent.windows(2).map(millis).collect();
    let whole: i128 = apart.iter().sum();
    ensure!(
        whole >= 1_900 * apart.len() as i128 && apart.iter().all(|one| *one > 1_000),
        "{apart:?} ms apart"
    );
    Ok(())
}

/// The signals that a pod's program says it has heard, and when.
fn heard(space: &Space<'_>, pod: &Pod) -> Result<Vec<(Timestamp, String)>> {
    let logs = [
        "logs",
        "--timestamps",
        "--namespace",
        &space.name,
        &pod.name,
    ];
    let log = kubectl(space.stage, &logs)?;
    let lines = log.lines().filter_map(|line| line.split_once(' '));
    lines
        .map(|(at, name)| Ok((at.parse()?, name.to_owned())))
        .collect()
}
