//! The agent's side of the API server: what it is told, and what it tells. Runs on a thread of
//! its own; talks to the node's thread by messages, and never holds it up.
//!
//! It reads only what its Role allows: the node injections of its own node, the operator's Lease
//! and the emergency stop in the release namespace. It writes only the status of the former and
//! its own `NodeAgent`.

use std::{
    collections::BTreeMap,
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::ConfigMap},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::{WatchStreamExt as _, watcher},
};
use nix::sys::eventfd::EventFd;
use serde_json::json;
use tokio::{
    sync::{mpsc as tokio_mpsc, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use windtunnel_crds::{
    NodeAgent, NodeAgentSpec, NodeAgentStatus, NodeInjection,
    names::{AGENT, LEASE, STOP_CONFIG_MAP},
    node_agent::Capability,
};
use windtunnel_runtime::{Steady, chain, watching};

use crate::{act::Report, kernel::proc::boottime};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(5);
/// How long a proof of the own rights may take.
const PROOF: Duration = Duration::from_secs(2);
/// How often the agent says that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Between two tries of a proof.
const PROOF_RETRY: Duration = Duration::from_secs(1);
/// Between two tries of a report.
const RETRY: Duration = Duration::from_millis(500);

/// What the node's thread is told.
#[derive(Debug)]
pub enum News {
    /// All injections of this node.
    Listed(BTreeMap<String, NodeInjection>),
    /// An injection is new or has changed.
    Changed(Box<NodeInjection>),
    /// An injection is gone.
    Deleted {
        /// Its uid.
        uid: String,
    },
    /// A fresh listing of the own injections succeeded.
    Listable {
        /// When, on the boot clock.
        at: Duration,
    },
    /// The operator's lease was seen.
    Lease(Sighting),
    /// Whether the emergency stop is in force.
    Stop(bool),
    /// What failed at the agent's start works now.
    Capable(Capability),
}

impl News {
    /// A fault may have to end for it, which waits for nothing.
    fn is_urgent(&self) -> bool {
        match self {
            Self::Listed(_) | Self::Deleted { .. } | Self::Stop(true) => true,
            Self::Changed(injection) => {
                injection.spec.abort || injection.metadata.deletion_timestamp.is_some()
            }
            Self::Listable { .. } | Self::Lease(_) | Self::Stop(false) | Self::Capable(_) => false,
        }
    }
}

/// The operator's lease as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Who holds it.
    pub holder: String,
    /// When its holder renewed it, by the holder's clock.
    pub renewed: Timestamp,
    /// When it was seen, by this node's clock.
    pub arrived: Timestamp,
    /// The same on the boot clock.
    pub at: Duration,
    /// It came as it happened, not from a listing.
    pub is_live: bool,
}

/// Where the node's thread is told something.
#[derive(Clone, Debug)]
pub struct Inbox {
    sender: mpsc::Sender<News>,
    wake: Arc<EventFd>,
    urgent: Arc<AtomicBool>,
}

impl Inbox {
    /// A way to tell the thread that receives and waits for `wake`, and looks at `urgent` while it
    /// waits for something else.
    #[must_use]
    pub fn new(sender: mpsc::Sender<News>, wake: Arc<EventFd>, urgent: Arc<AtomicBool>) -> Self {
        Self {
            sender,
            wake,
            urgent,
        }
    }

    /// Tells it something, and wakes it.
    pub fn tell(&self, news: News) {
        let is_urgent = news.is_urgent();
        // Without a receiver the process is ending.
        let _ = self.sender.send(news);
        self.urgent.fetch_or(is_urgent, Ordering::Relaxed);
        let _ = self.wake.write(1);
    }

    /// Has it wait for nothing: it is to end.
    pub fn hurry(&self) {
        self.urgent.store(true, Ordering::Relaxed);
        let _ = self.wake.write(1);
    }
}

/// What the rest of the API side works with.
#[derive(Clone)]
struct Side {
    client: Client,
    namespace: String,
    node: String,
    inbox: Inbox,
}

/// What goes out.
#[derive(Debug)]
pub struct Outbox {
    /// Reports on injections.
    pub reports: tokio_mpsc::UnboundedReceiver<Report>,
    /// The agent's view of itself; the heartbeat's time is filled in here.
    pub agent: watch::Receiver<NodeAgentStatus>,
}

/// Runs the API side until one of its parts ends, which none should.
pub async fn run(
    client: Client,
    (namespace, node): (String, String),
    grace: Duration,
    inbox: Inbox,
    outbox: Outbox,
) {
    let side = Side {
        client,
        namespace,
        node,
        inbox,
    };
    let mut parts = JoinSet::new();
    parts.spawn(watch_injections(side.clone()));
    parts.spawn(watch_lease(side.clone(), grace));
    parts.spawn(watch_stop(side.clone()));
    parts.spawn(prove_rights(side.clone(), grace));
    parts.spawn(report(side.clone(), outbox.reports));
    parts.spawn(heartbeat(side, outbox.agent));
    parts.join_next().await;
}

/// A watch that is tried again within two seconds, however long it has failed.
fn follow<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Event<K>> + Send
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    watcher(api, config)
        .backoff(Steady)
        .filter_map(|event| async move {
            event
                .inspect_err(|error| {
                    tracing::warn!(error = chain(error), "a watch was interrupted");
                })
                .ok()
        })
}

