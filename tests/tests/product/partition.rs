//! A cut link: nothing passes, the sender is told nothing, and nobody else is hit.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::stage::{ECHO, Stage, Test, at};

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
        ensure!(came == arrive, "{direction}: {came} of 100 packets arrived");
        ensure!(
            sent == 100,
            "{direction}: the sender was let send {sent} of 100"
        );
        let spared = probe(&other.v4)?;
        ensure!(
            spared.answered == 100,
            "{direction}: another peer answered {} of 100",
            spared.answered
        );
        run.abort()?;
        run.wait("Finished", SOON)?;
        ensure!(
            run.condition("Clean")?.0 == "True",
            "status: {}",
            run.status()?
        );
        let after = probe(&echo.v4)?;
        ensure!(
            after.answered == 100,
            "after {direction}: {} answers",
            after.answered
        );
    }
    Ok(())
}
