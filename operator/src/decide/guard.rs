//! What is refused before anything is looked at: namespaces, and how far an experiment reaches.

use std::collections::BTreeSet;

use windtunnel_crds::status::DrawnPod;

use super::{Policy, draw::Refusal, ending::Ending};

/// Refuses experiments in a namespace whose pods must never be hit.
pub(crate) fn namespace(policy: &Policy, namespace: &str) -> Result<(), Refusal> {
    if policy.protected_namespaces.contains(namespace) || policy.release_namespace == namespace {
        return Err(Refusal::new(
            Ending::NotAllowed,
            format!("namespace {namespace} is protected; its pods are never hit"),
        ));
    }
    Ok(())
}

/// Refuses more pods, over all faults, than one experiment may hit.
pub(crate) fn reach<'a>(
    policy: &Policy,
    drawn: impl Iterator<Item = &'a DrawnPod>,
) -> Result<(), Refusal> {
    let pods: BTreeSet<&str> = drawn.map(|pod| pod.uid.as_str()).collect();
    if pods.len() > policy.max_targets {
        return Err(Refusal::new(
            Ending::NotAllowed,
            format!(
                "the experiment would hit {} pods, of {} at most (chart value experiments.maxTargets)",
                pods.len(),
                policy.max_targets
            ),
        ));
    }
    Ok(())
}
