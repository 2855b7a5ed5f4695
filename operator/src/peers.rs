//! Peers to addresses: pure, from what the cluster was seen to hold.
//!
//! The target's own packets carry a Service's ClusterIP (it is the node that replaces it), so
//! peers chosen as pods include the ClusterIPs of the Services that lead to them alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kube::ResourceExt as _;
use thiserror::Error;
use windtunnel_crds::{
    injection::{AddressRange, PeerGroup},
    peers::{Peers, PortRange, Protocol, ServicePeer},
};

use crate::cluster::{EndpointSlice, Service, ServicePort};

/// The most addresses and ranges that one fault may have.
pub const MAX_ADDRESSES: usize = 4096;
/// The most groups of addresses with ports of their own that one fault may have.
pub const MAX_GROUPS: usize = 256;
/// The most ports and ranges that one group may have.
pub const MAX_PORTS: usize = 64;

/// What the cluster holds that peers can refer to.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    /// Addresses of the pods that the peers' podSelector selects.
    pub selected: BTreeSet<IpAddr>,
    /// Services by namespace and name: all of the experiment's namespace, and those named.
    pub services: Vec<Service>,
    /// The endpoint slices of those Services.
    pub slices: Vec<EndpointSlice>,
    /// Addresses of the hosts, or why there are none; without those that nobody has answered for yet.
    pub hosts: BTreeMap<String, Resolved>,
}

/// What is known of a host's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// These they are.
    Found(Vec<IpAddr>),
    /// These they were; what they are now, or of which other family there are some, nobody says.
    Kept {
        /// The addresses found last.
        addresses: Vec<IpAddr>,
        /// Why there are none newer.
        why: String,
    },
    /// The name servers say that there is none.
    Absent(String),
    /// This replica was told nothing so far, and why.
    Unknown(String),
}

impl Resolved {
    /// What was found, now or before.
    pub(crate) fn into_addresses(self) -> Vec<IpAddr> {
        match self {
            Self::Found(addresses) | Self::Kept { addresses, .. } => addresses,
            Self::Absent(_) | Self::Unknown(_) => Vec::new(),
        }
    }
}

/// Peers as addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerSet {
    /// Groups of addresses with their ports; any of them is a peer.
    pub groups: Vec<PeerGroup>,
    /// What the user should know about the choice.
    pub notes: Vec<String>,
    /// Of a host no address is known, or none of now: it is asked for again soon.
    pub is_partial: bool,
    /// Whether a host has addresses is not known: those that nodes have of it may be good.
    pub is_doubtful: bool,
    /// The hosts that nobody has answered for yet: without them the set is not to be used.
    pub awaited: Vec<String>,
}

/// Why peers cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PeerError {
    /// More addresses than a fault may have.
    #[error("the peers are {0} addresses and ranges, of {MAX_ADDRESSES} at most")]
    TooMany(usize),
    /// More groups than a fault may have.
    #[error("the peers have {0} different sets of ports, of {MAX_GROUPS} at most")]
    TooManyGroups(usize),
    /// More ports than a group may have.
    #[error("a Service among the peers has {0} ports, of {MAX_PORTS} at most")]
    TooManyPorts(usize),
    /// A named Service does not exist.
    #[error("there is no Service {name} in namespace {namespace}")]
    NoService {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

/// Resolves `peers` of an experiment in `namespace`.
///
/// # Errors
/// [`PeerError`] where a Service is missing, or the addresses, groups or ports are too many.
pub fn resolve(
    peers: &Peers,
    namespace: &str,
    directory: &Directory,
) -> Result<PeerSet, PeerError> {
    let Peers {
        pod_selector,
        services,
        cidrs,
        hosts,
        ports,
        local_ports: _,
    } = peers;
    let mut set = PeerSet::default();
    let mut addresses: BTreeSet<IpNet> = cidrs.iter().map(|cidr| cidr.0).collect();
    for host in hosts {
        let found = known(&host.0, directory, &mut set);
        addresses.extend(found.iter().copied().map(IpNet::from));
    }
    if pod_selector.is_some() {
        addresses.extend(directory.selected.iter().copied().map(IpNet::from));
        if directory.selected.is_empty() {
            set.notes
                .push("the peers' podSelector selects no pod now".to_owned());
        }
        covered_services(namespace, directory, ports, &mut addresses, &mut set);
    }
    for peer in services {
        let service = find(peer, namespace, directory)?;
        set.groups.extend(service_groups(service, directory));
    }
    let by_address = pod_selector.is_some() || !cidrs.is_empty() || !hosts.is_empty();
    if by_address {
        set.groups.push(group(Some(addresses), ports.clone()));
    } else if services.is_empty() {
        set.groups.push(group(None, ports.clone()));
    }
    set.groups.sort();
    set.groups.dedup();
    let count = set
        .groups
        .iter()
        .filter_map(|g| g.addresses.as_ref())
        .map(Vec::len)
        .sum();
    if count > MAX_ADDRESSES {
        return Err(PeerError::TooMany(count));
    }
    if set.groups.len() > MAX_GROUPS {
        return Err(PeerError::TooManyGroups(set.groups.len()));
    }
    let ports = set.groups.iter().map(|g| g.ports.len()).max();
    match ports.filter(|ports| *ports > MAX_PORTS) {
        Some(ports) => Err(PeerError::TooManyPorts(ports)),
        None => Ok(set),
    }
}

/// The addresses known of a host, now or before. What is wrong with them is said in the set.
fn known<'a>(host: &str, directory: &'a Directory, set: &mut PeerSet) -> &'a [IpAddr] {
    let known = directory.hosts.get(host);
    set.is_partial |= !matches!(known, Some(Resolved::Found(_)));
    set.is_doubtful |= matches!(known, Some(Resolved::Unknown(_)));
    match known {
        Some(Resolved::Found(found)) => found,
        Some(Resolved::Kept { addresses, why }) => {
            set.notes.push(format!(
                "host {host}: {why}; the addresses found before stay in force"
            ));
            addresses
        }
        Some(Resolved::Absent(why) | Resolved::Unknown(why)) => {
            set.notes.push(format!("host {host} has no address: {why}"));
            &[]
        }
        None => {
            set.awaited.push(host.to_owned());
            &[]
        }
    }
}

