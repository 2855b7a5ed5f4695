//! Rates in bit/s, cores and sizes, written as Kubernetes resource quantities.

use std::{borrow::Cow, fmt, marker::PhantomData, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::UnitError;

/// Slowest rate: the kernel counts whole bytes per second, and below this a
/// full-sized packet takes more than a second.
const LEAST: u64 = 8_000;
/// Fastest rate.
const MOST: u64 = 1_000_000_000_000;

/// Suffixes of quantities, with their factor.
const SUFFIXES: [(&str, u64); 9] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

/// A rate in bit/s, from 8k to 1T.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BitRate(u64);

impl BitRate {
    /// Checks that `bits` per second is within the range.
    ///
    /// # Errors
    /// [`UnitError::BitRate`] below 8 000 or above 10^12 bit/s.
    pub fn new(bits: u64) -> Result<Self, UnitError> {
        if (LEAST..=MOST).contains(&bits) {
            Ok(Self(bits))
        } else {
            Err(UnitError::BitRate(bits.to_string()))
        }
    }

    /// Bits per second.
    #[must_use]
    pub const fn bits_per_second(self) -> u64 {
        self.0
    }
}

impl FromStr for BitRate {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let rate = suffixed(text).and_then(|bits| Self::new(bits).ok());
        rate.ok_or_else(|| UnitError::BitRate(text.to_owned()))
    }
}

/// The bytes of a quantity as the API server writes it, rounded up; `None` for what is none.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    let thousandths = || scaled(text.strip_suffix('m')?, 1).map(|n| n.div_ceil(1000));
    let power = || {
        let (number, exponent) = text.split_once(['e', 'E'])?;
        scaled(number, 10u64.checked_pow(exponent.parse().ok()?)?)
    };
    let large = || {
        let (number, factor) = match text.strip_suffix("Pi").or(text.strip_suffix("Ei")) {
            Some(number) if text.ends_with("Pi") => (number, 1 << 50),
            Some(number) => (number, 1 << 60),
            None => (text.strip_suffix('P')?, 1_000_000_000_000_000),
        };
        scaled(number, factor)
    };
    suffixed(text)
        .or_else(thousandths)
        .or_else(large)
        .or_else(power)
}

/// A number with one of the suffixes, or none, rounded down.
fn suffixed(text: &str) -> Option<u64> {
    let (number, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))?;
    scaled(number, factor)
}

/// With the largest of some suffixes that leaves a whole number.
fn shown(f: &mut fmt::Formatter<'_>, value: u64, suffixes: &[(&str, u64)]) -> fmt::Result {
    let (suffix, factor) = suffixes
        .iter()
        .rev()
        .find(|(_, factor)| value.is_multiple_of(*factor))
        .unwrap_or(&("", 1));
    write!(f, "{}{suffix}", value / factor)
}

/// A plain decimal number times a factor, rounded down.
fn scaled(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let plain = |part: &str| part.len() <= 12 && part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !plain(whole) || !plain(fraction) || number.ends_with('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let places = u32::try_from(fraction.len()).ok()?;
    u64::try_from(digits * u128::from(factor) / 10u128.pow(places)).ok()
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown(f, self.0, &SUFFIXES[4..8])
    }
}

impl fmt::Debug for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}bit/s")
    }
}

/// A quantity may be written as a number or as text.
struct Visitor<T>(PhantomData<T>);

impl<T: FromStr<Err = UnitError>> de::Visitor<'_> for Visitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity such as 10M or 500m")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// Most cores, in thousandths.
const MOST_CORES: u64 = 1_024_000;

/// A number of CPU cores, from 1m to 1024.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cores(u64);

impl Cores {
    /// Thousandths of a core.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0
    }
}

impl FromStr for Cores {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let millis = match text.strip_suffix('m') {
            Some(number) => scaled(number, 1),
            None => scaled(text, 1_000),
        };
        millis
            .filter(|millis| (1..=MOST_CORES).contains(millis))
            .map(Self)
            .ok_or_else(|| UnitError::Cores(text.to_owned()))
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1_000) {
            write!(f, "{}", self.0 / 1_000)
        } else {
            write!(f, "{}m", self.0)
        }
    }
}

impl fmt::Debug for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} cores")
    }
}

/// Fewest bytes: a megabyte.
const LEAST_BYTES: u64 = 1 << 20;
/// Most bytes.
const MOST_BYTES: u64 = 1 << 50;

