//! Links and addresses of a network namespace, and the making of ifb and veth links.
//!
//! Owns rtnetlink's part about links. An ifb is made without IPv6: its MTU is below the least that
//! IPv6 allows, so the kernel gives it no IPv6 state at all, hence no address and no route in the
//! pod (net/ipv6/addrconf.c, `addrconf_notify`). The MTU of an ifb limits nothing that is forwarded
//! into it. Links are deleted by index and only if they still have the expected name.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};

use ipnet::IpNet;
use nix::errno::Errno;

use super::netlink::attr::{Attrs, DecodeError, Encoder, byte, head, tail, wire};
use super::netlink::message::{Message, Request};
use super::netlink::socket::{Family, Socket};
use super::netlink::{NetlinkError, Refusal};
use super::netns::NetNs;

/// Longest name of a link, in bytes (`IFNAMSIZ` less the NUL byte).
pub const NAME_LENGTH: usize = libc::IFNAMSIZ - 1;

/// One less than the least MTU with IPv6 (`IPV6_MIN_MTU`).
const MTU_WITHOUT_IPV6: u32 = 1279;

/// Bytes of the header in front of a link's attributes (`struct ifinfomsg`).
const LINK_HEADER: usize = 16;

/// Bytes of the header in front of an address's attributes (`struct ifaddrmsg`).
const ADDRESS_HEADER: usize = 8;

/// `VETH_INFO_PEER`.
const VETH_PEER: u16 = 1;

/// A link is up (`IFF_UP`).
#[allow(clippy::cast_sign_loss)]
const UP: u32 = libc::IFF_UP as u32;

const IPV4: u8 = byte(libc::AF_INET);
const IPV6: u8 = byte(libc::AF_INET6);

/// An address is used without looking for another that has it (`IFA_F_NODAD`).
const NODAD: u8 = byte(libc::IFA_F_NODAD.cast_signed());

/// Flags of a request that makes something new.
pub(crate) const CREATE: u16 = wire(libc::NLM_F_CREATE | libc::NLM_F_EXCL);

/// Why links could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The exchange with the kernel failed.
    #[error("links")]
    Netlink(#[from] NetlinkError),
    /// The kernel does not know this kind of link, and could not load it.
    #[error("links of kind {kind} are not supported by this kernel: {reason}")]
    KindUnknown {
        /// The kind.
        kind: &'static str,
        /// The kernel's reason.
        reason: Refusal,
    },
    /// A name that no link can have.
    #[error("{name:?} is no name for a link")]
    Name {
        /// The name.
        name: String,
    },
    /// The index belongs to another link by now.
    #[error("link {index} is named {found}, not {expected}")]
    OtherName {
        /// The index.
        index: u32,
        /// The name that it should have.
        expected: LinkName,
        /// The name that it has.
        found: String,
    },
}

/// A name that a link can have: 1 to 15 bytes without `/`, `:` and white space.
#[derive(
    Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct LinkName(String);

impl LinkName {
    /// Checks a name as the kernel does (`dev_valid_name`).
    ///
    /// # Errors
    /// When no link can have it.
    pub fn new(name: impl Into<String>) -> Result<Self, LinkError> {
        let name = name.into();
        let is_allowed = |c: char| !matches!(c, '/' | ':' | '\0') && !c.is_ascii_whitespace();
        let fits = (1..=NAME_LENGTH).contains(&name.len());
        if fits && !matches!(&name[..], "." | "..") && name.chars().all(is_allowed) {
            Ok(Self(name))
        } else {
            Err(LinkError::Name { name })
        }
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for LinkName {
    type Error = LinkError;

    fn try_from(name: String) -> Result<Self, LinkError> {
        Self::new(name)
    }
}

impl From<LinkName> for String {
    fn from(name: LinkName) -> Self {
        name.0
    }
}

impl std::fmt::Display for LinkName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A link as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index, unique in its namespace while it lives.
    pub index: u32,
    /// Its name; another may get it later.
    pub name: String,
    /// Its kind (`veth`, `ifb`, …); empty for links without one, such as hardware and loopback.
    pub kind: String,
    /// Whether it is the loopback link.
    pub is_loopback: bool,
    /// Whether it is administratively up.
    pub is_up: bool,
    /// Longest packet that it sends, in bytes.
    pub mtu: u32,
}

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkAddress {
    /// Index of the link.
    pub link: u32,
    /// The address, with the length of its prefix.
    pub address: IpNet,
}

/// A socket for links, addresses and queueing disciplines of one namespace.
#[derive(Debug)]
pub struct RouteSocket {
    pub(crate) socket: Socket,
}

impl RouteSocket {
    /// Opens a socket inside a namespace, which it pins while it is open.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the socket not be opened.
    pub fn open(netns: &NetNs) -> Result<Self, LinkError> {
        let socket = Socket::open(netns, Family::Route)?;
        Ok(Self { socket })
    }

