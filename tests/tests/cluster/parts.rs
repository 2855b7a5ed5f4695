//! Taking parts of the cluster down, and seeing them come back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Action, ServiceStatus, Signal};

use super::world::{PORT, World, node_is_ready};

const BOUND: Duration = Duration::from_secs(30);

pub(crate) fn nodes_are_ready(world: &World) -> Result<()> {
    let nodes: Vec<Node> = world.list(&["nodes"])?;
    ensure!(
        nodes.len() == world.cluster.nodes()?.len(),
        "kubectl lists {} nodes",
        nodes.len()
    );
    for node in &nodes {
        ensure!(node_is_ready(node), "not Ready: {node:?}");
        let addresses = node
            .status
            .iter()
            .flat_map(|status| status.addresses.iter().flatten());
        let addresses = addresses
            .filter(|address| address.type_ == "InternalIP")
            .count();
        ensure!(
            addresses == 2,
            "{addresses} addresses of {:?}",
            node.metadata.name
        );
    }
    Ok(())
}

pub(crate) fn service_is_started_again(world: &World) -> Result<()> {
    let node = world.cluster.node("node1")?;
    for service in ["kubelet", "containerd", "proxy"] {
        let before = node_service(world, service)?;
        node.signal(before.pid.context("not running")?, Signal::SIGKILL)?;
        until(&format!("{service} running again"), BOUND, || {
            let now = node_service(world, service)?;
            Ok((now.pid.is_some() && now.starts > before.starts).then_some(()))
        })?;
    }
    world.wait_for_node("node1", true)?;
    world.probes().map(drop)
}

pub(crate) fn service_stays_stopped(world: &World) -> Result<()> {
    let service = world.cluster.node("node2")?.service("kubelet");
    service.act(Action::Stop)?;
    world.wait_for_node("node2", false)?;
    // Its pods go on without it.
    world.probes_on(&["node1".to_owned()])?;
    service.act(Action::Start)?;
    world.wait_for_node("node2", true)?;
    world.probes().map(drop)
}

pub(crate) fn paused_api_server(world: &World) -> Result<()> {
    let server = world.cluster.component("apiserver");
    let ask = || {
        world
            .cluster
            .kubectl(&["get", "--raw", "/readyz", "--request-timeout", "2s"])
    };
    server.act(Action::Pause)?;
    let paused = ask()?;
    server.act(Action::Resume)?;
    ensure!(!paused.status.success(), "a paused API server answered");
    until("an answer", BOUND, || {
        Ok(ask()?.status.success().then_some(()))
    })
}

pub(crate) fn control_plane_restarts(world: &World) -> Result<()> {
    let before = world.probes()?;
    for component in ["etcd", "apiserver", "manager", "scheduler"] {
        world.cluster.component(component).act(Action::Restart)?;
    }
    until("API server ready", BOUND, || {
        Ok(world
            .cluster
            .kubectl(&["get", "--raw", "/readyz"])?
            .status
            .success()
            .then_some(()))
    })?;
    let names = |probes: &[super::world::Probe]| -> Vec<String> {
        probes.iter().map(|probe| probe.name.clone()).collect()
    };
    let after = world.probes()?;
    ensure!(
        names(&before) == names(&after),
        "pods changed: {before:?} {after:?}"
    );
    Ok(())
}

pub(crate) fn cut_node(world: &World) -> Result<()> {
    let node = world.cluster.node("node2")?;
    let probes = world.probes()?;
    node.cut()?;
    let result = world.wait_for_node("node2", false);
    let still_there = node.run(&["cat", "/proc/sys/kernel/hostname"]);
    let from = probes
        .iter()
        .find(|probe| probe.node == "node1")
        .context("no pod on node1")?;
    let to = probes
        .iter()
        .find(|probe| probe.node == "node2")
        .context("no pod on node2")?;
    let reached = world.exec(from, &["get", "tcp4", &format!("{}:{PORT}", to.v4)]);
    node.heal()?;
    result?;
    ensure!(
        still_there?.text()?.trim_end() == "node2",
        "the cut node did not answer"
    );
    ensure!(reached.is_err(), "a pod of the cut node was reached");
    world.wait_for_node("node2", true)?;
    world.probes().map(drop)
}

pub(crate) fn killed_node(world: &World) -> Result<()> {
    let node = world.cluster.node("node2")?;
    let boot = || {
        node.run(&["cat", "/proc/sys/kernel/random/boot_id"])?
            .text()
    };
    let before = boot()?;
    node.kill()?;
    ensure!(!node.is_running()?, "the node is running");
    node.boot()?;
    ensure!(boot()? != before, "the node has not started anew");
    until("pods answer again", Duration::from_mins(2), || {
        let probes = world.probes()?;
        let from = probes
            .iter()
            .find(|probe| probe.node == "node1")
            .context("no pod on node1")?;
        let to = probes
            .iter()
            .find(|probe| probe.node == "node2")
            .context("no pod on node2")?;
        let answer = world.exec(from, &["get", "tcp6", &format!("[{}]:{PORT}", to.v6)]);
        Ok(answer.ok().filter(|answer| *answer == to.name).map(|_| ()))
    })
}

fn node_service(world: &World, name: &str) -> Result<ServiceStatus> {
    let facts = world.cluster.node("node1")?.facts()?;
    let service = facts
        .services
        .into_iter()
        .find(|service| service.name == name);
    service.with_context(|| format!("no service {name}"))
}
