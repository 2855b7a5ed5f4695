//! Readiness: a process is ready when nothing that it waits for at start is missing.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// What a process still waits for, by name.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    missing: Arc<watch::Sender<BTreeMap<String, usize>>>,
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
        self.missing.send_modify(|missing| {
            *missing.entry(name.to_owned()).or_default() += 1;
        });
        Guard {
            readiness: self.clone(),
            name: name.to_owned(),
        }
    }

    /// The names of what is still missing; empty when ready.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        self.missing.borrow().keys().cloned().collect()
    }

    /// Waits until nothing is missing.
    pub async fn ready(&self) {
        let mut missing = self.missing.subscribe();
        // It fails only where the sender is gone, and that is held here.
        let _ = missing.wait_for(BTreeMap::is_empty).await;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.readiness.missing.send_modify(|missing| {
            if let Some(count) = missing.get_mut(&self.name) {
                *count -= 1;
                if *count == 0 {
                    missing.remove(&self.name);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ready_when_the_last_guard_is_gone() {
        let readiness = Readiness::default();
        let (first, second) = (readiness.block("caches"), readiness.block("caches"));
        let journal = readiness.block("journal");
        assert_eq!(readiness.missing(), ["caches", "journal"]);
        drop(first);
        drop(journal);
        assert_eq!(readiness.missing(), ["caches"]);
        let waiting = tokio::spawn({
            let readiness = readiness.clone();
            async move { readiness.ready().await }
        });
        drop(second);
        assert!(readiness.missing().is_empty());
        assert!(waiting.await.is_ok());
    }
}
