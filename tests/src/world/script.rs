//! What goes wrong, and when: made by chance, short enough to read.

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};

/// What is played: an experiment, and what happens while it runs.
#[derive(Debug, Clone)]
pub struct Script {
    /// The experiment.
    pub run: Run,
    /// What happens, each so many milliseconds after the one before.
    pub events: Vec<(u32, Event)>,
}

/// An experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// A delay on all pods, for the whole run.
    Short,
    /// A delay on half of the pods, and later a loss on all, on one clock.
    Windows,
    /// Half of the pods are killed under a delay.
    Kills,
    /// A delay on all pods, for longer than agents do without a control plane.
    Long,
    /// CPU time is burnt in all pods' containers, beside a loss on half of the pods.
    Containers,
    /// Nothing may be touched.
    Dry,
}

/// Something that goes wrong, or that a user wants. Nodes and pods are numbers, taken modulo how
/// many there are.
#[derive(Debug, Clone)]
pub enum Event {
    /// The agent dies after so many more steps, and comes back by itself; its injectors die with it,
    /// or are orphans until their lease is over.
    KillAgent {
        /// Where.
        node: u8,
        /// After so many steps.
        after: u8,
        /// Injectors outlive it.
        orphans: bool,
    },
    /// The agent is stopped.
    StopAgent {
        /// Where.
        node: u8,
        /// For how long.
        secs: u8,
    },
    /// An injector is killed.
    KillInjector {
        /// Where.
        node: u8,
    },
    /// An injector is stopped.
    StopInjector {
        /// Where.
        node: u8,
        /// For how long.
        secs: u8,
    },
    /// An effect vanishes although its injector lives.
    Vanish {
        /// Where.
        node: u8,
    },
    /// The agent dies, and all that it had written down is gone.
    LoseJournal {
        /// Where.
        node: u8,
    },
    /// A node is cut off.
    Cut {
        /// Which.
        node: u8,
        /// For how long.
        secs: u8,
    },
    /// A node is rebooted.
    Reboot {
        /// Which.
        node: u8,
    },
    /// A node is gone for good.
    Lose {
        /// Which.
        node: u8,
    },
    /// A node can prepare nothing.
    Refuse {
        /// Which.
        node: u8,
        /// For how long.
        secs: u8,
    },
    /// A node's journal cannot be written.
    FillJournal {
        /// Where.
        node: u8,
        /// For how long.
        secs: u8,
    },
    /// A node's wall clock jumps.
    JumpClock {
        /// Where.
        node: u8,
        /// By how much.
        millis: i16,
    },
    /// The API server does not answer.
    CutApi {
        /// For how long.
        secs: u8,
    },
    /// An operator dies after so many more actions, and comes back by itself.
    KillOperator {
        /// Which replica.
        which: u8,
        /// After so many actions.
        after: u8,
    },
    /// An operator stops between two actions, and goes on with the rest when it wakes.
    StallOperator {
        /// Which replica.
        which: u8,
        /// After so many actions.
        after: u8,
        /// For how long.
        secs: u8,
    },
    /// There is no operator.
    NoOperator {
        /// For how long.
        secs: u8,
    },
    /// A pod is gone.
    DeletePod {
        /// Which.
        pod: u8,
    },
    /// The container of a pod ends, and another takes its place.
    RestartContainer {
        /// Of which.
        pod: u8,
    },
    /// What is built on a node cannot be removed.
    Cling {
        /// Where.
        node: u8,
        /// For how long.
        secs: u16,
    },
    /// Somebody deletes the node injection of a node.
    Withdraw {
        /// Which.
        node: u8,
    },
    /// The user aborts the run.
    Abort,
    /// The user deletes the experiment.
    Delete,
    /// The emergency stop.
    Stop {
        /// For how long.
        secs: u8,
    },
}

/// All scripts of up to `events` events.
pub fn scripts(events: usize) -> impl Strategy<Value = Script> {
    let run = prop_oneof![
        3 => Just(Run::Short),
        3 => Just(Run::Windows),
        2 => Just(Run::Kills),
        2 => Just(Run::Long),
        3 => Just(Run::Containers),
        1 => Just(Run::Dry),
    ];
    // Often at once, often within a second, sometimes much later.
    let pause = prop_oneof![2 => Just(0), 4 => 0..1_500_u32, 2 => 0..40_000_u32];
    (run, vec((pause, event()), 0..=events)).prop_map(|(run, events)| Script { run, events })
}

