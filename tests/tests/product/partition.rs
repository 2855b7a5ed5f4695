//! A cut link: nothing passes, the sender is told nothing, and nobody else is hit.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::measure::counts;
use super::stage::{ECHO, Pod, Stage, Test, at};

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[(
    "a_partition_is_silent_and_goes_one_way",
    a_partition_is_silent_and_goes_one_way,
)];

const SOON: Duration = Duration::from_secs(40);

/// Cut on the way back: what is sent arrives, no answer does, and the sender sees no error. Cut on the
/// way out: what is sent does not arrive. Another peer is reached all the time.
fn a_partition_is_silent_and_goes_one_way(stage: &Stage) -> Result<()> {
    let space = stage.space("a_partition_is_silent_and_goes_one_way")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let probe = |to: &str| space.probe(&client, &at(to, ECHO), 100, Duration::from_millis(5));
    for (direction, arrive) in [("Ingress", 100), ("Egress", 0), ("Both", 0)] {
        let run = space.run(
            &direction.to_lowercase(),
            &format!(
                "
duration: 60s
faults:
- name: cut
  target: {{selector: {{matchLabels: {{app: client}}}}}}
  network: {{partition: {{}}, direction: {direction}, peers: {{podSelector: {{matchLabels: {{app: echo}}}}}}}}
"
            ),
        )?;
        run.wait("Injected", SOON)?;
        counts(&format!("{direction}: packets arrived"), arrive, || {
            let (sent, came) = (
                stage.counter(&client, "Udp OutDatagrams")?,
                stage.counter(&echo, "Udp InDatagrams")?,
            );
            let outcome = probe(&echo.v4)?;
            let sent = stage.counter(&client, "Udp OutDatagrams")? - sent;
            let came = stage.counter(&echo, "Udp InDatagrams")? - came;
            ensure!(
                outcome.answered == 0,
                "{direction}: {} answers",
                outcome.answered
            );
            ensure!(
                sent == 100,
                "{direction}: the sender was let send {sent} of 100"
            );
            Ok(came)
        })?;
        let answers = |of: &Pod| Ok(probe(&of.v4)?.answered as u64);
        counts(
            &format!("{direction}: answers of another peer"),
            100,
            || answers(&other),
        )?;
        run.abort()?;
        run.wait("Finished", SOON)?;
        ensure!(
            run.condition("Clean")?.0 == "True",
            "status: {}",
            run.status()?
        );
        counts(&format!("after {direction}: answers"), 100, || {
            answers(&echo)
        })?;
    }
    Ok(())
}
