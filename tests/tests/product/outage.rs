//! Faults while nobody leads, while the API server is down, and on a node that is cut off.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::Value;
use windtunnel_tests::cluster::Action;
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::product::{NAMESPACE, Run};

use super::scene::{GONE, SOON, Scene, Stopped, ended, started};
use super::stage::{Stage, Test, kubectl};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[
    (
        "faults_end_without_an_operator",
        faults_end_without_an_operator,
    ),
    ("a_paused_leader_is_replaced", a_paused_leader_is_replaced),
    (
        "a_short_outage_of_the_api_server_reverts_nothing",
        a_short_outage_of_the_api_server_reverts_nothing,
    ),
    (
        "a_long_outage_of_the_api_server_reverts_everything",
        a_long_outage_of_the_api_server_reverts_everything,
    ),
    (
        "a_node_that_is_cut_off_reverts_its_faults",
        a_node_that_is_cut_off_reverts_its_faults,
    ),
    (
        "connections_lost_without_a_word_are_made_anew",
        connections_lost_without_a_word_are_made_anew,
    ),
];

/// The chart's controlPlaneGrace.
const GRACE: Duration = Duration::from_secs(30);

/// No replica of the operator is there from the middle of two runs on: one ends at its deadline, the
/// other with the grace, though the API server answers and shows the lease as it was.
fn faults_end_without_an_operator(stage: &Stage) -> Result<()> {
    let long = Scene::set(stage, "faults_end_with_the_grace", "node2")?;
    let short = Scene::set(stage, "faults_end_at_their_deadline", "node1")?;
    let (lasting, uid) = long.silenced("run", "150s")?;
    let (run, _) = short.silenced("run", "12s")?;
    let dark = Instant::now();
    let absent = Absent::send_away(stage)?;
    let gone = Instant::now();
    let lasted = short.lamp.comes_back(dark, SOON)?;
    // It began before it was seen.
    ensure!(
        lasted < Duration::from_secs(12) + GONE,
        "a fault of 12 s was there for {lasted:?} and more"
    );
    ensure!(
        stage.windtunnel.pods("operator")?.is_empty(),
        "an operator is there"
    );
    ensure!(run.phase()? == "Running", "nobody leads: {}", run.status()?);
    let lasted = long.lamp.comes_back(gone, GRACE + SOON)?;
    ensure!(
        lasted < GRACE + GONE,
        "a fault was there for {lasted:?} after the last operator had gone"
    );
    absent.call_back()?;
    ended(&run, "Completed", "WindowsClosed")?;
    ended(&lasting, "Failed", "WindowsClosed")?;
    let target = traces::target(stage, &uid, &long.echo)?;
    ensure!(
        target["state"] == "Interrupted" && target["reason"] == "ControlPlaneLost",
        "the agent says {target}"
    );
    long.is_as_before()?;
    short.is_as_before()
}

/// The leader stands still; another replica takes over and finishes the run, and when the old one
/// wakes it does no harm.
fn a_paused_leader_is_replaced(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_paused_leader_is_replaced", "node2")?;
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let (run, _) = scene.silenced("run", "36s")?;
    let dark = Instant::now();
    let paused = Stopped::operator(stage, &leader)?;
    let next = until("another leader", SOON, || {
        Ok(stage.windtunnel.leader()?.filter(|next| *next != leader))
    });
    let took_over = Instant::now();
    next?;
    scene.lamp.was_out(dark, took_over)?;
    let finished = ended(&run, "Completed", "WindowsClosed");
    drop(paused);
    finished?;
    let uid = traces::uid(&scene.space, "run")?;
    let target = traces::target(stage, &uid, &scene.echo)?;
    ensure!(target["state"] == "Recovered", "the agent says {target}");
    stage.windtunnel.wait_for_operators()?;
    // Awake again, the old leader changes nothing of what the new one wrote.
    ensure!(run.phase()? == "Completed", "status: {}", run.status()?);
    scene.is_as_before()
}

/// The API server is started anew, and then says nothing for twenty seconds, longer than the
/// operator's lease: everybody waits. For that it stands still, so that the outage is not as long as a
/// loaded machine makes it.
fn a_short_outage_of_the_api_server_reverts_nothing(stage: &Stage) -> Result<()> {
    let test = "a_short_outage_of_the_api_server_reverts_nothing";
    let scene = Scene::set(stage, test, "node1")?;
    let (run, _) = scene.silenced("run", "60s")?;
    let dark = Instant::now();
    let server = stage.cluster.component("apiserver");
    let answers = || {
        until("a status that can be read", SOON, || {
            Ok(run.status().ok().map(drop))
        })
    };
    server.act(Action::Kill)?;
    server.act(Action::Start)?;
    answers()?;
    everybody_is_heard_of(stage)?;
    let moment = Instant::now();
    server.act(Action::Pause)?;
    reach(moment + Duration::from_secs(20));
    server.act(Action::Resume)?;
    answers()?;
    run.wait("Finished", 2 * SOON)?;
    ended(&run, "Completed", "WindowsClosed")?;
    let begun = started(&run)?.context("it was never started")?;
    scene.lamp.was_out(dark, begun + Duration::from_secs(59))?;
    stage.windtunnel.wait_for_operators()?;
    scene.is_as_before()
}

