//! How long faults on many pods take: on as many as two small nodes hold, and, with agents that answer at
//! once, on a thousand that are only objects.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Request};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::{interval, sleep, timeout};
use windtunnel_crds::conditions::{ConditionType, condition};
use windtunnel_crds::injection::{Audit, InjectionPhase, TargetState, TargetStatus};
use windtunnel_crds::{ChaosExperiment, NodeInjection, NodeInjectionStatus};
use windtunnel_tests::cluster::success;
use windtunnel_tests::product::{Installation, NAMESPACE as RELEASE};

use super::speed::{self, Bed};
use super::{Series, cost};
use crate::print;

const MANY: &str = "many";
/// Pods on the two nodes.
const PODS: [usize; 2] = [10, 40];
const FAKE: &str = "fake";
/// Nodes that are only objects, and the pods of each.
const NODES: usize = 20;
const EACH: usize = 50;
/// Requests under way at once while they are made.
const AT_ONCE: usize = 16;
/// How often nodes and agents say that they live.
const BEAT: Duration = Duration::from_secs(10);
const BOUND: Duration = Duration::from_mins(2);

/// Measures both, and prints the table.
pub(super) async fn measure(
    bed: &Bed<'_>,
    windtunnel: &Installation<'_>,
    runs: usize,
) -> Result<()> {
    print::line("| what | p50 ms | p99 ms | max ms | n |");
    print::line("| --- | --- | --- | --- | --- |");
    for count in PODS {
        let nodes: Vec<&str> = ["node1", "node2"].into_iter().cycle().take(count).collect();
        let many = Bed::of(bed.cluster, windtunnel, bed.client.clone(), (MANY, &nodes)).await?;
        let [came, went, clean] = speed::series(&many, runs).await?;
        print::line(&came.row(&format!(
            "{count} pods: POST answered → the last one delayed"
        )));
        print::line(&went.row(&format!("{count} pods: DELETE answered → none delayed")));
        print::line(&clean.row(&format!("{count} pods: DELETE answered → checked and gone")));
    }
    // Their end is not to be measured with what follows.
    success(&bed.cluster.kubectl(&["delete", "namespace", MANY])?)?;
    let fakes = Fakes::make(&bed.client).await?;
    // Whoever answers for the fakes ends with the measurement.
    let measured = tokio::select! {
        measured = fakes.measure(runs) => measured,
        failed = fakes.live() => failed,
        failed = fakes.answer() => failed,
    };
    fakes.remove().await?;
    measured?;
    for (name, usage) in cost::usage(bed.cluster)? {
        if name.starts_with("operator") {
            print::line(&format!("{name} after them: {:.1} MiB", usage.resident));
        }
    }
    Ok(())
}

/// Nodes and pods that are only objects.
struct Fakes<'a> {
    client: &'a Client,
    nodes: Vec<String>,
}

