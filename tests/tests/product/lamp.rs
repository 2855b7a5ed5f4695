//! A lamp: an echo in a pod, looked at a hundred times a second. A fault that loses every packet
//! puts it out; a single answer proves that the fault is not in place. So what is measured is
//! there or not, however slow the machine is.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::product::{Beacon, Flight};

use super::stage::{ECHO, Pod, Stage, at};

const EVERY: Duration = Duration::from_millis(10);
/// A packet that was not answered for so long is lost: a loaded machine is later than a network.
const LOST: Duration = Duration::from_secs(1);
/// So many packets in a row, lost or answered, are no accident of a network.
const ROW: usize = 30;
/// So many lost in a row are no stall of a loaded machine either.
const DARK: usize = 150;

/// Packets to the echo of a pod, for as long as this value lives.
pub(crate) struct Lamp {
    echo: String,
    beacon: Beacon,
}

impl Lamp {
    /// Begins to look at an echo, and waits until it answers.
    pub(crate) fn light(stage: &Stage, echo: &Pod) -> Result<Self> {
        Self::light_at(stage, echo, ECHO)
    }

    /// The same, for an echo at another port.
    pub(crate) fn light_at(stage: &Stage, echo: &Pod, port: u16) -> Result<Self> {
        let address: SocketAddr = at(&echo.v4, port)
            .parse()
            .with_context(|| format!("the address of {}", echo.name))?;
        let lamp = Self {
            echo: echo.name.clone(),
            beacon: Beacon::paced(stage.cluster, address, EVERY)?,
        };
        lamp.comes_back(Instant::now(), Duration::from_secs(20))?;
        Ok(lamp)
    }

    /// Waits until nothing is answered any more.
    pub(crate) fn goes_out(&self, since: Instant, bound: Duration) -> Result<Instant> {
        until("an echo that falls silent", bound + LOST, || {
            Ok(self.dark(since).0)
        })
    }

    /// How long after a moment packets were answered again.
    pub(crate) fn comes_back(&self, since: Instant, bound: Duration) -> Result<Duration> {
        until("an echo that answers", bound + LOST, || {
            let flights = self.beacon.since(since);
            let row = flights
                .windows(ROW)
                .position(|row| row.iter().all(|f| f.back.is_some()));
            Ok(row.map(|at| flights[at].left.duration_since(since)))
        })
    }

    /// How long after a moment a packet of a row was lost last, and how long after it packets were answered
    /// again. Packets that were not sent, on a machine that stood still, may have been either.
    pub(crate) fn silence(&self, since: Instant, bound: Duration) -> Result<(Duration, Duration)> {
        let back = self.comes_back(since, bound)?;
        // Until it is known of all packets before that whether they are lost.
        reach(Instant::now() + LOST);
        let last = self.dark(since).1.map(|last| last.duration_since(since));
        Ok((last.unwrap_or_default().min(back), back))
    }

    /// When the echo was first and last seen dark since a moment: the first and the last packet of
    /// rows of lost ones.
    pub(crate) fn dark(&self, since: Instant) -> (Option<Instant>, Option<Instant>) {
        self.rows(since, LOST, |flight| flight.back.is_none())
    }

    /// The same of rows whose packets left at moments that count, and were lost, or away for so long if
    /// that is asked for.
    pub(crate) fn dim(
        &self,
        since: Instant,
        away: Option<Duration>,
        counts: impl Fn(Instant) -> bool,
    ) -> (Option<Instant>, Option<Instant>) {
        self.rows(since, away.unwrap_or(LOST), |flight| {
            let is_late = |took| away.is_some_and(|away| took >= away);
            flight.took().is_none_or(is_late) && counts(flight.left)
        })
    }

    fn rows(
        &self,
        since: Instant,
        judged_after: Duration,
        is_one: impl Fn(&Flight) -> bool,
    ) -> (Option<Instant>, Option<Instant>) {
        let flights = self.beacon.since(since);
        let old = &flights[..flights.partition_point(|f| f.left.elapsed() > judged_after)];
        let mut rows = old.windows(ROW).filter(|row| row.iter().all(&is_one));
        let first = rows.next();
        let last = rows.next_back().or(first);
        (
            first.map(|row| row[0].left),
            last.map(|row| row[row.len() - 1].left),
        )
    }

    /// From when to when since a moment no packet of a row came back, or none before it was away so long.
    pub(crate) fn spans(&self, since: Instant, away: Duration) -> Vec<(Instant, Instant)> {
        let is_out = |flight: &Flight| flight.took().is_none_or(|took| took >= away);
        let flights = self.beacon.since(since);
        let rows = flights.chunk_by(|a, b| is_out(a) == is_out(b));
        let dark = rows.filter(|row| row.len() >= ROW && is_out(&row[0]));
        dark.map(|row| (row[0].left, row[row.len() - 1].left))
            .collect()
    }

    /// Fails if a single packet of those between two moments was answered.
    pub(crate) fn was_out(&self, since: Instant, until: Instant) -> Result<()> {
        let flights = self.beacon.since(since);
        let mut between = flights.iter().take_while(|f| f.left < until);
        let answered = between.find(|f| f.back.is_some());
        ensure!(
            answered.is_none(),
            "a packet was answered {:?} into a fault that loses all of them",
            answered.map(|f| f.left.duration_since(since))
        );
        Ok(())
    }

    /// Fails if since a moment all packets of more than a second were lost.
    pub(crate) fn was_lit(&self, since: Instant) -> Result<()> {
        // Answers that are late are still on their way, those of a fault never come.
        let settled = Instant::now();
        reach(settled + LOST);
        let flights = self.beacon.since(since);
        let sent: Vec<&Flight> = flights.iter().take_while(|f| f.left < settled).collect();
        let dark = sent
            .windows(DARK)
            .find(|row| row.iter().all(|f| f.back.is_none()));
        ensure!(
            dark.is_none(),
            "{DARK} packets to {} were lost in a row, {:?} after the moment from which none was to be",
            self.echo,
            dark.map(|row| row[0].left.duration_since(since))
        );
        Ok(())
    }

    /// Waits for a moment, then fails if the echo was silent since another one.
    pub(crate) fn stays_lit(&self, since: Instant, moment: Instant) -> Result<()> {
        reach(moment);
        self.was_lit(since)
    }
}
