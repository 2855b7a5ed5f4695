//! Durations as Go writes them: `1500ms`, `2m30s`, `1h`.

use std::{borrow::Cow, fmt, str::FromStr, time::Duration};

use kube::core::{Message, Rule};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::UnitError;

/// What a duration looks like, as an RE2 pattern.
///
/// The number of digits is bounded so that no sum of parts within
/// [`MAX_LENGTH`] characters overflows 64-bit nanoseconds, in CEL or here.
pub const DURATION_PATTERN: &str =
    r"^([0-9]{1,9}(\.[0-9]{1,9})?(ns|us|µs|ms|s)|[0-9]{1,5}(\.[0-9]{1,9})?(m|h))+$";

/// Longest text of a duration, in characters.
const MAX_LENGTH: usize = 20;

/// Units by descending length, in nanoseconds.
const UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// A duration of zero or more, in nanoseconds, written as Go writes it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GoDuration(Duration);

impl GoDuration {
    /// A duration of `millis` milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }

    /// A duration of `secs` seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(Duration::from_secs(secs))
    }

    /// The same duration in the standard library's type.
    #[must_use]
    pub const fn get(self) -> Duration {
        self.0
    }
}

impl From<Duration> for GoDuration {
    fn from(value: Duration) -> Self {
        Self(value)
    }
}

impl FromStr for GoDuration {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text)
            .map(|nanos| Self(Duration::from_nanos(nanos)))
            .ok_or_else(|| UnitError::Duration(text.to_owned()))
    }
}

/// Nanoseconds of `text`, or `None` where it does not match [`DURATION_PATTERN`].
fn parse(text: &str) -> Option<u64> {
    if text.is_empty() || text.chars().count() > MAX_LENGTH {
        return None;
    }
    let mut rest = text;
    let mut total = 0u64;
    while !rest.is_empty() {
        let (whole, after) = digits(rest)?;
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => digits(after)?,
            None => ("", after),
        };
        let length = after
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(after.len());
        let unit = match &after[..length] {
            "µs" => "us",
            other => other,
        };
        let nanos = UNITS.iter().find(|(name, _)| *name == unit)?.1;
        let most = if nanos >= UNITS[1].1 { 5 } else { 9 };
        if whole.len() > most || fraction.len() > 9 {
            return None;
        }
        total = total
            .checked_add(whole.parse::<u64>().ok()?.checked_mul(nanos)?)?
            .checked_add(fraction_of(fraction, nanos)?)?;
        rest = &after[length..];
    }
    Some(total)
}

/// The leading decimal digits of `text` (one at least) and what follows them.
fn digits(text: &str) -> Option<(&str, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// Nanoseconds of the decimal places `fraction` of a unit of `nanos`, rounded down.
fn fraction_of(fraction: &str, nanos: u64) -> Option<u64> {
    if fraction.is_empty() {
        return Some(0);
    }
    let value: u128 = fraction.parse().ok()?;
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    u64::try_from(value * u128::from(nanos) / scale).ok()
}

impl fmt::Display for GoDuration {
    /// The fewest parts that say the same: `90m` for an hour and a half.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        if nanos == 0 {
            return f.write_str("0s");
        }
        let mut rest = nanos;
        // The largest unit that divides the whole value gives one part; else one part a unit.
        for (unit, size) in UNITS.map(|(unit, size)| (unit, u128::from(size))) {
            if rest.is_multiple_of(size) {
                return write!(f, "{}{unit}", rest / size);
            }
            if rest >= size && size >= u128::from(UNITS[2].1) {
                write!(f, "{}{unit}", rest / size)?;
                rest %= size;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for GoDuration {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": MAX_LENGTH,
            "x-kubernetes-validations": [{
                "rule": format!("self.matches(r'{DURATION_PATTERN}')"),
                "message": "must be a duration such as 1500ms, 2m30s or 1h (units: ns, us, ms, s, m, h; no sign)",
            }],
        })
    }
}

/// A bound that holds for every text that is a duration at all, so that a
/// malformed one gets the message about its form and no other.
fn bound(condition: &str, message: String) -> Rule {
    Rule::new(format!(
        "!self.matches(r'{DURATION_PATTERN}') || {condition}"
    ))
    .message(Message::Message(message))
}

/// The duration must be more than zero.
#[must_use]
pub fn positive() -> Rule {
    bound(
        "duration(self) > duration('0s')",
        "must be more than 0s".to_owned(),
    )
}

/// The duration must not be less than `least`.
#[must_use]
pub fn at_least(least: &str) -> Rule {
    bound(
        &format!("duration(self) >= duration('{least}')"),
        format!("must be at least {least}"),
    )
}

/// The duration must not be more than `most`.
#[must_use]
pub fn at_most(most: &str) -> Rule {
    bound(
        &format!("duration(self) <= duration('{most}')"),
        format!("must be at most {most}"),
    )
}

/// The duration must be whole seconds: what it is for counts no others.
#[must_use]
pub fn whole_seconds() -> Rule {
    bound(
        "self.matches(r'^([0-9]+[hms])+$')",
        "must be whole seconds, such as 30s or 1m30s".to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values_agree() {
        for (text, nanos) in [
            ("0s", 0),
            ("1500ms", 1_500_000_000),
            ("2m30s", 150_000_000_000),
            ("1.5h", 5_400_000_000_000),
            ("0.000000001s", 1),
            ("7us", 7_000),
            ("7µs", 7_000),
            ("1h1m1s1ms", 3_661_001_000_000),
            ("99999h", 359_996_400_000_000_000),
        ] {
            let parsed: GoDuration = text.parse().unwrap();
            assert_eq!(parsed.get(), Duration::from_nanos(nanos), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in [
            "",
            "5",
            "-5s",
            "+5s",
            "5 s",
            "1,5s",
            "5S",
            "s",
            ".5s",
            "5.s",
            "1d",
            "1e3s",
            "0x5s",
            "100000h",
            "1000000000s",
            "5ss",
            "5s ",
            "１s",
            "1s1s1s1s1s1s1s1s1s1s1s",
        ] {
            assert!(text.parse::<GoDuration>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn display_is_short_and_parses_back() {
        for (nanos, text) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500_000_000, "1s500ms"),
            (5_400_000_000_000, "1h30m"),
            (150_000_000_000, "2m30s"),
            (200_000_000, "200ms"),
            (1_234_567, "1234567ns"),
        ] {
            let duration = GoDuration(Duration::from_nanos(nanos));
            assert_eq!(duration.to_string(), text);
            assert_eq!(text.parse::<GoDuration>().unwrap(), duration);
        }
    }
}
