//! The order of a pass (observe → decide → act), and who may run one.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        Controller,
        controller::{Action as Requeue, Config},
        events::{Recorder, Reporter},
        reflector::{self, ObjectRef, Store},
    },
};
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_stream::wrappers::{UnboundedReceiverStream, WatchStream};
use windtunnel_crds::{ChaosExperiment, NodeInjection, names::OPERATOR};
use windtunnel_runtime::{CancellationToken, Readiness, Steady, chain, watching};

use crate::{
    Args, act,
    decide::{self, Policy},
    directory::Directories,
    error::Error,
    fleet::Tracker,
    lease::{self, Leadership, may_write},
    metrics::Metrics,
    observe,
    recent::Recent,
    sweep,
    watches::{watch_agents, watch_injections, watch_stop},
};

/// After which time a failed pass is repeated.
const RETRY: Duration = Duration::from_secs(2);
/// After which time a pass that was decided on an old state is repeated, unless the newer state
/// is seen before.
const STALE: Duration = Duration::from_millis(250);
/// How often what belongs to nobody is looked for.
const SWEEP: Duration = Duration::from_secs(15);
/// How long the reads of a pass may take together: the end of a run must not wait for an answer
/// that is lost.
const READS: Duration = Duration::from_secs(10);
/// How long the end of the process waits until the lease is given back.
const FAREWELL: Duration = Duration::from_secs(5);
/// How many experiments are passed over at once.
const CONCURRENCY: u16 = 16;

/// What every pass works with.
pub(crate) struct Ctx {
    pub(crate) client: Client,
    pub(crate) policy: Policy,
    pub(crate) cluster_dns: (String, String),
    pub(crate) injections: Store<NodeInjection>,
    pub(crate) fleet: Tracker,
    pub(crate) directories: Directories,
    pub(crate) leadership: Leadership,
    pub(crate) recorder: Recorder,
    pub(crate) metrics: Metrics,
    pub(crate) recent: Recent,
    /// How long the reads of a pass may take together.
    pub(crate) patience: Duration,
    stopped: AtomicBool,
}

impl Ctx {
    /// Nothing was done or seen yet.
    pub(crate) fn new(
        args: &Args,
        client: &Client,
        (injections, leadership): (Store<NodeInjection>, Leadership),
        triggers: mpsc::UnboundedSender<ObjectRef<ChaosExperiment>>,
        metrics: Metrics,
    ) -> Self {
        let reporter = Reporter {
            controller: OPERATOR.to_owned(),
            instance: Some(args.identity.clone()),
        };
        Self {
            client: client.clone(),
            policy: args.policy(),
            cluster_dns: args.cluster_dns(),
            injections,
            fleet: Tracker::default(),
            directories: Directories::new(client.clone(), triggers),
            leadership,
            recorder: Recorder::new(client.clone(), reporter),
            metrics,
            recent: Recent::default(),
            patience: READS,
            stopped: AtomicBool::new(false),
        }
    }

    /// Whether the emergency stop is in force.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Notes whether the emergency stop is in force; whether it was before.
    pub(crate) fn set_stopped(&self, stopped: bool) -> bool {
        self.stopped.swap(stopped, Ordering::AcqRel)
    }
}

/// Has a pass made over one experiment, where this replica may.
async fn reconcile(cached: Arc<ChaosExperiment>, ctx: Arc<Ctx>) -> Result<Requeue, Error> {
    if !may_write(&ctx.leadership) {
        // Who comes to lead looks at all of them at once. A lease that only was late in being
        // renewed is nobody's gain, and what was seen meanwhile must not be lost.
        return Ok(Requeue::requeue(lease::DURATION));
    }
    let experiment = ctx.recent.freshest(cached);
    let started = Instant::now();
    let now = act::now();
    let result = pass(&ctx, experiment.clone(), now).await;
    ctx.metrics.passes.inc();
    ctx.metrics
        .pass_seconds
        .observe(started.elapsed().as_secs_f64());
    let trouble = result.as_ref().err().filter(|error| !error.is_stale());
    ctx.recent
        .passed(&experiment, trouble.map(|e| e.trouble(now)));
    Ok(result?.map_or_else(Requeue::await_change, |at| {
        Requeue::requeue(until(at, act::now()))
    }))
}

/// One pass over one experiment; when the next is due.
async fn pass(
    ctx: &Ctx,
    experiment: Arc<ChaosExperiment>,
    now: Timestamp,
) -> Result<Option<Timestamp>, Error> {
    let made = act::Made {
        at: now,
        since: Instant::now(),
    };
    let (observed, unread) = observe::observe(ctx, experiment, now).await?;
    let decision = decide::decide(&observed, now);
    act::act(ctx, &observed.experiment, decision.actions, made).await?;
    unread.map_or(Ok(decision.wake_at), |error| Err(error.into()))
}

fn until(at: Timestamp, now: Timestamp) -> Duration {
    at.duration_since(now).try_into().unwrap_or(Duration::ZERO)
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the signature that the controller calls"
)]
fn on_error(experiment: Arc<ChaosExperiment>, error: &Error, ctx: Arc<Ctx>) -> Requeue {
    if error.is_stale() {
        return Requeue::requeue(STALE);
    }
    ctx.metrics.failures.inc();
    let name = experiment.name_any();
    tracing::warn!(experiment = name, error = chain(error), "a pass failed");
    Requeue::requeue(RETRY)
}

