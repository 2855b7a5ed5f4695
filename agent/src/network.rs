//! A network fault as kernel objects: pure. Which ifbs with which queueing discipline, which
//! rules select packets, and whether two faults would compete for the same packets.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use windtunnel_crds::{
    injection::{Impairment, NodeNetworkFault, PeerGroup},
    names::hash,
    network::{self, Direction as Way, Spare},
    peers::{self, Protocol},
    units::Percent,
};

mod correlation;

use crate::{
    kernel::{
        link::{Link, LinkError, LinkName},
        nft::{
            Addresses, Chain, Device, Direction, PortRange, Selection, Table, Transport, Verdict,
        },
        qdisc::{Chance, Delay, Distribution, Loss, Netem, Reorder},
    },
    model::{Detour, Key, NetworkEntry},
};

/// Names of our tables begin with this.
pub const TABLE_PREFIX: &str = "windtunnel-";
/// Names of our ifbs begin with this.
pub const LINK_PREFIX: &str = "wt";
/// So many hexadecimal digits come after it in names of tables,
const TABLE_HASH: usize = 16;
/// and so many in names of ifbs, before the direction.
const LINK_HASH: usize = 12;

/// Packets per second that a delayed link is assumed to carry.
const ASSUMED_RATE: f64 = 10_000.0;
/// Fewest packets that a queue holds: what the kernel's own default is.
const MIN_LIMIT: f64 = 1_000.0;
/// Most packets that a queue holds.
const MAX_LIMIT: f64 = 100_000.0;
/// The most that the fate of a packet may depend on that of the one before, in percent.
const MAX_CORRELATION: f64 = 99.9;
/// The port of name servers.
const DNS: u16 = 53;
/// Fewest packets that the queue before a slow link holds.
const MIN_SLOW_LIMIT: f64 = 32.0;
/// Bits of a packet of full size.
const PACKET: f64 = 1_514.0 * 8.0;
/// How much of what a slow link can carry waits before it, in time.
const BACKLOG: Duration = Duration::from_secs(1);
/// How long a drained queue may still hold what was on its way into it.
const SETTLE: Duration = Duration::from_secs(1);
/// The longest that the end of a fault waits for packets that are still held.
const MAX_DRAIN: Duration = Duration::from_secs(5);

/// The queueing discipline for an impairment. Its limit is what the delay holds back at an assumed
/// rate of 10 000 packets per second, 1 000 packets at least and 100 000 at most; with a bandwidth,
/// what that carries in the delay and one second, 32 packets at least.
#[must_use]
pub fn netem(impairment: &Impairment) -> Netem {
    let Impairment {
        delay,
        loss,
        duplicate,
        corrupt,
        reorder,
        bandwidth,
        reset: _,
    } = impairment;
    let chance = |c: &network::Chance| as_chance(c.percent, c.correlation);
    Netem {
        limit: limit(delay.as_ref(), bandwidth.as_ref()),
        delay: delay.as_ref().map(as_delay).unwrap_or_default(),
        loss: loss.as_ref().map(as_loss).unwrap_or_default(),
        duplicate: duplicate.as_ref().map(chance).unwrap_or_default(),
        corrupt: corrupt.as_ref().map(chance).unwrap_or_default(),
        reorder: reorder.as_ref().map(as_reorder).unwrap_or_default(),
        rate: bandwidth.as_ref().map_or(0, |b| b.rate.bits_per_second()),
    }
}

fn limit(delay: Option<&network::Delay>, bandwidth: Option<&network::Bandwidth>) -> u32 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a number of packets is made of it"
    )]
    let carried = bandwidth.map(|b| (b.rate.bits_per_second() as f64 / PACKET).min(ASSUMED_RATE));
    let held = match carried {
        None => (longest(delay).as_secs_f64() * ASSUMED_RATE).max(MIN_LIMIT),
        Some(rate) => ((longest(delay) + BACKLOG).as_secs_f64() * rate).max(MIN_SLOW_LIMIT),
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 32 to 100 000"
    )]
    let limit = held.min(MAX_LIMIT) as u32;
    limit
}

fn longest(delay: Option<&network::Delay>) -> Duration {
    delay.map_or(Duration::ZERO, |d| {
        d.latency.get() + d.jitter.unwrap_or_default().get()
    })
}

