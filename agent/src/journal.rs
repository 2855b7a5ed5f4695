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
    io::{self, Write as _},
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
            .map_err(|e| failed("open", &lock_path, e))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|_| JournalError::Locked(directory.to_owned()))?;
        let mut journal = Self {
            directory: directory.to_owned(),
            entries: BTreeMap::new(),
            unsaved: BTreeSet::new(),
            _lock: lock,
        };
        journal.read(&aside)?;
        let set_aside = Self::aside(&aside)?;
        Ok((journal, set_aside))
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

    /// Reads all entries; moves what is none into `aside`.
    fn read(&mut self, aside: &Path) -> Result<(), JournalError> {
        for path in list(&self.directory)? {
            let name = path.file_name().unwrap_or_default();
            if path.is_dir() || name == "lock" {
                continue;
            }
            if path.extension().is_some_and(|e| e == "new") {
                fs::remove_file(&path).map_err(|e| failed("remove", &path, e))?;
                continue;
            }
            match read_entry(&path) {
                Ok(entry) if self.path(&entry.key) == path => {
                    self.entries.insert(entry.key.clone(), entry);
                }
                _ => fs::rename(&path, aside.join(name))
                    .map_err(|e| failed("set aside", &path, e))?,
            }
        }
        Ok(())
    }

    /// What lies in `aside`: it stays for whoever wants to know what it was, within a bound.
    fn aside(aside: &Path) -> Result<Vec<SetAside>, JournalError> {
        let mut files = list(aside)?;
        files.retain(|path| path.is_file());
        let changed = |path: &PathBuf| fs::metadata(path).and_then(|m| m.modified()).ok();
        files.sort_by_cached_key(|path| (Reverse(changed(path)), path.clone()));
        for path in files.split_off(files.len().min(MAX_ASIDE)) {
            fs::remove_file(&path).map_err(|e| failed("remove", &path, e))?;
        }
        let told = files.into_iter().map(|path| SetAside {
            message: read_entry(&path)
                .err()
                .unwrap_or_else(|| "its name does not belong to its content".to_owned()),
            name: path
                .file_name()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default(),
        });
        Ok(told.collect())
    }
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

fn read_entry(path: &Path) -> Result<Entry, String> {
    let size = fs::metadata(path).map_err(|e| e.to_string())?.len();
    if size > MAX_SIZE {
        return Err(format!("{size} bytes are too many"));
    }
    let text = fs::read(path).map_err(|e| e.to_string())?;
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
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{model::Window, testing::entry};

    #[test]
    fn what_was_written_is_read_by_the_next_agent() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, aside) = Journal::open(dir.path()).unwrap();
        assert!(aside.is_empty());
        journal.write(entry("a")).unwrap();
        journal.write(entry("b")).unwrap();
        journal.forget(&entry("a").key);
        journal.forget(&entry("a").key);
        drop(journal);
        let (journal, aside) = Journal::open(dir.path()).unwrap();
        assert!(aside.is_empty());
        assert_eq!(
            journal.entries().values().collect::<Vec<_>>(),
            [&entry("b")]
        );
    }

    #[test]
    fn two_agents_cannot_hold_it() {
        let dir = tempfile::tempdir().unwrap();
        let _first = Journal::open(dir.path()).unwrap();
        assert!(matches!(
            Journal::open(dir.path()),
            Err(JournalError::Locked(_))
        ));
    }

    #[test]
    fn what_is_no_entry_is_set_aside_and_the_rest_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.write(entry("a")).unwrap();
        let good = journal.path(&entry("a").key);
        drop(journal);
        let newer = fs::read_to_string(&good)
            .unwrap()
            .replace("\"format\":1", "\"format\":2");
        for (name, content) in [
            ("cut.json", "{\"format\":1,"),
            ("foreign.json", "{}"),
            ("empty.json", ""),
            ("newer.json", &newer),
            ("renamed.json", &fs::read_to_string(&good).unwrap()),
            ("half.new", "{"),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
        }
        fs::write(dir.path().join("large.json"), vec![b' '; 100_000]).unwrap();
        let (journal, aside) = Journal::open(dir.path()).unwrap();
        assert_eq!(journal.entries().len(), 1);
        let mut names: Vec<_> = aside.iter().map(|a| a.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "cut.json",
                "empty.json",
                "foreign.json",
                "large.json",
                "newer.json",
                "renamed.json"
            ]
        );
        assert!(dir.path().join("aside/cut.json").exists());
        drop(journal);
        let (_, again) = Journal::open(dir.path()).unwrap();
        let sorted = |mut aside: Vec<SetAside>| {
            aside.sort_by(|a, b| a.name.cmp(&b.name));
            aside
        };
        assert_eq!(sorted(again), sorted(aside), "told until it is removed");
    }

    #[test]
    fn a_bounded_number_of_files_is_kept_aside() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..=MAX_ASIDE {
            fs::write(dir.path().join(format!("{i}.json")), "{}").unwrap();
        }
        let (_, aside) = Journal::open(dir.path()).unwrap();
        assert_eq!(aside.len(), MAX_ASIDE);
        let kept = fs::read_dir(dir.path().join("aside")).unwrap();
        assert_eq!(kept.count(), MAX_ASIDE);
    }

    #[test]
    fn an_entry_that_cannot_be_written_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.write(entry("a")).unwrap();
        let mut large = entry("a");
        large.pod_name = "x".repeat(100_000);
        assert!(matches!(
            journal.write(large),
            Err(JournalError::TooLarge(_))
        ));
        assert_eq!(journal.entries()[&entry("a").key], entry("a"));
        // The directory is gone, as on a tmpfs that was unmounted.
        fs::remove_dir_all(dir.path()).unwrap();
        assert!(matches!(
            journal.write(entry("b")),
            Err(JournalError::Io { .. })
        ));
        assert_eq!(journal.entries().len(), 1);
    }

    #[test]
    fn what_has_happened_is_known_at_once_and_written_when_it_can_be() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        let window = |end| {
            let window = Window {
                begin: Duration::ZERO,
                end: Duration::from_secs(end),
            };
            Entry {
                window: Some(window),
                ..entry("a")
            }
        };
        for pod in ["a", "b"] {
            journal.write(entry(pod)).unwrap();
        }
        // A file is in the directory's place for a while.
        let (there, away) = (dir.path(), dir.path().with_extension("away"));
        fs::rename(there, &away).unwrap();
        fs::write(there, "").unwrap();
        journal.note(window(1));
        journal.note(window(2));
        journal.forget(&entry("b").key);
        let known: Vec<_> = journal.entries().values().cloned().collect();
        assert_eq!(known, [window(2)]);
        journal.flush();
        fs::remove_file(there).unwrap();
        fs::rename(&away, there).unwrap();
        journal.flush();
        let next = |journal| {
            drop::<Journal>(journal);
            let (journal, _) = Journal::open(dir.path()).unwrap();
            journal.entries().values().cloned().collect::<Vec<_>>()
        };
        assert_eq!(next(journal), [window(2)]);
    }
}
