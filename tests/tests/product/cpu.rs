//! CPU faults, measured by the target's own control group.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;

use super::stage::{Space, Stage, Test, kubectl};

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[(
    "cpu_burns_in_its_container_and_follows_it",
    cpu_burns_in_its_container_and_follows_it,
)];

const SOON: Duration = Duration::from_secs(40);

/// What a container uses, from inside.
fn usage(space: &Space<'_>, container: &str) -> Result<f64> {
    let argv = ["/windtunnel-sample", "usage", "--millis", "2000"];
    let text = space
        .stage
        .cluster
        .pod_exec(&space.name, "hot", container, &argv)?;
    let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    value["millicores"].as_f64().context("no millicores")
}

/// A load is there on the named container while its window is open, follows the container through a
/// restart, and is nowhere else.
pub(crate) fn cpu_burns_in_its_container_and_follows_it(stage: &Stage) -> Result<()> {
    let space = stage.space("cpu_burns_in_its_container_and_follows_it")?;
    let tag = &stage.windtunnel.images.tag;
    let container = |name: &str| {
        format!(
            "{{name: {name}, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [idle], resources: {{limits: {{cpu: 400m}}, requests: {{cpu: 10m}}}}}}"
        )
    };
    stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: hot, namespace: {space}, labels: {{app: hot}}}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 0
  containers:
  - {first}
  - {second}
",
        space = space.name,
        first = container("first"),
        second = container("second"),
    ))?;
    space.ready("hot")?;
    ensure!(usage(&space, "second")? < 100.0, "busy before the fault");
    let run = space.run(
        "hot",
        "
duration: 90s
faults:
- name: hot
  target: {selector: {matchLabels: {app: hot}}, containers: [second]}
  cpu: {load: 50}
",
    )?;
    run.wait("Injected", SOON)?;
    burns(&space, "second")?;
    ensure!(usage(&space, "first")? < 100.0, "the other container burns");
    let effect = run.until("the burner's own measurement", SOON, |status| {
        status["faults"][0]["effect"]["millicores"].as_i64() > Some(0)
    })?;
    ensure!(
        effect["faults"][0]["matchedPackets"].is_null(),
        "packets of a burner: {effect}"
    );
    restart(&space, "second")?;
    burns(&space, "second")?;
    run.abort()?;
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    ensure!(
        status["faults"][0]["recovered"] == 1 && status["faults"][0]["interrupted"] == 0,
        "status: {status}"
    );
    ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
    until("the load is gone", SOON, || {
        Ok((usage(&space, "second")? < 100.0).then_some(()))
    })
}

/// Half of the limit of 400m is burnt; what takes the measurement is on top of it.
fn burns(space: &Space<'_>, container: &str) -> Result<()> {
    let mut seen = Vec::new();
    // The machine may take CPU time away for a while.
    for _ in 0..10 {
        let millicores = usage(space, container)?;
        if (180.0..260.0).contains(&millicores) {
            return Ok(());
        }
        seen.push(millicores);
    }
    anyhow::bail!("200 millicores are to be burnt, {seen:?} were");
}

/// Ends the container's first process, and waits for the container that takes its place.
fn restart(space: &Space<'_>, container: &str) -> Result<()> {
    let state = |what: &str| {
        let path =
            format!("jsonpath={{.status.containerStatuses[?(@.name==\"{container}\")].{what}}}");
        kubectl(
            space.stage,
            &[
                "get",
                "pod",
                "hot",
                "--namespace",
                &space.name,
                "--output",
                &path,
            ],
        )
    };
    let before = state("containerID")?;
    let kill = format!(
        "kill -9 $(cat $(find /sys/fs/cgroup -type d -name '*{}*')/cgroup.procs | sort -n | head -1)",
        before.trim().trim_start_matches("containerd://")
    );
    space
        .stage
        .cluster
        .node("node1")?
        .run(&["sh", "-c", &kill])?
        .text()?;
    until("another container", SOON, || {
        let now = state("containerID")?;
        let is_running = !state("state.running.startedAt")?.trim().is_empty();
        Ok((now != before && is_running).then_some(()))
    })
}
