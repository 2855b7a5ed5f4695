//! Rules, detours and queues of network faults, as they are asked for.

use windtunnel_crds::{injection::AddressRange, units::Percent};

use super::*;
use crate::testing::{all_traffic, key};

fn to(nets: &[&str], ports: &[(u16, Protocol)]) -> NodeNetworkFault {
    let ports = ports.iter().map(|(port, protocol)| peers::PortRange {
        port: *port,
        end_port: None,
        protocol: *protocol,
    });
    NodeNetworkFault {
        peers: Some(vec![PeerGroup {
            addresses: Some(
                nets.iter()
                    .map(|n| AddressRange(n.parse().unwrap()))
                    .collect(),
            ),
            ports: ports.collect(),
        }]),
        ..all_traffic()
    }
}

#[test]
fn faults_compete_where_a_packet_could_be_meant_by_both() {
    let (a, b) = (to(&["10.0.0.0/8"], &[]), to(&["10.1.2.3/32"], &[]));
    assert!(compete(&a, &b));
    assert!(compete(&a, &all_traffic()));
    assert!(!compete(&a, &to(&["fd00::/8", "192.0.2.1/32"], &[])));
    assert!(!compete(
        &a,
        &NodeNetworkFault {
            direction: Way::Ingress,
            ..b.clone()
        }
    ));
    assert!(compete(
        &a,
        &NodeNetworkFault {
            direction: Way::Both,
            ..b
        }
    ));
    let (web, dns) = (
        to(&["10.0.0.0/8"], &[(80, Protocol::Tcp)]),
        to(&["10.0.0.0/8"], &[(53, Protocol::Udp)]),
    );
    assert!(!compete(&web, &dns));
    assert!(!compete(&web, &to(&["10.0.0.0/8"], &[(81, Protocol::Tcp)])));
    assert!(!compete(&web, &to(&["10.0.0.0/8"], &[(80, Protocol::Udp)])));
    assert!(compete(&web, &all_traffic()));
    assert!(
        !compete(&to(&[], &[]), &all_traffic()),
        "nobody's packets are nobody's loss"
    );
}

#[test]
fn a_reset_is_of_connections_whichever_way_and_makes_no_detour() {
    let reset = |fault: NodeNetworkFault| NodeNetworkFault {
        impairment: Impairment {
            reset: Some(network::Reset {}),
            ..Impairment::default()
        },
        spare: vec![Spare::Node],
        ..fault
    };
    let link = Link {
        index: 2,
        name: "eth0".to_owned(),
        kind: "veth".to_owned(),
        is_up: true,
        is_loopback: false,
        mtu: 1500,
    };
    let ports = [(80, Protocol::Tcp), (53, Protocol::Udp)];
    let fault = reset(to(&["10.0.0.0/8"], &ports));
    assert_eq!(
        detours(&key("a"), std::slice::from_ref(&link), &fault).unwrap(),
        []
    );
    let entry = NetworkEntry {
        resets: resets(&[link], &fault).unwrap(),
        detours: Vec::new(),
        ..crate::testing::entry("a").network().unwrap().clone()
    };
    let spared: IpAddr = "10.0.0.1".parse().unwrap();
    let table = table(&entry, &fault, &[spared], std::iter::empty());
    let ways: Vec<_> = table
        .chains
        .iter()
        .map(|c| (c.direction, &c.verdict))
        .collect();
    assert_eq!(
        ways,
        [
            (Direction::Egress, &Verdict::Reset),
            (Direction::Ingress, &Verdict::Reset)
        ]
    );
    let peer = "10.1.2.3".parse().unwrap();
    assert!(selects(&table, (peer, 80), 40_000));
    assert!(!selects(&table, (peer, 81), 40_000));
    assert!(!selects(&table, (peer, 53), 40_000), "no connection");
    assert!(!selects(&table, (spared, 80), 40_000), "the node");
    assert!(!selects(&table, ("192.0.2.1".parse().unwrap(), 80), 40_000));
    let ingress = NodeNetworkFault {
        direction: Way::Ingress,
        ..to(&["10.0.0.0/8"], &[])
    };
    assert!(compete(&fault, &ingress));
    let datagrams = to(&["10.0.0.0/8"], &[(80, Protocol::Udp)]);
    assert!(!compete(&fault, &datagrams));
}

