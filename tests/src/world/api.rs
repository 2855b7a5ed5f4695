//! The API server: what is stored, with versions, and what it refuses.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use windtunnel_agent::model::Key;
use windtunnel_crds::conditions::{ConditionType, condition};
use windtunnel_crds::injection::NodeContainer;
use windtunnel_crds::names::FINALIZER;
use windtunnel_crds::status::Phase;
use windtunnel_crds::{ChaosExperiment, ChaosExperimentStatus, NodeInjection, NodeInjectionStatus};
use windtunnel_operator::cluster::Candidate;
use windtunnel_operator::decide::Change;

use super::laws::{Laws, Violation};
use super::script::Run;
use super::wall;

/// The decision was made on a state that is not true any more.
#[derive(Debug)]
pub(super) struct Stale;

pub(super) struct Api {
    /// Counts changes.
    pub(super) version: u64,
    pub(super) experiment: Option<ChaosExperiment>,
    pub(super) injections: BTreeMap<String, NodeInjection>,
    pub(super) pods: Vec<Candidate>,
    /// Since when the emergency stop is in force.
    pub(super) stopped: Option<Duration>,
    /// Who holds the lease, and when it was renewed.
    pub(super) lease: Option<(usize, Duration)>,
    /// When agents last said that they live.
    pub(super) beats: BTreeMap<String, Duration>,
    stop_until: Duration,
    down_until: Duration,
    uids: u64,
}

impl Api {
    pub(super) fn new(run: Run) -> Self {
        let spec = serde_saphyr::from_str(run.spec()).unwrap_or_else(|e| panic!("{run:?}: {e}"));
        let mut experiment = ChaosExperiment::new("run", spec);
        experiment.metadata.namespace = Some("shop".to_owned());
        experiment.metadata.uid = Some("run-uid".to_owned());
        experiment.metadata.generation = Some(1);
        experiment.metadata.resource_version = Some("1".to_owned());
        let pods = (0..6).map(|i| Candidate {
            name: format!("pod{i}"),
            uid: format!("pod{i}-uid"),
            node: ["node1", "node2"][i % 2].to_owned(),
            host_network: false,
            // The last two are of another app.
            eligible: true,
            containers: vec![NodeContainer {
                name: "app".to_owned(),
                id: format!("pod{i}-app-0"),
                volume_mounts: Vec::new(),
                storage_limits: BTreeMap::new(),
            }],
            default_container: "app".to_owned(),
            addresses: Vec::new(),
        });
        Self {
            version: 1,
            experiment: Some(experiment),
            injections: BTreeMap::new(),
            pods: pods.collect(),
            stopped: None,
            lease: None,
            beats: BTreeMap::new(),
            stop_until: Duration::ZERO,
            down_until: Duration::ZERO,
            uids: 0,
        }
    }

    /// The pods that the faults' selector selects.
    pub(super) fn selected(&self) -> Vec<Candidate> {
        let mut pods = self.pods.clone();
        pods.retain(|p| !matches!(p.name.as_str(), "pod4" | "pod5"));
        pods
    }

    pub(super) fn is_up(&self, now: Duration) -> bool {
        now >= self.down_until
    }

    pub(super) fn due(&self) -> impl Iterator<Item = Duration> {
        [self.stop_until, self.down_until].into_iter()
    }

    pub(super) fn pass_time(&mut self, now: Duration) {
        if self.stopped.is_some() && now >= self.stop_until {
            self.stopped = None;
            self.version += 1;
        }
    }

    pub(super) fn cut(&mut self, until: Duration) {
        self.down_until = until;
    }

    pub(super) fn stop(&mut self, now: Duration, until: Duration) {
        self.stopped = self.stopped.or(Some(now));
        self.stop_until = until;
        self.version += 1;
    }

    pub(super) fn heal(&mut self) {
        self.down_until = Duration::ZERO;
        self.stop_until = Duration::ZERO;
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        Some(
            self.experiment
                .as_ref()?
                .status
                .as_ref()?
                .phase
                .unwrap_or_default(),
        )
    }

    pub(super) fn message(&self) -> String {
        let status = self.experiment.as_ref().and_then(|e| e.status.as_ref());
        status.map_or_else(String::new, |s| s.message.clone())
    }

    /// Status and reason of a condition of the experiment.
    pub(super) fn condition(&self, type_: ConditionType) -> Option<(&str, &str)> {
        let status = self.experiment.as_ref()?.status.as_ref()?;
        let found = condition(&status.conditions, type_)?;
        Some((found.status.as_str(), found.reason.as_str()))
    }

    pub(super) fn delete_pod(&mut self, number: u8) {
        let name = format!("pod{}", number % 6);
        self.pods.retain(|p| p.name != name);
        self.version += 1;
    }

    /// Another container takes the place of a pod's.
    pub(super) fn restart(&mut self, number: u8) {
        let name = format!("pod{}", number % 6);
        self.version += 1;
        if let Some(pod) = self.pods.iter_mut().find(|p| p.name == name) {
            pod.containers[0].id = format!("{name}-app-{}", self.version);
        }
    }

    /// The id of the container that a fault is on by now; empty where it is on the pod's network.
    /// None if the pod is gone.
    pub(super) fn container(&self, key: &Key) -> Option<String> {
        let pod = self.pods.iter().find(|p| p.uid == key.pod)?;
        let container = pod.containers.iter().find(|c| c.name == key.container);
        Some(container.map_or_else(String::new, |c| c.id.clone()))
    }

    pub(super) fn abort(&mut self, now: Duration, laws: &mut Laws) {
        if let Some(experiment) = &mut self.experiment {
            experiment.spec.abort = true;
            experiment.metadata.generation = experiment.metadata.generation.map(|g| g + 1);
            laws.ended(now);
            self.touch();
        }
    }

