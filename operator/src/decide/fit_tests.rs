//! Whatever agents, peers and API servers say, what is written is what its schema takes: the
//! simulation checks each write.

use proptest::prelude::*;
use windtunnel_crds::injection::{InjectionPhase as I, NodeContainer, TargetState as T};

use super::{
    Attempt, Trouble,
    testing::{DELAY, KILL_HALF, LOAD, Sim, pods, seconds},
};
use crate::peers::PeerSet;

/// Faults of every kind of report, one with peers that may change.
fn spec() -> String {
    let faults = |spec: &str| spec.split_once("faults:\n").unwrap().1.to_owned();
    let peers = "{latency: 100ms}, peers: {ports: [{port: 80}]}";
    let peers = DELAY.replace("{latency: 100ms}", peers);
    format!("{peers}{}{}", faults(KILL_HALF), faults(LOAD))
}

/// Words that nobody bounded.
fn words() -> impl Strategy<Value = String> {
    let letters = prop::sample::select(vec!["a", "\u{e9}", "\u{1f300}"]);
    (letters, 0usize..6000).prop_map(|(letter, n)| letter.repeat(n))
}

/// Has the agents say something of every target.
fn say(sim: &mut Sim, words: &str) {
    for injection in &mut sim.observed.injections {
        let status = injection.status.as_mut().unwrap();
        words.clone_into(&mut status.message);
        words.clone_into(&mut status.reason);
        for target in &mut status.targets {
            words.clone_into(&mut target.message);
            words.clone_into(&mut target.reason);
            target.effect = [(words.to_owned(), 1)].into();
        }
    }
    sim.settle();
}

/// Pods with so many containers.
fn crowded(containers: usize) -> Vec<crate::cluster::Candidate> {
    let mut pods = pods(3);
    for pod in &mut pods {
        let app = pod.containers[0].clone();
        pod.containers
            .extend((1..containers).map(|n| NodeContainer {
                name: n.to_string(),
                ..app.clone()
            }));
    }
    pods
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn whatever_is_said_fits(
        words in words(), notes in 0usize..200, dns in 0u8..100, containers in 1usize..100, refused in any::<bool>(),
    ) {
        let mut sim = Sim::new(&spec(), crowded(containers));
        sim.peers = Ok(PeerSet { notes: vec![words.clone(); notes], ..PeerSet::default() });
        sim.observed.cluster_dns = (0..dns).map(|n| [192, 0, 2, n].into()).collect();
        sim.observed.trouble = Some(Trouble { message: words.clone(), since: sim.now, unread: None });
        sim.settle();
        let written = sim.fault("slow").notes;
        prop_assert_eq!(written.len(), notes.min(64));
        if notes > 64 {
            prop_assert_eq!(written.last().cloned(), Some(format!("and {} more", notes - 63)));
        }
        let states = if refused { [(I::Refused, T::Failed); 2] } else { [(I::Prepared, T::Prepared), (I::Running, T::Injected)] };
        for (phase, state) in states {
            sim.all(phase, state);
            say(&mut sim, &words);
            sim.advance(seconds(11));
        }
        for kill in std::mem::take(&mut sim.kills) {
            let attempt = Attempt { at: sim.now, refusal: Some(words.clone()) };
            sim.observed.attempts.insert(kill.uid, attempt);
        }
        sim.settle();
        sim.advance(seconds(60));
        sim.settle();
        sim.all(I::Recovered, T::Interrupted);
        say(&mut sim, &words);
        sim.advance(seconds(60));
        sim.settle();
        prop_assert!(sim.phase().is_terminal());
    }
}
