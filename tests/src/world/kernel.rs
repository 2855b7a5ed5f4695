//! A node's kernel: processes that hold effects, their leases, and what is inert.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use windtunnel_agent::model::Key;
use windtunnel_agent::wire::LEASE;

/// An injector process.
#[derive(Debug)]
pub(super) struct Injector {
    pub(super) key: Key,
    /// The id of the container that it works in; empty where it works on the pod's network.
    pub(super) container: String,
    /// When it dies whatever happens, on the world's clock.
    pub(super) deadline: Duration,
    /// When it dies unless its agent is heard of; none while it is.
    pub(super) lease_end: Option<Duration>,
    pub(super) stopped_until: Option<Duration>,
    pub(super) has_applied: bool,
    pub(super) has_vanished: bool,
}

#[derive(Debug, Default)]
pub(super) struct Kernel {
    pub(super) injectors: BTreeMap<i32, Injector>,
    /// Fault and target of each ifb that exists.
    pub(super) inert: BTreeSet<Key>,
    /// Injectors that have ended with their containers, and said so.
    pub(super) last_words: BTreeSet<i32>,
    pids: i32,
}

impl Kernel {
    pub(super) const fn next_pid(&mut self) -> i32 {
        self.pids += 1;
        self.pids
    }

    pub(super) fn spawn(&mut self, pid: i32, key: Key, container: String, deadline: Duration) {
        let injector = Injector {
            key,
            container,
            deadline,
            lease_end: None,
            stopped_until: None,
            has_applied: false,
            has_vanished: false,
        };
        self.injectors.insert(pid, injector);
    }

    /// Time takes what it takes; injectors apply what they were started for. The effects
    /// that began, by key and container, and whether anything changed. `container` tells the id of the container that a key
    /// is about by now, an empty one for a pod's network; none if the pod is gone.
    pub(super) fn pass_time(
        &mut self,
        now: Duration,
        container: impl Fn(&Key) -> Option<String>,
    ) -> (Vec<(Key, String)>, bool) {
        let before = self.injectors.len();
        self.injectors
            .retain(|_, i| now < i.deadline && i.lease_end.is_none_or(|end| now < end));
        let last_words = &mut self.last_words;
        self.injectors.retain(|pid, i| {
            let is_left = container(&i.key).is_some_and(|id| id != i.container);
            if is_left && i.stopped_until.is_none() {
                last_words.insert(*pid);
            }
            !is_left || i.stopped_until.is_some()
        });
        let mut is_changed = before != self.injectors.len();
        let mut begun = Vec::new();
        for injector in self.injectors.values_mut() {
            if injector.stopped_until.is_some_and(|until| now >= until) {
                injector.stopped_until = None;
                is_changed = true;
            }
            let is_there = container(&injector.key).is_some();
            if injector.stopped_until.is_none() && !injector.has_applied && is_there {
                injector.has_applied = true;
                is_changed = true;
                begun.push((injector.key.clone(), injector.container.clone()));
            }
        }
        (begun, is_changed)
    }

    pub(super) fn due(&self) -> Option<Duration> {
        let all = self.injectors.values();
        all.flat_map(|i| [Some(i.deadline), i.lease_end, i.stopped_until])
            .flatten()
            .min()
    }

    /// The agent is not heard of from now on.
    pub(super) fn abandon(&mut self, now: Duration) {
        for injector in self.injectors.values_mut() {
            injector.lease_end.get_or_insert(now + LEASE);
        }
    }

    /// The agent is heard of again.
    pub(super) fn adopt(&mut self) {
        for injector in self.injectors.values_mut() {
            injector.lease_end = None;
        }
    }

    /// The effects that are in place: one on a container ends with it, even if its injector is stopped.
    pub(super) fn effects(
        &self,
        container: impl Fn(&Key) -> Option<String>,
    ) -> impl Iterator<Item = &Injector> {
        let all = self.injectors.values();
        let is_there = move |i: &&Injector| container(&i.key).is_none_or(|id| id == i.container);
        all.filter(|i| i.has_applied && !i.has_vanished)
            .filter(is_there)
    }

    pub(super) fn kill_one(&mut self) {
        self.injectors.pop_first();
    }

    pub(super) fn stop_one(&mut self, until: Duration) {
        if let Some(mut injector) = self.injectors.first_entry() {
            injector.get_mut().stopped_until = Some(until);
        }
    }

    pub(super) fn vanish_one(&mut self) {
        if let Some(mut injector) = self.injectors.first_entry() {
            injector.get_mut().has_vanished = injector.get().has_applied;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::contract::{self, Faults, Inert};
    use super::*;

    /// Two faults on one target.
    #[derive(Default)]
    struct Fakes {
        kernel: Kernel,
        now: Duration,
        pids: [i32; 2],
    }

    fn key(fault: usize) -> Key {
        Key {
            injection: "run".to_owned(),
            fault: fault.to_string(),
            pod: "pod".to_owned(),
            container: String::new(),
        }
    }

    impl Faults for Fakes {
        fn apply(&mut self, fault: usize, life: Duration) {
            self.pids[fault] = self.kernel.next_pid();
            let deadline = self.now + life;
            let network = String::new();
            self.kernel
                .spawn(self.pids[fault], key(fault), network, deadline);
            self.wait(Duration::ZERO);
        }

        fn kill(&mut self, fault: usize) {
            self.kernel.injectors.remove(&self.pids[fault]);
        }

        fn abandon(&mut self) {
            self.kernel.abandon(self.now);
        }

        fn wait(&mut self, time: Duration) {
            self.now += time;
            self.kernel.pass_time(self.now, |_| Some(String::new()));
        }

        fn is_applied(&mut self, fault: usize) -> bool {
            let mut effects = self.kernel.effects(|_| Some(String::new()));
            effects.any(|effect| effect.key == key(fault))
        }
    }

    impl Inert for Fakes {
        const PARTS: usize = 1;

        fn build(&mut self, fault: usize, parts: usize) {
            if parts > 0 {
                self.kernel.inert.insert(key(fault));
            }
        }

        fn undo(&mut self, fault: usize) {
            self.kernel.inert.remove(&key(fault));
        }

        fn is_built(&mut self, fault: usize) -> bool {
            self.kernel.inert.contains(&key(fault))
        }
    }

    #[test]
    fn the_fake_kernel_keeps_the_contract_of_the_real_one() {
        contract::effects(Fakes::default);
        contract::undoing(Fakes::default);
    }
}