/// Waits until the leader and every agent have given a sign of life from now on.
fn everybody_is_heard_of(stage: &Stage) -> Result<()> {
    let now = Timestamp::now();
    let is_later = |at: &Value| {
        let at: Option<Timestamp> = at.as_str().and_then(|at| at.parse().ok());
        at.is_some_and(|at| at > now)
    };
    until("signs of life", SOON, || {
        let get = |what: &[&str]| {
            let what = [what, &["--namespace", NAMESPACE]].concat();
            stage.cluster.get(&what).unwrap_or_default()
        };
        let lease = get(&["lease", "windtunnel-operator"]);
        let agents = get(&["nodeagents"]);
        let agents = agents["items"].as_array().cloned().unwrap_or_default();
        let is_heard_of = is_later(&lease["spec"]["renewTime"])
            && !agents.is_empty()
            && agents
                .iter()
                .all(|a| is_later(&a["status"]["heartbeatTime"]));
        Ok(is_heard_of.then_some(()))
    })
}

/// The API server says nothing for longer than the grace: all faults are taken back, and told when it
/// speaks again.
fn a_long_outage_of_the_api_server_reverts_everything(stage: &Stage) -> Result<()> {
    let one = Scene::set(stage, "a_long_outage_reverts_one", "node1")?;
    let other = Scene::set(stage, "a_long_outage_reverts_another", "node2")?;
    let runs = [one.silenced("run", "150s")?, other.silenced("run", "150s")?];
    let server = stage.cluster.component("apiserver");
    let silent = Instant::now();
    server.act(Action::Pause)?;
    let seen = [&one, &other].map(|scene| scene.lamp.comes_back(silent, GRACE + SOON));
    server.act(Action::Resume)?;
    for lasted in seen {
        let lasted = lasted?;
        ensure!(
            lasted < GRACE + GONE,
            "a fault was there for {lasted:?} after the API server had fallen silent"
        );
    }
    stage.windtunnel.wait_for_operators()?;
    for (scene, (run, uid)) in [&one, &other].into_iter().zip(&runs) {
        ended(run, "Failed", "WindowsClosed")?;
        let target = traces::target(stage, uid, &scene.echo)?;
        ensure!(
            target["state"] == "Interrupted" && target["reason"] == "ControlPlaneLost",
            "the agent says {target}"
        );
        scene.is_as_before()?;
    }
    Ok(())
}

/// A node is off the network for longer than the grace: its agent takes back what is in place, and
/// says so when it is back.
fn a_node_that_is_cut_off_reverts_its_faults(stage: &Stage) -> Result<()> {
    let test = "a_node_that_is_cut_off_reverts_its_faults";
    let scene = Scene::set(stage, test, "node2")?;
    let (run, uid) = scene.silenced("run", "150s")?;
    let node = stage.cluster.node("node2")?;
    ensure!(!answers(&scene)?, "the echo answers in its silence");
    node.cut()?;
    let seen = cut_off(&scene, &run);
    node.heal()?;
    seen?;
    run.wait("Finished", SOON * 2)?;
    let status = run.status()?;
    ensure!(status["phase"] == "Failed", "status: {status}");
    for condition in ["Recovered", "Clean"] {
        ensure!(run.condition(condition)?.0 == "True", "status: {status}");
    }
    let target = traces::target(stage, &uid, &scene.echo)?;
    ensure!(
        target["state"] == "Interrupted"
            && target["reason"] == "ControlPlaneLost"
            && target["reclaimedBy"] == "Agent",
        "the agent says {target}"
    );
    let wait = [
        "wait",
        "node/node2",
        "--for=condition=Ready",
        "--timeout=60s",
    ];
    kubectl(stage, &wait)?;
    stage.windtunnel.wait_for_operators()?;
    let moment = Instant::now();
    scene.lamp.comes_back(moment, SOON)?;
    traces::is_as_before(stage, &scene.echo, scene.before())
}

