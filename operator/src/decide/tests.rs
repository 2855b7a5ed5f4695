//! Runs from their beginning to their end, as tables of what is reported and what follows.

use jiff::SignedDuration;
use windtunnel_crds::{
    conditions::ConditionType as C,
    injection::{InjectionPhase as I, TargetState as T},
    status::Phase,
};

use super::{
    decide,
    testing::{DELAY, KILL_HALF, Sim, is, pods, seconds},
};

/// A delay on two pods of two nodes, in place.
fn running() -> Sim {
    Sim::in_place(DELAY, pods(2))
}

#[test]
fn a_run_goes_through_its_phases_and_ends_completed() {
    let mut sim = Sim::new(DELAY, pods(2));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Preparing);
    assert_eq!(sim.observed.injections.len(), 2);
    assert!(
        sim.observed
            .injections
            .iter()
            .all(|i| i.spec.start_time.is_none())
    );
    sim.advance(SignedDuration::from_millis(100));
    sim.report("node1", I::Prepared, T::Prepared);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Preparing, "one node is not enough");
    sim.all(I::Prepared, T::Prepared);
    assert_eq!(sim.phase(), Phase::Running);
    let status = sim.status();
    assert!(
        sim.observed
            .injections
            .iter()
            .all(|i| i.spec.start_time == status.start_time)
    );
    assert_eq!(
        sim.condition(C::Injected),
        is("False", "NotDue"),
        "the start of two nodes is a moment ahead"
    );
    sim.advance(seconds(1));
    sim.report("node1", I::Running, T::Injected);
    sim.settle();
    assert_eq!(sim.condition(C::Injected), is("False", "Injecting"));
    sim.all(I::Running, T::Injected);
    assert_eq!(sim.condition(C::Injected), is("True", "ReadBack"));
    assert_eq!(sim.status().summary.injected, "2/2");
    assert_eq!(sim.fault("slow").matched_packets, Some(14));
    sim.advance(seconds(60));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Recovering);
    sim.all(I::Recovered, T::Recovered);
    assert_eq!(sim.phase(), Phase::Completed);
    for (type_, expected) in [
        (C::Injected, is("True", "ReadBack")),
        (C::Recovered, is("True", "Recovered")),
        (C::Clean, is("True", "Checked")),
        (C::Finished, is("True", "DeadlineReached")),
    ] {
        assert_eq!(sim.condition(type_), expected);
    }
    assert!(sim.observed.experiment.metadata.finalizers.is_none());
    assert_eq!(sim.observed.injections.len(), 2, "kept for the recheck");
    sim.advance(seconds(600));
    sim.recheck();
    assert_eq!(sim.condition(C::Clean), is("True", "Rechecked"));
    assert!(sim.observed.injections.is_empty());
    assert_eq!(
        sim.status().summary.recovered,
        "2/2",
        "counts outlive the injections"
    );
}

#[test]
fn an_abort_a_deletion_and_a_stop_end_a_run_from_every_phase() {
    type End = fn(&mut Sim);
    let ends: [(End, &str); 3] = [
        (
            |sim| sim.observed.experiment.spec.abort = true,
            "AbortRequested",
        ),
        (
            |sim| {
                use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
                sim.observed.experiment.metadata.deletion_timestamp = Some(Time(sim.now));
            },
            "Deleted",
        ),
        (|sim| sim.observed.stop = true, "EmergencyStop"),
    ];
    for (end, reason) in ends {
        let mut fresh = Sim::new(DELAY, pods(2));
        end(&mut fresh);
        fresh.settle();
        assert!(
            fresh.observed.injections.is_empty(),
            "{reason}: nothing is begun"
        );

        let mut preparing = Sim::new(DELAY, pods(2));
        preparing.settle();
        for mut sim in [preparing, running()] {
            let from = sim.phase();
            end(&mut sim);
            sim.settle();
            assert_eq!(sim.phase(), Phase::Recovering, "{reason} from {from:?}");
            assert!(sim.observed.injections.iter().all(|i| i.spec.abort));
            assert!(
                sim.observed.experiment.metadata.finalizers.is_some(),
                "held until it is taken back"
            );
            sim.all(I::Recovered, T::Recovered);
            assert_eq!(sim.phase(), Phase::Aborted, "{reason} from {from:?}");
            assert_eq!(sim.condition(C::Finished), is("True", reason));
            assert!(sim.observed.experiment.metadata.finalizers.is_none());
        }
    }
}

#[test]
fn one_refusal_fails_the_run_and_nothing_is_started_anywhere() {
    let mut sim = Sim::new(DELAY, pods(2));
    sim.settle();
    sim.report("node1", I::Prepared, T::Prepared);
    sim.report("node2", I::Refused, T::Failed);
    sim.settle();
    assert!(
        sim.observed
            .injections
            .iter()
            .all(|i| i.spec.start_time.is_none() && i.spec.abort)
    );
    sim.report("node1", I::Recovered, T::Recovered);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.condition(C::Finished), is("True", "PrepareRefused"));
    assert_eq!(sim.condition(C::Injected), is("False", "NotStarted"));
    assert_eq!(sim.condition(C::Recovered), is("True", "NothingToUndo"));
    assert!(
        sim.status().message.contains("node2"),
        "{}",
        sim.status().message
    );
}

