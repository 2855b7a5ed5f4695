//! How an error is shown: once, at the edge, with all its causes.

use std::{error::Error, fmt::Write as _};

/// The error and its causes in one line, outermost first.
///
/// A cause whose text the one before it already ends with is not repeated. Of what the API server
/// refused, its own sentence is shown.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = sentence(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = sentence(error);
        if !text.ends_with(&message) {
            // Writing to a String cannot fail.
            let _ = write!(text, ": {message}");
        }
        cause = error.source();
    }
    text
}

fn sentence(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) => status.message.clone(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read journal")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_in_one_line() {
        let error = Outer(std::io::Error::other("disk on fire"));
        assert_eq!(chain(&error), "cannot read journal: disk on fire");
    }
}
