//! Torture: runs back to back, and in each something is killed, stopped or cut off at a moment of
//! chance. After each the traffic is normal within the bound, the kernel's state is as before, and
//! the status is true. `WINDTUNNEL_TORTURE_ROUNDS` says how many rounds, `WINDTUNNEL_TORTURE_SEED`
//! where chance begins.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::cluster::{Action, Signal};
use windtunnel_tests::product::Run;

use super::scene::{SOON, Scene, Stopped, agent_is_ready};
use super::stage::{Stage, Test};

pub(crate) const ROUGH: &[Test] = &[("torture_leaves_nothing", torture_leaves_nothing)];

/// Rounds where nothing else is asked for.
const ROUNDS: u64 = 8;
/// How long each run lasts.
const WINDOW: Duration = Duration::from_secs(8);
/// By when after its window a fault must be gone, whatever was done: the longest lease, and a
/// loaded machine's patience.
const BOUND: Duration = Duration::from_secs(8);
/// How long a run may take to its end: the grace of the control plane, its bounds, and patience.
const END: Duration = Duration::from_mins(2);
/// How long parts are away that are stopped or cut off.
const AWAY: Duration = Duration::from_secs(5);

type Deed = (&'static str, fn(&Scene<'_>) -> Result<()>);

const DEEDS: &[Deed] = &[
    ("nothing", |_| Ok(())),
    ("kill the injectors", |s| injectors(s, Signal::SIGKILL)),
    ("stop the injectors", |s| injectors(s, Signal::SIGSTOP)),
    ("kill the agent", kill_agent),
    ("stop the agent", stop_agent),
    ("kill agent and injectors", |s| {
        injectors(s, Signal::SIGKILL)?;
        kill_agent(s)
    }),
    ("delete the agent's pod", delete_agent),
    ("kill the leading operator", kill_leader),
    ("stop the API server for a moment", |s| {
        component(s, "apiserver", Action::Pause, Action::Resume)
    }),
    ("kill the API server", |s| {
        component(s, "apiserver", Action::Kill, Action::Start)
    }),
    ("kill etcd", |s| {
        component(s, "etcd", Action::Kill, Action::Start)
    }),
    ("cut the node off", cut),
    ("kill kubelet", |s| service(s, "kubelet")),
    ("kill containerd", |s| service(s, "containerd")),
];

/// Rounds of chance, all on one pod.
fn torture_leaves_nothing(stage: &Stage) -> Result<()> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let rounds = number("WINDTUNNEL_TORTURE_ROUNDS").unwrap_or(ROUNDS);
    let seed = number("WINDTUNNEL_TORTURE_SEED").unwrap_or(u64::from(std::process::id()));
    let scene = Scene::set(stage, "torture_leaves_nothing", "node2")?;
    let mut chance = Chance(seed);
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let deed = DEEDS[chance.below(DEEDS.len())];
        let is_early = chance.below(4) == 0;
        let end = chance.below(6);
        let told = format!(
            "seed {seed}, round {round}: {}{}{}",
            deed.0,
            if is_early { " at once" } else { "" },
            ["", "", "", "", ", abort", ", delete"][end]
        );
        let over = play(&scene, &format!("round-{round}"), deed, (is_early, end))
            .with_context(|| told.clone())?;
        slowest = slowest.max(over);
        writeln!(
            io::stderr(),
            "{told}: gone {:.1} s after the window or the deed",
            over.as_secs_f64()
        )?;
    }
    writeln!(
        io::stderr(),
        "{rounds} rounds, slowest {:.1} s",
        slowest.as_secs_f64()
    )?;
    Ok(())
}

/// One run and one deed; how long after the window the effect was seen last.
fn play(
    scene: &Scene<'_>,
    name: &str,
    deed: Deed,
    (is_early, end): (bool, usize),
) -> Result<Duration> {
    let stage = scene.space.stage;
    let applied = Instant::now();
    let run = scene.silence(name, &format!("{}s", WINDOW.as_secs()), "0s")?;
    if !is_early {
        scene.lamp.goes_out(applied, SOON)?;
    }
    deed.1(scene)?;
    match end {
        4 => run.abort()?,
        5 => run.delete(END)?,
        _ => {}
    }
    agent_is_ready(stage, &scene.echo.node)?;
    if end == 5 {
        return settled(scene, applied);
    }
    run.wait("Finished", END)?;
    let over = settled(scene, applied)?;
    is_true(&run)?;
    run.delete(END)?;
    Ok(over)
}