/// Why the operator ended.
#[derive(Debug, Error)]
pub enum RunError {
    /// A part ended that lives as long as the process.
    #[error("{0} ended")]
    Ended(&'static str),
}

/// Metrics and the registry that shows them, for the caller to serve.
#[must_use]
pub fn metrics() -> (Metrics, Registry) {
    Metrics::new()
}

/// Runs the operator until `shutdown`, and gives the lease back then; the caller serves readiness
/// and metrics.
///
/// # Errors
/// [`RunError`] where it cannot go on; the process must end then.
pub async fn run_with(
    args: Args,
    client: Client,
    (readiness, metrics): (Readiness, Metrics),
    shutdown: CancellationToken,
) -> Result<(), RunError> {
    let (triggers, triggered) = mpsc::unbounded_channel();
    let (lead, leadership) = watch::channel(None);
    let (reader, writer) = reflector::store();
    let caches = (reader, leadership.clone());
    let ctx = Arc::new(Ctx::new(&args, &client, caches, triggers.clone(), metrics));
    let all = Arc::new(tokio::sync::Notify::new());
    let mut parts = JoinSet::new();
    parts.spawn(watch_injections(
        ctx.clone(),
        writer,
        triggers.clone(),
        readiness.block("node injections"),
    ));
    parts.spawn(watch_agents(
        ctx.clone(),
        triggers.clone(),
        readiness.block("node agents"),
    ));
    parts.spawn(watch_stop(
        ctx.clone(),
        all.clone(),
        readiness.block("the emergency stop"),
    ));
    let experiments = spawn_controller(
        &mut parts,
        &ctx,
        triggered,
        (all.clone(), leadership),
        shutdown.clone(),
    );
    parts.spawn(sweep_loop(ctx.clone(), experiments));
    let lease = async {
        // Who leads may take what its caches do not hold for what does not exist.
        tokio::select! {
            () = readiness.ready() => {}
            () = shutdown.cancelled() => return,
        }
        let (namespace, me) = (&args.namespace, &args.identity);
        lease::compete(client, namespace, me, lead, shutdown.clone()).await;
    };
    let mut lease = std::pin::pin!(lease);
    // Cancel-safe: the lease goes on being given back where a part ends first.
    let ended = tokio::select! {
        () = &mut lease => return Ok(()),
        ended = parts.join_next() => ended,
    };
    match ended {
        Some(Err(_)) => Err(RunError::Ended("a part, by a panic,")),
        Some(Ok(part)) if !shutdown.is_cancelled() => Err(RunError::Ended(part)),
        _ => {
            // The other replica would wait for it to expire.
            if timeout(FAREWELL, lease).await.is_err() {
                tracing::warn!("ending before the lease was given back");
            }
            Ok(())
        }
    }
}

/// Starts the passes; the cache of experiments that they are made from.
fn spawn_controller(
    parts: &mut JoinSet<&'static str>,
    ctx: &Arc<Ctx>,
    triggered: mpsc::UnboundedReceiver<ObjectRef<ChaosExperiment>>,
    (all, leadership): (Arc<tokio::sync::Notify>, Leadership),
    shutdown: CancellationToken,
) -> Store<ChaosExperiment> {
    let api: Api<ChaosExperiment> = Api::all(ctx.client.clone());
    let on_stop = stream::unfold(all, |all| async {
        all.notified().await;
        Some(((), all))
    });
    // Renewals do not count, only gain and loss.
    let leader = ctx.metrics.leader.clone();
    let on_lead = WatchStream::new(leadership)
        .map(|until| until.is_some())
        .scan(None, move |last, leads| {
            leader.set(i64::from(leads));
            let changed = last.replace(leads) != Some(leads);
            futures::future::ready(Some(changed && leads))
        })
        .filter_map(|gained| futures::future::ready(gained.then_some(())));
    let controller = Controller::new(api, watching())
        .with_config(Config::default().concurrency(CONCURRENCY))
        .trigger_backoff(Steady)
        .reconcile_on(UnboundedReceiverStream::new(triggered))
        .reconcile_all_on(on_stop)
        .reconcile_all_on(on_lead)
        .graceful_shutdown_on(shutdown.cancelled_owned());
    let experiments = controller.store();
    let passes = controller.run(reconcile, on_error, ctx.clone());
    parts.spawn(async move {
        passes
            .for_each(|result| async move {
                if let Err(error) = result {
                    tracing::debug!(error = chain(&error), "a pass was not made");
                }
            })
            .await;
        "the controller"
    });
    experiments
}

/// Deletes what belongs to nobody, as the leader, for as long as the process lives. It does not
/// wait for the controller's cache, which wakes one who waits, and that is the controller.
async fn sweep_loop(ctx: Arc<Ctx>, experiments: Store<ChaosExperiment>) -> &'static str {
    let mut misses = BTreeMap::new();
    let mut ticks = interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        sweep::forget(&ctx, &experiments.state());
        if !may_write(&ctx.leadership) {
            continue;
        }
        if let Err(error) = sweep::sweep(&ctx, &mut misses).await {
            tracing::warn!(%error, "cannot sweep");
        }
    }
}

#[cfg(test)]
#[path = "pass_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "run_tests.rs"]
mod run_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod select_tests;
