//! `lab node`, `component`, `load-image`: hands on the parts of a cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use windtunnel_tests::cluster::{Action, Cluster, End, Node};

use crate::print;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Do something to a node, or on it
    Node {
        /// Which: 1, or node1
        node: String,
        #[command(subcommand)]
        action: NodeAction,
    },
    /// Do something to a part of the control plane
    Component {
        /// etcd, apiserver, manager or scheduler
        component: String,
        action: ServiceAction,
    },
    /// Give all nodes the images of an archive
    LoadImage { archive: PathBuf },
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum NodeAction {
    /// Run a command as root; works on a node that is cut off, too
    Run {
        /// Seconds after which it is killed
        #[arg(long, default_value_t = 60)]
        bound: u64,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Take its power away
    Kill,
    /// Start it, with the disk that it had
    Boot,
    /// Take it off the cluster's network
    Cut,
    /// Put it back on the cluster's network
    Heal,
    /// Do something to one of its services
    Service {
        /// containerd, kubelet or proxy
        service: String,
        action: ServiceAction,
    },
    /// Print a log
    Log {
        /// containerd, kubelet, proxy or console
        #[arg(default_value = "console")]
        service: String,
    },
    /// Print how its start went
    Facts,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum ServiceAction {
    Start,
    Stop,
    Restart,
    Kill,
    Pause,
    Resume,
    Log,
}

impl ServiceAction {
    /// None for what only reads.
    fn action(self) -> Option<Action> {
        Some(match self {
            Self::Start => Action::Start,
            Self::Stop => Action::Stop,
            Self::Restart => Action::Restart,
            Self::Kill => Action::Kill,
            Self::Pause => Action::Pause,
            Self::Resume => Action::Resume,
            Self::Log => return None,
        })
    }
}

pub(crate) fn run(name: &str, command: Command) -> Result<ExitCode> {
    let cluster =
        Cluster::find(name)?.with_context(|| format!("no cluster {name:?} is running"))?;
    match command {
        Command::Node { node, action } => {
            let node = if node.starts_with("node") {
                node
            } else {
                format!("node{node}")
            };
            return on_node(cluster.node(&node)?, action);
        }
        Command::Component { component, action } => {
            let component = cluster.component(&component);
            match action.action() {
                Some(action) => component.act(action)?,
                None => print::bytes(component.log()?.as_bytes()),
            }
        }
        Command::LoadImage { archive } => cluster.load_image(&archive)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn on_node(node: Node<'_>, action: NodeAction) -> Result<ExitCode> {
    match action {
        NodeAction::Run { bound, command } => return run_on(node, &command, bound),
        NodeAction::Kill => node.kill()?,
        NodeAction::Boot => node.boot()?,
        NodeAction::Cut => node.cut()?,
        NodeAction::Heal => node.heal()?,
        NodeAction::Service { service, action } => match action.action() {
            Some(action) => node.service(&service).act(action)?,
            None => print::bytes(node.log(&service)?.as_bytes()),
        },
        NodeAction::Log { service } => print::bytes(node.log(&service)?.as_bytes()),
        NodeAction::Facts => {
            for (step, seconds) in node.facts()?.steps {
                print::line(&format!("{seconds:6.2} s  {step}"));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_on(node: Node<'_>, command: &[String], bound: u64) -> Result<ExitCode> {
    let argv: Vec<&str> = command.iter().map(String::as_str).collect();
    let output = node.run_with(&argv, &[], Duration::from_secs(bound))?;
    print::bytes(&output.stdout);
    print::error(String::from_utf8_lossy(&output.stderr).trim_end());
    let code = match output.end {
        End::Exited(code) => code,
        End::Signaled(signal) => 128 + signal,
        End::TimedOut => 124,
    };
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}
