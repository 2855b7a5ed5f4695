//! Doing something in another network namespace.
//!
//! A socket belongs to the namespace that it was made in and works from everywhere, so a thread
//! that ends is moved there, and never one that lives on.

use std::fs::File;
use std::thread;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

/// The network namespace of a process.
pub(crate) fn of(process: &str) -> Result<File> {
    let path = format!("/proc/{process}/ns/net");
    File::open(&path).with_context(|| format!("open {path}"))
}

/// Runs `work` on a thread in the namespace.
pub(crate) fn within<T: Send>(
    namespace: &File,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter(namespace)?;
            work()
        });
        match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("the thread in the namespace panicked"),
        }
    })
}

/// Moves the calling thread for good.
pub(crate) fn enter(namespace: &File) -> Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNET).context("enter the network namespace")
}
