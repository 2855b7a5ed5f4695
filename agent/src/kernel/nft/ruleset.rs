//! What a table consists of: chains of rules, sets and counters, planned or held by the kernel.
//!
//! [`compile`] turns a plan into the state that the kernel must hold; reading back gives the same
//! type, so that proof is equality. Pure. Each selection becomes one rule per IP version, both of
//! which use one counter. Sets with equal content are shared by all chains of the table, and keep
//! their name from one plan to the next, so that an update sends only what is new.

use std::collections::{BTreeMap, BTreeSet};

use super::expr::{Expr, Header, Meta};
use super::intervals::{Interval, Key, merge, of_networks};
use super::plan::{Addresses, Chain, Direction, PortRange, Selection, Table, Transport, Verdict};

/// Counter of the neighbour discovery that was let pass.
const NEIGHBOUR_DISCOVERY: &str = "neighbour-discovery";

/// `IPPROTO_ICMPV6`.
const ICMPV6: u8 = 58;

/// Where the flags of a TCP header are, and the one that resets.
const TCP_FLAGS: u32 = 13;
const TCP_RST: u8 = 4;

/// Types of `ICMPv6` from router solicitation to redirect (RFC 4861).
const DISCOVERY_TYPES: (u8, u8) = (133, 137);

/// The content of one table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Ruleset {
    pub(super) chains: BTreeMap<String, BaseChain>,
    pub(super) sets: BTreeMap<String, Set>,
    pub(super) counters: BTreeSet<String>,
}

/// A chain that hangs on a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BaseChain {
    pub(super) hook: Option<Hook>,
    pub(super) rules: Vec<Rule>,
}

/// Where packets enter a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hook {
    /// `NF_NETDEV_INGRESS` and the like.
    pub(super) number: u32,
    pub(super) priority: i32,
    /// Names of the links.
    pub(super) devices: Vec<String>,
}

pub(super) type Rule = Vec<Expr>;

/// An interval set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Set {
    pub(super) key: Key,
    pub(super) intervals: Vec<Interval>,
}

/// Why a packet was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// It was let pass because a selection spares it.
    Spared,
    /// It was forwarded into the ifb, or its connection reset.
    Selected,
    /// It was let pass because it is neighbour discovery.
    Discovery,
}

/// The name of the counter of a selection.
pub(super) fn counter_name(chain: &str, role: Role, selection: &str) -> String {
    match role {
        Role::Spared => format!("{chain}/spare/{selection}"),
        Role::Selected => format!("{chain}/select/{selection}"),
        Role::Discovery => format!("{chain}/{NEIGHBOUR_DISCOVERY}"),
    }
}

/// The state that a plan asks for, with the names of the sets that are `known` already.
pub(super) fn compile(plan: &Table, known: &BTreeMap<String, Set>) -> Ruleset {
    let mut compiler = Compiler {
        known,
        ruleset: Ruleset::default(),
    };
    for chain in &plan.chains {
        let base_chain = compiler.chain(chain);
        compiler.ruleset.chains.insert(chain.name(), base_chain);
    }
    compiler.ruleset
}

struct Compiler<'k> {
    known: &'k BTreeMap<String, Set>,
    ruleset: Ruleset,
}

