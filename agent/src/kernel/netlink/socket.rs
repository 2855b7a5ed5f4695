//! A netlink socket that lives in a chosen network namespace.
//!
//! Owns sending, receiving, acknowledgements, lists and batches. The socket belongs to the namespace
//! for as long as it is open, from whichever thread it is used, and it pins that namespace. It is
//! closed on exec, so that no child keeps a table alive that this process owns. Answers are taken
//! from the kernel only: a container with `CAP_NET_ADMIN` could send forged ones. Blocking, with a
//! bound: nothing here waits for ever.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, sockopt,
};
use nix::sys::time::TimeVal;
use nix::{setsockopt_impl, sockopt_impl};

use super::NetlinkError;
use super::attr::{DecodeError, Encoder, wire};
use super::message::{End, Message, Request};
use crate::kernel::netns::NetNs;

/// Longest wait for one answer, in seconds. The kernel answers within the sending call.
const ANSWER_SECONDS: libc::time_t = 5;

/// A list that changed under us is read this often before giving up.
const DUMP_TRIES: u32 = 16;

/// What one datagram of the kernel may hold: it fills at most 32 KiB per read of a list.
const DATAGRAM: usize = 64 * 1024;

/// A whole batch has to fit into the send buffer; 10 000 addresses take about 1 MiB.
const SEND_BUFFER: usize = 16 * 1024 * 1024;

const NLM_F_ACK: u16 = wire(libc::NLM_F_ACK);
const NLM_F_DUMP: u16 = wire(libc::NLM_F_DUMP);

sockopt_impl!(
    /// Error texts and attributes in refusals.
    ExtendedAck, SetOnly, libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, bool
);
sockopt_impl!(
    /// Refusals do not repeat the whole refused message.
    CappedAck, SetOnly, libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, bool
);

/// Which part of the kernel a socket talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Links, addresses, queueing disciplines.
    Route,
    /// nftables.
    Netfilter,
    /// Sockets.
    Sockets,
}

/// One netlink socket.
pub(crate) struct Socket {
    fd: OwnedFd,
    port: u32,
    sequence: u32,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Socket");
        shown.field("fd", &self.fd).field("port", &self.port);
        shown.finish_non_exhaustive()
    }
}

impl Socket {
    /// Opens a socket inside a namespace.
    pub(crate) fn open(netns: &NetNs, family: Family) -> Result<Self, NetlinkError> {
        let opened = netns.enter(|| open_here(family))?;
        let (fd, port) = opened.map_err(|source| NetlinkError::Open { family, source })?;
        Ok(Self {
            fd,
            port,
            sequence: 0,
            buffer: vec![0; DATAGRAM],
        })
    }

    /// The kernel's name for this socket: the owner of the tables that are made with it.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Asks for something and waits until it is done.
    pub(crate) fn request(&mut self, request: Request) -> Result<(), NetlinkError> {
        let what = request.what.clone();
        let sequence = self.send(request, NLM_F_ACK)?;
        self.exchange(&what, sequence, |_| Ok(()))?;
        Ok(())
    }

    /// Asks for one object.
    pub(crate) fn get<T>(
        &mut self,
        request: Request,
        decode: impl Fn(&Message<'_>) -> Result<T, DecodeError>,
    ) -> Result<T, NetlinkError> {
        let what = request.what.clone();
        let mut found = None;
        let sequence = self.send(request, NLM_F_ACK)?;
        self.exchange(&what, sequence, |message| {
            found = Some(decode(message)?);
            Ok(())
        })?;
        found.ok_or(NetlinkError::NoAnswer { what })
    }

    /// Asks for a list; `decode` leaves out what it answers `None` for.
    ///
    /// `request` is called for each try: a list that changes while it is read is read again.
    pub(crate) fn dump<T>(
        &mut self,
        request: impl Fn() -> Request,
        decode: impl Fn(&Message<'_>) -> Result<Option<T>, DecodeError>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..DUMP_TRIES {
            let request = request();
            let what = request.what.clone();
            let mut list = Vec::new();
            let sequence = self.send(request, NLM_F_DUMP)?;
            let is_whole = self.exchange(&what, sequence, |message| {
                list.extend(decode(message)?);
                Ok(())
            })?;
            if is_whole {
                return Ok(list);
            }
        }
        let what = request().what;
        Err(NetlinkError::Changing { what })
    }

    /// Sends requests as one nftables transaction: all of them take effect, or none.
    pub(crate) fn transact(&mut self, requests: Vec<Request>) -> Result<(), NetlinkError> {
        if requests.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = requests.iter().map(|r| r.what.clone()).collect();
        let begin = self.next_sequence();
        let mut bytes = encode(batch_mark(libc::NFNL_MSG_BATCH_BEGIN), 0, begin)?;
        for (position, request) in requests.into_iter().enumerate() {
            let ack = if position + 1 == names.len() {
                NLM_F_ACK
            } else {
                0
            };
            let sequence = self.next_sequence();
            bytes.extend(encode(request, ack, sequence)?);
        }
        let last = self.sequence;
        let end = self.next_sequence();
        bytes.extend(encode(batch_mark(libc::NFNL_MSG_BATCH_END), 0, end)?);
        let name = |sequence: u32| {
            let position = sequence.wrapping_sub(begin.wrapping_add(1));
            let position = usize::try_from(position).unwrap_or(usize::MAX);
            names.get(position).map_or("commit a batch", String::as_str)
        };
        self.send_bytes(name(last), &bytes)?;
        self.await_batch(begin, last, name)
    }

    /// The kernel answers each refused request of a batch, and the last one in any case.
    fn await_batch<'n>(
        &mut self,
        begin: u32,
        last: u32,
        name: impl Fn(u32) -> &'n str,
    ) -> Result<(), NetlinkError> {
        let mut outcome = None;
        while outcome.is_none() {
            self.receive(name(last), |message| {
                let offset = message.sequence.wrapping_sub(begin);
                if outcome.is_some() || offset > last.wrapping_sub(begin) {
                    return Ok(());
                }
                outcome = match message.end()? {
                    Some(End::Refused(reason)) => Some(Err(NetlinkError::Refused {
                        what: name(message.sequence).to_owned(),
                        reason,
                    })),
                    Some(End::Done) if message.sequence == last => Some(Ok(())),
                    _ => None,
                };
                Ok(())
            })?;
        }
        outcome.unwrap_or(Ok(()))
    }

    fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn send(&mut self, request: Request, flags: u16) -> Result<u32, NetlinkError> {
        let what = request.what.clone();
        let sequence = self.next_sequence();
        let bytes = encode(request, flags, sequence)?;
        self.send_bytes(&what, &bytes)?;
        Ok(sequence)
    }

    fn send_bytes(&self, what: &str, bytes: &[u8]) -> Result<(), NetlinkError> {
        loop {
            let kernel = NetlinkAddr::new(0, 0);
            match socket::sendto(self.fd.as_raw_fd(), bytes, &kernel, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(source) => return Err(NetlinkError::send(what, source)),
            }
        }
    }

    /// Hands each answer to `each` until the kernel ends the exchange; false if what was read
    /// changed under us.
    fn exchange(
        &mut self,
        what: &str,
        sequence: u32,
        mut each: impl FnMut(&Message<'_>) -> Result<(), DecodeError>,
    ) -> Result<bool, NetlinkError> {
        let (mut is_whole, mut end) = (true, None);
        while end.is_none() {
            self.receive(what, |message| {
                if message.sequence != sequence || end.is_some() {
                    return Ok(());
                }
                is_whole &= !message.is_interrupted();
                end = message.end()?;
                if end.is_none() {
                    each(message)?;
                }
                Ok(())
            })?;
        }
        match end {
            Some(End::Refused(reason)) => Err(NetlinkError::Refused {
                what: what.to_owned(),
                reason,
            }),
            _ => Ok(is_whole),
        }
    }

    /// Receives one datagram and hands out its messages, if the kernel sent it to us.
    fn receive(
        &mut self,
        what: &str,
        mut each: impl FnMut(&Message<'_>) -> Result<(), DecodeError>,
    ) -> Result<(), NetlinkError> {
        let malformed = |source| NetlinkError::Malformed {
            what: what.to_owned(),
            source,
        };
        let length = self.receive_from_kernel(what)?;
        let messages = Message::parse_all(&self.buffer[..length]).map_err(malformed)?;
        for message in messages.iter().filter(|message| message.port == self.port) {
            each(message).map_err(malformed)?;
        }
        Ok(())
    }

    fn receive_from_kernel(&mut self, what: &str) -> Result<usize, NetlinkError> {
        loop {
            let mut parts = [IoSliceMut::new(&mut self.buffer)];
            let flags = MsgFlags::empty();
            let received =
                socket::recvmsg::<NetlinkAddr>(self.fd.as_raw_fd(), &mut parts, None, flags);
            match received {
                Ok(datagram) if datagram.address.is_none_or(|from| from.pid() != 0) => {}
                Ok(datagram) if datagram.flags.contains(MsgFlags::MSG_TRUNC) => {
                    return Err(NetlinkError::TooLong {
                        what: what.to_owned(),
                    });
                }
                Ok(datagram) => return Ok(datagram.bytes),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    return Err(NetlinkError::NoAnswer {
                        what: what.to_owned(),
                    });
                }
                Err(source) => return Err(NetlinkError::receive(what, source)),
            }
        }
    }
}

/// Opens a socket in the calling thread's namespace and tells its port.
fn open_here(family: Family) -> Result<(OwnedFd, u32), Errno> {
    let protocol = match family {
        Family::Route => SockProtocol::NetlinkRoute,
        Family::Netfilter => SockProtocol::NetlinkNetFilter,
        Family::Sockets => SockProtocol::NetlinkSockDiag,
    };
    let fd = socket::socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        protocol,
    )?;
    socket::setsockopt(&fd, ExtendedAck, &true)?;
    socket::setsockopt(&fd, CappedAck, &true)?;
    let wait = TimeVal::new(ANSWER_SECONDS, 0);
    socket::setsockopt(&fd, sockopt::ReceiveTimeout, &wait)?;
    // The limit on send buffers binds who may not administer the network; what is below it serves
    // all but the largest sets.
    if socket::setsockopt(&fd, sockopt::SndBufForce, &SEND_BUFFER).is_err() {
        socket::setsockopt(&fd, sockopt::SndBuf, &SEND_BUFFER)?;
    }
    socket::bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    let address: NetlinkAddr = socket::getsockname(fd.as_raw_fd())?;
    Ok((fd, address.pid()))
}

fn encode(request: Request, flags: u16, sequence: u32) -> Result<Vec<u8>, NetlinkError> {
    let what = request.what.clone();
    request
        .encode(flags, sequence)
        .map_err(|source| NetlinkError::Encode { what, source })
}

/// The message before or after a batch of nftables requests (`struct nfgenmsg`).
fn batch_mark(kind: libc::c_int) -> Request {
    let subsystem = wire(libc::NFNL_SUBSYS_NFTABLES).to_be_bytes();
    let mut body = Encoder::new();
    body.raw(&[0, 0, subsystem[0], subsystem[1]]);
    Request {
        what: "frame a batch".to_owned(),
        kind: wire(kind),
        flags: 0,
        body,
    }
}
