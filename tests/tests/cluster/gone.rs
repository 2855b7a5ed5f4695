//! Nothing of a cluster, or of a lone kernel, stays.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cluster, Options, entry, vm};

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
    let namespaces = namespaces_of(cluster.holder())?;
    let inside = processes_in(&namespaces)?;
    ensure!(
        inside.len() > 6,
        "only {inside:?} are in the cluster's namespaces"
    );
    kill(Pid::from_raw(cluster.holder()), Signal::SIGKILL).context("kill the holder")?;
    // What this value holds keeps the network namespace, and the holder a zombie.
    drop(cluster);
    is_gone(world, &name, &before, || processes_in(&namespaces))
}

/// Waits until no process of a cluster is left, and fails if anything else is.
fn is_gone(
    world: &World,
    name: &str,
    before: &[Vec<String>; 3],
    left: impl Fn() -> Result<Vec<i32>>,
) -> Result<()> {
    until("the end of all processes", Duration::from_secs(10), || {
        Ok(left()?.is_empty().then_some(()))
    })?;
    ensure!(
        world.cluster.beside(|| Cluster::find(name))?.is_none(),
        "the name is still taken"
    );
    let after = machine()?;
    ensure!(
        *before == after,
        "the machine was {before:?} and is {after:?}"
    );
    Ok(())
}

/// By when who starts a cluster has started its holder, with all parts cached.
const HOLDER: Duration = Duration::from_secs(20);
/// Steps of a start, by the words that `lab up` tells them with once they are over; none is when it has
/// started a process, and nothing is known of that yet.
const MOMENTS: [Option<&str>; 5] = [
    None,
    Some("network"),
    Some("node disks"),
    Some("API server"),
    Some("nodes Ready"),
];

/// `lab up` is killed in the middle of a start, at several moments.
pub(crate) fn nothing_is_left_of_a_start(world: &World) -> Result<()> {
    let before = machine()?;
    for (number, moment) in MOMENTS.into_iter().enumerate() {
        let name = format!("start-{number}-{}", std::process::id());
        let until = || format!("a start until {moment:?}");
        let namespaces = killed_start(world, &name, moment).with_context(until)?;
        let left = || Ok([processes_in(&namespaces)?, processes_for(&name)?].concat());
        is_gone(world, &name, &before, left).with_context(until)?;
    }
    Ok(())
}

/// Starts a cluster, and kills who starts it once a step is over; the namespaces that there were then.
fn killed_start(world: &World, name: &str, moment: Option<&str>) -> Result<Vec<String>> {
    let mut starter = world.cluster.beside(|| {
        Command::new(entry::lab_program()?)
            .args(["--name", name, "up", "--nodes", "1"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("run lab")
    })?;
    let seen = starter.stdout.take().context("no output").and_then(|told| {
        let Some(moment) = moment else {
            let has_child = || Ok((processes_for(name)?.len() > 1).then(Vec::new));
            return until("a process that it starts", HOLDER, has_child);
        };
        let mut lines = BufReader::new(told).lines();
        let reached = lines.find(|line| line.as_ref().is_ok_and(|line| line.ends_with(moment)));
        reached.context("it was never reached")??;
        let cluster = world.cluster.beside(|| Cluster::find(name))?;
        namespaces_of(cluster.context("no cluster")?.holder())
    });
    starter.kill().context("kill the starter")?;
    starter.wait().context("wait for the starter")?;
    seen
}

/// The namespaces that a holder's processes are in.
fn namespaces_of(holder: i32) -> Result<Vec<String>> {
    let found = NAMESPACES
        .iter()
        .map(|kind| namespace_of(&holder.to_string(), kind).context("no namespace"));
    found.collect()
}

/// The processes that have the name of a cluster among their arguments.
fn processes_for(name: &str) -> Result<Vec<i32>> {
    let found = processes()?.into_iter().filter(|pid| {
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline"));
        arguments.is_ok_and(|arguments| arguments.contains(name))
    });
    Ok(found.collect())
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
    let is_inside = |pid: &i32| {
        let mut kinds = NAMESPACES.iter().zip(namespaces);
        kinds.any(|(kind, namespace)| {
            namespace_of(&pid.to_string(), kind).as_ref() == Some(namespace)
        })
    };
    Ok(processes()?.into_iter().filter(is_inside).collect())
}

fn processes() -> Result<Vec<i32>> {
    let entries = fs::read_dir("/proc").context("list processes")?.flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers.collect())
}
