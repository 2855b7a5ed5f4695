//! Runs in a cluster that is against them: objects deleted by hand, reads and writes that fail.

use windtunnel_crds::{
    conditions::ConditionType as C,
    injection::{AddressRange, InjectionPhase as I, PeerGroup, TargetState as T},
    status::{FaultPhase, Phase},
};

use super::{
    Action, Attempt, Change, Needs, Trouble, Unread, decide, needs,
    testing::{DELAY, KILL_HALF, Sim, is, pods, seconds},
};
use crate::peers::{PeerError, PeerSet};

/// A delay that lasts longer than any bound here.
fn delay() -> String {
    DELAY.replace("1m", "10m")
}

/// The spec's faults in place on two pods of two nodes.
fn running(spec: &str) -> Sim {
    Sim::in_place(spec, pods(2))
}

/// Passes fail from now on.
fn trouble(sim: &Sim, message: &str, unread: Option<Unread>) -> Trouble {
    Trouble {
        message: message.to_owned(),
        since: sim.now,
        unread,
    }
}

#[test]
fn targets_that_cannot_be_listed_end_the_run_or_are_told() {
    let pending = (Phase::Pending, is("False", "NotSelected"));
    let failed = (Phase::Failed, is("False", "SelectionRefused"));
    let silent = (Phase::Pending, is("", ""));
    for (unread, at_once, later) in [
        (Unread::Failed, &silent, &pending),
        (Unread::Forbidden, &silent, &failed),
        (Unread::Senseless, &failed, &failed),
    ] {
        let mut sim = Sim::new(DELAY, pods(2));
        sim.pass();
        sim.observed.trouble = Some(trouble(&sim, "no: 'a b'", Some(unread)));
        for (wait, expected) in [(0, at_once), (9, at_once), (1, later), (60, later)] {
            sim.advance(seconds(wait));
            sim.settle();
            let found = (sim.phase(), sim.condition(C::Prepared));
            assert_eq!(&found, expected, "{unread:?}");
        }
        let message = sim.status().message;
        assert_eq!(message, "cannot begin: no: 'a b'");
        assert!(sim.observed.injections.is_empty());
        // It comes to an end, and the run goes on as if there had been none.
        sim.observed.trouble = None;
        sim.settle();
        let goes_on = unread == Unread::Failed;
        assert_eq!(sim.phase() == Phase::Preparing, goes_on, "{unread:?}");
    }
}

#[test]
fn a_finalizer_that_cannot_be_put_on_is_told() {
    let mut sim = Sim::new(DELAY, pods(2));
    sim.observed.trouble = Some(trouble(&sim, "cannot add the finalizer", None));
    sim.advance(seconds(10));
    let actions = decide(&sim.observed, sim.now).actions;
    let Action::WriteStatus(status) = &actions[0] else {
        panic!("{actions:?}");
    };
    assert_eq!(status.message, "cannot begin: cannot add the finalizer");
    assert_eq!(actions[1], Action::AddFinalizer);
}

#[test]
fn a_node_injection_deleted_by_hand_is_an_end_that_nobody_can_vouch_for() {
    let mut sim = running(&delay());
    sim.withdraw("node1");
    sim.settle();
    assert_eq!(sim.phase(), Phase::Running, "the other target goes on");
    assert_eq!(sim.condition(C::Injected), is("False", "Interrupted"));
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "Withdrawn"));
    assert_eq!(sim.status().summary.injected, "2/2", "that was so");
    assert_eq!(sim.status().summary.recovered, "0/2");
    sim.withdraw("node2");
    sim.settle();
    // Without a control plane an agent takes all back within the grace.
    assert_eq!(sim.phase(), Phase::Recovering);
    sim.advance(seconds(39));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Recovering);
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "Withdrawn"));
    sim.advance(seconds(1));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.condition(C::Recovered), is("Unknown", "Withdrawn"));
    assert_eq!(sim.condition(C::Clean), is("Unknown", "Withdrawn"));
    assert_eq!(sim.status().summary.recovered, "0/2");
    assert!(sim.observed.experiment.metadata.finalizers.is_none());
}

