//! Torture: runs back to back, each with faults of chance on one pod, and in each something is killed,
//! stopped or cut off at a moment of chance. After each the traffic is normal within the bound, nothing
//! runs, is held or stands still that did not before, the kernel's state is as before, and the status is
//! true. `WINDTUNNEL_TORTURE_ROUNDS` says how many rounds, `WINDTUNNEL_TORTURE_SEED` where chance begins, and
//! `WINDTUNNEL_TORTURE_FROM` which of its rounds is the first that is played.

mod body;
mod deeds;
mod look;
mod tally;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::Run;
use windtunnel_tests::product::deck::{Dealer, End, Fault, Kind, Round};

use super::disk::NODE;
use super::scene::{SOON, agent_is_ready, started};
use super::stage::{Broken, Stage, Test};
use body::{BOUND, Body, Ground};
use deeds::DEEDS;
use look::{Look, Watch};
use tally::Tally;

pub(crate) const ROUGH: &[Test] = &[("torture_leaves_nothing", torture_leaves_nothing)];

/// Rounds where nothing else is asked for: so many meet every kind of fault.
const ROUNDS: usize = 8;
/// Where chance begins where nothing else is asked for: the same rounds each time.
const SEED: u64 = 2026;
/// How long each run lasts.
const WINDOW: Duration = Duration::from_secs(8);
/// Fewer looks than so many in a window may have missed what was there, and it is played again; and how
/// often at most.
const LOOKS: usize = 8;
const PLAYS: usize = 3;
/// How long a run may take to its end: the grace of the control plane, its bounds, and patience.
const END: Duration = Duration::from_mins(2);

/// What was seen of a fault in a round.
struct Seen {
    kind: Kind,
    /// How long after its end it was seen last; none if never.
    late: Option<Duration>,
    /// It was not its window that ended it.
    is_early: bool,
}

/// Rounds of chance, all on one pod. One that fails does not keep the next from being played, so that all
/// that failed are told, but where a promise is broken for good.
fn torture_leaves_nothing(stage: &Stage) -> Result<()> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let rounds = number("WINDTUNNEL_TORTURE_ROUNDS").unwrap_or(ROUNDS as u64);
    let seed = number("WINDTUNNEL_TORTURE_SEED").unwrap_or(SEED);
    let from = number("WINDTUNNEL_TORTURE_FROM").unwrap_or(0);
    let ground = Ground::lay(stage, "torture_leaves_nothing")?;
    let mut dealer = Dealer::new(seed, DEEDS.len());
    let mut tally = Tally::default();
    let mut failed = Vec::new();
    let mut body = None;
    for number in 0..from + rounds {
        let round = dealer.deal();
        if number < from {
            continue;
        }
        let told = format!("seed {seed}, round {number}: {}", tell(&round));
        let name = format!("round-{number}");
        let begun = Instant::now();
        let told_of = match seen(&ground, body.take(), &name, &round) {
            Ok((target, all)) => {
                for seen in &all {
                    tally.note(&round, seen);
                }
                // What was killed comes back later each time.
                body = Some(target).filter(|_| !loses_target(&round));
                outcome(&all)
            }
            Err(error) if error.is::<Broken>() => return Err(error.context(told)),
            Err(error) => {
                ground.space.known(&name).delete(END)?;
                failed.push(format!("{told}: {error:#}"));
                format!("FAILED: {error:#}")
            }
        };
        let took = begun.elapsed().as_secs_f64();
        writeln!(io::stderr(), "{told}: {told_of} ({took:.0} s)")?;
    }
    write!(io::stderr(), "{tally}")?;
    ensure!(
        failed.is_empty(),
        "{} of {rounds} rounds failed: {failed:#?}",
        failed.len()
    );
    let missing = tally.missing();
    ensure!(
        missing.is_empty() || rounds < ROUNDS as u64,
        "never seen: {missing:?}"
    );
    Ok(())
}

/// Whether the target's container, or its pod, is another one after a round.
fn loses_target(round: &Round) -> bool {
    round.kills() || DEEDS[round.deed].kills_target
}

