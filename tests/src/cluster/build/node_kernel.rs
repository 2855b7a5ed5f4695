//! The nodes' kernel: user-mode Linux from Debian's source package.
//!
//! Only the parts of the source that the build reads are unpacked. The result is one program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::cluster::cache::{Cache, Inputs};
use crate::cluster::debian::{self, KernelSource};
use crate::cluster::progress::{Job, output, say};

const CONFIG: &str = include_str!("../../../cluster/node.config");
/// Raise this when the steps below change what they make.
const RECIPE: &str = "1";

pub(super) fn build(cache: &Cache) -> Result<PathBuf> {
    let source = debian::kernel_source(cache)?;
    let inputs = Inputs::default()
        .note("recipe", RECIPE)
        .note("source", &format!("{} {}", source.package, source.version))
        .note("compiler", &super::compiler()?)
        .file("node.config", CONFIG.as_bytes());
    let directory = cache.artefact("kernel", &inputs, |staging| {
        compile(cache, &source, staging)
    })?;
    Ok(directory.join("linux"))
}

fn compile(cache: &Cache, source: &KernelSource, staging: &Path) -> Result<()> {
    debian::ensure_installed(&debian::BUILD)?;
    let start = Instant::now();
    say(&format!(
        "kernel: unpacking {} {}",
        source.package, source.version
    ));
    let tree = unpack(&debian::download(cache, source)?, staging)?;
    say(&format!(
        "kernel: unpacked in {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    let config = tree.join("arch/um/configs/node_defconfig");
    fs::write(&config, CONFIG).with_context(|| format!("write {}", config.display()))?;
    let log = cache.directory("logs")?.join("kernel.log");
    fs::write(&log, "").with_context(|| format!("write {}", log.display()))?;
    let job = Job {
        name: "kernel",
        log: &log,
        unit: "objects",
        is_step: |line| line.starts_with("  CC "),
    };
    Job {
        name: "kernel configuration",
        ..job
    }
    .run(make(&tree).arg("node_defconfig"))?;
    check_config(&tree)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    job.run(make(&tree).arg(format!("-j{jobs}")).arg("linux"))?;
    output(
        Command::new("strip")
            .arg("-o")
            .arg(staging.join("linux"))
            .arg(tree.join("linux")),
    )?;
    fs::copy(tree.join(".config"), staging.join("config")).context("keep the configuration")?;
    fs::remove_dir_all(staging.join("source")).context("remove the source")?;
    Ok(())
}

fn make(tree: &Path) -> Command {
    let mut command = Command::new("make");
    // The same program whoever builds it, and whenever.
    command.args([
        "ARCH=um",
        "KBUILD_BUILD_USER=windtunnel",
        "KBUILD_BUILD_HOST=windtunnel",
    ]);
    command
        .env("KBUILD_BUILD_TIMESTAMP", "2025-01-01")
        .current_dir(tree);
    command
}

/// Unpacks the package and the tarball in it, without what a user-mode kernel never compiles.
fn unpack(package: &Path, staging: &Path) -> Result<PathBuf> {
    let directory = staging.join("source");
    output(
        Command::new("dpkg-deb")
            .arg("--extract")
            .arg(package)
            .arg(&directory),
    )?;
    let tarball = find(&directory.join("usr/src"), ".tar.xz")?;
    output(
        Command::new("tar")
            .args(["--extract", "--wildcards", "--no-same-owner"])
            .arg("--file")
            .arg(&tarball)
            .arg("--directory")
            .arg(&directory)
            .args(
                EXCLUDED
                    .iter()
                    .map(|pattern| format!("--exclude={pattern}")),
            ),
    )?;
    fs::remove_file(&tarball).context("remove the tarball")?;
    let name = tarball
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    Ok(directory.join(name.trim_end_matches(".tar.xz")))
}

/// Every Kconfig and Makefile stays: the configuration reads them all.
const EXCLUDED: [&str; 12] = [
    "*/Documentation/*/*",
    "*/drivers/gpu/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/infiniband/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/drivers/scsi/*.[ch]",
    "*/drivers/staging/*.[ch]",
    "*/sound/*.[ch]",
    "*/tools/testing/*",
    "*/tools/perf/*",
    "*.dts*",
];

fn find(directory: &Path, suffix: &str) -> Result<PathBuf> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.to_string_lossy().ends_with(suffix))
        .with_context(|| format!("no {suffix} in {}", directory.display()))
}

/// An option whose dependency was left out vanishes without a word: find it here, not in a test.
fn check_config(tree: &Path) -> Result<()> {
    let made = fs::read_to_string(tree.join(".config")).context("read the configuration")?;
    let lost: Vec<&str> = CONFIG
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .filter(|wanted| !made.lines().any(|line| line == *wanted))
        .collect();
    ensure!(
        lost.is_empty(),
        "the kernel's configuration lost {}",
        lost.join(", ")
    );
    Ok(())
}