#[test]
fn a_lost_node_injection_does_not_undo_what_was_reported() {
    let two = format!(
        "{}  duration: 10s\n- name: later\n  startAfter: 1m\n  target: {{selector: {{matchLabels: \
         {{app: orders}}}}}}\n  network: {{loss: {{percent: 1}}}}\n",
        delay()
    );
    let mut sim = running(&two);
    sim.advance(seconds(10));
    sim.report_faults("node1", I::Running, |fault| match fault {
        "slow" => T::Recovered,
        _ => T::Prepared,
    });
    sim.report_faults("node2", I::Running, |fault| match fault {
        "slow" => T::Recovered,
        _ => T::Prepared,
    });
    sim.settle();
    assert_eq!(sim.fault("slow").phase, FaultPhase::Ended);
    sim.withdraw("node1");
    sim.settle();
    let slow = sim.fault("slow");
    assert_eq!(
        (slow.phase, slow.injected, slow.recovered, slow.interrupted),
        (FaultPhase::Ended, 2, 2, 0)
    );
    assert_eq!(sim.fault("later").phase, FaultPhase::Failed);
}

#[test]
fn a_node_that_is_only_heard_of_after_the_end_learns_that_there_was_one() {
    let mut sim = running(&delay());
    sim.observed.experiment.spec.abort = true;
    sim.settle();
    for injection in &mut sim.observed.injections {
        injection.spec.abort = false;
    }
    sim.advance(seconds(60));
    sim.settle();
    assert_eq!(sim.phase(), Phase::Aborted);
    assert!(sim.observed.injections.iter().all(|i| i.spec.abort));
}

