//! What a fault does to packets, and to which.

use std::time::Duration;

use windtunnel_agent::kernel::nft::{Direction, OwnedTable, Role, Transport};
use windtunnel_agent::kernel::qdisc::Netem;

use crate::support::{
    NEVER, Pair, SOON, V4, V6, delay, eventually, everything, forward_to, has_netem, loss, peers,
    port, run, selected, table,
};

/// A fault's delay, and what is surely neither without it nor twice as much.
const DELAY: u64 = 200;
const DELAYED: std::ops::Range<Duration> = Duration::from_millis(199)..Duration::from_millis(390);
const DIRECT: std::ops::Range<Duration> = Duration::ZERO..Duration::from_millis(150);

/// How often a packet is sent that was late: a wrong dose is wrong each time, a busy machine is not.
const TRIES: u64 = 5;

/// Fails unless a packet takes as long as it is to; how many were sent.
fn assert_within(
    range: &std::ops::Range<Duration>,
    mut pass: impl FnMut() -> Option<Duration>,
) -> u64 {
    for sent in 1.. {
        let passed = pass();
        if passed.is_some_and(|passed| range.contains(&passed)) {
            return sent;
        }
        let is_late = passed.is_none_or(|passed| passed >= range.end);
        assert!(
            is_late && sent < TRIES,
            "{passed:?} is not within {range:?}"
        );
    }
    unreachable!("it is tried a few times")
}

/// A pair with a fault for one of the peer's addresses of each version.
fn faulty(direction: Direction, netem: &Netem) -> (Pair, OwnedTable) {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(netem));
    let select = vec![peers(&[V4[1], V6[1]])];
    let table = pair.install(pair.chain(direction, select, &ifb));
    (pair, table)
}

#[test]
fn packets_to_the_peer_are_delayed_and_no_others() {
    if !has_netem() {
        return;
    }
    let (pair, mut table) = faulty(Direction::Egress, &delay(DELAY));
    let mut sent = 0;
    for (selected, other) in [(V4[1], V4[2]), (V6[1], V6[2])] {
        let flow = pair.flow(selected, 0);
        sent += assert_within(&DELAYED, || flow.out(SOON));
        assert_within(&DIRECT, || flow.back(SOON));
        assert_within(&DIRECT, || pair.flow(other, 0).out(SOON));
    }
    assert_eq!(selected(&mut table), sent);
    drop(table);
    assert_within(&DIRECT, || pair.flow(V4[1], 0).out(SOON));
}

#[test]
fn packets_from_the_peer_are_delayed_and_no_others() {
    if !has_netem() {
        return;
    }
    let (pair, mut table) = faulty(Direction::Ingress, &delay(DELAY));
    let mut sent = 0;
    for (selected, other) in [(V4[1], V4[2]), (V6[1], V6[2])] {
        let flow = pair.flow(selected, 0);
        sent += assert_within(&DELAYED, || flow.back(SOON));
        assert_within(&DIRECT, || flow.out(SOON));
        assert_within(&DIRECT, || pair.flow(other, 0).back(SOON));
    }
    assert_eq!(selected(&mut table), sent);
}

#[test]
fn pings_are_delayed_too() {
    if !has_netem() {
        return;
    }
    let (pair, _table) = faulty(Direction::Egress, &delay(DELAY));
    for (peer, range) in [
        (V4[1], &DELAYED),
        (V6[1], &DELAYED),
        (V4[2], &DIRECT),
        (V6[2], &DIRECT),
    ] {
        assert_within(range, || {
            let shown = run(&pair.pod, &["ping", "-n", "-c", "1", "-W", "5", peer]);
            let time = shown.split("time=").nth(1).unwrap();
            let time: f64 = time.split(' ').next().unwrap().parse().unwrap();
            Some(Duration::from_secs_f64(time / 1000.0))
        });
    }
}

