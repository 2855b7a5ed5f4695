//! Prepare: every target of an injection is found, its fault is tried where it cannot hurt, and
//! what is inert is built. One target that cannot be injected refuses the whole injection, and
//! then nothing of it stays.

use std::{collections::BTreeMap, net::IpAddr};

use windtunnel_crds::{
    NodeInjection,
    injection::{NodeFault, NodeKind, NodeNetworkFault, NodeTarget, TargetState, TargetStatus},
    network::Spare,
};
use windtunnel_runtime::chain;

use crate::{
    act,
    decide::{Now, Preparation, keys, node_refusal},
    impair::{self, ImpairError},
    journal::UNWRITABLE,
    kernel::{link::RouteSocket, netns::NetNs},
    look::{self, PUT_OFF, UNRESPONSIVE},
    model::{Counts, Entry, FORMAT, Key, NetworkEntry, Objects, State},
    network,
    node::{self, Node},
    targets::{self, Target},
};

mod container;
#[cfg(test)]
mod pairs;
mod rivals;

pub(crate) use container::follow;
use rivals::Beside;

/// Most packets that the queues of all faults on this node may hold together: with full-sized
/// packets about 1 GiB.
const MAX_QUEUED: u64 = 700_000;

/// Most faults on targets that this node may have at once: each has a process.
const MAX_FAULTS: usize = 300;

/// A reason and a sentence.
pub(crate) type Refusal = (&'static str, String);

/// An injection on its way.
struct Run<'a> {
    injection: &'a NodeInjection,
    now: Now,
    /// What the journal would hold, were it no dry run.
    rehearsed: Vec<Entry>,
    /// The name servers of pods that were looked at.
    name_servers: BTreeMap<String, Vec<IpAddr>>,
}

/// Makes an entry of what it acts on.
struct Base {
    key: Key,
    entry: Box<dyn Fn(Objects) -> Entry>,
}

/// What became of a target.
enum Verdict {
    Prepared,
    Gone(String),
    Refused(Refusal),
}

/// Prepares an injection, and remembers what was found.
pub fn prepare(node: &mut Node, uid: &str, now: Now) {
    let Some(injection) = node
        .known
        .injections
        .as_ref()
        .and_then(|all| all.get(uid))
        .cloned()
    else {
        return;
    };
    let mut run = Run {
        injection: &injection,
        now,
        rehearsed: Vec::new(),
        name_servers: BTreeMap::new(),
    };
    let mut verdicts = Vec::new();
    let mut refusal = node_refusal(&node.observe(now.boot));
    for fault in &injection.spec.faults {
        for target in &fault.targets {
            for key in keys(uid, fault, target) {
                // There may be many: no injector is to miss a sign of life for that.
                node.supervisor.beat(node::now().unwrap_or(now).boot);
                let verdict = match &refusal {
                    Some(refusal) => Verdict::Refused(refusal.clone()),
                    None => prepare_target(node, &mut run, (&key, fault, target)),
                };
                // What is prepared stays so; the rest is for when the faults have ended that are to.
                if matches!(verdict, Verdict::Refused((PUT_OFF, _))) {
                    return;
                }
                // What does not answer is not waited for again and again: others are held up by it.
                if let (None, Verdict::Refused((UNRESPONSIVE, why))) = (&refusal, &verdict) {
                    let (pod, fault) = (&target.pod_name, &fault.name);
                    let message = format!("not looked at, for pod {pod} of fault {fault}: {why}");
                    refusal = Some((UNRESPONSIVE, message));
                }
                verdicts.extend(told(&injection, (&fault.name, target), verdict));
            }
        }
    }
    if verdicts.iter().any(|v| v.state == TargetState::Failed) {
        release(node, uid);
    }
    let generation = injection.metadata.generation;
    node.preparations.insert(
        uid.to_owned(),
        Preparation {
            generation,
            verdicts,
        },
    );
}

/// What is remembered of a verdict: a target that is prepared speaks through its journal entry,
/// which a dry run does not make.
fn told(
    injection: &NodeInjection,
    (fault, target): (&str, &NodeTarget),
    verdict: Verdict,
) -> Option<TargetStatus> {
    let (state, reason, message) = match verdict {
        Verdict::Prepared if !injection.spec.dry_run => return None,
        Verdict::Prepared => (TargetState::Prepared, "", String::new()),
        Verdict::Gone(message) => (TargetState::Gone, "TargetGone", message),
        Verdict::Refused((reason, message)) => (TargetState::Failed, reason, message),
    };
    Some(TargetStatus {
        fault: fault.to_owned(),
        pod_name: target.pod_name.clone(),
        pod_uid: target.pod_uid.clone(),
        state,
        reason: reason.to_owned(),
        message,
        ..TargetStatus::default()
    })
}