/// Waits until the effect is gone for good, and says how long after its window that was.
fn settled(scene: &Scene<'_>, applied: Instant) -> Result<Duration> {
    let (first, last) = scene.lamp.dark(applied);
    let late = match (first, last) {
        (Some(first), Some(last)) => last.duration_since(first).saturating_sub(WINDOW),
        _ => Duration::ZERO,
    };
    ensure!(late < BOUND, "the effect outlived its window by {late:?}");
    let since = Instant::now();
    scene.lamp.comes_back(since, BOUND)?;
    scene.lamp.was_lit(since)?;
    scene.has_its_network()?;
    let left = scene.space.stage.injectors(&scene.echo.node)?;
    ensure!(left.is_empty(), "injectors are left: {left:?}");
    Ok(late)
}

/// A finished run says that all is taken back and clean, or that nobody could look.
fn is_true(run: &Run<'_>) -> Result<()> {
    let status = run.status()?;
    for condition in ["Recovered", "Clean"] {
        let (is, reason) = run.condition(condition)?;
        ensure!(
            is == "True" || (is == "Unknown" && reason == "NotReported"),
            "{condition} is {is}/{reason}: {status}"
        );
    }
    let residue = status["cleanup"]["residue"].as_array();
    ensure!(residue.is_none_or(Vec::is_empty), "residue: {status}");
    Ok(())
}

fn injectors(scene: &Scene<'_>, signal: Signal) -> Result<()> {
    let node = scene.space.stage.cluster.node(&scene.echo.node)?;
    for pid in scene.space.stage.injectors(&scene.echo.node)? {
        node.signal(pid, signal)?;
    }
    Ok(())
}

fn kill_agent(scene: &Scene<'_>) -> Result<()> {
    let (stage, node) = (scene.space.stage, &scene.echo.node);
    stage
        .cluster
        .node(node)?
        .signal(stage.agent(node)?, Signal::SIGKILL)
}

fn stop_agent(scene: &Scene<'_>) -> Result<()> {
    let still = Stopped::agent(scene.space.stage, &scene.echo.node)?;
    reach(Instant::now() + AWAY);
    still.resume()
}

fn delete_agent(scene: &Scene<'_>) -> Result<()> {
    let stage = scene.space.stage;
    let pod = stage.windtunnel.agent_on(&scene.echo.node)?;
    stage.windtunnel.remove(&pod)
}

fn kill_leader(scene: &Scene<'_>) -> Result<()> {
    let stage = scene.space.stage;
    let Some(leader) = stage.windtunnel.leader()? else {
        return Ok(());
    };
    stage.windtunnel.remove(&leader)
}

/// A part of the control plane is away, and everybody is let in again.
fn component(scene: &Scene<'_>, name: &'static str, away: Action, back: Action) -> Result<()> {
    let stage = scene.space.stage;
    stage.cluster.component(name).act(away)?;
    reach(Instant::now() + AWAY);
    stage.cluster.component(name).act(back)?;
    until("an API server that answers", SOON * 2, || {
        Ok(stage.cluster.get(&["namespace", "default"]).ok().map(drop))
    })
}

fn cut(scene: &Scene<'_>) -> Result<()> {
    let node = scene.space.stage.cluster.node(&scene.echo.node)?;
    node.cut()?;
    reach(Instant::now() + AWAY);
    node.heal()
}

fn service(scene: &Scene<'_>, name: &'static str) -> Result<()> {
    let node = scene.space.stage.cluster.node(&scene.echo.node)?;
    node.service(name).act(Action::Kill)?;
    node.service(name).act(Action::Start)
}

/// Numbers of chance from a seed (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}
