//! Connections that are reset, seen from inside the network namespaces of both ends.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use windtunnel_tests::cluster::{Signal, poll::until};
use windtunnel_tests::product::Run;

use super::stage::{Pod, Space, Stage, Test, Wanted};
use super::traces;

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[(
    "connections_are_reset_for_both_ends",
    connections_are_reset_for_both_ends,
)];

const SOON: Duration = Duration::from_mins(1);
/// The port that takes in bytes.
const SINK: u16 = 9;

/// What a connection from a pod to another is told that is opened, and held until it ends or a minute
/// is over.
fn dial(stage: &Stage, from: &Pod, to: &Pod, seconds: u32) -> Result<String> {
    let script = format!(
        "exec 3<>/dev/tcp/{}/{SINK} && echo open && read -t {seconds} -u 3 line; echo ended $?",
        to.v4
    );
    let script = format!("({script}) 2>&1");
    stage.in_netns(from, &["timeout", "80", "bash", "-c", &script])
}

/// How many connections a pod has with another.
fn open(stage: &Stage, pod: &Pod, peer: &Pod) -> Result<usize> {
    let argv = ["ss", "-Htn", "state", "established", "dst", &peer.v4];
    Ok(stage.in_netns(pod, &argv)?.lines().count())
}

/// Fails unless a connection can be opened, or is refused.
fn opens(stage: &Stage, from: &Pod, to: &Pod, is_refused: bool) -> Result<()> {
    let said = dial(stage, from, to, 1)?;
    let is_as_wanted = if is_refused {
        said.contains("refused")
    } else {
        said.contains("open")
    };
    ensure!(is_as_wanted, "from {} to {}: {said}", from.name, to.name);
    Ok(())
}

const SPEC: &str = "
duration: 3m
faults:
- name: reset
  target: {selector: {matchLabels: {app: client}}}
  network: {reset: {}, peers: {podSelector: {matchLabels: {app: server}}}}
";

/// Opens a connection and injects the fault: both ends lose it.
fn ends_what_is_open<'a>(
    space: &Space<'a>,
    (client, server): (&Pod, &Pod),
    name: &str,
) -> Result<Run<'a>> {
    let stage = space.stage;
    let run = thread::scope(|scope| {
        let held = scope.spawn(|| dial(stage, client, server, 60));
        until("a connection is open", SOON, || {
            let ends = (open(stage, client, server)?, open(stage, server, client)?);
            Ok((ends == (1, 1)).then_some(()))
        })?;
        let run = space.run(name, SPEC)?;
        run.wait("Injected", SOON)?;
        let said = held.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        // Above 128: nothing happened in the time that was waited.
        ensure!(
            said.contains("open") && !said.contains("ended 142"),
            "the open connection: {said}"
        );
        Ok(run)
    })?;
    until("the other end is gone", SOON, || {
        Ok((open(stage, server, client)? == 0).then_some(()))
    })?;
    Ok(run)
}

/// An open connection ends for both ends, new ones are refused in both directions, and another peer is
/// left alone; all of that is over when the fault is deleted, and when its injector is killed.
fn connections_are_reset_for_both_ends(stage: &Stage) -> Result<()> {
    let space = stage.space("connections_are_reset_for_both_ends")?;
    let wanted = |name, node| Wanted {
        name,
        app: name,
        node,
        args: &["sink"],
    };
    let pods = space.pods(&[
        wanted("client", "node1"),
        wanted("server", "node2"),
        wanted("other", "node2"),
    ])?;
    let [client, server, other] = &pods[..] else {
        anyhow::bail!("three pods are to be there: {pods:?}");
    };
    opens(stage, client, server, false)?;
    for round in ["deleted", "killed"] {
        let run = ends_what_is_open(&space, (client, server), round)?;
        opens(stage, client, server, true)?;
        opens(stage, server, client, true)?;
        opens(stage, client, other, false)?;
        let status = run.until("what was met", SOON, |status| {
            status["faults"][0]["matchedPackets"].as_i64() > Some(0)
        })?;
        if round == "deleted" {
            run.delete(SOON)?;
        } else {
            let injector = traces::injector(stage, client)?;
            stage
                .cluster
                .node(&client.node)?
                .signal(injector, Signal::SIGKILL)?;
        }
        until("connections are taken again", SOON, || {
            let both = [
                opens(stage, client, server, false),
                opens(stage, server, client, false),
            ];
            Ok(both.iter().all(Result::is_ok).then_some(()))
        })
        .map_err(|error| error.context(format!("status: {status}")))?;
        if round == "killed" {
            run.wait("Finished", SOON)?;
            let status = run.status()?;
            ensure!(status["faults"][0]["interrupted"] == 1, "status: {status}");
            ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
        }
    }
    Ok(())
}
