//! The injector: a small process that holds one fault on one target, and with whose end the
//! kernel takes the fault back.
//!
//! It knows neither the API server nor its own history. It dies with its agent, without a
//! heartbeat of its agent, at its deadline, and by any signal; whatever it holds dies with it.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::time::TimeSpec,
};
use thiserror::Error;
use windtunnel_crds::injection::{ContainerKind, NodeContainer};

use crate::{
    kernel::{
        handle::ProcessHandle,
        lease::{Lease, LeaseError, die_with_parent},
        nft::Table,
        proc::{Proc, ProcError, boottime},
    },
    model::{Act, ContainerEntry, Counts},
    node::Node,
    prepare::Refusal,
    targets::{Container, is_deserted},
    wire::{BEAT, Down, LEASE, Line, NetworkTask, Order, Task, Up, WireError},
};

mod cpu;
mod disk;
mod io;
mod kill;
mod memory;
mod network;
mod pause;
mod reset;
mod scratch;
pub(crate) mod volume;

/// What an injector is started as.
pub(crate) const COMMAND: [&str; 2] = ["/proc/self/exe", "inject"];
/// How long an effect may take to show after it was brought about.
const PROOF: Duration = Duration::from_secs(10);
/// How often an effect that does not show yet is looked at.
const PROVE: Duration = Duration::from_millis(50);
/// How long a container, or a pod, may take to be seen to end after an effect on it has vanished.
const LOOK: Duration = Duration::from_millis(1500);
/// How often it is looked at meanwhile.
const GLANCE: Duration = Duration::from_millis(50);

