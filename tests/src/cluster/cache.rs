//! Built artefacts, kept outside the tree and shared by all checkouts.
//!
//! Each is a directory named by the hash of its inputs; it appears complete or not at all, and
//! only one process builds it. Nothing is ever changed in place.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::progress::say;

/// The directory of all artefacts.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$WINDTUNNEL_CACHE`, else `windtunnel` in the user's cache directory.
    ///
    /// # Errors
    /// When there is neither, or it cannot be created.
    pub fn open() -> Result<Self> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let root = variable("WINDTUNNEL_CACHE")
            .map(PathBuf::from)
            .or_else(|| variable("XDG_CACHE_HOME").map(|home| Path::new(&home).join("windtunnel")))
            .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache/windtunnel")))
            .context("no cache directory: set WINDTUNNEL_CACHE")?;
        fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        let root = root
            .canonicalize()
            .with_context(|| format!("find {}", root.display()))?;
        Ok(Self { root })
    }

    /// A directory for what is kept under its own name, such as downloads and logs.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(path)
    }

    /// The directory of an artefact; `build` fills it if no one has before.
    pub(crate) fn artefact(
        &self,
        name: &str,
        inputs: &Inputs,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let target = self.root.join(format!("{name}-{}", inputs.hash()));
        if target.is_dir() {
            return Ok(target);
        }
        let _lock = self.lock(name)?;
        if target.is_dir() {
            return Ok(target);
        }
        // Under the lock no one else can be using it: a build that was killed left it.
        let staging = self.root.join(format!(".{name}-building"));
        remove_all(&staging)?;
        fs::create_dir(&staging).with_context(|| format!("create {}", staging.display()))?;
        build(&staging).with_context(|| format!("build {name}"))?;
        fs::write(staging.join("inputs.txt"), &inputs.text).context("write inputs.txt")?;
        fs::rename(&staging, &target).with_context(|| format!("publish {}", target.display()))?;
        Ok(target)
    }

    fn lock(&self, name: &str) -> Result<File> {
        let path = self.directory("locks")?.join(name);
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                say(&format!("{name}: another process is building it, waiting"));
            }
            Err(TryLockError::Error(error)) => return Err(error).context("lock the cache"),
        }
        file.lock()
            .with_context(|| format!("lock {}", path.display()))?;
        Ok(file)
    }
}

fn remove_all(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Everything that an artefact depends on.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    text: String,
}

impl Inputs {
    /// Adds a short text: a version, flags.
    pub(crate) fn note(mut self, label: &str, value: &str) -> Self {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{label}: {value}");
        self
    }

    /// Adds a file by its content.
    pub(crate) fn file(self, label: &str, content: &[u8]) -> Self {
        let hash = hex(&Sha256::digest(content));
        self.note(label, &hash)
    }

    fn hash(&self) -> String {
        hex(&Sha256::digest(self.text.as_bytes()))[..16].to_owned()
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(value: &str) -> Inputs {
        Inputs::default()
            .note("compiler", "12")
            .file("main.c", value.as_bytes())
    }

    #[test]
    fn equal_inputs_share_a_name_and_any_change_gives_another() {
        assert_eq!(inputs("a").hash(), inputs("a").hash());
        assert_ne!(inputs("a").hash(), inputs("b").hash());
        assert_ne!(inputs("a").note("flags", "-O2").hash(), inputs("a").hash());
    }

    #[test]
    fn an_artefact_is_built_once_and_a_failure_leaves_none() {
        let root = std::env::temp_dir().join(format!("cache-test-{}", std::process::id()));
        fs::create_dir(&root).unwrap();
        let cache = Cache { root: root.clone() };
        let broken = cache.artefact("part", &inputs("a"), |_| anyhow::bail!("no luck"));
        assert_eq!(format!("{:#}", broken.unwrap_err()), "build part: no luck");
        for round in ["first", "second"] {
            let built = cache.artefact("part", &inputs("a"), |staging| {
                fs::write(staging.join("round"), round).context("write")
            });
            let text = fs::read_to_string(built.unwrap().join("round")).unwrap();
            assert_eq!(text, "first");
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
