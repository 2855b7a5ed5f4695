//! What the harness itself asks of the API server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

const CALL_BOUND: Duration = Duration::from_secs(5);

/// A client for the cluster of a kubeconfig. Needs the context of a tokio runtime.
///
/// Calls are not repeated: who wants that bounds it.
pub(crate) async fn client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("read {}", kubeconfig.display()))?;
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("use {}", kubeconfig.display()))?;
    config.default_retry = false;
    Client::try_from(config).context("make a client")
}

/// A client that blocks. An answer that does not come, or is an error, is `None`: the callers poll.
pub(crate) struct Probe {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl Probe {
    pub(crate) fn new(kubeconfig: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start a runtime")?;
        let client = runtime.block_on(client(kubeconfig))?;
        Ok(Self { runtime, client })
    }

    pub(crate) fn is_ready(&self) -> bool {
        let request = http_get("/readyz");
        request.is_some_and(|request| {
            self.call(self.client.request_text(request))
                .is_some_and(|text| text == "ok")
        })
    }

    /// Names of the nodes that are Ready.
    pub(crate) fn ready_nodes(&self) -> Option<Vec<String>> {
        let api: Api<Node> = Api::all(self.client.clone());
        let nodes = self.call(api.list(&ListParams::default()))?;
        Some(
            nodes
                .into_iter()
                .filter(is_ready)
                .filter_map(|node| node.metadata.name)
                .collect(),
        )
    }

    /// Whether a deployment has a replica that serves.
    pub(crate) fn is_available(&self, namespace: &str, name: &str) -> bool {
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), namespace);
        let status = self
            .call(api.get(name))
            .and_then(|deployment| deployment.status);
        status
            .and_then(|status| status.available_replicas)
            .unwrap_or(0)
            > 0
    }

    fn call<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Option<T> {
        self.runtime
            .block_on(async { tokio::time::timeout(CALL_BOUND, call).await.ok()?.ok() })
    }
}

fn http_get(path: &str) -> Option<http::Request<Vec<u8>>> {
    http::Request::get(path).body(Vec::new()).ok()
}

fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|conditions| {
        conditions
            .iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
    })
}
