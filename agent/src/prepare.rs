//! Prepare: every target of an injection is found, its fault is tried where it cannot hurt, and
//! what is inert is built. One target that cannot be injected refuses the whole injection, and
//! then nothing of it stays.

use std::time::Duration;

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
    model::{Counts, Entry, FORMAT, Key, NetworkEntry, Objects, State},
    network,
    node::Node,
    targets::{self, Target},
};

mod container;

pub(crate) use container::follow;

/// Most packets that the queues of all faults on this node may hold together: with full-sized
/// packets about 1 GiB.
const MAX_QUEUED: u64 = 700_000;

/// A reason and a sentence.
pub(crate) type Refusal = (&'static str, String);

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
    let mut verdicts = Vec::new();
    let refusal = node_refusal(&node.observe(now.boot));
    for fault in &injection.spec.faults {
        let rehearsed = refusal.clone().map_or(Ok(()), Err);
        for target in &fault.targets {
            for key in keys(uid, fault, target) {
                let verdict = match &rehearsed {
                    Err(refusal) => Verdict::Refused(refusal.clone()),
                    Ok(()) => prepare_target(node, &injection, (&key, fault, target), now),
                };
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
    injection: &NodeInjection,
    (key, fault, target): (&Key, &NodeFault, &NodeTarget),
    now: Now,
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
    let found = match targets::resolve(&node.settings.places, &injection.spec.experiment, target) {
        Ok(found) => found,
        Err(error @ targets::TargetError::Gone(_)) => return Verdict::Gone(error.to_string()),
        Err(error) => return Verdict::Refused((error.reason(), chain(&error))),
    };
    let base = base(node, injection, (key, target), &found, now);
    match kind {
        NodeKind::Network(network) => prepare_network(node, injection, (base, network), &found),
        NodeKind::Container(kind) => container::prepare(node, injection, (base, kind), target),
    }
}

/// What every entry has, before it is known what it acts on.
fn base(
    node: &Node,
    injection: &NodeInjection,
    (key, target): (&Key, &NodeTarget),
    found: &Target,
    now: Now,
) -> Base {
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
    injection: &NodeInjection,
    (base, network): (Base, &NodeNetworkFault),
    found: &Target,
) -> Verdict {
    let result = plan(node, (base, network), found).and_then(|entry| {
        rehearse(node, injection, network, &entry)?;
        if injection.spec.dry_run {
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
    node: &Node,
    (base, fault): (Base, &NodeNetworkFault),
    found: &Target,
) -> Result<Entry, Refusal> {
    let key = &base.key;
    let links = RouteSocket::open(&found.netns)
        .and_then(|mut route| route.links())
        .map_err(|e| ("KernelRefused", chain(&e)))?;
    impair::check_links(&links).map_err(refused)?;
    compete(node, key, fault)?;
    let detours = network::detours(key, &links, fault).map_err(|e| ("KernelRefused", chain(&e)))?;
    let network = NetworkEntry {
        netns: found.netns.id(),
        table: network::table_name(key),
        // The older keeps the packets if two come to select the same.
        priority: neighbours(node, key)
            .filter_map(Entry::network)
            .map(|other| other.priority + 1)
            .max()
            .unwrap_or(0),
        detours,
        resets: network::resets(&links, fault).map_err(|e| ("KernelRefused", chain(&e)))?,
        name_servers: found.name_servers.clone(),
        drain: network::drain(&fault.impairment),
    };
    queue_memory(node, &network)?;
    Ok((base.entry)(Objects::Network(network)))
}

/// Other faults on the same pod that may be in place.
fn neighbours<'a>(node: &'a Node, key: &'a Key) -> impl Iterator<Item = &'a Entry> {
    let entries = node.journal.entries().values();
    entries.filter(move |e| e.key.pod == key.pod && e.key != *key && e.ended().is_none())
}

/// Other faults on the same pod that may be in place at the same time, or closer than `gap`.
fn rivals<'a>(
    node: &'a Node,
    key: &'a Key,
    gap: Duration,
) -> impl Iterator<Item = &'a Entry> + use<'a> {
    let injections = node.known.injections.as_ref();
    let own = injections.and_then(|all| all.get(&key.injection));
    let fault = move |name: &str| own.and_then(|i| i.spec.faults.iter().find(|f| f.name == name));
    neighbours(node, key).filter(move |other| {
        // Another run has a clock of its own.
        other.key.injection != key.injection
            || match (fault(&key.fault), fault(&other.key.fault)) {
                (Some(one), Some(other)) => !are_apart(one, other, gap),
                _ => true,
            }
    })
}

/// Whether the window of one of two faults on one clock closes `gap` or more before that of the
/// other opens.
fn are_apart(one: &NodeFault, other: &NodeFault, gap: Duration) -> bool {
    let window = |fault: &NodeFault| {
        let begin = fault.start_after.get();
        (begin, begin.saturating_add(fault.duration.get()))
    };
    let (one, other) = (window(one), window(other));
    one.1.saturating_add(gap) <= other.0 || other.1.saturating_add(gap) <= one.0
}

/// Refuses a fault that selects packets which another one on the same pod selects.
fn compete(node: &Node, key: &Key, fault: &NodeNetworkFault) -> Result<(), Refusal> {
    // Back to back there is a moment at which both are there, and the older has the packets.
    for other in rivals(node, key, Duration::ZERO).filter(|e| e.network().is_some()) {
        let injection = node
            .known
            .injections
            .as_ref()
            .and_then(|all| all.get(&other.key.injection));
        let theirs = injection
            .and_then(|i| i.spec.faults.iter().find(|f| f.name == other.key.fault))
            .and_then(|f| f.network.as_ref());
        if theirs.is_none_or(|theirs| network::compete(fault, theirs)) {
            return Err((
                "Conflict",
                format!(
                    "fault {} of experiment {} acts on the same packets of this pod; give them different peers, ports, directions or windows, or put both doses into one fault",
                    other.key.fault, other.experiment.name
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses more queue memory than a node may be asked for.
fn queue_memory(node: &Node, network: &NetworkEntry) -> Result<(), Refusal> {
    let held = |network: &NetworkEntry| -> u64 {
        let limits = network.detours.iter().map(|d| u64::from(d.netem.limit));
        limits.sum()
    };
    let entries = node.journal.entries().values();
    let others: u64 = entries
        .filter(|e| e.ended().is_none())
        .filter_map(Entry::network)
        .map(held)
        .sum();
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn windows_are_apart_if_one_closes_before_the_other_opens() {
        let fault = |begin: u64, seconds: u64| -> NodeFault {
            let (begin, seconds) = (format!("{begin}s"), format!("{seconds}s"));
            let fault = json!({
                "name": "f", "startAfter": begin, "duration": seconds, "targets": []
            });
            serde_json::from_value(fault).unwrap()
        };
        let second = Duration::from_secs(1);
        for (one, other, gap, apart) in [
            ((0, 10), (5, 10), Duration::ZERO, false),
            ((0, 10), (10, 10), Duration::ZERO, true),
            ((0, 10), (10, 10), second, false),
            ((0, 10), (11, 10), second, true),
            ((0, 60), (20, 5), Duration::ZERO, false),
        ] {
            let (one, other) = (fault(one.0, one.1), fault(other.0, other.1));
            assert_eq!(are_apart(&one, &other, gap), apart, "{one:?} {other:?}");
            assert_eq!(are_apart(&other, &one, gap), apart, "{other:?} {one:?}");
        }
    }
}