fn prepare_target(
    node: &mut Node,
    run: &mut Run<'_>,
    (key, fault, target): (&Key, &NodeFault, &NodeTarget),
) -> Verdict {
    match node.journal.entries().get(key).map(|entry| &entry.state) {
        None => {}
        Some(State::Prepared) => return Verdict::Prepared,
        Some(_) => {
            let message =
                "what an agent before had begun for this target is still being cleaned up";
            return Verdict::Refused(("AgentRestarted", message.to_owned()));
        }
    }
    let Some(kind) = fault.kind() else {
        return Verdict::Refused((
            "UnknownFault",
            "this agent does not know the kind of the fault".to_owned(),
        ));
    };
    if let Err(refusal) = node.can(kind) {
        return Verdict::Refused(refusal);
    }
    if let Err(refusal) = Beside::new(node, run).has_room() {
        return Verdict::Refused(refusal);
    }
    let found = match targets::resolve(
        &node.settings.places,
        &run.injection.spec.experiment,
        target,
    ) {
        Ok(found) => found,
        Err(error @ targets::TargetError::Gone(_)) => return Verdict::Gone(error.to_string()),
        Err(error) => return Verdict::Refused((error.reason(), chain(&error))),
    };
    let base = base(node, run, (key, target), &found);
    match kind {
        NodeKind::Network(network) => prepare_network(node, run, (base, network), &found),
        NodeKind::Container(kind) => container::prepare(node, run, (base, kind), target),
    }
}

/// What every entry has, before it is known what it acts on.
fn base(node: &Node, run: &Run<'_>, (key, target): (&Key, &NodeTarget), found: &Target) -> Base {
    let (injection, now) = (run.injection, run.now);
    let (boot_id, its_key) = (node.boot_id.clone(), key.clone());
    let injection_name = injection.metadata.name.clone().unwrap_or_default();
    let experiment = injection.spec.experiment.clone();
    let recheck_after = injection.spec.recheck_after.get();
    let (pod_name, pod_cgroup) = (target.pod_name.clone(), found.cgroup.clone());
    let entry = move |objects| Entry {
        format: FORMAT,
        boot_id: boot_id.clone(),
        key: its_key.clone(),
        injection_name: injection_name.clone(),
        experiment: experiment.clone(),
        pod_name: pod_name.clone(),
        pod_cgroup: pod_cgroup.clone(),
        recheck_after,
        objects,
        prepared_at: now.boot,
        window: None,
        counts_before: Counts::default(),
        injected_before: None,
        state: State::Prepared,
    };
    Base {
        key: key.clone(),
        entry: Box::new(entry),
    }
}

fn prepare_network(
    node: &mut Node,
    run: &mut Run<'_>,
    (base, network): (Base, &NodeNetworkFault),
    found: &Target,
) -> Verdict {
    let result = plan(node, run, (base, network), found).and_then(|entry| {
        rehearse(node, run.injection, network, &entry)?;
        if run.injection.spec.dry_run {
            run.rehearsed.push(entry);
            Ok(())
        } else {
            build(node, entry, &found.netns)
        }
    });
    match result {
        Ok(()) => Verdict::Prepared,
        Err(refusal) => Verdict::Refused(refusal),
    }
}

/// The journal entry of a network fault, before anything is built.
fn plan(
    node: &mut Node,
    run: &mut Run<'_>,
    (base, fault): (Base, &NodeNetworkFault),
    found: &Target,
) -> Result<Entry, Refusal> {
    let key = &base.key;
    let name_servers = if fault.spare.contains(&Spare::ClusterDNS) {
        name_servers(node, run, &key.pod, found)?
    } else {
        Vec::new()
    };
    let links = RouteSocket::open(&found.netns)
        .and_then(|mut route| route.links())
        .map_err(|e| ("KernelRefused", chain(&e)))?;
    impair::check_links(&links).map_err(refused)?;
    let beside = Beside::new(node, run);
    beside.network(key, fault)?;
    let detours = network::detours(key, &links, fault).map_err(|e| ("KernelRefused", chain(&e)))?;
    let network = NetworkEntry {
        netns: found.netns.id(),
        table: network::table_name(key),
        // The older keeps the packets if two come to select the same.
        priority: beside.priority(key),
        detours,
        resets: network::resets(&links, fault).map_err(|e| ("KernelRefused", chain(&e)))?,
        name_servers,
        drain: network::drain(&fault.impairment),
    };
    queue_memory(&beside, &network)?;
    Ok((base.entry)(Objects::Network(network)))
}

