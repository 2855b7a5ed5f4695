//! Requests that make, change and take apart what a table consists of.
//!
//! Owns the outgoing messages of nfnetlink for tables. Each request names what it
//! is about, so that a refused transaction says which part was refused.

use super::expr::{COUNTER_OBJECT, Expr};
use super::intervals::{Element, to_elements};
use super::plan::Family;
use super::ruleset::{Hook, Set};
use crate::kernel::link::CREATE;
use crate::kernel::netlink::attr::{Encoder, byte, wire};
use crate::kernel::netlink::message::Request;

/// `NFT_TABLE_F_OWNER`: the table lives and dies with the socket that made it.
pub(super) const OWNER: u32 = 2;

/// Elements of a set in one message: an attribute holds 64 KiB, an element takes 36 bytes or less.
const ELEMENTS: usize = 1500;

// Kinds of message.
pub(super) const NEW_TABLE: libc::c_int = libc::NFT_MSG_NEWTABLE;
pub(super) const GET_TABLE: libc::c_int = libc::NFT_MSG_GETTABLE;
pub(super) const GET_CHAIN: libc::c_int = libc::NFT_MSG_GETCHAIN;
pub(super) const GET_RULE: libc::c_int = libc::NFT_MSG_GETRULE;
pub(super) const GET_SET: libc::c_int = libc::NFT_MSG_GETSET;
pub(super) const GET_ELEMENTS: libc::c_int = libc::NFT_MSG_GETSETELEM;
pub(super) const GET_OBJECT: libc::c_int = libc::NFT_MSG_GETOBJ;

// Attributes (include/uapi/linux/netfilter/nf_tables.h), shared with the reader.
pub(super) const TABLE_NAME: u16 = 1;
pub(super) const TABLE_FLAGS: u16 = 2;
pub(super) const CHAIN_TABLE: u16 = 1;
pub(super) const CHAIN_NAME: u16 = 3;
pub(super) const CHAIN_HOOK: u16 = 4;
pub(super) const HOOK_NUMBER: u16 = 1;
pub(super) const HOOK_PRIORITY: u16 = 2;
const HOOK_DEVICE: u16 = 3;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
pub(super) const RULE_TABLE: u16 = 1;
pub(super) const RULE_CHAIN: u16 = 2;
pub(super) const RULE_EXPRESSIONS: u16 = 4;
pub(super) const SET_TABLE: u16 = 1;
pub(super) const SET_NAME: u16 = 2;
pub(super) const SET_FLAGS: u16 = 3;
pub(super) const SET_KEY_TYPE: u16 = 4;
const SET_KEY_LENGTH: u16 = 5;
const SET_ID: u16 = 10;
pub(super) const ELEMENTS_TABLE: u16 = 1;
pub(super) const ELEMENTS_SET: u16 = 2;
pub(super) const ELEMENTS_LIST: u16 = 3;
pub(super) const ELEMENT_KEY: u16 = 1;
pub(super) const ELEMENT_FLAGS: u16 = 3;
pub(super) const OBJECT_TABLE: u16 = 1;
pub(super) const OBJECT_NAME: u16 = 2;
pub(super) const OBJECT_TYPE: u16 = 3;
pub(super) const OBJECT_DATA: u16 = 4;
pub(super) const LIST_ELEMENT: u16 = 1;
pub(super) const DATA_VALUE: u16 = 1;

/// `NFT_SET_INTERVAL`.
pub(super) const INTERVAL: u32 = libc::NFT_SET_INTERVAL.cast_unsigned();

/// `NFT_SET_ELEM_INTERVAL_END`.
pub(super) const INTERVAL_END: u32 = libc::NFT_SET_ELEM_INTERVAL_END.cast_unsigned();

/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;

/// A table: the family that it is of, and its name.
#[derive(Debug, Clone, Copy)]
pub(super) struct At<'a> {
    pub(super) family: Family,
    pub(super) name: &'a str,
}

impl std::fmt::Display for At<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// A message about tables of a family; `fill` appends the attributes.
pub(super) fn request(
    family: Family,
    what: String,
    kind: libc::c_int,
    flags: u16,
    fill: impl FnOnce(&mut Encoder),
) -> Request {
    let mut body = Encoder::new();
    // `struct nfgenmsg`: family, version, no resource.
    body.raw(&[byte(family.number()), 0, 0, 0]);
    fill(&mut body);
    Request {
        what,
        kind: wire(libc::NFNL_SUBSYS_NFTABLES) << 8 | wire(kind),
        flags,
        body,
    }
}

pub(super) fn new_table(table: At<'_>) -> Request {
    request(
        table.family,
        format!("create table {table}"),
        NEW_TABLE,
        CREATE,
        |body| {
            body.text(TABLE_NAME, table.name).be32(TABLE_FLAGS, OWNER);
        },
    )
}

pub(super) fn delete_table(table: At<'_>) -> Request {
    let kind = libc::NFT_MSG_DELTABLE;
    request(
        table.family,
        format!("delete table {table}"),
        kind,
        0,
        |body| {
            body.text(TABLE_NAME, table.name);
        },
    )
}

pub(super) fn new_chain(table: At<'_>, chain: &str, hook: &Hook) -> Request {
    let what = format!("create chain {chain} of table {table}");
    request(table.family, what, libc::NFT_MSG_NEWCHAIN, CREATE, |body| {
        body.text(CHAIN_TABLE, table.name)
            .text(CHAIN_NAME, chain)
            .nest(CHAIN_HOOK, |attrs| {
                attrs
                    .be32(HOOK_NUMBER, hook.number)
                    .be32(HOOK_PRIORITY, hook.priority.cast_unsigned());
                for device in &hook.devices {
                    attrs.text(HOOK_DEVICE, device);
                }
            })
            .be32(CHAIN_POLICY, ACCEPT)
            .text(CHAIN_TYPE, "filter");
    })
}

