//! How long effects were seen after what ended them, over all rounds.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use windtunnel_tests::product::deck::{Kind, Round};

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
    let mut all = all.to_vec();
    all.sort();
    let at = |percent: usize| {
        let at = (all.len() * percent).div_ceil(100).max(1) - 1;
        all.get(at).copied().unwrap_or_default().as_secs_f64()
    };
    if all.is_empty() {
        return "never".to_owned();
    }
    format!(
        "p50 {:.1}, p99 {:.1}, worst {:.1} s",
        at(50),
        at(99),
        at(100)
    )
}
