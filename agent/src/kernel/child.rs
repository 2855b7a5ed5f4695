//! A child of an injector: what burns or allocates inside the target's control group.
//!
//! It is the first process of a pid namespace of its own, so that all it ever starts dies with it,
//! and it dies with the injector. It joins the control group by itself, by way of a descriptor that
//! the injector opened: in the control group namespace of pid 1, because writes from another are
//! refused where the hierarchy is mounted with nsdelegate. What it writes to its standard output, a
//! line at a time, is the injector's to read; that pipe tells each side when the other is gone.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns, unshare};

use super::cgroup::{self, CgroupError};
use super::lease::{LeaseError, die_with_parent};
use super::proc::Proc;

/// The name that children go by.
const NAME: &str = "windtunnel-child";

/// Why a child could not be started, or not be one.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The control group's file could not be opened.
    #[error("open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The control group cannot be read.
    #[error("look at the control group")]
    Group(#[from] CgroupError),
    /// The control group namespace of pid 1 could not be entered (needs `CAP_SYS_ADMIN`).
    #[error("enter the control group namespace of pid 1")]
    CgroupNamespace(#[source] Errno),
    /// There is no pid namespace for it (needs `CAP_SYS_ADMIN`).
    #[error("make a pid namespace")]
    PidNamespace(#[source] Errno),
    /// The process could not be started.
    #[error("start a child")]
    Start(#[source] io::Error),
    /// Its reports could not be read.
    #[error("read what the child reports")]
    Report(#[source] io::Error),
    /// It could not join the control group.
    #[error("join the control group")]
    Join(#[source] io::Error),
    /// It cannot be bound to its parent.
    #[error("bind to the parent")]
    Parent(#[from] LeaseError),
    /// The injector was gone before it could be bound to it.
    #[error("the injector is gone")]
    Orphaned,
}

/// A running child; it ends with this value.
#[derive(Debug)]
pub struct Child {
    process: process::Child,
    reports: ChildStdout,
    unread: Vec<u8>,
}

impl Child {
    /// Starts one that is to join the control group of a container, for a process that has no other thread and no
    /// other children that live.
    ///
    /// # Errors
    /// [`ChildError`]; nothing is left then.
    pub fn start(group: &Path, arguments: &[String]) -> Result<Self, ChildError> {
        enter_cgroup_namespace()?;
        let path = cgroup::joinable(group)?.join("cgroup.procs");
        let join = OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|source| ChildError::Open { path, source })?;
        // Back to the own one first: that of a child before is dead, and no other can be made in it.
        let own = PathBuf::from("/proc/self/ns/pid");
        let namespace =
            File::open(&own).map_err(|source| ChildError::Open { path: own, source })?;
        setns(namespace, CloneFlags::CLONE_NEWPID).map_err(ChildError::PidNamespace)?;
        unshare(CloneFlags::CLONE_NEWPID).map_err(ChildError::PidNamespace)?;
        let mut process = Command::new("/proc/self/exe")
            .arg0(NAME)
            .arg("child")
            .args(arguments)
            .env_clear()
            .stdin(Stdio::from(join))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(ChildError::Start)?;
        let reports = process.stdout.take();
        let reports = reports.ok_or_else(|| ChildError::Report(Errno::EBADF.into()))?;
        fcntl(&reports, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|errno| ChildError::Report(errno.into()))?;
        Ok(Self {
            process,
            reports,
            unread: Vec::new(),
        })
    }

    /// Its pid in the namespace of the caller.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap_or_default()
    }

    /// The whole lines that it has written since the last call.
    ///
    /// # Errors
    /// Where its end of the pipe cannot be read.
    pub fn lines(&mut self) -> Result<Vec<String>, ChildError> {
        let mut buffer = [0; 4096];
        loop {
            match self.reports.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => self.unread.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(ChildError::Report(error)),
            }
        }
        let Some(end) = self.unread.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let whole: Vec<u8> = self.unread.drain(..=end).collect();
        let text = String::from_utf8_lossy(&whole);
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<String> {
        match self.process.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(status.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // One that has ended already is what was wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes this process a child: it joins the control group that its standard input is for, and dies
/// with its parent.
///
/// # Errors
/// [`ChildError`]; the process is to end then.
pub fn become_one() -> Result<(), ChildError> {
    die_with_parent()?;
    let (input, output) = (io::stdin(), io::stdout());
    // The parent may have died before the signal was asked for: nobody reads then.
    let mut reader = [PollFd::new(output.as_fd(), PollFlags::empty())];
    poll(&mut reader, PollTimeout::ZERO).map_err(|errno| ChildError::Join(errno.into()))?;
    if reader[0]
        .revents()
        .is_some_and(|events| events.intersects(PollFlags::POLLERR | PollFlags::POLLHUP))
    {
        return Err(ChildError::Orphaned);
    }
    let joined = input.as_fd().try_clone_to_owned().map(File::from);
    joined
        .and_then(|mut group| group.write_all(b"0"))
        .map_err(ChildError::Join)
}

/// Reports a line; whether somebody may have heard it.
#[must_use]
pub fn say(line: &str) -> bool {
    let mut out = io::stdout().lock();
    let said = writeln!(out, "{line}");
    said.and_then(|()| out.flush()).is_ok()
}

/// Whether a process is a child of an injector: by its name, which anybody can have, and its program.
#[must_use]
pub fn is_one(proc: &Proc, pid: i32) -> bool {
    let arguments = proc.arguments(pid);
    arguments
        .first()
        .is_some_and(|name| name == NAME.as_bytes())
        && proc.runs(pid, env!("CARGO_PKG_NAME"))
}

/// Moves this process into the control group namespace of pid 1.
///
/// # Errors
/// When that may not be entered.
pub fn enter_cgroup_namespace() -> Result<(), ChildError> {
    let path = PathBuf::from("/proc/1/ns/cgroup");
    let namespace = File::open(&path).map_err(|source| ChildError::Open { path, source })?;
    setns(namespace, CloneFlags::CLONE_NEWCGROUP).map_err(ChildError::CgroupNamespace)
}
