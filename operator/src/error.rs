//! What can go wrong in a pass, by phase.

use thiserror::Error;

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
