//! Deeds: what is killed, stopped or cut off while faults act on a node.

use std::time::{Duration, Instant};

use anyhow::Result;
use windtunnel_tests::cluster::poll::{reach, until};
use windtunnel_tests::cluster::{Action, Signal};

use crate::product::scene::{SOON, Stopped};
use crate::product::stage::Stage;

/// How long parts are away that are stopped or cut off.
const AWAY: Duration = Duration::from_secs(5);

/// What is done to a node, or to the cluster.
pub(super) struct Deed {
    pub(super) name: &'static str,
    /// Whether traffic of every pod of the node goes on meanwhile.
    pub(super) spares_traffic: bool,
    /// Whether it ends the faults that are in place.
    pub(super) ends_faults: bool,
    pub(super) act: Act,
}

type Act = fn(&Stage, &str) -> Result<()>;

const fn deed(name: &'static str, act: Act) -> Deed {
    Deed {
        name,
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
    end("kill the injectors", |stage, node| {
        injectors(stage, node, Signal::SIGKILL)
    }),
    end("stop the injectors", |stage, node| {
        injectors(stage, node, Signal::SIGSTOP)
    }),
    end("kill the agent", kill_agent),
    end("stop the agent", stop_agent),
    end("kill agent and injectors", |stage, node| {
        injectors(stage, node, Signal::SIGKILL)?;
        kill_agent(stage, node)
    }),
    end("delete the agent's pod", delete_agent),
    // Which node's turn it is, is not told.
    deed("replace every agent and operator", |stage, _| {
        stage.windtunnel.replace_all()
    }),
    deed("kill the leading operator", kill_leader),
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
        ..deed("cut the node off", cut)
    },
    deed("kill kubelet", |stage, node| {
        service(stage, node, "kubelet")
    }),
    deed("kill containerd", |stage, node| {
        service(stage, node, "containerd")
    }),
];

fn injectors(stage: &Stage, node: &str, signal: Signal) -> Result<()> {
    for pid in stage.injectors(node)? {
        stage.cluster.node(node)?.signal(pid, signal)?;
    }
    Ok(())
}

fn kill_agent(stage: &Stage, node: &str) -> Result<()> {
    let agent = stage.agent(node)?;
    stage.cluster.node(node)?.signal(agent, Signal::SIGKILL)
}

fn stop_agent(stage: &Stage, node: &str) -> Result<()> {
    let still = Stopped::agent(stage, node)?;
    reach(Instant::now() + AWAY);
    still.resume()
}

fn delete_agent(stage: &Stage, node: &str) -> Result<()> {
    stage.windtunnel.remove(&stage.windtunnel.agent_on(node)?)
}

fn kill_leader(stage: &Stage, _: &str) -> Result<()> {
    let Some(leader) = stage.windtunnel.leader()? else {
        return Ok(());
    };
    stage.windtunnel.remove(&leader)
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

fn cut(stage: &Stage, node: &str) -> Result<()> {
    let node = stage.cluster.node(node)?;
    node.cut()?;
    reach(Instant::now() + AWAY);
    node.heal()
}

fn service(stage: &Stage, node: &str, name: &'static str) -> Result<()> {
    let node = stage.cluster.node(node)?;
    node.service(name).act(Action::Kill)?;
    node.service(name).act(Action::Start)
}
