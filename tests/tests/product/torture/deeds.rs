//! Deeds: what is killed, stopped or cut off while faults act on a node.

use std::time::{Duration, Instant};

use anyhow::Result;
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::cluster::{Action, Signal};

use super::body::Body;
use crate::product::disk::NODE;
use crate::product::scene::{SOON, Stopped};
use crate::product::stage::Stage;

/// How long parts are away that are stopped or cut off.
const AWAY: Duration = Duration::from_secs(5);
/// Longer than the operator's lease (15 s): another replica leads before the one that stood still goes on.
const DEPOSED: Duration = Duration::from_secs(18);

/// What is done to the target, its node, or the cluster.
pub(super) struct Deed {
    pub(super) name: &'static str,
    /// Whether the target's container ends by it, and starts again.
    pub(super) kills_target: bool,
    /// Whether traffic of every pod of the node goes on meanwhile.
    pub(super) spares_traffic: bool,
    /// Whether it ends the faults that are in place.
    pub(super) ends_faults: bool,
    pub(super) act: Act,
}

type Act = fn(&Stage, &Body<'_>) -> Result<()>;

const fn deed(name: &'static str, act: Act) -> Deed {
    Deed {
        name,
        kills_target: false,
        spares_traffic: true,
        ends_faults: false,
        act,
    }
}

const fn end(name: &'static str, act: Act) -> Deed {
    Deed {
        ends_faults: true,
        ..deed(name, act)
    }
}

/// All of them; the first is none.
pub(super) const DEEDS: &[Deed] = &[
    deed("nothing", |_, _| Ok(())),
    end("kill the injectors", |stage, _| {
        injectors(stage, Signal::SIGKILL)
    }),
    end("stop the injectors", |stage, _| {
        injectors(stage, Signal::SIGSTOP)
    }),
    end("kill the agent", |stage, _| kill_agent(stage)),
    end("stop the agent", |stage, _| stop_agent(stage)),
    end("kill agent and injectors", |stage, _| {
        injectors(stage, Signal::SIGKILL)?;
        kill_agent(stage)
    }),
    end("delete the agent's pod", |stage, _| {
        stage.windtunnel.remove(&stage.windtunnel.agent_on(NODE)?)
    }),
    // Which node's turn it is, is not told.
    deed("replace every agent and operator", |stage, _| {
        stage.windtunnel.replace_all()
    }),
    deed("kill the leading operator", |stage, _| {
        with_leader(stage, |leader| stage.windtunnel.remove(leader))
    }),
    deed("stop the leading operator", |stage, _| {
        with_leader(stage, |leader| {
            let still = Stopped::operator(stage, leader)?;
            reach(Instant::now() + DEPOSED);
            drop(still);
            Ok(())
        })
    }),
    deed("stop the API server for a moment", |stage, _| {
        component(stage, "apiserver", Action::Pause, Action::Resume)
    }),
    deed("kill the API server", |stage, _| {
        component(stage, "apiserver", Action::Kill, Action::Start)
    }),
    deed("kill etcd", |stage, _| {
        component(stage, "etcd", Action::Kill, Action::Start)
    }),
    Deed {
        spares_traffic: false,
        ..deed("cut the node off", |stage, _| cut(stage))
    },
    deed("kill kubelet", |stage, _| kill_service(stage, "kubelet")),
    deed("stop kubelet", |stage, _| stop_service(stage, "kubelet")),
    deed("kill containerd", |stage, _| {
        kill_service(stage, "containerd")
    }),
    deed("stop containerd", |stage, _| {
        stop_service(stage, "containerd")
    }),
    Deed {
        kills_target: true,
        ..deed("kill the target", |stage, body| {
            signal_target(stage, body, Signal::SIGKILL).map(drop)
        })
    },
    deed("stop the target", stop_target),
];

fn injectors(stage: &Stage, signal: Signal) -> Result<()> {
    for pid in stage.injectors(NODE)? {
        stage.cluster.node(NODE)?.signal(pid, signal)?;
    }
    Ok(())
}

fn kill_agent(stage: &Stage) -> Result<()> {
    let agent = stage.agent(NODE)?;
    stage.cluster.node(NODE)?.signal(agent, Signal::SIGKILL)
}

fn stop_agent(stage: &Stage) -> Result<()> {
    let still = Stopped::agent(stage, NODE)?;
    reach(Instant::now() + AWAY);
    still.resume()
}

/// Does nothing where nobody leads.
fn with_leader(stage: &Stage, act: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let leader = stage.windtunnel.leader()?;
    leader.map_or(Ok(()), |leader| act(&leader))
}

/// False where its container is just away.
fn signal_target(stage: &Stage, body: &Body<'_>, signal: Signal) -> Result<bool> {
    let Some(pid) = body.eye.look(&[])?.app() else {
        return Ok(false);
    };
    match stage.cluster.node(NODE)?.signal(pid, signal) {
        // A kill that is one of the faults may have come before.
        Err(error) if body.eye.look(&[])?.app() == Some(pid) => Err(error),
        _ => Ok(true),
    }
}

fn stop_target(stage: &Stage, body: &Body<'_>) -> Result<()> {
    if signal_target(stage, body, Signal::SIGSTOP)? {
        reach(Instant::now() + AWAY);
        // Its successor, where it was killed meanwhile, is not hurt by it.
        signal_target(stage, body, Signal::SIGCONT)?;
    }
    Ok(())
}

/// A part of the control plane is away, and everybody is let in again.
fn component(stage: &Stage, name: &'static str, away: Action, back: Action) -> Result<()> {
    stage.cluster.component(name).act(away)?;
    reach(Instant::now() + AWAY);
    stage.cluster.component(name).act(back)?;
    until("an API server that answers", SOON * 2, || {
        Ok(stage.cluster.get(&["namespace", "default"]).ok().map(drop))
    })
}

fn cut(stage: &Stage) -> Result<()> {
    let node = stage.cluster.node(NODE)?;
    node.cut()?;
    reach(Instant::now() + AWAY);
    node.heal()
}

fn kill_service(stage: &Stage, name: &'static str) -> Result<()> {
    let node = stage.cluster.node(NODE)?;
    node.service(name).act(Action::Kill)?;
    node.service(name).act(Action::Start)
}

fn stop_service(stage: &Stage, name: &'static str) -> Result<()> {
    let node = stage.cluster.node(NODE)?;
    node.service(name).act(Action::Pause)?;
    reach(Instant::now() + AWAY);
    node.service(name).act(Action::Resume)
}
