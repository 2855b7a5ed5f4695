//! How quickly a fault comes and goes, seen by packets of this process.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::sleep;
use windtunnel_crds::ChaosExperiment;
use windtunnel_tests::cluster::Cluster;
use windtunnel_tests::product::{Beacon, Flight, Installation};

use super::{NODE, Series, echo};
use crate::print;

const NAMESPACE: &str = "bench";
/// What the fault adds to a packet's way, and from where on it counts as delayed.
const DELAY: &str = "200ms";
const DELAYED: Duration = Duration::from_millis(190);
/// So many normal packets in a row are the end of the fault.
const CALM: usize = 20;
/// A control plane that is gone is waited for longest: its grace, and the doubt after it.
const BOUND: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_millis(2);
/// Between two packets to one echo.
const EVERY: Duration = Duration::from_millis(1);

/// Echoes, each with a beacon that speaks to it.
pub(super) struct Bed<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) client: Client,
    namespace: &'static str,
    beacons: Vec<Beacon>,
}

impl<'a> Bed<'a> {
    /// Makes the one echo of most measurements, and lights its beacon.
    pub(super) async fn make(
        cluster: &'a Cluster,
        windtunnel: &Installation<'_>,
        client: Client,
    ) -> Result<Self> {
        Self::of(cluster, windtunnel, client, (NAMESPACE, &[NODE])).await
    }

    /// Makes an echo on each of these nodes, and lights the beacons.
    pub(super) async fn of(
        cluster: &'a Cluster,
        windtunnel: &Installation<'_>,
        client: Client,
        (namespace, nodes): (&'static str, &[&str]),
    ) -> Result<Self> {
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: {namespace}}}"
        ))?;
        let name = |number: usize| format!("echo-{number}");
        let echoes = nodes.iter().enumerate().map(|(number, node)| {
            let names = (&*name(number), "echo", *node);
            echo(names, namespace, &windtunnel.images.tag)
        });
        cluster.apply(&echoes.collect::<String>())?;
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let mut beacons = Vec::new();
        for number in 0..nodes.len() {
            let address = within("the echo's address", || async {
                let pod = pods.get(&name(number)).await?;
                let status = pod.status.unwrap_or_default();
                let is_ready = status
                    .conditions
                    .iter()
                    .flatten()
                    .any(|c| c.type_ == "Ready" && c.status == "True");
                Ok(status.pod_ip.filter(|_| is_ready))
            })
            .await?;
            let echo = format!("{address}:7")
                .parse()
                .context("the echo's address")?;
            // Together they send no more than a thousand packets a second.
            let every = EVERY * u32::try_from(nodes.len())?;
            beacons.push(Beacon::paced(cluster, echo, every)?);
        }
        Ok(Self {
            cluster,
            client,
            namespace,
            beacons,
        })
    }

    pub(super) fn experiments(&self) -> Api<ChaosExperiment> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// An experiment that delays what the echo answers to this process.
    pub(super) async fn start(&self, name: &str, duration: &str) -> Result<Instant> {
        let experiment: ChaosExperiment = serde_json::from_value(json!({
            "apiVersion": "windtunnel.dev/v1alpha1",
            "kind": "ChaosExperiment",
            "metadata": {"name": name},
            "spec": {"duration": duration, "faults": [{
                "name": "slow",
                "target": {"selector": {"matchLabels": {"app": "echo"}}},
                "network": {"delay": {"latency": DELAY}, "peers": {"cidrs": ["10.88.0.1/32"]}},
            }]},
        }))?;
        self.experiments()
            .create(&PostParams::default(), &experiment)
            .await?;
        Ok(Instant::now())
    }

    /// How long after `moment` the first packet left that was delayed; of several echoes, the last.
    pub(super) async fn came(&self, moment: Instant) -> Result<Duration> {
        self.each("a delayed packet", |beacon| {
            let slow = |f: &&Flight| {
                f.took()
                    .map_or(f.left.elapsed() > DELAYED, |took| took > DELAYED)
            };
            let flights = beacon.since(moment);
            let first = flights.iter().find(slow)?;
            Some(first.left.duration_since(moment))
        })
        .await
    }

    /// How long after `moment` the first packet left after which none was delayed; of several echoes,
    /// the last.
    pub(super) async fn went(&self, moment: Instant) -> Result<Duration> {
        self.each("normal packets", |beacon| {
            let flights = beacon.since(moment);
            let normal = |f: &Flight| f.took().is_some_and(|took| took < DELAYED);
            let calm = flights
                .windows(CALM)
                .position(|window| window.iter().all(normal))?;
            Some(flights[calm].left.duration_since(moment))
        })
        .await
    }

    /// The longest of what is seen of all beacons, once it is.
    async fn each(
        &self,
        what: &str,
        seen: impl Fn(&Beacon) -> Option<Duration>,
    ) -> Result<Duration> {
        let longest = within(what, || async {
            let all: Option<Vec<Duration>> = self.beacons.iter().map(&seen).collect();
            Ok(all.map(|all| all.into_iter().max()))
        });
        longest.await?.context("no beacon")
    }

    /// Deletes an experiment and waits until it is gone.
    pub(super) async fn end(&self, name: &str) -> Result<()> {
        let params = DeleteParams::default();
        self.experiments().delete(name, &params).await?;
        self.gone(name).await
    }

    /// Waits until an experiment is gone.
    pub(super) async fn gone(&self, name: &str) -> Result<()> {
        within("the experiment's end", || async {
            Ok(self
                .experiments()
                .get_opt(name)
                .await?
                .is_none()
                .then_some(()))
        })
        .await
    }

    /// Waits until a condition of an experiment holds.
    pub(super) async fn holds(&self, name: &str, condition: &str) -> Result<ChaosExperiment> {
        within(condition, || async {
            let experiment = self.experiments().get(name).await?;
            let conditions = experiment.status.iter().flat_map(|s| &s.conditions);
            let holds = conditions
                .into_iter()
                .any(|c| c.type_ == condition && c.status == "True");
            Ok(holds.then_some(experiment))
        })
        .await
    }
}

