//! Network namespaces: which one a process is in, work inside one, an empty one for trials.
//!
//! A namespace is known by its inode, never by a name or a pid. No thread of the caller ever moves:
//! work inside a namespace is done by a thread that ends afterwards. Holding a [`NetNs`] keeps the
//! namespace and its links alive; the agent must not hold one of a pod longer than it needs.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};

use super::proc::{Proc, ProcError, ProcessId, is_gone};

/// Why a namespace could not be found or used.
#[derive(Debug, thiserror::Error)]
pub enum NetNsError {
    /// The namespace's file could not be opened or read.
    #[error("open network namespace {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason; `NotFound` when the process is gone.
        source: io::Error,
    },
    /// The thread for work inside a namespace could not be started.
    #[error("start a thread for network namespace {id}")]
    Thread {
        /// The namespace.
        id: NetNsId,
        /// The reason.
        source: io::Error,
    },
    /// The namespace could not be entered (needs `CAP_SYS_ADMIN`).
    #[error("enter network namespace {id}")]
    Enter {
        /// The namespace.
        id: NetNsId,
        /// The reason.
        source: Errno,
    },
    /// The work inside the namespace panicked.
    #[error("work in network namespace {id} panicked")]
    Panicked {
        /// The namespace.
        id: NetNsId,
    },
    /// No new namespace could be made (needs `CAP_SYS_ADMIN`).
    #[error("create a network namespace")]
    Create(#[source] io::Error),
    /// The processes could not be listed.
    #[error("list processes")]
    Processes(#[from] ProcError),
}

impl NetNsError {
    /// The process whose namespace it was to be is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Open { source, .. } if is_gone(source))
    }
}

/// Identity of a network namespace: device and inode of its file, unique until reboot while it lives.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct NetNsId {
    /// Device of the nsfs.
    pub device: u64,
    /// Inode in it.
    pub inode: u64,
}

impl std::fmt::Display for NetNsId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.device, self.inode)
    }
}

impl NetNsId {
    /// The namespace that a process is in; `None` if the process is gone.
    ///
    /// # Errors
    /// When its namespace may not be seen (needs `CAP_SYS_PTRACE`).
    pub fn of_pid(proc: &Proc, pid: i32) -> Result<Option<Self>, NetNsError> {
        let path = netns_path(proc, pid);
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(Self::from(&metadata))),
            Err(error) if is_gone(&error) => Ok(None),
            Err(source) => Err(NetNsError::Open { path, source }),
        }
    }
}

impl From<&std::fs::Metadata> for NetNsId {
    fn from(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

/// A network namespace that is held open.
#[derive(Debug)]
pub struct NetNs {
    fd: OwnedFd,
    id: NetNsId,
}

impl NetNs {
    /// The namespace of a process.
    ///
    /// # Errors
    /// When the process is gone or its namespace may not be opened (needs `CAP_SYS_PTRACE`).
    pub fn of_pid(proc: &Proc, pid: i32) -> Result<Self, NetNsError> {
        Self::open(&netns_path(proc, pid))
    }

    /// A new namespace, empty but for a loopback link that is down. Nothing refers to it but the
    /// value returned: it is gone with the last of its sockets, links and holders.
    ///
    /// # Errors
    /// When the kernel refuses (needs `CAP_SYS_ADMIN`).
    pub fn scratch() -> Result<Self, NetNsError> {
        let made = thread::Builder::new()
            .name("netns-scratch".to_owned())
            .spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
                let file = File::open("/proc/thread-self/ns/net")?;
                let id = NetNsId::from(&file.metadata()?);
                Ok(Self {
                    fd: file.into(),
                    id,
                })
            })
            .map_err(NetNsError::Create)?;
        let panicked = || NetNsError::Create(io::Error::other("the thread panicked"));
        made.join()
            .map_err(|_| panicked())?
            .map_err(NetNsError::Create)
    }

