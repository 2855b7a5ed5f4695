//! Reads what a decision needs, and nothing else.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use futures::future::try_join_all;
use jiff::Timestamp;
use kube::{
    Api, ResourceExt as _,
    api::ListParams,
    core::{PartialObjectMeta, Selector},
};
use thiserror::Error;
use tokio::time::Instant;
use windtunnel_crds::{ChaosExperiment, fault::Fault, names::LABEL_EXPERIMENT_UID};

use crate::{
    cluster::{self, Candidate, EndpointSlice, Pod, Service},
    controller::Ctx,
    decide::{Observed, PodPresence, needs},
    directory::DirectoryError,
    peers::{self, PeerError, PeerSet},
};

/// Why the cluster could not be read.
#[derive(Debug, Error)]
pub(crate) enum ObserveError {
    /// A list or get failed.
    #[error("cannot read {what}")]
    Read {
        /// What was read.
        what: String,
        /// Why it failed.
        #[source]
        source: kube::Error,
    },
    /// A fault's selector cannot be understood.
    #[error("the selector of fault {fault} cannot be used")]
    Selector {
        /// The fault.
        fault: String,
        /// Why.
        #[source]
        source: kube::core::ParseExpressionError,
    },
    /// The containers of the targets could not be looked up.
    #[error("cannot look up the containers of the targets")]
    Containers(#[source] DirectoryError),
    /// Peers could not be looked up.
    #[error("cannot look up the peers of fault {fault}")]
    Peers {
        /// The fault.
        fault: String,
        /// Why.
        #[source]
        source: DirectoryError,
    },
}

/// Reads all that [`crate::decide::decide`] needs for this experiment.
///
/// # Errors
/// [`ObserveError`] where a read fails.
pub(crate) async fn observe(
    ctx: &Ctx,
    experiment: Arc<ChaosExperiment>,
    now: Timestamp,
) -> Result<Observed, ObserveError> {
    let uid = experiment.uid().unwrap_or_default();
    let belongs =
        |labels: &BTreeMap<String, String>| labels.get(LABEL_EXPERIMENT_UID) == Some(&uid);
    let injections: Vec<_> = ctx
        .injections
        .state()
        .into_iter()
        .filter(|i| belongs(i.labels()))
        .collect();
    let mut injections: Vec<_> = injections.into_iter().map(Arc::unwrap_or_clone).collect();
    injections.sort_by_key(kube::ResourceExt::name_any);
    let stop = ctx.is_stopped();
    let needs = needs(&experiment, &injections, stop, now);
    let faults = |names: &[String]| -> Vec<Fault> {
        let wanted = experiment
            .spec
            .faults
            .iter()
            .filter(|f| names.contains(&f.name));
        wanted.cloned().collect()
    };
    let namespace = experiment.namespace().unwrap_or_default();
    let candidates = faults(&needs.candidates);
    let candidates = try_join_all(
        candidates
            .iter()
            .map(|fault| matching_pods(ctx, &namespace, fault)),
    )
    .await?;
    let mut resolved = BTreeMap::new();
    for fault in faults(&needs.peers) {
        resolved.insert(
            fault.name.clone(),
            resolve_peers(ctx, &experiment, &fault).await?,
        );
    }
    Ok(Observed {
        pods: if needs.pods {
            Some(pods(ctx, &namespace).await?)
        } else {
            None
        },
        cluster_dns: if needs.cluster_dns {
            cluster_dns(ctx).await?
        } else {
            Vec::new()
        },
        containers: if needs.containers {
            let name = experiment.name_any();
            let containers = ctx.directories.containers((&namespace, &name)).await;
            Some(containers.map_err(ObserveError::Containers)?)
        } else {
            None
        },
        candidates: candidates.into_iter().collect(),
        peers: resolved,
        experiment: Arc::unwrap_or_clone(experiment),
        injections,
        fleet: ctx.fleet.fleet(Instant::now()),
        stop,
        policy: ctx.policy.clone(),
    })
}

fn reading(what: impl Into<String>) -> impl FnOnce(kube::Error) -> ObserveError {
    let what = what.into();
    move |source| ObserveError::Read { what, source }
}

/// The pods that a fault's selector matches, trimmed.
async fn matching_pods(
    ctx: &Ctx,
    namespace: &str,
    fault: &Fault,
) -> Result<(String, Vec<Candidate>), ObserveError> {
    let selector: Selector =
        fault
            .target
            .selector
            .clone()
            .try_into()
            .map_err(|source| ObserveError::Selector {
                fault: fault.name.clone(),
                source,
            })?;
    let api: Api<Pod> = Api::namespaced_with(ctx.client.clone(), namespace, &cluster::pods());
    let list = api
        .list(&ListParams::default().labels_from(&selector))
        .await
        .map_err(reading(format!("the pods of fault {}", fault.name)))?;
    Ok((
        fault.name.clone(),
        list.items.iter().map(Candidate::from).collect(),
    ))
}

/// The uids of the namespace's pods: what is not among them is gone.
async fn pods(ctx: &Ctx, namespace: &str) -> Result<BTreeMap<String, PodPresence>, ObserveError> {
    let api: Api<PartialObjectMeta<k8s_openapi::api::core::v1::Pod>> =
        Api::namespaced(ctx.client.clone(), namespace);
    let list = api
        .list(&ListParams::default())
        .await
        .map_err(reading(format!("the pods of namespace {namespace}")))?;
    let presence = |pod: PartialObjectMeta<_>| {
        let leaving = pod.metadata.deletion_timestamp.is_some();
        let presence = if leaving {
            PodPresence::Leaving
        } else {
            PodPresence::There
        };
        Some((pod.metadata.uid?, presence))
    };
    Ok(list.items.into_iter().filter_map(presence).collect())
}

async fn resolve_peers(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
    fault: &Fault,
) -> Result<Result<PeerSet, PeerError>, ObserveError> {
    let Some(wanted) = fault.network.as_ref().and_then(|n| n.peers.as_ref()) else {
        return Ok(Ok(PeerSet::default()));
    };
    let namespace = experiment.namespace().unwrap_or_default();
    let directory = ctx
        .directories
        .look_up((&namespace, &experiment.name_any()), wanted)
        .await
        .map_err(|source| ObserveError::Peers {
            fault: fault.name.clone(),
            source,
        })?;
    Ok(peers::resolve(wanted, &namespace, &directory))
}

/// The addresses of the cluster's DNS Service and of the pods behind it; none where there is no
/// such Service.
async fn cluster_dns(ctx: &Ctx) -> Result<Vec<IpAddr>, ObserveError> {
    let (namespace, name) = &ctx.cluster_dns;
    let api: Api<Service> =
        Api::namespaced_with(ctx.client.clone(), namespace, &cluster::services());
    let service = api
        .get_opt(name)
        .await
        .map_err(reading("the cluster's DNS Service"))?;
    let slices: Api<EndpointSlice> = Api::namespaced(ctx.client.clone(), namespace);
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
    let slices = slices
        .list(&of_service)
        .await
        .map_err(reading("the endpoints of the cluster's DNS"))?;
    let texts = service.into_iter().flat_map(|s| s.spec.cluster_ips).chain(
        slices
            .items
            .into_iter()
            .flat_map(|s| s.endpoints)
            .flat_map(|e| e.addresses),
    );
    let mut addresses: Vec<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}
