//! Five faults against a real database and its clients: each effect in its window and not outside
//! of it, all taken back when the agents are killed in the middle, and the database intact.

use std::ops::Range;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::product::{Database, Run, Second};

use super::measure::median;
use super::scene::{SOON, agent_is_ready};
use super::stage::{Pod, Space, Stage, Test, counter};

/// Tests that kill agents.
pub(crate) const ROUGH: &[Test] = &[("five_faults_on_a_database", five_faults_on_a_database)];

const EXAMPLE: &str = include_str!("../../../examples/five-faults.yaml");
/// How long the run of the example may take, all in all.
const OVER: Duration = Duration::from_mins(2);
/// Between two looks at counters.
const PACE: Duration = Duration::from_secs(2);
/// The least that the delay adds, in milliseconds.
const ADDED: f64 = 1300.0;
/// How much slower the machine may be at one time than at another, in milliseconds.
const SLACK: f64 = 300.0;

/// Everything at once, but what kills pods, which comes when the agents are long dead.
const ALL_AT_ONCE: &str = "
duration: 45s
faults:
- name: slow-link
  target: {selector: {matchLabels: {app: reader}}}
  network: {delay: {latency: 1500ms}, direction: Egress, peers: {services: [{name: db}]}}
- name: lossy-link
  target: {selector: {matchLabels: {app: reader}}}
  network: {loss: {percent: 20}, direction: Ingress, peers: {services: [{name: db}]}}
- name: disk-hangs
  target: {selector: {matchLabels: {app: db}}, containers: [postgres]}
  io: {volume: /data, hang: {}}
- name: busy
  target: {selector: {matchLabels: {app: db}}, containers: [postgres]}
  cpu: {load: 100}
- name: half-down
  startAfter: 40s
  target: {selector: {matchLabels: {app: reader}}, percent: 50}
  podKill: {gracePeriod: 1s}
";

/// Counters at a moment.
struct Look {
    at: f64,
    /// Segments that the readers have sent again; none where one of them is gone.
    resent: Option<u64>,
    /// CPU time of the database, in seconds.
    cpu: f64,
}

fn five_faults_on_a_database(stage: &Stage) -> Result<()> {
    let space = stage.space("five_faults_on_a_database")?;
    let database = Database::install(stage.cluster, &space.name)?;
    each_in_its_window(&space, &database)?;
    database.is_intact()?;
    all_end_with_the_agents(&space, &database)?;
    database.is_intact()
}

fn each_in_its_window(space: &Space<'_>, database: &Database<'_>) -> Result<()> {
    let spec = EXAMPLE.split_once("\nspec:\n").context("no spec")?.1;
    let spec = spec.replace("\n  ", "\n");
    let readers = space.ready_with("reader")?;
    let eyes = Eyes::open(space, &readers)?;
    let run = space.run("five-faults", spec.trim_start())?;
    let mut looks = Vec::new();
    let begun = Instant::now();
    let status = loop {
        looks.push(eyes.look()?);
        let status = run.status()?;
        if !status["endTime"].is_null() {
            break status;
        }
        ensure!(begun.elapsed() < OVER, "it does not end: {status}");
        reach(begun + PACE * u32::try_from(looks.len())?);
    };
    let start = since_1970(&status["startTime"])?;
    let now = space.ready_with("reader")?;
    let survivors: Vec<&Pod> = readers.iter().filter(|r| now.contains(r)).collect();
    ensure!(survivors.len() == 1, "of {readers:?} there are {now:?}");
    let window = |from: f64, to: f64| start + from..start + to;
    links(&database.seen_by(&survivors[0].name)?, &looks, window)?;
    disk(database, window)?;
    let busy = spent(&looks, window(51.0, 59.0))?;
    let usual = spent(&looks, window(-5.0, 5.0))?;
    // The database itself takes a good part of it on a slow node, and is throttled with the burner.
    ensure!(
        busy > usual + 0.04,
        "of 0.4 cores {busy:.2} are used in the window and {usual:.2} before"
    );
    is_true(&run, &status)
}