#[test]
fn some_packets_are_lost() {
    if !has_netem() {
        return;
    }
    let (mut pair, mut table) = faulty(Direction::Egress, &loss(30.0));
    for peer in [V4[1], V6[1]] {
        let flow = pair.flow(peer, 0);
        let arrived: usize = (0..10).map(|_| flow.burst_out(50)).sum();
        // 350 of 500, within 5 standard deviations.
        assert!((299..=401).contains(&arrived), "{arrived} of 500 arrived");
    }
    assert_eq!(selected(&mut table), 1000);
    let mut ifb = table.plan().chains[0].clone();
    let ifb = forward_to(&mut ifb).index;
    let stats = pair.route.qdisc_stats(ifb).unwrap().unwrap();
    assert_eq!(u64::from(stats.drops) + stats.sent_packets, 1000);
    assert!(stats.lost.is_none_or(|lost| lost == u64::from(stats.drops)));
}

#[test]
fn every_packet_is_lost_and_the_sender_is_not_told() {
    if !has_netem() {
        return;
    }
    for direction in [Direction::Egress, Direction::Ingress] {
        let (pair, _table) = faulty(direction, &loss(100.0));
        for (selected, other) in [(V4[1], V4[2]), (V6[1], V6[2])] {
            let flow = pair.flow(selected, 0);
            let (lost, kept) = match direction {
                Direction::Egress => (flow.out(NEVER), flow.back(SOON)),
                Direction::Ingress => (flow.back(NEVER), flow.out(SOON)),
            };
            assert_eq!(lost, None);
            assert!(kept.is_some());
            assert!(pair.flow(other, 0).out(SOON).is_some());
            assert!(pair.flow(other, 0).back(SOON).is_some());
        }
    }
}

#[test]
fn neighbours_are_found_while_every_packet_is_lost() {
    if !has_netem() {
        return;
    }
    for direction in [Direction::Egress, Direction::Ingress] {
        let mut pair = Pair::new();
        let ifb = pair.ifb("wt0", Some(&loss(100.0)));
        let mut table = pair.install(pair.chain(direction, vec![everything()], &ifb));
        run(&pair.pod, &["ip", "neigh", "flush", "all"]);
        for peer in [V4[1], V6[1]] {
            let flow = pair.flow(peer, 0);
            let (lost, kept) = match direction {
                Direction::Egress => (flow.out(NEVER), flow.back(SOON)),
                Direction::Ingress => (flow.back(NEVER), flow.out(SOON)),
            };
            assert_eq!(lost, None);
            assert!(kept.is_some());
            eventually("the neighbour is found", || {
                let shown = run(&pair.pod, &["ip", "neigh", "show", "to", peer]);
                shown.contains("lladdr")
            });
        }
        let counters = table.counters().unwrap();
        assert!(counters.sum(Role::Discovery).packets > 0);
    }
}

#[test]
fn ports_narrow_a_selection() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&loss(100.0)));
    for direction in [Direction::Egress, Direction::Ingress] {
        let mut remote = peers(&[V4[1], V6[1]]);
        remote.name = "remote".to_owned();
        remote.remote_ports = port(7001);
        remote.protocols = vec![Transport::Udp];
        let mut local = everything();
        local.local_ports = port(7002);
        let mut tcp = everything();
        tcp.name = "tcp".to_owned();
        tcp.remote_ports = port(7003);
        tcp.protocols = vec![Transport::Tcp];
        let chain = pair.chain(direction, vec![remote, local, tcp], &ifb);
        let _table = pair.install(chain);
        for (peer, other) in [(V4[1], V4[2]), (V6[1], V6[2])] {
            for (pod_port, peer, peer_port, is_lost) in [
                (0, peer, 7001, true),
                (0, other, 7001, false),
                (7001, peer, 0, false),
                (7002, peer, 0, true),
                (7002, other, 0, true),
                (0, peer, 7002, false),
                (0, peer, 7003, false),
            ] {
                let flow = pair.flow_from(pod_port, peer, peer_port);
                let wait = if is_lost { NEVER } else { SOON };
                let passed = match direction {
                    Direction::Egress => flow.out(wait),
                    Direction::Ingress => flow.back(wait),
                };
                let case = (direction, pod_port, peer, peer_port);
                assert_eq!(passed.is_none(), is_lost, "{case:?}");
            }
        }
    }
}

