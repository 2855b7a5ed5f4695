//! Faults in the real kernel, held by real injectors, keep the contract.

use std::thread;
use std::time::Duration;

use windtunnel_agent::impair;
use windtunnel_agent::kernel::link::LinkName;
use windtunnel_agent::kernel::nft::{Device, Direction, Table};
use windtunnel_agent::model::{Act, Detour};
use windtunnel_agent::wire::{NetworkTask, Task};

use crate::contract::{self, Faults, Inert};
use crate::injector::{Container, Injector};
use crate::support::{Pair, Process, V4, delay, has_netem, is_held, peers};

/// Two injectors at most, and whether they hear of their agent.
#[derive(Default)]
struct Owners {
    injectors: [Option<Injector>; 2],
    is_abandoned: bool,
}

impl Owners {
    fn start(&mut self, fault: usize, task: Task, life: Duration) {
        self.injectors[fault] = Some(Injector::started(task, life));
    }

    fn kill(&mut self, fault: usize) {
        if let Some(mut injector) = self.injectors[fault].take() {
            injector.kill();
        }
    }

    fn wait(&mut self, time: Duration) {
        if self.is_abandoned {
            return thread::sleep(time);
        }
        for injector in self.injectors.iter_mut().flatten() {
            injector.hold(time / 2);
        }
    }
}

/// Delays on the ways to two peers, out and in.
struct Delays {
    pair: Pair,
    inhabitant: Process,
    detours: [Vec<Detour>; 2],
    owners: Owners,
}

impl Delays {
    fn new() -> Self {
        let pair = Pair::new();
        let detours = [0, 1].map(|fault| {
            let ways = [(Direction::Egress, "e"), (Direction::Ingress, "i")];
            let made = ways.map(|(direction, way)| Detour {
                direction,
                device: pair.eth0.clone(),
                ifb: LinkName::new(format!("wt{fault:012x}{way}")).unwrap(),
                ifb_index: None,
                netem: delay(1),
            });
            made.to_vec()
        });
        Self {
            inhabitant: Process::in_netns(&pair.pod),
            pair,
            detours,
            owners: Owners::default(),
        }
    }

    fn table(fault: usize) -> String {
        format!("windtunnel-{fault:016x}")
    }
}

impl Faults for Delays {
    fn apply(&mut self, fault: usize, life: Duration) {
        if !self.is_built(fault) {
            self.build(fault, Self::PARTS);
        }
        let queues = self.detours[fault].iter().map(|detour| Device {
            name: detour.ifb.clone(),
            index: detour.ifb_index.unwrap(),
        });
        let queues: Vec<Device> = queues.collect();
        let chains = self.detours[fault]
            .iter()
            .zip(&queues)
            .map(|(detour, ifb)| {
                let select = vec![peers(&[V4[1 + fault]])];
                self.pair.chain(detour.direction, select, ifb)
            });
        let task = NetworkTask {
            netns: self.pair.pod.id(),
            pid: self.inhabitant.pid(),
            pod: "/sys/fs/cgroup".into(),
            table: Table {
                name: Self::table(fault),
                chains: chains.collect(),
            },
            queues: queues.clone(),
        };
        self.owners.start(fault, Task::Network(task), life);
    }

    fn kill(&mut self, fault: usize) {
        self.owners.kill(fault);
    }

    fn abandon(&mut self) {
        self.owners.is_abandoned = true;
    }

    fn wait(&mut self, time: Duration) {
        self.owners.wait(time);
    }

    fn is_applied(&mut self, fault: usize) -> bool {
        let (tables, _) = impair::marked(&self.pair.pod).unwrap();
        tables.contains(&Self::table(fault))
    }
}

impl Inert for Delays {
    const PARTS: usize = 2;

    fn build(&mut self, fault: usize, parts: usize) {
        impair::build(&self.pair.pod, &mut self.detours[fault][..parts]).unwrap();
    }

    fn undo(&mut self, fault: usize) {
        assert!(impair::remove(&self.pair.pod, &self.detours[fault], true).unwrap());
    }

    fn is_built(&mut self, fault: usize) -> bool {
        let (_, links) = impair::marked(&self.pair.pod).unwrap();
        let mut detours = self.detours[fault].iter();
        detours.any(|detour| links.contains(&detour.ifb.to_string()))
    }
}

/// Pauses of two containers.
struct Pauses {
    containers: [Container; 2],
    owners: Owners,
}

impl Pauses {
    fn new() -> Self {
        Self {
            containers: [0, 1].map(|fault| Container::new(&format!("contract-{fault}"), &[])),
            owners: Owners::default(),
        }
    }
}

impl Faults for Pauses {
    fn apply(&mut self, fault: usize, life: Duration) {
        let task = Task::Container(self.containers[fault].entry(Act::Pause));
        self.owners.start(fault, task, life);
    }

    fn kill(&mut self, fault: usize) {
        self.owners.kill(fault);
    }

    fn abandon(&mut self) {
        self.owners.is_abandoned = true;
    }

    fn wait(&mut self, time: Duration) {
        self.owners.wait(time);
    }

    fn is_applied(&mut self, fault: usize) -> bool {
        is_held(self.containers[fault].init.id())
    }
}

#[test]
fn delays_keep_the_contract() {
    if has_netem() {
        contract::effects(Delays::new);
        contract::undoing(Delays::new);
    }
}

#[test]
fn pauses_keep_the_contract() {
    contract::effects(Pauses::new);
}
