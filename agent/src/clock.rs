//! How far this node's clock is from the operator's, judged by how long renewals of its lease
//! seem to travel: the least of the last few is the closest to the truth.

use std::collections::VecDeque;

use crate::api::Sighting;

/// How many sightings count.
const SAMPLES: usize = 5;

/// The last live sightings of one holder's lease.
#[derive(Clone, Debug, Default)]
pub struct Offset {
    holder: String,
    millis: VecDeque<i64>,
}

impl Offset {
    /// Takes a sighting into account. Another holder has another clock.
    pub fn see(&mut self, sighting: &Sighting) {
        if sighting.holder != self.holder {
            self.millis.clear();
            self.holder.clone_from(&sighting.holder);
        }
        // A listing shows a renewal of any age.
        if sighting.is_live {
            self.millis.push_back(
                sighting
                    .arrived
                    .duration_since(sighting.renewed)
                    .as_millis()
                    .try_into()
                    .unwrap_or(i64::MAX),
            );
            if self.millis.len() > SAMPLES {
                self.millis.pop_front();
            }
        }
    }

    /// How far this node's clock is ahead, in milliseconds; `None` without a sample.
    #[must_use]
    pub fn millis(&self) -> Option<i64> {
        self.millis
            .iter()
            .copied()
            .min_by_key(|millis| millis.abs())
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};

    use super::*;

    fn sighting(holder: &str, travelled: i64, is_live: bool) -> Sighting {
        let renewed = Timestamp::UNIX_EPOCH;
        Sighting {
            holder: holder.to_owned(),
            renewed,
            arrived: renewed + SignedDuration::from_millis(travelled),
            at: std::time::Duration::ZERO,
            is_live,
        }
    }

    #[test]
    fn the_least_of_the_last_live_sightings_counts() {
        let mut offset = Offset::default();
        offset.see(&sighting("a", 9_000, false));
        assert_eq!(offset.millis(), None, "a listing says nothing of travel");
        for travelled in [300, 20, 500, 400, 900] {
            offset.see(&sighting("a", travelled, true));
        }
        assert_eq!(offset.millis(), Some(20));
        for _ in 0..SAMPLES {
            offset.see(&sighting("a", -5_000, true));
        }
        assert_eq!(offset.millis(), Some(-5_000), "the clock was set back");
        offset.see(&sighting("b", 40, true));
        assert_eq!(offset.millis(), Some(40), "another leader, another clock");
    }
}
