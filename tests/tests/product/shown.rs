//! The first thing that is promised of the network, to the letter: one link that is late and loses at
//! once, and one that is narrow, before, during and after, in both families.

use std::io::{self, Write};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::measure::{Added, Flood, Outcome, Probes, flood, mean, median, share, twice};
use super::scene::SOON;
use super::stage::{ECHO, Pod, Space, Stage, Test, at, close};

/// What must not have to share the machine.
pub(crate) const ALONE: &[Test] = &[
    (
        "a_link_is_late_and_loses_as_written",
        a_link_is_late_and_loses_as_written,
    ),
    (
        "a_narrow_link_carries_as_written",
        a_narrow_link_carries_as_written,
    ),
];

const EVERY: Duration = Duration::from_millis(50);
/// So many are sent that more than 600 of them are answered, with a fifth of them lost.
const LATE: usize = 800;
const ANSWERED: usize = 600;
/// How many of them are to come out at calm moments, and how often they are sent for that.
const ENOUGH: usize = 500;
const ROUNDS: usize = 3;
/// Of how many a share is lost.
const PACKETS: usize = 10_000;
/// Bytes of a frame of a flood, and how many bits of it a narrow link carries per second.
const FRAME: f64 = 1_000.0;
const NARROW: f64 = 4_000_000.0;

/// 1500 ± 200 ms and a fifth lost.
fn a_link_is_late_and_loses_as_written(stage: &Stage) -> Result<()> {
    let space = stage.space("a_link_is_late_and_loses_as_written")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let to = [at(&echo.v4, ECHO), at(&echo.v6, ECHO), at(&other.v4, ECHO)];
    let usual = || plain(&space, &client, &to);
    usual().context("before")?;
    let run = space.run(
        "late",
        "
duration: 10m
faults:
- name: late
  target: {selector: {matchLabels: {app: client}}}
  network:
    delay: {latency: 1500ms, jitter: 200ms}
    loss: {percent: 20}
    peers: {podSelector: {matchLabels: {app: echo}}}
",
    )?;
    run.wait("Injected", SOON)?;
    let some = Probes {
        every: EVERY,
        ..Probes::new(&to, LATE)
    };
    twice(|| late(&space, &client, &some))?;
    let many = Probes {
        every: Duration::from_millis(2),
        ..Probes::new(&to, PACKETS)
    };
    twice(|| {
        let outcomes = space.calm_probes(&client, &many)?;
        let control = outcomes[2].loss();
        let mut faulty = outcomes.iter().zip(&to).take(2);
        faulty.try_for_each(|(outcome, to)| {
            let lost = outcome.sent - outcome.answered;
            say(&format!("{to}: {lost} of {} lost", outcome.sent));
            share(&format!("loss to {to}"), (lost, outcome.sent), 0.2, control)
        })
    })?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    usual().context("after")?;
    stage.unchanged(&client, &before)
}

/// Nothing is late, and next to nothing is lost.
fn plain(space: &Space<'_>, from: &Pod, to: &[String]) -> Result<()> {
    let probes = Probes::new(to, 300);
    twice(|| {
        for (outcome, to) in space.probes(from, &probes)?.iter().zip(to) {
            let took = median(&outcome.answered_millis());
            ensure!(
                took < 100.0 && outcome.loss() < 0.01,
                "{to}: {took:.1} ms, {:.4} lost",
                outcome.loss()
            );
        }
        Ok(())
    })
}

