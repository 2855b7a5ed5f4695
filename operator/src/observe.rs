//! Reads what a decision needs, and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use jiff::Timestamp;
use kube::{
    Api, ResourceExt,
    api::ListParams,
    core::{PartialObjectMeta, Selector},
};
use thiserror::Error;
use tokio::time::{Instant, timeout};
use windtunnel_crds::{
    ChaosExperiment, NodeInjection, fault::Fault, names::LABEL_EXPERIMENT_UID, status::Phase,
};
use windtunnel_runtime::chain;

use crate::{
    cluster::{self, Candidate, EndpointSlice, Pod, Service},
    controller::Ctx,
    decide::{Needs, Observed, PodPresence, Trouble, Unread, is_undelivered, needs},
    directory::DirectoryError,
    peers::{self, PeerError, PeerSet},
};

/// Why the cluster could not be read.
#[derive(Debug, Error)]
pub(crate) enum ObserveError {
    /// An answer did not come in time.
    #[error("no answer in time when reading {0}")]
    Silence(&'static str),
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
    /// The experiment's namespace could not be looked at.
    #[error("cannot look at the pods of the namespace")]
    Namespace(#[source] DirectoryError),
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

impl ObserveError {
    /// Whether it is of any use to try again.
    pub(crate) fn kind(&self) -> Unread {
        let source = match self {
            Self::Read { source, .. } => source,
            Self::Selector { .. }
            | Self::Peers {
                source: DirectoryError::Selector(_),
                ..
            } => {
                return Unread::Senseless;
            }
            Self::Silence(_) | Self::Namespace(_) | Self::Peers { .. } => return Unread::Failed,
        };
        match source {
            kube::Error::Api(status) => match status.code {
                408 | 409 | 410 | 429 => Unread::Failed,
                401 | 403 => Unread::Forbidden,
                400..500 => Unread::Senseless,
                _ => Unread::Failed,
            },
            _ => Unread::Failed,
        }
    }
}

/// What was read, and what could not be read that the run can do without for now.
type Reading = (Observed, Option<ObserveError>);

/// Reads all that [`crate::decide::decide`] needs for this experiment.
///
/// A run whose clock runs goes on without what cannot be read: its end must not wait for it. One
/// that has not begun is told what it is.
///
/// # Errors
/// [`ObserveError`] where a read fails.
pub(crate) async fn observe(
    ctx: &Ctx,
    experiment: Arc<ChaosExperiment>,
    now: Timestamp,
) -> Result<Reading, ObserveError> {
    let injections = injections(ctx, &experiment).await?;
    let stop = ctx.is_stopped();
    let needs = needs(&experiment, &injections, stop, now);
    let (attempts, trouble) = ctx.recent.doings(&experiment);
    let mut observed = Observed {
        experiment: Arc::unwrap_or_clone(experiment),
        injections,
        fleet: ctx.fleet.fleet(Instant::now()),
        stop,
        candidates: BTreeMap::new(),
        pods: None,
        containers: None,
        peers: BTreeMap::new(),
        cluster_dns: Vec::new(),
        attempts,
        trouble,
        policy: ctx.policy.clone(),
    };
    let phase = observed.experiment.status.as_ref().and_then(|s| s.phase);
    // Cancel-safe: what was read by then is in place.
    let read = timeout(ctx.patience, read(ctx, &needs, &mut observed)).await;
    match read.unwrap_or(Err(ObserveError::Silence("what the run needs"))) {
        Ok(()) => {
            // Of what is read now nothing is unread, whatever was the last time.
            if let Some(trouble) = &mut observed.trouble {
                trouble.unread = None;
            }
            Ok((observed, None))
        }
        Err(error) => match phase.unwrap_or_default() {
            Phase::Running => Ok((observed, Some(error))),
            Phase::Pending => {
                let trouble = Trouble {
                    message: chain(&error),
                    since: now,
                    unread: Some(error.kind()),
                };
                observed.trouble = Some(trouble.after(observed.trouble.as_ref()));
                Ok((observed, Some(error)))
            }
            _ => Err(error),
        },
    }
}

/// The experiment's node injections, by name. That one is missing is believed only where the API
/// server itself says so: the cache may not show yet what was created a moment ago.
async fn injections(
    ctx: &Ctx,
    experiment: &ChaosExperiment,
) -> Result<Vec<NodeInjection>, ObserveError> {
    let uid = experiment.uid().unwrap_or_default();
    let cached = ctx.injections.state().into_iter();
    let mut injections: Vec<NodeInjection> = cached
        .filter(|i| i.labels().get(LABEL_EXPERIMENT_UID) == Some(&uid))
        .map(Arc::unwrap_or_clone)
        .collect();
    if is_undelivered(experiment, &injections) {
        let api: Api<NodeInjection> =
            Api::namespaced(ctx.client.clone(), &ctx.policy.release_namespace);
        let own = ListParams::default().labels(&format!("{LABEL_EXPERIMENT_UID}={uid}"));
        let what = "the node injections";
        let list = match timeout(ctx.patience, api.list(&own)).await {
            Ok(list) => list.map_err(reading(what)),
            Err(_) => Err(ObserveError::Silence(what)),
        };
        match list {
            Ok(list) => injections = list.items,
            // What is said of a run that goes matters less than that it goes.
            Err(_) if experiment.metadata.deletion_timestamp.is_some() => {}
            Err(error) => return Err(error),
        }
    }
    injections.sort_by_key(ResourceExt::name_any);
    Ok(injections)
}

/// Reads what is needed into `observed`; all that can be read, whatever else cannot.
async fn read(ctx: &Ctx, needs: &Needs, observed: &mut Observed) -> Result<(), ObserveError> {
    let experiment = &observed.experiment;
    let namespace = experiment.namespace().unwrap_or_default();
    let name = experiment.name_any();
    let user = (namespace.as_str(), name.as_str());
    let faults = |names: &[String]| -> Vec<Fault> {
        let all = experiment.spec.faults.iter();
        all.filter(|f| names.contains(&f.name)).cloned().collect()
    };
    let mut failure = None;
    for fault in faults(&needs.candidates) {
        if let Some(pods) = kept(matching_pods(ctx, &namespace, &fault).await, &mut failure) {
            observed.candidates.insert(fault.name, pods);
        }
    }
    if needs.pods {
        observed.pods = kept(pods(ctx, user).await, &mut failure);
    }
    if needs.containers {
        let containers = ctx.directories.containers(user).await;
        observed.containers = kept(containers.map_err(ObserveError::Namespace), &mut failure);
    }
    if needs.cluster_dns {
        observed.cluster_dns = cluster_dns(ctx).await?;
    }
    for fault in faults(&needs.peers) {
        if let Some(peers) = kept(resolve_peers(ctx, user, &fault).await, &mut failure) {
            observed.peers.insert(fault.name, peers);
        }
    }
    failure.map_or(Ok(()), Err)
}

/// What was read; that it could not be is noted, if it is the first.
fn kept<T>(read: Result<T, ObserveError>, failure: &mut Option<ObserveError>) -> Option<T> {
    read.map_err(|error| failure.get_or_insert(error)).ok()
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
) -> Result<Vec<Candidate>, ObserveError> {
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
    Ok(list.items.iter().map(Candidate::from).collect())
}

/// The uids of the namespace's pods: what is not among them is gone. From now on changes among
/// them have the experiment looked at.
async fn pods(
    ctx: &Ctx,
    (namespace, name): (&str, &str),
) -> Result<BTreeMap<String, PodPresence>, ObserveError> {
    let follow = ctx.directories.follow((namespace, name)).await;
    follow.map_err(ObserveError::Namespace)?;
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
    user: (&str, &str),
    fault: &Fault,
) -> Result<Result<PeerSet, PeerError>, ObserveError> {
    let Some(wanted) = fault.network.as_ref().and_then(|n| n.peers.as_ref()) else {
        return Ok(Ok(PeerSet::default()));
    };
    let directory = ctx
        .directories
        .look_up(user, wanted)
        .await
        .map_err(|source| ObserveError::Peers {
            fault: fault.name.clone(),
            source,
        })?;
    Ok(peers::resolve(wanted, user.0, &directory))
}

/// The addresses of the cluster's DNS Service, then of the pods behind it; none where there is no
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
    let ips = service.into_iter().flat_map(|s| s.spec.cluster_ips);
    let endpoints = slices.items.into_iter().flat_map(|s| s.endpoints);
    let parsed = |text: String| text.parse().ok();
    let pods: BTreeSet<IpAddr> = endpoints
        .flat_map(|e| e.addresses)
        .filter_map(parsed)
        .collect();
    // What every pod asks comes first: there may be more of them than are taken.
    Ok(ips.filter_map(parsed).chain(pods).collect())
}
