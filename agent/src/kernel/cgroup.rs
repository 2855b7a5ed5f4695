//! Control groups of pods and containers, found by pod uid and container id.
//!
//! Knows the layouts that kubelet and the container runtimes make: cgroup v1 and v2, the cgroupfs
//! and the systemd driver, beneath any prefix. It reads only. The mount of the hierarchy is a
//! parameter: the agent sees the host's at a path of its own, and tests read fixtures. A process's
//! own `/proc/PID/cgroup` is not used, because it is relative to the reader's namespace.

pub mod memory;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::proc::{Proc, ProcError, ProcessId};

/// Directories between the mount and a pod, at most; kind and nested clusters add three or four.
const DEPTH: usize = 8;

/// Why control groups could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A directory or file could not be read.
    #[error("read control group {}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file does not hold pids.
    #[error("{} does not hold pids", path.display())]
    Malformed {
        /// The path.
        path: PathBuf,
    },
    /// A container id is not of the form `runtime://id`.
    #[error("container id {id:?} is not of the form runtime://id")]
    ContainerId {
        /// The id.
        id: String,
    },
    /// A process of the group could not be identified.
    #[error("identify the processes of control group {}", path.display())]
    Process {
        /// The control group.
        path: PathBuf,
        /// The reason.
        source: ProcError,
    },
}

/// The hierarchies beneath `/sys/fs/cgroup` or wherever it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchies {
    /// One for all controllers (cgroup v2).
    Unified(PathBuf),
    /// One per controller or group of controllers (cgroup v1), sorted.
    PerController(Vec<PathBuf>),
}

impl Hierarchies {
    /// Tells cgroup v1 and v2 apart.
    ///
    /// # Errors
    /// When the mount cannot be read.
    pub fn detect(mount: &Path) -> Result<Self, CgroupError> {
        if mount.join("cgroup.controllers").exists() {
            return Ok(Self::Unified(mount.to_owned()));
        }
        Ok(Self::PerController(subdirectories(mount)?))
    }

    /// The directory of a v1 controller, or the only one of v2; `None` if it is not mounted.
    #[must_use]
    pub fn controller(&self, name: &str) -> Option<&Path> {
        match self {
            Self::Unified(path) => Some(path),
            Self::PerController(paths) => paths
                .iter()
                .find(|path| file_name(path).split(',').any(|part| part == name))
                .map(PathBuf::as_path),
        }
    }
}

/// The directory of a pod in one hierarchy; `None` if there is none.
///
/// # Errors
/// When a directory cannot be read.
pub fn find_pod(hierarchy: &Path, uid: &str) -> Result<Option<PathBuf>, CgroupError> {
    let plain = format!("pod{uid}");
    // systemd takes a dash for a level of its tree.
    let slice = format!("-pod{}.slice", uid.replace('-', "_"));
    let is_pod = |name: &str| name == plain || name.ends_with(&slice);
    let mut level = vec![hierarchy.to_owned()];
    for _ in 0..DEPTH {
        let mut next = Vec::new();
        for directory in &level {
            let children = subdirectories(directory)?;
            if let Some(pod) = children.iter().find(|path| is_pod(&file_name(path))) {
                return Ok(Some(pod.clone()));
            }
            next.extend(children);
        }
        level = next;
    }
    Ok(None)
}

/// The directory of a container beneath its pod's; `None` if there is none. The id is as in the
/// API: `containerd://0123…`.
///
/// # Errors
/// When the id has another form or a directory cannot be read.
pub fn find_container(pod: &Path, id: &str) -> Result<Option<PathBuf>, CgroupError> {
    let wrong_id = || CgroupError::ContainerId { id: id.to_owned() };
    let (_, bare) = id.split_once("://").ok_or_else(wrong_id)?;
    if bare.is_empty() {
        return Err(wrong_id());
    }
    // "cri-containerd-ID.scope", "crio-ID.scope", "docker-ID.scope"; "crio-conmon-ID.scope" holds
    // the monitor of a container, not the container.
    let scope = format!("-{bare}.scope");
    let prefixed = format!("crio-{bare}");
    let is_container = |name: &str| {
        let is_scope = name.ends_with(&scope) && !name.contains("conmon");
        name == bare || name == prefixed || is_scope
    };
    let found = subdirectories(pod)?;
    Ok(found
        .into_iter()
        .find(|path| is_container(&file_name(path))))
}

