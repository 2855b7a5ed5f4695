//! Faults on containers that restart.

use std::time::Duration;

use windtunnel_crds::injection::{InjectionPhase, TargetState};

use super::testing::Sim;
use crate::{supervisor::Leave, testing::on_containers};

/// In place on the container of one pod.
fn in_place() -> Sim {
    let mut sim = Sim::new(&["a"]);
    on_containers(sim.injection());
    sim.in_place()
}

/// The injector sees its container end.
fn end_container(sim: &mut Sim) {
    let live = sim.o.live.values_mut().next().unwrap();
    live.leave = Some(Leave::ContainerEnded);
    live.has_exited = true;
    sim.settle();
}

/// The operator sees the container that has taken its place.
fn show(sim: &mut Sim, id: &str) {
    let target = &mut sim.injection().spec.faults[0].targets[0];
    id.clone_into(&mut target.containers[0].id);
    sim.settle();
}

#[test]
fn a_container_that_restarts_is_followed_and_the_target_stays_injected() {
    let mut sim = in_place();
    let first = sim.target("a").injected_at.clone();
    end_container(&mut sim);
    assert_eq!(
        (sim.target("a").state, sim.target("a").reason.as_str()),
        (TargetState::Injected, "ContainerRestarting")
    );
    sim.advance(30_000);
    show(&mut sim, "containerd://2");
    assert_eq!(sim.starts, 2, "a new injector");
    sim.apply_all();
    sim.settle();
    let target = sim.target("a");
    assert_eq!(
        (target.state, target.reason.as_str(), &target.injected_at),
        (TargetState::Injected, "", &first)
    );
    sim.advance(30_000);
    sim.settle();
    assert_eq!(sim.target("a").state, TargetState::Recovered);
    assert_eq!(sim.last().phase, InjectionPhase::Recovered);
}

#[test]
fn what_was_met_on_a_container_that_ended_is_kept() {
    let mut sim = Sim::new(&["a"]);
    on_containers(sim.injection());
    sim.settle();
    sim.start(0);
    sim.settle();
    // The effect was the container's end: both are heard of at once.
    sim.apply_all();
    let live = sim.o.live.values_mut().next().unwrap();
    live.counts.effect = [("oomKills".to_owned(), 1), ("bytes".to_owned(), 5)].into();
    end_container(&mut sim);
    assert_eq!(sim.target("a").state, TargetState::Injected);
    show(&mut sim, "containerd://2");
    sim.apply_all();
    let live = sim.o.live.values_mut().next().unwrap();
    live.counts.effect = [("oomKills".to_owned(), 2), ("bytes".to_owned(), 7)].into();
    sim.advance(60_000);
    sim.settle();
    let target = sim.target("a");
    assert_eq!(target.state, TargetState::Recovered);
    assert_eq!(
        target.effect,
        [("oomKills".to_owned(), 3), ("bytes".to_owned(), 7)].into()
    );
}

#[test]
fn a_container_without_a_successor_is_gone_after_a_minute_and_its_window_ends_it_before() {
    let mut sim = in_place();
    let fault = &mut sim.injection().spec;
    fault.duration = windtunnel_crds::units::GoDuration::from_secs(600);
    for entry in sim.o.entries.values_mut() {
        entry.window.as_mut().unwrap().end += Duration::from_secs(500);
    }
    end_container(&mut sim);
    sim.advance(59_000);
    sim.settle();
    assert_eq!(sim.target("a").state, TargetState::Injected);
    sim.advance(1_000);
    sim.settle();
    assert_eq!(
        (sim.target("a").state, sim.target("a").reason.as_str()),
        (TargetState::Gone, "ContainerGone")
    );
    let mut over = in_place();
    over.advance(30_000);
    end_container(&mut over);
    over.advance(30_000);
    over.settle();
    assert_eq!(over.target("a").state, TargetState::Recovered);
    assert_eq!(over.starts, 1);
}

#[test]
fn while_a_container_is_waited_for_an_abort_ends_the_fault() {
    let mut sim = in_place();
    end_container(&mut sim);
    sim.injection().spec.abort = true;
    sim.settle();
    assert_eq!(
        (sim.target("a").state, sim.target("a").reason.as_str()),
        (TargetState::Recovered, "Aborted")
    );
    show(&mut sim, "containerd://2");
    assert_eq!(sim.starts, 1, "nothing is injected any more");
}

#[test]
fn an_injector_that_dies_on_a_living_container_is_interrupted() {
    let mut sim = in_place();
    sim.o.live.values_mut().next().unwrap().has_exited = true;
    sim.settle();
    assert_eq!(
        (sim.target("a").state, sim.target("a").reason.as_str()),
        (TargetState::Interrupted, "InjectorDied")
    );
}

#[test]
fn an_injector_that_has_done_what_was_to_be_done_ends_its_fault() {
    let mut sim = in_place();
    let live = sim.o.live.values_mut().next().unwrap();
    live.leave = Some(Leave::Done);
    live.has_exited = true;
    sim.settle();
    let target = sim.target("a");
    assert_eq!(
        (target.state, target.reason.as_str()),
        (TargetState::Recovered, "")
    );
    assert!(target.injected_at.is_some());
    assert_eq!(sim.starts, 1);
}
