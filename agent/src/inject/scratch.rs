//! A file system of this process's own, to try things on.

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// Mounts one where nobody else sees it, and says where. Every container has that directory, and this
/// process has no use for what is there.
pub(super) fn enter() -> Result<&'static str, String> {
    let told = |e: nix::Error| e.to_string();
    let place = "/sys";
    unshare(CloneFlags::CLONE_NEWNS).map_err(told)?;
    let (private, none) = (MsFlags::MS_REC | MsFlags::MS_PRIVATE, MsFlags::empty());
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).map_err(told)?;
    mount(None::<&str>, place, Some("tmpfs"), none, None::<&str>).map_err(told)?;
    Ok(place)
}
