//! A node: its kernel, its journal, and the agent that lives on it, or does not.

mod act;
mod agent;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::SignedDuration;
use windtunnel_agent::api::Sighting;
use windtunnel_agent::decide::{self, Decision, Now};
use windtunnel_agent::model::{Entry, Key, State};
use windtunnel_agent::replay::outlived;

use super::api::Api;
use super::kernel::Kernel;
use super::laws::{Laws, Violation};
use super::wall;

use agent::Agent;

/// How long faults are kept without a control plane.
pub(super) const GRACE: Duration = Duration::from_secs(30);
/// After which time what failed is tried again, and what was killed is back.
const RETRY: Duration = Duration::from_millis(200);
const RESTART: Duration = Duration::from_secs(1);

pub(super) struct Node {
    pub(super) name: String,
    pub(super) kernel: Kernel,
    pub(super) journal: BTreeMap<Key, Entry>,
    /// What the next agent would find instead, where the journal could not be written.
    unsaved: BTreeMap<Key, Option<Entry>>,
    /// It will not come back.
    pub(super) is_lost: bool,
    pub(super) passes: u64,
    /// What is in the kernel may stand in no entry, until the next agent has looked.
    pub(super) is_journal_lost: bool,
    /// When its agent last heard from the API server.
    pub(super) heard_at: Duration,
    boots: u32,
    booted_at: Duration,
    skew: SignedDuration,
    agent: Option<Agent>,
    /// When there is an agent again.
    start_at: Duration,
    /// The agent dies after so many more steps, and its injectors outlive it.
    fuse: Option<(u8, bool)>,
    cut_until: Duration,
    refuse_until: Duration,
    full_until: Duration,
    /// Until when what is built cannot be removed.
    clings_until: Duration,
}

/// The agent died between two steps.
struct Died;