/// Plays a round until enough looks fell into its window to have seen all of it, or a few times.
fn seen<'a>(
    ground: &'a Ground<'a>,
    mut body: Option<Body<'a>>,
    name: &str,
    round: &Round,
) -> Result<(Body<'a>, Vec<Seen>)> {
    for play in 1..=PLAYS {
        let target = match body.take() {
            Some(target) => target,
            None => ground.body()?,
        };
        let (all, is_blind) = match played(ground, &target, name, round)? {
            Some(played) => played,
            None => (Vec::new(), true),
        };
        // What the deed came before may be seen in no play.
        if !is_blind || (play == PLAYS && !all.is_empty()) {
            return Ok((target, all));
        }
        writeln!(io::stderr(), "{name}: too few looks, played again")?;
        body = Some(target).filter(|_| !loses_target(round));
    }
    bail!("too few looks each time")
}

fn tell(round: &Round) -> String {
    let faults: Vec<String> = round.faults.iter().map(Fault::to_string).collect();
    format!(
        "{}; {}{}{}",
        faults.join(" + "),
        DEEDS[round.deed].name,
        if round.is_early { " at once" } else { "" },
        match round.end {
            End::Window => "",
            End::Abort => ", abort",
            End::Delete => ", delete",
        }
    )
}

fn outcome(seen: &[Seen]) -> String {
    let told = seen.iter().map(|seen| {
        let late = seen.late.map(|late| format!("{:.1} s", late.as_secs_f64()));
        let late = late.unwrap_or_else(|| "not seen".to_owned());
        format!("{} {late}", seen.kind.name())
    });
    told.collect::<Vec<_>>().join(", ")
}

/// One run and one deed; what was seen of its faults, and whether something was missed with too few
/// looks. None if nothing was done, since the faults could not be seen before.
fn played(
    ground: &Ground<'_>,
    body: &Body<'_>,
    name: &str,
    round: &Round,
) -> Result<Option<(Vec<Seen>, bool)>> {
    let stage = ground.space.stage;
    let io = round.faults.iter().filter(|fault| fault.kind.is_io());
    let watch = Watch::begin(body.eye.clone(), io.map(|fault| fault.volume).collect());
    let applied = Instant::now();
    let spec = round.spec(&format!("{}s", WINDOW.as_secs()));
    let run = ground.space.run(name, &spec)?;
    if !round.is_early && !are_met(body, &watch, round, (&run, applied))? {
        run.delete(END)?;
        body.is_free(round)?;
        return Ok(None);
    }
    let deed = &DEEDS[round.deed];
    let done = Instant::now();
    (deed.act)(stage, body)?;
    let mut begun = started(&run)?;
    let asked = Instant::now();
    match round.end {
        End::Window => {}
        End::Abort => run.abort()?,
        End::Delete => run.delete(END)?,
    }
    agent_is_ready(stage, NODE)?;
    if round.end != End::Delete {
        run.wait("Finished", END)?;
        begun = started(&run)?;
        is_true(&run, round)?;
    }
    let over = Instant::now();
    body.is_free(round)?;
    let looks = watch.looks();
    let due = begun.map_or(over, |begun| begun + WINDOW);
    let early = match round.end {
        _ if is_ended_by_deed(round) => Some(done),
        End::Window => None,
        End::Abort | End::Delete => Some(asked),
    };
    let early = early.filter(|early| *early < due);
    let seen = judge(body, round, &looks, (applied, due, early))?;
    spares(ground, body, round, &looks, applied)?;
    run.delete(END)?;
    let is_blind = begun.is_some_and(|begun| is_blind(&looks, begun));
    let is_missed = seen.iter().any(|seen| seen.late.is_none());
    Ok(Some((seen, round.is_early && is_blind && is_missed)))
}

/// Whether too few looks fell into the window of a run to have seen what was there.
fn is_blind(looks: &[Look], begun: Instant) -> bool {
    let window = begun..begun + WINDOW;
    looks
        .iter()
        .filter(|look| window.contains(&look.at))
        .count()
        < LOOKS
}

