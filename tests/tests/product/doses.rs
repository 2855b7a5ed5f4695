//! Doses: as much happens to packets as was asked for. Several faults act on one pod at the same
//! time, each on a port of its own.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::measure::{Added, Outcome, Probes, counts, flood, mean, share, twice, within};
use super::stage::{ECHO, Pod, Space, Stage, Test, Wanted, at, close};

/// What must not have to share the machine: with others beside them, the packets that are sent are
/// fewer than those that were to be, or later.
pub(crate) const ALONE: &[Test] = &[
    ("delay_and_loss_are_as_asked", delay_and_loss_are_as_asked),
    ("bandwidth_is_as_asked", bandwidth_is_as_asked),
];

const SOON: Duration = Duration::from_secs(30);
/// Ports of faults; the echo's usual port is the control's.
const PORTS: [u16; 6] = [11, 12, 13, 14, 15, 16];
const PACKETS: usize = 10_000;

/// A client, and an echo on the control's port and on all of [`PORTS`].
fn pods(space: &Space<'_>) -> Result<(Pod, Pod)> {
    let ports: Vec<String> = PORTS.iter().map(|port| format!("--port={port}")).collect();
    let mut args = vec!["echo", "--port=7"];
    args.extend(ports.iter().map(String::as_str));
    let mut pods = space.pods(&[
        Wanted {
            name: "client",
            app: "client",
            node: "node1",
            args: &["idle"],
        },
        Wanted {
            name: "echo",
            app: "echo",
            node: "node2",
            args: &args,
        },
    ])?;
    let echo = pods.pop().context("no echo")?;
    Ok((pods.pop().context("no client")?, echo))
}

/// Faults on the client, each on packets to one port of the echo.
fn faults(doses: &[(u16, &str)]) -> String {
    let fault = |(port, dose): &(u16, &str)| {
        format!(
            "- name: port-{port}
  target: {{selector: {{matchLabels: {{app: client}}}}}}
  network:
    peers: {{podSelector: {{matchLabels: {{app: echo}}}}, ports: [{{port: {port}, protocol: UDP}}]}}
    {dose}
"
        )
    };
    let faults: String = doses.iter().map(fault).collect();
    format!("duration: 10m\nfaults:\n{faults}")
}

/// A delay of 1500 ms is 1500 ms, with jitter it stays within its bounds, and a loss of 20 % beside
/// it is 20 %, for both families.
fn delay_and_loss_are_as_asked(stage: &Stage) -> Result<()> {
    let space = stage.space("delay_and_loss_are_as_asked")?;
    let (client, echo) = pods(&space)?;
    let before = stage.snapshot(&client)?;
    let run = space.run(
        "doses",
        &faults(&[
            (11, "delay: {latency: 1500ms}"),
            (
                12,
                "delay: {latency: 1500ms, jitter: 200ms}\n    loss: {percent: 20}",
            ),
            (13, "loss: {percent: 20}"),
        ]),
    )?;
    run.wait("Injected", SOON)?;
    let ips = [&echo.v4, &echo.v6];
    let to = |port: u16| ips.map(|ip| at(ip, port));
    twice(|| {
        let added = space.added(&client, (&to(11), &at(&echo.v4, ECHO)), 1500.0, 600)?;
        added
            .iter()
            .try_for_each(|added| added.close("delay", 600, 1500.0, 0.01))
    })?;
    let lossy = [to(12), to(13), to(ECHO)].concat();
    let probes = Probes {
        every: Duration::from_millis(2),
        ..Probes::new(&lossy[..5], PACKETS)
    };
    twice(|| {
        let outcomes = space.calm_probes(&client, &probes)?;
        let control = &outcomes[4];
        for (outcome, to) in outcomes.iter().zip(&probes.to).take(4) {
            let lost = (outcome.sent - outcome.answered, outcome.sent);
            let what = format!("loss to {to} (control: {:.4})", control.loss());
            share(&what, lost, 0.2, control.loss())?;
        }
        outcomes
            .iter()
            .take(2)
            .try_for_each(|outcome| spread(outcome, control))
    })?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    stage.unchanged(&client, &before)
}

