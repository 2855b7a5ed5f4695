//! The product's programs, linked statically, and the images around them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cargo::cargo;
use crate::cluster::{Image, ImageFile, write_archive};

/// How programs are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// As tests are: shared with them, quickly built.
    Dev,
    /// As releases are: for figures.
    Release,
}

/// What is built: package and image, in that order.
const PROGRAMS: [(&str, &str); 3] = [
    ("windtunnel-operator", "docker.io/windtunnel/operator"),
    ("windtunnel-agent", "docker.io/windtunnel/agent"),
    ("windtunnel-sample", "docker.io/windtunnel/sample"),
];

/// An archive of all images, and the tag that they have.
#[derive(Debug, Clone)]
pub struct Images {
    /// The archive.
    pub archive: PathBuf,
    /// The tag: it changes with the programs.
    pub tag: String,
}

/// Builds the programs and their images; the archive is written into `directory`.
///
/// # Errors
/// When something cannot be built.
pub fn images(profile: Profile, directory: &Path) -> Result<Images> {
    let programs = programs(profile)?;
    let tag = tag(&programs)?;
    let mut images = Vec::new();
    for (package, image) in PROGRAMS {
        let program = programs
            .get(package)
            .with_context(|| format!("cargo built no {package}"))?;
        images.push(Image {
            name: format!("{image}:{tag}"),
            entrypoint: vec![format!("/{package}")],
            files: vec![ImageFile::program(
                &format!("/{package}"),
                stripped(program, directory)?,
            )],
            ..Image::default()
        });
    }
    let archive = directory.join("windtunnel-images.tar");
    write_archive(&images, &archive)?;
    Ok(Images { archive, tag })
}

/// The paths of the built programs by package.
fn programs(profile: Profile) -> Result<BTreeMap<String, PathBuf>> {
    let mut command = cargo();
    // All of them: what is built for the tests is built the same way.
    command.args(["build", "--workspace", "--bins"]);
    command.arg("--message-format=json-render-diagnostics");
    if profile == Profile::Release {
        command.arg("--release");
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo")?;
    if !output.status.success() {
        bail!("cargo build failed");
    }
    let mut programs = BTreeMap::new();
    for line in output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        let message: Value = serde_json::from_slice(line).context("read cargo's messages")?;
        let target = message["target"]["name"].as_str();
        if let (Some(name), Some(path)) = (target, message["executable"].as_str()) {
            programs.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    Ok(programs)
}

/// A copy without symbols: images are loaded into memory of nodes.
fn stripped(program: &Path, directory: &Path) -> Result<PathBuf> {
    let name = program.file_name().context("a program without a name")?;
    let copy = directory.join(name);
    let status = Command::new("strip")
        .arg("-o")
        .args([&copy, program])
        .status();
    if !status.context("run strip")?.success() {
        bail!("strip {} failed", program.display());
    }
    Ok(copy)
}

/// The first digits of a hash over the programs.
fn tag(programs: &BTreeMap<String, PathBuf>) -> Result<String> {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    for (name, path) in programs {
        hash.update(name.as_bytes());
        hash.update(std::fs::read(path).with_context(|| format!("read {}", path.display()))?);
    }
    Ok(crate::cluster::hex(&hash.finalize())[..12].to_owned())
}
