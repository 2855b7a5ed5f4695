//! A CPU fault: how exact it is, and what is left of it when its holder dies.

use std::time::{Duration, Instant};

use windtunnel_agent::model::Act;
use windtunnel_agent::wire::Up;

use crate::injector::{Container, Injector};
use crate::support::eventually;

#[test]
fn a_burner_uses_what_it_was_told_and_dies_with_its_injector() {
    let container = Container::new("burn", &[("cpu.max", "50000 100000")]);
    let mut injector = Injector::applied(&container, Act::Cpu { millicores: 300 });
    // The machine may take CPU time away: it is judged in the round that comes closest.
    let closest = (0..5).map(|_| {
        let (before, start) = (container.used(), Instant::now());
        injector.hold(Duration::from_secs(3));
        let used =
            container.used().saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64();
        eprintln!("used {used:.4} cores, told {:?}", injector.counts.effect);
        (used - 0.3).abs()
    });
    let closest = closest
        .scan(false, |done, off| {
            (!std::mem::replace(done, off <= 0.003)).then_some(off)
        })
        .fold(f64::INFINITY, f64::min);
    assert!(closest <= 0.003, "{closest} cores off 0.3");
    assert_eq!(container.others(), 1);
    injector.kill();
    let took = eventually("the burner is gone", || container.others() == 0);
    eprintln!("the burner was gone after {took:?}");
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