fn as_delay(delay: &network::Delay) -> Delay {
    let network::Delay {
        latency,
        jitter,
        distribution,
    } = delay;
    Delay {
        latency: latency.get(),
        jitter: jitter.unwrap_or_default().get(),
        correlation: 0.0,
        distribution: match distribution {
            None | Some(network::Distribution::Uniform) => Distribution::Uniform,
            Some(network::Distribution::Normal) => Distribution::Normal,
            Some(network::Distribution::Pareto) => Distribution::Pareto,
            Some(network::Distribution::ParetoNormal) => Distribution::ParetoNormal,
        },
    }
}

fn as_loss(loss: &network::Loss) -> Loss {
    match (&loss.percent, &loss.gilbert_elliott) {
        (_, Some(model)) => Loss::GilbertElliott {
            to_bad: model.good_to_bad.get(),
            to_good: model.bad_to_good.get(),
            loss_in_bad: model
                .loss_in_bad
                .map_or(100.0, windtunnel_crds::units::Percent::get),
            loss_in_good: model.loss_in_good.unwrap_or_default().get(),
        },
        (percent, None) => {
            let percent = percent.unwrap_or_default().get();
            match loss.correlation.unwrap_or_default().get() {
                correlation if correlation > 0.0 && percent < 100.0 => {
                    correlated(percent, correlation)
                }
                _ => Loss::Random(Chance {
                    percent,
                    correlation: 0.0,
                }),
            }
        }
    }
}

/// The chain of two states that loses `percent` of all packets, and in which the fate of a packet
/// has the asked correlation with that of the one before: exactly, which netem's own is not.
fn correlated(percent: f64, correlation: f64) -> Loss {
    // At 100 % no packet would ever differ from the first.
    let change = 100.0 - correlation.min(MAX_CORRELATION);
    Loss::GilbertElliott {
        to_bad: percent * change / 100.0,
        to_good: (100.0 - percent) * change / 100.0,
        loss_in_bad: 100.0,
        loss_in_good: 0.0,
    }
}

fn as_chance(percent: Percent, correlation: Option<Percent>) -> Chance {
    let correlation = correlation.unwrap_or_default().get();
    let correlation = correlation.min(correlation::MOST);
    Chance {
        percent: correlation::threshold(percent.get(), correlation),
        correlation,
    }
}

fn as_reorder(reorder: &network::Reorder) -> Reorder {
    Reorder {
        chance: as_chance(reorder.percent, reorder.correlation),
        gap: reorder.gap.unwrap_or(1),
    }
}

/// How long after its end a fault's impairments are given to let go of the packets that they hold,
/// 5 s at most. Packets that are late by more are dropped: they would be the fault outliving its end.
#[must_use]
pub fn drain(impairment: &Impairment) -> Duration {
    let backlog = impairment
        .bandwidth
        .as_ref()
        .map_or(Duration::ZERO, |_| BACKLOG);
    (longest(impairment.delay.as_ref()) + backlog + SETTLE).min(MAX_DRAIN)
}

/// The directions that a fault acts in.
#[must_use]
pub fn directions(way: Way) -> &'static [Direction] {
    match way {
        Way::Egress => &[Direction::Egress],
        Way::Ingress => &[Direction::Ingress],
        Way::Both => &[Direction::Egress, Direction::Ingress],
    }
}

/// Whether a link is one that packets of the target take, and not one of ours.
#[must_use]
pub fn carries_traffic(link: &Link) -> bool {
    link.is_up && !link.is_loopback && !(link.kind == "ifb" && is_ifb_name(&link.name))
}

/// One detour for each link and direction.
///
/// # Errors
/// Where a link's name is none that the kernel could have given.
pub fn detours(
    key: &Key,
    links: &[Link],
    fault: &NodeNetworkFault,
) -> Result<Vec<Detour>, LinkError> {
    let mut detours = Vec::new();
    if fault.impairment.reset.is_some() {
        return Ok(detours);
    }
    for link in links.iter().filter(|l| carries_traffic(l)) {
        for direction in directions(fault.direction) {
            detours.push(Detour {
                direction: *direction,
                device: Device {
                    name: LinkName::new(&link.name)?,
                    index: link.index,
                },
                ifb: LinkName::new(ifb_name(key, &link.name, *direction))?,
                ifb_index: None,
                netem: netem(&fault.impairment),
            });
        }
    }
    Ok(detours)
}

