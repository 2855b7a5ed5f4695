//! What an agent and its injector say to each other: one JSON document a packet, over a pair of
//! sockets that keeps packets whole and tells each side when the other is gone.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socketpair,
        sockopt::{SndBuf, SndBufForce},
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{
    kernel::{
        netns::NetNsId,
        nft::{Device, Table},
    },
    model::{ContainerEntry, Counts},
};

/// Largest packet: an order with some thousand addresses in text.
const MAX_PACKET: usize = 4 << 20;

/// How long an injector lives without a sign of life from its agent.
pub const LEASE: Duration = Duration::from_secs(3);
/// How often agent and injector give each other a sign of life.
pub const BEAT: Duration = Duration::from_secs(1);

/// From the agent to an injector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Down {
    /// What to do; the first packet, sent once.
    Order(Order),
    /// The agent is alive.
    Beat,
    /// Select other packets.
    Update(Table),
}

/// What an injector is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The end of the injector's life on the boot clock, whatever happens.
    pub deadline: Duration,
    /// What to do.
    pub task: Task,
}

/// What an injector is to bring about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Task {
    /// Impair a network.
    Network(NetworkTask),
    /// Do something to a container.
    Container(ContainerEntry),
}

/// A network fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkTask {
    /// The target's network namespace.
    pub netns: NetNsId,
    /// A process in it.
    pub pid: i32,
    /// The pod's control group.
    pub pod: PathBuf,
    /// The rules.
    pub table: Table,
    /// The ifbs whose queues may overflow.
    pub queues: Vec<Device>,
}

/// From an injector to its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Up {
    /// The effect was read back from the kernel.
    Applied {
        /// What the kernel holds, in a sentence.
        proof: String,
        /// What the user should know of how far the effect goes.
        note: String,
    },
    /// An update was read back.
    Updated,
    /// The injector is alive, and what its fault has met.
    Beat(Counts),
    /// The effect could not be brought about; nothing is in place.
    Failed {
        /// Why.
        message: String,
    },
    /// The effect is not what it was, although the injector did nothing.
    Vanished {
        /// What is missing.
        message: String,
    },
    /// What was to be done is done; nothing is held.
    Done,
    /// The container has ended, and the injector ends with it.
    ContainerEnded,
    /// The pod has ended, and the effect with it.
    PodEnded,
}

