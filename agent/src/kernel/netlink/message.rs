//! Netlink messages: the header in front of each, and the two that end an exchange.
//!
//! Owns the framing of messages in datagrams. Knows no socket and no family.

use nix::errno::Errno;

use super::attr::{Attrs, DecodeError, EncodeError, Encoder, head, tail, wire};

/// Bytes of a message's header (`struct nlmsghdr`).
const HEADER: usize = 16;

const NLMSG_ERROR: u16 = wire(libc::NLMSG_ERROR);
const NLMSG_DONE: u16 = wire(libc::NLMSG_DONE);
const NLM_F_DUMP_INTR: u16 = wire(libc::NLM_F_DUMP_INTR);

/// `NLM_F_CAPPED`: the refused message is not repeated in its answer, only its header is.
const CAPPED: u16 = 0x100;

/// `NLM_F_ACK_TLVS`: attributes follow in the answer.
const ANSWER_HAS_ATTRIBUTES: u16 = 0x200;

/// `NLMSGERR_ATTR_MSG`: the kernel's own words.
const ERROR_TEXT: u16 = 1;

/// A message to the kernel, and how to speak of it when it is refused.
#[derive(Debug)]
pub(crate) struct Request {
    /// What is asked, of which object: "create link wt0a".
    pub(crate) what: String,
    /// Type of the message.
    pub(crate) kind: u16,
    /// Flags beside `NLM_F_REQUEST`, which is always set.
    pub(crate) flags: u16,
    /// The family's header and attributes.
    pub(crate) body: Encoder,
}

impl Request {
    pub(crate) fn encode(self, extra_flags: u16, sequence: u32) -> Result<Vec<u8>, EncodeError> {
        let flags = self.flags | extra_flags | wire(libc::NLM_F_REQUEST);
        frame(self.kind, flags, sequence, &self.body.finish()?)
    }
}

/// Puts the header in front of a body; port 0, which stands for the sender.
fn frame(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Result<Vec<u8>, EncodeError> {
    let length = HEADER + body.len();
    let length = u32::try_from(length).map_err(|_| EncodeError::TooLong { kind, length })?;
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&length.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&sequence.to_ne_bytes());
    bytes.extend_from_slice(&0_u32.to_ne_bytes());
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// A message as received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    flags: u16,
    pub(crate) sequence: u32,
    pub(crate) port: u32,
    /// The family's header and attributes.
    pub(crate) payload: &'a [u8],
}

/// How an exchange went that the kernel has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// Done as asked.
    Done,
    /// Not done.
    Refused(Refusal),
}

/// The kernel's reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The error number.
    pub errno: Errno,
    /// The kernel's own words, when it gave any (extended acknowledgement).
    pub text: Option<String>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.text {
            Some(text) => write!(f, "{text} ({})", self.errno),
            None => write!(f, "{}", self.errno),
        }
    }
}

