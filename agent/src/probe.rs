//! What this node's kernel can do, found out by doing it where it cannot hurt.

use std::{
    io::Read as _,
    path::Path,
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use windtunnel_crds::{
    injection::{ContainerKind, NodeKind},
    io::IoErrno,
    node_agent::Capability,
};
use windtunnel_runtime::chain;

use crate::{
    impair::{self, ImpairError},
    inject,
    kernel::{
        link::LinkName,
        nft::{Addresses, Chain, Device, Direction, Selection, Table, Verdict},
        proc::Proc,
        qdisc::{Delay, Netem},
    },
    model::Detour,
};

/// How long a trial in a process of its own may take.
const TRIAL: Duration = Duration::from_secs(10);
/// The command of the process that tries.
const TRY: &str = "try";
/// What is tried.
const KINDS: [&str; 9] = [
    "network",
    "network.reset",
    "cpu",
    "memory",
    "io",
    "io.errno",
    inject::IO_OPENED,
    "diskFill",
    "containerPause",
];

/// Tries every kind of fault.
#[must_use]
pub fn capabilities(cgroups: &Path) -> Vec<Capability> {
    KINDS.iter().map(|kind| attempt(cgroups, kind)).collect()
}

/// Tries one: on a network of its own, or in a process of its own, on the agent's own container.
#[must_use]
pub fn attempt(cgroups: &Path, kind: &str) -> Capability {
    let tried = match kind {
        "network" => network().map_err(|e| chain(&e)),
        "network.reset" => inject::try_reset(),
        kind => elsewhere(cgroups, kind),
    };
    Capability {
        name: kind.to_owned(),
        available: tried.is_ok(),
        message: tried.err().unwrap_or_default(),
    }
}

/// Tries what has failed again after each pause, and tells what works now: a node that was too busy is
/// none that cannot. Returns when nothing is left.
pub fn again(
    mut failed: Vec<String>,
    mut pause: impl FnMut(),
    attempt: impl Fn(&str) -> Capability,
    tell: impl Fn(Capability),
) {
    while !failed.is_empty() {
        pause();
        failed.retain(|kind| {
            let tried = attempt(kind);
            let has_failed = !tried.available;
            if tried.available {
                tell(tried);
            }
            has_failed
        });
    }
}

/// The name of the capability that a kind of fault needs.
#[must_use]
pub fn name(kind: NodeKind<'_>) -> &'static str {
    match kind {
        NodeKind::Network(fault) if fault.impairment.reset.is_some() => "network.reset",
        NodeKind::Network(_) => "network",
        NodeKind::Container(ContainerKind::Cpu(_)) => "cpu",
        NodeKind::Container(ContainerKind::Memory(_)) => "memory",
        NodeKind::Container(ContainerKind::DiskFill(_)) => "diskFill",
        // Every kernel can send signals.
        NodeKind::Container(ContainerKind::Kill(_)) => "containerKill",
        NodeKind::Container(ContainerKind::Pause(_)) => "containerPause",
        NodeKind::Container(ContainerKind::Io(fault)) => match &fault.error {
            Some(error) if error.errno != IoErrno::EPERM => "io.errno",
            _ => "io",
        },
    }
}

/// Whether a process is one in which this very agent tries something.
pub(crate) fn is_trial(proc: &Proc, pid: i32) -> bool {
    let arguments = proc.arguments(pid);
    let own = i32::try_from(process::id()).ok();
    arguments.get(1).is_some_and(|word| word == TRY.as_bytes()) && proc.parent(pid) == own
}

/// Tries a kind in another process: what it changes of itself must not stay.
fn elsewhere(cgroups: &Path, kind: &str) -> Result<(), String> {
    let mut trial = Command::new("/proc/self/exe")
        .args([TRY, "--cgroups"])
        .arg(cgroups)
        .arg(kind)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let until = Instant::now() + TRIAL;
    let status = loop {
        match trial.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            _ => {
                // Its children die with it.
                let _ = trial.kill();
                let _ = trial.wait();
                return Err("no outcome in time".to_owned());
            }
        }
    };
    let mut message = String::new();
    if let Some(mut output) = trial.stdout.take() {
        output
            .read_to_string(&mut message)
            .map_err(|e| e.to_string())?;
    }
    match (status.success(), message.is_empty()) {
        (true, _) => Ok(()),
        (false, true) => Err(status.to_string()),
        (false, false) => Err(message),
    }
}

/// Tries a kind on the control group that this process is in.
///
/// # Errors
/// What this kernel does not do.
pub fn try_here(cgroups: &Path, kind: &str) -> Result<(), String> {
    inject::try_here(kind, cgroups).unwrap_or_else(|| Err(format!("{kind} is unknown")))
}

/// Delay in both directions, through a table that is owned.
fn network() -> Result<(), ImpairError> {
    let device = LinkName::new("eth0")?;
    let detour = |direction, ifb: &str| {
        Ok::<Detour, ImpairError>(Detour {
            direction,
            device: Device {
                name: device.clone(),
                index: 0,
            },
            ifb: LinkName::new(ifb)?,
            ifb_index: None,
            netem: Netem {
                delay: Delay {
                    latency: Duration::from_millis(1),
                    ..Delay::default()
                },
                ..Netem::new(1000)
            },
        })
    };
    let detours = [
        detour(Direction::Egress, "wtprobee")?,
        detour(Direction::Ingress, "wtprobei")?,
    ];
    impair::rehearse(&detours, |detours| Table {
        name: "windtunnel-probe".to_owned(),
        chains: detours.iter().filter_map(chain_of).collect(),
    })
}

fn chain_of(detour: &Detour) -> Option<Chain> {
    Some(Chain {
        direction: detour.direction,
        device: detour.device.clone(),
        priority: 0,
        spare: Vec::new(),
        select: vec![Selection::new("all", Addresses::Any)],
        verdict: Verdict::Forward(Device {
            name: detour.ifb.clone(),
            index: detour.ifb_index?,
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[test]
    fn what_has_failed_is_tried_until_it_works() {
        let (pauses, told) = (Cell::new(0), RefCell::new(Vec::new()));
        let pause = || pauses.set(pauses.get() + 1);
        let attempt = |kind: &str| Capability {
            name: kind.to_owned(),
            available: kind == "io" || pauses.get() == 3,
            message: "no outcome in time".to_owned(),
        };
        let tell = |works: Capability| told.borrow_mut().push((works.name, pauses.get()));
        again(
            vec!["cpu".to_owned(), "io".to_owned()],
            pause,
            attempt,
            tell,
        );
        let told = told.into_inner();
        assert_eq!(told, [("io".to_owned(), 1), ("cpu".to_owned(), 3)]);
    }
}
