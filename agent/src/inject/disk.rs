//! A disk fault: a file without a name on a container's volume. The injector has it open, and a child in
//! the container's control group makes it grow: with the injector both are gone, and the space is back.

use std::{
    fs::File,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{OFlag, open},
    sys::stat::Mode,
};
use windtunnel_crds::{disk::DiskFill, injection::NodeContainer};
use windtunnel_runtime::chain;

use super::{Effect, cpu, memory, scratch, volume};
use crate::{
    kernel::{
        cgroup,
        child::Child,
        mounts::{self, Mount},
        proc::{Proc, ProcessId},
        space::{self, Space},
    },
    look,
    model::{Act, ContainerEntry, Counts, FillAct, Until},
    node::Node,
    prepare::Refusal,
    targets::Container,
};

/// The controller of the control group that what is taken of a volume in memory is charged to.
pub(super) const CONTROLLER: &str = "memory";
/// File systems that are the node's own and nobody else's.
const OWN: [&str; 7] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"];
/// What a node cannot be without: its own files, kubelet's, the runtime's, logs.
const NEEDED: [&str; 10] = [
    "/",
    "/var/lib",
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/etcd",
    "/var/log",
    "/run",
    "/tmp",
];
/// What stands in the path of every emptyDir, wherever kubelet keeps them.
const EMPTY_DIR: &str = "/kubernetes.io~empty-dir/";
/// The least that is worth it.
const LEAST: u64 = 1 << 20;
/// How long everything may take to be taken before a part is proof enough.
const SLOW: Duration = Duration::from_secs(5);

/// What is to be taken, once the volume was found to be one that may be filled.
pub(super) fn plan(
    fault: &DiskFill,
    container: &NodeContainer,
    found: &Container,
    node: &mut Node,
) -> Result<Act, Refusal> {
    let DiskFill {
        volume,
        size,
        percent,
    } = fault;
    volume::check(volume, container)?;
    let (mount, space) = look::at_room(&mut node.supervisor, found.init, volume)?;
    if !OWN.contains(&mount.kind.as_str()) {
        let (kind, own) = (&mount.kind, OWN.join(", "));
        let message = format!("{volume} is on {kind}, which is not filled; these are: {own}");
        return Err(("FileSystem", message));
    }
    let unreadable = |message| ("NodeUnreadable", message);
    let is_needed = is_needed(&mount, found.init).map_err(unreadable)?;
    if is_needed && !node.settings.fill_node_disk {
        let message = format!(
            "{volume} is on {}, which the node itself needs; the chart's value agent.fillNodeDisk allows to fill that, but for a fifth",
            mount.source
        );
        return Err(("NodeDisk", message));
    }
    let space = space.map_err(|message| ("FileSystem", message))?;
    let limit = container.storage_limits.get(volume).copied();
    let act = FillAct {
        volume: volume.clone(),
        until: match (size, percent) {
            (Some(size), _) => Until::Size(size.bytes()),
            (None, percent) => {
                Until::Percent(percent.map_or(100.0, windtunnel_crds::units::Percent::get))
            }
        },
        reserve: if is_needed { space.total / 5 } else { 0 },
        limit: limit.map(|limit| u64::try_from(limit).unwrap_or(0)),
    };
    let bytes = judge(&act, space)?;
    if mount.kind == "tmpfs" {
        fits_in_memory(bytes, found)?;
    }
    Ok(Act::Fill(act))
}

/// Whether the node itself needs the file system of a mount of a container: it is one of those that
/// every node needs, or kubelet keeps its directories there, or the runtime the containers'.
fn is_needed(mount: &Mount, init: ProcessId) -> Result<bool, String> {
    let proc = Proc::default();
    let of = |pid| mounts::of_process(&proc, pid).map_err(|e| chain(&e));
    let (nodes, own) = (of(1)?, of(init.pid)?);
    Ok(is_among(&nodes, &own, mount))
}

fn is_among(nodes: &[Mount], own: &[Mount], mount: &Mount) -> bool {
    let needed = |path: &Path| {
        mounts::covering(nodes, path).is_some_and(|node| node.shares_file_system_with(mount))
    };
    let root = mounts::covering(own, Path::new("/"));
    let is_with_containers = root.is_some_and(|root| match &root.upper {
        Some(upper) => needed(upper),
        None => root.shares_file_system_with(mount),
    });
    is_with_containers
        || mount.root.contains(EMPTY_DIR)
        || NEEDED.iter().any(|path| needed(Path::new(path)))
}

