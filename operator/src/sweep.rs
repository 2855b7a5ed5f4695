//! Node injections whose experiment is gone, and agents whose node is gone.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt as _;
use windtunnel_crds::NodeInjection;

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
