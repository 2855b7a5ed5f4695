//! The API as kubectl shows it, on a real API server: what is accepted and refused with which words,
//! what may change, and what there is to read.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use table::Case;

use super::stage::{Space, Stage, kubectl};

const SOON: Duration = Duration::from_secs(30);

#[path = "../../../crds/testdata/table.rs"]
mod table;

/// What kubectl says of manifests that are not to be kept, whether it likes them or not.
fn dry_run(space: &Space<'_>, manifest: &str) -> Result<(String, String)> {
    let mut command = space.stage.cluster.kubectl_command();
    command.args(["apply", "--dry-run=server", "--filename", "-"]);
    let output = space
        .stage
        .cluster
        .run_with_input(&mut command, manifest.as_bytes())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((text(&output.stdout), text(&output.stderr)))
}

/// Every case of the table gets the answer that stands in it.
pub(crate) fn manifests_get_their_answers(stage: &Stage) -> Result<()> {
    let space = stage.space("manifests_get_their_answers")?;
    let cases = table::cases()?;
    let object = |number: usize, case: &Case| {
        case.object(&json!({"name": format!("case-{number}"), "namespace": space.name}))
    };
    let is_about_a_field = |case: &Case| case.error.first().is_none_or(|e| e.starts_with("spec"));
    let (named, unnamed): (Vec<_>, Vec<_>) = cases
        .iter()
        .enumerate()
        .partition(|(_, case)| is_about_a_field(case));
    // Not as one List: kubectl would judge that by itself, and in other words than the server.
    let all: Vec<String> = named
        .iter()
        .map(|(n, case)| object(*n, case).to_string())
        .collect();
    let all = all.join("\n");
    let (accepted, refused) = dry_run(&space, &all)?;
    ensure!(!accepted.is_empty(), "nothing is accepted: {refused}");
    for (number, case) in named {
        let accepted = accepted.contains(&format!("/case-{number} created"));
        judge(case, accepted, answer(&refused, number))?;
    }
    // An answer that does not name the object is asked for alone.
    for (number, case) in unnamed {
        let (accepted, refused) = dry_run(&space, &object(number, case).to_string())?;
        judge(case, !accepted.is_empty(), &refused)?;
    }
    Ok(())
}

/// What was said of one object among many.
fn answer(refused: &str, number: usize) -> &str {
    let name = format!("\"case-{number}\" is invalid");
    let answer = refused.split_once(&name).map_or("", |(_, rest)| rest);
    answer.split("\"case-").next().unwrap_or("")
}

fn judge(case: &Case, accepted: bool, refused: &str) -> Result<()> {
    let Case { name, error, .. } = case;
    ensure!(
        accepted == error.is_empty(),
        "{name}: {}: {refused}",
        if accepted { "accepted" } else { "refused" }
    );
    for part in error {
        ensure!(
            refused.contains(part),
            "{name}: {part:?} is not in {refused:?}"
        );
    }
    Ok(())
}

/// Every manifest in examples/ is one that the API server takes.
pub(crate) fn examples_are_accepted(stage: &Stage) -> Result<()> {
    let space = stage.space("examples_are_accepted")?;
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(&directory).context("examples")? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "yaml") {
            continue;
        }
        // Their namespace need not be there.
        let manifest = std::fs::read_to_string(&path)?.replace("shop", &space.name);
        let (accepted, refused) = dry_run(&space, &manifest)?;
        ensure!(
            refused.is_empty() && !accepted.is_empty(),
            "{}: {refused}",
            path.display()
        );
        seen += 1;
    }
    ensure!(seen > 0, "no manifest in {}", directory.display());
    Ok(())
}

fn patch(stage: &Stage, space: &Space<'_>, patch: &Value, more: &[&str]) -> Result<String> {
    let patch = patch.to_string();
    let mut arguments = vec![
        "patch",
        "chaosexperiment",
        "run",
        "--namespace",
        &space.name,
    ];
    arguments.extend(["--type=merge", "--patch", &patch]);
    arguments.extend(more);
    kubectl(stage, &arguments)
}

