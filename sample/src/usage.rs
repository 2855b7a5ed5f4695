//! What the container that this runs in uses, as its own control group says.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::time::sleep;

use crate::probe::print;

/// The container's own control group, where runtimes mount it.
const GROUP: &str = "/sys/fs/cgroup";

/// A measurement.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// For how long, in milliseconds.
    #[arg(long, default_value_t = 2_000)]
    millis: u64,
}

/// Measures and prints thousandths of a core, and bytes of memory at the end.
pub(crate) async fn usage(settings: Settings) -> anyhow::Result<()> {
    let (before, start) = (used_micros()?, Instant::now());
    sleep(Duration::from_millis(settings.millis)).await;
    let (used, took) = (used_micros()? - before, start.elapsed());
    let memory: u64 = read("memory.current")?.trim().parse()?;
    print(&serde_json::json!({
        "millicores": u128::from(used) * 1000 / took.as_micros(),
        "memoryBytes": memory,
    }))
}

fn used_micros() -> anyhow::Result<u64> {
    let stat = read("cpu.stat")?;
    let usage = stat.lines().find_map(|l| l.strip_prefix("usage_usec "));
    Ok(usage.context("no usage_usec")?.parse()?)
}

fn read(file: &str) -> anyhow::Result<String> {
    let path = format!("{GROUP}/{file}");
    std::fs::read_to_string(&path).with_context(|| format!("read {path}"))
}
