//! What the agent and its injectors ask of the kernel, in the words of the field.
//!
//! Owns netlink, nftables, namespaces, `/proc`, cgroups and the lease that ends a process, and is
//! the only home of `unsafe`. It decides nothing: no fault, no experiment, no policy is known here.
//! Nothing in it is asynchronous; calls that wait have a bound. What was written to the kernel can
//! be read back with what is here, and callers must do so before they claim an effect.

pub mod beneath;
pub mod cgroup;
pub mod child;
pub mod fanotify;
pub mod handle;
pub mod lease;
pub mod link;
pub mod mounts;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod pages;
pub mod proc;
pub mod qdisc;
pub mod sockets;
pub mod space;
pub mod trace;