fn group(addresses: Option<BTreeSet<IpNet>>, ports: Vec<PortRange>) -> PeerGroup {
    PeerGroup {
        addresses: addresses.map(|all| all.into_iter().map(AddressRange).collect()),
        ports,
    }
}

fn find<'a>(
    peer: &ServicePeer,
    namespace: &str,
    directory: &'a Directory,
) -> Result<&'a Service, PeerError> {
    let namespace = peer.namespace.as_deref().unwrap_or(namespace);
    directory
        .services
        .iter()
        .find(|s| s.name_any() == peer.name && s.namespace().as_deref() == Some(namespace))
        .ok_or_else(|| PeerError::NoService {
            namespace: namespace.to_owned(),
            name: peer.name.clone(),
        })
}

/// Adds the ClusterIPs of the namespace's Services that lead to selected pods alone.
fn covered_services(
    namespace: &str,
    directory: &Directory,
    ports: &[PortRange],
    addresses: &mut BTreeSet<IpNet>,
    set: &mut PeerSet,
) {
    let own = directory
        .services
        .iter()
        .filter(|s| s.namespace().as_deref() == Some(namespace));
    for service in own {
        let endpoints = endpoints(service, directory);
        let selected = endpoints
            .iter()
            .filter(|(ip, _)| directory.selected.contains(ip))
            .count();
        if selected == 0 {
            continue;
        }
        if selected < endpoints.len() {
            set.notes.push(format!(
                "Service {} leads to other pods too, packets to its ClusterIP are not matched",
                service.name_any()
            ));
            continue;
        }
        let ips = cluster_ips(service);
        if ports.is_empty() {
            addresses.extend(ips);
            continue;
        }
        let mapped = mapped_ports(service, &endpoints, ports);
        if !mapped.is_empty() {
            set.groups.push(group(Some(ips), mapped));
        }
    }
}

/// The service ports that lead to one of the pods' `ports`.
fn mapped_ports(
    service: &Service,
    endpoints: &[Endpoint<'_>],
    ports: &[PortRange],
) -> Vec<PortRange> {
    let wanted = |target: &PortRange| {
        ports
            .iter()
            .any(|p| p.protocol == target.protocol && (p.port..=p.last()).contains(&target.port))
    };
    let leads_there = |port: &&ServicePort| {
        endpoints
            .iter()
            .flat_map(|(_, slice)| slice_ports(slice))
            .any(|(name, target)| name == port.name && wanted(&target))
    };
    service
        .spec
        .ports
        .iter()
        .filter(leads_there)
        .map(service_port)
        .collect()
}

/// A named Service: its ClusterIPs with its own ports, its endpoints with the target ports.
fn service_groups(service: &Service, directory: &Directory) -> Vec<PeerGroup> {
    let mut groups = Vec::new();
    let ips = cluster_ips(service);
    if !ips.is_empty() {
        groups.push(group(
            Some(ips),
            service.spec.ports.iter().map(service_port).collect(),
        ));
    }
    let mut by_ports: BTreeMap<Vec<PortRange>, BTreeSet<IpNet>> = BTreeMap::new();
    for (ip, slice) in endpoints(service, directory) {
        let mut ports: Vec<PortRange> = slice_ports(slice).map(|(_, port)| port).collect();
        ports.sort();
        by_ports.entry(ports).or_default().insert(ip.into());
    }
    groups.extend(
        by_ports
            .into_iter()
            .map(|(ports, ips)| group(Some(ips), ports)),
    );
    groups
}

fn service_port(port: &ServicePort) -> PortRange {
    PortRange {
        port: port.port,
        end_port: None,
        protocol: port.protocol.unwrap_or_default(),
    }
}

fn cluster_ips(service: &Service) -> BTreeSet<IpNet> {
    // "None" of a headless Service is no address.
    service
        .spec
        .cluster_ips
        .iter()
        .filter_map(|text| text.parse::<IpAddr>().ok())
        .map(IpNet::from)
        .collect()
}

/// An address behind a Service, with the slice that names it.
type Endpoint<'a> = (IpAddr, &'a EndpointSlice);

