//! The clock of a node: as the machine's. A kernel reads the time once, when it begins to count; where it
//! stood still just then, it is late by as much for good, and agents refuse to work beside an operator
//! that is not.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime, clock_settime};

use crate::cluster::progress::say;

/// How far off it may be.
const CLOSE: i128 = 50_000_000;
/// How often it is looked at, and set: the machine may stand still meanwhile, too.
const LOOKS: usize = 10;
const TRIES: usize = 10;

/// Sets the clock by the files that the machine makes in this directory.
pub(super) fn set(directory: &Path) -> Result<()> {
    for _ in 0..TRIES {
        let late = lateness(directory)?;
        if late.abs() <= CLOSE {
            break;
        }
        say(&format!("the clock is {} ms late", late / 1_000_000));
        let right = u64::try_from(now()? + late).context("a time before 1970")?;
        clock_settime(ClockId::CLOCK_REALTIME, Duration::from_nanos(right).into())
            .context("set the clock")?;
    }
    Ok(())
}

/// How late this clock is, in nanoseconds, by the look that took least time.
fn lateness(directory: &Path) -> Result<i128> {
    let path = directory.join("clock");
    let mut looks = Vec::new();
    for _ in 0..LOOKS {
        let before = now()?;
        File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let after = now()?;
        let made = fs::metadata(&path).and_then(|made| made.modified());
        let made = made.with_context(|| format!("look at {}", path.display()))?;
        let made = made
            .duration_since(UNIX_EPOCH)
            .context("a time before 1970")?;
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        let middle = i128::midpoint(before, after);
        looks.push((after - before, i128::try_from(made.as_nanos())? - middle));
    }
    looks.sort_unstable();
    looks
        .first()
        .map(|(_, late)| *late)
        .context("no look at the clock")
}

/// Nanoseconds since 1970, by this clock.
fn now() -> Result<i128> {
    let now = clock_gettime(ClockId::CLOCK_REALTIME).context("read the clock")?;
    Ok(i128::try_from(Duration::from(now).as_nanos())?)
}
