//! Carries out steps: one match, no policy. A step that fails stops no other; it is decided on
//! again on the next pass, with what is true by then.

use jiff::Timestamp;
use thiserror::Error;
use windtunnel_crds::{
    NodeInjectionStatus,
    residue::{ReclaimedBy, ResidueKind},
};
use windtunnel_runtime::chain;

use crate::{
    audit,
    decide::{Decision, Kill, Now, Step},
    impair,
    journal::JournalError,
    kernel::{
        netns::{NetNs, NetNsError, NetNsId, find_process},
        nft::{Device, Table},
        proc::ProcError,
    },
    model::{Entry, Key, NetworkEntry, Objects, State},
    node::Node,
    prepare,
    supervisor::SupervisorError,
    sweep,
    wire::{NetworkTask, Order, Task, WireError},
};

/// Why a step failed.
#[derive(Debug, Error)]
pub enum ActError {
    /// The journal could not be written.
    #[error("the journal")]
    Journal(#[from] JournalError),
    /// An injector could not be started.
    #[error("the injector")]
    Supervisor(#[from] SupervisorError),
    /// An injector does not listen.
    #[error("the injector does not listen")]
    Wire(#[from] WireError),
    /// A process could not be signalled.
    #[error("the injector cannot be killed")]
    Process(#[from] ProcError),
    /// The target's namespace could not be found.
    #[error("the target's network namespace")]
    NetNs(#[from] NetNsError),
}

/// A report for the operator.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the injection.
    pub name: String,
    /// Its uid: one of another uid by the same name is another's.
    pub uid: String,
    /// The status.
    pub status: NodeInjectionStatus,
}

/// What came of a decision.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What to tell the operator.
    pub reports: Vec<Report>,
    /// A step failed; what is decided next may be the same.
    pub has_failed: bool,
}

/// Carries out a decision.
pub fn act(node: &mut Node, decision: Decision, clock: impl Fn() -> Now) -> Outcome {
    let mut outcome = Outcome::default();
    for step in decision.steps {
        // Steps can take a while in sum: no injector is to miss a sign of life for that.
        node.supervisor.beat(clock().boot);
        let told = format!("{step:?}");
        if let Err(error) = perform(node, step, clock(), &mut outcome.reports) {
            outcome.has_failed = true;
            tracing::warn!(error = chain(&error), step = told, "a step failed");
        }
    }
    outcome
}

fn perform(
    node: &mut Node,
    step: Step,
    now: Now,
    reports: &mut Vec<Report>,
) -> Result<(), ActError> {
    match step {
        Step::Sweep => {
            sweep::sweep(node, now);
            Ok(())
        }
        Step::Prepare { injection } => {
            prepare::prepare(node, &injection, now);
            Ok(())
        }
        Step::Open { key, window } => write(node, &key, |entry| entry.window = Some(window)),
        Step::Inject { key, table } => inject(node, &key, table, now),
        Step::Await { key } => {
            let live = node.supervisor.live();
            let known = live.get(&key).map(|l| (l.applied_at, l.counts.clone()));
            let (applied_at, counts) = known.unwrap_or_default();
            write(node, &key, |entry| {
                entry.outlive(applied_at, counts, now.boot);
            })?;
            node.supervisor.forget(&key);
            Ok(())
        }
        Step::Follow { key, id } => {
            prepare::follow(node, &key, &id);
            Ok(())
        }
        Step::Confirm { key, at } => write(node, &key, |entry| {
            if let Some(injector) = entry.injector() {
                entry.state = State::Injected { injector, at };
            }
        }),
        Step::Update { key, table } => Ok(node.supervisor.update(&key, table)?),
        Step::Kill { key, why } => kill(node, key, why, now),
        Step::End { key, ended } => {
            node.metrics.count_end(&ended);
            if let Some(killed_at) = node.killed_at.remove(&key) {
                let took = now.boot.saturating_sub(killed_at);
                node.metrics.revert_seconds.observe(took.as_secs_f64());
            }
            write(node, &key, |entry| entry.state = State::Ended(*ended))?;
            node.supervisor.forget(&key);
            node.kills.remove(&key);
            Ok(())
        }
        Step::Clean { key } => clean(node, &key, now),
        Step::Recheck { key } => check(node, &key, now, |ended, at| ended.rechecked = Some(at)),
        Step::Forget { key } => Ok(node.journal.forget(&key)?),
        Step::Report {
            injection,
            name,
            status,
        } => {
            let reported = node.reports.entry(injection.clone()).or_default();
            reported.status = Some((*status).clone());
            reported.pending_since = None;
            reports.push(Report {
                name,
                uid: injection,
                status: *status,
            });
            Ok(())
        }
    }
}

/// Writes an entry down, changed.
fn write(node: &mut Node, key: &Key, change: impl FnOnce(&mut Entry)) -> Result<(), ActError> {
    if let Some(entry) = node.journal.entries().get(key) {
        let mut entry = entry.clone();
        change(&mut entry);
        node.journal.write(entry)?;
    }
    Ok(())
}

/// The injector is written down before it is given its order: whatever has an effect is known to
/// the agent that comes after this one.
fn inject(node: &mut Node, key: &Key, table: Option<Table>, now: Now) -> Result<(), ActError> {
    let Some(entry) = node.journal.entries().get(key).cloned() else {
        return Ok(());
    };
    let Some(window) = entry.window else {
        return Ok(());
    };
    let task = match &entry.objects {
        Objects::Container(container) => Some(Task::Container(container.clone())),
        Objects::Network(network) => network_task(node, &entry, network, table)?,
    };
    let Some(task) = task else {
        return Ok(());
    };
    let order = Order {
        deadline: window.end,
        task,
    };
    let injector = match node.supervisor.start(key.clone(), order, now.boot) {
        Ok(injector) => injector,
        Err(error) => {
            // It is decided on: nothing is gained by trying again and again.
            node.unstarted.insert(key.clone(), chain(&error));
            return Err(error.into());
        }
    };
    let written = write(node, key, |entry| {
        entry.state = State::Injecting { injector };
    });
    if written.is_err() {
        node.supervisor.discard(key)?;
    }
    written?;
    Ok(node.supervisor.order(key)?)
}

/// What the injector of a network fault is to do; `None` where nobody is left in the namespace.
fn network_task(
    node: &Node,
    entry: &Entry,
    network: &NetworkEntry,
    table: Option<Table>,
) -> Result<Option<Task>, ActError> {
    let (Some(pid), Some(table)) = (member(node, entry, network.netns)?, table) else {
        return Ok(None);
    };
    let queues = network.detours.iter().filter_map(|d| {
        Some(Device {
            name: d.ifb.clone(),
            index: d.ifb_index?,
        })
    });
    Ok(Some(Task::Network(NetworkTask {
        netns: network.netns,
        pid,
        table,
        queues: queues.collect(),
    })))
}

fn kill(node: &mut Node, key: Key, why: Kill, now: Now) -> Result<(), ActError> {
    node.supervisor.kill(&key)?;
    if !node.kills.contains_key(&key) {
        if why == Kill::Silent {
            node.metrics.heartbeats_missed.inc();
        }
        node.killed_at.insert(key.clone(), now.boot);
        node.kills.insert(key, why);
    }
    Ok(())
}

/// A process in the target's network namespace.
fn member(node: &Node, entry: &Entry, wanted: NetNsId) -> Result<Option<i32>, ActError> {
    let proc = &node.settings.places.proc;
    let in_pod = crate::kernel::cgroup::pids(&entry.pod_cgroup).unwrap_or_default();
    let near = in_pod
        .into_iter()
        .find(|pid| matches!(NetNsId::of_pid(proc, *pid), Ok(Some(id)) if id == wanted));
    match near {
        Some(pid) => Ok(Some(pid)),
        None => Ok(find_process(proc, wanted)?.map(|process| process.pid)),
    }
}

/// The target's namespace, if the fault is on it and any process is in it.
pub(crate) fn netns(node: &Node, entry: &Entry) -> Result<Option<NetNs>, ActError> {
    if entry.boot_id != node.boot_id {
        return Ok(None);
    }
    let Some(network) = entry.network() else {
        return Ok(None);
    };
    let Some(pid) = member(node, entry, network.netns)? else {
        return Ok(None);
    };
    let netns = NetNs::of_pid(&node.settings.places.proc, pid)?;
    Ok((netns.id() == network.netns).then_some(netns))
}

/// Removes what is inert by now; once it is gone, checks the target.
fn clean(node: &mut Node, key: &Key, now: Now) -> Result<(), ActError> {
    let Some(entry) = node.journal.entries().get(key).cloned() else {
        return Ok(());
    };
    let Some(ended) = entry.ended() else {
        return Ok(());
    };
    if let (Some(netns), Some(network)) = (netns(node, &entry)?, entry.network()) {
        let overdue = now.boot >= ended.ended_at + network.drain;
        match impair::remove(&netns, &network.detours, overdue) {
            Ok(false) => return Ok(()),
            Ok(true) => {}
            // The check says what is left.
            Err(error) => {
                tracing::warn!(error = chain(&error), ?key, "cannot remove an impairment");
            }
        }
    }
    check(node, key, now, |ended, at| {
        ended.checked = Some((at, now.boot));
    })
}

/// Looks for anything that is left of an ended fault, removes it, and writes down what was found.
fn check(
    node: &mut Node,
    key: &Key,
    now: Now,
    done: impl FnOnce(&mut crate::model::Ended, Timestamp),
) -> Result<(), ActError> {
    let Some(entry) = node.journal.entries().get(key).cloned() else {
        return Ok(());
    };
    let netns = netns(node, &entry)?;
    let found = audit::audit(node, &entry, netns.as_ref());
    node.metrics.count_residue(&found);
    let by = found
        .iter()
        .any(|r| r.kind == ResidueKind::Process)
        .then_some(ReclaimedBy::Agent);
    write(node, key, |entry| {
        if let State::Ended(ended) = &mut entry.state {
            ended.residue = audit::merge(std::mem::take(&mut ended.residue), found);
            ended.reclaimed_by = ended.reclaimed_by.or(by);
            done(ended, now.wall);
        }
    })
}
