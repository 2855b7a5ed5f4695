//! Reads back what the kernel holds of a table, and compares it with what it should.
//!
//! Owns the lists that are read and the comparison, which names the first difference. It changes
//! nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::encode::{
    At, ELEMENTS_SET, ELEMENTS_TABLE, GET_CHAIN, GET_ELEMENTS, GET_OBJECT, GET_RULE, GET_SET,
    GET_TABLE, OBJECT_TABLE, OBJECT_TYPE, RULE_TABLE, SET_TABLE, request,
};
use super::expr::COUNTER_OBJECT;
use super::intervals::from_elements;
use super::plan::Family;
use super::ruleset::{BaseChain, Ruleset, Set};
use super::{NftError, TableInfo, Tally, decode};
use crate::kernel::netlink::NetlinkError;
use crate::kernel::netlink::socket::Socket;

/// What was found to be as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The kernel's number for the table.
    pub handle: u64,
    /// Netlink port of our socket, which owns it.
    pub owner: u32,
    /// Chains that hang on their links.
    pub chains: usize,
    /// Rules in them.
    pub rules: usize,
    /// Intervals in all sets.
    pub intervals: usize,
}

impl std::fmt::Display for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            handle,
            owner,
            chains,
            rules,
            intervals,
        } = self;
        write!(
            f,
            "table {handle} of port {owner}: {chains} chains, {rules} rules, {intervals} intervals"
        )
    }
}

/// The first difference between a plan and what the kernel holds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// There is no such table.
    #[error("it is gone")]
    TableGone,
    /// The table is not ours.
    #[error("its owner is {found:?}, not {expected}")]
    Owner {
        /// Port of our socket.
        expected: u32,
        /// Port of its owner.
        found: Option<u32>,
    },
    /// The link of a chain is gone, renamed, or another one has its name.
    #[error("link {index} named {name} of a chain is gone")]
    DeviceGone {
        /// Name of the link.
        name: String,
        /// Index of the link.
        index: u32,
    },
    /// The ifb that packets are forwarded to is gone or down: it swallows them.
    #[error("link {index} named {name}, which packets are forwarded to, is gone or down")]
    ForwardGone {
        /// Name of the ifb.
        name: String,
        /// Index of the ifb.
        index: u32,
    },
    /// A chain is not there; older kernels remove it with its link.
    #[error("chain {chain} is gone")]
    ChainGone {
        /// Name of the chain.
        chain: String,
    },
    /// A chain hangs elsewhere or on nothing.
    #[error("chain {chain} is not where it should be")]
    ChainMoved {
        /// Name of the chain.
        chain: String,
    },
    /// The rules of a chain differ.
    #[error("chain {chain} holds other rules, from rule {position} on")]
    Rules {
        /// Name of the chain.
        chain: String,
        /// Position of the first that differs, from 0.
        position: usize,
    },
    /// A set is missing or differs.
    #[error("set {set} holds other elements")]
    Elements {
        /// Name of the set.
        set: String,
    },
    /// A counter is missing.
    #[error("counter {counter} is gone")]
    CounterGone {
        /// Name of the counter.
        counter: String,
    },
    /// Something is in the table that the plan does not have.
    #[error("it holds {name}, which is not planned")]
    Foreign {
        /// Name of the chain, set or counter.
        name: String,
    },
}

/// All tables of a family in the socket's namespace.
pub(super) fn tables(socket: &mut Socket, family: Family) -> Result<Vec<TableInfo>, NetlinkError> {
    let list = || request(family, "list tables".to_owned(), GET_TABLE, 0, |_| {});
    socket.dump(list, decode::table)
}

/// The counters of a table.
pub(super) fn counters(
    socket: &mut Socket,
    table: At<'_>,
) -> Result<BTreeMap<String, Tally>, NetlinkError> {
    let list = || {
        let what = format!("list the counters of table {table}");
        request(table.family, what, GET_OBJECT, 0, |body| {
            body.text(OBJECT_TABLE, table.name)
                .be32(OBJECT_TYPE, COUNTER_OBJECT);
        })
    };
    let found = socket.dump(list, |message| decode::counter(message, table.name))?;
    Ok(found.into_iter().collect())
}

/// Everything that a table holds.
pub(super) fn ruleset(socket: &mut Socket, table: At<'_>) -> Result<Ruleset, NftError> {
    Ok(Ruleset {
        chains: chains(socket, table)?,
        sets: sets(socket, table)?,
        counters: counters(socket, table)?.into_keys().collect(),
    })
}

fn chains(socket: &mut Socket, table: At<'_>) -> Result<BTreeMap<String, BaseChain>, NetlinkError> {
    let list = || {
        request(
            table.family,
            format!("list the chains of table {table}"),
            GET_CHAIN,
            0,
            |_| {},
        )
    };
    let hooks = socket.dump(list, |message| decode::chain(message, table.name))?;
    let empty = |(name, hook)| {
        let rules = Vec::new();
        (name, BaseChain { hook, rules })
    };
    let mut chains: BTreeMap<_, _> = hooks.into_iter().map(empty).collect();
    let list = || {
        let what = format!("list the rules of table {table}");
        request(table.family, what, GET_RULE, 0, |body| {
            body.text(RULE_TABLE, table.name);
        })
    };
    for (chain, rule) in socket.dump(list, |message| decode::rule(message, table.name))? {
        let chain = chains.entry(chain).or_insert(BaseChain {
            hook: None,
            rules: Vec::new(),
        });
        chain.rules.push(rule);
    }
    Ok(chains)
}

