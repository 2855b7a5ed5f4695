//! What the operator is told of an injection: made from the journal, the injectors and what
//! Prepare found, and from nothing that was told before.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt as _;
use windtunnel_crds::{
    NodeInjection, NodeInjectionStatus,
    injection::{InjectionPhase, NodeFault, NodeTarget, TargetState, TargetStatus},
};

use super::{
    Decision, HOLD, Now, Observed, Preparation, RESTARTED, Step, checks, combine, keys, overlap,
};
use crate::{
    journal::UNWRITABLE,
    model::{Counts, Ended, Entry, Key, State},
};

/// The reason of a target that was not injected before its run was ended.
pub(super) const NEVER_INJECTED: &str = "NeverInjected";

/// Tells the operator what is new; waits a moment where more is about to follow.
pub(super) fn advance(
    o: &Observed,
    uid: &str,
    injection: &NodeInjection,
    now: Now,
    decision: &mut Decision,
) {
    let Some(status) = news(o, uid, injection) else {
        return;
    };
    let pending_since = o.reports.get(uid).and_then(|r| r.pending_since);
    let since = pending_since.unwrap_or(now.boot);
    if in_motion(o, uid, now) && now.boot < since + HOLD {
        return decision.wake(since + HOLD);
    }
    decision.push(Step::Report {
        injection: uid.to_owned(),
        name: injection.name_any(),
        status: Box::new(status),
    });
}

/// What the operator is to be told of an injection; `None` where it knows.
pub(super) fn news(
    o: &Observed,
    uid: &str,
    injection: &NodeInjection,
) -> Option<NodeInjectionStatus> {
    let status = status(o, uid, injection)?;
    let told = o.reports.get(uid).and_then(|r| r.status.as_ref());
    let known = told.or(injection.status.as_ref());
    known
        .is_none_or(|known| is_news(known, &status))
        .then_some(status)
}

/// Counters alone are no news: they go with the heartbeat.
fn is_news(known: &NodeInjectionStatus, new: &NodeInjectionStatus) -> bool {
    let without_counts = |status: &NodeInjectionStatus| {
        let mut status = status.clone();
        for target in &mut status.targets {
            if !target.state.is_final() {
                target.matched_packets = None;
                target.queue_drops = None;
                target.effect.clear();
            }
        }
        status
    };
    without_counts(known) != without_counts(new)
}

/// Something of this injection is between two states.
fn in_motion(o: &Observed, uid: &str, now: Now) -> bool {
    o.entries
        .values()
        .filter(|e| e.key.injection == uid)
        .any(|entry| match &entry.state {
            State::Injecting { .. } => true,
            State::Waiting { .. } => false,
            State::Ended(ended) => ended.checked.is_none(),
            State::Injected { .. } => o.kills.contains_key(&entry.key),
            State::Prepared => is_due(o, entry, now),
        })
}

/// A target that is about to be injected.
fn is_due(o: &Observed, entry: &Entry, now: Now) -> bool {
    let has_started = o
        .injection(&entry.key.injection)
        .is_some_and(|i| i.spec.start_time.is_some());
    has_started && entry.window.is_none_or(|w| now.boot >= w.begin)
}

/// The status of an injection; `None` while there is nothing to say.
fn status(o: &Observed, uid: &str, injection: &NodeInjection) -> Option<NodeInjectionStatus> {
    let prepared = o.preparations.get(uid);
    let has_entries = o.entries.keys().any(|key| key.injection == uid);
    let ended_before = injection.spec.abort || injection.spec.start_time.is_some();
    if prepared.is_none() && !has_entries && !ended_before {
        return None;
    }
    let mut targets = Vec::new();
    for fault in &injection.spec.faults {
        for target in &fault.targets {
            targets.push(target_status(o, uid, injection, (fault, target)));
        }
    }
    targets.sort_by(|a, b| (&a.fault, &a.pod_uid).cmp(&(&b.fault, &b.pod_uid)));
    let refusal = prepared.filter(|_| !ended_before).and_then(refused);
    let phase = phase(injection, &targets, refusal.is_some());
    let (reason, message) = refusal.unwrap_or_default();
    Some(NodeInjectionStatus {
        phase,
        boot_id: o.boot_id.clone(),
        observed_generation: prepared
            .and_then(|p| p.generation)
            .filter(|_| !ended_before)
            .or(injection.metadata.generation),
        reason,
        message,
        audit: checks::audit(o, uid, injection, phase),
        targets,
    })
}

