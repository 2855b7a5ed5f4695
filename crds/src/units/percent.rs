//! Percentages: numbers from 0 to 100, with decimals.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

use super::UnitError;

/// A percentage from 0 to 100; decimals are allowed.
#[derive(Clone, Copy, PartialEq, PartialOrd, Default, Serialize)]
pub struct Percent(f64);

impl Percent {
    /// All of it.
    pub const ALL: Self = Self(100.0);

    /// Checks that `value` is a percentage.
    ///
    /// # Errors
    /// [`UnitError::Percent`] where it is not within 0 to 100, or no number.
    pub fn new(value: f64) -> Result<Self, UnitError> {
        if (0.0..=100.0).contains(&value) {
            Ok(Self(value))
        } else {
            Err(UnitError::Percent(value.to_string()))
        }
    }

    /// The value, 0 to 100.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }

    /// This share of `total`, rounded up; more than none of something is never none.
    #[must_use]
    pub fn of(self, total: usize) -> usize {
        // Exact in f64 for any number of pods that a cluster can hold; `as` saturates.
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 <= share <= total, far below 2^52"
        )]
        let share = (total as f64 * self.0 / 100.0 - 1e-9).ceil().max(0.0) as usize;
        let least = usize::from(total > 0 && self.0 > 0.0);
        share.clamp(least, total)
    }
}

impl Eq for Percent {}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(f64::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Percent {
    fn schema_name() -> Cow<'static, str> {
        "Percent".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0, "maximum": 100})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_round_up_and_never_to_none() {
        for (percent, total, share) in [
            (50.0, 5, 3),
            (100.0, 5, 5),
            (0.0, 5, 0),
            (0.1, 5, 1),
            (20.0, 5, 1),
            (33.3, 3, 1),
            (33.4, 3, 2),
            (60.0, 5, 3),
            (7.0, 100, 7),
            (50.0, 0, 0),
        ] {
            assert_eq!(Percent(percent).of(total), share, "{percent}% of {total}");
        }
    }

    #[test]
    fn out_of_range_is_refused() {
        for value in [-0.1, 100.1, f64::NAN, f64::INFINITY] {
            assert!(Percent::new(value).is_err(), "{value}");
        }
    }
}
