//! The expressions that our rules are made of, on the wire.
//!
//! Each works on register 1: a rule loads a property of the packet, compares it, and goes on only
//! if it fits. What the kernel shows is decoded to the same type, so that rules can be compared; an
//! expression of another kind or form is kept as [`Expr::Other`] and equals none of ours.

use crate::kernel::netlink::DecodeError;
use crate::kernel::netlink::attr::{Attr, Attrs, Encoder};

/// `NFT_REG_1`.
const REGISTER: u32 = 1;

/// `NFT_REG_VERDICT`.
const VERDICT_REGISTER: u32 = 0;

/// `NFT_RETURN`: leave the chain; what a base chain's policy says happens, which is to accept.
const RETURN: u32 = (libc::NFT_RETURN).cast_unsigned();

/// `NFT_REJECT_TCP_RST`.
const TCP_RESET: u32 = 1;

/// `NFT_OBJECT_COUNTER`.
pub(super) const COUNTER_OBJECT: u32 = 1;

// Attributes (include/uapi/linux/netfilter/nf_tables.h).
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;

/// One expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Expr {
    /// Load a property of the packet that is not in its bytes.
    Meta(Meta),
    /// Load bytes of a header.
    Payload {
        header: Header,
        offset: u32,
        length: u32,
    },
    /// Go on if the register holds this.
    Equal(Vec<u8>),
    /// Go on if the register is between these, both included.
    Between(Vec<u8>, Vec<u8>),
    /// Go on if the register is in a set.
    InSet(String),
    /// Keep only these bits of the register.
    Mask(Vec<u8>),
    /// Count the packet.
    Count(String),
    /// Let the packet pass.
    Return,
    /// Load the index of a link.
    Link(u32),
    /// Send the packet to the link whose index is loaded.
    Forward,
    /// Answer with the reset of the packet's TCP connection, and drop it.
    Reset,
    /// What we never make.
    Other(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meta {
    /// The protocol above the link's, in network order.
    Protocol,
    /// The protocol above IP.
    Transport,
    /// The index of the link that the packet came in by.
    InLink,
    /// The index of the link that the packet goes out by.
    OutLink,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Header {
    Network,
    Transport,
}

impl Meta {
    const fn number(self) -> u32 {
        match self {
            Self::Protocol => libc::NFT_META_PROTOCOL.cast_unsigned(),
            Self::Transport => libc::NFT_META_L4PROTO.cast_unsigned(),
            Self::InLink => libc::NFT_META_IIF.cast_unsigned(),
            Self::OutLink => libc::NFT_META_OIF.cast_unsigned(),
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [Self::Protocol, Self::Transport, Self::InLink, Self::OutLink]
            .into_iter()
            .find(|meta| meta.number() == number)
    }
}

impl Header {
    const fn number(self) -> u32 {
        match self {
            Self::Network => libc::NFT_PAYLOAD_NETWORK_HEADER.cast_unsigned(),
            Self::Transport => libc::NFT_PAYLOAD_TRANSPORT_HEADER.cast_unsigned(),
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [Self::Network, Self::Transport]
            .into_iter()
            .find(|header| header.number() == number)
    }
}

impl Expr {
    /// The kernel's name of the kind of expression.
    fn kind(&self) -> &str {
        match self {
            Self::Meta(_) => "meta",
            Self::Payload { .. } => "payload",
            Self::Equal(_) => "cmp",
            Self::Between(..) => "range",
            Self::InSet(_) => "lookup",
            Self::Count(_) => "objref",
            Self::Return | Self::Link(_) => "immediate",
            Self::Forward => "fwd",
            Self::Mask(_) => "bitwise",
            Self::Reset => "reject",
            Self::Other(kind) => kind,
        }
    }

    /// Appends the expression as an element of a list.
    pub(super) fn encode(&self, list_element: u16, rule: &mut Encoder) {
        rule.nest(list_element, |expr| {
            expr.text(EXPR_NAME, self.kind())
                .nest(EXPR_DATA, |data| self.encode_data(data));
        });
    }

    fn encode_data(&self, data: &mut Encoder) {
        match self {
            Self::Meta(meta) => data.be32(1, REGISTER).be32(2, meta.number()),
            Self::Payload {
                header,
                offset,
                length,
            } => data
                .be32(1, REGISTER)
                .be32(2, header.number())
                .be32(3, *offset)
                .be32(4, *length),
            Self::Equal(bytes) => {
                let equal = libc::NFT_CMP_EQ.cast_unsigned();
                encode_value(data.be32(1, REGISTER).be32(2, equal), 3, bytes)
            }
            Self::Between(first, last) => {
                let equal = libc::NFT_RANGE_EQ.cast_unsigned();
                data.be32(1, REGISTER).be32(2, equal);
                encode_value(encode_value(data, 3, first), 4, last)
            }
            Self::InSet(set) => data.text(1, set).be32(2, REGISTER),
            Self::Count(counter) => data.be32(1, COUNTER_OBJECT).text(2, counter),
            Self::Return => data.be32(1, VERDICT_REGISTER).nest(2, |value| {
                value.nest(DATA_VERDICT, |verdict| {
                    verdict.be32(VERDICT_CODE, RETURN);
                });
            }),
            Self::Link(index) => encode_value(data.be32(1, REGISTER), 2, &index.to_ne_bytes()),
            Self::Forward => data.be32(1, REGISTER),
            Self::Mask(mask) => {
                let length = u32::try_from(mask.len()).unwrap_or(u32::MAX);
                data.be32(1, REGISTER).be32(2, REGISTER).be32(3, length);
                encode_value(encode_value(data, 4, mask), 5, &vec![0; mask.len()])
            }
            Self::Reset => data.be32(1, TCP_RESET),
            Self::Other(_) => data,
        };
    }

    /// Reads an element of a list of expressions.
    pub(super) fn decode(element: Attr<'_>) -> Result<Self, DecodeError> {
        let attrs = element.nested()?;
        let kind = attrs.require(EXPR_NAME)?.text()?;
        let data = attrs.require(EXPR_DATA).and_then(|data| data.nested());
        match data.and_then(|data| Self::decode_data(kind, &data)) {
            Ok(Some(expr)) => Ok(expr),
            // Another form has other attributes.
            Ok(None) | Err(DecodeError::Missing { .. }) => Ok(Self::Other(kind.to_owned())),
            Err(error) => Err(error),
        }
    }

    /// `None` for what we never make.
    fn decode_data(kind: &str, data: &Attrs<'_>) -> Result<Option<Self>, DecodeError> {
        let number = |kind| data.require(kind)?.be32();
        let is_ours = |kind| Ok::<_, DecodeError>(number(kind)? == REGISTER);
        let equal = |number| number == libc::NFT_CMP_EQ.cast_unsigned();
        Ok(match kind {
            "meta" if is_ours(1)? => Meta::from_number(number(2)?).map(Self::Meta),
            "payload" if is_ours(1)? => Header::from_number(number(2)?)
                .map(|header| {
                    Ok::<_, DecodeError>(Self::Payload {
                        header,
                        offset: number(3)?,
                        length: number(4)?,
                    })
                })
                .transpose()?,
            "cmp" if is_ours(1)? && equal(number(2)?) => Some(Self::Equal(decode_value(data, 3)?)),
            "range" if is_ours(1)? && equal(number(2)?) => Some(Self::Between(
                decode_value(data, 3)?,
                decode_value(data, 4)?,
            )),
            "lookup" => Self::decode_lookup(data)?,
            "objref" if number(1)? == COUNTER_OBJECT => {
                Some(Self::Count(data.require(2)?.text()?.to_owned()))
            }
            "immediate" => Self::decode_immediate(data)?,
            "bitwise" => Self::decode_mask(data)?,
            "reject" if number(1)? == TCP_RESET => Some(Self::Reset),
            "fwd" if is_ours(1)? && data.get(2).is_none() => Some(Self::Forward),
            _ => None,
        })
    }

    fn decode_lookup(data: &Attrs<'_>) -> Result<Option<Self>, DecodeError> {
        let is_inverted = match data.get(5) {
            Some(flags) => flags.be32()? != 0,
            None => false,
        };
        if is_inverted || data.get(3).is_some() || data.require(2)?.be32()? != REGISTER {
            return Ok(None);
        }
        Ok(Some(Self::InSet(data.require(1)?.text()?.to_owned())))
    }

    fn decode_mask(data: &Attrs<'_>) -> Result<Option<Self>, DecodeError> {
        let number = |kind| data.require(kind)?.be32();
        // Older kernels know but one operation, and do not say which.
        let is_mask = data.get(6).map_or(Ok(0), |operation| operation.be32())? == 0;
        if !is_mask || number(1)? != REGISTER || number(2)? != REGISTER {
            return Ok(None);
        }
        let flips = decode_value(data, 5)?.iter().any(|byte| *byte != 0);
        let mask = decode_value(data, 4)?;
        Ok((!flips).then_some(Self::Mask(mask)))
    }

    fn decode_immediate(data: &Attrs<'_>) -> Result<Option<Self>, DecodeError> {
        let register = data.require(1)?.be32()?;
        let value = data.require(2)?.nested()?;
        if let Some(verdict) = value.get(DATA_VERDICT) {
            let code = verdict.nested()?.require(VERDICT_CODE)?.be32()?;
            let returns = register == VERDICT_REGISTER && code == RETURN;
            return Ok(returns.then_some(Self::Return));
        }
        let link = value.require(DATA_VALUE)?.u32()?;
        Ok((register == REGISTER).then_some(Self::Link(link)))
    }
}

fn encode_value<'e>(data: &'e mut Encoder, kind: u16, bytes: &[u8]) -> &'e mut Encoder {
    data.nest(kind, |value| {
        value.bytes(DATA_VALUE, bytes);
    })
}

fn decode_value(data: &Attrs<'_>, kind: u16) -> Result<Vec<u8>, DecodeError> {
    let value = data.require(kind)?.nested()?.require(DATA_VALUE)?;
    Ok(value.value().to_vec())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(expr: &Expr) -> Expr {
        let mut rule = Encoder::new();
        expr.encode(1, &mut rule);
        let bytes = rule.finish().unwrap();
        let attrs = Attrs::parse(&bytes).unwrap();
        Expr::decode(attrs.require(1).unwrap()).unwrap()
    }

    fn exprs() -> impl Strategy<Value = Expr> {
        let bytes = || prop::collection::vec(any::<u8>(), 1..17);
        prop_oneof![
            prop::sample::select(
                &[Meta::Protocol, Meta::Transport, Meta::InLink, Meta::OutLink][..]
            )
            .prop_map(Expr::Meta),
            (
                prop::sample::select(&[Header::Network, Header::Transport][..]),
                0_u32..40,
                1_u32..17
            )
                .prop_map(|(header, offset, length)| Expr::Payload {
                    header,
                    offset,
                    length
                }),
            bytes().prop_map(Expr::Equal),
            (bytes(), bytes()).prop_map(|(first, last)| Expr::Between(first, last)),
            "[a-z0-9/-]{1,30}".prop_map(Expr::InSet),
            "[a-z0-9/-]{1,30}".prop_map(Expr::Count),
            Just(Expr::Return),
            any::<u32>().prop_map(Expr::Link),
            Just(Expr::Forward),
            bytes().prop_map(Expr::Mask),
            Just(Expr::Reset),
        ]
    }

    #[test]
    fn a_comparison_has_these_bytes() {
        let mut rule = Encoder::new();
        Expr::Equal(vec![8, 0]).encode(1, &mut rule);
        let expected: &[u8] = &[
            44, 0, 1, 0x80, // NFTA_LIST_ELEM
            8, 0, 1, 0, b'c', b'm', b'p', 0, // NFTA_EXPR_NAME
            32, 0, 2, 0x80, // NFTA_EXPR_DATA
            8, 0, 1, 0, 0, 0, 0, 1, // NFTA_CMP_SREG
            8, 0, 2, 0, 0, 0, 0, 0, // NFTA_CMP_OP
            12, 0, 3, 0x80, 6, 0, 1, 0, 8, 0, 0, 0, // NFTA_CMP_DATA { VALUE }
        ];
        assert_eq!(rule.finish().unwrap(), expected);
    }

    #[test]
    fn other_forms_are_not_taken_for_ours() {
        let mut list = Encoder::new();
        list.nest(1, |expr| {
            expr.text(EXPR_NAME, "lookup").nest(EXPR_DATA, |data| {
                data.text(1, "set").be32(2, REGISTER).be32(5, 1);
            });
        });
        let bytes = list.finish().unwrap();
        let attrs = Attrs::parse(&bytes).unwrap();
        let inverted = Expr::decode(attrs.require(1).unwrap()).unwrap();
        assert_eq!(inverted, Expr::Other("lookup".to_owned()));
        let other = Expr::Other("limit".to_owned());
        assert_eq!(round_trip(&other), other);
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(expr in exprs()) {
            prop_assert_eq!(round_trip(&expr), expr);
        }

        #[test]
        fn damaged_expressions_never_panic(expr in exprs(), at in any::<prop::sample::Index>(), byte: u8) {
            let mut rule = Encoder::new();
            expr.encode(1, &mut rule);
            let mut bytes = rule.finish().unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(attrs) = Attrs::parse(&bytes) {
                for attr in attrs.iter() {
                    let _ = Expr::decode(attr);
                }
            }
        }
    }
}
