//! What a run leaves in the cluster and on its nodes: journal entries, injectors, node injections
//! and events.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;

use super::stage::{Pod, Space, Stage, kubectl};

/// How long what belongs to nobody may stay: two rounds of the operator's sweeping.
const SWEPT: Duration = Duration::from_secs(40);

/// The journal's entries on a pod, as its node's agent wrote them.
pub(crate) fn journal(stage: &Stage, pod: &Pod) -> Result<Vec<Value>> {
    let script = format!(
        "cd /run/windtunnel && for f in $(grep -l {} *.json 2>/dev/null); do cat $f; echo; done",
        pod.uid
    );
    let node = stage.cluster.node(&pod.node)?;
    let text = node.run(&["sh", "-c", &script])?.text()?;
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_str(line).context("read a journal entry"))
        .collect()
}

/// The entries of the journal that are not ended.
pub(crate) fn open_entries(stage: &Stage, pod: &Pod) -> Result<Vec<Value>> {
    let mut entries = journal(stage, pod)?;
    entries.retain(|entry| entry["state"]["Ended"].is_null());
    Ok(entries)
}

/// The injector that is at work on a pod, by the journal.
pub(crate) fn injector(stage: &Stage, pod: &Pod) -> Result<i32> {
    let entries = open_entries(stage, pod)?;
    let pid = entries
        .iter()
        .find_map(|entry| entry["state"]["Injected"]["injector"]["pid"].as_i64());
    let pid = pid.with_context(|| format!("no injector on {} in {entries:?}", pod.name))?;
    Ok(pid.try_into()?)
}

/// Waits until a process of a node is gone.
pub(crate) fn process_ends(stage: &Stage, node: &str, pid: i32) -> Result<()> {
    until(
        &format!("end of injector {pid} on {node}"),
        Duration::from_secs(10),
        || Ok((!stage.injectors(node)?.contains(&pid)).then_some(())),
    )
}

/// The uid of an experiment.
pub(crate) fn uid(space: &Space<'_>, experiment: &str) -> Result<String> {
    let object =
        space
            .stage
            .cluster
            .get(&["chaosexperiment", experiment, "--namespace", &space.name])?;
    let uid = object["metadata"]["uid"].as_str();
    uid.map(str::to_owned).context("an experiment without uid")
}

/// The node injections of an experiment.
pub(crate) fn injections(stage: &Stage, uid: &str) -> Result<Vec<Value>> {
    let selector = format!("windtunnel.dev/experiment-uid={uid}");
    let all = stage.cluster.get(&[
        "nodeinjections",
        "--namespace",
        windtunnel_tests::product::NAMESPACE,
        "--selector",
        &selector,
    ])?;
    Ok(all["items"].as_array().cloned().unwrap_or_default())
}

/// What the agent reported of a pod in an experiment.
pub(crate) fn target(stage: &Stage, uid: &str, pod: &Pod) -> Result<Value> {
    for injection in injections(stage, uid)? {
        let targets = injection["status"]["targets"].as_array().cloned();
        let found = targets
            .into_iter()
            .flatten()
            .find(|t| t["podUid"] == pod.uid.as_str());
        if let Some(target) = found {
            return Ok(target);
        }
    }
    bail!("nothing is reported of {}", pod.name)
}

/// The events on an experiment, as `reason: note`, oldest first.
pub(crate) fn events(space: &Space<'_>, experiment: &str) -> Result<Vec<String>> {
    let all = kubectl(
        space.stage,
        &[
            "get",
            "events.v1.events.k8s.io",
            "--namespace",
            &space.name,
            "--sort-by=.eventTime",
            "--output",
            "jsonpath={range .items[*]}{.regarding.name}{\"\\t\"}{.reason}: {.note}{\"\\n\"}{end}",
        ],
    )?;
    let of_it = all
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .filter(|(name, _)| *name == experiment);
    Ok(of_it.map(|(_, text)| text.to_owned()).collect())
}

/// Fails unless a pod's network is as it was, and nothing is at work on it.
pub(crate) fn is_as_before(stage: &Stage, pod: &Pod, before: &str) -> Result<()> {
    let now = stage.snapshot(pod)?;
    ensure!(
        now == before,
        "the network of {} was\n{before}\nand is\n{now}",
        pod.name
    );
    let open = open_entries(stage, pod)?;
    ensure!(open.is_empty(), "the journal still has {open:?}");
    Ok(())
}

/// Fails if an experiment that was deleted is still there, or its node injections stay: those of a
/// run that was over before are swept.
pub(crate) fn is_forgotten(space: &Space<'_>, name: &str, uid: &str) -> Result<()> {
    let left = space.stage.cluster.get(&[
        "chaosexperiment",
        name,
        "--namespace",
        &space.name,
        "--ignore-not-found",
    ])?;
    ensure!(left.is_null(), "the experiment is still there: {left}");
    until(
        "node injections that go with their experiment",
        SWEPT,
        || Ok(injections(space.stage, uid)?.is_empty().then_some(())),
    )
}
