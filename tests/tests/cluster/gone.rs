//! Nothing of a cluster, or of a lone kernel, stays.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cluster, Options, vm};

use super::world::World;

const NAMESPACES: [&str; 3] = ["net", "mnt", "pid"];

pub(crate) fn nothing_is_left(world: &World) -> Result<()> {
    let before = machine()?;
    let name = format!("gone-{}", std::process::id());
    let options = Options {
        name: name.clone(),
        nodes: 1,
        is_detached: false,
    };
    // The control socket is in the machine's network, where this process came from.
    let cluster = world.cluster.beside(|| Cluster::start(&options))?;
    let namespaces = NAMESPACES
        .iter()
        .map(|kind| namespace_of(&cluster.holder().to_string(), kind).context("no namespace"))
        .collect::<Result<Vec<_>>>()?;
    let inside = processes_in(&namespaces)?;
    ensure!(
        inside.len() > 6,
        "only {inside:?} are in the cluster's namespaces"
    );
    kill(Pid::from_raw(cluster.holder()), Signal::SIGKILL).context("kill the holder")?;
    // What this value holds keeps the network namespace, and the holder a zombie.
    drop(cluster);
    until("the end of all processes", Duration::from_secs(10), || {
        Ok(processes_in(&namespaces)?.is_empty().then_some(()))
    })?;
    ensure!(
        world.cluster.beside(|| Cluster::find(&name))?.is_none(),
        "the name is still taken"
    );
    let after = machine()?;
    ensure!(
        before == after,
        "the machine was {before:?} and is {after:?}"
    );
    Ok(())
}

pub(crate) fn lone_kernel(_: &World) -> Result<()> {
    let script = "test -n \"$WINDTUNNEL_VM\" && tc qdisc add dev lo root netem delay 1ms \
                  && test -d /mnt/ext4/lost+found && exit 7";
    let status = vm::run(&["sh", "-c", script])?;
    ensure!(status.code() == Some(7), "{status}");
    Ok(())
}

/// What a cluster could leave on the machine.
fn machine() -> Result<[Vec<String>; 3]> {
    let list = |path: &str| -> Result<Vec<String>> {
        let entries = fs::read_dir(path).with_context(|| format!("list {path}"))?;
        let mut names: Vec<String> = entries
            .flatten()
            .map(|entry| entry.path().display().to_string())
            .collect();
        names.sort();
        Ok(names)
    };
    let mounts = fs::read_to_string("/proc/self/mounts").context("read the mounts")?;
    Ok([
        list("/run")?,
        list("/dev/shm")?,
        mounts.lines().map(str::to_owned).collect(),
    ])
}

fn namespace_of(process: &str, kind: &str) -> Option<String> {
    // The holder itself stays in the outer pid namespace; its children are in the inner one.
    let kind = if kind == "pid" {
        "pid_for_children"
    } else {
        kind
    };
    let link = fs::read_link(format!("/proc/{process}/ns/{kind}")).ok()?;
    Some(link.display().to_string())
}

fn processes_in(namespaces: &[String]) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("list processes")?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let is_inside = NAMESPACES.iter().zip(namespaces).any(|(kind, namespace)| {
            namespace_of(&format!("{pid}"), kind).as_ref() == Some(namespace)
        });
        if is_inside {
            found.push(pid);
        }
    }
    Ok(found)
}
