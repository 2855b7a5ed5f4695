//! One injection on one node, from what is told and seen to what is done and reported.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use windtunnel_crds::{
    injection::{InjectionPhase, TargetState},
    residue::{ReclaimedBy, Residue, ResidueKind},
};

use super::{
    Kill, Observed, Step, Unwritten, decide,
    testing::{Sim, UID},
};
use crate::{model::State, testing::key};

#[test]
fn a_run_is_prepared_injected_recovered_checked_and_checked_again() {
    let mut sim = Sim::new(&["a", "b"]);
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Prepared);
    assert_eq!(sim.starts, 0);
    sim.start(0);
    sim.settle();
    assert_eq!(sim.starts, 2);
    assert_eq!(
        sim.told.len(),
        1,
        "an injector that has not reported is no effect"
    );
    sim.apply_all();
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Running);
    assert!(
        sim.last()
            .targets
            .iter()
            .all(|t| t.state == TargetState::Injected && t.injected_at.is_some())
    );
    sim.advance(59_999);
    sim.settle();
    assert!(sim.o.entries.values().all(|e| e.ended().is_none()));
    sim.advance(1);
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Recovered);
    assert_eq!(sim.target("a").state, TargetState::Recovered);
    assert_eq!(sim.target("a").reclaimed_by, Some(ReclaimedBy::Agent));
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
    sim.advance(600_000);
    sim.settle();
    assert!(sim.last().audit.as_ref().unwrap().rechecked_at.is_some());
    assert_eq!(
        sim.told.len(),
        4,
        "Prepared, Injected, Recovered, rechecked"
    );
    sim.o.injections.as_mut().unwrap().clear();
    sim.settle();
    assert!(sim.o.entries.is_empty());
}

#[test]
fn a_window_opens_and_closes_on_the_boot_clock_whatever_the_wall_clock_does() {
    let mut sim = Sim::new(&["a"]);
    let fault = &mut sim.injection().spec.faults[0];
    fault.start_after = windtunnel_crds::units::GoDuration::from_secs(10);
    fault.duration = windtunnel_crds::units::GoDuration::from_secs(5);
    sim.settle();
    sim.start(200);
    sim.settle();
    sim.now.wall += SignedDuration::from_hours(5);
    sim.advance(10_199);
    sim.settle();
    assert_eq!(sim.starts, 0);
    sim.advance(1);
    sim.settle();
    assert_eq!(sim.starts, 1);
    sim.apply_all();
    sim.now.wall -= SignedDuration::from_hours(9);
    sim.advance(4_999);
    sim.settle();
    assert_eq!(sim.target("a").state, TargetState::Injected);
    sim.advance(1);
    sim.settle();
    assert_eq!(sim.target("a").state, TargetState::Recovered);
}

#[test]
fn a_late_node_ends_with_the_others_and_a_very_late_one_does_not_begin() {
    let mut late = Sim::new(&["a"]);
    late.settle();
    late.start(-2_000);
    late.settle();
    assert_eq!(
        late.o.entries.values().next().unwrap().window.unwrap().end,
        Duration::from_secs(158)
    );
    let mut missed = Sim::new(&["a"]);
    missed.settle();
    missed.start(-3_001);
    missed.settle();
    assert_eq!(missed.starts, 0);
    assert_eq!(
        (missed.target("a").state, missed.target("a").reason.as_str()),
        (TargetState::Failed, "StartMissed")
    );
    let mut waited = Sim::new(&["a"]);
    waited.settle();
    waited.advance(60_001);
    waited.start(0);
    waited.settle();
    assert_eq!(waited.target("a").reason, "StartMissed");
}

