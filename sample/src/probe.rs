//! Probes: what tests measure a network with, from inside a pod.

use std::{
    io::IoSliceMut,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use nix::sys::{
    socket::{
        ControlMessageOwned, MsgFlags, recvmsg, setsockopt,
        sockopt::{RcvBuf, ReceiveTimestampns},
    },
    time::TimeSpec,
};
use serde::Serialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep_until, timeout_at},
};

/// Bytes that wait for a socket that is not read for a moment; the kernel may allow fewer.
const WAITING: usize = 4 << 20;

/// A series of probes to each of some echoes, all at the same time.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// Where the echoes are: address:port or name:port.
    #[arg(long, required = true)]
    to: Vec<String>,
    /// The port to send from.
    #[arg(long, default_value_t = 0)]
    from_port: u16,
    /// How many packets to each.
    #[arg(long, default_value_t = 100)]
    count: usize,
    /// Microseconds between two packets.
    #[arg(long, default_value_t = 50_000)]
    every_micros: u64,
    /// How long the last answers are waited for, in milliseconds.
    #[arg(long, default_value_t = 3_000)]
    wait_millis: u64,
    /// Bytes of a packet, 12 at least.
    #[arg(long, default_value_t = 64)]
    size: usize,
}

/// What came back.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Outcome {
    sent: usize,
    /// Packets of which at least one answer came.
    answered: usize,
    /// Answers beyond the first to a packet.
    duplicates: usize,
    /// Answers that came after one to a later packet.
    reordered: usize,
    /// Answers that are not what was sent.
    corrupted: usize,
    /// When the first packet was sent, in seconds since 1970.
    started: f64,
    /// Milliseconds from then to when each packet was sent.
    sent_millis: Vec<f64>,
    /// Milliseconds to the first answer, by packet; null for none.
    millis: Vec<Option<f64>>,
}

/// Sends the probes and prints the outcome for each echo, in their order.
pub(crate) async fn probe(settings: Settings) -> anyhow::Result<()> {
    let mut all = JoinSet::new();
    for (at, to) in settings.to.iter().enumerate() {
        let (to, settings) = (to.clone(), settings.clone());
        all.spawn(async move { (at, probe_one(&to, &settings).await) });
    }
    let mut outcomes = Vec::new();
    for (at, outcome) in all.join_all().await {
        outcomes.push((
            at,
            outcome.with_context(|| format!("probe {}", settings.to[at]))?,
        ));
    }
    outcomes.sort_by_key(|(at, _)| *at);
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(|(_, outcome)| outcome).collect();
    print(&outcomes)
}

async fn probe_one(to: &str, settings: &Settings) -> anyhow::Result<Outcome> {
    let &Settings {
        to: _,
        from_port,
        count,
        every_micros,
        wait_millis,
        size,
    } = settings;
    let to = tokio::net::lookup_host(to)
        .await?
        .next()
        .with_context(|| format!("{to} has no address"))?;
    let local = if to.is_ipv4() {
        SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), from_port)
    } else {
        both(from_port)
    };
    let socket = socket(local).await?;
    socket.connect(to).await?;
    setsockopt(&socket, ReceiveTimestampns, &true).context("ask for times of arrival")?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let start = Instant::now();
    let mut ticks = interval(Duration::from_micros(every_micros.max(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut series = Series::new(count, size.max(12));
    let mut buffer = vec![0; 65_536];
    let mut sent = 0;
    let mut end = None;
    loop {
        let over = end.unwrap_or_else(|| Instant::now() + Duration::from_hours(24));
        // Cancel-safe: neither a tick nor a packet is lost when the other comes first.
        tokio::select! {
            _ = ticks.tick(), if sent < count => {
                series.sent_at[sent] = Some(start.elapsed());
                // A full queue or a refusal is a packet that was lost.
                let _ = socket.send(&series.packet(sent)).await;
                sent += 1;
                if sent == count {
                    end = Some(Instant::now() + Duration::from_millis(wait_millis));
                }
            }
            received = receive(&socket, &mut buffer) => {
                if let Ok((length, arrived)) = received {
                    let arrived = arrived.map_or(start.elapsed(), |at| at.saturating_sub(started));
                    series.receive(&buffer[..length], arrived);
                }
                if series.answered == count {
                    break;
                }
            }
            () = sleep_until(over.into()) => break,
        }
    }
    Ok(series.outcome(started.as_secs_f64()))
}

/// The length of the next packet, and when it came in, since 1970: a busy machine may let it wait for
/// its reader.
async fn receive(
    socket: &UdpSocket,
    buffer: &mut [u8],
) -> std::io::Result<(usize, Option<Duration>)> {
    let read = || {
        let mut parts = [IoSliceMut::new(buffer)];
        let mut notes = nix::cmsg_space!(TimeSpec);
        let flags = MsgFlags::MSG_DONTWAIT;
        let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut notes), flags)?;
        let arrived = message.cmsgs()?.find_map(|note| match note {
            ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
            _ => None,
        });
        Ok((message.bytes, arrived))
    };
    socket.async_io(Interest::READABLE, read).await
}

