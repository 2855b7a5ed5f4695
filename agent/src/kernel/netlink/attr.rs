//! Netlink attributes: type, length, value, padded to four bytes.
//!
//! Owns their encoding and decoding and nothing else: no sockets, no meaning of any attribute.
//! What comes from the kernel is treated as arbitrary bytes: the decoder returns an error and never
//! panics. What does not fit into the 16 bits of a length is refused, never truncated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes in front of each attribute's value: length and type, 16 bits each.
pub(crate) const HEADER: usize = 4;

/// Marks an attribute that holds attributes (`NLA_F_NESTED`).
const NESTED: u16 = 1 << 15;

/// The bits of a type without its flags (`NLA_TYPE_MASK`).
const KIND: u16 = 0x3fff;

/// Why attributes could not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The value does not fit behind a 16-bit length.
    #[error("attribute {kind} needs {length} bytes, more than a netlink attribute can hold")]
    TooLong {
        /// Type of the attribute.
        kind: u16,
        /// Bytes that it would take, header included.
        length: usize,
    },
    /// A text that is to end with a NUL byte holds one.
    #[error("attribute {kind}: the text holds a NUL byte")]
    Nul {
        /// Type of the attribute.
        kind: u16,
    },
}

/// Why bytes are not what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A length says more than there is, or less than its own header.
    #[error("{what} of {length} bytes in {available}")]
    Length {
        /// What was being read.
        what: &'static str,
        /// The length that it claims or needs.
        length: usize,
        /// The bytes that there are.
        available: usize,
    },
    /// An attribute that must be there is not.
    #[error("attribute {kind} is missing")]
    Missing {
        /// Type of the attribute.
        kind: u16,
    },
    /// A text is not UTF-8.
    #[error("attribute {kind} is not UTF-8")]
    Text {
        /// Type of the attribute.
        kind: u16,
    },
    /// A value that its reader does not know.
    #[error("{what} {value} is unknown")]
    Unknown {
        /// What was being read.
        what: &'static str,
        /// The value found.
        value: u64,
    },
}

/// A constant that libc gives as `c_int`, in the 16 bits that it has on the wire.
///
/// For constants only: a value that does not fit stops the build.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) const fn wire(value: libc::c_int) -> u16 {
    assert!(value >= 0 && value <= u16::MAX as libc::c_int);
    value as u16
}

/// As [`wire`], in 8 bits.
pub(crate) const fn byte(value: libc::c_int) -> u8 {
    let [high, low] = wire(value).to_be_bytes();
    assert!(high == 0);
    low
}

/// Builds the body of a message: a fixed header, then attributes.
///
/// The first error is kept and returned by [`Encoder::finish`], so that a message reads as the
/// list of its attributes.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    refused: Option<EncodeError>,
}

impl Encoder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Appends bytes that are not an attribute, padded to four.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        match u16::try_from(HEADER + value.len()) {
            Ok(length) => {
                self.bytes.extend_from_slice(&length.to_ne_bytes());
                self.bytes.extend_from_slice(&kind.to_ne_bytes());
                self.raw(value)
            }
            Err(_) => self.refuse(EncodeError::TooLong {
                kind,
                length: HEADER + value.len(),
            }),
        }
    }

    pub(crate) fn u32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(crate) fn u64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A 32-bit number in network order, as nftables wants all its numbers.
    pub(crate) fn be32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A text with its closing NUL byte.
    pub(crate) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        if value.contains('\0') {
            return self.refuse(EncodeError::Nul { kind });
        }
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    pub(crate) fn address(&mut self, kind: u16, address: IpAddr) -> &mut Self {
        match address {
            IpAddr::V4(address) => self.bytes(kind, &address.octets()),
            IpAddr::V6(address) => self.bytes(kind, &address.octets()),
        }
    }

    /// An attribute that holds what `fill` encodes.
    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        fill(self);
        let length = self.bytes.len() - start;
        match u16::try_from(length) {
            Ok(length) => self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes()),
            Err(_) => {
                self.refuse(EncodeError::TooLong { kind, length });
            }
        }
        self
    }

    pub(crate) fn finish(self) -> Result<Vec<u8>, EncodeError> {
        match self.refused {
            Some(error) => Err(error),
            None => Ok(self.bytes),
        }
    }

    fn refuse(&mut self, error: EncodeError) -> &mut Self {
        self.refused.get_or_insert(error);
        self
    }
}

