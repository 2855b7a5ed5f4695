//! What every user-mode kernel of the harness needs as its first steps: mounts and power-off.
//!
//! Runs as init of such a kernel, never on the machine itself. The root is the machine's, through
//! hostfs and read-only; everything that is written goes to a tmpfs or to the block device.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

use super::isolation::mount_tmpfs;
use super::layout;

/// Where programs are: a kernel starts its init without a word about that.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const NONE: MsFlags = MsFlags::empty();

/// Mounts what programs take for granted, and a tmpfs on /run with the harness's state in it.
pub(crate) fn mount_base() -> Result<()> {
    mount_new("proc", "/proc", "proc", NONE, "")?;
    mount_new("sysfs", "/sys", "sysfs", NONE, "")?;
    make_dirs(&["/dev/pts", "/dev/shm"])?;
    mount_new("devpts", "/dev/pts", "devpts", NONE, "ptmxmode=666")?;
    mount_tmpfs("/dev/shm", "mode=1777")?;
    for (name, target) in [
        ("fd", "fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ] {
        let path = Path::new("/dev").join(name);
        symlink(Path::new("/proc/self").join(target), &path)
            .with_context(|| format!("link {}", path.display()))?;
    }
    mount_tmpfs("/run", "mode=755")?;
    make_dirs(&[layout::STATE, "/run/lock"])?;
    mount_host(layout::STATE, MsFlags::MS_RDONLY)?;
    // As systemd mounts it: without nsdelegate a move into a foreign cgroup works here and fails
    // on real nodes.
    mount_new("cgroup2", "/sys/fs/cgroup", "cgroup2", NONE, "nsdelegate")?;
    mount_new("none", "/", "", MsFlags::MS_REC | MsFlags::MS_SHARED, "")
}

/// Mounts a directory of the machine, as the kernel's own process sees it, at the same place.
pub(crate) fn mount_host(path: &str, flags: MsFlags) -> Result<()> {
    mount_new("none", path, "hostfs", flags, path)
}

/// Mounts the kernel's block device.
pub(crate) fn mount_disk(target: &str) -> Result<()> {
    // The device cannot write zeroes by itself: without this the kernel tries, and complains.
    mount_new("/dev/ubda", target, "ext4", NONE, "noinit_itable")
}

/// Mounts a file system, saying what and where when that fails.
pub(crate) fn mount_new(
    source: &str,
    target: &str,
    kind: &str,
    flags: MsFlags,
    data: &str,
) -> Result<()> {
    mount(Some(source), target, Some(kind), flags, Some(data))
        .with_context(|| format!("mount {kind} {source} on {target}"))
}

/// Creates directories and their parents.
pub(crate) fn make_dirs(paths: &[&str]) -> Result<()> {
    for path in paths {
        fs::create_dir_all(path).with_context(|| format!("create {path}"))?;
    }
    Ok(())
}

/// Ends this kernel. Nothing is flushed: the caller has written what must last.
pub(crate) fn power_off() -> Result<()> {
    reboot(RebootMode::RB_POWER_OFF).context("power off")?;
    Ok(())
}
