//! Giving containerd the images of archives.
//!
//! What was imported is on the node's disk, and noted there: a node that boots again imports only
//! what came since.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result};
use nix::unistd::sync;

use crate::cluster::layout;
use crate::cluster::progress::output;

/// One file for each archive that was imported, with its stamp.
const NOTES: &str = "/var/lib/imported";

/// Imports every archive that was given to the cluster so far.
pub(super) fn import_all() -> Result<()> {
    let mut archives = Vec::new();
    for entry in fs::read_dir(layout::images()).context("list the images")? {
        let path = entry.context("list the images")?.path();
        if path.extension().is_some_and(|extension| extension == "tar") {
            archives.push(path);
        }
    }
    archives.sort();
    archives.iter().try_for_each(|archive| import(archive))
}

/// Imports an archive, unless that very one was imported before.
pub(super) fn import(archive: &Path) -> Result<()> {
    let (note, stamp) = (note(archive)?, stamp(archive)?);
    if fs::read_to_string(&note).is_ok_and(|known| known == stamp) {
        return Ok(());
    }
    output(
        Command::new("ctr")
            .args(["--namespace=k8s.io", "images", "import"])
            .arg(archive),
    )
    .with_context(|| format!("import {}", archive.display()))?;
    // containerd does not: a node killed now would boot with images that have holes.
    sync();
    fs::create_dir_all(NOTES).with_context(|| format!("create {NOTES}"))?;
    fs::write(&note, stamp).with_context(|| format!("write {}", note.display()))
}

fn note(archive: &Path) -> Result<PathBuf> {
    let name = archive.file_name().context("the archive has no name")?;
    Ok(Path::new(NOTES).join(name))
}

/// Another archive of the same name has another stamp.
fn stamp(archive: &Path) -> Result<String> {
    let about = fs::metadata(archive).with_context(|| format!("find {}", archive.display()))?;
    let modified = about.modified().context("read the time of the archive")?;
    let modified = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(format!("{} {}", about.len(), modified.as_nanos()))
}
