//! What becomes of a fault when its target is restarted, or goes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::{reach, until};

use super::scene::{GONE, SOON, Scene, ended};
use super::stage::{Stage, Test, kubectl};
use super::traces;

pub(crate) const GENTLE: &[Test] = &[
    (
        "a_network_fault_stays_while_a_container_restarts",
        a_network_fault_stays_while_a_container_restarts,
    ),
    (
        "a_pod_that_is_deleted_is_gone_with_its_network",
        a_pod_that_is_deleted_is_gone_with_its_network,
    ),
    (
        "a_pod_with_another_sandbox_is_not_gone",
        a_pod_with_another_sandbox_is_not_gone,
    ),
];

/// The network is the pod's: its container is killed and comes back, and not one packet passes.
fn a_network_fault_stays_while_a_container_restarts(stage: &Stage) -> Result<()> {
    let scene = Scene::set(
        stage,
        "a_network_fault_stays_while_a_container_restarts",
        "node2",
    )?;
    let (run, uid) = scene.silenced("run", "90s")?;
    let dark = Instant::now();
    let (space, echo) = (&scene.space, &scene.echo);
    let node = stage.cluster.node(&echo.node)?;
    // The first is what holds the pod's network.
    let pids = stage.pids(&echo.node, &echo.uid)?;
    node.signal(*pids.last().context("no process")?, Signal::SIGKILL)?;
    let back = until("a container that is back", SOON, || {
        let pod = stage
            .cluster
            .get(&["pod", &echo.name, "--namespace", &space.name])?;
        let container = &pod["status"]["containerStatuses"][0];
        let is_back = container["restartCount"] == 1 && container["ready"] == true;
        Ok(is_back.then(Instant::now))
    })?;
    reach(back + Duration::from_secs(2));
    scene.lamp.was_out(dark, Instant::now())?;
    let target = traces::target(stage, &uid, echo)?;
    ensure!(target["state"] == "Injected", "the agent says {target}");
    let aborted = Instant::now();
    run.abort()?;
    scene.lamp.comes_back(aborted, GONE)?;
    ended(&run, "Aborted", "AbortRequested")?;
    scene.is_as_before()
}

/// The target is done, which is no failure of the run; nothing of windtunnel's keeps its network.
fn a_pod_that_is_deleted_is_gone_with_its_network(stage: &Stage) -> Result<()> {
    let scene = Scene::set(
        stage,
        "a_pod_that_is_deleted_is_gone_with_its_network",
        "node1",
    )?;
    let echo = &scene.echo;
    let node = stage.cluster.node(&echo.node)?;
    let pid = stage.pid(echo)?;
    let network = node.run(&["readlink", &format!("/proc/{pid}/ns/net")])?;
    let network = network.text()?.trim().to_owned();
    let (run, uid) = scene.silenced("run", "60s")?;
    kubectl(
        stage,
        &[
            "delete",
            "pod",
            &echo.name,
            "--namespace",
            &scene.space.name,
            "--grace-period=1",
        ],
    )?;
    let target = until("a target that is done", SOON, || {
        let target = traces::target(stage, &uid, echo)?;
        let is_done = !["Injected", "Prepared"].contains(&target["state"].as_str().unwrap_or(""));
        Ok(is_done.then_some(target))
    })?;
    ensure!(
        target["state"] == "Gone" && target["reason"] == "TargetGone",
        "the agent says {target}"
    );
    let held = format!(
        "for process in /proc/[0-9]*; do [ \"$(readlink $process/ns/net)\" != '{network}' ] || echo $process; done; grep -F '{network}' /proc/1/mountinfo || true"
    );
    until("a network that nobody holds", SOON, || {
        let held = node.run(&["sh", "-c", &held])?;
        Ok(held.text()?.trim().is_empty().then_some(()))
    })?;
    ended(&run, "Completed", "WindowsClosed")
}

/// What holds its network dies: the pod goes on with another network, on which there is no fault.
fn a_pod_with_another_sandbox_is_not_gone(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_pod_with_another_sandbox_is_not_gone", "node1")?;
    let (run, uid) = scene.silenced("run", "60s")?;
    let echo = &scene.echo;
    let node = stage.cluster.node(&echo.node)?;
    node.signal(stage.pid(echo)?, Signal::SIGKILL)?;
    let told = until("a target that is not hit any more", SOON, || {
        let target = traces::target(stage, &uid, echo)?;
        Ok((target["state"] == "Interrupted").then_some(target))
    })
    .with_context(|| format!("{:?}", traces::target(stage, &uid, echo)))?;
    // Its link may go while the injector looks, or all of the pod's processes for a while.
    let reasons = ["EffectVanished", "SandboxReplaced"];
    ensure!(
        reasons.iter().any(|reason| told["reason"] == *reason),
        "the agent says {told}"
    );
    ended(&run, "Failed", "WindowsClosed")
}
