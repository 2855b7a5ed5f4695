//! The embedded cluster: build it, start it, reach into it.
//!
//! [`build`] makes the parts (kernel, Kubernetes, images) and caches them outside the tree;
//! the guardian opens the namespaces that the cluster lives and dies in; the supervisor starts
//! the parts there and answers on a control socket; `node` is what runs inside a node's kernel.
//! Tests and the `lab` program use [`Cluster`], and [`vm`] for a lone kernel without Kubernetes.

mod addresses;
mod api;
pub mod build;
mod cache;
mod control;
mod control_plane;
mod debian;
pub mod entry;
mod guardian;
mod guest;
mod handle;
mod image;
mod isolation;
mod kernel;
mod layout;
mod netns;
mod network;
mod node;
mod pki;
pub mod poll;
mod progress;
mod service;
mod supervisor;
pub mod vm;

pub use cache::Cache;
pub(crate) use cache::hex;
pub use control::{NodeAction, NodeStatus, Phase, Status, Step};
pub use guardian::Parts;
pub use handle::{Cluster, Component, Node, NodeService, Options, launch, success};
pub use image::{Image, ImageFile, write_archive};
pub use node::{End, NodeFacts, Output};
pub use service::{Action, ServiceStatus};

pub use nix::sys::signal::Signal;
