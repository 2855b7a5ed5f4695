//! What can go wrong in a pass, by phase.

use jiff::Timestamp;
use thiserror::Error;
use windtunnel_runtime::chain;

use crate::decide::Trouble;

/// A pass over an experiment failed; it will be tried again.
#[derive(Debug, Error)]
pub(crate) enum Error {
    /// The cluster could not be read.
    #[error("cannot observe")]
    Observe(#[from] crate::observe::ObserveError),
    /// A decision could not be carried out.
    #[error("cannot act")]
    Act(#[from] crate::act::ActError),
}

impl Error {
    /// The pass was decided on a state that is no longer true; the next one, on the newer state,
    /// is already due.
    #[must_use]
    pub(crate) fn is_stale(&self) -> bool {
        matches!(self, Self::Act(error) if error.is_stale())
    }

    /// As the trouble that began with this pass.
    pub(crate) fn trouble(&self, now: Timestamp) -> Trouble {
        Trouble {
            message: chain(self),
            since: now,
            unread: match self {
                Self::Observe(error) => Some(error.kind()),
                Self::Act(_) => None,
            },
        }
    }
}

/// An answer to a deletion. What it wants may be so already: gone, or replaced by something of the
/// same name.
///
/// # Errors
/// Where it is neither.
pub(crate) fn gone_is_fine<T>(result: Result<T, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        other => other.map(drop),
    }
}