/// A size in bytes, from 1Mi to 1024Ti.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

impl ByteSize {
    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        suffixed(text)
            .filter(|bytes| (LEAST_BYTES..=MOST_BYTES).contains(bytes))
            .map(Self)
            .ok_or_else(|| UnitError::ByteSize(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown(f, self.0, &SUFFIXES[..4])
    }
}

impl fmt::Debug for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}B")
    }
}

/// A quantity in manifests: a number or a text, with its form and bounds in the schema.
macro_rules! quantity {
    ($type:ident, $form:literal, $longest:literal, $bounds:literal, $message:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Visitor(PhantomData))
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "x-kubernetes-int-or-string": true,
                    "maxLength": $longest,
                    "x-kubernetes-validations": [{
                        "rule": concat!("string(self).matches(r'", $form, "') && ", $bounds),
                        "message": $message,
                    }],
                })
            }
        }
    };
}

quantity!(
    BitRate,
    r"^[0-9]{1,12}(\.[0-9]{1,12})?([kMGT]|[KMGT]i)?$",
    28,
    "!quantity(string(self)).isLessThan(quantity('8k')) && !quantity(string(self)).isGreaterThan(quantity('1T'))",
    "must be a rate in bit/s such as 512k, 10M or 1G, from 8k to 1T"
);
quantity!(
    Cores,
    r"^([0-9]{1,4}(\.[0-9]{1,3})?|[0-9]{1,7}m)$",
    8,
    "quantity(string(self)).isGreaterThan(quantity('0')) && !quantity(string(self)).isGreaterThan(quantity('1024'))",
    "must be a number of cores such as 500m, '1.5' or 2, from 1m to 1024"
);
quantity!(
    ByteSize,
    r"^[0-9]{1,12}(\.[0-9]{1,12})?([kMGT]|[KMGT]i)?$",
    28,
    "!quantity(string(self)).isLessThan(quantity('1Mi')) && !quantity(string(self)).isGreaterThan(quantity('1024Ti'))",
    "must be a size in bytes such as 64Mi, 500M or 1.5Gi, from 1Mi to 1024Ti"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values_agree() {
        for (text, bits) in [
            ("8k", 8_000),
            ("512k", 512_000),
            ("10M", 10_000_000),
            ("1.5G", 1_500_000_000),
            ("1Mi", 1 << 20),
            ("9000", 9_000),
            ("1T", MOST),
        ] {
            assert_eq!(text.parse::<BitRate>().unwrap().0, bits, "{text}");
        }
        assert_eq!(BitRate(1_500_000_000).to_string(), "1500M");
        assert_eq!(BitRate(9_001).to_string(), "9001");
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for text in [
            "", "7999", "0", "-1M", "10 M", "10m", "1.1T", "1e6", "M", "1.M", ".5M", "10Mbit",
        ] {
            assert!(text.parse::<BitRate>().is_err(), "{text}");
        }
    }

    #[test]
    fn cores_are_thousandths() {
        for (text, millis, shown) in [
            ("500m", 500, "500m"),
            ("1.5", 1_500, "1500m"),
            ("2", 2_000, "2"),
            ("1024", MOST_CORES, "1024"),
        ] {
            let cores: Cores = text.parse().unwrap();
            assert_eq!(
                (cores.millis(), cores.to_string().as_str()),
                (millis, shown)
            );
        }
        for text in ["", "0", "0m", "1025", "-1", "1k", "m", "0.0001"] {
            assert!(text.parse::<Cores>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_bytes() {
        for (text, bytes, shown) in [
            ("64Mi", 64 << 20, "64Mi"),
            ("1.5Gi", 1536 << 20, "1536Mi"),
            ("500M", 500_000_000, "500000000"),
            ("2048Ki", 2 << 20, "2Mi"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, shown));
            assert_eq!(shown.parse::<ByteSize>().unwrap(), size);
        }
        for text in ["", "0", "1k", "1Mb", "-1Gi", "1025Ti", "1m"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn quantities_are_bytes_in_every_form() {
        for (text, wanted) in [
            ("1Gi", 1 << 30),
            ("1500M", 1_500_000_000),
            ("2Pi", 2 << 50),
            ("3P", 3_000_000_000_000_000),
            ("1e3", 1000),
            ("500m", 1),
            ("12", 12),
        ] {
            assert_eq!(bytes(text), Some(wanted), "{text}");
        }
        for text in ["", "x", "1e", "e3", "-1", "1e99"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }
}
