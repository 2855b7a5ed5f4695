//! Tests of the way from a plan to rules.

use super::*;
use crate::kernel::link::LinkName;
use crate::kernel::nft::plan::Device;

fn device(name: &str, index: u32) -> Device {
    let name = LinkName::new(name).unwrap();
    Device { name, index }
}

fn peers(name: &str, networks: &[&str]) -> Selection {
    let networks = networks.iter().map(|network| network.parse().unwrap());
    Selection::new(name, Addresses::In(networks.collect()))
}

fn table(direction: Direction, spare: Vec<Selection>, select: Vec<Selection>) -> Table {
    let chain = Chain {
        direction,
        device: device("eth0", 2),
        priority: -5,
        spare,
        select,
        verdict: Verdict::Forward(device("wt0", 7)),
    };
    Table {
        name: "wt".to_owned(),
        chains: vec![chain],
    }
}

fn compiled(table: &Table) -> Ruleset {
    compile(table, &BTreeMap::new())
}

fn payloads(rule: &Rule) -> Vec<(Header, u32, u32)> {
    let payload = |expr: &Expr| match expr {
        Expr::Payload {
            header,
            offset,
            length,
        } => Some((*header, *offset, *length)),
        _ => None,
    };
    rule.iter().filter_map(payload).collect()
}

#[test]
fn spared_packets_are_let_pass_before_any_is_forwarded() {
    let plan = table(
        Direction::Egress,
        vec![peers("node", &["10.0.0.1/32"])],
        vec![Selection::new("all", Addresses::Any)],
    );
    let ruleset = compiled(&plan);
    let chain = &ruleset.chains["egress-eth0"];
    let hook = Hook {
        number: 1,
        priority: -5,
        devices: vec!["eth0".to_owned()],
    };
    assert_eq!(chain.hook, Some(hook));
    let ends: Vec<&Expr> = chain
        .rules
        .iter()
        .map(|rule| rule.last().unwrap())
        .collect();
    let (pass, forward) = (&Expr::Return, &Expr::Forward);
    assert_eq!(ends, [pass, pass, pass, forward, forward]);
    assert!(chain.rules[3].contains(&Expr::Link(7)));
}

#[test]
fn every_rule_counts_and_knows_its_version() {
    let plan = table(
        Direction::Ingress,
        vec![peers("node", &["fd00::1/128"])],
        vec![peers("peer", &["10.0.0.0/24"])],
    );
    for rule in &compiled(&plan).chains["ingress-eth0"].rules {
        assert!(rule.iter().any(|expr| matches!(expr, Expr::Count(_))));
        assert_eq!(rule[0], Expr::Meta(Meta::Protocol));
        assert!(matches!(&rule[1], Expr::Equal(version) if version.len() == 2));
    }
}

#[test]
fn remote_is_the_destination_on_egress_and_the_source_on_ingress() {
    use Header::{Network, Transport};
    let mut selection = peers("peer", &["10.0.0.2/32"]);
    selection.remote_ports = vec![PortRange::one(80)];
    selection.local_ports = vec![PortRange::one(90)];
    for (direction, v4, v6, remote, local) in [
        (Direction::Egress, 16, 24, 2, 0),
        (Direction::Ingress, 12, 8, 0, 2),
    ] {
        let ruleset = compiled(&table(direction, vec![], vec![selection.clone()]));
        let chain = ruleset.chains.values().next().unwrap();
        let ports = [(Transport, remote, 2), (Transport, local, 2)];
        let expected = [&[(Network, v4, 4)][..], &ports].concat();
        assert_eq!(payloads(&chain.rules[1]), expected);
        let expected = [&[(Network, v6, 16)][..], &ports].concat();
        assert_eq!(payloads(&chain.rules[2]), expected);
    }
}

#[test]
fn ports_without_a_protocol_mean_all_that_have_ports() {
    let mut selection = Selection::new("dns", Addresses::Any);
    selection.remote_ports = vec![PortRange::one(53)];
    let ruleset = compiled(&table(Direction::Egress, vec![], vec![selection.clone()]));
    let protocols = [6_u8, 17, 132].map(|number| Interval::new(number, number));
    assert_eq!(ruleset.sets["protocol-0"].intervals, protocols);

    selection.protocols = vec![Transport::Udp];
    let ruleset = compiled(&table(Direction::Egress, vec![], vec![selection]));
    let udp = [Interval::new(17_u8, 17_u8)];
    assert_eq!(ruleset.sets["protocol-0"].intervals, udp);
}

#[test]
fn sets_of_equal_content_are_shared_by_all_chains() {
    let selections = || vec![peers("a", &["10.0.0.0/25", "10.0.0.128/25"])];
    let mut plan = table(Direction::Egress, vec![], selections());
    let mut other = plan.chains[0].clone();
    other.direction = Direction::Ingress;
    other.select = vec![peers("b", &["10.0.0.0/24"])];
    plan.chains.push(other);
    let ruleset = compiled(&plan);
    // One of each version: the second is empty, and matches nothing.
    assert_eq!(ruleset.sets.len(), 2);
    assert_eq!(ruleset.sets["ipv4-0"].intervals.len(), 1);
    assert_eq!(ruleset.sets["ipv6-0"].intervals, []);
}

#[test]
fn an_update_keeps_the_names_of_sets_that_stay() {
    let plan = |last: &str| {
        let select = vec![peers("stays", &["10.0.0.1/32"]), peers("moves", &[last])];
        table(Direction::Egress, vec![], select)
    };
    let before = compiled(&plan("10.0.0.2/32"));
    let after = compile(&plan("10.0.0.3/32"), &before.sets);
    assert_eq!(after.sets["ipv4-0"], before.sets["ipv4-0"]);
    // The name of what goes is not used again in the same transaction.
    assert!(!after.sets.contains_key("ipv4-1"));
    assert!(after.sets.contains_key("ipv4-2"));
    assert_eq!(before.counters, after.counters);
    assert_eq!(compile(&plan("10.0.0.2/32"), &before.sets), before);
}

#[test]
fn neighbour_discovery_passes_first() {
    let ruleset = compiled(&table(
        Direction::Egress,
        vec![],
        vec![Selection::new("all", Addresses::Any)],
    ));
    let rule = &ruleset.chains["egress-eth0"].rules[0];
    assert!(rule.contains(&Expr::Equal(vec![58])));
    assert!(rule.contains(&Expr::Between(vec![133], vec![137])));
    assert_eq!(rule.last(), Some(&Expr::Return));
}

#[test]
fn a_reset_is_of_one_link_and_spares_resets() {
    let mut plan = table(
        Direction::Egress,
        Vec::new(),
        vec![Selection {
            protocols: vec![Transport::Tcp],
            ..peers("peers", &["10.0.0.0/8"])
        }],
    );
    plan.chains[0].verdict = Verdict::Reset;
    let chain = &compiled(&plan).chains["egress-eth0"];
    let hook = Hook {
        number: 3,
        priority: -5,
        devices: Vec::new(),
    };
    assert_eq!(chain.hook, Some(hook));
    for rule in &chain.rules {
        let link = [
            Expr::Meta(Meta::OutLink),
            Expr::Equal(2_u32.to_ne_bytes().to_vec()),
        ];
        assert_eq!(rule[..2], link);
    }
    let last = chain.rules.last().unwrap();
    let flags = [Expr::Mask(vec![4]), Expr::Equal(vec![0])];
    assert!(last.windows(2).any(|two| *two == flags), "{last:?}");
    assert_eq!(last.last(), Some(&Expr::Reset));
}
