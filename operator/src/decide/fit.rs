//! How much a status takes, by its schema. One that is too long would be refused for ever, and the
//! run would hang without a word; so whatever agents, peers and API servers say is cut to that.

use windtunnel_crds::{ChaosExperimentStatus, names::truncate};

/// The longest message, in bytes.
const MESSAGE: usize = 4096;
/// The most notes of a fault.
const NOTES: usize = 64;

/// Cuts a status to what its schema takes.
pub(crate) fn fit(status: &mut ChaosExperimentStatus) {
    clip(&mut status.message);
    for condition in &mut status.conditions {
        clip(&mut condition.message);
    }
    for fault in &mut status.faults {
        clip(&mut fault.message);
        shorten(&mut fault.notes);
    }
}

fn clip(message: &mut String) {
    message.truncate(truncate(message, MESSAGE).len());
}

/// The first of the notes, and how many are left out.
fn shorten(notes: &mut Vec<String>) {
    let left_out = notes.len().saturating_sub(NOTES - 1);
    if left_out > 1 {
        notes.truncate(NOTES - 1);
        notes.push(format!("and {left_out} more"));
    }
    notes.iter_mut().for_each(clip);
}