struct Series {
    size: usize,
    sent_at: Vec<Option<Duration>>,
    millis: Vec<Option<f64>>,
    answered: usize,
    duplicates: usize,
    reordered: usize,
    corrupted: usize,
    last: usize,
}

impl Series {
    fn new(count: usize, size: usize) -> Self {
        Self {
            size,
            sent_at: vec![None; count],
            millis: vec![None; count],
            answered: 0,
            duplicates: 0,
            reordered: 0,
            corrupted: 0,
            last: 0,
        }
    }

    /// The number of the packet, then bytes that follow from it.
    fn packet(&self, number: usize) -> Vec<u8> {
        let mut packet = (number as u64).to_be_bytes().to_vec();
        packet.extend(
            (8..self.size).map(|i| u8::try_from((number * 31 + i * 7) % 251).unwrap_or_default()),
        );
        packet
    }

    fn receive(&mut self, packet: &[u8], now: Duration) {
        let number = packet.first_chunk::<8>().map(|n| u64::from_be_bytes(*n));
        let number = number
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n < self.sent_at.len());
        let Some((number, sent)) = number.and_then(|n| Some((n, self.sent_at[n]?))) else {
            self.corrupted += 1;
            return;
        };
        if packet != self.packet(number) {
            self.corrupted += 1;
            return;
        }
        if self.millis[number].is_some() {
            self.duplicates += 1;
            return;
        }
        self.millis[number] = Some(millis(now.saturating_sub(sent)));
        self.answered += 1;
        if number < self.last {
            self.reordered += 1;
        }
        self.last = self.last.max(number);
    }

    fn outcome(self, started: f64) -> Outcome {
        let sent: Vec<f64> = self.sent_at.into_iter().flatten().map(millis).collect();
        Outcome {
            sent: sent.len(),
            answered: self.answered,
            duplicates: self.duplicates,
            reordered: self.reordered,
            corrupted: self.corrupted,
            started,
            sent_millis: sent,
            millis: self.millis,
        }
    }
}

/// Milliseconds, to the microsecond.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1_000_000.0).round() / 1000.0
}

/// Answers each packet to any of some ports with itself.
pub(crate) async fn echo(ports: Vec<u16>) -> anyhow::Result<()> {
    let mut all = JoinSet::new();
    for port in ports {
        all.spawn(echo_on(port));
    }
    // They do not end by themselves: the first that does has failed.
    match all.join_next().await {
        Some(ended) => ended?,
        None => bail!("no port to echo on"),
    }
}

async fn echo_on(port: u16) -> anyhow::Result<()> {
    let socket = socket(both(port)).await?;
    let mut buffer = vec![0; 65_536];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        // A peer that is gone does not hear it.
        let _ = socket.send_to(&buffer[..length], from).await;
    }
}

/// A stream of bytes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Blast {
    /// Where the sink is: address:port.
    #[arg(long)]
    to: SocketAddr,
    /// For how long, in milliseconds.
    #[arg(long, default_value_t = 5_000)]
    millis: u64,
}

/// Sends as fast as it goes and prints bytes and seconds.
pub(crate) async fn blast(settings: Blast) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(settings.to).await?;
    let start = Instant::now();
    let until = start + Duration::from_millis(settings.millis);
    let chunk = vec![0x5a; 64 * 1024];
    let mut bytes = 0;
    while let Ok(Ok(sent)) = timeout_at(until.into(), stream.write(&chunk)).await {
        bytes += sent;
    }
    print(&serde_json::json!({"bytes": bytes, "seconds": start.elapsed().as_secs_f64()}))
}

/// Takes bytes in and forgets them.
pub(crate) async fn sink(port: u16) -> anyhow::Result<()> {
    let listener = TcpListener::bind(both(port)).await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            let mut buffer = vec![0; 256 * 1024];
            while stream
                .read(&mut buffer)
                .await
                .is_ok_and(|length| length > 0)
            {}
        });
    }
}

/// A socket that holds many packets while nobody reads them.
async fn socket(local: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)
        .await
        .with_context(|| format!("bind {local}"))?;
    setsockopt(&socket, RcvBuf, &WAITING).context("set the socket's buffer")?;
    Ok(socket)
}

fn both(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)
}

#[expect(clippy::print_stdout, reason = "the outcome is what the caller reads")]
pub(crate) fn print(outcome: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(outcome)?);
    Ok(())
}
