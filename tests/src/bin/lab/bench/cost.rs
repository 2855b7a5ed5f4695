//! What it costs: memory and processor time at rest, and writes to the API server for a run.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::sleep;
use windtunnel_tests::cluster::{Cluster, success};
use windtunnel_tests::product::Installation;

use super::speed::{Bed, name_of};
use crate::print;

/// How long processor time at rest is measured.
const REST: Duration = Duration::from_secs(20);

/// Memory and processor time of the programs at rest.
pub(super) fn idle(cluster: &Cluster, windtunnel: &Installation<'_>) -> Result<()> {
    windtunnel.wait_for_leader()?;
    let before = usage(cluster)?;
    std::thread::sleep(REST);
    print::line("| at rest | resident MiB | private MiB | CPU % |");
    print::line("| --- | --- | --- | --- |");
    for (name, now) in usage(cluster)? {
        let ticks = now.ticks - before.get(&name).map_or(now.ticks, |b| b.ticks);
        #[expect(clippy::cast_precision_loss, reason = "a few hundred ticks")]
        let percent = ticks as f64 / REST.as_secs_f64();
        print::line(&format!(
            "| {name} | {:.1} | {:.1} | {percent:.2} |",
            now.resident, now.private
        ));
    }
    Ok(())
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    pub(super) resident: f64,
    private: f64,
    /// Hundredths of a second.
    ticks: u64,
}

/// The usage of each agent and operator, by node and program.
pub(super) fn usage(cluster: &Cluster) -> Result<BTreeMap<String, Usage>> {
    let script = "for p in $(pgrep -f '^/windtunnel-(agent|operator) [r]un'); do \
        echo $(tr '\\0' ' ' < /proc/$p/cmdline | cut -d' ' -f1) $p \
        $(awk '/^Rss:/{r=$2} /^Private_(Clean|Dirty):/{s+=$2} END{print r, s}' /proc/$p/smaps_rollup) \
        $(awk '{print $14+$15}' /proc/$p/stat); done";
    let mut all = BTreeMap::new();
    for node in cluster.nodes()? {
        for line in node.run(&["sh", "-c", script])?.text()?.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [program, pid, resident, private, ticks] = words[..] else {
                continue;
            };
            let mib = |text: &str| -> Result<f64> {
                Ok(text.parse::<f64>().context("read memory")? / 1024.0)
            };
            let usage = Usage {
                resident: mib(resident)?,
                private: mib(private)?,
                ticks: ticks.parse()?,
            };
            let name = format!(
                "{} on {} (pid {pid})",
                program.trim_start_matches("/windtunnel-"),
                node.name()
            );
            all.insert(name, usage);
        }
    }
    Ok(all)
}

/// Writes to the API server for one run with one window on one node, the recheck included.
pub(super) async fn writes(bed: &Bed<'_>) -> Result<()> {
    let before = counted(bed.cluster)?;
    bed.start("writes", "2s").await?;
    let experiment = bed.holds("writes", "Finished").await?;
    // The recheck is five seconds later here; the node injection goes after it.
    let name = name_of(&experiment);
    super::speed::rechecked(bed, &name).await?;
    sleep(Duration::from_secs(1)).await;
    let after = counted(bed.cluster)?;
    print::line("| write | count |");
    print::line("| --- | --- |");
    for (what, count) in after {
        let made = count - before.get(&what).copied().unwrap_or(0);
        if made > 0 {
            print::line(&format!("| {what} | {made} |"));
        }
    }
    bed.experiments()
        .delete(&name, &kube::api::DeleteParams::default())
        .await?;
    bed.gone(&name).await
}

/// Requests that write our resources, as the API server counts them.
fn counted(cluster: &Cluster) -> Result<BTreeMap<String, u64>> {
    let text = success(&cluster.kubectl(&["get", "--raw", "/metrics"])?)?;
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    let lines = text
        .lines()
        .filter(|line| line.starts_with("apiserver_request_total{"));
    for line in lines.filter(|line| line.contains(r#"group="windtunnel.dev""#)) {
        let label = |name: &str| {
            let rest = line.split_once(&format!("{name}=\""))?.1;
            rest.split_once('"').map(|(value, _)| value.to_owned())
        };
        let (verb, resource) = (
            label("verb").unwrap_or_default(),
            label("resource").unwrap_or_default(),
        );
        if !matches!(verb.as_str(), "POST" | "PUT" | "PATCH" | "APPLY" | "DELETE")
            || resource == "nodeagents"
        {
            continue;
        }
        let subresource = label("subresource").unwrap_or_default();
        let count: f64 = line
            .rsplit(' ')
            .next()
            .unwrap_or_default()
            .parse()
            .context("read a counter")?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count"
        )]
        let count = count as u64;
        *all.entry(format!("{verb} {resource} {subresource}"))
            .or_default() += count;
    }
    Ok(all)
}
