//! Memory faults, measured by the target's own control group.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::{Signal, poll::until};

use super::stage::{Space, Stage, Test};
use super::traces;

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[(
    "memory_is_held_below_the_limit_or_brings_a_kill",
    memory_is_held_below_the_limit_or_brings_a_kill,
)];

const SOON: Duration = Duration::from_mins(1);
const MIB: f64 = 1_048_576.0;

/// Megabytes that a pod's container uses, from inside.
fn usage(space: &Space<'_>) -> Result<f64> {
    let argv = ["/windtunnel-sample", "usage", "--millis", "10"];
    let text = space
        .stage
        .cluster
        .pod_exec(&space.name, "tight", "sample", &argv)?;
    let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(value["memoryBytes"].as_f64().context("no memoryBytes")? / MIB)
}

fn restarts(space: &Space<'_>) -> Result<i64> {
    let pod = space
        .stage
        .cluster
        .get(&["pod", "tight", "--namespace", &space.name])?;
    let count = pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
    count.context("no restartCount")
}

/// Half of a limit is held and given back; then more than the limit with oomKill: the kill is an effect.
fn memory_is_held_below_the_limit_or_brings_a_kill(stage: &Stage) -> Result<()> {
    let space = stage.space("memory_is_held_below_the_limit_or_brings_a_kill")?;
    stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: tight, namespace: {space}, labels: {{app: tight}}}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: sample, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [idle], resources: {{limits: {{memory: 128Mi}}, requests: {{memory: 16Mi}}}}}}
",
        space = space.name,
        tag = stage.windtunnel.images.tag,
    ))?;
    let pod = space.ready("tight")?;
    let before = usage(&space)?;
    let spec = |memory: &str| {
        format!(
            "
duration: 3m
faults:
- name: tight
  target: {{selector: {{matchLabels: {{app: tight}}}}}}
  memory: {memory}
"
        )
    };
    let is_held = |space: &Space<'_>| {
        until("half of the limit is held", SOON, || {
            let held = usage(space)? - before;
            Ok((60.0..72.0).contains(&held).then_some(()))
        })
    };
    let is_free = |space: &Space<'_>| {
        until("the memory is free", SOON, || {
            Ok((usage(space)? < before + 8.0).then_some(()))
        })
    };
    let run = space.run("hold", &spec("{percent: 50}"))?;
    run.wait("Injected", SOON)?;
    is_held(&space)?;
    run.delete(SOON)?;
    is_free(&space)?;
    let run = space.run("again", &spec("{percent: 50, ramp: 2s}"))?;
    run.wait("Injected", SOON)?;
    is_held(&space)?;
    let injector = traces::injector(stage, &pod)?;
    let node = stage.cluster.node(&pod.node)?;
    node.signal(injector, Signal::SIGKILL)?;
    is_free(&space)?;
    run.wait("Finished", SOON)?;
    ensure!(
        run.status()?["faults"][0]["interrupted"] == 1 && run.condition("Clean")?.0 == "True",
        "status: {}",
        run.status()?
    );
    ensure!(restarts(&space)? == 0, "the container was killed");
    a_kill_is_an_effect(&space, &spec("{size: 1Gi, oomKill: true}"))
}

/// More than the limit is taken, and that the kernel kills for it is what was asked for.
fn a_kill_is_an_effect(space: &Space<'_>, spec: &str) -> Result<()> {
    let kill = space.run("kill", spec)?;
    let status = kill.until("a kill as an effect", SOON, |status| {
        status["faults"][0]["effect"]["oomKills"].as_i64() > Some(0)
    })?;
    ensure!(
        status["faults"][0]["interrupted"] == 0 && status["faults"][0]["failed"] == 0,
        "status: {status}"
    );
    kill.abort()?;
    kill.wait("Finished", SOON)?;
    ensure!(kill.phase()? == "Aborted", "status: {}", kill.status()?);
    Ok(())
}
