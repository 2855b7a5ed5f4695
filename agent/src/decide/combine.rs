//! One status for a target from those of its containers: pure.

use windtunnel_crds::injection::{TargetState, TargetStatus};

/// What all parts of a target together say. Nothing is over before all of them are, nothing is in
/// place before it is on all of them, and the worst of them speaks.
pub(super) fn combine(parts: Vec<TargetStatus>) -> TargetStatus {
    let is_open = parts.iter().any(|p| !p.state.is_final());
    let counting = parts
        .iter()
        .filter(|p| p.injected_at.is_some() || p.state != TargetState::Gone);
    let on_all = counting.clone().count() > 0 && counting.clone().all(|p| p.injected_at.is_some());
    let injected_at = on_all
        .then(|| parts.iter().filter_map(|p| p.injected_at.clone()).min())
        .flatten();
    let reverted_at = (!is_open)
        .then(|| parts.iter().filter_map(|p| p.reverted_at.clone()).max())
        .flatten();
    let early = parts.iter().filter(|p| p.state == TargetState::Interrupted);
    let interrupted_at = is_open
        .then(|| early.filter_map(|p| p.reverted_at.clone()).min())
        .flatten();
    let sum = |pick: fn(&TargetStatus) -> Option<i64>| {
        let known: Vec<i64> = parts.iter().filter_map(pick).collect();
        (!known.is_empty()).then(|| known.iter().sum())
    };
    let (matched_packets, queue_drops) = (sum(|p| p.matched_packets), sum(|p| p.queue_drops));
    let mut effect = std::collections::BTreeMap::new();
    for (name, value) in parts.iter().flat_map(|p| &p.effect) {
        *effect.entry(name.clone()).or_insert(0) += value;
    }
    let state = parts
        .iter()
        .map(|p| p.state)
        .filter(|state| !is_open || !state.is_final())
        .min_by_key(|state| rank(*state))
        .unwrap_or_default();
    let worst = parts.into_iter().min_by_key(|p| rank(p.state));
    TargetStatus {
        state,
        injected_at,
        interrupted_at,
        reverted_at,
        matched_packets,
        queue_drops,
        effect,
        ..worst.unwrap_or_default()
    }
}

/// The worst first; what is open from the least advanced on.
fn rank(state: TargetState) -> u8 {
    match state {
        TargetState::Failed => 0,
        TargetState::Interrupted => 1,
        TargetState::Pending => 2,
        TargetState::Prepared => 3,
        TargetState::Injected => 4,
        TargetState::Recovered => 5,
        TargetState::Gone => 6,
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    fn part(state: TargetState, injected: bool) -> TargetStatus {
        TargetStatus {
            state,
            injected_at: injected.then_some(MicroTime(Timestamp::UNIX_EPOCH)),
            reverted_at: state.is_final().then_some(MicroTime(Timestamp::UNIX_EPOCH)),
            effect: [("millicores".to_owned(), 5)].into(),
            ..TargetStatus::default()
        }
    }

    #[test]
    fn a_target_is_as_far_as_its_last_container_and_as_bad_as_its_worst() {
        use TargetState::{Failed, Gone, Injected, Interrupted, Prepared, Recovered};
        let table = [
            (vec![(Injected, true), (Prepared, false)], Prepared, false),
            (vec![(Injected, true), (Injected, true)], Injected, true),
            (vec![(Failed, false), (Injected, true)], Injected, false),
            (vec![(Interrupted, true), (Injected, true)], Injected, true),
            (
                vec![(Interrupted, true), (Recovered, true)],
                Interrupted,
                true,
            ),
            (vec![(Gone, true), (Recovered, true)], Recovered, true),
            (vec![(Gone, false), (Injected, true)], Injected, true),
            (vec![(Gone, false), (Gone, false)], Gone, false),
        ];
        for (parts, state, injected) in table {
            let whole = combine(parts.iter().map(|(s, i)| part(*s, *i)).collect());
            assert_eq!(
                (whole.state, whole.injected_at.is_some()),
                (state, injected),
                "{parts:?}"
            );
            assert_eq!(whole.effect["millicores"], 10);
            // That it ended early somewhere is told at once, not when all is over.
            let is_early = parts.iter().any(|(s, _)| *s == Interrupted) && !state.is_final();
            assert_eq!(whole.interrupted_at.is_some(), is_early, "{parts:?}");
        }
    }
}
