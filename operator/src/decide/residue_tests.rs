//! What nodes find after the end, and who still says so.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use windtunnel_crds::{
    conditions::ConditionType as C,
    injection::{InjectionPhase as I, TargetState as T},
    residue::{Residue, ResidueKind},
};

use super::{
    cleanup,
    testing::{DELAY, Sim, is, pods, seconds},
};

/// A delay on two pods of two nodes, in place.
fn running() -> Sim {
    Sim::in_place(DELAY, pods(2))
}

/// The first node finds a link, and can remove it or not.
fn audit(sim: &mut Sim, removed: bool) {
    residue(sim, 0, removed);
}

/// A node finds a link, and can remove it or not.
fn residue(sim: &mut Sim, index: usize, removed: bool) {
    let residue = Residue {
        node: String::new(),
        kind: ResidueKind::Link,
        name: "wt0".to_owned(),
        pod: "shop/p0".to_owned(),
        removed,
        message: "busy".to_owned(),
    };
    let status = sim.observed.injections[index].status.as_mut().unwrap();
    status.audit.as_mut().unwrap().residue = vec![residue];
    sim.settle();
}

/// A node has checked its targets again.
fn recheck(sim: &mut Sim, index: usize) {
    let status = sim.observed.injections[index].status.as_mut().unwrap();
    let audit = status.audit.as_mut().unwrap();
    audit.rechecked_at = Some(MicroTime(sim.now));
    sim.settle();
}

#[test]
fn residue_outlives_the_injection_that_told_it() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.report("node2", I::Recovered, T::Recovered);
    sim.advance(seconds(1));
    sim.report("node1", I::Recovered, T::Recovered);
    audit(&mut sim, true);
    let checked = sim.status().cleanup.unwrap().checked_at;
    assert!(checked.is_some());
    sim.advance(seconds(600));
    for (left, reason) in [(1, "Checked"), (0, "Rechecked")] {
        recheck(&mut sim, 0);
        assert_eq!(sim.observed.injections.len(), left);
        let cleanup = sim.status().cleanup.unwrap();
        assert_eq!(cleanup.residue.len(), 1, "{left} left");
        assert_eq!(cleanup.residue[0].node, "node1");
        assert_eq!(cleanup.checked_at, checked, "of the node that was last");
        assert_eq!(sim.condition(C::Clean), is("True", reason));
    }
}

/// Also when those who said so are gone.
#[test]
fn what_took_the_faults_back_is_counted() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.report("node1", I::Recovered, T::Recovered);
    for reclaimed in [1, 2, 2] {
        sim.settle();
        let told = sim.status().cleanup.unwrap().reclaimed_by;
        assert_eq!(told, [("Agent".to_owned(), reclaimed)].into());
        sim.report("node2", I::Recovered, T::Recovered);
    }
    sim.observed.injections.clear();
    sim.advance(seconds(600));
    sim.settle();
    assert_eq!(sim.status().cleanup.unwrap().reclaimed_by["Agent"], 2);
}

/// It may be heard of again until it is late.
#[test]
fn residue_outlives_the_node_that_told_it() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    audit(&mut sim, false);
    sim.observed.fleet.get_mut("node1").unwrap().live = false;
    sim.advance(seconds(600));
    recheck(&mut sim, 1);
    recheck(&mut sim, 0);
    for left in [1, 0] {
        assert_eq!(sim.observed.injections.len(), left);
        assert_eq!(sim.status().cleanup.unwrap().residue.len(), 1);
        assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
        sim.advance(seconds(60));
        sim.settle();
    }
}

#[test]
fn residue_is_told_before_every_node_was_checked() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.report("node1", I::Recovered, T::Recovered);
    audit(&mut sim, false);
    assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
    assert_eq!(sim.status().cleanup.unwrap().residue.len(), 1);
}

#[test]
fn residue_is_told_until_it_is_gone() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    audit(&mut sim, false);
    assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
    assert_eq!(sim.status().cleanup.unwrap().residue[0].node, "node1");
    audit(&mut sim, true);
    assert_eq!(sim.condition(C::Clean), is("True", "Checked"));
    assert_eq!(
        sim.status().cleanup.unwrap().residue.len(),
        1,
        "what was found stays told"
    );
}

