//! Condition types and reasons, and how a list of conditions is kept.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The types of an experiment's conditions, for `kubectl wait --for=condition=…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionType {
    /// Every target is resolved on its node and can be injected.
    Prepared,
    /// Every window opened so far was read back from the kernel on every target.
    Injected,
    /// Every fault has ended on every target.
    Recovered,
    /// The nodes were checked: nothing of the experiment is left.
    Clean,
    /// The experiment is in a terminal phase.
    Finished,
}

impl ConditionType {
    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prepared => "Prepared",
            Self::Injected => "Injected",
            Self::Recovered => "Recovered",
            Self::Clean => "Clean",
            Self::Finished => "Finished",
        }
    }
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// It is not known.
    Unknown,
}

impl ConditionStatus {
    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// Sets a condition; its transition time changes only when its status does.
///
/// `message` says in one sentence what the reader may want to do about it.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    type_: ConditionType,
    (status, reason, message): (ConditionStatus, &str, String),
    generation: Option<i64>,
    now: Timestamp,
) {
    let mut condition = Condition {
        type_: type_.as_str().to_owned(),
        status: status.as_str().to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: Time(now),
    };
    match conditions
        .iter_mut()
        .find(|old| old.type_ == condition.type_)
    {
        Some(old) => {
            if old.status == condition.status {
                condition.last_transition_time = old.last_transition_time.clone();
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

/// The condition of this type, if it was ever set.
#[must_use]
pub fn condition(conditions: &[Condition], type_: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|c| c.type_ == type_.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transition_time_moves_with_the_status_only() {
        let (early, late) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(60).unwrap());
        let mut list = Vec::new();
        let set = |list: &mut Vec<Condition>, status, reason, now| {
            set_condition(
                list,
                ConditionType::Clean,
                (status, reason, String::new()),
                Some(1),
                now,
            );
        };
        set(&mut list, ConditionStatus::True, "Checked", early);
        set(&mut list, ConditionStatus::True, "Rechecked", late);
        assert_eq!(list[0].last_transition_time.0, early);
        assert_eq!(list[0].reason, "Rechecked");
        set(&mut list, ConditionStatus::False, "Residue", late);
        assert_eq!(list[0].last_transition_time.0, late);
        assert_eq!(list.len(), 1);
    }
}
