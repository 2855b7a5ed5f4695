//! How long each layer of reclamation takes, by what the layers above it have lost: from the blow to
//! the first packet after which none is delayed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Node, Signal};
use windtunnel_tests::product::Installation;

use super::speed::Bed;
use super::{NODE, Series};
use crate::print;

const INJECTOR: &str = "/proc/self/exe inject";
const AGENT: &str = "/windtunnel-agent run";
/// How long parts may take to be back.
const BACK: Duration = Duration::from_mins(2);

/// What is done to a node with a fault in place, and undone when the fault is gone.
struct Layer {
    name: &'static str,
    blow: fn(&Place<'_>) -> Result<()>,
    mend: fn(&Place<'_>) -> Result<()>,
    /// It takes the control plane's grace each time, and so is measured a tenth as often.
    is_slow: bool,
}

/// Where it is done.
struct Place<'a> {
    node: Node<'a>,
    windtunnel: &'a Installation<'a>,
}

const LAYERS: &[Layer] = &[
    Layer {
        name: "kernel: injector killed",
        blow: |place| place.signal(INJECTOR, Signal::SIGKILL),
        mend: |_| Ok(()),
        is_slow: false,
    },
    Layer {
        name: "kernel: agent killed",
        blow: |place| place.signal(AGENT, Signal::SIGKILL),
        mend: |place| place.renew_agent(),
        is_slow: false,
    },
    Layer {
        name: "lease: agent stopped",
        blow: |place| place.signal(AGENT, Signal::SIGSTOP),
        mend: |place| place.signal(AGENT, Signal::SIGCONT),
        is_slow: false,
    },
    Layer {
        name: "supervision: injector stopped",
        blow: |place| place.signal(INJECTOR, Signal::SIGSTOP),
        mend: |_| Ok(()),
        is_slow: false,
    },
    Layer {
        name: "lease: agent and injector stopped",
        blow: |place| {
            place.signal(INJECTOR, Signal::SIGSTOP)?;
            place.signal(AGENT, Signal::SIGSTOP)
        },
        mend: |place| place.signal(AGENT, Signal::SIGCONT),
        is_slow: false,
    },
    Layer {
        name: "control plane: operator gone",
        blow: |place| place.windtunnel.scale_operator(0),
        mend: |place| {
            place.windtunnel.scale_operator(2)?;
            place.windtunnel.wait_for_operators()
        },
        is_slow: true,
    },
];

impl Place<'_> {
    fn signal(&self, pattern: &str, signal: Signal) -> Result<()> {
        let met = self.node.signal_matching(pattern, signal)?;
        ensure!(!met.is_empty(), "there is no {pattern}");
        Ok(())
    }

    /// Another pod in place of one whose agent was killed: its own would wait longer each time.
    fn renew_agent(&self) -> Result<()> {
        let old = self.windtunnel.agent_on(NODE)?;
        self.windtunnel.remove(&old)?;
        until("another agent", BACK, || {
            let pods = self.windtunnel.pods("agent")?;
            let is_ready = pods.iter().any(|pod| {
                pod["spec"]["nodeName"] == NODE
                    && pod["metadata"]["name"] != old.as_str()
                    && pod["status"]["containerStatuses"][0]["ready"] == true
            });
            Ok(is_ready.then_some(()))
        })
    }
}

/// Measures each layer and prints the table.
pub(super) async fn measure(
    bed: &Bed<'_>,
    windtunnel: &Installation<'_>,
    runs: usize,
) -> Result<()> {
    let node = bed.cluster.node(NODE)?;
    let place = Place { node, windtunnel };
    print::line("| layer: what happens to the node | p50 ms | p99 ms | max ms | n |");
    print::line("| --- | --- | --- | --- | --- |");
    for (number, layer) in LAYERS.iter().enumerate() {
        let mut series = Series::default();
        let runs = if layer.is_slow {
            runs.div_ceil(10)
        } else {
            runs
        };
        for run in 0..runs {
            let name = format!("layer-{number}-{run}");
            let posted = bed.start(&name, "5m").await?;
            bed.came(posted).await?;
            bed.holds(&name, "Injected").await?;
            let blow = Instant::now();
            (layer.blow)(&place)?;
            series.add(bed.went(blow).await?);
            (layer.mend)(&place)?;
            bed.end(&name).await?;
        }
        print::line(&series.row(layer.name));
    }
    Ok(())
}
