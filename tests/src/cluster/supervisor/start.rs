//! From nothing to a cluster that works, step by step.
//!
//! Kernels boot while the control plane comes up. A step that fails says which part it waited for
//! and how that part's log ends.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Supervisor;
use crate::cluster::api::Probe;
use crate::cluster::control::{Phase, Step};
use crate::cluster::poll::until;
use crate::cluster::progress::{output, tail};
use crate::cluster::{addresses, control_plane, kernel, layout, network, node, pki};

const DNS_MANIFEST: &str = include_str!("../../../cluster/coredns.yaml");
const DISK_BYTES: u64 = 4 << 30;
const API_BOUND: Duration = Duration::from_mins(3);
const NODE_BOUND: Duration = Duration::from_mins(2);
const TAIL_LINES: usize = 15;

impl Supervisor {
    /// Brings everything up; the outcome is in the status.
    pub(super) fn start(&self) {
        let result = self.bring_up();
        self.progress().phase = match result {
            Ok(()) => Phase::Ready,
            Err(error) => Phase::Failed(format!("{error:#}")),
        };
    }

    fn bring_up(&self) -> Result<()> {
        self.step("network", || network::create(self.order.nodes))?;
        self.step("certificates", || pki::create(self.order.nodes))?;
        for component in ["etcd", "apiserver"] {
            self.component(component)?.start();
        }
        self.step("node disks", || self.make_disks())?;
        for node in &self.nodes {
            node.kernel.start();
        }
        let probe = Probe::new(&pki::kubeconfig("admin"))?;
        self.step("API server", || {
            let wait = until("API server ready", API_BOUND, || {
                Ok(probe.is_ready().then_some(()))
            });
            wait.with_context(|| tails(&["apiserver", "etcd"].map(layout::log)))
        })?;
        for component in control_plane::COMPONENTS {
            self.component(component)?.start();
        }
        self.step("DNS manifest", apply_dns)?;
        self.step("nodes Ready", || self.wait_for_nodes(&probe))?;
        self.step("DNS", || {
            let wait = until("DNS available", NODE_BOUND, || {
                Ok(probe.is_available("kube-system", "coredns").then_some(()))
            });
            wait.with_context(|| tails(&["manager", "scheduler"].map(layout::log)))
        })
    }

    fn step<T>(&self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let value = work().with_context(|| name.to_owned())?;
        let seconds = self.started.elapsed().as_secs_f64() + self.order.seconds_before;
        self.progress().steps.push(Step {
            name: name.to_owned(),
            seconds,
        });
        Ok(value)
    }

    fn make_disks(&self) -> Result<()> {
        for node in &self.nodes {
            let directory = layout::node_directory(&addresses::node_name(node.index));
            fs::create_dir_all(&directory)
                .with_context(|| format!("create {}", directory.display()))?;
            kernel::make_disk(&node::disk(node.index), DISK_BYTES)?;
        }
        Ok(())
    }

    fn wait_for_nodes(&self, probe: &Probe) -> Result<()> {
        let wanted = self.nodes.len();
        let wait = until("all nodes Ready", NODE_BOUND, || {
            Ok(probe
                .ready_nodes()
                .filter(|ready| ready.len() == wanted)
                .map(|_| ()))
        });
        wait.with_context(|| {
            let logs = self.nodes.iter().flat_map(|node| {
                let name = addresses::node_name(node.index);
                [
                    layout::log(&name),
                    layout::node_directory(&name).join("kubelet.log"),
                ]
            });
            tails(&logs.collect::<Vec<_>>())
        })
    }
}

fn apply_dns() -> Result<()> {
    let file = layout::state("coredns.yaml");
    fs::write(&file, DNS_MANIFEST).with_context(|| format!("write {}", file.display()))?;
    output(
        Command::new(layout::kubernetes())
            .args(["kubectl", "create", "--validate=false", "--filename"])
            .arg(&file)
            .arg("--kubeconfig")
            .arg(pki::kubeconfig("admin")),
    )?;
    Ok(())
}

/// The last lines of logs, for an error message.
fn tails(logs: &[impl AsRef<Path>]) -> String {
    let tails = logs.iter().map(|log| tail(log.as_ref(), TAIL_LINES));
    tails.collect::<Vec<_>>().join("\n")
}
