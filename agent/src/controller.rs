//! The node's own thread: listen → observe → decide → act, again and again. It starts the
//! injectors and must live as long as the agent does: they die with it.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::{eventfd::EventFd, time::TimeSpec},
};
use thiserror::Error;
use tokio::sync::{mpsc as tokio_mpsc, watch};
use windtunnel_crds::{NodeAgentStatus, node_agent::FaultCounters, residue::has_left};
use windtunnel_runtime::{CancellationToken, Guard, Pulse};

use crate::{
    act::{self, Report},
    api::{self, News},
    clock::Offset,
    decide::{self, Now},
    kernel::proc::ProcError,
    model::State,
    node::{self, Node},
    replay,
};

/// The longest that the thread waits: injectors need their sign of life.
const LONGEST_WAIT: Duration = Duration::from_millis(500);
/// After which time a step that failed, or changed nothing, is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// How long packets may wait in queues that are removed at the end, with what is left of them then; the
/// chart gives an agent 10 s to end.
const LEAVE: Duration = Duration::from_secs(3);
/// The most passes in a row without waiting.
const PASSES: usize = 16;

/// Why the node's thread ended.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The clock cannot be read.
    #[error("no clock")]
    Clock(#[from] ProcError),
    /// Nothing can be waited for.
    #[error("cannot wait")]
    Wait(#[source] nix::Error),
}

/// The lines between the node's thread and the API side.
#[derive(Debug)]
pub struct Lines {
    /// What the API side says.
    pub news: mpsc::Receiver<News>,
    /// Readable when it said something.
    pub wake: Arc<EventFd>,
    /// Set when it said something that does not wait.
    pub urgent: Arc<AtomicBool>,
    /// Reports for the operator.
    pub reports: tokio_mpsc::UnboundedSender<Report>,
    /// The agent's view of itself.
    pub agent: watch::Sender<NodeAgentStatus>,
}

/// The node's thread.
#[derive(Debug)]
pub struct Controller {
    node: Node,
    lines: Lines,
    offset: Offset,
    kernel: String,
    pulse: Pulse,
}

impl Controller {
    /// Takes the node over.
    #[must_use]
    pub fn new(mut node: Node, lines: Lines, pulse: Pulse) -> Self {
        node.supervisor.looks().heed(Arc::clone(&lines.urgent));
        let kernel = nix::sys::utsname::uname().map_or_else(
            |_| String::new(),
            |u| u.release().to_string_lossy().into_owned(),
        );
        Self {
            node,
            lines,
            offset: Offset::default(),
            kernel,
            pulse,
        }
    }

    /// Runs until `shutdown`, then takes everything back.
    ///
    /// # Errors
    /// [`ControlError`] where it cannot go on; injectors die with the process.
    pub fn run(
        mut self,
        guards: Vec<Guard>,
        shutdown: &CancellationToken,
    ) -> Result<(), ControlError> {
        let mut guards = Some(guards);
        while !shutdown.is_cancelled() {
            let wait = self.passes()?;
            let is_told = self.node.known.injections.is_some() && self.node.known.stop.is_some();
            if is_told && self.node.known.lease_seen.is_some() {
                drop(guards.take());
            }
            self.show();
            self.pulse.beat();
            self.wait(wait)?;
        }
        let now = node::now()?;
        // A clock that cannot be read has ended all.
        let clock = || node::now().unwrap_or(now);
        replay::leave(&mut self.node, clock, now.boot + LEAVE);
        Ok(())
    }

    /// Passes until nothing is left to do; returns how long to wait.
    fn passes(&mut self) -> Result<Duration, ControlError> {
        let mut last = Vec::new();
        for _ in 0..PASSES {
            let now = self.listen()?;
            let observed = self.node.observe_pass(now.boot);
            let decision = decide::decide(&observed, now);
            if decision.steps.is_empty() {
                let wait = decision
                    .wake_at
                    .map_or(LONGEST_WAIT, |at| at.saturating_sub(now.boot));
                return Ok(wait.min(LONGEST_WAIT));
            }
            // A clock that cannot be read stops the loop at its next turn.
            let clock = || node::now().unwrap_or(now);
            // What is to be done again has not got on yet.
            let is_stuck = last == decision.steps;
            last.clone_from(&decision.steps);
            let outcome = act::act(&mut self.node, decision, clock);
            for report in outcome.reports {
                // Without a receiver the process is ending.
                let _ = self.lines.reports.send(report);
            }
            if outcome.has_failed || is_stuck {
                return Ok(RETRY);
            }
        }
        Ok(Duration::from_millis(50))
    }

    /// Takes in everything that was said since the last pass.
    fn listen(&mut self) -> Result<Now, ControlError> {
        api::drain(&self.lines.wake);
        self.lines.urgent.store(false, Ordering::Relaxed);
        while let Ok(news) = self.lines.news.try_recv() {
            let is_stop = matches!(news, News::Stop(true));
            self.hear(news);
            if is_stop {
                // It ends what there is, also where it is over again by now.
                let _ = self.lines.wake.write(1);
                break;
            }
        }
        let now = node::now()?;
        self.node.supervisor.beat(now.boot);
        self.node.supervisor.listen(now.boot, now.wall);
        self.node.look(now.boot);
        self.node.tidy();
        Ok(now)
    }

    fn hear(&mut self, news: News) {
        let known = &mut self.node.known;
        match news {
            News::Listed(all) => known.injections = Some(all),
            News::Changed(injection) => {
                let uid = injection.metadata.uid.clone().unwrap_or_default();
                known
                    .injections
                    .get_or_insert_default()
                    .insert(uid, *injection);
            }
            News::Deleted { uid } => {
                if let Some(all) = &mut known.injections {
                    all.remove(&uid);
                }
            }
            News::Listable { at } => known.listed = known.listed.max(Some(at)),
            News::Lease(sighting) => {
                self.offset.see(&sighting);
                known.clock_offset = self.offset.millis();
                known.see_lease(&sighting);
            }
            News::Stop(stop) => known.stop = Some(stop),
            News::Capable(capability) => self.node.learn(capability),
        }
    }

    /// Brings the agent's view of itself up to date.
    fn show(&self) {
        let residue = self.node.residue();
        let injectors = self.node.supervisor.alive();
        self.node
            .metrics
            .injectors
            .set(i64::try_from(injectors).unwrap_or(i64::MAX));
        let available = self.node.capabilities.iter().filter(|c| c.available);
        let status = NodeAgentStatus {
            heartbeat_time: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: self.kernel.clone(),
            boot_id: self.node.boot_id.clone(),
            summary: available
                .map(|c| c.name.as_str())
                .collect::<Vec<_>>()
                .join(","),
            capabilities: self.node.capabilities.clone(),
            injectors: u32::try_from(injectors).unwrap_or(u32::MAX),
            clean: !has_left(&residue),
            residue,
            clock_offset_millis: self.node.known.clock_offset,
            counters: self.counters(),
        };
        self.lines.agent.send_if_modified(|shown| {
            let changed = *shown != status;
            *shown = status;
            changed
        });
    }

    /// What the faults in place have met, summed over the targets of each.
    fn counters(&self) -> Vec<FaultCounters> {
        let live = self.node.supervisor.live();
        let mut counters: Vec<FaultCounters> = Vec::new();
        for (key, entry) in self.node.journal.entries() {
            let live = live.get(key);
            // On a container that is waited for it counts what it has met.
            let is_told = match &entry.state {
                State::Injected { .. } => live.is_some(),
                State::Ended(_) => false,
                _ => entry.injected_before.is_some(),
            };
            if !is_told {
                continue;
            }
            let counts = live.map(|l| l.counts.clone()).unwrap_or_default();
            let counts = counts.after(&entry.counts_before);
            let (uid, fault) = (&entry.experiment.uid, &key.fault);
            let known = counters
                .iter()
                .position(|c| c.experiment_uid == *uid && c.fault == *fault);
            let at = known.unwrap_or_else(|| {
                counters.push(FaultCounters {
                    experiment_uid: uid.clone(),
                    fault: fault.clone(),
                    matched_packets: 0,
                    effect: BTreeMap::new(),
                });
                counters.len() - 1
            });
            let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
            let sum = &mut counters[at];
            sum.matched_packets = sum.matched_packets.saturating_add(number(counts.matched));
            for (name, value) in &counts.effect {
                let so_far = sum.effect.entry(name.clone()).or_default();
                *so_far = so_far.saturating_add(number(*value));
            }
        }
        counters
    }

    /// Waits until somebody says something, for `longest` at most.
    fn wait(&self, longest: Duration) -> Result<(), ControlError> {
        let descriptors: Vec<BorrowedFd<'_>> = std::iter::once(self.lines.wake.as_fd())
            .chain(self.node.supervisor.descriptors())
            .collect();
        let mut fds: Vec<PollFd<'_>> = descriptors
            .iter()
            .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
            .collect();
        match ppoll(&mut fds, Some(TimeSpec::from_duration(longest)), None) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(error) => Err(ControlError::Wait(error)),
        }
    }
}