/// How much is taken of a file system, or why that cannot be.
fn judge(act: &FillAct, space: Space) -> Result<u64, Refusal> {
    let wanted = wanted(act, space);
    if let Some(limit) = act.limit.filter(|limit| wanted > *limit) {
        let message = format!(
            "{wanted} bytes are to be taken at {}, where the pod may store {limit} by its sizeLimit or its ephemeral-storage limits",
            act.volume
        );
        return Err(("StorageLimit", message));
    }
    let room = room(act, space);
    if wanted > room || wanted < LEAST {
        let message = format!(
            "{wanted} bytes are to be taken at {}, where {} of {} are in use and {room} can be taken",
            act.volume,
            space.used(),
            space.total
        );
        return Err(("NoSpace", message));
    }
    Ok(wanted)
}

/// How much is to be taken where so much is in use.
fn wanted(act: &FillAct, space: Space) -> u64 {
    match act.until {
        Until::Size(bytes) => bytes,
        Until::Percent(percent) if percent < 100.0 => {
            let all = space.used() + space.available;
            memory::share(all, percent).saturating_sub(space.used())
        }
        Until::Percent(_) => room(act, space),
    }
}

/// How much can be taken; what is kept for root only where everything is to be.
fn room(act: &FillAct, space: Space) -> u64 {
    if act.reserve == 0 && act.until == Until::Percent(100.0) {
        space.free
    } else {
        space.available.saturating_sub(act.reserve)
    }
}

/// Files in memory are memory of the container, and of the node.
fn fits_in_memory(bytes: u64, found: &Container) -> Result<(), Refusal> {
    let unreadable = |e: cgroup::CgroupError| ("NodeUnreadable", chain(&e));
    let limit = cgroup::memory::limit(&found.cgroup).map_err(unreadable)?;
    let used = cgroup::memory::usage(&found.cgroup).map_err(unreadable)?;
    if let Some(limit) = limit.filter(|limit| used + bytes > memory::below(*limit)) {
        let message = format!(
            "{bytes} bytes of a volume in memory are to be taken; of the container's {limit} bytes of memory {used} are in use"
        );
        return Err(("NoHeadroom", message));
    }
    memory::spare_the_node(bytes).map(drop)
}

/// A file system that was filled.
struct Filled {
    file: File,
    child: Child,
    act: FillAct,
    is_all: bool,
    bytes: u64,
    available: u64,
    since: Instant,
}

pub(super) fn apply(container: &ContainerEntry, act: &FillAct) -> Result<Box<dyn Effect>, String> {
    let (opened, _) = volume::open(container.init, &act.volume)?;
    let file = space::nameless(opened.as_fd()).map_err(|e| e.to_string())?;
    // The mount is not needed any more, and is not to be held.
    drop(opened);
    Ok(Box::new(Filled::start(
        &container.cgroup,
        file,
        act.clone(),
    )?))
}

impl Filled {
    fn start(group: &Path, file: File, act: FillAct) -> Result<Self, String> {
        let space = Space::of(&file).map_err(|e| e.to_string())?;
        let bytes = wanted(&act, space).min(room(&act, space));
        let bytes = bytes.min(act.limit.unwrap_or(u64::MAX));
        let arguments = [
            "fill".to_owned(),
            format!(
                "--file=/proc/{}/fd/{}",
                std::process::id(),
                file.as_raw_fd()
            ),
            format!("--bytes={bytes}"),
            format!("--reserve={}", act.reserve),
        ];
        Ok(Self {
            child: Child::start(group, &arguments).map_err(|e| chain(&e))?,
            file,
            act,
            is_all: false,
            bytes: 0,
            available: space.available,
            since: Instant::now(),
        })
    }

    /// Reads what the file takes and what is left.
    fn read(&mut self) -> Result<(), String> {
        for line in self.child.lines().map_err(|e| chain(&e))? {
            if line.starts_with("failed") {
                return Err(line);
            }
            self.is_all |= line.ends_with(" 1");
        }
        if let Some(status) = self.child.ended() {
            return Err(format!("what fills the disk has ended: {status}"));
        }
        let (bytes, is_nameless) = space::taken(&self.file).map_err(|e| e.to_string())?;
        if !is_nameless {
            return Err("the file that takes the space has a name".to_owned());
        }
        self.bytes = bytes;
        self.available = Space::of(&self.file).map_err(|e| e.to_string())?.available;
        Ok(())
    }
}

impl Effect for Filled {
    fn proof(&mut self) -> Result<Option<String>, String> {
        self.read()?;
        let is_enough = self.is_all || self.since.elapsed() >= SLOW;
        Ok((is_enough && self.bytes > 0).then(|| {
            format!(
                "a file without a name takes {} bytes at {}, {} are left",
                self.bytes, self.act.volume, self.available
            )
        }))
    }

    fn note(&self) -> String {
        match self.act.limit {
            Some(limit) => format!(
                "of {limit} bytes that the pod may store there; kubelet does not see what is taken, and does not evict for it"
            ),
            None => String::new(),
        }
    }

    fn check(&mut self) -> Result<Counts, String> {
        self.read()?;
        Ok(Counts::measured([
            ("bytes", self.bytes),
            ("freeBytes", self.available),
        ]))
    }
}

