//! The inside of a lone kernel: its init.
//!
//! Mounts what a command may expect, runs it, and leaves its output and exit code in files of the
//! machine, which the host side passes on.

use std::fs::{self, OpenOptions};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result};
use nix::mount::MsFlags;
use nix::unistd::sethostname;

use super::{INSIDE, Order, order_path, output_path};
use crate::cluster::guest::{make_dirs, mount_base, mount_disk, mount_host, power_off};
use crate::cluster::isolation::{mount_tmpfs, reap_until};
use crate::cluster::layout;
use crate::cluster::network::ip_batch;

/// Init of the kernel. An error is told on the console, and the kernel ends in any case.
pub(crate) fn main() -> Result<()> {
    let result = run();
    power_off()?;
    result
}

fn run() -> Result<()> {
    sethostname("vm").context("set the host name")?;
    mount_base()?;
    mount_host(&layout::state("vm").display().to_string(), MsFlags::empty())?;
    for directory in ["/tmp", "/var", "/mnt"] {
        mount_tmpfs(directory, "mode=1777")?;
    }
    make_dirs(&["/var/lib", "/var/log", "/var/tmp", "/mnt/ext4"])?;
    mount_disk("/mnt/ext4")?;
    delegate_controllers()?;
    ip_batch(&["link set lo up".to_owned()])?;
    let text = fs::read_to_string(order_path()).context("read the order")?;
    let order: Order = serde_json::from_str(&text).context("read the order")?;
    let code = match start(&order) {
        Ok(mut child) => exit_code(reap_until(&mut child)?),
        Err(error) => {
            fs::write(output_path("stderr"), format!("{error:#}\n")).context("write the error")?;
            127
        }
    };
    fs::write(output_path("status"), format!("{code}\n")).context("write the exit code")
}

/// Lets child cgroups of the root use every controller.
fn delegate_controllers() -> Result<()> {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")
        .context("read the cgroup controllers")?;
    for controller in controllers.split_whitespace() {
        fs::write(
            "/sys/fs/cgroup/cgroup.subtree_control",
            format!("+{controller}"),
        )
        .with_context(|| format!("delegate the {controller} controller"))?;
    }
    Ok(())
}

fn start(order: &Order) -> Result<Child> {
    let (program, arguments) = order.argv.split_first().context("no command to run")?;
    let open = |name: &str| {
        let path = output_path(name);
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.with_context(|| format!("create {}", path.display()))
    };
    let directory = if order.directory.is_dir() {
        order.directory.as_path()
    } else {
        "/".as_ref()
    };
    Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .env(INSIDE, "1")
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(open("stdout")?)
        .stderr(open("stderr")?)
        .spawn()
        .with_context(|| format!("cannot run {program}"))
}

/// Exit code as a shell gives it.
fn exit_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(255)
}
