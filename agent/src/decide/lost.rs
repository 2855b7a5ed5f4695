//! Tests of what is said and done where the journal does not know what an agent before had begun.

use std::time::Duration;

use windtunnel_crds::{
    injection::{InjectionPhase, TargetState},
    residue::{Residue, ResidueKind},
};

use super::{
    Step,
    checks::audit,
    decide,
    testing::{Sim, sweep},
};
use crate::{
    model::{Ended, State},
    testing::key,
};

/// In place on these pods; then the agent ends, and the next one looks at the node. It knows what
/// was reported, and of the journal what `keep` leaves of it.
fn restarted(pods: &[&str], keep: &[&str]) -> Sim {
    let mut sim = Sim::injected(pods);
    sim.injection().status = Some(sim.last().clone());
    sim.o.entries.retain(|key, _| keep.contains(&&*key.pod));
    sim.o.live.clear();
    sim.o.preparations.clear();
    sim.o.reports.clear();
    sim.o.sweep = None;
    sim
}

fn left(name: &str) -> Residue {
    Residue {
        node: String::new(),
        kind: ResidueKind::Link,
        name: name.to_owned(),
        pod: String::new(),
        removed: false,
        message: "busy".to_owned(),
    }
}

#[test]
fn a_new_agent_looks_at_the_node_before_anything_else() {
    let mut sim = Sim::new(&["a"]);
    sim.o.sweep = None;
    assert_eq!(decide(&sim.o, sim.now).steps, [Step::Sweep]);
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Prepared);
}

#[test]
fn what_was_lost_has_ended_and_is_not_begun_again() {
    for (boot_id, reason) in [("boot", "JournalLost"), ("next", "NodeRebooted")] {
        let mut sim = restarted(&["a"], &[]);
        sim.o.boot_id = boot_id.to_owned();
        sim.settle();
        assert_eq!(
            (sim.target("a").state, sim.target("a").reason.as_str()),
            (TargetState::Interrupted, reason)
        );
        assert_eq!(sim.last().phase, InjectionPhase::Recovered);
        assert_eq!(sim.starts, 1);
        let audit = sim.last().audit.clone().unwrap();
        let looked = sim.o.sweep.as_ref().unwrap().at;
        assert_eq!(audit.checked_at.unwrap().0, looked, "not before it looked");
        assert_eq!(audit.rechecked_at, None);
    }
}

#[test]
fn nothing_is_called_clean_that_could_not_be_looked_at() {
    let mut sim = restarted(&["a"], &[]);
    let mut look = sweep(sim.now.boot);
    look.unread = Some("no access".to_owned());
    sim.o.sweep = Some(look);
    sim.settle();
    let audit = sim.last().audit.clone().unwrap();
    assert_eq!(audit.checked_at, None);
    sim.advance(60_000);
    assert_eq!(sim.pass()[..1], [Step::Sweep], "it is looked at again");
    sim.settle();
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
}

#[test]
fn what_a_look_finds_and_cannot_remove_is_residue_and_tried_again() {
    let mut sim = restarted(&["a"], &[]);
    let mut look = sweep(sim.now.boot);
    look.residue = vec![left("wt0")];
    sim.o.sweep = Some(look);
    sim.settle();
    let audit = sim.last().audit.clone().unwrap();
    assert!(!audit.residue[0].removed);
    let is_tried = |sim: &Sim| decide(&sim.o, sim.now).steps.contains(&Step::Sweep);
    assert!(!is_tried(&sim), "at once");
    sim.now.boot += Duration::from_secs(5);
    assert!(is_tried(&sim));
    sim.o.sweep.as_mut().unwrap().residue[0].removed = true;
    assert!(!is_tried(&sim), "gone");
    sim.settle();
    assert!(sim.last().audit.as_ref().unwrap().residue[0].removed);
}

/// The operator may have taken in meanwhile that the target was never hit.
#[test]
fn what_a_look_has_found_is_told_until_it_is_gone() {
    for keep in [&[][..], &["b"]] {
        let mut sim = restarted(&["a", "b"], keep);
        let mut look = sweep(sim.now.boot);
        look.residue = vec![left("wt0"), left("wt1")];
        sim.o.sweep = Some(look);
        sim.settle();
        for removed in [0, 1] {
            let mut told = sim.last().clone();
            assert_eq!(told.audit.as_ref().unwrap().residue.len(), 2);
            for target in &mut told.targets {
                target.state = TargetState::Failed;
            }
            sim.injection().status = Some(told);
            for residue in &mut sim.o.sweep.as_mut().unwrap().residue[..removed] {
                residue.removed = true;
            }
            sim.advance(600);
            sim.settle();
            let audit = sim.last().audit.clone().unwrap();
            let gone = audit.residue.iter().filter(|r| r.removed).count();
            assert_eq!((gone, audit.residue.len()), (removed, 2), "{keep:?}");
        }
        // The agent after this one finds nothing: what was left is gone.
        sim.injection().status = Some(sim.last().clone());
        sim.o.sweep = Some(sweep(sim.now.boot));
        sim.advance(5_000);
        sim.settle();
        let audit = sim.last().audit.clone().unwrap();
        assert_eq!(audit.residue.iter().filter(|r| r.removed).count(), 2);
    }
}

