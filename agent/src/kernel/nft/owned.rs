//! A table that this process owns, from its making to its end.
//!
//! Owns the two sockets of a table in its namespace, and the order of requests. Whatever rules look
//! up is there before they are: sets are filled in a transaction of their own that no packet sees,
//! and replaced under new names, never emptied and filled again. On 6.18, packets were seen to pass
//! rules whose sets came in the same transaction as if the sets were empty. Then all rules are
//! swapped at once; counters stay. Dropping an [`OwnedTable`] removes the table.

use std::collections::BTreeMap;

use nix::errno::Errno;

use super::encode::At;
use super::plan::{Chain, Device, Family, Table, Verdict};
use super::readback::{self, Mismatch, Proof};
use super::ruleset::{Role, Ruleset, Set, compile, counter_name};
use super::{NftError, TableInfo, Tally, encode};
use crate::kernel::link::{Link, RouteSocket};
use crate::kernel::netlink::NetlinkError;
use crate::kernel::netlink::message::Request;
use crate::kernel::netlink::socket::{self, Socket};
use crate::kernel::netns::NetNs;

/// A table that lives as long as this value, and at most as long as this process.
#[derive(Debug)]
pub struct OwnedTable {
    socket: Socket,
    route: RouteSocket,
    plan: Table,
    ruleset: Ruleset,
}

/// What the rules of a table have counted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters {
    /// One per selection, spared and selected, and one per chain for neighbour discovery.
    pub each: Vec<SelectionCount>,
}

/// What a selection has counted since it was first in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectionCount {
    /// Name of the chain.
    pub chain: String,
    /// What happened to the packets.
    pub role: Role,
    /// Name of the selection; empty for neighbour discovery.
    pub selection: String,
    /// How many.
    pub tally: Tally,
}

impl Counters {
    /// All that were counted in a role.
    #[must_use]
    pub fn sum(&self, role: Role) -> Tally {
        let counts = self.each.iter().filter(|count| count.role == role);
        counts.map(|count| count.tally).sum()
    }
}

impl OwnedTable {
    /// Makes a table in a namespace. All its chains take effect at once, when this returns.
    ///
    /// # Errors
    /// When the plan is not possible, the name is taken, a link is not there or not up, or the
    /// kernel lacks something; nothing is left then.
    pub fn install(netns: &NetNs, plan: &Table) -> Result<Self, NftError> {
        plan.check()?;
        let ruleset = compile(plan, &BTreeMap::new());
        let mut table = Self {
            socket: Socket::open(netns, socket::Family::Netfilter)?,
            route: RouteSocket::open(netns)?,
            plan: plan.clone(),
            ruleset,
        };
        // A chain for a link that is not there is accepted by newer kernels (seen on 6.18).
        table.check_links()?;
        let none = Ruleset::default();
        let mut contents = vec![encode::new_table(plan.at())];
        contents.extend(additions(plan.at(), &none, &table.ruleset));
        table.socket.transact(contents)?;
        table
            .socket
            .transact(rules(plan.at(), &none, &table.ruleset))?;
        Ok(table)
    }

    /// Name of the table.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.plan.name
    }

    /// What the table was last asked to be.
    #[must_use]
    pub fn plan(&self) -> &Table {
        &self.plan
    }

    /// Changes what is spared and selected, for all packets at once; counters of selections that
    /// stay go on. Call [`OwnedTable::verify`] afterwards.
    ///
    /// # Errors
    /// When the plan has other chains than the table, is not possible, or the kernel refuses;
    /// the table is then as before. After [`crate::kernel::netlink::NetlinkError::NoAnswer`] it may
    /// be either: verify, or drop it.
    pub fn update(&mut self, plan: &Table) -> Result<(), NftError> {
        plan.check()?;
        if !same_chains(&self.plan, plan) {
            let table = self.plan.name.clone();
            return Err(NftError::OtherChains { table });
        }
        let ruleset = compile(plan, &self.ruleset.sets);
        let name = plan.at();
        self.socket
            .transact(additions(name, &self.ruleset, &ruleset))?;
        let mut swap = rules(name, &self.ruleset, &ruleset);
        swap.extend(removals(name, &self.ruleset, &ruleset));
        if let Err(refused) = self.socket.transact(swap) {
            // What was added has no effect; if it stays, `verify` says so.
            let _ = self
                .socket
                .transact(removals(name, &ruleset, &self.ruleset));
            return Err(refused.into());
        }
        self.plan = plan.clone();
        self.ruleset = ruleset;
        Ok(())
    }

    /// Reads back what the kernel holds and compares it with the plan: table, owner, chains on
    /// their links, rules, sets, counters, and the links that packets are forwarded to.
    ///
    /// # Errors
    /// [`NftError::Mismatch`] with the first difference; otherwise when the exchange fails.
    pub fn verify(&mut self) -> Result<Proof, NftError> {
        let tables = readback::tables(&mut self.socket, self.plan.family())?;
        let table = tables
            .into_iter()
            .find(|table| table.name == self.plan.name);
        let table = table.ok_or_else(|| self.mismatch(Mismatch::TableGone))?;
        let expected = self.socket.port();
        if table.owner != Some(expected) {
            let found = table.owner;
            return Err(self.mismatch(Mismatch::Owner { expected, found }));
        }
        self.check_links()?;
        let held = readback::ruleset(&mut self.socket, self.plan.at())?;
        readback::compare(&self.ruleset, &held).map_err(|found| self.mismatch(found))?;
        Ok(Proof {
            handle: table.handle,
            owner: expected,
            chains: held.chains.len(),
            rules: held.chains.values().map(|chain| chain.rules.len()).sum(),
            intervals: held.sets.values().map(|set| set.intervals.len()).sum(),
        })
    }

    fn check_links(&mut self) -> Result<(), NftError> {
        let links = self.route.links()?;
        check_links(&self.plan.chains, &links).map_err(|found| self.mismatch(found))
    }

    fn mismatch(&self, mismatch: Mismatch) -> NftError {
        let table = self.plan.name.clone();
        NftError::Mismatch { table, mismatch }
    }

    /// What the rules have counted so far.
    ///
    /// # Errors
    /// When the exchange fails, or a counter is gone.
    pub fn counters(&mut self) -> Result<Counters, NftError> {
        let held = readback::counters(&mut self.socket, self.plan.at())?;
        let mut each = Vec::new();
        for chain in &self.plan.chains {
            for (role, selection) in counted(chain) {
                let counter = counter_name(&chain.name(), role, selection);
                let Some(tally) = held.get(&counter) else {
                    return Err(self.mismatch(Mismatch::CounterGone { counter }));
                };
                each.push(SelectionCount {
                    chain: chain.name(),
                    role,
                    selection: selection.to_owned(),
                    tally: *tally,
                });
            }
        }
        Ok(Counters { each })
    }
}