/// A set of a kind that we never make is taken for an empty one of ours: it equals none planned.
fn sets(socket: &mut Socket, table: At<'_>) -> Result<BTreeMap<String, Set>, NftError> {
    let list = || {
        let what = format!("list the sets of table {table}");
        request(table.family, what, GET_SET, 0, |body| {
            body.text(SET_TABLE, table.name);
        })
    };
    let mut sets = BTreeMap::new();
    for (name, key) in socket.dump(list, |message| decode::set(message, table.name))? {
        let Some(key) = key else {
            let mismatch = Mismatch::Foreign { name };
            let table = table.name.to_owned();
            return Err(NftError::Mismatch { table, mismatch });
        };
        let list = || {
            let what = format!("list the elements of set {name} of table {table}");
            request(table.family, what, GET_ELEMENTS, 0, |body| {
                body.text(ELEMENTS_TABLE, table.name)
                    .text(ELEMENTS_SET, &name);
            })
        };
        let elements = socket.dump(list, decode::elements)?.concat();
        let intervals = from_elements(key, elements).map_err(|source| NftError::Set {
            table: table.name.to_owned(),
            set: name.clone(),
            source,
        })?;
        sets.insert(name, Set { key, intervals });
    }
    Ok(sets)
}

/// Compares what should be with what is, and names the first difference.
pub(super) fn compare(planned: &Ruleset, held: &Ruleset) -> Result<(), Mismatch> {
    for (name, chain) in &planned.chains {
        compare_chain(name, chain, held.chains.get(name))?;
    }
    let differs = |(name, set): &(&String, &Set)| held.sets.get(*name) != Some(*set);
    if let Some((set, _)) = planned.sets.iter().find(differs) {
        return Err(Mismatch::Elements { set: set.clone() });
    }
    if let Some(counter) = planned.counters.difference(&held.counters).next() {
        let counter = counter.clone();
        return Err(Mismatch::CounterGone { counter });
    }
    match names(held).difference(&names(planned)).next() {
        Some(name) => Err(Mismatch::Foreign {
            name: (*name).to_owned(),
        }),
        None => Ok(()),
    }
}

fn compare_chain(
    name: &str,
    planned: &BaseChain,
    held: Option<&BaseChain>,
) -> Result<(), Mismatch> {
    let chain = name.to_owned();
    let Some(held) = held else {
        return Err(Mismatch::ChainGone { chain });
    };
    if held.hook != planned.hook {
        return Err(Mismatch::ChainMoved { chain });
    }
    let most = planned.rules.len().max(held.rules.len());
    match (0..most).find(|position| planned.rules.get(*position) != held.rules.get(*position)) {
        Some(position) => Err(Mismatch::Rules { chain, position }),
        None => Ok(()),
    }
}

fn names(ruleset: &Ruleset) -> BTreeSet<&str> {
    let chains = ruleset.chains.keys();
    let names = chains.chain(ruleset.sets.keys()).chain(&ruleset.counters);
    names.map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::super::expr::Expr;
    use super::super::intervals::{Interval, Key};
    use super::super::ruleset::Hook;
    use super::*;

    fn ruleset() -> Ruleset {
        let hook = Hook {
            number: 1,
            priority: 0,
            devices: vec!["eth0".to_owned()],
        };
        let chain = BaseChain {
            hook: Some(hook),
            rules: vec![vec![Expr::Return], vec![Expr::Link(3), Expr::Forward]],
        };
        let set = Set {
            key: Key::Ipv4,
            intervals: vec![Interval::new(1_u32, 2_u32)],
        };
        Ruleset {
            chains: BTreeMap::from([("egress-eth0".to_owned(), chain)]),
            sets: BTreeMap::from([("ipv4-0".to_owned(), set)]),
            counters: BTreeSet::from(["all".to_owned()]),
        }
    }

    #[test]
    fn the_same_is_the_same() {
        assert_eq!(compare(&ruleset(), &ruleset()), Ok(()));
    }

    #[test]
    fn each_difference_is_named() {
        let name = || "egress-eth0".to_owned();
        let found = |change: fn(&mut Ruleset)| {
            let mut held = ruleset();
            change(&mut held);
            compare(&ruleset(), &held).unwrap_err()
        };
        let chain = |held: &mut Ruleset| held.chains.clear();
        assert_eq!(found(chain), Mismatch::ChainGone { chain: name() });
        let hook = |held: &mut Ruleset| {
            let chain = held.chains.get_mut("egress-eth0").unwrap();
            chain.hook.as_mut().unwrap().devices.clear();
        };
        assert_eq!(found(hook), Mismatch::ChainMoved { chain: name() });
        let rule = |held: &mut Ruleset| {
            let chain = held.chains.get_mut("egress-eth0").unwrap();
            chain.rules[1][0] = Expr::Link(4);
        };
        let (chain, position) = (name(), 1);
        assert_eq!(found(rule), Mismatch::Rules { chain, position });
        let more = |held: &mut Ruleset| {
            let chain = held.chains.get_mut("egress-eth0").unwrap();
            chain.rules.push(vec![Expr::Return]);
        };
        let (chain, position) = (name(), 2);
        assert_eq!(found(more), Mismatch::Rules { chain, position });
        let element = |held: &mut Ruleset| {
            held.sets.get_mut("ipv4-0").unwrap().intervals[0].last = 3;
        };
        let set = "ipv4-0".to_owned();
        assert_eq!(found(element), Mismatch::Elements { set });
        let counter = |held: &mut Ruleset| held.counters.clear();
        let gone = "all".to_owned();
        assert_eq!(found(counter), Mismatch::CounterGone { counter: gone });
        let foreign = |held: &mut Ruleset| {
            held.counters.insert("more".to_owned());
        };
        let name = "more".to_owned();
        assert_eq!(found(foreign), Mismatch::Foreign { name });
    }
}
