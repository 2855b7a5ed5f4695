//! What README shows first: the demo, as a user has it run, on the cluster that is there.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::{entry, success};
use windtunnel_tests::product::Sample;

use super::stage::{Stage, Test, kubectl};

pub(crate) const ROUGH: &[Test] = &[(
    "the_demo_shows_a_run_that_is_clean",
    the_demo_shows_a_run_that_is_clean,
)];

/// How long the demo's namespace may take to be gone.
const GONE: Duration = Duration::from_mins(2);
/// What a report says of a run in which all went as it should.
const TOLD: [&str; 9] = [
    "$ kubectl get chaos -n shop",
    "fault slow-inventory: Ended on orders-",
    "injected 1, recovered 1.",
    "fault half-down: Ended on inventory-",
    "injected 2, recovered 2.",
    "Recovered True    Recovered:",
    "Clean     True    Checked:",
    "Finished  True    WindowsClosed:",
    ", 0 things left;",
];

/// `lab demo` ends well, and says that the run did, that packets were late, and that nothing is left.
fn the_demo_shows_a_run_that_is_clean(stage: &Stage) -> Result<()> {
    let shop = Shop(stage);
    // A run happens once: one of an earlier demo would be shown as it ended.
    shop.close()?;
    let shown = stage.cluster.beside(|| {
        Command::new(entry::lab_program()?)
            .args(["--name", stage.cluster.name(), "demo"])
            .output()
            .context("run lab")
    })?;
    let shown =
        success(&shown).with_context(|| String::from_utf8_lossy(&shown.stdout).into_owned())?;
    for told in TOLD {
        ensure!(shown.contains(told), "no {told:?} in {shown}");
    }
    let slowest = shown.lines().filter_map(slowness).max();
    ensure!(
        slowest >= Some(1_300),
        "at most {slowest:?} ms on the way that is 1500 ± 200 ms longer: {shown}"
    );
    Ok(())
}

/// The median of a line's calls from orders to inventory, while the fault was in place.
fn slowness(line: &str) -> Option<u64> {
    line.contains("active: slow-inventory").then_some(())?;
    // Seconds, their unit, and four numbers of each way: calls, failures, median, 99th percentile.
    line.split_whitespace().nth(8)?.parse().ok()
}

/// The sample's namespace; it goes with this value.
struct Shop<'a>(&'a Stage);

impl Shop<'_> {
    fn close(&self) -> Result<()> {
        let timeout = format!("--timeout={}s", GONE.as_secs());
        let name = Sample::NAMESPACE;
        let delete = ["delete", "namespace", name, "--ignore-not-found", &timeout];
        kubectl(self.0, &delete).map(drop)
    }
}

impl Drop for Shop<'_> {
    fn drop(&mut self) {
        // The next demo begins with it, where this fails.
        let _ = self.close();
    }
}