#[test]
fn queues_hold_what_is_held_back_and_are_given_time_for_it() {
    // Delay, rate, packets that the queue holds, time that it is given in the end.
    for (latency, rate, limit, drain) in [
        ("0s", "", 1_000, 1_000),
        ("10ms", "", 1_000, 1_010),
        ("1500ms", "", 15_000, 2_500),
        ("60s", "", 100_000, 5_000),
        ("0s", "8k", 32, 2_000),
        ("0s", "10M", 825, 2_000),
        ("0s", "1T", 10_000, 2_000),
        ("2s", "10M", 2_476, 4_000),
        ("60s", "1T", 100_000, 5_000),
    ] {
        let mut fault = Vec::new();
        if latency != "0s" {
            fault.push(format!(r#""delay": {{"latency": "{latency}"}}"#));
        }
        if !rate.is_empty() {
            fault.push(format!(r#""bandwidth": {{"rate": "{rate}"}}"#));
        }
        let impairment: Impairment =
            serde_json::from_str(&format!("{{{}}}", fault.join(", "))).unwrap();
        let told = format!("{latency} {rate}");
        assert_eq!(netem(&impairment).limit, limit, "{told}");
        assert_eq!(
            super::drain(&impairment),
            Duration::from_millis(drain),
            "{told}"
        );
    }
}

#[test]
fn ports_of_each_protocol_get_rules_of_their_own() {
    let fault = to(
        &["10.0.0.1/32"],
        &[
            (80, Protocol::Tcp),
            (53, Protocol::Udp),
            (53, Protocol::Tcp),
        ],
    );
    let selections = selected(&fault);
    let seen: Vec<_> = selections
        .iter()
        .map(|s| (s.protocols.clone(), s.remote_ports.len()))
        .collect();
    assert_eq!(seen, [(vec![Transport::Tcp], 2), (vec![Transport::Udp], 1)]);
    let local = NodeNetworkFault {
        local_ports: vec![peers::PortRange {
            port: 8080,
            end_port: None,
            protocol: Protocol::Tcp,
        }],
        ..fault
    };
    assert_eq!(
        selected(&local).len(),
        1,
        "the target's own port is TCP only"
    );
}

#[test]
fn names_fit_and_differ_by_link_and_direction() {
    let names = [
        ifb_name(&key("a"), "eth0", Direction::Egress),
        ifb_name(&key("a"), "eth0", Direction::Ingress),
        ifb_name(&key("a"), "eth1", Direction::Egress),
        ifb_name(&key("b"), "eth0", Direction::Egress),
    ];
    for (i, name) in names.iter().enumerate() {
        assert_eq!(name.len(), 15);
        assert!(!names[i + 1..].contains(name));
    }
}

#[test]
fn a_loss_keeps_its_share_whatever_its_correlation() {
    let random = |percent| {
        Loss::Random(Chance {
            percent,
            correlation: 0.0,
        })
    };
    let chain = |to_bad, to_good| Loss::GilbertElliott {
        to_bad,
        to_good,
        loss_in_bad: 100.0,
        loss_in_good: 0.0,
    };
    for (percent, correlation, wanted) in [
        (20.0, None, random(20.0)),
        (20.0, Some(0.0), random(20.0)),
        (100.0, Some(50.0), random(100.0)),
        (20.0, Some(50.0), chain(10.0, 40.0)),
        (50.0, Some(100.0), chain(0.05, 0.05)),
    ] {
        let loss = network::Loss {
            percent: Some(Percent::new(percent).unwrap()),
            correlation: correlation.map(|c| Percent::new(c).unwrap()),
            gilbert_elliott: None,
        };
        let (found, case) = (as_loss(&loss), format!("{percent} %, {correlation:?}"));
        match (&found, &wanted) {
            (
                Loss::GilbertElliott {
                    to_bad: a,
                    to_good: b,
                    ..
                },
                Loss::GilbertElliott {
                    to_bad: x,
                    to_good: y,
                    ..
                },
            ) => assert!((a - x).abs() + (b - y).abs() < 1e-9, "{case}: {found:?}"),
            _ => assert_eq!(found, wanted, "{case}"),
        }
    }
}
