//! Tests of windtunnel as a whole, and what they run on.
//!
//! [`cluster`] is a real Kubernetes cluster on one machine: etcd, the control plane and nodes with
//! kernels of their own, all in namespaces that vanish with the process that holds them. It knows
//! nothing of chaos: what it offers is a cluster, and hands to kill, cut and restart its parts.
//! [`product`] puts windtunnel on it.

pub mod cargo;
pub mod cluster;
pub mod product;
pub mod world;

use std::time::Duration;

/// What half of some durations, 99 in 100, and all are within; zeros where there are none.
#[must_use]
pub fn spread(all: &[Duration]) -> [Duration; 3] {
    let mut all = all.to_vec();
    all.sort_unstable();
    [50, 99, 100].map(|share| {
        let place = (all.len() * share / 100).min(all.len().saturating_sub(1));
        all.get(place).copied().unwrap_or_default()
    })
}