/// Every connection of an agent and of the leader is lost without a word, as behind a firewall that
/// has forgotten it: neither end is told. What is in place stays, and what is asked for is heard of.
fn connections_lost_without_a_word_are_made_anew(stage: &Stage) -> Result<()> {
    let test = "connections_lost_without_a_word_are_made_anew";
    let scene = Scene::set(stage, test, "node1")?;
    let (run, _) = scene.silenced("run", "150s")?;
    let dark = Instant::now();
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let lost = [
        Lost::connections(stage, &stage.windtunnel.agent_on("node1")?)?,
        Lost::connections(stage, &leader)?,
    ];
    // A watch is opened anew after 30 s, and given up 5 s after that.
    run.abort()?;
    let asked = Instant::now();
    let ended = scene.lamp.comes_back(dark, Duration::from_secs(50));
    drop(lost);
    ended?;
    run.wait("Finished", SOON)?;
    let (phase, status) = (run.phase()?, run.status()?);
    ensure!(phase == "Aborted", "the run ended by itself: {status}");
    for condition in ["Recovered", "Clean"] {
        let (is, _) = run.condition(condition)?;
        ensure!(is == "True", "{condition} is {is}: {status}");
    }
    let target = &status["faults"][0];
    ensure!(target["failed"] == 0, "not by the user's will: {status}");
    ensure!(asked.elapsed() < SOON * 3, "it took {:?}", asked.elapsed());
    stage.windtunnel.wait_for_operators()?;
    scene.is_as_before()
}

/// The connections that a pod of the release has now: nothing passes on them, for as long as this
/// value lives; what is opened from now on is as ever.
struct Lost<'a> {
    stage: &'a Stage,
    node: String,
    pid: String,
}

impl<'a> Lost<'a> {
    fn connections(stage: &'a Stage, pod: &str) -> Result<Self> {
        let pod = stage.cluster.get(&["pod", pod, "--namespace", NAMESPACE])?;
        let text = |value: &Value| value.as_str().map(str::to_owned).context("no text");
        let node = text(&pod["spec"]["nodeName"])?;
        let pid = stage.first_pid(&node, &text(&pod["metadata"]["uid"])?)?;
        let lost = Self {
            stage,
            node,
            pid: pid.to_string(),
        };
        // Local ports of what is established to the API server's port, from the kernel's table.
        lost.shell(
            "ports=$(cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"01\" && $3 ~ /:01BB$/ {split($2, a, \":\"); print \"0x\" a[2]}' | paste -sd,)
            [ -n \"$ports\" ] || exit 1
            nft \"table inet lost {
                chain in { type filter hook input priority 0; tcp dport { $ports } drop; }
                chain out { type filter hook output priority 0; tcp sport { $ports } drop; }
            }\"",
        )?;
        Ok(lost)
    }

    fn shell(&self, script: &str) -> Result<String> {
        let argv = [
            "nsenter", "--target", &self.pid, "--net", "--", "sh", "-c", script,
        ];
        self.stage.cluster.node(&self.node)?.run(&argv)?.text()
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        // A pod that is gone has taken it along.
        let _ = self.shell("nft delete table inet lost");
    }
}

/// What is seen while the node is off.
fn cut_off(scene: &Scene<'_>, run: &Run<'_>) -> Result<()> {
    let cut = Instant::now();
    let reverted = until("traffic on the node that is cut off", GRACE + SOON, || {
        Ok(answers(scene)?.then(|| cut.elapsed()))
    })?;
    // The last sign of life may have been a third of the grace before.
    ensure!(
        reverted > GRACE / 3,
        "reverted {reverted:?} after the cut, with a grace of {GRACE:?}"
    );
    ensure!(
        reverted < GRACE + Duration::from_secs(15),
        "reverted {reverted:?} after the cut, with a grace of {GRACE:?}"
    );
    run.until("a run of which nobody knows", SOON * 3, |status| {
        let conditions = status["conditions"].as_array();
        conditions
            .into_iter()
            .flatten()
            .any(|c| c["type"] == "Recovered" && c["status"] == "Unknown")
    })
    .map(drop)
}

/// Whether the target answers to the pod beside it, asked by way of the node alone.
fn answers(scene: &Scene<'_>) -> Result<bool> {
    let stage = scene.space.stage;
    let pid = stage.pid(&scene.other)?.to_string();
    let to = &scene.echo.v4;
    let argv = [
        "nsenter", "--target", &pid, "--net", "--", "ping", "-c", "3", "-i", "0.2", "-W", "1", to,
    ];
    let pinged = stage.cluster.node(&scene.other.node)?.run(&argv)?;
    Ok(pinged.text().is_ok())
}

/// No operator for as long as this value lives.
pub(crate) struct Absent<'a>(&'a Stage);

impl<'a> Absent<'a> {
    /// Scales the operator to nothing, and waits until nothing is there.
    pub(crate) fn send_away(stage: &'a Stage) -> Result<Self> {
        let absent = Self(stage);
        stage.windtunnel.scale_operator(0)?;
        until("an operator that is gone", SOON, || {
            Ok(stage.windtunnel.pods("operator")?.is_empty().then_some(()))
        })?;
        Ok(absent)
    }

    /// Waits until it is there again.
    pub(crate) fn call_back(self) -> Result<()> {
        let stage = self.0;
        drop(self);
        stage.windtunnel.wait_for_operators()
    }
}

impl Drop for Absent<'_> {
    fn drop(&mut self) {
        // Where this fails the tests that follow say so.
        let _ = self.0.windtunnel.scale_operator(2);
    }
}
