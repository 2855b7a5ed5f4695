//! What this replica did lately, by experiment: the caches may not show it yet, and no object
//! says it. Lost with the process, and nothing depends on it but speed and words.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::ResourceExt as _;
use windtunnel_crds::ChaosExperiment;

use crate::decide::{Attempt, Trouble};

/// By the experiment's uid.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<HashMap<String, Doings>>);

#[derive(Debug, Default)]
struct Doings {
    written: Option<Written>,
    attempts: BTreeMap<String, Attempt>,
    trouble: Option<Trouble>,
}

/// What was last written, with the version that it replaced.
#[derive(Debug)]
struct Written {
    replaced: Option<String>,
    object: ChaosExperiment,
}

impl Recent {
    /// A write of `seen` answered `object`.
    pub(crate) fn wrote(&self, seen: &ChaosExperiment, object: ChaosExperiment) {
        let written = Written {
            replaced: seen.resource_version(),
            object,
        };
        self.lock().entry(uid(seen)).or_default().written = Some(written);
    }

    /// The version of the experiment that the next write must carry.
    pub(crate) fn version(&self, seen: &ChaosExperiment) -> Option<String> {
        let recent = self.lock();
        let written = recent.get(&uid(seen)).and_then(|d| d.written.as_ref());
        let newer = written.filter(|w| w.replaced == seen.metadata.resource_version);
        newer
            .and_then(|w| w.object.resource_version())
            .or_else(|| seen.resource_version())
    }

    /// The experiment as last written, where the cache does not show that yet.
    pub(crate) fn freshest(&self, cached: Arc<ChaosExperiment>) -> Arc<ChaosExperiment> {
        let mut recent = self.lock();
        let Some(doings) = recent.get_mut(&uid(&cached)) else {
            return cached;
        };
        match &doings.written {
            Some(w) if w.replaced == cached.metadata.resource_version => Arc::new(w.object.clone()),
            _ => {
                doings.written = None;
                cached
            }
        }
    }

    /// It was tried to remove a pod.
    pub(crate) fn tried(&self, experiment: &ChaosExperiment, pod: String, attempt: Attempt) {
        let mut recent = self.lock();
        let doings = recent.entry(uid(experiment)).or_default();
        doings.attempts.insert(pod, attempt);
    }

    /// How a pass has failed; `None`: it has not.
    pub(crate) fn passed(&self, experiment: &ChaosExperiment, failure: Option<Trouble>) {
        let mut recent = self.lock();
        match (recent.get_mut(&uid(experiment)), failure) {
            (Some(doings), None) => doings.trouble = None,
            (None, None) => {}
            (_, Some(trouble)) => {
                let doings = recent.entry(uid(experiment)).or_default();
                doings.trouble = Some(trouble.after(doings.trouble.as_ref()));
            }
        }
    }

    /// The last tries to remove pods by their uid, and how the last pass failed.
    pub(crate) fn doings(
        &self,
        experiment: &ChaosExperiment,
    ) -> (BTreeMap<String, Attempt>, Option<Trouble>) {
        let recent = self.lock();
        let doings = recent.get(&uid(experiment));
        doings
            .map(|d| (d.attempts.clone(), d.trouble.clone()))
            .unwrap_or_default()
    }

    /// Forgets all experiments but those of these uids.
    pub(crate) fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.lock().retain(|uid, _| is_known(uid));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Doings>> {
        // Every change is one statement: a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn uid(experiment: &ChaosExperiment) -> String {
    experiment.uid().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::decide::{Unread, testing::experiment};

    fn at(version: &str) -> ChaosExperiment {
        let mut experiment = experiment("{duration: 1m, faults: []}");
        experiment.metadata.resource_version = Some(version.to_owned());
        experiment
    }

    #[test]
    fn a_write_counts_until_the_cache_has_moved_on() {
        let recent = Recent::default();
        assert_eq!(recent.version(&at("1")), Some("1".to_owned()));
        recent.wrote(&at("1"), at("2"));
        assert_eq!(recent.version(&at("1")), Some("2".to_owned()));
        let seen = |version| recent.freshest(Arc::new(at(version))).resource_version();
        assert_eq!(seen("1"), Some("2".to_owned()), "the cache is behind");
        assert_eq!(seen("3"), Some("3".to_owned()), "the cache is ahead");
        assert_eq!(seen("1"), Some("1".to_owned()), "and nothing is kept");
    }

    #[test]
    fn trouble_lasts_from_the_first_pass_that_failed_in_this_way() {
        let recent = Recent::default();
        let trouble = |message: &str, unread, second| Trouble {
            message: message.to_owned(),
            since: Timestamp::from_second(second).unwrap(),
            unread,
        };
        let (failed, forbidden) = (Some(Unread::Failed), Some(Unread::Forbidden));
        for (second, failure, since) in [
            (1, None, 0),
            (2, Some(("a", None)), 2),
            (3, Some(("b", None)), 2),
            (4, None, 0),
            (5, Some(("c", failed)), 5),
            (6, Some(("d", failed)), 5),
            (7, Some(("e", forbidden)), 7),
            (8, Some(("f", forbidden)), 7),
            (9, Some(("g", None)), 9),
        ] {
            let at_time = |time| failure.map(|(message, kind)| trouble(message, kind, time));
            recent.passed(&at("1"), at_time(second));
            assert_eq!(recent.doings(&at("1")).1, at_time(since), "{second}");
        }
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let recent = Recent::default();
        let trouble = Trouble {
            message: "no".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            unread: None,
        };
        recent.passed(&at("1"), Some(trouble));
        assert!(recent.doings(&at("1")).1.is_some());
        recent.retain(|uid| uid == "run-uid");
        assert_eq!(recent.lock().len(), 1);
        recent.retain(|_| false);
        assert!(recent.lock().is_empty());
    }
}