/// The links whose connections a fault resets.
///
/// # Errors
/// Where a link's name is none that the kernel could have given.
pub fn resets(links: &[Link], fault: &NodeNetworkFault) -> Result<Vec<Device>, LinkError> {
    let is_reset = fault.impairment.reset.is_some();
    let used = links.iter().filter(|l| is_reset && carries_traffic(l));
    used.map(|link| {
        Ok(Device {
            name: LinkName::new(&link.name)?,
            index: link.index,
        })
    })
    .collect()
}

/// At most 15 bytes: the prefix, a hash, and the direction.
fn ifb_name(key: &Key, link: &str, direction: Direction) -> String {
    let way = match direction {
        Direction::Egress => 'e',
        Direction::Ingress => 'i',
    };
    let hash = hash(&[&key.injection, &key.fault, &key.pod, link], LINK_HASH);
    format!("{LINK_PREFIX}{hash}{way}")
}

/// The name of a fault's table in the target's namespace.
#[must_use]
pub fn table_name(key: &Key) -> String {
    format!(
        "{TABLE_PREFIX}{}",
        hash(&[&key.injection, &key.fault, &key.pod], TABLE_HASH)
    )
}

/// Whether a table has a name that we give.
#[must_use]
pub fn is_table_name(name: &str) -> bool {
    name.strip_prefix(TABLE_PREFIX)
        .is_some_and(|rest| is_hash(rest, TABLE_HASH))
}

/// Whether a link has a name that we give to ifbs.
#[must_use]
pub fn is_ifb_name(name: &str) -> bool {
    let hash = name.strip_prefix(LINK_PREFIX);
    let hash = hash.and_then(|rest| rest.strip_suffix(['e', 'i']));
    hash.is_some_and(|hash| is_hash(hash, LINK_HASH))
}

fn is_hash(text: &str, length: usize) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == length && text.bytes().all(is_digit)
}

/// The rules of a fault: what it spares, what it selects, and where that goes. Detours whose ifb is
/// not there have no rules.
#[must_use]
pub fn table(
    entry: &NetworkEntry,
    fault: &NodeNetworkFault,
    node: &[IpAddr],
    cluster_dns: impl Iterator<Item = IpAddr>,
) -> Table {
    let name_servers: Vec<IpAddr> = entry
        .name_servers
        .iter()
        .copied()
        .chain(cluster_dns)
        .collect();
    let spare = spared(&fault.spare, node, &name_servers);
    let select = selected(fault);
    let chain = |direction, device: &Device, verdict| Chain {
        direction,
        device: device.clone(),
        priority: entry.priority,
        spare: spare.clone(),
        select: select.clone(),
        verdict,
    };
    let forwards = entry.detours.iter().filter_map(|detour| {
        let to = Verdict::Forward(Device {
            name: detour.ifb.clone(),
            index: detour.ifb_index?,
        });
        Some(chain(detour.direction, &detour.device, to))
    });
    let resets = entry.resets.iter().flat_map(|device| {
        let both = [Direction::Egress, Direction::Ingress];
        both.map(|direction| chain(direction, device, Verdict::Reset))
    });
    Table {
        name: entry.table.clone(),
        chains: forwards.chain(resets).collect(),
    }
}

fn spared(spare: &[Spare], node: &[IpAddr], name_servers: &[IpAddr]) -> Vec<Selection> {
    let networks =
        |addresses: &[IpAddr]| Addresses::In(addresses.iter().copied().map(IpNet::from).collect());
    let selection = |spare: &Spare| match spare {
        Spare::Node => Selection::new("node", networks(node)),
        Spare::ClusterDNS => Selection {
            remote_ports: vec![PortRange::one(DNS)],
            protocols: vec![Transport::Tcp, Transport::Udp],
            ..Selection::new("dns", networks(name_servers))
        },
    };
    spare.iter().map(selection).collect()
}

