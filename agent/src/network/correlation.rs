//! netem's correlated chance, and what to ask of it.
//!
//! For each packet netem draws `x = (1 - c) · u + c · last x` with `u` even between 0 and 1, and
//! something happens where `x` is below the percentage (`get_crandom` of the kernel's
//! `net/sched/sch_netem.c`). Such numbers lie the closer to one half the higher the correlation `c` is:
//! of 20 % there would be left 10 % at a correlation of 25 %, 3 % at 50 % and none at 90 %. So the
//! percentage that netem is given is the quantile of their distribution.

/// Steps of the distribution's table.
const STEPS: usize = 2_000;
/// Share of the first distribution's shape that is left in the last.
const REST: f64 = 1e-4;
/// The most that is reckoned with, in percent.
pub(super) const MOST: f64 = 99.0;

/// The percentage that netem is to be given, so that something happens to `percent` of all packets,
/// each with `correlation` to the one before, both in percent.
pub(super) fn threshold(percent: f64, correlation: f64) -> f64 {
    let c = correlation / 100.0;
    if c <= 0.0 || percent <= 0.0 || percent >= 100.0 {
        return percent;
    }
    let distribution = stationary(c);
    let wanted = percent / 100.0;
    let above = distribution.partition_point(|share| *share < wanted);
    let below = above.saturating_sub(1);
    let (low, high) = (distribution[below], distribution[above.min(STEPS)]);
    let part = if high > low {
        (wanted - low) / (high - low)
    } else {
        0.0
    };
    100.0 * (at(below) + part * (at(above) - at(below)))
}

/// How often numbers of this correlation are below each step, in the long run: the distribution that
/// the draw leaves as it is.
fn stationary(c: f64) -> Vec<f64> {
    // Even numbers of the right mean and width: what their shape is besides, each draw leaves the
    // fourth power of the correlation of.
    let width = ((1.0 - c) / (1.0 + c)).sqrt();
    let even = |step| (0.5 + (at(step) - 0.5) / width).clamp(0.0, 1.0);
    let mut below: Vec<f64> = (0..=STEPS).map(even).collect();
    let mut rest = 1.0;
    while rest > REST {
        // Of x = v + c · last, with v even below 1 - c: the mean of the last distribution over a
        // stretch, from its integral.
        let sums: Vec<f64> = std::iter::once(0.0)
            .chain(below.windows(2).scan(0.0, |sum, pair| {
                *sum += f64::midpoint(pair[0], pair[1]) * at(1);
                Some(*sum)
            }))
            .collect();
        let whole = |y: f64| match y {
            y if y <= 0.0 => 0.0,
            y if y >= 1.0 => sums[STEPS] + y - 1.0,
            y => between(&sums, y),
        };
        below = (0..=STEPS)
            .map(|step| {
                let stretch = whole(at(step) / c) - whole((at(step) - (1.0 - c)) / c);
                (c / (1.0 - c) * stretch).clamp(0.0, 1.0)
            })
            .collect();
        rest *= c.powi(4);
    }
    below
}

/// A value of a table at a place between 0 and 1.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and the number of steps"
)]
fn between(table: &[f64], y: f64) -> f64 {
    let place = y / at(1);
    let step = (place as usize).min(STEPS - 1);
    table[step] + (place - at(step) / at(1)) * (table[step + 1] - table[step])
}

/// Where a step lies.
#[expect(clippy::cast_precision_loss, reason = "some thousand steps")]
fn at(step: usize) -> f64 {
    step as f64 / STEPS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of packets that the kernel's own arithmetic picks, in percent.
    fn picked(percent: f64, correlation: f64) -> f64 {
        let packets = packets(correlation);
        let whole = f64::from(u32::MAX);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "shares of 32 bits"
        )]
        let share = |percent: f64| (percent / 100.0 * whole) as u32;
        let (limit, rho) = (share(percent), u64::from(share(correlation)) + 1);
        let (mut random, mut last, mut hits) = (0x2545_f491_4f6c_dd1d_u64, 0_u64, 0_u32);
        for _ in 0..packets {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let value = random >> 32;
            let sum = u128::from(value) * u128::from((1 << 32) - rho)
                + u128::from(last) * u128::from(rho);
            last = u64::try_from(sum >> 32).unwrap();
            hits += u32::from(last <= u64::from(limit));
        }
        100.0 * f64::from(hits) / f64::from(packets)
    }

    /// So many that the share can be told.
    fn packets(correlation: f64) -> u32 {
        if correlation < 95.0 {
            400_000
        } else {
            4_000_000
        }
    }

    #[test]
    fn the_share_is_what_was_asked_for_whatever_the_correlation() {
        assert!(picked(20.0, 50.0) < 5.0, "as the kernel takes it");
        for percent in [1.0, 10.0, 20.0, 50.0, 90.0] {
            for correlation in [0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, MOST] {
                let found = picked(threshold(percent, correlation), correlation);
                // A run of equal fates counts as one: the higher the correlation, the fewer.
                let runs =
                    f64::from(packets(correlation)) * (100.0 - correlation) / (100.0 + correlation);
                let deviation = (percent * (100.0 - percent) / runs).sqrt();
                let allowed = 4.0 * deviation + 0.02 * percent;
                assert!(
                    (found - percent).abs() < allowed,
                    "{percent} % at {correlation} %: {found} %, {allowed} off at most"
                );
            }
        }
    }

    #[test]
    fn all_and_none_stay_so() {
        for correlation in [0.0, 50.0, MOST] {
            assert!((threshold(100.0, correlation) - 100.0).abs() < f64::EPSILON);
            assert!(threshold(0.0, correlation).abs() < f64::EPSILON);
        }
    }
}