/// The links are slow in one window, lossy in another, and well before and after.
fn links(seen: &[Second], looks: &[Look], window: impl Fn(f64, f64) -> Range<f64>) -> Result<()> {
    // A loaded machine makes all of it slower, with the fault and without.
    let slow = took(seen, window(8.0, 20.0));
    ensure!(
        slow.len() > 1 && slow.iter().all(|millis| *millis > ADDED),
        "1.5 s with a jitter of 0.2 s is asked for: {slow:?}"
    );
    for (what, range) in [("before", window(-5.0, 5.0)), ("after", window(37.0, 49.0))] {
        let usual = took(seen, range);
        ensure!(
            !usual.is_empty() && median(&usual) + ADDED < median(&slow) + SLACK,
            "{what} the faults: {usual:?}; in the window: {slow:?}"
        );
    }
    let lossy = resent(looks, window(21.0, 35.0))?;
    let usual = resent(looks, window(37.0, 50.0))?;
    ensure!(
        lossy > usual + 0.15,
        "segments sent again in a second: {lossy:.2} in the window, {usual:.2} after it"
    );
    Ok(())
}

/// Nobody new is let in while the disk hangs, but before and after.
fn disk(database: &Database<'_>, window: impl Fn(f64, f64) -> Range<f64>) -> Result<()> {
    // What was let in just before may still be written.
    let [before, hung, after] = [(20.0, 40.0), (43.0, 48.0), (48.0, 70.0)]
        .map(|(from, to)| database.written(&window(from, to)));
    let (before, hung, after) = (before?, hung?, after?);
    ensure!(
        before > 0 && hung == 0 && after > 0,
        "transactions: {before} before, {hung} while the disk hangs, {after} after"
    );
    Ok(())
}

/// All at once, and then the agents die.
fn all_end_with_the_agents(space: &Space<'_>, database: &Database<'_>) -> Result<()> {
    let stage = space.stage;
    let reader = space.ready_with("reader")?.pop().context("no reader")?;
    let run = space.run("killed", ALL_AT_ONCE)?;
    run.wait("Injected", SOON)?;
    let injected = now();
    until("slow reads", SOON * 2, || {
        let slow = took(&database.seen_by(&reader.name)?, injected..f64::MAX);
        Ok(slow
            .last()
            .is_some_and(|millis| *millis > 1300.0)
            .then_some(()))
    })?;
    // The first of them may take the hang along while the second is still looked for.
    let killing = now();
    for node in ["node1", "node2"] {
        let agent = stage.agent(node)?;
        stage.cluster.node(node)?.signal(agent, Signal::SIGKILL)?;
    }
    let killed = now();
    until("reads as usual and writes again", SOON * 2, || {
        let quick = took(&database.seen_by(&reader.name)?, killed + 2.0..f64::MAX);
        let is_usual = quick.last().is_some_and(|millis| *millis < ADDED);
        Ok((is_usual && database.written(&(killed..killed + 3600.0))? > 0).then_some(()))
    })?;
    let hung = database.written(&(injected + 1.0..killing))?;
    ensure!(hung == 0, "{hung} transactions while the disk hung");
    for node in ["node1", "node2"] {
        agent_is_ready(stage, node)?;
    }
    run.wait("Finished", OVER)?;
    let status = run.status()?;
    for (fault, interrupted) in [
        ("slow-link", 2),
        ("lossy-link", 2),
        ("disk-hangs", 1),
        ("busy", 1),
    ] {
        let found = fault_of(&status, fault)?;
        ensure!(
            found["injected"] == interrupted && found["interrupted"] == interrupted,
            "{fault}: {status}"
        );
    }
    ensure!(
        fault_of(&status, "half-down")?["injected"] == 1 && status["phase"] == "Failed",
        "status: {status}"
    );
    for condition in ["Recovered", "Clean"] {
        ensure!(
            run.condition(condition)?.0 == "True",
            "{condition}: {status}"
        );
    }
    Ok(())
}

