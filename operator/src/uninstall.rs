//! Before windtunnel is uninstalled: ends every run, waits until the faults are taken back, and
//! takes off the finalizers that nobody will be there to release. Bounded in time; what was not
//! seen to end within the bound is said, and does not stand in the way.

use std::time::Duration;

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use windtunnel_crds::{ChaosExperiment, NodeInjection};
use windtunnel_runtime::chain;

use crate::{act::finalizers_of_others, error::gone_is_fine};

/// Between two looks.
const POLL: Duration = Duration::from_millis(500);
/// What the operator itself may take beyond the agents' grace.
const SLACK: Duration = Duration::from_secs(15);
/// How long the API server is asked to let go of what is held.
const RELEASE: Duration = Duration::from_mins(1);

/// How long an uninstallation may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// To see the runs end.
    pub end: Duration,
    /// To release what they hold, after that.
    pub release: Duration,
}

impl Bounds {
    /// Where agents take their faults back by themselves within `grace`. The chart's hook is given
    /// somewhat more than the sum.
    #[must_use]
    pub fn after(grace: Duration) -> Self {
        Self {
            end: grace + SLACK,
            release: RELEASE,
        }
    }
}

/// Ends all runs and releases what they hold.
///
/// # Errors
/// Where something is still held at the end, and why.
pub async fn uninstall(
    client: Client,
    namespace: &str,
    bounds: Bounds,
) -> Result<(), UninstallError> {
    let until = Instant::now() + bounds.end;
    loop {
        let running = end_all(&client).await;
        match &running {
            Ok(running) if running.is_empty() => break,
            Ok(_) => {}
            Err(error) => tracing::warn!(error = chain(error), "cannot end the runs, trying again"),
        }
        if Instant::now() >= until {
            for name in running.iter().flatten() {
                tracing::warn!(
                    name,
                    "not seen to end; its agents take its faults back within their grace, or with their own end"
                );
            }
            break;
        }
        sleep(POLL).await;
    }
    let until = Instant::now() + bounds.release;
    loop {
        let held = release_all(&client, namespace).await;
        match held {
            Ok(0) => return Ok(()),
            Ok(held) if Instant::now() >= until => return Err(UninstallError::Held(held)),
            Ok(_) => {}
            Err(error) if Instant::now() >= until => return Err(error.into()),
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot release all, trying again");
            }
        }
        sleep(POLL).await;
    }
}

/// Why something is still held.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// Others kept changing it.
    #[error("{0} objects are still held")]
    Held(usize),
    /// The API server refused.
    #[error("the API server refuses")]
    Api(#[from] kube::Error),
}

/// Aborts every run that has not ended; returns which those are.
async fn end_all(client: &Client) -> Result<Vec<String>, kube::Error> {
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
        let abort = json!({"spec": {"abort": true}});
        gone_is_fine(patch(client, experiment, abort).await)?;
    }
    let name = |e: &&ChaosExperiment| {
        let namespace = e.namespace().unwrap_or_default();
        format!("{namespace}/{}", e.name_any())
    };
    Ok(running.iter().map(name).collect())
}

/// Takes our finalizer off every experiment that has it, and deletes the node injections; returns
/// how many there were of both. None: nothing is held.
async fn release_all(client: &Client, namespace: &str) -> Result<usize, kube::Error> {
    let mut held = 0;
    let all: Api<ChaosExperiment> = Api::all(client.clone());
    for experiment in all.list(&ListParams::default()).await? {
        let others = finalizers_of_others(&experiment);
        if others.len() < experiment.finalizers().len() {
            held += 1;
            let version = experiment.resource_version();
            let change = json!({"metadata": {"finalizers": others, "resourceVersion": version}});
            // One that was changed meanwhile is held until the next look.
            gone_is_fine(patch(client, &experiment, change).await)?;
        }
    }
    let injections: Api<NodeInjection> = Api::namespaced(client.clone(), namespace);
    for injection in injections.list(&ListParams::default()).await? {
        held += 1;
        let name = injection.name_any();
        gone_is_fine(injections.delete(&name, &DeleteParams::default()).await)?;
    }
    Ok(held)
}

