//! The whole system without a cluster: the operator's and the agents' `decide` over a fake API
//! server, fake kernels and one clock, while things go wrong as a [`Script`] says. After every step
//! the [`laws`] are checked: no fault outlives its bound, nothing is done before it is written
//! down, no status claims what is not so.
//!
//! Time jumps from one moment at which something is due to the next, so that an hour costs
//! milliseconds. What executes decisions here is a plain copy of what `act` does in both programs;
//! it can die or stall between any two steps.

mod api;
#[cfg(test)]
#[path = "../../agent/tests/kernel/contract.rs"]
mod contract;
mod kernel;
mod laws;
mod node;
mod operator;
mod script;

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use api::Api;
use laws::Laws;
use node::Node;
use operator::Operator;

pub use laws::Violation;
pub use script::{Event, Run, Script, scripts};

/// How often leases are renewed, agents say that they live, and lists are made.
const TICK: Duration = Duration::from_secs(2);
/// How many turns a moment may take until nothing is left to do.
const TURNS: usize = 300;
/// How long after the last event everything must have come to its end: the longest run, the
/// recheck, and room for retries.
const REST: Duration = Duration::from_mins(25);

/// What a script led to.
#[derive(Debug, Default)]
pub struct Story {
    /// Effects that began.
    pub effects: u64,
    /// Pods that were killed.
    pub kills: usize,
    /// What the run's status says at the end; empty if it was deleted.
    pub message: String,
    /// The phase that the run ended in; none if it was deleted.
    pub phase: Option<windtunnel_crds::status::Phase>,
    /// The decisions that were made.
    pub passes: u64,
}

struct World {
    now: Duration,
    ticked: Duration,
    api: Api,
    operators: [Operator; 2],
    nodes: Vec<Node>,
    laws: Laws,
}

/// Plays a script to its end.
///
/// # Errors
/// [`Violation`] where a law was broken.
pub fn play(script: &Script) -> Result<Story, Violation> {
    let mut world = World::new(script.run);
    world.settle()?;
    for (after, event) in &script.events {
        world.advance(Duration::from_millis(u64::from(*after)))?;
        world.happen(event);
        world.settle()?;
    }
    world.heal();
    world.settle()?;
    world.advance(REST)?;
    world.judge()
}

/// The wall clock of a machine that is right.
fn wall(at: Duration) -> Timestamp {
    let start = Timestamp::constant(1_767_225_600, 0);
    start + SignedDuration::try_from(at).unwrap_or(SignedDuration::MAX)
}

impl World {
    fn new(run: Run) -> Self {
        let mut world = Self {
            now: Duration::ZERO,
            ticked: Duration::ZERO,
            api: Api::new(run),
            operators: [Operator::new(0), Operator::new(1)],
            nodes: vec![Node::new("node1"), Node::new("node2")],
            laws: Laws::new(run),
        };
        // The lease is held and the agents are at work before there is an experiment.
        world.tick();
        for node in &mut world.nodes {
            node.start(Duration::ZERO);
        }
        world.tick();
        world
    }

    /// Lets time pass.
    fn advance(&mut self, by: Duration) -> Result<(), Violation> {
        let until = self.now + by;
        loop {
            let next = self.next().max(self.now + Duration::from_millis(1));
            if next > until {
                break;
            }
            self.now = next;
            self.settle()?;
        }
        self.now = until;
        self.settle()
    }

    /// The next moment at which something is due.
    fn next(&self) -> Duration {
        let tick = self.ticked + TICK;
        let operators = self.operators.iter().filter_map(Operator::due);
        let nodes = self.nodes.iter().filter_map(|n| n.due(self.now));
        let all = operators.chain(nodes).chain(self.api.due());
        // What was due before and could not be done waits for what keeps it, or for the tick.
        all.filter(|at| *at > self.now).fold(tick, Duration::min)
    }