#[test]
fn a_node_that_does_not_answer_in_time_fails_the_run() {
    let mut sim = Sim::new(DELAY, pods(2));
    sim.settle();
    sim.report("node1", I::Prepared, T::Prepared);
    sim.advance(seconds(30));
    sim.settle();
    assert_eq!(sim.condition(C::Finished), is("False", "PrepareTimeout"));
    assert!(
        sim.status().message.contains("node2"),
        "{}",
        sim.status().message
    );
    // Nobody was told to start: that nothing was injected is known, though node2 stays silent.
    sim.advance(seconds(60));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.condition(C::Recovered), is("True", "NothingToUndo"));
    assert_eq!(sim.condition(C::Clean), is("Unknown", "NotReported"));
}

#[test]
fn a_target_that_is_gone_is_drawn_anew() {
    let one = DELAY.replace("{app: orders}}}", "{app: orders}}, count: 1}");
    let mut sim = Sim::new(&one, pods(4));
    sim.settle();
    let first = sim.fault("slow").draw[0].clone();
    sim.report(&first.node, I::Prepared, T::Gone);
    sim.remove_pod(&first.name);
    sim.settle();
    let second = sim.fault("slow").draw[0].clone();
    assert_ne!(first.uid, second.uid);
    assert_eq!(sim.phase(), Phase::Preparing);
    let node = second.node.clone();
    sim.report(&node, I::Prepared, T::Prepared);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Running);
    assert_eq!(
        sim.observed.injections.len(),
        1,
        "a node without targets is not asked any more"
    );
    assert!(sim.fault("slow").drawn_at.is_some());
}

#[test]
fn a_dry_run_says_the_same_and_touches_nothing() {
    let mut sim = Sim::new(&format!("{DELAY}dryRun: true\n"), pods(2));
    sim.settle();
    assert!(sim.observed.injections.iter().all(|i| i.spec.dry_run));
    sim.all(I::Prepared, T::Prepared);
    assert_eq!(sim.phase(), Phase::Completed);
    assert_eq!(sim.condition(C::Prepared), is("True", "Prepared"));
    assert_eq!(sim.condition(C::Injected), is("False", "DryRun"));
    assert_eq!(sim.condition(C::Clean), is("True", "NothingInjected"));
    assert!(sim.status().start_time.is_none());
    assert!(sim.observed.injections.is_empty());
}

#[test]
fn an_interruption_is_told_at_once_and_fails_the_run() {
    let mut sim = running();
    sim.report("node1", I::Running, T::Interrupted);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Running, "the other target goes on");
    assert_eq!(sim.condition(C::Injected), is("False", "Interrupted"));
    assert!(
        sim.notices
            .iter()
            .any(|n| n.warning && n.note.contains("Interrupted"))
    );
    sim.advance(seconds(60));
    sim.report("node1", I::Recovered, T::Interrupted);
    sim.report("node2", I::Recovered, T::Recovered);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.fault("slow").interrupted, 1);
}

#[test]
fn a_run_that_nodes_took_back_before_it_began_is_not_completed() {
    let mut sim = Sim::new(DELAY, pods(2));
    sim.settle();
    // They saw an emergency stop that was over before an operator did.
    sim.all(I::Prepared, T::Recovered);
    sim.all(I::Recovered, T::Recovered);
    sim.advance(seconds(60));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed, "{:?}", sim.status());
    assert_eq!(sim.status().message, "a window was never opened");
}

#[test]
fn a_silent_agent_is_unknown_and_never_recovered() {
    let mut sim = running();
    sim.observed.fleet.get_mut("node1").unwrap().live = false;
    sim.settle();
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "AgentSilent"));
    sim.advance(seconds(60));
    sim.report("node2", I::Recovered, T::Recovered);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Recovering);
    sim.advance(seconds(10));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "NotReported"));
    assert_eq!(sim.condition(C::Clean), is("Unknown", "NotReported"));
    assert!(
        sim.observed.experiment.metadata.finalizers.is_none(),
        "released by rule"
    );
}

#[test]
fn what_was_told_to_be_over_is_not_doubted_for_want_of_a_look() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.report("node1", I::Running, T::Recovered);
    sim.report("node2", I::Recovered, T::Recovered);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Recovering);
    sim.advance(seconds(10));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Completed);
    assert_eq!(sim.condition(C::Recovered), is("True", "Recovered"));
    assert_eq!(sim.condition(C::Clean), is("Unknown", "NotReported"));
    sim.report("node1", I::Recovered, T::Recovered);
    sim.settle();
    assert_eq!(sim.condition(C::Clean), is("True", "Checked"));
}