async fn watch_injections(side: Side) {
    let api: Api<DeserializeGuard<NodeInjection>> = Api::namespaced(side.client, &side.namespace);
    let config = watching().fields(&format!("spec.nodeName={}", side.node));
    let mut events = std::pin::pin!(follow(api, config));
    let mut listed = BTreeMap::new();
    while let Some(event) = events.next().await {
        match event {
            watcher::Event::Init => listed.clear(),
            watcher::Event::InitApply(guarded) => {
                if let Some(injection) = readable(guarded) {
                    listed.insert(injection.uid().unwrap_or_default(), injection);
                }
            }
            watcher::Event::InitDone => side.inbox.tell(News::Listed(std::mem::take(&mut listed))),
            watcher::Event::Apply(guarded) => {
                if let Some(injection) = readable(guarded) {
                    side.inbox.tell(News::Changed(Box::new(injection)));
                }
            }
            watcher::Event::Delete(guarded) => side.inbox.tell(News::Deleted {
                uid: guarded.uid().unwrap_or_default(),
            }),
        }
    }
}

fn readable(guarded: DeserializeGuard<NodeInjection>) -> Option<NodeInjection> {
    match guarded.0 {
        Ok(mut injection) => {
            injection.metadata.managed_fields = None;
            Some(injection)
        }
        Err(error) => {
            tracing::warn!(error = chain(&error), "a node injection cannot be read");
            None
        }
    }
}

/// Who leads renews the lease each two seconds. Silence means that nobody does, or that the
/// connection was lost without a word: the watch begins anew long before the grace is over.
async fn watch_lease(side: Side, grace: Duration) {
    let api: Api<Lease> = Api::namespaced(side.client, &side.namespace);
    let config = watching().fields(&format!("metadata.name={LEASE}"));
    loop {
        let mut events = std::pin::pin!(follow(api.clone(), config.clone()));
        while let Ok(Some(event)) = timeout(grace / 4, events.next()).await {
            if let Some(sighting) = sighting(event) {
                side.inbox.tell(News::Lease(sighting));
            }
        }
    }
}

/// What an event of the lease's watch says; nothing where nobody holds the lease.
fn sighting(event: watcher::Event<Lease>) -> Option<Sighting> {
    let (lease, is_live) = match event {
        watcher::Event::InitApply(lease) => (lease, false),
        watcher::Event::Apply(lease) => (lease, true),
        _ => return None,
    };
    let (spec, at) = lease.spec.zip(boottime().ok())?;
    Some(Sighting {
        holder: spec.holder_identity.filter(|holder| !holder.is_empty())?,
        renewed: spec.renew_time?.0,
        arrived: Timestamp::now(),
        at,
        is_live,
    })
}

async fn watch_stop(side: Side) {
    let api: Api<PartialObjectMeta<ConfigMap>> = Api::namespaced(side.client, &side.namespace);
    let config = watching().fields(&format!("metadata.name={STOP_CONFIG_MAP}"));
    let mut events = std::pin::pin!(follow(api, config));
    let mut listed = false;
    while let Some(event) = events.next().await {
        match event {
            watcher::Event::Init => listed = false,
            watcher::Event::InitApply(_) => listed = true,
            watcher::Event::InitDone => side.inbox.tell(News::Stop(listed)),
            watcher::Event::Apply(_) => side.inbox.tell(News::Stop(true)),
            watcher::Event::Delete(_) => side.inbox.tell(News::Stop(false)),
        }
    }
}

/// An open watch survives a revoked right and a silent network: a listing does not.
async fn prove_rights(side: Side, grace: Duration) {
    let api: Api<PartialObjectMeta<NodeInjection>> = Api::namespaced(side.client, &side.namespace);
    let own = ListParams::default()
        .fields(&format!("spec.nodeName={}", side.node))
        .limit(1);
    // Often enough that an outage of two thirds of the grace is survived, whenever it begins.
    let mut ticks = interval(grace / 6);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(asked) = boottime() else { continue };
        match timeout(PROOF, api.list(&own)).await {
            Ok(Ok(_)) => {
                side.inbox.tell(News::Listable { at: asked });
                continue;
            }
            Ok(Err(error)) => {
                tracing::warn!(error = chain(&error), "cannot list the node injections");
            }
            Err(_) => tracing::warn!("no answer when listing the node injections"),
        }
        ticks.reset_after(PROOF_RETRY);
    }
}

