//! A node loses its power with a fault in place.

use std::time::Duration;

use anyhow::{Result, ensure};
use windtunnel_tests::cluster::poll::until;

use super::scene::{Scene, agent_is_ready, ended};
use super::stage::{Stage, Test, deepen, kubectl};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[(
    "a_rebooted_node_has_no_fault_and_says_so",
    a_rebooted_node_has_no_fault_and_says_so,
)];

/// How long a node may take to be ready again, with the pods that it had.
const BACK: Duration = Duration::from_mins(3);

/// The same pods start again on it. Nothing is injected into them anew, though the window is still
/// open; the run says why the fault ended, and ends as failed.
fn a_rebooted_node_has_no_fault_and_says_so(stage: &Stage) -> Result<()> {
    let test = "a_rebooted_node_has_no_fault_and_says_so";
    let scene = Scene::set(stage, test, "node2")?;
    let (run, uid) = scene.silenced("run", "10m")?;
    let node = stage.cluster.node("node2")?;
    node.kill()?;
    node.boot()?;
    deepen(&node)?;
    let interrupted = until("a report of the reboot", BACK, || {
        let target = traces::target(stage, &uid, &scene.echo)?;
        Ok((target["state"] == "Interrupted").then_some(target))
    })?;
    ensure!(
        interrupted["reason"] == "NodeRebooted" && interrupted["reclaimedBy"] == "Kernel",
        "the agent says {interrupted}"
    );
    agent_is_ready(stage, "node2")?;
    until("the pod on the booted node", BACK, || {
        Ok(stage.pid(&scene.echo).ok())
    })?;
    ended(&run, "Failed", "WindowsClosed")?;
    let message = run.status()?["message"].to_string();
    ensure!(message.contains("was rebooted"), "it says {message}");
    let now = stage.snapshot(&scene.echo)?;
    ensure!(
        !now.contains("table ") && !now.contains("ifb"),
        "something is at work on the pod: {now}"
    );
    let wait = [
        "wait",
        "node/node2",
        "--for=condition=Ready",
        "--timeout=120s",
    ];
    kubectl(stage, &wait)?;
    stage.windtunnel.wait_for_agents()?;
    stage.windtunnel.wait_for_operators()
}
