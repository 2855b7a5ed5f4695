//! A lone kernel: one command, run as root on a user-mode kernel of the same build as the nodes'.
//!
//! For tests that need what the machine's kernel may lack or must not be asked for: network
//! emulation, cgroups, permission events. The command sees the machine's files read-only, has
//! tmpfs on /tmp, /run, /var and /mnt, an ext4 disk on /mnt/ext4, and its output and exit code are
//! passed on. Nothing of the kernel outlives the process that called [`run`].

mod guest;
mod host;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::isolation::{self, Import};
use super::{build, entry, layout};

pub(crate) use guest::main as guest_main;
pub(crate) use host::main as host_main;

const DISK_BYTES: u64 = 1 << 30;
/// Where the command's program is bound when its own place is covered inside.
const PROGRAM: &str = "vm/program";
/// Set for the command.
const INSIDE: &str = "WINDTUNNEL_VM";
/// Places of the machine that something else is mounted over inside.
const COVERED: [&str; 6] = ["/dev", "/mnt", "/proc", "/run", "/tmp", "/var"];

/// What to run, and with what memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment of the command.
    pub env: Vec<(String, String)>,
    /// Working directory; / if it does not exist inside.
    pub directory: PathBuf,
    /// Memory of the kernel, such as `1G`.
    pub memory: String,
}

impl Order {
    /// Runs `argv` with this process's environment and working directory.
    ///
    /// # Errors
    /// When there is no working directory.
    pub fn new(argv: Vec<String>) -> Result<Self> {
        Ok(Self {
            argv,
            env: std::env::vars().collect(),
            directory: std::env::current_dir().context("read the working directory")?,
            memory: "1G".into(),
        })
    }
}

/// Runs a command on a kernel of its own by way of the `lab` program, with this process's output.
///
/// # Errors
/// When `lab` cannot be found or started. What happens to the command is in the status.
pub fn run(argv: &[&str]) -> Result<ExitStatus> {
    let mut lab = command(argv)?;
    let name = lab.get_program().display().to_string();
    lab.status().with_context(|| format!("run {name}"))
}

/// What runs a command on a kernel of its own, not yet run.
///
/// # Errors
/// When `lab` cannot be found.
pub fn command(argv: &[&str]) -> Result<Command> {
    let mut lab = Command::new(entry::lab_program()?);
    lab.args(["vm", "--"]).args(argv);
    Ok(lab)
}

/// Runs this program again, with the arguments that it has, on a kernel of its own: for test
/// programs that would otherwise do their work on the machine. See [`is_inside`].
///
/// # Errors
/// When `lab` or this program cannot be found.
pub fn run_self() -> Result<ExitStatus> {
    let program = std::env::current_exe().context("find the running program")?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut argv = vec![program.to_str().context("the program's path is not text")?];
    argv.extend(arguments.iter().map(String::as_str));
    run(&argv)
}

/// Whether this process runs on a kernel that [`run`] booted.
#[must_use]
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Boots a kernel, runs the order and returns its exit code; the process's own output is used.
///
/// Changes the namespaces of the calling process: call it last, and with no other thread running.
///
/// # Errors
/// When the kernel does not come up, or ends without a word about the command.
pub fn run_here(order: &Order) -> Result<u8> {
    let kernel = build::kernel(&super::Cache::open()?)?;
    let program = covered_program(order)?;
    let mut imports = vec![Import {
        from: &kernel,
        to: "bin/linux",
    }];
    if let Some(program) = &program {
        imports.push(Import {
            from: program,
            to: PROGRAM,
        });
    }
    isolation::isolate(&imports)?;
    let mut order = order.clone();
    if program.is_some() {
        order.argv[0] = layout::state(PROGRAM).display().to_string();
    }
    let text = serde_json::to_string(&order).context("write the order")?;
    fs::write(order_path(), text).context("write the order")?;
    // The first child: it becomes the init of the new pid namespace.
    let status = entry::child("vm-host", &[&std::process::id().to_string()])
        .status()
        .context("run the host side of the kernel")?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(host::BROKEN))
}

/// The command's program, if it is at a place that is covered inside.
fn covered_program(order: &Order) -> Result<Option<PathBuf>> {
    let program = order.argv.first().context("no command to run")?;
    if !program.contains('/') {
        return Ok(None);
    }
    let path = fs::canonicalize(order.directory.join(program))
        .with_context(|| format!("find {program}"))?;
    let is_covered = COVERED.iter().any(|place| path.starts_with(place));
    Ok(is_covered.then_some(path))
}

fn order_path() -> PathBuf {
    layout::state("vm/order.json")
}

fn disk_path() -> PathBuf {
    layout::state("disks/vm.img")
}

/// Files that the kernel writes for the machine's side to pass on.
fn output_path(name: &str) -> PathBuf {
    Path::new(layout::STATE).join("vm").join(name)
}
