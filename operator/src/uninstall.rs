//! Before windtunnel is uninstalled: ends every run, waits until the faults are taken back, and
//! takes off the finalizers that nobody will be there to release. Bounded in time; what was not
//! seen to end within the bound is said, and does not stand in the way. Nor does an object that cannot
//! be read, or a kind that is not defined any more.

use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::{ApiResource, DynamicObject},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use windtunnel_crds::{ChaosExperiment, NodeInjection, status::Phase};
use windtunnel_runtime::chain;

use crate::{act::finalizers_of_others, error::gone_is_fine};

/// Between two looks.
const POLL: Duration = Duration::from_millis(500);
/// What the operator itself may take beyond the agents' grace.
const SLACK: Duration = Duration::from_secs(15);
/// How long the API server is asked to let go of what is held.
const RELEASE: Duration = Duration::from_mins(1);
/// How long the operator is waited for that was told to end.
const ENDING: Duration = Duration::from_secs(10);
/// The operator, as the chart names it.
const OPERATOR: &str = "windtunnel-operator";

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
        let runs = end_all(&client).await;
        match runs {
            Ok(running) if running.is_empty() => break,
            Ok(running) if Instant::now() >= until => {
                for name in running {
                    tracing::warn!(
                        name,
                        "not seen to end; its agents take its faults back within their grace, or with their own end"
                    );
                }
                break;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot end the runs");
                if Instant::now() >= until {
                    break;
                }
            }
        }
        sleep(POLL).await;
    }
    let until = Instant::now() + bounds.release;
    // Whoever begins a run from now on finds nobody who holds anything for it.
    let replicas = match end_operator(&client, namespace, until).await {
        Ok(replicas) => replicas,
        Err(error) => {
            tracing::warn!(error = chain(&error), "the operator cannot be ended first");
            None
        }
    };
    let released = release(&client, namespace, until).await;
    if let (Err(_), Some(replicas)) = (&released, replicas) {
        // It is still installed.
        if let Err(error) = scale(&client, namespace, replicas).await {
            tracing::warn!(
                error = chain(&error),
                "the operator cannot be started again"
            );
        }
    }
    released
}

