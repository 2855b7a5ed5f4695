//! What the real kernel and the one of `tests/src/world` are both held to. The laws that are checked on
//! the latter say something about the former as far as this does.
//!
//! A part of both test programs.

use std::time::Duration;

use windtunnel_agent::wire::LEASE;

/// Longest time for what happens at once, and by which a bound may be passed.
const SLACK: Duration = Duration::from_secs(2);
/// A life that no check sees the end of.
const LONG: Duration = Duration::from_mins(1);
/// How often it is looked.
const STEP: Duration = Duration::from_millis(20);

/// Two faults, 0 and 1, that are in place beside one another.
pub(crate) trait Faults {
    /// Starts the owner of an effect, for so long at most, and returns when the effect was read back.
    fn apply(&mut self, fault: usize, life: Duration);
    /// Kills the owner.
    fn kill(&mut self, fault: usize);
    /// No owner hears of its agent any more.
    fn abandon(&mut self);
    /// Lets time pass.
    fn wait(&mut self, time: Duration);
    /// Whether the kernel shows the effect.
    fn is_applied(&mut self, fault: usize) -> bool;
}

/// Faults of which something is made before the effect, and stays after it.
pub(crate) trait Inert: Faults {
    /// How many things are made.
    const PARTS: usize;
    /// Makes the first so many of them.
    fn build(&mut self, fault: usize, parts: usize);
    /// Removes all of them, whichever there are.
    fn undo(&mut self, fault: usize);
    /// Whether the kernel has any of them.
    fn is_built(&mut self, fault: usize) -> bool;
}

/// Checks the life of effects.
pub(crate) fn effects<F: Faults>(new: impl Fn() -> F) {
    is_seen_once_it_is_applied(new());
    ends_with_its_owner_and_with_no_other(new());
    ends_at_its_deadline_whoever_lives(new());
    ends_soon_after_its_agent(new());
}

/// Checks the undoing of what is inert.
pub(crate) fn undoing<F: Inert>(new: impl Fn() -> F) {
    undone_twice_is_undone_once(new());
    for parts in 0..=F::PARTS {
        undone_is_whatever_is_built(new(), parts);
    }
    undoing_leaves_the_other_as_it_is(new());
}

fn is_seen_once_it_is_applied(mut faults: impl Faults) {
    assert!(!faults.is_applied(0));
    faults.apply(0, LONG);
    assert!(faults.is_applied(0));
    assert!(!faults.is_applied(1));
}

fn ends_with_its_owner_and_with_no_other(mut faults: impl Faults) {
    for fault in [0, 1] {
        faults.apply(fault, LONG);
    }
    faults.kill(0);
    is_gone_within(&mut faults, 0, SLACK);
    assert!(faults.is_applied(1));
}

fn ends_at_its_deadline_whoever_lives(mut faults: impl Faults) {
    faults.apply(1, LONG);
    faults.apply(0, SLACK);
    is_gone_within(&mut faults, 0, SLACK + SLACK);
    assert!(faults.is_applied(1));
}

fn ends_soon_after_its_agent(mut faults: impl Faults) {
    faults.apply(0, LONG);
    faults.abandon();
    is_gone_within(&mut faults, 0, LEASE + SLACK);
}

fn undone_twice_is_undone_once<F: Inert>(mut faults: F) {
    faults.undo(0);
    faults.build(0, F::PARTS);
    assert!(faults.is_built(0));
    for _ in 0..2 {
        faults.undo(0);
        assert!(!faults.is_built(0));
    }
}

fn undone_is_whatever_is_built(mut faults: impl Inert, parts: usize) {
    faults.build(0, parts);
    assert_eq!(faults.is_built(0), parts > 0);
    faults.undo(0);
    assert!(!faults.is_built(0));
}

fn undoing_leaves_the_other_as_it_is<F: Inert>(mut faults: F) {
    for fault in [0, 1] {
        faults.build(fault, F::PARTS);
        faults.apply(fault, LONG);
    }
    faults.kill(0);
    is_gone_within(&mut faults, 0, SLACK);
    faults.undo(0);
    assert!(!faults.is_built(0));
    assert!(faults.is_built(1) && faults.is_applied(1));
}

fn is_gone_within(faults: &mut impl Faults, fault: usize, bound: Duration) {
    let mut waited = Duration::ZERO;
    while faults.is_applied(fault) {
        assert!(waited < bound, "fault {fault} is there after {bound:?}");
        faults.wait(STEP);
        waited += STEP;
    }
}
