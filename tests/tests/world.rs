//! The whole system under scripts of what can go wrong, made by chance. How many is said by
//! `WINDTUNNEL_WORLD_SCRIPTS`, or for how long by `WINDTUNNEL_WORLD_SECONDS`; where they begin by
//! `WINDTUNNEL_WORLD_SEED`. A script that breaks a law is made as short as it can be, and printed
//! with its seed.

use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use windtunnel_tests::world::{Event, Run, Script, play, scripts};

/// Most events of a script.
const EVENTS: usize = 8;
/// How long scripts are played if nothing is said.
const SECONDS: u64 = 20;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_script_breaks_a_law() {
    let seed = number("WINDTUNNEL_WORLD_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("a time");
        now.as_secs()
    });
    let wanted = number("WINDTUNNEL_WORLD_SCRIPTS");
    let time = Duration::from_secs(number("WINDTUNNEL_WORLD_SECONDS").unwrap_or(SECONDS));
    let start = Instant::now();
    let (mut played, mut effects, mut passes) = (0_u64, 0, 0);
    let mut batch = seed;
    while wanted.map_or(start.elapsed() < time, |wanted| played < wanted) {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&batch.to_le_bytes());
        let config = Config {
            cases: 100,
            failure_persistence: None,
            max_shrink_iters: 20_000,
            ..Config::default()
        };
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, rng);
        let counts = std::cell::Cell::new((0_u64, 0_u64));
        let result = runner.run(&scripts(EVENTS), |script| {
            let story = play(&script).map_err(|broken| TestCaseError::fail(broken.to_string()))?;
            let (effects, passes) = counts.get();
            counts.set((effects + story.effects, passes + story.passes));
            Ok(())
        });
        if let Err(broken) = result {
            panic!("WINDTUNNEL_WORLD_SEED={batch} WINDTUNNEL_WORLD_SCRIPTS=100: {broken}");
        }
        played += 100;
        let (begun, made) = counts.get();
        effects += begun;
        passes += made;
        batch += 1;
    }
    println!(
        "{played} scripts from seed {seed}, {effects} effects, {passes} passes, {:.0} s",
        start.elapsed().as_secs_f64()
    );
    assert!(effects > played / 4, "most scripts do nothing");
}

/// Without trouble each run does what it says: the laws are not kept by doing nothing.
#[test]
fn a_run_without_trouble_completes() {
    for (run, effects, kills) in [
        (Run::Short, 4, 0),
        (Run::Windows, 6, 0),
        (Run::Kills, 4, 2),
        (Run::Long, 4, 0),
        (Run::Containers, 6, 0),
        (Run::Dry, 0, 0),
    ] {
        let story = play(&Script {
            run,
            events: Vec::new(),
        })
        .expect("no law is broken");
        assert_eq!((story.effects, story.kills), (effects, kills), "{run:?}");
        assert_eq!(
            story.phase,
            Some(windtunnel_crds::status::Phase::Completed),
            "{run:?}"
        );
    }
}

/// Once more for each restart within the window, and not after it.
#[test]
fn a_fault_is_on_the_container_that_is_there() {
    for (after, effects) in [(3_000, 7), (29_000, 7), (31_000, 6)] {
        let events = vec![(after, Event::RestartContainer { pod: 0 })];
        let story = play(&Script {
            run: Run::Containers,
            events,
        })
        .expect("no law is broken");
        assert_eq!(story.effects, effects, "after {after} ms");
        assert_eq!(story.phase, Some(windtunnel_crds::status::Phase::Completed));
    }
}

#[test]
fn an_abort_ends_every_effect() {
    let events = vec![(5_000, Event::Abort)];
    let story = play(&Script {
        run: Run::Short,
        events,
    })
    .expect("no law is broken");
    assert_eq!(story.phase, Some(windtunnel_crds::status::Phase::Aborted));
}
