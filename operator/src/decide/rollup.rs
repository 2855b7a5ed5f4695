//! From what the nodes reported to the experiment's status: counts, conditions, one sentence.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use windtunnel_crds::{
    ChaosExperimentStatus,
    conditions::{ConditionStatus as Is, ConditionType, condition, set_condition},
    fault::{Fault, Kind},
    injection::{TargetState, TargetStatus},
    status::{DrawnPod, FaultPhase, FaultStatus, Summary},
};

use super::{
    Agent, Observed,
    cleanup::{self, NOBODY_REPORTS, RESIDUE, Verdict, WITHDRAWN},
    plan,
};

/// The longest name of a counter, and how many a fault may have.
const COUNTER: usize = 32;
const COUNTERS: usize = 16;

/// A target as the operator can honestly speak of it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen<'a> {
    /// As its agent reported it.
    Reported(&'a TargetStatus),
    /// Its agent has not reported on it yet.
    NotYet,
    /// Its agent is silent; what it last said, if anything.
    Unknown(Option<&'a TargetStatus>),
    /// Somebody deleted the node injection: whatever was in place is being taken back, and nobody
    /// can say so.
    Lost,
}

impl<'a> Seen<'a> {
    fn status(self) -> Option<&'a TargetStatus> {
        match self {
            Self::Reported(status) | Self::Unknown(Some(status)) => Some(status),
            _ => None,
        }
    }

    fn was_injected(self) -> bool {
        self.status().is_some_and(|s| s.injected_at.is_some())
    }

    fn is_final(self) -> bool {
        self == Self::Lost || self.status().is_some_and(|s| s.state.is_final())
    }

    fn ended_early(self) -> bool {
        let is_early =
            |s: &TargetStatus| s.state == TargetState::Interrupted || s.interrupted_at.is_some();
        self == Self::Lost || self.status().is_some_and(is_early)
    }

    fn is_state(self, state: TargetState) -> bool {
        self.status().is_some_and(|s| s.state == state)
    }
}

/// One fault with all its targets.
struct Part<'a> {
    fault: &'a Fault,
    open: bool,
    /// It had ended everywhere before; what it was is not judged anew.
    settled: bool,
    targets: Vec<Seen<'a>>,
}

/// Brings counts, conditions and summary of a run that has started or been prepared up to date.
pub(crate) fn roll_up(observed: &Observed, status: &mut ChaosExperimentStatus, now: Timestamp) {
    let parts = parts(observed, status, now);
    for part in &parts {
        if let Some(fault) = status.faults.iter_mut().find(|f| f.name == part.fault.name) {
            count(observed, part, fault);
        }
    }
    let targets = parts.iter().flat_map(|part| &part.targets);
    cleanup::note_reclaimed(targets.filter_map(|t| t.status()?.reclaimed_by), status);
    let faults = status.faults.clone();
    let generation = observed.experiment.metadata.generation;
    let mut set =
        |type_, condition| set_condition(&mut status.conditions, type_, condition, generation, now);
    if let Some(verdict) = injected(&parts, &faults) {
        set(ConditionType::Injected, verdict);
    }
    set(ConditionType::Recovered, recovered(&parts));
    cleanup::check(observed, status, now);
    summarize(status);
}

fn parts<'a>(
    observed: &'a Observed,
    status: &ChaosExperimentStatus,
    now: Timestamp,
) -> Vec<Part<'a>> {
    let start = status.start_time.as_ref().map(|t| t.0);
    plan::node_faults(&observed.experiment)
        .map(|fault| {
            let begins = start.map(|start| plan::at(start, fault.start_after.unwrap_or_default()));
            let progress = status.faults.iter().find(|f| f.name == fault.name);
            let settled = progress.is_some_and(|f| f.phase == FaultPhase::Ended);
            let draw = progress.into_iter().flat_map(|f| &f.draw);
            Part {
                fault,
                open: begins.is_some_and(|begins| now >= begins),
                settled,
                targets: draw
                    .map(|pod| see(observed, &fault.name, pod))
                    .filter(|seen| !(settled && *seen == Seen::Lost))
                    .collect(),
            }
        })
        .collect()
}

