//! Watches of what passes are made for: what changed, and whose experiments must be looked at.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt as _,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::{
        WatchStreamExt as _,
        reflector::{self, ObjectRef},
        watcher,
    },
};
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, MissedTickBehavior, interval},
};
use windtunnel_crds::{ChaosExperiment, NodeAgent, NodeInjection, names::STOP_CONFIG_MAP};
use windtunnel_runtime::{Guard, Steady, chain, watching};

use crate::controller::Ctx;

/// How often the fleet is checked for agents that fell silent.
const FLEET_CHECK: Duration = Duration::from_secs(2);

pub(crate) type Triggers = mpsc::UnboundedSender<ObjectRef<ChaosExperiment>>;

fn experiment_of(injection: &NodeInjection) -> ObjectRef<ChaosExperiment> {
    let experiment = &injection.spec.experiment;
    ObjectRef::new(&experiment.name).within(&experiment.namespace)
}

/// Keeps the cache of node injections, and has the experiments of changed ones looked at.
pub(crate) async fn watch_injections(
    ctx: Arc<Ctx>,
    writer: reflector::store::Writer<NodeInjection>,
    triggers: Triggers,
    guard: Guard,
) -> &'static str {
    let api: Api<NodeInjection> =
        Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
    let mut guard = Some(guard);
    let events = watcher(api, watching())
        .backoff(Steady)
        .modify(|injection| injection.managed_fields_mut().clear())
        .reflect(writer);
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(
                watcher::Event::Apply(i) | watcher::Event::InitApply(i) | watcher::Event::Delete(i),
            ) => {
                // The receiver lives as long as the controller.
                let _ = triggers.send(experiment_of(&i));
            }
            Ok(watcher::Event::InitDone) => drop(guard.take()),
            Ok(watcher::Event::Init) => {}
            Err(error) => tracing::warn!(%error, "the watch of node injections was interrupted"),
        }
    }
    "the watch of node injections"
}

/// Keeps track of the fleet, and has experiments looked at whose nodes changed.
pub(crate) async fn watch_agents(ctx: Arc<Ctx>, triggers: Triggers, guard: Guard) -> &'static str {
    let api: Api<DeserializeGuard<NodeAgent>> =
        Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
    let mut guard = Some(guard);
    let mut events = watcher(api, watching()).backoff(Steady).boxed();
    let mut listed = BTreeSet::new();
    let mut checks = interval(FLEET_CHECK);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let tell = |node: &str| {
        for injection in ctx
            .injections
            .state()
            .iter()
            .filter(|i| i.spec.node_name == node)
        {
            let _ = triggers.send(experiment_of(injection));
        }
    };
    loop {
        // Cancel-safe: neither the stream's next nor a tick loses anything when dropped.
        tokio::select! {
            _ = checks.tick() => ctx.fleet.fallen_silent(Instant::now()).iter().for_each(|node| tell(node)),
            event = events.next() => match event {
                Some(Ok(watcher::Event::Apply(agent) | watcher::Event::InitApply(agent))) => {
                    let node = agent.name_any();
                    listed.insert(node.clone());
                    match agent.0 {
                        Ok(agent) => {
                            if ctx.fleet.see(agent, Instant::now()) {
                                tell(&node);
                            }
                        }
                        Err(error) => tracing::warn!(error = chain(&error), "a node agent's object cannot be read"),
                    }
                }
                Some(Ok(watcher::Event::Delete(agent))) => {
                    let node = agent.name_any();
                    ctx.fleet.forget(&node);
                    tell(&node);
                }
                Some(Ok(watcher::Event::InitDone)) => {
                    ctx.fleet.keep(&listed).iter().for_each(|node| tell(node));
                    drop(guard.take());
                }
                Some(Ok(watcher::Event::Init)) => listed.clear(),
                Some(Err(error)) => tracing::warn!(%error, "the watch of node agents was interrupted"),
                None => return "the watch of node agents",
            },
        }
    }
}

/// Follows the emergency stop: a `ConfigMap` that exists or does not.
pub(crate) async fn watch_stop(ctx: Arc<Ctx>, all: Arc<Notify>, guard: Guard) -> &'static str {
    let api: Api<PartialObjectMeta<ConfigMap>> =
        Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
    let config = watching().fields(&format!("metadata.name={STOP_CONFIG_MAP}"));
    let mut guard = Some(guard);
    let mut events = watcher(api, config).backoff(Steady).boxed();
    let mut listed = false;
    while let Some(event) = events.next().await {
        let stopped = match event {
            Ok(watcher::Event::Init) => {
                listed = false;
                continue;
            }
            Ok(watcher::Event::InitApply(_)) => {
                listed = true;
                continue;
            }
            Ok(watcher::Event::InitDone) => listed,
            Ok(watcher::Event::Apply(_)) => true,
            Ok(watcher::Event::Delete(_)) => false,
            Err(error) => {
                tracing::warn!(%error, "the watch of the emergency stop was interrupted");
                continue;
            }
        };
        if ctx.set_stopped(stopped) != stopped {
            tracing::warn!(stopped, "the emergency stop changed");
            all.notify_one();
        }
        drop(guard.take());
    }
    "the watch of the emergency stop"
}