impl Compiler<'_> {
    fn chain(&mut self, chain: &Chain) -> BaseChain {
        let mut rules = vec![self.discovery_rule(chain)];
        for selection in &chain.spare {
            let verdict = [Expr::Return];
            rules.extend(self.selection_rules(chain, Role::Spared, selection, &verdict));
        }
        for selection in &chain.select {
            let verdict = match &chain.verdict {
                Verdict::Forward(to) => vec![Expr::Link(to.index), Expr::Forward],
                Verdict::Reset => vec![Expr::Reset],
            };
            rules.extend(self.selection_rules(chain, Role::Selected, selection, &verdict));
        }
        let hook = Hook {
            number: hook_number(chain),
            priority: chain.priority,
            devices: match chain.verdict {
                Verdict::Forward(_) => vec![chain.device.name.to_string()],
                Verdict::Reset => Vec::new(),
            },
        };
        BaseChain {
            hook: Some(hook),
            rules,
        }
    }

    fn discovery_rule(&mut self, chain: &Chain) -> Rule {
        let (first, last) = DISCOVERY_TYPES;
        let mut rule = on_link(chain);
        rule.extend(Version::V6.is_it());
        rule.extend([
            Expr::Meta(Meta::Transport),
            Expr::Equal(vec![ICMPV6]),
            load(Header::Transport, 0, 1),
            Expr::Between(vec![first], vec![last]),
            self.count(&chain.name(), Role::Discovery, NEIGHBOUR_DISCOVERY),
            Expr::Return,
        ]);
        rule
    }

    fn selection_rules(
        &mut self,
        chain: &Chain,
        role: Role,
        selection: &Selection,
        verdict: &[Expr],
    ) -> [Rule; 2] {
        [Version::V4, Version::V6].map(|version| {
            let mut exprs = on_link(chain);
            exprs.extend(version.is_it());
            if let Addresses::In(networks) = &selection.addresses {
                let intervals = of_networks(version.key(), networks);
                exprs.push(version.load_remote(chain.direction));
                exprs.push(self.in_set(version.key(), intervals));
            }
            exprs.extend(self.ports(chain.direction, selection));
            if role == Role::Selected && chain.verdict == Verdict::Reset {
                // A reset is not answered by another, and has to arrive: ours, and the peer's.
                let flags = load(Header::Transport, TCP_FLAGS, 1);
                exprs.extend([flags, Expr::Mask(vec![TCP_RST]), Expr::Equal(vec![0])]);
            }
            exprs.push(self.count(&chain.name(), role, &selection.name));
            exprs.extend_from_slice(verdict);
            exprs
        })
    }

    fn ports(&mut self, direction: Direction, selection: &Selection) -> Rule {
        let (remote, local) = (&selection.remote_ports, &selection.local_ports);
        let protocols = match &selection.protocols[..] {
            [] if remote.is_empty() && local.is_empty() => return Rule::new(),
            [] => &Transport::ALL[..],
            named => named,
        };
        let numbers = protocols.iter().map(|protocol| protocol.number());
        let numbers = numbers.map(|number| Interval::new(number, number));
        let mut rule = vec![
            Expr::Meta(Meta::Transport),
            self.in_set(Key::Protocol, merge(numbers.collect())),
        ];
        // Source and destination port are the first two fields of all three protocols.
        let (remote_at, local_at) = match direction {
            Direction::Egress => (2, 0),
            Direction::Ingress => (0, 2),
        };
        for (ports, offset) in [(remote, remote_at), (local, local_at)] {
            if !ports.is_empty() {
                rule.push(load(Header::Transport, offset, 2));
                rule.push(self.in_set(Key::Port, of_ports(ports)));
            }
        }
        rule
    }

    /// Looks the register up in a set with this content.
    fn in_set(&mut self, key: Key, intervals: Vec<Interval>) -> Expr {
        let set = Set { key, intervals };
        let same = |sets: &BTreeMap<String, Set>| {
            let mut found = sets.iter().filter(|(_, other)| **other == set);
            found.next().map(|(name, _)| name.clone())
        };
        let name = same(&self.ruleset.sets)
            .or_else(|| same(self.known))
            .unwrap_or_else(|| self.free_name(key));
        self.ruleset.sets.entry(name.clone()).or_insert(set);
        Expr::InSet(name)
    }

    fn free_name(&self, key: Key) -> String {
        let prefix = match key {
            Key::Ipv4 => "ipv4",
            Key::Ipv6 => "ipv6",
            Key::Protocol => "protocol",
            Key::Port => "port",
        };
        let is_free =
            |name: &String| !self.known.contains_key(name) && !self.ruleset.sets.contains_key(name);
        // One of as many names as there are sets, and one more, is free.
        let taken = self.known.len() + self.ruleset.sets.len();
        let mut names = (0..=taken).map(|number| format!("{prefix}-{number}"));
        names.find(is_free).unwrap_or_default()
    }

    fn count(&mut self, chain: &str, role: Role, selection: &str) -> Expr {
        let name = counter_name(chain, role, selection);
        self.ruleset.counters.insert(name.clone());
        Expr::Count(name)
    }
}

/// The version of the internet protocol.
#[derive(Debug, Clone, Copy)]
enum Version {
    V4,
    V6,
}

impl Version {
    fn key(self) -> Key {
        match self {
            Self::V4 => Key::Ipv4,
            Self::V6 => Key::Ipv6,
        }
    }

    /// Goes on for packets of this version only.
    fn is_it(self) -> Rule {
        let ethertype: u16 = match self {
            Self::V4 => 0x0800,
            Self::V6 => 0x86dd,
        };
        vec![
            Expr::Meta(Meta::Protocol),
            Expr::Equal(ethertype.to_be_bytes().to_vec()),
        ]
    }

    fn load_remote(self, direction: Direction) -> Expr {
        let offset = match (self, direction) {
            (Self::V4, Direction::Ingress) => 12,
            (Self::V4, Direction::Egress) => 16,
            (Self::V6, Direction::Ingress) => 8,
            (Self::V6, Direction::Egress) => 24,
        };
        load(Header::Network, offset, self.key().width())
    }
}

fn load(header: Header, offset: u32, length: u32) -> Expr {
    Expr::Payload {
        header,
        offset,
        length,
    }
}

fn of_ports(ranges: &[PortRange]) -> Vec<Interval> {
    let intervals = ranges
        .iter()
        .map(|range| Interval::new(range.first, range.last));
    merge(intervals.collect())
}

fn hook_number(chain: &Chain) -> u32 {
    let number = match (&chain.verdict, chain.direction) {
        (Verdict::Forward(_), Direction::Ingress) => libc::NF_NETDEV_INGRESS,
        (Verdict::Forward(_), Direction::Egress) => libc::NF_NETDEV_EGRESS,
        (Verdict::Reset, Direction::Ingress) => libc::NF_INET_LOCAL_IN,
        (Verdict::Reset, Direction::Egress) => libc::NF_INET_LOCAL_OUT,
    };
    number.cast_unsigned()
}

/// Goes on for packets of the chain's link only, where the chain does not hang on it.
fn on_link(chain: &Chain) -> Rule {
    let link = match (&chain.verdict, chain.direction) {
        (Verdict::Forward(_), _) => return Rule::new(),
        (Verdict::Reset, Direction::Ingress) => Meta::InLink,
        (Verdict::Reset, Direction::Egress) => Meta::OutLink,
    };
    let index = chain.device.index.to_ne_bytes().to_vec();
    vec![Expr::Meta(link), Expr::Equal(index)]
}

#[cfg(test)]
#[path = "ruleset_tests.rs"]
mod tests;