/// The endpoints of a Service, ready or not: packets may reach either.
fn endpoints<'a>(service: &Service, directory: &'a Directory) -> Vec<Endpoint<'a>> {
    let of_service = |slice: &&EndpointSlice| {
        slice.namespace() == service.namespace()
            && slice.labels().get("kubernetes.io/service-name") == Some(&service.name_any())
    };
    let addresses = |slice: &'a EndpointSlice| {
        slice
            .endpoints
            .iter()
            .flat_map(|endpoint| &endpoint.addresses)
            .filter_map(|address| address.parse().ok())
            .map(move |ip| (ip, slice))
    };
    directory
        .slices
        .iter()
        .filter(of_service)
        .flat_map(addresses)
        .collect()
}

/// The target ports of a slice, with the names of the service ports that lead to them.
fn slice_ports(slice: &EndpointSlice) -> impl Iterator<Item = (String, PortRange)> {
    slice.ports.iter().flatten().filter_map(|port| {
        let protocol = match port.protocol.as_deref() {
            Some("UDP") => Protocol::Udp,
            Some("SCTP") => Protocol::Sctp,
            _ => Protocol::Tcp,
        };
        let number = u16::try_from(port.port?).ok()?;
        let range = PortRange {
            port: number,
            end_port: None,
            protocol,
        };
        Some((port.name.clone().unwrap_or_default(), range))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// So many Services in front of one selected pod, each with so many ports.
    fn directory(services: u16, ports: u16) -> Directory {
        let ports: Vec<u16> = (1..=ports).collect();
        let service = |n: u16| {
            let ports: Vec<_> = ports.iter().map(|p| json!({"port": p})).collect();
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"name": format!("s{n}"), "namespace": "shop"},
                "spec": {"clusterIPs": [format!("10.0.{}.{}", n / 256, n % 256)], "ports": ports},
            })
        };
        let slice = |n: u16| {
            let ports: Vec<_> = ports.iter().map(|p| json!({"port": p})).collect();
            json!({
                "metadata": {"name": format!("s{n}"), "namespace": "shop",
                    "labels": {"kubernetes.io/service-name": format!("s{n}")}},
                "addressType": "IPv4", "ports": ports,
                "endpoints": [{"addresses": ["192.0.2.1"]}],
            })
        };
        let all = |make: &dyn Fn(u16) -> serde_json::Value| (0..services).map(make).collect();
        Directory {
            selected: ["192.0.2.1".parse().unwrap()].into(),
            services: serde_json::from_value(all(&service)).unwrap(),
            slices: serde_json::from_value(all(&slice)).unwrap(),
            ..Directory::default()
        }
    }

    #[test]
    fn a_host_that_nobody_can_say_anything_new_of_keeps_its_addresses() {
        let peers: Peers = serde_json::from_value(json!({"hosts": ["a", "b"]})).unwrap();
        let one: IpAddr = [192, 0, 2, 1].into();
        let two: IpAddr = [192, 0, 2, 2].into();
        let why = || "no answer".to_owned();
        let kept = Resolved::Kept {
            addresses: vec![two],
            why: why(),
        };
        for (b, count, note, flags) in [
            (Resolved::Found(vec![two]), 2, "", (false, false)),
            (
                kept,
                2,
                "host b: no answer; the addresses found before stay in force",
                (true, false),
            ),
            (
                Resolved::Absent(why()),
                1,
                "host b has no address: no answer",
                (true, false),
            ),
            (
                Resolved::Unknown(why()),
                1,
                "host b has no address: no answer",
                (true, true),
            ),
        ] {
            let a = ("a".to_owned(), Resolved::Found(vec![one]));
            let directory = Directory {
                hosts: [a, ("b".to_owned(), b)].into(),
                ..Directory::default()
            };
            let set = resolve(&peers, "shop", &directory).unwrap();
            let addresses = set.groups[0].addresses.as_ref().unwrap();
            assert_eq!(addresses.len(), count, "{set:?}");
            assert_eq!(set.notes.join(", "), note);
            assert_eq!((set.is_partial, set.is_doubtful), flags);
        }
    }

    #[test]
    fn more_than_an_injection_takes_is_refused_here() {
        let peers: Peers = serde_json::from_value(json!({
            "podSelector": {"matchLabels": {"app": "x"}}, "ports": [{"port": 1, "endPort": 99}],
        }))
        .unwrap();
        for (services, ports, error) in [
            (255, 64, None),
            (256, 1, Some(PeerError::TooManyGroups(257))),
            (1, 65, Some(PeerError::TooManyPorts(65))),
        ] {
            let resolved = resolve(&peers, "shop", &directory(services, ports));
            assert_eq!(resolved.err(), error, "{services} Services, {ports} ports");
        }
    }
}
