//! The operator: turns each experiment into one `NodeInjection` per node, and rolls up what the
//! nodes' agents report into the experiment's status.
//!
//! `controller` shows the order: observe → decide → act. `decide` is pure.

mod act;
mod args;
pub mod cluster;
mod controller;
pub mod decide;
mod directory;
mod error;
mod fleet;
mod hosts;
mod lease;
mod metrics;
#[cfg(test)]
mod mock;
mod observe;
pub mod peers;
mod recent;
mod sweep;
mod uninstall;
mod watches;

pub use args::{Args, Cli, Command};
pub use controller::{RunError, metrics, run_with};
pub use uninstall::{Bounds, UninstallError, uninstall};