/// What the status says is what was measured.
fn is_true(run: &Run<'_>, status: &Value) -> Result<()> {
    ensure!(status["phase"] == "Completed", "status: {status}");
    ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
    for (fault, effect) in [
        ("slow-link", "matchedPackets"),
        ("lossy-link", "matchedPackets"),
        ("disk-hangs", "hit"),
        ("busy", "cpuMilliseconds"),
    ] {
        let found = fault_of(status, fault)?;
        let count = found["effect"][effect].as_i64().or(found[effect].as_i64());
        ensure!(
            count > Some(0) && found["recovered"] == found["injected"],
            "{fault}: {found}"
        );
    }
    ensure!(
        fault_of(status, "half-down")?["recovered"] == 1,
        "status: {status}"
    );
    Ok(())
}

fn fault_of<'a>(status: &'a Value, name: &str) -> Result<&'a Value> {
    let mut faults = status["faults"].as_array().into_iter().flatten();
    let found = faults.find(|fault| fault["name"] == name);
    found.with_context(|| format!("no fault {name} in {status}"))
}

/// What transactions took, in the seconds of a window in which some ended.
fn took(seen: &[Second], window: Range<f64>) -> Vec<f64> {
    let seconds = seen.iter().filter(|second| window.contains(&second.at));
    let busy = seconds.filter(|second| second.transactions > 0.0);
    busy.map(|second| second.millis).collect()
}

/// Where the counters are.
struct Eyes<'a> {
    stage: &'a Stage,
    node: String,
    /// The readers' first processes, each in its network namespace.
    readers: Vec<i32>,
    db: Pod,
    cpu: String,
}

impl<'a> Eyes<'a> {
    fn open(space: &Space<'a>, readers: &[Pod]) -> Result<Self> {
        let stage = space.stage;
        let db = space.ready("db-0")?;
        let find = format!(
            "ls /sys/fs/cgroup/kubepods*/pod{0}/cpu.stat /sys/fs/cgroup/kubepods*/*/pod{0}/cpu.stat 2>/dev/null || true",
            db.uid
        );
        let cpu = stage.cluster.node(&db.node)?.run(&["sh", "-c", &find])?;
        Ok(Self {
            stage,
            node: readers.first().context("no reader")?.node.clone(),
            readers: readers
                .iter()
                .map(|pod| stage.pid(pod))
                .collect::<Result<_>>()?,
            cpu: cpu.text()?.trim().to_owned(),
            db,
        })
    }

    fn look(&self) -> Result<Look> {
        let node = self.stage.cluster.node(&self.node)?;
        let resent = self.readers.iter().map(|pid| {
            // One that was killed has no counters.
            let text = node
                .run(&["cat", &format!("/proc/{pid}/net/snmp")])?
                .text()?;
            counter(&text, "Tcp RetransSegs").context("no counter")
        });
        let resent = resent.sum::<Result<u64>>().ok();
        let node = self.stage.cluster.node(&self.db.node)?;
        let text = node.run(&["cat", &self.cpu])?.text()?;
        let micros = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "));
        let micros: f64 = micros.context("no CPU time of the database")?.parse()?;
        Ok(Look {
            resent,
            cpu: micros / 1e6,
            at: now(),
        })
    }
}

/// How fast something grew in a window, in a second.
fn growth(looks: &[Look], window: Range<f64>, of: impl Fn(&Look) -> Option<f64>) -> Result<f64> {
    let mut inside = looks.iter().filter(|look| window.contains(&look.at));
    let first = inside.next().context("no look in a window")?;
    let last = inside.next_back().context("one look in a window")?;
    let (before, after) = (of(first), of(last));
    let grown = before.zip(after).map(|(before, after)| after - before);
    Ok(grown.context("no counters in a window")? / (last.at - first.at))
}

fn resent(looks: &[Look], window: Range<f64>) -> Result<f64> {
    growth(looks, window, |look| look.resent.map(|count| count as f64))
}

fn spent(looks: &[Look], window: Range<f64>) -> Result<f64> {
    growth(looks, window, |look| Some(look.cpu))
}

fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

fn since_1970(time: &Value) -> Result<f64> {
    let time: jiff::Timestamp = time.as_str().context("no time")?.parse()?;
    Ok(time.as_duration().as_secs_f64())
}
