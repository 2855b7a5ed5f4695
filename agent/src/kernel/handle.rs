//! Handles to processes, to end them.
//!
//! Killing goes through a pidfd whose process was identified after it was opened.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::Signal;
use nix::sys::time::TimeSpec;

use super::proc::{Proc, ProcError, ProcessId};

/// A process that can be ended without fear of hitting another.
#[derive(Debug)]
pub struct ProcessHandle {
    fd: OwnedFd,
    process: ProcessId,
}

impl Proc {
    /// Opens a process for [`ProcessHandle::kill`]; `None` if it is gone.
    ///
    /// # Errors
    /// When the kernel refuses for another reason.
    pub fn open(&self, process: ProcessId) -> Result<Option<ProcessHandle>, ProcError> {
        let fd = match pidfd_open(process.pid) {
            Ok(fd) => fd,
            Err(Errno::ESRCH) => return Ok(None),
            Err(source) => {
                return Err(ProcError::Process {
                    operation: "open",
                    process,
                    source,
                });
            }
        };
        // Only now: a process that was known before and lives after the handle was opened is the
        // one that the handle means.
        let is_same = self.is_alive(process)?;
        Ok(is_same.then_some(ProcessHandle { fd, process }))
    }

    /// Kills a process; what its end is seen by, `None` if it is gone.
    ///
    /// # Errors
    /// When it cannot be opened, or the kernel refuses (needs `CAP_KILL`).
    pub fn kill(&self, process: ProcessId) -> Result<Option<ProcessHandle>, ProcError> {
        let handle = self.open(process)?;
        if let Some(handle) = &handle {
            handle.kill()?;
        }
        Ok(handle)
    }
}

impl ProcessHandle {
    /// Which process this is.
    #[must_use]
    pub fn process(&self) -> ProcessId {
        self.process
    }

    /// Sends SIGKILL; a process that has ended already is no error.
    ///
    /// # Errors
    /// When the kernel refuses (needs `CAP_KILL`).
    pub fn kill(&self) -> Result<(), ProcError> {
        self.send(Signal::SIGKILL)
    }

    /// Sends a signal; a process that has ended already is no error.
    ///
    /// # Errors
    /// When the kernel refuses (needs `CAP_KILL`).
    pub fn send(&self, signal: Signal) -> Result<(), ProcError> {
        match pidfd_send_signal(self.fd.as_fd(), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(source) => Err(ProcError::Process {
                operation: "signal",
                process: self.process,
                source,
            }),
        }
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// When the handle cannot be looked at.
    pub fn has_ended(&self) -> Result<bool, ProcError> {
        self.ends_within(Duration::ZERO)
    }

    /// Whether it ends within some time; waits no longer than until it does.
    ///
    /// # Errors
    /// When the handle cannot be looked at.
    pub fn ends_within(&self, time: Duration) -> Result<bool, ProcError> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::EINTR) => {}
                Err(source) => {
                    return Err(ProcError::Process {
                        operation: "look at",
                        process: self.process,
                        source,
                    });
                }
            }
        }
    }
}

/// Readable once the process has ended.
impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn pidfd_open(pid: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: takes two integers and returns a new descriptor or -1.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
    // SAFETY: the descriptor was just made and belongs to no one else; it is close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pidfd_send_signal(fd: BorrowedFd<'_>, signal: Signal) -> Result<(), Errno> {
    let no_info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open for the duration of the call; a null pointer is allowed and
    // stands for the information that kill(2) would send.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            fd.as_raw_fd(),
            signal as libc::c_int,
            no_info,
            0,
        )
    };
    Errno::result(sent).map(drop)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_identified_process_is_killed() {
        let proc = Proc::default();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let process = proc.identify(pid).unwrap().unwrap();

        let start_time = process.start_time + 1;
        let earlier = ProcessId { pid, start_time };
        assert!(proc.open(earlier).unwrap().is_none());

        let handle = proc.open(process).unwrap().unwrap();
        handle.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        handle.kill().unwrap();
        assert!(proc.open(process).unwrap().is_none());
    }
}
