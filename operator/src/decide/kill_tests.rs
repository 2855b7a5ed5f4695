//! Runs that kill pods.

use windtunnel_crds::{
    conditions::ConditionType as C,
    status::{FaultPhase, Phase},
};

use super::testing::{KILL_HALF, Sim, candidate, is, pods, seconds};

#[test]
fn a_kill_is_drawn_when_due_written_down_first_and_ends_when_all_are_gone() {
    let mut sim = Sim::new(KILL_HALF, pods(5));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Running, "no node has to prepare");
    assert!(sim.fault("half").draw.is_empty());
    sim.advance(seconds(9));
    sim.settle();
    assert!(sim.kills.is_empty());
    sim.advance(seconds(1));
    sim.pass();
    let drawn = sim.fault("half").draw;
    assert_eq!(drawn.len(), 3);
    assert_eq!(sim.kills.len(), 3);
    assert!(
        sim.kills
            .iter()
            .all(|k| k.grace_period_seconds == Some(1) && drawn.iter().any(|p| p.uid == k.uid))
    );
    sim.settle();
    assert_eq!(sim.kills.len(), 3, "what is leaving is not asked again");
    assert_eq!(sim.condition(C::Injected), is("True", "ReadBack"));
    for pod in &drawn {
        sim.remove_pod(&pod.name);
    }
    sim.settle();
    assert_eq!(sim.phase(), Phase::Completed);
    assert_eq!(sim.fault("half").phase, FaultPhase::Ended);
    assert_eq!(sim.condition(C::Clean), is("True", "NothingToUndo"));
}

#[test]
fn a_new_leader_kills_nobody_that_was_not_drawn() {
    let mut sim = Sim::new(KILL_HALF, pods(5));
    sim.settle();
    sim.advance(seconds(10));
    sim.pass();
    let drawn = sim.fault("half").draw;
    // One was deleted, then the leader died; its replacement has come up meanwhile.
    sim.kills.truncate(1);
    let dead = sim.kills[0].name.clone();
    sim.remove_pod(&dead);
    sim.kills.clear();
    sim.settle();
    assert_eq!(sim.kills.len(), 2);
    assert!(
        sim.kills
            .iter()
            .all(|k| drawn.iter().any(|p| p.uid == k.uid) && k.name != dead)
    );
}

#[test]
fn pods_that_do_not_go_fail_the_kill_at_the_deadline() {
    let mut sim = Sim::new(KILL_HALF, pods(2));
    sim.settle();
    sim.advance(seconds(10));
    sim.settle();
    sim.advance(seconds(50));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert!(
        sim.fault("half").message.contains("not removed"),
        "{}",
        sim.fault("half").message
    );
}

#[test]
fn kills_of_one_run_together_keep_to_the_cap() {
    let spec = KILL_HALF.replace("percent: 50", "count: 2");
    let again = spec.split_once("faults:\n").unwrap().1;
    let again = again.replace("half", "more").replace("10s", "20s");
    for (most, phase) in [(3, FaultPhase::Failed), (4, FaultPhase::Active)] {
        let mut sim = Sim::new(&format!("{spec}{again}"), pods(2));
        sim.observed.policy.max_targets = most;
        sim.settle();
        sim.advance(seconds(10));
        sim.settle();
        for pod in sim.fault("half").draw {
            sim.remove_pod(&pod.name);
        }
        for name in ["p2", "p3"] {
            sim.add_pod(candidate(name, "node1"));
        }
        sim.advance(seconds(10));
        sim.settle();
        assert_eq!(sim.fault("half").phase, FaultPhase::Ended);
        let more = sim.fault("more");
        assert_eq!(more.phase, phase, "{}", more.message);
        assert_eq!(sim.kills.len(), if most == 4 { 4 } else { 2 });
        let refused = more.message.contains("would hit 4 pods, of 3");
        assert_eq!(refused, most == 3, "{}", more.message);
    }
}