fn see<'a>(observed: &'a Observed, fault: &str, pod: &DrawnPod) -> Seen<'a> {
    let Some(injection) = observed
        .injections
        .iter()
        .find(|i| i.spec.node_name == pod.node)
    else {
        return Seen::Lost;
    };
    let status = injection.status.iter().flat_map(|s| &s.targets);
    let status = status
        .into_iter()
        .find(|t| t.fault == fault && t.pod_uid == pod.uid);
    let silent = observed
        .fleet
        .get(&pod.node)
        .is_none_or(|agent| !agent.live);
    match status {
        // What has ended stays so whoever is silent.
        Some(status) if status.state.is_final() || !silent => Seen::Reported(status),
        _ if silent => Seen::Unknown(status),
        _ => Seen::NotYet,
    }
}

/// Counts only grow: they are of what was once reported.
fn count(observed: &Observed, part: &Part<'_>, fault: &mut FaultStatus) {
    let of = |test: &dyn Fn(Seen<'_>) -> bool| {
        u32::try_from(part.targets.iter().filter(|t| test(**t)).count()).unwrap_or(u32::MAX)
    };
    fault.desired = u32::try_from(fault.draw.len()).unwrap_or(u32::MAX);
    fault.injected = of(&|t| t.was_injected()).max(fault.injected);
    fault.recovered = of(&|t| t.was_injected() && t.is_final()).max(fault.recovered);
    fault.interrupted = of(&|t| t.ended_early());
    fault.failed = of(&|t| t.is_state(TargetState::Failed));
    let ended = part.targets.iter().all(|t| t.is_final());
    fault.phase = match () {
        () if fault.interrupted + fault.failed > 0 => FaultPhase::Failed,
        () if ended => FaultPhase::Ended,
        () if part.open || fault.injected > 0 => FaultPhase::Active,
        () => FaultPhase::Pending,
    };
    let is_network = matches!(part.fault.kind(), Some(Kind::Network(_)));
    if fault.injected > 0 && is_network {
        let matched = matched(observed, part, fault).max(fault.matched_packets.unwrap_or(0));
        fault.matched_packets = Some(matched);
    } else if fault.injected > 0 {
        measure(observed, part, fault);
    }
    fault.message = message(part, fault);
}

/// Packets matched so far: the injections' reports and the agents' heartbeats, whichever is newer
/// (both only grow).
fn matched(observed: &Observed, part: &Part<'_>, fault: &FaultStatus) -> i64 {
    let reported = part.targets.iter();
    let reported = reported.filter_map(|t| t.status()?.matched_packets);
    let reported = reported.fold(0, i64::saturating_add);
    let uid = observed.experiment.metadata.uid.clone().unwrap_or_default();
    let key = (uid, part.fault.name.clone());
    let alive = agents(observed, fault)
        .into_iter()
        .filter_map(|agent| agent.matched.get(&key));
    reported.max(alive.fold(0, |all, n| all.saturating_add(*n)))
}

/// What a fault on containers was measured to do: by the heartbeats while it is in place, then as
/// it was when it ended.
fn measure(observed: &Observed, part: &Part<'_>, fault: &mut FaultStatus) {
    let uid = observed.experiment.metadata.uid.clone().unwrap_or_default();
    let key = (uid, part.fault.name.clone());
    let open = part.targets.iter().any(|t| !t.is_final());
    let alive = agents(observed, fault)
        .into_iter()
        .filter_map(|a| a.effects.get(&key));
    let reported = part.targets.iter().filter_map(|t| t.status());
    let mut sum = BTreeMap::new();
    let all: Vec<_> = if open {
        alive.flatten().collect()
    } else {
        reported.flat_map(|t| &t.effect).collect()
    };
    for (name, value) in all.into_iter().filter(|(name, _)| name.len() <= COUNTER) {
        let counter: &mut i64 = sum.entry(name.clone()).or_default();
        *counter = counter.saturating_add(*value);
    }
    // The first of them in the alphabet: an agent has a few.
    let sum: BTreeMap<_, _> = sum.into_iter().take(COUNTERS).collect();
    if !sum.is_empty() {
        fault.effect = sum;
    }
}

