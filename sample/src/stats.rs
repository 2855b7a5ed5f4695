//! What a service sees of its calls, second by second.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

/// How many seconds are kept.
const KEPT: usize = 120;

/// The calls of one second, by the time they ended.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Second {
    /// Seconds since 1970.
    pub(crate) at: u64,
    /// Calls that succeeded.
    pub(crate) ok: usize,
    /// Calls that failed.
    pub(crate) failed: usize,
    /// Median of how long all of them took, in milliseconds.
    pub(crate) p50_millis: u64,
    /// 99th percentile.
    pub(crate) p99_millis: u64,
}

#[derive(Debug, Default)]
struct Open {
    at: u64,
    ok: usize,
    failed: usize,
    took: Vec<u64>,
}

/// Calls so far.
#[derive(Debug, Default)]
pub(crate) struct Stats(Mutex<(Open, VecDeque<Second>)>);

impl Stats {
    /// A call has ended.
    pub(crate) fn count(&self, is_ok: bool, took: Duration) {
        let now = now();
        let mut held = self.lock();
        close(&mut held, now);
        let open = &mut held.0;
        if is_ok {
            open.ok += 1;
        } else {
            open.failed += 1;
        }
        open.took
            .push(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
    }

    /// The seconds that are over.
    pub(crate) fn seconds(&self) -> Vec<Second> {
        let mut held = self.lock();
        close(&mut held, now());
        held.1.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, (Open, VecDeque<Second>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts the open second away if it is over.
fn close(held: &mut (Open, VecDeque<Second>), now: u64) {
    let (open, seconds) = held;
    if open.at == now {
        return;
    }
    if open.at > 0 {
        open.took.sort_unstable();
        let at = |percent: usize| {
            open.took
                .get((open.took.len() * percent / 100).min(open.took.len().saturating_sub(1)))
                .copied()
        };
        seconds.push_back(Second {
            at: open.at,
            ok: open.ok,
            failed: open.failed,
            p50_millis: at(50).unwrap_or_default(),
            p99_millis: at(99).unwrap_or_default(),
        });
        if seconds.len() > KEPT {
            seconds.pop_front();
        }
    }
    *open = Open {
        at: now,
        ..Open::default()
    };
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}
