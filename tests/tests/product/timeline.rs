//! Faults with offsets: each acts in its own window, on all of its nodes, and not outside.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use windtunnel_tests::cluster::poll::until;

use super::measure::{Outcome, Probes, twice};
use super::stage::{ECHO, Pod, Space, Stage, Wanted, at};

const SOON: Duration = Duration::from_mins(1);
/// Port of a fault, and its window in seconds after the start.
const WINDOWS: [(u16, f64, f64); 3] = [(11, 0.0, 6.0), (12, 5.0, 11.0), (13, 10.0, 16.0)];
/// An agent that is later than this with the beginning of a window does not begin at all.
const LATE: f64 = 3.2;
/// How long after its window a fault may still be found, and how far clocks may be apart.
const AFTER: f64 = 3.0;
const BEFORE: f64 = 0.3;
/// Packets that a busy machine may lose, or answer too late.
const LOST: f64 = 0.02;

const SPEC: &str = "
duration: 16s
faults:
- name: first
  duration: 6s
  target: {selector: {matchLabels: {app: target}}}
  network: {loss: {percent: 100}, peers: {ports: [{port: 11, protocol: UDP}]}}
- name: second
  startAfter: 5s
  duration: 6s
  target: {selector: {matchLabels: {app: target}}}
  network: {loss: {percent: 100}, peers: {ports: [{port: 12, protocol: UDP}]}}
- name: third
  startAfter: 10s
  target: {selector: {matchLabels: {app: target}}}
  network: {loss: {percent: 100}, peers: {ports: [{port: 13, protocol: UDP}]}}
";

/// Three windows on two nodes, with packets on their way to everywhere all the time.
pub(crate) fn windows_open_and_close_in_time(stage: &Stage) -> Result<()> {
    let space = stage.space("windows_open_and_close_in_time")?;
    let target = |name, node| Wanted {
        name,
        app: "target",
        node,
        args: &["idle"],
    };
    let mut targets = space.pods(&[
        target("one", "node1"),
        target("two", "node2"),
        Wanted {
            name: "echo",
            app: "echo",
            node: "node2",
            args: &["echo", "--port=7", "--port=11", "--port=12", "--port=13"],
        },
    ])?;
    let echo = targets.pop().context("no echo")?;
    let before: Vec<String> = snapshots(stage, &targets)?;
    // A machine that stands still for three seconds ends a fault before its time.
    twice(|| observe(&space, &targets, &echo))?;
    let all = targets.iter().zip(&before);
    all.into_iter()
        .try_for_each(|(pod, before)| stage.unchanged(pod, before))
}

fn snapshots(stage: &Stage, pods: &[Pod]) -> Result<Vec<String>> {
    pods.iter().map(|pod| stage.snapshot(pod)).collect()
}

/// One run, with packets to everywhere until it is over.
fn observe(space: &Space<'_>, targets: &[Pod], echo: &Pod) -> Result<()> {
    let mut to: Vec<String> = WINDOWS
        .iter()
        .map(|(port, ..)| at(&echo.v4, *port))
        .collect();
    to.push(at(&echo.v4, ECHO));
    let probes = Probes {
        every: Duration::from_millis(20),
        ..Probes::new(&to, 2_000)
    };
    let sent = |pod: &Pod| space.stage.counter(pod, "Udp OutDatagrams");
    let earlier: Vec<u64> = targets.iter().map(sent).collect::<Result<_>>()?;
    let (status, outcomes) = thread::scope(|scope| {
        let probing: Vec<_> = targets
            .iter()
            .map(|pod| scope.spawn(|| space.probes(pod, &probes)))
            .collect();
        for (pod, earlier) in targets.iter().zip(earlier) {
            until("packets on their way", SOON, || {
                Ok((sent(pod)? > earlier + 200).then_some(()))
            })?;
        }
        let run = space.run("timeline", SPEC)?;
        run.wait("Clean", SOON)?;
        let outcomes: Result<Vec<_>> = probing
            .into_iter()
            .map(|one| one.join().unwrap_or_else(|_| anyhow::bail!("panicked")))
            .collect();
        run.wait("Finished", SOON)?;
        anyhow::Ok((run.status()?, outcomes?))
    })?;
    ensure!(status["phase"] == "Completed", "status: {status}");
    let start: Timestamp = status["startTime"]
        .as_str()
        .context("no startTime")?
        .parse()?;
    let start = start.as_microsecond() as f64 / 1_000_000.0;
    for (pod, outcomes) in targets.iter().zip(&outcomes) {
        for (outcome, window) in outcomes.iter().zip(&WINDOWS) {
            judge(outcome, start, *window).with_context(|| format!("pod {}", pod.name))?;
        }
        let control = &outcomes[WINDOWS.len()];
        ensure!(
            control.loss() < LOST,
            "the control lost {:.3}",
            control.loss()
        );
    }
    Ok(())
}

/// Judges each packet by the moment at which it was sent.
fn judge(outcome: &Outcome, start: f64, (port, opens, closes): (u16, f64, f64)) -> Result<()> {
    let packets: Vec<(f64, bool)> = outcome
        .journeys()
        .map(|(sent, back)| (outcome.started + sent / 1000.0 - start, back.is_some()))
        .collect();
    let of = |from: f64, until: f64| -> Vec<&(f64, bool)> {
        let within = |(at, _): &&(f64, bool)| (from..until).contains(at);
        packets.iter().filter(within).collect()
    };
    let inside = of(opens + LATE, closes - BEFORE);
    let through = inside.iter().filter(|(_, answered)| *answered).count();
    ensure!(
        !inside.is_empty(),
        "port {port}: nothing was sent in its window"
    );
    ensure!(
        through == 0,
        "port {port}: {through} of {} packets in its window were answered",
        inside.len()
    );
    for (when, outside) in [
        ("before", of(f64::NEG_INFINITY, opens - BEFORE)),
        ("after", of(closes + AFTER, f64::INFINITY)),
    ] {
        let lost: Vec<f64> = outside
            .iter()
            .filter(|(_, answered)| !answered)
            .map(|(at, _)| *at)
            .collect();
        ensure!(
            !outside.is_empty(),
            "port {port}: nothing was sent {when} its window"
        );
        ensure!(
            lost.len() as f64 <= LOST * outside.len() as f64,
            "port {port}: {} of {} packets {when} its window were lost, at {lost:.1?} s",
            lost.len(),
            outside.len()
        );
    }
    Ok(())
}
