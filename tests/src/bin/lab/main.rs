//! `lab`: builds, starts and drives the embedded test cluster. `cargo lab help`.
//!
//! Parses, calls the harness, prints. One module per group of sub-commands.

mod again;
mod bench;
mod check;
mod demo;
mod lifecycle;
mod parts;
mod print;
mod tools;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use windtunnel_tests::cluster::entry;

#[derive(Debug, Parser)]
#[command(
    name = "lab",
    about = "The embedded Kubernetes test cluster",
    max_term_width = 100
)]
struct Arguments {
    /// Which cluster: several can run side by side
    #[arg(
        long,
        global = true,
        default_value = "default",
        env = "WINDTUNNEL_LAB_NAME"
    )]
    name: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Lifecycle(lifecycle::Command),
    #[command(flatten)]
    Demo(demo::Command),
    #[command(flatten)]
    Check(check::Command),
    #[command(flatten)]
    Tools(tools::Command),
    #[command(flatten)]
    Parts(parts::Command),
    /// Measure the figures that the README gives
    Bench(bench::Arguments),
    /// Run a command as root on a node kernel of its own, without Kubernetes
    Vm(vm::Arguments),
    /// Roles that the harness starts itself in
    #[command(hide = true)]
    Internal {
        role: String,
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments.name, arguments.command) {
        Ok(code) => code,
        Err(error) => {
            print::error(&format!("lab: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(name: &str, command: Command) -> Result<ExitCode> {
    match command {
        Command::Lifecycle(command) => lifecycle::run(name, &command)?,
        Command::Demo(command) => demo::run(name, &command)?,
        Command::Check(command) => check::run(&command)?,
        Command::Tools(command) => return tools::run(name, command),
        Command::Parts(command) => return parts::run(name, command),
        Command::Bench(arguments) => bench::run(name, &arguments)?,
        Command::Vm(arguments) => return vm::run(arguments),
        Command::Internal { role, arguments } => return entry::play(&role, &arguments),
    }
    Ok(ExitCode::SUCCESS)
}
