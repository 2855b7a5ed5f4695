//! Queueing disciplines: netem at the root of a link of ours, and what is at the root of any link.
//!
//! Owns rtnetlink's part about queueing disciplines. netem is installed on ifb links only, never on
//! a pod's own link: what is there is read, for comparison before and after, and left alone.

mod distribution;
mod netem;

use nix::errno::Errno;

pub use self::distribution::Distribution;
pub use self::netem::{Chance, Delay, Loss, Netem, NetemError, Reorder};
use super::link::{CREATE, RouteSocket};
use super::netlink::attr::{Attr, Attrs, DecodeError, EncodeError, Encoder, head, tail, wire};
use super::netlink::message::{Message, Request};
use super::netlink::{NetlinkError, Refusal};

/// The place at the root of a link (`TC_H_ROOT`).
const ROOT: u32 = 0xffff_ffff;

/// Bytes of the header in front of a queueing discipline's attributes (`struct tcmsg`).
const HEADER: usize = 20;

/// The handles that a netem of ours has; the second when it replaces one that has the first.
const HANDLES: [u32; 2] = [0x1_0000, 0x2_0000];

// Statistics within `TCA_STATS2` (include/uapi/linux/gen_stats.h, `TCA_STATS_*`).
const BASIC: u16 = 1;
const QUEUE: u16 = 3;
const PACKETS64: u16 = 8;

/// Why a queueing discipline could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum QdiscError {
    /// The exchange with the kernel failed.
    #[error("queueing disciplines")]
    Netlink(#[from] NetlinkError),
    /// The options are not possible.
    #[error("netem")]
    Netem(#[from] NetemError),
    /// The options do not fit into netlink's format.
    #[error("encode netem's options")]
    Encode(#[from] EncodeError),
    /// The kernel does not know netem, and could not load it.
    #[error("netem is not supported by this kernel: {0}")]
    Unsupported(Refusal),
    /// Another queueing discipline is at the root of the link.
    #[error("link {link} has {found:?} at its root instead of netem")]
    NotNetem {
        /// Index of the link.
        link: u32,
        /// What is there instead.
        found: Option<RootQdisc>,
    },
}

/// What is at the root of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootQdisc {
    /// Its kind: `noqueue`, `netem`, `fq_codel`, …
    pub kind: String,
    /// Its handle; 0 for one that the kernel put there by default.
    pub handle: u32,
}

/// What has passed through a queueing discipline, and what waits in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QdiscStats {
    /// Packets sent on.
    pub sent_packets: u64,
    /// Bytes sent on, link headers included.
    pub sent_bytes: u64,
    /// Packets that wait.
    pub backlog_packets: u32,
    /// Bytes that wait.
    pub backlog_bytes: u32,
    /// Packets dropped, by netem's loss as well as for want of room.
    pub drops: u32,
    /// Of these, the ones dropped by netem's loss; kernels before 7.x do not tell.
    pub lost: Option<u64>,
    /// Packets that had to wait for room.
    pub overlimits: u32,
}

/// A queueing discipline as the kernel shows it.
struct Held {
    qdisc: RootQdisc,
    netem: Option<Netem>,
    stats: QdiscStats,
}

impl RouteSocket {
    /// Installs netem at the root of a link that has only what the kernel put there by default.
    ///
    /// # Errors
    /// [`QdiscError::Unsupported`] without the kernel's module; otherwise when something is there
    /// already, the options are not possible or the exchange fails.
    pub fn install_netem(&mut self, link: u32, netem: &Netem) -> Result<(), QdiscError> {
        self.put_netem(link, netem, HANDLES[0], CREATE)
    }

    /// Puts a new netem in the place of what is at the root of a link; what waits there is dropped.
    ///
    /// # Errors
    /// As [`RouteSocket::install_netem`].
    pub fn replace_netem(&mut self, link: u32, netem: &Netem) -> Result<(), QdiscError> {
        // With the same handle the kernel would change the old one, and keep its distribution.
        let taken = self.root_qdisc(link)?.map(|qdisc| qdisc.handle);
        let [first, second] = HANDLES;
        let handle = if taken == Some(first) { second } else { first };
        let replace = wire(libc::NLM_F_CREATE | libc::NLM_F_REPLACE);
        self.put_netem(link, netem, handle, replace)
    }

    fn put_netem(
        &mut self,
        link: u32,
        netem: &Netem,
        handle: u32,
        flags: u16,
    ) -> Result<(), QdiscError> {
        let options = netem::encode(netem)?.finish()?;
        let mut body = header(link, handle);
        body.text(libc::TCA_KIND, "netem")
            .bytes(libc::TCA_OPTIONS, &options);
        let what = format!("install netem on link {link}");
        let request = request(&what, libc::RTM_NEWQDISC, flags, body);
        match self.socket.request(request) {
            // ENOENT: the kind is unknown (net/sched/sch_api.c, `qdisc_create`).
            Err(NetlinkError::Refused { reason, .. }) if reason.errno == Errno::ENOENT => {
                Err(QdiscError::Unsupported(reason))
            }
            result => Ok(result?),
        }
    }

