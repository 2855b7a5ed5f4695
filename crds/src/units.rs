//! Units of the API: durations, percentages, rates, cores and sizes.
//!
//! Each type parses once, at the edge, and cannot hold a value out of its range.
//! The same bounds stand in its schema, as CEL rules with a message that says
//! what is right, so that `kubectl apply` refuses what these parsers would refuse.

mod duration;
mod percent;
mod quantity;

pub use duration::{DURATION_PATTERN, GoDuration, at_least, at_most, positive, whole_seconds};
pub use percent::Percent;
pub use quantity::{BitRate, ByteSize, Cores, bytes};

use thiserror::Error;

/// Why a text or number is not a value of one of the API's units.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnitError {
    /// The text is not a sequence of decimal numbers with units.
    #[error("{0:?} is not a duration such as 1500ms, 2m30s or 1h (units: ns, us, ms, s, m, h)")]
    Duration(String),
    /// The number is not within 0 to 100.
    #[error("{0} is not a percentage from 0 to 100")]
    Percent(String),
    /// The text is not a quantity, or is out of range.
    #[error("{0:?} is not a rate in bit/s such as 512k, 10M or 1G, from 8k to 1T")]
    BitRate(String),
    /// The text is not a number of cores, or is out of range.
    #[error("{0:?} is not a number of cores such as 500m, 1.5 or 2, from 1m to 1024")]
    Cores(String),
    /// The text is not a size, or is out of range.
    #[error("{0:?} is not a size in bytes such as 64Mi, 500M or 1.5Gi, from 1Mi to 1024Ti")]
    ByteSize(String),
}