/// What the look does not find may be an entry's, which is looked at by itself.
#[test]
fn nothing_is_gone_before_every_entry_was_looked_at() {
    let mut sim = restarted(&["a", "b"], &["b"]);
    let mut look = sweep(sim.now.boot);
    look.residue = vec![left("wt0")];
    sim.o.sweep = Some(look);
    sim.settle();
    sim.injection().status = Some(sim.last().clone());
    sim.o.sweep = Some(sweep(sim.now.boot));
    let checked = |sim: &mut Sim, checked| match &mut sim.entry(&key("b")).state {
        State::Ended(ended) => std::mem::replace(&mut ended.checked, checked),
        state => panic!("{state:?}"),
    };
    let is_gone = |sim: &mut Sim| {
        let injection = sim.injection().clone();
        let uid = injection.metadata.uid.as_deref().unwrap();
        let told = audit(&sim.o, uid, &injection, InjectionPhase::Recovered).unwrap();
        told.residue[0].removed
    };
    let before = checked(&mut sim, None);
    assert!(before.is_some() && !is_gone(&mut sim));
    checked(&mut sim, before);
    assert!(is_gone(&mut sim));
}

/// Also if the second check found it, and nobody wants to know any more.
#[test]
fn what_is_left_is_remembered_until_it_is_gone() {
    let mut sim = Sim::injected(&["a"]);
    sim.injection().spec.abort = true;
    sim.settle();
    let ended = |sim: &mut Sim, change: &dyn Fn(&mut Ended)| match &mut sim.entry(&key("a")).state {
        State::Ended(ended) => change(ended),
        state => panic!("{state:?}"),
    };
    let at = sim.now.wall;
    ended(&mut sim, &|ended| {
        ended.rechecked = Some(at);
        ended.residue = vec![left("wt0")];
    });
    sim.o.injections = Some([].into());
    sim.settle();
    assert_eq!(sim.o.entries.len(), 1);
    sim.now.boot += Duration::from_secs(5);
    let clean = Step::Clean { key: key("a") };
    assert!(decide(&sim.o, sim.now).steps.contains(&clean));
    ended(&mut sim, &|ended| ended.residue[0].removed = true);
    sim.settle();
    assert_eq!(sim.o.entries.len(), 0);
}

#[test]
fn one_lost_target_of_two_is_not_covered_by_the_check_of_the_other() {
    let mut sim = restarted(&["a", "b"], &["a"]);
    let mut look = sweep(sim.now.boot);
    look.unread = Some("no access".to_owned());
    sim.o.sweep = Some(look);
    sim.settle();
    let ended = |sim: &mut Sim| match &sim.entry(&key("a")).state {
        State::Ended(ended) => ended.clone(),
        state => panic!("{state:?}"),
    };
    assert!(ended(&mut sim).checked.is_some());
    assert_eq!(sim.last().audit.as_ref().unwrap().checked_at, None);
    sim.o.sweep = Some(sweep(sim.now.boot));
    sim.settle();
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
    assert_eq!(sim.target("b").reason, "JournalLost");
}

#[test]
fn what_was_checked_before_stays_so_once_it_is_reported() {
    let mut sim = restarted(&["a"], &[]);
    sim.settle();
    let told = sim.last().clone();
    sim.injection().status = Some(told.clone());
    sim.o.reports.clear();
    let mut look = sweep(sim.now.boot);
    look.unread = Some("no access".to_owned());
    sim.o.sweep = Some(look);
    let count = sim.told.len();
    sim.settle();
    assert_eq!(sim.told.len(), count, "nothing is news");
}

/// A full journal did not take an end, or an effect that was read back; then the agent died. What was
/// told of it stands.
#[test]
fn what_was_told_of_an_end_outlives_a_journal_that_could_not_be_written() {
    let over = |sim: &mut Sim, injected: bool| {
        let entry = sim.entry(&key("a"));
        let mut ended = crate::replay::outlived(entry, "boot", false, Sim::new(&["a"]).now);
        ended.injected_at = ended.injected_at.filter(|_| injected);
        entry.state = State::Ended(ended);
        sim.settle();
    };
    let mut sim = restarted(&["a"], &["a"]);
    let told = {
        let status = sim.injection().status.as_mut().unwrap();
        status.targets[0].state = TargetState::Recovered;
        status.targets[0].clone()
    };
    assert!(told.injected_at.is_some());
    over(&mut sim, true);
    assert_eq!(*sim.target("a"), told, "the end");
    let mut sim = restarted(&["a"], &["a"]);
    over(&mut sim, false);
    let target = sim.target("a");
    assert_eq!(target.state, TargetState::Interrupted);
    assert_eq!(target.injected_at, told.injected_at, "the effect");
}