impl Node {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: Kernel::default(),
            journal: BTreeMap::new(),
            unsaved: BTreeMap::new(),
            is_lost: false,
            passes: 0,
            is_journal_lost: false,
            heard_at: Duration::ZERO,
            boots: 1,
            booted_at: Duration::ZERO,
            skew: SignedDuration::ZERO,
            agent: None,
            start_at: Duration::ZERO,
            fuse: None,
            cut_until: Duration::ZERO,
            refuse_until: Duration::ZERO,
            full_until: Duration::ZERO,
            clings_until: Duration::ZERO,
        }
    }

    fn boot_id(&self) -> String {
        format!("{}-{}", self.name, self.boots)
    }

    fn clocks(&self, now: Duration) -> Now {
        Now {
            boot: now.saturating_sub(self.booted_at) + Duration::from_secs(1000),
            wall: wall(now) + self.skew,
        }
    }

    /// A moment of the boot clock on the world's.
    fn at(&self, boot: Duration) -> Duration {
        (boot + self.booted_at).saturating_sub(Duration::from_secs(1000))
    }

    fn is_reachable(&self, now: Duration, api: &Api) -> bool {
        now >= self.cut_until && api.is_up(now)
    }

    pub(super) fn due(&self, now: Duration) -> Option<Duration> {
        let agent = self.agent.as_ref();
        let fresh = agent.and_then(|a| {
            Some(a.known.lease_seen?.min(a.known.listed?) + GRACE + Duration::from_millis(1))
        });
        let wake = agent.and_then(|a| a.wake);
        let deserted =
            agent.and_then(|a| a.deserted.values().min().map(|at| *at + decide::DESERTED));
        let boot = self.clocks(now).boot;
        let clocks = [fresh, wake, deserted]
            .into_iter()
            .flatten()
            .filter(|at| *at > boot);
        let start = (agent.is_none() && !self.is_lost).then_some(self.start_at);
        let world = [
            start,
            self.kernel.due(),
            agent.and_then(|a| a.stopped_until),
            Some(self.cut_until),
        ];
        let world = world.into_iter().flatten().filter(|at| *at > now);
        clocks.map(|at| self.at(at)).chain(world).min()
    }

    pub(super) fn kill_agent(&mut self, now: Duration, after: u8, orphans: bool) {
        if after == 0 {
            self.die(now, orphans);
        } else {
            self.fuse = Some((after, orphans));
        }
    }

    fn die(&mut self, now: Duration, orphans: bool) {
        self.fuse = None;
        if self.agent.take().is_none() {
            return;
        }
        self.kernel.last_words.clear();
        self.start_at = now + RESTART;
        for (key, written) in std::mem::take(&mut self.unsaved) {
            match written {
                Some(entry) => drop(self.journal.insert(key, entry)),
                None => drop(self.journal.remove(&key)),
            }
        }
        if orphans {
            self.kernel.abandon(now);
        } else {
            self.kernel.injectors.clear();
        }
    }

    /// The agent dies, and its journal with it; its injectors are orphans.
    pub(super) fn lose_journal(&mut self, now: Duration) {
        self.die(now, true);
        self.journal.clear();
        self.is_journal_lost = true;
    }

    pub(super) fn stop_agent(&mut self, now: Duration, until: Duration) {
        if let Some(agent) = &mut self.agent {
            agent.stopped_until = Some(until);
            self.kernel.abandon(now);
        }
    }

    pub(super) fn cut(&mut self, until: Duration) {
        self.cut_until = until;
    }

    pub(super) fn refuse(&mut self, until: Duration) {
        self.refuse_until = until;
    }

    pub(super) fn fill_journal(&mut self, until: Duration) {
        self.full_until = until;
    }

    pub(super) fn cling(&mut self, until: Duration) {
        self.clings_until = until;
    }

    pub(super) fn jump_clock(&mut self, millis: i16) {
        self.skew += SignedDuration::from_millis(i64::from(millis));
        if let Some(agent) = &mut self.agent {
            agent.is_dirty = true;
        }
    }

    /// All of the kernel's state is gone; the node is back after `away`, or never.
    pub(super) fn reboot(&mut self, now: Duration, away: Option<Duration>) {
        if self.is_lost {
            return;
        }
        self.die(now, false);
        self.kernel = Kernel::default();
        self.journal.clear();
        self.boots += 1;
        self.is_lost = away.is_none();
        self.booted_at = now + away.unwrap_or_default();
        self.start_at = self.booted_at;
    }

    pub(super) fn heal(&mut self) {
        self.cut_until = Duration::ZERO;
        self.refuse_until = Duration::ZERO;
        self.full_until = Duration::ZERO;
        self.skew = SignedDuration::ZERO;
        self.fuse = None;
    }

    /// Signs of life, both ways.
    pub(super) fn tick(&mut self, now: Duration, api: &mut Api) {
        if now >= self.full_until {
            self.unsaved.clear();
        }
        let is_reachable = self.is_reachable(now, api);
        let boot = self.clocks(now).boot;
        let skew = self.skew;
        let Some(agent) = self.agent.as_mut().filter(|a| a.stopped_until.is_none()) else {
            return;
        };
        if !is_reachable {
            return;
        }
        self.heard_at = now;
        let stale = |at: Option<Duration>| at.is_none_or(|at| boot > at + GRACE);
        agent.is_dirty |= stale(agent.known.listed) || stale(agent.known.lease_seen);
        agent.known.listed = Some(boot);
        if let Some((holder, renewed)) = api.lease {
            // As a watch lists it that begins anew each time: also one that nobody renews any more.
            agent.known.see_lease(&Sighting {
                holder: holder.to_string(),
                renewed: wall(renewed),
                arrived: wall(now),
                at: boot,
                is_live: false,
            });
        }
        if agent.known.lease_seen == Some(boot) {
            let offset = i64::try_from(skew.as_millis()).ok();
            agent.is_dirty |= agent.known.clock_offset != offset;
            agent.known.clock_offset = offset;
        }
        if api.beats.insert(self.name.clone(), now).is_none() {
            api.version += 1;
        }
    }

    /// The kernel and the agent do what is to be done now; whether there was anything.
    pub(super) fn turn(
        &mut self,
        now: Duration,
        api: &mut Api,
        laws: &mut Laws,
    ) -> Result<bool, Violation> {
        let (begun, mut is_busy) = self.kernel.pass_time(now, |key| api.container(key));
        for (key, container) in begun {
            laws.began(now, &key, container)?;
        }
        if self.agent.is_none() && !self.is_lost && now >= self.start_at {
            self.start(now);
            is_busy = true;
        }
        if let Some(agent) = &mut self.agent {
            if agent.stopped_until.is_some_and(|until| now >= until) {
                agent.stopped_until = None;
                self.kernel.adopt();
            }
            agent.is_dirty |= is_busy;
        }
        let is_reachable = self.is_reachable(now, api);
        let boot = self.clocks(now).boot;
        let Some(agent) = self.agent.as_mut().filter(|a| a.stopped_until.is_none()) else {
            return Ok(is_busy);
        };
        if is_reachable {
            is_busy |= agent.talk(&self.name, api);
        }
        agent.look(boot, &self.journal, |key| api.container(key).is_some());
        agent.hear(boot, wall(now), &self.kernel);
        if agent.is_dirty || agent.wake.is_some_and(|at| boot >= at) {
            is_busy |= self.pass(now, api)?;
        }
        Ok(is_busy)
    }

    /// A new agent ends what the one before had begun.
    pub(super) fn start(&mut self, now: Duration) {
        let clocks = self.clocks(now);
        let boot_id = self.boot_id();
        let open: Vec<Entry> = self
            .journal
            .values()
            .filter(|e| e.ended().is_none())
            .cloned()
            .collect();
        for mut entry in open {
            let had_no_effect = entry.state == State::Prepared && entry.injected_before.is_none();
            if had_no_effect && self.remove(now, &entry.key) {
                self.forget(now, &entry.key);
                continue;
            }
            let pid = entry.injector().map(|process| process.pid);
            let killed = pid.is_some_and(|pid| self.kernel.injectors.remove(&pid).is_some());
            entry.state = State::Ended(outlived(&entry, &boot_id, killed, clocks));
            self.fall_behind(now, &entry.key);
            self.journal.insert(entry.key.clone(), entry);
        }
        self.agent = Some(Agent {
            is_dirty: true,
            ..Agent::default()
        });
    }

    /// One pass of the agent; whether it did anything.
    fn pass(&mut self, now: Duration, api: &Api) -> Result<bool, Violation> {
        let clocks = self.clocks(now);
        let boot_id = self.boot_id();
        let Some(agent) = &mut self.agent else {
            return Ok(false);
        };
        self.passes += 1;
        let mut observed = agent.observe(clocks.boot, boot_id, &self.journal);
        observed.note_pending(clocks.boot);
        agent.reports.clone_from(&observed.reports);
        let Decision { steps, wake_at } = decide::decide(&observed, clocks);
        if decide::decide(&observed, clocks).steps != steps {
            return Err(Violation::new(now, "equal observations, different steps"));
        }
        agent.wake = wake_at;
        agent.is_dirty = false;
        let mut is_busy = false;
        for step in steps {
            match self.perform(now, step, &observed, api) {
                Ok(true) => is_busy = true,
                Ok(false) => {
                    if let Some(agent) = &mut self.agent {
                        let again = clocks.boot + RETRY;
                        agent.wake = Some(agent.wake.map_or(again, |at| at.min(again)));
                    }
                }
                Err(Died) => return Ok(true),
            }
        }
        if let Some(agent) = &mut self.agent {
            agent.is_dirty |= is_busy;
        }
        Ok(is_busy)
    }
}