/// The tables of a namespace whose name starts so, whoever owns them.
///
/// # Errors
/// When the exchange fails.
pub fn list_tables(netns: &NetNs, prefix: &str) -> Result<Vec<TableInfo>, NftError> {
    let mut socket = Socket::open(netns, socket::Family::Netfilter)?;
    let mut tables = Vec::new();
    for family in Family::ALL {
        tables.extend(readback::tables(&mut socket, family)?);
    }
    tables.retain(|table| table.name.starts_with(prefix));
    Ok(tables)
}

/// Deletes a table that no one owns, if there is one.
///
/// # Errors
/// `EPERM` when a socket owns it: only that one's end removes it.
pub fn delete_table(netns: &NetNs, name: &str) -> Result<(), NftError> {
    let mut socket = Socket::open(netns, socket::Family::Netfilter)?;
    for family in Family::ALL {
        match socket.transact(vec![encode::delete_table(At { family, name })]) {
            Err(NetlinkError::Refused { reason, .. }) if reason.errno == Errno::ENOENT => {}
            deleted => return Ok(deleted?),
        }
    }
    Ok(())
}

fn counted(chain: &Chain) -> impl Iterator<Item = (Role, &str)> {
    let spared = chain.spare.iter().map(|s| (Role::Spared, &s.name[..]));
    let selected = chain.select.iter().map(|s| (Role::Selected, &s.name[..]));
    let discovery = std::iter::once((Role::Discovery, ""));
    spared.chain(selected).chain(discovery)
}

/// Requests for the sets and counters that are in `after` and not in `before`.
fn additions(table: At<'_>, before: &Ruleset, after: &Ruleset) -> Vec<Request> {
    let counters = after.counters.difference(&before.counters);
    let counters = counters.map(|counter| encode::new_counter(table, counter));
    let sets = without(&after.sets, &before.sets);
    let sets = sets.flat_map(|(name, set)| encode::new_set(table, name, set));
    counters.chain(sets).collect()
}

/// Requests that put the rules of `after` in the place of those of `before`, with their chains.
fn rules(table: At<'_>, before: &Ruleset, after: &Ruleset) -> Vec<Request> {
    let mut requests = Vec::new();
    for (name, chain) in &after.chains {
        if before.chains.contains_key(name) {
            requests.push(encode::delete_rules(table, name));
        } else if let Some(hook) = &chain.hook {
            requests.push(encode::new_chain(table, name, hook));
        }
        let rules = chain.rules.iter();
        requests.extend(rules.map(|rule| encode::new_rule(table, name, rule)));
    }
    requests
}

/// Requests that remove the sets and counters that no rule uses any more.
fn removals(table: At<'_>, before: &Ruleset, after: &Ruleset) -> Vec<Request> {
    let sets = without(&before.sets, &after.sets).map(|(name, _)| encode::delete_set(table, name));
    let counters = before.counters.difference(&after.counters);
    let counters = counters.map(|counter| encode::delete_counter(table, counter));
    sets.chain(counters).collect()
}

fn without<'s>(
    sets: &'s BTreeMap<String, Set>,
    others: &'s BTreeMap<String, Set>,
) -> impl Iterator<Item = (&'s String, &'s Set)> {
    sets.iter().filter(|(name, _)| !others.contains_key(*name))
}

/// Whether two plans differ in selections only.
fn same_chains(one: &Table, other: &Table) -> bool {
    let bare = |chain: &Chain| Chain {
        spare: Vec::new(),
        select: Vec::new(),
        ..chain.clone()
    };
    let ones = one.chains.iter().map(bare);
    one.name == other.name && ones.eq(other.chains.iter().map(bare))
}

/// A chain keeps the name of a link that is gone, and hooks on to a later one of that name: its
/// link must be the one it was made for.
fn check_links(chains: &[Chain], links: &[Link]) -> Result<(), Mismatch> {
    let find = |device: &Device| {
        let mut found = links.iter().filter(|link| link.index == device.index);
        found.find(|link| link.name == device.name.as_str())
    };
    for chain in chains {
        let Device { name, index } = &chain.device;
        if find(&chain.device).is_none() {
            return Err(Mismatch::DeviceGone {
                name: name.to_string(),
                index: *index,
            });
        }
        let Verdict::Forward(to) = &chain.verdict else {
            continue;
        };
        let Device { name, index } = to;
        if !find(to).is_some_and(|link| link.is_up) {
            return Err(Mismatch::ForwardGone {
                name: name.to_string(),
                index: *index,
            });
        }
    }
    Ok(())
}