#[test]
fn whatever_forbids_a_fault_ends_it_at_once_and_says_why() {
    type Forbid = fn(&mut Sim);
    let table: [(Forbid, TargetState, &str); 4] = [
        (
            |sim| sim.injection().spec.abort = true,
            TargetState::Recovered,
            "Aborted",
        ),
        (
            |sim| sim.o.stop = Some(true),
            TargetState::Recovered,
            "EmergencyStop",
        ),
        (
            |sim| sim.o.has_control_plane = false,
            TargetState::Interrupted,
            "ControlPlaneLost",
        ),
        (
            |sim| sim.o.deserted = sim.o.entries.keys().cloned().collect(),
            TargetState::Gone,
            "TargetGone",
        ),
    ];
    for (forbid, state, reason) in table {
        let mut sim = Sim::injected(&["a"]);
        forbid(&mut sim);
        sim.settle();
        assert_eq!(
            (sim.target("a").state, sim.target("a").reason.as_str()),
            (state, reason)
        );
        assert!(sim.target("a").injected_at.is_some());
        assert!(sim.o.live.is_empty());
    }
    let mut withdrawn = Sim::injected(&["a"]);
    withdrawn.o.injections.as_mut().unwrap().clear();
    withdrawn.settle();
    assert!(withdrawn.o.live.is_empty(), "absent means revert");
    assert_eq!(withdrawn.o.entries.len(), 1, "kept for the recheck");
}

#[test]
fn an_injector_that_ends_by_itself_is_told_apart_by_what_ended_it() {
    type End = fn(&mut Sim);
    let table: [(End, TargetState, ReclaimedBy, &str); 5] = [
        (
            |_| {},
            TargetState::Interrupted,
            ReclaimedBy::Kernel,
            "InjectorDied",
        ),
        (
            |sim| sim.live("a").longest_silence = Duration::from_secs(4),
            TargetState::Interrupted,
            ReclaimedBy::InjectorLease,
            "LeaseExpired",
        ),
        (
            |sim| sim.now.boot += Duration::from_millis(2_500),
            TargetState::Interrupted,
            ReclaimedBy::InjectorLease,
            "InjectorSilent",
        ),
        (
            |sim| sim.live("a").vanished = Some("the ifb is gone".to_owned()),
            TargetState::Interrupted,
            ReclaimedBy::Kernel,
            "EffectVanished",
        ),
        (
            |sim| sim.advance(60_000),
            TargetState::Recovered,
            ReclaimedBy::Deadline,
            "",
        ),
    ];
    for (end, state, by, reason) in table {
        let mut sim = Sim::injected(&["a"]);
        end(&mut sim);
        sim.live("a").has_exited = true;
        sim.settle();
        let target = sim.target("a");
        assert_eq!(
            (target.state, target.reclaimed_by, target.reason.as_str()),
            (state, Some(by), reason)
        );
        assert_eq!(sim.starts, 1, "nothing is injected again");
    }
}

#[test]
fn an_injector_that_cannot_apply_has_failed_and_was_never_injected() {
    let mut sim = Sim::new(&["a"]);
    sim.settle();
    sim.start(0);
    sim.settle();
    sim.live("a").failure = Some("no such device".to_owned());
    sim.live("a").has_exited = true;
    sim.settle();
    let target = sim.target("a");
    assert_eq!(
        (target.state, target.message.as_str()),
        (TargetState::Failed, "no such device")
    );
    assert!(target.injected_at.is_none());
}

#[test]
fn an_injector_that_cannot_be_started_is_not_tried_again() {
    let mut sim = Sim::new(&["a"]);
    sim.settle();
    let message = "cannot start an injector: no processes left";
    sim.o.unstarted = [(key("a"), message.to_owned())].into();
    sim.start(0);
    sim.settle();
    assert_eq!(sim.starts, 0);
    let target = sim.target("a");
    assert_eq!(
        (
            target.state,
            target.reason.as_str(),
            target.message.as_str()
        ),
        (TargetState::Failed, "ApplyFailed", message)
    );
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
}

