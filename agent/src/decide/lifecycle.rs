//! One fault on one target: Prepared → Injecting → Injected → Ended → checked → checked again.

use std::time::Duration;

use windtunnel_crds::{
    NodeInjection,
    injection::{EMERGENCY_STOP, NodeFault, TargetState},
    residue::{ReclaimedBy, has_left},
};

use super::{
    AGAIN, Decision, Kill, LATE, Now, Observed, RESTART, RESTARTED, SILENCE, Step, WAIT, sandbox,
    window::window,
};
use crate::{
    journal::UNWRITABLE,
    kernel::nft::Table,
    model::{Act, Ended, Entry, Key, Objects, State},
    network,
    supervisor::{Leave, Live},
    wire::{LEASE, Task},
};

/// How often a target that has not drained or cannot be cleaned is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// An injector that ended after so long a silence had not been renewing its lease: one that works
/// speaks every second, and an end by somebody else's hand is seen at once.
const MUTE: Duration = Duration::from_millis(1_500);

/// Adds the steps for one entry.
pub(super) fn advance(o: &Observed, key: &Key, entry: &Entry, now: Now, decision: &mut Decision) {
    match &entry.state {
        State::Prepared => prepared(o, key, entry, now, decision),
        State::Injecting { .. } | State::Injected { .. } => in_place(o, key, entry, now, decision),
        State::Waiting { since } => waiting(o, key, (entry, *since), now, decision),
        State::Ended(ended) => over(o, key, (entry, ended), now, decision),
    }
}

/// Nothing has an effect yet.
fn prepared(o: &Observed, key: &Key, entry: &Entry, now: Now, decision: &mut Decision) {
    let end = |outcome, reason: &str, message: &str| Step::End {
        key: key.clone(),
        ended: Box::new(ended(entry, outcome, (reason, message), now)),
    };
    if let Some(why) = o.forbidden(key) {
        let (_, reason, message) = words(why);
        return decision.push(end(TargetState::Recovered, reason, message));
    }
    let Some((injection, fault)) = o.fault(key) else {
        return;
    };
    let Some(window) = entry.window else {
        return match window(injection, fault, entry, now) {
            Ok(Some(window)) => decision.push(Step::Open {
                key: key.clone(),
                window,
            }),
            Ok(None) => decision.wake(entry.prepared_at + WAIT),
            Err(message) => decision.push(end(TargetState::Failed, "StartMissed", &message)),
        };
    };
    if now.boot >= window.end && entry.injected_before.is_some() {
        // It had been in place on a container that ended.
        decision.push(end(TargetState::Recovered, "", ""));
    } else if let Some(held_up) = o.unwritten.get(key)
        && !o.deserted.contains(key)
        && now.boot >= window.end.min(held_up.since + LATE)
    {
        decision.push(end(not_applied(entry), UNWRITABLE, &held_up.message));
    } else if now.boot >= window.end {
        decision.push(end(
            TargetState::Failed,
            "StartMissed",
            "the window had passed before the fault could be injected",
        ));
    } else if now.boot < window.begin {
        decision.wake(window.begin);
    } else if o.deserted.contains(key) {
        decision.push(end(
            TargetState::Gone,
            "TargetGone",
            "the pod was gone before its window opened",
        ));
    } else if let Some(message) = o.unstarted.get(key) {
        decision.push(end(not_applied(entry), "ApplyFailed", message));
    } else {
        inject(o, key, entry, (injection, fault), decision);
    }
}

/// What it means for a target that an effect could not be brought about.
fn not_applied(entry: &Entry) -> TargetState {
    if entry.injected_before.is_some() {
        TargetState::Interrupted
    } else {
        TargetState::Failed
    }
}

/// The window is open: the injector is started, on the container that is there now.
fn inject(
    o: &Observed,
    key: &Key,
    entry: &Entry,
    (injection, fault): (&NodeInjection, &NodeFault),
    decision: &mut Decision,
) {
    let key = key.clone();
    match &entry.objects {
        Objects::Network(_) => {
            if let Some(table) = rules(o, entry, (injection, fault)) {
                let table = Some(table);
                decision.push(Step::Inject { key, table });
            }
        }
        Objects::Container(container) => match o.container_id(&key) {
            Some(id) if id != container.id => {
                let id = id.to_owned();
                decision.push(Step::Follow { key, id });
            }
            _ => decision.push(Step::Inject { key, table: None }),
        },
    }
}

