//! Live views of the namespaces that running experiments take their peers from: watched while
//! somebody needs them, and no longer.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    core::{ApiResource, Selector, SelectorExt as _},
    runtime::{
        WatchStreamExt as _,
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::{
    sync::mpsc::UnboundedSender,
    task::JoinSet,
    time::{Instant, timeout},
};
use windtunnel_crds::{ChaosExperiment, injection::NodeContainer, peers::Peers};
use windtunnel_runtime::{Steady, watching};

use crate::{
    cluster::{self, Candidate, EndpointSlice, Pod, Service},
    hosts::Hosts,
    peers::Directory,
};

/// How long changes are gathered before the experiments that use them are looked at.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// How long the first listing of a namespace may take.
const FIRST_LIST: Duration = Duration::from_secs(10);

/// Why a namespace cannot be read.
#[derive(Debug, Error)]
pub(crate) enum DirectoryError {
    /// The first listing did not come.
    #[error("cannot list pods and services of namespace {0} in time")]
    NotListed(String),
    /// The selector cannot be understood.
    #[error("the peers' podSelector cannot be used")]
    Selector(#[source] kube::core::ParseExpressionError),
}

/// A namespace being watched; the watches end with it.
struct Namespace {
    pods: Store<Pod>,
    services: Store<Service>,
    slices: Store<EndpointSlice>,
    users: Mutex<BTreeSet<(String, String)>>,
    /// Whose turn it is to wait until the stores are filled.
    turn: tokio::sync::Mutex<()>,
    _watches: JoinSet<()>,
}

/// Whether a store was filled. It wakes only the last who asked, so those who wait ask in turn.
async fn is_filled<K>(store: &Store<K>, turn: &tokio::sync::Mutex<()>) -> bool
where
    K: reflector::Lookup + Clone + 'static,
    K::DynamicType: std::hash::Hash + Eq + Clone,
{
    let _turn = turn.lock().await;
    store.wait_until_ready().await.is_ok()
}

/// The watched namespaces, and the host names' addresses.
pub(crate) struct Directories {
    client: Client,
    triggers: UnboundedSender<ObjectRef<ChaosExperiment>>,
    namespaces: Mutex<HashMap<String, Arc<Namespace>>>,
    pub(crate) hosts: Hosts,
}

impl Directories {
    /// Nothing is watched yet. Experiments to look at again are sent to `triggers`.
    #[must_use]
    pub(crate) fn new(
        client: Client,
        triggers: UnboundedSender<ObjectRef<ChaosExperiment>>,
    ) -> Self {
        Self {
            client,
            hosts: Hosts::new(triggers.clone()),
            triggers,
            namespaces: Mutex::default(),
        }
    }

    /// What `peers` of an experiment can refer to, now.
    ///
    /// # Errors
    /// [`DirectoryError`] where a namespace cannot be listed.
    pub(crate) async fn look_up(
        &self,
        experiment: (&str, &str),
        peers: &Peers,
    ) -> Result<Directory, DirectoryError> {
        let (own, _) = experiment;
        let mut directory = Directory::default();
        let mut namespaces: BTreeSet<&str> = peers
            .services
            .iter()
            .map(|s| s.namespace.as_deref().unwrap_or(own))
            .collect();
        if peers.pod_selector.is_some() {
            namespaces.insert(own);
        }
        for name in namespaces {
            let namespace = self.namespace(name, experiment).await?;
            directory
                .services
                .extend(namespace.services.state().iter().map(|s| Service::clone(s)));
            directory.slices.extend(
                namespace
                    .slices
                    .state()
                    .iter()
                    .map(|s| EndpointSlice::clone(s)),
            );
            if let (true, Some(selector)) = (name == own, &peers.pod_selector) {
                directory.selected = select(&namespace.pods, selector)?;
            }
        }
        directory
            .hosts
            .extend(peers.hosts.iter().filter_map(|host| {
                let answer = self.hosts.look_up(&host.0, experiment)?;
                Some((host.0.clone(), answer))
            }));
        Ok(directory)
    }

    /// The running containers of the pods of an experiment's own namespace, by the pods' uid.
    ///
    /// # Errors
    /// [`DirectoryError`] where the namespace cannot be listed.
    pub(crate) async fn containers(
        &self,
        experiment: (&str, &str),
    ) -> Result<BTreeMap<String, Vec<NodeContainer>>, DirectoryError> {
        let namespace = self.namespace(experiment.0, experiment).await?;
        let pods = namespace.pods.state();
        let candidates = pods.iter().map(|pod| Candidate::from(&**pod));
        Ok(candidates.map(|c| (c.uid, c.containers)).collect())
    }

    /// Has the experiment looked at when its own namespace changes.
    ///
    /// # Errors
    /// [`DirectoryError`] where the namespace cannot be listed.
    pub(crate) async fn follow(&self, experiment: (&str, &str)) -> Result<(), DirectoryError> {
        self.namespace(experiment.0, experiment).await.map(drop)
    }

    /// Watches for these experiments only, given by namespace and name.
    pub(crate) fn retain(&self, is_user: impl Fn(&(String, String)) -> bool) {
        lock(&self.namespaces).retain(|_, watched| {
            let mut users = lock(&watched.users);
            users.retain(&is_user);
            !users.is_empty()
        });
    }

    async fn namespace(
        &self,
        name: &str,
        user: (&str, &str),
    ) -> Result<Arc<Namespace>, DirectoryError> {
        let watched = {
            let mut namespaces = lock(&self.namespaces);
            let watched = namespaces
                .entry(name.to_owned())
                .or_insert_with(|| self.watch(name));
            lock(&watched.users).insert((user.0.to_owned(), user.1.to_owned()));
            Arc::clone(watched)
        };
        let listed = async {
            is_filled(&watched.pods, &watched.turn).await
                && is_filled(&watched.services, &watched.turn).await
                && is_filled(&watched.slices, &watched.turn).await
        };
        match timeout(FIRST_LIST, listed).await {
            Ok(true) => Ok(watched),
            _ => Err(DirectoryError::NotListed(name.to_owned())),
        }
    }

    /// Starts the watches of a namespace.
    fn watch(&self, name: &str) -> Arc<Namespace> {
        let (pods, pod_changes) = reflect::<Pod>(&self.client, name, cluster::pods());
        let (services, service_changes) =
            reflect::<Service>(&self.client, name, cluster::services());
        let slices_api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), name);
        let (slices, writer) = reflector::store();
        let slice_changes = changes(writer, slices_api);
        let mut watches = JoinSet::new();
        let all = stream::select_all([
            pod_changes.boxed(),
            service_changes.boxed(),
            slice_changes.boxed(),
        ]);
        let triggers = self.triggers.clone();
        Arc::new_cyclic(|me: &std::sync::Weak<Namespace>| {
            let me = me.clone();
            watches.spawn(async move {
                let users = move || {
                    me.upgrade()
                        .map(|n| lock(&n.users).clone())
                        .unwrap_or_default()
                };
                tell_users(all, &users, &triggers).await;
            });
            Namespace {
                pods,
                services,
                slices,
                users: Mutex::default(),
                turn: tokio::sync::Mutex::default(),
                _watches: watches,
            }
        })
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one statement: a panic leaves the value whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store of a trimmed resource, and a stream that keeps it current.
fn reflect<K>(
    client: &Client,
    namespace: &str,
    resource: ApiResource,
) -> (Store<K>, impl Stream<Item = ()> + use<K>)
where
    K: Resource<DynamicType = ApiResource>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + Sync
        + 'static,
    K: Resource<Scope = kube::core::DynamicResourceScope>,
{
    let api: Api<K> = Api::namespaced_with(client.clone(), namespace, &resource);
    let writer = Writer::new(resource);
    (writer.as_reader(), changes(writer, api))
}

/// Keeps a store current; one item for each change.
fn changes<K>(writer: Writer<K>, api: Api<K>) -> impl Stream<Item = ()>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    watcher(api, watching())
        .backoff(Steady)
        .modify(|object| object.managed_fields_mut().clear())
        .reflect(writer)
        .filter_map(|event| async move {
            if let Err(error) = &event {
                tracing::warn!(%error, "a watch for peers was interrupted");
            }
            event.is_ok().then_some(())
        })
}

/// Sends the users of a namespace to be looked at, a second after the first of some changes.
async fn tell_users(
    mut changes: impl Stream<Item = ()> + Unpin,
    users: &impl Fn() -> BTreeSet<(String, String)>,
    triggers: &UnboundedSender<ObjectRef<ChaosExperiment>>,
) {
    while changes.next().await.is_some() {
        let until = Instant::now() + DEBOUNCE;
        while let Ok(Some(())) = tokio::time::timeout_at(until, changes.next()).await {}
        for (namespace, name) in users() {
            // The receiver lives as long as the controller; without it there is nobody to tell.
            let _ = triggers.send(ObjectRef::new(&name).within(&namespace));
        }
    }
}

/// Addresses of the pods that a selector selects, hostNetwork pods excepted: theirs are the node's.
fn select(pods: &Store<Pod>, selector: &LabelSelector) -> Result<BTreeSet<IpAddr>, DirectoryError> {
    let selector: Selector = selector
        .clone()
        .try_into()
        .map_err(DirectoryError::Selector)?;
    let chosen = pods
        .state()
        .into_iter()
        .filter(|pod| selector.matches(pod.labels()));
    Ok(chosen
        .map(|pod| Candidate::from(&*pod))
        .filter(|pod| !pod.host_network)
        .flat_map(|pod| pod.addresses)
        .collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn everybody_who_waits_for_a_store_is_woken() {
        let (store, mut writer) = reflector::store::<EndpointSlice>();
        let (store, turn) = (Arc::new(store), Arc::new(tokio::sync::Mutex::new(())));
        let mut waiting = JoinSet::new();
        for _ in 0..3 {
            let (store, turn) = (store.clone(), turn.clone());
            waiting.spawn(async move { is_filled(&store, &turn).await });
        }
        // All of them wait before there is anything.
        tokio::task::yield_now().await;
        for event in [watcher::Event::Init, watcher::Event::InitDone] {
            writer.apply_watcher_event(&event);
        }
        let all = timeout(Duration::from_secs(5), waiting.join_all()).await;
        assert_eq!(all.ok(), Some(vec![true; 3]));
    }
}
