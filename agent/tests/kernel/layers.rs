//! Layers of reclamation, each with the others out of play, and the second look, by a whole agent.

use std::time::Duration;

use serde_json::Value;
use windtunnel_crds::residue::ReclaimedBy;

use crate::agent::Agent;
use crate::support::{has_netem, name};

const DELAY: &str =
    r#"{"network": {"impairment": {"delay": {"latency": "100ms"}}, "direction": "Both"}}"#;
/// Longer than it takes to inject, and no more.
const GRACE: Duration = Duration::from_secs(6);

fn is_checked(told: &Value) -> bool {
    told["checked"] == true
}

/// Of the two signs of a control plane neither stands for the other: an operator that nobody can be told
/// of, and injections that nobody looks after.
#[test]
fn a_fault_needs_both_the_operator_and_its_injections() {
    if !has_netem() {
        return;
    }
    let signs: [fn(&Agent); 2] = [Agent::lead, Agent::list];
    for (sign, name) in signs.into_iter().zip(["unlisted", "unled"]) {
        let mut agent = Agent::hasty(name, &[DELAY], GRACE);
        agent.injected();
        let told = agent.until_with("its end", is_checked, sign);
        let why = (told["reason"].as_str(), told["by"].as_str());
        assert_eq!(why, (Some("ControlPlaneLost"), Some("Agent")), "{told}");
    }
}

/// The lease of the injector itself is not in play: it is another program, which has none.
#[test]
fn an_injector_that_says_nothing_is_killed() {
    if !has_netem() {
        return;
    }
    let mut agent = Agent::mute("mute", &[DELAY]);
    agent.started();
    let told = agent.until("its end", is_checked);
    let why = (told["reason"].as_str(), told["by"].as_str());
    assert_eq!(why, (Some("InjectorSilent"), Some("Agent")), "{told}");
}

/// The agent that comes next knows of it by the journal only.
#[test]
fn an_injector_that_outlives_its_agent_is_killed_by_the_next() {
    if !has_netem() {
        return;
    }
    let mut agent = Agent::plain("outlived", &[DELAY]);
    agent.injected();
    let entries = agent.successor().observe(Duration::ZERO).entries;
    let ended: Vec<_> = entries
        .values()
        .map(|entry| entry.ended().unwrap())
        .collect();
    let [ended] = ended[..] else {
        panic!("{ended:?}");
    };
    assert_eq!(ended.reclaimed_by, Some(ReclaimedBy::Journal));
    let told = agent.until("its end", is_checked);
    assert_eq!(told["reason"], "InjectorDied", "{told}");
}

/// What comes between the checks is found by the second, and what is somebody else's is left alone.
#[test]
fn the_second_check_finds_what_the_first_did_not() {
    if !has_netem() {
        return;
    }
    let mut agent = Agent::hasty("twice", &[DELAY], GRACE);
    agent.injected();
    let links = agent.pod.network.route.links().unwrap();
    let ours = links.iter().find(|link| link.name.starts_with("wt"));
    let ours = ours.unwrap().name.clone();
    agent.abort();
    let first = agent.until("the first check", is_checked);
    assert_eq!(first["residue"], serde_json::json!([]), "{first}");
    let route = &mut agent.pod.network.route;
    for link in [&ours, "mesh0"] {
        route.create_ifb(&name(link)).unwrap();
    }
    let is_checked_again = |told: &Value| told["rechecked"] == true;
    let told = agent.until_with("the second check", is_checked_again, |agent| {
        agent.lead();
        agent.list();
    });
    let residue = told["residue"].as_array().unwrap();
    assert_eq!(residue.len(), 1, "{told}");
    assert_eq!(
        (&residue[0]["name"], &residue[0]["removed"]),
        (&ours.into(), &true.into())
    );
    let left = agent.pod.network.route.links().unwrap();
    let left: Vec<&str> = left.iter().map(|link| &*link.name).collect();
    assert_eq!(left, ["lo", "eth0", "mesh0"]);
}
