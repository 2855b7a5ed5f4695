//! What cannot be done is refused with its reason, and then nothing is done: not on the pods that
//! could have been hit either, nor anything at all in a dry run.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::lamp::Lamp;
use super::scene::{SOON, Scene, agent_is_ready, ended, silence};
use super::stage::{Pod, Space, Stage, Test, Wanted, kubectl};
use super::traces;

pub(crate) const GENTLE: &[Test] = &[
    (
        "what_cannot_be_selected_is_refused",
        what_cannot_be_selected_is_refused,
    ),
    (
        "one_refusal_refuses_the_whole_run",
        one_refusal_refuses_the_whole_run,
    ),
];

pub(crate) const ROUGH: &[Test] = &[
    (
        "a_node_without_an_agent_is_not_hit",
        a_node_without_an_agent_is_not_hit,
    ),
    (
        "a_node_with_another_time_is_not_hit",
        a_node_with_another_time_is_not_hit,
    ),
    ("an_unclean_node_is_not_hit", an_unclean_node_is_not_hit),
];

/// Numbers that do not fit, selectors that match nothing, pods of the host's network, peers that
/// do not exist; each for a run and for a dry run.
fn what_cannot_be_selected_is_refused(stage: &Stage) -> Result<()> {
    let space = stage.space("what_cannot_be_selected_is_refused")?;
    let pods = ["a", "b"].map(|name| Wanted {
        name,
        app: "few",
        node: "node1",
        args: &["idle"],
    });
    space.pods(&pods)?;
    host_network(&space)?;
    let network = "network: {loss: {percent: 100}}";
    let table = [
        (
            "count",
            format!("target: {{selector: {{matchLabels: {{app: few}}}}, count: 3}}\n  {network}"),
            "TargetsMissing",
            ["count is 3", "matches 2"],
        ),
        (
            "nothing",
            format!("target: {{selector: {{matchLabels: {{app: nobody}}}}}}\n  {network}"),
            "TargetsMissing",
            ["matches no pod", "Ready"],
        ),
        (
            "host",
            format!("target: {{selector: {{matchLabels: {{app: host}}}}}}\n  {network}"),
            "NotAllowed",
            ["pod host", "shares its node's network"],
        ),
        (
            "peers",
            "target: {selector: {matchLabels: {app: few}}}\n  network: {loss: {percent: 100}, peers: {services: [{name: nobody}]}}".to_owned(),
            "PeersUnusable",
            ["fault bad", "nobody"],
        ),
    ];
    for (name, fault, reason, words) in table {
        for dry_run in [false, true] {
            let name = format!("{name}-{dry_run}");
            let spec =
                format!("duration: 10s\ndryRun: {dry_run}\nfaults:\n- name: bad\n  {fault}\n");
            let run = space.run(&name, &spec)?;
            is_refused(&run, reason, &words)?;
            let asked = traces::injections(stage, &traces::uid(&space, &name)?)?;
            ensure!(asked.is_empty(), "{name}: a node was asked: {asked:?}");
        }
    }
    Ok(())
}

/// A pod in its node's own network.
fn host_network(space: &Space<'_>) -> Result<Pod> {
    let stage = space.stage;
    stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: host, namespace: {}, labels: {{app: host}}}}
spec:
  nodeName: node1
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: sample, image: 'windtunnel/sample:{}', imagePullPolicy: Never, args: [idle]}}
",
        space.name, stage.windtunnel.images.tag
    ))?;
    space.ready("host")
}

/// One of two targets has a link of a kind that was never tested: nothing happens to the other,
/// on another node. Without that link a dry run finds nothing wrong, and touches nothing.
fn one_refusal_refuses_the_whole_run(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "one_refusal_refuses_the_whole_run", "node1")?;
    let strange = Wanted {
        name: "strange",
        app: "echo",
        node: "node2",
        args: &["echo"],
    };
    let strange = scene.space.pods(&[strange])?.pop().context("no pod")?;
    let plain = stage.snapshot(&strange)?;
    stage.in_netns(&strange, &["ip", "link", "add", "odd0", "type", "dummy"])?;
    stage.in_netns(&strange, &["ip", "link", "set", "odd0", "up"])?;
    let begun = Instant::now();
    for dry_run in [false, true] {
        let name = format!("refused-{dry_run}");
        let spec = format!("{}dryRun: {dry_run}\n", silence("20s", "0s"));
        let run = scene.space.run(&name, &spec)?;
        let words = ["node2", "strange", "LinkKind", "odd0", "dummy"];
        is_refused(&run, "PrepareRefused", &words)?;
        // What was built for the other target, inert, is taken back again.
        scene.is_as_before()?;
        let entries = traces::journal(stage, &strange)?;
        ensure!(entries.is_empty(), "the journal has {entries:?}");
    }
    stage.in_netns(&strange, &["ip", "link", "delete", "odd0"])?;
    let spec = format!("{}dryRun: true\n", silence("20s", "0s"));
    let run = scene.space.run("dry", &spec)?;
    ended(&run, "Completed", "DryRun")?;
    let injected = run.condition("Injected")?;
    ensure!(
        injected == ("False".to_owned(), "DryRun".to_owned()),
        "status: {}",
        run.status()?
    );
    let entries = traces::journal(stage, &strange)?;
    ensure!(entries.is_empty(), "the journal has {entries:?}");
    traces::is_as_before(stage, &strange, &plain)?;
    scene.lamp.was_lit(begun)?;
    scene.is_as_before()
}

