//! netem's options: as a fault speaks of them, and as the kernel holds them.
//!
//! Owns both forms and the way between them. All options are always sent, so that none is left over
//! from before. The kernel's form has coarser units; two [`Netem`] that become the same there are
//! the same fault ([`Netem::matches`]). The kernel does not tell which distribution it was given.

use std::time::Duration;

use super::distribution::Distribution;
use crate::kernel::netlink::attr::{Attrs, DecodeError, Encoder, head, tail};

/// Bytes of the header in front of netem's attributes (`struct tc_netem_qopt`).
const HEADER: usize = 24;

// Attributes of netem (include/uapi/linux/pkt_sched.h, `TCA_NETEM_*`).
const CORRELATION: u16 = 1;
const DELAY_DISTRIBUTION: u16 = 2;
const REORDER: u16 = 3;
const CORRUPT: u16 = 4;
const LOSS: u16 = 5;
const RATE: u16 = 6;
const RATE64: u16 = 8;
const LATENCY64: u16 = 10;
const JITTER64: u16 = 11;

// Loss models (`NETEM_LOSS_*`).
const FOUR_STATE: u16 = 1;
const GILBERT_ELLIOTT: u16 = 2;

/// Why options are not possible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NetemError {
    /// A percentage outside 0 to 100.
    #[error("{option} of {percent} % is not within 0 to 100")]
    Percent {
        /// Which option.
        option: &'static str,
        /// The value.
        percent: f64,
    },
    /// A time that the kernel cannot hold.
    #[error("{option} of {time:?} is too long")]
    TooLong {
        /// Which option.
        option: &'static str,
        /// The value.
        time: Duration,
    },
    /// A rate below one byte per second, which the kernel would take for no limit.
    #[error("a rate of {0} bit/s is below 8")]
    Rate(u64),
    /// A queue for no packet drops all.
    #[error("a queue limit of 0 packets")]
    Limit,
}

/// What netem does to each packet that passes it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Netem {
    /// Packets that it holds at most, 1 or more; others are dropped. A GSO packet of up to 64 KiB
    /// counts as one.
    pub limit: u32,
    /// How long packets wait.
    pub delay: Delay,
    /// Which packets are lost.
    pub loss: Loss,
    /// Which packets are sent twice.
    pub duplicate: Chance,
    /// Which packets get one bit turned over.
    pub corrupt: Chance,
    /// Which packets are sent at once, ahead of those that wait.
    pub reorder: Reorder,
    /// Bits per second of whole packets, link header included; 0 for no limit. The kernel holds
    /// bytes: the last three bits do not count.
    pub rate: u64,
}

/// How long packets wait.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Delay {
    /// Mean, to the nanosecond.
    pub latency: Duration,
    /// Spread, at most 2 147 483 647 ns (the kernel would silently cap it).
    pub jitter: Duration,
    /// How much a packet's delay depends on the one before, in percent.
    pub correlation: f64,
    /// Shape of the spread; without jitter it has no effect.
    pub distribution: Distribution,
}

/// How often something happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Chance {
    /// Probability in percent.
    pub percent: f64,
    /// How much it depends on the packet before, in percent.
    pub correlation: f64,
}

/// Which packets are sent at once.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Reorder {
    /// Probability, for the packets that it may happen to.
    pub chance: Chance,
    /// Only each `gap`-th packet; 0 counts as 1.
    pub gap: u32,
}

/// Which packets are lost. All values are percentages.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Loss {
    /// Each packet by itself, or depending on the one before.
    Random(Chance),
    /// Two states, good and bad, with a loss in each.
    GilbertElliott {
        /// From good to bad.
        to_bad: f64,
        /// From bad to good.
        to_good: f64,
        /// Lost while bad.
        loss_in_bad: f64,
        /// Lost while good.
        loss_in_good: f64,
    },
    /// Four states: gap (1), burst (2), lost in a burst (3), lost in a gap (4); `p13` is the
    /// probability to go from state 1 to state 3.
    FourState {
        /// Gap to lost in a burst.
        p13: f64,
        /// Lost in a burst to gap.
        p31: f64,
        /// Lost in a burst to burst.
        p32: f64,
        /// Burst to lost in a burst.
        p23: f64,
        /// Gap to lost in a gap.
        p14: f64,
    },
}

impl Default for Loss {
    fn default() -> Self {
        Self::Random(Chance::default())
    }
}

impl Netem {
    /// A queue of `limit` packets that does nothing to them.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            delay: Delay::default(),
            loss: Loss::default(),
            duplicate: Chance::default(),
            corrupt: Chance::default(),
            reorder: Reorder::default(),
            rate: 0,
        }
    }

    /// Whether the kernel, which holds `held`, does what this says. Everything is compared but the
    /// distribution, which the kernel does not tell.
    ///
    /// # Errors
    /// When one of the two is not possible.
    pub fn matches(&self, held: &Self) -> Result<bool, NetemError> {
        Ok(Raw::of(self)? == Raw::of(held)?)
    }
}

