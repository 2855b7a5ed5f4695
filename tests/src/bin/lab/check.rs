//! `lab test`, `lab generate`: all tests, each where it belongs.

use std::path::PathBuf;
use std::process::{Command as Process, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use windtunnel_tests::cargo::cargo;
use windtunnel_tests::cluster::vm;

use crate::{again, print};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Run all tests: pure ones here, privileged ones on a kernel of their own, the others on a
    /// cluster
    Test {
        /// Only these
        #[arg(long)]
        only: Option<Kind>,
        /// Passed on to the test programs: names to select, and their options
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Write the generated files anew: the YAML of the custom resources
    Generate,
}

/// Where tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Anywhere.
    Unit,
    /// As root, on a kernel of their own.
    Kernel,
    /// On the embedded cluster.
    Cluster,
}

pub(crate) fn run(command: &Command) -> Result<()> {
    match command {
        Command::Generate => run_cargo(&[
            "run",
            "--quiet",
            "--package",
            "windtunnel-crds",
            "--features",
            "crdgen",
            "--bin",
            "crdgen",
        ]),
        Command::Test { only, arguments } => {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            for kind in [Kind::Unit, Kind::Kernel, Kind::Cluster] {
                if only.is_none_or(|only| only == kind) {
                    test(kind, &arguments)?;
                }
            }
            Ok(())
        }
    }
}

fn test(kind: Kind, arguments: &[&str]) -> Result<()> {
    let start = Instant::now();
    match kind {
        Kind::Unit => unit(arguments)?,
        Kind::Kernel => kernel(arguments)?,
        Kind::Cluster => cluster(arguments)?,
    }
    print::line(&format!(
        "{kind:?} tests passed in {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

fn unit(arguments: &[&str]) -> Result<()> {
    run_cargo(&["test", "--quiet", "--workspace", "--no-run"])?;
    again::twice(arguments, |arguments| {
        let mut command = cargo();
        command
            .args(["test", "--quiet", "--workspace", "--no-fail-fast", "--"])
            .args(arguments)
            // For the scripts of what can go wrong; plain `cargo test` is content with less.
            .env("WINDTUNNEL_WORLD_SECONDS", "120");
        Ok(command)
    })
}

/// The privileged tests, on a kernel that has everything a node may have.
fn kernel(arguments: &[&str]) -> Result<()> {
    let program = test_program("kernel")?;
    let program = program
        .to_str()
        .context("the test program's path is not text")?;
    again::twice(arguments, |arguments| {
        vm::command(&[&[program], arguments].concat())
    })
}

/// The harness's own tests, then the product's, which try again by themselves.
fn cluster(arguments: &[&str]) -> Result<()> {
    again::twice(arguments, on_cluster("cluster")?)?;
    let ran = again::begun(arguments, on_cluster("product")?)?;
    ensure!(ran.is_success, "tests failed");
    Ok(())
}

/// Builds a test program, and says how it is run.
fn on_cluster(test: &str) -> Result<impl Fn(&[&str]) -> Result<Process>> {
    let all = ["test", "--quiet", "--workspace", "--test", test];
    run_cargo(&[&all[..], &["--no-run"]].concat())?;
    Ok(move |arguments: &[&str]| {
        let mut command = cargo();
        command.args(all).arg("--").args(arguments);
        Ok(command)
    })
}

/// Builds a test program and says where it is.
fn test_program(test: &str) -> Result<PathBuf> {
    let output = cargo()
        .args([
            "test",
            "--no-run",
            // With all packages: the same features, so that nothing is built twice.
            "--workspace",
            "--test",
            test,
            "--message-format=json-render-diagnostics",
        ])
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo")?;
    if !output.status.success() {
        bail!("cargo could not build the test {test}");
    }
    let messages = output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let mut programs =
        messages.filter(|m| m["target"]["name"] == test && m["profile"]["test"] == true);
    let program = programs.find_map(|m| m["executable"].as_str().map(PathBuf::from));
    program.with_context(|| format!("cargo built no test {test}"))
}

fn run_cargo(arguments: &[&str]) -> Result<()> {
    let status = cargo().args(arguments).status().context("run cargo")?;
    if !status.success() {
        bail!("cargo {} failed", arguments.join(" "));
    }
    Ok(())
}