#[test]
fn what_is_spared_passes() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&loss(100.0)));
    let mut node = peers(&[V4[2], V6[2]]);
    node.name = "node".to_owned();
    let mut dns = peers(&[V4[1], V6[1]]);
    dns.remote_ports = port(5300);
    let mut chain = pair.chain(Direction::Egress, vec![everything()], &ifb);
    chain.spare = vec![node, dns];
    let mut table = pair.install(chain);
    for (selected, spared) in [(V4[1], V4[2]), (V6[1], V6[2])] {
        assert_eq!(pair.flow(selected, 0).out(NEVER), None);
        assert!(pair.flow(selected, 5300).out(SOON).is_some());
        assert!(pair.flow(spared, 0).out(SOON).is_some());
    }
    let counters = table.counters().unwrap();
    assert_eq!(counters.sum(Role::Spared).packets, 4);
    let spared = counters.each.iter().filter(|c| c.role == Role::Spared);
    let each: Vec<_> = spared
        .map(|c| (&c.selection[..], c.tally.packets))
        .collect();
    assert_eq!(each, [("node", 2), ("peers", 2)]);
    assert!(counters.sum(Role::Selected).packets >= 2);
}

#[test]
fn loopback_is_untouched() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&loss(100.0)));
    let _table = pair.install(pair.chain(Direction::Egress, vec![everything()], &ifb));
    for address in ["127.0.0.1", "::1", V4[0], V6[0]] {
        run(&pair.pod, &["ping", "-n", "-c", "1", "-W", "5", address]);
    }
}

#[test]
fn of_two_tables_the_one_with_the_lower_priority_takes_the_packet() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let slow = pair.ifb("wt0", Some(&delay(DELAY)));
    let lossy = pair.ifb("wt1", Some(&loss(100.0)));
    for (slow_priority, lossy_priority) in [(-1, 1), (1, -1)] {
        for slow_is_first in [true, false] {
            let install = |name: &str, priority, ifb| {
                let mut chain = pair.chain(Direction::Egress, vec![peers(&[V4[1]])], ifb);
                chain.priority = priority;
                let mut plan = table(vec![chain]);
                plan.name = name.to_owned();
                OwnedTable::install(&pair.pod, &plan).unwrap()
            };
            let make_slow = || install("wt-slow", slow_priority, &slow);
            let make_lossy = || install("wt-lossy", lossy_priority, &lossy);
            let tables = if slow_is_first {
                let slow = make_slow();
                (slow, make_lossy())
            } else {
                let lossy = make_lossy();
                (make_slow(), lossy)
            };
            let flow = pair.flow(V4[1], 0);
            if slow_priority < lossy_priority {
                assert_within(&DELAYED, || flow.out(SOON));
            } else {
                assert_eq!(flow.out(SOON / 10), None);
            }
            drop(tables);
        }
    }
}

#[test]
fn packets_are_counted_one_by_one() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let chain = pair.chain(Direction::Egress, vec![peers(&[V4[1], V6[1]])], &ifb);
    let mut table = pair.install(chain);
    for (peer, so_far) in [(V4[1], 50), (V6[1], 100)] {
        assert_eq!(pair.flow(peer, 0).burst_out(50), 50);
        assert_eq!(selected(&mut table), so_far);
    }
    let tally = table.counters().unwrap().sum(Role::Selected);
    // "burst" behind 8 bytes of UDP, 20 or 40 of IP, and 14 of Ethernet.
    assert_eq!(tally.bytes, 50 * (5 + 8 + 20 + 14) + 50 * (5 + 8 + 40 + 14));
    assert_eq!(pair.flow(V4[2], 0).burst_out(10), 10);
    assert_eq!(selected(&mut table), 100);
}

#[test]
fn what_waits_is_seen_and_drains() {
    if !has_netem() {
        return;
    }
    let (mut pair, table) = faulty(Direction::Egress, &delay(1500));
    let flow = pair.flow(V4[1], 0);
    for _ in 0..5 {
        flow.send_out();
    }
    let mut ifb = table.plan().chains[0].clone();
    let ifb = forward_to(&mut ifb).clone();
    let mut backlog = || pair.route.qdisc_stats(ifb.index).unwrap().unwrap();
    assert_eq!(backlog().backlog_packets, 5);
    assert!(backlog().backlog_bytes > 0);
    // The table goes, what waits comes out all the same.
    drop(table);
    eventually("the ifb is empty", || backlog().backlog_packets == 0);
    assert_eq!(backlog().sent_packets, 5);
    assert!(pair.route.delete(ifb.index, &ifb.name).unwrap());
}
