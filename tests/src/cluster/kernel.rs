//! How one user-mode kernel is started: its command line, its processor, its console.
//!
//! A user-mode kernel is a process of the machine. Its root is the machine's own file system,
//! read-only; what it may write it mounts itself.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::layout;

/// A network device of a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    /// The machine's side.
    pub(crate) tap: String,
    pub(crate) mac: String,
}

/// A kernel to start, as seen from the cluster's namespaces.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Size of its memory, as the kernel reads it (`3G`).
    pub(crate) memory: String,
    /// File behind its block device.
    pub(crate) disk: PathBuf,
    /// What is behind `vec0`, `vec1`, …
    pub(crate) links: Vec<Link>,
    /// Arguments of the init program, which is this program.
    pub(crate) init: Vec<String>,
}

impl Kernel {
    /// Program and arguments. Standard output is the kernel's console.
    pub(crate) fn argv(&self) -> Vec<String> {
        let state = layout::STATE;
        let mut argv = vec![
            layout::kernel().display().to_string(),
            // Without this system calls are traced with ptrace, several times slower.
            "seccomp=on".into(),
            "ncpus=1".into(),
            "rootfstype=hostfs".into(),
            "root=machine".into(),
            "rootflags=/".into(),
            "ro".into(),
            format!("mem={}", self.memory),
            format!("umid={}", self.name),
            format!("uml_dir={state}/uml"),
            format!("ubd0={}", self.disk.display()),
        ];
        argv.extend(
            self.links
                .iter()
                .enumerate()
                .map(|(index, Link { tap, mac })| {
                    // Without gro the driver cuts off what is longer than one frame.
                    format!("vec{index}:transport=tap,ifname={tap},mac={mac},depth=64,gro=1")
                }),
        );
        argv.extend(["con=null", "con0=null,fd:1", "con1=null", "quiet"].map(Into::into));
        argv.push(format!("init={}", layout::program().display()));
        argv.push("--".into());
        argv.extend(self.init.iter().cloned());
        argv
    }

    /// Environment of the kernel process: its memory is a file that it unlinks at once.
    pub(crate) fn env() -> Vec<(String, String)> {
        vec![
            (
                "TMPDIR".into(),
                layout::state("memory").display().to_string(),
            ),
            ("HOME".into(), layout::STATE.into()),
        ]
    }
}

/// Makes an empty ext4 file system in a sparse file.
pub(crate) fn make_disk(path: &std::path::Path, size: u64) -> Result<()> {
    let file = std::fs::File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.set_len(size)
        .with_context(|| format!("size {}", path.display()))?;
    let output = Command::new("mkfs.ext4")
        .args([
            "-q",
            "-F",
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
        ])
        .arg(path)
        .output()
        .context("run mkfs.ext4")?;
    anyhow::ensure!(
        output.status.success(),
        "mkfs.ext4 {}: {}",
        path.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Ties the calling thread, and what it starts, to one of the processors that it may use: a
/// kernel that moves between two spends most of its time on system calls.
pub(crate) fn pin(index: usize) -> Result<()> {
    let me = Pid::from_raw(0);
    let allowed = sched_getaffinity(me).context("read the allowed processors")?;
    let processors: Vec<usize> = (0..CpuSet::count())
        .filter(|&cpu| allowed.is_set(cpu).unwrap_or(false))
        .collect();
    let mut set = CpuSet::new();
    set.set(processors[index % processors.len()])
        .context("choose a processor")?;
    sched_setaffinity(me, &set).context("pin to a processor")
}
