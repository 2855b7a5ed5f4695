//! Network faults, measured from inside the pods.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::stage::{ECHO, Stage, at, close};

const SOON: Duration = Duration::from_secs(20);

/// A delay is there while its window is open, and nowhere else.
pub(crate) fn delay_is_there_and_gone(stage: &Stage) -> Result<()> {
    let space = stage.space("delay_is_there_and_gone")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let probe = |to: &str| space.probe(&client, &at(to, ECHO), 20, Duration::from_millis(20));
    ensure!(probe(&echo.v4)?.max() < 100.0, "slow before the fault");
    let run = space.run(
        "delay",
        "
duration: 10s
faults:
- name: slow
  target: {selector: {matchLabels: {app: client}}}
  network: {delay: {latency: 300ms}, peers: {podSelector: {matchLabels: {app: echo}}}}
",
    )?;
    run.wait("Injected", SOON)?;
    for address in [&echo.v4, &echo.v6] {
        let outcome = probe(address)?;
        ensure!(outcome.answered == 20, "lost packets: {outcome:?}");
        close("delay", outcome.mean(), 300.0, 0.05)?;
    }
    ensure!(probe(&other.v4)?.max() < 100.0, "another peer is delayed");
    run.wait("Finished", SOON)?;
    ensure!(run.phase()? == "Completed", "status: {}", run.status()?);
    ensure!(probe(&echo.v4)?.max() < 100.0, "slow after the fault");
    ensure!(
        stage.snapshot(&client)? == before,
        "the pod's network is not as before"
    );
    Ok(())
}