/// Waits until every fault of a round was seen; false if nobody could have. What the container or the pod
/// is killed under may not have been.
fn are_met(
    body: &Body<'_>,
    watch: &Watch,
    round: &Round,
    (run, applied): (&Run<'_>, Instant),
) -> Result<bool> {
    let mut missing = Vec::new();
    let waited = until("every fault", SOON, || {
        let looks = watch.looks();
        let is_seen = |fault: &&Fault| body.seen(fault, &looks, applied).0.is_some();
        let kill = round.faults.iter().find(|fault| fault.kind.kills());
        if kill.is_some_and(|kill| is_seen(&kill)) {
            return Ok(Some(()));
        }
        let unseen = round.faults.iter().filter(|fault| !is_seen(fault));
        missing = unseen.map(|fault| fault.kind).collect();
        Ok(missing.is_empty().then_some(()))
    });
    let Err(error) = waited else {
        return Ok(true);
    };
    if started(run)?.is_some_and(|begun| is_blind(&watch.looks(), begun)) {
        return Ok(false);
    }
    let status = match run.status() {
        Ok(status) => format!("status: {status}"),
        Err(error) => format!("no status: {error:#}"),
    };
    Err(error.context(format!("not seen: {missing:?}; {status}")))
}

/// Whether the deed ends all faults of a round. Those on a container that was killed go on with its
/// successor, which may come after the deed.
fn is_ended_by_deed(round: &Round) -> bool {
    DEEDS[round.deed].ends_faults && !round.is_early && !round.kills()
}

/// How long each fault was seen, and that it did not outlive its window, or what ends it in the kernel.
/// What the user asks for, an operator that was killed may hear of when the window is over.
fn judge(
    body: &Body<'_>,
    round: &Round,
    looks: &[Look],
    (applied, due, early): (Instant, Instant, Option<Instant>),
) -> Result<Vec<Seen>> {
    let must = early.filter(|_| is_ended_by_deed(round)).unwrap_or(due);
    let mut all = Vec::new();
    for fault in &round.faults {
        let (_, last) = body.seen(fault, looks, applied);
        let after = |moment: Instant| last.map(|last| last.saturating_duration_since(moment));
        let late = after(must);
        ensure!(
            late.is_none_or(|late| late < BOUND),
            "{fault} outlived its end by {late:?}"
        );
        all.push(Seen {
            kind: fault.kind,
            late: after(early.unwrap_or(due)),
            is_early: early.is_some(),
        });
    }
    Ok(all)
}

/// Fails if what is never a target was hit: the container beside, and the other pod.
fn spares(
    ground: &Ground<'_>,
    body: &Body<'_>,
    round: &Round,
    looks: &[Look],
    applied: Instant,
) -> Result<()> {
    if !round.has(Kind::PodKill) {
        let found = looks.iter().find_map(|look| look.trespasses(&body.before));
        ensure!(found.is_none(), "{}", found.unwrap_or_default());
    }
    if DEEDS[round.deed].spares_traffic {
        ground.other.was_lit(applied)?;
    }
    Ok(())
}

/// A finished run says that all is taken back and clean, at once or, where its agent was away at its end,
/// when that has told; and where nothing was done to it, that it went as it was meant to.
fn is_true(run: &Run<'_>, round: &Round) -> Result<()> {
    for condition in ["Recovered", "Clean"] {
        until(&format!("{condition} known"), SOON, || {
            let (is, reason) = run.condition(condition)?;
            let is_late = is == "Unknown" && reason == "NotReported";
            ensure!(
                is == "True" || (is_late && round.deed != 0),
                "{condition} is {is}/{reason}: {}",
                run.status()?
            );
            Ok((is == "True").then_some(()))
        })?;
    }
    let status = run.status()?;
    let residue = status["cleanup"]["residue"].as_array();
    let is_clean = residue.is_none_or(Vec::is_empty);
    if !is_clean {
        return Err(anyhow!("residue: {status}").context(Broken));
    }
    ensure!(
        round.deed != 0 || status["phase"] != "Failed",
        "nothing was done to it, and it failed: {status}"
    );
    Ok(())
}