impl<'a> Message<'a> {
    /// Splits a datagram into its messages.
    pub(crate) fn parse_all(mut bytes: &'a [u8]) -> Result<Vec<Self>, DecodeError> {
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            let (message, length) = Self::parse(bytes)?;
            messages.push(message);
            bytes = tail(bytes, length.next_multiple_of(4));
        }
        Ok(messages)
    }

    fn parse(bytes: &'a [u8]) -> Result<(Self, usize), DecodeError> {
        let wrong = |length| DecodeError::Length {
            what: "a message",
            length,
            available: bytes.len(),
        };
        let length = u32::from_ne_bytes(head("a message's length", bytes)?);
        let length = usize::try_from(length).map_err(|_| wrong(usize::MAX))?;
        let payload = bytes.get(HEADER..length).ok_or_else(|| wrong(length))?;
        let message = Self {
            kind: u16::from_ne_bytes(head("a message's type", tail(bytes, 4))?),
            flags: u16::from_ne_bytes(head("a message's flags", tail(bytes, 6))?),
            sequence: u32::from_ne_bytes(head("a message's number", tail(bytes, 8))?),
            port: u32::from_ne_bytes(head("a message's port", tail(bytes, 12))?),
            payload,
        };
        Ok((message, length))
    }

    /// The objects changed while they were being listed: what was read is not one state.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.flags & NLM_F_DUMP_INTR != 0
    }

    /// Whether this message ends its exchange, and how.
    pub(crate) fn end(&self) -> Result<Option<End>, DecodeError> {
        match self.kind {
            NLMSG_ERROR | NLMSG_DONE => self.read_end().map(Some),
            _ => Ok(None),
        }
    }

    fn read_end(&self) -> Result<End, DecodeError> {
        let code = match self.payload {
            [] if self.kind == NLMSG_DONE => 0,
            payload => i32::from_ne_bytes(head("an error number", payload)?),
        };
        // A dump ends with 0 or with a count; only what is below zero is an error number.
        if code >= 0 {
            return Ok(End::Done);
        }
        Ok(End::Refused(Refusal {
            errno: Errno::from_raw(code.saturating_neg()),
            text: self.error_text()?,
        }))
    }

    fn error_text(&self) -> Result<Option<String>, DecodeError> {
        if self.flags & ANSWER_HAS_ATTRIBUTES == 0 {
            return Ok(None);
        }
        let attrs = match self.kind {
            NLMSG_DONE => tail(self.payload, 4),
            _ => tail(self.payload, 4 + self.repeated_request()?),
        };
        let attrs = Attrs::parse(attrs)?;
        let text = attrs.get(ERROR_TEXT).map(|attr| attr.text()).transpose()?;
        Ok(text.map(str::to_owned))
    }

    /// Bytes of the refused message that its answer repeats.
    fn repeated_request(&self) -> Result<usize, DecodeError> {
        if self.flags & CAPPED != 0 {
            return Ok(HEADER);
        }
        let length = u32::from_ne_bytes(head("a refused message", tail(self.payload, 4))?);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        Ok(length.saturating_add(3) & !3)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(kind: u16, body: Encoder) -> Request {
        Request {
            what: "test".to_owned(),
            kind,
            flags: 0x400,
            body,
        }
    }

    fn answer(flags: u16, payload: &[u8]) -> Vec<u8> {
        frame(NLMSG_ERROR, flags, 7, payload).unwrap()
    }

    #[test]
    fn a_request_has_these_bytes() {
        let mut body = Encoder::new();
        body.raw(&[1, 2, 3, 4]);
        let expected: &[u8] = &[20, 0, 0, 0, 16, 0, 5, 4, 9, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4];
        assert_eq!(request(16, body).encode(4, 9).unwrap(), expected);
    }

    #[test]
    fn an_acknowledgement_is_done() {
        let bytes = answer(CAPPED, &[0; 20]);
        let message = Message::parse_all(&bytes).unwrap()[0];
        assert_eq!(message.sequence, 7);
        assert_eq!(message.end().unwrap(), Some(End::Done));
    }

    #[test]
    fn a_refusal_carries_the_kernels_words() {
        for (flags, repeated) in [
            (CAPPED | ANSWER_HAS_ATTRIBUTES, 16),
            (ANSWER_HAS_ATTRIBUTES, 24),
        ] {
            let mut payload = (-95_i32).to_ne_bytes().to_vec();
            payload.extend_from_slice(&24_u32.to_ne_bytes());
            payload.resize(4 + repeated, 0);
            let mut text = Encoder::new();
            text.text(ERROR_TEXT, "Unknown device type");
            payload.extend(text.finish().unwrap());

            let bytes = answer(flags, &payload);
            let end = Message::parse_all(&bytes).unwrap()[0].end().unwrap();
            let Some(End::Refused(refusal)) = end else {
                panic!("not refused: {end:?}");
            };
            assert_eq!(refusal.errno, Errno::EOPNOTSUPP);
            assert_eq!(refusal.text.as_deref(), Some("Unknown device type"));
        }
    }

    proptest! {
        #[test]
        fn what_was_framed_is_parsed(bodies in prop::collection::vec((16_u16.., any::<u32>(), prop::collection::vec(any::<u8>(), 0..40)), 0..5)) {
            let mut datagram = Vec::new();
            for (kind, sequence, body) in &bodies {
                datagram.extend(frame(*kind, 0, *sequence, body).unwrap());
                datagram.resize(datagram.len().next_multiple_of(4), 0);
            }
            let messages = Message::parse_all(&datagram).unwrap();
            prop_assert_eq!(messages.len(), bodies.len());
            for (message, (kind, sequence, body)) in messages.iter().zip(&bodies) {
                prop_assert_eq!(message.kind, *kind);
                prop_assert_eq!(message.sequence, *sequence);
                prop_assert_eq!(message.payload, &body[..]);
                prop_assert_eq!(message.end(), Ok(None));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(kind in 0_u16..6, flags in any::<u16>(), payload in prop::collection::vec(any::<u8>(), 0..80), cut in 0_usize..100) {
            let bytes = frame(kind, flags, 1, &payload).unwrap();
            let bytes = &bytes[..cut.min(bytes.len())];
            for message in Message::parse_all(bytes).unwrap_or_default() {
                let _ = message.end();
            }
        }
    }
}
