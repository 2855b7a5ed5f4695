//! `lab vm`: one command on a kernel of its own.

use std::process::ExitCode;

use anyhow::Result;
use windtunnel_tests::cluster::vm;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Memory of the kernel
    #[arg(long, default_value = "1G")]
    memory: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let mut order = vm::Order::new(arguments.command)?;
    order.memory = arguments.memory;
    vm::run_here(&order).map(ExitCode::from)
}
