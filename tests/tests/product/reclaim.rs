//! Whatever dies, the fault ends: injectors, agents and both together are killed and stopped,
//! and the traffic is normal again within the bounds of the layers that are left.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::scene::{SOON, Scene, Stopped, agent_is_ready, restarts};
use super::stage::{Stage, Test, kubectl};
use super::traces;

/// What the kernel owns ends with its owner: no timer is in it, so the bound is patience.
const AT_ONCE: Duration = Duration::from_secs(2);
/// A lease of three seconds, with the same patience.
const LEASE: Duration = Duration::from_secs(6);
/// How long the runs here would last.
const WINDOW: Duration = Duration::from_secs(12);

pub(crate) const GENTLE: &[Test] = &[
    (
        "a_killed_injector_takes_its_fault_along",
        a_killed_injector_takes_its_fault_along,
    ),
    ("a_stopped_injector_is_killed", a_stopped_injector_is_killed),
    (
        "a_withdrawn_node_injection_is_taken_back_and_doubted",
        a_withdrawn_node_injection_is_taken_back_and_doubted,
    ),
];

pub(crate) const ROUGH: &[Test] = &[
    (
        "a_killed_agent_takes_its_faults_along",
        a_killed_agent_takes_its_faults_along,
    ),
    (
        "agent_and_injector_may_die_together",
        agent_and_injector_may_die_together,
    ),
    (
        "a_stopped_agent_loses_its_faults",
        a_stopped_agent_loses_its_faults,
    ),
    (
        "a_removed_agent_takes_its_faults_along",
        a_removed_agent_takes_its_faults_along,
    ),
];

/// How a fault must have ended.
struct Expected {
    within: Duration,
    reason: &'static str,
    reclaimed_by: &'static [&'static str],
}

/// An injector is killed.
fn a_killed_injector_takes_its_fault_along(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_killed_injector_takes_its_fault_along", "node1")?;
    let expected = Expected {
        within: AT_ONCE,
        reason: "InjectorDied",
        reclaimed_by: &["Kernel"],
    };
    interrupted(&scene, &expected, |injector| {
        stage
            .cluster
            .node("node1")?
            .signal(injector, Signal::SIGKILL)
    })
}

/// An injector is stopped: it says nothing any more, and its agent kills it.
fn a_stopped_injector_is_killed(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_stopped_injector_is_killed", "node2")?;
    let expected = Expected {
        within: LEASE,
        reason: "InjectorSilent",
        // Both count three seconds.
        reclaimed_by: &["Agent", "InjectorLease"],
    };
    interrupted(&scene, &expected, |injector| {
        stage
            .cluster
            .node("node2")?
            .signal(injector, Signal::SIGSTOP)
    })
}

/// Somebody deletes a node injection: the fault ends at once, and since nobody can report that,
/// the run says that it does not know, from then on.
fn a_withdrawn_node_injection_is_taken_back_and_doubted(stage: &Stage) -> Result<()> {
    let name = "a_withdrawn_node_injection_is_taken_back_and_doubted";
    let scene = Scene::set(stage, name, "node1")?;
    let (run, uid) = scene.silenced("run", &format!("{}s", WINDOW.as_secs()))?;
    let moment = Instant::now();
    for injection in traces::injections(stage, &uid)? {
        let name = injection["metadata"]["name"].as_str().unwrap_or_default();
        kubectl(stage, &["delete", "nodeinjection", name, "-n", NAMESPACE])?;
    }
    let took = scene.lamp.comes_back(moment, SOON)?;
    ensure!(took < LEASE, "the fault ended {took:?} after the deletion");
    run.until("the doubt", SOON, |s| {
        s["faults"][0]["phase"] == "Failed" && s["summary"]["injected"] == "1/1"
    })?;
    for condition in ["Recovered", "Clean"] {
        let said = run.condition(condition)?;
        ensure!(
            (said.0.as_str(), said.1.as_str()) == ("Unknown", "Withdrawn"),
            "{condition} is {said:?}"
        );
    }
    run.wait("Finished", SOON)?;
    ensure!(run.phase()? == "Failed", "{}", run.status()?);
    ensure!(run.condition("Clean")?.0 == "Unknown", "{}", run.status()?);
    scene.is_as_before()
}

/// An agent is killed: its injectors end with it, and the next agent says so.
fn a_killed_agent_takes_its_faults_along(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_killed_agent_takes_its_faults_along", "node1")?;
    dies_with_its_agent(&scene, |_| {
        let agent = stage.agent("node1")?;
        stage.cluster.node("node1")?.signal(agent, Signal::SIGKILL)
    })
}

/// An agent and its injector are killed in one go.
fn agent_and_injector_may_die_together(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "agent_and_injector_may_die_together", "node2")?;
    dies_with_its_agent(&scene, |injector| {
        let agent = stage.agent("node2")?;
        let script = format!("kill -9 {agent} {injector}");
        let killed = stage.cluster.node("node2")?.run(&["sh", "-c", &script])?;
        killed.text().map(drop)
    })
}