/// The rules of a network fault as they are to be now.
fn rules(
    o: &Observed,
    entry: &Entry,
    (injection, fault): (&NodeInjection, &NodeFault),
) -> Option<Table> {
    let dns = injection.spec.cluster_dns.iter().map(|a| a.0);
    let (held, wanted) = (entry.network()?, fault.network.as_ref()?);
    Some(network::table(held, wanted, &o.node_addresses, dns))
}

/// The container has ended, and the effect with it: its successor is followed.
fn waiting(
    o: &Observed,
    key: &Key,
    (entry, since): (&Entry, Duration),
    now: Now,
    decision: &mut Decision,
) {
    let outcome = if let Some(why) = o.forbidden(key) {
        Some(words(why))
    } else if entry.window.is_none_or(|w| now.boot >= w.end) {
        Some((TargetState::Recovered, "", ""))
    } else if o.deserted.contains(key) {
        Some(words(Kill::Deserted))
    } else if now.boot >= since + RESTART && !is_to_restart(entry) {
        Some((
            TargetState::Gone,
            "ContainerGone",
            "the container ended and none has taken its place",
        ))
    } else {
        None
    };
    if let Some(outcome) = outcome {
        let ended = Box::new(by(ReclaimedBy::Kernel, entry, outcome, now));
        let key = key.clone();
        return decision.push(Step::End { key, ended });
    }
    decision.wake((since + RESTART).max(now.boot + RETRY));
    if let Some(window) = entry.window {
        decision.wake(window.end);
    }
    let known = entry.container().map(|c| c.id.as_str());
    if let Some(id) = o.container_id(key).filter(|id| Some(*id) != known) {
        decision.push(Step::Follow {
            key: key.clone(),
            id: id.to_owned(),
        });
    }
}

/// The fault itself ends its container again and again: the runtime may take its time.
fn is_to_restart(entry: &Entry) -> bool {
    let act = entry.container().map(|c| &c.act);
    match act {
        Some(Act::Kill { every, .. }) => every.is_some(),
        Some(Act::Memory(act)) => act.most.is_none(),
        _ => false,
    }
}

/// An injector is at work, or was.
fn in_place(o: &Observed, key: &Key, entry: &Entry, now: Now, decision: &mut Decision) {
    let Some(live) = o.live.get(key) else {
        // Its agent died: the replay at this agent's start has seen to the process.
        let (reason, message) = (RESTARTED, "the agent had died; the fault ended with it");
        return decision.push(Step::End {
            key: key.clone(),
            ended: Box::new(by(
                ReclaimedBy::Kernel,
                entry,
                (TargetState::Interrupted, reason, message),
                now,
            )),
        });
    };
    if live.has_exited {
        let is_over = entry.window.is_none_or(|w| now.boot >= w.end);
        if live.leave == Some(Leave::ContainerEnded) && !is_over && !o.kills.contains_key(key) {
            return decision.push(Step::Await { key: key.clone() });
        }
        if sandbox::is_ending(o, key, live) && !is_over && !o.kills.contains_key(key) {
            return decision.wake(now.boot + RETRY);
        }
        let ended = if live.leave == Some(Leave::Done) {
            with(live, ended(entry, TargetState::Recovered, ("", ""), now))
        } else {
            exited(o, key, entry, live, now)
        };
        return decision.push(Step::End {
            key: key.clone(),
            ended: Box::new(ended),
        });
    }
    if let (State::Injecting { .. }, Some(at)) = (&entry.state, live.applied_at) {
        decision.push(Step::Confirm {
            key: key.clone(),
            at,
        });
    }
    if let Some(why) = reason_to_kill(o, key, entry, live, now) {
        // Again on every pass until it is seen to be gone: a signal costs nothing.
        return decision.push(Step::Kill {
            key: key.clone(),
            why,
        });
    }
    refresh(o, key, entry, live, decision);
    decision.wake(live.heard_at + SILENCE);
    if let Some(window) = entry.window {
        decision.wake(window.end);
    }
}