/// The options in the kernel's units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Raw {
    limit: u32,
    gap: u32,
    latency: u64,
    jitter: u64,
    delay_correlation: u32,
    loss: RawLoss,
    duplicate: (u32, u32),
    corrupt: (u32, u32),
    reorder: (u32, u32),
    bytes_per_second: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RawLoss {
    Random(u32, u32),
    GilbertElliott([u32; 4]),
    FourState([u32; 5]),
}

impl Raw {
    fn of(netem: &Netem) -> Result<Self, NetemError> {
        let Netem {
            limit,
            delay,
            loss,
            duplicate,
            corrupt,
            reorder,
            rate,
        } = netem;
        if *limit == 0 {
            return Err(NetemError::Limit);
        }
        if (1..8).contains(rate) {
            return Err(NetemError::Rate(*rate));
        }
        Ok(Self {
            limit: *limit,
            gap: reorder.gap.max(u32::from(reorder.chance.percent > 0.0)),
            latency: nanoseconds("latency", delay.latency, i64::MAX.cast_unsigned())?,
            jitter: nanoseconds("jitter", delay.jitter, u64::from(i32::MAX.cast_unsigned()))?,
            delay_correlation: from_percent("delay correlation", delay.correlation)?,
            loss: RawLoss::of(loss)?,
            duplicate: from_chance("duplicate", duplicate)?,
            corrupt: from_chance("corrupt", corrupt)?,
            reorder: from_chance("reorder", &reorder.chance)?,
            bytes_per_second: rate / 8,
        })
    }

    fn netem(&self) -> Netem {
        Netem {
            limit: self.limit,
            delay: Delay {
                latency: Duration::from_nanos(self.latency),
                jitter: Duration::from_nanos(self.jitter),
                correlation: to_percent(self.delay_correlation),
                distribution: Distribution::default(),
            },
            loss: self.loss.loss(),
            duplicate: to_chance(self.duplicate),
            corrupt: to_chance(self.corrupt),
            reorder: Reorder {
                chance: to_chance(self.reorder),
                gap: self.gap,
            },
            rate: self.bytes_per_second.saturating_mul(8),
        }
    }

    fn encode(&self) -> Encoder {
        let (random_loss, loss_correlation) = match self.loss {
            RawLoss::Random(percent, correlation) => (percent, correlation),
            RawLoss::GilbertElliott(_) | RawLoss::FourState(_) => (0, 0),
        };
        let correlations = [self.delay_correlation, loss_correlation, self.duplicate.1];
        let small_rate = u32::try_from(self.bytes_per_second).unwrap_or(u32::MAX);
        let mut options = Encoder::new();
        // Latency and jitter stand in the header in clock ticks; the 64-bit attributes replace them.
        options
            .raw(&words(&[
                0,
                self.limit,
                random_loss,
                self.gap,
                self.duplicate.0,
                0,
            ]))
            .u64(LATENCY64, self.latency)
            .u64(JITTER64, self.jitter)
            .bytes(CORRELATION, &words(&correlations))
            .bytes(REORDER, &words(&[self.reorder.0, self.reorder.1]))
            .bytes(CORRUPT, &words(&[self.corrupt.0, self.corrupt.1]))
            .bytes(RATE, &words(&[small_rate, 0, 0, 0]));
        if self.bytes_per_second > u64::from(u32::MAX) {
            options.u64(RATE64, self.bytes_per_second);
        }
        match self.loss {
            RawLoss::Random(..) => {}
            RawLoss::GilbertElliott(values) => {
                options.nest(LOSS, |loss| {
                    loss.bytes(GILBERT_ELLIOTT, &words(&values));
                });
            }
            RawLoss::FourState(values) => {
                options.nest(LOSS, |loss| {
                    loss.bytes(FOUR_STATE, &words(&values));
                });
            }
        }
        options
    }

    fn decode(options: &[u8]) -> Result<Self, DecodeError> {
        let [_, limit, random_loss, gap, duplicate, _] = read_words(options)?;
        let attrs = Attrs::parse(tail(options, HEADER))?;
        let value = |kind| attrs.require(kind).map(|attr| attr.value());
        let [delay_correlation, loss_correlation, duplicate_correlation] =
            read_words(value(CORRELATION)?)?;
        let loss = match attrs.get(LOSS) {
            Some(loss) => RawLoss::decode(&loss.nested()?)?,
            None => RawLoss::Random(random_loss, loss_correlation),
        };
        let bytes_per_second = match attrs.get(RATE64) {
            Some(rate) => rate.u64()?,
            None => u64::from(attrs.require(RATE)?.u32()?),
        };
        Ok(Self {
            limit,
            gap,
            latency: attrs.require(LATENCY64)?.u64()?,
            jitter: attrs.require(JITTER64)?.u64()?,
            delay_correlation,
            loss,
            duplicate: (duplicate, duplicate_correlation),
            corrupt: read_words::<2>(value(CORRUPT)?)?.into(),
            reorder: read_words::<2>(value(REORDER)?)?.into(),
            bytes_per_second,
        })
    }
}

