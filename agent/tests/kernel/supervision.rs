//! What does not answer, and an effect that is not there any more although its injector lives, told by
//! a whole agent.

use std::thread;
use std::time::Instant;

use windtunnel_agent::kernel::link::RouteSocket;
use windtunnel_agent::kernel::qdisc::Netem;
use windtunnel_agent::look::PATIENCE;

use crate::agent::Agent;
use crate::support::{SOON, V4, has_netem, name, run};

const DELAY: &str = r#"{"network": {
    "impairment": {"delay": {"latency": "100ms"}}, "direction": "Both", "spare": ["ClusterDNS"]
}}"#;

/// An agent with a delay in place on its pod.
fn delayed(name: &str) -> Agent {
    faulty(name, DELAY)
}

fn faulty(name: &str, fault: &str) -> Agent {
    let mut agent = Agent::new(name, &[fault]);
    agent.injected();
    agent
}

/// Deletes the links of the pod that are wanted.
fn delete(agent: &mut Agent, is_wanted: impl Fn(&str) -> bool) {
    let route = &mut agent.pod.network.route;
    let links = route.links().unwrap().into_iter();
    for link in links.filter(|link| is_wanted(&link.name)) {
        assert!(route.delete(link.index, &name(&link.name)).unwrap());
    }
}

/// The fault is ended where somebody changes its effect.
fn changed(name: &str, change: impl Fn(&mut RouteSocket, u32)) {
    if !has_netem() {
        return;
    }
    let mut agent = delayed(name);
    let route = &mut agent.pod.network.route;
    let links = route.links().unwrap().into_iter();
    for link in links.filter(|link| link.name.starts_with("wt")) {
        change(route, link.index);
    }
    let told = agent.until("its end", |told| told["checked"] == true);
    let why = (told["state"].as_str(), told["reason"].as_str());
    assert_eq!(why, (Some("Interrupted"), Some("EffectVanished")), "{told}");
}

#[test]
fn an_effect_that_somebody_takes_away_is_interrupted() {
    changed("vanishes", |route, link| {
        let links = route.links().unwrap().into_iter();
        for link in links.filter(|other| other.index == link) {
            assert!(route.delete(link.index, &name(&link.name)).unwrap());
        }
    });
}

/// It is removed all the same, by what it was called first.
#[test]
fn a_link_that_somebody_renames_is_interrupted_and_removed() {
    if !has_netem() {
        return;
    }
    let mut agent = delayed("renamed");
    for link in agent.pod.network.route.links().unwrap() {
        if let Some(rest) = link.name.strip_prefix("wt") {
            let (netns, name) = (&agent.pod.network.pod, format!("f{rest}"));
            run(netns, &["ip", "link", "set", &link.name, "down"]);
            run(netns, &["ip", "link", "set", &link.name, "name", &name]);
        }
    }
    let told = agent.until("its end", |told| told["checked"] == true);
    assert_eq!(told["reason"], "EffectVanished", "{told}");
    let left = agent.pod.network.route.links().unwrap();
    let left: Vec<&str> = left.iter().map(|link| &*link.name).collect();
    assert_eq!(left, ["lo", "eth0"]);
}

#[test]
fn an_impairment_that_somebody_takes_away_is_interrupted() {
    changed("unimpaired", |route, link| {
        assert!(route.delete_netem(link).unwrap());
    });
}

#[test]
fn an_impairment_that_somebody_changes_is_interrupted() {
    changed("otherwise", |route, link| {
        route.replace_netem(link, &Netem::new(1000)).unwrap();
    });
}

#[test]
fn a_pod_whose_links_go_with_it_is_gone() {
    if !has_netem() {
        return;
    }
    let mut agent = delayed("goes");
    agent.pod.end();
    delete(&mut agent, |link| link == "eth0");
    let told = agent.until("its end", |told| told["checked"] == true);
    let why = (told["state"].as_str(), told["reason"].as_str());
    assert_eq!(why, (Some("Gone"), Some("TargetGone")), "{told}");
}

/// Whoever takes an agent away may bring no other.
#[test]
fn an_agent_that_ends_leaves_nothing() {
    if !has_netem() {
        return;
    }
    for fault in [DELAY, &DELAY.replace("100ms", "30s")] {
        let mut agent = faulty("leaves", fault);
        agent.pod.network.flow(V4[1], 0).send_out();
        let begun = Instant::now();
        agent.end();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let links = agent.pod.network.route.links().unwrap();
        let ours = links.iter().filter(|link| link.name.starts_with("wt"));
        assert_eq!(ours.count(), 0, "{links:?}");
        assert_eq!(run(&agent.pod.network.pod, &["nft", "list", "tables"]), "");
        let ended = &agent.journal.entries()[0]["state"]["Ended"];
        assert_eq!(ended["residue"], serde_json::json!([]), "{ended}");
        assert_eq!(ended["reclaimed_by"], "Agent", "{ended}");
        assert!(ended["checked"].is_array(), "{ended}");
    }
}

/// An abort, or the emergency stop, comes before what is waited for.
#[test]
fn an_end_does_not_wait_for_a_look() {
    if !has_netem() {
        return;
    }
    let mut agent = Agent::unanswered("put-off", &[DELAY]);
    agent.begin();
    while agent.starts() == 0 {
        thread::yield_now();
    }
    let begun = Instant::now();
    agent.abort();
    let told = agent.until("its end", |told| told["phase"] != "Pending");
    assert_eq!(told["phase"], "Recovered", "{told}");
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
}

#[test]
fn what_does_not_answer_is_refused_in_time() {
    if !has_netem() {
        return;
    }
    let mut agent = Agent::unanswered("unanswered", &[DELAY, DELAY]);
    agent.begin();
    let told = agent.until("refused", |told| told["phase"] == "Refused");
    assert_eq!(told["refused"], "Unresponsive");
    let message = told["message"].as_str().unwrap();
    assert!(
        message.starts_with("not looked at, for pod pod of fault fault-0"),
        "{message}"
    );
}
