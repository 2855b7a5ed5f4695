//! The death of a table's owner, and what is left of a fault.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use windtunnel_agent::kernel::netns::NetNs;
use windtunnel_agent::kernel::nft::{Device, Direction, OwnedTable, Table, list_tables};
use windtunnel_agent::kernel::proc::Proc;

use crate::support::{
    Flow, NEVER, Pair, SOON, Subprocess, TABLE, V4, V6, delay, eventually, has_netem, loss, peers,
    plays, run, stay, table,
};

/// How soon packets must pass after the owner's death; measured are a few milliseconds.
const UNDONE: Duration = Duration::from_millis(500);

/// Holds the table that it is told in the namespace that it is started in.
#[test]
fn owner() {
    if !plays("death::owner") {
        return;
    }
    let plan: Table = serde_json::from_str(&std::env::var("WT_PLAN").unwrap()).unwrap();
    let pid = i32::try_from(std::process::id()).unwrap();
    let netns = NetNs::of_pid(&Proc::default(), pid).unwrap();
    let mut table = OwnedTable::install(&netns, &plan).unwrap();
    table.verify().unwrap();
    println!("owner ready");
    stay();
}

fn start_owner(pair: &Pair, plan: &Table) -> Subprocess {
    let plan = serde_json::to_string(plan).unwrap();
    // The thread that starts it ends at once; the owner did not ask to die with it.
    let start = || Subprocess::start("death::owner", &[("WT_PLAN", plan)]);
    let mut owner = pair.pod.enter(start).unwrap();
    owner.wait_for("owner ready");
    owner
}

/// An ifb that nothing passes; without netem, one with room for nothing.
fn black_hole(pair: &mut Pair) -> Device {
    if has_netem() {
        return pair.ifb("wt0", Some(&loss(100.0)));
    }
    let ifb = pair.ifb("wt0", None);
    let shut = "tc qdisc replace dev wt0 root tbf rate 8bit burst 1 limit 1";
    run(&pair.pod, &shut.split(' ').collect::<Vec<_>>());
    ifb
}

#[test]
fn the_kernel_undoes_the_fault_of_a_killed_owner() {
    let mut pair = Pair::new();
    let before = pair.state();
    let ifb = black_hole(&mut pair);
    let select = vec![peers(&[V4[1], V6[1]])];
    let plan = table(vec![pair.chain(Direction::Egress, select, &ifb)]);
    for round in 0..5 {
        let mut owner = start_owner(&pair, &plan);
        let flows = [pair.flow(V4[1], 0), pair.flow(V6[1], 0)];
        for flow in &flows {
            assert_eq!(flow.out(NEVER), None);
        }
        owner.child.kill().unwrap();
        let killed = Instant::now();
        eventually("packets pass", || flows.iter().all(Flow::is_open));
        let undone = killed.elapsed();
        eprintln!("round {round}: undone {undone:?} after the kill");
        assert!(undone < UNDONE, "{undone:?}");
        owner.child.wait().unwrap();
        eventually("the table is gone", || {
            list_tables(&pair.pod, TABLE).unwrap().is_empty()
        });
    }
    assert!(pair.route.delete(ifb.index, &ifb.name).unwrap());
    assert_eq!(pair.state(), before);
}

#[test]
fn a_stopped_owner_keeps_its_fault_until_it_is_killed() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let plan = table(vec![pair.chain(
        Direction::Egress,
        vec![peers(&[V4[1]])],
        &ifb,
    )]);
    let mut owner = start_owner(&pair, &plan);
    let pid = Pid::from_raw(i32::try_from(owner.child.id()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    assert_eq!(list_tables(&pair.pod, TABLE).unwrap().len(), 1);
    owner.kill();
    eventually("the table is gone", || {
        list_tables(&pair.pod, TABLE).unwrap().is_empty()
    });
}

#[test]
fn a_fault_leaves_everything_as_it_was() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let before = pair.state();
    let ifbs = [
        pair.ifb("wt0", Some(&delay(1))),
        pair.ifb("wt1", Some(&delay(1))),
    ];
    let select = || vec![peers(&[V4[1], V6[1]])];
    let chains = vec![
        pair.chain(Direction::Egress, select(), &ifbs[0]),
        pair.chain(Direction::Ingress, select(), &ifbs[1]),
    ];
    let owned = OwnedTable::install(&pair.pod, &table(chains)).unwrap();
    for peer in [V4[1], V6[1]] {
        pair.flow(peer, 0).out(SOON).unwrap();
        pair.flow(peer, 0).back(SOON).unwrap();
    }
    assert_ne!(pair.state(), before);
    drop(owned);
    for ifb in &ifbs {
        assert!(pair.route.delete(ifb.index, &ifb.name).unwrap());
    }
    assert_eq!(pair.state(), before);
}
