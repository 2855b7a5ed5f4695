//! Namespaces and links.

use std::collections::BTreeSet;
use std::process::Command;

use nix::errno::Errno;
use windtunnel_agent::kernel::link::{LinkError, RouteSocket};
use windtunnel_agent::kernel::netns::{NetNs, NetNsId, count_processes, find_process};
use windtunnel_agent::kernel::proc::Proc;

use crate::support::{Pair, V4, V6, eventually, name, run};

#[test]
fn a_scratch_namespace_is_new_and_empty() {
    let proc = Proc::default();
    let netns = NetNs::scratch().unwrap();
    let ours = i32::try_from(std::process::id()).unwrap();
    assert_ne!(NetNsId::of_pid(&proc, ours).unwrap(), Some(netns.id()));
    assert_ne!(NetNs::scratch().unwrap().id(), netns.id());
    let links = RouteSocket::open(&netns).unwrap().links().unwrap();
    assert_eq!(links[0].name, "lo");
    assert!(links[0].is_loopback && !links[0].is_up);
}

#[test]
fn a_scratch_namespace_is_gone_when_dropped() {
    let proc = Proc::default();
    let pair = Pair::new();
    let Pair {
        pod, peer, route, ..
    } = pair;
    let id = peer.id();
    drop((peer, route));
    // With the peer's namespace went its half of the veth pair, and so the pod's.
    let mut route = RouteSocket::open(&pod).unwrap();
    eventually("the pair is gone", || {
        route.link_named(&name("eth0")).unwrap().is_none()
    });
    assert_eq!(find_process(&proc, id).unwrap(), None);
}

#[test]
fn processes_in_a_namespace_are_found_and_counted() {
    let proc = Proc::default();
    let netns = NetNs::scratch().unwrap();
    let sleep = || Command::new("sleep").arg("60").spawn();
    let mut child = netns.enter(sleep).unwrap().unwrap();
    let pid = i32::try_from(child.id()).unwrap();

    let found = NetNsId::of_pid(&proc, pid).unwrap();
    assert_eq!(found, Some(netns.id()));
    assert_eq!(NetNs::of_pid(&proc, pid).unwrap().id(), netns.id());
    let process = find_process(&proc, netns.id()).unwrap().unwrap();
    assert_eq!(process.pid, pid);
    let none = BTreeSet::new();
    assert_eq!(count_processes(&proc, netns.id(), &none).unwrap(), 1);
    let except = BTreeSet::from([pid]);
    assert_eq!(count_processes(&proc, netns.id(), &except).unwrap(), 0);

    proc.open(process).unwrap().unwrap().kill().unwrap();
    child.wait().unwrap();
    assert_eq!(find_process(&proc, netns.id()).unwrap(), None);
}

#[test]
fn links_and_addresses_are_listed_as_ip_does() {
    let mut pair = Pair::new();
    let links = pair.route.links().unwrap();
    let eth0 = links.iter().find(|link| link.name == "eth0").unwrap();
    assert_eq!(eth0.index, pair.eth0.index);
    assert_eq!((&eth0.kind[..], eth0.mtu, eth0.is_up), ("veth", 1500, true));
    let shown = run(&pair.pod, &["ip", "-oneline", "link"]);
    let shown = shown.lines().count();
    assert_eq!(links.len(), shown);

    let addresses = pair.route.addresses().unwrap();
    for (address, length) in [(V4[0], 24), (V6[0], 64)] {
        let address = format!("{address}/{length}").parse().unwrap();
        let is_it = |found: &&_| {
            let found: &windtunnel_agent::kernel::link::LinkAddress = found;
            found.link == eth0.index && found.address == address
        };
        assert_eq!(addresses.iter().filter(is_it).count(), 1, "{address}");
    }
}

#[test]
fn an_ifb_has_no_ipv6() {
    let mut pair = Pair::new();
    let before = pair.state();
    let ifb = pair.ifb("wt0", None);

    let addresses = pair.route.addresses().unwrap();
    assert!(addresses.iter().all(|address| address.link != ifb.index));
    let routes = run(&pair.pod, &["ip", "-6", "route", "show", "table", "all"]);
    assert!(!routes.contains("wt0"), "{routes}");
    let known = run(&pair.pod, &["ls", "/proc/sys/net/ipv6/conf"]);
    // The listing is that of the namespace of the thread that the program was started from.
    assert!(known.contains("eth0") && !known.contains("wt0"), "{known}");

    assert!(pair.route.delete(ifb.index, &ifb.name).unwrap());
    assert_eq!(pair.state(), before);
    assert!(!pair.route.delete(ifb.index, &ifb.name).unwrap(), "again");
}

#[test]
fn a_link_is_deleted_only_by_its_name() {
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0", None);
    let refused = pair.route.delete(ifb.index, &name("wt1"));
    assert!(matches!(refused, Err(LinkError::OtherName { .. })));
    assert!(pair.route.link(ifb.index).unwrap().is_some());
}

#[test]
fn a_taken_name_is_refused_with_the_kernels_words() {
    let mut pair = Pair::new();
    pair.ifb("wt0", None);
    let error = pair.route.create_ifb(&name("wt0")).unwrap_err();
    let LinkError::Netlink(error) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.refusal(), Some(Errno::EEXIST));
    assert!(
        error.to_string().starts_with("create ifb link wt0: "),
        "{error}"
    );
}
