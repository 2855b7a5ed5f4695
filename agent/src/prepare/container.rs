//! Prepare for faults on containers: the container is found, and what is to be done to it worked
//! out. Nothing is built; a restarted container is found again the same way.

use std::time::Duration;

use windtunnel_crds::injection::{ContainerKind, NodeContainer, NodeFault, NodeKind, NodeTarget};
use windtunnel_runtime::chain;

use super::{Base, Refusal, Run, Verdict, rivals::Beside};
use crate::{
    inject,
    journal::UNWRITABLE,
    look::{PATIENCE, UNRESPONSIVE},
    model::{ContainerEntry, Key, Objects, State},
    node::Node,
    targets::{self, TargetError},
};

pub(super) fn prepare(
    node: &mut Node,
    run: &mut Run<'_>,
    (base, kind): (Base, ContainerKind<'_>),
    target: &NodeTarget,
) -> Verdict {
    let name = &base.key.container;
    let Some(container) = target.containers.iter().find(|c| c.name == *name) else {
        return Verdict::Refused(("NoContainer", "the target names no container".to_owned()));
    };
    let entry = match find(node, target, container, kind) {
        Ok(entry) => entry,
        Err(Ok(gone)) => return Verdict::Gone(gone),
        Err(Err(refusal)) => return Verdict::Refused(refusal),
    };
    if let Err(refusal) = Beside::new(node, run).container(&base.key, &entry.act) {
        return Verdict::Refused(refusal);
    }
    let entry = (base.entry)(Objects::Container(entry));
    if run.injection.spec.dry_run {
        run.rehearsed.push(entry);
        return Verdict::Prepared;
    }
    match node.journal.write(entry) {
        Ok(()) => Verdict::Prepared,
        Err(error) => Verdict::Refused((UNWRITABLE, chain(&error))),
    }
}

/// The container, and what is to be done to it; or that it is gone, or why it cannot be hit.
fn find(
    node: &mut Node,
    target: &NodeTarget,
    container: &NodeContainer,
    kind: ContainerKind<'_>,
) -> Result<ContainerEntry, Result<String, Refusal>> {
    let places = &node.settings.places;
    let controller = inject::controller(kind);
    let found =
        targets::container(places, target, &container.id, controller).map_err(
            |error| match error {
                TargetError::Gone(_) => Ok(format!(
                    "container {} of pod {} has no process on this node any more",
                    container.name, target.pod_name
                )),
                error => Err((error.reason(), chain(&error))),
            },
        )?;
    let act = inject::plan(kind, container, &found, node).map_err(Err)?;
    Ok(ContainerEntry {
        id: container.id.clone(),
        cgroup: found.cgroup,
        init: found.init,
        act,
        is_successor: false,
    })
}

/// Finds the container that has taken the place of an entry's. One that cannot be found yet, or not
/// be hit, is looked for again until it is given up; what does not answer holds up others, and is
/// looked at less often.
pub(crate) fn follow(node: &mut Node, key: &Key, id: &str, now: Duration) {
    if node.follow_after.get(key).is_some_and(|at| now < *at) {
        return;
    }
    let Some(mut entry) = node.journal.entries().get(key).cloned() else {
        return;
    };
    let known = node.known.injections.as_ref();
    let meant = known.and_then(|all| key.meant(all));
    let Some(fault) = meant.map(|(_, fault)| fault.clone()) else {
        return;
    };
    let Some((kind, target)) = wanted(&fault, key) else {
        return;
    };
    let container = target.containers.iter().find(|c| c.id == id);
    let found = container.map(|container| find(node, target, container, kind));
    match found {
        Some(Ok(mut container)) => {
            container.is_successor = entry.injected_before.is_some();
            entry.objects = Objects::Container(container);
            entry.state = State::Prepared;
            node.journal.note(entry);
        }
        Some(Err(Err((UNRESPONSIVE, _)))) => {
            node.follow_after.insert(key.clone(), now + PATIENCE * 5);
        }
        Some(Err(why)) => tracing::debug!(?why, ?key, "cannot follow a container yet"),
        None => {}
    }
}

fn wanted<'a>(fault: &'a NodeFault, key: &Key) -> Option<(ContainerKind<'a>, &'a NodeTarget)> {
    let Some(NodeKind::Container(kind)) = fault.kind() else {
        return None;
    };
    let target = fault.targets.iter().find(|t| t.pod_uid == key.pod)?;
    Some((kind, target))
}