/// Waits for something, looking often.
async fn within<T, F: Future<Output = Result<Option<T>>>>(
    what: &str,
    mut probe: impl FnMut() -> F,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = probe().await? {
            return Ok(found);
        }
        if start.elapsed() > BOUND {
            bail!("{what}: not within {} s", BOUND.as_secs());
        }
        sleep(POLL).await;
    }
}

/// Measures and prints the table.
pub(super) async fn measure(bed: &Bed<'_>, runs: usize) -> Result<()> {
    let [came, went, clean] = series(bed, runs).await?;
    print::line("| what | p50 ms | p99 ms | max ms | n |");
    print::line("| --- | --- | --- | --- | --- |");
    print::line(&came.row("POST answered → first delayed packet"));
    print::line(&went.row("DELETE answered → no packet delayed any more"));
    print::line(&clean.row("DELETE answered → checked and gone"));
    Ok(())
}

/// How long faults took to come, to go, and to be checked and gone.
pub(super) async fn series(bed: &Bed<'_>, runs: usize) -> Result<[Series; 3]> {
    let (mut came, mut went, mut clean) = (Series::default(), Series::default(), Series::default());
    for run in 0..runs {
        let name = format!("speed-{run}");
        let posted = bed.start(&name, "1m").await?;
        came.add(bed.came(posted).await?);
        bed.holds(&name, "Injected").await?;
        bed.experiments()
            .delete(&name, &DeleteParams::default())
            .await?;
        let deleted = Instant::now();
        went.add(bed.went(deleted).await?);
        bed.gone(&name).await?;
        clean.add(deleted.elapsed());
    }
    Ok([came, went, clean])
}

/// Waits until the nodes of an experiment were checked again and nothing of it is left there.
pub(super) async fn rechecked(bed: &Bed<'_>, name: &str) -> Result<()> {
    within("the recheck", || async {
        let experiment = bed.experiments().get(name).await?;
        let cleanup = experiment.status.and_then(|s| s.cleanup);
        Ok(cleanup.and_then(|c| c.rechecked_at).map(drop))
    })
    .await
}

/// The name of an object.
pub(super) fn name_of(experiment: &ChaosExperiment) -> String {
    experiment.name_any()
}
