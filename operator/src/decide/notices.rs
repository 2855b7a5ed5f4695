//! What the user is told as events: transitions, and only those.

use windtunnel_crds::{
    ChaosExperimentStatus,
    conditions::{ConditionType, condition},
    status::Phase,
};

use super::Notice;

const TYPES: [ConditionType; 5] = [
    ConditionType::Prepared,
    ConditionType::Injected,
    ConditionType::Recovered,
    ConditionType::Clean,
    ConditionType::Finished,
];

/// Steps on the way that are no news.
const SILENT: [&str; 6] = [
    "Preparing",
    "NotDue",
    "Injecting",
    "NotOver",
    "NotChecked",
    "Running",
];

/// One event for each condition whose status or reason changed.
pub(crate) fn of_change(
    old: Option<&ChaosExperimentStatus>,
    new: &ChaosExperimentStatus,
) -> Vec<Notice> {
    let changed = TYPES.into_iter().filter_map(|type_| {
        let now = condition(&new.conditions, type_)?;
        let before = old.and_then(|s| condition(&s.conditions, type_));
        let same = before.is_some_and(|b| b.status == now.status && b.reason == now.reason);
        (!same && !SILENT.contains(&now.reason.as_str())).then_some((type_, now))
    });
    changed
        .map(|(type_, now)| Notice {
            warning: is_warning(type_, &now.status, &now.reason)
                || (type_ == ConditionType::Finished && new.phase == Some(Phase::Failed)),
            reason: format!(
                "{}{}",
                if now.status == "True" { "" } else { "Not" },
                type_.as_str()
            ),
            note: format!("{}: {}", now.reason, now.message),
        })
        .collect()
}

fn is_warning(type_: ConditionType, status: &str, reason: &str) -> bool {
    match type_ {
        ConditionType::Finished => false,
        ConditionType::Injected => matches!(reason, "Interrupted" | "Failed" | "TargetsGone"),
        _ => status != "True",
    }
}
