//! Tests of windtunnel on a real cluster. One cluster serves all of them: the running one named by
//! `WINDTUNNEL_LAB_NAME`, else `default`; if there is none, one is started and ends with this
//! program. Tests that leave everybody else's pods, agents and nodes alone run beside each other,
//! each in a namespace of its own; then the others run one after the other.

#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of packets and of milliseconds are small and not negative"
)]

mod product {
    pub(crate) mod busy;
    pub(crate) mod compose;
    pub(crate) mod containers;
    pub(crate) mod counters;
    pub(crate) mod cpu;
    pub(crate) mod database;
    pub(crate) mod definitions;
    pub(crate) mod demo;
    pub(crate) mod disk;
    pub(crate) mod doses;
    pub(crate) mod follow;
    pub(crate) mod install;
    pub(crate) mod io;
    pub(crate) mod lamp;
    pub(crate) mod lifecycle;
    pub(crate) mod manifests;
    pub(crate) mod measure;
    pub(crate) mod memory;
    pub(crate) mod network;
    pub(crate) mod outage;
    pub(crate) mod partition;
    pub(crate) mod peers;
    pub(crate) mod podkill;
    pub(crate) mod reboot;
    pub(crate) mod reclaim;
    pub(crate) mod refuse;
    pub(crate) mod reset;
    pub(crate) mod scene;
    pub(crate) mod security;
    pub(crate) mod shown;
    pub(crate) mod stage;
    pub(crate) mod stop;
    pub(crate) mod timeline;
    pub(crate) mod told;
    pub(crate) mod torture;
    pub(crate) mod traces;
}

use std::any::Any;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use libtest_mimic::{Arguments, Trial};

use product::stage::{Broken, Stage, Test};
use product::{
    compose, doses, lifecycle, manifests, network, outage, peers, podkill, reboot, reclaim, refuse,
    security, timeline, told, torture,
};

/// How many tests run beside each other.
const BESIDE: usize = 3;

/// How many of the slowest tests are told.
const SLOWEST: usize = 10;

/// Tests that touch only what is in their own namespace.
const GENTLE: &[&[Test]] = &[
    NETWORK,
    lifecycle::GENTLE,
    reclaim::GENTLE,
    refuse::GENTLE,
    podkill::GENTLE,
    security::GENTLE,
    product::install::GENTLE,
    product::follow::GENTLE,
    product::containers::GENTLE,
    product::cpu::GENTLE,
    product::io::GENTLE,
    product::memory::GENTLE,
    product::disk::GENTLE,
    product::reset::GENTLE,
    product::partition::GENTLE,
];

/// Tests that take agents, the operator, nodes or the control plane down; before them those of which a
/// busy machine makes nothing.
const ROUGH: &[&[Test]] = &[
    doses::ALONE,
    product::shown::ALONE,
    lifecycle::ROUGH,
    reclaim::ROUGH,
    torture::ROUGH,
    refuse::ROUGH,
    product::stop::ROUGH,
    outage::ROUGH,
    podkill::ROUGH,
    reboot::ROUGH,
    product::busy::ROUGH,
    product::counters::ROUGH,
    product::demo::ROUGH,
    product::install::ROUGH,
    product::definitions::ROUGH,
    product::database::ROUGH,
];

