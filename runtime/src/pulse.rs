//! Liveness: a process lives as long as the loop that matters turns.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a loop that matters may stand still before its process is to be restarted.
pub const STANDSTILL: Duration = Duration::from_secs(15);

/// The beat of a loop. A process whose loop has missed its beat is not live.
#[derive(Clone, Debug)]
pub struct Pulse {
    origin: Instant,
    limit: Duration,
    /// Milliseconds from the origin to the last beat.
    last: Arc<AtomicU64>,
}

impl Pulse {
    /// A pulse that beats now, and must beat again within `limit` each time.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self {
            origin: Instant::now(),
            limit,
            last: Arc::default(),
        }
    }

    /// The loop turns.
    pub fn beat(&self) {
        self.last.store(self.elapsed(), Ordering::Relaxed);
    }

    /// Whether the last beat is recent enough.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let since = self
            .elapsed()
            .saturating_sub(self.last.load(Ordering::Relaxed));
        Duration::from_millis(since) <= self.limit
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_stands_still_is_not_live() {
        let limit = Duration::from_secs(10);
        let mut pulse = Pulse::new(limit);
        assert!(pulse.is_live());
        // As if it had begun long ago.
        if let Some(earlier) = pulse.origin.checked_sub(limit * 2) {
            pulse.origin = earlier;
            assert!(!pulse.is_live());
            pulse.beat();
            assert!(pulse.is_live());
        }
    }
}