/// A mean of 1500 ms, and each within 200 ms of it, with what a link takes by itself; of one in 200 the
/// machine may be later than the fault. The last of the echoes is the control.
fn late(space: &Space<'_>, from: &Pod, probes: &Probes) -> Result<()> {
    let every = probes.every.as_secs_f64() * 1_000.0;
    let mut added = vec![Added::default(); probes.to.len() - 1];
    for _ in 0..ROUNDS {
        let mut outcomes = space.probes(from, probes)?;
        let control = outcomes.pop().context("no outcome of the control")?;
        for ((outcome, to), added) in outcomes.iter().zip(&probes.to).zip(&mut added) {
            bounded(outcome, &control, every).with_context(|| to.clone())?;
            added.add(outcome, &control, every, 1_500.0);
        }
        if added.iter().all(|added| added.calm.len() >= ENOUGH) {
            break;
        }
    }
    for (added, to) in added.iter().zip(&probes.to) {
        let (calm, all) = (&added.calm, &added.all);
        say(&format!(
            "{to}: mean of {} at calm moments {:.2} ms, median of all {} {:.2}",
            calm.len(),
            mean(calm),
            all.len(),
            added.median()
        ));
        added.close(&format!("delay to {to}"), ENOUGH, 1_500.0, 0.01)?;
    }
    Ok(())
}

/// No packet is early, and next to none is late that the control's are not.
fn bounded(outcome: &Outcome, control: &Outcome, every: f64) -> Result<()> {
    let (all, least) = (outcome.answered, outcome.min());
    let longer = outcome.longer(1_720.0, control, every, 1_700.0);
    say(&format!(
        "{all} answers, the first after {least:.1} ms, late: {longer:.1?}"
    ));
    ensure!(all >= ANSWERED, "only {all} answers");
    ensure!(
        least >= 1_300.0 && longer.len() * 200 <= all,
        "{least:.1} ms at least, above 1720: {longer:.1?}"
    );
    Ok(())
}

/// 4 Mbit/s of 8 that are offered, by what the link itself counts.
fn a_narrow_link_carries_as_written(stage: &Stage) -> Result<()> {
    let space = stage.space("a_narrow_link_carries_as_written")?;
    let (client, echo, _) = space.client_and_echoes()?;
    let before = stage.snapshot(&client)?;
    let each = |carries: &dyn Fn(&str) -> Result<()>| {
        let mut all = [&echo.v4, &echo.v6].into_iter();
        all.try_for_each(|ip| twice(|| carries(ip)))
    };
    // What is offered is what the machine can send, as long as it is more than the narrow link carries.
    let all = |when: &str| {
        each(&|ip| {
            let flood = flooded(&space, &client, ip, when)?;
            let offered = flood.offered * FRAME * 8.0;
            ensure!(offered > 1.25 * NARROW, "{offered:.0} bit/s are sent");
            close(&format!("bit/s {when}"), flood.carried, offered, 0.05)
        })
    };
    all("before")?;
    let run = space.run(
        "narrow",
        "
duration: 10m
faults:
- name: narrow
  target: {selector: {matchLabels: {app: client}}}
  network: {bandwidth: {rate: 4M}, peers: {podSelector: {matchLabels: {app: echo}}}}
",
    )?;
    run.wait("Injected", SOON)?;
    each(&|ip| {
        let flood = flooded(&space, &client, ip, "during")?;
        close("bit/s during", flood.carried, NARROW, 0.05)
    })?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    all("after")?;
    stage.unchanged(&client, &before)
}

/// A flood to an address: 8 Mbit/s, where the machine can send as much.
fn flooded(space: &Space<'_>, from: &Pod, to: &str, when: &str) -> Result<Flood> {
    // Frames that are never split, one each millisecond.
    let (headers, sent) = if to.contains(':') {
        (62, "Udp6OutDatagrams")
    } else {
        (42, "Udp OutDatagrams")
    };
    let probes = Probes {
        every: Duration::from_millis(1),
        size: FRAME as usize - headers,
        wait: Duration::ZERO,
        ..Probes::new(&[at(to, ECHO)], 13_000)
    };
    let found = thread::scope(|scope| {
        let sender = scope.spawn(|| space.probes(from, &probes));
        let found = flood(space.stage, from, sent);
        sender
            .join()
            .unwrap_or_else(|_| bail!("the flood panicked"))?;
        found
    })?;
    say(&format!(
        "{when} to {to}: {:.0} bit/s of {:.0} packets/s",
        found.carried, found.offered
    ));
    Ok(found)
}

/// What was measured, for whoever wants the figure and not only that it is right.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