/// A node whose agent is missing: at first it gives no answer, then it is known to be silent, and
/// in the end to have none. Nothing happens on the other node meanwhile.
fn a_node_without_an_agent_is_not_hit(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "a_node_without_an_agent_is_not_hit", "node1")?;
    let far = Wanted {
        name: "far",
        app: "echo",
        node: "node2",
        args: &["echo"],
    };
    let far = scene.space.pods(&[far])?.pop().context("no pod")?;
    let far = Lamp::light(stage, &far)?;
    let begun = Instant::now();
    let banished = Banished::agent(stage)?;
    let unanswered = scene.silence("unanswered", "60s", "0s")?;
    unanswered.until("a preparation that took too long", SOON * 2, |s| {
        s["phase"] == "Recovering" && s["message"].to_string().contains("within 30 s from node2")
    })?;
    let silent = until("an agent that is known to be silent", SOON, || {
        let run = scene.silence("silent", "60s", "0s")?;
        run.until("an answer", SOON, |s| !s["phase"].is_null())?;
        Ok((run.phase()? == "Failed").then_some(run))
    })?;
    is_refused(&silent, "NodeUnavailable", &["far", "node2", "silent"])?;
    let arguments = ["delete", "nodeagent", "node2", "--namespace", NAMESPACE];
    kubectl(stage, &arguments)?;
    let absent = scene.silence("absent", "60s", "0s")?;
    is_refused(&absent, "NodeUnavailable", &["far", "node2", "no agent"])?;
    banished.call_back()?;
    // Now that it can be asked, the node says that nothing is there.
    is_refused(&unanswered, "PrepareTimeout", &["node2", "30 s"])?;
    for lamp in [&scene.lamp, &far] {
        lamp.was_lit(begun)?;
    }
    scene.is_as_before()
}

/// No agent on node2 for as long as this value lives; that of node1 stays as it is.
struct Banished<'a>(&'a Stage);

impl<'a> Banished<'a> {
    fn agent(stage: &'a Stage) -> Result<Self> {
        let banished = Self(stage);
        banished.patch(
            r#"{"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null},
                "template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node1"}}}}}"#,
        )?;
        until("node2 without an agent", SOON, || {
            Ok(stage.windtunnel.agent_on("node2").is_err().then_some(()))
        })?;
        Ok(banished)
    }

    fn call_back(self) -> Result<()> {
        let stage = self.0;
        drop(self);
        for node in ["node1", "node2"] {
            agent_is_ready(stage, node)?;
        }
        stage.windtunnel.wait_for_agents()
    }

    fn patch(&self, patch: &str) -> Result<()> {
        let arguments = [
            "patch",
            "daemonset",
            "windtunnel-agent",
            "--namespace",
            NAMESPACE,
            "--type=merge",
            "--patch",
            patch,
        ];
        kubectl(self.0, &arguments).map(drop)
    }
}

impl Drop for Banished<'_> {
    fn drop(&mut self) {
        // First the template, so that the agent that stayed is that of the template again.
        let _ = self.patch(
            r#"{"spec": {"template": {"spec": {"nodeSelector": null}},
                "updateStrategy": {"type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}}"#,
        );
    }
}

/// A node whose clock is five seconds late.
fn a_node_with_another_time_is_not_hit(stage: &Stage) -> Result<()> {
    let node = away_from_the_leader(stage)?;
    let scene = Scene::set(stage, "a_node_with_another_time_is_not_hit", node)?;
    let begun = Instant::now();
    let shifted = Shifted::by(stage, node, -5)?;
    let run = scene.silence("skewed", "20s", "0s")?;
    is_refused(&run, "PrepareRefused", &[node, "ClockSkew", "ms"])?;
    drop(shifted);
    scene.lamp.was_lit(begun)?;
    until("a clock that is trusted again", SOON * 2, || {
        let agents = ["nodeagent", node, "--namespace", NAMESPACE];
        let agent = stage.cluster.get(&agents)?;
        let offset = agent["status"]["clockOffsetMillis"].as_i64();
        Ok(offset.filter(|offset| offset.abs() < 1_000).map(drop))
    })?;
    scene.is_as_before()
}

/// The node that the leader does not run on: its own clock is the one that counts.
fn away_from_the_leader(stage: &Stage) -> Result<&'static str> {
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let pods = stage.windtunnel.pods("operator")?;
    let leader = pods
        .iter()
        .find(|p| p["metadata"]["name"] == leader.as_str());
    let is_on = |node: &str| leader.is_some_and(|p| p["spec"]["nodeName"] == node);
    Ok(if is_on("node1") { "node2" } else { "node1" })
}

