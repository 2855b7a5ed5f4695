//! What a table is to do, in the words of a fault: plain data, no nftables in it.
//!
//! A table holds one chain per link and direction. A chain first lets pass what is spared, then
//! forwards what is selected into an ifb. Neighbour discovery is never selected, packets that are
//! not IP never match. A plan says nothing of rules or sets; that is `ruleset`'s part.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::encode::At;
use crate::kernel::link::LinkName;

/// Longest name of a selection, in bytes.
const SELECTION_NAME: usize = 128;

/// Longest name of a table, in bytes (`NFT_NAME_MAXLEN` less the NUL byte).
const TABLE_NAME: usize = 255;

/// Why a plan is not possible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A name is empty, too long or holds a NUL byte.
    #[error("{what} cannot be named {name:?}")]
    Name {
        /// Table or selection.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Two chains for the same link and direction.
    #[error("there are two chains {chain}")]
    TwoChains {
        /// Name of the chains.
        chain: String,
    },
    /// Two selections of a chain that are spared, or two that are not, have one name.
    #[error("chain {chain} has two selections {selection:?}")]
    TwoSelections {
        /// Name of the chain.
        chain: String,
        /// Name of the selections.
        selection: String,
    },
    /// Some packets of a table are to be forwarded, others reset.
    #[error("a table cannot both forward and reset")]
    Mixed,
    /// A range of ports whose first is above its last.
    #[error("ports {first} to {last} are no range")]
    Ports {
        /// First port.
        first: u16,
        /// Last port.
        last: u16,
    },
}

/// A family of tables: where its chains hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// On links.
    Netdev,
    /// On what the namespace's own sockets send and receive.
    Inet,
}

impl Family {
    /// All that our tables are of.
    pub(super) const ALL: [Self; 2] = [Self::Netdev, Self::Inet];

    pub(super) const fn number(self) -> libc::c_int {
        match self {
            Self::Netdev => libc::NFPROTO_NETDEV,
            Self::Inet => libc::NFPROTO_INET,
        }
    }
}

/// What happens to packets that are selected.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Verdict {
    /// They are forwarded into an ifb. It must be up: one that is down or gone swallows them.
    Forward(Device),
    /// They are answered with the reset of their TCP connection, and go no further. Resets pass.
    Reset,
}

/// A table: all its chains have verdicts of one kind.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Table {
    /// Its name, unique among the tables of the namespace.
    pub name: String,
    /// Its chains, at most one per link and direction.
    pub chains: Vec<Chain>,
}

/// What happens to the packets of one link in one direction.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Chain {
    /// Which packets of the link pass the chain.
    pub direction: Direction,
    /// The link.
    pub device: Device,
    /// Order among the chains of the same link and direction: the lower sees a packet first, and
    /// takes it if it selects it.
    pub priority: i32,
    /// What passes untouched.
    pub spare: Vec<Selection>,
    /// What is selected, unless it is spared.
    pub select: Vec<Selection>,
    /// What happens to what is selected.
    pub verdict: Verdict,
}

/// A link, known by its index, with the name that it must still have.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Device {
    /// Its name.
    pub name: LinkName,
    /// Its index.
    pub index: u32,
}

/// Which way packets go, seen from the namespace.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Direction {
    /// Out of the link (needs Linux 5.16).
    Egress,
    /// Into the link.
    Ingress,
}

/// Packets with properties that all apply. An empty list leaves a property open.
///
/// Of a datagram in fragments, only the first has ports: the others match no selection with ports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Selection {
    /// Name under which its packets are counted, 1 to 128 bytes.
    pub name: String,
    /// Addresses of the remote side: the destination on egress, the source on ingress.
    pub addresses: Addresses,
    /// Ports of the remote side.
    pub remote_ports: Vec<PortRange>,
    /// Ports of the namespace's own side.
    pub local_ports: Vec<PortRange>,
    /// Transport protocols; when none is named but ports are, all that have ports.
    pub protocols: Vec<Transport>,
}

/// Addresses of the remote side.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Addresses {
    /// All of both families.
    Any,
    /// Those in these networks, which may overlap; an empty list matches nothing.
    In(Vec<IpNet>),
}

/// Ports from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PortRange {
    /// First port.
    pub first: u16,
    /// Last port, not below the first.
    pub last: u16,
}

/// A transport protocol with ports.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Transport {
    /// Transmission control protocol.
    Tcp,
    /// User datagram protocol.
    Udp,
    /// Stream control transmission protocol.
    Sctp,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The protocol's number in IP headers.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl PortRange {
    /// One port.
    #[must_use]
    pub fn one(port: u16) -> Self {
        Self {
            first: port,
            last: port,
        }
    }
}