/// The pids of all processes in a control group and beneath it, ascending.
///
/// # Errors
/// When a file cannot be read; a group that vanishes meanwhile has no processes.
pub fn pids(group: &Path) -> Result<Vec<i32>, CgroupError> {
    let mut pids = Vec::new();
    let mut waiting = vec![group.to_owned()];
    while let Some(group) = waiting.pop() {
        pids.extend(own_pids(&group)?);
        waiting.extend(subdirectories(&group)?);
    }
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Where in a container's control group a process can join it: the group itself, or where the
/// container has groups of its own, as systemd and crun make them, the first beneath it that has
/// processes. A group whose controllers are passed on takes none (cgroup-v2.rst, "No Internal Process
/// Constraint").
///
/// # Errors
/// When a file cannot be read.
pub fn joinable(container: &Path) -> Result<PathBuf, CgroupError> {
    let mut level = vec![container.to_owned()];
    while !level.is_empty() {
        let mut next = Vec::new();
        for group in level {
            if !own_pids(&group)?.is_empty() {
                return Ok(group);
            }
            next.extend(subdirectories(&group)?);
        }
        level = next;
    }
    Ok(container.to_owned())
}

/// All live processes in a control group and beneath it, by pid.
///
/// # Errors
/// When a file cannot be read.
pub fn processes(proc: &Proc, group: &Path) -> Result<Vec<ProcessId>, CgroupError> {
    let mut processes = Vec::new();
    for pid in pids(group)? {
        let found = proc.identify(pid);
        let found = found.map_err(|source| CgroupError::Process {
            path: group.to_owned(),
            source,
        })?;
        processes.extend(found);
    }
    Ok(processes)
}

/// The first process of a container, which is the oldest in its control group; `None` if none
/// lives.
///
/// # Errors
/// When a file cannot be read.
pub fn init(proc: &Proc, container: &Path) -> Result<Option<ProcessId>, CgroupError> {
    let processes = processes(proc, container)?;
    Ok(processes
        .into_iter()
        .min_by_key(|process| (process.start_time, process.pid)))
}

/// The CPU limit of a control group itself, in thousandths of a core; `None` without one.
///
/// # Errors
/// When its files cannot be read.
pub fn cpu_limit(group: &Path) -> Result<Option<u64>, CgroupError> {
    let (quota, period) = match read(&group.join("cpu.max")) {
        Ok(text) => {
            let mut words = text.split_ascii_whitespace().map(str::to_owned);
            (words.next(), words.next())
        }
        Err(CgroupError::Read { source, .. }) if is_gone(&source) => (
            Some(read(&group.join("cpu.cfs_quota_us"))?),
            Some(read(&group.join("cpu.cfs_period_us"))?),
        ),
        Err(error) => return Err(error),
    };
    // "max" or -1: no limit.
    let number = |text: Option<String>| text.and_then(|t| t.trim().parse::<u64>().ok());
    Ok(number(quota)
        .zip(number(period).filter(|period| *period > 0))
        .map(|(quota, period)| quota.saturating_mul(1000) / period))
}

fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|source| CgroupError::Read {
        path: path.to_owned(),
        source,
    })
}

fn own_pids(group: &Path) -> Result<Vec<i32>, CgroupError> {
    let path = group.join("cgroup.procs");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        // A threaded group has its processes in the group above.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(Vec::new()),
        Err(source) => return Err(CgroupError::Read { path, source }),
    };
    let pids = text.lines().map(str::parse).collect::<Result<_, _>>();
    pids.map_err(|_| CgroupError::Malformed { path })
}

