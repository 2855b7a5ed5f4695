//! The image of a real database, `PostgreSQL` from Debian's packages.
//!
//! Of the packages only those files are taken that the programs need: the libraries that their
//! loader finds, and what they read at run time.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cluster::cache::{Cache, Inputs};
use crate::cluster::debian;
use crate::cluster::image::{Image, ImageFile, write_archive};
use crate::cluster::progress::output;

/// Name and tag.
pub const IMAGE: &str = "docker.io/windtunnel/postgres:1";
/// Raise this when the steps below change what they make.
const RECIPE: &str = "1";
const PACKAGES: [&str; 2] = ["postgresql", "dash"];
/// Parts of the names of packages that the programs below do not need.
const UNWANTED: [&str; 5] = ["perl", "llvm", "libz3", "locales", "libc-l10n"];
const PROGRAMS: [&str; 5] = ["postgres", "initdb", "psql", "pg_isready", "pgbench"];
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// The user of `postgres`, which refuses to be root.
const USER: &str = "999";

pub(super) fn build(cache: &Cache) -> Result<PathBuf> {
    let inputs = Inputs::default()
        .note("recipe", RECIPE)
        .note("suite", &debian::own_suite()?);
    let directory = cache.artefact("postgres", &inputs, |staging| make(cache, staging))?;
    Ok(directory.join("postgres.tar"))
}

fn make(cache: &Cache, staging: &Path) -> Result<()> {
    let root = staging.join("root");
    let is_wanted = |name: &str| !UNWANTED.iter().any(|part| name.contains(part));
    debian::unpack(cache, &PACKAGES, is_wanted, &root)?;
    let mut files = files(&root)?;
    for (path, text) in texts(&root)? {
        let source = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(source.parent().context("a file at the root")?)?;
        fs::write(&source, text).with_context(|| format!("write {path}"))?;
        files.insert(path, source);
    }
    let image = Image {
        name: IMAGE.to_owned(),
        entrypoint: vec!["/bin/sh".to_owned()],
        files: files
            .into_iter()
            .map(|(path, source)| ImageFile::program(&path, source))
            .collect(),
        user: format!("{USER}:{USER}"),
        ..Image::default()
    };
    write_archive(&[image], &staging.join("postgres.tar"))?;
    fs::remove_dir_all(root).context("remove the unpacked packages")
}

/// What is in the image, by its path there.
fn files(root: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let version = only(&root.join("usr/lib/postgresql"))?;
    let library = format!("/usr/lib/postgresql/{version}");
    let share = format!("/usr/share/postgresql/{version}");
    let mut files = BTreeMap::new();
    let mut take = |path: &str, source: &str| -> Result<()> {
        files.insert(path.to_owned(), real(root, source)?);
        for needed in needed(root, source)? {
            files.insert(needed.clone(), real(root, &needed)?);
        }
        Ok(())
    };
    take("/bin/sh", "/bin/dash")?;
    for program in PROGRAMS {
        let path = format!("{library}/bin/{program}");
        take(&path, &path)?;
    }
    for module in ["plpgsql.so", "dict_snowball.so"] {
        let path = format!("{library}/lib/{module}");
        take(&path, &path)?;
    }
    for path in below(root, Path::new(&share))? {
        files.insert(path.clone(), real(root, &path)?);
    }
    let utc = "/usr/share/zoneinfo/Etc/UTC";
    files.insert(utc.to_owned(), real(root, utc)?);
    Ok(files)
}

/// Files that no package has: the programs under names without a version, and their user.
fn texts(root: &Path) -> Result<Vec<(String, String)>> {
    let version = only(&root.join("usr/lib/postgresql"))?;
    let mut texts = vec![(
        "/etc/passwd".to_owned(),
        format!("postgres:x:{USER}:{USER}::/:/bin/sh\n"),
    )];
    for program in PROGRAMS {
        // Each finds what it needs from where it is: no link to it would do.
        let script =
            format!("#!/bin/sh\nexec /usr/lib/postgresql/{version}/bin/{program} \"$@\"\n");
        texts.push((format!("/usr/local/bin/{program}"), script));
    }
    Ok(texts)
}

/// The name of the only entry of a directory.
fn only(directory: &Path) -> Result<String> {
    let mut names = fs::read_dir(directory)
        .with_context(|| format!("list {}", directory.display()))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    let name = names.next().context("no version of the database")?;
    ensure!(names.next().is_none(), "two versions of the database");
    Ok(name)
}

/// The libraries that a program is loaded with, by its own loader.
fn needed(root: &Path, program: &str) -> Result<Vec<String>> {
    let list = output(
        Command::new("chroot")
            .arg(root)
            .args([LOADER, "--list", program]),
    )?;
    let path = |line: &str| {
        let word = line.split(" => ").last()?.split_whitespace().next()?;
        word.starts_with('/').then(|| word.to_owned())
    };
    Ok(list
        .lines()
        .filter_map(path)
        .chain([LOADER.to_owned()])
        .collect())
}

/// The file at a path of the unpacked packages, by way of links that mean their own root.
fn real(root: &Path, path: &str) -> Result<PathBuf> {
    let mut place = PathBuf::from("/");
    let mut left: Vec<PathBuf> = vec![PathBuf::from(path)];
    for _ in 0..64 {
        let Some(next) = left.pop() else {
            return Ok(root.join(place.strip_prefix("/")?));
        };
        let mut parts = next.components();
        let Some(part) = parts.next() else { continue };
        left.push(parts.as_path().to_owned());
        match part {
            Component::RootDir => place = PathBuf::from("/"),
            Component::ParentDir => drop(place.pop()),
            Component::Normal(name) => {
                let here = root.join(place.strip_prefix("/")?).join(name);
                match fs::read_link(&here) {
                    Ok(target) => left.push(target),
                    Err(_) => place.push(name),
                }
            }
            Component::CurDir | Component::Prefix(_) => {}
        }
    }
    anyhow::bail!("too many links in {path}")
}

/// All files below a directory, but manual pages.
fn below(root: &Path, directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let here = root.join(directory.strip_prefix("/")?);
    for entry in fs::read_dir(&here).with_context(|| format!("list {}", here.display()))? {
        let entry = entry?;
        let path = directory.join(entry.file_name());
        if entry.path().is_dir() {
            if entry.file_name() != OsStr::new("man") {
                found.extend(below(root, &path)?);
            }
        } else {
            found.push(path.display().to_string());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_mean_their_own_root() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        fs::create_dir_all(root.join("usr/lib/x")).unwrap();
        fs::write(root.join("usr/lib/x/lib.so.1"), "").unwrap();
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("lib.so.1", root.join("usr/lib/x/lib.so")).unwrap();
        symlink("/lib/x/../x/lib.so", root.join("usr/abs")).unwrap();
        let wanted = root.join("usr/lib/x/lib.so.1");
        for path in ["/lib/x/lib.so.1", "/lib/x/lib.so", "/usr/abs"] {
            assert_eq!(real(root, path).unwrap(), wanted, "{path}");
        }
        symlink("loop", root.join("loop")).unwrap();
        assert!(real(root, "/loop").is_err());
    }
}
