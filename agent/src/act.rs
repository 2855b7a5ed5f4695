//! Carries out steps: one match, no policy. A step that fails stops no other; it is decided on
//! again on the next pass, with what is true by then.

use std::time::Duration;

use jiff::Timestamp;
use thiserror::Error;
use windtunnel_crds::{
    NodeInjectionStatus,
    injection::TargetState,
    residue::{ReclaimedBy, ResidueKind},
};
use windtunnel_runtime::chain;

use crate::{
    audit,
    decide::{Decision, Kill, Now, Step, Unwritten},
    impair,
    journal::JournalError,
    kernel::{
        netns::{NetNs, NetNsError, NetNsId, find_process},
        nft::{Device, Table},
        proc::ProcError,
    },
    model::{Detour, Ended, Entry, Key, NetworkEntry, Objects, State},
    node::Node,
    prepare,
    supervisor::SupervisorError,
    sweep,
    wire::{NetworkTask, Order, Task, WireError},
};

/// How long what was killed may take to be gone before it counts as left: a busy node is late, and one
/// whose disk hangs is later.
const DYING: Duration = Duration::from_secs(5);

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
    // What a target can hold up comes last, and is held up once in a pass.
    let (slow, quick): (Vec<Step>, Vec<Step>) =
        decision.steps.into_iter().partition(Step::looks_at_targets);
    node.supervisor.looks().begin();
    for step in quick.into_iter().chain(slow) {
        if step.looks_at_targets() && node.supervisor.looks().was_in_vain() {
            outcome.has_failed = true;
            continue;
        }
        // Steps can take a while in sum: no injector is to miss a sign of life for that.
        node.supervisor.beat(clock().boot);
        let told = format!("{step:?}");
        if let Err(error) = perform(node, step, clock(), &mut outcome.reports) {
            outcome.has_failed = true;
            tracing::warn!(error = chain(&error), step = told, "a step failed");
        }
    }
    outcome.has_failed |= node.supervisor.looks().was_in_vain();
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
        Step::Open { key, window } => {
            note(node, &key, |entry| entry.window = Some(window));
            Ok(())
        }
        Step::Inject { key, table } => inject(node, &key, table, now),
        Step::Await { key } => {
            let live = node.supervisor.live();
            let known = live.get(&key).map(|l| (l.applied_at, l.counts.clone()));
            let (applied_at, counts) = known.unwrap_or_default();
            note(node, &key, |entry| {
                entry.outlive(applied_at, counts, now.boot);
            });
            node.supervisor.forget(&key);
            Ok(())
        }
        Step::Follow { key, id } => {
            prepare::follow(node, &key, &id, now.boot);
            Ok(())
        }
        Step::Confirm { key, at } => {
            note(node, &key, |entry| {
                if let Some(injector) = entry.injector() {
                    entry.state = State::Injected { injector, at };
                }
            });
            Ok(())
        }
        Step::Update { key, table } => Ok(node.supervisor.update(&key, table)?),
        Step::Kill { key, why } => kill(node, key, why, now),
        Step::End { key, ended } => {
            end(node, &key, *ended, now);
            Ok(())
        }
        Step::Clean { key } => clean(node, &key, now),
        Step::Recheck { key } => check(node, &key, now, |ended, at| ended.rechecked = Some(at)),
        Step::Forget { key } => {
            node.journal.forget(&key);
            Ok(())
        }
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

/// Notes what has become of an entry.
fn note(node: &mut Node, key: &Key, change: impl FnOnce(&mut Entry)) {
    if let Some(entry) = node.journal.entries().get(key) {
        let mut entry = entry.clone();
        change(&mut entry);
        node.journal.note(entry);
    }
}

fn end(node: &mut Node, key: &Key, ended: Ended, now: Now) {
    let entry = node.journal.entries().get(key);
    if entry.is_none_or(|entry| entry.ended().is_none()) {
        node.metrics.count_end(&ended);
    }
    if matches!(
        ended.outcome,
        TargetState::Failed | TargetState::Interrupted
    ) {
        let Ended {
            reason, message, ..
        } = &ended;
        tracing::warn!(?key, reason, message, "a fault ended before its time");
    }
    if let Some(killed_at) = node.killed_at.remove(key) {
        let took = now.boot.saturating_sub(killed_at);
        node.metrics.revert_seconds.observe(took.as_secs_f64());
    }
    note(node, key, |entry| entry.state = State::Ended(ended));
    node.supervisor.forget(key);
    node.kills.remove(key);
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
        Objects::Network(network) => network_task(node, &entry, network, table),
    };
    let Some(task) = task else {
        // It is not the journal that holds it up.
        node.unwritten.remove(key);
        return Ok(());
    };
    let order = Order {
        deadline: window.end,
        task,
    };
    // Written as it stands: nothing is started that could not be written down.
    write(node, entry.clone(), now)?;
    let injector = match node.supervisor.start(key.clone(), order, now.boot) {
        Ok(injector) => injector,
        Err(error) => {
            // It is decided on: nothing is gained by trying again and again.
            node.unstarted.insert(key.clone(), chain(&error));
            return Err(error.into());
        }
    };
    let state = State::Injecting { injector };
    if let Err(error) = write(node, Entry { state, ..entry }, now) {
        node.supervisor.discard(key)?;
        return Err(error);
    }
    node.unwritten.remove(key);
    Ok(node.supervisor.order(key)?)
}

/// Writes an entry of a fault down that is to be injected; remembers since when that fails.
fn write(node: &mut Node, entry: Entry, now: Now) -> Result<(), ActError> {
    let key = entry.key.clone();
    node.journal.write(entry).map_err(|error| {
        let unwritten = node.unwritten.entry(key).or_insert(Unwritten {
            since: now.boot,
            message: String::new(),
        });
        unwritten.message = chain(&error);
        error.into()
    })
}

