//! What the nodes were found to be left with after the end, and whether they are clean.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    ChaosExperimentStatus, NodeInjection,
    conditions::{ConditionStatus as Is, ConditionType, condition, set_condition},
    injection::{Audit, InjectionPhase},
    residue::{ReclaimedBy, Residue},
    status::Cleanup,
};

use super::{Observed, plan};

/// A node was not heard of until the end: whether it is clean nobody knows.
pub(crate) const NOT_REPORTED: &str = "NotReported";
/// Something of an ended fault is left.
pub(crate) const RESIDUE: &str = "Residue";
/// A node injection was deleted by hand: nobody can report for it any more.
pub(crate) const WITHDRAWN: &str = "Withdrawn";

/// A node injection is gone before its agent has reported the end.
pub(crate) const NOBODY_REPORTS: &str = "a node injection was deleted by somebody; its agent takes its faults back, and cannot report that";

/// A condition's status, reason and message.
pub(crate) type Verdict = (Is, &'static str, String);

/// What the nodes were checked for. Reports only add to it: an injection that is gone by now has
/// reported before.
pub(crate) fn check(observed: &Observed, status: &mut ChaosExperimentStatus, now: Timestamp) {
    let injections = &observed.injections;
    // What Clean said may have given way to residue meanwhile.
    let types = [ConditionType::Clean, ConditionType::Recovered];
    let is_withdrawn = types
        .into_iter()
        .any(|type_| says(status, type_, WITHDRAWN))
        || !plan::withdrawn(observed, status).is_empty();
    if injections.is_empty() && !is_withdrawn {
        return;
    }
    let found = found(injections, status.cleanup.as_ref());
    let verdict = match clean(&found) {
        verdict if verdict.0 == Is::False && verdict.1 == RESIDUE => verdict,
        _ if is_withdrawn => (Is::Unknown, WITHDRAWN, NOBODY_REPORTS.to_owned()),
        _ if !found.not_reported.is_empty() => (
            Is::Unknown,
            NOT_REPORTED,
            nobody_has_looked(&found.not_reported),
        ),
        verdict => verdict,
    };
    let told = status.cleanup.take();
    // What was found is written down before the others are checked: its injection may go first.
    if told.is_some() || found.checked_at.is_some() || !found.residue.is_empty() {
        let told = told.unwrap_or_default();
        // That they were checked stays true, whoever does not say so any more.
        status.cleanup = Some(Cleanup {
            checked_at: found.checked_at.or(told.checked_at),
            rechecked_at: found.rechecked_at.or(told.rechecked_at),
            ..found
        });
    }
    set_condition(
        &mut status.conditions,
        ConditionType::Clean,
        verdict,
        observed.experiment.metadata.generation,
        now,
    );
}

/// Notes what took the faults back. Counts only grow: they are of what was once reported.
pub(crate) fn note_reclaimed(
    by: impl Iterator<Item = ReclaimedBy>,
    status: &mut ChaosExperimentStatus,
) {
    let mut now: BTreeMap<String, u32> = BTreeMap::new();
    for by in by {
        *now.entry(by.to_string()).or_default() += 1;
    }
    for (by, count) in now {
        let cleanup = status.cleanup.get_or_insert_default();
        let told = cleanup.reclaimed_by.entry(by).or_default();
        *told = count.max(*told);
    }
}

/// A node was not heard of until the end, and has not reported since.
pub(crate) fn is_doubted(status: &ChaosExperimentStatus) -> bool {
    let cleanup = status.cleanup.as_ref();
    cleanup.is_some_and(|cleanup| !cleanup.not_reported.is_empty())
}

/// What is known of nodes that were not heard of.
pub(crate) fn nobody_has_looked(nodes: &[String]) -> String {
    format!(
        "{} did not report within the bound; by the bounds of its agent and kernel nothing is in place there, but nobody has looked",
        nodes.join(", ")
    )
}

/// An injection's node has said that its faults are over, and that it has looked for what is left.
pub(crate) fn is_over(injection: &NodeInjection) -> bool {
    let phase = injection.status.as_ref().map(|s| s.phase);
    matches!(
        phase,
        Some(InjectionPhase::Recovered | InjectionPhase::Refused)
    ) && audit(injection).is_some_and(|a| a.checked_at.is_some())
}

/// Whether a condition is as it is for a reason.
fn says(status: &ChaosExperimentStatus, type_: ConditionType, reason: &str) -> bool {
    condition(&status.conditions, type_).is_some_and(|c| c.reason == reason)
}

/// What the checks of a node's targets found, by its own report.
pub(crate) fn audit(injection: &NodeInjection) -> Option<&Audit> {
    injection.status.as_ref()?.audit.as_ref()
}

/// What the injections say, and what was said before by those that are gone.
fn found(injections: &[NodeInjection], before: Option<&Cleanup>) -> Cleanup {
    let told = before.cloned().unwrap_or_default();
    let latest = |pick: fn(&Audit) -> Option<&MicroTime>, before: Option<MicroTime>| {
        let audits = injections.iter().map(audit);
        let times: Option<Vec<_>> = audits.map(|a| a.and_then(pick).cloned()).collect();
        times.and_then(|t| t.into_iter().chain(before).max_by_key(|t| t.0))
    };
    let is_gone = |node: &str| !injections.iter().any(|i| i.spec.node_name == node);
    let gone = told
        .residue
        .into_iter()
        .filter(|residue| is_gone(&residue.node));
    let mut residue: Vec<_> = injections.iter().flat_map(residue_of).chain(gone).collect();
    residue.sort();
    // Only the node itself can say that it is over there.
    let has_reported = |node: &String| {
        let own = injections.iter().find(|i| i.spec.node_name == *node);
        own.is_some_and(is_over)
    };
    let mut not_reported = told.not_reported;
    not_reported.retain(|node| !has_reported(node));
    Cleanup {
        checked_at: latest(|a| a.checked_at.as_ref(), told.checked_at),
        rechecked_at: latest(|a| a.rechecked_at.as_ref(), told.rechecked_at),
        residue,
        not_reported,
        reclaimed_by: told.reclaimed_by,
    }
}

fn residue_of(injection: &NodeInjection) -> Vec<Residue> {
    audit(injection)
        .iter()
        .flat_map(|a| a.residue.clone())
        .map(|mut residue| {
            residue.node.clone_from(&injection.spec.node_name);
            residue
        })
        .collect()
}

fn clean(found: &Cleanup) -> Verdict {
    let left = found.residue.iter().filter(|r| !r.removed).count();
    match found {
        _ if left > 0 => (
            Is::False,
            RESIDUE,
            format!("{left} things are left, see status.cleanup.residue"),
        ),
        Cleanup {
            rechecked_at: Some(_),
            ..
        } => (
            Is::True,
            "Rechecked",
            "checked again: nothing is left".to_owned(),
        ),
        Cleanup {
            checked_at: Some(_),
            ..
        } => (Is::True, "Checked", "nothing is left".to_owned()),
        _ => (
            Is::False,
            "NotChecked",
            "the nodes are checked when their faults have ended".to_owned(),
        ),
    }
}
