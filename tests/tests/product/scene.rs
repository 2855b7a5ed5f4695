//! A scene: an echo that faults silence, another one beside it that they leave alone, and a lamp
//! on each.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::lamp::Lamp;
use super::stage::{Pod, Space, Stage, Wanted};
use super::traces;

/// How long the operator and the agents may take for what they do at once: not a speed, but the
/// patience of a test on a loaded machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// By when a fault that was ended must be gone.
pub(crate) const GONE: Duration = Duration::from_secs(5);

/// Two echoes and what they looked like before.
pub(crate) struct Scene<'a> {
    pub(crate) space: Space<'a>,
    /// The target: label `app=echo`.
    pub(crate) echo: Pod,
    pub(crate) lamp: Lamp,
    /// On the same node, never a target.
    pub(crate) other: Pod,
    pub(crate) control: Lamp,
    before: String,
    begun: Instant,
}

impl<'a> Scene<'a> {
    /// Makes the pods on a node and lights the lamps.
    pub(crate) fn set(stage: &'a Stage, test: &str, node: &str) -> Result<Self> {
        let space = stage.space(test)?;
        let wanted = ["echo", "other"].map(|name| Wanted {
            name,
            app: name,
            node,
            args: &["echo"],
        });
        let mut pods = space.pods(&wanted)?;
        let (other, echo) = (pods.pop(), pods.pop());
        let (other, echo) = (other.context("no other")?, echo.context("no echo")?);
        Ok(Self {
            lamp: Lamp::light(stage, &echo)?,
            control: Lamp::light(stage, &other)?,
            before: stage.snapshot(&echo)?,
            begun: Instant::now(),
            space,
            echo,
            other,
        })
    }

    /// Applies a run that silences the echo from `start_after` to its end.
    pub(crate) fn silence(&self, name: &str, duration: &str, start_after: &str) -> Result<Run<'a>> {
        self.space.run(name, &silence(duration, start_after))
    }

    /// Applies a run that silences the echo, and waits until it is seen to.
    pub(crate) fn silenced(&self, name: &str, duration: &str) -> Result<(Run<'a>, String)> {
        let applied = Instant::now();
        let run = self.silence(name, duration, "0s")?;
        run.wait("Injected", SOON)?;
        self.lamp.goes_out(applied, GONE)?;
        let uid = traces::uid(&self.space, name)?;
        Ok((run, uid))
    }

    /// What the echo's network was like.
    pub(crate) fn before(&self) -> &str {
        &self.before
    }

    /// Fails unless the echo's network is as it was, nothing is at work on it, and the pod beside
    /// it was never touched.
    pub(crate) fn is_as_before(&self) -> Result<()> {
        self.has_its_network()?;
        self.control.was_lit(self.begun)
    }

    /// Fails unless the echo's network is as it was and nothing is at work on it, whatever happened
    /// to the node meanwhile.
    pub(crate) fn has_its_network(&self) -> Result<()> {
        traces::is_as_before(self.space.stage, &self.echo, &self.before)
    }
}

/// The spec of a run that silences the echoes of a namespace.
pub(crate) fn silence(duration: &str, start_after: &str) -> String {
    format!(
        "
duration: {duration}
faults:
- name: silent
  startAfter: {start_after}
  target: {{selector: {{matchLabels: {{app: echo}}}}}}
  network: {{loss: {{percent: 100}}}}
"
    )
}

/// A process of a node that stands still for as long as this value lives.
pub(crate) struct Stopped<'a> {
    stage: &'a Stage,
    node: String,
    pid: i32,
}

impl<'a> Stopped<'a> {
    /// Stops the agent of a node. Its liveness probe gives it a minute.
    pub(crate) fn agent(stage: &'a Stage, node: &str) -> Result<Self> {
        Self::process(stage, node.to_owned(), stage.agent(node)?)
    }

    /// Stops a replica of the operator.
    pub(crate) fn operator(stage: &'a Stage, pod: &str) -> Result<Self> {
        let (node, pid) = stage.operator(pod)?;
        Self::process(stage, node, pid)
    }

    fn process(stage: &'a Stage, node: String, pid: i32) -> Result<Self> {
        stage.cluster.node(&node)?.signal(pid, Signal::SIGSTOP)?;
        Ok(Self { stage, node, pid })
    }

    /// Lets an agent go on, and waits until its pod is ready.
    pub(crate) fn resume(self) -> Result<()> {
        let (stage, node) = (self.stage, self.node.clone());
        drop(self);
        agent_is_ready(stage, &node)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        // It may have been killed; then there is nothing to resume.
        if let Ok(node) = self.stage.cluster.node(&self.node) {
            let _ = node.signal(self.pid, Signal::SIGCONT);
        }
    }
}

/// Waits until the agent of a node is ready. One that was just killed is called so for a moment, and
/// kubelet starts it again later each time.
pub(crate) fn agent_is_ready(stage: &Stage, node: &str) -> Result<()> {
    until(&format!("a ready agent on {node}"), SOON * 6, || {
        let pods = stage.windtunnel.pods("agent")?;
        let ready = pods.iter().any(|pod| {
            let conditions = pod["status"]["conditions"].as_array();
            pod["spec"]["nodeName"] == node
                && pod["metadata"]["deletionTimestamp"].is_null()
                && conditions
                    .into_iter()
                    .flatten()
                    .any(|c| c["type"] == "Ready" && c["status"] == "True")
        });
        Ok((ready && stage.agent(node).is_ok()).then_some(()))
    })
}

/// Fails unless a run ended in a phase, for a reason, with everything taken back and checked. Where
/// the last window ends with the run, either may be seen first.
pub(crate) fn ended(run: &Run<'_>, phase: &str, reason: &str) -> Result<()> {
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    ensure!(status["phase"] == phase, "status: {status}");
    let (_, found) = run.condition("Finished")?;
    let found = match found.as_str() {
        "DeadlineReached" => "WindowsClosed",
        other => other,
    };
    ensure!(found == reason, "status: {status}");
    for condition in ["Recovered", "Clean"] {
        let (is, _) = run.condition(condition)?;
        ensure!(is == "True", "{condition} is {is}: {status}");
    }
    Ok(())
}

/// When a run was started, by its own account.
pub(crate) fn started(run: &Run<'_>) -> Result<Option<Instant>> {
    let status = run.status()?;
    let Some(text) = status["startTime"].as_str() else {
        return Ok(None);
    };
    let at: Timestamp = text.parse().with_context(|| format!("read {text:?}"))?;
    // It may lie ahead, where agents are given time.
    let now = Instant::now();
    let ago = Timestamp::now().duration_since(at);
    Ok(Some(match Duration::try_from(ago) {
        Ok(ago) => now.checked_sub(ago).context("long before this machine")?,
        Err(_) => now + ago.unsigned_abs(),
    }))
}

/// Restarts so far of the containers of a pod in the release namespace.
pub(crate) fn restarts(stage: &Stage, pod: &str) -> Result<i64> {
    let pod = stage.cluster.get(&["pod", pod, "--namespace", NAMESPACE])?;
    let statuses = pod["status"]["containerStatuses"].as_array();
    Ok(statuses
        .into_iter()
        .flatten()
        .filter_map(|status| status["restartCount"].as_i64())
        .sum())
}
