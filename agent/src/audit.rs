//! Looks for what an ended fault has left: by the journal's names, and by our marks.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use windtunnel_crds::residue::{Residue, ResidueKind, has_left};
use windtunnel_runtime::chain;

use crate::{
    impair,
    kernel::{
        cgroup::{self, CgroupError},
        child,
        handle::ProcessHandle,
        netns::NetNs,
        nft,
        proc::{ProcError, ProcessId},
    },
    model::{Entry, NetworkEntry, State},
    node::Node,
};

/// How long processes that were killed may take to be gone.
const KILLED: Duration = Duration::from_secs(1);

/// What is left of an ended fault on its target; each thing is removed where that is possible.
/// `netns` is the target's namespace, unless it is gone.
#[must_use]
pub fn audit(node: &Node, entry: &Entry, netns: Option<&NetNs>) -> Vec<Residue> {
    let mut found = Vec::new();
    if let Some(container) = entry.container() {
        // What was not seen to end before is looked at, not waited for: entries can be many.
        let ended = entry.ended();
        let is_known = ended.is_some_and(|e| has_left(&e.residue));
        let patience = if is_known { Duration::ZERO } else { KILLED };
        found.extend(children(node, &container.cgroup, patience));
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

/// Children of injectors that are dead, among the processes of a container.
fn orphans(node: &Node, group: &Path) -> Result<Vec<ProcessId>, CgroupError> {
    let proc = &node.settings.places.proc;
    let mut all = cgroup::processes(proc, group)?;
    all.retain(|process| {
        let parent = || proc.parent(process.pid);
        child::is_one(proc, process.pid)
            && parent().is_none_or(|parent| !node.supervisor.is_injector(parent))
    });
    Ok(all)
}

/// Whether something is still dying with its injector, this fault's or another's that ended at the same
/// time, in the container of an ended fault.
pub(crate) fn is_dying(node: &Node, entry: &Entry) -> bool {
    let proc = &node.settings.places.proc;
    entry.container().is_some_and(|container| {
        // What cannot be read is residue, which the check finds.
        let all = orphans(node, &container.cgroup).unwrap_or_default();
        all.iter().any(|process| proc.is_dying(process.pid))
    })
}

/// Kills the children of dead injectors, and sees them end: all of them in one time, for which living
/// injectors get no sign of life.
fn children(node: &Node, group: &Path, patience: Duration) -> Vec<Residue> {
    let proc = &node.settings.places.proc;
    let orphans = match orphans(node, group) {
        Ok(orphans) => orphans,
        Err(error) => {
            let group = group.display().to_string();
            return vec![residue(ResidueKind::Process, group, Err(chain(&error)))];
        }
    };
    let killed: Vec<_> = orphans
        .into_iter()
        .map(|process| (process, proc.kill(process)))
        .collect();
    see_end(killed, patience)
}

/// Sees processes end that were killed: all of them in one time. One that was gone before has ended.
pub(crate) fn see_end(
    killed: Vec<(ProcessId, Result<Option<ProcessHandle>, ProcError>)>,
    patience: Duration,
) -> Vec<Residue> {
    let until = Instant::now() + patience;
    let ended = killed.into_iter().map(|(process, handle)| {
        let left = until.saturating_duration_since(Instant::now());
        let ended = handle.and_then(|handle| handle.map_or(Ok(true), |h| h.ends_within(left)));
        let ended = match ended {
            Ok(true) => Ok(()),
            Ok(false) => Err("it was killed, and does not end".to_owned()),
            Err(error) => Err(chain(&error)),
        };
        residue(ResidueKind::Process, process.pid.to_string(), ended)
    });
    ended.collect()
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
#[must_use]
pub fn merge(old: Vec<Residue>, new: Vec<Residue>) -> Vec<Residue> {
    let kept = old
        .into_iter()
        .filter(|o| !new.iter().any(|n| n.is_same(o)));
    let kept = kept.map(|residue| Residue {
        removed: true,
        ..residue
    });
    let mut all: Vec<Residue> = kept.collect();
    all.extend(new);
    all.sort();
    all
}
