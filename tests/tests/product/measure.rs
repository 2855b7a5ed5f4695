//! What probes see, and how it is judged on a machine that may be busy with other things: against
//! an unaffected echo that the same program probes at the same time.
//!
//! A packet that is held back comes out when its delay is over, so what the machine adds to it is
//! what it adds to a control packet of that moment. Where a control packet was late, nothing is
//! said about the packets around it; if that leaves too few, more are sent.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use windtunnel_tests::cluster::poll::until;

use super::scene::SOON;
use super::stage::{Pod, Space, Stage, close, counter};

/// Milliseconds that a control packet may be late at a calm moment.
const CALM: f64 = 10.0;
/// The share of packets that a calm machine may lose.
const NEXT_TO_NONE: f64 = 0.000_5;
/// How often packets are sent anew while too few met a calm moment.
const ROUNDS: usize = 5;
/// How often what may be lost is sent anew.
const TRIES: usize = 3;
/// How much farther off the median of all packets may be if there were too few calm moments: a
/// machine that is late all the time is not late evenly, and half of the packets may share that.
const RESTLESS: f64 = 10.0;

/// Which probes are sent.
#[derive(Debug, Clone)]
pub(crate) struct Probes {
    /// `address:port` of each echo; all are probed at the same time.
    pub(crate) to: Vec<String>,
    /// Packets to each.
    pub(crate) count: usize,
    /// Between two packets.
    pub(crate) every: Duration,
    /// How long the last answers are waited for.
    pub(crate) wait: Duration,
    /// Bytes of a packet.
    pub(crate) size: usize,
    /// The port that is sent from; 0 for any.
    pub(crate) from_port: u16,
}

impl Probes {
    /// So many probes to each of some echoes, 10 ms apart.
    pub(crate) fn new(to: &[String], count: usize) -> Self {
        Self {
            to: to.to_vec(),
            count,
            every: Duration::from_millis(10),
            wait: Duration::from_secs(3),
            size: 64,
            from_port: 0,
        }
    }
}

/// What a series of probes saw.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Outcome {
    pub(crate) sent: usize,
    pub(crate) answered: usize,
    pub(crate) duplicates: usize,
    pub(crate) reordered: usize,
    pub(crate) corrupted: usize,
    /// When the first packet was sent, in seconds since 1970.
    pub(crate) started: f64,
    /// Milliseconds from then to when each packet was sent.
    pub(crate) sent_millis: Vec<f64>,
    /// Milliseconds to the first answer, by packet; null for one without an answer.
    pub(crate) millis: Vec<Option<f64>>,
}

impl Outcome {
    /// Of the packets that were answered.
    pub(crate) fn answered_millis(&self) -> Vec<f64> {
        self.millis.iter().copied().flatten().collect()
    }

    pub(crate) fn min(&self) -> f64 {
        self.answered_millis()
            .into_iter()
            .fold(f64::INFINITY, f64::min)
    }

    /// The share without an answer.
    pub(crate) fn loss(&self) -> f64 {
        1.0 - self.answered as f64 / self.sent as f64
    }

    /// When each packet was sent and when its answer came, in milliseconds since the start.
    pub(crate) fn journeys(&self) -> impl Iterator<Item = (f64, Option<f64>)> {
        let pairs = self.sent_millis.iter().zip(&self.millis);
        pairs.map(|(sent, took)| (*sent, took.map(|took| sent + took)))
    }

    /// By how much the answer to each packet came later than one that was sent when it was due.
    pub(crate) fn lateness(&self, every: f64) -> Vec<(f64, f64)> {
        let first = self.sent_millis.first().copied().unwrap_or_default();
        let due = |number: usize| first + number as f64 * every;
        let journeys = self.journeys().enumerate();
        journeys
            .map(|(number, (_, back))| {
                let late = back.map_or(f64::INFINITY, |back| back - due(number));
                (due(number), late)
            })
            .collect()
    }
}

impl Outcome {
    /// Times of packets that took longer than `most` milliseconds, but of those that the machine held up as
    /// well as the control's, from when they were to come out at the latest.
    pub(crate) fn longer(&self, most: f64, control: &Self, every: f64, latest: f64) -> Vec<f64> {
        let lateness = control.lateness(every);
        let excused = |sent: f64, back: f64| {
            let since = lateness.partition_point(|(due, _)| *due < sent + latest - every);
            let mut meanwhile = lateness[since..].iter().take_while(|(due, _)| *due <= back);
            meanwhile.any(|(_, late)| *late > CALM)
        };
        // Nothing can be said of those that came out when the control had ended.
        let end = lateness.last().map_or(0.0, |(due, _)| *due);
        self.journeys()
            .filter_map(|(sent, back)| Some((sent, back?)))
            .filter(|(sent, back)| back - sent > most && *back < end && !excused(*sent, *back))
            .map(|(sent, back)| back - sent)
            .collect()
    }
}