/// One attribute as received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attr<'a> {
    kind: u16,
    value: &'a [u8],
}

impl<'a> Attr<'a> {
    pub(crate) fn value(&self) -> &'a [u8] {
        self.value
    }

    pub(crate) fn u32(&self) -> Result<u32, DecodeError> {
        Ok(u32::from_ne_bytes(head("an attribute", self.value)?))
    }

    pub(crate) fn u64(&self) -> Result<u64, DecodeError> {
        Ok(u64::from_ne_bytes(head("an attribute", self.value)?))
    }

    pub(crate) fn be32(&self) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(head("an attribute", self.value)?))
    }

    pub(crate) fn be64(&self) -> Result<u64, DecodeError> {
        Ok(u64::from_be_bytes(head("an attribute", self.value)?))
    }

    /// The text up to its NUL byte, or all of it.
    pub(crate) fn text(&self) -> Result<&'a str, DecodeError> {
        let end = self.value.iter().position(|byte| *byte == 0);
        std::str::from_utf8(&self.value[..end.unwrap_or(self.value.len())])
            .map_err(|_| DecodeError::Text { kind: self.kind })
    }

    pub(crate) fn address(&self) -> Result<IpAddr, DecodeError> {
        match self.value.len() {
            4 => Ok(Ipv4Addr::from(head::<4>("an address", self.value)?).into()),
            16 => Ok(Ipv6Addr::from(head::<16>("an address", self.value)?).into()),
            length => Err(DecodeError::Unknown {
                what: "address length",
                value: length as u64,
            }),
        }
    }

    pub(crate) fn nested(&self) -> Result<Attrs<'a>, DecodeError> {
        Attrs::parse(self.value)
    }
}

/// All attributes of a message or of one attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attrs<'a>(Vec<Attr<'a>>);

impl<'a> Attrs<'a> {
    /// Splits bytes into attributes; every byte must belong to one or pad one.
    pub(crate) fn parse(mut bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut attrs = Vec::new();
        while !bytes.is_empty() {
            let length = usize::from(u16::from_ne_bytes(head("an attribute", bytes)?));
            let kind = u16::from_ne_bytes(head("an attribute's type", tail(bytes, 2))?) & KIND;
            let value = bytes.get(HEADER..length).ok_or(DecodeError::Length {
                what: "an attribute",
                length,
                available: bytes.len(),
            })?;
            attrs.push(Attr { kind, value });
            bytes = tail(bytes, length.next_multiple_of(4));
        }
        Ok(Self(attrs))
    }

    /// The last attribute of this type, as the kernel's own parser has it.
    pub(crate) fn get(&self, kind: u16) -> Option<Attr<'a>> {
        self.0.iter().rev().find(|attr| attr.kind == kind).copied()
    }

    pub(crate) fn require(&self, kind: u16) -> Result<Attr<'a>, DecodeError> {
        self.get(kind).ok_or(DecodeError::Missing { kind })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Attr<'a>> + '_ {
        self.0.iter().copied()
    }
}

/// The first `N` bytes.
pub(crate) fn head<const N: usize>(
    what: &'static str,
    bytes: &[u8],
) -> Result<[u8; N], DecodeError> {
    bytes.first_chunk().copied().ok_or(DecodeError::Length {
        what,
        length: N,
        available: bytes.len(),
    })
}

