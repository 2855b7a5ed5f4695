//! Injections that have not started: when their targets are checked.

use windtunnel_crds::{NodeInjection, injection::EMERGENCY_STOP};

use super::{Decision, Observed, SKEW, Step};

/// Has an injection's targets checked, if it is to be prepared and was not for this spec.
pub(super) fn advance(o: &Observed, uid: &str, injection: &NodeInjection, decision: &mut Decision) {
    let spec = &injection.spec;
    if spec.abort || spec.start_time.is_some() {
        return;
    }
    let known = o.preparations.get(uid);
    if known.is_some_and(|p| p.generation == injection.metadata.generation) {
        return;
    }
    // Nothing is prepared before it is known whether the emergency stop is in force, that
    // somebody is there to end what is begun, and how the clocks stand.
    if o.stop.is_none() || !o.has_control_plane || o.clock_offset.is_none() {
        return;
    }
    decision.push(Step::Prepare {
        injection: uid.to_owned(),
    });
}

/// Why this node takes no faults at all now, if so: a reason and a sentence.
#[must_use]
pub fn refusal(o: &Observed) -> Option<(&'static str, String)> {
    if o.stop == Some(true) {
        return Some((EMERGENCY_STOP, "the emergency stop is in force".to_owned()));
    }
    if o.is_unclean {
        return Some((
            "Unclean",
            "residue of an earlier fault is left on this node".to_owned(),
        ));
    }
    match o.clock_offset {
        Some(offset) if offset.abs() > SKEW => Some((
            "ClockSkew",
            format!("this node's clock is {offset} ms from the operator's, of {SKEW} ms at most"),
        )),
        _ => None,
    }
}
