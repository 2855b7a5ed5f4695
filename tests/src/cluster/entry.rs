//! The roles that this program plays besides the one the user called it for.
//!
//! The harness starts its own program again, as holder of namespaces, as init of a pid namespace
//! and as init of a kernel: `lab internal ROLE ARGUMENT…`. Nobody calls these by hand.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use super::{guardian, layout, node, supervisor, vm};

/// Plays a role to its end.
///
/// # Errors
/// What the role failed with.
pub fn play(role: &str, arguments: &[String]) -> Result<ExitCode> {
    let text = |index: usize| {
        let text = arguments
            .get(index)
            .with_context(|| format!("{role}: argument missing"));
        text.map(String::as_str)
    };
    let number = |index| -> Result<i32> { Ok(text(index)?.parse()?) };
    let index = |index| -> Result<u8> { Ok(text(index)?.parse()?) };
    let order = |index| -> Result<guardian::Order> { Ok(serde_json::from_str(text(index)?)?) };
    match role {
        "guardian" => return guardian::main(order(0)?),
        "init" => return guardian::init_main(number(0)?, text(1)?),
        "supervisor" => supervisor::main(order(0)?)?,
        "node" => return node::init_main(index(0)?),
        "node-agent" => node::agent_main(index(0)?)?,
        "vm-host" => return vm::host_main(number(0)?),
        "vm-guest" => vm::guest_main()?,
        _ => bail!("unknown role {role}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The command that starts the cluster's own copy of this program in a role.
pub(crate) fn child(role: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(layout::program());
    command.args(["internal", role]).args(arguments);
    command
}

/// The `lab` program of the build that this process is from.
///
/// # Errors
/// When it was not built.
pub fn lab_program() -> Result<PathBuf> {
    let me = std::env::current_exe().context("find the running program")?;
    // Test programs are in `deps`, one below.
    let candidates = me
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("lab"));
    for candidate in candidates {
        if candidate.is_file() {
            return Ok(candidate);
        }
    }
    bail!(
        "no `lab` program beside {}: cargo build --package windtunnel-tests --bin lab",
        me.display()
    )
}