impl<'a> Fakes<'a> {
    async fn make(client: &'a Client) -> Result<Self> {
        let nodes: Vec<String> = (0..NODES).map(|n| format!("{FAKE}{n}")).collect();
        let fakes = Self { client, nodes };
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": FAKE}});
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let namespace = serde_json::from_value(namespace)?;
        namespaces
            .create(&PostParams::default(), &namespace)
            .await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), FAKE);
        let made = await_condition(accounts, "default", |account: Option<&ServiceAccount>| {
            account.is_some()
        });
        timeout(BOUND, made).await??;
        for node in &fakes.nodes {
            fakes.make_node(node).await?;
        }
        let pods = (0..NODES * EACH).map(|number| fakes.make_pod(number));
        let mut made = stream::iter(pods).buffer_unordered(AT_ONCE);
        while made.next().await.transpose()?.is_some() {}
        drop(made);
        Ok(fakes)
    }

    async fn make_node(&self, name: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        let node = serde_json::from_value(node)?;
        nodes.create(&PostParams::default(), &node).await?;
        let ready = json!({"status": {"conditions": [{
            "type": "Ready", "status": "True", "reason": "Fake", "message": "",
            "lastHeartbeatTime": Timestamp::now(), "lastTransitionTime": Timestamp::now(),
        }]}});
        let params = PatchParams::default();
        nodes
            .patch_status(name, &params, &Patch::Merge(ready))
            .await?;
        self.beat(name).await
    }

    async fn make_pod(&self, number: usize) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), FAKE);
        let name = format!("pod{number}");
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": FAKE}},
            "spec": {
                "nodeName": self.nodes[number % NODES],
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "app", "image": FAKE}],
            },
        });
        let pod = serde_json::from_value(pod)?;
        pods.create(&PostParams::default(), &pod).await?;
        let status = json!({"status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "podIP": format!("198.18.{}.{}", number / 250, number % 250 + 1),
            "containerStatuses": [{
                "name": "app", "image": FAKE, "imageID": FAKE, "ready": true, "restartCount": 0,
                "containerID": format!("containerd://{number}"),
                "state": {"running": {"startedAt": Timestamp::now()}},
            }],
        }});
        let params = PatchParams::default();
        pods.patch_status(&name, &params, &Patch::Merge(status))
            .await?;
        Ok(())
    }

    /// A node and its agent say that they live.
    async fn beat(&self, node: &str) -> Result<()> {
        let now = MicroTime(Timestamp::now());
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now},
        });
        let params = PatchParams::apply(FAKE).force();
        leases.patch(node, &params, &Patch::Apply(lease)).await?;
        let agent = json!({
            "apiVersion": "windtunnel.dev/v1alpha1", "kind": "NodeAgent",
            "metadata": {"name": node}, "spec": {"nodeName": node},
        });
        let url = windtunnel_crds::NodeAgent::url_path(&(), Some(RELEASE));
        let request = Request::new(url);
        let create = request.create(&PostParams::default(), serde_json::to_vec(&agent)?)?;
        match self.say(node, create).await {
            Err(error) if !error.to_string().contains("exists") => return Err(error),
            _ => {}
        }
        let status = json!({
            "apiVersion": "windtunnel.dev/v1alpha1", "kind": "NodeAgent",
            "status": {
                "heartbeatTime": now, "version": env!("CARGO_PKG_VERSION"), "clean": true,
                "clockOffsetMillis": 0,
            },
        });
        let apply = request.patch_subresource("status", node, &params, &Patch::Apply(status))?;
        self.say(node, apply).await
    }

    /// Asks in the name of a node's agent.
    async fn say(&self, node: &str, mut request: http::Request<Vec<u8>>) -> Result<()> {
        let user = format!("system:serviceaccount:{RELEASE}:windtunnel-agent");
        let headers = request.headers_mut();
        headers.insert("impersonate-user", user.parse()?);
        headers.insert("impersonate-group", "system:authenticated".parse()?);
        let of_node = "impersonate-extra-authentication.kubernetes.io%2fnode-name";
        headers.insert(of_node, node.parse()?);
        self.client.request::<Value>(request).await?;
        Ok(())
    }

    /// Nodes and agents live.
    async fn live(&self) -> Result<()> {
        let mut beats = interval(BEAT);
        loop {
            beats.tick().await;
            for node in &self.nodes {
                self.beat(node).await?;
            }
        }
    }

    /// Agents answer at once.
    async fn answer(&self) -> Result<()> {
        let injections: Api<NodeInjection> = Api::namespaced(self.client.clone(), RELEASE);
        let changes = watcher(injections, watcher::Config::default()).default_backoff();
        let changes = changes.applied_objects().map_err(anyhow::Error::from);
        let answers = changes.try_for_each_concurrent(NODES, async |injection| {
            let node = injection.spec.node_name.clone();
            let Some(status) = told(&injection).filter(|_| node.starts_with(FAKE)) else {
                return Ok(());
            };
            let start = injection.spec.start_time.as_ref();
            let wait = start.map(|start| start.0.duration_since(Timestamp::now()));
            // What has begun already is not waited for.
            sleep(
                wait.and_then(|wait| wait.try_into().ok())
                    .unwrap_or_default(),
            )
            .await;
            let status = json!({
                "apiVersion": "windtunnel.dev/v1alpha1", "kind": "NodeInjection",
                "metadata": {"uid": injection.uid()}, "status": status,
            });
            let request = Request::new(NodeInjection::url_path(&(), Some(RELEASE)));
            let params = PatchParams::apply("windtunnel-agent").force();
            let name = injection.name_any();
            let request =
                request.patch_subresource("status", &name, &params, &Patch::Apply(status))?;
            self.say(&node, request).await
        });
        answers.await
    }

    /// Measures how long it takes until a fault is on every pod, and until it is gone.
    async fn measure(&self, runs: usize) -> Result<()> {
        let experiments: Api<ChaosExperiment> = Api::namespaced(self.client.clone(), FAKE);
        let (mut came, mut gone) = (Series::default(), Series::default());
        for run in 0..runs {
            let name = format!("scale-{run}");
            let experiment = serde_json::from_value(json!({
                "apiVersion": "windtunnel.dev/v1alpha1", "kind": "ChaosExperiment",
                "metadata": {"name": name},
                "spec": {"duration": "5m", "faults": [{
                    "name": "slow",
                    "target": {"selector": {"matchLabels": {"app": FAKE}}},
                    "network": {"delay": {"latency": "100ms"}},
                }]},
            }))?;
            let made = experiments
                .create(&PostParams::default(), &experiment)
                .await?;
            let posted = Instant::now();
            let injected = await_condition(experiments.clone(), &name, is_injected);
            timeout(BOUND, injected).await.context("not injected")??;
            came.add(posted.elapsed());
            experiments.delete(&name, &DeleteParams::default()).await?;
            let deleted = Instant::now();
            let uid = made.uid().context("no uid")?;
            let end = await_condition(experiments.clone(), &name, conditions::is_deleted(&uid));
            timeout(BOUND, end).await.context("not gone")??;
            gone.add(deleted.elapsed());
        }
        let what = format!("{} pods of {NODES} nodes, as objects", NODES * EACH);
        print::line(&came.row(&format!("{what}: POST answered → injected on all")));
        print::line(&gone.row(&format!(
            "{what}: DELETE answered → taken back on all and gone"
        )));
        Ok(())
    }

    async fn remove(&self) -> Result<()> {
        let params = DeleteParams::default();
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.delete(FAKE, &params).await?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let agents: Api<windtunnel_crds::NodeAgent> = Api::namespaced(self.client.clone(), RELEASE);
        for node in &self.nodes {
            nodes.delete(node, &params).await?;
            agents.delete(node, &params).await?;
        }
        Ok(())
    }
}

