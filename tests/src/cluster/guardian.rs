//! The process that holds a cluster's namespaces, and the init of the pid namespace in them.
//!
//! The guardian takes the cluster's name, opens the namespaces and waits. When it ends, however it
//! ends, the kernel kills the init, with it every process of the cluster, and with them go
//! mounts, devices and files. It does nothing else, so that little can end it.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::setsid;
use serde::{Deserialize, Serialize};

use super::isolation::{self, Import};
use super::{control, entry, layout};

/// What a starter writes so that the cluster outlives it.
pub(crate) const DETACH: &[u8] = b"detach";

/// What cluster to hold.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) name: String,
    pub(crate) nodes: u8,
    pub(crate) parts: Parts,
    /// Time that passed before the supervisor started.
    pub(crate) seconds_before: f64,
}

/// Built parts that the cluster runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Parts {
    /// The nodes' kernel.
    pub kernel: PathBuf,
    /// The Kubernetes components in one program.
    pub kubernetes: PathBuf,
    /// helm.
    pub helm: PathBuf,
    /// Archive of the images that every node has from the start.
    pub images: PathBuf,
    /// Archive of an image with a server and a client, for tests of the network.
    pub probe: PathBuf,
}

/// Holds a cluster until it ends, or until whoever started it ends without having detached.
pub(crate) fn main(mut order: Order) -> Result<ExitCode> {
    let start = Instant::now();
    setsid().context("leave the session")?;
    let listener = control::listen(&order.name)?;
    let parts = &order.parts;
    isolation::isolate(&[
        Import {
            from: &parts.kernel,
            to: "bin/linux",
        },
        Import {
            from: &parts.kubernetes,
            to: "bin/kubernetes",
        },
        Import {
            from: &parts.helm,
            to: "bin/helm",
        },
        Import {
            from: &parts.images,
            to: "images/base.tar",
        },
    ])?;
    symlink("kubernetes", layout::state("bin/kubectl")).context("name kubectl")?;
    order.seconds_before = start.elapsed().as_secs_f64();
    let order = serde_json::to_string(&order).context("write the order")?;
    let mut init = entry::child("init", &[&std::process::id().to_string(), &order])
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::piped())
        .spawn()
        .context("start the init")?;
    let init_output = init.stdout.take().context("the init has no output")?;
    if wait_for_end(&init_output)? == End::Starter {
        init.kill().context("end the init")?;
        init.wait().context("wait for the init")?;
        return Ok(ExitCode::SUCCESS);
    }
    let status = init.wait().context("wait for the init")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What ended first.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Init,
    Starter,
}

/// Waits for the end of the init or of whoever started this process. The init writes nothing, and
/// its output closes with it; the starter closes standard input, unless it writes to it first.
fn wait_for_end(init: &impl AsFd) -> Result<End> {
    let mut stdin = io::stdin();
    let mut is_detached = false;
    loop {
        let starter = stdin.as_fd();
        let mut fds = vec![PollFd::new(init.as_fd(), PollFlags::empty())];
        if !is_detached {
            fds.push(PollFd::new(starter, PollFlags::POLLIN));
        }
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("wait for the cluster's end"),
        }
        if fds[0].any() == Some(true) {
            return Ok(End::Init);
        }
        if fds.get(1).and_then(PollFd::any) == Some(true) {
            let mut word = [0; DETACH.len()];
            match stdin.read(&mut word).context("listen to the starter")? {
                0 => return Ok(End::Starter),
                _ => is_detached = true,
            }
        }
    }
}

/// Init of the cluster's pid namespace: starts the supervisor and reaps what it leaves.
pub(crate) fn init_main(parent: i32, order: &str) -> Result<ExitCode> {
    isolation::die_with_parent(parent)?;
    isolation::mount_proc()?;
    let log = std::fs::File::create(layout::log("supervisor")).context("create the log")?;
    let mut supervisor = entry::child("supervisor", &[order])
        .stdin(Stdio::inherit())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("start the supervisor")?;
    let status = isolation::reap_until(&mut supervisor)?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
