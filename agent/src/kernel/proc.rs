//! Processes as `/proc` shows them.
//!
//! A process is its pid together with its start time: a bare pid may be someone else's by the time
//! that it is used. The root of `/proc` is a parameter, so that tests read fixtures.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_gettime};

/// Why `/proc` could not be read or a process not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// A file could not be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file does not look as it should.
    #[error("{} is not of the known form", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// A process could not be opened or signalled.
    #[error("{operation} process {}", process.pid)]
    Process {
        /// What was tried.
        operation: &'static str,
        /// The process.
        process: ProcessId,
        /// The reason.
        source: Errno,
    },
    /// A clock could not be read.
    #[error("read the boot clock")]
    Clock(#[source] Errno),
}

/// Identity of a process until reboot.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct ProcessId {
    /// Its pid in the agent's pid namespace.
    pub pid: i32,
    /// Clock ticks from boot to its start (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

/// The part of `/proc/PID/stat` that is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    state: char,
    parent: i32,
    flags: u32,
    start_time: u64,
}

/// `PF_EXITING` of the kernel's `include/linux/sched.h`: set before anything is given up.
const EXITING: u32 = 4;
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// A `/proc`, by default the real one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Proc {
    root: PathBuf,
}

impl Default for Proc {
    fn default() -> Self {
        Self::new("/proc")
    }
}

impl Proc {
    /// A `/proc` that is mounted there.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory of a process.
    #[must_use]
    pub fn path(&self, pid: i32) -> PathBuf {
        self.root.join(pid.to_string())
    }

    /// All pids, ascending.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn pids(&self) -> Result<Vec<i32>, ProcError> {
        let failed = |source| ProcError::Read {
            path: self.root.clone(),
            source,
        };
        let mut pids = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            pids.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// The identity of the live process that has a pid now; `None` if there is none, or only a
    /// zombie.
    ///
    /// # Errors
    /// When its `stat` cannot be read.
    pub fn identify(&self, pid: i32) -> Result<Option<ProcessId>, ProcError> {
        let stat = self.stat(pid)?;
        Ok(stat
            .filter(|stat| !matches!(stat.state, 'Z' | 'X' | 'x'))
            .map(|Stat { start_time, .. }| ProcessId { pid, start_time }))
    }

    /// Whether this very process still runs; a zombie does not.
    ///
    /// # Errors
    /// When its `stat` cannot be read.
    pub fn is_alive(&self, process: ProcessId) -> Result<bool, ProcError> {
        Ok(self.identify(process.pid)? == Some(process))
    }

    /// The parent of a process; `None` if it is gone or cannot be read.
    #[must_use]
    pub fn parent(&self, pid: i32) -> Option<i32> {
        self.stat(pid).ok().flatten().map(|stat| stat.parent)
    }

    /// Whether a process is on its way out, or gone. Before it can be waited for it frees its memory,
    /// which takes a while, and is in no list of a control group any more.
    #[must_use]
    pub fn is_exiting(&self, pid: i32) -> bool {
        let stat = self.stat(pid).ok().flatten();
        stat.is_none_or(|stat| stat.flags & EXITING != 0)
    }

