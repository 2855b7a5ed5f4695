//! `lab up`, `down`, `status`, `build`.

use std::time::Instant;

use anyhow::{Context, Result};
use windtunnel_tests::cluster::{Cache, Cluster, Options, Phase, ServiceStatus, build, launch};

use crate::print;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Build what is missing and start a cluster; it runs until `lab down`
    Up {
        /// How many nodes
        #[arg(long, default_value_t = 2)]
        nodes: u8,
    },
    /// End a cluster; nothing of it stays
    Down,
    /// Say how a cluster is
    Status,
    /// Build all parts of a cluster, and what tests run on it, and start none
    Build,
}

pub(crate) fn run(name: &str, command: &Command) -> Result<()> {
    match command {
        Command::Up { nodes } => up(name, *nodes),
        Command::Down => {
            let cluster =
                Cluster::find(name)?.with_context(|| format!("no cluster {name:?} is running"))?;
            cluster.stop()
        }
        Command::Status => status(name),
        Command::Build => {
            let cache = Cache::open()?;
            let parts = build::all(&cache)?;
            for part in [
                &parts.kernel,
                &parts.kubernetes,
                &parts.helm,
                &parts.images,
                &parts.probe,
                &build::postgres(&cache)?,
            ] {
                print::line(&part.display().to_string());
            }
            Ok(())
        }
    }
}

fn up(name: &str, nodes: u8) -> Result<()> {
    let start = Instant::now();
    let options = Options {
        name: name.to_owned(),
        nodes,
        is_detached: true,
    };
    launch(&options, |step| {
        print::line(&format!("{:6.1} s  {}", step.seconds, step.name));
    })?;
    let seconds = start.elapsed().as_secs_f64();
    print::line(&format!(
        "{seconds:6.1} s  cluster {name:?} is up: cargo lab kubectl get pods -A"
    ));
    Ok(())
}

fn status(name: &str) -> Result<()> {
    let Some(cluster) = Cluster::find(name)? else {
        print::line(&format!("cluster {name:?} is not running"));
        return Ok(());
    };
    let status = cluster.status()?;
    let phase = match status.phase {
        Phase::Starting => "starting".to_owned(),
        Phase::Ready => "ready".to_owned(),
        Phase::Failed(text) => format!("failed: {text}"),
    };
    print::line(&format!(
        "cluster {name:?}: {phase}; held by process {}",
        cluster.holder()
    ));
    for component in &status.components {
        service(component, "");
    }
    for node in &status.nodes {
        service(&node.kernel, if node.is_cut { "cut off" } else { "" });
        let Ok(facts) = cluster.node(&node.kernel.name)?.facts() else {
            continue;
        };
        for part in &facts.services {
            service(part, &format!("on {}", node.kernel.name));
        }
    }
    Ok(())
}

fn service(status: &ServiceStatus, note: &str) {
    let state = match status.pid {
        Some(pid) if status.is_paused => format!("paused, pid {pid}"),
        Some(pid) => format!("running, pid {pid}"),
        None => "stopped".to_owned(),
    };
    let again = match (status.starts, &status.last_end) {
        (2.., Some(end)) => format!(", started {} times, last ended with {end}", status.starts),
        _ => String::new(),
    };
    print::line(&format!("  {:<12} {state}{again} {note}", status.name));
}
