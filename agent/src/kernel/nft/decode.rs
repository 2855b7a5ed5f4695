//! What the kernel shows of tables, read into the same types that plans are compiled to.
//!
//! Owns the incoming messages of nfnetlink for tables. Treats them as arbitrary
//! bytes.

use super::encode::{
    CHAIN_HOOK, CHAIN_NAME, CHAIN_TABLE, DATA_VALUE, ELEMENT_FLAGS, ELEMENT_KEY, ELEMENTS_LIST,
    HOOK_NUMBER, HOOK_PRIORITY, INTERVAL, INTERVAL_END, OBJECT_DATA, OBJECT_NAME, OBJECT_TABLE,
    OBJECT_TYPE, RULE_CHAIN, RULE_EXPRESSIONS, RULE_TABLE, SET_FLAGS, SET_KEY_TYPE, SET_NAME,
    SET_TABLE, TABLE_NAME,
};
use super::expr::{COUNTER_OBJECT, Expr};
use super::intervals::{Element, Key};
use super::ruleset::{Hook, Rule};
use crate::kernel::netlink::DecodeError;
use crate::kernel::netlink::attr::{Attr, Attrs, tail};
use crate::kernel::netlink::message::Message;

/// Bytes of the header in front of attributes (`struct nfgenmsg`).
const HEADER: usize = 4;

// Attributes that are only read.
const TABLE_HANDLE: u16 = 4;
const TABLE_OWNER: u16 = 7;
const HOOK_DEVICES: u16 = 4;
const COUNTER_BYTES: u16 = 1;
const COUNTER_PACKETS: u16 = 2;

/// A table as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// The kernel's number for it, never used twice in a namespace.
    pub handle: u64,
    /// Netlink port of the socket that owns it; `None` for one that outlives its maker.
    pub owner: Option<u32>,
}

/// Packets that a counter has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Packets; a GSO packet counts as one.
    pub packets: u64,
    /// Bytes; on egress the link's header is among them, on ingress it is not.
    pub bytes: u64,
}

impl std::ops::Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            packets: self.packets.saturating_add(other.packets),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl std::iter::Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), std::ops::Add::add)
    }
}

fn attrs<'a>(message: &Message<'a>) -> Result<Attrs<'a>, DecodeError> {
    Attrs::parse(tail(message.payload, HEADER))
}

/// The attributes of an object that belongs to the table; `None` if it belongs to another.
fn attrs_of<'a>(
    message: &Message<'a>,
    kind: u16,
    table: &str,
) -> Result<Option<Attrs<'a>>, DecodeError> {
    let attrs = attrs(message)?;
    let is_same = attrs.require(kind)?.text()? == table;
    Ok(is_same.then_some(attrs))
}

fn text(attrs: &Attrs<'_>, kind: u16) -> Result<String, DecodeError> {
    Ok(attrs.require(kind)?.text()?.to_owned())
}

pub(super) fn table(message: &Message<'_>) -> Result<Option<TableInfo>, DecodeError> {
    let attrs = attrs(message)?;
    Ok(Some(TableInfo {
        name: text(&attrs, TABLE_NAME)?,
        handle: attrs.require(TABLE_HANDLE)?.be64()?,
        owner: attrs
            .get(TABLE_OWNER)
            .map(|owner| owner.be32())
            .transpose()?,
    }))
}

pub(super) fn chain(
    message: &Message<'_>,
    table: &str,
) -> Result<Option<(String, Option<Hook>)>, DecodeError> {
    let Some(attrs) = attrs_of(message, CHAIN_TABLE, table)? else {
        return Ok(None);
    };
    let found = attrs.get(CHAIN_HOOK);
    let found = found.map(|attr| attr.nested().and_then(|attrs| hook(&attrs)));
    Ok(Some((text(&attrs, CHAIN_NAME)?, found.transpose()?)))
}

fn hook(attrs: &Attrs<'_>) -> Result<Hook, DecodeError> {
    let devices = match attrs.get(HOOK_DEVICES) {
        Some(list) => list
            .nested()?
            .iter()
            .map(|device| Ok(device.text()?.to_owned()))
            .collect::<Result<_, DecodeError>>()?,
        None => Vec::new(),
    };
    Ok(Hook {
        number: attrs.require(HOOK_NUMBER)?.be32()?,
        priority: attrs.require(HOOK_PRIORITY)?.be32()?.cast_signed(),
        devices,
    })
}

/// The chain of a rule, and the rule.
pub(super) fn rule(
    message: &Message<'_>,
    table: &str,
) -> Result<Option<(String, Rule)>, DecodeError> {
    let Some(attrs) = attrs_of(message, RULE_TABLE, table)? else {
        return Ok(None);
    };
    let exprs = match attrs.get(RULE_EXPRESSIONS) {
        Some(list) => list
            .nested()?
            .iter()
            .map(Expr::decode)
            .collect::<Result<_, _>>()?,
        None => Rule::new(),
    };
    Ok(Some((text(&attrs, RULE_CHAIN)?, exprs)))
}