/// A node's clock, moved for as long as this value lives.
struct Shifted<'a> {
    stage: &'a Stage,
    node: &'a str,
    seconds: i64,
}

impl<'a> Shifted<'a> {
    fn by(stage: &'a Stage, node: &'a str, seconds: i64) -> Result<Self> {
        shift(stage, node, seconds)?;
        let shifted = Self {
            stage,
            node,
            seconds,
        };
        // Of the last five renewals, two seconds apart, an agent believes the best.
        until("a clock that is off", SOON * 2, || {
            let agents = ["nodeagent", node, "--namespace", NAMESPACE];
            let agent = stage.cluster.get(&agents)?;
            let offset = agent["status"]["clockOffsetMillis"].as_i64();
            Ok(offset.filter(|offset| offset.abs() > 1_000).map(drop))
        })?;
        Ok(shifted)
    }
}

impl Drop for Shifted<'_> {
    fn drop(&mut self) {
        // Where this fails what follows is refused with that reason.
        let _ = shift(self.stage, self.node, -self.seconds);
    }
}

fn shift(stage: &Stage, node: &str, seconds: i64) -> Result<()> {
    let script = format!("date --set \"$(date --iso-8601=ns --date '{seconds:+} seconds')\"");
    let node = stage.cluster.node(node)?;
    node.run(&["sh", "-c", &script])?.text().map(drop)
}

/// Something that bears our mark and cannot be removed: another program owns it. The run that finds
/// it says so, and its node takes no new faults until it is gone.
fn an_unclean_node_is_not_hit(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "an_unclean_node_is_not_hit", "node2")?;
    let foreign = Foreign::table(&scene)?;
    let found = unclean(&scene);
    foreign.end()?;
    found?;
    let run = scene.silence("clean", "1s", "0s")?;
    super::scene::ended(&run, "Completed", "WindowsClosed")?;
    scene.is_as_before()
}

/// A table in the network of a scene's echo that bears our mark, as long as the program lives that
/// owns it.
pub(crate) struct Foreign<'a> {
    stage: &'a Stage,
    node: String,
}

impl<'a> Foreign<'a> {
    /// Makes it, and waits until it is there.
    pub(crate) fn table(scene: &Scene<'a>) -> Result<Self> {
        let (stage, node) = (scene.space.stage, scene.echo.node.clone());
        let pid = stage.pid(&scene.echo)?;
        let script = format!(
            "((echo 'add table netdev windtunnel-0123456789abcdef {{ flags owner; }}'; exec sleep 300) | nsenter --target {pid} --net nft --interactive) </dev/null >/dev/null 2>&1 &"
        );
        stage
            .cluster
            .node(&node)?
            .run(&["sh", "-c", &script])?
            .text()?;
        let foreign = Self { stage, node };
        let tables = ["nft", "list", "tables"];
        until("a table of somebody else", SOON, || {
            let tables = stage.in_netns(&scene.echo, &tables)?;
            Ok(tables.contains("windtunnel-0123456789abcdef").then_some(()))
        })?;
        Ok(foreign)
    }

    /// Ends the program, and waits until the node is clean.
    pub(crate) fn end(self) -> Result<()> {
        let node = self.stage.cluster.node(&self.node)?;
        node.run(&["pkill", "-f", "sleep 300"])?.text()?;
        until("a node that is clean again", SOON, || {
            let agents = ["nodeagent", &self.node, "--namespace", NAMESPACE];
            let agent = self.stage.cluster.get(&agents)?;
            Ok((agent["status"]["clean"] == true).then_some(()))
        })
    }
}

fn unclean(scene: &Scene<'_>) -> Result<()> {
    let run = scene.silence("finds", "1s", "0s")?;
    run.wait("Finished", SOON)?;
    let (clean, reason) = run.condition("Clean")?;
    let status = run.status()?;
    ensure!(clean == "False" && reason == "Residue", "status: {status}");
    let residue = &status["cleanup"]["residue"][0];
    ensure!(
        residue["name"] == "windtunnel-0123456789abcdef" && residue["removed"] == false,
        "status: {status}"
    );
    let refused = scene.silence("refused", "20s", "0s")?;
    is_refused(&refused, "NodeUnavailable", &["node2", "residue"])
}

/// Fails unless a run failed for a reason, with these words, and injected nothing.
fn is_refused(run: &Run<'_>, reason: &str, words: &[&str]) -> Result<()> {
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    let message = status["message"].as_str().unwrap_or_default();
    let missing: Vec<_> = words.iter().filter(|w| !message.contains(**w)).collect();
    ensure!(
        status["phase"] == "Failed" && missing.is_empty(),
        "{missing:?} is not in {status}"
    );
    ensure!(run.condition("Finished")?.1 == reason, "status: {status}");
    for (condition, expected) in [
        ("Injected", "False"),
        ("Prepared", "False"),
        ("Recovered", "True"),
    ] {
        let (is, _) = run.condition(condition)?;
        ensure!(is == expected, "{condition} is {is}: {status}");
    }
    Ok(())
}