#[test]
fn what_cannot_be_written_down_waits_for_the_journal_and_not_for_long() {
    let held_up = |sim: &mut Sim| {
        sim.settle();
        sim.start(0);
        // The window is open, and the attempt to write the injector down has failed.
        let steps = sim.decide();
        assert!(matches!(steps[..], [Step::Open { .. }]), "{steps:?}");
        sim.perform(steps[0].clone());
        let unwritten = Unwritten {
            since: sim.now.boot,
            message: "no space left".to_owned(),
        };
        sim.o.unwritten = [(key("a"), unwritten)].into();
        sim.o.note_pending(sim.now.boot);
        sim.advance(500);
        let steps = sim.decide();
        assert!(
            matches!(steps[..], [Step::Inject { .. }, Step::Report { .. }]),
            "it is tried again, and told: {steps:?}"
        );
        sim.perform(steps[1].clone());
        assert_eq!(sim.target("a").state, TargetState::Prepared);
        assert_eq!(sim.why("a"), ("JournalUnwritable", "no space left"));
    };
    let mut writable = Sim::new(&["a"]);
    held_up(&mut writable);
    writable.advance(2_499);
    let again = writable.decide();
    writable.o.unwritten.clear();
    writable.perform(again[0].clone());
    writable.apply_all();
    writable.settle();
    assert_eq!(writable.target("a").state, TargetState::Injected);

    let mut unwritable = Sim::new(&["a"]);
    held_up(&mut unwritable);
    unwritable.advance(2_500);
    unwritable.settle();
    assert_eq!(unwritable.starts, 0);
    assert_eq!(unwritable.target("a").state, TargetState::Failed);
    assert_eq!(unwritable.why("a"), ("JournalUnwritable", "no space left"));
    assert_eq!(unwritable.last().phase, InjectionPhase::Recovered);

    let mut short = Sim::new(&["a"]);
    short.injection().spec.faults[0].duration = windtunnel_crds::units::GoDuration::from_secs(1);
    held_up(&mut short);
    short.advance(500);
    short.settle();
    assert_eq!(short.target("a").state, TargetState::Failed);
    assert_eq!(short.why("a"), ("JournalUnwritable", "no space left"));
}

#[test]
fn an_injector_that_gives_up_without_a_word_has_failed_with_its_code() {
    for (applied, state, reason) in [
        (false, TargetState::Failed, "ApplyFailed"),
        (true, TargetState::Interrupted, "InjectorDied"),
    ] {
        let mut sim = Sim::new(&["a"]);
        sim.settle();
        sim.start(0);
        sim.settle();
        if applied {
            sim.apply_all();
        }
        sim.live("a").exit_code = Some(70);
        sim.live("a").has_exited = true;
        sim.settle();
        let target = sim.target("a");
        assert_eq!((target.state, target.reason.as_str()), (state, reason));
        assert!(target.message.contains("code 70"), "{}", target.message);
    }
}

#[test]
fn an_injector_that_is_silent_or_lies_is_killed() {
    let mut silent = Sim::injected(&["a"]);
    silent.now.boot += Duration::from_secs(3);
    silent.settle();
    assert_eq!(silent.target("a").reason, "InjectorSilent");
    let mut lying = Sim::injected(&["a"]);
    lying.live("a").vanished = Some("the ifb is gone".to_owned());
    lying.settle();
    assert_eq!(
        (
            lying.target("a").reason.as_str(),
            lying.target("a").message.as_str()
        ),
        ("EffectVanished", "the ifb is gone")
    );
    assert_eq!(lying.target("a").reclaimed_by, Some(ReclaimedBy::Agent));
}

#[test]
fn a_kill_is_repeated_until_the_injector_is_gone() {
    let mut sim = Sim::injected(&["a"]);
    sim.injection().spec.abort = true;
    let kill = Step::Kill {
        key: crate::testing::key("a"),
        why: Kill::Aborted,
    };
    assert_eq!(decide(&sim.o, sim.now).steps, std::slice::from_ref(&kill));
    sim.o.kills.insert(crate::testing::key("a"), Kill::Aborted);
    assert_eq!(decide(&sim.o, sim.now).steps[..1], [kill]);
}

#[test]
fn one_refused_target_refuses_the_injection_and_nothing_of_it_stays() {
    let mut sim = Sim::new(&["a", "b"]);
    sim.prepare(UID, &["b"]);
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Refused);
    assert_eq!(sim.last().reason, "LinkKind");
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
    sim.start(0);
    sim.settle();
    assert_eq!(sim.starts, 0, "even if it were started");
}

