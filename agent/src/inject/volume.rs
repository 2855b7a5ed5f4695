//! A volume of a container, found without trust in what the container shows.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use windtunnel_crds::injection::NodeContainer;
use windtunnel_runtime::chain;

use crate::{
    kernel::{
        beneath,
        mounts::{self, Mount},
        proc::{Proc, ProcessId},
    },
    prepare::Refusal,
};

/// Refuses what the pod has no volume at.
pub(super) fn check(volume: &str, container: &NodeContainer) -> Result<(), Refusal> {
    if container.volume_mounts.iter().any(|at| at == volume) {
        return Ok(());
    }
    let name = &container.name;
    let message = format!("{volume} is not where container {name} has a volume mounted");
    Err(("NotAVolume", message))
}

/// The volume's root, opened beneath the root of the container's first process. It must be a mount
/// of that process, at that very path: a link to anywhere else is refused.
pub(crate) fn open(init: ProcessId, volume: &str) -> Result<(OwnedFd, Mount), String> {
    let proc = Proc::default();
    let root = proc.open_root(init.pid).map_err(|e| chain(&e))?;
    let relative = Path::new(volume.trim_start_matches('/'));
    let relative = if volume == "/" {
        Path::new(".")
    } else {
        relative
    };
    let opened = beneath::open(root.as_fd(), relative).map_err(|e| chain(&e))?;
    let id = mounts::id_of(opened.as_fd()).map_err(|e| chain(&e))?;
    let mounted = mounts::of_process(&proc, init.pid).map_err(|e| chain(&e))?;
    if !proc.is_alive(init).map_err(|e| chain(&e))? {
        return Err("the container has ended".to_owned());
    }
    let is_there = |mount: &Mount| mount.id == id && mount.point == Path::new(volume);
    let mount = mounted.into_iter().find(is_there);
    let mount = mount.ok_or_else(|| format!("nothing is mounted at {volume} in the container"))?;
    Ok((opened, mount))
}
