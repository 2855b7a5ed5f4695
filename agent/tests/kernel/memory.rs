//! A memory fault: how much is held, whose need goes first, and what is left when its holder dies.

use std::fs;
use std::time::Duration;

use windtunnel_agent::kernel::cgroup::memory;
use windtunnel_agent::model::{Act, MemoryAct};
use windtunnel_agent::wire::Up;

use crate::injector::{Container, Injector};
use crate::support::eventually;

const MIB: u64 = 1 << 20;

fn hold(bytes: u64, most: Option<u64>) -> Act {
    Act::Memory(MemoryAct {
        bytes,
        ramp: Duration::ZERO,
        most,
        spare: 0,
        is_limited: true,
    })
}

/// A limit of 128 MiB.
fn container(name: &str, together: &str) -> Container {
    let limit = (128 * MIB).to_string();
    Container::new(
        name,
        &[("memory.max", &limit), ("memory.oom.group", together)],
    )
}

#[test]
fn memory_is_held_as_told_and_freed_when_the_injector_dies() {
    let container = container("hold", "1");
    let before = memory::usage(&container.cgroup).unwrap();
    let mut injector = Injector::applied(&container, hold(64 * MIB, Some(112 * MIB)));
    injector.hold(Duration::from_secs(2));
    let held = memory::usage(&container.cgroup).unwrap() - before;
    assert!((60 * MIB..72 * MIB).contains(&held), "{held}");
    assert_eq!(injector.counts.effect["bytes"], 64 * MIB);
    injector.kill();
    let took = eventually("the memory is free", || {
        memory::usage(&container.cgroup).unwrap() < before + 2 * MIB
    });
    eprintln!("the memory was free after {took:?}");
}

#[test]
fn no_more_is_held_than_may_be_used() {
    let mut container = container("headroom", "1");
    let mut injector = Injector::applied(&container, hold(500 * MIB, Some(100 * MIB)));
    injector.hold(Duration::from_secs(2));
    let used = memory::usage(&container.cgroup).unwrap();
    assert!((90 * MIB..=100 * MIB).contains(&used), "{used}");
    assert_eq!(memory::oom_kills(&container.cgroup), 0);
    assert!(
        container.init.try_wait().unwrap().is_none(),
        "the container lives"
    );
}

#[test]
fn the_hog_dies_first_and_that_is_an_effect() {
    let mut container = container("oom", "0");
    let mut injector = Injector::applied(&container, hold(500 * MIB, None));
    injector.hold(Duration::from_secs(4));
    let kills = injector.counts.effect["oomKills"];
    assert!(kills >= 1, "{:?}", injector.counts);
    assert!(
        container.init.try_wait().unwrap().is_none(),
        "the container lives"
    );
}

#[test]
fn where_all_die_as_one_the_container_ends_and_the_kill_is_told() {
    let mut container = container("group", "1");
    let mut injector = Injector::start(windtunnel_agent::wire::Task::Container(
        container.entry(hold(500 * MIB, None)),
    ));
    injector.until("the container ended", |said| *said == Up::ContainerEnded);
    container.init.wait().unwrap();
    assert!(
        injector.counts.effect["oomKills"] >= 1,
        "{:?}",
        injector.counts
    );
    let events = fs::read_to_string(container.cgroup.join("memory.events")).unwrap();
    eprintln!("{events}");
}
