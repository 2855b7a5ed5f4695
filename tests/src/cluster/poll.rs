//! Waiting for a condition, with a bound: the only place that sleeps.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(250);
/// What the time from one look to the next counts for at most, and at most as a part of the bound: a
/// process that stands still itself does not give up after one look.
const COUNTED: Duration = Duration::from_secs(1);
const PARTS: u32 = 10;

/// Calls `probe` until it returns a value, and returns that; fails once `bound` is over. Time that nobody
/// looked in counts little, so it is the patience of a test: how long something took is measured apart.
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
    let most = COUNTED.max(bound / PARTS);
    let (mut pause, mut passed, mut begun) = (SHORTEST, Duration::ZERO, Instant::now());
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        // The look itself counts.
        let now = Instant::now();
        if passed + most.min(now - begun) >= bound {
            bail!("{what}: not within {:.1} s", bound.as_secs_f64());
        }
        thread::sleep(pause);
        let now = Instant::now();
        passed += most.min(now - begun);
        begun = now;
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
    fn time_that_nobody_looked_in_counts_little() {
        let mut calls = 0;
        let value = until("third call", Duration::from_millis(1_500), || {
            calls += 1;
            thread::sleep(Duration::from_millis(if calls == 1 { 1_600 } else { 0 }));
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
