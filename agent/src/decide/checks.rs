//! What the checks of an injection's targets found.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    NodeInjection,
    injection::{Audit, InjectionPhase, TargetState, TargetStatus},
    residue::{Residue, has_left},
};

use crate::model::Sweep;

use super::{Observed, keys, report::NEVER_INJECTED};

/// What the checks of all targets together say; nothing while one of them is outstanding. What the
/// journal has lost counts as checked when the whole node was looked at.
pub(super) fn audit(
    o: &Observed,
    uid: &str,
    injection: &NodeInjection,
    phase: InjectionPhase,
) -> Option<Audit> {
    if !matches!(phase, InjectionPhase::Recovered | InjectionPhase::Refused) {
        return None;
    }
    let entries = || o.entries.values().filter(|e| e.key.injection == uid);
    let told = injection.status.as_ref().and_then(|s| s.audit.as_ref());
    let own: Vec<&Residue> = entries()
        .filter_map(|e| e.ended())
        .flat_map(|e| &e.residue)
        .collect();
    let before: Vec<&Residue> = told
        .iter()
        .flat_map(|audit| &audit.residue)
        .filter(|r| !own.iter().any(|known| known.is_same(r)))
        .collect();
    // What stands in no entry is looked for until it is gone, whoever found it.
    let is_lost = has_lost(o, uid, injection) || has_left(before.iter().copied());
    if entries().next().is_none() {
        // Nothing of it is on this node as far as the journal knows; an earlier report may know more.
        match told {
            Some(told) if !is_lost || is_settled(told) => return Some(told.clone()),
            None if !is_lost => {
                return Some(Audit {
                    checked_at: begun(injection),
                    ..Audit::default()
                });
            }
            _ => {}
        }
    }
    let sweep = o.sweep.as_ref().filter(|_| is_lost);
    let swept = is_lost.then(|| sweep.filter(|s| s.unread.is_none()).map(|s| s.at));
    let checked = entries().map(|e| e.ended()?.checked.map(|c| c.0));
    let checked: Option<Vec<_>> = checked.collect();
    // Until each entry was looked at, what is not found may still be one's.
    let is_looked_for = checked.is_some() && sweep.is_some_and(|s| s.unread.is_none());
    let rechecked: Option<Vec<_>> = entries().map(|e| e.ended()?.rechecked).collect();
    Some(Audit {
        checked_at: checked
            .zip(swept.into_iter().collect::<Option<Vec<_>>>())
            .and_then(|(own, whole)| own.into_iter().chain(whole).max())
            .map(MicroTime),
        rechecked_at: rechecked
            .filter(|_| !is_lost)
            .and_then(|t| t.into_iter().max())
            .map(MicroTime),
        residue: residue(&own, sweep, &before, is_looked_for),
    })
}

/// What is found now, and what was found before and is not any more.
fn residue(
    own: &[&Residue],
    sweep: Option<&Sweep>,
    before: &[&Residue],
    is_looked_for: bool,
) -> Vec<Residue> {
    let swept = sweep.iter().flat_map(|s| &s.residue);
    // What stands in an entry is looked at more often than the whole node.
    let strange = swept.filter(|r| !own.iter().any(|known| known.is_same(r)));
    let found: Vec<&Residue> = own.iter().copied().chain(strange).collect();
    let gone = before
        .iter()
        .filter(|r| !found.iter().any(|known| known.is_same(r)))
        .map(|r| Residue {
            removed: r.removed || is_looked_for,
            ..(*r).clone()
        });
    found.iter().copied().cloned().chain(gone).collect()
}

/// There is nothing more to find out.
fn is_settled(told: &Audit) -> bool {
    told.checked_at.is_some() && !has_left(&told.residue)
}

/// An agent before this one had begun something for a target that the journal does not know.
fn has_lost(o: &Observed, uid: &str, injection: &NodeInjection) -> bool {
    if injection.spec.dry_run || o.preparations.contains_key(uid) {
        return false;
    }
    let told = || injection.status.iter().flat_map(|s| &s.targets);
    let begun = |t: &TargetStatus| {
        t.injected_at.is_some()
            || match t.state {
                TargetState::Prepared | TargetState::Injected | TargetState::Interrupted => true,
                TargetState::Recovered => t.reason != NEVER_INJECTED,
                TargetState::Pending | TargetState::Failed | TargetState::Gone => false,
            }
    };
    let targets = injection
        .spec
        .faults
        .iter()
        .flat_map(|fault| fault.targets.iter().map(move |target| (fault, target)));
    targets
        .filter(|(fault, target)| {
            told().any(|t| t.fault == fault.name && t.pod_uid == target.pod_uid && begun(t))
        })
        .flat_map(|(fault, target)| keys(uid, fault, target))
        .any(|key| !o.entries.contains_key(&key))
}

/// When an injection without entries counts as checked: at its beginning, since nothing was ever
/// there.
fn begun(injection: &NodeInjection) -> Option<MicroTime> {
    let created = injection
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|t| MicroTime(t.0));
    injection.spec.start_time.clone().or(created)
}