/// Delays of 1500 ± 200 ms: none is shorter, next to none is longer but for what the control was
/// late at that time, and they are spread over the whole width.
fn spread(outcome: &Outcome, control: &Outcome) -> Result<()> {
    let every = 2.0;
    ensure!(outcome.min() >= 1299.0, "shortest: {:.2}", outcome.min());
    let longer = outcome.longer(1720.0, control, every, 1700.0);
    // The timer of the queue is late by itself now and then; the control does not meet it.
    ensure!(
        longer.len() * 100 < outcome.answered,
        "{} of {} took longer than 1720 ms while the control was in time: {longer:.0?}",
        longer.len(),
        outcome.answered
    );
    let mut added = Added::default();
    added.add(outcome, control, every, 1500.0);
    // A stall of the machine meets few of them.
    close("delay with jitter, median", added.median(), 1500.0, 0.02)?;
    // An even spread of ± 200 ms has a standard deviation of 115.5 ms.
    let middle = mean(&added.all);
    let squares: Vec<f64> = added.all.iter().map(|d| (d - middle).powi(2)).collect();
    ensure!(
        mean(&squares).sqrt() > 100.0,
        "deviation {:.1} ms",
        mean(&squares).sqrt()
    );
    Ok(())
}

/// What goes out, what comes in, and both: seen at the echo and at the client.
pub(crate) fn directions_are_those_of_the_target(stage: &Stage) -> Result<()> {
    let space = stage.space("directions_are_those_of_the_target")?;
    let (client, echo) = pods(&space)?;
    let run = space.run(
        "directions",
        &faults(&[
            (11, "loss: {percent: 100}\n    direction: Egress"),
            (12, "loss: {percent: 100}\n    direction: Ingress"),
            (13, "delay: {latency: 400ms}\n    direction: Both"),
            (14, "delay: {latency: 400ms}\n    direction: Ingress"),
        ]),
    )?;
    run.wait("Injected", SOON)?;
    for (ip, counter) in [(&echo.v4, "Udp InDatagrams"), (&echo.v6, "Udp6InDatagrams")] {
        for (port, arrive) in [(11, 0), (12, 100)] {
            let what = format!("port {port}: of 100 packets reached {ip}");
            counts(&what, arrive, || {
                let before = stage.counter(&echo, counter)?;
                let outcome = space.probe(&client, &at(ip, port), 100, Duration::from_millis(5))?;
                ensure!(
                    outcome.answered == 0,
                    "port {port}: {} answers",
                    outcome.answered
                );
                Ok(stage.counter(&echo, counter)? - before)
            })?;
        }
    }
    let control = at(&echo.v4, ECHO);
    for (port, delay) in [(13, 800.0), (14, 400.0)] {
        let to = [&echo.v4, &echo.v6].map(|ip| at(ip, port));
        twice(|| {
            let added = space.added(&client, (&to, &control), delay, 200)?;
            let what = format!("port {port}");
            added
                .iter()
                .try_for_each(|added| added.close(&what, 200, delay, 0.03))
        })?;
    }
    run.abort()?;
    run.wait("Clean", SOON)
}

/// Duplicates, corruption, reordering and the two kinds of bursts show in what comes back.
pub(crate) fn every_dose_is_seen(stage: &Stage) -> Result<()> {
    let space = stage.space("every_dose_is_seen")?;
    let (client, echo) = pods(&space)?;
    let before = stage.snapshot(&client)?;
    let run = space.run(
        "doses",
        &faults(&[
            (11, "duplicate: {percent: 20}"),
            (12, "corrupt: {percent: 20}"),
            (13, "delay: {latency: 1s}\n    reorder: {percent: 25}"),
            (14, "loss: {percent: 20, correlation: 50}"),
            (15, "loss: {gilbertElliott: {goodToBad: 2, badToGood: 20}}"),
            (16, "duplicate: {percent: 20, correlation: 50}"),
        ]),
    )?;
    run.wait("Injected", SOON)?;
    let mut to: Vec<String> = PORTS.iter().map(|port| at(&echo.v4, *port)).collect();
    to.push(at(&echo.v4, ECHO));
    let probes = Probes {
        every: Duration::from_millis(2),
        ..Probes::new(&to, PACKETS)
    };
    twice(|| {
        let refused = stage.counter(&echo, "Udp InCsumErrors")?;
        let outcomes = space.calm_probes(&client, &probes)?;
        let refused = stage.counter(&echo, "Udp InCsumErrors")? - refused;
        let [
            doubled,
            corrupt,
            overtaken,
            correlated,
            bursts,
            pairs,
            control,
        ] = &outcomes[..]
        else {
            anyhow::bail!("{} outcomes", outcomes.len());
        };
        ensure!(
            control.duplicates + control.corrupted == 0,
            "the control is hit"
        );
        let excuse = control.loss();
        share("duplicates", (doubled.duplicates, PACKETS), 0.2, excuse)?;
        // Packets that share a fate count as one.
        let shared = (pairs.duplicates / 3, PACKETS / 3);
        share("correlated duplicates", shared, 0.2, excuse)?;
        corrupted(corrupt, refused, excuse)?;
        reordered(overtaken, excuse)?;
        burst(correlated, (0.2 * 0.5, 0.8 * 0.5), excuse).context("correlated loss")?;
        burst(bursts, (0.02, 0.2), excuse).context("Gilbert-Elliott")
    })?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    stage.unchanged(&client, &before)
}