async fn patch(
    client: &Client,
    experiment: &ChaosExperiment,
    change: serde_json::Value,
) -> Result<ChaosExperiment, kube::Error> {
    let api: Api<ChaosExperiment> =
        Api::namespaced(client.clone(), &experiment.namespace().unwrap_or_default());
    let (name, change) = (experiment.name_any(), Patch::Merge(change));
    api.patch(&name, &PatchParams::default(), &change).await
}

#[cfg(test)]
mod tests {
    use windtunnel_crds::names::FINALIZER;

    use super::*;
    use crate::mock::{Refusal, Server, When};

    const RUN: &str = "/apis/windtunnel.dev/v1alpha1/namespaces/shop/chaosexperiments/run";
    const PART: &str =
        "/apis/windtunnel.dev/v1alpha1/namespaces/windtunnel/nodeinjections/run-node1";
    const NOW: Bounds = Bounds {
        end: Duration::ZERO,
        release: Duration::from_secs(20),
    };

    /// A run that nobody ends, and a part of it.
    fn server() -> Server {
        let server = Server::default();
        server.put(
            RUN,
            &json!({
                "apiVersion": "windtunnel.dev/v1alpha1", "kind": "ChaosExperiment",
                "metadata": {"name": "run", "namespace": "shop", "uid": "u",
                    "finalizers": ["example.com/other", FINALIZER]},
                "spec": {"duration": "1m", "faults": []},
                "status": {"phase": "Running"},
            }),
        );
        server.put(
            PART,
            &json!({
                "apiVersion": "windtunnel.dev/v1alpha1", "kind": "NodeInjection",
                "metadata": {"name": "run-node1", "namespace": "windtunnel"},
                "spec": {"nodeName": "node1", "duration": "1m", "recheckAfter": "10m",
                    "experiment": {"namespace": "shop", "name": "run", "uid": "u"}, "faults": []},
            }),
        );
        server
    }

    #[tokio::test]
    async fn what_nobody_ends_is_released_and_nobody_elses_finalizer() {
        let server = server();
        uninstall(server.client(), "windtunnel", NOW).await.unwrap();
        let run: ChaosExperiment = server.get(RUN).unwrap();
        assert!(run.spec.abort);
        assert_eq!(run.finalizers(), ["example.com/other"]);
        assert!(server.get::<NodeInjection>(PART).is_none());
    }

    #[tokio::test]
    async fn no_single_refusal_keeps_anything_held() {
        let mut all = tokio::task::JoinSet::new();
        for (of, code) in [
            ("GET chaosexperiments", 500),
            ("GET nodeinjections", 500),
            ("PATCH chaosexperiments", 409),
            ("PATCH chaosexperiments", 500),
            ("DELETE nodeinjections", 409),
            ("DELETE nodeinjections", 500),
        ] {
            all.spawn(refused_once(of, code, 0));
            all.spawn(refused_once(of, code, 1));
        }
        all.join_all().await;
    }

    async fn refused_once(of: &'static str, code: u16, countdown: usize) {
        let server = server();
        server.refuse(Refusal {
            countdown,
            stays: false,
            of,
            code,
            when: When::Before,
        });
        uninstall(server.client(), "windtunnel", NOW).await.unwrap();
        let run: ChaosExperiment = server.get(RUN).unwrap();
        assert_eq!(run.finalizers(), ["example.com/other"], "{of} {code}");
        assert!(server.get::<NodeInjection>(PART).is_none(), "{of} {code}");
    }

    #[tokio::test]
    async fn it_fails_within_its_bound_where_something_stays_held() {
        for (code, expected) in [
            (409, "2 objects are still held"),
            (403, "the API server refuses"),
        ] {
            let server = server();
            server.refuse(Refusal {
                countdown: 0,
                stays: true,
                of: "PATCH chaosexperiments",
                code,
                when: When::Before,
            });
            let bounds = Bounds {
                end: Duration::ZERO,
                release: Duration::ZERO,
            };
            let error = uninstall(server.client(), "windtunnel", bounds).await;
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    }
}