#[test]
fn a_deletion_does_not_wait_for_a_silent_node_longer_than_the_bound() {
    let mut sim = Sim::new(&DELAY.replace("1m", "1h"), pods(2));
    sim.settle();
    sim.all(I::Prepared, T::Prepared);
    sim.all(I::Running, T::Injected);
    for agent in sim.observed.fleet.values_mut() {
        agent.live = false;
    }
    sim.observed.experiment.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(sim.now),
    );
    sim.settle();
    sim.advance(seconds(39));
    sim.settle();
    assert!(sim.observed.experiment.metadata.finalizers.is_some());
    sim.advance(seconds(1));
    sim.settle();
    assert!(sim.observed.experiment.metadata.finalizers.is_none());
    assert!(
        sim.notices
            .iter()
            .any(|n| n.note.contains("did not report"))
    );
    assert!(sim.observed.injections.is_empty(), "absent means revert");
}

#[test]
fn refusals_at_select_touch_nothing_and_say_why() {
    let mut protected = Sim::new(DELAY, pods(1));
    protected.observed.experiment.metadata.namespace = Some("kube-system".to_owned());
    let nobody = Sim::new(DELAY, Vec::new());
    let many = {
        let mut sim = Sim::new(DELAY, pods(6));
        sim.observed.policy.max_targets = 5;
        sim
    };
    let silent = {
        let mut sim = Sim::new(DELAY, pods(2));
        sim.observed.fleet.get_mut("node2").unwrap().live = false;
        sim
    };
    for (mut sim, reason, words) in [
        (
            protected,
            "NotAllowed",
            "namespace kube-system is protected",
        ),
        (nobody, "TargetsMissing", "matches no pod"),
        (many, "NotAllowed", "would hit 6 pods, of 5"),
        (silent, "NodeUnavailable", "node2"),
    ] {
        sim.settle();
        assert_eq!(sim.phase(), Phase::Failed);
        assert_eq!(sim.condition(C::Finished), is("True", reason));
        assert!(
            sim.status().message.contains(words),
            "{}",
            sim.status().message
        );
        assert!(sim.observed.injections.is_empty() && sim.kills.is_empty());
        assert!(sim.observed.experiment.metadata.finalizers.is_none());
    }
}

#[test]
fn a_finished_run_is_deleted_when_its_time_is_over() {
    let mut sim = Sim::new(
        &format!("{KILL_HALF}ttlSecondsAfterFinished: 60\n"),
        pods(1),
    );
    sim.settle();
    sim.advance(seconds(10));
    sim.pass();
    sim.remove_pod("p0");
    sim.settle();
    assert_eq!(sim.phase(), Phase::Completed);
    assert!(sim.deleted.is_empty());
    sim.advance(seconds(60));
    sim.pass();
    assert_eq!(sim.deleted, ["experiment"]);
}

#[test]
fn host_names_are_resolved_again_each_minute() {
    for (peers, is_due) in [
        ("peers: {hosts: [example.com]}", true),
        ("peers: {cidrs: [192.0.2.0/24]}", false),
    ] {
        let spec = DELAY
            .replace("1m", "3m")
            .replace("{latency: 100ms}", &format!("{{latency: 100ms}}, {peers}"));
        assert_ne!(spec, DELAY);
        let mut sim = Sim::new(&spec, pods(2));
        sim.settle();
        sim.all(I::Prepared, T::Prepared);
        sim.advance(seconds(1));
        sim.all(I::Running, T::Injected);
        let wakes = decide(&sim.observed, sim.now).wake_at.unwrap();
        let wakes = wakes.duration_since(sim.now);
        assert_eq!(wakes <= seconds(60), is_due, "{peers}: {wakes:?}");
        // One that has no address is not left without for a minute.
        for found in sim.observed.peers.values_mut().flatten() {
            found.is_partial = true;
        }
        let wakes = decide(&sim.observed, sim.now).wake_at.unwrap();
        let wakes = wakes.duration_since(sim.now);
        assert_eq!(wakes <= seconds(5), is_due, "{peers}, partial: {wakes:?}");
    }
}

#[test]
fn conditions_are_of_the_current_generation_also_after_the_end() {
    let mut sim = running();
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    assert_eq!(sim.phase(), Phase::Completed);
    sim.observed.experiment.spec.abort = true;
    sim.observed.experiment.metadata.generation = Some(2);
    sim.settle();
    let status = sim.status();
    assert_eq!(
        (status.phase, status.observed_generation),
        (Some(Phase::Completed), Some(2))
    );
    assert!(!status.conditions.is_empty());
    for condition in status.conditions {
        assert_eq!(
            condition.observed_generation,
            Some(2),
            "{}",
            condition.type_
        );
    }
}

#[test]
fn an_emergency_stop_that_only_the_agents_saw_ends_the_run() {
    let mut sim = running();
    let status = sim.observed.injections[0].status.as_mut().unwrap();
    status.targets[0].state = T::Recovered;
    status.targets[0].reason = "EmergencyStop".to_owned();
    sim.settle();
    assert_eq!(sim.phase(), Phase::Recovering);
    assert!(sim.observed.injections.iter().all(|i| i.spec.abort));
    sim.all(I::Recovered, T::Recovered);
    assert_eq!(sim.phase(), Phase::Aborted);
    assert_eq!(sim.condition(C::Finished), is("True", "EmergencyStop"));
}
