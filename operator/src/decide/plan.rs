//! What each node is asked to do: node injections from the experiment, its draws and its peers.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use windtunnel_crds::{
    ChaosExperiment, NodeInjection, NodeInjectionSpec,
    fault::{Fault, Kind},
    injection::{Address, ExperimentRef, NodeFault, NodeNetworkFault, NodeTarget},
    names::{LABEL_EXPERIMENT_UID, injection_name},
    network::NetworkFault,
    status::DrawnPod,
    units::GoDuration,
};

use super::{Observed, Policy};

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
pub(crate) fn node_faults(
    experiment: &ChaosExperiment,
) -> impl Iterator<Item = (&Fault, &NetworkFault)> {
    experiment
        .spec
        .faults
        .iter()
        .filter_map(|fault| match fault.kind() {
            Some(Kind::Network(network)) => Some((fault, network)),
            _ => None,
        })
}

/// What every node with a target is asked: its faults by node name.
pub(crate) fn by_node(observed: &Observed, draws: &Draws) -> BTreeMap<String, Vec<NodeFault>> {
    let mut nodes: BTreeMap<String, Vec<NodeFault>> = BTreeMap::new();
    for (fault, network) in node_faults(&observed.experiment) {
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
                .push(node_fault(observed, (fault, network), targets));
        }
    }
    nodes
}

fn target(observed: &Observed, fault: &Fault, pod: &DrawnPod) -> NodeTarget {
    let seen = observed.candidates.get(&fault.name).into_iter().flatten();
    NodeTarget {
        pod_name: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        containers: seen
            .filter(|c| c.uid == pod.uid)
            .flat_map(|c| c.containers.clone())
            .collect(),
    }
}

fn node_fault(
    observed: &Observed,
    (fault, network): (&Fault, &NetworkFault),
    targets: Vec<NodeTarget>,
) -> NodeFault {
    let start_after = fault.start_after.unwrap_or_default();
    let end = window_end(&observed.experiment, fault);
    let resolved = observed
        .peers
        .get(&fault.name)
        .and_then(|r| r.as_ref().ok());
    NodeFault {
        name: fault.name.clone(),
        start_after,
        duration: GoDuration::from(end.get().saturating_sub(start_after.get())),
        targets,
        network: Some(NodeNetworkFault {
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
        }),
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
            cluster_dns: observed.cluster_dns.iter().copied().map(Address).collect(),
            faults,
        },
        status: None,
    }
}