/// What the injector of a network fault is to do; `None` where nothing of the pod is left in the
/// namespace: its number may be another pod's by now.
fn network_task(
    node: &Node,
    entry: &Entry,
    network: &NetworkEntry,
    table: Option<Table>,
) -> Option<Task> {
    let (pid, table) = (member(node, entry, network.netns)?, table?);
    let queues = network.detours.iter().filter_map(|d| {
        Some(Device {
            name: d.ifb.clone(),
            index: d.ifb_index?,
        })
    });
    Some(Task::Network(NetworkTask {
        netns: network.netns,
        pid,
        pod: entry.pod_cgroup.clone(),
        table,
        queues: queues.collect(),
    }))
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

/// A process of the target in its network namespace.
fn member(node: &Node, entry: &Entry, wanted: NetNsId) -> Option<i32> {
    let proc = &node.settings.places.proc;
    let in_pod = crate::kernel::cgroup::pids(&entry.pod_cgroup).unwrap_or_default();
    let is_in = |pid: &i32| matches!(NetNsId::of_pid(proc, *pid), Ok(Some(id)) if id == wanted);
    in_pod.into_iter().find(is_in)
}

/// The target's namespace, if the fault is on it and any process is in it: to look for what is left,
/// by names that no other fault has. Its number may be another's by the time that the target is gone.
pub(crate) fn netns(node: &Node, entry: &Entry) -> Result<Option<NetNs>, ActError> {
    if entry.boot_id != node.boot_id {
        return Ok(None);
    }
    let Some(network) = entry.network() else {
        return Ok(None);
    };
    let proc = &node.settings.places.proc;
    let pid = match member(node, entry, network.netns) {
        Some(pid) => pid,
        None => match find_process(proc, network.netns)? {
            Some(process) => process.pid,
            None => return Ok(None),
        },
    };
    let netns = NetNs::of_pid(proc, pid)?;
    Ok((netns.id() == network.netns).then_some(netns))
}

/// The detours of a fault as they are looked for in its namespace: by their names, and by their indices
/// where a process of the pod tells that the namespace is the pod's.
pub(crate) fn detours(node: &Node, entry: &Entry, network: &NetworkEntry) -> Vec<Detour> {
    let is_own = member(node, entry, network.netns).is_some();
    let mut detours = network.detours.clone();
    for detour in &mut detours {
        detour.ifb_index = detour.ifb_index.filter(|_| is_own);
    }
    detours
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
        match impair::remove(&netns, &detours(node, &entry, network), overdue) {
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
    done: impl FnOnce(&mut Ended, Timestamp),
) -> Result<(), ActError> {
    let Some(entry) = node.journal.entries().get(key).cloned() else {
        return Ok(());
    };
    if is_dying(node, &entry, now) {
        return Ok(());
    }
    let netns = netns(node, &entry)?;
    let found = audit::audit(node, &entry, netns.as_ref());
    let before = entry.ended().map_or(&[][..], |ended| &ended.residue);
    node.metrics.count_residue(&found, before);
    let by = found
        .iter()
        .any(|r| r.kind == ResidueKind::Process)
        .then_some(ReclaimedBy::Agent);
    note(node, key, |entry| {
        if let State::Ended(ended) = &mut entry.state {
            ended.residue = audit::merge(std::mem::take(&mut ended.residue), found);
            ended.reclaimed_by = ended.reclaimed_by.or(by);
            done(ended, now.wall);
        }
    });
    Ok(())
}

/// Whether something is still dying with its injector, and is given more time.
fn is_dying(node: &mut Node, entry: &Entry, now: Now) -> bool {
    if !audit::is_dying(node, entry) {
        node.dying.remove(&entry.key);
        return false;
    }
    let since = *node.dying.entry(entry.key.clone()).or_insert(now.boot);
    now.boot < since + DYING
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;
    use crate::{
        model::Window,
        supervisor::Supervisor,
        testing::{self, container_entry},
    };

    /// A node whose injectors cannot be started, which is remembered.
    fn node(journal: &std::path::Path) -> Node {
        testing::node(journal).with_supervisor(Supervisor::new("/nowhere"))
    }

    #[test]
    fn nothing_is_started_that_cannot_be_written_down() {
        let directory = tempfile::tempdir().unwrap();
        let journal = directory.path().join("journal");
        let mut node = node(&journal);
        let mut entry = container_entry("a");
        let window = Window {
            begin: Duration::ZERO,
            end: Duration::from_mins(1),
        };
        entry.window = Some(window);
        let key = entry.key.clone();
        node.journal.write(entry).unwrap();
        let mut inject = |boot| {
            let steps = vec![Step::Inject {
                key: key.clone(),
                table: None,
            }];
            let decision = Decision {
                steps,
                wake_at: None,
            };
            let now = Now {
                boot: Duration::from_secs(boot),
                wall: Timestamp::UNIX_EPOCH,
            };
            assert!(act(&mut node, decision, || now).has_failed);
            let observed = node.observe(now.boot);
            assert_eq!(observed.entries[&key].state, State::Prepared);
            observed
        };
        let away = directory.path().join("away");
        fs::rename(&journal, &away).unwrap();
        for boot in [1, 2] {
            let observed = inject(boot);
            assert_eq!(observed.unstarted, [].into(), "nothing was tried");
            let held_up = &observed.unwritten[&key];
            assert_eq!(held_up.since, Duration::from_secs(1));
            let why = "No such file or directory";
            assert!(held_up.message.contains(why), "{held_up:?}");
        }
        fs::rename(&away, &journal).unwrap();
        let observed = inject(3);
        assert!(observed.unstarted.contains_key(&key), "it is tried");
    }
}