fn reason_to_kill(o: &Observed, key: &Key, entry: &Entry, live: &Live, now: Now) -> Option<Kill> {
    if let Some(why) = o.kills.get(key) {
        return Some(*why);
    }
    if entry.window.is_none_or(|w| now.boot >= w.end) {
        return Some(Kill::WindowOver);
    }
    if let Some(why) = o.forbidden(key) {
        return Some(why);
    }
    if o.deserted.contains(key) {
        return Some(Kill::Deserted);
    }
    if live.vanished.is_some() {
        return Some(Kill::Vanished);
    }
    (now.boot >= live.heard_at + SILENCE).then_some(Kill::Silent)
}

/// New peers or node addresses: other rules, once the last were confirmed.
fn refresh(o: &Observed, key: &Key, entry: &Entry, live: &Live, decision: &mut Decision) {
    if live.applied_at.is_none() || !live.is_current {
        return;
    }
    let Some((injection, fault)) = o.fault(key) else {
        return;
    };
    let Some(table) = rules(o, entry, (injection, fault)) else {
        return;
    };
    if matches!(&live.order.task, Task::Network(held) if held.table != table) {
        decision.push(Step::Update {
            key: key.clone(),
            table,
        });
    }
}

/// How an injector that has exited ended its fault.
fn exited(o: &Observed, key: &Key, entry: &Entry, live: &Live, now: Now) -> Ended {
    if live.leave == Some(Leave::PodEnded) && o.revived.contains(key) {
        let outcome = match live.applied_at {
            Some(_) => TargetState::Interrupted,
            None => not_applied(entry),
        };
        let why = (outcome, sandbox::REPLACED.0, sandbox::REPLACED.1);
        return with(live, by(ReclaimedBy::Kernel, entry, why, now));
    }
    let deserted = o.deserted.contains(key) || live.leave == Some(Leave::PodEnded);
    if let Some(message) = &live.failure {
        let outcome = if deserted {
            TargetState::Gone
        } else {
            not_applied(entry)
        };
        return with(live, ended(entry, outcome, ("ApplyFailed", message), now));
    }
    if let Some(why) = o.kills.get(key) {
        let (outcome, reason, message) = words(*why);
        let message = live
            .vanished
            .as_deref()
            .filter(|_| *why == Kill::Vanished)
            .unwrap_or(message);
        let outcome = if deserted && outcome == TargetState::Interrupted {
            TargetState::Gone
        } else {
            outcome
        };
        return with(
            live,
            by(ReclaimedBy::Agent, entry, (outcome, reason, message), now),
        );
    }
    died(entry, live, deserted, now)
}

/// How an injector ended its fault that nobody had killed and that said nothing.
fn died(entry: &Entry, live: &Live, deserted: bool, now: Now) -> Ended {
    let over = entry.window.is_some_and(|w| now.boot >= w.end);
    let is_forsaken = over || deserted || live.longest_silence >= LEASE;
    if let (Some(code), None, false) = (live.exit_code, live.applied_at, is_forsaken) {
        let message = format!("the injector ended with code {code} before its effect was there");
        let outcome = not_applied(entry);
        return with(live, ended(entry, outcome, ("ApplyFailed", &message), now));
    }
    let by_itself = live
        .exit_code
        .map(|code| format!("the injector ended by itself, with code {code}"));
    let (reclaimed, outcome, reason, message) = if over {
        (ReclaimedBy::Deadline, TargetState::Recovered, "", "")
    } else if deserted {
        (
            ReclaimedBy::Kernel,
            TargetState::Gone,
            "TargetGone",
            "the pod is gone",
        )
    } else if live.longest_silence >= LEASE {
        (
            ReclaimedBy::InjectorLease,
            TargetState::Interrupted,
            "LeaseExpired",
            "the agent had not been heard of for longer than the injector's lease",
        )
    } else if live.vanished.is_some() {
        (
            ReclaimedBy::Kernel,
            TargetState::Interrupted,
            "EffectVanished",
            live.vanished.as_deref().unwrap_or_default(),
        )
    } else if now.boot >= live.heard_at + MUTE {
        (
            ReclaimedBy::InjectorLease,
            TargetState::Interrupted,
            "InjectorSilent",
            "the injector gave no sign of life, and its own lease ended it",
        )
    } else {
        (
            ReclaimedBy::Kernel,
            TargetState::Interrupted,
            "InjectorDied",
            by_itself
                .as_deref()
                .unwrap_or("the injector was killed by somebody else"),
        )
    };
    with(live, by(reclaimed, entry, (outcome, reason, message), now))
}