/// One selection for each group of peers and each protocol of their ports: a range of ports
/// belongs to one protocol.
fn selected(fault: &NodeNetworkFault) -> Vec<Selection> {
    let everybody = [PeerGroup {
        addresses: None,
        ports: Vec::new(),
    }];
    let groups = fault.peers.as_deref().unwrap_or(&everybody);
    let mut selections = Vec::new();
    for group in groups {
        for protocol in protocols(&group.ports, &fault.local_ports) {
            // Other packets belong to no connection.
            let protocol = match (&fault.impairment.reset, protocol) {
                (Some(_), None | Some(Protocol::Tcp)) => Some(Protocol::Tcp),
                (Some(_), Some(_)) => continue,
                (None, protocol) => protocol,
            };
            let addresses = match &group.addresses {
                None => Addresses::Any,
                Some(ranges) => Addresses::In(ranges.iter().map(|range| range.0).collect()),
            };
            selections.push(Selection {
                name: format!("peers-{}", selections.len()),
                addresses,
                remote_ports: ranges(&group.ports, protocol),
                local_ports: ranges(&fault.local_ports, protocol),
                protocols: protocol.map(transport).into_iter().collect(),
            });
        }
    }
    selections
}

/// The protocols that both lists of ports allow; `None` is any, where neither list says.
fn protocols(remote: &[peers::PortRange], local: &[peers::PortRange]) -> Vec<Option<Protocol>> {
    if remote.is_empty() && local.is_empty() {
        return vec![None];
    }
    let allows = |ports: &[peers::PortRange], protocol: Protocol| {
        ports.is_empty() || ports.iter().any(|port| port.protocol == protocol)
    };
    [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .filter(|p| allows(remote, *p) && allows(local, *p))
        .map(Some)
        .collect()
}

fn ranges(ports: &[peers::PortRange], protocol: Option<Protocol>) -> Vec<PortRange> {
    ports
        .iter()
        .filter(|port| Some(port.protocol) == protocol)
        .map(|port| PortRange {
            first: port.port,
            last: port.last(),
        })
        .collect()
}

fn transport(protocol: Protocol) -> Transport {
    match protocol {
        Protocol::Tcp => Transport::Tcp,
        Protocol::Udp => Transport::Udp,
        Protocol::Sctp => Transport::Sctp,
    }
}

/// Whether packets of a connection are selected, by its remote end and its local port, and not spared.
#[must_use]
pub fn selects(table: &Table, remote: (IpAddr, u16), local_port: u16) -> bool {
    let is_in = |selection: &Selection| {
        let address = match &selection.addresses {
            Addresses::Any => true,
            Addresses::In(nets) => nets.iter().any(|net| net.contains(&remote.0)),
        };
        let port = |ports: &[PortRange], port: u16| {
            ports.is_empty() || ports.iter().any(|r| (r.first..=r.last).contains(&port))
        };
        let protocols = &selection.protocols;
        address
            && (protocols.is_empty() || protocols.contains(&Transport::Tcp))
            && port(&selection.remote_ports, remote.1)
            && port(&selection.local_ports, local_port)
    };
    let takes = |chain: &Chain| chain.select.iter().any(is_in) && !chain.spare.iter().any(is_in);
    table.chains.iter().any(takes)
}

/// Whether two faults on one target would select some packet both: the kernel would give it to
/// one of them and not to the other.
#[must_use]
pub fn compete(one: &NodeNetworkFault, other: &NodeNetworkFault) -> bool {
    let ways = |fault: &NodeNetworkFault| match fault.impairment.reset {
        Some(_) => directions(Way::Both),
        None => directions(fault.direction),
    };
    let meet = ways(one).iter().any(|d| ways(other).contains(d));
    meet && selected(one)
        .iter()
        .any(|a| selected(other).iter().any(|b| overlap(a, b)))
}

fn overlap(a: &Selection, b: &Selection) -> bool {
    let protocols = a.protocols.is_empty()
        || b.protocols.is_empty()
        || a.protocols.iter().any(|p| b.protocols.contains(p));
    let ports = |a: &[PortRange], b: &[PortRange]| {
        a.is_empty()
            || b.is_empty()
            || a.iter()
                .any(|x| b.iter().any(|y| x.first <= y.last && y.first <= x.last))
    };
    let addresses = match (&a.addresses, &b.addresses) {
        (Addresses::Any, Addresses::Any) => true,
        (Addresses::Any, Addresses::In(nets)) | (Addresses::In(nets), Addresses::Any) => {
            !nets.is_empty()
        }
        (Addresses::In(a), Addresses::In(b)) => a
            .iter()
            .any(|x| b.iter().any(|y| x.contains(y) || y.contains(x))),
    };
    protocols
        && addresses
        && ports(&a.remote_ports, &b.remote_ports)
        && ports(&a.local_ports, &b.local_ports)
}

#[cfg(test)]
mod tests;
