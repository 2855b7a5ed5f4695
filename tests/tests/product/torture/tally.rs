//! How long effects were seen after what ended them, over all rounds.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use windtunnel_tests::product::deck::{Kind, Round};
use windtunnel_tests::spread;

use super::deeds::DEEDS;
use super::{Seen, is_ended_by_deed};

/// All that was seen.
#[derive(Default)]
pub(super) struct Tally {
    kinds: BTreeMap<Kind, Column>,
    /// By the deed that ended them.
    deeds: BTreeMap<usize, Column>,
}

/// What effects have in common that are told in one line.
#[derive(Default)]
struct Column {
    faults: usize,
    /// How long they were seen after their windows, and after what ended them before that: the deed, or
    /// the user.
    after_window: Vec<Duration>,
    after_end: Vec<Duration>,
}

impl Column {
    fn note(&mut self, seen: &Seen) {
        self.faults += 1;
        if let Some(late) = seen.late {
            let column = if seen.is_early {
                &mut self.after_end
            } else {
                &mut self.after_window
            };
            column.push(late);
        }
    }

    fn seen(&self) -> usize {
        self.after_window.len() + self.after_end.len()
    }
}

impl Tally {
    pub(super) fn note(&mut self, round: &Round, seen: &Seen) {
        self.kinds.entry(seen.kind).or_default().note(seen);
        if is_ended_by_deed(round) && seen.is_early {
            self.deeds.entry(round.deed).or_default().note(seen);
        }
    }

    /// Kinds that were seen in no round.
    pub(super) fn missing(&self) -> Vec<Kind> {
        let is_missing = |kind: &Kind| self.kinds.get(kind).is_none_or(|k| k.seen() == 0);
        Kind::ALL.into_iter().filter(is_missing).collect()
    }
}

impl Display for Tally {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let kinds = self.kinds.iter().map(|(kind, all)| (kind.name(), all));
        let deeds = self
            .deeds
            .iter()
            .map(|(deed, all)| (DEEDS[*deed].name, all));
        for (name, all) in kinds.chain(deeds) {
            writeln!(
                f,
                "{name:24} seen {} of {} times; last after its window {}; after what ended it before {}",
                all.seen(),
                all.faults,
                tell(&all.after_window),
                tell(&all.after_end),
            )?;
        }
        Ok(())
    }
}

/// Median, 99th percentile and worst.
fn tell(all: &[Duration]) -> String {
    if all.is_empty() {
        return "never".to_owned();
    }
    let [half, most, worst] = spread(all).map(|late| late.as_secs_f64());
    format!("p50 {half:.1}, p99 {most:.1}, worst {worst:.1} s")
}
