//! An I/O fault: the kernel asks before calls on the container's mount of a volume, and the answer
//! is withheld, late, or no.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs,
    io::{self, Read as _},
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{fcntl::OFlag, sys::stat::Mode};
use windtunnel_crds::{
    injection::NodeContainer,
    io::{IoErrno, IoFault, IoOperation},
};
use windtunnel_runtime::chain;

use super::{Effect, IO_OPENED, scratch, volume};
use crate::{
    kernel::{
        fanotify::{Answer, Class, FanotifyError, Group, Waiting},
        mounts,
        proc::{Proc, ProcessId},
    },
    look,
    model::{Act, ContainerEntry, Counts, IoAct, IoMode},
    node::Node,
    prepare::Refusal,
    targets::Container,
};

/// Any hierarchy will do: only the container's first process is needed.
pub(super) const CONTROLLER: &str = "pids";
/// The file that trials are made with.
const TRIED: &str = "/sys/trial";
/// How long a trial may take.
const TRIAL: Duration = Duration::from_secs(5);

/// What is to be done, once the volume was found to be one of the container's.
pub(super) fn plan(
    fault: &IoFault,
    container: &NodeContainer,
    found: &Container,
    node: &mut Node,
) -> Result<Act, Refusal> {
    let IoFault {
        volume,
        operations,
        percent,
        hang: _,
        latency,
        error,
    } = fault;
    if volume != "/" {
        volume::check(volume, container)?;
    }
    look::at_volume(&mut node.supervisor, found.init, volume)?;
    let does = |operation| operations.is_empty() || operations.contains(&operation);
    Ok(Act::Io(IoAct {
        volume: volume.clone(),
        open: does(IoOperation::Open),
        read: does(IoOperation::Read),
        write: does(IoOperation::Write),
        opened: node.has(IO_OPENED),
        percent: percent.map_or(100.0, windtunnel_crds::units::Percent::get),
        mode: match (latency, error) {
            (Some(latency), _) => IoMode::Latency {
                delay: latency.delay.get(),
                jitter: latency.jitter.unwrap_or_default().get(),
            },
            (None, Some(error)) => IoMode::Error(number(error.errno)),
            (None, None) => IoMode::Hang,
        },
    }))
}

fn number(errno: IoErrno) -> i32 {
    match errno {
        IoErrno::EPERM => libc::EPERM,
        IoErrno::EIO => libc::EIO,
        IoErrno::EBUSY => libc::EBUSY,
        IoErrno::EAGAIN => libc::EAGAIN,
        IoErrno::ENOSPC => libc::ENOSPC,
        IoErrno::EDQUOT => libc::EDQUOT,
    }
}

/// Calls that the kernel has asked about.
struct Calls {
    init: ProcessId,
    /// The id of the mount that it asks about.
    mount: u64,
    groups: Vec<Group>,
    act: IoAct,
    note: String,
    held: Vec<Call>,
    late: BinaryHeap<Reverse<Late>>,
    /// Percent that are due to the next call.
    credit: f64,
    random: u64,
    asked: u64,
    hit: u64,
}

/// A call that is answered later.
struct Late {
    due: Instant,
    call: Call,
}

/// A call, and the group that it is answered through.
struct Call {
    group: usize,
    waiting: Waiting,
}

pub(super) fn apply(container: &ContainerEntry, act: &IoAct) -> Result<Box<dyn Effect>, String> {
    let (opened, mount) = volume::open(container.init, &act.volume)?;
    let (groups, note) = mark(opened.as_fd(), act)?;
    Ok(Box::new(Calls {
        init: container.init,
        mount: mount.id,
        groups,
        act: act.clone(),
        note,
        held: Vec::new(),
        late: BinaryHeap::new(),
        credit: 0.0,
        random: container.init.start_time | 1,
        asked: 0,
        hit: 0,
    }))
}

/// Has the kernel ask; what it does not ask about is said. Reads and writes of content have a group
/// of their own: the kernel refuses to ask one about them and about directories.
fn mark(mount: BorrowedFd<'_>, act: &IoAct) -> Result<(Vec<Group>, String), String> {
    let group = |class| {
        let group = Group::new()?;
        group.mark(mount, class).map(|()| group)
    };
    let (mut groups, mut covered) = (Vec::new(), Vec::new());
    if act.open {
        groups.push(group(Class::Open).map_err(|e| chain(&e))?);
        covered.push("opens");
    }
    let mut missing = String::new();
    if act.write {
        match group(Class::ReadWrite) {
            Ok(group) => {
                groups.push(group);
                covered.extend(["reads", "writes"]);
            }
            Err(FanotifyError::Mark { source, .. }) => {
                missing = format!(
                    ", not writes: this kernel cannot ask about them on this file system ({source})"
                );
            }
            Err(error) => return Err(chain(&error)),
        }
    }
    if act.read && !covered.contains(&"reads") {
        groups.push(group(Class::Read).map_err(|e| chain(&e))?);
        covered.push("reads");
    }
    let before = match covered[..] {
        ["opens"] => "",
        _ if act.opened => "",
        _ => "; not on files that were open before: this kernel does not ask about them",
    };
    let covered = covered.join(", ");
    Ok((groups, format!("covers {covered}{missing}{before}")))
}