/// The directories in a directory, sorted, links to directories not among them; none if it is gone.
fn subdirectories(directory: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |source| CgroupError::Read {
        path: directory.to_owned(),
        source,
    };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        Err(source) => return Err(failed(source)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if is_gone(&error) => continue,
            Err(source) => return Err(failed(source)),
        };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(entry.path());
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// What a control group says that is being removed.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UID: &str = "9a1f3c52-0c1e-4a55-8a0b-3c1f0e9d7b11";
    const OTHER: &str = "9a1f3c52-0c1e-4a55-8a0b-3c1f0e9d7b12";
    const ID: &str = "4f0c8a9e7d6b5a4c3d2e1f00112233445566778899aabbccddeeff0011223344";

    /// A tree of control groups, each with the pids that are directly in it.
    fn tree(groups: &[(&str, &[i32])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, pids) in groups {
            let group = dir.path().join(path);
            fs::create_dir_all(&group).unwrap();
            let lines: Vec<String> = pids.iter().map(ToString::to_string).collect();
            fs::write(group.join("cgroup.procs"), lines.join("\n")).unwrap();
        }
        dir
    }

    fn systemd_slice(uid: &str, class: &str) -> String {
        let uid = uid.replace('-', "_");
        let class = format!("kubepods.slice/kubepods-{class}.slice/kubepods-{class}");
        format!("{class}-pod{uid}.slice")
    }

    fn found(mount: &Path, uid: &str, id: &str) -> Option<PathBuf> {
        let pod = find_pod(mount, uid).unwrap()?;
        find_container(&pod, &format!("containerd://{id}")).unwrap()
    }

    #[test]
    fn every_layout_is_known() {
        let plain = format!("kubepods/burstable/pod{UID}/{ID}");
        let guaranteed = format!("kubepods/pod{UID}/{ID}");
        let slice = systemd_slice(UID, "besteffort");
        let containerd = format!("{slice}/cri-containerd-{ID}.scope");
        let crio = format!("{slice}/crio-{ID}.scope");
        let crio_cgroupfs = format!("kubepods/besteffort/pod{UID}/crio-{ID}");
        let kind = format!("kubelet.slice/kubelet-{containerd}");
        let nested = format!("system.slice/docker-0123.scope/kubelet/{plain}");
        for path in [
            plain,
            guaranteed,
            containerd,
            crio,
            crio_cgroupfs,
            kind,
            nested,
        ] {
            let dir = tree(&[("system.slice/sshd.service", &[]), (&path, &[10])]);
            let expected = dir.path().join(&path);
            assert_eq!(found(dir.path(), UID, ID), Some(expected));
            assert_eq!(found(dir.path(), OTHER, ID), None);
        }
    }

    #[test]
    fn a_containers_monitor_is_not_the_container() {
        let slice = systemd_slice(UID, "burstable");
        let monitor = format!("{slice}/crio-conmon-{ID}.scope");
        let container = format!("{slice}/crio-{ID}.scope");
        let dir = tree(&[(&monitor, &[5]), (&container, &[6])]);
        assert_eq!(found(dir.path(), UID, ID), Some(dir.path().join(container)));

        let dir = tree(&[(&monitor, &[5])]);
        assert_eq!(found(dir.path(), UID, ID), None);
    }

    #[test]
    fn container_ids_of_another_form_are_refused() {
        for id in ["", ID, "containerd://"] {
            let refused = find_container(Path::new("/nowhere"), id);
            assert!(matches!(refused, Err(CgroupError::ContainerId { .. })));
        }
    }

    #[test]
    fn both_versions_are_told_apart() {
        let dir = tree(&[("kubepods", &[])]);
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory").unwrap();
        let unified = Hierarchies::detect(dir.path()).unwrap();
        assert_eq!(unified, Hierarchies::Unified(dir.path().to_owned()));
        assert_eq!(unified.controller("cpu"), Some(dir.path()));

        let dir = tree(&[("cpu,cpuacct", &[]), ("memory", &[])]);
        symlink("cpu,cpuacct", dir.path().join("cpu")).unwrap();
        let per_controller = Hierarchies::detect(dir.path()).unwrap();
        let cpu = dir.path().join("cpu,cpuacct");
        assert_eq!(per_controller.controller("cpuacct"), Some(&cpu as &Path));
        assert_eq!(per_controller.controller("pids"), None);
    }

    #[test]
    fn a_container_is_joined_where_its_processes_are() {
        for (groups, expected) in [
            (&[("c", &[31][..]), ("c/app", &[30])][..], "c"),
            (&[("c", &[]), ("c/app", &[30])], "c/app"),
            (
                &[("c", &[]), ("c/a", &[]), ("c/a/deep", &[9]), ("c/b", &[8])],
                "c/b",
            ),
            (&[("c", &[]), ("c/app", &[])], "c"),
        ] {
            let dir = tree(groups);
            let found = joinable(&dir.path().join("c")).unwrap();
            assert_eq!(found, dir.path().join(expected));
        }
    }

    #[test]
    fn the_oldest_process_beneath_is_the_containers_first() {
        let dir = tree(&[("c", &[31]), ("c/app", &[30, 32]), ("c/app/deep", &[33])]);
        let group = dir.path().join("c");
        assert_eq!(pids(&group).unwrap(), [30, 31, 32, 33]);

        let proc_dir = tempfile::tempdir().unwrap();
        for (pid, start) in [(30, 900), (31, 500), (32, 500)] {
            let between = " 0".repeat(18);
            let directory = proc_dir.path().join(pid.to_string());
            fs::create_dir(&directory).unwrap();
            let stat = format!("{pid} (app) S{between} {start} 0");
            fs::write(directory.join("stat"), stat).unwrap();
        }
        let proc = Proc::new(proc_dir.path());
        assert_eq!(processes(&proc, &group).unwrap().len(), 3, "33 has ended");
        assert_eq!(init(&proc, &group).unwrap().unwrap().pid, 31);

        fs::remove_dir_all(&group).unwrap();
        assert_eq!(init(&proc, &group).unwrap(), None);
    }

    #[test]
    fn cpu_limits_are_read_in_both_forms() {
        let table = [
            (&[("cpu.max", "50000 100000\n")][..], Some(500)),
            (&[("cpu.max", "max 100000\n")], None),
            (
                &[
                    ("cpu.cfs_quota_us", "150000\n"),
                    ("cpu.cfs_period_us", "100000\n"),
                ],
                Some(1500),
            ),
            (
                &[
                    ("cpu.cfs_quota_us", "-1\n"),
                    ("cpu.cfs_period_us", "100000\n"),
                ],
                None,
            ),
        ];
        for (files, limit) in table {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                fs::write(dir.path().join(name), text).unwrap();
            }
            assert_eq!(cpu_limit(dir.path()).unwrap(), limit, "{files:?}");
        }
        assert!(cpu_limit(Path::new("/nowhere")).is_err());
    }
}