#[test]
fn a_node_injection_that_cannot_be_made_fails_the_run_in_time_and_says_why() {
    let mut sim = Sim::new(&delay(), pods(2));
    sim.settle();
    sim.observed.injections.clear();
    sim.observed.trouble = Some(trouble(&sim, "cannot create a node injection: no", None));
    assert!(
        !needs(&sim.observed.experiment, &[], false, sim.now)
            .candidates
            .is_empty()
    );
    sim.advance(seconds(30));
    // Nothing more is read, drawn or made.
    assert_eq!(
        needs(&sim.observed.experiment, &[], false, sim.now),
        Needs::default()
    );
    sim.settle();
    assert!(sim.observed.injections.is_empty());
    assert_eq!(sim.phase(), Phase::Failed);
    assert_eq!(sim.condition(C::Finished), is("True", "PrepareTimeout"));
    let message = sim.status().message;
    for word in ["node1, node2", "cannot create a node injection: no"] {
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn the_deadline_waits_for_no_read() {
    let spec = delay().replace(
        "{latency: 100ms}",
        "{latency: 100ms}, peers: {ports: [{port: 80}]}",
    );
    let mut sim = running(&spec);
    let needed = |sim: &Sim| needs(&sim.observed.experiment, &[], false, sim.now);
    assert_eq!(needed(&sim).peers, ["slow"]);
    // What cannot be read leaves the nodes as they are.
    sim.observed.peers.clear();
    let decision = decide(&sim.observed, sim.now);
    assert!(decision.actions.is_empty(), "{decision:?}");
    sim.advance(seconds(600));
    assert_eq!(needed(&sim), Needs::default());
}

#[test]
fn peers_that_cannot_be_found_any_more_stay_and_it_is_told() {
    let peers = "{latency: 100ms}, peers: {services: [{name: db}]}";
    let spec = delay().replace("{latency: 100ms}", peers);
    let mut sim = running(&spec);
    let before = sim.observed.injections.clone();
    let missing = PeerError::NoService {
        namespace: "shop".to_owned(),
        name: "db".to_owned(),
    };
    for (error, said) in [
        (missing, "there is no Service db in namespace shop"),
        (PeerError::TooMany(5000), "the peers are 5000 addresses"),
    ] {
        sim.peers = Err(error);
        sim.settle();
        let notes = sim.fault("slow").notes;
        assert!(notes[0].contains(said), "{notes:?}");
        assert!(notes[0].contains("stay in force"), "{notes:?}");
        assert_eq!(sim.observed.injections, before);
    }
    sim.peers = Ok(PeerSet::default());
    sim.settle();
    assert!(sim.fault("slow").notes.is_empty());
}

#[test]
fn hosts_that_nobody_answered_for_yet_are_waited_for_and_take_nothing_away() {
    let spec = delay().replace(
        "{latency: 100ms}",
        "{latency: 100ms}, peers: {hosts: [db.example.com]}",
    );
    let awaited = PeerSet {
        is_partial: true,
        awaited: vec!["db.example.com".to_owned()],
        ..PeerSet::default()
    };
    let known = PeerSet {
        groups: vec![PeerGroup {
            addresses: Some(vec![AddressRange("192.0.2.1/32".parse().unwrap())]),
            ports: Vec::new(),
        }],
        notes: vec!["a note".to_owned()],
        ..PeerSet::default()
    };
    let mut sim = Sim::new(&spec, pods(2));
    sim.peers = Ok(awaited.clone());
    sim.settle();
    assert_eq!(sim.phase(), Phase::Pending);
    let message = sim.status().message;
    assert_eq!(message, "waiting for the addresses of host db.example.com");
    sim.peers = Ok(known.clone());
    sim.settle();
    assert_eq!(sim.phase(), Phase::Preparing);
    sim.all(I::Prepared, T::Prepared);
    sim.advance(seconds(1));
    sim.all(I::Running, T::Injected);
    // Another replica leads, which has not asked yet.
    let before = sim.observed.injections.clone();
    sim.peers = Ok(awaited);
    sim.settle();
    assert_eq!(sim.observed.injections, before);
    assert_eq!(sim.fault("slow").notes, ["a note"]);
    // The first answer that it gets is none.
    sim.peers = Ok(PeerSet {
        groups: vec![PeerGroup {
            addresses: Some(Vec::new()),
            ports: Vec::new(),
        }],
        notes: vec!["host db.example.com has no address: busy".to_owned()],
        is_partial: true,
        is_doubtful: true,
        ..PeerSet::default()
    });
    sim.settle();
    assert_eq!(sim.observed.injections, before);
    let notes = sim.fault("slow").notes;
    assert_eq!(
        notes[1..],
        ["the peers found before stay in force meanwhile"]
    );
    // The name servers know of none any more.
    sim.peers.as_mut().unwrap().is_doubtful = false;
    sim.settle();
    assert_ne!(sim.observed.injections, before);
}

#[test]
fn a_pod_that_may_not_be_removed_is_asked_for_now_and_then_and_holds_up_nobody() {
    let spec = format!("{KILL_HALF}{}", delay().split_once("faults:\n").unwrap().1);
    let mut sim = Sim::new(&spec, pods(2));
    sim.settle();
    sim.all(I::Prepared, T::Prepared);
    sim.advance(seconds(11));
    sim.pass();
    assert_eq!(sim.kills.len(), 1);
    let uid = sim.kills.remove(0).uid;
    let refused = |sim: &mut Sim| {
        let attempt = Attempt {
            at: sim.now,
            refusal: Some("a budget forbids it".to_owned()),
        };
        sim.observed.attempts.insert(uid.clone(), attempt);
        sim.pass();
    };
    refused(&mut sim);
    assert!(sim.kills.is_empty());
    let message = sim.fault("half").message;
    assert_eq!(message, "1 of 1 pods not removed yet: a budget forbids it");
    sim.advance(seconds(5));
    sim.pass();
    assert_eq!(sim.kills.len(), 1, "asked for again");
    // Whatever becomes of it, the nodes have been told before.
    sim.kills.clear();
    sim.advance(seconds(5));
    for injection in &mut sim.observed.injections {
        injection.spec.start_time = None;
    }
    let actions = decide(&sim.observed, sim.now).actions;
    let is_start = |a: &Action| {
        matches!(
            a,
            Action::Patch {
                change: Change::Start(_),
                ..
            }
        )
    };
    let start = actions.iter().rposition(is_start).unwrap();
    let kill = actions
        .iter()
        .position(|a| matches!(a, Action::Kill(_)))
        .unwrap();
    assert!(start < kill, "{actions:?}");
    // At the end it is said why the pod is still there.
    refused(&mut sim);
    sim.advance(seconds(60));
    sim.all(I::Recovered, T::Recovered);
    assert_eq!(sim.phase(), Phase::Failed);
    assert!(sim.status().message.contains("(a budget forbids it)"));
}