    pub(super) fn delete(&mut self, now: Duration, laws: &mut Laws) {
        let Some(experiment) = &mut self.experiment else {
            return;
        };
        laws.ended(now);
        if experiment
            .metadata
            .finalizers
            .as_deref()
            .unwrap_or_default()
            .is_empty()
        {
            self.experiment = None;
        } else {
            experiment
                .metadata
                .deletion_timestamp
                .get_or_insert(Time(wall(now)));
        }
        self.touch();
    }

    /// The experiment has a new version.
    fn touch(&mut self) {
        self.version += 1;
        if let Some(experiment) = &mut self.experiment {
            experiment.metadata.resource_version = Some(self.version.to_string());
        }
    }

    fn current(&mut self, seen: &ChaosExperiment) -> Result<&mut ChaosExperiment, Stale> {
        let current = self.experiment.as_mut().ok_or(Stale)?;
        if current.metadata.resource_version == seen.metadata.resource_version {
            Ok(current)
        } else {
            Err(Stale)
        }
    }

    pub(super) fn set_finalizer(
        &mut self,
        seen: &ChaosExperiment,
        is_set: bool,
    ) -> Result<(), Stale> {
        let current = self.current(seen)?;
        current.metadata.finalizers = is_set.then(|| vec![FINALIZER.to_owned()]);
        if !is_set && current.metadata.deletion_timestamp.is_some() {
            self.experiment = None;
        }
        self.touch();
        Ok(())
    }

    pub(super) fn write_status(
        &mut self,
        now: Duration,
        seen: &ChaosExperiment,
        status: ChaosExperimentStatus,
    ) -> Result<Result<(), Violation>, Stale> {
        let current = self.current(seen)?;
        let old = current.status.clone().unwrap_or_default();
        let broken = write_once(&old, &status, current.status.is_some());
        current.status = Some(status);
        self.touch();
        Ok(broken.map_or(Ok(()), |what| Err(Violation::new(now, what))))
    }

    pub(super) fn create(
        &mut self,
        now: Duration,
        mut injection: NodeInjection,
    ) -> Result<(), Stale> {
        let name = injection.metadata.name.clone().unwrap_or_default();
        if self.injections.contains_key(&name) {
            return Err(Stale);
        }
        self.version += 1;
        self.uids += 1;
        injection.metadata.uid = Some(format!("{name}-{}", self.uids));
        injection.metadata.generation = Some(1);
        injection.metadata.resource_version = Some(self.version.to_string());
        injection.metadata.creation_timestamp = Some(Time(wall(now)));
        self.injections.insert(name, injection);
        Ok(())
    }

    pub(super) fn patch(
        &mut self,
        name: &str,
        version: Option<&String>,
        change: Change,
    ) -> Result<(), Stale> {
        let injection = self.injections.get_mut(name).ok_or(Stale)?;
        if version.is_some_and(|v| injection.metadata.resource_version.as_ref() != Some(v)) {
            return Err(Stale);
        }
        self.version += 1;
        injection.metadata.resource_version = Some(self.version.to_string());
        injection.metadata.generation = injection.metadata.generation.map(|g| g + 1);
        match change {
            Change::Start(at) => {
                injection.spec.start_time.get_or_insert(MicroTime(at));
            }
            Change::Abort => injection.spec.abort = true,
            Change::Faults(faults) => injection.spec.faults = faults,
        }
        Ok(())
    }

    pub(super) fn delete_injection(&mut self, name: &str, uid: Option<&String>) {
        if self
            .injections
            .get(name)
            .is_some_and(|i| i.metadata.uid.as_ref() == uid)
        {
            self.injections.remove(name);
            self.version += 1;
        }
    }

    /// Somebody deletes the node injection of a node.
    pub(super) fn withdraw(&mut self, number: u8, laws: &mut Laws) {
        let node = ["node1", "node2"][usize::from(number % 2)];
        let before = self.injections.len();
        self.injections.retain(|_, i| i.spec.node_name != node);
        if self.injections.len() < before {
            laws.withdrawn();
            self.version += 1;
        }
    }

    /// What an agent reports; nothing happens if the injection is gone.
    pub(super) fn report(&mut self, name: &str, uid: &str, status: NodeInjectionStatus) {
        let found = self.injections.get_mut(name);
        if let Some(injection) = found.filter(|i| i.metadata.uid.as_deref() == Some(uid)) {
            self.version += 1;
            injection.metadata.resource_version = Some(self.version.to_string());
            injection.status = Some(status);
        }
    }

    /// Node injections of experiments that are gone are deleted.
    pub(super) fn sweep(&mut self) {
        let uid = self
            .experiment
            .as_ref()
            .and_then(|e| e.metadata.uid.clone());
        let before = self.injections.len();
        self.injections
            .retain(|_, i| Some(&i.spec.experiment.uid) == uid.as_ref());
        self.version += u64::from(before != self.injections.len());
    }
}

/// What a status may not do to the one before.
fn write_once(
    old: &ChaosExperimentStatus,
    new: &ChaosExperimentStatus,
    was_there: bool,
) -> Option<&'static str> {
    let (old_phase, new_phase) = (old.phase.unwrap_or_default(), new.phase.unwrap_or_default());
    if was_there && old == new {
        Some("an unchanged status was written")
    } else if old.start_time.is_some() && old.start_time != new.start_time {
        Some("startTime was written twice")
    } else if old.deadline.is_some() && old.deadline != new.deadline {
        Some("deadline was written twice")
    } else if old_phase.is_terminal() && old_phase != new_phase {
        Some("a terminal phase was left")
    } else if old_phase > new_phase {
        Some("a phase went back")
    } else {
        None
    }
}