/// The name servers of a pod, which is looked at once however many faults are on it.
fn name_servers(
    node: &mut Node,
    run: &mut Run<'_>,
    pod: &str,
    found: &Target,
) -> Result<Vec<IpAddr>, Refusal> {
    if let Some(known) = run.name_servers.get(pod) {
        return Ok(known.clone());
    }
    let proc = &node.settings.places.proc;
    let seen = look::at_name_servers(&mut node.supervisor, proc, &found.inits)?;
    run.name_servers.insert(pod.to_owned(), seen.clone());
    Ok(seen)
}

/// Refuses more queue memory than a node may be asked for.
fn queue_memory(beside: &Beside<'_>, network: &NetworkEntry) -> Result<(), Refusal> {
    let held = |network: &NetworkEntry| -> u64 {
        let limits = network.detours.iter().map(|d| u64::from(d.netem.limit));
        limits.sum()
    };
    let others: u64 = beside.networks().map(held).sum();
    let total = others + held(network);
    if total > MAX_QUEUED {
        return Err((
            "QueueMemory",
            format!(
                "the delay queues on this node would hold up to {total} packets, of {MAX_QUEUED} at most"
            ),
        ));
    }
    Ok(())
}

/// Tries the fault in a namespace of its own.
fn rehearse(
    node: &mut Node,
    injection: &NodeInjection,
    fault: &NodeNetworkFault,
    entry: &Entry,
) -> Result<(), Refusal> {
    let Some(held) = entry.network() else {
        return Ok(());
    };
    let node_addresses = node.addresses().to_vec();
    if node_addresses.is_empty() && fault.spare.contains(&Spare::Node) {
        let message = "the node's own addresses cannot be read, so probes could not be spared; the agent must run in the host's pid namespace";
        return Err(("NodeAddressesUnknown", message.to_owned()));
    }
    let dns = || injection.spec.cluster_dns.iter().map(|a| a.0);
    if !held.resets.is_empty() {
        let table = network::table(held, fault, &node_addresses, dns());
        return impair::rehearse_resets(table).map_err(refused);
    }
    impair::rehearse(&held.detours, |detours| {
        let mut copy = held.clone();
        copy.detours = detours.to_vec();
        network::table(&copy, fault, &node_addresses, dns())
    })
    .map_err(refused)
}

/// Writes the entry down, then builds.
fn build(node: &mut Node, mut entry: Entry, netns: &NetNs) -> Result<(), Refusal> {
    node.journal
        .write(entry.clone())
        .map_err(|e| (UNWRITABLE, chain(&e)))?;
    let key = entry.key.clone();
    let Objects::Network(network) = &mut entry.objects else {
        return Ok(());
    };
    let built = impair::build(netns, &mut network.detours).map_err(refused);
    let noted = built.and_then(|()| {
        node.journal
            .write(entry.clone())
            .map_err(|e| (UNWRITABLE, chain(&e)))
    });
    if noted.is_err() {
        withdraw(node, &key, netns);
    }
    noted
}

/// Takes back what was built for a target that is not to be injected after all. What cannot be
/// taken back stays in the journal, and with it on the way to the audit.
fn withdraw(node: &mut Node, key: &Key, netns: &NetNs) {
    let Some(entry) = node.journal.entries().get(key) else {
        return;
    };
    let detours = entry.network().map_or(&[][..], |n| &n.detours);
    match impair::remove(netns, detours, true) {
        Ok(_) => node.journal.forget(key),
        Err(error) => tracing::warn!(error = chain(&error), "cannot remove an impairment"),
    }
}

/// Takes back everything that was prepared for an injection that was refused.
fn release(node: &mut Node, uid: &str) {
    let entries = node.journal.entries().values();
    let prepared: Vec<Entry> = entries
        .filter(|e| e.key.injection == uid && e.state == State::Prepared)
        .cloned()
        .collect();
    for entry in prepared {
        undo(node, &entry);
    }
}

/// Takes back what was prepared for one target, where its namespace is still there; if it is not,
/// nothing is left to take back.
pub(crate) fn undo(node: &mut Node, entry: &Entry) {
    match act::netns(node, entry) {
        Ok(Some(netns)) => withdraw(node, &entry.key, &netns),
        Ok(None) => node.journal.forget(&entry.key),
        Err(error) => tracing::warn!(error = chain(&error), "cannot look for a target"),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn refused(error: ImpairError) -> Refusal {
    (error.reason(), chain(&error))
}
