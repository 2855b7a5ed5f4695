//! Permission events: the kernel asks before an operation on a mount goes on, and waits for the
//! answer.
//!
//! A group belongs to this process: when its last descriptor is closed, by whatever death, every
//! operation that still waits is allowed. Nothing may be opened on a marked mount by the process
//! that answers. Marks are on one mount only: the same file through another is not asked about.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{read, write};

/// Not in libc yet: before content is read or written (6.14).
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
/// Where the errno of a refusal stands in a response.
const ERRNO_SHIFT: u32 = 24;
/// Bytes of events that are read at once.
const BUFFER: usize = 16 * 1024;

/// Why permission events cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FanotifyError {
    /// There is no group (needs `CAP_SYS_ADMIN`).
    #[error("make a group for permission events")]
    Group(#[source] Errno),
    /// The mount cannot be marked.
    #[error("ask for permission events of {what}")]
    Mark {
        /// What was asked for.
        what: &'static str,
        /// The reason; `EINVAL` where the kernel, `EOPNOTSUPP` where the file system cannot.
        source: Errno,
    },
    /// Events could not be read.
    #[error("read permission events")]
    Read(#[source] Errno),
    /// A response was not taken; the operation was allowed.
    #[error("answer a permission event")]
    Answer(#[source] Errno),
    /// The descriptor of an event cannot be made, its operation goes on or fails by itself.
    #[error("the kernel could not open what is asked about")]
    NoDescriptor,
}

/// Which operations the kernel is to ask about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Files and directories are opened.
    Open,
    /// Files and directories are read.
    Read,
    /// Files are read or written; not on every kernel and file system.
    ReadWrite,
}

impl Class {
    fn mask(self) -> u64 {
        match self {
            Self::Open => libc::FAN_OPEN_PERM | libc::FAN_ONDIR,
            Self::Read => libc::FAN_ACCESS_PERM | libc::FAN_ONDIR,
            Self::ReadWrite => FAN_PRE_ACCESS,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Open => "opens",
            Self::Read => "reads",
            Self::ReadWrite => "reads and writes",
        }
    }
}

/// What becomes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It goes on.
    Allow,
    /// It fails with this errno.
    Fail(i32),
}

/// An operation that waits for an answer. Dropped without one it goes on waiting until the group is
/// closed.
#[derive(Debug)]
pub struct Waiting {
    file: OwnedFd,
}

/// A group of permission events.
#[derive(Debug)]
pub struct Group {
    fd: OwnedFd,
}

impl Group {
    /// A group that may ask before content is touched, and never blocks itself.
    ///
    /// # Errors
    /// [`FanotifyError::Group`].
    pub fn new() -> Result<Self, FanotifyError> {
        // Each operation that waits holds a descriptor here.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let flags = libc::FAN_CLASS_PRE_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        // The kernel opens what was called on, in the reader's place: a pipe that nobody writes to
        // is not to be waited for.
        let event_flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_LARGEFILE | libc::O_CLOEXEC;
        let event_flags = event_flags.unsigned_abs();
        // SAFETY: takes two integers and returns a new descriptor or -1.
        let fd = Errno::result(unsafe { libc::fanotify_init(flags, event_flags) });
        let fd = fd.map_err(FanotifyError::Group)?;
        // SAFETY: the descriptor was just made and belongs to no one else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Asks about a class of operations on the mount that a descriptor lies on.
    ///
    /// # Errors
    /// [`FanotifyError::Mark`].
    pub fn mark(&self, mount: BorrowedFd<'_>, class: Class) -> Result<(), FanotifyError> {
        let failed = |source| FanotifyError::Mark {
            what: class.name(),
            source,
        };
        // What was opened is what is marked, whatever its path means by now.
        let path = CString::new(format!("/proc/self/fd/{}", mount.as_raw_fd()));
        let path = path.map_err(|_| failed(Errno::EINVAL))?;
        // SAFETY: the group is open and the path ends with a zero for the duration of the call.
        let marked = unsafe {
            libc::fanotify_mark(
                self.fd.as_raw_fd(),
                libc::FAN_MARK_ADD | libc::FAN_MARK_MOUNT,
                class.mask(),
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        Errno::result(marked).map(drop).map_err(failed)
    }

    /// The operations that have begun to wait since the last call.
    ///
    /// # Errors
    /// [`FanotifyError::Read`].
    pub fn waiting(&self) -> Result<Vec<Waiting>, FanotifyError> {
        let mut buffer = vec![0; BUFFER];
        let length = match read(&self.fd, &mut buffer) {
            Ok(length) => length,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Vec::new()),
            Err(errno) => return Err(FanotifyError::Read(errno)),
        };
        // SAFETY: these descriptors were just given to this process, each for one event.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(descriptors(&buffer[..length])
            .into_iter()
            .map(|fd| Waiting { file: own(fd) })
            .collect())
    }

    /// Answers; a refusal that the kernel does not take becomes an allowance.
    ///
    /// # Errors
    /// [`FanotifyError::Answer`]: the operation went on, or is gone.
    pub fn answer(&self, operation: &Waiting, answer: Answer) -> Result<(), FanotifyError> {
        let response = match answer {
            Answer::Allow => libc::FAN_ALLOW,
            // The plain refusal is the only one that every kernel knows.
            Answer::Fail(libc::EPERM) => libc::FAN_DENY,
            Answer::Fail(errno) => libc::FAN_DENY | (errno.unsigned_abs() << ERRNO_SHIFT),
        };
        match self.respond(operation, response) {
            // The task that waited has been killed.
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => {
                // There is nobody left to tell if this fails too: the task is gone.
                let _ = self.respond(operation, libc::FAN_ALLOW);
                Err(FanotifyError::Answer(errno))
            }
        }
    }

    fn respond(&self, operation: &Waiting, response: u32) -> Result<(), Errno> {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&operation.file.as_raw_fd().to_ne_bytes());
        bytes[4..].copy_from_slice(&response.to_ne_bytes());
        write(&self.fd, &bytes).map(drop)
    }
}

/// Readable when an operation waits.
impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The descriptors of the events in a buffer: 24 bytes at least, the length first, the descriptor
/// at 16. An event without a descriptor wants no answer.
fn descriptors(mut events: &[u8]) -> Vec<i32> {
    let mut found = Vec::new();
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4)?.try_into().ok();
    while let (Some(length), Some(fd)) = (word(events, 0), word(events, 16)) {
        let fd = i32::from_ne_bytes(fd);
        if fd >= 0 {
            found.push(fd);
        }
        let length = usize::try_from(u32::from_ne_bytes(length)).unwrap_or(0);
        match events.get(length..) {
            Some(rest) if length >= 24 => events = rest,
            _ => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(length: u32, fd: i32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[16..20].copy_from_slice(&fd.to_ne_bytes());
        bytes
    }

    #[test]
    fn events_of_any_length_are_read_and_those_without_a_file_left_out() {
        let events = [event(24, 5), event(56, 6), event(24, -1), event(24, 7)].concat();
        assert_eq!(descriptors(&events), [5, 6, 7]);
        assert!(descriptors(&[]).is_empty());
        assert_eq!(descriptors(&event(24, 5)[..20]), [5], "cut short");
        let mut endless = event(24, 5);
        endless[..4].copy_from_slice(&0u32.to_ne_bytes());
        assert_eq!(descriptors(&endless), [5]);
    }
}