#[test]
fn the_time_of_a_check_outlives_the_audit_that_told_it() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    audit(&mut sim, false);
    let mut status = sim.status();
    let mut cleanup = status.cleanup.clone().unwrap();
    cleanup.rechecked_at = Some(MicroTime(sim.now));
    assert!(cleanup.checked_at.is_some());
    status.cleanup = Some(cleanup.clone());
    for lost in [false, true] {
        if lost {
            let injection = sim.observed.injections[1].status.as_mut().unwrap();
            injection.audit = None;
        }
        cleanup::check(&sim.observed, &mut status, sim.now);
        assert_eq!(status.cleanup, Some(cleanup.clone()), "lost: {lost}");
    }
}

/// As long as it takes, unless the experiment goes.
#[test]
fn an_injection_stays_while_its_node_tries_to_remove_residue() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    audit(&mut sim, false);
    sim.advance(seconds(600));
    recheck(&mut sim, 0);
    recheck(&mut sim, 1);
    sim.advance(seconds(3_600));
    sim.settle();
    assert_eq!(sim.observed.injections.len(), 1);
    assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
    let mut deleted = running();
    deleted.advance(seconds(60));
    deleted.all(I::Recovered, T::Recovered);
    audit(&mut deleted, false);
    let leaving = Some(Time(deleted.now));
    deleted.observed.experiment.metadata.deletion_timestamp = leaving;
    deleted.settle();
    assert_eq!(deleted.observed.injections.len(), 0);
    audit(&mut sim, true);
    assert_eq!(sim.observed.injections.len(), 0);
    assert_eq!(sim.condition(C::Clean), is("True", "Rechecked"));
}

/// Residue of another node is worse, and told instead while it is there.
#[test]
fn a_deleted_injection_is_not_forgotten_for_residue() {
    let mut sim = running();
    sim.observed.injections.remove(1);
    sim.settle();
    sim.advance(seconds(60));
    sim.report("node1", I::Recovered, T::Recovered);
    sim.settle();
    let withdrawn = is("Unknown", "Withdrawn");
    assert_eq!(sim.condition(C::Clean), withdrawn);
    audit(&mut sim, false);
    assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
    sim.advance(seconds(60));
    sim.settle();
    audit(&mut sim, true);
    assert_eq!(sim.condition(C::Clean), withdrawn);
}

#[test]
fn residue_is_told_where_another_node_is_not_heard_of() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.report("node1", I::Recovered, T::Recovered);
    audit(&mut sim, false);
    sim.advance(seconds(10));
    sim.settle();
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "NotReported"));
    assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
    assert_eq!(sim.status().cleanup.unwrap().not_reported, ["node2"]);
    audit(&mut sim, true);
    assert_eq!(sim.condition(C::Clean), is("Unknown", "NotReported"));
}

/// Only the node itself can say that it is clean, and others do not go before it has.
#[test]
fn a_doubt_about_a_node_is_not_lifted_by_the_others() {
    for is_deleted in [false, true] {
        let mut sim = running();
        sim.advance(seconds(60));
        sim.report("node2", I::Recovered, T::Recovered);
        sim.settle();
        sim.advance(seconds(10));
        sim.settle();
        let doubt = is("Unknown", "NotReported");
        assert_eq!(sim.condition(C::Clean), doubt);
        recheck(&mut sim, 1);
        assert_eq!(sim.observed.injections.len(), 2, "nobody goes before");
        // What another node has found is told meanwhile, and the doubt is not forgotten for it.
        residue(&mut sim, 1, false);
        assert_eq!(sim.condition(C::Clean), is("False", "Residue"));
        assert_eq!(sim.status().cleanup.unwrap().not_reported, ["node1"]);
        residue(&mut sim, 1, true);
        assert_eq!(sim.condition(C::Clean), doubt);
        if is_deleted {
            sim.observed.injections.remove(0);
            sim.settle();
            assert_eq!(sim.condition(C::Clean), doubt);
            continue;
        }
        sim.report("node1", I::Recovered, T::Recovered);
        sim.settle();
        assert_eq!(sim.condition(C::Clean), is("True", "Checked"));
        assert_eq!(sim.observed.injections.len(), 1);
    }
}