fn event() -> impl Strategy<Value = Event> {
    let node = 0..2_u8;
    let short = 1..12_u8;
    let long = 1..100_u8;
    prop_oneof![
        3 => (node.clone(), 0..12_u8, any::<bool>())
            .prop_map(|(node, after, orphans)| Event::KillAgent { node, after, orphans }),
        2 => (node.clone(), short.clone()).prop_map(|(node, secs)| Event::StopAgent { node, secs }),
        2 => node.clone().prop_map(|node| Event::KillInjector { node }),
        1 => (node.clone(), short.clone())
            .prop_map(|(node, secs)| Event::StopInjector { node, secs }),
        1 => node.clone().prop_map(|node| Event::Vanish { node }),
        1 => node.clone().prop_map(|node| Event::LoseJournal { node }),
        2 => (node.clone(), long.clone()).prop_map(|(node, secs)| Event::Cut { node, secs }),
        1 => node.clone().prop_map(|node| Event::Reboot { node }),
        1 => node.clone().prop_map(|node| Event::Lose { node }),
        1 => node.clone().prop_map(|node| Event::Withdraw { node }),
        1 => (node.clone(), short.clone()).prop_map(|(node, secs)| Event::Refuse { node, secs }),
        1 => (node.clone(), short.clone())
            .prop_map(|(node, secs)| Event::FillJournal { node, secs }),
        1 => (node.clone(), -5_000..5_000_i16)
            .prop_map(|(node, millis)| Event::JumpClock { node, millis }),
        // Longer than until the second check.
        1 => (node, 1..700_u16).prop_map(|(node, secs)| Event::Cling { node, secs }),
        2 => long.clone().prop_map(|secs| Event::CutApi { secs }),
        3 => (0..2_u8, 0..8_u8).prop_map(|(which, after)| Event::KillOperator { which, after }),
        2 => (0..2_u8, 0..8_u8, long.clone())
            .prop_map(|(which, after, secs)| Event::StallOperator { which, after, secs }),
        1 => (1..250_u8).prop_map(|secs| Event::NoOperator { secs }),
        2 => (0..8_u8).prop_map(|pod| Event::DeletePod { pod }),
        3 => (0..8_u8).prop_map(|pod| Event::RestartContainer { pod }),
        1 => Just(Event::Abort),
        1 => Just(Event::Delete),
        1 => long.prop_map(|secs| Event::Stop { secs }),
    ]
}

const WINDOWS: &str = "
duration: 60s
faults:
- name: slow
  startAfter: 2s
  duration: 20s
  target: {selector: {matchLabels: {app: orders}}, percent: 50}
  network: {delay: {latency: 100ms}}
- name: lossy
  startAfter: 25s
  target: {selector: {matchLabels: {app: orders}}}
  network: {loss: {percent: 10}}
";

const KILLS: &str = "
duration: 40s
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}}
- name: half
  startAfter: 5s
  target: {selector: {matchLabels: {app: orders}}, percent: 50}
  podKill: {gracePeriod: 1s}
";

const CONTAINERS: &str = "
duration: 40s
faults:
- name: busy
  duration: 30s
  target: {selector: {matchLabels: {app: orders}}}
  cpu: {load: 50}
- name: lossy
  startAfter: 5s
  target: {selector: {matchLabels: {app: orders}}, percent: 50}
  network: {loss: {percent: 10}}
";

impl Run {
    /// The spec of the experiment.
    pub(super) const fn spec(self) -> &'static str {
        match self {
            Self::Short => {
                "
duration: 20s
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}}
"
            }
            Self::Windows => WINDOWS,
            Self::Kills => KILLS,
            Self::Long => {
                "
duration: 4m
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}}
"
            }
            Self::Containers => CONTAINERS,
            Self::Dry => {
                "
duration: 20s
dryRun: true
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}}
"
            }
        }
    }
}