/// A spec cannot change but for the abort, status fields that are written once cannot at all; what a
/// user reads and waits for is there.
pub(crate) fn a_run_is_what_it_was_created_as(stage: &Stage) -> Result<()> {
    let space = stage.space("a_run_is_what_it_was_created_as")?;
    space.client_and_echoes()?;
    let run = space.run(
        "run",
        "
duration: 5m
faults:
- name: cut
  target: {selector: {matchLabels: {app: client}}}
  network: {loss: {percent: 100}}
",
    )?;
    run.wait("Injected", SOON)?;
    columns(stage, &space, &["Running", "1/1", "0/1"])?;
    let fault = json!([{
        "name": "cut",
        "target": {"selector": {"matchLabels": {"app": "echo"}}},
        "network": {"loss": {"percent": 100}},
    }]);
    for (field, value) in [
        ("faults", fault),
        ("duration", json!("6m")),
        ("seed", json!("other")),
        ("dryRun", json!(true)),
        ("ttlSecondsAfterFinished", json!(1)),
    ] {
        refused(
            patch(stage, &space, &json!({"spec": {field: value}}), &[]),
            &format!("{field} is immutable"),
        )?;
    }
    let status = run.status()?;
    for field in ["startTime", "deadline"] {
        for value in [json!("2026-01-01T00:00:00.000000Z"), Value::Null] {
            let change = json!({"status": {field: value}});
            let found = patch(stage, &space, &change, &["--subresource=status"]);
            refused(found, &format!("{field} is written once"))?;
        }
        ensure!(run.status()?[field] == status[field], "{field} has changed");
    }
    run.abort()?;
    for condition in ["Recovered", "Clean", "Finished"] {
        run.wait(condition, SOON)?;
    }
    refused(
        patch(stage, &space, &json!({"spec": {"abort": false}}), &[]),
        "an abort cannot be taken back",
    )?;
    columns(stage, &space, &["Aborted", "1/1", "1/1", "Checked"])?;
    explained(stage)
}

fn refused(answer: Result<String>, words: &str) -> Result<()> {
    match answer {
        Ok(answer) => anyhow::bail!("accepted, in spite of {words:?}: {answer}"),
        Err(error) => {
            let error = format!("{error:#}");
            ensure!(error.contains(words), "{words:?} is not in {error:?}");
            Ok(())
        }
    }
}

/// `kubectl get` shows its columns, with these values in this order.
fn columns(stage: &Stage, space: &Space<'_>, values: &[&str]) -> Result<()> {
    let get = ["get", "chaos", "--namespace", &space.name];
    let table = kubectl(stage, &get)?;
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head = lines.next().unwrap_or_default();
    ensure!(
        head == [
            "NAME",
            "PHASE",
            "INJECTED",
            "RECOVERED",
            "CLEAN",
            "DEADLINE",
            "AGE"
        ],
        "columns: {head:?}"
    );
    let row = lines.next().unwrap_or_default();
    ensure!(
        row.get(1..=values.len()) == Some(values),
        "not {values:?}: {table}"
    );
    let deadline = row.iter().rev().nth(1).copied().unwrap_or_default();
    ensure!(deadline.ends_with('Z'), "no deadline: {table}");
    let wide = kubectl(stage, &[&get[..], &["--output", "wide"]].concat())?;
    ensure!(
        wide.lines().next().unwrap_or_default().contains("MESSAGE"),
        "no message: {wide}"
    );
    Ok(())
}

/// `kubectl explain` says what the fields mean and how far they go.
fn explained(stage: &Stage) -> Result<()> {
    let field = "chaosexperiment.spec.faults.network.delay";
    let text = kubectl(stage, &["explain", field])?;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "latency",
        "above 0s, to 60s",
        "jitter",
        "At most 2s",
        "distribution",
    ] {
        ensure!(text.contains(part), "{part:?} is not in {text:?}");
    }
    Ok(())
}