fn is_injected(experiment: Option<&ChaosExperiment>) -> bool {
    let status = experiment.and_then(|e| e.status.as_ref());
    let injected = status.and_then(|s| condition(&s.conditions, ConditionType::Injected));
    injected.is_some_and(|c| c.status == "True")
}

/// What an agent for which everything works would say, if it has not said it.
fn told(injection: &NodeInjection) -> Option<NodeInjectionStatus> {
    let now = || Some(MicroTime(Timestamp::now()));
    let spec = &injection.spec;
    let (phase, state) = match spec {
        _ if spec.abort => (InjectionPhase::Recovered, TargetState::Recovered),
        _ if spec.start_time.is_some() => (InjectionPhase::Running, TargetState::Injected),
        _ => (InjectionPhase::Prepared, TargetState::Prepared),
    };
    if injection.status.as_ref().is_some_and(|s| s.phase == phase) {
        return None;
    }
    let targets = spec.faults.iter().flat_map(|fault| {
        fault.targets.iter().map(|target| TargetStatus {
            fault: fault.name.clone(),
            pod_name: target.pod_name.clone(),
            pod_uid: target.pod_uid.clone(),
            state,
            injected_at: now().filter(|_| state != TargetState::Prepared),
            reverted_at: now().filter(|_| state == TargetState::Recovered),
            ..TargetStatus::default()
        })
    });
    Some(NodeInjectionStatus {
        phase,
        boot_id: FAKE.to_owned(),
        observed_generation: injection.metadata.generation,
        targets: targets.collect(),
        audit: spec.abort.then(|| Audit {
            checked_at: now(),
            ..Audit::default()
        }),
        ..NodeInjectionStatus::default()
    })
}
