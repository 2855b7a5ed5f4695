//! Several faults on one pod: they add up where they mean different packets, and are refused where
//! they would compete for the same.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::measure::Probes;
use super::stage::{ECHO, Pod, Space, Stage, at};

const SOON: Duration = Duration::from_secs(30);

/// An experiment that cuts the client off some peers.
fn cut_off(peers: &str) -> String {
    format!(
        "
duration: 5m
faults:
- name: cut
  target: {{selector: {{matchLabels: {{app: client}}}}}}
  network: {{loss: {{percent: 100}}{peers}}}
"
    )
}

fn pods_of(app: &str) -> String {
    cut_off(&format!(
        ", peers: {{podSelector: {{matchLabels: {{app: {app}}}}}}}"
    ))
}

/// Fails unless exactly those pods answer that should.
fn answers(space: &Space<'_>, from: &Pod, wanted: &[(&Pod, bool)]) -> Result<()> {
    let to: Vec<String> = wanted
        .iter()
        .flat_map(|(pod, _)| [at(&pod.v4, ECHO), at(&pod.v6, ECHO)])
        .collect();
    let probes = Probes {
        wait: Duration::from_secs(2),
        ..Probes::new(&to, 20)
    };
    for (number, outcome) in space.probes(from, &probes)?.iter().enumerate() {
        let wanted = wanted[number / 2].1;
        let found = outcome.answered;
        ensure!(
            if wanted { found >= 10 } else { found == 0 },
            "{}: {found} of 20 answered, and it is{} to be cut off",
            to[number],
            if wanted { " not" } else { "" }
        );
    }
    Ok(())
}

/// Two experiments with different peers act on one pod at the same time, and the end of one leaves
/// the other as it is.
pub(crate) fn experiments_compose(stage: &Stage) -> Result<()> {
    let space = stage.space("experiments_compose")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let first = space.run("first", &pods_of("echo"))?;
    first.wait("Injected", SOON)?;
    answers(&space, &client, &[(&echo, false), (&other, true)])?;
    let second = space.run("second", &pods_of("other"))?;
    second.wait("Injected", SOON)?;
    answers(&space, &client, &[(&echo, false), (&other, false)])?;
    first.abort()?;
    first.wait("Clean", SOON)?;
    answers(&space, &client, &[(&echo, true), (&other, false)])?;
    second.abort()?;
    second.wait("Clean", SOON)?;
    answers(&space, &client, &[(&echo, true), (&other, true)])?;
    stage.unchanged(&client, &before)
}

/// An experiment that means packets that another one has is refused before anything is injected,
/// with the name of the other; so are two such faults in one experiment.
pub(crate) fn equal_peers_are_refused(stage: &Stage) -> Result<()> {
    let space = stage.space("equal_peers_are_refused")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let first = space.run("first", &pods_of("echo"))?;
    first.wait("Injected", SOON)?;
    // Not the contents of the tables: the first one's follows the addresses of its node.
    let marks = || stage.in_netns(&client, &["sh", "-c", "nft list tables; ip -br link"]);
    let held = marks()?;
    let everything = cut_off("");
    let address = cut_off(&format!(
        ", direction: Both, peers: {{cidrs: [{}]}}",
        echo.v6
    ));
    let twice = format!(
        "{}{}",
        pods_of("other"),
        pods_of("other")
            .split_once("faults:\n")
            .context("no faults")?
            .1
            .replace("name: cut", "name: again")
    );
    for (name, spec, rival) in [
        ("same", pods_of("echo"), "fault cut of experiment first"),
        ("everything", everything, "fault cut of experiment first"),
        ("address", address, "fault cut of experiment first"),
        ("twice", twice, "of experiment twice"),
    ] {
        let run = space.run(name, &spec)?;
        run.wait("Finished", SOON)?;
        let status = run.status()?;
        ensure!(status["phase"] == "Failed", "{name}: {status}");
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let prepared = conditions.iter().find(|c| c["type"] == "Prepared");
        let prepared = prepared.with_context(|| format!("{name}: {status}"))?;
        let message = prepared["message"].as_str().unwrap_or_default();
        ensure!(
            prepared["status"] == "False" && message.contains(rival),
            "{name}: {prepared}"
        );
        let injected = status["summary"]["injected"].as_str().unwrap_or_default();
        ensure!(
            status["startTime"].is_null() && injected.starts_with("0/"),
            "{name}: something was injected: {status}"
        );
        ensure!(marks()? == held, "{name}: found {}, not {held}", marks()?);
    }
    answers(&space, &client, &[(&echo, false), (&other, true)])?;
    ensure!(
        first.phase()? == "Running",
        "the first: {}",
        first.status()?
    );
    first.abort()?;
    first.wait("Clean", SOON)
}

/// Faults on the same packets of one pod take turns, each in a window of its own on one clock.
pub(crate) fn faults_on_the_same_packets_take_turns(stage: &Stage) -> Result<()> {
    let space = stage.space("faults_on_the_same_packets_take_turns")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let once = pods_of("echo");
    let (_, fault) = once.split_once("faults:\n").context("no faults")?;
    let first = fault.replace("name: cut", "name: first\n  duration: 3s");
    let second = fault.replace("name: cut", "name: second\n  startAfter: 3s");
    let run = space.run("turns", &format!("duration: 5m\nfaults:\n{first}{second}"))?;
    run.until("the second turn", SOON, |s| {
        s["faults"][0]["phase"] == "Ended" && s["faults"][1]["injected"] == 1
    })?;
    ensure!(
        run.status()?["faults"][0]["injected"] == 1,
        "{}",
        run.status()?
    );
    ensure!(run.condition("Injected")?.0 == "True", "{}", run.status()?);
    answers(&space, &client, &[(&echo, false), (&other, true)])?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    answers(&space, &client, &[(&echo, true), (&other, true)])?;
    stage.unchanged(&client, &before)
}
