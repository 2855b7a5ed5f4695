//! Before windtunnel is uninstalled: ends every run, waits until the faults are taken back, and
//! takes off the finalizers that nobody will be there to release. Bounded in time.

use std::time::Duration;

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use windtunnel_crds::{ChaosExperiment, NodeInjection, names::FINALIZER};

use crate::error::gone_is_fine;

/// Between two looks.
const POLL: Duration = Duration::from_millis(500);
/// What the operator itself may take beyond the agents' grace.
const SLACK: Duration = Duration::from_secs(15);

/// Ends all runs and releases what they hold; `wait` is the agents' grace.
///
/// # Errors
/// Where the API server refuses; a second try may do better.
pub async fn uninstall(client: Client, namespace: &str, wait: Duration) -> Result<(), kube::Error> {
    let until = Instant::now() + wait + SLACK;
    loop {
        let running = end_all(&client).await?;
        if running == 0 {
            break;
        }
        if Instant::now() >= until {
            tracing::warn!(running, "not waiting any longer");
            break;
        }
        sleep(POLL).await;
    }
    release_all(&client).await?;
    let injections: Api<NodeInjection> = Api::namespaced(client, namespace);
    for injection in injections.list(&ListParams::default()).await? {
        let name = injection.name_any();
        gone_is_fine(injections.delete(&name, &DeleteParams::default()).await)?;
    }
    Ok(())
}

/// Aborts every run that has not ended; returns how many there are.
async fn end_all(client: &Client) -> Result<usize, kube::Error> {
    let all: Api<ChaosExperiment> = Api::all(client.clone());
    let experiments = all.list(&ListParams::default()).await?;
    let is_over = |e: &&ChaosExperiment| {
        e.status
            .as_ref()
            .and_then(|s| s.phase)
            .is_some_and(windtunnel_crds::status::Phase::is_terminal)
    };
    let running: Vec<&ChaosExperiment> = experiments.items.iter().filter(|e| !is_over(e)).collect();
    for experiment in running.iter().filter(|e| !e.spec.abort) {
        patch(client, experiment, json!({"spec": {"abort": true}})).await?;
    }
    Ok(running.len())
}

/// Takes our finalizer off every experiment that still has it.
async fn release_all(client: &Client) -> Result<(), kube::Error> {
    let all: Api<ChaosExperiment> = Api::all(client.clone());
    for experiment in all.list(&ListParams::default()).await? {
        let others: Vec<&String> = experiment
            .finalizers()
            .iter()
            .filter(|f| *f != FINALIZER)
            .collect();
        if others.len() < experiment.finalizers().len() {
            let version = experiment.resource_version();
            let change = json!({"metadata": {"finalizers": others, "resourceVersion": version}});
            patch(client, &experiment, change).await?;
        }
    }
    Ok(())
}

async fn patch(
    client: &Client,
    experiment: &ChaosExperiment,
    change: serde_json::Value,
) -> Result<(), kube::Error> {
    let api: Api<ChaosExperiment> =
        Api::namespaced(client.clone(), &experiment.namespace().unwrap_or_default());
    let patched = api
        .patch(
            &experiment.name_any(),
            &PatchParams::default(),
            &Patch::Merge(change),
        )
        .await;
    gone_is_fine(patched)
}