/// Delays of the packets to one echo, without what the control's packets took.
#[derive(Debug, Default, Clone)]
pub(crate) struct Added {
    /// Of packets that came out at calm moments.
    pub(crate) calm: Vec<f64>,
    /// Of all packets.
    pub(crate) all: Vec<f64>,
}

impl Added {
    /// Adds what one round saw of packets that are to be held back for `latency` milliseconds.
    pub(crate) fn add(&mut self, subject: &Outcome, control: &Outcome, every: f64, latency: f64) {
        let lateness = control.lateness(every);
        // The control packets around a moment: those that the same stall would have met.
        let around = |moment: f64| {
            let after = lateness.partition_point(|(due, _)| *due < moment);
            let near = &lateness[after.saturating_sub(1)..(after + 1).min(lateness.len())];
            let worst = near.iter().map(|(_, late)| *late).fold(0.0, f64::max);
            let best = near.iter().map(|(_, late)| *late).fold(CALM, f64::min);
            (near.len() == 2 && worst < CALM, best)
        };
        for (sent, back) in subject.journeys() {
            let Some(back) = back else { continue };
            let (is_calm, usual) = around(sent + latency);
            self.all.push(back - sent - usual);
            // Some turn round at the start or, delayed both ways, halfway.
            let is_calm = is_calm && around(sent).0 && around(sent + latency / 2.0).0;
            if is_calm {
                self.calm.push(back - sent - usual);
            }
        }
    }

    /// The median of all, calm or not.
    pub(crate) fn median(&self) -> f64 {
        median(&self.all)
    }

    /// Fails unless the delays' mean is within `share` of `wanted` milliseconds. A tenth of them is
    /// left out at either end: the machine holds up a queue now and then where no control packet is.
    pub(crate) fn close(&self, what: &str, enough: usize, wanted: f64, share: f64) -> Result<()> {
        let mut sorted = self.calm.clone();
        sorted.sort_by(f64::total_cmp);
        let tenth = sorted.len() / 10;
        if sorted.len() >= enough {
            let what = format!(
                "{what}, mean of {} (a tenth below {:.1}, half above {:.1}, a tenth above {:.1})",
                sorted.len(),
                sorted[tenth],
                median(&sorted),
                sorted[sorted.len() - 1 - tenth]
            );
            let most = &sorted[tenth..sorted.len() - tenth];
            return close(&what, mean(most), wanted, share);
        }
        let what = format!(
            "{what}, median of {} of which only {} met a calm moment",
            self.all.len(),
            self.calm.len()
        );
        close(&what, self.median(), wanted, share * RESTLESS)
    }
}

impl Space<'_> {
    /// Sends probes from a pod and says what came back from each echo.
    pub(crate) fn probes(&self, from: &Pod, probes: &Probes) -> Result<Vec<Outcome>> {
        let mut argv = vec!["/windtunnel-sample".to_owned(), "probe".to_owned()];
        for to in &probes.to {
            argv.extend(["--to".to_owned(), to.clone()]);
        }
        for (option, value) in [
            ("--count", probes.count.to_string()),
            ("--every-micros", probes.every.as_micros().to_string()),
            ("--wait-millis", probes.wait.as_millis().to_string()),
            ("--size", probes.size.to_string()),
            ("--from-port", probes.from_port.to_string()),
        ] {
            argv.extend([option.to_owned(), value]);
        }
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let text = self
            .stage
            .cluster
            .pod_exec(&self.name, &from.name, "sample", &argv)?;
        serde_json::from_str(&text).with_context(|| format!("read the outcome of probes: {text}"))
    }

    /// Sends probes until the last of the echoes, which no fault is to meet, lost next to none, or
    /// for some rounds; what came back from each in the last round.
    pub(crate) fn calm_probes(&self, from: &Pod, probes: &Probes) -> Result<Vec<Outcome>> {
        for _ in 1..ROUNDS {
            let outcomes = self.probes(from, probes)?;
            if outcomes.last().is_some_and(|o| o.loss() < NEXT_TO_NONE) {
                return Ok(outcomes);
            }
        }
        self.probes(from, probes)
    }

    /// Probes echoes that are to answer `latency` milliseconds later than `control`, until at least
    /// `enough` answers of each came at calm moments, for some rounds at most.
    pub(crate) fn added(
        &self,
        from: &Pod,
        (echoes, control): (&[String], &str),
        latency: f64,
        enough: usize,
    ) -> Result<Vec<Added>> {
        let mut all = echoes.to_vec();
        all.push(control.to_owned());
        let probes = Probes::new(&all, enough + enough / 2);
        let every = probes.every.as_secs_f64() * 1000.0;
        let mut added = vec![Added::default(); echoes.len()];
        // The control is probed until the last of the others has come out.
        let beyond = (latency / every) as usize + 2;
        for _ in 0..ROUNDS {
            let probes = Probes {
                count: probes.count + beyond,
                ..probes.clone()
            };
            let mut outcomes = self.probes(from, &probes)?;
            let control = outcomes.pop().context("no outcome of the control")?;
            ensure!(control.answered > 0, "nothing came back from the control");
            for (added, outcome) in added.iter_mut().zip(&outcomes) {
                added.add(outcome, &control, every, latency);
            }
            if added.iter().all(|added| added.calm.len() >= enough) {
                break;
            }
        }
        Ok(added)
    }
}

