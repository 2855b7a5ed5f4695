//! Network faults, measured from inside the pods.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::measure::twice;
use super::stage::{ECHO, Stage, at};

const SOON: Duration = Duration::from_secs(30);

/// A delay is there while its window is open, and nowhere else.
pub(crate) fn delay_is_there_and_gone(stage: &Stage) -> Result<()> {
    let space = stage.space("delay_is_there_and_gone")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let echoes = [at(&echo.v4, ECHO), at(&echo.v6, ECHO)];
    let control = at(&other.v4, ECHO);
    let delays = |latency: f64, enough| space.added(&client, (&echoes, &control), latency, enough);
    for added in delays(0.0, 50)? {
        ensure!(
            added.median().abs() < 100.0,
            "slow before the fault: {added:?}"
        );
    }
    let run = space.run(
        "delay",
        "
duration: 5m
faults:
- name: slow
  target: {selector: {matchLabels: {app: client}}}
  network: {delay: {latency: 300ms}, peers: {podSelector: {matchLabels: {app: echo}}}}
",
    )?;
    run.wait("Injected", SOON)?;
    twice(|| {
        let added = delays(300.0, 200)?;
        let mut all = added.iter().zip(&echoes);
        all.try_for_each(|(added, to)| added.close(&format!("delay to {to}"), 200, 300.0, 0.05))
    })?;
    run.abort()?;
    run.wait("Finished", SOON)?;
    ensure!(run.phase()? == "Aborted", "status: {}", run.status()?);
    for added in delays(0.0, 50)? {
        ensure!(
            added.median().abs() < 100.0,
            "slow after the fault: {added:?}"
        );
    }
    run.wait("Clean", SOON)?;
    stage.unchanged(&client, &before)
}
