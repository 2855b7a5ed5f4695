//! Tables as the kernel holds them: proof, mismatch, ownership, leftovers.

use nix::errno::Errno;
use windtunnel_agent::kernel::nft::{
    Direction, Mismatch, NftError, OwnedTable, delete_table, list_tables,
};

use crate::support::{
    Pair, SOON, TABLE, V4, V6, eventually, everything, forward_to, name, peers, port, run, table,
};

fn mismatch(table: &mut OwnedTable) -> Mismatch {
    match table.verify() {
        Err(NftError::Mismatch { mismatch, .. }) => mismatch,
        other => panic!("no mismatch: {other:?}"),
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, NftError>) -> Option<Errno> {
    match result {
        Err(NftError::Netlink(error)) => error.refusal(),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn nft_shows_the_plan() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut selection = peers(&["10.0.0.0", "10.0.0.1", V6[1]]);
    selection.remote_ports = port(80);
    let mut chain = pair.chain(Direction::Egress, vec![selection], &ifb);
    chain.priority = -7;
    chain.spare = vec![peers(&[V4[2]])];
    let mut owned = pair.install(chain);
    let shown = run(&pair.pod, &["nft", "list", "ruleset"]);
    for part in [
        "table netdev wt-test {",
        "type filter hook egress device \"eth0\" priority filter - 7; policy accept;",
        "elements = { 10.0.0.0/31 }",
        "elements = { fd77::2 }",
        "elements = { 10.77.0.3 }",
        "elements = { 80 }",
        "counter name \"egress-eth0/select/peers\" fwd to \"wt0\"",
        "counter name \"egress-eth0/spare/peers\" return",
        "icmpv6 type 133-137 counter name \"egress-eth0/neighbour-discovery\" return",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    let proof = owned.verify().unwrap();
    assert_eq!((proof.chains, proof.rules), (1, 5));
    // Three protocols, one port, one spared address, and the peers: two merged, and one of IPv6.
    assert_eq!(proof.intervals, 3 + 1 + 1 + 1 + 1);
}

#[test]
fn a_table_with_both_directions_is_one() {
    let mut pair = Pair::new();
    let (egress, ingress) = (pair.ifb("wt0", None), pair.ifb("wt1", None));
    let chains = vec![
        pair.chain(Direction::Egress, vec![everything()], &egress),
        pair.chain(Direction::Ingress, vec![everything()], &ingress),
    ];
    let mut owned = OwnedTable::install(&pair.pod, &table(chains)).unwrap();
    let proof = owned.verify().unwrap();
    assert_eq!((proof.chains, proof.rules), (2, 6));
    assert!(pair.flow(V4[1], 0).out(SOON).is_some());
    assert!(pair.flow(V6[1], 0).back(SOON).is_some());
}

#[test]
fn a_link_that_is_not_there_is_refused_before_anything_is_made() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let before = pair.state();
    let chain = || pair.chain(Direction::Egress, vec![everything()], &ifb);
    let mut no_link = chain();
    no_link.device.name = name("missing");
    let mut no_ifb = chain();
    forward_to(&mut no_ifb).index = 99;
    for chain in [no_link, no_ifb] {
        let refused = OwnedTable::install(&pair.pod, &table(vec![chain]));
        let error = refused.unwrap_err();
        assert!(matches!(error, NftError::Mismatch { .. }), "{error:?}");
    }
    assert_eq!(pair.state(), before);
}

#[test]
fn a_name_is_taken_once() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let chain = || pair.chain(Direction::Egress, vec![peers(&[V4[1]])], &ifb);
    let _owned = pair.install(chain());
    let before = pair.state();
    let Err(NftError::Netlink(error)) = OwnedTable::install(&pair.pod, &table(vec![chain()]))
    else {
        panic!("not refused");
    };
    assert!(matches!(
        error.refusal(),
        Some(Errno::EPERM | Errno::EEXIST)
    ));
    let text = error.to_string();
    assert!(text.starts_with("create table wt-test: "), "{text}");
    assert_eq!(pair.state(), before);
}

#[test]
fn tables_of_other_owners_are_listed_and_cannot_be_deleted() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut owned = pair.install(pair.chain(Direction::Egress, vec![everything()], &ifb));
    let proof = owned.verify().unwrap();
    run(&pair.pod, &["nft", "add", "table", "netdev", "wt-left"]);
    run(&pair.pod, &["nft", "add", "table", "netdev", "foreign"]);

    let mut tables = list_tables(&pair.pod, "wt-").unwrap();
    tables.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<_> = tables.iter().map(|t| (&t.name[..], t.owner)).collect();
    assert_eq!(names, [("wt-left", None), (TABLE, Some(proof.owner))]);
    assert_eq!(tables[1].handle, proof.handle);

    assert_eq!(refusal(delete_table(&pair.pod, TABLE)), Some(Errno::EPERM));
    delete_table(&pair.pod, "wt-left").unwrap();
    // Somebody else may have deleted it first.
    delete_table(&pair.pod, "wt-left").unwrap();
    assert_eq!(list_tables(&pair.pod, "wt-left").unwrap(), []);
    owned.verify().unwrap();
}

#[test]
fn a_flush_of_everything_leaves_an_owned_table() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut owned = pair.install(pair.chain(Direction::Egress, vec![everything()], &ifb));
    run(&pair.pod, &["nft", "flush", "ruleset"]);
    owned.verify().unwrap();
}

#[test]
fn a_chain_whose_link_is_gone_is_reported() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut owned = pair.install(pair.chain(Direction::Egress, vec![everything()], &ifb));
    let eth0 = pair.eth0.clone();
    assert!(pair.route.delete(eth0.index, &eth0.name).unwrap());
    let gone = Mismatch::DeviceGone {
        name: "eth0".to_owned(),
        index: eth0.index,
    };
    assert_eq!(mismatch(&mut owned), gone);

    // A later link of the same name is not the one that was meant.
    pair.route
        .create_veth(&name("eth0"), &name("peer"), &pair.peer)
        .unwrap();
    assert_eq!(mismatch(&mut owned), gone);
    drop(owned);
    assert_eq!(list_tables(&pair.pod, "").unwrap(), []);
}

#[test]
fn a_chain_whose_link_is_renamed_is_reported() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut owned = pair.install(pair.chain(Direction::Egress, vec![everything()], &ifb));
    run(&pair.pod, &["ip", "link", "set", "eth0", "down"]);
    run(&pair.pod, &["ip", "link", "set", "eth0", "name", "eth1"]);
    assert!(matches!(mismatch(&mut owned), Mismatch::DeviceGone { .. }));
}

#[test]
fn an_ifb_that_is_gone_or_down_is_reported() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let mut owned = pair.install(pair.chain(Direction::Egress, vec![peers(&[V4[1]])], &ifb));
    let gone = Mismatch::ForwardGone {
        name: "wt0".to_owned(),
        index: ifb.index,
    };
    run(&pair.pod, &["ip", "link", "set", "wt0", "down"]);
    assert_eq!(mismatch(&mut owned), gone);
    pair.route.set_up(ifb.index).unwrap();
    owned.verify().unwrap();
    assert!(pair.route.delete(ifb.index, &ifb.name).unwrap());
    assert_eq!(mismatch(&mut owned), gone);
    // Its packets are swallowed until the table is gone.
    let flow = pair.flow(V4[1], 0);
    assert_eq!(flow.out(crate::support::NEVER), None);
    drop(owned);
    eventually("packets pass again", || {
        flow.out(crate::support::NEVER).is_some()
    });
}
