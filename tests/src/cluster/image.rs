//! Container images made from files of the machine, without an engine.
//!
//! The archive is what `docker save` writes. Equal inputs give equal bytes: no times, no users.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Cursor, Read, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use super::cache::hex;

/// An image of one layer.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Name and tag.
    pub name: String,
    /// The program that a container runs, and its first arguments.
    pub entrypoint: Vec<String>,
    /// What is in it.
    pub files: Vec<ImageFile>,
    /// Labels of the configuration.
    pub labels: BTreeMap<String, String>,
    /// User and group of the program, as numbers; root if empty.
    pub user: String,
}

/// A file of an image.
#[derive(Debug, Clone)]
pub struct ImageFile {
    /// Absolute path in the image.
    pub path: String,
    /// The file on the machine.
    pub source: PathBuf,
    /// Permission bits.
    pub mode: u32,
}

impl ImageFile {
    /// A file that everyone may run.
    pub fn program(path: &str, source: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            source: source.into(),
            mode: 0o755,
        }
    }
}

/// Writes an archive of images; it appears under its name only when it is complete.
///
/// # Errors
/// When a source cannot be read, or the archive not written.
pub fn write_archive(images: &[Image], target: &Path) -> Result<()> {
    let partial = target.with_extension("partial");
    let file = File::create(&partial).with_context(|| format!("create {}", partial.display()))?;
    let mut archive = Builder::new(file);
    let mut manifest = Vec::new();
    for image in images {
        let layer = layer(image).with_context(|| format!("image {}", image.name))?;
        let digest = hex(&Sha256::digest(&layer));
        let config = config(image, &digest).to_string();
        let config_name = format!("{}.json", hex(&Sha256::digest(&config)));
        let layer_name = format!("{digest}/layer.tar");
        manifest
            .push(json!({"Config": config_name, "RepoTags": [image.name], "Layers": [layer_name]}));
        append(&mut archive, &config_name, 0o644, Cursor::new(config))?;
        append(&mut archive, &layer_name, 0o644, Cursor::new(layer))?;
    }
    let manifest = serde_json::Value::from(manifest).to_string();
    append(&mut archive, "manifest.json", 0o644, Cursor::new(manifest))?;
    archive.into_inner().context("finish the archive")?;
    fs::rename(&partial, target).with_context(|| format!("publish {}", target.display()))
}

fn config(image: &Image, layer: &str) -> serde_json::Value {
    json!({
        "architecture": match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        },
        "os": "linux",
        "config": {
            "Entrypoint": image.entrypoint,
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Labels": image.labels,
            "User": image.user,
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer}")]},
    })
}

fn layer(image: &Image) -> Result<Vec<u8>> {
    let mut layer = Builder::new(Vec::new());
    let mut directories = BTreeSet::from(["tmp".to_owned()]);
    for file in &image.files {
        let path = Path::new(file.path.trim_start_matches('/'));
        directories.extend(
            path.ancestors()
                .skip(1)
                .map(|path| path.display().to_string()),
        );
    }
    directories.remove("");
    for directory in &directories {
        let mode = if directory == "tmp" { 0o1777 } else { 0o755 };
        let mut header = header(EntryType::Directory, mode, 0);
        layer.append_data(&mut header, format!("{directory}/"), std::io::empty())?;
    }
    for file in &image.files {
        let source =
            File::open(&file.source).with_context(|| format!("open {}", file.source.display()))?;
        append(
            &mut layer,
            file.path.trim_start_matches('/'),
            file.mode,
            source,
        )?;
    }
    layer.into_inner().context("finish the layer")
}

fn append<W: std::io::Write>(
    archive: &mut Builder<W>,
    path: &str,
    mode: u32,
    mut content: impl Read + Seek,
) -> Result<()> {
    let size = content
        .seek(std::io::SeekFrom::End(0))
        .context("size a file")?;
    content.rewind().context("rewind a file")?;
    let mut header = header(EntryType::Regular, mode, size);
    archive
        .append_data(&mut header, path, content)
        .with_context(|| format!("add {path}"))
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(name: &str) -> Vec<u8> {
        let directory = std::env::temp_dir();
        let target = directory.join(format!("image-test-{}-{name}.tar", std::process::id()));
        let image = Image {
            name: "lab/test:1".into(),
            entrypoint: vec!["/bin/true".into()],
            files: vec![ImageFile::program("/bin/true", "/bin/true")],
            ..Image::default()
        };
        write_archive(&[image], &target).unwrap();
        let bytes = fs::read(&target).unwrap();
        fs::remove_file(&target).unwrap();
        bytes
    }

    #[test]
    fn equal_inputs_give_equal_bytes() {
        assert_eq!(archive("a"), archive("b"));
    }

    #[test]
    fn the_manifest_names_what_is_in_the_archive() {
        let bytes = archive("c");
        let mut names = Vec::new();
        let mut manifest = String::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            if name == "manifest.json" {
                entry.read_to_string(&mut manifest).unwrap();
            }
            names.push(name);
        }
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], "lab/test:1");
        for file in [&manifest[0]["Config"], &manifest[0]["Layers"][0]] {
            assert!(
                names.iter().any(|name| file == name),
                "{file} is not among {names:?}"
            );
        }
    }
}
