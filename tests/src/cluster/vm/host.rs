//! The machine's side of a lone kernel: init of its pid namespace.
//!
//! Starts the kernel, passes on what the command writes while it runs, and ends with its exit
//! code. When the process outside ends, the kernel of the machine kills this one, and all with it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::sched_getcpu;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::{DISK_BYTES, disk_path, order_path, output_path};
use crate::cluster::kernel::{Kernel, make_disk, pin};
use crate::cluster::progress::tail;
use crate::cluster::{isolation, layout};

/// Exit code when the kernel or the harness failed, not the command.
pub(super) const BROKEN: u8 = 125;

/// Runs the kernel to its end.
pub(crate) fn main(parent: i32) -> Result<ExitCode> {
    isolation::die_with_parent(parent)?;
    isolation::mount_proc()?;
    let text = fs::read_to_string(order_path()).context("read the order")?;
    let order: super::Order = serde_json::from_str(&text).context("read the order")?;
    make_disk(&disk_path(), DISK_BYTES)?;
    let mut outputs = [
        Output::new("stdout", Box::new(io::stdout()))?,
        Output::new("stderr", Box::new(io::stderr()))?,
    ];
    let changes = watch()?;
    let mut kernel = start(order.memory)?;
    loop {
        wait_for_change(&changes)?;
        // Read before the outputs: the exit code is written after them.
        let code = read_code()?;
        let has_ended = kernel.try_wait().context("wait for the kernel")?.is_some();
        for output in &mut outputs {
            output.pass_on()?;
        }
        if let Some(code) = code {
            return Ok(ExitCode::from(code));
        }
        // It may have written its last between the two looks above.
        if has_ended && read_code()?.is_none() {
            bail!(
                "the kernel ended before the command did\n{}",
                tail(&layout::log("console"), 30)
            );
        }
    }
}

fn start(memory: String) -> Result<Child> {
    pin(sched_getcpu().context("find the current processor")?)?;
    let kernel = Kernel {
        name: "vm".into(),
        memory,
        disk: disk_path(),
        links: Vec::new(),
        init: vec!["internal".into(), "vm-guest".into()],
    };
    let argv = kernel.argv();
    let console = File::create(layout::log("console")).context("create the console log")?;
    Command::new(&argv[0])
        .args(&argv[1..])
        .envs(Kernel::env())
        .stdin(Stdio::null())
        .stderr(console.try_clone().context("share the console log")?)
        .stdout(console)
        .spawn()
        .context("start the kernel")
}

/// One stream of the command: what it has written so far is in a file that grows.
struct Output {
    file: File,
    sink: Box<dyn Write>,
}

impl Output {
    fn new(name: &str, sink: Box<dyn Write>) -> Result<Self> {
        let path = output_path(name);
        fs::write(&path, "").with_context(|| format!("create {}", path.display()))?;
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        Ok(Self { file, sink })
    }

    fn pass_on(&mut self) -> Result<()> {
        io::copy(&mut self.file, &mut self.sink).context("pass on the output")?;
        self.sink.flush().context("pass on the output")
    }
}

fn watch() -> Result<Inotify> {
    let inotify =
        Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).context("start inotify")?;
    inotify
        .add_watch(&layout::state("vm"), AddWatchFlags::IN_MODIFY)
        .context("watch the command's output")?;
    Ok(inotify)
}

/// Returns when a file changed, or after a moment in any case: the kernel may have ended.
fn wait_for_change(inotify: &Inotify) -> Result<()> {
    let mut fds = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)];
    if poll(&mut fds, PollTimeout::from(100u8)).context("wait for output")? > 0 {
        inotify.read_events().context("read file changes")?;
    }
    Ok(())
}

fn read_code() -> Result<Option<u8>> {
    match fs::read_to_string(output_path("status")) {
        Ok(text) => Ok(text.strip_suffix('\n').and_then(|code| code.parse().ok())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("read the exit code"),
    }
}
