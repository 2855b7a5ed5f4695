//! A fault takes from its target, not from the node: one whose only CPU burns stays in everybody's
//! hand.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::lamp::Lamp;
use super::scene::{GONE, SOON, restarts, silence};
use super::stage::{Pod, Space, Stage, Test};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[(
    "a_node_whose_cpu_burns_stays_in_hand",
    a_node_whose_cpu_burns_stays_in_hand,
)];

const NODE: &str = "node2";
/// Longer than an agent may be silent, or a kubelet.
const WATCHED: Duration = Duration::from_secs(45);
/// Both agent and kubelet speak each ten seconds; after 30 s and 40 s they count as lost.
const SPOKEN: Duration = Duration::from_secs(30);
/// How long a command in a pod may take: one that gets no CPU takes as long as the fault.
const COMMAND: Duration = Duration::from_secs(30);

/// All of a node's CPU is burnt in one container, and memory held in another: the node is Ready
/// throughout, kubelet and agent speak, commands are answered, and another fault comes and goes.
fn a_node_whose_cpu_burns_stays_in_hand(stage: &Stage) -> Result<()> {
    let space = stage.space("a_node_whose_cpu_burns_stays_in_hand")?;
    let (hot, echo) = pods(&space)?;
    let lamp = Lamp::light(stage, &echo)?;
    let agent = stage.windtunnel.agent_on(NODE)?;
    let (before, ready) = (restarts(stage, &agent)?, ready(stage)?);
    let run = burn(&space)?;
    let begun = Instant::now();
    let mut silences = [Duration::ZERO; 2];
    let mut longest = Duration::ZERO;
    until("a while of burning", WATCHED * 3, || {
        for (longest, silence) in silences.iter_mut().zip(silent(stage)?) {
            *longest = silence.max(*longest);
        }
        longest = longest.max(command(&space, &echo)?);
        Ok((begun.elapsed() >= WATCHED).then_some(()))
    })?;
    let _ = writeln!(
        io::stderr(),
        "on a burning node agent and kubelet were silent for {silences:.1?} at most, a command took {longest:.1?}"
    );
    ensure!(
        silences.iter().all(|silence| *silence < SPOKEN) && longest < COMMAND,
        "agent and kubelet were silent for {silences:?}, a command took {longest:?}"
    );
    let now = self::ready(stage)?;
    ensure!(now == ready, "Ready was {ready} and is {now}");
    another_comes_and_goes(&space, &lamp)?;
    let status = run.status()?;
    let faults = status["faults"].as_array().into_iter().flatten();
    let is_flawless = |fault: &Value| {
        fault["phase"] == "Active" && fault["interrupted"] == 0 && fault["failed"] == 0
    };
    ensure!(faults.clone().count() == 2, "status: {status}");
    ensure!(faults.clone().all(is_flawless), "status: {status}");
    ensure!(
        restarts(stage, &agent)? == before,
        "the agent was restarted"
    );
    run.delete(SOON)?;
    let open = traces::open_entries(stage, &hot)?;
    ensure!(open.is_empty(), "the journal still has {open:?}");
    Ok(())
}

/// One that asks for a good part of the node and may have all of it, and an echo beside it that asks
/// for its part: who asks for nothing gets nothing where all is taken.
fn pods(space: &Space<'_>) -> Result<(Pod, Pod)> {
    let stage = space.stage;
    for (name, millicores, args) in [("hot", 300, "idle"), ("echo", 100, "echo")] {
        stage.cluster.apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {}, labels: {{app: {name}}}}}
spec:
  nodeName: {NODE}
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: sample, image: 'windtunnel/sample:{}', imagePullPolicy: Never, args: [{args}], resources: {{requests: {{cpu: {millicores}m}}}}}}
",
            space.name, stage.windtunnel.images.tag,
        ))?;
    }
    Ok((space.ready("hot")?, space.ready("echo")?))
}

/// Applies the faults, and waits until most of the CPU is burnt.
fn burn<'a>(space: &Space<'a>) -> Result<Run<'a>> {
    let run = space.run(
        "burn",
        "
duration: 10m
faults:
- name: hot
  target: {selector: {matchLabels: {app: hot}}}
  cpu: {load: 100, cores: 1}
- name: full
  target: {selector: {matchLabels: {app: echo}}}
  memory: {size: 64Mi}
",
    )?;
    run.wait("Injected", SOON)?;
    run.until("a CPU that burns", SOON, |status| {
        status["faults"][0]["effect"]["millicores"].as_i64() > Some(500)
    })?;
    Ok(run)
}

/// For how long the node's agent and its kubelet have said nothing.
fn silent(stage: &Stage) -> Result<[Duration; 2]> {
    let agent = ["nodeagent", NODE, "--namespace", NAMESPACE];
    let lease = ["lease", NODE, "--namespace", "kube-node-lease"];
    let agent = &stage.cluster.get(&agent)?["status"]["heartbeatTime"];
    let lease = &stage.cluster.get(&lease)?["spec"]["renewTime"];
    let since = |at: &Value| -> Result<Duration> {
        let at: Timestamp = at.as_str().context("no time")?.parse()?;
        Ok(Timestamp::now().duration_since(at).unsigned_abs())
    };
    Ok([since(agent)?, since(lease)?])
}

/// The node's condition Ready, and since when it is as it is.
fn ready(stage: &Stage) -> Result<String> {
    let node = stage.cluster.get(&["node", NODE])?;
    let conditions = node["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten();
    let ready = conditions.into_iter().find(|c| c["type"] == "Ready");
    let ready = ready.context("a node without Ready")?;
    ensure!(ready["status"] == "True", "the node is {ready}");
    Ok(ready["lastTransitionTime"].to_string())
}

/// How long a command in a pod of the node takes.
fn command(space: &Space<'_>, pod: &Pod) -> Result<Duration> {
    let begun = Instant::now();
    let argv = ["/windtunnel-sample", "usage", "--millis", "10"];
    let cluster = space.stage.cluster;
    cluster.pod_exec(&space.name, &pod.name, "sample", &argv)?;
    Ok(begun.elapsed())
}

/// A fault of the network on the same node, as on any other.
fn another_comes_and_goes(space: &Space<'_>, lamp: &Lamp) -> Result<()> {
    let applied = Instant::now();
    let run = space.run("another", &silence("60s", "0s"))?;
    run.wait("Injected", SOON)?;
    let dark = lamp.goes_out(applied, GONE)?.duration_since(applied);
    let _ = writeln!(io::stderr(), "another fault was in place after {dark:.1?}");
    let aborted = Instant::now();
    run.abort()?;
    let took = lamp.comes_back(aborted, SOON)?;
    ensure!(took < GONE, "the fault ended {took:?} after the abort");
    super::scene::ended(&run, "Aborted", "AbortRequested")
}