/// Writes each report; of several on one injection only the last.
async fn report(side: Side, mut reports: tokio_mpsc::UnboundedReceiver<Report>) {
    let api: Api<NodeInjection> = Api::namespaced(side.client, &side.namespace);
    let mut waiting: BTreeMap<String, Report> = BTreeMap::new();
    loop {
        if waiting.is_empty() {
            let Some(report) = reports.recv().await else {
                return;
            };
            waiting.insert(report.uid.clone(), report);
        }
        while let Ok(report) = reports.try_recv() {
            waiting.insert(report.uid.clone(), report);
        }
        let due: Vec<Report> = waiting.values().cloned().collect();
        for report in due {
            if write(&api, &report).await {
                waiting.remove(&report.uid);
            }
        }
        if !waiting.is_empty() {
            sleep(RETRY).await;
        }
    }
}

/// Writes one report; true if there is nothing left to do about it.
async fn write(api: &Api<NodeInjection>, report: &Report) -> bool {
    let patch = json!({
        "apiVersion": "windtunnel.dev/v1alpha1",
        "kind": "NodeInjection",
        // The API server refuses the write if the object by this name is another.
        "metadata": {"uid": report.uid},
        "status": report.status,
    });
    let params = PatchParams::apply(AGENT).force();
    match timeout(
        REQUEST,
        api.patch_status(&report.name, &params, &Patch::Apply(&patch)),
    )
    .await
    {
        Ok(Ok(_)) => true,
        Ok(Err(kube::Error::Api(status))) if status.is_not_found() || status.is_conflict() => true,
        Ok(Err(error)) => {
            tracing::warn!(
                error = chain(&error),
                injection = report.name,
                "cannot report"
            );
            false
        }
        Err(_) => {
            tracing::warn!(injection = report.name, "no answer to a report");
            false
        }
    }
}

/// Says every ten seconds that the agent is alive, and at once when something of note changed.
async fn heartbeat(side: Side, mut view: watch::Receiver<NodeAgentStatus>) {
    let api: Api<NodeAgent> = Api::namespaced(side.client, &side.namespace);
    let mut ticks = interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = NodeAgentStatus::default();
    loop {
        // Cancel-safe: a change that is not seen by one arm is seen by the next `changed`.
        tokio::select! {
            _ = ticks.tick() => {}
            changed = view.changed() => if changed.is_err() { return },
        }
        let current = view.borrow_and_update().clone();
        let is_news = current.clean != told.clean
            || current.residue != told.residue
            || current.capabilities != told.capabilities;
        let is_due = told.heartbeat_time.as_ref().is_none_or(|t| {
            Timestamp::now().duration_since(t.0).unsigned_abs() + Duration::from_millis(100)
                >= HEARTBEAT
        });
        if !is_news && !is_due {
            continue;
        }
        let status = NodeAgentStatus {
            heartbeat_time: Some(MicroTime(Timestamp::now())),
            ..current
        };
        match timeout(REQUEST, say(&api, &side.node, &status)).await {
            Ok(Ok(())) => told = status,
            Ok(Err(error)) => tracing::warn!(error = chain(&error), "cannot write the heartbeat"),
            Err(_) => tracing::warn!("no answer to the heartbeat"),
        }
    }
}

async fn say(
    api: &Api<NodeAgent>,
    node: &str,
    status: &NodeAgentStatus,
) -> Result<(), kube::Error> {
    let patch =
        json!({"apiVersion": "windtunnel.dev/v1alpha1", "kind": "NodeAgent", "status": status});
    let params = PatchParams::apply(AGENT).force();
    match api.patch_status(node, &params, &Patch::Apply(&patch)).await {
        Err(kube::Error::Api(refused)) if refused.is_not_found() => {
            let agent = NodeAgent::new(
                node,
                NodeAgentSpec {
                    node_name: node.to_owned(),
                },
            );
            api.create(&PostParams::default(), &agent).await?;
            api.patch_status(node, &params, &Patch::Apply(&patch))
                .await
                .map(drop)
        }
        result => result.map(drop),
    }
}

/// Takes the wake-ups that have been seen.
pub fn drain(wake: &EventFd) {
    // Nothing to take is fine: the descriptor does not block.
    let mut buffer = [0; 8];
    let _ = nix::unistd::read(wake.as_fd(), &mut buffer);
}
