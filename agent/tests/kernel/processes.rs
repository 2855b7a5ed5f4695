//! A container's processes stopped and killed.

use std::fs;
use std::process::Command;
use std::time::Duration;

use windtunnel_agent::model::Act;
use windtunnel_agent::wire::{Task, Up};

use crate::injector::{Container, Injector};
use crate::support::eventually;

/// Counts on its standard output's file.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i > /tmp/wt-count; done";

fn counting(name: &str) -> Container {
    let mut program = Command::new("sh");
    program.args(["-c", &format!("({COUNT}) & {COUNT}")]);
    Container::running(name, &[], &mut program)
}

fn states(container: &Container) -> Vec<char> {
    let pids = windtunnel_agent::kernel::cgroup::pids(&container.cgroup).unwrap();
    let state = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    };
    pids.into_iter().filter_map(state).collect()
}

#[test]
fn a_paused_container_goes_on_when_its_injector_dies() {
    let container = counting("pause");
    eventually("both count", || states(&container).len() >= 2);
    let mut injector = Injector::applied(&container, Act::Pause);
    let used = container.used();
    injector.hold(Duration::from_secs(2));
    assert!(
        states(&container).iter().all(|state| *state == 't'),
        "{:?}",
        states(&container)
    );
    assert!(
        container.used().saturating_sub(used) < Duration::from_millis(50),
        "something ran"
    );
    injector.kill();
    let used = container.used();
    let took = eventually("it goes on", || {
        !states(&container).contains(&'t') && container.used() > used
    });
    eprintln!("it went on after {took:?}");
}

#[test]
fn a_paused_container_can_be_killed() {
    let mut container = Container::new("paused-kill", &[]);
    let mut injector = Injector::applied(&container, Act::Pause);
    container.init.kill().unwrap();
    injector.until("the container ended", |said| *said == Up::ContainerEnded);
    container.init.wait().unwrap();
}

#[test]
fn a_signal_ends_the_container_and_the_injector_is_done() {
    let mut container = Container::new("kill", &[]);
    let kill = Act::Kill {
        signal: libc::SIGKILL,
        every: None,
    };
    let mut injector = Injector::start(Task::Container(container.entry(kill)));
    injector.until("the proof", |said| matches!(said, Up::Applied { .. }));
    injector.until("all is done", |said| *said == Up::Done);
    injector.process.wait().unwrap();
    container.init.wait().unwrap();
}
