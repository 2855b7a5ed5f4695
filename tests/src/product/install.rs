//! windtunnel installed with its chart, by the real helm.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::build::{Images, Profile, images};
use crate::cluster::poll::until;
use crate::cluster::{Cluster, success};

/// The release namespace.
pub const NAMESPACE: &str = "windtunnel";
const RELEASE: &str = "windtunnel";
const OPERATOR: &str = "deployment/windtunnel-operator";
const AGENT: &str = "daemonset/windtunnel-agent";
const READY: Duration = Duration::from_mins(5);

/// windtunnel on a cluster.
#[derive(Debug)]
pub struct Installation<'a> {
    cluster: &'a Cluster,
    /// The images that it runs.
    pub images: Images,
}

impl<'a> Installation<'a> {
    /// Builds the images and gives them to the nodes.
    ///
    /// # Errors
    /// When something cannot be built or loaded.
    pub fn load(cluster: &'a Cluster, profile: Profile) -> Result<Self> {
        let images = images(profile, &cluster.path("images"))?;
        cluster.load_image(&images.archive)?;
        Ok(Self { cluster, images })
    }

    /// Installs or upgrades with some chart values, `name=value` each, and waits until everything
    /// is ready and every node's agent has spoken.
    ///
    /// # Errors
    /// When helm refuses, or it does not come up.
    pub fn install(&self, values: &[&str]) -> Result<()> {
        let chart = chart();
        // helm leaves definitions that are there as they are.
        let definitions = chart.join("crds");
        let apply = [
            "apply",
            "--server-side",
            "--force-conflicts",
            "--filename",
            definitions.to_str().context("the chart's path")?,
        ];
        success(&self.cluster.kubectl(&apply)?)?;
        let tag = format!("image.tag={}", self.images.tag);
        let chart = chart.to_str().context("the chart's path")?;
        let mut arguments = vec![
            "upgrade",
            "--install",
            RELEASE,
            chart,
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--wait",
            "--timeout",
            "5m",
            "--set",
            &tag,
        ];
        for value in values {
            arguments.extend(["--set", value]);
        }
        success(&self.cluster.helm(&arguments)?)?;
        self.wait_for_agents()?;
        self.wait_for_leader()
    }

    /// Uninstalls, and waits until helm has done so.
    ///
    /// # Errors
    /// When helm refuses.
    pub fn uninstall(&self) -> Result<()> {
        let arguments = [
            "uninstall",
            RELEASE,
            "--namespace",
            NAMESPACE,
            "--wait",
            "--timeout",
            "5m",
        ];
        success(&self.cluster.helm(&arguments)?).map(drop)
    }

    /// Waits until every node's agent has a heartbeat.
    ///
    /// # Errors
    /// When one does not in time.
    pub fn wait_for_agents(&self) -> Result<()> {
        let nodes = self.cluster.nodes()?.len();
        until("every node's agent", READY, || {
            let agents = self
                .cluster
                .get(&["nodeagents", "--namespace", NAMESPACE])?;
            let speaking = agents["items"].as_array().into_iter().flatten();
            Ok((speaking
                .filter(|a| !a["status"]["heartbeatTime"].is_null())
                .count()
                >= nodes)
                .then_some(()))
        })
    }

    /// Wants so many replicas of the operator; waits for nothing.
    ///
    /// # Errors
    /// When that is refused.
    pub fn scale_operator(&self, replicas: usize) -> Result<()> {
        let replicas = format!("--replicas={replicas}");
        let scale = ["scale", OPERATOR, "--namespace", NAMESPACE, &replicas];
        success(&self.cluster.kubectl(&scale)?).map(drop)
    }

    /// Waits until all replicas of the operator are ready and one of them leads.
    ///
    /// # Errors
    /// When they are not in time.
    pub fn wait_for_operators(&self) -> Result<()> {
        self.rollout(&["status", OPERATOR, &wait()])?;
        self.wait_for_leader()
    }

    /// Replaces every pod of windtunnel, as an upgrade does, and waits until all are there.
    ///
    /// # Errors
    /// When they are not in time.
    pub fn replace_all(&self) -> Result<()> {
        for part in [OPERATOR, AGENT] {
            self.rollout(&["restart", part])?;
        }
        self.wait_for_operators()?;
        self.rollout(&["status", AGENT, &wait()])
    }

    fn rollout(&self, what: &[&str]) -> Result<()> {
        let rollout = [&["rollout"], what, &["--namespace", NAMESPACE]].concat();
        success(&self.cluster.kubectl(&rollout)?).map(drop)
    }

    /// Waits until a running pod of the operator holds the lease.
    ///
    /// # Errors
    /// When none does in time.
    pub fn wait_for_leader(&self) -> Result<()> {
        until("an operator that leads", READY, || {
            self.leader().map(|leader| leader.map(drop))
        })
    }

    /// The operator's pod that holds the lease, if it is running.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn leader(&self) -> Result<Option<String>> {
        let lease = self.cluster.get(&[
            "lease",
            "windtunnel-operator",
            "--namespace",
            NAMESPACE,
            "--ignore-not-found",
        ])?;
        let holder = lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let pods = self.pods("operator")?;
        let running = pods.iter().any(|pod| {
            pod["metadata"]["name"] == holder.as_str()
                && pod["metadata"]["deletionTimestamp"].is_null()
        });
        Ok(running.then_some(holder))
    }

    /// Deletes one of its pods by force: its containers are killed at once.
    ///
    /// # Errors
    /// When that is refused.
    pub fn remove(&self, pod: &str) -> Result<()> {
        let arguments = [
            "delete",
            "pod",
            pod,
            "--namespace",
            NAMESPACE,
            "--force",
            "--grace-period=0",
        ];
        success(&self.cluster.kubectl(&arguments)?).map(drop)
    }

    /// The pods of a component: `operator` or `agent`.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn pods(&self, component: &str) -> Result<Vec<Value>> {
        let selector = format!("app.kubernetes.io/component={component}");
        let pods =
            self.cluster
                .get(&["pods", "--namespace", NAMESPACE, "--selector", &selector])?;
        Ok(pods["items"].as_array().cloned().unwrap_or_default())
    }

    /// The name of the agent's pod on a node.
    ///
    /// # Errors
    /// When there is none.
    pub fn agent_on(&self, node: &str) -> Result<String> {
        let pods = self.pods("agent")?;
        let pod = pods.iter().find(|pod| pod["spec"]["nodeName"] == node);
        let name = pod.and_then(|pod| pod["metadata"]["name"].as_str());
        name.map(str::to_owned)
            .with_context(|| format!("no agent on {node}"))
    }
}

/// The chart in this checkout.
#[must_use]
pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/windtunnel")
}

/// How long a rollout is waited for.
fn wait() -> String {
    format!("--timeout={}s", READY.as_secs())
}
