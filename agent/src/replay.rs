//! What an agent does first: it ends what the agent before it had begun. Nothing is re-injected. And
//! what it does last, since it does not know of any agent after it.

use std::{thread, time::Duration};

use windtunnel_crds::{injection::TargetState, residue::ReclaimedBy};
use windtunnel_runtime::chain;

use crate::{
    act::{self, ActError},
    decide::{Decision, Now, RESTARTED, Step},
    impair, inject,
    kernel::proc::{ProcError, ProcessId},
    model::{Counts, Ended, Entry, State},
    node::Node,
    prepare,
};

/// Between two looks at what is not empty yet.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a killed injector may take to be gone.
const KILLED: Duration = Duration::from_secs(2);

/// Ends every entry that is not ended. One that cannot be ended stops no other, and is tried again
/// by the passes that follow.
pub fn replay(node: &mut Node, now: Now) {
    check_anew(node, now);
    take_back(node, now, None);
}

/// Ends what this agent has begun, and removes what is inert by then: nobody else may. Returns by
/// `until`, on the boot clock, or soon after.
pub fn leave(node: &mut Node, clock: impl Fn() -> Now, until: Duration) {
    node.supervisor.end_all(KILLED);
    take_back(node, clock(), Some(ReclaimedBy::Agent));
    loop {
        let entries = node.journal.entries().values();
        let unchecked = entries.filter(|e| e.ended().is_some_and(|ended| ended.checked.is_none()));
        let unchecked: Vec<Entry> = unchecked.cloned().collect();
        let is_last = clock().boot >= until;
        if is_last {
            // What waits in a queue goes with it.
            for entry in &unchecked {
                if let (Ok(Some(netns)), Some(network)) = (act::netns(node, entry), entry.network())
                {
                    // The check says what is left.
                    let _ = impair::remove(&netns, &act::detours(node, entry, network), true);
                }
            }
        }
        let steps: Vec<Step> = unchecked
            .into_iter()
            .map(|entry| Step::Clean { key: entry.key })
            .collect();
        let is_done = is_last || steps.is_empty();
        let decision = Decision {
            steps,
            wake_at: None,
        };
        act::act(node, decision, &clock);
        if is_done {
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// Ends every entry that is not ended, by whom is said where the journal alone does not tell.
fn take_back(node: &mut Node, now: Now, by: Option<ReclaimedBy>) {
    let open: Vec<Entry> = node
        .journal
        .entries()
        .values()
        .filter(|e| e.ended().is_none())
        .cloned()
        .collect();
    for entry in open {
        let key = entry.key.clone();
        tracing::info!(?key, "taking back what is in place");
        if entry.state == State::Prepared && entry.injected_before.is_none() {
            // It had no effect yet: as if it had never been prepared.
            prepare::undo(node, &entry);
        }
        let Some(entry) = node.journal.entries().get(&key).cloned() else {
            continue;
        };
        if by.is_none() {
            node.metrics.journal_replays.inc();
        }
        if let Err(error) = end(node, entry, now, by) {
            tracing::warn!(error = chain(&error), ?key, "cannot take back a fault");
        }
    }
}

/// What had ended before a reboot is checked anew: its times are of a clock that has begun anew.
fn check_anew(node: &mut Node, now: Now) {
    let entries = node.journal.entries().values();
    let mut before: Vec<Entry> = entries
        .filter(|e| e.boot_id != node.boot_id)
        // Once: what it is given then is of this clock.
        .filter(|e| e.ended().is_some_and(|ended| ended.ended_at > now.boot))
        .cloned()
        .collect();
    for entry in &mut before {
        if let State::Ended(ended) = &mut entry.state {
            ended.ended_at = now.boot;
            ended.checked = None;
            node.journal.note(entry.clone());
        }
    }
}

fn end(
    node: &mut Node,
    mut entry: Entry,
    now: Now,
    by: Option<ReclaimedBy>,
) -> Result<(), ActError> {
    let is_same_boot = entry.boot_id == node.boot_id;
    let killed = match entry.injector() {
        Some(process) if is_same_boot => kill(node, process)?,
        _ => false,
    };
    let mut ended = outlived(&entry, &node.boot_id, killed, now);
    ended.reclaimed_by = ended.reclaimed_by.map(|found| by.unwrap_or(found));
    node.metrics.count_end(&ended);
    entry.state = State::Ended(ended);
    node.journal.note(entry);
    Ok(())
}

/// How an entry ended whose agent died; `killed`: its injector was still alive.
#[must_use]
pub fn outlived(entry: &Entry, boot_id: &str, killed: bool, now: Now) -> Ended {
    let injected_at = entry.injected_at();
    let begun = injected_at.is_some() || !matches!(entry.state, State::Prepared);
    let (outcome, reason, message) = if !begun {
        (
            TargetState::Failed,
            RESTARTED,
            "the agent ended before the fault was injected",
        )
    } else if entry.boot_id == boot_id {
        (
            TargetState::Interrupted,
            RESTARTED,
            "the agent ended, and the fault with it",
        )
    } else {
        (
            TargetState::Interrupted,
            "NodeRebooted",
            "the node was rebooted; the fault ended with it",
        )
    };
    Ended {
        outcome,
        reason: reason.to_owned(),
        message: message.to_owned(),
        reclaimed_by: begun.then_some(if killed {
            ReclaimedBy::Journal
        } else {
            ReclaimedBy::Kernel
        }),
        injected_at,
        reverted_at: now.wall,
        ended_at: now.boot,
        counts: Counts::default(),
        checked: None,
        rechecked: None,
        residue: Vec::new(),
    }
}

/// Kills an injector that outlived its agent; true if there was one. Waits until it is gone. Whatever the
/// journal says, nothing else is killed.
fn kill(node: &Node, process: ProcessId) -> Result<bool, ProcError> {
    let proc = &node.settings.places.proc;
    let Some(handle) = proc.open(process)? else {
        return Ok(false);
    };
    // One that is dying has no arguments any more.
    if inject::is_one(proc, process.pid) {
        handle.kill()?;
    } else if !proc.is_dying(process.pid) {
        return Ok(false);
    }
    // The checks that follow find one that is still there.
    let _ = handle.ends_within(KILLED);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::process::CommandExt as _,
        process::{Command, Stdio},
    };

    use jiff::Timestamp;

    use super::*;
    use crate::{
        journal::Journal,
        kernel::proc::Proc,
        testing::{container_entry, node},
    };

    #[test]
    fn what_had_ended_before_a_reboot_is_checked_anew() {
        let directory = tempfile::tempdir().unwrap();
        let late = Now {
            boot: Duration::from_hours(24 * 365),
            wall: Timestamp::UNIX_EPOCH,
        };
        let own = Proc::default().boot_id().unwrap();
        for (boot_id, is_checked) in [(own.as_str(), true), ("before", false)] {
            let mut entry = container_entry(boot_id);
            entry.boot_id = boot_id.to_owned();
            let mut ended = outlived(&entry, boot_id, false, late);
            ended.checked = Some((late.wall, late.boot));
            entry.state = State::Ended(ended);
            let (mut journal, _) = Journal::open(directory.path()).unwrap();
            journal.write(entry.clone()).unwrap();
            drop(journal);
            let node = node(directory.path());
            let ended = node.journal.entries()[&entry.key].ended().unwrap();
            assert_eq!(ended.checked.is_some(), is_checked, "{boot_id}");
            assert_eq!(ended.ended_at < late.boot, !is_checked, "{boot_id}");
        }
    }

    /// What the journal names may be anybody.
    #[test]
    fn only_an_injector_is_killed() {
        for name in ["/proc/self/exe", "another"] {
            let directory = tempfile::tempdir().unwrap();
            let script = directory.path().join("inject");
            fs::write(&script, "read line").unwrap();
            let mut child = Command::new("sh")
                .arg0(name)
                .arg("inject")
                .current_dir(directory.path())
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let mut injector = Proc::default().identify(pid).unwrap().unwrap();
            injector.start_time += u64::from(name != "another");
            let mut entry = container_entry("a");
            entry.boot_id = Proc::default().boot_id().unwrap();
            entry.state = State::Injecting { injector };
            let place = directory.path().join("journal");
            let (mut journal, _) = Journal::open(&place).unwrap();
            journal.write(entry.clone()).unwrap();
            drop(journal);
            let node = node(&place);
            let ended = node.journal.entries()[&entry.key].ended().unwrap();
            assert_eq!(ended.reclaimed_by, Some(ReclaimedBy::Kernel));
            assert_eq!(ended.outcome, TargetState::Interrupted);
            assert_eq!(child.try_wait().unwrap(), None);
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
