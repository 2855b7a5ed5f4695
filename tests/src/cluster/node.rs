//! A node: a user-mode kernel with containerd, kubelet and kube-proxy, and the harness's hands.
//!
//! [`init`] prepares the system and then only reaps; [`agent`] is its one child, keeps the
//! services running and listens for the harness on the management network ([`hands`]).

mod agent;
mod clock;
mod config;
mod hands;
mod images;
mod init;
mod processes;

use std::path::PathBuf;

use super::kernel::Kernel;
use super::service::Spec;
use super::{addresses, layout, network};

pub(crate) use agent::main as agent_main;
pub use hands::{End, NodeFacts, Output};
pub(crate) use hands::{Hands, PATIENCE};
pub(crate) use init::main as init_main;

const MEMORY: &str = "3G";

/// File behind the node's ext4 file system.
pub(crate) fn disk(index: u8) -> PathBuf {
    layout::state("disks").join(format!("{}.img", addresses::node_name(index)))
}

/// How a node's kernel is run. It is not started again by itself: a dead node stays dead.
pub(crate) fn kernel_spec(index: u8) -> Spec {
    let name = addresses::node_name(index);
    let kernel = Kernel {
        name: name.clone(),
        memory: MEMORY.into(),
        disk: disk(index),
        links: network::links(index).to_vec(),
        init: ["internal", "node", &index.to_string()]
            .map(Into::into)
            .to_vec(),
    };
    Spec {
        log: layout::log(&name),
        name,
        argv: kernel.argv(),
        env: Kernel::env(),
        restarts: false,
        processor: Some(usize::from(index) - 1),
    }
}