/// The first reason against an injection.
fn refused(preparation: &Preparation) -> Option<(String, String)> {
    let against = preparation
        .verdicts
        .iter()
        .find(|v| v.state == TargetState::Failed)?;
    Some((against.reason.clone(), against.message.clone()))
}

fn phase(injection: &NodeInjection, targets: &[TargetStatus], is_refused: bool) -> InjectionPhase {
    let is_over = targets.iter().all(|t| t.state.is_final());
    let has_begun = targets
        .iter()
        .any(|t| t.state.is_final() || t.injected_at.is_some());
    let is_wanted = injection.spec.start_time.is_some() || injection.spec.abort;
    match () {
        () if is_refused => InjectionPhase::Refused,
        () if is_over && is_wanted => InjectionPhase::Recovered,
        () if has_begun && is_wanted => InjectionPhase::Running,
        () => InjectionPhase::Prepared,
    }
}

fn target_status(
    o: &Observed,
    uid: &str,
    injection: &NodeInjection,
    (fault, target): (&NodeFault, &NodeTarget),
) -> TargetStatus {
    let parts = keys(uid, fault, target)
        .into_iter()
        .map(|key| part_status(o, &key, injection, target));
    as_told(injection, combine::combine(parts.collect()))
}

/// What was told stands. The agent before may have known more than it could write down: a journal
/// that was full then says of what had ended that it was in place when that agent died.
fn as_told(injection: &NodeInjection, status: TargetStatus) -> TargetStatus {
    let told = told(injection, &status).filter(|told| told.injected_at.is_some());
    match told {
        Some(told) if status.reason == RESTARTED && told.state.is_final() => told.clone(),
        Some(told) if status.reason == RESTARTED && status.injected_at.is_none() => TargetStatus {
            injected_at: told.injected_at.clone(),
            ..status
        },
        _ => status,
    }
}

/// What was last told of a target.
fn told<'a>(injection: &'a NodeInjection, target: &TargetStatus) -> Option<&'a TargetStatus> {
    let mut all = injection.status.iter().flat_map(|s| &s.targets);
    all.find(|told| told.fault == target.fault && told.pod_uid == target.pod_uid)
}

/// The status of one entry: a target's only one, or that of one of its containers.
fn part_status(
    o: &Observed,
    key: &Key,
    injection: &NodeInjection,
    target: &NodeTarget,
) -> TargetStatus {
    let base = TargetStatus {
        fault: key.fault.clone(),
        pod_name: target.pod_name.clone(),
        pod_uid: target.pod_uid.clone(),
        ..TargetStatus::default()
    };
    if let Some(entry) = o.entries.get(key) {
        return from_entry(o, entry, base);
    }
    let prepared = o.preparations.get(&key.injection);
    let verdicts = prepared.map_or(&[][..], |p| &p.verdicts);
    if let Some(verdict) = verdicts
        .iter()
        .find(|v| v.fault == key.fault && v.pod_uid == key.pod)
        // What a dry run could have injected is over with it: there is no entry to say so.
        .filter(|v| v.state.is_final() || !injection.spec.abort)
    {
        return verdict.clone();
    }
    without_entry(o, injection, base)
}

/// A target that the journal does not know: nothing of it is in place.
fn without_entry(o: &Observed, injection: &NodeInjection, base: TargetStatus) -> TargetStatus {
    let boot_id = injection.status.as_ref().map(|s| s.boot_id.as_str());
    let is_rebooted = boot_id.is_some_and(|id| !id.is_empty() && id != o.boot_id);
    let (reason, message) = if is_rebooted {
        (
            "NodeRebooted",
            "the node was rebooted; the fault ended with it",
        )
    } else {
        (
            "JournalLost",
            "the node's journal does not know the fault any more; it ended with the agent before",
        )
    };
    match told(injection, &base) {
        Some(before) if before.state.is_final() => before.clone(),
        Some(before) if before.injected_at.is_some() => TargetStatus {
            state: TargetState::Interrupted,
            reason: reason.to_owned(),
            message: message.to_owned(),
            reclaimed_by: Some(windtunnel_crds::residue::ReclaimedBy::Kernel),
            ..before.clone()
        },
        _ if injection.spec.abort => TargetStatus {
            state: TargetState::Recovered,
            reason: NEVER_INJECTED.to_owned(),
            ..base
        },
        _ if injection.spec.start_time.is_some() => TargetStatus {
            state: TargetState::Failed,
            reason: "StartMissed".to_owned(),
            message: "this node had not prepared the target when the run started".to_owned(),
            ..base
        },
        _ => base,
    }
}

