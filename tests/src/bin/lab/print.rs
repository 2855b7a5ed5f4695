//! Printing that does not mind when nobody listens any more.

use std::io::{self, Write};

/// A line to standard output.
pub(crate) fn line(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// A line to standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Bytes to standard output, as they are.
pub(crate) fn bytes(bytes: &[u8]) {
    let _ = io::stdout().write_all(bytes);
}
