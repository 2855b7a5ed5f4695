//! Threads that are stopped by being traced: they go on when the tracer ends, by whatever death.
//!
//! One tracer a thread is all that the kernel allows: where a debugger is attached, this one is
//! refused. All calls must come from the thread that traces.

use std::collections::BTreeSet;
use std::fs;

use nix::errno::Errno;
use nix::sys::ptrace::{Options, interrupt, seize};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::proc::Proc;

/// Why a thread cannot be stopped.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It may not be traced (needs `CAP_SYS_PTRACE`), or is by somebody else.
    #[error("stop thread {thread}: is a debugger attached?")]
    Stop {
        /// The thread.
        thread: i32,
        /// The reason.
        source: Errno,
    },
    /// What became of traced threads cannot be learned.
    #[error("wait for stopped threads")]
    Wait(#[source] Errno),
}

/// The threads that this thread holds.
#[derive(Debug, Default)]
pub struct Stopped {
    threads: BTreeSet<i32>,
    stopped: BTreeSet<i32>,
}

impl Stopped {
    /// Stops the threads of a process that are not held yet; how many there were. Threads and
    /// processes that have ended are no error.
    ///
    /// # Errors
    /// [`TraceError::Stop`].
    pub fn hold(&mut self, proc: &Proc, pid: i32) -> Result<usize, TraceError> {
        let mut fresh = 0;
        let Ok(tasks) = fs::read_dir(proc.path(pid).join("task")) else {
            return Ok(0);
        };
        let names = tasks.filter_map(|task| task.ok()?.file_name().into_string().ok());
        for thread in names.filter_map(|name| name.parse::<i32>().ok()) {
            if self.threads.contains(&thread) {
                continue;
            }
            let id = Pid::from_raw(thread);
            match seize(id, Options::empty()).and_then(|()| interrupt(id)) {
                Ok(()) => {
                    self.threads.insert(thread);
                    fresh += 1;
                }
                Err(Errno::ESRCH) => {}
                // One that has ended and was not seen off yet cannot be traced either.
                Err(_) if proc.identify(thread).is_ok_and(|found| found.is_none()) => {}
                Err(source) => return Err(TraceError::Stop { thread, source }),
            }
        }
        Ok(fresh)
    }

    /// Learns which threads have stopped and which are gone. Must be called now and then: a process
    /// that dies while it is held is seen by its own parent only after this.
    ///
    /// # Errors
    /// [`TraceError::Wait`].
    pub fn settle(&mut self) -> Result<(), TraceError> {
        loop {
            let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
            match waitpid(None, Some(flags)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(()),
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                    self.threads.remove(&pid.as_raw());
                    self.stopped.remove(&pid.as_raw());
                }
                Ok(status) => self.stopped.extend(status.pid().map(Pid::as_raw)),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(TraceError::Wait(errno)),
            }
        }
    }

    /// How many threads are held, and whether all of them have stopped.
    #[must_use]
    pub fn count(&self) -> (usize, bool) {
        let all = self.threads.is_subset(&self.stopped);
        (self.threads.len(), all)
    }
}
