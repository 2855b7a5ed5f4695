//! Carries out a decision, in order: one match over actions, no policy.

use std::{future::Future, time::Duration};

use futures::{StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::{core::v1::Pod, policy::v1::Eviction},
    apimachinery::pkg::apis::meta::v1::{DeleteOptions, MicroTime, ObjectMeta},
};
use kube::{
    Api, Resource as _, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
    runtime::events::{Event, EventType},
};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::{Instant, timeout};
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjection,
    fault::KillMethod,
    names::{FINALIZER, OPERATOR},
};
use windtunnel_runtime::chain;

use crate::{
    controller::Ctx,
    decide::{Action, Attempt, Change, Kill, Notice},
    error::gone_is_fine,
    lease::may_write,
    metrics::Write,
};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(10);
/// How many requests of one kind are under way at once.
const PARALLEL: usize = 32;

/// Why an action failed.
#[derive(Debug, Error)]
pub(crate) enum ActError {
    /// This replica does not hold the lease any more.
    #[error("not the leader any more")]
    NotLeader,
    /// A request failed.
    #[error("cannot {action}")]
    Request {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: kube::Error,
    },
    /// A request was not answered in time.
    #[error("no answer when trying to {0}")]
    Timeout(&'static str),
}

impl ActError {
    /// The decision was made on a state that is not true any more.
    #[must_use]
    pub(crate) fn is_stale(&self) -> bool {
        self.answer()
            .is_some_and(|s| s.is_conflict() || s.is_already_exists() || s.is_not_found())
    }

    /// The API server's refusal, if it is one.
    fn answer(&self) -> Option<&Status> {
        match self {
            Self::Request {
                source: kube::Error::Api(status),
                ..
            } => Some(status),
            _ => None,
        }
    }
}

/// When a decision was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    /// By the clock that it speaks of.
    pub(crate) at: Timestamp,
    /// The same moment on the monotonic clock.
    pub(crate) since: Instant,
}

impl Made {
    /// The time now, if a step of the clock is left out.
    fn now(self) -> Timestamp {
        let passed = SignedDuration::try_from(self.since.elapsed()).unwrap_or(SignedDuration::MAX);
        self.at.saturating_add(passed).unwrap_or(Timestamp::MAX)
    }
}