    fn open(path: &Path) -> Result<Self, NetNsError> {
        let open = || {
            let file = File::open(path)?;
            let id = NetNsId::from(&file.metadata()?);
            Ok((OwnedFd::from(file), id))
        };
        match open() {
            Ok((fd, id)) => Ok(Self { fd, id }),
            Err(source) => Err(NetNsError::Open {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Its identity.
    #[must_use]
    pub fn id(&self) -> NetNsId {
        self.id
    }

    /// Whether this is the namespace of pid 1, the node's own.
    ///
    /// # Errors
    /// When pid 1's namespace may not be seen.
    pub fn is_host(&self, proc: &Proc) -> Result<bool, NetNsError> {
        Ok(NetNsId::of_pid(proc, 1)? == Some(self.id))
    }

    /// Does something in a thread that is in this namespace and ends afterwards.
    ///
    /// Sockets opened and processes started there stay in the namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered (needs `CAP_SYS_ADMIN`) or the work panicked.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetNsError> {
        let id = self.id;
        thread::scope(|scope| {
            let inside = thread::Builder::new()
                .name("netns".to_owned())
                .spawn_scoped(scope, || {
                    setns(&self.fd, CloneFlags::CLONE_NEWNET).map(|()| work())
                })
                .map_err(|source| NetNsError::Thread { id, source })?;
            inside
                .join()
                .map_err(|_| NetNsError::Panicked { id })?
                .map_err(|source| NetNsError::Enter { id, source })
        })
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A live process in a namespace; `None` if there is none.
///
/// A process whose namespace may not be seen counts as elsewhere: prove first, on pid 1, that
/// namespaces can be seen at all.
///
/// # Errors
/// When the processes cannot be listed.
pub fn find_process(proc: &Proc, id: NetNsId) -> Result<Option<ProcessId>, NetNsError> {
    for pid in proc.pids()? {
        if is_in(proc, pid, id)
            && let Some(process) = proc.identify(pid)?
        {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// How many live processes are in a namespace, those in `except` not counted; see
/// [`find_process`] for those that may not be seen.
///
/// # Errors
/// When the processes cannot be listed.
pub fn count_processes(
    proc: &Proc,
    id: NetNsId,
    except: &BTreeSet<i32>,
) -> Result<usize, NetNsError> {
    let pids = proc.pids()?;
    let others = pids.into_iter().filter(|pid| !except.contains(pid));
    Ok(others.filter(|pid| is_in(proc, *pid, id)).count())
}

/// A process that ended meanwhile, is a zombie or may not be seen is in no namespace.
fn is_in(proc: &Proc, pid: i32, id: NetNsId) -> bool {
    matches!(NetNsId::of_pid(proc, pid), Ok(Some(found)) if found == id)
}

fn netns_path(proc: &Proc, pid: i32) -> PathBuf {
    proc.path(pid).join("ns/net")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A `/proc` with these processes, each in a namespace that is a file of that name.
    fn fixture(processes: &[(i32, &str)]) -> (tempfile::TempDir, Proc) {
        let dir = tempfile::tempdir().unwrap();
        for (pid, netns) in processes {
            let ns = dir.path().join(pid.to_string()).join("ns");
            fs::create_dir_all(&ns).unwrap();
            let target = dir.path().join(netns);
            fs::write(&target, "").unwrap();
            symlink(&target, ns.join("net")).unwrap();
            let stat = format!("{pid} (app) S 1{}", " 0".repeat(48));
            fs::write(ns.with_file_name("stat"), stat).unwrap();
        }
        let proc = Proc::new(dir.path());
        (dir, proc)
    }

    #[test]
    fn processes_are_found_by_the_inode_of_their_namespace() {
        let (_dir, proc) = fixture(&[(1, "host"), (20, "pod"), (21, "pod"), (30, "other")]);
        let pod = NetNsId::of_pid(&proc, 20).unwrap().unwrap();

        assert_eq!(find_process(&proc, pod).unwrap().unwrap().pid, 20);
        assert_eq!(count_processes(&proc, pod, &BTreeSet::new()).unwrap(), 2);
        let except = BTreeSet::from([20, 30]);
        assert_eq!(count_processes(&proc, pod, &except).unwrap(), 1);
    }

    #[test]
    fn a_namespace_without_a_process_is_not_found() {
        let (dir, proc) = fixture(&[(1, "host"), (20, "pod")]);
        let pod = NetNsId::of_pid(&proc, 20).unwrap().unwrap();
        fs::remove_dir_all(dir.path().join("20")).unwrap();

        assert_eq!(find_process(&proc, pod).unwrap(), None);
        assert_eq!(NetNsId::of_pid(&proc, 20).unwrap(), None);
    }

    #[test]
    fn the_hosts_namespace_is_that_of_pid_1() {
        let (_dir, proc) = fixture(&[(1, "host"), (2, "host"), (20, "pod")]);
        assert!(NetNs::of_pid(&proc, 2).unwrap().is_host(&proc).unwrap());
        assert!(!NetNs::of_pid(&proc, 20).unwrap().is_host(&proc).unwrap());
    }
}
