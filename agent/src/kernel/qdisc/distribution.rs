//! Tables that give netem's jitter its shape.
//!
//! A table holds 4096 equally likely values in units of the jitter, scaled by 8192
//! (`NETEM_DIST_SCALE`); the kernel draws one for each packet (`tabledist` in `sch_netem.c`).
//! The shapes are those that iproute2 ships under the same names, computed here once per process.

use std::sync::LazyLock;

/// Values in a table.
const SIZE: u32 = 4096;

/// What stands for one jitter.
const SCALE: f64 = 8192.0;

/// How jitter is spread around the latency.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub enum Distribution {
    /// Evenly over latency ± jitter: the kernel's own, without a table.
    #[default]
    Uniform,
    /// Normal, with the jitter as standard deviation, up to ± 4 of them.
    Normal,
    /// Pareto of shape 3, shifted to a mean of 0: mostly a little early, sometimes very late.
    Pareto,
    /// A quarter normal, three quarters Pareto.
    ParetoNormal,
}

impl Distribution {
    /// The table to give to the kernel; `None` for the uniform one.
    #[must_use]
    pub fn table(self) -> Option<&'static [i16]> {
        static NORMAL: LazyLock<Vec<i16>> = LazyLock::new(|| scale(normal()));
        static PARETO: LazyLock<Vec<i16>> = LazyLock::new(|| scale(pareto()));
        static PARETO_NORMAL: LazyLock<Vec<i16>> = LazyLock::new(|| {
            let mixed = normal().zip(pareto());
            scale(mixed.map(|(normal, pareto)| 0.25 * normal + 0.75 * pareto))
        });
        match self {
            Self::Uniform => None,
            Self::Normal => Some(&NORMAL),
            Self::Pareto => Some(&PARETO),
            Self::ParetoNormal => Some(&PARETO_NORMAL),
        }
    }
}

/// The probability in the middle of each value's share.
fn quantiles() -> impl Iterator<Item = f64> {
    (0..SIZE).map(|step| (f64::from(step) + 0.5) / f64::from(SIZE))
}

/// Quantiles of the standard normal distribution, by walking along its density.
fn normal() -> impl Iterator<Item = f64> {
    const STEP: f64 = 1e-4;
    let (mut x, mut below) = (-6.0_f64, 0.0_f64);
    quantiles().map(move |quantile| {
        while below < quantile && x < 6.0 {
            let middle = x + STEP / 2.0;
            below += STEP * (-middle * middle / 2.0).exp() / std::f64::consts::TAU.sqrt();
            x += STEP;
        }
        x
    })
}

/// Quantiles of a Pareto distribution of shape 3 with its mean of 3/2 taken off, ascending, as far
/// as a table can hold them.
fn pareto() -> impl Iterator<Item = f64> {
    let values = quantiles().map(|quantile| ((1.0 - quantile).powf(-1.0 / 3.0) - 1.5) * 4.0 / 3.0);
    values.map(|value| value.min(f64::from(i16::MAX) / SCALE))
}

#[allow(clippy::cast_possible_truncation)]
fn scale(values: impl Iterator<Item = f64>) -> Vec<i16> {
    // A float is cast to the nearest value that fits.
    values.map(|value| (value * SCALE).round() as i16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(table: &[i16]) -> f64 {
        let sum: f64 = table.iter().map(|value| f64::from(*value)).sum();
        sum / f64::from(SIZE) / SCALE
    }

    fn deviation(table: &[i16]) -> f64 {
        let mean = mean(table);
        let squares = table
            .iter()
            .map(|value| (f64::from(*value) / SCALE - mean).powi(2));
        (squares.sum::<f64>() / f64::from(SIZE)).sqrt()
    }

    #[test]
    fn the_uniform_distribution_needs_no_table() {
        assert_eq!(Distribution::Uniform.table(), None);
    }

    #[test]
    fn the_normal_table_has_mean_0_and_deviation_1() {
        let table = Distribution::Normal.table().unwrap();
        assert_eq!(table.len(), 4096);
        assert!(mean(table).abs() < 0.001, "{}", mean(table));
        let deviation = deviation(table);
        assert!((deviation - 1.0).abs() < 0.005, "{deviation}");
        // One in six is more than a deviation early.
        assert!((table[650] + 8192).abs() < 20, "{}", table[650]);
    }

    #[test]
    fn the_pareto_tables_are_skewed_towards_late() {
        for distribution in [Distribution::Pareto, Distribution::ParetoNormal] {
            let table = distribution.table().unwrap();
            assert_eq!(table.len(), 4096);
            assert!(mean(table).abs() < 0.05, "{}", mean(table));
            assert!(table[2048] < 0, "the median is early");
            assert!(table.is_sorted());
        }
        // (1 − 3/2) · 4/3, the earliest.
        let earliest = Distribution::Pareto.table().unwrap()[0];
        assert!((earliest + 5461).abs() <= 1, "{earliest}");
    }

    /// The same quantiles as in the tables that iproute2 installs, to half a hundredth of the jitter.
    #[test]
    fn the_tables_are_those_of_iproute2() {
        use Distribution::{Normal, Pareto, ParetoNormal};
        let shares = [1, 10, 25, 50, 75, 90, 99];
        for (distribution, theirs) in [
            (Normal, [-19121, -10504, -5525, 0, 5526, 10495, 19064]),
            (Pareto, [-5426, -5072, -4362, -2622, 955, 7141, 32767]),
            (
                ParetoNormal,
                [-8849, -6430, -4652, -1966, 2097, 7979, 29341],
            ),
        ] {
            let ours = distribution.table().unwrap();
            for (share, theirs) in shares.into_iter().zip(theirs) {
                let ours = i32::from(ours[ours.len() * share / 100]);
                let difference = (theirs - ours).abs();
                assert!(difference < 40, "{distribution:?} {share} %: {ours}");
            }
        }
    }
}