    /// The same, or it was killed, as by the end of its parent, and a busy node is late with it.
    #[must_use]
    pub fn is_dying(&self, pid: i32) -> bool {
        let status = fs::read_to_string(self.path(pid).join("status")).unwrap_or_default();
        let mut pending = status.lines().filter_map(|line| {
            let mask = line.strip_prefix("SigPnd:");
            let mask = mask.or_else(|| line.strip_prefix("ShdPnd:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        });
        pending.any(|mask| mask & KILLED != 0) || self.is_exiting(pid)
    }

    /// Whether a process was stopped, by a signal or by who traces it.
    #[must_use]
    pub fn is_stopped(&self, pid: i32) -> bool {
        let status = fs::read_to_string(self.path(pid).join("status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:"));
        state.is_some_and(|state| state.trim_start().starts_with(['T', 't']))
    }

    /// The arguments that a process was started with; none if it is gone or cannot be read.
    #[must_use]
    pub fn arguments(&self, pid: i32) -> Vec<Vec<u8>> {
        let text = fs::read(self.path(pid).join("cmdline")).unwrap_or_default();
        text.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
    }

    /// Whether a process runs a program of this name: another version of one is another file.
    #[must_use]
    pub fn runs(&self, pid: i32, program: &str) -> bool {
        let path = fs::read_link(self.path(pid).join("exe")).unwrap_or_default();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.strip_suffix(b" (deleted)").unwrap_or(name) == program.as_bytes()
    }

    /// Whether two processes are in the same pid namespace, as far as can be seen.
    #[must_use]
    pub fn is_beside(&self, pid: i32, other: i32) -> bool {
        let namespace = |pid: i32| {
            let metadata = fs::metadata(self.path(pid).join("ns/pid")).ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        namespace(pid).is_some_and(|own| Some(own) == namespace(other))
    }

    /// Opens the root directory of a process as seen from outside, for [`super::beneath`].
    ///
    /// # Errors
    /// When the process is gone or its root may not be opened (needs `CAP_SYS_PTRACE`).
    pub fn open_root(&self, pid: i32) -> Result<OwnedFd, ProcError> {
        let path = self.path(pid).join("root");
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        open(&path, flags, Mode::empty()).map_err(|source| ProcError::Read {
            path,
            source: source.into(),
        })
    }

    /// The node's memory, and how much of it is available, in bytes.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn memory(&self) -> Result<(u64, u64), ProcError> {
        let path = self.root.join("meminfo");
        let text = read(&path)?;
        bytes(&text, "MemTotal:")
            .zip(bytes(&text, "MemAvailable:"))
            .ok_or(ProcError::Malformed { path })
    }

    /// Bytes of a process's own that are in memory, files and what it shares aside; `None` for one
    /// that is gone.
    #[must_use]
    pub fn anonymous(&self, pid: i32) -> Option<u64> {
        let text = fs::read_to_string(self.path(pid).join("status")).ok()?;
        bytes(&text, "RssAnon:")
    }

    /// The id that the kernel draws at each boot.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn boot_id(&self) -> Result<String, ProcError> {
        let path = self.root.join("sys/kernel/random/boot_id");
        Ok(read(&path)?.trim().to_owned())
    }

    fn stat(&self, pid: i32) -> Result<Option<Stat>, ProcError> {
        let path = self.path(pid).join("stat");
        match fs::read(&path) {
            Ok(bytes) => match parse_stat(&String::from_utf8_lossy(&bytes)) {
                Some(stat) => Ok(Some(stat)),
                None => Err(ProcError::Malformed { path }),
            },
            Err(error) if is_gone(&error) => Ok(None),
            Err(source) => Err(ProcError::Read { path, source }),
        }
    }
}

/// Time since boot, suspension included (`CLOCK_BOOTTIME`).
///
/// # Errors
/// When the clock cannot be read.
pub fn boottime() -> Result<Duration, ProcError> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map_err(ProcError::Clock)?;
    Ok(Duration::from(now))
}

/// The name in the second field may hold anything, brackets and line ends too: the fields are
/// counted from its last bracket.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        // The parent is field 4 of the file.
        flags: fields.nth(9 - 4 - 1)?.parse().ok()?,
        start_time: fields.nth(22 - 9 - 1)?.parse().ok()?,
    })
}

/// The bytes behind a name, which the kernel writes in units of 1 024.
fn bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(number * 1024)
}

fn read(path: &Path) -> Result<String, ProcError> {
    fs::read_to_string(path).map_err(|source| ProcError::Read {
        path: path.to_owned(),
        source,
    })
}

/// What `/proc` says of a process that has ended, or is about to.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stat_line(comm: &str, state: char, start: u64) -> String {
        let between = " 0".repeat(18);
        format!("42 ({comm}) {state}{between} {start} 0 0\n")
    }

    #[test]
    fn names_with_brackets_and_line_ends_do_not_confuse() {
        for comm in ["sh", "a) S 1 2 (b", "x\n) Z", "((", ""] {
            let stat = parse_stat(&stat_line(comm, 'R', 777)).unwrap();
            assert_eq!((stat.state, stat.start_time), ('R', 777), "{comm:?}");
        }
    }

    #[test]
    fn a_process_on_its_way_out_is_told() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("42")).unwrap();
        let proc = Proc::new(dir.path());
        for (flags, is_exiting) in [(0x40_0104, true), (0x40_0100, false), (0, false)] {
            let line = format!("42 (hog) R 1 1 1 0 -1 {flags}{} 7 0\n", " 0".repeat(12));
            fs::write(dir.path().join("42/stat"), line).unwrap();
            assert_eq!(proc.is_exiting(42), is_exiting, "{flags:#x}");
        }
        assert!(proc.is_exiting(43), "one that is gone");
        for (own, shared, is_dying) in [
            (0, 0, false),
            (0x4001, 0x1, false),
            (0x100, 0, true),
            (0, 0x100, true),
        ] {
            let status = format!("Name:\thog\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\n");
            fs::write(dir.path().join("42/status"), status).unwrap();
            assert_eq!(proc.is_dying(42), is_dying, "{own:#x} {shared:#x}");
        }
        assert!(proc.is_dying(43), "one that is gone");
    }

    #[test]
    fn a_pid_is_identified_with_its_start_time() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("42")).unwrap();
        let stat = dir.path().join("42/stat");
        let proc = Proc::new(dir.path());

        fs::write(&stat, stat_line("app", 'S', 100)).unwrap();
        let process = proc.identify(42).unwrap().unwrap();
        assert!(proc.is_alive(process).unwrap());

        fs::write(&stat, stat_line("app", 'S', 101)).unwrap();
        assert!(!proc.is_alive(process).unwrap(), "another process now");
        fs::write(&stat, stat_line("app", 'Z', 100)).unwrap();
        assert!(!proc.is_alive(process).unwrap(), "a zombie");
        fs::remove_file(&stat).unwrap();
        assert!(!proc.is_alive(process).unwrap(), "gone");
    }

    #[test]
    fn the_boot_clock_is_that_of_start_times() {
        let ticks = Proc::default().stat(1).unwrap().unwrap().start_time;
        assert!(Duration::from_millis(ticks * 10) <= boottime().unwrap());
        assert_eq!(Proc::default().boot_id().unwrap().len(), 36);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in ".*") {
            let _ = parse_stat(&text);
        }
    }
}