/// Releases all that is held, until then.
async fn release(client: &Client, namespace: &str, until: Instant) -> Result<(), UninstallError> {
    loop {
        match release_all(client, namespace).await {
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
    let mut running = experiments(client).await?;
    running.retain(|run| !is_over(run));
    for run in running
        .iter()
        .filter(|run| run.data["spec"]["abort"] != true)
    {
        let abort = json!({"spec": {"abort": true}});
        if let Err(error) = gone_is_fine(patch(client, run, abort).await) {
            tracing::warn!(error = chain(&error), name = name(run), "cannot end a run");
        }
    }
    Ok(running.iter().map(name).collect())
}

/// Has all replicas of the operator end, and waits for that for some time; how many there were to be,
/// where there is one.
async fn end_operator(
    client: &Client,
    namespace: &str,
    until: Instant,
) -> Result<Option<i32>, kube::Error> {
    let all: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let Some(before) = or_gone(all.get_scale(OPERATOR).await)? else {
        return Ok(None);
    };
    scale(client, namespace, 0).await?;
    let until = until.min(Instant::now() + ENDING);
    while Instant::now() < until {
        let now = or_gone(all.get_scale(OPERATOR).await)?;
        if now
            .and_then(|now| now.status)
            .is_none_or(|now| now.replicas == 0)
        {
            break;
        }
        sleep(POLL).await;
    }
    Ok(before.spec.and_then(|spec| spec.replicas))
}

async fn scale(client: &Client, namespace: &str, replicas: i32) -> Result<(), kube::Error> {
    let all: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let wanted = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    gone_is_fine(
        all.patch_scale(OPERATOR, &PatchParams::default(), &wanted)
            .await,
    )
}

/// What was asked for, if it is there.
fn or_gone<T>(found: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match found {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
        other => other.map(Some),
    }
}

/// Takes our finalizer off every experiment that has it, and deletes the node injections; returns
/// how many there were of both. None: nothing is held. What is refused stops nothing else.
async fn release_all(client: &Client, namespace: &str) -> Result<usize, kube::Error> {
    let (mut held, mut refused) = (0, None);
    for experiment in experiments(client).await? {
        let others = finalizers_of_others(&experiment);
        if others.len() < experiment.finalizers().len() {
            held += 1;
            let version = experiment.resource_version();
            let change = json!({"metadata": {"finalizers": others, "resourceVersion": version}});
            // One that was changed meanwhile is held until the next look.
            let released = gone_is_fine(patch(client, &experiment, change).await);
            refused = released.err().or(refused);
        }
    }
    let injections: Api<NodeInjection> = Api::namespaced(client.clone(), namespace);
    let all = injections.list_metadata(&ListParams::default()).await;
    // A kind may not be defined any more.
    for injection in or_gone(all.map(|all| all.items))?.unwrap_or_default() {
        held += 1;
        let name = injection.name_any();
        let deleted = injections.delete(&name, &DeleteParams::default()).await;
        refused = gone_is_fine(deleted).err().or(refused);
    }
    refused.map_or(Ok(held), Err)
}

/// All experiments, whatever is in them.
async fn experiments(client: &Client) -> Result<Vec<DynamicObject>, kube::Error> {
    let kind = ApiResource::erase::<ChaosExperiment>(&());
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let found = or_gone(all.list(&ListParams::default()).await)?;
    Ok(found.map(|all| all.items).unwrap_or_default())
}

fn is_over(run: &DynamicObject) -> bool {
    let phase = serde_json::from_value::<Phase>(run.data["status"]["phase"].clone());
    phase.is_ok_and(Phase::is_terminal)
}

fn name(run: &DynamicObject) -> String {
    let namespace = run.namespace().unwrap_or_default();
    format!("{namespace}/{}", run.name_any())
}

async fn patch(
    client: &Client,
    experiment: &DynamicObject,
    change: Value,
) -> Result<DynamicObject, kube::Error> {
    let kind = ApiResource::erase::<ChaosExperiment>(&());
    let namespace = experiment.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &kind);
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

    /// `kubectl delete` of the definitions may come first.
    #[tokio::test]
    async fn kinds_that_are_not_defined_any_more_hold_nothing() {
        let server = Server::default();
        server.refuse(Refusal::always("GET windtunnel.dev", 404));
        uninstall(server.client(), "windtunnel", NOW).await.unwrap();
    }

    /// What is refused for one object, or cannot be read of it, is none of the others' business.
    #[tokio::test]
    async fn what_cannot_be_released_keeps_nothing_else() {
        let server = server();
        let other = RUN.replace("/run", "/a-run");
        let mut run: Value = server.get(RUN).unwrap();
        run["metadata"]["name"] = json!("a-run");
        run["status"]["phase"] = json!("OfANewerVersion");
        run["spec"] = json!({"ofANewerVersion": true});
        server.put(&other, &run);
        server.refuse(Refusal::always("PATCH chaosexperiments/a-run", 403));
        let bounds = Bounds {
            release: Duration::ZERO,
            ..NOW
        };
        let error = uninstall(server.client(), "windtunnel", bounds).await;
        assert_eq!(error.unwrap_err().to_string(), "the API server refuses");
        let run: ChaosExperiment = server.get(RUN).unwrap();
        assert!(run.spec.abort);
        assert_eq!(run.finalizers(), ["example.com/other"]);
        assert!(server.get::<NodeInjection>(PART).is_none());
        server.refuse(None);
        uninstall(server.client(), "windtunnel", NOW).await.unwrap();
        let run: DynamicObject = server.get(&other).unwrap();
        assert_eq!(run.finalizers(), ["example.com/other"]);
    }

    /// It would hold what is begun while the rest is released; where that fails it is still installed.
    #[tokio::test]
    async fn the_operator_ends_before_anything_is_released() {
        const SCALE: &str =
            "/apis/apps/v1/namespaces/windtunnel/deployments/windtunnel-operator/scale";
        for (is_refused, replicas) in [(false, 0), (true, 2)] {
            let server = server();
            let name = json!({"name": OPERATOR, "namespace": "windtunnel"});
            server.put(SCALE, &json!({"metadata": name, "spec": {"replicas": 2}}));
            if is_refused {
                server.refuse(Refusal::always("PATCH chaosexperiments", 403));
            }
            let bounds = Bounds {
                release: Duration::from_millis(100),
                ..NOW
            };
            let done = uninstall(server.client(), "windtunnel", bounds).await;
            assert_eq!(done.is_err(), is_refused);
            let now: Value = server.get(SCALE).unwrap();
            assert_eq!(now["spec"]["replicas"], replicas);
        }
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
