//! Names of everything that belongs to a running cluster.
//!
//! All state is below [`STATE`], on a tmpfs that only the cluster's mount namespace has. Nodes see
//! the same directory by the same name, so that a path can be handed from one side to the other.

use std::path::{Path, PathBuf};

/// Root of all state of a running cluster or kernel.
pub(crate) const STATE: &str = "/run/lab";

/// Directories that exist from the start.
pub(crate) const DIRECTORIES: [&str; 10] = [
    "bin", "disks", "helm", "images", "log", "memory", "nodes", "pki", "uml", "vm",
];

/// A path below [`STATE`].
pub(crate) fn state(relative: &str) -> PathBuf {
    Path::new(STATE).join(relative)
}

/// The copy of this program that the cluster runs, whatever happens to the original.
pub(crate) fn program() -> PathBuf {
    state("bin/lab")
}

/// The user-mode kernel.
pub(crate) fn kernel() -> PathBuf {
    state("bin/linux")
}

/// The Kubernetes components in one program.
pub(crate) fn kubernetes() -> PathBuf {
    state("bin/kubernetes")
}

/// Log of a part on the machine's side.
pub(crate) fn log(part: &str) -> PathBuf {
    state("log").join(format!("{part}.log"))
}

/// The only directory of the machine that a node writes to: its logs.
pub(crate) fn node_directory(node: &str) -> PathBuf {
    state("nodes").join(node)
}

/// Image archives: what is in here a node imports when it boots.
pub(crate) fn images() -> PathBuf {
    state("images")
}
