//! Waiting for a condition, with a bound: the only place that sleeps.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(250);

/// Calls `probe` until it returns a value, and returns that; fails once `bound` is over.
///
/// An error of the probe ends the wait at once: a condition that may still come true is `Ok(None)`.
///
/// # Errors
/// What the probe failed with, or that `what` did not come true within the bound.
pub fn until<T>(
    what: &str,
    bound: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    let mut pause = SHORTEST;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if start.elapsed() >= bound {
            bail!("{what}: not within {:.1} s", bound.as_secs_f64());
        }
        thread::sleep(pause);
        pause = (pause * 3 / 2).min(LONGEST);
    }
}

/// Lets time pass until a moment, where time itself is what is waited for.
pub fn reach(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_first_value() {
        let mut calls = 0;
        let value = until("third call", Duration::from_secs(5), || {
            calls += 1;
            Ok((calls == 3).then_some(calls))
        });
        assert_eq!(value.unwrap(), 3);
    }

    #[test]
    fn names_what_did_not_happen() {
        let error = until::<()>("the moon", Duration::ZERO, || Ok(None)).unwrap_err();
        assert_eq!(error.to_string(), "the moon: not within 0.0 s");
    }
}