/// One flipped bit: it is found by a checksum and the packet is not answered, unless it is in the
/// sender's address of the Ethernet frame (6 bytes of 106), which nobody checks.
fn corrupted(outcome: &Outcome, refused: u64, excuse: f64) -> Result<()> {
    let lost = (outcome.sent - outcome.answered, outcome.sent);
    share(
        "packets that did not survive",
        lost,
        0.2 * 100.0 / 106.0,
        excuse,
    )?;
    // 72 of the 106 bytes are under UDP's checksum; the others end the packet before that.
    ensure!(
        refused as f64 > 0.5 * lost.0 as f64,
        "{} packets vanished, of which {refused} with a wrong checksum",
        lost.0
    );
    Ok(())
}

/// A quarter of the packets is not held back for the second that the others are.
fn reordered(outcome: &Outcome, excuse: f64) -> Result<()> {
    let early = outcome
        .answered_millis()
        .iter()
        .filter(|m| **m < 999.0)
        .count();
    share("packets sent at once", (early, outcome.sent), 0.25, excuse)?;
    // All but the last that were held back have been overtaken.
    ensure!(
        outcome.reordered > outcome.sent / 2,
        "{} answers were overtaken",
        outcome.reordered
    );
    Ok(())
}

/// Losses as a link with a good and a bad state makes them, with these chances to turn bad and good:
/// the share of losses, and how long they last.
fn burst(outcome: &Outcome, (to_bad, to_good): (f64, f64), excuse: f64) -> Result<()> {
    let lost: Vec<bool> = outcome.millis.iter().map(Option::is_none).collect();
    let all = lost.len() as f64;
    let losses = lost.iter().filter(|l| **l).count() as f64;
    let bursts = lost.windows(2).filter(|w| !w[0] && w[1]).count() as f64;
    let share = to_bad / (to_bad + to_good);
    // Packets of a chain with this memory count for fewer than so many independent ones.
    let memory = 1.0 - to_bad - to_good;
    let fewer = (1.0 + memory) / (1.0 - memory);
    let deviation = (share * (1.0 - share) * fewer / all).sqrt();
    within("share lost", losses / all, share, 3.0 * deviation + excuse)?;
    // Lengths of bursts are geometric.
    let (length, deviation) = (1.0 / to_good, (1.0 - to_good).sqrt() / to_good);
    let margin = 3.0 * deviation / bursts.sqrt() + 2.0 * excuse * length;
    within("length of a burst", losses / bursts, length, margin)
}

/// A link with a bandwidth carries as much by the counters of the link itself, with more offered.
fn bandwidth_is_as_asked(stage: &Stage) -> Result<()> {
    let space = stage.space("bandwidth_is_as_asked")?;
    let (client, echo) = pods(&space)?;
    let run = space.run("narrow", &faults(&[(11, "bandwidth: {rate: 4M}")]))?;
    run.wait("Injected", SOON)?;
    for ip in [&echo.v4, &echo.v6] {
        // 8 Mbit/s of frames that are never split.
        let probes = Probes {
            every: Duration::from_millis(1),
            size: 950,
            wait: Duration::ZERO,
            ..Probes::new(&[at(ip, 11)], 15_000)
        };
        twice(|| {
            thread::scope(|scope| {
                let sender = scope.spawn(|| space.probes(&client, &probes));
                let rate = flood(stage, &client, "Udp OutDatagrams");
                let outcome = sender
                    .join()
                    .map_err(|_| anyhow::anyhow!("the flood panicked"))??;
                let rate = rate.with_context(|| format!("flood: {} sent", outcome[0].sent))?;
                close("bit/s", rate.carried, 4_000_000.0, 0.05)
            })
        })?;
    }
    run.abort()?;
    run.wait("Clean", SOON)
}
