//! Node injections whose experiment is gone, and agents whose node is gone; and what this replica
//! keeps for experiments that are over.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Preconditions},
    core::PartialObjectMeta,
};
use windtunnel_crds::{ChaosExperiment, NodeAgent, NodeInjection};

use crate::{controller::Ctx, error::gone_is_fine};

/// Forgets what is kept for experiments that are over or gone.
pub(crate) fn forget(ctx: &Ctx, experiments: &[Arc<ChaosExperiment>]) {
    let phase = |e: &ChaosExperiment| e.status.as_ref().and_then(|s| s.phase).unwrap_or_default();
    let open = experiments.iter().filter(|e| !phase(e).is_terminal());
    let users: BTreeSet<(String, String)> = open
        .map(|e| (e.namespace().unwrap_or_default(), e.name_any()))
        .collect();
    ctx.directories.retain(|user| users.contains(user));
    let uids: BTreeSet<String> = experiments.iter().filter_map(|e| e.uid()).collect();
    ctx.recent.retain(|uid| uids.contains(uid));
}

/// Deletes what belongs to nobody; `misses` is kept between calls.
///
/// # Errors
/// What the API server answered; what is left is found the next time.
pub(crate) async fn sweep(
    ctx: &Ctx,
    misses: &mut BTreeMap<String, u32>,
) -> Result<(), kube::Error> {
    let injections = sweep_injections(ctx).await;
    injections.and(sweep_agents(ctx, misses).await)
}

async fn sweep_injections(ctx: &Ctx) -> Result<(), kube::Error> {
    let injections: Vec<NodeInjection> = ctx
        .injections
        .state()
        .iter()
        .map(|i| NodeInjection::clone(i))
        .collect();
    if injections.is_empty() {
        return Ok(());
    }
    // Listed after the injections were read: an experiment that has one is among them.
    let all: Api<PartialObjectMeta<ChaosExperiment>> = Api::all(ctx.client.clone());
    let all = all.list(&ListParams::default()).await?;
    let uids: BTreeSet<String> = all.items.iter().filter_map(ResourceExt::uid).collect();
    let api: Api<NodeInjection> =
        Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
    // One that cannot be deleted must not keep those behind it.
    let mut swept = Ok(());
    for (name, uid) in orphans(&injections, &uids) {
        tracing::info!(
            injection = name,
            "deleting a node injection whose experiment is gone"
        );
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        swept = swept.and(gone_is_fine(api.delete(&name, &params).await));
    }
    swept
}

async fn sweep_agents(ctx: &Ctx, misses: &mut BTreeMap<String, u32>) -> Result<(), kube::Error> {
    let agents = ctx.fleet.nodes();
    let nodes: Api<PartialObjectMeta<Node>> = Api::all(ctx.client.clone());
    let nodes = nodes.list(&ListParams::default()).await?;
    let nodes: BTreeSet<String> = nodes.items.iter().map(ResourceExt::name_any).collect();
    let api: Api<NodeAgent> = Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
    for agent in widowed(&agents, &nodes, misses) {
        tracing::info!(
            node = agent,
            "deleting the agent's object of a node that is gone"
        );
        gone_is_fine(api.delete(&agent, &DeleteParams::default()).await)?;
    }
    Ok(())
}

/// The node injections that belong to no existing experiment, by name and uid. `experiments`:
/// the uids of all experiments, from a listing that is newer than the injections'.
#[must_use]
pub(crate) fn orphans(
    injections: &[NodeInjection],
    experiments: &BTreeSet<String>,
) -> Vec<(String, Option<String>)> {
    injections
        .iter()
        .filter(|i| !experiments.contains(&i.spec.experiment.uid))
        .map(|i| (i.name_any(), i.uid()))
        .collect()
}

/// How often a node must be missing in a row before its agent's object is deleted.
const MISSES: u32 = 2;

/// Agents whose node does not exist, seen so more than once: `misses` is kept between calls.
pub(crate) fn widowed(
    agents: &[String],
    nodes: &BTreeSet<String>,
    misses: &mut BTreeMap<String, u32>,
) -> Vec<String> {
    misses.retain(|agent, _| agents.contains(agent) && !nodes.contains(agent));
    for agent in agents.iter().filter(|a| !nodes.contains(*a)) {
        *misses.entry(agent.clone()).or_default() += 1;
    }
    misses
        .iter()
        .filter(|(_, count)| **count >= MISSES)
        .map(|(agent, _)| agent.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_widowed_when_its_node_is_missing_twice() {
        let agents = ["node1".to_owned(), "node2".to_owned()];
        let (mut misses, one) = (BTreeMap::new(), BTreeSet::from(["node1".to_owned()]));
        let both = BTreeSet::from(["node1".to_owned(), "node2".to_owned()]);
        assert!(widowed(&agents, &one, &mut misses).is_empty());
        assert!(widowed(&agents, &both, &mut misses).is_empty());
        assert!(
            widowed(&agents, &one, &mut misses).is_empty(),
            "it had come back"
        );
        assert_eq!(widowed(&agents, &one, &mut misses), ["node2"]);
    }
}