    /// All links, by index.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn links(&mut self) -> Result<Vec<Link>, LinkError> {
        let request = || link_request("list links", libc::RTM_GETLINK, 0, link_header(0, 0));
        let mut links = self
            .socket
            .dump(request, |message| decode_link(message).map(Some))?;
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    /// The link with an index; `None` if there is none.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn link(&mut self, index: u32) -> Result<Option<Link>, LinkError> {
        let what = format!("find link {index}");
        let request = link_request(&what, libc::RTM_GETLINK, 0, link_header(index, 0));
        absent_if(Errno::ENODEV, self.socket.get(request, decode_link))
    }

    /// The link with a name; `None` if there is none.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn link_named(&mut self, name: &LinkName) -> Result<Option<Link>, LinkError> {
        let mut body = link_header(0, 0);
        body.text(libc::IFLA_IFNAME, name.as_str());
        let what = format!("find link {name}");
        let request = link_request(&what, libc::RTM_GETLINK, 0, body);
        absent_if(Errno::ENODEV, self.socket.get(request, decode_link))
    }

    /// The addresses of all links, of both families, sorted.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn addresses(&mut self) -> Result<Vec<LinkAddress>, LinkError> {
        let request = || {
            let mut body = Encoder::new();
            body.raw(&[0; ADDRESS_HEADER]);
            link_request("list addresses", libc::RTM_GETADDR, 0, body)
        };
        let mut addresses = self.socket.dump(request, decode_address)?;
        addresses.sort_unstable();
        Ok(addresses)
    }

    /// Makes an ifb that is down, has no queueing discipline yet and no IPv6.
    ///
    /// Loading the kernel's module for the first time makes `ifb0` and `ifb1` in the host's
    /// namespace besides.
    ///
    /// # Errors
    /// [`LinkError::KindUnknown`] without that module; otherwise when the name is taken or the
    /// exchange fails.
    pub fn create_ifb(&mut self, name: &LinkName) -> Result<Link, LinkError> {
        let mut body = link_header(0, 0);
        body.text(libc::IFLA_IFNAME, name.as_str())
            .u32(libc::IFLA_MTU, MTU_WITHOUT_IPV6)
            .nest(libc::IFLA_LINKINFO, |info| {
                info.text(libc::IFLA_INFO_KIND, "ifb");
            });
        self.create("ifb", name, body)
    }

    /// Makes a pair of veth links, the second in another namespace; both are down.
    ///
    /// # Errors
    /// [`LinkError::KindUnknown`] without the kernel's module; otherwise when a name is taken or
    /// the exchange fails.
    pub fn create_veth(
        &mut self,
        name: &LinkName,
        peer: &LinkName,
        peer_netns: &NetNs,
    ) -> Result<Link, LinkError> {
        let netns = peer_netns.as_fd().as_raw_fd().cast_unsigned();
        let mut body = link_header(0, 0);
        body.text(libc::IFLA_IFNAME, name.as_str())
            .nest(libc::IFLA_LINKINFO, |info| {
                info.text(libc::IFLA_INFO_KIND, "veth")
                    .nest(libc::IFLA_INFO_DATA, |data| {
                        data.nest(VETH_PEER, |attrs| {
                            attrs
                                .raw(&[0; LINK_HEADER])
                                .text(libc::IFLA_IFNAME, peer.as_str())
                                .u32(libc::IFLA_NET_NS_FD, netns);
                        });
                    });
            });
        self.create("veth", name, body)
    }

    fn create(
        &mut self,
        kind: &'static str,
        name: &LinkName,
        body: Encoder,
    ) -> Result<Link, LinkError> {
        let what = format!("create {kind} link {name}");
        let request = link_request(&what, libc::RTM_NEWLINK, CREATE, body);
        match self.socket.request(request) {
            Err(NetlinkError::Refused { reason, .. }) if reason.errno == Errno::EOPNOTSUPP => {
                Err(LinkError::KindUnknown { kind, reason })
            }
            Err(error) => Err(error.into()),
            Ok(()) => self
                .link_named(name)?
                .ok_or(NetlinkError::NoAnswer { what }.into()),
        }
    }

    /// Sets a link up.
    ///
    /// # Errors
    /// When there is none with this index or the exchange fails.
    pub fn set_up(&mut self, index: u32) -> Result<(), LinkError> {
        let what = format!("set link {index} up");
        let request = link_request(&what, libc::RTM_NEWLINK, 0, link_header(index, UP));
        Ok(self.socket.request(request)?)
    }

    /// Adds an address to a link, usable at once (no duplicate address detection).
    ///
    /// # Errors
    /// When the link has it already or the exchange fails.
    pub fn add_address(&mut self, index: u32, address: IpNet) -> Result<(), LinkError> {
        let family = match address {
            IpNet::V4(_) => IPV4,
            IpNet::V6(_) => IPV6,
        };
        let mut body = Encoder::new();
        body.raw(&[family, address.prefix_len(), NODAD, 0])
            .raw(&index.to_ne_bytes())
            .address(libc::IFA_LOCAL, address.addr())
            .address(libc::IFA_ADDRESS, address.addr());
        let what = format!("add address {address} to link {index}");
        let request = link_request(&what, libc::RTM_NEWADDR, CREATE, body);
        Ok(self.socket.request(request)?)
    }

    /// Deletes a link; false if there is none with this index any more.
    ///
    /// Packets that an ifb still holds are dropped with it.
    ///
    /// # Errors
    /// [`LinkError::OtherName`] when the index belongs to another link by now; otherwise when the
    /// exchange fails.
    pub fn delete(&mut self, index: u32, name: &LinkName) -> Result<bool, LinkError> {
        let Some(link) = self.link(index)? else {
            return Ok(false);
        };
        if link.name != name.as_str() {
            return Err(LinkError::OtherName {
                index,
                expected: name.clone(),
                found: link.name,
            });
        }
        let what = format!("delete link {name}");
        let request = link_request(&what, libc::RTM_DELLINK, 0, link_header(index, 0));
        let deleted = absent_if(Errno::ENODEV, self.socket.request(request))?;
        Ok(deleted.is_some())
    }
}

