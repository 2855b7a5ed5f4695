//! The parts of the cluster, each built from sources and cached by the hash of its inputs.
//!
//! What they are built from is in the tree under `tests/cluster`, and compiled into this program.

mod images;
mod kubernetes;
mod node_kernel;
mod postgres;

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::Cache;
use super::debian;
use super::guardian::Parts;
use super::progress::output;

pub use postgres::IMAGE as POSTGRES;

/// Everything that a cluster runs.
///
/// # Errors
/// When something has to be built and that fails.
pub fn all(cache: &Cache) -> Result<Parts> {
    let kernel = kernel(cache)?;
    let programs = kubernetes::build(cache)?;
    let images = images::build(cache, &programs)?;
    Ok(Parts {
        kernel,
        kubernetes: programs.join("kubernetes"),
        helm: programs.join("helm"),
        images: images.join("base.tar"),
        probe: images.join("probe.tar"),
    })
}

/// The user-mode kernel of the nodes, which see the machine's programs: those they need are there.
///
/// # Errors
/// When it has to be built and that fails.
pub fn kernel(cache: &Cache) -> Result<PathBuf> {
    debian::ensure_installed(&debian::RUN)?;
    node_kernel::build(cache)
}

/// An archive with a database and its own load: [`POSTGRES`], with `postgres`, `initdb`, `psql`,
/// `pg_isready` and `pgbench` in `/usr/local/bin`, and a shell.
///
/// # Errors
/// When it has to be built and that fails.
pub fn postgres(cache: &Cache) -> Result<PathBuf> {
    postgres::build(cache)
}

/// The C compiler, as it names itself.
fn compiler() -> Result<String> {
    debian::ensure_installed(&["gcc"])?;
    let text = output(Command::new("gcc").arg("--version"))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