impl Selection {
    /// All packets with these addresses on the remote side.
    #[must_use]
    pub fn new(name: impl Into<String>, addresses: Addresses) -> Self {
        Self {
            name: name.into(),
            addresses,
            remote_ports: Vec::new(),
            local_ports: Vec::new(),
            protocols: Vec::new(),
        }
    }

    fn check(&self) -> Result<(), PlanError> {
        check_name("a selection", &self.name, SELECTION_NAME)?;
        let mut ports = self.remote_ports.iter().chain(&self.local_ports);
        match ports.find(|range| range.first > range.last) {
            Some(&PortRange { first, last }) => Err(PlanError::Ports { first, last }),
            None => Ok(()),
        }
    }
}

impl Chain {
    /// Its name in the table: direction and link.
    #[must_use]
    pub fn name(&self) -> String {
        match self.direction {
            Direction::Egress => format!("egress-{}", self.device.name),
            Direction::Ingress => format!("ingress-{}", self.device.name),
        }
    }

    fn check(&self) -> Result<(), PlanError> {
        for selections in [&self.spare, &self.select] {
            let mut names = BTreeSet::new();
            for selection in selections {
                selection.check()?;
                if !names.insert(&selection.name) {
                    return Err(PlanError::TwoSelections {
                        chain: self.name(),
                        selection: selection.name.clone(),
                    });
                }
            }
        }
        Ok(())
    }
}

impl Table {
    /// The family that it is of.
    #[must_use]
    pub fn family(&self) -> Family {
        match self.chains.first().map(|chain| &chain.verdict) {
            Some(Verdict::Reset) => Family::Inet,
            Some(Verdict::Forward(_)) | None => Family::Netdev,
        }
    }

    pub(super) fn at(&self) -> At<'_> {
        At {
            family: self.family(),
            name: &self.name,
        }
    }

    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first fault found.
    pub fn check(&self) -> Result<(), PlanError> {
        check_name("a table", &self.name, TABLE_NAME)?;
        let mut names = BTreeSet::new();
        for chain in &self.chains {
            chain.check()?;
            if matches!(chain.verdict, Verdict::Reset) != (self.family() == Family::Inet) {
                return Err(PlanError::Mixed);
            }
            if !names.insert(chain.name()) {
                let chain = chain.name();
                return Err(PlanError::TwoChains { chain });
            }
        }
        Ok(())
    }
}

fn check_name(what: &'static str, name: &str, longest: usize) -> Result<(), PlanError> {
    if (1..=longest).contains(&name.len()) && !name.contains('\0') {
        Ok(())
    } else {
        let name = name.to_owned();
        Err(PlanError::Name { what, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, index: u32) -> Device {
        let name = LinkName::new(name).unwrap();
        Device { name, index }
    }

    fn table() -> Table {
        let chain = |direction| Chain {
            direction,
            device: device("eth0", 2),
            priority: 0,
            spare: vec![Selection::new("node", Addresses::Any)],
            select: vec![Selection::new("node", Addresses::Any)],
            verdict: Verdict::Forward(device("wt0", 3)),
        };
        Table {
            name: "wt".to_owned(),
            chains: vec![chain(Direction::Egress), chain(Direction::Ingress)],
        }
    }

    #[test]
    fn a_sound_plan_passes() {
        assert_eq!(table().check(), Ok(()));
    }

    #[test]
    fn what_the_types_leave_open_is_checked() {
        let broken = |change: fn(&mut Table)| {
            let mut table = table();
            change(&mut table);
            table.check().unwrap_err()
        };
        let error = broken(|table| table.name.clear());
        assert!(matches!(error, PlanError::Name { .. }));
        let error = broken(|table| table.chains[1].verdict = Verdict::Reset);
        assert_eq!(error, PlanError::Mixed);
        let error = broken(|table| table.chains[1].direction = Direction::Egress);
        assert!(matches!(error, PlanError::TwoChains { .. }));
        let error = broken(|table| {
            let again = table.chains[0].select[0].clone();
            table.chains[0].select.push(again);
        });
        assert!(matches!(error, PlanError::TwoSelections { .. }));
        let error = broken(|table| {
            let range = PortRange { first: 2, last: 1 };
            table.chains[0].spare[0].local_ports.push(range);
        });
        assert_eq!(error, PlanError::Ports { first: 2, last: 1 });
        let error = broken(|table| table.chains[0].spare[0].name = "x".repeat(129));
        assert!(matches!(error, PlanError::Name { .. }));
    }
}