const NETWORK: &[Test] = &[
    ("delay_is_there_and_gone", network::delay_is_there_and_gone),
    (
        "directions_are_those_of_the_target",
        doses::directions_are_those_of_the_target,
    ),
    ("every_dose_is_seen", doses::every_dose_is_seen),
    ("peers_are_those_chosen", peers::peers_are_those_chosen),
    (
        "local_ports_are_those_of_the_target",
        peers::local_ports_are_those_of_the_target,
    ),
    ("peers_follow_the_cluster", peers::peers_follow_the_cluster),
    (
        "probes_and_names_are_spared",
        peers::probes_and_names_are_spared,
    ),
    (
        "windows_open_and_close_in_time",
        timeline::windows_open_and_close_in_time,
    ),
    ("experiments_compose", compose::experiments_compose),
    ("equal_peers_are_refused", compose::equal_peers_are_refused),
    (
        "faults_on_the_same_packets_take_turns",
        compose::faults_on_the_same_packets_take_turns,
    ),
    (
        "manifests_get_their_answers",
        manifests::manifests_get_their_answers,
    ),
    ("examples_are_accepted", manifests::examples_are_accepted),
    (
        "a_run_is_what_it_was_created_as",
        manifests::a_run_is_what_it_was_created_as,
    ),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let stage = if arguments.list {
        Ok(None)
    } else {
        Stage::set().map(|stage| Some(Arc::new(stage)))
    };
    let stage = match stage {
        Ok(stage) => stage,
        Err(error) => {
            let _ = writeln!(io::stderr(), "no stage to test on: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let mut has_failed = false;
    for (tests, beside) in [(GENTLE, BESIDE), (ROUGH, 1)] {
        let first = |test| Try { test, failed: None };
        let all = tests.concat().into_iter().map(first).collect();
        let first = run(&arguments, all, beside, stage.as_ref());
        has_failed |= first.has_failed;
        if !first.again.is_empty() {
            // What failed beside others has the machine to itself now.
            has_failed |= run(&arguments, first.again, 1, stage.as_ref()).has_failed;
        }
    }
    if has_failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// A test that is to be run, and how it failed before, if it did.
struct Try {
    test: Test,
    failed: Option<String>,
}

/// What has become of tests.
struct Tried {
    /// One has failed for good.
    has_failed: bool,
    /// Those that are to be run once more.
    again: Vec<Try>,
}

/// Runs tests. The machines that this runs on are shared and stand still for seconds at a time, which no
/// bound of a fault can tell from a fault that stays: so a failure counts when it happens again, and the
/// first is told in any case. What was seen [`Broken`] counts at once.
fn run(
    arguments: &Arguments,
    tries: Vec<Try>,
    threads: usize,
    stage: Option<&Arc<Stage>>,
) -> Tried {
    let mut arguments = arguments.clone();
    arguments.test_threads.get_or_insert(threads);
    let (times, again) = (Arc::new(Mutex::new(Vec::new())), Arc::default());
    let trials = tries.into_iter().map(|one| {
        let (stage, times, again) = (stage.cloned(), times.clone(), Arc::clone(&again));
        Trial::test(one.test.0, move || {
            let stage = stage.ok_or("no stage")?;
            let (begun, name) = (Instant::now(), one.test.0);
            let result = attempt(one, &stage, &again);
            lock(&times).push((begun.elapsed(), name));
            result.map_err(|error| format!("{error:#}").into())
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    tell_slowest(&mut lock(&times));
    Tried {
        has_failed: conclusion.has_failed(),
        again: std::mem::take(&mut *lock(&again)),
    }
}

/// Runs a test; puts it among those that are to be run once more if it fails for the first time.
fn attempt(one: Try, stage: &Stage, again: &Mutex<Vec<Try>>) -> anyhow::Result<()> {
    let (name, test) = one.test;
    // A test that panics leaves nothing of itself but what every test leaves that fails.
    let result = catch_unwind(AssertUnwindSafe(|| test(stage)));
    let Err(error) = result.unwrap_or_else(|panic| Err(anyhow!("panicked: {}", text(&*panic))))
    else {
        return Ok(());
    };
    let is_broken = error.downcast_ref::<Broken>().is_some();
    let what = match &one.failed {
        Some(_) => "again",
        None if is_broken => "for good",
        None => "and is run once more",
    };
    let told = told::told(stage);
    let _ = writeln!(io::stderr(), "{name} failed, {what}: {error:#}\n{told}");
    if let Some(first) = one.failed {
        return Err(error.context(format!("failed twice; at first: {first}")));
    }
    if is_broken {
        return Err(error);
    }
    let failed = Some(format!("{error:#}"));
    lock(again).push(Try { failed, ..one });
    Ok(())
}

/// What a panic says.
fn text(panic: &dyn Any) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one statement: a panic leaves the value whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says which of many tests took longest.
fn tell_slowest(times: &mut [(Duration, &str)]) {
    if times.len() < SLOWEST {
        return;
    }
    times.sort_unstable_by(|a, b| b.cmp(a));
    let slowest = times.iter().take(SLOWEST);
    let told: Vec<String> = slowest
        .map(|(took, name)| format!("{name} {:.0} s", took.as_secs_f64()))
        .collect();
    let _ = writeln!(io::stderr(), "slowest: {}", told.join(", "));
}