impl Calls {
    /// Takes in what the kernel has asked, and answers. As much of it as is read at once: a busy
    /// volume never runs out of calls, and the agent is to be heard in between.
    fn serve(&mut self) -> Result<(), String> {
        for group in 0..self.groups.len() {
            for waiting in self.groups[group].waiting().map_err(|e| chain(&e))? {
                self.asked += 1;
                self.take(Call { group, waiting })?;
            }
        }
        let now = Instant::now();
        while self
            .late
            .peek()
            .is_some_and(|Reverse(late)| late.due <= now)
        {
            if let Some(Reverse(late)) = self.late.pop() {
                self.answer(&late.call, Answer::Allow)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, call: Call) -> Result<(), String> {
        self.credit += self.act.percent;
        if self.credit < 100.0 {
            return self.answer(&call, Answer::Allow);
        }
        self.credit -= 100.0;
        self.hit += 1;
        match self.act.mode {
            IoMode::Hang => self.held.push(call),
            IoMode::Latency { delay, jitter } => {
                let due = Instant::now() + self.within(delay, jitter);
                self.late.push(Reverse(Late { due, call }));
            }
            IoMode::Error(errno) => return self.answer(&call, Answer::Fail(errno)),
        }
        Ok(())
    }

    /// An even draw from `delay` ± `jitter`.
    fn within(&mut self, delay: Duration, jitter: Duration) -> Duration {
        if jitter.is_zero() {
            return delay;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let share = f64::from(u32::try_from(self.random >> 32).unwrap_or(0)) / f64::from(u32::MAX);
        delay.saturating_sub(jitter) + (jitter * 2).mul_f64(share)
    }

    /// Whether the path still leads to what the kernel asks about. A container that ends is noticed
    /// elsewhere.
    fn is_mounted(&self) -> bool {
        let mounts = mounts::of_process(&Proc::default(), self.init.pid).unwrap_or_default();
        let shown = mounts::covering(&mounts, Path::new(&self.act.volume));
        mounts.is_empty() || shown.is_some_and(|mount| mount.id == self.mount)
    }

    fn answer(&self, call: &Call, answer: Answer) -> Result<(), String> {
        let answered = self.groups[call.group].answer(&call.waiting, answer);
        answered.map_err(|e| chain(&e))
    }
}

impl Effect for Calls {
    fn proof(&mut self) -> Result<Option<String>, String> {
        Ok(Some(self.note.clone()))
    }

    fn note(&self) -> String {
        self.note.clone()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.groups.iter().map(|group| group.as_fd()).collect()
    }

    fn due(&self) -> Option<Instant> {
        self.late.peek().map(|Reverse(late)| late.due)
    }

    fn work(&mut self) -> Result<(), String> {
        self.serve()
    }

    fn check(&mut self) -> Result<Counts, String> {
        if !self.is_mounted() {
            return Err(format!(
                "{} is not what it was: somebody has changed the container's mounts",
                self.act.volume
            ));
        }
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        Ok(Counts::measured([
            ("asked", self.asked),
            ("hit", self.hit),
            ("waiting", count(self.held.len() + self.late.len())),
        ]))
    }
}

impl PartialEq for Late {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for Late {}

impl PartialOrd for Late {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Late {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

/// Has the kernel ask about opens on a file system of this process's own, and refuses with `errno`.
pub(super) fn trial(errno: i32) -> Result<(), String> {
    let place = trial_file()?;
    let group = asking(place, Class::Open)?;
    // One that is never answered ends with the process.
    let opened = thread::spawn(|| fs::File::open(TRIED).map(drop));
    match refused(&group, errno, opened)? {
        Err(error) if error.raw_os_error() == Some(errno) => Ok(()),
        _ => Err("a call that was refused did not fail as it was told to".to_owned()),
    }
}

/// Has the kernel ask about reads there while a file is open already: newer kernels do not, unless
/// somebody had them ask when it was opened.
pub(super) fn trial_opened() -> Result<(), String> {
    let place = trial_file()?;
    let mut file = fs::File::open(TRIED).map_err(|e| e.to_string())?;
    let group = asking(place, Class::Read)?;
    let read = thread::spawn(move || file.read(&mut [0]).map(drop));
    match refused(&group, libc::EPERM, read)? {
        Err(_) => Ok(()),
        Ok(()) => Err("the kernel does not ask about files that were open before".to_owned()),
    }
}

/// A file on a file system of this process's own; says where that is mounted.
fn trial_file() -> Result<&'static str, String> {
    let place = scratch::enter()?;
    fs::write(TRIED, "x").map_err(|e| e.to_string())?;
    Ok(place)
}

fn asking(place: &str, class: Class) -> Result<Group, String> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let directory =
        nix::fcntl::open(place, flags, Mode::empty()).map_err(|e: nix::Error| e.to_string())?;
    let group = Group::new().map_err(|e| chain(&e))?;
    group
        .mark(directory.as_fd(), class)
        .map_err(|e| chain(&e))?;
    Ok(group)
}

/// What comes of a call while all that the kernel asks about is refused.
fn refused(
    group: &Group,
    errno: i32,
    call: JoinHandle<io::Result<()>>,
) -> Result<io::Result<()>, String> {
    let until = Instant::now() + TRIAL;
    while Instant::now() < until {
        for waiting in group.waiting().map_err(|e| chain(&e))? {
            group
                .answer(&waiting, Answer::Fail(errno))
                .map_err(|e| chain(&e))?;
        }
        if call.is_finished() {
            return call.join().map_err(|_| "a call was not made".to_owned());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err("the kernel did not ask".to_owned())
}
