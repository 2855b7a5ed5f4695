//! Every pair of faults on one target, decided as Prepare does and compared with the table in README.md
//! that says it to users.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use windtunnel_crds::{
    NodeInjection,
    fault::{Fault, Kind},
    injection::{ContainerKind, Impairment, NodeFault, NodeKind},
    network::NetworkFault,
};

use super::{Refusal, rivals::Beside};
use crate::{
    decide::keys,
    model::{Act, Entry, FillAct, IoAct, IoMode, Key, MemoryAct, Objects, Until},
    testing::{all_traffic, container_entry, entry, injection},
};

const README: &str = include_str!("../../../README.md");

/// The kinds of the table, and what users write for each.
const KINDS: [(&str, &[&str]); 9] = [
    (
        "network",
        &[
            r#"{"delay": {"latency": "10ms"}}"#,
            r#"{"loss": {"percent": 10}}"#,
            r#"{"duplicate": {"percent": 10}}"#,
            r#"{"corrupt": {"percent": 10}}"#,
            r#"{"delay": {"latency": "10ms"}, "reorder": {"percent": 10}}"#,
            r#"{"bandwidth": {"rate": "1M"}}"#,
            r#"{"partition": {}}"#,
        ],
    ),
    ("network.reset", &[r#"{"reset": {}}"#]),
    ("cpu", &[r#"{"load": 50}"#]),
    ("memory", &[r#"{"size": "64Mi"}"#]),
    (
        "io",
        &[
            r#"{"hang": {}}"#,
            r#"{"latency": {"delay": "10ms"}}"#,
            r#"{"error": {"errno": "EPERM"}}"#,
        ],
    ),
    ("diskFill", &[r#"{"percent": 90}"#]),
    ("containerKill", &["{}", r#"{"every": "5s"}"#]),
    ("containerPause", &["{}"]),
    ("podKill", &["{}"]),
];

/// What two faults have in common.
#[expect(clippy::struct_excessive_bools, reason = "each is one circumstance")]
#[derive(Clone, Copy, Debug)]
struct Common {
    run: bool,
    pod: bool,
    container: bool,
    volume: bool,
    packets: Packets,
    windows: Windows,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Packets {
    Same,
    OtherPeers,
    OtherPorts,
    OtherDirection,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Windows {
    Overlap,
    BackToBack,
    ASecondApart,
}

impl Common {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for bits in 0..16 {
            let bit = |n: u8| bits & (1 << n) != 0;
            for packets in [
                Packets::Same,
                Packets::OtherPeers,
                Packets::OtherPorts,
                Packets::OtherDirection,
            ] {
                for windows in [Windows::Overlap, Windows::BackToBack, Windows::ASecondApart] {
                    all.push(Self {
                        run: bit(0),
                        pod: bit(1),
                        container: bit(2),
                        volume: bit(3),
                        packets,
                        windows,
                    });
                }
            }
        }
        all
    }

    /// The second of two faults that have this in common.
    fn second(self) -> Place {
        let first = Place::FIRST;
        let (peers, port, direction) = match self.packets {
            Packets::Same => (first.peers, first.port, first.direction),
            Packets::OtherPeers => ("192.0.2.0/24", first.port, first.direction),
            Packets::OtherPorts => (first.peers, 81, first.direction),
            Packets::OtherDirection => (first.peers, first.port, "Ingress"),
        };
        let other = |is_same, one, other| if is_same { one } else { other };
        Place {
            name: "second",
            pod: other(self.pod, first.pod, "b"),
            container: other(self.container, first.container, "sidecar"),
            volume: other(self.volume, first.volume, "/logs"),
            peers,
            port,
            direction,
            start_after: match self.windows {
                Windows::Overlap => "9s",
                Windows::BackToBack => "10s",
                Windows::ASecondApart => "11s",
            },
        }
    }
}

/// Where and when a fault is, for ten seconds.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    pod: &'static str,
    container: &'static str,
    volume: &'static str,
    peers: &'static str,
    port: u16,
    direction: &'static str,
    start_after: &'static str,
}

impl Place {
    const FIRST: Self = Self {
        name: "first",
        pod: "a",
        container: "app",
        volume: "/data",
        peers: "10.0.0.0/8",
        port: 80,
        direction: "Egress",
        start_after: "0s",
    };

    /// A fault there as agents are told of it; `None` for a kind that they have no part in.
    fn fault(self, kind: &str, dose: &str) -> Option<NodeFault> {
        let mut dose: Value = serde_json::from_str(dose).unwrap();
        if kind == "podKill" {
            let fault = json!({"name": "x", "target": {"selector": {}}, "podKill": dose});
            let fault: Fault = serde_json::from_value(fault).unwrap();
            assert!(!fault.kind().is_some_and(Kind::is_on_node));
            return None;
        }
        let field = kind.split('.').next().unwrap();
        if field == "network" {
            let fault: NetworkFault = serde_json::from_value(dose).unwrap();
            let ports = json!([{"port": self.port}]);
            dose = json!({
                "impairment": Impairment::from(&fault),
                "direction": self.direction,
                "peers": [{"addresses": [self.peers], "ports": ports}],
            });
        }
        if ["io", "diskFill"].contains(&kind) {
            dose["volume"] = self.volume.into();
        }
        let container = json!({"name": self.container, "id": "containerd://1"});
        let target = json!({"podName": "pod", "podUid": self.pod, "containers": [container]});
        let mut fault = json!({
            "name": self.name,
            "startAfter": self.start_after,
            "duration": "10s",
            "targets": [target],
        });
        fault[field] = dose;
        Some(serde_json::from_value(fault).unwrap())
    }
}

/// What is done for a fault on a container; how much of it is no matter here.
fn act(kind: ContainerKind<'_>) -> Act {
    match kind {
        ContainerKind::Cpu(_) => Act::Cpu { millicores: 500 },
        ContainerKind::Memory(_) => Act::Memory(MemoryAct {
            bytes: 1,
            ramp: Duration::ZERO,
            most: None,
            spare: 0,
            is_limited: true,
        }),
        ContainerKind::Io(fault) => Act::Io(IoAct {
            volume: fault.volume.clone(),
            open: true,
            read: true,
            write: true,
            opened: true,
            percent: 100.0,
            mode: match fault {
                _ if fault.latency.is_some() => IoMode::Latency {
                    delay: Duration::from_millis(10),
                    jitter: Duration::ZERO,
                },
                _ if fault.error.is_some() => IoMode::Error(1),
                _ => IoMode::Hang,
            },
        }),
        ContainerKind::DiskFill(fault) => Act::Fill(FillAct {
            volume: fault.volume.clone(),
            until: Until::Percent(90.0),
            reserve: 0,
            limit: None,
        }),
        ContainerKind::Kill(fault) => Act::Kill {
            signal: 9,
            every: fault.every.map(windtunnel_crds::units::GoDuration::get),
        },
        ContainerKind::Pause(_) => Act::Pause,
    }
}

fn key(injection: &str, fault: &NodeFault) -> Key {
    keys(injection, fault, &fault.targets[0]).remove(0)
}

/// A fault as the journal has it once it is prepared.
fn prepared(injection: &str, fault: &NodeFault) -> Entry {
    let mut made = match fault.kind().unwrap() {
        NodeKind::Network(_) => entry("a"),
        NodeKind::Container(kind) => {
            let mut made = container_entry("a");
            if let Objects::Container(container) = &mut made.objects {
                container.act = act(kind);
            }
            made
        }
    };
    made.key = key(injection, fault);
    made
}

/// Whether the second fault may be beside the first.
fn decided(first: &NodeFault, second: &NodeFault, common: Common) -> Result<(), Refusal> {
    let run = |uid: &str, faults: &[&NodeFault]| -> (String, NodeInjection) {
        let mut injection = injection(uid, &[], all_traffic());
        injection.spec.faults = faults.iter().copied().cloned().collect();
        (uid.to_owned(), injection)
    };
    let (runs, uid) = if common.run {
        (vec![run("run", &[first, second])], "run")
    } else {
        (vec![run("run", &[first]), run("later", &[second])], "later")
    };
    let runs: BTreeMap<String, NodeInjection> = runs.into_iter().collect();
    let entry = prepared("run", first);
    let beside = Beside {
        injections: Some(&runs),
        entries: vec![&entry],
    };
    let key = key(uid, second);
    match second.kind().unwrap() {
        NodeKind::Network(fault) => beside.network(&key, fault),
        NodeKind::Container(kind) => beside.container(&key, &act(kind)),
    }
}

/// What the word in the table means for two faults.
fn is_refused(word: &str, has_reset: bool, common: Common) -> bool {
    let take_turns = |windows: &[Windows]| common.run && windows.contains(&common.windows);
    let on_containers = common.pod && !take_turns(&[Windows::ASecondApart]);
    match word {
        "yes" => false,
        "packets" => {
            let is_other_way = common.packets == Packets::OtherDirection;
            common.pod
                && !take_turns(&[Windows::BackToBack, Windows::ASecondApart])
                && (common.packets == Packets::Same || is_other_way && has_reset)
        }
        "container" => on_containers && common.container,
        "volume" => on_containers && common.container && common.volume,
        word => panic!("README.md says {word:?}"),
    }
}

/// The rows of the table, cell by cell.
fn table() -> Vec<Vec<&'static str>> {
    let lines = README
        .lines()
        .skip_while(|l| !l.starts_with("| | network |"));
    let rows = lines.take_while(|l| l.starts_with('|'));
    let cells = |row: &'static str| {
        let row = row.trim_matches('|').split('|');
        row.map(str::trim).collect()
    };
    rows.filter(|row| !row.contains("---")).map(cells).collect()
}

#[test]
fn every_pair_of_faults_acts_together_or_is_refused_as_the_readme_says() {
    let table = table();
    let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
    assert_eq!(table[0][1..], names);
    let rows: Vec<&str> = table[1..].iter().map(|row| row[0]).collect();
    assert_eq!(rows, names);
    let doses = || {
        let all = KINDS.iter().enumerate();
        all.flat_map(|(at, (kind, doses))| doses.iter().map(move |dose| (at, *kind, *dose)))
    };
    let faults = |place: Place| -> Vec<_> {
        let made = doses().map(|(at, kind, dose)| (at, dose, place.fault(kind, dose)));
        made.collect()
    };
    let firsts = faults(Place::FIRST);
    let mut refusals = 0;
    for common in Common::all() {
        let seconds = faults(common.second());
        for (row, one, first) in &firsts {
            for (column, other, second) in &seconds {
                let word = table[row + 1][column + 1];
                let has_reset = [row, column]
                    .map(|at| names[*at])
                    .contains(&"network.reset");
                let found = match (first, second) {
                    (Some(first), Some(second)) => decided(first, second, common),
                    // No agent ever hears of it.
                    _ => Ok(()),
                };
                let expected = is_refused(word, has_reset, common);
                let (row, column) = (names[*row], names[*column]);
                let what = format!("{column} {other} beside {row} {one}, {common:?}: {found:?}");
                assert_eq!(found.is_err(), expected, "{what}");
                if let Err((reason, message)) = found {
                    assert_eq!(reason, "Conflict", "{what}");
                    assert!(message.contains("fault first of experiment run"), "{what}");
                    refusals += 1;
                }
            }
        }
    }
    assert!(refusals > 0);
}