pub(crate) fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len() as f64
}

pub(crate) fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Fails unless `found` of `all` independent chances of `share` is what three standard deviations
/// allow, and `excuse` (a share) more, for what the machine lost by itself.
pub(crate) fn share(
    what: &str,
    (found, all): (usize, usize),
    share: f64,
    excuse: f64,
) -> Result<()> {
    let deviation = (share * (1.0 - share) / all as f64).sqrt();
    within(
        what,
        found as f64 / all as f64,
        share,
        3.0 * deviation + excuse,
    )
}

/// Fails unless `found` is no farther than `margin` from `wanted`.
pub(crate) fn within(what: &str, found: f64, wanted: f64, margin: f64) -> Result<()> {
    ensure!(
        (found - wanted).abs() <= margin,
        "{what}: {found:.5} is not within {margin:.5} of {wanted:.5}"
    );
    Ok(())
}

/// Measures a second time if the first fails: one in 370 right measurements lies beyond three
/// standard deviations, and the machine may hold up the queue of a fault and not the control. A
/// wrong dose is wrong both times.
pub(crate) fn twice(measure: impl Fn() -> Result<()>) -> Result<()> {
    measure().or_else(|first| measure().with_context(|| format!("before that: {first:#}")))
}

/// Counts until it is as many as wanted, a few times: the machine may lose some of what is to arrive. Of
/// what is to be none, or of more than was sent, nothing is forgiven.
pub(crate) fn counts(what: &str, wanted: u64, count: impl Fn() -> Result<u64>) -> Result<()> {
    let mut found = Vec::new();
    while found.len() < TRIES {
        found.push(count()?);
        let last = found.last().copied().unwrap_or_default();
        ensure!(last <= wanted, "{what}: {last}, not {wanted}");
        if last == wanted {
            return Ok(());
        }
    }
    bail!("{what}: {found:?}, not {wanted}")
}

/// A flood of UDP packets out of a pod, over 8 s of it.
pub(crate) struct Flood {
    /// Bits per second that leave the pod.
    pub(crate) carried: f64,
    /// Packets per second that its program has sent.
    pub(crate) offered: f64,
}

/// Measures a flood that begins now; how many packets are sent says a counter.
pub(crate) fn flood(stage: &Stage, pod: &Pod, sent: &str) -> Result<Flood> {
    let read = || -> Result<(f64, f64, f64)> {
        let files = ["uptime", "net/snmp", "net/snmp6", "net/dev"];
        let files = files.map(|file| format!("/proc/{file}"));
        let files = files.iter().map(String::as_str);
        let argv: Vec<&str> = ["cat"].into_iter().chain(files).collect();
        let text = stage.in_netns(pod, &argv)?;
        let packets = counter(&text, sent).context("no counter")? as f64;
        let uptime = text.split_whitespace().next().and_then(|t| t.parse().ok());
        let sent = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("eth0:"))
            .and_then(|counts| counts.split_whitespace().nth(8))
            .and_then(|sent| sent.parse().ok());
        let (uptime, sent) = uptime
            .zip(sent)
            .with_context(|| format!("no counters in {text}"))?;
        Ok((uptime, sent, packets))
    };
    let (_, idle, _) = read()?;
    let first = until("a flood", SOON, || {
        let now = read()?;
        Ok((now.1 > idle + 500_000.0).then_some(now))
    })?;
    let last = until("8 s of it", SOON, || {
        let now = read()?;
        Ok((now.0 >= first.0 + 8.0).then_some(now))
    })?;
    let seconds = last.0 - first.0;
    Ok(Flood {
        carried: (last.1 - first.1) * 8.0 / seconds,
        offered: (last.2 - first.2) / seconds,
    })
}
