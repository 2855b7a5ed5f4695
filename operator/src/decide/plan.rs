//! What each node is asked to do: node injections from the experiment, its draws and its peers.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use windtunnel_crds::{
    ChaosExperiment, ChaosExperimentStatus, NodeInjection, NodeInjectionSpec,
    fault::{Fault, Kind},
    injection::{Address, ExperimentRef, NodeFault, NodeNetworkFault, NodeTarget},
    names::{LABEL_EXPERIMENT_UID, injection_name},
    network::NetworkFault,
    status::{DrawnPod, FaultPhase},
    units::GoDuration,
};

use super::{Observed, Policy};
use crate::cluster::Candidate;

/// The most addresses of the cluster's DNS that an injection takes.
const CLUSTER_DNS: usize = 64;
/// The most containers of a target that an injection takes.
const CONTAINERS: usize = 64;

/// The draws of the faults that agents carry out, by fault.
pub(crate) type Draws = BTreeMap<String, Vec<DrawnPod>>;

/// The namespace of the experiment and of its targets.
pub(crate) fn namespace(experiment: &ChaosExperiment) -> String {
    experiment.namespace().unwrap_or_default()
}

/// What the draws depend on besides names.
pub(crate) fn seed(experiment: &ChaosExperiment) -> &str {
    let name = experiment.metadata.name.as_deref().unwrap_or_default();
    experiment.spec.seed.as_deref().unwrap_or(name)
}

/// `duration` after `start`; the end of time where that overflows.
pub(crate) fn at(start: Timestamp, duration: GoDuration) -> Timestamp {
    let duration = SignedDuration::try_from(duration.get()).unwrap_or(SignedDuration::MAX);
    start.saturating_add(duration).unwrap_or(Timestamp::MAX)
}

/// When a fault's window closes, after the start of the run.
pub(crate) fn window_end(experiment: &ChaosExperiment, fault: &Fault) -> GoDuration {
    let run = experiment.spec.duration.get();
    let begin = fault.start_after.unwrap_or_default().get();
    let end = fault
        .duration
        .map_or(run, |d| begin.saturating_add(d.get()));
    GoDuration::from(end.min(run))
}

/// The faults of an experiment that agents carry out.
pub(crate) fn node_faults(experiment: &ChaosExperiment) -> impl Iterator<Item = &Fault> {
    let faults = experiment.spec.faults.iter();
    faults.filter(|fault| fault.kind().is_some_and(Kind::is_on_node))
}

/// The nodes that have a target of a fault that has not ended, and no node injection: it is not
/// created yet, or somebody has deleted it.
pub(crate) fn undelivered<'a>(
    experiment: &'a ChaosExperiment,
    status: &'a ChaosExperimentStatus,
    injections: &'a [NodeInjection],
) -> impl Iterator<Item = &'a str> {
    let progress = |fault: &Fault| status.faults.iter().find(|f| f.name == fault.name);
    let nodes = node_faults(experiment)
        .filter_map(progress)
        .filter(|fault| fault.phase != FaultPhase::Ended)
        .flat_map(|fault| &fault.draw)
        .map(|pod| pod.node.as_str());
    nodes.filter(|node| !injections.iter().any(|i| i.spec.node_name == *node))
}

/// The nodes whose injection somebody has deleted before all was over. Before the start one that is
/// missing is made again; those of a finished run are deleted by the operator.
pub(crate) fn withdrawn(observed: &Observed, status: &ChaosExperimentStatus) -> BTreeSet<String> {
    let is_on = status.start_time.is_some() && !status.phase.unwrap_or_default().is_terminal();
    let missing = undelivered(&observed.experiment, status, &observed.injections);
    missing.filter(|_| is_on).map(str::to_owned).collect()
}

/// The names of the containers of a pod that a fault is for; none for a fault on the whole pod.
pub(crate) fn chosen<'a>(fault: &'a Fault, pod: &'a Candidate) -> Vec<&'a str> {
    let named = &fault.target.containers;
    match fault.kind() {
        Some(kind) if kind.is_on_containers() && named.is_empty() => vec![&pod.default_container],
        Some(kind) if kind.is_on_containers() => named.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    }
}