/// What follows the first `count` bytes; nothing, if there are fewer.
pub(crate) fn tail(bytes: &[u8], count: usize) -> &[u8] {
    bytes.get(count..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_link_request_has_these_bytes() {
        let mut body = Encoder::new();
        body.text(3, "eth0").nest(18, |info| {
            info.bytes(1, b"ifb");
        });
        let expected: &[u8] = &[
            9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0, // IFLA_IFNAME, padded
            12, 0, 18, 0x80, 7, 0, 1, 0, b'i', b'f', b'b', 0, // IFLA_LINKINFO { KIND }
        ];
        assert_eq!(body.finish().unwrap(), expected);
    }

    #[test]
    fn a_value_over_sixteen_bits_is_refused() {
        let mut body = Encoder::new();
        body.bytes(1, &vec![0; 65_531]);
        assert_eq!(body.finish().unwrap().len(), 65_536);

        let mut body = Encoder::new();
        body.bytes(7, &vec![0; 65_532]).u32(1, 1);
        let refused = EncodeError::TooLong {
            kind: 7,
            length: 65_536,
        };
        assert_eq!(body.finish(), Err(refused));
    }

    #[test]
    fn a_nest_over_sixteen_bits_is_refused() {
        let half = vec![0; 40_000];
        let mut body = Encoder::new();
        body.nest(5, |nest| {
            nest.bytes(1, &half).bytes(2, &half);
        });
        assert!(matches!(
            body.finish(),
            Err(EncodeError::TooLong { kind: 5, .. })
        ));
    }

    #[test]
    fn a_text_with_a_nul_byte_is_refused() {
        let mut body = Encoder::new();
        body.text(3, "eth0\0up");
        assert_eq!(body.finish(), Err(EncodeError::Nul { kind: 3 }));
    }

    #[test]
    fn lengths_that_lie_are_errors() {
        for bytes in [
            &[3, 0, 1, 0][..],
            &[0, 0, 0, 0],
            &[9, 0, 1, 0, 1, 2, 3, 4],
            &[8, 0, 1],
            &[8],
        ] {
            assert!(Attrs::parse(bytes).is_err(), "{bytes:?}");
        }
    }

    /// A tree of attributes to encode.
    #[derive(Debug, Clone)]
    enum Tree {
        Leaf(u16, Vec<u8>),
        Nest(u16, Vec<Tree>),
    }

    impl Tree {
        fn encode(&self, into: &mut Encoder) {
            match self {
                Self::Leaf(kind, value) => {
                    into.bytes(*kind, value);
                }
                Self::Nest(kind, children) => {
                    into.nest(*kind, |nest| children.iter().for_each(|c| c.encode(nest)));
                }
            }
        }

        fn check(&self, attr: Attr<'_>) {
            match self {
                Self::Leaf(kind, value) => {
                    assert_eq!((attr.kind, attr.value), (*kind, &value[..]));
                }
                Self::Nest(kind, children) => {
                    assert_eq!(attr.kind, *kind);
                    check_all(children, &attr.nested().unwrap());
                }
            }
        }
    }

    fn encode_all(trees: &[Tree]) -> Vec<u8> {
        let mut body = Encoder::new();
        for tree in trees {
            tree.encode(&mut body);
        }
        body.finish().unwrap()
    }

    fn check_all(trees: &[Tree], attrs: &Attrs<'_>) {
        assert_eq!(attrs.iter().count(), trees.len());
        trees
            .iter()
            .zip(attrs.iter())
            .for_each(|(tree, attr)| tree.check(attr));
    }

    fn trees() -> impl Strategy<Value = Vec<Tree>> {
        let bytes = prop::collection::vec(any::<u8>(), 0..40);
        let leaf = (0..=KIND, bytes).prop_map(|(kind, value)| Tree::Leaf(kind, value));
        let tree = leaf.prop_recursive(4, 40, 6, |inner| {
            (0..=KIND, prop::collection::vec(inner, 0..6))
                .prop_map(|(kind, children)| Tree::Nest(kind, children))
        });
        prop::collection::vec(tree, 0..8)
    }

    /// Reads bytes in every way there is.
    fn read_all(attrs: &Attrs<'_>) {
        for attr in attrs.iter() {
            let _ = (attr.u32(), attr.u64(), attr.be32(), attr.be64());
            let _ = (attr.text(), attr.address());
            if let Ok(nested) = attr.nested() {
                read_all(&nested);
            }
        }
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(trees in trees()) {
            let bytes = encode_all(&trees);
            check_all(&trees, &Attrs::parse(&bytes).unwrap());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(attrs) = Attrs::parse(&bytes) {
                read_all(&attrs);
            }
        }

        #[test]
        fn damaged_attributes_never_panic(trees in trees(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = encode_all(&trees);
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(attrs) = Attrs::parse(&bytes) {
                read_all(&attrs);
            }
        }
    }
}