/// An agent is stopped: its injectors' leases run out.
fn a_stopped_agent_loses_its_faults(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_stopped_agent_loses_its_faults", "node1")?;
    let (run, uid) = scene.silenced("run", &format!("{}s", WINDOW.as_secs()))?;
    let injector = traces::injector(stage, &scene.echo)?;
    let end = Instant::now() + WINDOW;
    let moment = Instant::now();
    let still = Stopped::agent(stage, "node1")?;
    let took = scene.lamp.comes_back(moment, SOON)?;
    ensure!(took < LEASE, "the fault ended {took:?} after the stop");
    // Ended, not reaped: the agent that would do that stands still.
    let stat = stage
        .cluster
        .node("node1")?
        .run(&["sh", "-c", &format!("cat /proc/{injector}/stat || true")])?
        .text()?;
    ensure!(
        stat.is_empty() || stat.contains(") Z "),
        "the injector is still there: {stat}"
    );
    still.resume()?;
    let expected = Expected {
        within: LEASE,
        reason: "LeaseExpired",
        reclaimed_by: &["InjectorLease"],
    };
    is_reported(&scene, &run, &uid, &expected)?;
    scene.lamp.stays_lit(moment + took, end)?;
    scene.is_as_before()
}

/// The agent's pod is deleted by force: it is told to end, and has little time for it.
fn a_removed_agent_takes_its_faults_along(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_removed_agent_takes_its_faults_along", "node1")?;
    let pod = stage.windtunnel.agent_on("node1")?;
    let expected = Expected {
        within: LEASE,
        reason: "AgentRestarted",
        reclaimed_by: &["Agent", "Kernel", "Journal"],
    };
    interrupted(&scene, &expected, |_| stage.windtunnel.remove(&pod))?;
    agent_is_ready(stage, "node1")
}

/// A fault in place, something that takes its agent down, and what must follow.
fn dies_with_its_agent(scene: &Scene<'_>, kill: impl FnOnce(i32) -> Result<()>) -> Result<()> {
    let stage = scene.space.stage;
    let node = scene.echo.node.clone();
    let pod = stage.windtunnel.agent_on(&node)?;
    let before = restarts(stage, &pod)?;
    let expected = Expected {
        within: LEASE,
        reason: "AgentRestarted",
        reclaimed_by: &["Kernel", "Journal"],
    };
    interrupted(scene, &expected, |injector| {
        kill(injector)?;
        until("another container of the agent", SOON * 2, || {
            Ok((restarts(stage, &pod)? > before).then_some(()))
        })?;
        agent_is_ready(stage, &node)?;
        // What was begun before is ended before the agent says that it is ready.
        let open = traces::open_entries(stage, &scene.echo)?;
        ensure!(open.is_empty(), "a ready agent's journal has {open:?}");
        Ok(())
    })
}

/// A fault in place, something that ends it, and what must follow.
fn interrupted(
    scene: &Scene<'_>,
    expected: &Expected,
    act: impl FnOnce(i32) -> Result<()>,
) -> Result<()> {
    let stage = scene.space.stage;
    let (run, uid) = scene.silenced("run", &format!("{}s", WINDOW.as_secs()))?;
    let end = Instant::now() + WINDOW;
    let injector = traces::injector(stage, &scene.echo)?;
    let moment = Instant::now();
    act(injector)?;
    let took = scene.lamp.comes_back(moment, SOON)?;
    ensure!(
        took < expected.within,
        "the fault ended {took:?} after the deed"
    );
    traces::process_ends(stage, &scene.echo.node, injector)?;
    is_reported(scene, &run, &uid, expected)?;
    scene.lamp.stays_lit(moment + took, end)?;
    scene.is_as_before()
}

/// The end before its time is in every status, and the run ends clean.
fn is_reported(scene: &Scene<'_>, run: &Run<'_>, uid: &str, expected: &Expected) -> Result<()> {
    run.wait("Finished", SOON * 2)?;
    let status = run.status()?;
    ensure!(status["phase"] == "Failed", "status: {status}");
    let fault = &status["faults"][0];
    ensure!(
        fault["interrupted"] == 1 && fault["injected"] == 1 && fault["recovered"] == 1,
        "status: {status}"
    );
    let (injected, reason) = run.condition("Injected")?;
    ensure!(
        injected == "False" && reason == "Interrupted",
        "status: {status}"
    );
    for condition in ["Recovered", "Clean"] {
        ensure!(run.condition(condition)?.0 == "True", "status: {status}");
    }
    let target = traces::target(scene.space.stage, uid, &scene.echo)?;
    let by = |value: &Value| {
        let by = value["reclaimedBy"].as_str().unwrap_or_default();
        expected.reclaimed_by.contains(&by)
    };
    ensure!(
        target["state"] == "Interrupted" && target["reason"] == expected.reason && by(&target),
        "the agent says {target}"
    );
    ensure!(!target["revertedAt"].is_null(), "the agent says {target}");
    Ok(())
}