/// Why a packet was not exchanged.
#[derive(Debug, Error)]
pub enum WireError {
    /// A socket could not be made.
    #[error("cannot make a pair of sockets")]
    Pair(#[source] Errno),
    /// The other side is gone.
    #[error("the other side is gone")]
    Gone,
    /// The other side does not read.
    #[error("the other side does not read")]
    Full,
    /// The exchange failed.
    #[error("cannot exchange a packet")]
    Exchange(#[source] Errno),
    /// A packet is no document of ours.
    #[error("a packet cannot be read")]
    Decode(#[source] serde_json::Error),
    /// A message cannot be written as text.
    #[error("a packet cannot be written")]
    Encode(#[source] serde_json::Error),
}

/// One end of the line. Never blocks.
#[derive(Debug)]
pub struct Line {
    fd: OwnedFd,
}

impl Line {
    /// Both ends of a new line; the second is for the child's standard input.
    ///
    /// # Errors
    /// Where there are no more descriptors.
    pub fn pair() -> Result<(Self, OwnedFd), WireError> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(WireError::Pair)?;
        // Beyond the limit for ordinary users where we are not one; as far as it goes otherwise.
        if setsockopt(&ours, SndBufForce, &MAX_PACKET).is_err() {
            setsockopt(&ours, SndBuf, &MAX_PACKET).map_err(WireError::Pair)?;
        }
        Ok((Self { fd: ours }, theirs))
    }

    /// The injector's end.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Sends a message whole or not at all.
    ///
    /// # Errors
    /// [`WireError::Full`] where the other side has not read enough, [`WireError::Gone`] where
    /// it has ended.
    pub fn send<T: Serialize>(&self, message: &T) -> Result<(), WireError> {
        let text = serde_json::to_vec(message).map_err(WireError::Encode)?;
        match send(
            self.fd.as_raw_fd(),
            &text,
            MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(_) => Ok(()),
            Err(Errno::EAGAIN) => Err(WireError::Full),
            Err(Errno::EPIPE | Errno::ECONNRESET) => Err(WireError::Gone),
            Err(errno) => Err(WireError::Exchange(errno)),
        }
    }

    /// The next message, if one is there.
    ///
    /// # Errors
    /// [`WireError::Gone`] where the other side has ended and everything was read.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<T>, WireError> {
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC | MsgFlags::MSG_DONTWAIT;
        let size = loop {
            match recv(self.fd.as_raw_fd(), &mut [], peek) {
                Ok(0) => return Err(WireError::Gone),
                Ok(size) => break size.min(MAX_PACKET),
                // Said once of a side that had not read everything; what it had sent comes after.
                Err(Errno::ECONNRESET | Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(errno) => return Err(WireError::Exchange(errno)),
            }
        };
        let mut packet = vec![0; size];
        let got = recv(self.fd.as_raw_fd(), &mut packet, MsgFlags::MSG_DONTWAIT)
            .map_err(WireError::Exchange)?;
        serde_json::from_slice(&packet[..got])
            .map(Some)
            .map_err(WireError::Decode)
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<WireError> for io::Error {
    fn from(error: WireError) -> Self {
        Self::other(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said next. Processes that other tests start have a copy of the other end for a moment.
    fn next<T: DeserializeOwned>(line: &Line) -> Result<T, WireError> {
        loop {
            match line.receive() {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
    }

    #[test]
    fn packets_stay_whole_and_an_end_is_seen() {
        let (ours, theirs) = Line::pair().unwrap();
        let theirs = Line::from_fd(theirs);
        assert!(matches!(theirs.receive::<Down>(), Ok(None)));
        ours.send(&Down::Beat).unwrap();
        ours.send(&Down::Beat).unwrap();
        assert_eq!(theirs.receive::<Down>().unwrap(), Some(Down::Beat));
        let long = Up::Failed {
            message: "x".repeat(100_000),
        };
        theirs.send(&long).unwrap();
        assert_eq!(ours.receive::<Up>().unwrap(), Some(long));
        drop(ours);
        assert_eq!(
            theirs.receive::<Down>().unwrap(),
            Some(Down::Beat),
            "what was sent is read first"
        );
        assert!(matches!(next::<Down>(&theirs), Err(WireError::Gone)));
        assert!(matches!(theirs.send(&Up::Updated), Err(WireError::Gone)));
    }

    #[test]
    fn what_was_said_is_heard_although_not_everything_was_read() {
        let (ours, theirs) = Line::pair().unwrap();
        let theirs = Line::from_fd(theirs);
        ours.send(&Down::Beat).unwrap();
        theirs.send(&Up::ContainerEnded).unwrap();
        drop(theirs);
        assert_eq!(next::<Up>(&ours).unwrap(), Up::ContainerEnded);
        assert!(matches!(next::<Up>(&ours), Err(WireError::Gone)));
    }

    #[test]
    fn a_side_that_does_not_read_blocks_nobody() {
        let (ours, _theirs) = Line::pair().unwrap();
        let full = (0..10_000_000).find_map(|_| ours.send(&Down::Beat).err());
        assert!(matches!(full, Some(WireError::Full)));
    }

    #[test]
    fn a_packet_that_is_no_message_is_an_error() {
        let (ours, theirs) = Line::pair().unwrap();
        ours.send(&"nonsense").unwrap();
        assert!(matches!(
            Line::from_fd(theirs).receive::<Down>(),
            Err(WireError::Decode(_))
        ));
    }
}