/// The agents of the nodes that a fault is on: what others say of it is none of their business.
fn agents<'a>(observed: &'a Observed, fault: &FaultStatus) -> Vec<&'a Agent> {
    let nodes: BTreeSet<&str> = fault.draw.iter().map(|pod| pod.node.as_str()).collect();
    let found = nodes.iter().filter_map(|node| observed.fleet.get(*node));
    found.collect()
}

fn message(part: &Part<'_>, fault: &FaultStatus) -> String {
    let troubled = |t: &&TargetStatus| {
        matches!(t.state, TargetState::Failed | TargetState::Interrupted)
            || (!t.state.is_final() && !t.message.is_empty())
    };
    let statuses: Vec<&TargetStatus> = part.targets.iter().filter_map(|t| t.status()).collect();
    if let Some(status) = statuses.iter().copied().find(troubled) {
        let what = if status.message.is_empty() {
            &status.reason
        } else {
            &status.message
        };
        return format!("pod {}: {what}", status.pod_name);
    }
    if part.targets.contains(&Seen::Lost) {
        return NOBODY_REPORTS.to_owned();
    }
    if part.targets.iter().any(|t| matches!(t, Seen::Unknown(_))) {
        return "the agent of a target's node is silent; the fault's state is not known".to_owned();
    }
    let drops: i64 = statuses.iter().filter_map(|t| t.queue_drops).sum();
    match fault.matched_packets {
        Some(0) => "in place, but no packet matched so far".to_owned(),
        Some(matched) if drops > 0 => format!(
            "{matched} packets matched, {drops} of them dropped because the delay queue was full"
        ),
        Some(matched) => format!("{matched} packets matched"),
        None => {
            let counters = fault.effect.iter().map(|(name, n)| format!("{name} {n}"));
            counters.collect::<Vec<_>>().join(", ")
        }
    }
}

/// Whether every window opened so far was read back on every target.
///
/// `None`: as was said before.
fn injected(parts: &[Part<'_>], faults: &[FaultStatus]) -> Option<Verdict> {
    let open: Vec<&Part<'_>> = parts
        .iter()
        .filter(|p| p.open || p.targets.iter().any(|t| t.was_injected()))
        .collect();
    let targets = || open.iter().flat_map(|p| p.targets.iter().copied());
    let is_kill = |f: &&FaultStatus| !parts.iter().any(|p| p.fault.name == f.name);
    let kills: Vec<&FaultStatus> = faults.iter().filter(is_kill).collect();
    if let Some(verdict) = failure(targets(), &kills) {
        return Some(verdict);
    }
    let counted: Vec<Seen<'_>> = targets()
        .filter(|t| t.was_injected() || !t.is_state(TargetState::Gone))
        .collect();
    let drawn = kills.iter().filter(|f| f.drawn_at.is_some());
    let (desired, killed) = drawn.fold((0, 0), |(desired, killed), f| {
        (desired + f.desired as usize, killed + f.injected as usize)
    });
    let total = counted.len() + desired;
    let done = counted.iter().filter(|t| t.was_injected()).count() + killed;
    let message = format!("read back on {done} of {total} targets of the windows opened so far");
    match (total, done) {
        (0, _) if parts.iter().any(|p| p.settled && p.targets.is_empty()) => None,
        (0, _) if targets().next().is_some() => Some((
            Is::False,
            "TargetsGone",
            "every target was gone before its window opened".to_owned(),
        )),
        (0, _) => Some((Is::False, "NotDue", "no window has opened yet".to_owned())),
        (total, done) if done == total => Some((Is::True, "ReadBack", message)),
        _ => Some((Is::False, "Injecting", message)),
    }
}

/// What has gone wrong with a fault, if anything has.
fn failure<'a>(
    mut targets: impl Iterator<Item = Seen<'a>> + Clone,
    kills: &[&FaultStatus],
) -> Option<Verdict> {
    if let Some(t) = targets.clone().find(|t| t.ended_early()) {
        let message = told(t, "a fault ended before its time");
        return Some((Is::False, "Interrupted", message));
    }
    if let Some(t) = targets.find(|t| t.is_state(TargetState::Failed)) {
        let message = told(t, "a fault could not be injected");
        return Some((Is::False, "Failed", message));
    }
    let failed = kills.iter().find(|f| f.phase == FaultPhase::Failed)?;
    let message = format!("fault {}: {}", failed.name, failed.message);
    Some((Is::False, "Failed", message))
}

