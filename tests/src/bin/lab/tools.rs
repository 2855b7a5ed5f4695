//! `lab kubectl`, `helm`, `shell`, `kubeconfig`: programs in the cluster's network.

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use windtunnel_tests::cluster::Cluster;

use crate::print;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Run kubectl as administrator
    Kubectl(Arguments),
    /// Run helm as administrator
    Helm(Arguments),
    /// Run a shell, or a command, in the cluster's network, with KUBECONFIG set
    Shell(Arguments),
    /// Print the path of the kubeconfig; its server is reached only from the cluster's network
    Kubeconfig,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(name: &str, command: Command) -> Result<ExitCode> {
    let cluster =
        Cluster::find(name)?.with_context(|| format!("no cluster {name:?} is running"))?;
    let (mut program, arguments) = match command {
        Command::Kubectl(rest) => (cluster.kubectl_command(), rest.arguments),
        Command::Helm(rest) => (cluster.helm_command(), rest.arguments),
        Command::Shell(rest) => {
            let mut rest = rest.arguments.into_iter();
            let shell = || std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".into());
            (
                cluster.command(rest.next().unwrap_or_else(shell)),
                rest.collect(),
            )
        }
        Command::Kubeconfig => {
            print::line(&cluster.kubeconfig().display().to_string());
            return Ok(ExitCode::SUCCESS);
        }
    };
    cluster.enter()?;
    Err(program.args(arguments).exec())
        .with_context(|| format!("run {}", program.get_program().display()))
}
