//! Netlink: how the kernel is asked to change links, queueing disciplines and nftables.
//!
//! Owns the wire format and the exchange of messages, blocking and bounded in time. It knows no
//! object of the kernel: what the messages mean is in `link`, `qdisc` and `nft`. It must not be
//! given more than a namespace to work in, and it must never panic on what it receives.

pub(crate) mod attr;
pub(crate) mod message;
pub(crate) mod socket;

use nix::errno::Errno;

pub use self::attr::{DecodeError, EncodeError};
pub use self::message::Refusal;
pub use self::socket::Family;
use super::netns::NetNsError;

/// Why an exchange with the kernel failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket's namespace could not be entered.
    #[error("open a netlink socket")]
    NetNs(#[from] NetNsError),
    /// The socket could not be opened or set up.
    #[error("open a {family} netlink socket")]
    Open {
        /// Which socket.
        family: Family,
        /// The reason.
        source: Errno,
    },
    /// The request does not fit into netlink's format.
    #[error("{what}: encode the request")]
    Encode {
        /// Operation and object.
        what: String,
        /// The reason.
        source: EncodeError,
    },
    /// The request did not reach the kernel.
    #[error("{what}: send the request")]
    Send {
        /// Operation and object.
        what: String,
        /// The reason.
        source: Errno,
    },
    /// The answer could not be received.
    #[error("{what}: receive the answer")]
    Receive {
        /// Operation and object.
        what: String,
        /// The reason.
        source: Errno,
    },
    /// No answer came within the bound, or it held no object.
    #[error("{what}: no answer")]
    NoAnswer {
        /// Operation and object.
        what: String,
    },
    /// The kernel said no.
    #[error("{what}: {reason}")]
    Refused {
        /// Operation and object.
        what: String,
        /// The kernel's reason.
        reason: Refusal,
    },
    /// The answer is not what the protocol says.
    #[error("{what}: read the answer")]
    Malformed {
        /// Operation and object.
        what: String,
        /// The reason.
        source: DecodeError,
    },
    /// An answer is longer than any that the kernel is known to send.
    #[error("{what}: the answer is too long")]
    TooLong {
        /// Operation and object.
        what: String,
    },
    /// A list changed each time that it was read.
    #[error("{what}: the list keeps changing")]
    Changing {
        /// Operation and object.
        what: String,
    },
}

impl NetlinkError {
    /// The error number with which the kernel refused, if it did.
    #[must_use]
    pub fn refusal(&self) -> Option<Errno> {
        match self {
            Self::Refused { reason, .. } => Some(reason.errno),
            _ => None,
        }
    }

    fn send(what: &str, source: Errno) -> Self {
        let what = what.to_owned();
        Self::Send { what, source }
    }

    fn receive(what: &str, source: Errno) -> Self {
        let what = what.to_owned();
        Self::Receive { what, source }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Route => "route",
            Self::Netfilter => "netfilter",
            Self::Sockets => "sockets",
        })
    }
}
