//! What a cluster says of itself when a test has failed: enough to see why from a log.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::Value;
use windtunnel_tests::product::NAMESPACE;

use super::stage::{Stage, kubectl};

/// How many of the last lines of each program are told.
const LINES: &str = "--tail=12";

/// Runs and their nodes' parts, namespaces that do not go, the lease, and what the programs said
/// last. What cannot be asked for is told as the error.
pub(crate) fn told(stage: &Stage) -> String {
    let mut all = String::new();
    for (what, answer) in [
        ("runs", runs(stage)),
        ("node injections", injections(stage)),
        ("ending namespaces", namespaces(stage)),
        ("lease", lease(stage)),
        ("operator", logs(stage, "operator")),
        ("agents", logs(stage, "agent")),
    ] {
        let text = answer.unwrap_or_else(|error| format!("{error:#}"));
        let _ = write!(all, "  -- {what}\n{}", indented(&text));
    }
    all
}

fn indented(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.fold(String::new(), |all, line| all + "  " + line + "\n")
}

fn runs(stage: &Stage) -> Result<String> {
    let list = stage
        .cluster
        .get(&["chaosexperiments", "--all-namespaces"])?;
    Ok(each(&list, |run| {
        let (metadata, status) = (&run["metadata"], &run["status"]);
        format!(
            "{}/{} deleted {} finalizers {} phase {}: {}",
            metadata["namespace"],
            metadata["name"],
            metadata["deletionTimestamp"],
            metadata["finalizers"],
            status["phase"],
            status["message"]
        )
    }))
}

fn injections(stage: &Stage) -> Result<String> {
    let list = stage
        .cluster
        .get(&["nodeinjections", "--namespace", NAMESPACE])?;
    Ok(each(&list, |injection| {
        let (spec, status) = (&injection["spec"], &injection["status"]);
        format!(
            "{} for {} abort {} start {}: {} {} {} audit {}",
            spec["nodeName"],
            spec["experiment"]["name"],
            spec["abort"],
            spec["startTime"],
            status["phase"],
            status["reason"],
            status["message"],
            status["audit"]
        )
    }))
}

fn namespaces(stage: &Stage) -> Result<String> {
    let list = stage.cluster.get(&["namespaces"])?;
    Ok(each(&list, |namespace| {
        if namespace["metadata"]["deletionTimestamp"].is_null() {
            return String::new();
        }
        let (name, conditions) = (
            &namespace["metadata"]["name"],
            &namespace["status"]["conditions"],
        );
        format!("{name}: {conditions}")
    }))
}

fn lease(stage: &Stage) -> Result<String> {
    let lease = [
        "lease",
        "windtunnel-operator",
        "--namespace",
        NAMESPACE,
        "--ignore-not-found",
    ];
    Ok(stage.cluster.get(&lease)?["spec"].to_string())
}

fn logs(stage: &Stage, component: &str) -> Result<String> {
    let selector = format!("app.kubernetes.io/component={component}");
    let arguments = [
        "logs",
        "--namespace",
        NAMESPACE,
        "--selector",
        &selector,
        LINES,
        "--prefix",
    ];
    kubectl(stage, &arguments)
}

fn each(list: &Value, line: impl Fn(&Value) -> String) -> String {
    let items = list["items"].as_array().into_iter().flatten();
    items.map(line).collect::<Vec<_>>().join("\n")
}
