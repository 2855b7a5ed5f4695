//! Why a run ends. Kept in the reason of the `Finished` condition, so that a new leader ends the
//! run for the same reason as the old one would have.

use windtunnel_crds::status::Phase;

/// Why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Every window has closed.
    WindowsClosed,
    /// The deadline has passed.
    DeadlineReached,
    /// Only a dry run was asked for.
    DryRun,
    /// `spec.abort` was set.
    AbortRequested,
    /// The experiment was deleted.
    Deleted,
    /// The emergency stop is in force.
    EmergencyStop,
    /// The namespace, the number of targets or a target itself is not allowed.
    NotAllowed,
    /// The selector does not yield the targets that were asked for.
    TargetsMissing,
    /// What the selection of targets and peers takes cannot be read, now or later.
    SelectionRefused,
    /// A target is on a node that takes no faults.
    NodeUnavailable,
    /// The peers cannot be resolved.
    PeersUnusable,
    /// A node refused its part.
    PrepareRefused,
    /// A node did not answer in time.
    PrepareTimeout,
    /// Every target was gone before it could be injected.
    TargetsGone,
}

/// All endings with the word that stands for them in a condition's reason.
const REASONS: [(Ending, &str); 14] = [
    (Ending::WindowsClosed, "WindowsClosed"),
    (Ending::DeadlineReached, "DeadlineReached"),
    (Ending::DryRun, "DryRun"),
    (Ending::AbortRequested, "AbortRequested"),
    (Ending::Deleted, "Deleted"),
    (Ending::EmergencyStop, "EmergencyStop"),
    (Ending::NotAllowed, "NotAllowed"),
    (Ending::TargetsMissing, "TargetsMissing"),
    (Ending::SelectionRefused, "SelectionRefused"),
    (Ending::NodeUnavailable, "NodeUnavailable"),
    (Ending::PeersUnusable, "PeersUnusable"),
    (Ending::PrepareRefused, "PrepareRefused"),
    (Ending::PrepareTimeout, "PrepareTimeout"),
    (Ending::TargetsGone, "TargetsGone"),
];

impl Ending {
    /// The word for the condition's reason.
    pub(crate) fn reason(self) -> &'static str {
        REASONS
            .iter()
            .find_map(|(ending, word)| (*ending == self).then_some(*word))
            .unwrap_or("Unknown")
    }

    /// The ending that a condition's reason stands for.
    pub(crate) fn from_reason(reason: &str) -> Option<Self> {
        REASONS
            .iter()
            .find_map(|(ending, word)| (*word == reason).then_some(*ending))
    }

    /// The terminal phase; `flawless` is whether every fault went as asked.
    pub(crate) fn phase(self, flawless: bool) -> Phase {
        match self {
            Self::AbortRequested | Self::Deleted | Self::EmergencyStop => Phase::Aborted,
            Self::DryRun => Phase::Completed,
            Self::WindowsClosed | Self::DeadlineReached if flawless => Phase::Completed,
            _ => Phase::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ending_has_a_word_of_its_own() {
        for (ending, word) in REASONS {
            assert_eq!(ending.reason(), word);
            assert_eq!(Ending::from_reason(word), Some(ending));
        }
    }
}