fn told(seen: Seen<'_>, otherwise: &str) -> String {
    match seen.status() {
        Some(status) if !status.message.is_empty() => {
            format!("pod {}: {}", status.pod_name, status.message)
        }
        Some(status) => format!("pod {}: {otherwise}", status.pod_name),
        None => otherwise.to_owned(),
    }
}

/// Whether every fault has ended on every target.
fn recovered(parts: &[Part<'_>]) -> Verdict {
    let targets = || parts.iter().flat_map(|p| p.targets.iter().copied());
    if targets().any(|t| t == Seen::Lost) {
        return (Is::Unknown, WITHDRAWN, NOBODY_REPORTS.to_owned());
    }
    let unknown = targets().filter(|t| matches!(t, Seen::Unknown(_))).count();
    if unknown > 0 {
        let message = format!("of {unknown} targets the agent is silent");
        return (Is::Unknown, "AgentSilent", message);
    }
    let injected = targets().filter(|t| t.was_injected()).count();
    let ended = targets()
        .filter(|t| t.was_injected() && t.is_final())
        .count();
    let message = format!("ended on {ended} of {injected} targets injected so far");
    match targets().all(Seen::is_final) {
        true if injected == 0 => {
            let message = "nothing was injected on a node".to_owned();
            (Is::True, "NothingToUndo", message)
        }
        true => (Is::True, "Recovered", message),
        false => (Is::False, "NotOver", message),
    }
}

/// The columns of `kubectl get`.
pub(crate) fn summarize(status: &mut ChaosExperimentStatus) {
    let sum = |pick: fn(&FaultStatus) -> u32| status.faults.iter().map(pick).sum::<u32>();
    let (desired, injected, recovered) = (
        sum(|f| f.desired),
        sum(|f| f.injected),
        sum(|f| f.recovered),
    );
    let clean = condition(&status.conditions, ConditionType::Clean);
    status.summary = Summary {
        injected: format!("{injected}/{desired}"),
        recovered: format!("{recovered}/{injected}"),
        clean: match clean.map(|c| (c.status.as_str(), c.reason.as_str())) {
            Some(("True", reason)) => reason.to_owned(),
            Some(("False", RESIDUE)) => RESIDUE.to_owned(),
            Some(("Unknown", _)) => "Unknown".to_owned(),
            _ => String::new(),
        },
        deadline: status
            .deadline
            .as_ref()
            .map(|t| t.0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
            .unwrap_or_default(),
    };
}

/// Whether everything went as asked, as far as is known. A node may have taken a fault back before it
/// was in place, by an emergency stop that no operator saw: that is not what was asked for.
pub(crate) fn is_flawless(observed: &Observed, status: &ChaosExperimentStatus) -> bool {
    status.faults.iter().all(|f| {
        let mut targets = f.draw.iter().map(|pod| see(observed, &f.name, pod));
        let withheld = targets.any(|t| t.is_state(TargetState::Recovered) && !t.was_injected());
        f.phase == FaultPhase::Ended && f.interrupted + f.failed == 0 && !withheld
    })
}

/// Whether every window has closed on every target, by report.
pub(crate) fn is_over(observed: &Observed, status: &ChaosExperimentStatus) -> bool {
    observed.experiment.spec.faults.iter().all(|fault| {
        let Some(progress) = status.faults.iter().find(|f| f.name == fault.name) else {
            return false;
        };
        match fault.kind() {
            Some(kind) if kind.is_on_node() => progress
                .draw
                .iter()
                .all(|pod| see(observed, &fault.name, pod).is_final()),
            _ => matches!(progress.phase, FaultPhase::Ended | FaultPhase::Failed),
        }
    })
}