/// Fills some of a file system of this process's own.
pub(super) fn trial(cgroups: &Path) -> Result<(), String> {
    let own = cpu::own_group(cgroups, CONTROLLER)?;
    let place = scratch::enter()?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let directory = open(place, flags, Mode::empty()).map_err(|e| e.to_string())?;
    let file = space::nameless(directory.as_fd()).map_err(|e| e.to_string())?;
    let act = FillAct {
        volume: place.to_owned(),
        until: Until::Size(LEAST),
        reserve: 0,
        limit: None,
    };
    cpu::until_proved(&mut Filled::start(&own, file, act)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    /// A tenth is kept for root, half of the rest is in use.
    const SPACE: Space = Space {
        total: 10 * GIB,
        free: 5 * GIB + GIB / 2,
        available: 4 * GIB + GIB / 2,
    };

    fn act(until: Until) -> FillAct {
        FillAct {
            volume: "/data".to_owned(),
            until,
            reserve: 0,
            limit: None,
        }
    }

    #[test]
    fn a_share_counts_what_is_in_use_already() {
        assert_eq!(judge(&act(Until::Size(GIB)), SPACE), Ok(GIB));
        assert_eq!(judge(&act(Until::Percent(75.0)), SPACE), Ok(9 * GIB / 4));
        let all = act(Until::Percent(100.0));
        assert_eq!(judge(&all, SPACE), Ok(SPACE.free), "root's too");
        let reserve = SPACE.total / 5;
        let all = FillAct { reserve, ..all };
        assert_eq!(judge(&all, SPACE), Ok(SPACE.available - reserve));
    }

    #[test]
    fn what_cannot_be_taken_is_refused() {
        let reserve = SPACE.total / 5;
        let limit = Some(GIB);
        let all = || act(Until::Percent(100.0));
        for (act, reason) in [
            (act(Until::Size(5 * GIB)), "NoSpace"),
            (act(Until::Percent(50.0)), "NoSpace"),
            (
                FillAct {
                    reserve,
                    ..act(Until::Size(3 * GIB))
                },
                "NoSpace",
            ),
            (
                FillAct {
                    reserve,
                    ..act(Until::Percent(90.0))
                },
                "NoSpace",
            ),
            (
                FillAct {
                    limit,
                    ..act(Until::Size(2 * GIB))
                },
                "StorageLimit",
            ),
            (FillAct { limit, ..all() }, "StorageLimit"),
        ] {
            assert_eq!(judge(&act, SPACE).unwrap_err().0, reason, "{act:?}");
        }
    }

    #[test]
    fn a_nodes_disks_are_its_own_kubelets_and_the_runtimes() {
        let mount = |device: &str, root: &str, point: &str, upper: Option<&str>| Mount {
            id: 1,
            device: device.to_owned(),
            root: root.to_owned(),
            point: point.into(),
            kind: "ext4".to_owned(),
            source: format!("/dev/{device}"),
            upper: upper.map(Into::into),
        };
        let nodes = [
            mount("8:1", "/", "/", None),
            mount("8:2", "/", "/var/lib/rancher", None),
            mount("8:3", "/", "/mnt/disks/a", None),
        ];
        let upper = "/var/lib/rancher/k3s/agent/containerd/snapshots/7/fs";
        let overlay = [mount("0:40", "/", "/", Some(upper))];
        let plain = [mount("8:2", "/containers/7", "/", None)];
        for (what, volume, own, expected) in [
            ("root's disk", ("8:1", "/srv/x"), &overlay, true),
            (
                "the runtime's disk",
                ("8:2", "/local/pvc-1"),
                &overlay,
                true,
            ),
            ("the container's own disk", ("8:2", "/pvc-1"), &plain, true),
            (
                "kubelet's disk elsewhere",
                ("8:4", "/pods/u/volumes/kubernetes.io~empty-dir/cache"),
                &overlay,
                true,
            ),
            ("a disk of its own", ("8:3", "/pvc-1"), &overlay, false),
            ("memory", ("0:77", "/"), &overlay, false),
        ] {
            let volume = mount(volume.0, volume.1, "/data", None);
            assert_eq!(is_among(&nodes, own, &volume), expected, "{what}");
        }
    }

    #[test]
    fn the_roots_file_system_is_needed_and_memory_of_its_own_is_not() {
        let proc = Proc::default();
        let own = i32::try_from(std::process::id()).unwrap();
        let own = proc.identify(own).unwrap().unwrap();
        let nodes = mounts::of_process(&proc, 1).unwrap();
        let root = mounts::covering(&nodes, Path::new("/")).unwrap();
        assert_eq!(is_needed(root, own), Ok(true));
        let other = Mount {
            device: "0:99999".to_owned(),
            source: "tmpfs".to_owned(),
            ..root.clone()
        };
        assert_eq!(is_needed(&other, own), Ok(false));
    }
}