#[test]
fn a_dry_run_reports_prepared_and_has_no_journal() {
    let mut sim = Sim::new(&["a"]);
    sim.injection().spec.dry_run = true;
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Prepared);
    assert!(sim.o.entries.is_empty());
    // Ended because another node refused, it says so at once.
    sim.injection().spec.abort = true;
    sim.settle();
    assert_eq!(sim.last().phase, InjectionPhase::Recovered);
    assert!(sim.last().audit.as_ref().unwrap().checked_at.is_some());
    assert_eq!(sim.target("a").state, TargetState::Recovered);
}

#[test]
fn nothing_is_prepared_before_stop_clock_and_control_plane_are_known() {
    type Hide = fn(&mut Observed);
    let table: [Hide; 3] = [
        |o| o.stop = None,
        |o| o.clock_offset = None,
        |o| o.has_control_plane = false,
    ];
    for hide in table {
        let mut sim = Sim::new(&["a"]);
        hide(&mut sim.o);
        sim.settle();
        assert!(sim.told.is_empty() && sim.o.entries.is_empty());
    }
}

#[test]
fn new_peers_are_given_once_and_only_when_the_last_were_taken() {
    use windtunnel_crds::injection::{AddressRange, PeerGroup};
    let mut sim = Sim::injected(&["a"]);
    let group = PeerGroup {
        addresses: Some(vec![AddressRange("10.1.0.0/16".parse().unwrap())]),
        ports: Vec::new(),
    };
    sim.injection().spec.faults[0]
        .network
        .as_mut()
        .unwrap()
        .peers = Some(vec![group]);
    sim.live("a").is_current = false;
    assert!(
        sim.pass().is_empty(),
        "the last update is not confirmed yet"
    );
    sim.live("a").is_current = true;
    assert!(matches!(sim.pass()[..], [Step::Update { .. }]));
    sim.settle();
}

#[test]
fn counters_alone_are_no_news() {
    let mut sim = Sim::injected(&["a"]);
    let told = sim.told.len();
    sim.live("a").counts.matched = 99;
    sim.settle();
    assert_eq!(sim.told.len(), told);
    sim.advance(60_000);
    sim.settle();
    assert_eq!(
        sim.target("a").matched_packets,
        Some(99),
        "the last count is told at the end"
    );
}

#[test]
fn a_report_waits_a_moment_for_what_is_about_to_follow() {
    let mut sim = Sim::new(&["a", "b"]);
    sim.settle();
    sim.start(0);
    sim.settle();
    let told = sim.told.len();
    sim.live("a").applied_at = Some(Timestamp::UNIX_EPOCH);
    sim.settle();
    assert_eq!(sim.told.len(), told, "the other is about to follow");
    sim.advance(500);
    sim.settle();
    assert_eq!(sim.told.len(), told + 1, "but not for ever");
    assert_eq!(sim.target("a").state, TargetState::Injected);
    assert_eq!(sim.target("b").state, TargetState::Prepared);
}

#[test]
fn residue_that_stays_is_tried_again_until_it_is_gone() {
    let mut sim = Sim::injected(&["a"]);
    sim.advance(60_000);
    sim.settle();
    let left = Residue {
        node: String::new(),
        kind: ResidueKind::Link,
        name: "wt0".to_owned(),
        pod: "shop/pod-a".to_owned(),
        removed: false,
        message: "busy".to_owned(),
    };
    let entry = sim.entry(&key("a"));
    let State::Ended(ended) = &mut entry.state else {
        panic!("the window is over");
    };
    ended.residue = vec![left];
    let clean = Step::Clean { key: key("a") };
    let is_tried = |sim: &Sim| decide(&sim.o, sim.now).steps.contains(&clean);
    assert!(!is_tried(&sim), "at once");
    sim.now.boot += Duration::from_secs(6);
    assert!(is_tried(&sim));
    let State::Ended(ended) = &mut sim.entry(&key("a")).state else {
        panic!("the window is over");
    };
    ended.residue[0].removed = true;
    assert!(!is_tried(&sim), "gone");
}
