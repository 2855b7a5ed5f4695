//! TCP connections of a network namespace: which there are, and their end.
//!
//! A connection that is ended is gone for both ends: the local one is told `ECONNABORTED`, the remote
//! one is sent a reset.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::errno::Errno;

use super::netlink::attr::{Encoder, byte, head, tail};
use super::netlink::message::{Message, Request};
use super::netlink::socket::{Family, Socket};
use super::netlink::{DecodeError, NetlinkError};
use super::netns::NetNs;

/// `SOCK_DIAG_BY_FAMILY` and `SOCK_DESTROY`.
const LIST: u16 = 20;
const DESTROY: u16 = 21;
/// Bytes of `struct inet_diag_sockid`.
const IDENTITY: usize = 48;
/// States of sockets that have another end: `TCP_ESTABLISHED` 1, `SYN_SENT`, `SYN_RECV`, `FIN_WAIT1`,
/// `FIN_WAIT2`, `CLOSE_WAIT` 8, `LAST_ACK` and `CLOSING` 11; each is the bit of its number.
const CONNECTED: u32 = 0b1011_0011_1110;

/// A connection, seen from the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// The end in the namespace.
    pub local: (IpAddr, u16),
    /// The other end.
    pub remote: (IpAddr, u16),
    family: u8,
    identity: [u8; IDENTITY],
}

impl Connection {
    /// Whether both ends are in the namespace.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.local.0 == self.remote.0 || self.local.0.is_loopback()
    }
}

/// The TCP sockets of a namespace.
#[derive(Debug)]
pub struct Sockets {
    socket: Socket,
}

impl Sockets {
    /// Those of a namespace.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn open(netns: &NetNs) -> Result<Self, NetlinkError> {
        let socket = Socket::open(netns, Family::Sockets)?;
        Ok(Self { socket })
    }

    /// All connections.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn connections(&mut self) -> Result<Vec<Connection>, NetlinkError> {
        let mut all = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6].map(byte) {
            let list = || request("list connections", LIST, family, &[0; IDENTITY]);
            all.extend(self.socket.dump(list, decode)?);
        }
        Ok(all)
    }

    /// Ends a connection; false if it has ended already.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the kernel cannot, `EPERM` without `CAP_NET_ADMIN`.
    pub fn end(&mut self, connection: &Connection) -> Result<bool, NetlinkError> {
        let Connection {
            family, identity, ..
        } = connection;
        match self
            .socket
            .request(request("end a connection", DESTROY, *family, identity))
        {
            Ok(()) => Ok(true),
            Err(NetlinkError::Refused { reason, .. }) if reason.errno == Errno::ENOENT => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// `struct inet_diag_req_v2`.
fn request(what: &str, kind: u16, family: u8, identity: &[u8]) -> Request {
    let mut body = Encoder::new();
    body.raw(&[family, byte(libc::IPPROTO_TCP), 0, 0])
        .raw(&CONNECTED.to_ne_bytes())
        .raw(identity);
    Request {
        what: what.to_owned(),
        kind,
        flags: 0,
        body,
    }
}

/// `struct inet_diag_msg`: family, state, timer, retransmissions, and who the socket is.
fn decode(message: &Message<'_>) -> Result<Option<Connection>, DecodeError> {
    let what = "a connection";
    let [family, ..] = head::<4>(what, message.payload)?;
    let identity: [u8; IDENTITY] = head(what, tail(message.payload, 4))?;
    let port = |at| Ok::<_, DecodeError>(u16::from_be_bytes(head(what, tail(&identity, at))?));
    let address = |at| -> Result<IpAddr, DecodeError> {
        let bytes = tail(&identity, at);
        Ok(if i32::from(family) == libc::AF_INET {
            Ipv4Addr::from(head::<4>(what, bytes)?).into()
        } else {
            // A socket of the newer kind may have a connection of the older.
            IpAddr::from(Ipv6Addr::from(head::<16>(what, bytes)?)).to_canonical()
        })
    };
    Ok(Some(Connection {
        local: (address(4)?, port(0)?),
        remote: (address(20)?, port(2)?),
        family,
        identity,
    }))
}
