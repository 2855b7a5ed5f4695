//! Images: what every node has from the start, a pod's pause container and `CoreDNS`, in
//! one archive, and the probe of the harness's own tests in another.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::cluster::cache::{Cache, Inputs};
use crate::cluster::debian;
use crate::cluster::image::{Image, ImageFile, write_archive};
use crate::cluster::progress::output;

const PAUSE: &str = include_str!("../../../cluster/pause.c");
const FLAGS: [&str; 4] = ["-static", "-Os", "-s", "-Wall"];

/// The directory of the archives; `programs` is the directory of the Go programs.
pub(super) fn build(cache: &Cache, programs: &Path) -> Result<PathBuf> {
    let inputs = Inputs::default()
        .note("recipe", "1")
        .note("compiler", &super::compiler()?)
        .note("flags", &FLAGS.join(" "))
        .note(
            "programs",
            &programs.file_name().unwrap_or_default().to_string_lossy(),
        )
        .file("pause.c", PAUSE.as_bytes());
    cache.artefact("images", &inputs, |staging| make(programs, staging))
}

fn make(programs: &Path, staging: &Path) -> Result<()> {
    debian::ensure_installed(&debian::BUILD)?;
    let (source, pause) = (staging.join("pause.c"), staging.join("pause"));
    std::fs::write(&source, PAUSE)?;
    output(
        Command::new("gcc")
            .args(FLAGS)
            .arg("-o")
            .arg(&pause)
            .arg(&source),
    )?;
    let image = |name: &str, program: &Path| Image {
        name: format!("lab/{name}:1"),
        entrypoint: vec![format!("/{name}")],
        files: vec![ImageFile::program(&format!("/{name}"), program)],
        ..Image::default()
    };
    let images = [
        image("pause", &pause),
        image("coredns", &programs.join("coredns")),
    ];
    write_archive(&images, &staging.join("base.tar"))?;
    write_archive(
        &[image("probe", &programs.join("probe"))],
        &staging.join("probe.tar"),
    )
}
