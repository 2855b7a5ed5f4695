//! netem on an ifb: every option is held as it was given.

use std::time::Duration;

use windtunnel_agent::kernel::netlink::NetlinkError;
use windtunnel_agent::kernel::qdisc::{
    Chance, Distribution, Loss, Netem, QdiscError, Reorder, RootQdisc,
};

use crate::support::{Pair, delay, has_netem, run};

fn variants() -> Vec<Netem> {
    let chance = Chance {
        percent: 12.5,
        correlation: 25.0,
    };
    let with = |change: &dyn Fn(&mut Netem)| {
        let mut netem = delay(100);
        change(&mut netem);
        netem
    };
    let mut variants = vec![
        Netem::new(1),
        with(&|netem| netem.limit = 100_000),
        with(&|netem| netem.delay.latency = Duration::from_mins(1)),
        with(&|netem| netem.delay.latency = Duration::from_nanos(1)),
        with(&|netem| netem.loss = Loss::Random(chance)),
        with(&|netem| {
            netem.loss = Loss::Random(Chance {
                percent: 100.0,
                correlation: 0.0,
            });
        }),
        with(&|netem| {
            netem.loss = Loss::GilbertElliott {
                to_bad: 1.0,
                to_good: 10.0,
                loss_in_bad: 75.0,
                loss_in_good: 0.1,
            };
        }),
        with(&|netem| {
            netem.loss = Loss::FourState {
                p13: 1.0,
                p31: 2.0,
                p32: 3.0,
                p23: 4.0,
                p14: 5.0,
            };
        }),
        with(&|netem| netem.duplicate = chance),
        with(&|netem| netem.corrupt = chance),
        with(&|netem| netem.reorder = Reorder { chance, gap: 0 }),
        with(&|netem| netem.reorder = Reorder { chance, gap: 5 }),
        with(&|netem| netem.rate = 1_000_000),
        with(&|netem| netem.rate = 100_000_000_000),
    ];
    for distribution in [
        Distribution::Uniform,
        Distribution::Normal,
        Distribution::Pareto,
        Distribution::ParetoNormal,
    ] {
        variants.push(with(&|netem| {
            netem.delay.jitter = Duration::from_millis(20);
            netem.delay.correlation = 33.3;
            netem.delay.distribution = distribution;
        }));
    }
    variants
}

#[test]
fn every_option_is_held_as_given() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&Netem::new(7)));
    for netem in variants() {
        pair.route.replace_netem(ifb.index, &netem).unwrap();
        let held = pair.route.netem(ifb.index).unwrap();
        assert!(netem.matches(&held).unwrap(), "{netem:?}\n{held:?}");
    }
}

#[test]
fn tc_shows_what_was_given() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let mut netem = delay(100);
    netem.delay.jitter = Duration::from_millis(10);
    netem.loss = Loss::GilbertElliott {
        to_bad: 1.0,
        to_good: 10.0,
        loss_in_bad: 75.0,
        loss_in_good: 0.5,
    };
    netem.duplicate.percent = 3.0;
    netem.corrupt.percent = 4.0;
    netem.reorder.chance.percent = 5.0;
    netem.rate = 8_000_000;
    pair.ifb("wt0", Some(&netem));
    let shown = run(&pair.pod, &["tc", "qdisc", "show", "dev", "wt0"]);
    for part in [
        "netem 1: root",
        "limit 1000",
        "delay 100ms  10ms",
        "loss gemodel p 1% r 10% 1-h 75% 1-k 0.5%",
        "duplicate 3%",
        "corrupt 4%",
        "reorder 5%",
        "rate 8Mbit",
        "gap 1",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
}

#[test]
fn installing_takes_no_ones_place() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&delay(100)));
    let refused = pair.route.install_netem(ifb.index, &delay(200));
    assert!(matches!(
        refused,
        Err(QdiscError::Netlink(NetlinkError::Refused { .. }))
    ));
    let held = pair.route.netem(ifb.index).unwrap();
    assert!(delay(100).matches(&held).unwrap());
}

#[test]
fn netem_is_removed_and_nothing_else_is() {
    if !has_netem() {
        return;
    }
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", Some(&delay(100)));
    assert!(pair.route.delete_netem(ifb.index).unwrap());
    assert!(!pair.route.delete_netem(ifb.index).unwrap(), "again");
    let error = pair.route.netem(ifb.index).unwrap_err();
    assert!(matches!(error, QdiscError::NotNetem { .. }), "{error:?}");
}

#[test]
fn the_pods_own_queueing_discipline_is_seen() {
    let mut pair = Pair::new();
    let root = pair.route.root_qdisc(pair.eth0.index).unwrap();
    let expected = RootQdisc {
        kind: "noqueue".to_owned(),
        handle: 0,
    };
    assert_eq!(root, Some(expected));
    assert!(!pair.route.delete_netem(pair.eth0.index).unwrap());
    let stats = pair.route.qdisc_stats(pair.eth0.index).unwrap().unwrap();
    assert_eq!(stats.backlog_packets, 0);
    let ifb = pair.ifb("wt0", None);
    assert!(pair.route.root_qdisc(ifb.index).unwrap().is_some());
    assert_eq!(pair.route.root_qdisc(9999).unwrap(), None);
}

#[test]
fn a_kernel_without_netem_says_so() {
    let mut pair = Pair::new();
    let link = pair.route.create_ifb(&crate::support::name("wt0")).unwrap();
    match pair.route.install_netem(link.index, &delay(1)) {
        Ok(()) => {}
        Err(QdiscError::Unsupported(reason)) => {
            assert!(!has_netem(), "this kernel has no netem: {reason}");
        }
        Err(error) => panic!("{error:?}"),
    }
}