/// Why an injector ends by itself.
#[derive(Debug, Error)]
pub enum InjectError {
    /// It cannot be bound to its agent and its lease.
    #[error("no lease")]
    Lease(#[from] LeaseError),
    /// The line to the agent is gone or broken.
    #[error("no agent")]
    Line(#[from] WireError),
    /// The boot clock cannot be read.
    #[error("no clock")]
    Clock(#[from] ProcError),
    /// The line cannot be waited for.
    #[error("cannot wait for the agent")]
    Wait(#[source] nix::Error),
    /// The first packet was no order.
    #[error("the agent gave no order")]
    NoOrder,
    /// The standard input cannot be taken for the line.
    #[error("there is no line to an agent")]
    NoLine(#[source] std::io::Error),
}

/// What an injector holds of the kernel; dropping it gives it back.
trait Effect {
    /// What the kernel was read back to hold, in a sentence; `None` while the effect does not show.
    fn proof(&mut self) -> Result<Option<String>, String>;
    /// Changes what packets are selected, and reads it back.
    fn update(&mut self, _: Table) -> Result<(), String> {
        Err("this fault cannot be changed".to_owned())
    }
    /// What is to be known of how far the effect goes.
    fn note(&self) -> String {
        String::new()
    }
    /// Whether the container's end is what this is for.
    fn ends_the_container(&self) -> bool {
        false
    }
    /// Whether what was proved is all that there is to do.
    fn is_done(&self) -> bool {
        false
    }
    /// What becomes readable when there is work.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
    /// When there is work in any case.
    fn due(&self) -> Option<Instant> {
        None
    }
    /// Does what there is to do; never blocks.
    fn work(&mut self) -> Result<(), String> {
        Ok(())
    }
    /// What the fault has met; an error says what is missing of the effect.
    fn check(&mut self) -> Result<Counts, String>;
}

/// Whether a process is an injector, by its arguments; one of a pod that calls itself so is none.
pub(crate) fn is_one(proc: &Proc, pid: i32) -> bool {
    let arguments = proc.arguments(pid);
    let told = COMMAND.iter().map(|word| word.as_bytes());
    arguments.iter().map(Vec::as_slice).take(2).eq(told) && proc.is_beside(pid, 1)
}

/// What is told of a kernel that asks about calls on files that were open before.
pub(crate) const IO_OPENED: &str = "io.opened";

/// The controller in whose hierarchy the container of a fault is looked for.
pub(crate) fn controller(kind: ContainerKind<'_>) -> &'static str {
    match kind {
        ContainerKind::Cpu(_) => cpu::CONTROLLER,
        ContainerKind::Io(_) => io::CONTROLLER,
        ContainerKind::Memory(_) => memory::CONTROLLER,
        ContainerKind::DiskFill(_) => disk::CONTROLLER,
        ContainerKind::Kill(_) => kill::CONTROLLER,
        ContainerKind::Pause(_) => pause::CONTROLLER,
    }
}

/// What is to be done to a container, or why it cannot be.
pub(crate) fn plan(
    kind: ContainerKind<'_>,
    container: &NodeContainer,
    found: &Container,
    node: &mut Node,
) -> Result<Act, Refusal> {
    match kind {
        ContainerKind::Cpu(fault) => cpu::plan(fault, found),
        ContainerKind::Memory(fault) => memory::plan(fault, found),
        ContainerKind::Io(fault) => io::plan(fault, container, found, node),
        ContainerKind::DiskFill(fault) => disk::plan(fault, container, found, node),
        ContainerKind::Kill(fault) => Ok(kill::plan(fault)),
        ContainerKind::Pause(_) => Ok(Act::Pause),
    }
}

/// Brings an effect about; it is to be proved.
fn apply(task: Task) -> Result<Box<dyn Effect>, String> {
    match task {
        Task::Network(task) => network::apply(task),
        Task::Container(container) => match &container.act {
            Act::Cpu { millicores } => cpu::apply(&container, *millicores),
            Act::Memory(act) => memory::apply(&container, *act),
            Act::Io(act) => io::apply(&container, act),
            Act::Fill(act) => disk::apply(&container, act),
            Act::Kill { signal, every } => kill::apply(&container, *signal, *every),
            Act::Pause => pause::apply(&container),
        },
    }
}

/// Tries a kind of fault on what is this process's own; `None` for a kind that is unknown.
pub(crate) fn try_here(kind: &str, cgroups: &Path) -> Option<Result<(), String>> {
    match kind {
        "cpu" => Some(cpu::trial(cgroups)),
        "memory" => Some(memory::trial(cgroups)),
        "io" => Some(io::trial(libc::EPERM)),
        "diskFill" => Some(disk::trial(cgroups)),
        "containerPause" => Some(pause::trial()),
        "idle" => {
            pause::idle();
            Some(Ok(()))
        }
        "io.errno" => Some(io::trial(libc::EIO)),
        IO_OPENED => Some(io::trial_opened()),
        _ => None,
    }
}

/// Tries to reset connections in a namespace of their own.
pub(crate) fn try_reset() -> Result<(), String> {
    reset::trial()
}

/// Runs an injector on the line that is its standard input, to its end.
///
/// # Errors
/// [`InjectError`]: why it ended. There is nobody to tell but the log.
pub fn run() -> Result<(), InjectError> {
    die_with_parent()?;
    let stdin = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(InjectError::NoLine)?;
    let line = Line::from_fd(stdin);
    // Until the order is there, the lease alone bounds this process.
    let lease = Lease::start(LEASE, boottime()?.saturating_add(LEASE))?;
    let Some(Down::Order(order)) = wait(&line, &[], Instant::now() + LEASE)? else {
        return Err(InjectError::NoOrder);
    };
    // The new timer holds before the first is gone.
    let holder = Lease::start(LEASE, order.deadline)?;
    drop(lease);
    hold(&line, holder, order)
}

/// Brings the effect about and holds it until the agent is gone, or its container.
fn hold(line: &Line, mut lease: Lease, order: Order) -> Result<(), InjectError> {
    let target = match &order.task {
        Task::Network(NetworkTask { pod, .. }) => Target::Pod(pod.clone()),
        Task::Container(ContainerEntry { init, .. }) => match Proc::default().open(*init)? {
            Some(init) => Target::Container(init),
            None => return Ok(line.send(&Up::ContainerEnded)?),
        },
    };
    let mut held = match apply(order.task) {
        Ok(effect) => Held {
            line,
            target,
            effect,
            unproved: Some(Instant::now() + PROOF),
        },
        Err(message) => return leave(line, &mut lease, &target, Up::Failed { message }),
    };
    let mut next_beat = Instant::now();
    loop {
        match held.wait(next_beat)? {
            Some(Down::Beat) => {
                lease.renew(LEASE)?;
            }
            Some(Down::Update(table)) => match held.effect.update(table) {
                Ok(()) => line.send(&Up::Updated)?,
                Err(message) => return held.vanish(&mut lease, message),
            },
            Some(Down::Order(_)) => return Err(InjectError::NoOrder),
            None => {}
        }
        if let Err(message) = held.effect.work() {
            return held.vanish(&mut lease, message);
        }
        if held.is_done() {
            return Ok(line.send(&Up::Done)?);
        }
        if !held.wants_its_end() && held.target.is_container_ended() {
            // What it has met until now is told with its last breath; it may be the proof.
            let _ = held.beat()?;
            return Ok(line.send(&Up::ContainerEnded)?);
        }
        if Instant::now() >= next_beat {
            next_beat = Instant::now() + if held.unproved.is_some() { PROVE } else { BEAT };
            if let Err(message) = held.beat()? {
                return held.vanish(&mut lease, message);
            }
        }
    }
}

/// An effect, and who is told of it.
struct Held<'a> {
    line: &'a Line,
    target: Target,
    effect: Box<dyn Effect>,
    /// Until when the effect must show, while it does not.
    unproved: Option<Instant>,
}

impl Held<'_> {
    /// There is nothing more to do.
    fn is_done(&self) -> bool {
        self.unproved.is_none() && self.effect.is_done()
    }

    /// The end of the container is the effect, and is still to be told.
    fn wants_its_end(&self) -> bool {
        self.unproved.is_some() && self.effect.ends_the_container()
    }

    /// Proves the effect if that is to be done, and tells what it has met; the inner error says what
    /// is missing of it.
    fn beat(&mut self) -> Result<Result<(), String>, InjectError> {
        if let Some(until) = self.unproved {
            match self.effect.proof() {
                Ok(Some(proof)) => {
                    self.unproved = None;
                    let note = self.effect.note();
                    self.line.send(&Up::Applied { proof, note })?;
                }
                Ok(None) if Instant::now() < until => {}
                Ok(None) => return Ok(Err("the effect does not show".to_owned())),
                Err(message) => return Ok(Err(message)),
            }
        }
        let counts = match self.effect.check() {
            Ok(counts) => counts,
            Err(message) => return Ok(Err(message)),
        };
        // An agent that does not read is no reason to end: the lease is.
        match self.line.send(&Up::Beat(counts)) {
            Ok(()) | Err(WireError::Full) => Ok(Ok(())),
            Err(error) => Err(error.into()),
        }
    }

    /// The effect is not there, or not any more.
    fn vanish(self, lease: &mut Lease, message: String) -> Result<(), InjectError> {
        let Self {
            line,
            target,
            effect,
            unproved,
        } = self;
        drop(effect);
        let why = match unproved {
            Some(_) => Up::Failed { message },
            None => Up::Vanished { message },
        };
        leave(line, lease, &target, why)
    }

    /// The agent's next message, if one comes before `until` and before the container ends.
    fn wait(&self, until: Instant) -> Result<Option<Down>, InjectError> {
        let target = self.target.descriptor().into_iter();
        let others: Vec<BorrowedFd<'_>> = target.chain(self.effect.descriptors()).collect();
        let until = self.effect.due().map_or(until, |due| due.min(until));
        wait(self.line, &others, until)
    }
}

/// Says why there is no effect; where what it was to be on has ended, that is why.
fn leave(line: &Line, lease: &mut Lease, target: &Target, why: Up) -> Result<(), InjectError> {
    let ended = target.await_end(line, lease)?;
    Ok(line.send(&ended.unwrap_or(why))?)
}

/// What an effect is on, and ends with.
enum Target {
    /// A container's first process.
    Container(ProcessHandle),
    /// A pod's control group. A runtime takes the pod's links away when it is about to end, or has.
    Pod(PathBuf),
}

impl Target {
    /// Whether it is a container that has ended.
    fn is_container_ended(&self) -> bool {
        matches!(self, Self::Container(_)) && self.end().is_some()
    }

    /// What becomes readable with its end, if anything does.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Container(init) => Some(init.as_fd()),
            Self::Pod(_) => None,
        }
    }

    /// What to tell of its end, if it has ended; one that cannot be looked at is taken to live.
    fn end(&self) -> Option<Up> {
        match self {
            Self::Container(init) => {
                let has_ended = init.ends_within(Duration::ZERO).unwrap_or(false);
                has_ended.then_some(Up::ContainerEnded)
            }
            Self::Pod(group) => is_deserted(group).then_some(Up::PodEnded),
        }
    }

    /// What to tell of its end, if it comes soon; the agent is listened to meanwhile.
    fn await_end(&self, line: &Line, lease: &mut Lease) -> Result<Option<Up>, InjectError> {
        let until = Instant::now() + LOOK;
        loop {
            let now = Instant::now();
            let end = self.end();
            if end.is_some() || now >= until {
                return Ok(end);
            }
            let others: Vec<BorrowedFd<'_>> = self.descriptor().into_iter().collect();
            if let Some(Down::Beat) = wait(line, &others, until.min(now + GLANCE))? {
                lease.renew(LEASE)?;
            }
        }
    }
}

/// The agent's next message, if one comes before `until` and before another descriptor is ready.
fn wait(
    line: &Line,
    others: &[BorrowedFd<'_>],
    until: Instant,
) -> Result<Option<Down>, InjectError> {
    loop {
        if let Some(message) = line.receive()? {
            return Ok(Some(message));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let mut fds = vec![PollFd::new(line.as_fd(), PollFlags::POLLIN)];
        fds.extend(others.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)));
        match ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None) {
            Ok(_) if fds[1..].iter().any(|fd| fd.any() == Some(true)) => return Ok(None),
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(InjectError::Wait(error)),
        }
    }
}
