//! Namespaces that a cluster lives in, and the ties that make it die with its holder.
//!
//! The holder unshares network, mount and pid namespace; its first child is the init of the new
//! pid namespace and is killed by the kernel when the holder ends, and everything else with it.
//! Nothing here may leave a name on the machine: no named netns, no mount outside, no file.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::ExitStatus;

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use super::layout;

/// A file of the machine that the cluster needs under [`layout::STATE`].
#[derive(Debug)]
pub(crate) struct Import<'a> {
    pub(crate) from: &'a Path,
    /// Relative to [`layout::STATE`].
    pub(crate) to: &'a str,
}

/// Moves this process into new namespaces, with an empty tmpfs on /run that holds the state.
/// The next child of this process becomes the init of the new pid namespace.
pub(crate) fn isolate(imports: &[Import<'_>]) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWPID)
        .context("cannot unshare namespaces (are you root?)")?;
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .context("make all mounts private")?;
    // Opened before /run is covered: they may be in there.
    let program = fs::File::open("/proc/self/exe").context("open the running program")?;
    let files = imports
        .iter()
        .map(|import| {
            fs::File::open(import.from).with_context(|| format!("open {}", import.from.display()))
        })
        .collect::<Result<Vec<_>>>()?;
    // Neither a place of the machine that is held busy, nor a dump of a kernel's memory there.
    std::env::set_current_dir("/").context("change to /")?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("turn off core dumps")?;
    mount_tmpfs("/run", "mode=755,size=90%")?;
    for directory in layout::DIRECTORIES {
        let path = layout::state(directory);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    }
    // A copy, so that a rebuild during the run does not change it.
    fs::copy(
        format!("/proc/self/fd/{}", program.as_raw_fd()),
        layout::program(),
    )
    .context("copy the running program")?;
    for (import, file) in imports.iter().zip(&files) {
        bind_file(file, &layout::state(import.to))?;
    }
    Ok(())
}

fn bind_file(file: &fs::File, target: &Path) -> Result<()> {
    fs::write(target, "").with_context(|| format!("create {}", target.display()))?;
    let source = format!("/proc/self/fd/{}", file.as_raw_fd());
    mount(
        Some(source.as_str()),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .with_context(|| format!("bind {}", target.display()))
}

/// Mounts a tmpfs.
pub(crate) fn mount_tmpfs(target: &str, options: &str) -> Result<()> {
    mount(
        Some("tmpfs"),
        target,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options),
    )
    .with_context(|| format!("mount a tmpfs on {target}"))
}

/// Makes the kernel kill this process when its parent ends, and makes sure that it has not yet.
///
/// Call this before [`mount_proc`]: `parent` is a pid of the namespace outside.
pub(crate) fn die_with_parent(parent: i32) -> Result<()> {
    prctl::set_pdeathsig(Some(Signal::SIGKILL)).context("set the parent-death signal")?;
    let stat = fs::read_to_string(format!("/proc/{parent}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.trim_start().chars().next());
    match state {
        Some(state) if state != 'Z' && state != 'X' => Ok(()),
        _ => bail!("the parent, process {parent}, has ended"),
    }
}

/// Mounts the /proc of the pid namespace that this process is in.
pub(crate) fn mount_proc() -> Result<()> {
    mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        MsFlags::empty(),
        None::<&str>,
    )
    .context("mount /proc")
}

/// The loop of an init: reaps every orphan until the child `main` ends, and returns its status.
pub(crate) fn reap_until(main: &mut std::process::Child) -> Result<ExitStatus> {
    let main_pid = Pid::from_raw(i32::try_from(main.id()).context("pid out of range")?);
    loop {
        // Only a look: `main` must stay for its own wait to find.
        let status = waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
            .context("wait for children")?;
        match status.pid() {
            Some(pid) if pid == main_pid => return main.wait().context("wait for the main child"),
            Some(pid) => match waitpid(pid, None) {
                Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(_) => {}
                Ok(other) => bail!("unexpected state of child {pid}: {other:?}"),
            },
            None => bail!("wait returned no pid: {status:?}"),
        }
    }
}