fn from_entry(o: &Observed, entry: &Entry, base: TargetStatus) -> TargetStatus {
    let live = o.live.get(&entry.key);
    let counts = live.map(|l| l.counts.clone()).unwrap_or_default();
    let counts = counts.after(&entry.counts_before);
    match &entry.state {
        State::Injecting { .. } | State::Prepared if entry.injected_before.is_some() => {
            TargetStatus {
                state: TargetState::Injected,
                reason: "ContainerRestarting".to_owned(),
                injected_at: entry.injected_at().map(MicroTime),
                ..base
            }
        }
        State::Prepared => {
            // It is due, and waits for the journal.
            let (reason, message) = match o.unwritten.get(&entry.key) {
                Some(held_up) => (UNWRITABLE.to_owned(), held_up.message.clone()),
                None => Default::default(),
            };
            TargetStatus {
                state: TargetState::Prepared,
                reason,
                message,
                ..base
            }
        }
        State::Injecting { .. } => TargetStatus {
            state: TargetState::Prepared,
            reason: "Injecting".to_owned(),
            ..base
        },
        State::Injected { .. } => TargetStatus {
            state: TargetState::Injected,
            reason: ending(o, entry).to_owned(),
            message: notes(o, entry),
            injected_at: entry.injected_at().map(MicroTime),
            ..counted(entry, counts, base)
        },
        State::Waiting { .. } => TargetStatus {
            // One that was never seen in place is not claimed to be.
            state: if entry.injected_before.is_some() {
                TargetState::Injected
            } else {
                TargetState::Prepared
            },
            reason: "ContainerRestarting".to_owned(),
            injected_at: entry.injected_at().map(MicroTime),
            ..base
        },
        State::Ended(ended) => from_end(entry, ended, base),
    }
}

/// Why a fault that was in place may not be any more.
fn ending(o: &Observed, entry: &Entry) -> &'static str {
    let live = o.live.get(&entry.key);
    let is_ending = live.is_some_and(|live| super::sandbox::is_ending(o, &entry.key, live));
    if is_ending { "PodEnding" } else { "" }
}

/// What there is to know of a fault in place.
fn notes(o: &Observed, entry: &Entry) -> String {
    let note = o.live.get(&entry.key).map(|live| live.note.clone());
    let note = note.filter(|note| !note.is_empty());
    let notes: Vec<String> = note.into_iter().chain(overlap::told(o, entry)).collect();
    notes.join("; ")
}

fn from_end(entry: &Entry, ended: &Ended, base: TargetStatus) -> TargetStatus {
    let Ended {
        outcome,
        reason,
        message,
        reclaimed_by,
        injected_at,
        reverted_at,
        ended_at: _,
        counts,
        checked: _,
        rechecked: _,
        residue: _,
    } = ended;
    let base = if injected_at.is_some() {
        counted(entry, counts.clone(), base)
    } else {
        base
    };
    TargetStatus {
        state: *outcome,
        reason: reason.clone(),
        message: message.clone(),
        injected_at: injected_at.map(MicroTime),
        reverted_at: Some(MicroTime(*reverted_at)),
        reclaimed_by: *reclaimed_by,
        ..base
    }
}

fn counted(entry: &Entry, counts: Counts, base: TargetStatus) -> TargetStatus {
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    TargetStatus {
        matched_packets: entry.network().map(|_| number(counts.matched)),
        effect: counts
            .effect
            .into_iter()
            .map(|(name, n)| (name, number(n)))
            .collect(),
        queue_drops: counts.dropped.and_then(|d| i64::try_from(d).ok()),
        ..base
    }
}
