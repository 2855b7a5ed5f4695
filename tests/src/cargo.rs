//! cargo, run by a program that cargo itself may have started.

use std::path::Path;
use std::process::Command;

/// What `cargo run` tells a program about itself. Build scripts that look at any of it would run
/// again for every caller.
const TOLD: [&str; 6] = [
    "CARGO_BIN_",
    "CARGO_CRATE_",
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "CARGO_PRIMARY_",
    "CARGO_TARGET_TMPDIR",
];

/// cargo in the workspace, not yet run, as a shell would run it.
#[must_use]
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    command.current_dir(root.unwrap_or(Path::new(".")));
    for (name, _) in std::env::vars_os() {
        let is_told = name
            .to_str()
            .is_some_and(|n| TOLD.iter().any(|told| n.starts_with(told)));
        if is_told || name == "LD_LIBRARY_PATH" {
            command.env_remove(name);
        }
    }
    command
}
