//! The cluster and a set of pods in it, one on each node, that all tests look at.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node as ApiNode, Pod};
use serde::de::DeserializeOwned;
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cache, Cluster, Node, build, success};

pub(crate) const NAMESPACE: &str = "harness";
pub(crate) const PORT: u16 = 8080;
const BOUND: Duration = Duration::from_mins(2);

const MANIFEST: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: harness}
---
apiVersion: v1
kind: Service
metadata: {name: probe, namespace: harness}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: probe}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: probe, namespace: harness}
spec:
  selector: {matchLabels: {app: probe}}
  template:
    metadata: {labels: {app: probe}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: probe
        image: lab/probe:1
        imagePullPolicy: Never
        args: [serve, ':8080']
";

/// What the tests share.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
}

/// A running pod.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) v4: String,
    pub(crate) v6: String,
}

impl World {
    pub(crate) fn new(cluster: Cluster) -> Result<Self> {
        let parts = build::all(&Cache::open()?)?;
        cluster.load_image(&parts.probe)?;
        cluster.apply(MANIFEST)?;
        let world = Self { cluster };
        world.probes()?;
        Ok(world)
    }

    /// The pods, once there is a ready one on each node.
    pub(crate) fn probes(&self) -> Result<Vec<Probe>> {
        let nodes: Vec<String> = self.cluster.nodes()?.iter().map(Node::name).collect();
        self.probes_on(&nodes)
    }

    /// The pods on some nodes, once there is a ready one on each of these.
    pub(crate) fn probes_on(&self, nodes: &[String]) -> Result<Vec<Probe>> {
        until(&format!("a ready pod on each of {nodes:?}"), BOUND, || {
            // The API server may be on its way back.
            let pods: Vec<Pod> = self
                .list(&["pods", "--namespace", NAMESPACE])
                .unwrap_or_default();
            let probes = pods.iter().filter_map(probe);
            let mut probes: Vec<Probe> =
                probes.filter(|probe| nodes.contains(&probe.node)).collect();
            probes.sort_by(|a, b| a.node.cmp(&b.node));
            Ok((probes.len() == nodes.len()).then_some(probes))
        })
    }

    /// Runs the probe's client in a pod.
    pub(crate) fn exec(&self, probe: &Probe, arguments: &[&str]) -> Result<String> {
        let argv: Vec<&str> = ["/probe"].iter().chain(arguments).copied().collect();
        let text = self
            .cluster
            .pod_exec(NAMESPACE, &probe.name, "probe", &argv)?;
        Ok(text.trim_end().to_owned())
    }

    /// What kubectl lists.
    pub(crate) fn list<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<Vec<T>> {
        let arguments: Vec<&str> = ["get", "--output", "json"]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        let text = success(&self.cluster.kubectl(&arguments)?)?;
        // kubectl calls it a List of no kind, which the typed lists refuse.
        let mut list: Value = serde_json::from_str(&text).context("understand kubectl")?;
        serde_json::from_value(list["items"].take()).context("understand the items")
    }

    /// Waits until a node is Ready, or is not.
    pub(crate) fn wait_for_node(&self, name: &str, is_ready: bool) -> Result<()> {
        let what = format!("{name} {}", if is_ready { "Ready" } else { "not Ready" });
        until(&what, BOUND, || {
            let nodes: Vec<ApiNode> = self.list(&["nodes"]).unwrap_or_default();
            let node = nodes
                .iter()
                .find(|node| node.metadata.name.as_deref() == Some(name));
            Ok(node
                .filter(|node| node_is_ready(node) == is_ready)
                .map(|_| ()))
        })
    }
}

pub(crate) fn node_is_ready(node: &ApiNode) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The pod, if it is ready and not on its way out.
fn probe(pod: &Pod) -> Option<Probe> {
    let status = pod.status.as_ref()?;
    let is_ready = status
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == "Ready" && c.status == "True");
    if !is_ready || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let mut addresses = status
        .pod_ips
        .iter()
        .flatten()
        .map(|address| address.ip.clone());
    Some(Probe {
        name: pod.metadata.name.clone()?,
        node: pod.spec.as_ref()?.node_name.clone()?,
        v4: addresses.next()?,
        v6: addresses.next()?,
    })
}
