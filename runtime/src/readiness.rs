//! Readiness: a process is ready when nothing that it waits for at start is missing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// What a process still waits for, by name.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    missing: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// While it lives, the process is not ready.
#[derive(Debug)]
pub struct Guard {
    readiness: Readiness,
    name: String,
}

impl Readiness {
    /// Blocks readiness under this name until the guard is dropped.
    #[must_use]
    pub fn block(&self, name: &str) -> Guard {
        *self.lock().entry(name.to_owned()).or_default() += 1;
        Guard {
            readiness: self.clone(),
            name: name.to_owned(),
        }
    }

    /// The names of what is still missing; empty when ready.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, usize>> {
        // A panic while holding the lock leaves the map whole: each change is one statement.
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut missing = self.readiness.lock();
        if let Some(count) = missing.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                missing.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_the_last_guard_is_gone() {
        let readiness = Readiness::default();
        let (first, second) = (readiness.block("caches"), readiness.block("caches"));
        let journal = readiness.block("journal");
        assert_eq!(readiness.missing(), ["caches", "journal"]);
        drop(first);
        drop(journal);
        assert_eq!(readiness.missing(), ["caches"]);
        drop(second);
        assert!(readiness.missing().is_empty());
    }
}
