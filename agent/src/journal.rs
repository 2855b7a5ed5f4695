//! The journal: what this agent may have changed, written down before it is changed.
//!
//! One file an entry, replaced atomically and synced. It lies on a tmpfs, so that it is gone when
//! the kernel state that it speaks of is. A file that cannot be read is set aside, and reported;
//! it never stops the rest.
//!
//! What is to be done is written before it is done, and not done where it cannot be written. What
//! has happened is known at once and written as soon as that is possible: until then the next agent
//! would look for more than there is, never for less.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;
use windtunnel_crds::names::hash;
use windtunnel_runtime::chain;

use crate::model::{Entry, FORMAT, Key};

/// The reason of a fault that is not injected because it cannot be written down.
pub const UNWRITABLE: &str = "JournalUnwritable";
/// Most entries; a node has at most some hundred pods, each with a few faults.
const MAX_ENTRIES: usize = 4096;
/// Most files that are kept of those set aside; the newest.
const MAX_ASIDE: usize = 64;
/// Largest entry, in bytes.
const MAX_SIZE: u64 = 64 * 1024;

/// Why the journal cannot be used.
#[derive(Debug, Error)]
pub enum JournalError {
    /// A file or directory operation failed.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Another agent uses it.
    #[error("another agent uses the journal in {}", .0.display())]
    Locked(PathBuf),
    /// It has as many entries as it may have.
    #[error("the journal has {MAX_ENTRIES} entries, more are not kept")]
    Full,
    /// An entry is larger than it may be.
    #[error("a journal entry of {0} bytes is too large")]
    TooLarge(usize),
    /// An entry cannot be written as text.
    #[error("cannot encode a journal entry")]
    Encode(#[source] serde_json::Error),
}

/// The journal, held by one agent at a time.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    entries: BTreeMap<Key, Entry>,
    /// Entries whose files are behind them.
    unsaved: BTreeSet<Key>,
    _lock: Flock<File>,
}

/// A file in the journal that is no entry of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Its name.
    pub name: String,
    /// What is wrong with it.
    pub message: String,
}

impl Journal {
    /// Opens the journal in `directory`, which is made if it is missing, and reads what is there:
    /// the entries, and what is set aside, by this agent or one before it.
    ///
    /// # Errors
    /// Where the directory cannot be used or another agent uses it.
    pub fn open(directory: &Path) -> Result<(Self, Vec<SetAside>), JournalError> {
        let aside = directory.join("aside");
        fs::create_dir_all(&aside).map_err(|e| failed("create", &aside, e))?;
        let lock_path = directory.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            // What was written before it became read-only is still to be read, and ended.
            .or_else(|error| File::open(&lock_path).map_err(|_| error))
            .map_err(|e| failed("open", &lock_path, e))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|_| JournalError::Locked(directory.to_owned()))?;
        let mut journal = Self {
            directory: directory.to_owned(),
            entries: BTreeMap::new(),
            unsaved: BTreeSet::new(),
            _lock: lock,
        };
        let mut unmoved = journal.read(&aside)?;
        unmoved.extend(Self::aside(&aside)?);
        Ok((journal, unmoved))
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<Key, Entry> {
        &self.entries
    }

    /// Writes an entry down; when this returns it survives the agent. For what is about to be done.
    ///
    /// # Errors
    /// Where it cannot be written; the entry is then as it was.
    pub fn write(&mut self, entry: Entry) -> Result<(), JournalError> {
        if !self.entries.contains_key(&entry.key) && self.entries.len() >= MAX_ENTRIES {
            return Err(JournalError::Full);
        }
        self.save(&entry)?;
        self.unsaved.remove(&entry.key);
        self.entries.insert(entry.key.clone(), entry);
        Ok(())
    }

    /// Takes note of what has happened; it is written down now, or as soon as it can be.
    pub fn note(&mut self, entry: Entry) {
        let key = entry.key.clone();
        self.entries.insert(key.clone(), entry);
        self.settle(key);
    }

    /// Forgets an entry; its file goes now, or as soon as it can.
    pub fn forget(&mut self, key: &Key) {
        self.entries.remove(key);
        self.settle(key.clone());
    }

    /// Writes down what could not be until now.
    pub fn flush(&mut self) {
        for key in self.unsaved.clone() {
            self.settle(key);
        }
    }

    /// Brings the file of an entry up to it; what cannot be is tried again.
    fn settle(&mut self, key: Key) {
        let settled = match self.entries.get(&key) {
            Some(entry) => self.save(entry),
            None => self.remove(&key),
        };
        match settled {
            Ok(()) => drop(self.unsaved.remove(&key)),
            Err(error) => {
                let error = chain(&error);
                if self.unsaved.insert(key) {
                    tracing::warn!(error, "the journal falls behind");
                }
            }
        }
    }

