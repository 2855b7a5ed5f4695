//! A look at the whole node for what is ours and stands in no entry of the journal: an entry may
//! have been lost, and nothing is said to be clean that nobody has looked at.

use std::{collections::BTreeSet, time::Duration};

use windtunnel_crds::residue::Residue;
use windtunnel_runtime::chain;

use crate::{
    audit,
    decide::Now,
    impair::{self, ImpairError},
    inject,
    kernel::{
        child,
        netns::{NetNs, NetNsError, NetNsId},
        proc::{ProcError, boottime},
    },
    model::Sweep,
    node::Node,
    probe,
};

/// How long killed processes may take to be gone.
const KILLED: Duration = Duration::from_secs(2);

/// What was found, and what could not be looked at.
#[derive(Debug, Default)]
struct Found {
    residue: Vec<Residue>,
    unread: Option<String>,
}

/// Looks at every process and every network namespace of the node, removes what is ours and no
/// entry speaks of, and remembers what was found.
pub fn sweep(node: &mut Node, now: Now) {
    let mut found = Found::default();
    // Those first: what they hold goes with them.
    if let Err(error) = processes(node, &mut found) {
        found.doubt(chain(&error));
    }
    if let Err(error) = namespaces(node, &mut found) {
        found.doubt(chain(&error));
    }
    let Found {
        mut residue,
        unread,
    } = found;
    let before = node.sweep.take().map(|s| s.residue).unwrap_or_default();
    node.metrics.count_residue(&residue, &before);
    for residue in &residue {
        tracing::warn!(?residue, "found what no journal entry speaks of");
    }
    if let Some(unread) = &unread {
        tracing::warn!(unread, "the node could not be looked at as a whole");
    }
    if unread.is_some() {
        // What was there may be where nobody could look.
        let is_again = |before: &&Residue| residue.iter().any(|found| found.is_same(before));
        let kept: Vec<Residue> = before.iter().filter(|b| !is_again(b)).cloned().collect();
        residue.extend(kept);
    }
    node.sweep = Some(Sweep {
        at: now.wall,
        swept_at: now.boot,
        residue: audit::merge(before, residue),
        unread,
    });
}

/// Kills injectors, and children of injectors, that are not this agent's. What it tries in the
/// background meanwhile has such a child as well.
fn processes(node: &Node, found: &mut Found) -> Result<(), ProcError> {
    let proc = &node.settings.places.proc;
    let is_own = |pid: i32| node.supervisor.is_injector(pid) || probe::is_trial(proc, pid);
    let is_orphan = |pid: i32| {
        let parent = || proc.parent(pid).unwrap_or_default();
        (inject::is_one(proc, pid) && !node.supervisor.is_injector(pid))
            || (child::is_one(proc, pid) && !is_own(parent()))
    };
    let mut killed = Vec::new();
    for pid in proc.pids()? {
        let Some(process) = proc.identify(pid)?.filter(|_| is_orphan(pid)) else {
            continue;
        };
        match proc.kill(process) {
            Ok(None) => {}
            handle => killed.push((process, handle)),
        }
    }
    // Living injectors get no sign of life meanwhile.
    found.residue.extend(audit::see_end(killed, KILLED));
    Ok(())
}

/// Removes tables and links by our names from every namespace that a process is in. The node's own
/// is left alone: no fault is ever in it.
fn namespaces(node: &mut Node, found: &mut Found) -> Result<(), NetNsError> {
    let proc = node.settings.places.proc.clone();
    let expected = audit::names(node.journal.entries().values());
    let mut seen: BTreeSet<NetNsId> = NetNsId::of_pid(&proc, 1)?.into_iter().collect();
    for pid in proc.pids()? {
        let netns = match NetNs::of_pid(&proc, pid) {
            Ok(netns) if seen.contains(&netns.id()) => continue,
            Ok(netns) => netns,
            Err(error) if error.is_gone() => continue,
            Err(error) => {
                found.doubt(chain(&error));
                continue;
            }
        };
        seen.insert(netns.id());
        // There may be many: no injector is to miss a sign of life for that.
        node.supervisor.beat(boottime()?);
        if let Err(error) = namespace(&netns, &expected, found) {
            found.doubt(format!("namespace of process {pid}: {}", chain(&error)));
        }
    }
    Ok(())
}

fn namespace(
    netns: &NetNs,
    expected: &BTreeSet<String>,
    found: &mut Found,
) -> Result<(), ImpairError> {
    let (tables, links) = impair::marked(netns)?;
    let lost = |name: &String| !expected.contains(name);
    let tables = tables.into_iter().filter(lost);
    found
        .residue
        .extend(tables.map(|name| audit::remove_table(netns, name)));
    let links = links.into_iter().filter(lost);
    found
        .residue
        .extend(links.map(|name| audit::remove_link(netns, name)));
    Ok(())
}

impl Found {
    /// Notes what could not be looked at; the first says enough.
    fn doubt(&mut self, what: String) {
        self.unread.get_or_insert(what);
    }
}
