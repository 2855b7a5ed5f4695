//! Looks for what an ended fault has left: by the journal's names, and by our marks.

use std::{collections::BTreeSet, path::Path};

use windtunnel_crds::residue::{Residue, ResidueKind};
use windtunnel_runtime::chain;

use crate::{
    impair,
    kernel::{cgroup, child, netns::NetNs, nft},
    model::{Entry, NetworkEntry, State},
    node::Node,
};

/// What is left of an ended fault on its target; each thing is removed where that is possible.
/// `netns` is the target's namespace, unless it is gone.
#[must_use]
pub fn audit(node: &Node, entry: &Entry, netns: Option<&NetNs>) -> Vec<Residue> {
    let mut found = Vec::new();
    if let Some(container) = entry.container() {
        found.extend(children(node, &container.cgroup));
    }
    if let (Some(netns), Some(network)) = (netns, entry.network()) {
        match impair::marked(netns) {
            Ok((tables, links)) => {
                let expected = expected(node, entry, network);
                let left = |name: &String| !expected.contains(name);
                found.extend(
                    tables
                        .into_iter()
                        .filter(left)
                        .map(|name| remove_table(netns, name)),
                );
                found.extend(
                    links
                        .into_iter()
                        .filter(left)
                        .map(|name| remove_link(netns, name)),
                );
            }
            Err(error) => found.push(Residue {
                message: format!("the target's namespace cannot be read: {}", chain(&error)),
                ..residue(
                    ResidueKind::Table,
                    network.table.clone(),
                    Err(String::new()),
                )
            }),
        }
    }
    for residue in &mut found {
        residue.pod = format!("{}/{}", entry.experiment.namespace, entry.pod_name);
    }
    found
}

/// The names of tables and links that other faults on the same namespace may have now.
fn expected(node: &Node, entry: &Entry, network: &NetworkEntry) -> BTreeSet<String> {
    let entries = node.journal.entries().values();
    let others = entries.filter_map(|other| Some((other, other.network()?)));
    let others = others.filter(|(other, its)| {
        let same = its.netns == network.netns && other.boot_id == entry.boot_id;
        same && other.key != entry.key
    });
    names(others.map(|(other, _)| other))
}

/// The names of tables and links that some entries account for.
pub(crate) fn names<'a>(entries: impl Iterator<Item = &'a Entry>) -> BTreeSet<String> {
    let open = entries.filter(|e| e.ended().is_none_or(|ended| ended.checked.is_none()));
    open.filter_map(|entry| Some((entry, entry.network()?)))
        .flat_map(|(entry, network)| {
            let table = match entry.state {
                State::Ended(_) | State::Prepared => None,
                _ => Some(network.table.clone()),
            };
            let links = network.detours.iter().map(|d| d.ifb.to_string());
            links.chain(table)
        })
        .collect()
}

/// Children of injectors that are dead, among the processes of a container; they are killed. Those that
/// are dying with an injector, as one of another fault that ends at the same time, are not left.
fn children(node: &Node, group: &Path) -> Vec<Residue> {
    let proc = &node.settings.places.proc;
    let mut found = Vec::new();
    for process in cgroup::processes(proc, group).unwrap_or_default() {
        let is_orphan = child::is_one(proc, process.pid)
            && !proc.is_dying(process.pid)
            && proc
                .parent(process.pid)
                .is_none_or(|parent| !node.supervisor.is_injector(parent));
        if is_orphan {
            let killed = proc
                .open(process)
                .and_then(|handle| handle.map_or(Ok(()), |handle| handle.kill()));
            found.push(residue(
                ResidueKind::Process,
                process.pid.to_string(),
                killed.map_err(|e| chain(&e)),
            ));
        }
    }
    found
}

pub(crate) fn remove_table(netns: &NetNs, name: String) -> Residue {
    let removed = nft::delete_table(netns, &name).map_err(|e| chain(&e));
    residue(ResidueKind::Table, name, removed)
}

pub(crate) fn remove_link(netns: &NetNs, name: String) -> Residue {
    let removed = impair::remove_named(netns, &name).map_err(|e| chain(&e));
    residue(ResidueKind::Link, name, removed)
}

pub(crate) fn residue(kind: ResidueKind, name: String, removed: Result<(), String>) -> Residue {
    Residue {
        node: String::new(),
        kind,
        name,
        pod: String::new(),
        removed: removed.is_ok(),
        message: removed.err().unwrap_or_default(),
    }
}

/// What was found before stays in the record; what is found again replaces it.
pub(crate) fn merge(old: Vec<Residue>, new: Vec<Residue>) -> Vec<Residue> {
    let kept = old
        .into_iter()
        .filter(|o| !new.iter().any(|n| n.kind == o.kind && n.name == o.name));
    let kept = kept.map(|residue| Residue {
        removed: true,
        ..residue
    });
    let mut all: Vec<Residue> = kept.collect();
    all.extend(new);
    all.sort();
    all
}