    /// Everybody does what is to be done now, until nothing is left.
    fn settle(&mut self) -> Result<(), Violation> {
        if self.now >= self.ticked + TICK {
            self.tick();
        }
        self.api.pass_time(self.now);
        for _ in 0..TURNS {
            let mut is_busy = false;
            for node in &mut self.nodes {
                is_busy |= node.turn(self.now, &mut self.api, &mut self.laws)?;
            }
            for operator in &mut self.operators {
                is_busy |= operator.turn(self.now, &mut self.api, &mut self.laws)?;
            }
            self.laws.check(self.now, &self.api, &self.nodes)?;
            if !is_busy {
                return Ok(());
            }
        }
        Err(Violation::new(self.now, "decisions do not come to an end"))
    }

    /// Signs of life.
    fn tick(&mut self) {
        self.ticked = self.now;
        for operator in &mut self.operators {
            operator.tick(self.now, &mut self.api);
        }
        for node in &mut self.nodes {
            node.tick(self.now, &mut self.api);
        }
    }

    fn node(&mut self, number: u8) -> &mut Node {
        let count = self.nodes.len();
        &mut self.nodes[usize::from(number) % count]
    }

    fn happen(&mut self, event: &Event) {
        let now = self.now;
        let seconds = |s: &u8| now + Duration::from_secs(u64::from(*s));
        match event {
            Event::KillAgent {
                node,
                after,
                orphans,
            } => {
                self.node(*node).kill_agent(now, *after, *orphans);
            }
            Event::StopAgent { node, secs } => self.node(*node).stop_agent(now, seconds(secs)),
            Event::KillInjector { node } => self.node(*node).kernel.kill_one(),
            Event::StopInjector { node, secs } => self.node(*node).kernel.stop_one(seconds(secs)),
            Event::Vanish { node } => self.node(*node).kernel.vanish_one(),
            Event::LoseJournal { node } => self.node(*node).lose_journal(now),
            Event::Cut { node, secs } => self.node(*node).cut(seconds(secs)),
            Event::Reboot { node } => self.node(*node).reboot(now, Some(Duration::from_secs(10))),
            Event::Lose { node } => self.node(*node).reboot(now, None),
            Event::Refuse { node, secs } => self.node(*node).refuse(seconds(secs)),
            Event::FillJournal { node, secs } => self.node(*node).fill_journal(seconds(secs)),
            Event::JumpClock { node, millis } => self.node(*node).jump_clock(*millis),
            Event::CutApi { secs } => self.api.cut(seconds(secs)),
            Event::KillOperator { which, after } => {
                self.operators[usize::from(*which) % 2].kill(*after);
            }
            Event::StallOperator { which, after, secs } => {
                let stall = Duration::from_secs(u64::from(*secs));
                self.operators[usize::from(*which) % 2].stall(*after, stall);
            }
            Event::NoOperator { secs } => {
                for operator in &mut self.operators {
                    operator.die(seconds(secs));
                }
            }
            Event::DeletePod { pod } => self.api.delete_pod(*pod),
            Event::RestartContainer { pod } => self.api.restart(*pod),
            Event::Cling { node, secs } => {
                self.node(*node)
                    .cling(now + Duration::from_secs(u64::from(*secs)));
            }
            Event::Withdraw { node } => self.api.withdraw(*node, &mut self.laws),
            Event::Abort => self.api.abort(now, &mut self.laws),
            Event::Delete => self.api.delete(now, &mut self.laws),
            Event::Stop { secs } => self.api.stop(now, seconds(secs)),
        }
    }

    /// Whatever is away for a time is back.
    fn heal(&mut self) {
        self.api.heal();
        for operator in &mut self.operators {
            operator.heal();
        }
        for node in &mut self.nodes {
            node.heal();
        }
    }

    fn judge(self) -> Result<Story, Violation> {
        self.laws.judge(self.now, &self.api, &self.nodes)?;
        Ok(Story {
            phase: self.api.phase(),
            message: self.api.message(),
            passes: self.operators.iter().map(|o| o.passes).sum::<u64>()
                + self.nodes.iter().map(|n| n.passes).sum::<u64>(),
            ..self.laws.story()
        })
    }
}