/// Carries out `actions` for `experiment`; neighbours of one kind at the same time, kinds in
/// order. Stops at the first kind of which one fails; what was to be told is told even so, unless
/// it is the status that could not be written. An abort that fails, and a finalizer that cannot be
/// removed, hold up nothing behind them.
///
/// # Errors
/// The first [`ActError`].
pub(crate) async fn act(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
    actions: Vec<Action>,
    made: Made,
) -> Result<(), ActError> {
    let mut actions = actions.into_iter().peekable();
    let (mut failed, mut is_over) = (None, false);
    let kind = |action: &Action| (std::mem::discriminant(action), action.is_abort());
    while let Some(first) = actions.next() {
        if is_over && !matches!(first, Action::Notify(_)) {
            continue;
        }
        let writes_status = matches!(first, Action::WriteStatus(_));
        let holds_up = !first.is_abort() && first != Action::RemoveFinalizer;
        let this = kind(&first);
        let mut batch = vec![first];
        while let Some(next) = actions.next_if(|next| kind(next) == this) {
            batch.push(next);
        }
        let mut done = stream::iter(batch)
            .map(|action| perform(ctx, experiment, action, made))
            .buffer_unordered(PARALLEL);
        while let Some(result) = done.next().await {
            match result {
                Err(error) if writes_status => return Err(error),
                Err(error) => {
                    is_over |= holds_up;
                    failed.get_or_insert(error);
                }
                Ok(()) => {}
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

async fn perform(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
    action: Action,
    made: Made,
) -> Result<(), ActError> {
    if !may_write(&ctx.leadership) {
        return Err(ActError::NotLeader);
    }
    match action {
        Action::AddFinalizer => patch_finalizer(ctx, experiment, true).await,
        Action::RemoveFinalizer => patch_finalizer(ctx, experiment, false).await,
        Action::WriteStatus(status) => write_status(ctx, experiment, *status).await,
        Action::Create(injection) => {
            let params = params();
            request(
                ctx,
                "create a node injection",
                injections(ctx).create(&params, &injection),
            )
            .await
            .map(drop)
        }
        Action::Patch {
            name,
            resource_version,
            change,
        } => patch_injection(ctx, &name, resource_version, change).await,
        Action::Delete { name, uid } => {
            let (api, params) = (injections(ctx), only(uid));
            let call = async { gone_is_fine(api.delete(&name, &params).await) };
            request(ctx, "delete a node injection", call).await
        }
        // Whoever was held up since the decision is too late: the next pass says so.
        Action::Kill(kill) if made.now() >= kill.before => Ok(()),
        Action::Kill(kill) => {
            let uid = kill.uid.clone();
            let result = remove_pod(ctx, kill).await;
            let refusal = result.as_ref().err().map(|error| chain(error));
            let attempt = Attempt {
                at: made.at,
                refusal,
            };
            ctx.recent.tried(experiment, uid, attempt);
            // One that a disruption budget forbids is asked for again later.
            fine_if(|status| status.code == 429, result)
        }
        Action::DeleteExperiment => {
            let (api, name) = (experiments(ctx, experiment), experiment.name_any());
            let params = only(experiment.uid());
            let call = async { gone_is_fine(api.delete(&name, &params).await) };
            request(ctx, "delete the experiment", call).await
        }
        Action::Notify(notice) => {
            notify(ctx, experiment, notice).await;
            Ok(())
        }
    }
}

async fn write_status(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
    status: ChaosExperimentStatus,
) -> Result<(), ActError> {
    let mut written = experiment.clone();
    written.status = Some(status);
    let (api, name) = (experiments(ctx, experiment), experiment.name_any());
    let params = params();
    let call = api.replace_status(&name, &params, &written);
    let answer = request(ctx, "write the status", call).await?;
    ctx.recent.wrote(experiment, answer);
    Ok(())
}

/// Puts a bound on a request, and counts it.
async fn request<T>(
    ctx: &Ctx,
    action: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, ActError> {
    let result = match timeout(REQUEST, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(ActError::Request { action, source }),
        Err(_) => Err(ActError::Timeout(action)),
    };
    let outcome = match &result {
        Ok(_) => "ok",
        Err(error) if error.is_stale() => "conflict",
        Err(_) => "error",
    };
    ctx.metrics
        .writes
        .get_or_create(&Write { action, outcome })
        .inc();
    result
}

fn experiments(ctx: &Ctx, experiment: &ChaosExperiment) -> Api<ChaosExperiment> {
    Api::namespaced(
        ctx.client.clone(),
        &experiment.namespace().unwrap_or_default(),
    )
}

fn injections(ctx: &Ctx) -> Api<NodeInjection> {
    Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace)
}

fn params() -> PostParams {
    PostParams {
        field_manager: Some(OPERATOR.to_owned()),
        ..PostParams::default()
    }
}

/// Deletes this very object, not another of its name.
fn only(uid: Option<String>) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid,
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

/// Some refusals say that what was wanted is so already.
fn fine_if<T>(
    is_fine: impl Fn(&Status) -> bool,
    result: Result<T, ActError>,
) -> Result<(), ActError> {
    match result {
        Err(error) if error.answer().is_some_and(is_fine) => Ok(()),
        other => other.map(drop),
    }
}

/// The finalizers of an experiment that are not ours.
pub(crate) fn finalizers_of_others(experiment: &impl ResourceExt) -> Vec<&str> {
    let all = experiment.finalizers().iter().map(String::as_str);
    all.filter(|finalizer| *finalizer != FINALIZER).collect()
}

async fn patch_finalizer(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
    wanted: bool,
) -> Result<(), ActError> {
    let mut list = finalizers_of_others(experiment);
    if wanted {
        list.push(FINALIZER);
    }
    let patch = json!({"metadata": {
        "resourceVersion": ctx.recent.version(experiment),
        "finalizers": list,
    }});
    let action = if wanted {
        "add the finalizer"
    } else {
        "remove the finalizer"
    };
    let (api, name) = (experiments(ctx, experiment), experiment.name_any());
    let params = PatchParams {
        field_manager: Some(OPERATOR.to_owned()),
        ..PatchParams::default()
    };
    let patch = Patch::Merge(&patch);
    let answer = request(ctx, action, api.patch(&name, &params, &patch)).await?;
    ctx.recent.wrote(experiment, answer);
    Ok(())
}

async fn patch_injection(
    ctx: &Ctx,
    name: &str,
    version: Option<String>,
    change: Change,
) -> Result<(), ActError> {
    let spec = match change {
        Change::Start(at) => json!({"startTime": MicroTime(at)}),
        Change::Abort => json!({"abort": true}),
        Change::Faults(faults) => json!({"faults": faults}),
    };
    // Faults are replaced as a whole, so on the very state that they were decided on. A start or
    // an abort is one field that nobody else writes: it must not wait for a quiet moment.
    let replaces = spec.get("faults").is_some();
    let mut patch = json!({"spec": spec});
    if let (true, Some(version)) = (replaces, version) {
        patch["metadata"] = json!({"resourceVersion": version});
    }
    let params = PatchParams {
        field_manager: Some(OPERATOR.to_owned()),
        ..PatchParams::default()
    };
    let api = injections(ctx);
    let patched = request(
        ctx,
        "change a node injection",
        api.patch(name, &params, &Patch::Merge(&patch)),
    )
    .await;
    // One that is gone has nothing left to be told.
    fine_if(Status::is_not_found, patched)
}

async fn remove_pod(ctx: &Ctx, kill: Kill) -> Result<(), ActError> {
    let Kill {
        namespace,
        name,
        uid,
        grace_period_seconds,
        method,
        before: _,
    } = kill;
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &namespace);
    match method {
        KillMethod::Delete => {
            let params = DeleteParams {
                grace_period_seconds: grace_period_seconds.and_then(|s| u32::try_from(s).ok()),
                ..only(Some(uid))
            };
            let call = async { gone_is_fine(api.delete(&name, &params).await) };
            request(ctx, "delete a pod", call).await
        }
        KillMethod::Evict => {
            let eviction = Eviction {
                metadata: ObjectMeta {
                    name: Some(name.clone()),
                    namespace: Some(namespace),
                    ..ObjectMeta::default()
                },
                delete_options: Some(DeleteOptions {
                    grace_period_seconds,
                    preconditions: Some(
                        k8s_openapi::apimachinery::pkg::apis::meta::v1::Preconditions {
                            uid: Some(uid),
                            resource_version: None,
                        },
                    ),
                    ..DeleteOptions::default()
                }),
            };
            let params = PostParams::default();
            let call =
                api.create_subresource::<Eviction, Value>("eviction", &name, &params, &eviction);
            request(ctx, "evict a pod", async { gone_is_fine(call.await) }).await
        }
    }
}

/// An event; that it cannot be written is no reason to stop.
async fn notify(ctx: &Ctx, experiment: &ChaosExperiment, notice: Notice) {
    let Notice {
        warning,
        reason,
        note,
    } = notice;
    let event = Event {
        type_: if warning {
            EventType::Warning
        } else {
            EventType::Normal
        },
        reason,
        note: Some(note),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    let published = timeout(
        REQUEST,
        ctx.recorder.publish(&event, &experiment.object_ref(&())),
    )
    .await;
    match published {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot write an event"),
        Err(_) => tracing::warn!("no answer when writing an event"),
    }
}

/// The time, for decisions: the only place that reads the wall clock.
#[must_use]
pub(crate) fn now() -> Timestamp {
    Timestamp::now()
}