/// What a kill means for the target.
fn words(why: Kill) -> (TargetState, &'static str, &'static str) {
    match why {
        Kill::WindowOver => (TargetState::Recovered, "", ""),
        Kill::Aborted => (TargetState::Recovered, "Aborted", "the run was ended"),
        Kill::Withdrawn => (
            TargetState::Recovered,
            "Withdrawn",
            "the node injection is gone",
        ),
        Kill::Stopped => (
            TargetState::Recovered,
            EMERGENCY_STOP,
            "the emergency stop is in force",
        ),
        Kill::NoControlPlane => (
            TargetState::Interrupted,
            "ControlPlaneLost",
            "the operator or the API server was not heard of for longer than the grace",
        ),
        Kill::Silent => (
            TargetState::Interrupted,
            "InjectorSilent",
            "the injector gave no sign of life and was killed",
        ),
        Kill::Vanished => (
            TargetState::Interrupted,
            "EffectVanished",
            "the effect was gone although the injector lived",
        ),
        Kill::Deserted => (TargetState::Gone, "TargetGone", "the pod is gone"),
    }
}

/// The injector is gone: what is inert is removed, then the target is checked, twice.
fn over(
    o: &Observed,
    key: &Key,
    (entry, ended): (&Entry, &Ended),
    now: Now,
    decision: &mut Decision,
) {
    if let Some(ended) = sandbox::replaced(o, key, (entry, ended), now) {
        let (key, ended) = (key.clone(), Box::new(ended));
        return decision.push(Step::End { key, ended });
    }
    let Some((_, checked_at)) = ended.checked else {
        decision.wake(now.boot + RETRY);
        return decision.push(Step::Clean { key: key.clone() });
    };
    if has_left(&ended.residue) {
        let again = checked_at + AGAIN;
        if now.boot >= again {
            decision.push(Step::Clean { key: key.clone() });
        }
        // Until it is gone, this entry is what says so.
        return decision.wake(again.max(now.boot + RETRY));
    }
    let due = checked_at + entry.recheck_after;
    let wanted = o.injections.is_none() || o.fault(key).is_some();
    if ended.rechecked.is_none() {
        if now.boot >= due {
            decision.push(Step::Recheck { key: key.clone() });
        } else {
            decision.wake(due);
        }
    } else if !wanted {
        decision.push(Step::Forget { key: key.clone() });
    }
}

/// An end as it is written down: what is known of the effect is carried along.
fn ended(entry: &Entry, outcome: TargetState, (reason, message): (&str, &str), now: Now) -> Ended {
    Ended {
        outcome,
        reason: reason.to_owned(),
        message: message.to_owned(),
        reclaimed_by: None,
        injected_at: entry.injected_at(),
        reverted_at: now.wall,
        ended_at: now.boot,
        counts: entry.counts_before.clone(),
        checked: None,
        rechecked: None,
        residue: Vec::new(),
    }
}

fn by(
    reclaimed: ReclaimedBy,
    entry: &Entry,
    (outcome, reason, message): (TargetState, &str, &str),
    now: Now,
) -> Ended {
    Ended {
        reclaimed_by: Some(reclaimed),
        ..ended(entry, outcome, (reason, message), now)
    }
}

fn with(live: &Live, ended: Ended) -> Ended {
    let before = &ended.counts;
    Ended {
        counts: live.counts.clone().after(before),
        // It may have been in place for a moment that was not written down.
        injected_at: ended.injected_at.or(live.applied_at),
        ..ended
    }
}
