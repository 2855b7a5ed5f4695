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