pub(super) fn new_rule(table: At<'_>, chain: &str, rule: &[Expr]) -> Request {
    let what = format!("add a rule to chain {chain} of table {table}");
    let flags = wire(libc::NLM_F_CREATE | libc::NLM_F_APPEND);
    request(table.family, what, libc::NFT_MSG_NEWRULE, flags, |body| {
        body.text(RULE_TABLE, table.name)
            .text(RULE_CHAIN, chain)
            .nest(RULE_EXPRESSIONS, |list| {
                for expr in rule {
                    expr.encode(LIST_ELEMENT, list);
                }
            });
    })
}

/// Removes all rules of a chain.
pub(super) fn delete_rules(table: At<'_>, chain: &str) -> Request {
    let what = format!("remove the rules of chain {chain} of table {table}");
    request(table.family, what, libc::NFT_MSG_DELRULE, 0, |body| {
        body.text(RULE_TABLE, table.name).text(RULE_CHAIN, chain);
    })
}

/// Makes a set and puts its elements into it.
pub(super) fn new_set(table: At<'_>, name: &str, set: &Set) -> Vec<Request> {
    let what = format!("create set {name} of table {table}");
    let mut requests = vec![request(
        table.family,
        what,
        libc::NFT_MSG_NEWSET,
        CREATE,
        |body| {
            body.text(SET_TABLE, table.name)
                .text(SET_NAME, name)
                .be32(SET_FLAGS, INTERVAL)
                .be32(SET_KEY_TYPE, set.key.datatype())
                .be32(SET_KEY_LENGTH, set.key.width())
                // The kernel wants one; the set is spoken of by its name.
                .be32(SET_ID, 0);
        },
    )];
    let elements = to_elements(set.key, &set.intervals);
    let chunks = elements.chunks(ELEMENTS);
    requests.extend(chunks.map(|chunk| new_elements(table, name, chunk)));
    requests
}

fn new_elements(table: At<'_>, set: &str, elements: &[Element]) -> Request {
    let what = format!("fill set {set} of table {table}");
    request(
        table.family,
        what,
        libc::NFT_MSG_NEWSETELEM,
        CREATE,
        |body| {
            body.text(ELEMENTS_TABLE, table.name)
                .text(ELEMENTS_SET, set)
                .nest(ELEMENTS_LIST, |list| {
                    for element in elements {
                        list.nest(LIST_ELEMENT, |attrs| encode_element(element, attrs));
                    }
                });
        },
    )
}

fn encode_element(element: &Element, attrs: &mut Encoder) {
    attrs.nest(ELEMENT_KEY, |key| {
        key.bytes(DATA_VALUE, &element.key);
    });
    if element.is_end {
        attrs.be32(ELEMENT_FLAGS, INTERVAL_END);
    }
}

pub(super) fn delete_set(table: At<'_>, name: &str) -> Request {
    let what = format!("delete set {name} of table {table}");
    request(table.family, what, libc::NFT_MSG_DELSET, 0, |body| {
        body.text(SET_TABLE, table.name).text(SET_NAME, name);
    })
}

pub(super) fn new_counter(table: At<'_>, name: &str) -> Request {
    let what = format!("create counter {name} of table {table}");
    request(table.family, what, libc::NFT_MSG_NEWOBJ, CREATE, |body| {
        body.text(OBJECT_TABLE, table.name)
            .text(OBJECT_NAME, name)
            .be32(OBJECT_TYPE, COUNTER_OBJECT)
            .nest(OBJECT_DATA, |_| {});
    })
}

pub(super) fn delete_counter(table: At<'_>, name: &str) -> Request {
    let what = format!("delete counter {name} of table {table}");
    request(table.family, what, libc::NFT_MSG_DELOBJ, 0, |body| {
        body.text(OBJECT_TABLE, table.name)
            .text(OBJECT_NAME, name)
            .be32(OBJECT_TYPE, COUNTER_OBJECT);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::nft::intervals::{Interval, Key};

    fn at(name: &str) -> At<'_> {
        let family = Family::Netdev;
        At { family, name }
    }

    /// As `nft` sends it, but with the flags that make the table ours and new.
    #[test]
    fn an_owned_table_has_these_bytes() {
        let expected: &[u8] = &[
            36, 0, 0, 0, 0, 10, 1, 6, 1, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr
            5, 0, 0, 0, // nfgenmsg
            7, 0, 1, 0, b'w', b't', 0, 0, // NFTA_TABLE_NAME
            8, 0, 2, 0, 0, 0, 0, 2, // NFTA_TABLE_FLAGS: owner
        ];
        assert_eq!(new_table(at("wt")).encode(0, 1).unwrap(), expected);
    }

    #[test]
    fn large_sets_are_cut_into_messages_that_fit() {
        let intervals = (0..4096_u128).map(|n| Interval::new(2 * n, 2 * n));
        let set = Set {
            key: Key::Ipv6,
            intervals: intervals.collect(),
        };
        let requests = new_set(at("wt"), "ipv6-0", &set);
        assert_eq!(requests.len(), 1 + 8192_usize.div_ceil(ELEMENTS));
        for request in requests {
            assert!(request.encode(0, 1).is_ok());
        }
    }
}