/// "There is none" is an answer, not an error.
fn absent_if<T>(errno: Errno, result: Result<T, NetlinkError>) -> Result<Option<T>, LinkError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.refusal() == Some(errno) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn link_request(what: &str, kind: u16, flags: u16, body: Encoder) -> Request {
    Request {
        what: what.to_owned(),
        kind,
        flags,
        body,
    }
}

/// `struct ifinfomsg`; of the flags, only those that are set here are changed.
fn link_header(index: u32, flags: u32) -> Encoder {
    let mut body = Encoder::new();
    body.raw(&[0; 4])
        .raw(&index.to_ne_bytes())
        .raw(&flags.to_ne_bytes())
        .raw(&flags.to_ne_bytes());
    body
}

fn decode_link(message: &Message<'_>) -> Result<Link, DecodeError> {
    let index = u32::from_ne_bytes(head("a link's index", tail(message.payload, 4))?);
    let flags = u32::from_ne_bytes(head("a link's flags", tail(message.payload, 8))?);
    let attrs = Attrs::parse(tail(message.payload, LINK_HEADER))?;
    let kind = match attrs.get(libc::IFLA_LINKINFO) {
        Some(info) => info.nested()?.get(libc::IFLA_INFO_KIND),
        None => None,
    };
    let kind = kind.map(|kind| kind.text()).transpose()?;
    Ok(Link {
        index,
        name: attrs.require(libc::IFLA_IFNAME)?.text()?.to_owned(),
        kind: kind.unwrap_or_default().to_owned(),
        is_loopback: flags & libc::IFF_LOOPBACK.cast_unsigned() != 0,
        is_up: flags & UP != 0,
        mtu: attrs.require(libc::IFLA_MTU)?.u32()?,
    })
}

/// On a point-to-point link the attribute with the link's own address is the local one.
fn decode_address(message: &Message<'_>) -> Result<Option<LinkAddress>, DecodeError> {
    let [family, prefix, _, _] = head("an address's header", message.payload)?;
    if !matches!(family, IPV4 | IPV6) {
        return Ok(None);
    }
    let link = u32::from_ne_bytes(head("an address's link", tail(message.payload, 4))?);
    let attrs = Attrs::parse(tail(message.payload, ADDRESS_HEADER))?;
    let local = attrs.get(libc::IFA_LOCAL).or(attrs.get(libc::IFA_ADDRESS));
    let Some(local) = local else { return Ok(None) };
    let address: IpAddr = local.address()?;
    let address = IpNet::new(address, prefix).map_err(|_| DecodeError::Unknown {
        what: "prefix length",
        value: prefix.into(),
    })?;
    Ok(Some(LinkAddress { link, address }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_checked_as_the_kernel_does() {
        for name in ["eth0", "wt0123456789abc", "a.b", "...", "π"] {
            assert_eq!(LinkName::new(name).unwrap().as_str(), name);
        }
        for name in [
            "",
            "sixteen-bytes-xx",
            ".",
            "..",
            "a/b",
            "a:b",
            "a b",
            "a\n",
        ] {
            assert!(LinkName::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_links_name_is_checked_when_it_is_read() {
        let name: LinkName = serde_json::from_str("\"eth0\"").unwrap();
        assert_eq!(serde_json::to_string(&name).unwrap(), "\"eth0\"");
        assert!(serde_json::from_str::<LinkName>("\"no link/name\"").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(payload in prop::collection::vec(any::<u8>(), 0..120)) {
            let bytes = [&[0_u8; 16][..], &payload].concat();
            let mut bytes = bytes;
            let length = u32::try_from(bytes.len()).unwrap();
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            for message in Message::parse_all(&bytes).unwrap() {
                let _ = decode_link(&message);
                let _ = decode_address(&message);
            }
        }
    }
}