    /// Writes the file of an entry.
    fn save(&self, entry: &Entry) -> Result<(), JournalError> {
        let text = serde_json::to_vec(entry).map_err(JournalError::Encode)?;
        if text.len() as u64 > MAX_SIZE {
            return Err(JournalError::TooLarge(text.len()));
        }
        let path = self.path(&entry.key);
        let new = path.with_extension("new");
        let written = (|| {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.directory)?.sync_all()
        })();
        if let Err(source) = written {
            // What is half written is not read as an entry.
            let _ = fs::remove_file(&new);
            return Err(failed("write", &path, source));
        }
        Ok(())
    }

    /// Removes the file of an entry.
    fn remove(&self, key: &Key) -> Result<(), JournalError> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &path, source))
            }
            _ => Ok(()),
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        let mut parts = vec![key.injection.as_str(), &key.fault, &key.pod];
        if !key.container.is_empty() {
            parts.push(&key.container);
        }
        let name = hash(&parts, 32);
        self.directory.join(format!("{name}.json"))
    }

    /// Reads all entries, and moves what is none into `aside`; tells of what cannot be moved. Nothing
    /// that is there keeps the rest from being read.
    fn read(&mut self, aside: &Path) -> Result<Vec<SetAside>, JournalError> {
        let mut unmoved = Vec::new();
        for path in list(&self.directory)? {
            let name = path.file_name().unwrap_or_default();
            if is_directory(&path) || name == "lock" {
                continue;
            }
            if path.extension().is_some_and(|e| e == "new") {
                // One that cannot be removed is written over.
                let _ = fs::remove_file(&path);
                continue;
            }
            match read_entry(&path) {
                Ok(entry) if self.path(&entry.key) == path => {
                    self.entries.insert(entry.key.clone(), entry);
                }
                other => {
                    if let Err(error) = fs::rename(&path, aside.join(name)) {
                        let told = SetAside::new(&path, other);
                        let message = format!("{}; it cannot be set aside: {error}", told.message);
                        unmoved.push(SetAside { message, ..told });
                    }
                }
            }
        }
        Ok(unmoved)
    }

    /// What lies in `aside`: it stays for whoever wants to know what it was, within a bound.
    fn aside(aside: &Path) -> Result<Vec<SetAside>, JournalError> {
        let mut files = list(aside)?;
        files.retain(|path| !is_directory(path));
        let changed = |path: &PathBuf| fs::symlink_metadata(path).and_then(|m| m.modified()).ok();
        files.sort_by_cached_key(|path| (Reverse(changed(path)), path.clone()));
        for path in files.split_off(files.len().min(MAX_ASIDE)) {
            // One that stays is looked at again by the next agent.
            let _ = fs::remove_file(&path);
        }
        let told = files
            .iter()
            .map(|path| SetAside::new(path, read_entry(path)));
        Ok(told.collect())
    }
}

impl SetAside {
    fn new(path: &Path, read: Result<Entry, String>) -> Self {
        let message = read.err();
        let name = path.file_name().unwrap_or_default();
        Self {
            name: name.to_string_lossy().into_owned(),
            message: message
                .unwrap_or_else(|| "its name does not belong to its content".to_owned()),
        }
    }
}

/// Whether something is a directory, and no link to one.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.is_dir())
}

/// What is in a directory.
fn list(directory: &Path) -> Result<Vec<PathBuf>, JournalError> {
    let read = || {
        fs::read_dir(directory)?
            .map(|file| Ok(file?.path()))
            .collect::<io::Result<Vec<_>>>()
    };
    read().map_err(|e| failed("read", directory, e))
}

/// Reads a file that may be anything: neither a link is followed, nor a pipe waited for, nor more read
/// than an entry may have.
fn read_entry(path: &Path) -> Result<Entry, String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| e.to_string())?;
    if !file.metadata().is_ok_and(|m| m.is_file()) {
        return Err("it is no regular file".to_owned());
    }
    let mut text = Vec::new();
    file.take(MAX_SIZE + 1)
        .read_to_end(&mut text)
        .map_err(|e| e.to_string())?;
    if text.len() as u64 > MAX_SIZE {
        return Err(format!("it has more than {MAX_SIZE} bytes"));
    }
    let value: serde_json::Value = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => return Err(format!("it has format {format}, this agent reads {FORMAT}")),
        None => return Err("it has no format".to_owned()),
    }
    serde_json::from_value(value).map_err(|e| e.to_string())
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> JournalError {
    JournalError::Io {
        operation,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