impl RawLoss {
    fn of(loss: &Loss) -> Result<Self, NetemError> {
        let percent = |value: f64| from_percent("loss", value);
        Ok(match *loss {
            Loss::Random(chance) => {
                Self::Random(percent(chance.percent)?, percent(chance.correlation)?)
            }
            // The kernel holds what is *not* lost in the bad state (`loss_gilb_ell`).
            Loss::GilbertElliott {
                to_bad,
                to_good,
                loss_in_bad,
                loss_in_good,
            } => Self::GilbertElliott([
                percent(to_bad)?,
                percent(to_good)?,
                u32::MAX - percent(loss_in_bad)?,
                percent(loss_in_good)?,
            ]),
            Loss::FourState {
                p13,
                p31,
                p32,
                p23,
                p14,
            } => Self::FourState([
                percent(p13)?,
                percent(p31)?,
                percent(p32)?,
                percent(p14)?,
                percent(p23)?,
            ]),
        })
    }

    fn loss(self) -> Loss {
        match self {
            Self::Random(percent, correlation) => Loss::Random(to_chance((percent, correlation))),
            Self::GilbertElliott([to_bad, to_good, kept_in_bad, loss_in_good]) => {
                Loss::GilbertElliott {
                    to_bad: to_percent(to_bad),
                    to_good: to_percent(to_good),
                    loss_in_bad: to_percent(u32::MAX - kept_in_bad),
                    loss_in_good: to_percent(loss_in_good),
                }
            }
            Self::FourState([p13, p31, p32, p14, p23]) => Loss::FourState {
                p13: to_percent(p13),
                p31: to_percent(p31),
                p32: to_percent(p32),
                p23: to_percent(p23),
                p14: to_percent(p14),
            },
        }
    }

    fn decode(attrs: &Attrs<'_>) -> Result<Self, DecodeError> {
        if let Some(values) = attrs.get(GILBERT_ELLIOTT) {
            return Ok(Self::GilbertElliott(read_words(values.value())?));
        }
        let values = attrs.require(FOUR_STATE)?;
        Ok(Self::FourState(read_words(values.value())?))
    }
}

/// The options as the kernel takes them, the distribution's table among them.
pub(super) fn encode(netem: &Netem) -> Result<Encoder, NetemError> {
    let mut options = Raw::of(netem)?.encode();
    if let Some(table) = netem.delay.distribution.table() {
        let bytes: Vec<u8> = table.iter().flat_map(|value| value.to_ne_bytes()).collect();
        options.bytes(DELAY_DISTRIBUTION, &bytes);
    }
    Ok(options)
}

/// The options as the kernel shows them; the distribution is left at its default.
pub(super) fn decode(options: &[u8]) -> Result<Netem, DecodeError> {
    Ok(Raw::decode(options)?.netem())
}

/// Scales a percentage to the kernel's 32 bits, 100 to the largest value.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn from_percent(option: &'static str, percent: f64) -> Result<u32, NetemError> {
    if (0.0..=100.0).contains(&percent) {
        Ok((percent / 100.0 * f64::from(u32::MAX)).round() as u32)
    } else {
        Err(NetemError::Percent { option, percent })
    }
}

fn to_percent(value: u32) -> f64 {
    f64::from(value) / f64::from(u32::MAX) * 100.0
}

fn from_chance(option: &'static str, chance: &Chance) -> Result<(u32, u32), NetemError> {
    let correlation = from_percent(option, chance.correlation)?;
    Ok((from_percent(option, chance.percent)?, correlation))
}

fn to_chance((percent, correlation): (u32, u32)) -> Chance {
    Chance {
        percent: to_percent(percent),
        correlation: to_percent(correlation),
    }
}

fn nanoseconds(option: &'static str, time: Duration, most: u64) -> Result<u64, NetemError> {
    match u64::try_from(time.as_nanos()) {
        Ok(nanoseconds) if nanoseconds <= most => Ok(nanoseconds),
        _ => Err(NetemError::TooLong { option, time }),
    }
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn read_words<const N: usize>(bytes: &[u8]) -> Result<[u32; N], DecodeError> {
    let mut words = [0; N];
    for (position, word) in words.iter_mut().enumerate() {
        *word = u32::from_ne_bytes(head("netem's options", tail(bytes, position * 4))?);
    }
    Ok(words)
}

#[cfg(test)]
#[path = "netem_tests.rs"]
mod tests;
