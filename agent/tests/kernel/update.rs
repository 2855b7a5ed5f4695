//! Changes of a table in place.

use std::net::Ipv6Addr;
use std::time::Instant;

use ipnet::IpNet;
use windtunnel_agent::kernel::nft::{
    Addresses, Chain, Direction, NftError, OwnedTable, Role, Selection, Table,
};

use crate::support::{Pair, SOON, V4, V6, forward_to, peers, port, selected, table};

fn with(plan: &Table, change: impl FnOnce(&mut Chain)) -> Table {
    let mut plan = plan.clone();
    change(&mut plan.chains[0]);
    plan
}

fn installed() -> (Pair, OwnedTable) {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let chain = pair.chain(Direction::Egress, vec![peers(&[V4[1], V6[1]])], &ifb);
    let table = pair.install(chain);
    (pair, table)
}

#[test]
fn addresses_change_and_counters_go_on() {
    let (pair, mut table) = installed();
    pair.flow(V4[1], 0).out(SOON).unwrap();
    let before = table.verify().unwrap();

    let plan = with(table.plan(), |chain| {
        chain.select = vec![peers(&[V4[2], V6[1]])];
    });
    table.update(&plan).unwrap();
    let after = table.verify().unwrap();
    assert_eq!(after.handle, before.handle, "the same table");
    pair.flow(V4[1], 0).out(SOON).unwrap();
    assert_eq!(selected(&mut table), 1, "no longer selected");
    for peer in [V4[2], V6[1]] {
        pair.flow(peer, 0).out(SOON).unwrap();
    }
    assert_eq!(selected(&mut table), 3);
}

#[test]
fn an_update_to_the_same_changes_nothing() {
    let (pair, mut table) = installed();
    let before = (table.verify().unwrap(), pair.state());
    let plan = table.plan().clone();
    table.update(&plan).unwrap();
    assert_eq!(table.verify().unwrap(), before.0);
    assert_eq!(pair.state(), before.1);
}

#[test]
fn selections_come_and_go() {
    let (pair, mut table) = installed();
    let first = table.plan().clone();
    let second = with(&first, |chain| {
        let mut more = peers(&[V4[2]]);
        more.name = "more".to_owned();
        more.remote_ports = port(7001);
        chain.select.push(more);
        chain.spare.push(peers(&[V6[2]]));
    });
    table.update(&second).unwrap();
    table.verify().unwrap();
    pair.flow(V4[2], 7001).out(SOON).unwrap();
    let counters = table.counters().unwrap();
    let more = counters.each.iter().find(|count| count.selection == "more");
    assert_eq!(more.unwrap().tally.packets, 1);
    assert_eq!(counters.sum(Role::Spared).packets, 0);

    table.update(&first).unwrap();
    let proof = table.verify().unwrap();
    assert_eq!((proof.rules, proof.intervals), (3, 2));
    let names: Vec<_> = table
        .counters()
        .unwrap()
        .each
        .into_iter()
        .map(|c| c.selection)
        .collect();
    assert_eq!(names, ["peers", ""]);
}

#[test]
fn other_chains_are_not_an_update() {
    let (_pair, mut table) = installed();
    for plan in [
        with(table.plan(), |chain| chain.priority = 3),
        with(table.plan(), |chain| chain.direction = Direction::Ingress),
        with(table.plan(), |chain| forward_to(chain).index += 1),
    ] {
        let refused = table.update(&plan);
        assert!(matches!(refused, Err(NftError::OtherChains { .. })));
    }
    table.verify().unwrap();
}

#[test]
fn a_refused_update_leaves_the_table_as_it_was() {
    let (pair, mut table) = installed();
    let plan = with(table.plan(), |chain| {
        let mut broken = peers(&[V4[2]]);
        broken.name = "nul\0".to_owned();
        chain.select.push(broken);
    });
    assert!(matches!(table.update(&plan), Err(NftError::Plan(_))));
    table.verify().unwrap();
    pair.flow(V4[1], 0).out(SOON).unwrap();
    assert_eq!(selected(&mut table), 1);
}

#[test]
fn four_thousand_addresses_are_held_and_replaced() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let many = |parity: u32| {
        let v4 = (0..2048_u32).map(|n| {
            IpNet::from(std::net::IpAddr::from(
                (0x0b00_0000 + 4 * n + parity).to_be_bytes(),
            ))
        });
        let v6 = (0..2048_u32).map(|n| {
            let address = Ipv6Addr::from((0xfd99_u128 << 112) + u128::from(4 * n + parity));
            IpNet::from(std::net::IpAddr::from(address))
        });
        let mut networks: Vec<IpNet> = v4.chain(v6).collect();
        networks.push(IpNet::from(V4[1].parse::<std::net::IpAddr>().unwrap()));
        Selection::new("many", Addresses::In(networks))
    };
    let chain = pair.chain(Direction::Egress, vec![many(0)], &ifb);
    let start = Instant::now();
    let mut table = OwnedTable::install(&pair.pod, &table(vec![chain])).unwrap();
    let installed = start.elapsed();
    assert_eq!(table.verify().unwrap().intervals, 4097);
    let verified = start.elapsed();
    let plan = with(table.plan(), |chain| chain.select = vec![many(2)]);
    let start = Instant::now();
    table.update(&plan).unwrap();
    let updated = start.elapsed();
    assert_eq!(table.verify().unwrap().intervals, 4097);
    eprintln!("4097 addresses: install {installed:?}, with proof {verified:?}, update {updated:?}");
    pair.flow(V4[1], 0).out(SOON).unwrap();
    assert_eq!(selected(&mut table), 1);
}

#[test]
fn no_packet_is_missed_while_a_table_changes() {
    let (pair, mut table) = installed();
    let flow = pair.flow(V4[1], 0);
    let plans = [
        table.plan().clone(),
        with(table.plan(), |chain| {
            chain.select = vec![peers(&[V4[1], V4[2]])];
        }),
    ];
    let sent = std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let sender = scope.spawn(move || {
            let mut sent = 0_u64;
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                flow.send_out();
                sent += 1;
            }
            sent
        });
        for _ in 0..200 {
            for plan in &plans {
                table.update(plan).unwrap();
            }
        }
        drop(stop);
        sender.join().unwrap()
    });
    assert_eq!(selected(&mut table), sent);
    assert!(sent > 0);
}