    /// The netem at the root of a link, as the kernel holds it; compare it by [`Netem::matches`].
    ///
    /// # Errors
    /// [`QdiscError::NotNetem`] when something else is there; otherwise when the exchange fails.
    pub fn netem(&mut self, link: u32) -> Result<Netem, QdiscError> {
        let held = self.root(link)?;
        match held {
            Some(Held {
                netem: Some(netem), ..
            }) => Ok(netem),
            other => Err(QdiscError::NotNetem {
                link,
                found: other.map(|held| held.qdisc),
            }),
        }
    }

    /// What is at the root of a link; `None` for a link that is gone, or one that has been down
    /// since it was made.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn root_qdisc(&mut self, link: u32) -> Result<Option<RootQdisc>, QdiscError> {
        Ok(self.root(link)?.map(|held| held.qdisc))
    }

    /// Statistics of what is at the root of a link; `None` as for [`RouteSocket::root_qdisc`].
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn qdisc_stats(&mut self, link: u32) -> Result<Option<QdiscStats>, QdiscError> {
        Ok(self.root(link)?.map(|held| held.stats))
    }

    /// The netem at the root of a link, if it is one, and statistics of what is there; `None` as for
    /// [`RouteSocket::root_qdisc`].
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn netem_and_stats(
        &mut self,
        link: u32,
    ) -> Result<Option<(Option<Netem>, QdiscStats)>, QdiscError> {
        Ok(self.root(link)?.map(|held| (held.netem, held.stats)))
    }

    /// Removes netem from the root of a link; false if none is there. What waits in it is dropped.
    ///
    /// # Errors
    /// When the exchange fails; something else at the root is left alone.
    pub fn delete_netem(&mut self, link: u32) -> Result<bool, QdiscError> {
        let Some(held) = self.root(link)?.filter(|held| held.netem.is_some()) else {
            return Ok(false);
        };
        let what = format!("remove netem from link {link}");
        let body = header(link, held.qdisc.handle);
        let request = request(&what, libc::RTM_DELQDISC, 0, body);
        match self.socket.request(request) {
            Err(error) if matches!(error.refusal(), Some(Errno::ENOENT | Errno::ENODEV)) => {
                Ok(false)
            }
            result => Ok(result.map(|()| true)?),
        }
    }

    fn root(&mut self, link: u32) -> Result<Option<Held>, QdiscError> {
        let list = || {
            let what = format!("read the queueing discipline of link {link}");
            request(&what, libc::RTM_GETQDISC, 0, header(link, 0))
        };
        // The kernel lists those of all links, whatever is asked for.
        let found = self.socket.dump(list, |message| decode(message, link))?;
        Ok(found.into_iter().next())
    }
}

fn request(what: &str, kind: u16, flags: u16, body: Encoder) -> Request {
    Request {
        what: what.to_owned(),
        kind,
        flags,
        body,
    }
}

/// `struct tcmsg` for what is at the root of a link.
fn header(link: u32, handle: u32) -> Encoder {
    let mut body = Encoder::new();
    body.raw(&[0; 4]);
    for word in [link, handle, ROOT, 0] {
        body.raw(&word.to_ne_bytes());
    }
    body
}

fn decode(message: &Message<'_>, link: u32) -> Result<Option<Held>, DecodeError> {
    let word = |at| {
        let bytes = head("a queueing discipline", tail(message.payload, at))?;
        Ok(u32::from_ne_bytes(bytes))
    };
    if word(4)? != link || word(12)? != ROOT {
        return Ok(None);
    }
    let attrs = Attrs::parse(tail(message.payload, HEADER))?;
    let kind = attrs.require(libc::TCA_KIND)?.text()?;
    let options = attrs.get(libc::TCA_OPTIONS);
    let netem = match options.filter(|_| kind == "netem") {
        Some(options) => Some(netem::decode(options.value())?),
        None => None,
    };
    let lost = attrs.get(libc::TCA_XSTATS).filter(|_| netem.is_some());
    Ok(Some(Held {
        qdisc: RootQdisc {
            kind: kind.to_owned(),
            handle: word(8)?,
        },
        netem,
        stats: QdiscStats {
            lost: lost.map(decode_lost).transpose()?,
            ..decode_stats(&attrs.require(libc::TCA_STATS2)?.nested()?)?
        },
    }))
}

/// `struct gnet_stats_basic` and `struct gnet_stats_queue`.
fn decode_stats(stats: &Attrs<'_>) -> Result<QdiscStats, DecodeError> {
    let basic = stats.require(BASIC)?;
    let queue = stats.require(QUEUE)?.value();
    let queued = |at| head("queue statistics", tail(queue, at)).map(u32::from_ne_bytes);
    let short = head("basic statistics", tail(basic.value(), 8))?;
    let sent_packets = match stats.get(PACKETS64) {
        Some(packets) => packets.u64()?,
        None => u32::from_ne_bytes(short).into(),
    };
    Ok(QdiscStats {
        sent_packets,
        sent_bytes: basic.u64()?,
        backlog_packets: queued(0)?,
        backlog_bytes: queued(4)?,
        drops: queued(8)?,
        lost: None,
        overlimits: queued(16)?,
    })
}

/// The second number of `struct tc_netem_xstats`.
fn decode_lost(stats: Attr<'_>) -> Result<u64, DecodeError> {
    let lost = head("netem's statistics", tail(stats.value(), 8))?;
    Ok(u64::from_ne_bytes(lost))
}
