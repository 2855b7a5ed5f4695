//! A CPU fault: how exact it is, and what is left of it when its holder dies.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use windtunnel_agent::kernel::cgroup;
use windtunnel_agent::model::Act;
use windtunnel_agent::wire::{Task, Up};

use crate::injector::{Container, Injector};
use crate::support::{Subprocess, eventually, plays, within};

/// How long many processes may take.
const MANY: Duration = Duration::from_secs(30);

#[test]
fn a_burner_uses_what_it_was_told_and_dies_with_its_injector() {
    let container = Container::new("burn", &[("cpu.max", "50000 100000")]);
    let mut injector = Injector::applied(&container, Act::Cpu { millicores: 300 });
    // The machine may take CPU time away, and a kernel in user mode counts that as used: it is judged
    // in the round that comes closest, and by three in a hundred.
    let closest = (0..12).map(|_| {
        let (before, start) = (container.used(), Instant::now());
        injector.hold(Duration::from_secs(3));
        let used =
            container.used().saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64();
        eprintln!("used {used:.4} cores, told {:?}", injector.counts.effect);
        (used - 0.3).abs()
    });
    let closest = closest
        .scan(false, |done, off| {
            (!std::mem::replace(done, off <= 0.009)).then_some(off)
        })
        .fold(f64::INFINITY, f64::min);
    assert!(closest <= 0.009, "{closest} cores off 0.3");
    assert_eq!(container.others(), 1);
    injector.kill();
    let took = eventually("the burner is gone", || container.others() == 0);
    eprintln!("the burner was gone after {took:?}");
}

/// As crun and systemd leave it: the group of the container passes its controllers on.
#[test]
fn a_container_with_groups_of_its_own_is_hit() {
    let container = Container::new("nested", &[]);
    let inner = container.cgroup.join("app");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("cgroup.procs"), container.init.id().to_string()).unwrap();
    fs::write(container.cgroup.join("cgroup.subtree_control"), "+cpu").unwrap();
    let mut injector = Injector::applied(&container, Act::Cpu { millicores: 100 });
    assert_eq!(container.others(), 1);
    injector.kill();
    eventually("the burner is gone", || container.others() == 0);
}

#[test]
fn an_injector_ends_with_its_container() {
    let mut container = Container::new("restart", &[]);
    let mut injector = Injector::applied(&container, Act::Cpu { millicores: 100 });
    container.init.kill().unwrap();
    container.init.wait().unwrap();
    injector.until("the container ended", |said| *said == Up::ContainerEnded);
    injector.process.wait().unwrap();
    eventually("the burner is gone", || container.others() == 0);
}

/// Stands for an agent: holds the fault that it is told.
#[test]
fn agent() {
    if !plays("cpu::agent") {
        return;
    }
    let task = serde_json::from_str(&std::env::var("WT_TASK").unwrap()).unwrap();
    let mut injector = Injector::start(task);
    injector.until("the proof", |said| matches!(said, Up::Applied { .. }));
    println!("agent ready");
    loop {
        injector.hold(Duration::from_secs(1));
    }
}

#[test]
fn whatever_forks_in_a_fault_is_gone_soon_after_its_agent() {
    // The machine may be late, but not each time.
    let soon = (0..3).any(|_| forks_are_gone_after() < Duration::from_secs(2));
    assert!(soon);
}

/// How long what forks in a fault outlives the agent.
fn forks_are_gone_after() -> Duration {
    let container = Container::new("forks", &[]);
    let task = Task::Container(container.entry(Act::Cpu { millicores: 50 }));
    let task = serde_json::to_string(&task).unwrap();
    let mut agent = Subprocess::start("cpu::agent", &[("WT_TASK", task)]);
    agent.wait_for("agent ready");
    let pids = cgroup::pids(&container.cgroup).unwrap();
    let init = i32::try_from(container.init.id()).unwrap();
    let burner = pids.into_iter().find(|pid| *pid != init).unwrap();
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = namespace(&burner.to_string()).unwrap();
    // Many at once, and then one after the other for ever; each in a session of its own, with a
    // parent that has gone, and deaf to all signals that it can be deaf to.
    let one = "trap '' HUP INT QUIT TERM PIPE; sleep 600 & exec sleep 600";
    let bomb = format!(
        "i=0; while :; do (setsid sh -c \"{one}\" &); i=$((i+1)); [ $i -lt 50 ] || sleep 0.1; done"
    );
    let mut bomb = Command::new("nsenter")
        .args(["--target", &burner.to_string(), "--pid", "--"])
        .args(["sh", "-c", &bomb])
        .spawn()
        .unwrap();
    let inside = || {
        let all = fs::read_dir("/proc").unwrap().flatten();
        let names = all.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter(|pid| namespace(pid).as_ref() == Some(&own))
            .count()
    };
    within(MANY, "there are many", || inside() > 60);
    agent.kill();
    let took = within(MANY, "all are gone", || inside() == 0);
    eprintln!("gone after {took:?}");
    bomb.wait().unwrap();
    took
}