/// Name and key of a set; the key is `None` for a set that is not of our making.
pub(super) fn set(
    message: &Message<'_>,
    table: &str,
) -> Result<Option<(String, Option<Key>)>, DecodeError> {
    let Some(attrs) = attrs_of(message, SET_TABLE, table)? else {
        return Ok(None);
    };
    let flags = match attrs.get(SET_FLAGS) {
        Some(flags) => flags.be32()?,
        None => 0,
    };
    let datatype = attrs.require(SET_KEY_TYPE)?.be32()?;
    let key = Key::ALL.into_iter().find(|key| key.datatype() == datatype);
    let key = key.filter(|_| flags == INTERVAL);
    Ok(Some((text(&attrs, SET_NAME)?, key)))
}

/// A part of a set's elements.
pub(super) fn elements(message: &Message<'_>) -> Result<Option<Vec<Element>>, DecodeError> {
    let Some(list) = attrs(message)?.get(ELEMENTS_LIST) else {
        return Ok(None);
    };
    let elements = list.nested()?.iter().map(element).collect::<Result<_, _>>();
    elements.map(Some)
}

fn element(attr: Attr<'_>) -> Result<Element, DecodeError> {
    let attrs = attr.nested()?;
    let key = attrs.require(ELEMENT_KEY)?.nested()?.require(DATA_VALUE)?;
    let flags = match attrs.get(ELEMENT_FLAGS) {
        Some(flags) => flags.be32()?,
        None => 0,
    };
    Ok(Element {
        key: key.value().to_vec(),
        is_end: flags & INTERVAL_END != 0,
    })
}

/// Name and count of a counter.
pub(super) fn counter(
    message: &Message<'_>,
    table: &str,
) -> Result<Option<(String, Tally)>, DecodeError> {
    let Some(attrs) = attrs_of(message, OBJECT_TABLE, table)? else {
        return Ok(None);
    };
    if attrs.require(OBJECT_TYPE)?.be32()? != COUNTER_OBJECT {
        return Ok(None);
    }
    let counts = attrs.require(OBJECT_DATA)?.nested()?;
    let tally = Tally {
        packets: counts.require(COUNTER_PACKETS)?.be64()?,
        bytes: counts.require(COUNTER_BYTES)?.be64()?,
    };
    Ok(Some((text(&attrs, OBJECT_NAME)?, tally)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernel::nft::encode;
    use crate::kernel::nft::intervals::{Interval, from_elements};
    use crate::kernel::nft::plan::Family;
    use crate::kernel::nft::ruleset::Set;

    const WT: encode::At<'_> = encode::At {
        family: Family::Netdev,
        name: "wt",
    };

    /// What the kernel shows has the form of what it was sent.
    fn decoded<T>(
        request: crate::kernel::netlink::message::Request,
        decode: impl Fn(&Message<'_>) -> Result<Option<T>, DecodeError>,
    ) -> Option<T> {
        let bytes = request.encode(0, 1).unwrap();
        decode(&Message::parse_all(&bytes).unwrap()[0]).unwrap()
    }

    #[test]
    fn rules_come_back_as_they_were_sent() {
        let sent = vec![
            Expr::InSet("ipv4-0".to_owned()),
            Expr::Link(7),
            Expr::Forward,
        ];
        let request = || encode::new_rule(WT, "egress-eth0", &sent);
        let found = decoded(request(), |message| rule(message, "wt"));
        assert_eq!(found, Some(("egress-eth0".to_owned(), sent.clone())));
        assert_eq!(decoded(request(), |message| rule(message, "other")), None);
    }

    #[test]
    fn sets_come_back_as_they_were_sent() {
        let sent = Set {
            key: Key::Port,
            intervals: vec![
                Interval::new(80_u16, 81_u16),
                Interval::new(443_u16, u16::MAX),
            ],
        };
        let mut requests = encode::new_set(WT, "port-0", &sent).into_iter();
        let found = decoded(requests.next().unwrap(), |message| set(message, "wt"));
        assert_eq!(found, Some(("port-0".to_owned(), Some(Key::Port))));
        let found = decoded(requests.next().unwrap(), elements).unwrap();
        assert_eq!(from_elements(Key::Port, found).unwrap(), sent.intervals);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(payload in prop::collection::vec(any::<u8>(), 0..120)) {
            let length = u32::try_from(16 + payload.len()).unwrap();
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.resize(16, 0);
            bytes.extend(payload);
            for message in Message::parse_all(&bytes).unwrap() {
                let _ = (table(&message), chain(&message, "a"), rule(&message, "a"));
                let _ = (set(&message, "a"), elements(&message), counter(&message, "a"));
            }
        }
    }
}