/// What every node with a target is asked: its faults by node name.
pub(crate) fn by_node(observed: &Observed, draws: &Draws) -> BTreeMap<String, Vec<NodeFault>> {
    let mut nodes: BTreeMap<String, Vec<NodeFault>> = BTreeMap::new();
    for fault in node_faults(&observed.experiment) {
        let mut targets: BTreeMap<String, Vec<NodeTarget>> = BTreeMap::new();
        for pod in draws.get(&fault.name).into_iter().flatten() {
            targets
                .entry(pod.node.clone())
                .or_default()
                .push(target(observed, fault, pod));
        }
        for (node, targets) in targets {
            nodes
                .entry(node)
                .or_default()
                .push(node_fault(observed, fault, targets));
        }
    }
    nodes
}

fn target(observed: &Observed, fault: &Fault, pod: &DrawnPod) -> NodeTarget {
    let mut seen = observed.candidates.get(&fault.name).into_iter().flatten();
    let containers = seen.find(|c| c.uid == pod.uid).map(|seen| {
        let chosen = chosen(fault, seen);
        let all = seen.containers.iter();
        let wanted = all.filter(|c| chosen.is_empty() || chosen.contains(&c.name.as_str()));
        wanted.take(CONTAINERS).cloned().collect()
    });
    NodeTarget {
        pod_name: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        containers: containers.unwrap_or_default(),
    }
}

fn node_fault(observed: &Observed, fault: &Fault, targets: Vec<NodeTarget>) -> NodeFault {
    let start_after = fault.start_after.unwrap_or_default();
    let end = window_end(&observed.experiment, fault);
    NodeFault {
        name: fault.name.clone(),
        start_after,
        duration: GoDuration::from(end.get().saturating_sub(start_after.get())),
        targets,
        network: fault
            .network
            .as_ref()
            .map(|network| node_network(observed, &fault.name, network)),
        cpu: fault.cpu.clone(),
        memory: fault.memory.clone(),
        io: fault.io.clone(),
        disk_fill: fault.disk_fill.clone(),
        container_kill: fault.container_kill.clone(),
        container_pause: fault.container_pause.clone(),
    }
}

fn node_network(observed: &Observed, fault: &str, network: &NetworkFault) -> NodeNetworkFault {
    let resolved = observed.peers.get(fault).and_then(|r| r.as_ref().ok());
    NodeNetworkFault {
        impairment: network.into(),
        direction: network.direction,
        peers: network
            .peers
            .as_ref()
            .map(|_| resolved.map(|r| r.groups.clone()).unwrap_or_default()),
        local_ports: network
            .peers
            .as_ref()
            .map(|p| p.local_ports.clone())
            .unwrap_or_default(),
        spare: network.spare.clone(),
    }
}

/// A node's injection as it is created: not started.
pub(crate) fn injection(observed: &Observed, node: &str, faults: Vec<NodeFault>) -> NodeInjection {
    let experiment = &observed.experiment;
    let Policy {
        release_namespace,
        recheck_after,
        ..
    } = &observed.policy;
    let (name, uid) = (experiment.name_any(), experiment.uid().unwrap_or_default());
    let dns = observed.cluster_dns.iter().copied().take(CLUSTER_DNS);
    NodeInjection {
        metadata: ObjectMeta {
            name: Some(injection_name(&name, &uid, node)),
            namespace: Some(release_namespace.clone()),
            labels: Some([(LABEL_EXPERIMENT_UID.to_owned(), uid.clone())].into()),
            ..ObjectMeta::default()
        },
        spec: NodeInjectionSpec {
            node_name: node.to_owned(),
            experiment: ExperimentRef {
                namespace: namespace(experiment),
                name,
                uid,
            },
            duration: experiment.spec.duration,
            start_time: None,
            abort: false,
            dry_run: experiment.spec.dry_run,
            recheck_after: GoDuration::from(recheck_after.unsigned_abs()),
            cluster_dns: dns.map(Address).collect(),
            faults,
        },
        status: None,
    }
}
